"""Weights out of an engine or its checkpoints, under DeepSpeed's names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megazero.checkpoint import open_checkpoint
from megazero.foreign.consolidate import consolidate


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
    """The float32 weights of a checkpoint of an engine's, tied ones under every name, and its buffers."""
    with open_checkpoint(Path(checkpoint_dir) / tag if tag else checkpoint_dir) as checkpoint:
        found = {name: checkpoint.read("weight", name) for name in checkpoint.parameters}
        prefix = "buffer/"
        for key, value in checkpoint.rank_state(0).items():
            if key.startswith(prefix):
                found[key.removeprefix(prefix)] = value
        tied = checkpoint.meta.get("tied", {})
        return found | {name: found[first] for name, first in tied.items() if first in found}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """``model``, on the CPU, with the float32 weights of a checkpoint. It leaves the engine that it may be in."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
) -> None:
    """Write model.safetensors, float32, to ``output_dir``."""
    consolidate(Path(checkpoint_dir) / tag if tag else checkpoint_dir, output_dir, "float32", max_shard_size)
