"""The learning rate, against values worked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megazero.config_tree import OptimizerSection
from megazero.optim.schedule import learning_rate

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"


def rates(steps: int, **fields) -> list[float]:
    section = OptimizerSection(**fields)
    return [learning_rate(section, step, steps) for step in range(1, steps + 1)]


def test_cosine() -> None:
    """Progress 1/4, 1/2, 3/4, 1 of half a turn: (1 + cos) / 2 is 0.8535…, 0.5, 0.1464…, 0."""
    quarter = (1 + math.sqrt(0.5)) / 2
    expected = [0.5, 1.0, 0.2 + 0.8 * quarter, 0.6, 0.2 + 0.8 * (1 - quarter), 0.2]
    assert rates(6, lr=1.0, min_lr=0.2, warmup_steps=2) == pytest.approx(expected, rel=1e-14)


def test_linear() -> None:
    expected = [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates(6, lr=1.0, min_lr=0.2, warmup_steps=2, schedule="linear") == pytest.approx(expected, rel=1e-14)


def test_warm_up_stable_decay() -> None:
    expected = [0.5, 1.0, 1.0, 1.0, 0.6, 0.2]
    found = rates(6, lr=1.0, min_lr=0.2, warmup_steps=2, schedule="wsd", decay_steps=2)
    assert found == pytest.approx(expected, rel=1e-14)


def test_constant_does_not_fall() -> None:
    assert rates(4, lr=1.0, min_lr=0.2, warmup_steps=2, schedule="constant") == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_warm_up_of_0_or_1_steps_starts_at_or_below_the_highest_rate(schedule: str, warmup: int) -> None:
    found = rates(4, lr=1.0, min_lr=0.0, warmup_steps=warmup, schedule=schedule)
    assert 0 < found[0] <= 1.0 and found == sorted(found, reverse=True)
    assert found[0] == 1.0 or warmup == 0
    assert found[-1] == pytest.approx(1.0 if schedule == "constant" else 0.0, abs=1e-15)


def test_warm_up_over_the_whole_run() -> None:
    assert rates(4, lr=1.0, min_lr=0.1, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(1, lr=1.0, min_lr=0.1, warmup_steps=1) == [1.0]


def test_decay_over_all_that_follows_the_warm_up() -> None:
    found = rates(4, lr=1.0, min_lr=0.0, warmup_steps=1, schedule="wsd", decay_steps=3)
    assert found == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0], rel=1e-14)


@pytest.mark.parametrize("case", ["gpt2-tied", "llama-gqa"])
def test_rates_of_the_recipes(case: str) -> None:
    recipe = json.loads((ORACLE / case / "recipe.json").read_text())
    expected = [step["lr"] for step in json.loads((ORACLE / case / "expected.json").read_text())]
    fields = {name: recipe[name] for name in ("lr", "min_lr", "warmup_steps")}
    assert rates(recipe["train_steps"], **fields) == pytest.approx(expected, rel=1e-14)
