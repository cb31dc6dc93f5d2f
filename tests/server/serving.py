"""A server at work on a free port, in a thread of this process, on a small random model of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from ktransformer2.engine.llm import LLM
from ktransformer2.models.loading import LoadedModel
from ktransformer2.server.engine_thread import EngineThread
from ktransformer2.server.limits import Limits
from ktransformer2.server.serving import Address, make_server, open_address

BLOCK = 16


@dataclass
class Served:
    """`http` asks as the key that was given first, or as nobody in particular."""

    url: str
    engine: EngineThread
    key: str

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.http = httpx2.Client(base_url=self.url, headers=headers, timeout=60)
        self.openai = self.client(self.key or "none")

    def client(self, key: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/v1/cache/stats").json()["cache"]
        return found

    def used_blocks(self) -> int:
        stats = self.stats()
        return int(stats["num_blocks"] - stats["num_cached_blocks"] - stats["num_pinned_blocks"])

    def rests(self) -> None:
        """Wait until nobody uses a block; the test's time limit is the bound."""
        while self.engine.stats.num_running or self.engine.stats.num_waiting or self.used_blocks():
            pass


def opened(loaded: LoadedModel) -> LLM:
    return LLM(loaded, kv="full", memory="64MB", block_tokens=BLOCK, cached_share_ratio=1.0)


@contextmanager
def served(
    open_llm: Callable[[], LLM], key_file: Path | None = None, limits: Limits | None = None, *, wait: bool = True
) -> Iterator[Served]:
    place = open_address(Address(port=0), key_file)
    engine = EngineThread(open_llm)
    server = make_server(place, engine, ["tiny", "alias"], limits or Limits(drain_s=5))
    thread = threading.Thread(target=server.run, args=([place.listener],))
    thread.start()
    first = "" if key_file is None else key_file.read_text().split()[1]
    found = Served(place.url, engine, first)
    try:
        while wait and engine.state == "loading":
            found.http.get("/health")
        yield found
    finally:
        found.http.close()
        found.openai.close()
        server.should_exit = True
        thread.join()
