"""Each setting of zero_optimization, and the loggers, do what they say: counted, on two ranks."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import megazero
from megazero.comm import Communicator
from megazero.zero.block import State
from tests.foreign.uses import WIDTH, Parts, part, settings

LAYERS = 4


class Chain(nn.Module):
    """Four equal layers and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.parts:
            x = x + each(x)
        return self.last(x).square().mean()


def started(stage: int, model: nn.Module | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    tree = settings(stage, **{name: value for name, value in changes.items() if name not in OUTSIDE})
    tree |= {name: value for name, value in changes.items() if name in OUTSIDE}
    return megazero.initialize(model=Chain() if model is None else model, config=tree)[0]


OUTSIDE = ("gradient_accumulation_steps", "comms_logger", "steps_per_print")


def micro_step(engine: Any, index: int = 0) -> None:
    generator = torch.Generator().manual_seed(index + 10 * dist.get_rank())
    engine.backward(engine(torch.randn(2, 3, WIDTH, generator=generator)))
    engine.step()


def block_size(engine: Any) -> int:
    return engine.sharded.blocks[0].layout.numel


def counted(stage: int, changes: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], int]:
    """(calls and elements of each kind of collective in the second step, elements of a layer's block)"""
    engine = started(stage, **changes)
    micro_step(engine)
    group = engine.sharded.groups.whole
    group.calls.clear()
    group.elements.clear()
    micro_step(engine, 1)
    engine.sharded.gather()
    return dict(group.calls), dict(group.elements), block_size(engine)


@pytest.mark.parametrize(("stage", "kind"), [(0, "all_reduce"), (1, "reduce_scatter"), (2, "reduce_scatter")])
def test_reduce_bucket_size_is_the_number_of_reductions(ranks: Callable, stage: int, kind: str) -> None:
    for size, expected in ((1, LAYERS + 1), (2, 3), (1000, 1)):
        for calls, elements, block in ranks(2, counted_in_blocks, stage, "reduce_bucket_size", size):
            assert calls[kind] == expected
            assert LAYERS * block <= elements[kind] <= (LAYERS + 1) * block


def counted_in_blocks(stage: int, name: str, blocks: int) -> tuple[dict[str, int], dict[str, int], int]:
    """A size that holds so many of the layers' blocks."""
    size = block_size(started(stage)) * blocks
    return counted(stage, {name: size})


@pytest.mark.parametrize("stage", [1, 2])
def test_allgather_bucket_size_is_the_number_of_gathers(ranks: Callable, stage: int) -> None:
    for size, expected in ((1, LAYERS + 1), (2, 3), (1000, 1)):
        for calls, elements, block in ranks(2, counted_in_blocks, stage, "allgather_bucket_size", size):
            assert calls["all_gather"] == expected
            assert LAYERS * block <= elements["all_gather"] <= (LAYERS + 1) * block


def ahead(blocks: float, limit: float | None) -> tuple[int, int]:
    """(layers being gathered beyond the one in use, most elements whole at one time in layers) of a third forward."""
    block = block_size(started(3))
    changes = {} if limit is None else {"stage3_max_live_parameters": int(limit * block)}
    engine = started(
        3, stage3_prefetch_bucket_size=int(blocks * block), stage3_param_persistence_threshold=0, **changes
    )
    micro_step(engine)
    micro_step(engine)
    units = [unit for unit in engine.sharded.units if unit.plan.name.startswith("parts")]
    beyond, live = [], []

    def look(*_: Any) -> None:
        whole = [any(b.state is not State.SHARDED for b in unit.freed) for unit in units]
        beyond.append(sum(whole[1:]))
        live.append(engine.sharded._live)

    engine.module.parts[0].register_forward_pre_hook(look)
    micro_step(engine)
    return beyond[0], live[0] // block


@pytest.mark.parametrize(
    ("blocks", "limit", "expected"), [(0, None, (0, 1)), (1, None, (1, 2)), (2, None, (2, 3)), (3, 2, (1, 2))]
)
def test_prefetch_goes_ahead_until_live_parameters_are_too_many(
    ranks: Callable, blocks: int, limit: int | None, expected: tuple[int, int]
) -> None:
    assert ranks(2, ahead, blocks, limit) == [expected] * 2


def persistent(threshold: int) -> tuple[list[str], int]:
    """(parameters that stay whole, gathers in a step)"""
    engine = started(3, stage3_param_persistence_threshold=threshold, stage3_prefetch_bucket_size=0)
    calls, *_ = counted(3, {"stage3_param_persistence_threshold": threshold, "stage3_prefetch_bucket_size": 0})
    whole = [e.name for b in engine.sharded.blocks if not b.sharding.parameters for e in b.layout.entries]
    return whole, calls.get("all_gather", 0)


def test_persistence_threshold_says_which_parameters_stay(ranks: Callable) -> None:
    biases = [f"parts.{i}.{j}.bias" for i in range(LAYERS) for j in (0, 2)]
    everything = [name for name, _ in Chain().named_parameters()]
    for threshold, expected, gathers in (
        (0, [], 2 * LAYERS + 2),
        (WIDTH, [*biases, "last.weight", "last.bias"], 2 * LAYERS + 1),
        (WIDTH**2, everything, 1),
    ):
        for whole, calls in ranks(2, persistent, threshold):
            assert sorted(whole) == sorted(expected)
            # Of weights in forward and backward, and once of what the update changed and stays whole.
            assert calls == gathers


class Held:
    """A collective under way that notes when it is waited for."""

    def __init__(self, work: Any, log: list[str], name: str) -> None:
        self.work, self.log, self.name = work, log, name

    def wait(self) -> None:
        self.log.append(f"waited {self.name}")
        self.work.wait()


def backward_log(stage: int, overlap: bool) -> list[str]:
    """What happens in a backward: gradients as autograd makes them, reductions issued and waited for."""
    engine = started(stage, overlap_comm=overlap, reduce_bucket_size=1)
    log: list[str] = []
    group, kind = engine.sharded.groups.shard, "reduce_scatter" if stage else "all_reduce"
    count, issue = iter(range(100)), getattr(Communicator, kind)

    def held(*buffers: Any) -> Held:
        name = str(next(count))
        log.append(f"issued {name}")
        return Held(issue(group, *buffers), log, name)

    setattr(group, kind, held)
    for index, each in enumerate(engine.module.parts):
        each[0].register_full_backward_hook(lambda *_, index=index: log.append(f"gradient {index}"))
    micro_step(engine)
    return log


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_overlap_comm_lets_backward_go_on_while_a_bucket_is_reduced(ranks: Callable, stage: int) -> None:
    for log in ranks(2, backward_log, stage, True):
        # Reduction 1 is of the last layer's gradients; the layer before it goes on meanwhile.
        assert log.index("issued 1") < log.index(f"gradient {LAYERS - 2}") < log.index("waited 1")
    for log in ranks(2, backward_log, stage, False):
        for index in range(LAYERS):
            assert log[log.index(f"issued {index}") + 1] == f"waited {index}"


def live_gradients(contiguous: bool) -> tuple[int, int]:
    """(most bytes of .grad at any time of a backward, bytes of the largest gradient)"""
    torch.manual_seed(0)
    model = Parts(2)
    parameters = list(model.parameters())
    live: list[int] = []

    def look(_: Any) -> None:
        live.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(look)
    engine = started(1, model, contiguous_gradients=contiguous)
    micro_step(engine)
    return max(live), max(p.numel() for p in parameters) * 4


def test_contiguous_gradients_holds_one_gradient_beside_the_buffer(ranks: Callable) -> None:
    for most, largest in ranks(2, live_gradients, True):
        assert most == largest
    for most, largest in ranks(2, live_gradients, False):
        assert most == 2 * (WIDTH * WIDTH + WIDTH) * 4 > largest  # a whole layer's


def without_sync(stage: int) -> list[int]:
    """Calls of reductions after each micro-step; two inside no_sync, then one outside."""
    engine = started(stage, gradient_accumulation_steps=3)
    calls, group = [], engine.sharded.groups.whole
    for index in range(3):
        with engine.no_sync() if index < 2 else contextlib.nullcontext():
            micro_step(engine, index)
        calls.append(group.calls["all_reduce"] + group.calls["reduce_scatter"])
    return calls


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_reduces_nothing(ranks: Callable, stage: int) -> None:
    for first, second, last in ranks(2, without_sync, stage):
        assert first == second == 0 < last


def comms_said(settings_of_log: dict[str, Any]) -> tuple[str, dict[str, int], dict[str, int]]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        log = {"enabled": True, **settings_of_log}
        engine = started(1, comms_logger=log, steps_per_print=1, reduce_bucket_size=1000, allgather_bucket_size=1000)
        group = engine.sharded.groups.whole
        group.calls.clear()
        group.elements.clear()
        micro_step(engine)
    return said.getvalue(), dict(group.calls), dict(group.elements)


def test_comms_logger_counts_what_the_communicators_count(ranks: Callable) -> None:
    (said, calls, elements), (other, *_) = ranks(2, comms_said, {"verbose": True, "debug": True})
    assert other == ""
    found = re.findall(r"reduce_scatter: (\d+) calls, ([\d,]+) elements, ([\d,]+) bytes, [\d.]+ ms", said)
    (row,) = [[int(number.replace(",", "")) for number in row] for row in found]
    assert row == [calls["reduce_scatter"], elements["reduce_scatter"], 4 * elements["reduce_scatter"]]
    assert re.search(r"reduce_scatter of [\d,]+ elements, [\d,]+ bytes, [\d.]+ ms from _\w+ in .*reduction.py", said)
    (said, *_), _ = ranks(2, comms_said, {"prof_all": False, "prof_ops": ["all_gather"]})
    assert "all_gather: " in said and "reduce_scatter" not in said and "elements, 4" not in said
