"""DESIGN section 6 and case 26: values that are not finite, or all zero, and what the step then does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megazero.engine import Engine
from megazero.errors import DivergenceError
from megazero.optim.schedule import learning_rate
from tests.distributed.runs import make_whole
from tests.engine.tiny import open_run, steps_in, tiny


class Ending(NamedTuple):
    """How a run ended on one rank: the error, the step it was raised at, whether weights had moved since step 3."""

    message: str
    step: int
    moved: bool


def parameters(engine: Engine) -> dict[str, torch.Tensor]:
    make_whole(engine.stage.sharded)
    return dict(engine.stage.sharded.named_parameters())


def plant_weight(engine: Engine, name: str) -> None:
    parameters(engine)[name].data.view(-1)[5] = torch.nan


def plant_large(engine: Engine, name: str) -> None:
    """Finite, and yet too large for what it is multiplied with."""
    parameters(engine)[name].data.fill_(3e38)


def plant_gradient(engine: Engine, name: str) -> None:
    parameters(engine)[name].register_hook(lambda grad: grad * torch.inf)


def plant_gradient_once(engine: Engine, name: str) -> None:
    def spoil(grad: torch.Tensor) -> torch.Tensor:
        hook.remove()
        return grad * torch.inf

    hook = parameters(engine)[name].register_hook(spoil)


def run_planted(settings: dict, plant: Callable[[Engine, str], None], name: str, rank: int) -> Ending:
    """Train as the script does; on ``rank``, plant something in parameter ``name`` after step 3."""
    engine, train, _ = open_run(settings)
    before: dict[str, torch.Tensor] = {}
    with pytest.raises(DivergenceError) as caught, engine:
        while engine.running():
            if engine.step == 3:
                if engine.topology.rank == rank:
                    plant(engine, name)
                before = {name: value.detach().clone() for name, value in parameters(engine).items()}
            engine.train_batch(train)
            if engine.due(engine.config.checkpoint.save_interval):
                engine.save(train)
        engine.save(train)
    moved = not all(
        torch.equal(value.nan_to_num(7), before[n].nan_to_num(7)) for n, value in parameters(engine).items()
    )
    return Ending(str(caught.value), engine.step, moved)


@pytest.mark.parametrize(
    "world_size, changes, plant, name, rank, words",
    [
        (
            2,
            {"parallel.tp": 2},
            plant_weight,
            "layers.1.attention.out.weight",
            1,
            "first in the weight layers.1.attention.out.weight on rank 1 (pp 0, dp 0, tp 1)",
        ),
        (
            2,
            {"parallel.tp": 2},
            plant_gradient,
            "layers.1.mlp.inner.weight",
            1,
            "first in the gradient of layers.1.mlp.inner.weight on rank 1 (pp 0, dp 0, tp 1)",
        ),
        (
            4,
            {"parallel.pp": 2, "zero.stage": 1},
            plant_gradient,
            "layers.2.attention.qkv.bias",
            3,
            "first in the gradient of layers.2.attention.qkv.bias on rank 3 (pp 1, dp 1, tp 0)",
        ),
        (
            2,
            {},
            plant_weight,
            "final_norm.weight",
            1,
            "first in the weight final_norm.weight on rank 1 (pp 0, dp 1, tp 0)",
        ),
        (
            2,
            {"parallel.pp": 2, "parallel.virtual_pp": 2, "model.num_layers": 4},
            plant_large,
            "layers.1.mlp.down.weight",
            1,
            "first in the output of layers.1.mlp.down on rank 1 (pp 1, dp 0, tp 0)",
        ),
        (2, {"zero.stage": 1}, plant_gradient_once, "layers.0.mlp.down.weight", 0, "suspect the hardware"),
    ],
    ids=["weight, tp", "gradient, tp", "gradient, pp and dp", "weight, dp", "output, chunks", "once"],
)
def test_a_value_that_is_not_finite_stops_the_run_at_the_next_logging_step(
    corpus: Path,
    tmp_path: Path,
    ranks: Callable,
    world_size: int,
    changes: dict,
    plant: Callable,
    name: str,
    rank: int,
    words: str,
) -> None:
    changes = {"log.interval": 3, "checkpoint.dir": tmp_path / "run", "checkpoint.save_interval": 3, **changes}
    endings = ranks(world_size, run_planted, tiny(corpus, changes), plant, name, rank)
    for ending in endings:
        assert ending == endings[0] == Ending(ending.message, 6, False)
    message = endings[0].message
    assert message.startswith("step 4: the gradient is not finite") and words in message
    assert "It read samples 24 to 31" in message
    assert steps_in(tmp_path / "run") == [3]


def test_a_diverged_run_is_never_saved(corpus: Path, tmp_path: Path) -> None:
    """The save comes before the next logging step, and finds out first."""
    changes = {"log.interval": 8, "checkpoint.dir": tmp_path / "run", "checkpoint.save_interval": 1}
    ending = run_planted(tiny(corpus, changes), plant_gradient, "embedding.word.weight", 0)
    assert ending.step == 4 and not ending.moved
    assert "first in the gradient of embedding.word.weight on rank 0" in ending.message
    assert steps_in(tmp_path / "run") == [1, 2, 3]


def test_an_infinite_loss_names_the_module(corpus: Path) -> None:
    """A finite weight may be too large all the same."""
    message = run_planted(tiny(corpus, {"log.interval": 4}), plant_large, "layers.1.mlp.down.weight", 0).message
    assert "first in the output of layers.1.mlp.down on rank 0" in message


def overflow_in_fp16(settings: dict) -> dict:
    """Two good steps around one whose gradient is infinite on the last rank alone; what changed in each."""
    engine, train, _ = open_run(settings)
    last = dist.get_world_size() - 1 if dist.is_initialized() else 0
    seen = []
    with engine:
        for step in (1, 2, 3):
            hook = None
            if step == 2 and engine.topology.rank == last:
                hook = parameters(engine)["layers.2.mlp.down.weight"].register_hook(lambda grad: grad * torch.inf)
            before = copy.deepcopy(
                [(b.master, *b.optimizer_state.values(), b.flat) for b in engine.stage.sharded.blocks]
            )
            metrics = engine.train_batch(train)
            parameters(engine)
            after = [(b.master, *b.optimizer_state.values(), b.flat) for b in engine.stage.sharded.blocks]
            same = all(torch.equal(x, y) for old, new in zip(before, after) for x, y in zip(old, new))
            numbers = (metrics.lr, float(engine.optimizer.adam.count), float(engine.optimizer.loss_scale), same)
            seen.append((engine.step, engine.consumed_samples, *numbers))
            if hook is not None:
                hook.remove()
        rates = [learning_rate(engine.config.optimizer, step, 8) for step in (1, 2, 3)]
    return {"seen": seen, "rates": rates}


@pytest.mark.parametrize(
    "world_size, changes", [(1, {}), (4, {"parallel.pp": 2, "zero.stage": 1})], ids=["1", "pp2 dp2"]
)
def test_fp16_skips_a_step_that_overflows(corpus: Path, ranks: Callable, world_size: int, changes: dict) -> None:
    """Steps, samples and learning rate go on, Adam's counter does not, the loss scale halves; on every rank."""
    settings = tiny(corpus, {"train.precision": "fp16", "train.initial_loss_scale": 1024, **changes})
    found = [overflow_in_fp16(settings)] if world_size == 1 else ranks(world_size, overflow_in_fp16, settings)
    for result in found:
        first, second, third = result["rates"]
        assert first > second > third
        assert result["seen"] == [
            (1, 8, first, 1, 1024, False),
            (2, 16, second, 1, 512, True),
            (3, 24, third, 2, 512, False),
        ]


def test_fp16_stops_where_no_smaller_loss_scale_is_left(corpus: Path) -> None:
    """A weight that is not a number overflows at every scale: two steps halve it to the least, the next is the last."""

    def plant(engine: Engine, name: str) -> None:
        plant_weight(engine, name)
        for block in engine.stage.sharded.blocks:
            for entry in block.layout.entries:
                if entry.name == name:
                    block.master[entry.start + 5] = torch.nan

    changes = {"train.precision": "fp16", "train.initial_loss_scale": 4, "log.interval": 1, "train.min_loss_scale": 1}
    ending = run_planted(tiny(corpus, changes), plant, "layers.1.mlp.down.weight", 0)
    assert ending.step == 6 and not ending.moved
    assert ending.message.startswith("step 6: the gradient is not finite, first in the weight layers.1.mlp.down.weight")


class AllMasked:
    """Another source, none of whose tokens counts."""

    def __init__(self, source: object) -> None:
        self.source = source

    def read(self, *arguments: int) -> list[dict[str, torch.Tensor]]:
        batches = self.source.read(*arguments)
        return [{**batch, "weights": torch.zeros_like(batch["weights"])} for batch in batches]


def test_a_gradient_of_zero_leaves_only_decay(corpus: Path) -> None:
    """No token in the loss: loss and norm are 0, not NaN; moments decay and weights shrink as AdamW has it."""
    engine, train, _ = open_run(tiny(corpus, {"optimizer.weight_decay": 0.3, "optimizer.lr": 1e-2}))
    with engine:
        metrics = engine.train_batch(AllMasked(train))
        (block,) = [block for block in engine.stage.sharded.blocks if block.layout.name == "layers.1"]
        assert float(metrics.loss) == 0 and float(metrics.grad_norm) == 0
        assert not block.owned_state("exp_avg").any() and not block.owned_state("exp_avg_sq").any()

        engine.train_batch(train)
        weight = parameters(engine)["layers.1.mlp.down.weight"]
        bias = parameters(engine)["layers.1.mlp.down.bias"]
        before = (
            weight.detach().clone(),
            bias.detach().clone(),
            block.owned_state("exp_avg").clone(),
            block.owned_state("exp_avg_sq").clone(),
        )
        lr = engine.train_batch(AllMasked(train)).lr
        parameters(engine)
        torch.testing.assert_close(block.owned_state("exp_avg"), 0.9 * before[2])
        torch.testing.assert_close(block.owned_state("exp_avg_sq"), 0.95 * before[3])
        (entry,) = [entry for entry in block.layout.entries if entry.name == "layers.1.mlp.down.weight"]
        mean, square = (
            x[entry.start : entry.end].view_as(weight)
            for x in (block.owned_state("exp_avg"), block.owned_state("exp_avg_sq"))
        )
        update = (mean / (1 - 0.9**3)) / ((square / (1 - 0.95**3)).sqrt() + 1e-8)
        torch.testing.assert_close(weight.detach(), before[0] * (1 - lr * 0.3) - lr * update)
        (entry,) = [entry for entry in block.layout.entries if entry.name == "layers.1.mlp.down.bias"]
        mean, square = (
            x[entry.start : entry.end].view_as(bias)
            for x in (block.owned_state("exp_avg"), block.owned_state("exp_avg_sq"))
        )
        update = (mean / (1 - 0.9**3)) / ((square / (1 - 0.95**3)).sqrt() + 1e-8)
        torch.testing.assert_close(bias.detach(), before[1] - lr * update)


def test_clipping_given_0_is_off(corpus: Path) -> None:
    """The same update as under a limit that is never reached; the norm that is reported is the one before clipping."""

    def train(clip: float) -> tuple[float, torch.Tensor]:
        engine, source, _ = open_run(tiny(corpus, {"optimizer.clip_grad_norm": clip, "optimizer.eps": 1.0}))
        with engine:
            norm = float(engine.train_batch(source).grad_norm)
            return norm, parameters(engine)["layers.0.mlp.down.weight"].detach().clone()

    (norm, free), (high_norm, high), (low_norm, low) = train(0), train(1e9), train(0.1)
    assert norm == high_norm == low_norm > 1
    assert torch.equal(free, high) and not torch.allclose(free, low, atol=1e-6)
