"""What a checkpoint of any kind holds, tensor by tensor; nothing is read before it is asked for."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import manifest, open_checkpoint
from megazero.convert.hf_reader import HFWeights, read_raw_config
from megazero.convert.tensor_files import open_files

_WIDENED = 2**22
"""Elements that are in float64 at once."""


@dataclass(frozen=True)
class StoredTensor:
    """``kind``: weight, exp_avg or exp_avg_sq. ``dtype``: as stored, in torch's spelling.

    ``boxes``: in how many parts it is stored; ``files``: the names of those that hold them. ``read``: the whole of it,
    on the CPU; raises CheckpointError or ConvertError where its bytes are damaged. ``readable``: its dtype is one of
    torch's; else ``dtype`` is as the file spells it, and reading raises ConvertError.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: int
    files: tuple[str, ...]
    read: Callable[[], torch.Tensor]
    readable: bool = True


@dataclass(frozen=True)
class Contents:
    """``facts``: what is known of the checkpoint as a whole, JSON values, in the order to show them.

    ``has_checksums``: whether reading a tensor checks its bytes. ``check_rest``: reads and checks what belongs to no
    tensor listed (states of single ranks); raises CheckpointError.
    """

    facts: dict[str, Any]
    has_checksums: bool
    tensors: tuple[StoredTensor, ...]
    check_rest: Callable[[], None]


def is_hugging_face(path: str | os.PathLike[str]) -> bool:
    """Whether a path is taken for a Hugging Face directory: it has a config.json."""
    return (Path(path) / "config.json").exists()


def open_contents(path: str | os.PathLike[str]) -> Contents:
    """A megazero checkpoint (the newest, of a directory of some), or a Hugging Face directory of whatever model.

    A Hugging Face directory's tensors have the names, shapes and dtypes of its files. Raises CheckpointError or
    ConvertError.
    """
    return _of_hugging_face(Path(path)) if is_hugging_face(path) else _of_megazero(path)


def open_canonical(path: str | os.PathLike[str]) -> Contents:
    """The same under our names and in our shapes, whichever kind it is; a Hugging Face directory's in float32.

    Raises CheckpointError, or ConvertError also for a family that convert/ does not know.
    """
    if not is_hugging_face(path):
        return _of_megazero(path)
    weights = HFWeights(path)
    tensors = [
        StoredTensor("weight", name, shape, "float32", 1, (), partial(weights.read, name))
        for name, shape in weights.parameters.items()
    ]
    return Contents({"format": "Hugging Face", "path": str(path)}, False, _sorted(tensors), _nothing)


def _of_megazero(path: str | os.PathLike[str]) -> Contents:
    checkpoint = open_checkpoint(path)
    files, meta = checkpoint.contents.files, checkpoint.meta
    # A parameter without elements is in no file.
    holders: dict[tuple[str, str], list[str]] = {("weight", name): [] for name in checkpoint.parameters}
    for file in files:
        for chunk in file.chunks:
            holders.setdefault((chunk.kind, chunk.name), []).append(file.name)
    tensors = [
        StoredTensor(
            kind,
            name,
            checkpoint.parameters[name],
            str(checkpoint.dtype_of(kind, name)).removeprefix("torch."),
            len(held),
            tuple(dict.fromkeys(held)),
            partial(checkpoint.read, kind, name),
        )
        for (kind, name), held in holders.items()
    ]

    def check_rest() -> None:
        for rank in range(len(files)):
            checkpoint.rank_state(rank)

    layout = manifest.within(meta, "layout")
    layout = dict(layout) if isinstance(layout, dict) else {}
    if "config" in meta:
        layout["zero_stage"] = manifest.within(meta, "config", "zero", "stage")
    facts = {
        "format": "megazero checkpoint",
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "consumed_samples": meta.get("consumed_samples"),
        "layout": layout,
        "files": len(files),
        "bytes": sum(file.size for file in files),
        "parameters": sum(map(math.prod, checkpoint.parameters.values())),
        "model": meta.get("model"),
    }
    return Contents(facts, True, _sorted(tensors), check_rest)


def _of_hugging_face(path: Path) -> Contents:
    config = read_raw_config(path)
    stored = open_files(path)
    tensors = [
        StoredTensor(
            "weight",
            name,
            entry.shape,
            str(entry.dtype).removeprefix("torch."),
            1,
            (entry.file.name,),
            partial(entry.read, ...),
            readable=isinstance(entry.dtype, torch.dtype),
        )
        for name, entry in stored.items()
    ]
    files = {entry.file for entry in stored.values()}
    facts = {
        "format": "Hugging Face",
        "path": str(path),
        "model_type": config.get("model_type"),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "elements": sum(math.prod(entry.shape) for entry in stored.values()),
        "model": config,
    }
    return Contents(facts, False, _sorted(tensors), _nothing)


def _nothing() -> None:
    """Everything is in the tensors listed."""


def _sorted(tensors: list[StoredTensor]) -> tuple[StoredTensor, ...]:
    """Weights first, then by name, numbers by their value."""

    def place(tensor: StoredTensor) -> tuple[bool, str, list[str | int]]:
        parts: list[str | int] = re.split(r"(\d{1,18})", tensor.name)
        parts[1::2] = map(int, parts[1::2])
        return tensor.kind != "weight", tensor.kind, parts

    return tuple(sorted(tensors, key=place))


def _widened(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Runs of its elements, one after another, in float64; a complex one counts as two."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    return (run.double() for run in flat.split(_WIDENED))


def norm(tensor: torch.Tensor) -> float:
    """The L2 norm, summed in float64; nan or inf where an element is."""
    total = 0.0
    for wide in _widened(tensor):
        total += torch.dot(wide, wide).item()
    return math.sqrt(total)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The L2 norm of the difference of two tensors of one shape.

    Elements that are the same number, the same infinity or both nan differ by 0; a nan or infinity on one side makes
    the result inf.
    """
    total = 0.0
    if one.is_complex() != other.is_complex():
        one, other = one.to(torch.complex128), other.to(torch.complex128)
    for a, b in zip(_widened(one), _widened(other), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, 0.0, a - b).nan_to_num(math.inf, math.inf, math.inf)
        total += torch.dot(gap, gap).item()
    return math.sqrt(total)
