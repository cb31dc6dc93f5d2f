"""What every scenario must show: one line a key, with its threshold. Knows no measurement.

Invariant: a scenario's summary holds exactly keys that are listed here, so no promise is measured without a target.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

REPORTED = "reported"
_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True)
class Target:
    """A key of a scenario's summary. `relation` is <=, >=, == or `reported`, which has no bound to break."""

    bench: str
    key: str
    relation: str
    bound: float = 0.0
    part: int = 1

    @property
    def name(self) -> str:
        return f"{self.part}/{self.bench}/{self.key}"

    @property
    def text(self) -> str:
        return REPORTED if self.relation == REPORTED else f"{self.relation} {self.bound:g}"

    def holds(self, value: float) -> bool:
        """True where the value keeps the bound; NaN keeps none."""
        return value == value and (self.relation == REPORTED or _COMPARE[self.relation](value, self.bound))


# 3,047,424 bytes is one chunk: min_chunk_tokens 256 = 4 extents of SmolLM2 in int8 (761,856 bytes each).
_PART_1 = """
fidelity  mismatch_fp32                      == 0
fidelity  mismatch_bf16                      == 0
fidelity  near_tie_share_bf16                <= 0.05
fidelity  kl_int8                            <= 5e-4
fidelity  top1_int8                          >= 0.99
fidelity  ppl_ratio_int8                     <= 1.001
attention int8_bandwidth_share               >= 0.5
attention int8_vs_sdpa_masked_bf16           >= 4
attention int8_vs_sdpa_fp32                  reported
attention int8_vs_sdpa_bf16                  reported
attention int8_vs_grouped_bmm                >= 2
attention max_rel_error                      <= 0.015
attention contiguous_vs_scattered            reported
attention adjacent_share                     reported
decode    decode_vs_hf_best_8k               >= 1.5
decode    decode_vs_hf_stock_8k              reported
decode    ttft_vs_hf_8k                      reported
decode    kv_bytes_vs_fp16                   <= 0.525
memory    waste_tokens                       <= 0.026
memory    waste_bytes                        <= 0.06
memory    growth_per_1k_tokens               <= 5
memory    tokens_copied_by_growth            == 0
memory    saved_vs_static                    >= 0.7
memory    saved_vs_static_1m                 >= 0.4
memory    throughput_vs_static_same_bytes    >= 2.3
memory    arena_resident_after_bytes         <= 3047424
memory    rss_growth_after_bytes             <= 16777216
memory    step_p99_over_p50_vs_control       <= 1.5
"""
_PART_2 = """
architectures served_architectures           >= 60
architectures silently_different             == 0
plan          plan_error                     <= 0.05
dropin        dropin_decode_vs_hf_best_8k    >= 1.5
dropin        dropin_decode_vs_hf_stock_8k   reported
dropin        dropin_kv_bytes_vs_fp16        <= 0.525
dropin        attach_warm_speedup            >= 20
dropin        dropin_mismatch_fp32           == 0
dropin        dropin_mismatch_bf16           == 0
dropin        dropin_near_tie_share_bf16     <= 0.05
"""
_PART_3 = """
monitor       figures_cost_ratio             <= 0.01
policy    gap_closed_chat_2pct               >= 0.2
policy    gap_closed_chat_5pct               >= 0.08
policy    gap_closed_chat_10pct              >= 0.1
policy    worst_below_best                   <= 1.0
policy    mean_below_best                    <= 0.3
policy    gap_closed_hints_2pct              >= 0.5
policy    gap_closed_hints_10pct             >= 0.7
policy    normalised_hints_10pct             >= 0.89
policy    us_per_touch                       <= 5
"""
_PART_4 = """
tiers  median_transfer_bytes     >= 524288
tiers  disk_read_share           >= 0.7
tiers  writer_cpu_share          <= 0.05
tiers  bloom_fpr                 <= 0.01
tiers  bloom_probes_saved        >= 0.95
tiers  prefetch_accuracy         >= 0.75
tiers  prefetch_hidden_share     reported
tiers  prefetch_throughput_gain  reported
prefix warm_overhead             <= 1.3
prefix warm_speedup              >= 30
prefix restart_speedup           >= 15
prefix restart_reused_share      >= 0.99
prefix restart_vs_handmade       <= 1.0
prefix valkey_speedup            >= 5
prefix salt_foreign_tokens       == 0
prefix salt_own_share            >= 1
prefix salt_time_difference      <= 0.05
"""
_PART_5 = """
attention int8_bandwidth_share             >= 0.7
attention kernel_prefetch_gain             reported
attention int8_kv_vs_full_kv_decode_8k     >= 1.1
attention int8_kv_vs_full_kv_ttft_8k       <= 1.02
attention prefill_vs_fp32_matmul           reported
overhead  engine_overhead_ms_b1            <= 0.5
overhead  engine_overhead_ms_b32           <= 2
overhead  lean_vs_transformers_decode_512  reported
overhead  lean_vs_transformers_decode_8k   reported
overhead  lean_vs_transformers_prefill_512 reported
overhead  lean_vs_transformers_prefill_8k  reported
linear    int8_read_share                  >= 0.8
linear    int4_read_share                  >= 0.8
linear    bf16_read_share                  reported
linear    bf16_vs_torch_1                  reported
linear    int8_vs_torch_1                  reported
linear    int4_vs_torch_1                  reported
linear    bf16_vs_torch_8                  reported
linear    int8_vs_torch_8                  reported
linear    int4_vs_torch_8                  reported
linear    bf16_vs_torch_512                reported
linear    int8_vs_torch_512                reported
linear    int4_vs_torch_512                reported
linear    ppl_ratio_bf16                   <= 1.001
linear    ppl_ratio_int8                   <= 1.003
linear    ppl_ratio_int4                   <= 1.003
peers     decode_vs_best_8k_bf16           >= 1.3
peers     decode_vs_best_8k_int8           >= 1.8
peers     decode_vs_best_8k_int4           >= 2.5
peers     ttft_vs_best_8k                  <= 0.9
peers     decode_vs_llamacpp_8k            reported
peers     decode_vs_vllm_8k                reported
peers     decode_vs_openvino_8k            reported
peers     decode_vs_hf_best_8k             >= 3
peers     ttft_vs_llamacpp_8k              <= 0.25
peers     ttft_vs_hf_8k                    <= 0.35
peers     decode_vs_best_512_bf16          >= 1.0
peers     decode_vs_best_512_int8          >= 1.05
peers     decode_vs_best_512_int4          >= 1.4
peers     ttft_vs_best_512                 <= 1.1
peers     batch8_vs_best                   >= 1.15
peers     warm_ttft_vs_best                <= 1.0
peers     int8_kv_vs_full_kv_decode_8k     >= 1.1
peers     int8_kv_vs_full_kv_ttft_8k       <= 1.02
peers     decode_slowdown_512_to_8k        <= 1.7
"""
_PART_7 = """
serve serve_errors             == 0
serve cached_share             >= 0.9
serve ttft_later_turns_vs_cold <= 0.2
serve good_share               reported
serve inter_token_p95_ms       reported
"""


def _parse(part: int, line: str) -> Target:
    bench, key, relation, *bound = line.split()
    return Target(bench, key, relation, float(bound[0]) if bound else 0.0, part)


TARGETS: tuple[Target, ...] = tuple(
    _parse(part, line)
    for part, lines in ((1, _PART_1), (2, _PART_2), (3, _PART_3), (4, _PART_4), (5, _PART_5), (7, _PART_7))
    for line in lines.split("\n")
    if line
)


def targets_of(bench: str) -> dict[str, Target]:
    """The keys of one scenario's summary and their targets."""
    return {target.key: target for target in TARGETS if target.bench == bench}


def broken(bench: str, summary: Mapping[str, float]) -> list[Target]:
    """Targets that the summary measured and missed. Keys that were not measured in this run are not judged."""
    known = targets_of(bench)
    return [known[key] for key, value in summary.items() if not known[key].holds(value)]
