"""Text out of tokens: whole characters only, any bytes, and answers cut before a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from ktransformer2.engine.detokenizer import Detokenizer, StopStrings
from tests.engine.byte_tokenizer import END, USER, ByteTokenizer

TEXT = "The tenant shall pay 租金应于每月五日前支付。 Привет, мир! 👩‍👩‍👧 🇨🇳 café naïve 12,000.50 €"
PIECES = st.text(st.sampled_from("ab 租金应😀👩‍👧é\u0301\n�\x00"), max_size=12)


class BytePairTokenizer:
    """A trained byte-level BPE, as GPT-2, Llama 3 and Qwen have it: a token may be one byte or a word and a half."""

    eos_token_id = None
    chat_template = None

    def __init__(self) -> None:
        self._fast = FastTokenizer(models.BPE())
        self._fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._fast.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        self._fast.train_from_iterator([TEXT] * 3, trainer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text).ids
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class WordTokenizer(BytePairTokenizer):
    """A SentencePiece-like tokenizer: a leading space is part of the word, and vanishes at the start of a text."""

    WORDS = ("▁the", "▁rent", "s", "▁is", "▁due", ".")

    def __init__(self) -> None:
        self._fast = FastTokenizer(models.WordLevel({word: i for i, word in enumerate(self.WORDS)}, unk_token="."))
        self._fast.decoder = decoders.Metaspace()


BPE = BytePairTokenizer()


def pieces_of(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_a_character_comes_whole_with_its_last_byte() -> None:
    pieces = pieces_of(Detokenizer(ByteTokenizer()), list("a租😀b".encode()))
    assert pieces == ["a", "", "", "租", "", "", "", "😀", "b", ""]


def test_half_a_character_at_the_end_comes_with_the_flush() -> None:
    pieces = pieces_of(Detokenizer(ByteTokenizer()), [*b"ok", *"租".encode()[:2]])
    assert pieces == ["o", "k", "", "", "\ufffd"]


def test_invalid_bytes_are_given_out_and_do_not_block_what_follows() -> None:
    pieces = pieces_of(Detokenizer(ByteTokenizer()), [0x80] * 20 + list(b"go"))
    assert "".join(pieces) == "\ufffd" * 20 + "go"
    assert pieces[7] == "\ufffd" * 5  # with eight held back only the last three can still change
    assert pieces[-3:] == ["\ufffd" * 3 + "g", "o", ""]


def test_special_tokens_have_no_text() -> None:
    assert pieces_of(Detokenizer(ByteTokenizer()), [USER, *b"hi", END]) == ["", "h", "i", "", ""]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert pieces_of(Detokenizer(None, [1, 2]), [1, 2]) == ["", "", ""]


def test_a_leading_space_stays_between_pieces_and_after_the_prompt() -> None:
    words = WordTokenizer()
    assert pieces_of(Detokenizer(words), [0, 1, 2, 3, 4, 5]) == ["the", " rent", "s", " is", " due", ".", ""]
    assert pieces_of(Detokenizer(words, [0, 1]), [3, 4]) == [" is", " due", ""]


def test_a_prompt_that_ends_inside_a_character_is_no_context() -> None:
    half = list("租".encode())
    assert "".join(pieces_of(Detokenizer(ByteTokenizer(), [*b"a", *half[:2]]), [*half[2:], *b"b"])) == "\ufffdb"


@given(st.lists(st.integers(0, 255), max_size=40))
@example([0xF0, 0x9F, 0x98, 0xF0, 0x9F, 0x98, 0x80])
def test_any_bytes_give_the_text_that_decoding_at_once_gives(ids: list[int]) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    pieces = pieces_of(detokenizer, ids)
    assert "".join(pieces) == detokenizer.text == bytes(ids).decode(errors="replace")


@given(PIECES, PIECES)
@example("", TEXT)
def test_valid_text_never_shows_a_broken_character(before: str, text: str) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        detokenizer = Detokenizer(tokenizer, tokenizer.encode(before))
        pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
        if "\ufffd" not in text:
            assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) + detokenizer.flush() == text


@given(st.lists(st.integers(0, 329), max_size=30))
def test_any_byte_pair_tokens_give_the_text_that_decoding_at_once_gives(ids: list[int]) -> None:
    ids = [token for token in ids if token < BPE._fast.get_vocab_size()]
    assert "".join(pieces_of(Detokenizer(BPE), ids)) == BPE.decode(ids)


# --- stop strings


def test_a_stop_string_across_tokens_is_cut_and_its_beginning_never_shown() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), stop=["STOP"])
    assert [detokenizer.push(token) for token in b"a ST STOPx"] == ["a", " ", "", "", "ST ", "", "", "", "", ""]
    assert (detokenizer.stop_string, detokenizer.text, detokenizer.flush()) == ("STOP", "a ST ", "")


def test_what_may_be_a_stop_string_comes_with_the_flush_when_it_is_none() -> None:
    assert pieces_of(Detokenizer(ByteTokenizer(), stop=["\n\n"]), list(b"a\n")) == ["a", "", "\n"]


def test_a_stop_string_of_several_byte_characters() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), stop=["。租"])
    assert "".join(pieces_of(detokenizer, list("应。金。租".encode()))) == "应。金"
    assert detokenizer.stop_string == "。租"


@pytest.mark.parametrize(
    ("stops", "text", "expected", "met"),
    [
        (["b", "ab"], "xab", "x", "ab"),  # the one that begins first
        (["ab", "abc"], "xabc", "x", "ab"),  # at one place, the first named
        (["abc", "ab"], "xabc", "x", "abc"),
        (["aab"], "aaaab", "aa", "aab"),  # an overlap with itself
        (["zz"], "az", "az", None),
        ([], "abc", "abc", None),
    ],
)
def test_which_stop_string_counts(stops: list[str], text: str, expected: str, met: str | None) -> None:
    whole = StopStrings(stops)
    assert whole.push(text) + whole.flush() == expected
    assert whole.met == met


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=12),
)
def test_pieces_end_before_a_stop_string_wherever_they_are_cut(stops: list[str], pieces: list[str]) -> None:
    stream, text = StopStrings(stops), "".join(pieces)
    given_out = "".join(stream.push(piece) for piece in pieces)
    assert not any(stop in given_out for stop in stops)
    given_out += stream.flush()
    # Naive: the first prefix of the text that holds a stop string ends it, as when pieces are single characters.
    if not any(stop in text for stop in stops):
        assert (given_out, stream.met) == (text, None)
    else:
        assert stream.met in stops
        assert text.startswith(given_out + str(stream.met))
        assert not any(stop in given_out for stop in stops)
