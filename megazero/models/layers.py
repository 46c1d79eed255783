"""The matrices of a transformer, as plain modules. Global sizes; no word of how they may be cut.

Activations are x_TH: T = batch x sequence tokens, flattened batch-major, by H features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megazero.models.parts import Part


class ProjectIn(nn.Module):
    """From the residual stream into an inner space: y = x Wᵀ + b, W stacked from named parts.

    Each part is a tensor of its own by name (``<module>.<part>.weight``), so that a fused matrix multiply
    costs nothing in checkpoints. A unit (a head, say) is never cut.
    """

    def __init__(self, in_features: int, parts: Sequence[Part], bias: bool) -> None:
        super().__init__()
        self.in_features, self.parts = in_features, tuple(parts)
        out_features = sum(p.size for p in self.parts)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_TH: torch.Tensor, with_bias: bool = True) -> tuple[torch.Tensor, ...]:
        """(T, in_features) → one (T, part.size) per part. ``with_bias``: false: the caller adds it."""
        y = F.linear(x_TH, self.weight, self.bias if with_bias else None)
        return y.split([p.size for p in self.parts], dim=-1)


class ProjectOut(nn.Module):
    """From an inner space back to the residual stream: y = x Wᵀ + b."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, in_features) → (T, out_features)."""
        return F.linear(x, self.weight, self.bias)


class WordEmbedding(nn.Module):
    """Token ids (T,) → (T, H)."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens_T, self.weight)


class PositionEmbedding(nn.Module):
    """Positions, of one sequence (S,) or of each of T tokens (T,), → (T, H), learned."""

    def __init__(self, max_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.max_positions, self.hidden_size = max_positions, hidden_size
        self.weight = nn.Parameter(torch.empty(max_positions, hidden_size))

    def forward(self, positions: torch.Tensor, tokens: int) -> torch.Tensor:
        return repeat_rows(F.embedding(positions, self.weight), tokens)


class Head(nn.Module):
    """Hidden states (T, H) → logits (T, V)."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TH, self.weight)


def repeat_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """(R, H) → (count, H), R dividing count. Backward adds the repeats up in a fixed order, without a scatter."""
    return rows.expand(count // rows.shape[0], *rows.shape).flatten(0, 1)


def depth_scaled_std(std: float, num_layers: int) -> float:
    """GPT-2's initial standard deviation of projections that add to the residual stream (report, section 2.3)."""
    return std / math.sqrt(2 * num_layers)
