"""Imports LangBot's runner state into scoped state: values with their times, contexts and keys.

The table is called ``runner_state``, formerly ``agent_runner_state``. Older rows have scope keys
joined by colons; they get the newer key, computed from their columns, under which LangBot's host
looks for them. If a newer row has that key already, the host has used that row since, and the
older one is left out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from casstore.compat import importing
from casstore.compat.importing import (
    ImportNote,
    ImportReport,
    Part,
    Presence,
    RowPart,
    paged,
    presence,
    run,
)
from casstore.compat.sqlite_source import SqliteSource, utc_ms
from casstore.errors import ConflictError, ForeignSourceError, InvalidInputError, StateRefusedError
from casstore.maintenance.progress import Progress, Step
from casstore.records.scoped.adoption import Adoption, ArrivedReset, ArrivedValue
from casstore.records.scoped.policy import checked_key, content_of
from casstore.records.scoped.scope_keys import ALIASES, SCOPES, Context, checked, scope_key
from casstore.store import Store, check_store

Arrived = TypeVar("Arrived")

_TABLES: Final = ("runner_state", "agent_runner_state")
_RESETTER: Final = "__langbot_context_reset__"
_CONTEXT: Final = (
    "runner_id", "binding_identity", "bot_id", "workspace_id", "conversation_id", "thread_id",
    "actor_id", "actor_type", "subject_id", "subject_type",
)  # fmt: skip
_OTHERS: Final = ("id", "scope", "scope_key", "state_key", "value_json", "created_at", "updated_at")

# Why rows are left out.
_EMPTY: Final = "rows without a value, left out"
_UNREADABLE: Final = "rows whose value is not JSON, left out"
_SUPERSEDED: Final = "rows that a newer row replaces, left out"


def import_langbot(
    store: Store,
    source: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the runner state of a LangBot database.

    Notes count the rows that LangBot itself does not see, and values in columns that this release
    does not know; they are left out. ForeignSourceError if there is no such table; ConflictError
    if both tables have rows, or the store holds a row with other content; InvalidInputError,
    naming the row, if its columns contradict each other or it holds NaN.
    """
    check_store(store)
    with SqliteSource(source) as database:
        rows = _StateTable(database, _table(database))
        adoption = Adoption(store)
        fates = _fates(rows, progress)
        parts: list[Part] = [
            _ArrivedPart(
                "resets", rows.count_resets(), rows.resets, rows.arrived_reset,
                adoption.has_resets, adoption.put_resets,
            ),
            _ArrivedPart(
                "values", fates[None], rows.kept, rows.arrived_value,
                adoption.has_values, adoption.put_values,
            ),
        ]  # fmt: skip
        notes = [ImportNote(why, number) for why, number in fates.items() if why is not None]
        notes += database.unread(rows.table, (*_CONTEXT, *_OTHERS))
        return run(
            "langbot", database, store, parts, notes=notes, dry_run=dry_run, progress=progress
        )


def _fates(rows: _StateTable, progress: Progress | None) -> Counter[str | None]:
    """How many rows are imported (None), and how many are left out for which reason."""
    fates: Counter[str | None] = Counter()
    for seen, row in enumerate(rows.values(), 1):
        fates[rows.fate(row)] += 1
        if progress is not None and not seen % importing.PAGE_ROWS:
            progress(Step("check", seen, None, "rows"))
    return fates


def _table(source: SqliteSource) -> str:
    """The table of the two that has rows; ConflictError if both have."""
    there = [table for table in _TABLES if table in source.tables]
    if not there:
        raise ForeignSourceError(f"{source.path} has no table {' or '.join(_TABLES)}")
    filled = [table for table in there if source.first(f"SELECT 1 FROM {table} LIMIT 1")]
    if len(filled) > 1:
        raise ConflictError(
            f"{source.path} has state in {' and in '.join(filled)}; move it into one of them first"
        )
    table = (filled or there)[0]
    lacking = {*_CONTEXT, *_OTHERS} - source.columns(table)
    if lacking:
        raise ForeignSourceError(f"{table} of {source.path} has no column {sorted(lacking)[0]}")
    return table


class _ArrivedPart(RowPart[Arrived]):
    """Rows of one kind, which ``has`` looks for in the store and ``put`` writes."""

    def __init__(
        self,
        name: str,
        number: int,
        rows: Callable[[], Iterator[_StateRow]],
        convert: Callable[[_StateRow], Arrived],
        has: Callable[[Sequence[Arrived]], Sequence[bool]],
        put: Callable[[Sequence[Arrived]], None],
    ) -> None:
        self.name = name
        self._number = number
        self._rows = rows
        self._convert = convert
        self._has = has
        self._put = put

    def count(self) -> int:
        return self._number

    def pages(self) -> Iterator[Sequence[Arrived]]:
        for page in paged(self._rows(), _row_bytes):
            yield [self._convert(row) for row in page]

    def look(self, page: Sequence[Arrived]) -> Sequence[Presence]:
        return presence(self._has(page))

    def store(self, rows: Sequence[Arrived]) -> None:
        self._put(rows)


def _row_bytes(row: _StateRow) -> int:
    return len(row.value_json) if isinstance(row.value_json, str) else 0


# --- rows of the source -------------------------------------------------------------------------


class _StateRow(NamedTuple):
    """A row of the table."""

    id: int
    scope: Any
    scope_key: Any
    state_key: Any
    value_json: Any
    created_at: Any
    updated_at: Any
    context: Context


class _StateTable:
    """The table, read in order of its ids, and the conversion of its rows."""

    def __init__(self, source: SqliteSource, table: str) -> None:
        self._source = source
        self.table = table

    def values(self) -> Iterator[_StateRow]:
        """All rows but resets."""
        return self._where("runner_id IS NOT ?")

    def kept(self) -> Iterator[_StateRow]:
        """The values that are imported."""
        return (row for row in self.values() if self.fate(row) is None)

    def resets(self) -> Iterator[_StateRow]:
        """The rows that record the latest reset of a conversation; earlier ones are not kept."""
        return self._where("runner_id IS ?")

    def count_resets(self) -> int:
        """How many rows record a reset."""
        query = f"SELECT count(*) FROM {self.table} WHERE runner_id IS ?"
        return self._source.number(query, (_RESETTER,))

    def _where(self, condition: str) -> Iterator[_StateRow]:
        columns = ", ".join((*_OTHERS, *_CONTEXT))
        query = f"SELECT {columns} FROM {self.table} WHERE {condition} ORDER BY id"
        for row in self._source.ask(query, (_RESETTER,)):
            yield _StateRow._make([*row[: len(_OTHERS)], Context(*row[len(_OTHERS) :])])

    # --- rows that are left out -------------------------------------------------------------

    def fate(self, row: _StateRow) -> str | None:
        """Why a row is left out; None if it is imported."""
        key = self._key(row)
        if not row.value_json:
            return _EMPTY
        if self._is_superseded(row, key):
            return _SUPERSEDED
        try:
            json.loads(row.value_json)
        except json.JSONDecodeError:
            return _UNREADABLE
        except (TypeError, ValueError, RecursionError) as exc:
            raise self._broken(row, f"its value cannot be read: {exc}") from exc
        return None

    def _is_superseded(self, row: _StateRow, key: str) -> bool:
        """Whether the host finds another row in place of this one."""
        name = ALIASES.get(row.state_key, row.state_key)
        # The places where the host looks for this value, in its order: the newer scope key before
        # the older, the name before its aliases. It uses the first row that it finds.
        names = [name, *[alias for alias, meant in ALIASES.items() if meant == name]]
        places = [(one, other) for one in (key, _joined(row)) for other in names]
        better = places[: places.index((row.scope_key, row.state_key))]
        query = f"SELECT 1 FROM {self.table} WHERE scope_key = ? AND state_key = ?"
        return any(self._source.first(query, place) for place in better)

    # --- conversion -------------------------------------------------------------------------

    def arrived_value(self, row: _StateRow) -> ArrivedValue:
        """A value; InvalidInputError if it cannot be stored."""
        try:
            content = content_of(json.loads(row.value_json))
            name = checked_key(row.state_key)
        except StateRefusedError as exc:
            raise self._broken(row, str(exc)) from exc
        in_talk = row.scope == "conversation"
        return ArrivedValue(
            context=row.context,
            scope=row.scope,
            scope_key=self._key(row),
            key=name,
            content=content,
            created_ms=self._time_ms(row, row.created_at),
            updated_ms=self._time_ms(row, row.updated_at),
            generation=1 if in_talk and self._has_reset(row.context) else 0,
        )

    def arrived_reset(self, row: _StateRow) -> ArrivedReset:
        """A reset; InvalidInputError if it is invalid."""
        context = row.context
        try:
            value = json.loads(row.value_json)
        except (TypeError, ValueError, RecursionError) as exc:
            raise self._broken(row, "its value is not JSON") from exc
        is_id = type(value) is str and bool(value)
        if not is_id or not context.conversation_id or row.state_key != "generation":
            raise self._broken(row, "it is not the reset of a conversation")
        place = (context.workspace_id, context.bot_id, context.conversation_id)
        return ArrivedReset(*place, value, self._time_ms(row, row.created_at))

    def _has_reset(self, context: Context) -> bool:
        """Whether this conversation was ever reset."""
        query = (
            f"SELECT 1 FROM {self.table} WHERE runner_id = ? AND workspace_id IS ? "
            "AND bot_id IS ? AND conversation_id IS ?"
        )
        place = (context.workspace_id, context.bot_id, context.conversation_id)
        return self._source.first(query, (_RESETTER, *place)) is not None

    def _key(self, row: _StateRow) -> str:
        """The scope key computed from a row's columns.

        InvalidInputError if the row's own key is neither this one nor its older form.
        """
        try:
            made = scope_key(checked(row.context), row.scope) if row.scope in SCOPES else None
        except InvalidInputError as exc:
            raise self._broken(row, str(exc)) from exc
        if made is None:
            raise self._broken(row, f"its columns do not identify a scope {row.scope!r}")
        if row.scope_key not in (made, _joined(row)):
            raise self._broken(row, "its scope_key does not match its other columns")
        return made

    def _time_ms(self, row: _StateRow, text: Any) -> int:
        try:
            return utc_ms(text)
        except ValueError as exc:
            raise self._broken(row, str(exc)) from exc

    def _broken(self, row: _StateRow, why: str) -> InvalidInputError:
        return InvalidInputError(
            f"row {row.id} of {self.table} cannot be imported: {why}; correct or delete it there"
        )


def _joined(row: _StateRow) -> str:
    """The row's scope key in the older form."""
    context = row.context
    own: list[str | None] = []
    if row.scope == "conversation":
        own = [context.conversation_id] + ([context.thread_id] if context.thread_id else [])
    elif row.scope == "actor":
        own = list(context.actor or ())
    elif row.scope == "subject":
        own = list(context.subject or ())
    return ":".join([row.scope, context.runner_id, context.binding_identity, *map(str, own)])
