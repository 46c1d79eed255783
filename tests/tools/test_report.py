"""report.py and draw_timeline.py: pages that stand alone, with the run's own numbers."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from megazero.errors import ConfigError, DataError
from tests.distributed import runs
from tools import draw_timeline, report

MODEL = dict(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=23, max_position_embeddings=16)


class Page(HTMLParser):
    """``tags`` opened, in order; ``text`` of everything; all that is opened must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag != "meta" and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def run_tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """run_tool(module, *arguments): what the script prints."""

    def run(module: ModuleType, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("a <run> & more")
    log = {"interval": 1, "jsonl": str(place / "metrics.jsonl"), "timeline": str(place / "timeline")}
    with runs.make_engine(runs.settings(MODEL, log=log, train={"eval_interval": 3, "eval_steps": 1})) as engine:
        source = runs.TokenSource(23, 12)
        while engine.running():
            engine.train_batch(source)
            if engine.due(3):
                engine.evaluate(source)
    return place


def test_a_page_has_the_runs_numbers_and_needs_nothing_else(directory: Path, run_tool: Callable):
    output = run_tool(report, str(directory))
    assert output.strip() == str(directory / "report.html")
    page = Page((directory / "report.html").read_text())
    assert page.links == [] and page.tags.count("svg") >= 6
    text = " ".join(page.words)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    loss, valid = (next(line[key] for line in reversed(lines) if key in line) for key in ("loss", "valid_loss"))
    for words in (f"{loss:.4f}", f"{valid:.4f}", "3 of 3", "tp 1, pp 1, dp 1, zero_stage 0", "measured in step 3"):
        assert words in text, words
    assert "<run>" in text, "names are escaped"
    described = json.loads((directory / "metrics.run.json").read_text())
    assert described["config"]["model"]["hidden_size"] == 16 and described["run_id"] in text


def test_without_a_timeline_the_schedule_is_drawn_as_planned(directory: Path, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text((directory / "metrics.jsonl").read_text() + '{"step": 4, "lo')
    described = json.loads((directory / "metrics.run.json").read_text())
    described["config"]["log"]["timeline"] = None
    described["config"]["parallel"]["pp"] = described["layout"]["pp"] = 2
    (tmp_path / "metrics.run.json").write_text(json.dumps(described))
    text = " ".join(Page(report.page(report.Run(tmp_path / "metrics.jsonl"))).words)
    # 4 micro-batches through 2 stages: (p - 1) / (m + p - 1).
    assert f"planned, forward 1 ms, backward 2 ms: bubble {1 / 5:.1%}" in text and "measured in" not in text


def test_a_timeline_of_a_run_that_was_cut_off(directory: Path, tmp_path: Path):
    """A half-written last line, a file of a rank that the layout no longer has, and none at all."""
    recorded = tmp_path / "timeline"
    for name in ("metrics.jsonl", "metrics.run.json"):
        (tmp_path / name).write_text((directory / name).read_text())
    described = json.loads((tmp_path / "metrics.run.json").read_text())
    described["config"]["log"]["timeline"] = str(recorded)
    (tmp_path / "metrics.run.json").write_text(json.dumps(described))
    recorded.mkdir()
    assert f"No whole step is recorded in {recorded}" in report.page(report.Run(tmp_path))
    lines = (directory / "timeline" / "pipeline_rank_000.jsonl").read_text().splitlines()
    (recorded / "pipeline_rank_000.jsonl").write_text("\n".join([lines[0], lines[1], lines[2][:50]]))
    (recorded / "pipeline_rank_001.jsonl").write_text(lines[0] + "\n")
    assert "measured in step 2" in report.page(report.Run(tmp_path))


def test_a_loss_that_is_not_finite(directory: Path, tmp_path: Path):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "loss": null, "grad_norm": null}']))
    (tmp_path / "metrics.run.json").write_text((directory / "metrics.run.json").read_text())
    assert "not finite" in report.page(report.Run(tmp_path))


def test_what_is_no_run_is_named(directory: Path, tmp_path: Path):
    with pytest.raises(DataError, match="holds no run"):
        report.Run(tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    with pytest.raises(DataError, match="holds no metrics yet"):
        report.Run(metrics)
    metrics.write_text("nonsense\n{}\n")
    with pytest.raises(DataError, match="line 1 is not a line of metrics"):
        report.Run(metrics)
    metrics.write_text((directory / "metrics.jsonl").read_text())
    missing = rf"^{re.escape(str(tmp_path / 'metrics.run.json'))}: missing; .* copied along"
    for given in (metrics, tmp_path):
        with pytest.raises(DataError, match=missing):
            report.Run(given)
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(DataError, match=r"events.run.json or .*/metrics.run.json: missing"):
        report.Run(tmp_path)
    whole = json.loads((directory / "metrics.run.json").read_text())
    for broken in ({"layout": {}}, whole | {"layout": {"tp": 1}}, whole | {"layout": {**whole["layout"], "pp": "x"}}):
        (tmp_path / "metrics.run.json").write_text(json.dumps(broken))
        with pytest.raises(DataError, match=r"metrics.run.json: does not describe a run"):
            report.Run(metrics)


def test_a_schedule_is_drawn(tmp_path: Path, run_tool: Callable):
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    flags = ["--stages", "3", "--micro-batches", "5", "--svg", str(picture), "--trace", str(trace)]
    output = run_tool(draw_timeline, "--schedule", "gpipe", *flags)
    assert output.splitlines()[0] == f"gpipe: 3 ranks, 5 micro-batches; at most 5 held at once; bubble {2 / 7:.1%}"
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert math.isclose(max(event["ts"] + event["dur"] for event in events), 1e3 * 3 * 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--chunks: 1 is too few for --schedule interleaved"),
        (("--chunks", "2", "--stages", "1"), "--stages: 1 is too few for --schedule interleaved"),
    ],
)
def test_what_cannot_be_interleaved(run_tool: Callable, arguments: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        run_tool(draw_timeline, "--schedule", "interleaved", *arguments)


def test_a_recorded_step_is_drawn(directory: Path, run_tool: Callable):
    recorded = str(directory / "timeline")
    assert run_tool(draw_timeline, "--recorded", recorded, "--step", "2").startswith("step 2, recorded in")
    with pytest.raises(ConfigError, match="--step: 9 is not recorded by every rank; these are: 1, 2, 3"):
        run_tool(draw_timeline, "--recorded", recorded, "--step", "9")
