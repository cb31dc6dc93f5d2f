"""One line in the log every ten seconds while there is work, and logs as JSON. No text of a prompt."""

from __future__ import annotations

import asyncio
import json
import logging

from ktransformer2.config import format_bytes
from ktransformer2.engine.outputs import EngineStats
from ktransformer2.server.engine_thread import EngineThread

_EVERY_S = 10.0
_log = logging.getLogger(__name__)


async def watch(engine: EngineThread, every_s: float = _EVERY_S) -> None:
    """Log a line now and then, until cancelled."""
    before = engine.stats
    while True:
        await asyncio.sleep(every_s)
        now = engine.stats
        if line := status_line(before, now, every_s):
            held = 0 if engine.facts is None else engine.facts.cache.published.held_bytes
            _log.info("%s | KV %s", line, format_bytes(held))
        before = now


def status_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """What happened between two moments; empty: nothing."""
    if before == now and not now.num_running and not now.num_waiting:
        return ""
    read, written = now.prefill_tokens - before.prefill_tokens, now.decode_tokens - before.decode_tokens
    prompt, cached = now.prompt_tokens - before.prompt_tokens, now.cached_tokens - before.cached_tokens
    hits = f" | {100 * cached / prompt:.0f} % of new prompts cached" if prompt else ""
    speeds = f"{read / seconds:,.0f} tok/s read, {written / seconds:,.0f} written"
    return f"{now.num_running} running, {now.num_waiting} waiting | {speeds}{hits}"


class JsonLines(logging.Formatter):
    """A line of JSON for every record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
