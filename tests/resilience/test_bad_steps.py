"""`watch.bad_step` and `watch.loss_spike`: which steps are left out, on every rank alike, and when the run stops."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.errors import DivergenceError
from megazero.resilience.bad_steps import IN_A_ROW, BadSteps
from tests.distributed.runs import make_whole
from tests.engine.tiny import open_run, tiny, write_corpus

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def judged(bad_steps: BadSteps, losses: list[float]) -> list[tuple[bool, bool]]:
    found = []
    for step, value in enumerate(losses, start=1):
        loss = torch.tensor(value, dtype=torch.float64)
        bad = ~torch.isfinite(loss)
        found.append(tuple(bool(x) for x in bad_steps.judge(step, loss, bad, bad)))
    return found


def test_the_mean_and_deviation_are_those_of_the_losses() -> None:
    """As long as no more than 50 are averaged, by the statistics module."""
    losses = [3 + math.sin(7 * i) for i in range(50)]
    bad_steps = BadSteps(skips=True, spike=1.0, device=CPU)
    assert judged(bad_steps, losses) == [(False, False)] * 50
    mean, variance = bad_steps.state()[:2]
    assert math.isclose(mean, statistics.fmean(losses)) and math.isclose(variance, statistics.pvariance(losses))


@pytest.mark.parametrize("skips", [True, False])
def test_a_spike_is_one_from_the_fifty_first_good_step_on(skips: bool) -> None:
    losses = [3 + math.sin(7 * i) for i in range(50)]
    limit = statistics.fmean(losses) + 4 * statistics.pstdev(losses)
    early = losses[:49] + [limit + 9]
    assert judged(BadSteps(skips, 4.0, CPU), early)[-1] == (False, False)
    bad_steps = BadSteps(skips, 4.0, CPU)
    found = judged(bad_steps, [*losses, limit - 0.01])
    assert found[-1] == (False, False)
    bad_steps = BadSteps(skips, 4.0, CPU)
    assert judged(bad_steps, [*losses, limit + 0.01])[-1] == (True, not skips)
    assert bad_steps.skipped() == (1, 51) and bad_steps.skipped() == (0, 51)
    assert (bad_steps.spike() is None) is skips


def test_low_losses_are_no_spikes_and_bad_ones_do_not_move_the_mean() -> None:
    losses = [3 + math.sin(7 * i) for i in range(50)]
    bad_steps = BadSteps(True, 4.0, CPU)
    assert judged(bad_steps, [*losses, 0.0])[-1] == (False, False)
    before = bad_steps.state()[:3]
    assert judged(bad_steps, [99.0, math.nan, math.inf]) == [(True, False)] * 3
    assert bad_steps.state()[:3] == before


def test_many_in_a_row_stop_the_run() -> None:
    bad_steps = BadSteps(True, 0.0, CPU)
    found = judged(bad_steps, [1.0, *[math.nan] * (IN_A_ROW - 1), 1.0, *[math.nan] * IN_A_ROW])
    assert [stops for _, stops in found].index(True) == len(found) - 1


def test_an_overflow_of_fp16_is_neither_counted_nor_averaged() -> None:
    bad_steps = BadSteps(True, 0.0, CPU)
    for step in range(2 * IN_A_ROW):
        assert bad_steps.judge(step, torch.tensor(math.inf, dtype=torch.float64), YES, NO)[1].item() is False
    assert bad_steps.skipped() == (0, 0) and bad_steps.state()[2] == 0


def test_its_state_goes_through_a_checkpoint() -> None:
    losses = [3 + math.sin(7 * i) for i in range(60)]
    one, other = BadSteps(True, 4.0, CPU), BadSteps(True, 4.0, CPU)
    judged(one, [*losses, 99.0])
    other.load(json.loads(json.dumps(one.state())))
    assert judged(one, losses) == judged(other, losses) and one.state() == other.state() and other.skipped() == (0, 61)


def weights(engine) -> dict[str, torch.Tensor]:
    make_whole(engine.stage.sharded)
    return {name: value.detach().clone() for name, value in engine.stage.sharded.named_parameters()}


def run_with_a_bad_gradient(settings: dict, rank: int) -> tuple[list[bool], int]:
    """(for each step whether weights moved, the last step); one gradient of step 4 is infinite on one rank."""
    engine, source, _ = open_run(settings)
    moved = []

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.inf if engine.step == 3 else grad

    with engine:
        if int(os.environ["RANK"]) == rank:
            next(p for p in engine.stage.model.parameters() if p.requires_grad).register_hook(spoil)
        before = weights(engine)
        while engine.running():
            engine.train_batch(source)
            after = weights(engine)
            moved.append(not all(torch.equal(after[name], value) for name, value in before.items()))
            before = after
    return moved, engine.step


@pytest.mark.parametrize("changes", [{"parallel.pp": 2}, {"zero.stage": 2, "log.interval": 4}])
def test_a_bad_step_is_left_out_on_every_rank(ranks: Callable, tmp_path: Path, changes: dict) -> None:
    log = tmp_path / "events.jsonl"
    settings = tiny(write_corpus(tmp_path), {"watch.bad_step": "skip", "log.events": log, "train.steps": 6, **changes})
    for moved, step in ranks(2, run_with_a_bad_gradient, settings, 1):
        # The learning rate of the last step is 0.
        assert moved == [True, True, True, False, True, False] and step == 6
    (skip,) = [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "skip"]
    assert (skip["count"], skip["last"], skip["sample"]) == (1, 4, 24)
    assert skip["text"] == "1 updates left out (watch.bad_step): the last is step 4, samples 24 to 31"


def test_a_spike_stops_the_run_with_its_samples(tmp_path: Path) -> None:
    settings = tiny(write_corpus(tmp_path), {"watch.loss_spike": 5})
    engine, source, _ = open_run(settings)
    assert engine.optimizer.bad_steps is not None
    engine.optimizer.bad_steps.load([0.5, 0.01, 50, 0, 0, 0, None])
    with pytest.raises(
        DivergenceError, match=r"step 1: the loss is 5\.\d+, where 0\.5 is the mean and 0\.1 the deviation of"
    ):
        with engine:
            engine.train_batch(source)
