"""safe_get and safe_set of whole weights, gradients and optimizer state, beside a plain float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import megazero
from megazero.zero import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from tests.foreign.models import ADAMW, Odd, batch, build, config, loss_of
from tests.foreign.test_engine import adamw

CHANGED = "layers.1.up.weight"
Seen = dict[str, torch.Tensor]


def values(name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)


def seen_by_engine(stage: int, accumulation: int) -> Seen:
    """Gradients so far after each backward, and weights and moments after each step; some of them set in between."""
    rank, seen = dist.get_rank(), {}
    engine, *_ = megazero.initialize(
        model=build(Odd, 3 + rank), config=config(stage, accumulation, 0.0, optimizer=ADAMW)
    )
    parameters = dict(engine.module.named_parameters())
    assert safe_get_full_optimizer_state(parameters[CHANGED], "exp_avg") is None
    assert safe_get_full_grad(parameters[CHANGED]) is None
    for step in range(2):
        for micro in range(accumulation):
            engine.backward(engine(batch(step, micro, rank)))
            for name, parameter in parameters.items():
                if parameter.requires_grad:
                    seen[f"{step}.{micro} grad {name}"] = safe_get_full_grad(parameter)
                else:
                    assert safe_get_full_grad(parameter) is None
            engine.step()
        for name, parameter in parameters.items():
            seen[f"{step} weight {name}"] = safe_get_full_fp32_param(parameter)
            if parameter.requires_grad:
                seen[f"{step} exp_avg {name}"] = safe_get_full_optimizer_state(parameter, "exp_avg")
        assert safe_get_full_optimizer_state(parameters["scale"], "step") == step + 1
        if step == 0:
            for name in (CHANGED, "embed.weight", "scale"):
                given = values(name, parameters[name]) + (0 if rank == 0 else 1)  # the first rank's count
                safe_set_full_fp32_param(parameters[name], given)
                safe_set_full_optimizer_state(parameters[name], given / 10, "exp_avg")
    seen["loss"] = loss_of(engine, batch(5, 0, 0)).detach()
    with pytest.raises(megazero.MegazeroError, match=r"'exp_average'; it keeps exp_avg, exp_avg_sq, step"):
        safe_get_full_optimizer_state(parameters[CHANGED], "exp_average")
    with pytest.raises(megazero.MegazeroError, match="shape"):
        safe_set_full_fp32_param(parameters[CHANGED], torch.ones(3))
    assert all(x is not None for name, x in seen.items() if "empty" not in name)
    return {name: x for name, x in seen.items() if x is not None}


def seen_by_plain(accumulation: int, world: int) -> Seen:
    model, seen = build(Odd).double(), {}
    parameters = dict(model.named_parameters())
    made = adamw([p for p in parameters.values() if p.requires_grad])
    for step in range(2):
        for micro in range(accumulation):
            for rank in range(world):
                (loss_of(model, batch(step, micro, rank)) / (accumulation * world)).backward()
            for name, p in parameters.items():
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    seen[f"{step}.{micro} grad {name}"] = p.grad.clone()
        made.step()
        made.zero_grad()
        for name, p in parameters.items():
            seen[f"{step} weight {name}"] = p.detach().clone()
            if p.requires_grad:
                seen[f"{step} exp_avg {name}"] = made.state[p]["exp_avg"].clone()
        if step == 0:
            for name in (CHANGED, "embed.weight", "scale"):
                parameters[name].data.copy_(values(name, parameters[name]))
                made.state[parameters[name]]["exp_avg"].copy_(values(name, parameters[name]) / 10)
    seen["loss"] = loss_of(model, batch(5, 0, 0)).detach()
    return seen


@pytest.mark.parametrize(
    ("stage", "world", "accumulation"), [(0, 2, 2), (1, 2, 2), (2, 2, 2), (3, 2, 2), (3, 3, 1), (2, 1, 1)]
)
def test_everything_is_what_a_plain_loop_has(ranks: Callable, stage: int, world: int, accumulation: int) -> None:
    wanted = seen_by_plain(accumulation, world)
    for seen in ranks(world, seen_by_engine, stage, accumulation):
        assert seen.keys() >= {name for name in wanted if "empty" not in name}
        for name, value in seen.items():
            assert value.dtype == torch.float32 and value.shape == wanted[name].shape, name
            error = (value.double() - wanted[name]).norm()
            assert error <= 1e-4 * wanted[name].norm() + 1e-7, (name, float(error))


def half_precision(precision: str, stage: int) -> dict[str, Any]:
    rank = dist.get_rank()
    settings = config(stage, 1, 0.0, optimizer=ADAMW, **{precision: {"enabled": True}})
    engine, *_ = megazero.initialize(model=build(Odd, 3 + rank), config=settings)
    parameter = dict(engine.module.named_parameters())[CHANGED]
    before = safe_get_full_fp32_param(parameter)
    engine.backward(engine(batch(0, 0, rank)))
    gradient = safe_get_full_grad(parameter)
    safe_set_full_fp32_param(parameter, before + 1e-4)
    with megazero.zero.GatheredParameters(parameter, modifier_rank=0):
        copy = parameter.detach().clone()
        safe_set_full_fp32_param(parameter, before + 2e-4)
        inside = parameter.detach().clone()
    return {
        "before": before,
        "after": safe_get_full_fp32_param(parameter),
        "rounded": torch.equal(copy, (before + 1e-4).to(copy.dtype)),
        "inside": torch.equal(inside, (before + 2e-4).to(copy.dtype)),
        "grad": gradient,
    }


@pytest.mark.parametrize(("precision", "stage"), [("bf16", 1), ("fp16", 3)])
def test_masters_and_gradients_of_16_bit_parameters(ranks: Callable, precision: str, stage: int) -> None:
    plain = build(Odd)
    sum(loss_of(plain, batch(0, 0, rank)) / 2 for rank in range(2)).backward()
    weight = dict(plain.named_parameters())[CHANGED]
    for found in ranks(2, half_precision, precision, stage):
        assert torch.equal(found["before"], weight), "the float32 values, not the rounded ones"
        assert torch.equal(found["after"], weight + 2e-4) and found["rounded"] and found["inside"]
        assert (found["grad"] - weight.grad).norm() <= 2e-2 * weight.grad.norm(), "without the loss scale"


def test_outside_an_engine() -> None:
    loose = nn.Parameter(torch.ones(2))
    assert safe_get_full_fp32_param(loose) is None
    assert safe_get_full_grad(loose) is None
    assert safe_get_full_optimizer_state(loose, "exp_avg") is None
    with pytest.raises(megazero.MegazeroError, match="in no engine"):
        safe_set_full_fp32_param(loose, torch.ones(2))
