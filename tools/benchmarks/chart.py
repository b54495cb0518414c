"""Line charts on two logarithmic axes, as SVG, readable on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import NamedTuple
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 190, 46, 48
_LINE_HEIGHT = 17
# Light page, dark page. The first is drawn thicker.
_COLOURS = (
    ("#0b6bcb", "#58a6ff"),
    ("#c2410c", "#ff9e64"),
    ("#15803d", "#56d364"),
    ("#7e22ce", "#d2a8ff"),
    ("#b91c1c", "#ff7b72"),
    ("#be185d", "#f778ba"),
    ("#854d0e", "#e3b341"),
    ("#4b5563", "#9ca3af"),
)
_DASHES = ("", "", "6 3", "2 3", "8 3 2 3", "4 2", "1 2", "10 4")


class Line(NamedTuple):
    """A named series of points, all positive. ``style`` 0 to 7 picks its colour and dashes."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0


class Axis(NamedTuple):
    """Powers of ten that a range lies between, and pixels for them."""

    low: int
    high: int
    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value stands."""
        share = (log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return Axis(low, max(high, low + 1), start, end)


def draw(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> str:
    """An SVG document. ``x_text`` and ``y_text`` write the powers of ten at the axes."""
    shown = [line for line in lines if line.points]
    if not shown:
        raise ValueError("a chart needs a line with at least one point")
    x = _axis([point[0] for line in shown for point in line.points], _LEFT, _WIDTH - _RIGHT)
    y = _axis([point[1] for line in shown for point in line.points], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        _style(sorted({line.style for line in shown})),
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>',
        _text(_LEFT, 26, title, "title"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_label, "middle"),
    ]
    for power in range(x.low, x.high + 1):
        at = x.at(10.0**power)
        parts.append(_rule(at, y.start, at, y.end))
        parts.append(_text(at, y.start + 18, x_text(10.0**power), "middle"))
    for power in range(y.low, y.high + 1):
        at = y.at(10.0**power)
        parts.append(_rule(x.start, at, x.end, at))
        parts.append(_text(x.start - 8, at + 4, y_text(10.0**power), "end"))
    for line in shown:
        steps = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in line.points)
        parts.append(f'<polyline class="line c{line.style}" points="{steps}"/>')
    parts += _names(shown, x, y)
    return "\n".join([*parts, "</svg>", ""])


def _style(used: Sequence[int]) -> str:
    light = [f".c{at}{{stroke:{_COLOURS[at][0]};fill:{_COLOURS[at][0]}}}" for at in used]
    dark = [f".c{at}{{stroke:{_COLOURS[at][1]};fill:{_COLOURS[at][1]}}}" for at in used]
    dashes = [f".line.c{at}{{stroke-dasharray:{_DASHES[at]}}}" for at in used if _DASHES[at]]
    return "\n".join(
        [
            "<style>",
            "text{font:12px system-ui,sans-serif;fill:#374151}",
            ".title{font-size:15px;font-weight:600;fill:#111827}",
            ".middle{text-anchor:middle}.end{text-anchor:end}",
            ".page{fill:#ffffff;stroke:#d1d5db}.rule{stroke:#e5e7eb}",
            ".line{stroke-width:1.8}.line.c0{stroke-width:3}",
            *light,
            ".line{fill:none}",
            "text.name{stroke:none}text.name.c0{font-weight:600}",
            ".lead{stroke-width:0.8;stroke-opacity:0.6}",
            *dashes,
            "@media (prefers-color-scheme:dark){",
            "text{fill:#c9d1d9}.title{fill:#f0f6fc}",
            ".page{fill:#0d1117;stroke:#30363d}.rule{stroke:#21262d}",
            *dark,
            ".line{fill:none}",
            "}",
            "</style>",
        ]
    )


def _names(lines: Sequence[Line], x: Axis, y: Axis) -> list[str]:
    """A label at the end of each line; labels that would overlap are moved apart."""
    ends = sorted((y.at(line.points[-1][1]), number) for number, line in enumerate(lines))
    places: list[float] = []
    for height, _ in ends:
        places.append(max(height, places[-1] + _LINE_HEIGHT) if places else height)
    # What ran over the bottom pushes those above it up.
    limit = y.start
    for at in reversed(range(len(places))):
        places[at] = min(places[at], limit)
        limit = places[at] - _LINE_HEIGHT
    parts: list[str] = []
    for (height, number), place in zip(ends, places, strict=True):
        line = lines[number]
        end = x.at(line.points[-1][0])
        parts.append(
            f'<line class="lead c{line.style}" x1="{end:.1f}" y1="{height:.1f}" '
            f'x2="{x.end + 10:.1f}" y2="{place:.1f}"/>'
        )
        parts.append(_text(x.end + 14, place + 4, line.name, f"name c{line.style}"))
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="rule" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
