"""A conversation as a person has it: over a pipe here, since a terminal is only another way to read lines."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ktransformer2.cli import guard
from ktransformer2.cli.conversation import Conversation
from ktransformer2.cli.turns import Turn, read_stdin, turns
from ktransformer2.engine.snapshot import Snapshot
from ktransformer2.errors import ConfigError
from tests.cli.invoking import CLI, assert_as_before, failed, invoke

FIRST = "user: Hello\nassistant: "  # one token a byte


def chat(folder: Path, *lines: str, options: tuple[str, ...] = ("--max-new-tokens", "5")) -> Any:
    return invoke("chat", folder, "--memory", "64MB", *options, stdin="\n".join(lines) + "\n")


def costs(result: Any) -> list[tuple[int, int, int]]:
    """(tokens in, of them cached, out) of every answer."""
    found = re.findall(
        r"([\d,]+) tokens in \(([\d,]+) cached\) \| ([\d,]+) out \| first token .* \| KV ", result.stderr
    )
    return [(int(a.replace(",", "")), int(b.replace(",", "")), int(c)) for a, b, c in found]


def test_a_second_question_finds_the_first_in_the_cache(tiny_model_folder: Path) -> None:
    result = chat(tiny_model_folder, "x" * 80, "More", "", "/bye", "never asked")
    assert result.exit_code == 0, result.stderr
    first, second = costs(result)
    assert first == (len(FIRST) - len("Hello") + 80, 0, 5)
    assert second[1] == 64  # a whole block of the first question
    assert "ready in" in result.stderr
    assert "prefill 100 %" in result.stderr


def test_stdout_is_the_answers_and_the_same_as_run(tiny_model_folder: Path) -> None:
    result = chat(tiny_model_folder, "Hello", "/stats", "/help")
    alone = invoke("run", tiny_model_folder, "-p", "Hello", "--memory", "64MB", "--max-new-tokens", "5")
    assert result.stdout == alone.stdout
    assert "the answer was ended at 5 tokens" in result.stderr


def test_the_system_text_comes_first(tiny_model_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    options = ("--max-new-tokens", "2", "--system", "Be kind")
    result = chat(tiny_model_folder, "/system", "Hello", "/system Be brief", f"/save {saved}", options=options)
    assert costs(result)[0][0] == len("system: Be kind\n" + FIRST)
    assert "System text: Be kind" in result.stderr
    assert json.loads(saved.read_text(encoding="utf-8"))[0] == {"role": "system", "content": "Be brief"}


def test_a_conversation_is_saved_loaded_and_forgotten(tiny_model_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    result = chat(tiny_model_folder, "Hello", f"/save {saved}", "/clear", "Hello", f"/load {saved}", "More")
    assert result.exit_code == 0, result.stderr
    messages = json.loads(saved.read_text(encoding="utf-8"))
    assert [message["role"] for message in messages] == ["user", "assistant"]
    tokens_in = [cost[0] for cost in costs(result)]
    assert tokens_in[:2] == [len(FIRST)] * 2
    assert tokens_in[2] > len(FIRST + "\n" + FIRST)  # the answer in the middle has five tokens of unknown length
    assert "Forgot 2 messages" in result.stderr
    assert "Read 2 messages" in result.stderr


def test_a_file_goes_in_front_of_the_next_question_only(tiny_model_folder: Path, tmp_path: Path) -> None:
    text, saved = tmp_path / "contract.txt", tmp_path / "saved.json"
    text.write_text("Clause 1\n", encoding="utf-8")
    result = chat(tiny_model_folder, f"/file {text}", "Who?", "When?", f"/save {saved}")
    assert "contract.txt: 9 characters" in result.stderr
    asked = [message["content"] for message in json.loads(saved.read_text(encoding="utf-8"))[::2]]
    assert asked == ["Clause 1\n\nWho?", "When?"]
    taken_off = chat(tiny_model_folder, f"/file {text}", "/file", "Hello")
    assert costs(taken_off)[0][0] == len(FIRST)


def test_too_long_is_refused_with_numbers_and_nothing_is_lost(tiny_model_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    options = ("--max-new-tokens", "5", "--memory", "1MB")
    result = chat(tiny_model_folder, "Hello", "x" * 9000, "Go on", f"/save {saved}", options=options)
    assert result.exit_code == guard.EXIT_DOES_NOT_FIT
    assert len(costs(result)) == 2
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "the memory limit of 1 MB holds" in error
    assert "The longest prompt that fits" in error
    assert "The question was not sent and the conversation is as before: /clear forgets it" in error
    asked = [message["content"] for message in json.loads(saved.read_text(encoding="utf-8"))[::2]]
    assert asked == ["Hello", "Go on"]


def test_longer_than_the_model_is_refused_and_the_attached_file_stays(tiny_model_folder: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("x" * 140_000, encoding="utf-8")
    result = chat(tiny_model_folder, f"/file {long}", "Why?", "/file", "Hello")
    assert result.exit_code == guard.EXIT_DOES_NOT_FIT
    assert "the model's maximum is 131072. Nothing was truncated" in result.stderr
    assert "/file without a name takes long.txt off again" in result.stderr
    assert costs(result) == [(len(FIRST), 0, 5)]


def test_help_and_stats(tiny_model_folder: Path, tmp_path: Path) -> None:
    counters = tmp_path / "counters.json"
    result = chat(tiny_model_folder, "/help", "Hello", "/stats", f"/stats {counters}")
    shown = result.stderr.partition("/bye leaves.\n")[2].partition("prefill")[0]
    assert_as_before("chat-help", shown)
    assert f"tokens      {len(FIRST)} in (0 cached), 4 decoded" in result.stderr
    found = Snapshot.from_json(json.loads(counters.read_text(encoding="utf-8")))
    assert found.engine.prompt_tokens == found.cache.lookup_tokens == len(FIRST)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/stat", 'unknown command /stat; did you mean /stats? A text that begins with a slash goes into """ """'),
        ("/zzz", "unknown command /zzz; /help lists them. A text that begins with a slash"),
        ("/save", "/save wants FILE"),
        ("/load /no/such/file", "/no/such/file cannot be read"),
        ("/file /no/such/file", "/no/such/file cannot be read"),
        ("/save /no/such/folder/file", "/no/such/folder/file cannot be written"),
        ("/stats /no/such/folder/file", "/no/such/folder/file cannot be written"),
    ],
)
def test_a_wrong_command_changes_nothing(tiny_model_folder: Path, line: str, why: str) -> None:
    result = chat(tiny_model_folder, line, "Hello")
    assert result.exit_code == guard.EXIT_FAILED
    assert f"error: {why}" in result.stderr
    assert costs(result) == [(len(FIRST), 0, 5)]


def test_a_model_without_a_chat_format_is_named(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for file in tiny_model_folder.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    message = failed(chat(folder, "Hello"), guard.EXIT_FAILED)
    assert message == f"error: {folder} has no chat format; `ktransformer run {folder} --raw` continues a text"


def test_bytes_that_are_no_text(tiny_model_folder: Path) -> None:
    command = [*CLI, "chat", str(tiny_model_folder), "--memory", "64MB"]
    done = subprocess.run(command, input=b"ab\xff\n", capture_output=True, check=False)
    assert done.returncode == guard.EXIT_FAILED
    assert done.stderr.splitlines()[-1] == b"error: stdin is no UTF-8 text"


# --- Ctrl-C


def started(folder: Path) -> subprocess.Popen[bytes]:
    """A chat that is in the middle of a very long answer."""
    command = [*CLI, "chat", str(folder), "--memory", "256MB", "--max-new-tokens", "100000"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hello " + b"x" * 100 + b"\n")
    process.stdin.flush()
    assert os.read(process.stdout.fileno(), 1)  # the answer has begun
    return process


def read_until(process: subprocess.Popen[bytes], words: bytes) -> bytes:
    assert process.stderr is not None
    seen = b""
    while words not in seen:
        piece = os.read(process.stderr.fileno(), 4096)
        assert piece, f"the chat ended before {words!r}: {seen.decode()}"
        seen += piece
    return seen


def test_ctrl_c_stops_the_answer_and_keeps_it(tiny_model_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with started(tiny_model_folder) as process:
        process.send_signal(signal.SIGINT)
        read_until(process, b"| KV ")  # the closing line: the answer is over, the chat is not
        assert process.stdin is not None
        process.stdin.write(f"/save {saved}\nAnd\n".encode())
        process.stdin.flush()
        read_until(process, b"Wrote 2 messages")
        seen = read_until(process, b"prefill 100 %")
        process.send_signal(signal.SIGINT)
        seen += read_until(process, b"| KV ")
        _, errors = process.communicate(b"/bye\n", timeout=60)
    assert process.returncode == 0, errors.decode()
    question, answer = json.loads(saved.read_text(encoding="utf-8"))
    assert question["content"].startswith("Hello")
    assert answer["content"]
    (cached,) = re.findall(rb"\(([\d,]+) cached\)", seen)
    assert int(cached.replace(b",", b"")) >= 64
    assert b"Traceback" not in seen + errors


def test_a_second_ctrl_c_leaves(tiny_model_folder: Path) -> None:
    with started(tiny_model_folder) as process:
        process.send_signal(signal.SIGINT)
        read_until(process, b"| KV ")
        process.send_signal(signal.SIGINT)  # at the prompt now
        assert process.wait(60) == guard.EXIT_INTERRUPTED
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


# --- lines and messages


def spoken(*lines: str) -> list[Turn]:
    waiting = iter(lines)
    return list(turns(lambda _: next(waiting, None)))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["one", "", "  ", "two "], [Turn("one"), Turn("two")]),
        (["one\\", "two\\", "three", "four"], [Turn("one\ntwo\nthree"), Turn("four")]),
        (["end\\"], [Turn("end")]),
        (['"""one', "", '/two"""', "three"], [Turn("one\n\n/two"), Turn("three")]),
        (['"""/one"""'], [Turn("/one")]),
        (['"""', "never closed"], [Turn("never closed")]),
        (["/clear", " /stats x"], [Turn("/clear", True), Turn("/stats x", True)]),
    ],
)
def test_turns(lines: list[str], expected: list[Turn]) -> None:
    assert spoken(*lines) == expected


def test_a_line_of_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\r\n\nlast"))
    assert [read_stdin("> ") for _ in range(4)] == ["one", "", "last", None]
    monkeypatch.setattr("sys.stdin", None)
    assert read_stdin("> ") is None


def test_a_file_of_somebody_else_is_never_written_over(tmp_path: Path) -> None:
    path, conversation = tmp_path / "saved.json", Conversation("Be kind")
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="is there already; name another file"):
        conversation.save(path)
    assert path.read_text(encoding="utf-8") == "precious"
    own = tmp_path / "own.json"
    conversation.save(own)
    conversation.add("a", "b")
    conversation.save(own)
    again = Conversation()
    again.load(own)
    assert again.messages == conversation.messages
    again.save(own)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{}", "holds no list of messages"),
        ("[]", "holds no list of messages"),
        ("nothing", "is no JSON"),
        ('[{"role": "user"}]', "message 1 has not just a role and a content"),
        ('[{"role": "boss", "content": "x"}]', "message 1 has a role or a content that is not allowed"),
        ('[{"role": "user", "content": 1}]', "message 1 has a role or a content that is not allowed"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]', "message 2 is a system text"),
    ],
)
def test_a_file_that_holds_no_messages_changes_nothing(tmp_path: Path, content: str, why: str) -> None:
    path, conversation = tmp_path / "saved.json", Conversation("Be kind")
    conversation.add("a", "b")
    before = list(conversation.messages)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        conversation.load(path)
    assert conversation.messages == before
