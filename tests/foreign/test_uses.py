"""Every way in which modules are used gives the plain loop's gradients, at every stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

import megazero
from megazero.errors import ConfigError
from tests.distributed.harness import RankFailure
from tests.foreign.models import ADAMW, Odd, Weights, config, trained
from tests.foreign.uses import USES, Sometimes, Use, built, data, on_one_rank, plain, settings, with_engine

STEPS = 3
plain_cached = functools.cache(plain)


def all_uses(names: list[str], stage: int) -> dict[str, tuple[list[float], Weights]]:
    return {name: with_engine(USES[name], settings(stage), STEPS)[:2] for name in names}


def check(found: tuple[list[float], Weights], wanted: tuple[list[float], Weights], name: str) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=2e-6), name
    assert found[1].keys() == wanted[1].keys()
    for key, value in found[1].items():
        error = (value.double() - wanted[1][key]).norm()
        assert error <= 2e-6 * wanted[1][key].norm(), (name, key, float(error))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_uses_give_the_plain_gradients(ranks: Callable, stage: int) -> None:
    for results in ranks(2, all_uses, list(USES), stage):
        for name, found in results.items():
            check(found, plain_cached(USES[name], STEPS, 2), name)


@pytest.mark.parametrize("stage", [1, 3])
def test_three_ranks(ranks: Callable, stage: int) -> None:
    names = ["sizes", "weights as outputs"]
    for results in ranks(3, all_uses, names, stage):
        for name, found in results.items():
            check(found, plain_cached(USES[name], STEPS, 3), name)


ONE_RANK = Use(Sometimes, on_one_rank)


def used_on_one_rank(stage: int) -> tuple[list[float], Weights]:
    return with_engine(ONE_RANK, settings(stage), STEPS)[:2]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_module_that_one_rank_uses(ranks: Callable, stage: int) -> None:
    for found in ranks(2, used_on_one_rank, stage):
        check(found, plain_cached(ONE_RANK, STEPS, 2), "used on one rank")


def leaves_the_recorded_order(limit: float) -> None:
    engine, *_ = megazero.initialize(model=built(ONE_RANK), config=settings(3))
    engine.sharded.groups.agreement._timeout = timedelta(seconds=limit)
    for step in range(2):
        engine.backward(engine(data(0, 0), last=step == 0 or dist.get_rank() == 1))
        engine.step()


@pytest.mark.parametrize("when", ["first step", "second step"])
def test_a_module_that_one_rank_uses_at_stage_3_is_named(ranks: Callable, when: str) -> None:
    """In the second step the other rank has begun a collective, and only the first one's patience ends the wait."""
    with pytest.raises(RankFailure, match=r"uses the parameters of parts\.[12].*every rank call the module"):
        if when == "first step":
            ranks(2, used_on_one_rank, 3)
        else:
            ranks(2, leaves_the_recorded_order, 2.0)


def runs_of(stage: int, variants: list[dict[str, Any]]) -> list[tuple[list[float], list[float], Weights]]:
    return [trained(Odd, config(stage, 2, 0.5, optimizer=ADAMW, zero_optimization=variant), 2) for variant in variants]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sizes_of_buckets_and_overlap_do_not_change_a_bit(ranks: Callable, stage: int) -> None:
    variants = [
        {"reduce_bucket_size": size, "allgather_bucket_size": size, "stage3_prefetch_bucket_size": size, **other}
        for size, other in (
            (1, {}),
            (7, {"overlap_comm": False}),
            (2**20, {"contiguous_gradients": False}),
            (5e8, {"overlap_comm": False, "stage3_max_live_parameters": 0}),
            (5e8, {}),
        )
    ]
    for first, *others in ranks(2, runs_of, stage, variants):
        for other in others:
            assert other[:2] == first[:2]
            assert all(torch.equal(value, first[2][name]) for name, value in other[2].items())


def compiled(how: str) -> list[float]:
    model = built(USES["twice in a forward"])
    if how == "each layer":
        for index in range(3):
            model.parts[index] = torch.compile(model.parts[index], backend="eager")
    elif how == "inside a layer":
        model.parts[0][0] = torch.compile(model.parts[0][0], backend="eager")
    elif how == "each layer in place":
        model.parts[1].compile(backend="eager")
    elif how == "the model":
        model = torch.compile(model, backend="eager")
    engine, *_ = megazero.initialize(model=model, config=settings(3))
    if how == "the engine":
        engine.compile(backend="eager")
    norms = []
    for step in range(2):
        engine.backward(engine(data(step, 0)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def compiled_all(hows: list[str]) -> list[list[float]]:
    return [compiled(how) for how in hows]


def test_torch_compile_of_parts_and_of_the_whole(ranks: Callable) -> None:
    (found,) = ranks(1, compiled_all, ["each layer", "inside a layer", "the engine"])
    wanted = plain_cached(USES["twice in a forward"], STEPS, 1)[0][:2]
    for norms in found:
        assert norms == pytest.approx(wanted, rel=2e-6)
    for how, name in (("the model", "OptimizedModule"), ("each layer in place", "parts.1")):
        with pytest.raises(ConfigError, match=f"{name} is compiled, with parts that are to be gathered"):
            compiled(how)
