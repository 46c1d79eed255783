"""Pipelines of a user's layers against a plain float64 loop over the same layers in one process."""

from __future__ import annotations

import itertools
import math
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn

from megazero.errors import ConfigError, MegazeroError
from megazero.foreign.consolidate import consolidate
from megazero.foreign.pipe.specs import divide
from megazero.layout import Layout
from megazero.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.foreign import pipe_models
from tests.foreign.models import Weights, whole_weights
from tests.foreign.pipe_models import (
    crossed,
    frozen_first,
    in_place,
    layers,
    own_batches,
    plain,
    settings,
    start,
    trained,
)
from tests.foreign.test_engine import check
from tests.foreign.test_mistakes import Fails

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("make", "stages", "size", "accumulation", "tree", "options"),
    [
        pytest.param(in_place, 2, 1, 3, {"stage": 1}, {}, id="2 stages, in place"),
        pytest.param(layers, 2, 2, 3, {"stage": 0}, {"dynamic_shape": True}, id="2 x 2"),
        pytest.param(layers, 2, 2, 2, {"stage": 3}, {"activation_checkpoint_interval": 2}, id="2 x 2, recomputed"),
        pytest.param(layers, 3, 1, 1, {"stage": 2}, {"partition_method": "parameters"}, id="one micro-batch"),
        pytest.param(frozen_first, 4, 1, 3, {"stage": 1}, {}, id="stages that train nothing, or hold nothing"),
    ],
)
def test_stages_agree_with_a_plain_loop(
    ranks: Callable, make: Callable, stages: int, size: int, accumulation: int, tree: dict, options: dict
) -> None:
    """Tied, frozen and uneven layers, several tensors, a gradient that comes back for some of them."""
    wanted = plain(make, 3, accumulation, size)
    found = ranks(stages * size, trained, make, stages, settings(accumulation=accumulation, **tree), 3, **options)
    for losses, norms, weights, evaluated in found:
        check([(losses, norms, weights)], (*wanted[:2], {name: wanted[2][name] for name in weights}))
        assert evaluated == pytest.approx(wanted[3], rel=2e-6)
    held = [frozenset(weights) for *_, weights, _ in found]
    assert set().union(*held) == wanted[2].keys()
    if make is not frozen_first:
        assert all(weights["0.weight"].equal(found[0][2]["0.weight"]) for *_, weights, _ in (found[0], found[-1]))
        assert set(held[0]) & set(held[-1]) == {"0.weight"}, "a stage holds what is not its own"


def half(name: str) -> list[tuple]:
    return [trained(layers, stages, settings(1, **{name: {"enabled": True}}), 3) for stages in (1, 2)]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_sixteen_bits(ranks: Callable, name: str) -> None:
    """Two stages and two data-parallel processes of one stage are as near to the truth as each other."""
    wanted = plain(layers, 3, 3, 1)
    for alone, staged in ranks(2, half, name):
        assert staged[0] == pytest.approx(wanted[0], rel=2e-3) and staged[1] == pytest.approx(wanted[1], rel=2e-2)
        assert alone[0] != staged[0]  # other samples
        for key, value in staged[2].items():
            assert value.dtype == getattr(torch, "bfloat16" if name == "bf16" else "float16")
            assert (value.double() - wanted[2][key]).norm() <= 1e-2 * wanted[2][key].norm(), key


# Checkpoints


def saving(folder: str, stages: int, stage: int, make: Callable = layers) -> tuple[list[float], Weights]:
    engine = start(make, stages, settings(stage))
    iterator = own_batches(engine, 3)
    for _ in range(2):
        engine.train_batch(iterator)
    check_grid(engine)
    engine.save_checkpoint(folder, client_state={"epoch": 4})
    return [float(engine.train_batch(iterator)) for _ in range(2)], whole_weights(engine)


def check_grid(engine: Any) -> None:
    grid, rank = engine.grid, dist.get_rank()
    assert (grid.get_stage_id(), grid.get_data_parallel_id()) == divmod(rank, grid.get_data_parallel_world_size())
    assert grid is engine.mpu and grid.get_global_rank() == rank == grid.stage_to_global(grid.get_pipe_parallel_rank())
    for kind in ("data", "pipe", "model", "slice"):
        group, size, own = (getattr(grid, f"get_{kind}_parallel_{name}")() for name in ("group", "world_size", "rank"))
        assert (dist.get_world_size(group), dist.get_rank(group)) == (size, own), kind


def loading(folder: str, stages: int, stage: int, make: Callable = layers) -> tuple[list[float], Weights]:
    engine = start(make, stages, settings(stage), base_seed=77)
    path, state = engine.load_checkpoint(folder)
    assert path is not None and state == {"epoch": 4} and engine.global_steps == 2
    iterator = own_batches(engine, 3)
    skipped = None if iterator is None else list(itertools.islice(iterator, 6))
    assert skipped is None or len(skipped) == 6
    return [float(engine.train_batch(iterator)) for _ in range(2)], whole_weights(engine)


def test_any_number_of_stages_goes_on_from_a_checkpoint(ranks: Callable, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    before = ranks(4, saving, folder, 2, 1)
    for (losses, weights), (again, same) in zip(before, ranks(4, loading, folder, 2, 1), strict=True):
        assert losses == again and all(value.equal(same[name]) for name, value in weights.items())
    wanted = plain(layers, 4, 3, 2)
    for losses, weights in ranks(2, loading, folder, 1, 3):
        assert losses == pytest.approx(wanted[0][2:], rel=2e-6)
        for name, value in weights.items():
            assert (value.double() - wanted[2][name]).norm() <= 1e-4 * wanted[2][name].norm(), name
    # The names are those of the plain model, parameters and buffers.
    consolidate(folder, tmp_path / "whole")
    pipe_models.Plain(layers()).load_state_dict(load_file(tmp_path / "whole" / "model.safetensors"))


def test_two_tied_layers_that_stages_come_to_in_different_orders(ranks: Callable, tmp_path: Path) -> None:
    """In two stages, and on from there in three that cut the parameters as well."""
    folder, wanted = str(tmp_path), plain(crossed, 4, 3, 1)
    for found in (ranks(2, saving, folder, 2, 1, crossed), ranks(3, loading, folder, 3, 3, crossed)):
        for losses, weights in found:
            assert losses == pytest.approx(wanted[0][2:], rel=2e-6)
            for name, value in weights.items():
                assert (value.double() - wanted[2][name]).norm() <= 1e-4 * wanted[2][name].norm(), name


# What is asked wrongly, and what is said


def changing(dynamic: bool) -> float:
    engine = start(layers, 2, settings(accumulation=2), dynamic_shape=dynamic)
    ((inputs, labels),) = itertools.islice(pipe_models.batches(0, 1, 1), 1)
    return float(engine.train_batch(iter([(inputs, labels), (inputs[:1], labels[:1])])))


def test_shapes_that_change(ranks: Callable) -> None:
    assert len(set(ranks(2, changing, True))) == 1
    with pytest.raises(Exception, match=r"stage 0 gave .*\[2, 5, 6\].* gives .*\[1, 5, 6\].* dynamic_shape=True"):
        ranks(2, changing, False)


def test_loops_of_other_engines_name_train_batch() -> None:
    engine = start(layers, 1, settings())
    for call in (lambda: engine(torch.zeros(1)), lambda: engine.backward(torch.zeros(1)), engine.step, engine.no_sync):
        with pytest.raises(MegazeroError, match="call train_batch"):
            call()
    with pytest.raises(MegazeroError, match=r"ended after 1 of 3 micro-batches"):
        engine.train_batch(iter([(torch.zeros(2, 5), torch.zeros(2, 5))]))
    with pytest.raises(MegazeroError, match=r"a batch is a Tensor; a pipeline's is \(inputs, labels\)"):
        engine.train_batch(iter([torch.zeros(2)]))
    with pytest.raises(MegazeroError, match=r"data_iter is a list and no iterator"):
        engine.train_batch([(torch.zeros(2, 5), torch.zeros(2, 5))] * 3)
    with pytest.raises(MegazeroError, match=r"num_micro_batches is 0; use 1 or more"):
        engine.eval_batch(own_batches(engine, 3), num_micro_batches=0)
    loss, logits = engine.eval_batch(own_batches(engine, 3), return_logits=True, num_micro_batches=2)
    assert loss.dim() == 0 and [x.shape for x in logits] == [(2, 5, 13)] * 2


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ([], {}, "layers: is empty"),
        ([nn.Linear], {}, "layer 0 is the class Linear; give a LayerSpec"),
        (
            [TiedLayerSpec("a", nn.Linear, 2, 2), TiedLayerSpec("a", nn.Embedding, 2, 2)],
            {},
            "layers 0 and 1 are tied as 'a', one of Linear and one of Embedding",
        ),
        ([nn.Linear(2, 2)], {"num_stages": None}, "num_stages: is not given"),
        (nn.Linear(2, 2), {}, "layers: is a Linear; give a list of layers"),
        ([nn.Linear(2, 2)], {"num_stages": "1"}, "'1' is no number of stages"),
        ([nn.Linear(2, 2)], {"loss_fn": "mse"}, "loss_fn: is a str; give a function"),
        ([nn.Linear(2, 2)], {"activation_checkpoint_interval": -1}, "-1 is no number of layers"),
        ([nn.Linear(2, 2)], {"activation_checkpoint_interval": "2"}, "'2' is no number of layers"),
        ([nn.Linear(2, 2), nn.ReLU()], {"checkpointable_layers": ["Conv2d"]}, "some of .*; there are Linear, ReLU"),
        ([nn.Linear(2, 2)], {"num_stages": 2}, "2 stages cannot share 1 processes"),
        ([nn.Linear(2, 2)], {"topology": Layout(pp=3), "num_stages": None}, "cannot share 1 processes"),
    ],
)
def test_a_module_that_cannot_be(given: list, options: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PipelineModule(given, **{"num_stages": 1, **options})
    with pytest.raises(ConfigError, match="give a class of torch.nn.Module's"):
        LayerSpec(torch.tanh)


def test_parameters_that_no_layer_holds_are_not_left_untrained() -> None:
    """A function that takes a module from outside, and a loss that does."""
    outside = nn.Linear(2, 2)
    for function, loss_fn, who in (
        (lambda x: outside(x), F.mse_loss, "layer 1"),
        (partial(F.linear, weight=outside.weight), F.mse_loss, "layer 1"),
        (outside.forward, F.mse_loss, "layer 1"),
        (torch.tanh, lambda x, y: F.mse_loss(outside(x), y), "loss_fn"),
    ):
        engine = start(
            lambda function=function: [nn.Linear(2, 2), function], 1, settings(accumulation=1), loss_fn=loss_fn
        )
        outside.weight.grad = None
        with pytest.raises(MegazeroError, match=rf"{who} uses a parameter of shape \(2, 2\) that no layer"):
            engine.train_batch(iter([(torch.ones(1, 2), torch.ones(1, 2))]))


def test_batches_by_other_means() -> None:
    """A loader, epoch after epoch; an iterator; and a function that makes batches of what is read."""
    given = list(itertools.islice(pipe_models.batches(0, 1, 3), 3))
    reference = start(layers, 1, settings())
    wanted = [float(reference.train_batch(iter(given))) for _ in range(3)]
    engine = start(layers, 1, settings())
    engine.set_dataloader(given)
    found = [float(engine.train_batch()) for _ in range(2)]
    engine.set_batch_fn(lambda batch: (batch["inputs"], batch["labels"]))
    engine.set_dataiterator(iter([{"inputs": x, "labels": y} for x, y in given]))
    assert [*found, float(engine.train_batch())] == wanted
    with pytest.raises(MegazeroError, match="ended after 0 of 3 micro-batches"):
        engine.train_batch()
    with pytest.raises(MegazeroError, match="set_dataloader: takes what gives batches, not a int"):
        engine.set_dataloader(3)
    with pytest.raises(MegazeroError, match="set_batch_fn: takes a function of a batch, not a list"):
        engine.set_batch_fn(given)
    assert engine.grid.get_data_parallel_group() is None


def test_a_step_that_fails() -> None:
    given = list(itertools.islice(pipe_models.batches(0, 1, 3), 3))
    reference, engine = (start(layers, 1, settings(2)) for _ in range(2))
    calls = []

    def fails_once(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(outputs)
        loss = pipe_models.loss_fn(outputs, labels)
        return Fails.apply(loss) if len(calls) == 2 else loss

    engine.module.loss_fn = fails_once
    with pytest.raises(ValueError, match="of the user's"):
        engine.train_batch(iter(given))
    with pytest.raises(MegazeroError, match=r"ended in an error.*call engine.zero_grad\(\)"):
        engine.train_batch(iter(given))
    engine.zero_grad()
    for _ in range(2):
        assert float(engine.train_batch(iter(given))) == float(reference.train_batch(iter(given)))


def test_seeds_are_what_any_library_takes() -> None:
    seeds: list[int] = []
    for _ in range(20):
        PipelineModule([nn.Linear(2, 2)], num_stages=1, seed_fn=seeds.append)
    assert len(set(seeds)) == 20 and 0 <= min(seeds) and max(seeds) < 2**32


def test_layers_are_divided() -> None:
    wide, narrow = LayerSpec(nn.Linear, 30, 30), LayerSpec(nn.Linear, 3, 3)
    given = [wide, narrow, nn.ReLU(), narrow, torch.tanh, narrow]
    assert divide(given, 2, "uniform") == [range(0, 3), range(3, 6)]
    assert divide(given, 2, "parameters") == [range(0, 1), range(1, 6)]
    assert divide(given, 3, "type:^lin|TANH") == [range(0, 1), range(1, 4), range(4, 6)]
    for method, told in (("best", "use uniform"), ("type:Conv", "there are Linear, ReLU, tanh"), ("type:(", "regular")):
        with pytest.raises(ConfigError, match=told):
            divide(given, 2, method)
    with pytest.raises(ConfigError, match="use at most 6"):
        divide(given, 7, "uniform")


class Counted(nn.Linear):
    made = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.weight.is_meta:
            type(self).made += 1


class Unembedding(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding


def building() -> tuple[int, list[float], list[str]]:
    """How many layers each makes; their first values; and the errors of modules that share a parameter."""
    Counted.made = 0
    torch.manual_seed(dist.get_rank())
    module = PipelineModule([LayerSpec(Counted, 4, 4) for _ in range(6)], num_stages=2, topology=Layout(pp=2))
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    told = []
    for given in ([a, b], [a, LayerSpec(Unembedding, a)]):
        try:
            PipelineModule(given, num_stages=2, partition_method="uniform")
        except ConfigError as error:
            told.append(str(error))
    return Counted.made, [float(p[0, 0]) for n, p in module.named_parameters() if "weight" in n], told


def test_a_process_builds_its_own_layers_only(ranks: Callable) -> None:
    first, second = ranks(2, building)
    assert first[0] == second[0] == 3
    assert len({*first[1], *second[1]}) == 6
    assert len(first[2]) == 2 and first[2] == second[2]
    assert all("layers 0 and 1 share a parameter" in told for told in first[2])


def example() -> None:
    sys.argv = ["pipeline.py", "--stages", "2", "--steps", "6"]
    runpy.run_path(str(ROOT / "examples" / "pipeline.py"), run_name="__main__")


def test_the_example_learns(ranks: Callable, capsys: pytest.CaptureFixture) -> None:
    """By the loader of training_data, which the first and the last stage read alike."""
    ranks(2, example)
    printed = capsys.readouterr().out
    first, last = (
        float(re.search(text, printed)[1]) for text in (r"step 5: loss ([\d.]+)", r"stages 2, loss ([\d.]+)")
    )
    assert last < first < math.log(256) + 0.5
