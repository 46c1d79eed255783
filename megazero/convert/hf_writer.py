"""Weights of any kind, a megazero checkpoint of any layout above all, into a directory that transformers loads."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import Checkpoint, files, manifest
from megazero.checkpoint.writer import row_runs
from megazero.convert import carried
from megazero.convert.ahead import Job, ahead
from megazero.convert.configs import choose_family, read_tokens, write_config
from megazero.convert.families import Parts
from megazero.convert.hf_reader import HFWeights
from megazero.convert.importer import Progress
from megazero.convert.target import new_directory, refuse_non_empty
from megazero.convert.weights import CheckpointWeights, Weights, open_weights
from megazero.errors import ConvertError
from megazero.sharding import Rectangle

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_SIZE = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

# Checking and rounding cost more than writing; 256 MiB are four chunks.
_WORKERS, _IN_MEMORY = 2, 256 * 2**20


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    parts: Parts

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def export(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "float32",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    tokenizer: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes config.json and model.safetensors, in shards with an index where larger than ``max_shard_size``.

    ``checkpoint``: whatever open_weights opens. ``target`` must be missing or empty and appears at once, whole.
    ``tokenizer``: a directory or file whose tokenizer files go along; unset: those that came with the import. Tensors
    are written in runs of rows; only a transposed one (GPT-2's) is whole in memory. Raises ConvertError where the model
    is of no family there, a value does not fit the dtype, or a path cannot be used; CheckpointError where the
    checkpoint is damaged.
    """
    if dtype not in DTYPES:
        raise ConvertError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    limit = parse_size(max_shard_size)
    refuse_non_empty(target)
    weights = open_weights(checkpoint)
    origin, along = _origin(weights)
    along = carried.with_tokenizer(along, tokenizer)
    family, config = choose_family(weights.config, origin.get("model_type"))
    end = weights.end_of_text
    tokens = manifest.within(origin, "tokens") or {"bos_token_id": end, "eos_token_id": end}
    settings = write_config(family, config, dtype, read_tokens(tokens))
    tensors = [_Tensor(name, parts[0][1].shape(parts[0][2]), parts) for name, parts in family.tensors(config).items()]
    with new_directory(target) as scratch:
        _write_shards(scratch, _shards(tensors, DTYPES[dtype], limit), weights, DTYPES[dtype], progress)
        carried.copy(along, scratch)
        files.write_file(scratch / "config.json", json_bytes(settings))
    return Path(target)


def parse_size(size: int | str) -> int:
    """Bytes of e.g. 1000000, "500MB" or "2GiB"; ConvertError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(size).strip().upper())
    value = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if value <= 0:
        raise ConvertError(f"max-shard-size {size!r} is not a size; give one like 5GB or 500MB")
    return value


def _origin(weights: Weights) -> tuple[dict[str, Any], carried.Carried]:
    """The model_type and special tokens that the weights had in a Hugging Face directory, and what goes along."""
    if isinstance(weights, HFWeights):
        meta = {"model_type": weights.family.model_type, "tokens": weights.tokens}
        return meta, carried.files_of(weights.directory)
    if isinstance(weights, CheckpointWeights):
        beside = weights.checkpoint.path.parent / carried.FOLDER
        origin = manifest.within(weights.checkpoint.meta, "huggingface")
        return origin if isinstance(origin, dict) else {}, carried.files_of(beside)
    return {}, {}


def json_bytes(value: dict[str, Any]) -> bytes:
    """As transformers writes its files: indented, keys sorted."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _shards(tensors: list[_Tensor], dtype: torch.dtype, limit: int) -> dict[str, list[_Tensor]]:
    """File name → its tensors, in order."""
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        count = tensor.numel * dtype.itemsize
        if shards[-1] and size + count > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += count
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _write_shards(
    directory: Path,
    shards: dict[str, list[_Tensor]],
    weights: Weights,
    dtype: torch.dtype,
    progress: Progress | None,
) -> None:
    reader = _Reader(weights)
    jobs = (job for shard in shards.values() for tensor in shard for job in _pieces(tensor, reader, dtype))
    total = sum(tensor.numel * dtype.itemsize for shard in shards.values() for tensor in shard)
    done = 0
    with contextlib.closing(ahead(jobs, reader.workers, _IN_MEMORY)) as pieces:
        for name, shard in shards.items():
            left = sum(tensor.numel * dtype.itemsize for tensor in shard)
            with open(directory / name, "xb", buffering=0) as file:
                _write(file, memoryview(_header(shard, dtype)))
                while left:
                    data = files.tensor_bytes(next(pieces))
                    _write(file, data)
                    left, done = left - len(data), done + len(data)
                    if progress is not None:
                        progress(done, total)
                os.fsync(file.fileno())
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
        contents = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files.write_file(directory / "model.safetensors.index.json", json_bytes(contents))


def _header(shard: list[_Tensor], dtype: torch.dtype) -> bytes:
    """What stands before the tensors in a safetensors file, padded so that they are aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in shard:
        end = position + tensor.numel * dtype.itemsize
        entries[tensor.name] = {
            "dtype": files.DTYPE_NAMES[dtype],
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def _write(file: io.RawIOBase, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


class _Reader:
    """``read`` for several threads; a checkpoint is opened by each for itself."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self._own = weights, threading.local()
        self.workers = _WORKERS if isinstance(weights, CheckpointWeights) else 1

    def read(self, name: str, box: Rectangle, dtype: torch.dtype) -> torch.Tensor:
        """In ``dtype`` where it is stored so, else in float32. Zeros for a bias that the model does not have."""
        if name not in self._weights.parameters:
            return torch.zeros(box.shape, dtype=dtype)
        dtype = dtype if self._weights.dtype_of(name) == dtype else torch.float32
        if not isinstance(self._weights, CheckpointWeights):
            return self._weights.read(name, box, dtype)
        if not hasattr(self._own, "checkpoint"):
            shared = self._weights.checkpoint
            self._own.checkpoint = Checkpoint(shared.path, shared.contents)
        return self._own.checkpoint.read("weight", name, box, dtype)


def _pieces(tensor: _Tensor, reader: _Reader, dtype: torch.dtype) -> Iterator[Job[torch.Tensor]]:
    """Makes the tensor's bytes, in order."""
    if any(source.transposed for _, source, _ in tensor.parts):
        yield Job(tensor.numel * dtype.itemsize, partial(_transposed, tensor, reader, dtype))
        return
    for name, _, shape in tensor.parts:
        for box in row_runs(Rectangle((0,) * len(shape), shape)):
            yield Job(box.numel * dtype.itemsize, partial(_rounded, tensor.name, name, box, reader, dtype))


def _rounded(
    name: str, ours: str, box: Rectangle, reader: _Reader, dtype: torch.dtype, into: torch.Tensor | None = None
) -> torch.Tensor:
    """A box of ours in the dtype, written to ``into`` where that is given."""
    value = reader.read(ours, box, dtype)
    if value.dtype != dtype:
        largest = torch.stack(torch.aminmax(value)).abs().max()
        # Also true of nan, and of what rounds to the largest number: only then is each value looked at.
        if not largest <= torch.finfo(dtype).max:
            if not torch.equal(value.to(dtype).isfinite(), value.isfinite()):
                raise ConvertError(f"{name} has values up to {largest:.3g}, too large for {dtype}; use bfloat16")
    return value.to(dtype) if into is None else into.copy_(value)


def _transposed(tensor: _Tensor, reader: _Reader, dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty(tensor.shape, dtype=dtype)
    for name, source, shape in tensor.parts:
        for box in row_runs(Rectangle((0,) * len(shape), shape)):
            low = source.part * shape[0] + box.offsets[0]
            _rounded(tensor.name, name, box, reader, dtype, into=result[:, low : low + box.shape[0]].t())
    return result
