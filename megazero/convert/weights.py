"""Weights to start a model from, whichever kind of directory they are in."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import pydantic
import torch

from megazero.checkpoint import Checkpoint, manifest, open_checkpoint
from megazero.convert.hf_reader import HFWeights
from megazero.errors import CheckpointError
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes
from megazero.sharding import Rectangle


class Weights(Protocol):
    """``config``: the architecture; ``parameters``: global name → global shape."""

    config: ModelConfig
    parameters: dict[str, tuple[int, ...]]

    def read(self, name: str, box: Rectangle | None = None) -> torch.Tensor:
        """A box of a global tensor, or the whole of it: float32, on the CPU, the caller's own."""
        ...


class CheckpointWeights:
    """The weights of a megazero checkpoint, of any layout."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = model_of(checkpoint)
        checkpoint.check_matches(parameter_shapes(self.config))
        self.parameters = checkpoint.parameters

    def read(self, name: str, box: Rectangle | None = None) -> torch.Tensor:
        return self.checkpoint.read("weight", name, box)

    def verify(self, boxes: Iterable[tuple[str, Rectangle]]) -> None:
        """Checks the bytes of these boxes before any is used; CheckpointError."""
        self.checkpoint.verify(("weight", name, box) for name, box in boxes)


def model_of(checkpoint: Checkpoint) -> ModelConfig:
    """The architecture that a checkpoint was saved with."""
    saved: Any = checkpoint.meta.get("model")
    if saved is None:
        raise CheckpointError(f"{checkpoint.path / manifest.NAME}: meta.model, the architecture, is not in it")
    try:
        return ModelConfig(**saved)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CheckpointError(f"{checkpoint.path / manifest.NAME}: meta.model.{where}: {problem['msg']}") from None


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """A Hugging Face directory (it has a config.json), or a megazero checkpoint or a directory of some.

    Raises ConvertError or CheckpointError where it is neither, or not whole.
    """
    if (Path(path) / "config.json").exists():
        return HFWeights(path)
    return CheckpointWeights(open_checkpoint(path))
