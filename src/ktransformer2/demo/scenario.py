"""A contract is read once and asked twice; then the cache is cleared: what was reused, how fast, and the memory.

Where blocks are kept on disk a last question is left for a new process.

Knows the engine's public face and nothing below it. All that is random is the model of last resort, and it is seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from ktransformer2.console import closing_line, follow
from ktransformer2.demo.contract import contract_text, longest_fitting
from ktransformer2.demo.memory_curve import MemoryCurve, static_cache_bytes
from ktransformer2.errors import ConfigError

if TYPE_CHECKING:
    from ktransformer2.demo.restart import Answer
    from ktransformer2.engine.llm import LLM
    from ktransformer2.engine.outputs import RequestOutput, StreamChunk

QUESTIONS = (
    "Which two parties made this agreement, and what is it about?",
    "Which state's law governs this agreement?",
)
LAST_QUESTION = "How can this agreement be ended?"  # asked in a new process
QUICK_CONTEXT_TOKENS = 1024
QUICK_NEW_TOKENS = 16


@dataclass(frozen=True)
class DemoOptions:
    """`context_tokens` bounds prompt and answer together; None: the model's own context length."""

    context_tokens: int | None = None
    max_new_tokens: int = 96


@dataclass(frozen=True)
class DemoResult:
    """What happened. `contract_characters` of the contract were read; `freed_bytes` were given back by clear().

    `last_prompt`: the contract with the last question. `restarted`: the answer of a new process; None: none was asked.
    """

    contract_characters: int
    outputs: tuple[RequestOutput, ...]
    curve: MemoryCurve
    freed_bytes: int
    last_prompt: tuple[int, ...] = ()
    restarted: Answer | None = None


class ContractDemo:
    """One run on one model. Text of answers goes through `write`, everything else to `console`."""

    def __init__(self, llm: LLM, options: DemoOptions, write: Callable[[str], None], console: Console) -> None:
        self._llm, self._options, self._write, self._console = llm, options, write, console
        geometry = llm.cache.geometry
        self._context = min(options.context_tokens or geometry.max_positions, geometry.max_positions)
        self._curve = MemoryCurve(llm.cache.stats, static_cache_bytes(geometry, geometry.max_positions))

    def run(self) -> DemoResult:
        """Read, ask, ask again, clear. Raises what the engine raises; ConfigError where no text fits the context."""
        text = self._fitting_text()
        self._curve.sample(0, "start")
        outputs = [self._ask(text, question, number) for number, question in enumerate(QUESTIONS, start=1)]
        freed = self._llm.cache.clear()
        self._curve.sample(0, "clear()")
        last_prompt = tuple(self._prompt(text, LAST_QUESTION))
        return DemoResult(len(text), tuple(outputs), self._curve, freed, last_prompt)

    def _fitting_text(self) -> str:
        limit = self._context - self._options.max_new_tokens
        whole, questions = contract_text(), (*QUESTIONS, LAST_QUESTION)
        text = longest_fitting(whole, lambda part: max(len(self._prompt(part, q)) for q in questions), limit)
        if not text:
            raise ConfigError(
                f"a context of {self._context} tokens leaves no room for the contract beside a question and an answer "
                f"of {self._options.max_new_tokens} tokens; raise --context or lower --max-new-tokens"
            )
        share = f"the first {len(text):,} characters" if len(text) < len(whole) else "all"
        self._console.print(
            f"A co-branding agreement of 1999, {len(whole):,} characters; {share} fit {self._context:,} tokens.",
            soft_wrap=True,
        )
        return text

    def _prompt(self, text: str, question: str) -> list[int]:
        """The contract first, so that all questions have it in common."""
        tokenizer, prompt = self._llm.tokenizer, f"{text}\n\n{question}"
        if not tokenizer.chat_template:
            return tokenizer.encode(prompt)
        message = [{"role": "user", "content": prompt}]
        return list(
            tokenizer.apply_chat_template(message, tokenize=True, add_generation_prompt=True, return_dict=False)
        )

    def _ask(self, text: str, question: str, number: int) -> RequestOutput:
        from ktransformer2.engine.sampling import SamplingParams

        prompt = self._prompt(text, question)
        self._write(f"\nQuestion {number}: {question}\n")
        chunks = self._llm.stream(prompt, SamplingParams(max_new_tokens=self._options.max_new_tokens))
        output = follow(self._watched(chunks, len(prompt), number), self._write, self._console)
        self._write("\n")
        self._curve.sample(0, f"answer {number}")
        self._console.print(closing_line(output.usage, self._curve.samples[-1].held_bytes), style="bold")
        return output

    def _watched(self, chunks: Iterable[StreamChunk], prompt_tokens: int, number: int) -> Iterator[StreamChunk]:
        """The same chunks; the memory is looked at after each of them."""
        moments = iter(((prompt_tokens // 2, "half read"), (prompt_tokens, "contract read")) if number == 1 else ())
        next_at, name = next(moments, (None, ""))
        new_tokens = 0
        for chunk in chunks:
            new_tokens += len(chunk.token_ids)
            tokens = chunk.prefill[0] if chunk.prefill is not None else prompt_tokens + new_tokens
            if next_at is not None and tokens >= next_at:
                self._curve.sample(tokens, name)
                next_at, name = next(moments, (None, ""))
            else:
                self._curve.sample(tokens)
            yield chunk
