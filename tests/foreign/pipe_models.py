"""Pipelines of layers of our own, and the plain float64 loop over nn.Sequential that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import megazero
from megazero.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.foreign.models import Losses, Weights, whole_weights

WIDTH, VOCABULARY, LENGTH = 6, 13, 5
ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}}


class Embed(nn.Embedding):
    """Tokens (B, S) → (hidden states (B, S, H), positions (B, S) int64, a scale (B, 1, 1) that takes no gradient)."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return super().forward(tokens), positions, (tokens.float().mean(1).view(-1, 1, 1) / 10).to(self.weight.dtype)


class Layer(nn.Module):
    """Works on the first tensor, in place if asked to, and passes the rest on."""

    def __init__(self, inner: int, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, positions, factor = x
        change = self.down(torch.tanh(self.up(hidden * factor))) * self.scale
        return hidden.add_(change) if self.in_place else hidden + change, positions, factor


class Position(nn.Module):
    """The last that looks at positions; one tensor from here on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x[0] + self.table(x[1])


def frozen() -> nn.Module:
    torch.manual_seed(11)
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def unembed(embed: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ embed.weight.t()


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def layers(in_place: bool = False) -> list[Any]:
    """Tied at both ends, uneven, a frozen one, a function, the first ones of several tensors."""
    return [
        TiedLayerSpec("embed", Embed, VOCABULARY, WIDTH),
        LayerSpec(Layer, 7, in_place),
        LayerSpec(Layer, 4, in_place),
        LayerSpec(Position),
        frozen(),
        LayerSpec(nn.ReLU, inplace=in_place),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        torch.tanh,
        TiedLayerSpec("embed", Embed, VOCABULARY, WIDTH, forward_fn=unembed),
    ]


def in_place() -> list[Any]:
    return layers(in_place=True)


class Residual(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(super().forward(x))


def crossed() -> list[Any]:
    """Two tied layers, which the last of two or three stages comes to in the other order than the first."""
    return [
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH),
        TiedLayerSpec("residual", Residual, WIDTH, WIDTH),
        LayerSpec(Residual, WIDTH, WIDTH),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("residual", Residual, WIDTH, WIDTH),
        TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=unembed),
    ]


def frozen_first() -> list[Any]:
    """Nothing is trained on the first of two stages, and nothing has a parameter in the middle."""
    return [
        frozen_embedding(),
        torch.tanh,
        LayerSpec(nn.Linear, WIDTH, 7),
        nn.ReLU(),
        LayerSpec(nn.Linear, 7, VOCABULARY),
    ]


def frozen_embedding() -> nn.Module:
    torch.manual_seed(12)
    return nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)


def batches(rank: int, size: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of one data-parallel process of ``size``, ``count`` in each step."""
    for number in range(10**6):
        step, micro = divmod(number, count)
        seed = (step * count + micro) * size + rank
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        yield tokens[:, :-1], tokens[:, 1:]


def settings(stage: int = 0, accumulation: int = 3, clip: float = 0.5, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 5, "reduce_bucket_size": 100},
        **sections,
    }


class Plain(nn.Module):
    """The same layers by hand, with the same names."""

    def __init__(self, specs: list[Any], base_seed: int = 1234) -> None:
        super().__init__()
        self.calls, first = [], {}
        for index, layer in enumerate(specs):
            torch.manual_seed(base_seed + index)
            key = getattr(layer, "key", None)
            made = first.get(key) if key else None
            if made is None:
                made = layer.build() if isinstance(layer, LayerSpec) else layer
                if isinstance(made, nn.Module):
                    self.add_module(str(index), made)
                if key:
                    first[key] = made
            use = getattr(layer, "forward_fn", None)
            self.calls.append((lambda x, use=use, made=made: use(made, x)) if use else made)

    def forward(self, x: Any) -> Any:
        for call in self.calls:
            x = call(x)
        return x


def plain(
    make: Callable[[], list[Any]], steps: int, accumulation: int = 3, size: int = 1, clip: float = 0.5
) -> tuple[Losses, Losses, Weights, float]:
    """(losses, norms before clipping, weights, the loss of the next step's batches) in float64."""
    model = Plain(make()).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    iterators = [batches(rank, size, accumulation) for rank in range(size)]
    losses, norms = [], []

    def loss_of(iterator: Iterator) -> torch.Tensor:
        inputs, labels = next(iterator)
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / (accumulation * size)

    for _ in range(steps):
        total = 0.0
        for _ in range(accumulation):
            for iterator in iterators:
                loss = loss_of(iterator)
                loss.backward()
                total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with torch.no_grad():
        evaluated = sum(loss_of(iterator).item() for _ in range(accumulation) for iterator in iterators)
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}, evaluated


def start(make: Callable[[], list[Any]], stages: int, tree: dict[str, Any], **options: Any) -> Any:
    options = {"partition_method": "uniform", "seed_layers": True, "loss_fn": loss_fn, **options}
    module = PipelineModule(make(), num_stages=stages, **options)
    engine, *_ = megazero.initialize(model=module, config=copy.deepcopy(tree))
    return engine


def own_batches(engine: Any, accumulation: int) -> Iterator | None:
    """None on stages that read nothing."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    topology = engine.topology
    return batches(topology.coordinates["dp"], topology.layout.dp, accumulation)


def trained(
    make: Callable[[], list[Any]], stages: int, tree: dict[str, Any], steps: int, **options: Any
) -> tuple[Losses, Losses, Weights, float]:
    """The same as ``plain``; weights are this stage's."""
    engine = start(make, stages, tree, **options)
    iterator = own_batches(engine, engine.gradient_accumulation_steps())
    losses, norms = [], []
    for _ in range(steps):
        losses.append(float(engine.train_batch(iterator)))
        norms.append(engine.get_global_grad_norm())
    evaluated = float(engine.eval_batch(iterator))
    return losses, norms, whole_weights(engine), evaluated
