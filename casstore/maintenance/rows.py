"""Rows: decoding them with errors that name the row, and removing those that have expired.

A row is removed on condition that it is unchanged and, if it has a time, that it has expired by the
engine's clock. It keeps the objects it names until it is removed; its time only says when it may be
removed. So later steps need not check the time again, and setting the clock back cannot revive a
row: objects that gc may collect have no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    Engine,
    Row,
    RowChange,
    RowKey,
    RowLapsed,
    Write,
)
from casstore.errors import ConditionFailedError, CorruptionError, FormatError
from casstore.maintenance.progress import Phase, Progress
from casstore.session import pins
from casstore.session.scanning import scan

_BATCH: Final = 1024

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


class ConditionalChange(NamedTuple):
    """Changes of rows, and the condition for them."""

    condition: Condition
    rows: Sequence[RowChange]


def apply_changes(
    engine: Engine, changes: Iterable[ConditionalChange]
) -> Iterator[ConditionalChange]:
    """Write changes, many in one transaction; yields those whose conditions held."""
    ahead = iter(changes)
    while waiting := list(islice(ahead, _BATCH)):
        yield from _apply(engine, waiting)


def _apply(engine: Engine, waiting: list[ConditionalChange]) -> list[ConditionalChange]:
    while waiting:
        conditions = [one.condition for one in waiting]
        rows = [row for one in waiting for row in one.rows]
        try:
            engine.write(Write(conditions=conditions, rows=rows))
        except ConditionFailedError as exc:
            # The row was changed or removed since it was read.
            del waiting[exc.index]
            continue
        break
    return waiting


def remove_rows(
    engine: Engine,
    table: str,
    bounds: tuple[bytes, bytes | None],
    condition_of: Callable[[Row], Condition | None],
    progress: Progress | None = None,
) -> int:
    """Remove rows for which ``condition_of`` returns a condition, if it holds; returns how many."""
    report = Phase(progress, "expire", f"rows of {table}")

    def removals() -> Iterator[ConditionalChange]:
        for seen, row in enumerate(scan(engine, table, *bounds)):
            report.now_and_then(seen + 1)
            condition = condition_of(row)
            if condition is not None:
                yield ConditionalChange(condition, [DeleteRow(table, row.key)])

    return sum(1 for _ in apply_changes(engine, removals()))


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
