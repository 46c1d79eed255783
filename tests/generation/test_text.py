"""Text that comes token by token is the text of all tokens, and never shows half a character."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import Tokenizer, load_tokenizer
from megazero.generation import TextStream
from tests.data.helpers import FIXTURES, gpt2_folder

TEXT = "Naïve  café: 漢字仮名, 🎉👩‍🔬 — d'accord?\n\n\tЖ 1234 €."


@cache
def tokenizer(kind: str) -> Tokenizer:
    return load_tokenizer("byte" if kind == "byte" else f"sentencepiece:{FIXTURES / 'sentencepiece' / kind}.model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """GPT-2's vocabulary, and a tokenizer.json that spells what it does not know in bytes, as Llama's does."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, normalizers

    folder = gpt2_folder(tmp_path_factory.mktemp("tokenizers"))
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁a"]
    raw = Raw(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.save(str(folder / "tokenizer.json"))
    return folder


def streamed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.finish()]


def check(kind: Tokenizer, prompt: str, text: str) -> None:
    """What comes after the prompt, in whole characters."""
    before = kind.encode(prompt)
    after = kind.encode(prompt + text)[len(before) :]
    parts = streamed(TextStream(kind.decode, before), after)
    assert "".join(parts) == kind.decode(before + after)[len(kind.decode(before)) :]
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("kind", ["byte", "mistral_v1", "botchan_en_unigram_1000"])
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=12).filter(lambda t: "\ufffd" not in t))
def test_pieces_make_up_the_text(kind: str, text: str) -> None:
    if kind == "botchan_en_unigram_1000":  # it knows few characters, and the rest decodes to its mark for unknown ones
        text = "".join(c for c in text if c.isascii())
    check(tokenizer(kind), "So ", text)
    check(tokenizer(kind), "So", text + TEXT)


@pytest.mark.parametrize("spec", ["gpt2:{}", "hf:{}"])
def test_pieces_of_byte_level_and_byte_fallback_vocabularies(spec: str, folder: Path) -> None:
    kind = load_tokenizer(spec.format(folder))
    for start in range(len(TEXT)):
        check(kind, "a b", TEXT[start:])


def test_characters_come_when_they_are_whole() -> None:
    stream = TextStream(tokenizer("byte").decode, list(b"x"))
    assert [stream.push(byte) for byte in "a€🎉é".encode()] == ["a", "", "", "€", "", "", "", "🎉", "", "é"]


def test_bytes_that_are_no_text_are_shown_when_that_is_certain() -> None:
    stream = TextStream(tokenizer("byte").decode, list(b"x"))
    assert streamed(stream, [0xE2, 0x82, 65, 0xFF, 0xFF]) == ["", "", "\ufffdA", "", "", "\ufffd\ufffd"]


def test_a_first_space_is_not_lost() -> None:
    kind = tokenizer("mistral_v1")
    stream = TextStream(kind.decode, kind.encode("Hello"))
    assert streamed(stream, kind.encode("world"))[:-1] == [" world"]


def test_decoding_takes_a_window_not_the_whole_text() -> None:
    sizes = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return "".join(map(chr, ids))

    streamed(TextStream(decode, [65]), [66] * 100)
    assert max(sizes) <= 3


def split(text: str) -> Callable:
    """A stream over characters, as if each were a token."""
    return lambda *stop: streamed(TextStream(lambda ids: "".join(map(chr, ids)), [65], stop), [ord(c) for c in text])


def test_a_stop_string_ends_the_text_before_it() -> None:
    assert split("one\n\ntwo")("\n\n") == ["o", "n", "e", "", "", "", "", "", ""]
    assert "".join(split("abcabd!")("abd")) == "abc"
    assert "".join(split("aaab")("aab")) == "a"
    assert "".join(split("xyz stop END")("END", "stop")) == "xyz "
    assert "".join(split("abc")("abcd", "cde")) == "abc"  # only begun
    assert "".join(split("abc")("Aa")) == "abc"  # the prompt's last letter does not count


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    assert split("ab-abc")("abc") == ["", "", "ab-", "", "", "", ""]


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_stop_strings_cut_where_the_whole_text_would_be_cut(text: str, stop: str) -> None:
    assert "".join(split(text)(stop)) == text.partition(stop)[0]


def test_it_says_that_it_has_stopped() -> None:
    stream = TextStream(lambda ids: "".join(map(chr, ids)), [65], ["b"])
    assert (stream.push(97), stream.stopped) == ("a", False)
    assert (stream.push(98), stream.stopped) == ("", True)
    assert (stream.push(97), stream.finish()) == ("", "")
