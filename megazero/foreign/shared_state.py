"""What a checkpoint of an engine's holds beside weights and moments, for whoever loads it: buffers, and state that an
optimizer keeps in other shapes. Each is with the first of the ranks that had it."""

from __future__ import annotations

import torch

from megazero.checkpoint import Checkpoint

BUFFER, OPTIMIZER = "buffer/", "optimizer/"


def shared_shapes(checkpoint: Checkpoint, prefix: str) -> dict[str, tuple[int, ...]]:
    """Name, without the prefix → shape."""
    return {
        key.removeprefix(prefix): shape for key, (_, shape) in _places(checkpoint).items() if key.startswith(prefix)
    }


def shared_state(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All of it, by names with the prefix. Of a pipeline's stages each has its own."""
    places = _places(checkpoint)
    found: dict[str, torch.Tensor] = {}
    for rank in sorted({rank for rank, _ in places.values()}):
        found |= {
            key: value for key, value in checkpoint.rank_state(rank).items() if places.get(key, (None,))[0] == rank
        }
    return found


def buffers(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Those of the module, by name."""
    state = shared_state(checkpoint)
    return {key.removeprefix(BUFFER): value for key, value in state.items() if key.startswith(BUFFER)}


def _places(checkpoint: Checkpoint) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Key → (rank, shape)."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for rank in range(checkpoint.world_size):
        for key, shape in checkpoint.state_shapes(rank).items():
            if key.startswith((BUFFER, OPTIMIZER)):
                found.setdefault(key, (rank, shape))
    return found
