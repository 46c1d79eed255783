"""Models that are not ours, and the plain float64 loop that the engine is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn

import megazero

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}}

Losses = list[float]
Weights = dict[str, torch.Tensor]


class Odd(nn.Module):
    """Layers with parameters of odd sizes, tied, frozen and unused ones, one module applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(OddLayer() for _ in range(3))
        self.twice = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(6, 5)
        self.empty = nn.Linear(4, 0, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inverse", torch.linspace(0.1, 1, 6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S + 1) → the mean cross-entropy."""
        x = self.embed(tokens[:, :-1]) * self.inverse.to(self.scale.dtype)
        for layer in self.layers:
            x = layer(x)
        x = self.twice(torch.tanh(self.twice(x))) + self.frozen(x)
        logits = self.head(x) * self.scale
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class OddLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, bias=False)
        self.three = nn.Parameter(torch.full((3,), 0.1))
        self.one = nn.Parameter(torch.full((1,), 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.one + self.three.repeat(2)


def build(factory: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


def batch(step: int, micro_step: int, rank: int, vocabulary: int = 13, shape: tuple[int, int] = (2, 9)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro_step + rank)
    return torch.randint(vocabulary, shape, generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of one of the models here, or of a causal language model of Hugging Face."""
    if not hasattr(getattr(model, "module", model), "config"):  # an engine has one of its own
        return model(tokens)
    return model(input_ids=tokens, labels=tokens).loss


def plain(
    factory: Callable[[], nn.Module],
    optimizer: Callable[[list], torch.optim.Optimizer],
    steps: int,
    accumulation: int,
    world_size: int,
    clip: float,
    vocabulary: int = 13,
) -> tuple[Losses, Losses, Weights]:
    """(losses, gradient norms before clipping, weights after) of one process in float64, all ranks' batches in turn."""
    model = build(factory).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    made = optimizer(trained)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for micro_step in range(accumulation):
            for rank in range(world_size):
                loss = loss_of(model, batch(step, micro_step, rank, vocabulary)) / (accumulation * world_size)
                loss.backward()
                total += loss.item()
        for parameter in trained:  # what is unused has a gradient of zero
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip or float("inf"))))
        made.step()
        made.zero_grad()
        losses.append(total)
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def config(stage: int, accumulation: int, clip: float, **sections: Any) -> dict[str, Any]:
    tree = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 5, "reduce_bucket_size": 100},
    }
    for name, section in sections.items():
        tree[name] = {**tree[name], **section} if isinstance(tree.get(name), dict) else section
    return tree


def trained(
    factory: Callable[[], nn.Module],
    settings: dict[str, Any],
    steps: int,
    prepare: Callable[[nn.Module], dict[str, Any]] | None = None,
    vocabulary: int = 13,
) -> tuple[Losses, Losses, Weights]:
    """The same on this rank with the engine; losses are the mean over ranks. ``prepare``: further arguments."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = build(factory, seed=3 + rank)  # rank 0's values are every rank's
    arguments = prepare(model) if prepare is not None else {}
    engine, *_ = megazero.initialize(model=model, config=copy.deepcopy(settings), **arguments)
    losses, norms = [], []
    for step in range(steps):
        total = torch.zeros((), device=engine.device)
        for micro_step in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, batch(step, micro_step, rank, vocabulary).to(engine.local_rank))
            total += engine.backward(loss).float()
            engine.step()
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world)
        norms.append(engine.get_global_grad_norm())
    return losses, norms, whole_weights(engine)


def whole_weights(engine: Any) -> Weights:
    blocks = range(len(engine.sharded.blocks))
    engine.sharded.gather()
    engine.sharded.hold(blocks, "a test")
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.sharded.let_go(blocks)
    return weights
