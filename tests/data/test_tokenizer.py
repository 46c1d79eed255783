"""Ids against published vectors and the libraries' own."""

import base64
import json

import pytest

from data.tokenizer import load_tokenizer
from megazero.errors import DataError
from tests.data.helpers import FIXTURES, gpt2_folder

TEXTS = [
    "",
    "Hello world",
    " leading, trailing ",
    "two\n\nlines\r\n\ttab",
    "naïve 漢字 🎉 \u200d",
    "12345 <|endoftext|> </s> <s>",
    "It's  spaced    out",
]


def vectors():
    """The 47 (text, ids) of llama.cpp's GPT-2 test; the last text is empty and its line of ids is left out."""
    texts = (FIXTURES / "gpt2/vectors.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = [*(FIXTURES / "gpt2/vectors.out").read_text().splitlines(), ""]
    pairs = [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]
    assert len(pairs) == 47 and pairs[-1] == ("", [])
    return pairs


def test_byte():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.encode("aé\n") == [97, 195, 169, 10]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert tokenizer.decode([97, 256, 195]) == "a\ufffd"


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_gpt2_vectors(tmp_path, names):
    folder = gpt2_folder(tmp_path)
    for old, new in zip(("encoder.json", "vocab.bpe"), names, strict=True):
        (folder / old).rename(folder / new)
    tokenizer = load_tokenizer(f"gpt2:{folder}")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    for text, ids in vectors():
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == text
    assert 50256 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.decode([50256]) == "<|endoftext|>"


def test_gpt2_as_tokenizer_json_and_tiktoken(tmp_path):
    """The same vocabulary in three formats gives the same ids."""
    folder = gpt2_folder(tmp_path)
    gpt2 = load_tokenizer(f"gpt2:{folder}")
    gpt2._tokenizer.save(str(folder / "tokenizer.json"))
    vocab = json.loads((folder / "encoder.json").read_text())
    to_byte = _byte_of_character()
    lines = [
        base64.b64encode(bytes(to_byte[c] for c in piece)) + b" %d" % i
        for piece, i in vocab.items()
        if piece != "<|endoftext|>"
    ]
    (folder / "r50k_base.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    others = [load_tokenizer(f"hf:{folder / 'tokenizer.json'}"), load_tokenizer(f"hf:{folder}")]
    others.append(load_tokenizer(f"tiktoken:{folder / 'r50k_base.tiktoken'}"))
    for other in others:
        assert (other.vocab_size, other.eod_id) == (50257, 50256)
        for text, ids in vectors():
            assert other.encode(text) == ids, repr(text)
            assert other.decode(ids) == text


def _byte_of_character():
    """GPT-2's printable stand-in for each byte, the other way round (as its paper's code defines it)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def test_hf_recognises_special_tokens_and_finds_the_end(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    raw.add_special_tokens([AddedToken("<end>", special=True), AddedToken("</s>", special=True)])
    raw.enable_truncation(1)
    raw.save(str(tmp_path / "tokenizer.json"))
    plain = load_tokenizer(f"hf:{tmp_path}")
    assert (plain.vocab_size, plain.eod_id) == (4, 3)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<end>")
    assert plain.encode("b<end>b") == theirs.encode("b<end>b", add_special_tokens=False) == [1, 2, 1]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert load_tokenizer(f"hf:{tmp_path}").eod_id == 2
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert load_tokenizer(f"hf:{tmp_path}").eod_id == 2
    for text in ("[" * 100_000, "[]", '{"eos_token": 5}', '{"eos_token": {"content": []}}'):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(DataError, match="tokenizer_config.json"):
            load_tokenizer(f"hf:{tmp_path}")


@pytest.mark.parametrize("name", ["botchan_en_bpe_1000", "botchan_en_unigram_1000", "mistral_v1"])
def test_sentencepiece_ids_are_its_own(name):
    from sentencepiece import SentencePieceProcessor

    path = FIXTURES / f"sentencepiece/{name}.model"
    ours, theirs = load_tokenizer(f"sentencepiece:{path}"), SentencePieceProcessor(model_file=str(path))
    for text in [*TEXTS, *(text for text, _ in vectors())]:
        assert ours.encode(text) == theirs.encode(text), repr(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.vocab_size, ours.eod_id) == (theirs.get_piece_size(), theirs.eos_id())
    if name == "mistral_v1":
        assert ours.encode("Hello world") == [22557, 1526]


def test_tiktoken_of_an_unpublished_size(tmp_path):
    tokens = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell"]
    path = tmp_path / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens)))
    tokenizer = load_tokenizer(f"tiktoken:{path}")
    assert tokenizer.encode("hello") == [258, 111]
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (260, 259)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert 259 not in tokenizer.encode("<|endoftext|>")


def test_tiktoken_patterns_cut_as_tiktokens_own(monkeypatch):
    import regex
    from tiktoken_ext import openai_public

    import data.tokenizer as ours

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    pairs = [
        (ours._GPT2_PATTERN, openai_public.r50k_base),
        (ours._GPT2_PATTERN, openai_public.p50k_base),
        (ours._CL100K_PATTERN, openai_public.cl100k_base),
        (ours._O200K_PATTERN, openai_public.o200k_base),
    ]
    texts = [*TEXTS, *(text for text, _ in vectors()), "HTMLParser don'T we'LL camelCase//x\n\n 1234567 Ünï\u0301 \n a"]
    published = {ranks: (pattern, name, end) for ranks, (pattern, name, end) in ours._PUBLISHED.items()}
    for (pattern, theirs), ranks in zip(pairs, (50256, 50280, 100256, 199998), strict=True):
        description = theirs()
        for text in texts:
            assert regex.findall(pattern, text) == regex.findall(description["pat_str"], text), repr(text)
        assert published[ranks] == (pattern, "<|endoftext|>", description["special_tokens"]["<|endoftext|>"])


@pytest.mark.parametrize(
    "spec, message",
    [
        ("bytes", "is none of byte"),
        ("gpt2", "is none of byte"),
        ("gpt2:", "is none of byte"),
        ("bpe:x", "is none of byte"),
        ("sentencepiece:{}/no.model", "no.model does not exist"),
        ("sentencepiece:{}/bad", "bad is not a sentencepiece model"),
        ("hf:{}/bad", "bad is not a tokenizer.json"),
        ("tiktoken:{}/bad", "bad is not a .tiktoken file"),
        ("tiktoken:{}/short", "no rank for byte 2"),
        ("gpt2:{}", "holds neither encoder.json and vocab.bpe nor vocab.json and merges.txt"),
    ],
)
def test_errors_name_the_file(tmp_path, spec, message):
    (tmp_path / "bad").write_bytes(b"\xffnot a model")
    (tmp_path / "short").write_bytes(b"AA== 0\nAQ== 1\n")
    with pytest.raises(DataError, match=message):
        load_tokenizer(spec.format(tmp_path))
