"""From logits to the next token: temperature, top-k, top-p, and random numbers that depend on nothing else."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megazero.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Raises ConfigError that names every field that cannot be.

    ``temperature``: divides the logits; 0 takes the likeliest token. ``top_k``: only the k likeliest (and what ties
    with the last of them); None is all. ``top_p``: only the likeliest, as few as have this probability together
    (Holtzman et al. 2020, arXiv:1904.09751). Applied in this order.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.temperature < math.inf:
            problems.append(("temperature", f"{self.temperature:g} must be at least 0; 0 takes the likeliest token"))
        if self.top_k is not None and self.top_k < 1:
            problems.append(("top_k", f"{self.top_k} must be at least 1, or left out"))
        if not 0 < self.top_p <= 1:
            problems.append(("top_p", f"{self.top_p:g} must be above 0 and at most 1; 1 keeps every token"))
        if problems:
            raise ConfigError(problems)


def uniform(seed: int, prompt: int, position: int) -> float:
    """A number in [0, 1), a pure function of its arguments: of no device, batch or layout."""
    digest = hashlib.sha256(f"{seed}:{prompt}:{position}".encode()).digest()
    # 48 bits: its product with a float64 sum of probabilities is then below that sum.
    return int.from_bytes(digest[:6], "little") / 2**48


def choose(logits_BV: torch.Tensor, sampling: Sampling, uniforms: Sequence[float]) -> torch.Tensor:
    """The token of each row, (B,) int64: the likeliest, or where a row's number falls in its cumulative distribution.

    Tokens are summed in the order of their ids, so that logits that differ by rounding give the same token unless the
    number is within that rounding of a border. -1 where a row holds a logit that is not finite.
    """
    finite_B = logits_BV.isfinite().all(-1)
    if sampling.temperature == 0:
        return torch.where(finite_B, logits_BV.argmax(-1), -1)
    cumulative_BV = probabilities(logits_BV, sampling).cumsum(-1)
    threshold_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)[:, None] * cumulative_BV[:, -1:]
    return torch.where(finite_B, (cumulative_BV <= threshold_B1).sum(-1), -1)


def probabilities(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What a token is drawn from, (B, V) float64; ``temperature`` above 0."""
    # Off the maximum first: a tiny temperature must not overflow.
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled_BV.shape[-1]:
        least_B1 = scaled_BV.topk(sampling.top_k).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -math.inf)
    if sampling.top_p < 1:
        sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
        share_BV = sorted_BV.softmax(-1)
        # What stands before a token; nothing before the first, which therefore always stays.
        dropped_BV = share_BV.cumsum(-1) - share_BV >= sampling.top_p
        scaled_BV = scaled_BV.masked_fill(dropped_BV.scatter(-1, order_BV, dropped_BV), -math.inf)
    return scaled_BV.softmax(-1)
