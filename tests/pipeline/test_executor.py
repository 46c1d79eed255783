"""The executor does what the list says, in its order, with the tensors the list names."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import distributed as dist

from megazero.layout import Layout
from megazero.pipeline.executor import Executor
from megazero.pipeline.p2p import Transfers, neighbour_groups
from megazero.pipeline.schedules import BROUGHT_BY, COMMUNICATION, Action, Kind, activation_bound, build_schedule
from megazero.pipeline.schedules import evaluation_schedule as evaluation

SHAPE = (2, 3)


class Product:
    """Stage s multiplies by its weight w_s = s + 2; the last one sums. Records what it is asked."""

    def __init__(self, rank: int, ranks: int, chunks: int) -> None:
        self.stages, self.last = [chunk * ranks + rank for chunk in range(chunks)], ranks * chunks - 1
        self.weights = [torch.tensor(float(stage + 2), requires_grad=True) for stage in self.stages]
        self.log: list[str] = []
        self.alive = self.most_alive = 0

    def forward(self, micro_batch: torch.Tensor, x: torch.Tensor | None, chunk: int) -> torch.Tensor:
        assert (x is None) == (self.stages[chunk] == 0)
        self.log.append(f"forward {int(micro_batch[0, 0])} of {chunk}")
        self.alive += torch.is_grad_enabled()
        self.most_alive = max(self.most_alive, self.alive)
        y = (micro_batch if x is None else x) * self.weights[chunk]
        return y.sum() if self.stages[chunk] == self.last else y

    def gather(self) -> None:
        self.log.append("gather")

    def reduce(self) -> None:
        self.log.append("reduce")

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None, chunk: int) -> None:
        torch.autograd.backward(output, gradient)
        self.alive -= 1
        self.log.append(f"backward of {chunk}")

    def backward_input(self, output: torch.Tensor, gradient: torch.Tensor | None, chunk: int) -> None:
        torch.autograd.backward(output, gradient)
        self.log.append(f"backward_input of {chunk}")

    def backward_weight(self, chunk: int) -> None:
        self.alive -= 1
        self.log.append(f"backward_weight of {chunk}")


def micro_batches(count: int) -> list[torch.Tensor]:
    return [torch.full(SHAPE, float(index)) for index in range(count)]


class Recorder:
    """A trace: the actions that are entered, and for each whether it was left before the next one was."""

    def __init__(self) -> None:
        self.entered: list[Action] = []
        self.open = 0

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        self.entered.append(action)
        self.open += 1
        yield
        self.open -= 1


class Found(NamedTuple):
    log: list[str]
    losses: list[float]
    grads: list[float]
    most_alive: int
    grad_enabled: bool
    traced: list[Action]


def run(schedule: list[list[Action]], count: int, chunks: int, traces: bool) -> Found:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    product, losses, recorder = Product(rank, ranks, chunks), [], Recorder()
    transfers = None
    if ranks > 1:
        pairs = neighbour_groups(Layout(1, ranks, 1), rank, chunks > 1, 60)
        assert ranks == 2 or sorted(pairs) == sorted({(rank + d) % ranks for d in (1, -1)} if chunks > 1 else pairs)
        transfers = Transfers(dist.group.WORLD, range(ranks), SHAPE, torch.float32, torch.device("cpu"), pairs)
    executor = Executor(product, transfers, recorder if traces else None)
    executor.run(schedule[rank], micro_batches(count), lambda loss: losses.append(float(loss)))
    grads = [0.0 if weight.grad is None else float(weight.grad) for weight in product.weights]
    assert recorder.open == 0
    return Found(product.log, losses, grads, product.most_alive, torch.is_grad_enabled(), recorder.entered)


def logged(action: Action) -> str:
    if action.kind in (Kind.GATHER, Kind.REDUCE):
        return action.kind.value
    which = f" {action.micro_batch}" if action.kind is Kind.FORWARD else ""
    return f"{action.kind.value}{which} of {action.chunk}"


def loss_of(micro_batch: int, stages: int) -> float:
    """6 · i · Π w; the gradient of a weight is the sum of the losses over that weight."""
    return 6.0 * micro_batch * math.prod(range(2, stages + 2))


@pytest.mark.parametrize(
    ("name", "stages", "count", "chunks"),
    [(name, *size, 1) for name in ("gpipe", "1f1b", "zero_bubble") for size in ((1, 1), (1, 3), (2, 1), (3, 2), (4, 6))]
    + [("interleaved", *size) for size in ((2, 1, 2), (2, 4, 3), (3, 4, 2), (4, 3, 2))],
)
def test_every_micro_batch_forward_and_backward(
    ranks: Callable, name: str, stages: int, count: int, chunks: int
) -> None:
    schedule = build_schedule(name, stages, count, chunks)
    losses = [loss_of(i, stages * chunks) for i in range(count)]
    for rank, found in enumerate(ranks(stages, run, schedule, count, chunks, False)):
        assert found.log == [logged(a) for a in schedule[rank] if a.kind not in COMMUNICATION]
        assert found.losses == (losses if rank == stages - 1 else [])
        assert found.grads == [sum(losses) / (chunk * stages + rank + 2) for chunk in range(chunks)]
        assert found.most_alive <= activation_bound(name, stages, count, rank, chunks)


@pytest.mark.parametrize(("stages", "count", "chunks"), [(1, 2, 1), (3, 1, 1), (3, 4, 1), (2, 3, 2)])
def test_evaluation_only_goes_forward(ranks: Callable, stages: int, count: int, chunks: int) -> None:
    schedule = evaluation(stages, count, chunks)
    for rank, found in enumerate(ranks(stages, run, schedule, count, chunks, False)):
        assert found.log == [logged(a) for a in schedule[rank] if a.kind not in COMMUNICATION]
        assert found.losses == ([loss_of(i, stages * chunks) for i in range(count)] if rank == stages - 1 else [])
        assert found.grads == [0] * chunks and found.most_alive == 0 and found.grad_enabled


def test_a_trace_sees_every_action_and_every_wait(ranks: Callable) -> None:
    schedule = build_schedule("interleaved", 2, 3, 2)
    for rank, found in enumerate(ranks(2, run, schedule, 3, 2, True)):
        expected = []
        for action in schedule[rank]:
            brought = BROUGHT_BY.get(action.kind)
            expected += [a for a in schedule[rank] if a[:3] == (brought, action.micro_batch, action.chunk)]
            expected.append(action)
        assert found.traced == expected


class Late:
    """Work that is waited for in the order it says."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self.name, self.waited = name, waited

    def wait(self) -> None:
        self.waited.append(self.name)


def test_only_what_is_used_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the peer's batches before it, whose sent tensors are let go of; those of others are left alone."""
    waited: list[str] = []
    tensors: list[weakref.ref] = []

    def issue(operations: list[tuple]) -> list[Late]:
        tensors.append(weakref.ref(operations[0][1]))
        return [Late(operations[0][2], waited)]

    monkeypatch.setattr(dist, "P2POp", lambda *args: args)
    monkeypatch.setattr(dist, "batch_isend_irecv", issue)
    transfers = Transfers(None, ["a", "b"], SHAPE, torch.float32, torch.device("cpu"))
    transfers.issue(0, [torch.ones(SHAPE)], 0)
    transfers.issue(1, [], 1)
    (first,), (second,) = transfers.issue(0, [], 1), transfers.issue(0, [], 1)
    assert tensors[0]() is not None and not waited
    assert transfers.wait(first) is first.tensor
    assert waited == ["a", "a"] and tensors[0]() is None
    transfers.wait(first)
    assert waited == ["a", "a"]
    transfers.wait(second)
    transfers.drain()
    assert waited == ["a", "a", "a", "b"]
