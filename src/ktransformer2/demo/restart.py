"""The demo's last question, asked in a new process: what the one before has kept on disk is found again.

    python -m ktransformer2.demo.restart        a `LastQuestion` in JSON on stdin; prints an `Answer` in JSON

The new process loads the model anew, so it knows nothing but what lies on disk. Knows no contract.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformer2.console import follow, stderr_console
from ktransformer2.engine.outputs import Usage
from ktransformer2.errors import KTransformerError


@dataclass(frozen=True)
class LastQuestion:
    """`options`: those of `LLM`. `dtype`, `sources`, `wheel`: those of `demo_model`, so that it is the same model."""

    prompt_ids: list[int]
    max_new_tokens: int
    options: dict[str, Any]
    dtype: str
    sources: list[str]
    wheel: str | None = None

    def ask(self) -> Answer:
        """In a new process, whose progress goes to stderr. Raises: KTransformerError where it fails."""
        command = [sys.executable, "-m", __name__]
        here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the package may not be installed
        asked = json.dumps(dataclasses.asdict(self))
        done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=False, env=here)
        if done.returncode:
            raise KTransformerError(f"the new process ended with {done.returncode}; what it said stands above")
        found = json.loads(done.stdout.splitlines()[-1])
        return Answer(found["text"], Usage(**found["usage"]))

    def answer(self) -> Answer:
        """In this process. Raises what `LLM` and the engine raise."""
        from ktransformer2.engine.llm import LLM
        from ktransformer2.engine.sampling import SamplingParams
        from ktransformer2.models.demo import demo_model

        wheel = None if self.wheel is None else Path(self.wheel)
        how = {name: self.options[name] for name in ("runner", "weights") if name in self.options}
        loaded = demo_model(self.dtype, self.sources, wheel, **how)
        with LLM(loaded, **self.options) as llm:
            chunks = llm.stream(self.prompt_ids, SamplingParams(max_new_tokens=self.max_new_tokens))
            output = follow(chunks, lambda _: None, stderr_console())
        return Answer(output.text, dataclasses.replace(output.usage, miss=None))


@dataclass(frozen=True)
class Answer:
    """What the new process said, and what it cost."""

    text: str
    usage: Usage


if __name__ == "__main__":
    try:
        print(json.dumps(dataclasses.asdict(LastQuestion(**json.load(sys.stdin)).answer())))
    except KTransformerError as error:
        sys.exit(f"error: {error}")
