"""The executor does what the list says, in its order, with the tensors the list names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import distributed as dist

from megazero.pipeline.executor import Executor
from megazero.pipeline.p2p import Transfers
from megazero.pipeline.schedules import COMMUNICATION, Action, Kind, activation_bound, build_schedule
from megazero.pipeline.schedules import evaluation_schedule as evaluation

SHAPE = (2, 3)
LOGGED = {
    Kind.FORWARD: "forward {}",
    Kind.GATHER: "gather",
    Kind.REDUCE: "reduce",
    Kind.BACKWARD: "backward",
}


class Product:
    """Stage s multiplies by its weight w_s = s + 2; the last one sums. Records what it is asked."""

    def __init__(self, stage: int, stages: int) -> None:
        self.first, self.last = stage == 0, stage == stages - 1
        self.weight = torch.tensor(float(stage + 2), requires_grad=True)
        self.log: list[str] = []
        self.alive = self.most_alive = 0

    def forward(self, micro_batch: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        assert (x is None) == self.first
        self.log.append(f"forward {int(micro_batch[0, 0])}")
        self.alive += torch.is_grad_enabled()
        self.most_alive = max(self.most_alive, self.alive)
        y = (micro_batch if x is None else x) * self.weight
        return y.sum() if self.last else y

    def gather(self) -> None:
        self.log.append("gather")

    def reduce(self) -> None:
        self.log.append("reduce")

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        torch.autograd.backward(output, gradient)
        self.alive -= 1
        self.log.append("backward")


def micro_batches(count: int) -> list[torch.Tensor]:
    return [torch.full(SHAPE, float(index)) for index in range(count)]


def run(schedule: list[list[Action]], count: int) -> tuple[list[str], list[float], float, int, bool]:
    stage, stages = dist.get_rank(), dist.get_world_size()
    product, losses = Product(stage, stages), []
    transfers = None
    if stages > 1:
        transfers = Transfers(dist.group.WORLD, range(stages), SHAPE, torch.float32, torch.device("cpu"))
    batches = micro_batches(count)
    Executor(product, transfers).run(schedule[stage], batches, lambda loss: losses.append(float(loss)))
    grad = 0.0 if product.weight.grad is None else float(product.weight.grad)
    return product.log, losses, grad, product.most_alive, torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 6)])
def test_every_micro_batch_forward_and_backward(ranks: Callable, name: str, stages: int, count: int) -> None:
    """Loss of micro-batch i: 6 · i · Π w; the gradient of a weight is the sum of the losses over that weight."""
    schedule = build_schedule(name, stages, count)
    product = 1
    for stage in range(stages):
        product *= stage + 2
    losses = [6.0 * i * product for i in range(count)]
    for stage, (log, found, grad, most_alive, _) in enumerate(ranks(stages, run, schedule, count)):
        expected = [LOGGED[a.kind].format(a.micro_batch) for a in schedule[stage] if a.kind not in COMMUNICATION]
        assert log == expected
        assert found == (losses if stage == stages - 1 else [])
        assert grad == sum(losses) / (stage + 2)
        assert most_alive <= activation_bound(name, stages, count, stage)


@pytest.mark.parametrize(("stages", "count"), [(1, 2), (3, 1), (3, 4)])
def test_evaluation_only_goes_forward(ranks: Callable, stages: int, count: int) -> None:
    results = ranks(stages, run, evaluation(stages, count), count)
    product = 1
    for stage in range(stages):
        product *= stage + 2
    for stage, (log, losses, grad, alive, grad_enabled) in enumerate(results):
        assert log == ["gather"] + [f"forward {i}" for i in range(count)]
        assert losses == ([6.0 * i * product for i in range(count)] if stage == stages - 1 else [])
        assert grad == 0 and alive == 0 and grad_enabled
