"""megazero.initialize against a plain float64 loop: every stage gives the same losses, norms and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.foreign.models import ADAMW, Odd, config, plain, trained


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


def check(found: list, wanted: tuple, loss: float = 2e-6, norm: float = 5e-5, weights: float = 1e-4) -> None:
    for losses, norms, values in found:
        assert losses == pytest.approx(wanted[0], rel=loss)
        assert norms == pytest.approx(wanted[1], rel=norm)
        assert values.keys() == wanted[2].keys()
        for name, value in values.items():
            error = (value.double() - wanted[2][name]).norm()
            assert error <= weights * wanted[2][name].norm(), (name, float(error))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_agree_with_a_plain_loop(ranks: Callable, stage: int, accumulation: int) -> None:
    wanted = plain(Odd, adamw, 3, accumulation, 2, clip=0.5)
    found = ranks(2, trained, Odd, config(stage, accumulation, 0.5, optimizer=ADAMW), 3)
    check(found, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_three_ranks_and_one(ranks: Callable, stage: int) -> None:
    for world in (1, 3):
        wanted = plain(Odd, adamw, 2, 2, world, clip=0.0)
        check(ranks(world, trained, Odd, config(stage, 2, 0.0, optimizer=ADAMW), 2), wanted)
