"""A megazero checkpoint, of any layout, into a directory that transformers loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import files, open_checkpoint
from megazero.convert.configs import choose_family, write_config
from megazero.convert.families import Source
from megazero.convert.importer import refuse_non_empty
from megazero.convert.weights import CheckpointWeights
from megazero.errors import ConvertError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_SIZE = "5GB"
# What transformers and its kin read a tokenizer from.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

# The (global name, source, global shape) that make up one Hugging Face tensor.
Parts = list[tuple[str, Source, tuple[int, ...]]]


def export(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "float32",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes config.json and model.safetensors, in shards with an index where larger than ``max_shard_size``.

    ``checkpoint``: one, or a directory of some (its newest). ``target`` must be missing or empty and appears
    at once, whole. ``tokenizer``: a directory or file whose tokenizer files go along. Tensors are written one
    at a time. Raises ConvertError where the model is of no family there, a value does not fit the dtype, or a
    path cannot be used; CheckpointError where the checkpoint is damaged.
    """
    target = Path(target)
    if dtype not in DTYPES:
        raise ConvertError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    limit = parse_size(max_shard_size)
    refuse_non_empty(target)
    carried = _tokenizer_files(tokenizer)
    with open_checkpoint(checkpoint) as opened:
        weights = CheckpointWeights(opened)
        family, config = choose_family(weights.config)
        settings = write_config(family, config, dtype, _end_of_text(opened.meta))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        except OSError as error:
            raise ConvertError(f"{target}: cannot be written: {error.strerror}; choose another") from error
        try:
            scratch.chmod(0o755)
            _write_shards(scratch, weights, family.tensors(config), DTYPES[dtype], limit)
            for source, name in carried:
                shutil.copyfile(source, scratch / name)
            files.write_file(scratch / "config.json", _json(settings))
            files.sync_directory(scratch)
            os.rename(scratch, target)
            files.sync_directory(target.parent)
        except OSError as error:
            raise ConvertError(f"{error.filename or target}: the export failed: {error.strerror}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def parse_size(size: int | str) -> int:
    """Bytes of e.g. 1000000, "500MB" or "2GiB"; ConvertError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(size).strip().upper())
    value = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if value <= 0:
        raise ConvertError(f"max-shard-size {size!r} is not a size; give one like 5GB or 500MB")
    return value


def _end_of_text(meta: dict[str, Any]) -> int | None:
    """The end-of-document token, where the checkpoint was imported with one or trained with one set."""
    trained = meta.get("config", {}).get("data", {}).get("eod_id")
    return meta.get("eod_id") if trained is None else trained


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _write_shards(
    directory: Path, weights: CheckpointWeights, tensors: dict[str, Parts], dtype: torch.dtype, limit: int
) -> None:
    shards: list[list[str]] = [[]]
    size = total = 0
    shapes = {name: parts[0][1].shape(parts[0][2]) for name, parts in tensors.items()}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and size + count > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + count, total + count
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [
            files.Entry(name, dtype, shapes[name], partial(_assemble, weights, name, tensors[name], dtype))
            for name in names
        ]
        files.write_safetensors(directory / file, entries)
        index.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        contents = {"metadata": {"total_size": total}, "weight_map": index}
        files.write_file(directory / "model.safetensors.index.json", _json(contents))


def _assemble(weights: CheckpointWeights, name: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    """One Hugging Face tensor. A bias that the model does not have is zeros."""
    values = [
        weights.read(ours) if ours in weights.parameters else torch.zeros(shape)
        for ours, _, shape in sorted(parts, key=lambda part: part[1].part)
    ]
    value = torch.cat(values) if len(values) > 1 else values[0]
    if parts[0][1].transposed:
        value = value.t()
    result = value.to(dtype)
    if not torch.equal(result.isfinite(), value.isfinite()):
        raise ConvertError(f"{name} has values up to {value.abs().max():.3g}, too large for {dtype}; use bfloat16")
    return result


def _tokenizer_files(tokenizer: str | os.PathLike[str] | None) -> list[tuple[Path, str]]:
    """(file, name in the target) of what is to be carried."""
    if tokenizer is None:
        return []
    path = Path(tokenizer)
    if path.is_file():
        # The names that transformers looks for; a SentencePiece model may have any.
        return [(path, "tokenizer.model" if path.suffix == ".model" else path.name)]
    found = [(path / name, name) for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not found:
        raise ConvertError(f"{path}: no tokenizer there; give a directory with one of {', '.join(_TOKENIZER_FILES)}")
    return found
