"""Text to token ids and back, for the tokenizer SPECs of the command line.

    byte                        the 256 bytes of UTF-8, and 256 as end of document
    gpt2:DIR                    encoder.json and vocab.bpe, or vocab.json and merges.txt
    hf:FILE                     a Hugging Face tokenizer.json, or the directory that holds it
    sentencepiece:FILE.model    a sentencepiece model
    tiktoken:FILE.tiktoken      base64 ranks, as OpenAI and Meta publish them

The library behind each is imported when it is used; nothing here imports a GPU package. (This module is not called
"tokenizers": beside a script, a file of that name would hide the library.)
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from megazero.errors import DataError

KINDS = "byte, gpt2:DIR, hf:tokenizer.json, sentencepiece:FILE.model or tiktoken:FILE.tiktoken"


class Tokenizer(Protocol):
    """What every tokenizer offers. ``encode`` adds no special tokens: begin- and end-of-text are the caller's."""

    vocab_size: int
    eod_id: int | None
    """End of document; None where the tokenizer has no such token."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that ``spec`` names. Raises DataError naming the file and what would fix it."""
    kind, _, argument = spec.partition(":")
    if spec == "byte":
        return ByteTokenizer()
    loaders = {
        "gpt2": GPT2Tokenizer,
        "hf": HuggingFaceTokenizer,
        "sentencepiece": SentencePieceTokenizer,
        "tiktoken": TiktokenTokenizer,
    }
    if kind not in loaders or not argument:
        raise DataError(f"tokenizer {spec!r} is none of {KINDS}")
    path = Path(os.path.expanduser(argument))  # of an unknown user it stays: a file that is not there
    if not path.exists():
        raise DataError(f"tokenizer {spec!r}: {path} does not exist")
    return loaders[kind](path)


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(f"this tokenizer needs the package {name}: pip install {name}") from error


class ByteTokenizer:
    """UTF-8 bytes as they are. Ids that are no byte decode to nothing, broken sequences to U+FFFD."""

    vocab_size = 257
    eod_id: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-level BPE from its published files. ``<|endoftext|>`` inside a text is ordinary text."""

    def __init__(self, folder: Path) -> None:
        tokenizers = _library("tokenizers")
        vocab, merges = _first_pair(folder, [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
        try:
            model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{vocab} and {merges} are not a GPT-2 vocabulary: {error}") from error
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.eod_id: int | None = self._tokenizer.token_to_id("<|endoftext|>")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def _first_pair(folder: Path, pairs: list[tuple[str, str]]) -> tuple[Path, Path]:
    for first, second in pairs:
        if (folder / first).is_file() and (folder / second).is_file():
            return folder / first, folder / second
    raise DataError(f"{folder} holds neither {' nor '.join(' and '.join(pair) for pair in pairs)}")


class HuggingFaceTokenizer:
    """Any tokenizer.json. As in transformers, special tokens written out in a text are recognised.

    The end of document is ``eos_token`` of the tokenizer_config.json beside it, else the usual name it contains.
    """

    USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")

    def __init__(self, path: Path) -> None:
        tokenizers = _library("tokenizers")
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path} is not a tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod_id: int | None = self._find_end(path.with_name("tokenizer_config.json"))

    def _find_end(self, config: Path) -> int | None:
        names: tuple[str, ...] = self.USUAL_ENDS
        if config.is_file():
            try:
                eos = json.loads(config.read_text("utf-8")).get("eos_token")
            except (ValueError, AttributeError, RecursionError) as error:
                raise DataError(f"{config} is not a JSON object: {error}") from error
            eos = eos.get("content") if isinstance(eos, dict) else eos
            if eos is not None and not isinstance(eos, str):
                raise DataError(f"{config}: eos_token is no text of a token")
            names = (eos,) if eos else names
        ids = [self._tokenizer.token_to_id(name) for name in names]
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


class SentencePieceTokenizer:
    """A sentencepiece model; ids are exactly SentencePieceProcessor's. The end of document is its eos piece."""

    def __init__(self, path: Path) -> None:
        sentencepiece = _library("sentencepiece")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path} is not a sentencepiece model: {error}") from error
        self.vocab_size: int = self._processor.vocab_size()
        eos = self._processor.eos_id()
        self.eod_id: int | None = eos if eos >= 0 else None

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(i) for i in ids])


# How tiktoken's published vocabularies cut text before merging. A .tiktoken file holds only the ranks, so the pattern
# and the end-of-text id follow from their number.
_GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_CL100K_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"""
    r"""\s+(?!\S)|\s+"""
)
_QWEN_PATTERN = _CL100K_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_PUBLISHED: dict[int, tuple[str, str, int]] = {  # ranks: (pattern, name of the end, its id)
    50256: (_GPT2_PATTERN, "<|endoftext|>", 50256),
    50280: (_GPT2_PATTERN, "<|endoftext|>", 50256),
    100256: (_CL100K_PATTERN, "<|endoftext|>", 100257),
    128000: (_CL100K_PATTERN, "<|end_of_text|>", 128001),
    151643: (_QWEN_PATTERN, "<|endoftext|>", 151643),
    199998: (_O200K_PATTERN, "<|endoftext|>", 199999),
}


class TiktokenTokenizer:
    """A .tiktoken file. Published ones are told by their number of ranks; any other is cut as cl100k_base is, and its
    end of document follows the last rank."""

    def __init__(self, path: Path) -> None:
        tiktoken = _library("tiktoken")
        ranks = _read_ranks(path)
        after_last = max(ranks.values()) + 1
        pattern, name, self.eod_id = _PUBLISHED.get(len(ranks), (_CL100K_PATTERN, "<|endoftext|>", after_last))
        self._encoding = tiktoken.Encoding(
            path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens={name: self.eod_id}
        )
        self.vocab_size: int = self._encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([int(i) for i in ids], errors="replace")


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is not a .tiktoken file of lines 'base64 rank': {error}") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(f"{path} has no rank for byte {missing[0]}: it is cut short or is no .tiktoken file")
    return ranks
