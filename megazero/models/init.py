"""Initial weights: one table, and the same values under every layout."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase

import torch

from megazero.models.config import ModelConfig
from megazero.models.layers import depth_scaled_std

# First match decides. Projections onto the residual stream start smaller the deeper the model is.
_RULES = (
    ("*norm.weight", "ones"),
    ("*.bias", "zeros"),
    ("layers.*.attention.out.weight", "residual"),
    ("layers.*.mlp.down.weight", "residual"),
    ("*.weight", "normal"),
)


def draw(
    config: ModelConfig, name: str, global_shape: tuple[int, ...], seed: int, device: torch.device | str
) -> torch.Tensor:
    """The initial value of the global tensor called ``name``: float32, ``global_shape``, on ``device``.

    A pure function of its arguments and of the kind of device: whoever needs a slice draws the whole and cuts.
    """
    rule = next(rule for pattern, rule in _RULES if fnmatchcase(name, pattern))
    if rule == "ones":
        return torch.ones(global_shape, dtype=torch.float32, device=device)
    if rule == "zeros":
        return torch.zeros(global_shape, dtype=torch.float32, device=device)
    std = depth_scaled_std(config.init_std, config.num_layers) if rule == "residual" else config.init_std
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(global_shape, dtype=torch.float32, device=device)
    return values.normal_(0.0, std, generator=generator)
