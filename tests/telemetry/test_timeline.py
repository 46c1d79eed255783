"""Timelines, planned and recorded, and what is drawn of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from megazero.errors import DataError
from megazero.pipeline.schedules import COMMUNICATION, Kind, activation_bound, build_schedule
from megazero.pipeline.simulate import compute_cost, simulate
from megazero.telemetry import svg
from megazero.telemetry.timeline import (
    Bar,
    bubble_fraction,
    chrome_trace,
    measured_bars,
    memory_over_time,
    planned_bars,
    timeline_svg,
)
from megazero.telemetry.trace import StepRecorder
from tests.distributed import runs

MODEL = dict(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=23, max_position_embeddings=16)
STAGES, MICRO_BATCHES = 4, 6


@pytest.fixture(scope="module")
def bars() -> list[Bar]:
    return planned_bars(simulate(build_schedule("1f1b", STAGES, MICRO_BATCHES), compute_cost(1.0, 2.0)))


def test_the_bubble_of_1f1b_is_the_published_one(bars: list[Bar]):
    """Narayanan et al. 2021, section 2.2.1: (p - 1) / m of the ideal time, so (p - 1) / (m + p - 1) of the whole."""
    assert bubble_fraction(bars) == pytest.approx((STAGES - 1) / (MICRO_BATCHES + STAGES - 1))


def test_activations_over_time_reach_the_schedules_bound(bars: list[Bar]):
    held = memory_over_time(bars, [[100]] * STAGES)
    for rank, points in held.items():
        assert max(size for _, size in points) == 100 * activation_bound("1f1b", STAGES, MICRO_BATCHES, rank)
        assert points[-1][1] == 0 and [at for at, _ in points] == sorted(at for at, _ in points)


def test_a_trace_has_every_action_with_its_times(bars: list[Bar]):
    events = [event for event in chrome_trace(bars)["traceEvents"] if event["ph"] == "X"]
    assert json.loads(json.dumps(events)) == events and len(events) == len(bars)
    backward = [event["dur"] for event in events if event["name"].startswith("backward ")]
    assert len(backward) == STAGES * MICRO_BATCHES and set(backward) == {2e6}
    lanes = {(event["cat"], event["tid"]) for event in events}
    assert lanes == {("compute", 0), ("transfer", 1)}


def test_a_picture_has_each_computation_at_its_place(bars: list[Bar]):
    root = ElementTree.fromstring(timeline_svg("<1F1B> & co", bars))
    name = "{http://www.w3.org/2000/svg}"
    boxes = {
        rect.find(f"{name}title").text: rect
        for rect in root.iter(f"{name}rect")
        if rect.find(f"{name}title") is not None
    }
    computed = [text for text in boxes if ": forward of" in text or ": backward of" in text]
    assert len(computed) == 2 * STAGES * MICRO_BATCHES
    forward, backward = (
        boxes[f"rank 0: {what}"] for what in ("forward of micro-batch 0; 1000 ms", "backward of micro-batch 0; 2000 ms")
    )
    assert float(backward.get("width")) == pytest.approx(2 * float(forward.get("width")), rel=0.02)
    # Micro-batch 0 comes back to the first rank after 4 forwards and 3 backwards, 10 forwards' time.
    start, width = float(forward.get("x")), float(forward.get("width")) + 0.5
    assert float(backward.get("x")) == pytest.approx(start + 10 * width, abs=1.0)
    assert root.find(f"{name}text").text == "<1F1B> & co"


def test_numbers_of_an_axis():
    assert svg.ticks(0, 10) == [0, 2, 4, 6, 8, 10] and svg.ticks(3.0, 3.0) == [3.0]
    assert svg.ticks(0.12, 0.31) == pytest.approx([0.15, 0.2, 0.25, 0.3])
    assert [svg.spelled(value) for value in (0, 1500, 2e7, 0.0003, 12)] == ["0", "1.5k", "20M", "0.0003", "12"]


def test_what_is_not_finite_is_left_out_of_a_line():
    chart = svg.line_chart("loss", "step", {"a": [(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 3.0)]})
    (line,) = [shape for shape in ElementTree.fromstring(chart) if shape.get("stroke") == svg.COLOURS[0]]
    assert len(line.get("points").split()) == 2
    assert svg.line_chart("loss", "step", {"a": [(1, float("nan"))]}) == ""


def recorded_run(tree: Mapping[str, Any], steps: int) -> None:
    with runs.make_engine(tree) as engine:
        for _ in range(steps):
            engine.train_batch(runs.TokenSource(23, 12))


def test_logged_steps_are_recorded_action_by_action(tmp_path: Path, ranks: Callable):
    log = {"interval": 2, "timeline": str(tmp_path / "timeline")}
    tree = runs.settings(MODEL, (1, 2, 1), log=log, train={"steps": 5}, checkpoint={"dir": str(tmp_path / "run")})
    ranks(2, recorded_run, tree, 5)
    steps = measured_bars(tmp_path / "timeline")
    assert list(steps) == [2, 4, 5]
    schedule = build_schedule("1f1b", 2, 4)
    for bars in steps.values():
        for rank, actions in enumerate(schedule):
            own = [bar for bar in bars if bar.rank == rank]
            found = [(bar.kind, bar.micro_batch) for bar in own if bar.kind not in COMMUNICATION]
            assert found == [(a.kind, a.micro_batch) for a in actions if a.kind not in COMMUNICATION]
            # A receive is there when it is issued and when it is waited for.
            transfers = Counter(bar.kind for bar in own if bar.kind in COMMUNICATION)
            assert set(transfers) == {action.kind for action in actions if action.kind in COMMUNICATION}
        # The last stage computes a micro-batch once the first has, by clocks that are the same here.
        for micro_batch in range(4):
            first, last = (
                next(b for b in bars if (b.rank, b.kind, b.micro_batch) == (rank, Kind.FORWARD, micro_batch))
                for rank in (0, 1)
            )
            assert first.end <= last.end and first.start < last.start
        assert 0 <= bubble_fraction(bars) < 1
    # A new run drops what an earlier one has left there.
    tree["checkpoint"]["dir"] = str(tmp_path / "another")
    ranks(2, recorded_run, tree, 2)
    assert list(measured_bars(tmp_path / "timeline")) == [2]


def test_other_files_are_refused_by_name(tmp_path: Path):
    with pytest.raises(DataError, match="set log.timeline"):
        measured_bars(tmp_path)
    file = tmp_path / "pipeline_rank_000.jsonl"
    for text in ("{", "3", '{"step": 1}', '{"step": 1, "begin": 0, "actions": [["dance", 0, 0, 0, 1]]}'):
        file.write_text(text + "\n")
        with pytest.raises(DataError, match=r"pipeline_rank_000.jsonl: not a timeline"):
            measured_bars(tmp_path)


def test_times_that_cannot_be_written_are_said_once_and_the_step_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    executor = SimpleNamespace(trace=None)
    first = {"tp": 0, "dp": 0, "pp": 0}
    recorder = StepRecorder(executor, str(tmp_path / "file"), first, torch.device("cpu"), 0)
    traced = []
    for step in (1, 2):
        with recorder.step(step, wanted=True):
            traced.append(executor.trace is not None)
    assert traced == [True, False] and executor.trace is None
    said = capsys.readouterr().err
    assert said.startswith(f"log.timeline: {tmp_path}/file/pipeline_rank_000.jsonl: cannot be written: ")
    assert said.count("\n") == 1
