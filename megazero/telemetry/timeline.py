"""A step's timeline, planned or measured: what every pipeline rank did when. As SVG, and as a trace for Perfetto.

Planned, it is a schedule as `pipeline.simulate` times it; measured, what `telemetry.trace` has recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megazero.errors import DataError
from megazero.pipeline.schedules import COMMUNICATION, SENDS, Kind
from megazero.pipeline.simulate import Timeline
from megazero.telemetry.svg import GREY, Drawing, spelled, ticks

FILE = "pipeline_rank_{:03d}.jsonl"
_COLOURS = {
    Kind.FORWARD: "#0072B2",
    Kind.BACKWARD: "#E69F00",
    Kind.BACKWARD_INPUT: "#E69F00",
    Kind.BACKWARD_WEIGHT: "#009E73",
}
_RELEASES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class Bar(NamedTuple):
    """One action on one rank; ``start`` and ``end`` in seconds from the beginning of the step. ``micro_batch`` is None
    where the action is not of one."""

    rank: int
    kind: Kind
    micro_batch: int | None
    chunk: int
    start: float
    end: float

    @property
    def is_compute(self) -> bool:
        return self.micro_batch is not None and self.kind not in (*COMMUNICATION, Kind.REDUCE)

    def describe(self) -> str:
        what = self.kind.value.replace("_", " ")
        what += "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        what += f", chunk {self.chunk}" if self.chunk else ""
        return f"rank {self.rank}: {what}; {1e3 * (self.end - self.start):.4g} ms"


def planned_bars(timeline: Timeline) -> list[Bar]:
    """Of a simulated schedule whose costs are in seconds."""
    return [
        Bar(rank, span.action.kind, span.action.micro_batch, span.action.chunk, span.start, span.end)
        for rank, spans in enumerate(timeline.ranks)
        for span in spans
    ]


def measured_bars(directory: Path, ranks: int | None = None) -> dict[int, list[Bar]]:
    """Step → bars, from the files of `telemetry.trace` in a directory; steps that a rank lacks are left out, and a last
    line that was cut off. ``ranks``: pipeline ranks, where more files may lie there, of a run before; None: all.

    Raises DataError where a file cannot be read as one of them.
    """
    by_rank: list[dict[int, tuple[float, list[Bar]]]] = []
    while len(by_rank) != ranks and (path := directory / FILE.format(len(by_rank))).exists():
        try:
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1].splitlines()
            by_rank.append(dict(_step(len(by_rank), json.loads(line)) for line in whole))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a timeline that a run has written ({error})") from error
    if not by_rank:
        raise DataError(f"{directory}: holds no {FILE.format(0)}: set log.timeline to record one")
    found = {}
    for step in sorted(set.intersection(*(set(steps) for steps in by_rank))):
        first = min(steps[step][0] for steps in by_rank)
        found[step] = [
            bar._replace(start=bar.start + begin - first, end=bar.end + begin - first)
            for begin, bars in (steps[step] for steps in by_rank)
            for bar in bars
        ]
    return found


def _step(rank: int, line: dict[str, Any]) -> tuple[int, tuple[float, list[Bar]]]:
    bars = [Bar(rank, Kind(kind), micro_batch, chunk, *times) for kind, micro_batch, chunk, *times in line["actions"]]
    return line["step"], (line["begin"], bars)


def memory_over_time(bars: Sequence[Bar], activations: Sequence[Sequence[int]]) -> dict[int, list[tuple[float, float]]]:
    """Rank → (seconds, bytes of activations held) at every change; ``activations[rank][chunk]``: of a micro-batch.

    A micro-batch's are there from the start of its forward to the end of its backward.
    """
    held = {}
    for rank, sizes in enumerate(activations):
        own = [bar for bar in bars if bar.rank == rank]
        changes = [(bar.start, sizes[bar.chunk]) for bar in own if bar.kind is Kind.FORWARD]
        last = {(bar.micro_batch, bar.chunk): bar.end for bar in own if bar.kind in _RELEASES}
        changes += [(end, -sizes[chunk]) for (_, chunk), end in last.items()]
        points, total = [(0.0, 0.0)], 0.0
        for at, change in sorted(changes):
            points += [(at, total), (at, total + change)]
            total += change
        held[rank] = points
    return held


def bubble_fraction(bars: Sequence[Bar]) -> float:
    """The mean share of the time from the first computation to the last in which a rank computes nothing."""
    compute = [bar for bar in bars if bar.is_compute]
    begin, end = min(bar.start for bar in compute), max(bar.end for bar in compute)
    ranks = {bar.rank for bar in compute}
    busy = sum(bar.end - bar.start for bar in compute)
    return 1 - busy / (len(ranks) * (end - begin)) if end > begin else 0.0


def chrome_trace(bars: Sequence[Bar]) -> dict[str, Any]:
    """The JSON object that ui.perfetto.dev and chrome://tracing open: a process per rank, transfers in a lane apart."""
    events: list[dict[str, Any]] = []
    for rank in sorted({bar.rank for bar in bars}):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}})
        for lane, name in enumerate(("compute", "transfers")):
            events.append({"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}})
    for bar in bars:
        events.append(
            {
                "ph": "X",
                "pid": bar.rank,
                "tid": int(bar.kind in COMMUNICATION),
                "name": bar.kind.value if bar.micro_batch is None else f"{bar.kind.value} {bar.micro_batch}",
                "cat": "transfer" if bar.kind in COMMUNICATION else "compute",
                "ts": 1e6 * bar.start,
                "dur": 1e6 * (bar.end - bar.start),
                "args": {"micro_batch": bar.micro_batch, "chunk": bar.chunk},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_LEFT, _TOP, _ROW, _FOOT = 64.0, 42.0, 26.0, 34.0


def timeline_svg(title: str, bars: Sequence[Bar], width: float = 1040) -> str:
    """Ranks from top to bottom, time from left to right; a later chunk is lighter. Time in which a rank waits for a
    transfer is a thin line in the middle of its row."""
    ranks = sorted({bar.rank for bar in bars})
    end = max((bar.end for bar in bars), default=0.0) or 1.0
    drawing = Drawing(width, _TOP + _ROW * len(ranks) + _FOOT)
    scale = (width - _LEFT - 12) / end
    drawing.text(_LEFT, 15, title)
    _key(drawing, bars)
    for number, rank in enumerate(ranks):
        top = _TOP + _ROW * number
        drawing.text(_LEFT - 6, top + _ROW / 2 + 3, f"rank {rank}", "end")
        drawing.rectangle(_LEFT, top + 1, end * scale, _ROW - 2, GREY, opacity=0.12)
        own = [bar for bar in bars if bar.rank == rank]
        for bar in sorted(own, key=lambda bar: bar.is_compute):  # waits behind what is computed meanwhile
            _draw(drawing, bar, top, scale)
    floor = _TOP + _ROW * len(ranks)
    for value in ticks(0.0, end, about=8):
        drawing.line([(_LEFT + value * scale, floor), (_LEFT + value * scale, floor + 4)])
        drawing.text(_LEFT + value * scale, floor + 16, spelled(1e3 * value), "middle", GREY)
    drawing.text(width - 12, floor + 30, "milliseconds", "end", GREY)
    return drawing.render()


def _draw(drawing: Drawing, bar: Bar, top: float, scale: float) -> None:
    left, width = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
    if bar.kind in COMMUNICATION:
        if bar.kind not in SENDS:
            drawing.rectangle(left, top + _ROW / 2 - 1.5, width, 3, GREY, bar.describe())
        return
    if not bar.is_compute:
        return
    drawing.rectangle(left + 0.25, top + 2, width - 0.5, _ROW - 4, _lighter(bar), bar.describe())
    if width >= 14:
        drawing.text(left + width / 2, top + _ROW / 2 + 4, str(bar.micro_batch), "middle", "#ffffff")


def _colour(kind: Kind) -> str:
    return _COLOURS.get(kind, GREY)


def _lighter(bar: Bar) -> str:
    """The colour of its kind, the lighter the later its chunk."""
    white = min(0.3 * bar.chunk, 0.65)
    parts = [int(_colour(bar.kind)[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def _key(drawing: Drawing, bars: Sequence[Bar]) -> None:
    x = _LEFT
    for kind in dict.fromkeys(bar.kind for bar in bars if bar.is_compute):
        name = kind.value.replace("_", " ")
        drawing.rectangle(x, 23, 9, 9, _colour(kind))
        drawing.text(x + 14, 31, name)
        x += 6.5 * len(name) + 34
    drawing.rectangle(x, 26, 9, 3, GREY)
    drawing.text(x + 14, 31, "waits for what it is sent")
