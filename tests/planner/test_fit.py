"""Efficiencies fitted to steps of a chip whose efficiencies are known."""

from __future__ import annotations

import pytest

from megazero.config import Config
from megazero.planner.chips import CHIPS, Chip
from megazero.planner.fit import Measured, fitted
from megazero.planner.step_time import step_time


def settings(tp: int, zero: int, micro_batch: int, recompute: str) -> Config:
    return Config.model_validate(
        {
            "model": {"preset": "llama3-8b"},
            "parallel": {"tp": tp},
            "zero": {"stage": zero},
            "data": {"seq_length": 4096},
            "train": {"global_batch_size": 32, "micro_batch_size": micro_batch, "recompute": recompute},
        }
    )


def changed(chip: Chip, **shares: float) -> Chip:
    return chip.model_copy(update={"efficiency": chip.efficiency.model_copy(update=shares)})


RUNS = [settings(1, 1, 1, "none"), settings(1, 3, 2, "full"), settings(4, 1, 2, "none"), settings(8, 0, 4, "selective")]


def test_runs_that_agree_with_the_plan_change_nothing() -> None:
    chip = CHIPS["h100"]
    runs = [Measured(config, 8, step_time(config, 8, chip).seconds) for config in RUNS]
    assert fitted(chip, runs).efficiency.model_dump() == pytest.approx(chip.efficiency.model_dump(), rel=1e-6)


def test_one_run_corrects_the_others() -> None:
    """A chip under a lower power limit: one run is enough to plan the rest within 10 %."""
    chip = CHIPS["h100"]
    true = changed(chip, matmul=0.55, attention=0.36, link=0.6)
    runs = [Measured(config, 8, step_time(config, 8, true).seconds) for config in RUNS]
    assert max(abs(step_time(run.config, 8, chip).seconds / run.seconds - 1) for run in runs) > 0.15
    found = fitted(chip, runs[:1])
    assert step_time(RUNS[0], 8, found).seconds == pytest.approx(runs[0].seconds, rel=0.02)
    for run in runs:
        assert step_time(run.config, 8, found).seconds == pytest.approx(run.seconds, rel=0.10)


def test_several_runs_tell_links_from_products() -> None:
    chip = CHIPS["h100"]
    true = changed(chip, matmul=0.6, link=0.55)
    runs = [Measured(config, 8, step_time(config, 8, true).seconds) for config in RUNS]
    found = fitted(chip, runs)
    assert found.efficiency.link == pytest.approx(0.55, rel=0.05)
    assert found.efficiency.matmul == pytest.approx(0.6, rel=0.05)
    for run in runs:
        assert step_time(run.config, 8, found).seconds == pytest.approx(run.seconds, rel=0.02)


def test_a_share_stays_a_share() -> None:
    chip, config = CHIPS["h100"], RUNS[0]
    for factor in (1e-3, 1e3):
        found = fitted(chip, [Measured(config, 8, factor * step_time(config, 8, chip).seconds)])
        assert 0.01 <= found.efficiency.matmul <= 1 and 0.01 <= found.efficiency.memory <= 1
