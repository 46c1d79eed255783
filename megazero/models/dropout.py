"""Dropout whose mask is a function of the token, not of a random stream.

An element is kept by a hash of (token key, feature, site), in integer arithmetic that every device does
alike. A token's mask is therefore the same wherever the token lives (any slice of the sequence, any
micro-batch, any rank) and whenever it is computed (recomputation needs no saved state).
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import nn

_LOW32 = 0xFFFFFFFF


class Site(IntEnum):
    """Where in the model a mask applies; sites have unrelated masks."""

    EMBEDDING = 1
    ATTENTION = 2
    MLP = 3


class Dropout(nn.Module):
    """Zero a share ``rate`` of the elements and scale the rest by 1 / (1 − rate); nothing in evaluation."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x_TH: torch.Tensor, key_T: torch.Tensor | None) -> torch.Tensor:
        """(T, H) → (T, H). ``key_T``: (T,) int64, keys of the rows at this site."""
        if not self.training or self.rate == 0:
            return x_TH
        assert key_T is not None, "training with dropout needs Context.dropout_key; give build_context the samples"
        keep = keep_mask(key_T, x_TH.shape[1], self.rate)
        return torch.where(keep, x_TH * (1 / (1 - self.rate)), 0.0)


def token_keys(numbers_T: torch.Tensor, seed: int) -> torch.Tensor:
    """Keys (T,) int64 of tokens numbered throughout a run, (T,) int64; one to one, unrelated between seeds."""
    return derive_key(derive_key(numbers_T, seed & _LOW32), (seed >> 32) & _LOW32)


def layer_keys(key_T: torch.Tensor, layers: int) -> torch.Tensor:
    """Context.dropout_key, (T,), → (layers, 2, T): keys at a layer's two sites, of so many layers.

    All together and outside the layers: compiled within one, a key would be made anew for every element of a mask.
    """
    numbers = torch.arange(layers, device=key_T.device)
    sites = torch.arange(Site.ATTENTION, Site.MLP + 1, device=key_T.device)
    return derive_key(derive_key(key_T, numbers[:, None])[:, None], sites[:, None])


def derive_key(key: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
    """Keys for the ``number``-th use of ``key``: one to one in the keys, unrelated between numbers below 2³².

    A tensor of numbers is broadcast against the keys.
    """
    low, high = key & _LOW32, (key >> 32) & _LOW32
    low = _scramble(low ^ (_scramble(number) if isinstance(number, torch.Tensor) else _scramble_int(number)))
    high = _scramble(high ^ low)
    low = _scramble(low ^ high)
    return (high << 32) | low


def keep_mask(key_T: torch.Tensor, features: int, rate: float) -> torch.Tensor:
    """(T, features) bool, True with probability 1 − rate (to 2⁻³²), independent over tokens and features."""
    low, high = (key_T & _LOW32)[:, None], ((key_T >> 32) & _LOW32)[:, None]
    feature = _scramble(torch.arange(1, features + 1, device=key_T.device))
    # Both halves of the key enter, the second between two rounds: were they joined into 32 bits beforehand,
    # a batch of a million tokens would hold pairs with the same mask.
    hashed = _round(low ^ feature, 15, 0x2C1B3C6D)
    hashed = _round(hashed ^ high, 12, 0x297A2D39)
    return (hashed ^ (hashed >> 15)) >= round(rate * 2**32)


def _round(x: torch.Tensor, shift: int, factor: int) -> torch.Tensor:
    # Factors below 2³¹ on 32-bit values: the product fits int64, so no device's overflow rules matter.
    return ((x ^ (x >> shift)) * factor) & _LOW32


def _scramble(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit values (held in int64) that flips each output bit with probability near ½.

    Constants: Wellons, "Prospecting for Hash Functions" (2018).
    """
    x = _round(x, 15, 0x2C1B3C6D)
    x = _round(x, 12, 0x297A2D39)
    return x ^ (x >> 15)


def _scramble_int(x: int) -> int:
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _LOW32
    x = ((x ^ (x >> 12)) * 0x297A2D39) & _LOW32
    return x ^ (x >> 15)
