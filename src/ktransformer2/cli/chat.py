"""`ktransformer chat`: a conversation with one model. Answers go to stdout, everything else to stderr.

Nothing is truncated: a question that does not fit is refused with numbers, and the conversation is as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ktransformer2.cli.guard import EXIT_DOES_NOT_FIT, EXIT_FAILED, EXIT_INTERRUPTED, fail, in_flags, reported, write
from ktransformer2.cli.opening import Opening
from ktransformer2.cli.options import (
    DtypeOption,
    KvOption,
    MemoryOption,
    MinPOption,
    ModelArgument,
    NewTokensOption,
    PersistFlag,
    RepetitionOption,
    RunnerOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    WeightsOption,
    persistence,
)

if TYPE_CHECKING:
    from ktransformer2.cli.conversation import Conversation
    from ktransformer2.cli.keeping import Keeping
    from ktransformer2.cli.last_chat import LastChat
    from ktransformer2.cli.turns import Turn
    from ktransformer2.engine.llm import LLM
    from ktransformer2.engine.sampling import SamplingParams

_WAYS_OUT = (
    "The question was not sent and the conversation is as before: /clear forgets it (/save FILE keeps a copy), a "
    "smaller --max-new-tokens leaves more room for it"
)


@reported
def chat(
    model: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="A system text in front of the conversation.")] = None,
    memory: MemoryOption = None,
    kv: KvOption = None,
    dtype: DtypeOption = None,
    runner: RunnerOption = None,
    weights: WeightsOption = None,
    max_new_tokens: NewTokensOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionOption = 1.0,
    seed: SeedOption = None,
    persist: PersistFlag = None,
    goes_on: Annotated[
        bool, typer.Option("--continue", "-c", help="Go on with the last conversation, which was kept on disk.")
    ] = False,
) -> None:
    """Talk with a model.

    /help in the chat lists what it understands; Ctrl-C stops an answer and keeps it.
    """
    last = _last_chat(persist) if goes_on else None
    if last is not None and model is None:
        model = last.model
    opening = Opening.of(
        {"model": model, "memory": memory, "kv": kv, "dtype": dtype, "runner": runner}
        | {"weights": weights, "max_new_tokens": max_new_tokens, "persist": persistence(persist)},
        **{"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
        **{"repetition_penalty": repetition_penalty, "seed": seed},
    )
    from ktransformer2.cli.conversation import Conversation
    from ktransformer2.console import stderr_console

    conversation = Conversation()
    if last is not None:
        conversation.go_on_from(last.messages)
    if system is not None:
        conversation.system = system
    console = stderr_console()
    with opening.opened(console) as (llm, keeping):
        if not llm.tokenizer.chat_template:
            fail(
                f"{llm.source} has no chat format; `ktransformer run {opening.model} --raw` continues a text",
                EXIT_FAILED,
            )
        if last is not None:
            keeping.holds_chat = True
            console.print(f"Going on after {len(last.messages)} messages; /clear forgets them.", style="dim")
        code = Chat(llm, conversation, opening.params, keeping).run()
    raise typer.Exit(code)


def _last_chat(persist: bool | None) -> LastChat:
    """What `--continue` goes on with. Raises: ConfigError where none was kept, or nothing is to be read."""
    from ktransformer2 import settings
    from ktransformer2.cli.last_chat import LastChat
    from ktransformer2.errors import ConfigError

    if settings.resolve({"persist": persistence(persist)}).values["persist"] == "off":
        raise ConfigError("--continue reads what was kept on disk, and --no-persist (persist = off) reads nothing")
    return LastChat.read()


class Chat:
    """One conversation on one model."""

    def __init__(self, llm: LLM, conversation: Conversation, params: SamplingParams, keeping: Keeping) -> None:
        self.llm, self.conversation, self.keeping, self.console = llm, conversation, keeping, keeping.console
        self._params = params
        self._code = 0

    def run(self) -> int:
        """Until /bye, the end of the input, or Ctrl-C at the prompt; the exit code.

        Away from a terminal it tells of the last line that was refused: nobody was there to read the message.
        """
        from ktransformer2.cli import turns

        turns.prepare_stdin()
        self.console.print("/help lists what this chat understands, /bye leaves.", style="dim")
        try:
            for turn in turns.turns(turns.read_stdin):
                if not self._take(turn):
                    break
        except KeyboardInterrupt:
            self.say("")
            return EXIT_INTERRUPTED
        return 0 if turns.is_interactive() else self._code

    def say(self, text: str) -> None:
        """Something that is no answer."""
        self.console.print(text, soft_wrap=True, markup=False)

    def _take(self, turn: Turn) -> bool:
        """Whether the chat goes on. Errors of this package are said, and change nothing."""
        from ktransformer2.cli import slash
        from ktransformer2.errors import ContextLengthError, KTransformerError, OutOfMemoryError

        try:
            if turn.is_command:
                return slash.obey(self, turn.text)
            self._answer(turn.text)
        except (ContextLengthError, OutOfMemoryError) as error:
            self._say_refused(f"{in_flags(str(error))}. {_WAYS_OUT}{self._attached()}", EXIT_DOES_NOT_FIT)
        except KTransformerError as error:
            self._say_refused(str(error), EXIT_FAILED)
        return True

    def _answer(self, question: str) -> None:
        from ktransformer2.console import Interrupt, closing_line, follow

        chunks = self.llm.stream_chat(self.conversation.asking(question), self._params)
        with Interrupt(self.llm.engine.cancel) as interrupt:
            output = follow(chunks, write, self.console, interrupt)
        write("\n" if output.text else "")
        if output.text or output.finish_reason != "cancelled":
            self.conversation.add(question, output.text)
            self.keeping.keep_chat(self.conversation.messages)
        else:
            self.say("Stopped before the answer began; the question is not part of the conversation.")
        if output.finish_reason == "length":
            self.console.print(
                f"(the answer was ended at {output.usage.new_tokens} tokens: --max-new-tokens)", style="yellow"
            )
        self.console.print(closing_line(output.usage, self.llm.cache.stats().held_bytes), style="bold", soft_wrap=True)
        self.keeping.look()

    def _attached(self) -> str:
        names = ", ".join(self.conversation.attached)
        return f", /file without a name takes {names} off again" if names else ""

    def _say_refused(self, message: str, code: int) -> None:
        self._code = code
        self.console.print(f"error: {message}", style="red", soft_wrap=True, markup=False)
