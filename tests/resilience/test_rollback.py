"""`watch.bad_step rollback`: back to the newest good checkpoint, and on behind what the bad step read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.checkpoint import left_out, newest, open_checkpoint
from megazero.config_tree import TrainSection
from megazero.course import Course
from megazero.errors import CheckpointError, ConfigError, DivergenceError
from tests.engine.tiny import open_run, rank_files, series, steps_in, tiny, write_corpus


class Source:
    """Batches of ``source``, where that of one position has an infinite loss; or the samples from a position on left
    out, which is what a run that goes back is to be equal to."""

    def __init__(self, source: Any, bad: int = -1, gap: range = range(0)) -> None:
        self.source, self.bad, self.gap = source, bad, gap

    def read(self, first: int, *where: int) -> Any:
        if self.gap and first >= self.gap.start:
            first += len(self.gap)
        batches = self.source.read(first, *where)
        if first == self.bad:
            batches = [{**batch, "weights": batch["weights"] * math.inf} for batch in batches]
        return batches


def train(settings: dict, until: int = -1, **source: Any) -> list[int]:
    """As pretrain/gpt.py does, or as far as position ``until``: the steps taken."""
    engine, data, valid = open_run(settings)
    taken, data = [], Source(data, **source)
    with engine:
        while engine.running() and engine.consumed_samples != until:
            taken.append(engine.train_batch(data).step)
            if valid is not None and engine.due(engine.config.train.eval_interval):
                engine.evaluate(valid)
            if engine.due(engine.config.checkpoint.save_interval):
                engine.save(data)
        if until < 0:
            engine.save(data)
    return taken


def settings(corpus: Path, place: Path, changes: dict) -> dict:
    own = {"checkpoint.dir": place / "run", "checkpoint.save_interval": 3, "log.jsonl": place / "metrics.jsonl"}
    own |= {"log.events": place / "events.jsonl", "train.eval_interval": 3, "data.valid": corpus / "valid"}
    return tiny(corpus, {"watch.bad_step": "rollback", "train.eval_steps": 1, **own, **changes})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def both_ways(gone: dict, cut: dict) -> tuple[list[int], list[int]]:
    """A run that goes back, and one of the same settings elsewhere that ends soon after it has and is resumed with data
    that are good by now."""
    went = train(gone, bad=40)
    stopped = train(cut, until=64, bad=40)
    train(cut)
    return went, stopped


LAYOUTS = {
    "pp, asynchronous": {"parallel.pp": 2, "checkpoint.async_save": True, "train.micro_batch_size": 2},
    "zero 2, offload": {"zero.stage": 2, "zero.offload_optimizer.device": "cpu", "log.interval": 8},
    "zero 3": {"zero.stage": 3, "zero.stage3_param_persistence_threshold": 20},
}


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_the_run_that_never_met_those_samples(
    ranks: Callable, corpus: Path, tmp_path: Path, changes: dict
) -> None:
    """Step 6 reads samples 40 to 47, with step 3 saved, which had come to 24. A resume before the next save is the
    same, though what was bad is good by now. All to the bit, moments and random state included."""
    whole, gone, cut = (settings(corpus, tmp_path / name, changes) for name in ("whole", "gone", "cut"))

    ranks(2, train, whole, gap=range(24, 48))
    went, stopped = ranks(2, both_ways, gone, cut)[0]
    assert went == [1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8] and stopped == went[:8]
    for place in ("gone", "cut"):
        assert rank_files(tmp_path / place / "run") == rank_files(tmp_path / "whole" / "run")
        assert steps_in(tmp_path / place / "run") == [3, 6, 8]
        names = ("loss", "grad_norm", "lr")
        metrics = [series(tmp_path / name / "metrics.jsonl", *names) for name in (place, "whole")]
        assert metrics[0] == metrics[1]
        assert series(tmp_path / place / "metrics.jsonl", "valid_loss").keys() == {3, 6, 8}
        with open_checkpoint(tmp_path / place / "run") as checkpoint:
            assert checkpoint.meta["left_out"] == [[24, 47]] and checkpoint.meta["consumed_samples"] == 88
    lines = [json.loads(line) for line in (tmp_path / "gone" / "events.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line["event"] == "rollback"]
    assert (event["step"], event["bad_step"], event["first"], event["last"]) == (3, 6, 24, 47)
    assert event["text"].startswith("step 6: the gradient is not finite, first in ")
    assert "rolled back to step 3, without samples 24 to 47 (watch.bad_step, 1 of at most 10)" in event["text"]


class AlwaysBad(Source):
    """From a position on."""

    def read(self, first: int, *where: int) -> Any:
        self.bad = first if first >= 32 else -1
        return super().read(first, *where)


def test_the_limit_is_that_of_the_whole_run_and_damage_goes_further_back(corpus: Path, tmp_path: Path) -> None:
    """Each is found at once. Before the second, a bit of the newest checkpoint flips: it is named, and set aside."""
    run = tmp_path / "run"
    engine, data, _ = open_run(settings(corpus, tmp_path, {"watch.max_rollbacks": 2, "checkpoint.save_interval": 2}))
    found = []
    with pytest.raises(DivergenceError, match=r"^step 3: the gradient .* after 2 roll-backs \(watch\.max_rollbacks\)"):
        with engine:
            while engine.running():
                before = engine.step
                engine.train_batch(AlwaysBad(data))
                if engine.due(2):
                    engine.save(data)
                elif engine.step <= before:
                    found.append((engine.step, engine.consumed_samples))
                if found == [(4, 40)]:
                    with (run / "step_00000004" / "rank_00000.safetensors").open("r+b") as file:
                        file.seek(-9, 2)
                        file.write(b"\xff")
    assert found == [(4, 40), (2, 48)]
    assert (run / "step_00000004.damaged").is_dir() and newest(run).name == "step_00000002"
    texts = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert any("passing over a damaged checkpoint" in text and "rank_00000.safetensors" in text for text in texts)


def test_a_spike_is_left_out_with_what_was_read_before_it(corpus: Path, tmp_path: Path) -> None:
    """The first checkpoint knows nothing of losses: it is of a run that did not judge them."""
    changes = {"checkpoint.save_interval": 2, "train.steps": 4}
    engine, data, _ = open_run(settings(corpus, tmp_path, {**changes, "watch.bad_step": "stop"}))
    with engine:
        for _ in range(2):
            engine.train_batch(data)
        engine.save(data)
    engine, data, _ = open_run(settings(corpus, tmp_path, {**changes, "watch.loss_spike": 5}))
    bad_steps = engine.optimizer.bad_steps
    assert bad_steps is not None
    bad_steps.load([0.5, 0.01, 50, 0, 0, 0, None])
    with engine:
        assert engine.train_batch(data).step == 3
        assert (engine.step, engine.consumed_samples, bad_steps.state()) == (2, 24, [0, 0, 0, 0, 0, 0, None])
        assert engine.train_batch(data).step == engine.step == 3
    texts = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (text,) = [text for text in texts if "rolled back" in text]
    assert text.startswith("step 3: the loss is 4.") and "rolled back to step 2, without samples 16 to 23" in text


def test_nothing_to_go_back_to(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="There is no checkpoint yet to go back to"):
        train(settings(corpus, tmp_path, {}), bad=8)
    # Of two runs, one goes on in the other's directory, and has saved nothing there yet.
    train(settings(corpus, tmp_path / "one", {"train.steps": 1}))
    train(settings(corpus, tmp_path / "two", {"train.steps": 2}))
    place = {"checkpoint.resume": tmp_path / "two" / "run", "checkpoint.dir": tmp_path / "one" / "run"}
    with pytest.raises(DivergenceError, match=r"to go back to: those in .*one.run are another run's"):
        train(settings(corpus, tmp_path / "three", place), bad=16)
    with pytest.raises(ConfigError, match=r"watch\.bad_step: rollback needs checkpoints"):
        train(settings(corpus, tmp_path, {"checkpoint.save_interval": 0}))


def test_the_course() -> None:
    course = Course(TrainSection(global_batch_size=8))
    assert course.samples(0, 3) == range(24, 32)
    course.leave_out([range(16, 32), range(32, 40), range(16, 32)])
    assert course.left_out == [range(16, 32), range(32, 40)]
    # Steps of another size than those of before may come to a range from within: they do not read into it.
    assert [course.begin(position) for position in (8, 9, 15, 16, 39, 40)] == [8, 40, 40, 40, 40, 40]
    assert course.after(8) == 40 and course.samples(8, 2) == range(48, 56)


def test_a_batch_grows_by_what_is_read() -> None:
    """Sizes are those of the run that never met what is left out, of which some is left out twice."""
    train = TrainSection(global_batch_size=16, rampup_batch_size=(4, 4, 30))
    whole, course = Course(train), Course(train)
    course.leave_out([range(12, 32), range(36, 48), range(12, 48)])
    at, position = 0, 0
    for step in range(12):
        assert course.samples(0, step) == range(position, position + whole.size(at))
        assert course.total(position, 9) == whole.total(at, 9)
        at, position = whole.after(at), course.after(position)
        assert position == at + (36 if at >= 12 else 0)


def test_the_record_is_of_one_run_and_damage_is_no_excuse(tmp_path: Path) -> None:
    assert left_out.read(tmp_path, "run") == []
    left_out.write(tmp_path, "run", [range(3, 9), range(20, 21)])
    assert left_out.read(tmp_path, "run") == [range(3, 9), range(20, 21)] and left_out.read(tmp_path, "other") == []
    of_run = b'{"run_id": "run", "left_out": %s}'
    for content in (b"", b"[]", b"[" * 100_000, b"{}", of_run % b"[[9, 3]]", of_run % b"1"):
        (tmp_path / left_out.NAME).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"left_out\.json: cannot be read"):
            left_out.read(tmp_path, "run")
