"""A module that leaves its engine: the weights of then, no trace of the engine, ready for another at any stage."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import distributed as dist
from torch import nn

import megazero
from megazero.zero.homes import home_of
from tests.foreign.models import ADAMW, Losses, Odd, Weights, batch, build, config, loss_of, plain
from tests.foreign.test_engine import adamw, check

Result = tuple[Losses, Losses, Weights]


@functools.cache
def wanted() -> Result:
    """Of the second of two optimizers, each of two steps."""
    model = build(Odd)
    plain(lambda: model, adamw, 2, 2, 2, 0.5)
    return plain(lambda: model, adamw, 2, 2, 2, 0.5)


def in_two_engines(stages: tuple[int, int]) -> Result:
    model = build(Odd, seed=3 + dist.get_rank())
    parameters = list(model.parameters())
    for stage in stages:
        engine, *_ = megazero.initialize(model=model, config=config(stage, 2, 0.5, optimizer=ADAMW))
        losses, norms = [], []
        for step in range(2):
            total = torch.zeros(())
            for micro_step in range(2):
                loss = loss_of(engine, batch(step, micro_step, dist.get_rank()))
                total += engine.backward(loss).float()
                engine.step()
            dist.all_reduce(total)
            losses.append(float(total) / 2)
            norms.append(engine.get_global_grad_norm())
        engine.destroy()
        engine.destroy()
        assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        with pytest.raises(megazero.MegazeroError, match="the engine was destroyed"):
            engine.backward(loss)
    with megazero.zero.GatheredParameters(model.parameters()):
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)
        whole = model(batch(0, 0, 0))  # by itself
    if stages[1] < 3:
        assert all(type(p) is nn.Parameter and home_of(p) is None for p in parameters)
        assert torch.equal(model(batch(0, 0, 0)), whole)
    return losses, norms, weights


@pytest.mark.parametrize("stages", [(0, 3), (2, 2), (3, 1), (3, 3)])
def test_a_module_goes_from_engine_to_engine(ranks: Callable, stages: tuple[int, int]) -> None:
    check(ranks(2, in_two_engines, stages), wanted())
