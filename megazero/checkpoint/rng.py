"""The state of torch's random generators on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megazero.errors import CheckpointError


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """By the names that a checkpoint has it under: the CPU's, and the GPU's where ``device`` is one."""
    state = {"rng_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["rng_cuda"] = torch.cuda.get_rng_state(device)
    return state


def check_rng_state(state: Mapping[str, torch.Tensor], where: Path) -> None:
    """CheckpointError unless ``set_rng_state`` can take what the checkpoint at ``where`` holds."""
    try:
        torch.Generator().set_state(state["rng_cpu"])
    except (KeyError, TypeError, RuntimeError):
        raise CheckpointError(f"{where}: the state of a rank's random generator is not as it was written") from None


def set_rng_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """The reverse; a state saved on the CPU alone leaves a GPU's generator as it is."""
    torch.set_rng_state(state["rng_cpu"])
    if device.type == "cuda" and "rng_cuda" in state:
        torch.cuda.set_rng_state(state["rng_cuda"], device)
