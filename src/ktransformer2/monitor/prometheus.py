"""The published snapshot as Prometheus metrics. The one file that imports prometheus-client.

Own registry, nothing global. Base units, counters end in `_total`, and every sample carries `model_name`. Reads
`KVCache.published` and nothing else, so any thread may ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ktransformer2.errors import ConfigError
from ktransformer2.monitor.states import state_blocks, state_bytes

if TYPE_CHECKING:
    from ktransformer2.cache.kv_cache import KVCache
    from ktransformer2.engine.outputs import EngineStats

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        'metrics need the package prometheus-client; pip install "ktransformer2[monitor]" brings it'
    ) from error

_PREFIX = "ktransformer_cache_"
_COUNTERS = {
    "lookup_tokens": "Tokens of prompts that were looked up.",
    "hit_tokens": "Of those, tokens that came from the cache.",
    "findable_tokens": "Of those, tokens that memory without end would have found.",
    "computed_tokens": "Tokens whose rows were computed.",
    "copied_tokens": "Tokens whose rows were copied from another block.",
    "moved_bytes": "Bytes moved by defragmentation.",
    "defrag_runs": "Times that defragmentation ran.",
    "growth_events": "Times that memory was committed.",
    "shrink_events": "Times that memory was given back.",
    "prefetched_blocks": "Blocks that were fetched ahead.",
    "prefetch_used_blocks": "Of those, blocks that were used.",
    "prefetch_unused_blocks": "Of those, blocks that were evicted before they were used.",
    "prefetch_late_blocks": "Of those, blocks that came when nobody waited for them any more.",
    "prefetch_homeless_blocks": "Of those, blocks that found no room.",
    "not_worth_tokens": "Tokens that lay in a tier and were quicker to compute.",
    "written_blocks": "Blocks that a tier took.",
}
_GAUGES = {
    "limit_bytes": "Hard limit over everything that the cache counts.",
    "held_bytes": "What counts against the limit now.",
    "staged_bytes": "Copies on their way to and from tiers.",
    "pinned_bytes": "Bytes of blocks that are pinned.",
    "peak_bytes": "The most that ever counted against the limit.",
    "fragmentation_ratio": "1 - longest stretch of unused extents / all unused ones, of the worst pool.",
}
_BY_LABEL = {
    "evictions": ("cause", "Blocks that left, by cause."),
    "arena_calls": ("call", "Commits, decommits and huge-page requests of the arena."),
    "restored_tokens": ("tier", "Tokens that prompts found and a tier had kept, by tier."),
    "tier_failures": ("kind", "What tiers could not do, by tier and kind."),
}
_AGES = {
    "lifetime_s": ("block_lifetime_seconds", "From being published until being evicted."),
    "idle_before_eviction_s": ("block_idle_before_eviction_seconds", "From the last use until being evicted."),
}
_ENGINE_PREFIX = "ktransformer_engine_"
_ENGINE_COUNTERS = {
    "num_added": ("requests", "Requests that were taken."),
    "num_refused": ("refused_requests", "Requests that were refused."),
    "num_finished": ("finished_requests", "Requests that were answered."),
    "num_cancelled": ("cancelled_requests", "Requests that were ended by whoever asked."),
    "num_failed": ("failed_requests", "Requests that ended with an error."),
    "num_preemptions": ("preemptions", "Times that a running sequence had to wait again."),
    "prompt_tokens": ("prompt_tokens", "Tokens of all prompts."),
    "cached_tokens": ("cached_tokens", "Of those, tokens that came from the cache."),
    "prefill_tokens": ("prefill_tokens", "Tokens of prompts that were computed."),
    "decode_tokens": ("decode_tokens", "Tokens of answers that were computed."),
}
_ENGINE_GAUGES = {
    "num_running": ("running_sequences", "Answers that are computed now."),
    "num_waiting": ("waiting_sequences", "Answers that wait for their turn."),
}


def exposition(
    cache: KVCache, model_name: str, engine: Callable[[], EngineStats] | None = None
) -> Callable[[str], tuple[bytes, str]]:
    """What answers a scrape: (Accept header) -> (body, content type). `engine`: the counters of one."""
    registry = CollectorRegistry()
    registry.register(_CacheCollector(cache, model_name))
    if engine is not None:
        registry.register(_EngineCollector(engine, model_name))

    def scrape(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    return scrape


class _CacheCollector(Collector):
    def __init__(self, cache: KVCache, model_name: str) -> None:
        self._cache, self._model_name = cache, model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._cache.published
        for name, text in _COUNTERS.items():
            yield self._counter(name, text, {(): getattr(stats, name)})
        for name, (label, text) in _BY_LABEL.items():
            yield self._counter(name, text, {(key,): value for key, value in getattr(stats, name).items()}, label)
        for name, text in _GAUGES.items():
            yield self._gauge(name, text, {(): getattr(stats, name)})
        yield self._gauge("bytes", "Bytes by state.", _labelled(state_bytes(stats)), "state")
        yield self._gauge("form_bytes", "Bytes of live blocks by form.", _labelled(stats.form_bytes), "form")
        yield self._gauge("tier_bytes", "Bytes below the device by tier.", _labelled(stats.tier_bytes), "tier")
        yield self._gauge("blocks", "Blocks by state.", _labelled(state_blocks(stats)), "state")
        idle = "Quantiles of how long cached blocks have been unused."
        yield self._gauge("idle_age_seconds", idle, _labelled(stats.idle_age_s), "quantile")
        age = self._cache.published_age_s()
        yield self._gauge("snapshot_age_seconds", "Age of the snapshot that all of this is from.", {(): age})
        for name, (metric, text) in _AGES.items():
            yield self._histogram(metric, text, getattr(stats, name))

    def _counter(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self._model_name, *key], value)
        return family

    def _gauge(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self._model_name, *key], value)
        return family

    def _histogram(self, name: str, text: str, ages: Mapping[str, float]) -> Metric:
        family = HistogramMetricFamily(_PREFIX + name, text, labels=["model_name"])
        buckets = [(bound, count) for bound, count in ages.items() if bound != "sum"]
        family.add_metric([self._model_name], buckets, ages["sum"])
        return family


class _EngineCollector(Collector):
    def __init__(self, engine: Callable[[], EngineStats], model_name: str) -> None:
        self._engine, self._model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine()
        families: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], Mapping[str, tuple[str, str]]], ...]
        families = ((CounterMetricFamily, _ENGINE_COUNTERS), (GaugeMetricFamily, _ENGINE_GAUGES))
        for make, named in families:
            for field, (name, text) in named.items():
                family = make(_ENGINE_PREFIX + name, text, labels=["model_name"])
                family.add_metric([self._model_name], getattr(stats, field))
                yield family


def _labelled(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): value for key, value in values.items()}
