"""Charts as SVG text, to stand in a page or in a file of their own: lines over an axis, stacked bars."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Told apart by people who see colours differently (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
GREY = "#8a8f98"
_FONT = "font-family='system-ui, sans-serif' font-size='11'"

Points = Sequence[tuple[float, float]]


@dataclass
class Drawing:
    """Shapes in user units, x to the right and y down; ``width`` and ``height`` are those of the whole."""

    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def rectangle(
        self, x: float, y: float, width: float, height: float, colour: str, tip: str = "", opacity: float = 1.0
    ) -> None:
        """``tip`` is shown where the pointer rests on it."""
        title = f"<title>{html.escape(tip)}</title>" if tip else ""
        place = f"x='{x:.2f}' y='{y:.2f}' width='{max(width, 0.0):.2f}' height='{height:.2f}'"
        self.shapes.append(f"<rect {place} fill='{colour}' fill-opacity='{opacity:g}'>{title}</rect>")

    def line(self, points: Points, colour: str = GREY, width: float = 1.0) -> None:
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.shapes.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='{width:g}'/>")

    def text(self, x: float, y: float, text: str, anchor: str = "start", colour: str = "currentColor") -> None:
        """``anchor``: which part of the text is at x: start, middle or end."""
        escaped = html.escape(text)
        self.shapes.append(
            f"<text x='{x:.2f}' y='{y:.2f}' {_FONT} text-anchor='{anchor}' fill='{colour}'>{escaped}</text>"
        )

    def render(self) -> str:
        size = f"viewBox='0 0 {self.width:g} {self.height:g}' width='{self.width:g}' height='{self.height:g}'"
        start = f"<svg xmlns='http://www.w3.org/2000/svg' {size} style='max-width:100%;height:auto'>"
        return "\n".join([start, *self.shapes, "</svg>"])


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``: 1, 2 or 5 times a power of ten apart."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def spelled(value: float) -> str:
    """A number for an axis: 1.5k, 20M, 3e-4."""
    if value == 0:
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.3g}".replace("e-0", "e-")


_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 16.0, 26.0, 34.0


class _Plot:
    """The area of a chart with its axes: data units to user units."""

    def __init__(self, title: str, x: tuple[float, float], y: tuple[float, float], width: float, height: float) -> None:
        self.x, self.y = x, y
        self.drawing = Drawing(width, height)
        self.drawing.text(_LEFT, 15, title)

    def at(self, x: float, y: float) -> tuple[float, float]:
        inner_width = self.drawing.width - _LEFT - _RIGHT
        inner_height = self.drawing.height - _TOP - _BOTTOM
        across = (x - self.x[0]) / (self.x[1] - self.x[0] or 1.0)
        up = (y - self.y[0]) / (self.y[1] - self.y[0] or 1.0)
        return _LEFT + across * inner_width, _TOP + (1 - up) * inner_height

    def axes(self, x_label: str, marks: Sequence[tuple[float, str]]) -> None:
        """``marks``: (place, label) on the y axis; those of x are round numbers."""
        drawing, floor = self.drawing, self.drawing.height - _BOTTOM
        for value, label in marks:
            _, y = self.at(self.x[0], value)
            drawing.line([(_LEFT, y), (drawing.width - _RIGHT, y)], "#8a8f9840")
            drawing.text(_LEFT - 6, y + 4, label, "end", GREY)
        for value in ticks(*self.x, about=8):
            x, _ = self.at(value, self.y[0])
            drawing.text(x, floor + 14, spelled(value), "middle", GREY)
        drawing.line([(_LEFT, floor), (drawing.width - _RIGHT, floor)])
        drawing.text(drawing.width - _RIGHT, floor + 28, x_label, "end", GREY)

    def key(self, names: Sequence[str]) -> None:
        """Which colour is which, at the top right."""
        x = self.drawing.width - _RIGHT
        for number, name in reversed(list(enumerate(names))):
            self.drawing.text(x, 15, name, "end")
            x -= 6.5 * len(name) + 8
            self.drawing.rectangle(x - 8, 7, 9, 9, COLOURS[number % len(COLOURS)])
            x -= 20


def line_chart(
    title: str,
    x_label: str,
    series: Mapping[str, Points],
    *,
    log: bool = False,
    width: float = 520,
    height: float = 220,
) -> str:
    """One line per name; points whose y is not finite, or not positive on a ``log`` axis, are left out."""
    scale = math.log10 if log else float
    kept = {
        name: [(x, scale(y)) for x, y in points if math.isfinite(y) and (y > 0 or not log)]
        for name, points in series.items()
    }
    places = [point for points in kept.values() for point in points]
    if not places:
        return ""
    xs, ys = [x for x, _ in places], [y for _, y in places]
    low, high = min(ys), max(ys)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    plot = _Plot(title, (min(xs), max(xs)), (low - margin, high + margin), width, height)
    marks = [(value, spelled(10**value if log else value)) for value in ticks(*plot.y)]
    plot.axes(x_label, marks)
    for number, (name, points) in enumerate(kept.items()):
        colour = COLOURS[number % len(COLOURS)]
        if len(points) == 1:
            x, y = plot.at(*points[0])
            plot.drawing.rectangle(x - 2, y - 2, 4, 4, colour, f"{name} {spelled(series[name][0][1])}")
        else:
            plot.drawing.line([plot.at(*point) for point in points], colour, 1.5)
    if len(kept) > 1:
        plot.key(list(kept))
    return plot.drawing.render()


def stacked_bars(
    title: str, x_label: str, bars: Mapping[str, Mapping[str, float]], *, width: float = 760, row: float = 22
) -> str:
    """One horizontal bar per name, made of parts of the same names in the same order; all start at 0."""
    if not bars:
        return ""
    most = max(sum(parts.values()) for parts in bars.values())
    height = _TOP + _BOTTOM + row * len(bars)
    plot = _Plot(title, (0.0, most * 1.02 or 1.0), (0.0, 1.0), width, height)
    plot.axes(x_label, [])
    for number, (name, parts) in enumerate(bars.items()):
        y, start = _TOP + row * number, 0.0
        plot.drawing.text(_LEFT - 6, y + row / 2 + 3, name, "end")
        for place, (part, value) in enumerate(parts.items()):
            left, right = plot.at(start, 0)[0], plot.at(start + value, 0)[0]
            tip = f"{name}: {part} {spelled(value)}"
            plot.drawing.rectangle(left, y + 2, right - left, row - 4, COLOURS[place % len(COLOURS)], tip)
            start += value
    plot.key(list(next(iter(bars.values()))))
    return plot.drawing.render()
