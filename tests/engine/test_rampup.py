"""`train.rampup_batch_size`: Megatron-LM's sizes, in every layout the plain loop's numbers, and no state of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import megatron
import pytest

from megazero.config import Config
from megazero.config_tree import TrainSection
from megazero.course import Course
from megazero.errors import ConfigError
from megazero.models.config import ModelConfig
from megazero.planner.chips import CHIPS
from megazero.planner.search import search
from tests.distributed.runs import TokenSource, assert_close, plain_loop, random_weights, settings, train
from tests.engine.tiny import open_run, rank_files, run_script, series, tiny


@pytest.fixture(scope="module")
def megatrons() -> ModuleType:
    """Megatron-LM's calculator, without the package around it, which takes seconds to import."""
    path = Path(next(iter(megatron.__path__))) / "core" / "num_microbatches_calculator.py"
    spec = importlib.util.spec_from_file_location("megatrons_calculator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def course(full: int, *ramp_up: int) -> Course:
    return Course(TrainSection(global_batch_size=full, rampup_batch_size=ramp_up))


@pytest.mark.parametrize("sizes", [(64, 16, 16, 3000), (96, 32, 8, 1600), (10, 1, 3, 100), (8, 4, 4, 1)])
def test_sizes_are_megatrons(megatrons: ModuleType, sizes: tuple[int, int, int, int]) -> None:
    full, start, increment, samples = sizes
    theirs = megatrons.RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, start, increment, samples)
    ours = course(full, start, increment, samples)
    for position in range(2 * samples + 3):
        theirs.update(position, consistency_check=False)
        assert ours.size(position) == theirs.get_current_global_batch_size(), position


@pytest.mark.parametrize("ours", [course(64, 16, 16, 3000), course(10, 1, 3, 100), Course(TrainSection())])
def test_what_is_left_is_the_sum_of_the_steps(ours: Course) -> None:
    """By one step after the other, from places in, at and behind the ramp; the time left rests on it."""
    for position in (0, 1, 33, 90, 1000, 2999, 3000, 9000):
        at = position
        for steps in range(150):
            assert ours.total(position, steps) == at - position
            at += ours.size(at)


GPT2 = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 37, "max_position_embeddings": 24}
SIZES = (2, 2, 4, 6, 8, 8)


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ((1, 1, 1), {}),
        ((2, 1, 1), {"zero": {"stage": 1}, "train": {"micro_batch_size": 2}}),
        ((1, 2, 1), {"parallel": {"pp": 2, "virtual_pp": 2}}),
        ((1, 1, 2), {"zero": {"stage": 3}}),
    ],
    ids=["one process", "tp", "pp, chunks", "dp, zero 3"],
)
def test_every_layout_is_the_plain_loop(layout: tuple[int, int, int], sections: dict) -> None:
    """Learning rate by steps, samples in order, each step the mean over its own batch."""
    growth = {"steps": 6, "global_batch_size": 8, "rampup_batch_size": [2, 2, 12]}
    tree = settings(GPT2, layout, **{**sections, "train": {**growth, **sections.get("train", {})}})
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    assert_close(train(tree, source, weights, dp=layout[2]), plain_loop(tree, source, weights, sizes=SIZES))


def test_a_resume_in_the_middle_is_the_same_run(corpus: Path, tmp_path: Path) -> None:
    """To the bit; and what is logged counts the tokens that were read."""
    growth = {"train.rampup_batch_size": (4, 4, 30), "train.global_batch_size": 16, "checkpoint.save_interval": 3}

    def run(name: str) -> dict:
        return tiny(corpus, {**growth, "checkpoint.dir": tmp_path / name, "log.jsonl": tmp_path / f"{name}.jsonl"})

    run_script(run("whole"))
    engine, source, _ = open_run(run("cut"))
    with engine:
        for _ in range(5):
            engine.train_batch(source)
            if engine.due(3):
                engine.save(source)
    run_script(run("cut"))
    assert rank_files(tmp_path / "cut") == rank_files(tmp_path / "whole")
    read = series(tmp_path / "whole.jsonl", "consumed_samples", "loss", "grad_norm", "lr")
    assert series(tmp_path / "cut.jsonl", "consumed_samples", "loss", "grad_norm", "lr") == read
    assert [int(numbers[0]) for numbers in read.values()] == [4, 8, 12, 20, 32, 48, 64, 80]


def test_the_planner_offers_what_every_size_allows() -> None:
    tree = {"model": {"preset": "gpt2-124m"}, "train": {"global_batch_size": 32, "rampup_batch_size": [8, 8, 1000]}}
    plans = search(Config.from_dict(tree), 4, CHIPS["h100"], 40).plans
    for plan in plans:
        plan.config.validate_world(4)
    assert len({plan.config.train.micro_batch_size for plan in plans}) > 1


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"rampup_batch_size": [8, 8, 100]}, "starts at 8, which is not below train.global_batch_size = 8"),
        ({"rampup_batch_size": [2, 4, 100]}, "increments of 4 do not lead from 2 .* = 8; use 1, 2, 3 or 6"),
        ({"rampup_batch_size": [2, 0, 100]}, "start, increment and samples must each be at least 1"),
        ({"rampup_batch_size": [2, 2]}, "train.rampup_batch_size"),
        ({"rampup_batch_size": [2, 2, 9], "micro_batch_size": 2}, "multiples of .* = 2 x 2 = 4, .* 2 is none; use 4"),
    ],
)
def test_what_cannot_work_is_said_at_once(train: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.from_dict({"train": {"global_batch_size": 8, **train}}, world_size=2)
