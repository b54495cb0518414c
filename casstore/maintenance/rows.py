"""Rows: decoding them with errors that name the row, and removing those that have expired.

A row is removed on condition that it is unchanged and, if it has a time, that it has expired by the
engine's clock. It keeps the objects it names until it is removed; its time only says when it may be
removed. So later steps need not check the time again, and setting the clock back cannot revive a
row: objects that gc may collect have no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    Engine,
    Row,
    RowKey,
    RowLapsed,
    Write,
)
from casstore.errors import CorruptionError, FormatError
from casstore.maintenance.progress import Phase, Progress
from casstore.session import pins
from casstore.session.attempts import write_unchanged
from casstore.session.scanning import scan

Stored = TypeVar("Stored")
Decoded = TypeVar("Decoded")


def decoded(place: RowKey, row: Stored, decode: Callable[[Stored], Decoded]) -> Decoded:
    """Decode a row; the error for a damaged row names it."""
    try:
        return decode(row)
    except FormatError as exc:
        raise FormatError(_unreadable(place, exc)) from exc
    except (CorruptionError, ValueError) as exc:
        raise CorruptionError(_unreadable(place, exc)) from exc


def _unreadable(place: RowKey, exc: Exception) -> str:
    return f"row {place.key.hex()} of table {place.table} cannot be read: {exc}"


def remove_rows(
    engine: Engine,
    table: str,
    bounds: tuple[bytes, bytes | None],
    condition_of: Callable[[Row], Condition | None],
    progress: Progress | None = None,
) -> int:
    """Remove rows for which ``condition_of`` returns a condition, if it holds; returns how many."""
    report = Phase(progress, "expire", f"rows of {table}")

    def removals() -> Iterator[Write]:
        for seen, row in enumerate(scan(engine, table, *bounds)):
            report.now_and_then(seen + 1)
            condition = condition_of(row)
            if condition is not None:
                yield Write(conditions=[condition], rows=[DeleteRow(table, row.key)])

    return sum(1 for _ in write_unchanged(engine, removals()))


def remove_pins(engine: Engine, progress: Progress | None = None) -> int:
    """Remove expired pins; returns how many."""
    now_ms = engine.now_ms()

    def lapsed(row: Row) -> Condition | None:
        if pins.kept_digest(row.value, now_ms) is not None:
            return None
        return RowLapsed("pins", row.key, row.value, pins.EXPIRES_AT)

    return remove_rows(engine, "pins", (b"", None), lapsed, progress)


def count_pins(engine: Engine) -> int:
    """How many pins ``remove_pins`` would remove."""
    now_ms = engine.now_ms()
    rows = scan(engine, "pins", b"", None)
    return sum(pins.kept_digest(row.value, now_ms) is None for row in rows)
