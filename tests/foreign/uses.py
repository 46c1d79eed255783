"""Ways in which people's models use their modules, each with the plain float64 run that it is compared with.

A use is a module of small parts and a function that runs one micro-batch of it: it gets what to call, what to call
instead of ``loss.backward()``, the step and the rank, and returns nothing.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import megazero
from tests.foreign.models import Weights, whole_weights

WIDTH = 6


def data(step: int, rank: int, index: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + index)
    return torch.randn(2, 3, WIDTH, generator=generator)


def part(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Parts(nn.Module):
    """Parts of one kind in a row; subclasses use them otherwise."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.parts)):
            x = x + self.use(index, x)
        return x.square().mean()

    def use(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.parts[index](x)


class Twice(Parts):
    def use(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.parts[0](torch.sin(self.parts[index](x)))


class Checkpointed(Parts):
    reentrant = False

    def use(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        return checkpoint(self.run, index, x, use_reentrant=self.reentrant)

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.parts[index](x)


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedTwice(Checkpointed):
    """The part twice in one checkpoint, all parts' neighbours in it too."""

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.parts[index](self.parts[index - 1](self.parts[index](x)))


class ReentrantTwice(CheckpointedTwice):
    reentrant = True


class InPlace(Parts):
    """Activations in place: first in a part, on a view that a linear layer returned, and seen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part(nn.ReLU(inplace=True)) for _ in range(3))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def use(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.relu(self.first(x)))
        y = torch.sin(x)
        return self.parts[index](y) + y


@dataclass
class Result:
    value: torch.Tensor
    more: tuple[dict[str, torch.Tensor], None]


class Structured(nn.Module):
    """Takes keyword arguments, a mapping among them; gives a dataclass, a mapping, a tuple with an input in it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(StructuredPart(kind) for kind in ("dataclass", "dict", "tuple"))

    def forward(self, *, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for each in self.parts:
            x = each(name="x", inputs={"x": x, "flag": True})
        return {"loss": x.square().mean()}


class StructuredPart(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, PassesOn(kind)

    def forward(self, name: str, inputs: dict[str, Any]) -> torch.Tensor:
        found = self.inner(inputs[name])
        if self.kind == "dataclass":
            return found.value + found.more[0]["x"]
        return found["value"] + found["x"] if self.kind == "dict" else found[0] + found[1]


class PassesOn(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, part()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        if self.kind == "dataclass":
            return Result(y, ({"x": x}, None))
        return {"value": y, "x": x} if self.kind == "dict" else (y, x)


class KeepsAttribute(Parts):
    """Half of the loss is of tensors that a part's inner layer made and the part does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Keeper() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return sum((each.kept.square().mean() for each in self.parts), 0.1 * loss.detach())


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.tanh(self.inner(torch.tanh(self.outer(x))))
        return x


class ReturnsWeight(Parts):
    """A module that returns rows of its weight; attention, which uses its child's weight without calling the child; a
    sparse gradient; a frozen layer that gradients flow through."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Prompt() for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.table = nn.Embedding(5, WIDTH, sparse=True)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def use(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table(torch.tensor([1, 3, 1], device=x.device))
        return self.attention(x, x, x, need_weights=False)[0] + self.parts[index]().sum(0) * self.frozen(torch.sin(x))


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        self.bias = nn.Parameter(torch.ones(WIDTH))

    def forward(self) -> torch.Tensor:
        return self.weight[1:3]


class Elsewhere(Parts):
    """Parameters outside of their own module's forward: by a function, another method, a generator, forward called
    directly, under another module's checkpoint, and by a hook that came before the engine's (weight_norm's)."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.two, self.normed = nn.Linear(WIDTH, WIDTH), TwoMethods(), nn.Linear(WIDTH, WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and in many models
            nn.utils.weight_norm(self.normed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(torch.tanh(self.other(x)))
        for each in self.parts:
            x = x + each(x)
        x = self.parts[0].forward(x)
        x = checkpoint(lambda x: F.linear(x, self.other.weight, self.normed.bias), x, use_reentrant=False)
        x = x + sum(self.two(x)) + self.two.sine(x).mul_(self.parts[1][2].bias)
        return x.square().mean() + self.parts[1][0].weight.detach().norm() * self.parts[2][0].bias.square().sum()


class TwoMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self.first(x)
        yield torch.cos(self.first(x))

    def sine(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.second(x))


class OnLoan(Parts):
    """A part's weights gathered by hand inside the forward."""

    def use(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[index](x)
        with megazero.zero.GatheredParameters(self.parts[index].parameters()):
            return F.linear(x, self.parts[index][0].weight)


class Sizes(nn.Module):
    """Parameters of awkward sizes, each used, and a layer without outputs at the end."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(), (0,), (1,), (2,), (3,), (4,), (8,), (0,), (24,), (3, 0), (5, 13)]
        self.values = nn.ParameterList(torch.linspace(-1, 1, torch.Size(s).numel()).view(s) for s in shapes)
        self.only = nn.ModuleList([nn.Linear(WIDTH, 5)])
        self.unlike = nn.ModuleDict({"middle": nn.Linear(5, 4), "norm": nn.LayerNorm(4)})
        self.last = nn.Linear(4, 0, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.unlike["norm"](self.unlike["middle"](self.only[0](x)))
        total = sum((torch.sin(value * x.mean()).sum() for value in self.values), x.square().mean())
        return total + self.last(x).sum()


class Sometimes(Parts):
    """The last part is used where the caller says so."""

    def forward(self, x: torch.Tensor, last: bool = True) -> torch.Tensor:
        for each in self.parts[: None if last else -1]:
            x = x + each(x)
        return x.square().mean()


Run = Callable[[Callable, Callable, int, int], None]


class Use(NamedTuple):
    factory: Callable[[], nn.Module]
    run: Run


def plainly(call: Callable, backward: Callable, step: int, rank: int) -> None:
    backward(call(data(step, rank)))


def with_keywords(call: Callable, backward: Callable, step: int, rank: int) -> None:
    backward(call(x=data(step, rank))["loss"])


def two_forwards(call: Callable, backward: Callable, step: int, rank: int) -> None:
    first = call(data(step, rank))
    with torch.no_grad():
        call(data(step, rank, 2))
    backward(first + 2 * call(data(step, rank, 1)))


def two_backwards(call: Callable, backward: Callable, step: int, rank: int) -> None:
    """Of graphs that lived side by side, and then of a third."""
    first, second = call(data(step, rank)), call(data(step, rank, 1))
    backward(first)
    backward(second)
    backward(call(data(step, rank, 2)))


def same_graph_twice(call: Callable, backward: Callable, step: int, rank: int) -> None:
    loss = call(data(step, rank))
    backward(loss, retain_graph=True)
    backward(loss.square())


def every_other_step(call: Callable, backward: Callable, step: int, rank: int) -> None:
    backward(call(data(step, rank), last=step % 2 == 1))


def on_one_rank(call: Callable, backward: Callable, step: int, rank: int) -> None:
    backward(call(data(step, rank), last=rank == 1))


def several(call: Callable, backward: Callable, step: int, rank: int) -> None:
    """Two forwards and one without gradients, then two backwards."""
    losses = [call(data(step, rank, index)) for index in range(2)]
    with torch.no_grad():
        call(data(step, rank, 2))
    for loss in losses:
        backward(loss)


USES: dict[str, Use] = {
    "twice in a forward": Use(Twice, plainly),
    "two forwards, one backward": Use(Parts, two_forwards),
    "several backwards": Use(Parts, two_backwards),
    "the same graph twice": Use(Twice, same_graph_twice),
    "every other step": Use(Sometimes, every_other_step),
    "checkpoint": Use(Checkpointed, two_forwards),
    "checkpoint, reentrant": Use(Reentrant, two_forwards),
    "checkpoint of several": Use(CheckpointedTwice, plainly),
    "checkpoint of several, reentrant": Use(ReentrantTwice, plainly),
    "sizes": Use(Sizes, plainly),
    "in place": Use(InPlace, plainly),
    "structures": Use(Structured, with_keywords),
    "an attribute": Use(KeepsAttribute, plainly),
    "weights as outputs": Use(ReturnsWeight, plainly),
    "used elsewhere": Use(Elsewhere, several),
    "on loan": Use(OnLoan, several),
}


def built(use: Use, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return use.factory()


def plain(use: Use, steps: int, world_size: int) -> tuple[list[float], Weights]:
    """(gradient norms, weights after) of one process in float64; a parameter without a gradient has one of zero."""
    model = built(use).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    norms = []
    for step in range(steps):
        for rank in range(world_size):

            def call(x: torch.Tensor, **options: Any) -> Any:
                return model(x.double(), **options)

            def call_by_name(x: torch.Tensor) -> Any:
                return model(x=x.double())

            def backward(loss: torch.Tensor, **options: Any) -> None:
                (loss / world_size).backward(**options)

            use.run(call_by_name if use.run is with_keywords else call, backward, step, rank)
        for parameter in trained:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = grad.to_dense() if grad.is_sparse else grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def with_engine(use: Use, settings: dict[str, Any], steps: int) -> tuple[list[float], Weights, Any]:
    """The same on this rank, and the engine."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine, *_ = megazero.initialize(model=built(use), config=copy.deepcopy(settings))
    norms = []
    for step in range(steps):
        use.run(engine, engine.backward, step, rank)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, whole_weights(engine), engine


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 5,
            "stage3_prefetch_bucket_size": 100,
            "reduce_bucket_size": 100,
            **zero,
        },
    }
