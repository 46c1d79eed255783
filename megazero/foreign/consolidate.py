"""An engine's checkpoint, of any number of ranks and any stage, into safetensors files with whole tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megazero.checkpoint import Checkpoint, files, open_checkpoint
from megazero.convert.hf_writer import DTYPES, json_bytes, parse_size
from megazero.convert.target import new_directory, refuse_non_empty
from megazero.errors import ConvertError
from megazero.foreign.shared_state import buffers

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def consolidate(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
    exclude_frozen: bool = False,
) -> Path:
    """Write model.safetensors, in shards with an index where larger than ``max_shard_size``, under the module's names.

    ``source``: a checkpoint, or a directory of some: its latest. ``target`` must be missing or empty and appears whole.
    Weights are the float32 masters, rounded to ``dtype``, those that were trained alone where ``exclude_frozen``;
    buffers keep their dtype. A tied parameter is written under its first name. One tensor at a time is in memory.
    Raises ConvertError and CheckpointError.
    """
    if dtype not in DTYPES:
        raise ConvertError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    limit = parse_size(max_shard_size)
    refuse_non_empty(target)
    with open_checkpoint(source) as checkpoint:
        entries = _entries(checkpoint, DTYPES[dtype], exclude_frozen)
        shards = _shards(entries, limit)
        total = sum(entry.size for entry in entries)
        done = 0
        with new_directory(target) as scratch:
            for name, shard in shards.items():
                files.write_safetensors(scratch / name, shard)
                done += sum(entry.size for entry in shard)
                if progress is not None:
                    progress(done, total)
            if len(shards) > 1:
                weight_map = {entry.key: name for name, shard in shards.items() for entry in shard}
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                files.write_file(scratch / "model.safetensors.index.json", json_bytes(index))
    return Path(target)


def weights_of(checkpoint: Checkpoint, exclude_frozen: bool) -> dict[str, tuple[int, ...]]:
    """Name → shape. ConvertError where the checkpoint is none of an engine's, or lacks what is asked for."""
    if "engine" not in checkpoint.meta:
        raise ConvertError(
            f"{checkpoint.path}: was not saved by an engine of megazero.initialize; tools/convert_checkpoint.py export "
            "is for the trainer's"
        )
    if exclude_frozen:
        trained = (checkpoint.meta["optimizer"] or {}).get("group_of", {})
        return {name: shape for name, shape in checkpoint.parameters.items() if name in trained}
    if missing := checkpoint.meta.get("excluded"):
        raise ConvertError(
            f"{checkpoint.path}: was saved without its {len(missing)} frozen parameters ({missing[0]} first); save it "
            "with exclude_frozen_parameters=False, or ask for the others alone with exclude_frozen_parameters"
        )
    return dict(checkpoint.parameters)


def _entries(checkpoint: Checkpoint, dtype: torch.dtype, exclude_frozen: bool) -> list[files.Entry]:
    """What there is to write, by falling element size."""
    weights = [
        files.Entry(name, dtype, shape, partial(_rounded, checkpoint, name, dtype))
        for name, shape in weights_of(checkpoint, exclude_frozen).items()
    ]
    kept = [files.Entry(name, value.dtype, tuple(value.shape), value) for name, value in buffers(checkpoint).items()]
    return sorted((*weights, *kept), key=lambda entry: -entry.dtype.itemsize)


def _rounded(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    value = checkpoint.read("weight", name)
    rounded = value.to(dtype)
    if not torch.equal(rounded.isfinite(), value.isfinite()):
        raise ConvertError(f"{name} has values up to {value.abs().max():.3g}, too large for {dtype}; use bfloat16")
    return rounded


def _shards(entries: list[files.Entry], limit: int) -> dict[str, list[files.Entry]]:
    """File name → its tensors, in order."""
    shards: list[list[files.Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.size > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}
