"""The comparison as Markdown tables and charts, inserted into a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.chart import Line, draw
from benchmarks.peers.comparison import Column, Results, Spread
from benchmarks.peers.langgraph_savers import CasstoreSaver
from benchmarks.peers.peer import Flush
from benchmarks.peers.workloads import Figure, figures

BEGIN = "<!-- peers: written by tools/bench.py --write-docs; changes here are lost -->"
END = "<!-- peers: end -->"

_DOES_NOT = "does not do this"
# Figures within this ratio count as equal, given the noise of a run.
_EVEN = 1.1
# One of each group of peers that differ only in when they flush.
_SIZES = (
    "casstore",
    "LangGraph SqliteSaver",
    "casstore's CasstoreSaver",
    "SQLite, WAL, FULL",
    "bare LMDB",
    "OpenAI SQLiteSession",
    "power-loop",
    "git",
)
# A peer has the same colour in every chart.
_STYLES = {name: at for at, name in enumerate(_SIZES)} | {
    "casstore, `relaxed`": 0,
    "LangGraph InMemorySaver": 1,
    "SQLite, WAL, NORMAL": 3,
    "bare LMDB, no sync": 4,
}


def seconds_text(value: float) -> str:
    """A time in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def bytes_text(value: float) -> str:
    """A size in the unit that suits it."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def _bytes_mark(value: float) -> str:
    """A power of ten at an axis."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.0f} {unit}"
    return f"{value:.0f} B"


def _cell(figure: Figure, value: Spread | None) -> str:
    if value is None:
        return _DOES_NOT
    text = seconds_text if figure.unit == "s" else bytes_text
    middle, low, high = text(value.median), text(value.low), text(value.high)
    return middle if low == high else f"{middle} ({low} – {high})"


def _table(rows: Sequence[Figure], columns: Sequence[Column]) -> list[str]:
    return [
        "| | " + " | ".join(column.name for column in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(
            f"| {row.title} | "
            + " | ".join(_cell(row, column.figures.get(row.key)) for column in columns)
            + " |"
            for row in rows
        ),
    ]


def behind(rows: Sequence[Figure], ours: Column, others: Sequence[Column]) -> list[str]:
    """The rows in which ``ours`` is not the best, with the better columns and ratios."""
    told: list[str] = []
    for row in rows:
        if row.key not in ours.figures:
            continue
        mine = ours.figures[row.key].median
        better = [
            (mine / theirs.median if theirs.median > 0 else float("inf"), other.name)
            for other in others
            if (theirs := other.figures.get(row.key)) is not None and theirs.median * _EVEN < mine
        ]
        if better:
            named = ", ".join(
                f"{name} ({ratio:.1f}×)" if ratio < float("inf") else f"{name} (nothing at all)"
                for ratio, name in sorted(better, reverse=True)
            )
            what = "takes longer than" if row.unit == "s" else "takes more room than"
            told.append(f"- {row.title}: `{ours.name.replace('`', '')}` {what} {named}.")
    return told


def markdown(results: Results) -> str:
    """The text between the markers."""
    rows = figures(results.sizes)
    there = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    parts = [
        f"Median of {results.repeats} repeats, lowest and highest in brackets; the order of the "
        "peers was shuffled each time. One write of 4 KiB and its flush took "
        f"{seconds_text(results.flush.median)} in the middle during the run "
        f"({seconds_text(results.flush.low)} – {seconds_text(results.flush.high)}). {there}.",
        *(
            f"{name} was skipped: {lack} is not installed."
            for name, lack in results.skipped.items()
        ),
    ]
    for flush, heading in (
        (Flush.EACH, "### Every turn flushed to disk"),
        (Flush.LATER, "### Not flushed, or in memory only"),
    ):
        columns = [
            column
            for column in results.columns
            if (column.flush == Flush.EACH.value) == (flush is Flush.EACH)
        ]
        if not columns:
            continue
        parts += [heading, "\n".join(_table(rows, columns))]
        told: list[str] = []
        ours = [column for column in columns if column.name.startswith("casstore")]
        for column in ours:
            others = [other for other in columns if other not in ours]
            if column.name == CasstoreSaver.name:
                # It has LangGraph's interface, so it is compared with LangGraph's savers.
                others = [other for other in others if other.name.startswith("LangGraph")]
            told += behind(rows, column, others)
        if told:
            parts += ["Where casstore is behind, by more than a tenth:", "\n".join(told)]
    parts += [
        "### As a session grows",
        f"Up to {results.sizes.long:,} turns of two messages of 1.7 KB. A line ends early where "
        f"the peer took more than {bytes_text(results.sizes.long_bytes)} or "
        f"{results.sizes.long_s:.0f} seconds for the session. Run once; a time is the "
        "median of the last twenty turns.",
        *(f"![{title}](../img/{name})" for name, title in CHARTS.items()),
    ]
    return "\n\n".join(parts)


CHARTS = {
    "size-langgraph.svg": "Size of a session with every turn's checkpoint kept",
    "size-over-turns.svg": "Size of a session over its turns",
    "turn-flushed.svg": "Time a turn takes, flushed to disk",
    "turn-not-flushed.svg": "Time a turn takes, not flushed",
}


def charts(results: Results) -> dict[str, str]:
    """The charts by file name."""
    by_name = {column.name: column for column in results.columns}
    sizes = [by_name[name] for name in _SIZES if name in by_name]
    flushed = [column for column in results.columns if column.flush == Flush.EACH.value]
    later = [column for column in results.columns if column.flush != Flush.EACH.value]
    wanted = {
        "size-langgraph.svg": _sizes(sizes[:3]),
        "size-over-turns.svg": _sizes(sizes),
        "turn-flushed.svg": _times(flushed),
        "turn-not-flushed.svg": _times(later),
    }
    drawn: dict[str, str] = {}
    for name, lines in wanted.items():
        text = _bytes_mark if name.startswith("size") else seconds_text
        if any(line.points for line in lines):
            drawn[name] = draw(
                CHARTS[name], lines, x_label="turns", x_text=lambda value: f"{value:,.0f}",
                y_text=text,
            )  # fmt: skip
    return drawn


def _sizes(columns: Sequence[Column]) -> list[Line]:
    return [
        _line(one, [(point.turns, point.size_bytes) for point in one.growth]) for one in columns
    ]


def _times(columns: Sequence[Column]) -> list[Line]:
    return [_line(one, [(point.turns, point.turn_s) for point in one.growth]) for one in columns]


def _line(column: Column, points: list[tuple[float, float]]) -> Line:
    return Line(column.name.replace("`", ""), points, _STYLES[column.name])


def put_between(page: str, body: str) -> str:
    """The page with ``body`` between the markers, otherwise unchanged."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must have one line {BEGIN!r} and, after it, one {END!r}")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


def write(results: Results, documents: Path) -> None:
    """Write ``reference/benchmarks.md`` and ``img/`` below a directory of documents."""
    page = documents / "reference" / "benchmarks.md"
    text = put_between(page.read_text(), markdown(results))
    images = documents / "img"
    images.mkdir(exist_ok=True)
    for name, drawn in charts(results).items():
        (images / name).write_text(drawn)
    page.write_text(text)
