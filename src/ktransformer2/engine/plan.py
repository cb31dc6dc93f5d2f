"""What a model and a context will take, said before anything is loaded; and when it does not fit, what would.

    process     this Python with its libraries, measured        weights     as loaded
    workspace   activations, logits, tokenizer                  KV, tables  of all texts at their full length

`plan` is pure: it weighs an outline against the same rules that the engine follows (`cache.sizing`, `memory_budget`).
Knows no file and no model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import psutil

from ktransformer2.cache.sizing import Demand, DemandBytes, demand_bytes, longest_tokens, sealed_form
from ktransformer2.config import CacheConfig, EngineConfig, format_bytes
from ktransformer2.engine.memory_budget import Memory, most_useful_bytes, spare_bytes, workspace_bytes
from ktransformer2.layout import Form
from ktransformer2.models.outline import ModelOutline

KV_FORMS = ("full", "int8")
# The model's own module, kernels, and what torch sets up at the first product: 18 to 24 MB over fp32 and bf16.
_FIRST_MODEL_BYTES = 20 * 10**6


@dataclass(frozen=True)
class Wish:
    """What is to be held. `num_tokens` None: the model's own context. `total_bytes`: of the process; `memory_bytes`: of
    the cache; both None: what the machine can spare, as memory="auto" takes it.
    """

    num_tokens: int | None = None
    num_sequences: int = 1
    total_bytes: int | None = None
    memory_bytes: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True)
class FormPlan:
    """The same wish with full blocks in one form. Bytes; `longest_tokens` for every text, at most the model's own."""

    kv: str
    form: str
    kv_bytes: int
    table_bytes: int
    total_bytes: int
    limit_bytes: int
    longest_tokens: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """`peak_bytes`: the most that the process holds, while loading or at the full context, in the chosen form."""

    model: str
    architecture: str
    dtype: str
    weights: str
    num_layers: int
    max_positions: int
    num_tokens: int
    num_sequences: int
    process_bytes: int
    weight_bytes: int
    workspace_bytes: int
    loading_bytes: int
    unpacking_bytes: int
    forms: tuple[FormPlan, ...]
    chosen: str
    advice: tuple[str, ...]

    @property
    def choice(self) -> FormPlan:
        return next(form for form in self.forms if form.kv == self.chosen)

    @property
    def peak_bytes(self) -> int:
        return max(self.choice.total_bytes, self.process_bytes + self.loading_bytes)

    @property
    def fits(self) -> bool:
        return self.choice.fits


def idle_process_bytes() -> int:
    """What a process holds before it loads a model: what this one holds now, which has the same libraries imported, and
    the code that comes in with the first model. Ask before anything else is done.
    """
    return int(psutil.Process().memory_info().rss) + _FIRST_MODEL_BYTES


def plan(outline: ModelOutline, wish: Wish, process_bytes: int, memory: Memory) -> Plan:
    """Weigh `wish`, in both forms. `memory`: what the machine has, beside what this process holds already."""
    scale = _Scale(outline, wish, process_bytes, memory)
    forms = tuple(scale.weigh(kv) for kv in KV_FORMS)
    chosen = "full" if wish.cache.kv == "full" else "int8"
    return Plan(
        model=outline.source,
        architecture=outline.architecture,
        dtype=outline.dtype,
        weights=outline.weights,
        num_layers=outline.geometry.num_layers,
        max_positions=outline.geometry.max_positions,
        num_tokens=scale.num_tokens,
        num_sequences=wish.num_sequences,
        process_bytes=process_bytes,
        weight_bytes=outline.footprint.weight_bytes,
        workspace_bytes=scale.workspace_bytes,
        loading_bytes=outline.loading_bytes,
        unpacking_bytes=outline.unpacking_bytes,
        forms=forms,
        chosen=chosen,
        advice=() if forms[KV_FORMS.index(chosen)].fits else tuple(scale.advice(forms, chosen)),
    )


class _Scale:
    """One outline and one wish, and what follows from both."""

    def __init__(self, outline: ModelOutline, wish: Wish, process_bytes: int, memory: Memory) -> None:
        self._outline, self._wish, self._memory, self._process_bytes = outline, wish, memory, process_bytes
        self._max_positions = outline.geometry.max_positions
        self.num_tokens = self._max_positions if wish.num_tokens is None else wish.num_tokens
        running = dataclasses.replace(wish.engine, max_num_sequences=wish.num_sequences)
        self.workspace_bytes = workspace_bytes(outline.footprint, running, self._max_positions * wish.num_sequences)
        self.fixed_bytes = process_bytes + outline.footprint.weight_bytes + self.workspace_bytes
        self.limit_bytes = self._limit()

    def _limit(self) -> int:
        """What the cache may take."""
        wish, footprint = self._wish, self._outline.footprint
        limits = [] if wish.memory_bytes is None else [wish.memory_bytes]
        if wish.total_bytes is not None:
            limits.append(max(0, wish.total_bytes - self.fixed_bytes))
        if not limits:
            spare = spare_bytes(self._memory, footprint.weight_bytes, workspace_bytes(footprint, wish.engine))
            limits = [spare, most_useful_bytes(self._outline.geometry, wish.engine)]
        return min(limits)

    def weigh(self, kv: str) -> FormPlan:
        config, longest = self._config(kv), self._longest(kv)
        need = self._need(kv)
        return FormPlan(
            kv=kv,
            form=sealed_form(self._outline.geometry, config).name.lower(),
            kv_bytes=need.kv_bytes,
            table_bytes=need.table_bytes,
            total_bytes=self.fixed_bytes + need.total,
            limit_bytes=self.limit_bytes,
            longest_tokens=longest,
            fits=self.num_tokens <= longest,
        )

    def _config(self, kv: str) -> CacheConfig:
        return dataclasses.replace(self._wish.cache, kv=kv, memory_bytes=max(1, self.limit_bytes))

    def _demand(self, num_sequences: int) -> Demand:
        return Demand(self.num_tokens, self._wish.engine.max_step_tokens, num_sequences)

    def _need(self, kv: str) -> DemandBytes:
        return demand_bytes(self._outline.geometry, self._config(kv), self._demand(self._wish.num_sequences))

    def _longest(self, kv: str) -> int:
        demand = self._demand(self._wish.num_sequences)
        return min(longest_tokens(self._outline.geometry, self._config(kv), demand), self._max_positions)

    def advice(self, forms: tuple[FormPlan, ...], chosen: str) -> list[str]:
        """What does not fit and by how much, then every single change that makes it fit, with its number."""
        choice = next(form for form in forms if form.kv == chosen)
        if self.num_tokens > self._max_positions:
            most = self._max_positions
            return [f"{self.num_tokens:,} tokens are more than the model's own context of {most:,}", f"--ctx {most}"]
        need = choice.kv_bytes + choice.table_bytes
        told = [f"the cache needs {format_bytes(need)}, its limit is {format_bytes(self.limit_bytes)}"]
        if choice.longest_tokens:
            told.append(f"--ctx {choice.longest_tokens}, the longest that fits")
        told += [f"--kv {form.kv}: {format_bytes(form.total_bytes)} in all" for form in forms if form.fits]
        halved = self._in_bfloat16()
        if halved is not None and (other := halved.weigh(chosen)).fits:
            told.append(f"--dtype bfloat16: {format_bytes(other.total_bytes)} in all")
        if (fewer := self._most_sequences(chosen)) > 0:
            told.append(f"--sequences {fewer}")
        if self._wish.memory_bytes is not None and self._wish.memory_bytes < need:
            told.append(f"--memory {_megabytes(need)}")
        elif self._wish.total_bytes is not None:
            told.append(f"--total {_megabytes(choice.total_bytes)}")
        else:
            told.append(f"free memory, or name what the cache may take: --memory {_megabytes(need)}")
        return told

    def _in_bfloat16(self) -> _Scale | None:
        """The same with weights, activations, and full blocks of half the size; None: they are not in fp32."""
        if self._outline.geometry.full_form != Form.FP32:
            return None
        before = self._outline.footprint
        weights = before.weight_bytes // 2 if self._outline.weights == "dense" else before.weight_bytes
        footprint = dataclasses.replace(before, weight_bytes=weights, row_bytes=before.row_bytes // 2)
        geometry = dataclasses.replace(self._outline.geometry, full_form=Form.BF16)
        outline = dataclasses.replace(self._outline, geometry=geometry, footprint=footprint)
        return _Scale(outline, self._wish, self._process_bytes, self._memory)

    def _most_sequences(self, kv: str) -> int:
        """The most texts of this length that fit, when fewer than wished do; the workspace is left as it is."""
        config = self._config(kv)
        low, high = 0, self._wish.num_sequences - 1
        while low < high:
            middle = (low + high + 1) // 2
            need = demand_bytes(self._outline.geometry, config, self._demand(middle)).total
            low, high = (middle, high) if need <= self.limit_bytes else (low, middle - 1)
        return low


def _megabytes(num_bytes: int) -> str:
    """A size that can be typed, rounded up."""
    return f"{-(-num_bytes // 10**6)}MB"
