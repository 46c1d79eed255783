"""Weights out of an engine or its checkpoints, under DeepSpeed's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megazero.checkpoint import open_checkpoint
from megazero.errors import CheckpointError
from megazero.foreign.consolidate import consolidate, weights_of
from megazero.foreign.shared_state import buffers
from megazero.zero.homes import home_of, leave


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Tensors of nested mappings, tuples and lists as copies on ``device`` that hold no more than themselves: those of
    an engine are views of its buffers. What shares values still does."""
    copies: dict[tuple, torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
            if place not in copies or not value.numel():
                copies[place] = value.detach().to(device, copy=True).contiguous()
            return copies[place]
        if isinstance(value, Mapping):
            return type(value)((name, copied(inner)) for name, inner in value.items())
        if isinstance(value, tuple | list):
            return type(value)(copied(inner) for inner in value)
        return value

    return copied(item)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The float32 weights of a checkpoint of an engine's, tied ones under every name, and its buffers.

    Raises ConvertError where it was saved without what is asked for. ``lazy_mode`` changes nothing.
    """
    with open_checkpoint(Path(checkpoint_dir) / tag if tag else checkpoint_dir) as checkpoint:
        found = {name: checkpoint.read("weight", name) for name in weights_of(checkpoint, exclude_frozen_parameters)}
        found |= buffers(checkpoint)
        tied = checkpoint.meta.get("tied", {})
        return found | {name: found[first] for name, first in tied.items() if first in found}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """``model``, on the CPU, with the float32 weights of a checkpoint in its dtype. It leaves the engine it may be in.

    Raises CheckpointError where the checkpoint lacks a weight or has it in another shape, before anything is changed.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    for name, parameter in model.named_parameters():
        told = f"no {name}" if name not in state else f"{name} in the shape {list(state[name].shape)}"
        if name not in state or state[name].shape != parameter.shape:
            raise CheckpointError(f"{checkpoint_dir}: holds {told}; give the model that it was saved with")
    for name, parameter in model.named_parameters():
        if home_of(parameter) is not None:
            leave(parameter)
            parameter.__class__ = nn.Parameter
        parameter.data = state[name].to(parameter.dtype)
    model.cpu().load_state_dict(state, strict=False)  # buffers
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write model.safetensors, float32, to ``output_dir``."""
    source = Path(checkpoint_dir) / tag if tag else checkpoint_dir
    consolidate(source, output_dir, "float32", max_shard_size, exclude_frozen=exclude_frozen_parameters)
