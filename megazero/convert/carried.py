"""What a Hugging Face directory holds besides the model and goes along with it: tokenizer and generation settings."""

from __future__ import annotations

import os
from pathlib import Path

from megazero.checkpoint import files
from megazero.errors import ConvertError

FOLDER = "huggingface"
"""Beside the steps of an imported checkpoint."""

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "encoder.json",
    "vocab.bpe",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_GENERATION = ("generation_config.json",)

Carried = dict[str, Path]
"""Name in the target → file."""


def files_of(directory: Path) -> Carried:
    """Those in a directory; none where there is no such directory."""
    return {name: directory / name for name in (*_TOKENIZER, *_GENERATION) if (directory / name).is_file()}


def with_tokenizer(carried: Carried, tokenizer: str | os.PathLike[str] | None) -> Carried:
    """The same with another tokenizer, a directory or a file of one; ConvertError where there is none."""
    if tokenizer is None:
        return carried
    rest = {name: path for name, path in carried.items() if name not in _TOKENIZER}
    path = Path(tokenizer)
    if path.is_file():
        # The names that transformers looks for; a SentencePiece model may have any.
        name = "tokenizer.model" if path.suffix == ".model" else path.name
        if name not in _TOKENIZER:
            raise ConvertError(f"{path}: is no tokenizer by its name; it must be one of {', '.join(_TOKENIZER)}")
        return {**rest, name: path}
    found = {name: file for name, file in files_of(path).items() if name in _TOKENIZER}
    if not found:
        raise ConvertError(f"{path}: no tokenizer there; give a directory with one of {', '.join(_TOKENIZER)}")
    return {**rest, **found}


def copy(carried: Carried, directory: Path) -> None:
    """Into a directory that is there, durably; ConvertError where one cannot be read."""
    for name, path in carried.items():
        try:
            contents = path.read_bytes()
        except OSError as error:
            raise ConvertError(f"{path}: cannot be read: {error.strerror}") from error
        files.write_file(directory / name, contents)
