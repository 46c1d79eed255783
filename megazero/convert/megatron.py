"""Weights, and where it is whole the optimizer's state, of a Megatron-Core checkpoint: torch_dist or mp_rank folders.

Megatron pads the vocabulary to a multiple of its ranks and has the padding's rows in its softmax, so they are kept:
``vocab_size`` is args.padded_vocab_size. Give ``config`` to cut them off.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megazero.convert import megatron_dist, megatron_legacy
from megazero.convert.configs import read_config, shapes_of
from megazero.convert.foreign import MOMENTS, Assembled, Part, TrainingState, listed, named_folder, whole_box
from megazero.convert.megatron_args import read_args
from megazero.convert.megatron_dist import DistributedFiles, is_distributed
from megazero.convert.megatron_legacy import LegacyFiles
from megazero.convert.megatron_names import fused_shape, source
from megazero.convert.tensor_files import read_json
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig
from megazero.sharding import Rectangle

_POINTER = "latest_checkpointed_iteration.txt"
# What may differ between a config.json and the saved arguments: neither the weights nor the loss depend on it.
_FREE = {"vocab_size", "dropout", "attention_dropout", "init_std", "max_position_embeddings"}


def is_megatron(path: Path) -> bool:
    """Whether Megatron wrote the folder, or it holds iterations that it wrote."""
    return (path / _POINTER).is_file() or _is_iteration(path) or any(map(_is_iteration, path.glob("iter_*")))


def _is_iteration(path: Path) -> bool:
    return is_distributed(path) or any(
        (*path.glob("mp_rank_*/model_optim_rng.pt"), *path.glob("mp_rank_*/model_rng.pt"))
    )


class MegatronWeights:
    """A Megatron checkpoint: the folder of a run (its latest iteration is taken), or of one iteration.

    ``config``: the architecture, of the saved arguments; ``parameters``: global name → global shape. ``training``:
    what a run can go on from, None where the files do not have all of it; ``notes``: lines on what was left out.
    ``config_json``: a Hugging Face config.json or its folder, whose architecture is taken instead of the arguments'.

    Weights are the optimizer's float32 masters where there are any. A distributed checkpoint is read chunk by chunk,
    all chunks of one fused tensor held at a time; legacy files are mapped. Raises ConvertError for what cannot be
    taken, naming the file, the argument or the tensor.
    """

    end_of_text: int | None = None

    def __init__(self, path: str | os.PathLike[str], config_json: str | os.PathLike[str] | None = None) -> None:
        self.folder = _iteration(Path(path))
        distributed = is_distributed(self.folder)
        common = (megatron_dist if distributed else megatron_legacy).read_common(self.folder)
        self.config = self._config(common.get("args"), config_json)
        self._files: DistributedFiles | LegacyFiles = (
            DistributedFiles(self.folder) if distributed else LegacyFiles(self.folder, common.get("args"), self.config)
        )
        self.parameters = shapes_of(self.config, len(self._files.parts), str(self.folder))
        self._sources = {name: source(name, shape, self.config) for name, shape in self.parameters.items()}
        self._shapes = {
            self._sources[name].name: fused_shape(name, shape, self.config) for name, shape in self.parameters.items()
        }
        self._tensors = {"weight": self._assemble("weight")}
        for kind in ("master", *MOMENTS):
            if all(self._fits(kind, name) for name in self._shapes):
                self._tensors[kind] = self._assemble(kind)
        self._refuse_others()
        self.notes: tuple[str, ...] = ()
        self.training = self._training(common)

    def dtype_of(self, name: str) -> torch.dtype:
        """Float32: a tensor may be put together from files of several dtypes."""
        return torch.float32

    def read(self, name: str, box: Rectangle | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A box of a global tensor, or the whole of it: on the CPU, the caller's own."""
        kind = "master" if "master" in self._tensors else "weight"
        return self.read_as(kind, name, box or whole_box(self.parameters[name])).to(dtype)

    def read_as(self, kind: str, name: str, box: Rectangle) -> torch.Tensor:
        """A box in float32: of weight, as the model has it, or where they are there of master, exp_avg, exp_avg_sq."""
        rows = self._sources[name]
        stored = self._tensors[kind][rows.name]
        result, row, end = torch.empty(box.shape, dtype=torch.float32), box.offsets[0], box.offsets[0] + box.shape[0]
        while row < end:
            group, inside = divmod(row, rows.run)
            count = min(rows.run - inside, end - row)
            theirs = Rectangle((rows.start + group * rows.stride + inside, *box.offsets[1:]), (count, *box.shape[1:]))
            result[row - box.offsets[0] : row - box.offsets[0] + count] = stored.read(theirs)
            row += count
        return result

    def _config(self, args: Any, config_json: str | os.PathLike[str] | None) -> ModelConfig:
        where = str(self.folder)
        if config_json is None:
            if args is None:
                raise ConvertError(
                    f"{where}: holds no args, so the architecture is not known; give it as a Hugging Face config.json"
                )
            return read_args(args, where)
        saved = None if args is None else read_args(args, where, complete=False)
        path = Path(config_json)
        path = path / "config.json" if path.is_dir() else path
        given = read_config(read_json(path, f"{path}: missing"), str(path))[1]
        if saved is not None:
            fields = [name for name in ModelConfig.model_fields if getattr(saved, name) != getattr(given, name)]
            if differing := [f"{f} ({getattr(given, f)}, not {getattr(saved, f)})" for f in fields if f not in _FREE]:
                raise ConvertError(f"{path}: differs from the args in {where}: {listed(differing)}")
        return given

    def _assemble(self, kind: str) -> dict[str, Assembled]:
        missing = [name for name in self._shapes if (kind, name) not in self._files.parts]
        if missing:
            raise ConvertError(f"{self.folder}: tensors missing for a model of its args: {listed(missing)}")
        for name, shape in self._shapes.items():
            if not self._fits(kind, name):
                stored = _shape(self._files.parts[kind, name])
                raise ConvertError(
                    f"{self.folder}: {name} has shape {list(stored)}, {list(shape)} follows from the architecture"
                )
        parts = self._files.parts
        return {name: Assembled(self.folder, name, shape, parts[kind, name]) for name, shape in self._shapes.items()}

    def _fits(self, kind: str, name: str) -> bool:
        """Whether there is a tensor of the shape that follows from the architecture; a vocabulary may be padded."""
        shape, stored = self._shapes[name], _shape(self._files.parts.get((kind, name), []))
        padded = name in ("embedding.word_embeddings.weight", "output_layer.weight")
        return len(stored) == len(shape) and stored[padded:] == shape[padded:] and stored[0] >= shape[0]

    def _refuse_others(self) -> None:
        known = set(self._shapes)
        if self.config.tie_word_embeddings:
            known.add("output_layer.weight")
        unknown = sorted(name for kind, name in self._files.parts if kind == "weight" and name not in known)
        if unknown:
            raise ConvertError(
                f"{self.folder}: tensors that a model of its args does not have: {listed(unknown)}; "
                "megazero has no module for them"
            )

    def _training(self, common: dict[str, Any]) -> TrainingState | None:
        if not all(kind in self._tensors for kind in MOMENTS):
            legacy = isinstance(self._files, LegacyFiles)
            why = "in mp_rank files it is not read" if legacy else "there are no moments"
            if self._files.bucketed or any(kind in MOMENTS for kind, _ in self._files.parts):
                why = (
                    "it is not saved parameter by parameter; save once more in Megatron-LM with "
                    "--dist-ckpt-optim-fully-reshardable"
                )
            self.notes = (f"weights only: the optimizer's state is not taken: {why}",)
            return None
        args, optimizer_steps = common.get("args"), _adam_steps(common.get("optimizer"))
        step = common.get("iteration", getattr(args, "iteration", None))
        if optimizer_steps is None or step is None:
            missing = "step of the optimizer" if optimizer_steps is None else "iteration"
            raise ConvertError(f"{self.folder / 'common.pt'}: has moments but no {missing}; it is damaged")
        samples = getattr(args, "consumed_train_samples", 0) or 0
        return TrainingState(
            "Megatron", self.config, self.parameters, int(step), int(samples), optimizer_steps, self._state
        )

    def _state(self, kind: str, name: str, box: Rectangle) -> torch.Tensor:
        return self.read(name, box) if kind == "weight" else self.read_as(kind, name, box)


def _shape(parts: list[Part]) -> tuple[int, ...]:
    """Of the tensor whose boxes these are."""
    return tuple(max(o + n for o, n in ends) for ends in zip(*(zip(p.box.offsets, p.box.shape) for p in parts)))


def _adam_steps(tree: Any) -> int | None:
    """The first ``step`` or ``common_step`` in the optimizer's state, however deep it is nested."""
    if isinstance(tree, dict):
        for key in ("step", "common_step"):
            if isinstance(tree.get(key), int | float | torch.Tensor):
                return int(tree[key])
        tree = list(tree.values())
    if isinstance(tree, list):
        return next((found for value in tree if (found := _adam_steps(value)) is not None), None)
    return None


def _iteration(path: Path) -> Path:
    """The folder of the iteration to take."""
    if _is_iteration(path):
        return path
    found = named_folder(path, _POINTER, lambda name: f"iter_{name:>07}" if name.isdigit() else name)
    if found is None:
        there = sorted(folder for folder in path.glob("iter_*") if _is_iteration(folder))
        if len(there) != 1:
            raise ConvertError(
                f"{path}: has no {_POINTER} and the iterations {listed([folder.name for folder in there])}; "
                "give the folder of the one to take"
            )
        return there[0]
    if not _is_iteration(found):
        raise ConvertError(
            f"{found}: holds neither .metadata (torch_dist) nor mp_rank_*/model_optim_rng.pt; copy the whole checkpoint"
        )
    return found
