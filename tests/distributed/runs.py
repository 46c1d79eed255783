"""Short training runs: on any layout with the engine, and on one process with nothing but torch.

`train` runs the engine on the ranks of a layout and puts the global tensors together again; on the way it checks that
the ranks hold every element exactly once and that copies of an element are the same bits. `plain_loop` is the truth:
the whole model in float64, torch's own AdamW and clipping, the whole global batch at once.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import methodcaller
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import distributed as dist

from megazero.config import Config
from megazero.config_tree import merged
from megazero.engine import Engine
from megazero.launch.environment import ProcessEnvironment
from megazero.models.config import ModelConfig
from megazero.models.context import build_context
from megazero.models.gpt import GPT
from megazero.models.parameters import parameter_shapes
from megazero.sharding import is_counted
from megazero.zero.block import Block
from megazero.zero.sharded import ShardedModel
from tests.distributed import harness

Layout = tuple[int, int, int]
"""(tp, pp, dp)"""

LOSS, NORM, WEIGHTS = 2e-6, 5e-5, 1e-4
"""How far any layout may be from a float64 run: relative in loss and norm, and in each tensor's norm."""

KINDS = ("weight", "exp_avg", "exp_avg_sq")

Weights = dict[str, torch.Tensor]


class Piece(NamedTuple):
    """A box of a global tensor on one rank; ``counts`` on the one rank that stands for all that hold it."""

    kind: str
    name: str
    global_shape: tuple[int, ...]
    index: tuple[slice, ...]
    counts: bool
    values: torch.Tensor


@dataclass
class Outcome:
    """What a run gave: a number per step, and the state it ended with, by kind and global name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, Weights] = field(default_factory=dict)

    @property
    def weights(self) -> Weights:
        return self.state["weight"]


class TokenSource:
    """Random tokens as a batch source: sample i of the run is sample i mod ``samples``."""

    def __init__(self, vocab_size: int, seq_length: int, samples: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.fields = {
            "tokens": torch.randint(vocab_size, (samples, seq_length + 1), generator=generator),
            "weights": torch.ones(samples, seq_length),
        }

    def batch(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        batch = {name: value[positions % len(value)] for name, value in self.fields.items()}
        return {**batch, "samples": positions}

    def read(self, first: int, dp_rank: int, dp_size: int, global_batch_size: int, micro_batch_size: int):
        count = global_batch_size // (micro_batch_size * dp_size)
        starts = [first + (j * dp_size + dp_rank) * micro_batch_size for j in range(count)]
        return [self.batch(torch.arange(start, start + micro_batch_size)) for start in starts]


def settings(model: Mapping[str, Any], layout: Layout = (1, 1, 1), **sections: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a run of 3 steps of 4 samples of 12 tokens, with ``sections`` on top."""
    tree = {
        "model": dict(model),
        "parallel": {"tp": layout[0], "pp": layout[1], "vocab_multiple": 4},
        # At stage 3 norms stay whole, matrices come and go.
        "zero": {"stage3_param_persistence_threshold": 20},
        "data": {"seq_length": 12},
        # Softmax does not see a key bias (without rotation): its gradient is rounding noise of some 1e-7, which Adam
        # would blow up to whole steps unless eps is well above it.
        "optimizer": {"lr": 2e-3, "min_lr": 4e-4, "warmup_steps": 2, "clip_grad_norm": 0.5, "eps": 1e-4},
        "train": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 1, "precision": "fp32", "compile": False},
        "log": {"interval": 0},
    }
    return merged(tree, sections)


def random_weights(model: ModelConfig, seed: int = 0) -> Weights:
    """Values that let no tensor hide: biases not zero, norm weights not one, matrices of unit gain."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(model).items():
        scale = 0.2 if len(shape) == 1 else shape[1] ** -0.5
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        weights[name] = torch.randn(shape, generator=generator) * scale + centre
    return weights


def make_engine(config: Config | Mapping[str, Any], weights: Weights | None = None) -> Engine:
    """This rank's engine, in the process group that is there; ``weights``: global tensors to begin with."""
    config = config if isinstance(config, Config) else Config.from_dict(config)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # A collection goes through all that a worker has imported: 0.3 s, most of what a short run would cost.
    with mock.patch.object(gc, "collect"):
        engine = Engine(config, ProcessEnvironment(rank, rank, world_size))
    if weights is not None:
        set_weights(engine, weights)
    return engine


def make_whole(sharded: ShardedModel) -> None:
    """Wait for the update of every parameter that is whole between uses."""
    sharded.gather()
    for block in sharded.blocks:
        if not block.sharding.parameters:
            block.use()


def set_weights(engine: Engine, weights: Weights) -> None:
    for block in engine.stage.sharded.blocks:
        block.load("weight", lambda name, shape, box: weights[name][index_of(box)])


def index_of(box: Any) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape))


def pieces_of(engine: Engine) -> list[Piece]:
    """Everything this rank keeps in float32, as boxes of global tensors."""
    return [piece for kind in KINDS for piece in state_pieces(engine, kind, methodcaller("owned_state", kind))]


def state_pieces(engine: Engine, kind: str, state_of: Callable[[Block], torch.Tensor]) -> list[Piece]:
    """``state_of`` gives a block's state of its owned range; what others own alike counts as a copy."""
    pieces = []
    for block in engine.stage.sharded.blocks:
        (first, last), (low, high), state = block.owned, block.shard, state_of(block)
        for start, end, own in ((first, low, False), (low, high, True), (high, last, False)):
            for at, piece, box in block.layout.boxes(start, end):
                values = state[at - first : at - first + box.numel].view(box.shape).clone()
                first_copy = engine.stage.sharded.groups.replicate.rank == 0
                counts = own and first_copy and is_counted(piece, engine.topology.coordinates)
                pieces.append(Piece(kind, piece.name, piece.global_shape, index_of(box), counts, values))
    return pieces


def run_rank(
    tree: Mapping[str, Any], source: Any, weights: Weights | None, steps: int
) -> tuple[list[tuple[float, float, float]], list[Piece]]:
    """On every rank: (loss, norm, rate) per step, and the state at the end."""
    with make_engine(tree, weights) as engine:
        metrics = [engine.train_batch(source) for _ in range(steps)]
        return [(float(m.loss), float(m.grad_norm), m.lr) for m in metrics], pieces_of(engine)


def assemble(pieces_by_rank: list[list[Piece]]) -> dict[str, Weights]:
    """Global tensors by kind and name. Every element is there exactly once, and its copies are the same bits."""
    state: dict[str, Weights] = {}
    filled: dict[tuple[str, str], torch.Tensor] = {}
    pieces = [piece for pieces in pieces_by_rank for piece in pieces]
    for piece in pieces:
        whole = state.setdefault(piece.kind, {}).setdefault(piece.name, torch.zeros(piece.global_shape))
        seen = filled.setdefault((piece.kind, piece.name), torch.zeros(piece.global_shape, dtype=torch.bool))
        if piece.counts:
            assert not seen[piece.index].any(), f"{piece.name}: two ranks hold {piece.index} as theirs"
            seen[piece.index] = True
            whole[piece.index] = piece.values
    for key, seen in filled.items():
        assert seen.all(), f"{key}: {int((~seen).sum())} elements on no rank"
    for piece in pieces:
        if not piece.counts:
            assert torch.equal(state[piece.kind][piece.name][piece.index], piece.values), f"{piece.name}: copies differ"
    return state


def train(
    tree: Mapping[str, Any],
    source: Any,
    weights: Weights | None = None,
    *,
    dp: int = 1,
    steps: int | None = None,
    function: Callable = run_rank,
    timeout: float = 240,
) -> Outcome:
    """The engine on tp · pp · ``dp`` processes. Every rank reports the same numbers."""
    world_size = tree["parallel"]["tp"] * tree["parallel"]["pp"] * dp
    steps = tree["train"]["steps"] if steps is None else steps
    results = harness.run(world_size, function, tree, source, weights, steps, timeout=timeout)
    for numbers, _ in results:
        assert numbers == results[0][0] or any(map(math.isnan, sum(numbers, ()))), "ranks report different numbers"
    losses, norms, rates = map(list, zip(*results[0][0])) if steps else ([], [], [])
    return Outcome(losses, norms, rates, assemble([pieces for _, pieces in results]))


def fused(weights: Weights) -> Weights:
    """Global tensors → the plain model's parameters, where q, k, v and gate, up are one matrix."""
    result: Weights = {}
    for name, tensor in weights.items():
        local = name
        for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv")):
            local = local.replace(f".attention.{part}.", f".attention.{whole}.")
        for part in ("gate", "up"):
            local = local.replace(f".mlp.{part}.", ".mlp.inner.")
        result[local] = torch.cat((result[local], tensor)) if local in result else tensor
    return result


def split_up(parameters: Weights, model: ModelConfig) -> Weights:
    """The reverse of `fused`."""
    names, taken, result = {name: fused_name(name) for name in parameter_shapes(model)}, {}, {}
    for name, shape in parameter_shapes(model).items():
        start = taken.get(names[name], 0)
        result[name] = parameters[names[name]][start : start + shape[0]]
        taken[names[name]] = start + shape[0]
    return result


def fused_name(name: str) -> str:
    return next(iter(fused({name: torch.zeros(1)})))


def plain_loop(
    tree: Mapping[str, Any],
    source: TokenSource,
    weights: Weights,
    steps: int | None = None,
    dtype: torch.dtype = torch.float64,
    sizes: Sequence[int] | None = None,
) -> Outcome:
    """The same run by one plain process: whole model, whole batch, torch.optim.AdamW, clip_grad_norm_. ``sizes``: of
    each step's batch, where they are not all the same."""
    config = Config.from_dict(
        merged(tree, {"parallel": {"tp": 1, "pp": 1, "virtual_pp": 1, "partition": None, "sequence_parallel": False}})
    )
    architecture, train, optimizer = config.model.architecture, config.train, config.optimizer
    model = GPT(architecture).to(dtype)
    values = fused(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW([g for g in groups if g["params"]], betas=optimizer.betas, eps=optimizer.eps)
    outcome = Outcome()
    for step in range(1, (train.steps if steps is None else steps) + 1):
        ends = list(accumulate(sizes or [train.global_batch_size] * step))
        batch = source.batch(torch.arange(ends[step - 1])[ends[step - 2] if step > 1 else 0 :])
        loss = plain_loss(model, batch, config.train.seed)
        adam.zero_grad()
        loss.backward()
        clip = optimizer.clip_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        rate = warmup_then_cosine(step, optimizer.lr, optimizer.min_lr, optimizer.warmup_steps, train.steps)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        outcome.losses.append(loss.item())
        outcome.norms.append(norm.item())
        outcome.rates.append(rate)
    outcome.state["weight"] = split_up({name: p.detach() for name, p in model.named_parameters()}, architecture)
    return outcome


def plain_loss(model: GPT, batch: Mapping[str, torch.Tensor], seed: int = 1234) -> torch.Tensor:
    """The mean over unmasked tokens of a batch, with torch's own cross-entropy."""
    tokens = batch["tokens"]
    context = build_context(
        model.config,
        tokens.shape[1] - 1,
        tokens.shape[0],
        batch.get("positions"),
        batch.get("documents"),
        batch["samples"],
        seed=seed,
    )
    logits = model.head(model(tokens[:, :-1].flatten(), context))
    losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
    weights = batch["weights"].flatten().to(losses.dtype)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def warmup_then_cosine(step: int, lr: float, min_lr: float, warmup: int, steps: int) -> float:
    """Linear to ``lr`` at step ``warmup``, then a half cosine to ``min_lr`` at step ``steps``; steps count from 1."""
    if step <= warmup:
        return lr * step / warmup
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def relative(ours: float, truth: float) -> float:
    return abs(ours - truth) / max(abs(truth), 1e-30)


def assert_close(ours: Outcome, truth: Outcome) -> None:
    """Within the tolerances of a reference run."""
    assert len(ours.losses) == len(truth.losses)
    assert ours.rates == truth.rates or max(map(relative, ours.rates, truth.rates)) < 1e-12
    assert max(map(relative, ours.losses, truth.losses)) < LOSS, (ours.losses, truth.losses)
    assert max(map(relative, ours.norms, truth.norms)) < NORM, (ours.norms, truth.norms)
    assert ours.weights.keys() == truth.weights.keys()
    errors = {name: tensor_error(ours.weights[name], truth.weights[name]) for name in truth.weights}
    far = {name: error for name, error in errors.items() if not error < WEIGHTS}
    assert not far, far


def tensor_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())
