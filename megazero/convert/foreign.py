"""What the readers of Megatron's and DeepSpeed's checkpoints share: pickles read as data, tensors in parts.

[Note: inert pickles]
These files are pickles, which may name any function. Each name that is not torch's own way to say "tensor" becomes a
class that only keeps what it is given, so a file can describe things but nothing of it ever runs.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.checkpoint.manifest import uncovered
from megazero.checkpoint.writer import ChunkData, row_runs
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig
from megazero.sharding import Rectangle

MOMENTS = ("exp_avg", "exp_avg_sq")


class Inert:
    """Stands for an object of a class that is not loaded: its attributes, and what it was made with (``arguments``)."""

    arguments: tuple[Any, ...] = ()

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, Mapping):
            self.__dict__.update(state)


def load_tensors(path: Path) -> Any:
    """What torch.save wrote, on the CPU; see [Note: inert pickles]. Tensors are mapped from the file and must not be
    changed, but for files older than torch 1.6, which are read whole. Raises ConvertError where it cannot be read."""
    try:
        zipped = zipfile.is_zipfile(path)
        inert = [(_inert(name), name) for name in sorted(_unknown_names(path, zipped))]
        with torch.serialization.safe_globals(inert):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except FileNotFoundError:
        raise ConvertError(f"{path}: missing; copy the whole checkpoint") from None
    except pickle.UnpicklingError as error:
        raise ConvertError(f"{path}: damaged, or made to run code ({str(error).splitlines()[-1].strip()})") from error
    except Exception as error:
        raise ConvertError(f"{path}: damaged or cut short: {str(error).splitlines()[0]}; copy it again") from error


def _inert(name: str) -> type[Inert]:
    return type(name.rpartition(".")[2], (Inert,), {})


def _unknown_names(path: Path, zipped: bool) -> set[str]:
    if zipped:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    names: set[tuple[str, str]] = set()
    with path.open("rb") as file:
        # Magic number, version, system, the object, its storages' keys: a pickle each.
        for _ in range(5):
            names.update(tuple(arg.split(" ")) for code, arg, _ in pickletools.genops(file) if code.name == "GLOBAL")
    # As Python 2 called them: pickles of that version still do.
    modules = {"__builtin__": "builtins", "copy_reg": "copyreg"}
    found = {f"{modules.get(module, module)}.{name}" for module, name in names}
    return {name for name in found if not name.startswith("torch") and name != "collections.OrderedDict"}


class _Unpickler(pickle.Unpickler):
    """See [Note: inert pickles]."""

    def find_class(self, module: str, name: str) -> Any:
        value = getattr(torch, name, None)
        if module == "torch" and isinstance(value, torch.dtype):
            return value
        if module == "builtins" and name in ("set", "frozenset"):
            return {"set": set, "frozenset": frozenset}[name]
        known = {("torch", "Size"): tuple, ("collections", "OrderedDict"): OrderedDict}
        return known.get((module, name)) or _inert(name)


def load_pickle(path: Path) -> Any:
    """What pickle wrote, without tensors. Raises ConvertError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except FileNotFoundError:
        raise ConvertError(f"{path}: missing; copy the whole checkpoint") from None
    except Exception as error:
        raise ConvertError(f"{path}: damaged or cut short: {error}; copy it again") from error


class Part(NamedTuple):
    """A box of a tensor and how to get it: ``read()`` gives a tensor of the box's shape, not to be changed."""

    box: Rectangle
    read: Callable[[], torch.Tensor]


class Assembled:
    """A tensor whose boxes are in several places. ConvertError where no part holds some of it, naming ``name``."""

    def __init__(self, where: Path, name: str, shape: tuple[int, ...], parts: list[Part]) -> None:
        self.shape, self.parts = shape, parts
        missing = uncovered(whole_box(shape), (part.box for part in parts))
        if missing:
            raise ConvertError(
                f"{where}: {name} has shape {list(shape)} by the settings saved with it, but its files do not hold "
                f"{list(missing[0].shape)} of it at {list(missing[0].offsets)}; a rank's file is of another checkpoint"
            )

    def read(self, box: Rectangle) -> torch.Tensor:
        """Float32, the caller's own."""
        result = torch.empty(box.shape, dtype=torch.float32)
        for part in self.parts:
            common = box.intersect(part.box)
            if common is not None:
                result[common.within(box)] = part.read()[common.within(part.box)].float()
        return result


def whole_box(shape: tuple[int, ...]) -> Rectangle:
    return Rectangle((0,) * len(shape), shape)


@dataclass(frozen=True)
class TrainingState:
    """What training goes on from, where a foreign checkpoint has all of it.

    ``step``, ``consumed_samples``: as ``program`` counted them. ``optimizer_steps``: Adam's own count.
    ``read``: (kind, global name, box) → float32 of the kinds weight, exp_avg and exp_avg_sq.
    """

    program: str
    config: ModelConfig
    parameters: dict[str, tuple[int, ...]]
    step: int
    consumed_samples: int
    optimizer_steps: int
    read: Callable[[str, str, Rectangle], torch.Tensor]

    def chunks(self) -> Iterator[ChunkData]:
        """All of it, in boxes as the writer wants them, made when their turn comes."""
        for kind in ("weight", *MOMENTS):
            for name, shape in self.parameters.items():
                for box in row_runs(whole_box(shape)):
                    yield ChunkData(kind, name, box, shape, partial(self.read, kind, name, box))

    def meta(self) -> dict[str, Any]:
        """What a run that resumes wants to know; the order of samples was another program's."""
        return {
            "model": self.config.model_dump(mode="json"),
            "config": {"data": {}},
            # Unlike any of ours, since there are no random states to go on from.
            "layout": {"by": self.program},
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "optimizer_steps": self.optimizer_steps,
            "loss_scale": None,
            "loss_scale_good_steps": None,
            "run_id": None,
        }


def named_folder(root: Path, pointer: str, folder: Callable[[str], str]) -> Path | None:
    """The folder that the file ``root/pointer`` names, None where there is no such file; ConvertError otherwise."""
    path = root / pointer
    if not path.is_file():
        return None
    try:
        name = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConvertError(f"{path}: cannot be read: {error}") from None
    if not name:
        raise ConvertError(f"{path}: is empty; write the folder's name there, or give the folder itself")
    found = root / folder(name)
    if os.path.basename(name) != name or not found.is_dir():
        raise ConvertError(f"{path}: says {name!r}, but there is no folder {found}; give the folder to take instead")
    return found


def listed(names: list[str], limit: int = 4) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
