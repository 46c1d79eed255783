"""float32 state in fewer bits, and back. Bit patterns are little-endian, as on every machine that torch runs on."""

from __future__ import annotations

import random
import zlib

import torch

OFFSETS = 2**16


class Noise:
    """What rounds at random: 16 random bits for each of up to ``numel`` elements, a table read from a place that is
    drawn anew for every piece and step from what they are, so that a resumed run draws the same."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0x0FF10AD)
        self._table = torch.randint(2**16, (numel + OFFSETS,), dtype=torch.int32, generator=generator)

    def of(self, numel: int, *what: object) -> torch.Tensor:
        start = random.Random(zlib.crc32(repr(what).encode())).randrange(OFFSETS)
        return self._table[start : start + numel]


def round_at_random(values: torch.Tensor, noise: torch.Tensor, out: torch.Tensor) -> None:
    """float32 → bfloat16, up or down with the probability that makes the mean right; ``values`` are lost.

    Rounding to the nearest would lose every change smaller than half of the last place, 1/512: of a second moment with
    beta2 0.999, all of its decay.
    """
    bits = values.view(torch.int32).add_(noise)
    out.view(torch.int16).copy_(_upper(bits))


def split(values: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor) -> None:
    """float32 → the nearest bfloat16 (halves away from zero) and what it lacks, int16; ``values`` are lost."""
    bits = values.view(torch.int32)
    lower.copy_(bits.view(torch.int16)[::2])  # what is missing, modulo 2^16: below zero where it was rounded up
    upper.view(torch.int16).copy_(_upper(bits.add_(0x8000)))


def join(upper: torch.Tensor, lower: torch.Tensor, out: torch.Tensor) -> None:
    """What ``split`` was given."""
    bits = out.view(torch.int32)
    bits.copy_(upper.view(torch.int16)).bitwise_left_shift_(16).add_(lower)


def _upper(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.int16)[1::2]
