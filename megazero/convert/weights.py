"""Weights to start a model from, whichever kind of directory they are in."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import pydantic
import torch

from megazero.checkpoint import Checkpoint, manifest, open_checkpoint
from megazero.convert.hf_reader import HFWeights
from megazero.errors import CheckpointError, ConvertError
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes
from megazero.sharding import Rectangle

# Other programs' checkpoints: module of this package, which has is_MODULE(path) and the class.
_FOREIGN = {"megatron": "MegatronWeights", "deepspeed": "DeepSpeedWeights"}


class Weights(Protocol):
    """``config``: the architecture; ``parameters``: global name → global shape; ``end_of_text``: its token, if known.

    Other programs' have ``training`` as well: foreign.TrainingState, None where the optimizer's state is not whole; and
    ``notes``, lines on what was left out.
    """

    config: ModelConfig
    parameters: dict[str, tuple[int, ...]]
    end_of_text: int | None

    def dtype_of(self, name: str) -> torch.dtype:
        """The narrowest of float32, bfloat16 and float16 that a global tensor can be read in as it is stored."""
        ...

    def read(self, name: str, box: Rectangle | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A box of a global tensor, or the whole of it: on the CPU, the caller's own."""
        ...


class CheckpointWeights:
    """The weights of a megazero checkpoint, of any layout."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = model_of(checkpoint)
        checkpoint.check_matches(parameter_shapes(self.config))
        self.parameters = checkpoint.parameters
        trained = manifest.within(checkpoint.meta, "config", "data", "eod_id")
        self.end_of_text: int | None = checkpoint.meta.get("eod_id") if trained is None else trained

    def dtype_of(self, name: str) -> torch.dtype:
        return self.checkpoint.dtype_of("weight", name)

    def read(self, name: str, box: Rectangle | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.checkpoint.read("weight", name, box, dtype)

    def verify(self, boxes: Iterable[tuple[str, Rectangle]]) -> None:
        """Checks the bytes of these boxes before any is used; CheckpointError."""
        self.checkpoint.verify(("weight", name, box) for name, box in boxes)


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    """The architecture that a checkpoint was saved with."""
    saved, where = checkpoint.meta.get("model"), checkpoint.path / manifest.NAME
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where}: meta.model, the architecture, is not in it")
    try:
        config = ModelConfig(**saved)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise CheckpointError(f"{where}: meta.model.{field}: {problem['msg']}") from None
    if config.num_layers > len(checkpoint.parameters):
        raise CheckpointError(
            f"{where}: meta.model.num_layers: {config.num_layers}, but it holds {len(checkpoint.parameters)} tensors"
        )
    return config


def open_weights(path: str | os.PathLike[str], config_json: str | os.PathLike[str] | None = None) -> Weights:
    """A Hugging Face directory, a megazero checkpoint or a directory of some, or another program's checkpoint.

    ``config_json``: for the last, a Hugging Face config.json (or its folder) that says what the model is. Raises
    ConvertError or CheckpointError where it is none of them, or not whole.
    """
    with _readable(path):
        foreign = _open_foreign(path, config_json)
        if foreign is None and not (Path(path) / "config.json").exists():
            return CheckpointWeights(open_checkpoint(path))
        return foreign or HFWeights(path)


def open_source(path: str | os.PathLike[str], config_json: str | os.PathLike[str] | None = None) -> Weights:
    """The same, but not a megazero checkpoint: where it is nothing else, the error says what a directory must have."""
    with _readable(path):
        return _open_foreign(path, config_json) or HFWeights(path)


@contextlib.contextmanager
def _readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """ConvertError for what the system refuses, such as a folder of somebody else's."""
    try:
        yield
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read: {error.strerror} ({error.filename})") from error


def _open_foreign(path: str | os.PathLike[str], config_json: str | os.PathLike[str] | None) -> Weights | None:
    for name, weights in _FOREIGN.items():
        module = importlib.import_module(f"megazero.convert.{name}")
        if getattr(module, f"is_{name}")(Path(path)):
            return getattr(module, weights)(path, config_json)
    if config_json is not None:
        raise ConvertError(
            f"{path}: is no checkpoint of Megatron or DeepSpeed: only these need a config.json elsewhere"
        )
    return None
