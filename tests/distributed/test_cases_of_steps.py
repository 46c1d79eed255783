"""As test_cases.py: steps that change nothing or end the run, and random numbers that go on after a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megazero.errors import DivergenceError
from megazero.models.config import ModelConfig
from tests.distributed import runs
from tests.distributed.runs import (
    Layout,
    TokenSource,
    Weights,
    assert_close,
    make_engine,
    plain_loop,
    random_weights,
    settings,
    train,
)
from tests.distributed.test_cases import GPT2

# 26


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_26_a_zero_gradient_leaves_decay_and_moments(layout: Layout) -> None:
    """Nothing is in the loss at first: weights only decay. Nothing is again, later: moments fade as AdamW says."""
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    source.fields["weights"][:4] = 0
    source.fields["weights"][8:12] = 0
    tree = settings(GPT2, layout, zero={"stage": 1}, optimizer={"warmup_steps": 0, "weight_decay": 0.2})
    first = train(tree, source, weights, dp=layout[2], steps=1)
    assert (first.losses, first.norms) == ([0.0], [0.0])
    for name, tensor in weights.items():
        decay = 1 - first.rates[0] * 0.2 if tensor.dim() > 1 else 1.0
        torch.testing.assert_close(first.weights[name], tensor * decay, rtol=3e-7, atol=0)
        assert not first.state["exp_avg"][name].any() and not first.state["exp_avg_sq"][name].any()
    assert_close(train(tree, source, weights, dp=layout[2]), plain_loop(tree, source, weights))


def run_into_infinity(tree: dict[str, Any], source: TokenSource, weights: Weights, steps: int):
    """As runs.run_rank, where a gradient of the last rank is infinite in step 2 only."""
    with make_engine(tree, weights) as engine:
        parameter = engine.stage.sharded.blocks[-1].parameters[0]
        last = engine.topology.rank == engine.topology.layout.world_size - 1
        parameter.register_hook(lambda grad: grad * math.inf if last and engine.step == 1 else grad)
        metrics = [engine.train_batch(source) for _ in range(steps)]
        return [(float(m.loss), float(m.grad_norm), m.lr) for m in metrics], runs.pieces_of(engine)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_26_an_infinite_norm_on_one_rank_leaves_all_weights_untouched(layout: Layout) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    tree = settings(GPT2, layout, zero={"stage": 1})
    before = train(tree, source, weights, dp=layout[2], steps=1)
    after = train(tree, source, weights, dp=layout[2], steps=3, function=run_into_infinity)
    assert not math.isfinite(after.norms[1])
    for kind in runs.KINDS:
        assert all(torch.equal(after.state[kind][name], value) for name, value in before.state[kind].items())


def diverge_and_log(tree: dict[str, Any], source: TokenSource) -> str:
    weights = random_weights(ModelConfig(**GPT2))
    weights["layers.1.mlp.down.weight"][0, 0] = math.inf
    with make_engine(tree, weights) as engine:
        try:
            engine.train_batch(source)
        except DivergenceError as error:
            return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_26_an_infinite_norm_stops_every_rank_with_what_and_where(ranks: Callable, layout: Layout) -> None:
    tree = settings(GPT2, layout, log={"interval": 1})
    messages = ranks(math.prod(layout), diverge_and_log, tree, TokenSource(37, 12))
    assert set(messages) == {messages[0]}
    assert "step 1" in messages[0] and "layers.1.mlp.down" in messages[0] and "samples 0 to 3" in messages[0]


def overflow_in_fp16(tree: dict[str, Any], source: TokenSource, weights: Weights):
    with make_engine(tree, weights) as engine:
        scales, changed = [], []
        for _ in range(tree["train"]["steps"]):
            before = [block.master.clone() for block in engine.stage.sharded.blocks]
            scales.append(float(engine.optimizer.loss_scale))
            engine.train_batch(source)
            now = [block.master for block in engine.stage.sharded.blocks]
            changed.append(not all(map(torch.equal, before, now)))
        return scales, changed, float(engine.optimizer.adam.count), engine.step


def test_26_an_overflow_in_fp16_is_skipped_by_every_rank(ranks: Callable) -> None:
    fields = {"precision": "fp16", "initial_loss_scale": 2.0**40, "steps": 40, "global_batch_size": 2}
    model = {**GPT2, "num_layers": 1, "hidden_size": 8}
    tree = settings(model, (1, 1, 2), zero={"stage": 1}, data={"seq_length": 4}, train=fields)
    results = ranks(2, overflow_in_fp16, tree, TokenSource(37, 4), random_weights(ModelConfig(**model)))
    scales, changed, updates, steps = results[0]
    assert results[1] == results[0]
    skipped = changed.index(True)
    assert 5 < skipped < 35 and all(changed[skipped:]) and updates == 40 - skipped and steps == 40
    assert scales == [2.0 ** (40 - min(i, skipped)) for i in range(40)]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_26_clipping_given_0_is_off(layout: Layout) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    tree = settings(GPT2, layout, optimizer={"clip_grad_norm": 0.0})
    ours = train(tree, source, weights)
    assert_close(ours, plain_loop(tree, source, weights))
    assert max(ours.norms) > 1


# 27


def stop_and_resume(tree: dict[str, Any], source: TokenSource, weights: Weights, steps: int):
    """Two steps, a save, and the rest by a second engine that starts from the file."""
    numbers = []
    for engine_steps in (2, steps - 2):
        with make_engine(tree, None if numbers else weights) as engine:
            metrics = [engine.train_batch(source) for _ in range(engine_steps)]
            numbers += [(float(m.loss), float(m.grad_norm), m.lr) for m in metrics]
            engine.save(source)
            pieces = runs.pieces_of(engine)
    return numbers, pieces


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_27_masks_go_on_after_a_resume(tmp_path: Path, recompute: str) -> None:
    """Attention dropout draws from each rank's own generator, other dropout from the token's place in the run."""
    model = {**GPT2, "dropout": 0.2, "attention_dropout": 0.4}
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**model))
    tree = settings(model, (2, 1, 2), zero={"stage": 1}, train={"steps": 4, "recompute": recompute})
    unbroken = train(tree, source, weights, dp=2)
    broken = {**tree, "checkpoint": {"dir": str(tmp_path)}}
    resumed = train(broken, source, weights, dp=2, function=stop_and_resume)
    assert (resumed.losses, resumed.norms) == (unbroken.losses, unbroken.norms)
    for kind in runs.KINDS:
        assert all(torch.equal(resumed.state[kind][name], value) for name, value in unbroken.state[kind].items())


def generator_state(tree: dict[str, Any], directory: str) -> tuple[bytes, bytes]:
    """Before a save and after a resume."""
    source = TokenSource(37, 12)
    tree = {**tree, "checkpoint": {"dir": directory}}
    with make_engine(tree) as engine:
        engine.train_batch(source)
        engine.save(source)
        before = torch.get_rng_state().numpy().tobytes()
    torch.manual_seed(0)
    dist.barrier()
    with make_engine(tree):
        return before, torch.get_rng_state().numpy().tobytes()


def test_27_each_rank_has_its_own_random_state(ranks: Callable, tmp_path: Path) -> None:
    model = {**GPT2, "attention_dropout": 0.4}
    states = ranks(4, generator_state, settings(model, (2, 2, 1)), str(tmp_path))
    assert all(before == after for before, after in states)
    assert len({before for before, _ in states}) == 4
