"""From flags to an open model, as `run` and `chat` have it: all that can be wrong is found before a library is loaded.

Knows no prompt and no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ktransformer2.cli.options import llm_options, named_model, say_kernels

if TYPE_CHECKING:
    from rich.console import Console

    from ktransformer2.cli.keeping import Keeping
    from ktransformer2.engine.llm import LLM
    from ktransformer2.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Opening:
    """Which model is opened with which settings, and how its answers are drawn."""

    model: str
    options: Mapping[str, Any]
    params: SamplingParams

    @classmethod
    def of(cls, flags: Mapping[str, str | None], **sampling: Any) -> Self:
        """`flags` are settings, None where nothing is said; `sampling` the fields of `SamplingParams`.

        Raises: ConfigError that names the flag.
        """
        from ktransformer2 import settings
        from ktransformer2.engine.sampling import SamplingParams
        from ktransformer2.errors import ConfigError, RequestError

        said = {name: str(value) for name, value in flags.items() if value is not None}
        chosen = settings.resolve(said)
        try:
            params = SamplingParams(**sampling)
        except RequestError as error:
            name = str(error).partition("=")[0]
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from error
        return cls(named_model(chosen), llm_options(chosen), params)

    @contextmanager
    def opened(self, console: Console) -> Iterator[tuple[LLM, Keeping]]:
        """The model and what is kept of it, until the end of the block; phases, times and what was kept on `console`.

        Raises: what `LLM` raises.
        """
        from ktransformer2.cli.keeping import Keeping
        from ktransformer2.console import Phases

        phases = Phases(console)
        with phases.phase("libraries"):
            from ktransformer2.engine.llm import LLM
        say_kernels(console)
        with phases.phase("weights"):
            llm = LLM(self.model, **self.options)
        keeping = Keeping(llm, self.model, console)
        try:
            with llm:
                phases.ready()
                yield llm, keeping
        finally:  # closing writes most, after Ctrl-C and an error too
            keeping.end()
