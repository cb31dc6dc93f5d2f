"""A program for the test of killed writers: for each line `seed delay` on stdin it forks a process that puts and
deletes without end, kills it after the delay, and says so. Forked, so that a hundred of them take seconds."""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import NoReturn

from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits
from tests.tiers.disk_factories import RECORD_BYTES, chain, lineage, remove

NUM_TEXTS = 23
LIMITS = DiskLimits(30 * RECORD_BYTES + 360_000, segment_bytes=12 * RECORD_BYTES)


def write_without_end(directory: Path, seed: int, ready: int) -> NoReturn:
    tier = DiskTier(directory, LIMITS, lineage())
    os.write(ready, b"r")
    for i in count(seed * 7):
        tier.put(chain(f"{i % NUM_TEXTS}.", 3))
        if i % 5 == 4:
            remove(tier, [chain(f"{(i + 3) % NUM_TEXTS}.", 2)[1].key])
    raise AssertionError("it counts without end")


def main() -> None:
    for line in sys.stdin:
        seed, delay_s = line.split()
        is_ready, ready = os.pipe()
        child = os.fork()
        if not child:
            write_without_end(Path(sys.argv[1]), int(seed), ready)
        os.read(is_ready, 1)
        time.sleep(float(delay_s))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(is_ready)
        os.close(ready)
        print("killed by", os.WTERMSIG(status), flush=True)


if __name__ == "__main__":
    main()
