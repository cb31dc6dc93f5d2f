"""Uses of blocks that the index has not been told of yet: reading a block writes nothing. Knows no file.

They are told at the next change of the directory. A process that is killed before loses them: its blocks look a little
older than they are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

_MOST_KEYS = 4096  # so that telling them is one short transaction


class PendingUses:
    """The last use of each key, the oldest first. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[bytes, float] = {}

    def __bool__(self) -> bool:
        """Whether any is pending."""
        return bool(self._uses)

    def note(self, keys: Sequence[bytes], now_s: float) -> None:
        """A use of the blocks of one chain, given from its head: the tail counts as used before it."""
        with self._lock:
            for key in reversed(keys):
                self._uses.pop(key, None)
                self._uses[key] = now_s
            while len(self._uses) > _MOST_KEYS:
                del self._uses[next(iter(self._uses))]

    def last_s(self, key: bytes, otherwise_s: float) -> float:
        """When a key was used last, if that is pending; else `otherwise_s`."""
        with self._lock:
            return self._uses.get(key, otherwise_s)

    def take(self) -> dict[bytes, float]:
        """What is pending, the oldest use first; it is not any more."""
        with self._lock:
            taken, self._uses = self._uses, {}
            return taken
