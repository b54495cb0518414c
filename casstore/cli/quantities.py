"""Parses and formats sizes, durations and times."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

import click

from casstore.format.printing import count as count
from casstore.format.printing import size as size

_UNITS_MS: Final = {
    "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000,
    "w": 7 * 86_400_000, "y": 365 * 86_400_000,
}  # fmt: skip
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_MAX_DURATION_MS: Final = 1000 * 366 * 86_400_000


def parse_duration(text: str) -> int:
    """Milliseconds from ``90s``, ``1h30m``, ``7d`` or ``0``; ValueError for anything else."""
    squeezed = text.strip().lower()
    if squeezed == "0":
        return 0
    total = 0.0
    at = 0
    for match in _DURATION.finditer(squeezed):
        if match.start() != at or match[2] not in _UNITS_MS:
            break
        total += float(match[1]) * _UNITS_MS[match[2]]
        at = match.end()
    if not squeezed or at != len(squeezed) or total > _MAX_DURATION_MS:
        raise ValueError(f"{text!r} is not a duration; write 500ms, 90s, 30m, 1h, 7d, 2w, 1y or 0")
    return int(total)


class Duration(click.ParamType[int]):
    """A duration option: given as text, taken as milliseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Milliseconds."""
        if isinstance(value, int):
            return value
        try:
            return parse_duration(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


DURATION: Final = Duration()


class Whole(click.IntRange):
    """A whole number within bounds: at least ``min``, at most ``max``."""

    name = "n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            allowed = f"of at least {self.min}"
            if self.max is not None:
                allowed = f"from {self.min} to {self.max}"
            self.fail(f"must be a whole number {allowed}, got {value!r}", param, ctx)


def duration(time_ms: float) -> str:
    """A time span as a person reads it: ``2 h 5 min``."""
    if time_ms < 1000:
        return f"{time_ms:.0f} ms"
    seconds = int(time_ms / 1000)
    for unit, long in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= long:
            below, short = {"d": ("h", 3600), "h": ("min", 60), "min": ("s", 1)}[unit]
            rest = seconds % long // short
            return f"{seconds // long} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{seconds} s"


def moment(time_ms: int) -> str:
    """A time in RFC 3339, to the millisecond."""
    try:
        found = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        # The year is not in the calendar. Times from a wrong clock must still be shown.
        return f"{time_ms} ms"
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def clock(time_ms: int) -> str:
    """A time as a person reads it, in UTC."""
    return time_words(moment(time_ms))


def time_words(text: str) -> str:
    """A time in RFC 3339 as a person reads it, to the second."""
    return text[:19].replace("T", " ")
