"""Weights and AdamW's state of a DeepSpeed checkpoint of a Hugging Face model, ZeRO stages 1 to 3, any number of ranks.

DeepSpeed's files do not say what the model is: its Hugging Face config.json must be given, or lie in the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megazero.checkpoint import manifest
from megazero.convert.configs import read_config, read_tokens, shapes_of
from megazero.convert.deepspeed_files import ZeroFiles
from megazero.convert.families import HEAD
from megazero.convert.foreign import TrainingState, listed, named_folder, whole_box
from megazero.convert.tensor_files import read_json
from megazero.errors import ConvertError
from megazero.sharding import Rectangle

_POINTER = "latest"
_MODEL_FILES = "*mp_rank_*_model_states.pt"
_OTHER_FORMS = ("model.safetensors*", "pytorch_model.bin*", f"*/{manifest.NAME}")


def is_deepspeed(path: Path) -> bool:
    """Whether DeepSpeed wrote the folder, or it holds tags that it wrote, and no model of Hugging Face's or ours."""
    if any(path.glob(_MODEL_FILES)):
        return True
    tagged = (path / _POINTER).is_file() or any(path.glob(f"global_step*/{_MODEL_FILES}"))
    return tagged and not any(next(path.glob(form), None) for form in _OTHER_FORMS)


class DeepSpeedWeights:
    """A DeepSpeed checkpoint: the folder given to save_checkpoint (its latest tag is taken), or that of one tag.

    ``config``: the architecture; ``parameters``: global name → global shape; ``end_of_text``: of config.json.
    ``training``: what a run can go on from, None where the files do not have all of it; ``notes``: lines on what was
    left out. ``config_json``: the model's config.json or its folder; unset: beside the files, or above them.

    Weights are the float32 masters where the optimizer's files are there, else what the model's file has. Files are
    mapped; one tensor is in memory at a time. Raises ConvertError for what cannot be taken, naming file or tensor.
    """

    def __init__(self, path: str | os.PathLike[str], config_json: str | os.PathLike[str] | None = None) -> None:
        self.folder = _tag(Path(path))
        where = _find_config(Path(path), self.folder, config_json)
        raw = read_json(where, f"{where}: missing")
        self.family, self.config = read_config(raw, str(where))
        ends = read_tokens(raw).get("eos_token_id")
        self.end_of_text: int | None = ends[0] if isinstance(ends, list) else ends
        self._files = ZeroFiles(self.folder)
        self.parameters = shapes_of(self.config, len(self._files.shapes), str(where))
        self._sources = {name: self.family.source(name) for name in self.parameters}
        self._stored = self._names()
        self._check(where)
        self.notes: tuple[str, ...] = ()
        self.training = self._training()

    def dtype_of(self, name: str) -> torch.dtype:
        """Float32: a tensor may be put together from files of several dtypes."""
        return torch.float32

    def read(self, name: str, box: Rectangle | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A box of a global tensor, or the whole of it: on the CPU, the caller's own."""
        return self._read("weight", name, box or whole_box(self.parameters[name])).to(dtype)

    def _read(self, kind: str, name: str, box: Rectangle) -> torch.Tensor:
        source, shape = self._sources[name], self.parameters[name]
        slices = [slice(offset, offset + count) for offset, count in zip(box.offsets, box.shape, strict=True)]
        base = source.part * shape[0]
        slices[0] = slice(slices[0].start + base, slices[0].stop + base)
        if source.transposed:
            slices.reverse()
        whole = source.shape(shape)
        row = whole[1] if len(whole) == 2 else 1
        flat = self._files.elements(kind, self._stored[source.name], slices[0].start * row, slices[0].stop * row)
        value = flat.view(-1, *whole[1:])[(slice(None), *slices[1:])]
        return (value.t() if source.transposed else value).contiguous()

    def _names(self) -> dict[str, str]:
        """Name in a Hugging Face model with a head → name in the files, which may have wrappers' prefixes before it."""
        stored = [name for name in self._files.shapes if name not in (self._files.state.get("shared_params") or {})]
        common = os.path.commonprefix(stored)
        common = common[: common.rfind(".") + 1]
        prefix, bare = self.family.prefix, {name.removeprefix(common): name for name in stored}
        if any(name.startswith(prefix) for name in bare):
            bare = {name.removeprefix(prefix): full for name, full in bare.items()}
        if twins := sorted(set(stored) - set(bare.values())):
            raise ConvertError(f"{self._files.model_file}: {twins[0]} is there twice, with and without {prefix}")
        return {
            name if name == HEAD else prefix + name: full
            for name, full in bare.items()
            if not self.family.buffers.fullmatch(name)
        }

    def _check(self, where: Path) -> None:
        wanted = {source.name: source.shape(self.parameters[name]) for name, source in self._sources.items()}
        tied = {HEAD} if self.config.tie_word_embeddings else set()
        for what, names in (
            ("missing", [name for name in wanted if name not in self._stored]),
            ("unexpected", [full for name, full in self._stored.items() if name not in wanted and name not in tied]),
        ):
            if names:
                raise ConvertError(
                    f"{self.folder}: parameters {what} for the {self.family.model_type} model of {where}: "
                    f"{listed(names)}; only whole models of its family can be taken (no adapters, no added modules)"
                )
        for name, shape in wanted.items():
            found = self._files.shapes[self._stored[name]]
            if found != shape:
                raise ConvertError(
                    f"{self._files.model_file}: {self._stored[name]} has shape {list(found)}, {list(shape)} follows "
                    f"from {where}"
                )

    def _training(self) -> TrainingState | None:
        files, state = self._files, self._files.state
        if not all(files.has_moments(self._stored[source.name]) for source in self._sources.values()):
            why = "there are no *_optim_states.pt" if not files.stage else "it is not AdamW's of every parameter"
            self.notes = (f"weights only: the optimizer's state is not taken: {why}",)
            return None
        assert files.steps is not None
        steps, samples = state.get("global_steps"), state.get("global_samples")
        if steps is None:
            raise ConvertError(f"{files.model_file}: has no global_steps")
        return TrainingState(
            "DeepSpeed", self.config, self.parameters, int(steps), int(samples or 0), files.steps, self._read
        )


def _find_config(root: Path, folder: Path, given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        return Path(given) / "config.json" if Path(given).is_dir() else Path(given)
    for place in dict.fromkeys((folder, root, folder.parent)):
        if (place / "config.json").is_file():
            return place / "config.json"
    raise ConvertError(
        f"{folder}: DeepSpeed does not save what the model is: give its Hugging Face config.json, "
        f"or copy it to {root / 'config.json'}"
    )


def _tag(path: Path) -> Path:
    """The folder of the tag to take."""
    if any(path.glob(_MODEL_FILES)):
        return path
    found = named_folder(path, _POINTER, lambda name: name)
    if found is None:
        there = sorted({file.parent for file in path.glob(f"global_step*/{_MODEL_FILES}")})
        if len(there) != 1:
            raise ConvertError(
                f"{path}: has no file 'latest' and the tags {listed([folder.name for folder in there])}; "
                "give the folder of the one to take"
            )
        return there[0]
    return found
