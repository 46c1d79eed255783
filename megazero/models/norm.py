"""Normalisation. Statistics are taken in float32 (float64 where the input is), whatever the input's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megazero.models.config import ModelConfig


class LayerNorm(nn.Module):
    """Layer normalisation over the last dim (Ba et al. 2016, arXiv:1607.06450). (..., H) → (..., H), same dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dim (Zhang, Sennrich 2019, arXiv:1910.07467), no bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """RMSNorm over each head's features, (..., heads, D) → same, one weight for all heads (Qwen-3).

    A class of its own because a rank that has only some of the heads has only a part of its gradient.
    """


def build_norm(config: ModelConfig) -> LayerNorm | RMSNorm:
    """The norm over the residual stream that the config asks for."""
    kind = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[config.norm]
    return kind(config.hidden_size, config.norm_eps)


AddNorm = Callable[[torch.Tensor, torch.Tensor | None, nn.Module], tuple[torch.Tensor, torch.Tensor]]
"""(T, H), and what a branch adds to it if there is one, and a norm → their sum, and that under the norm."""


def add_norm(x_TH: torch.Tensor, branch_TH: torch.Tensor | None, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """As AddNorm, in plain operations."""
    x_TH = x_TH if branch_TH is None else x_TH + branch_TH
    return x_TH, norm(x_TH)
