"""LangBot's runner state into scoped state: every value with its times, its context and its key.

The table was called ``agent_runner_state`` and is called ``runner_state``. Keys of scopes were
once texts joined by colons: those rows are given the key that their columns make, so that the
host finds them again. Where a row of the later kind has the same place, that is the one the
host has used since, and the older is passed over.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.compat.importing import ImportReport, LeftBehind, Part, move
from casstore.compat.sqlite_source import SqliteSource
from casstore.compat.times import utc_us
from casstore.errors import ConflictError, ForeignSourceError, InvalidInputError, StateRefusedError
from casstore.maintenance.progress import Progress, Step
from casstore.records.scoped.adoption import Adoption, Arrival, ArrivedReset
from casstore.records.scoped.contents import checked_key, content_of
from casstore.records.scoped.scope_keys import ALIASES, SCOPES, Context, checked, scope_key
from casstore.store import Store, check_store

_TABLES: Final = ("runner_state", "agent_runner_state")
_RESETTER: Final = "__langbot_context_reset__"
_CONTEXT: Final = (
    "runner_id", "binding_identity", "bot_id", "workspace_id", "conversation_id", "thread_id",
    "actor_id", "actor_type", "subject_id", "subject_type",
)  # fmt: skip
_OTHERS: Final = ("id", "scope", "scope_key", "state_key", "value_json", "created_at", "updated_at")
# A write holds so much at the most: what stopping in between would lose.
_PAGE_ROWS: Final = 200
_PAGE_BYTES: Final = 4 << 20

# Why rows stay behind.
_EMPTY: Final = "without value"
_UNREADABLE: Final = "unreadable"
_SUPERSEDED: Final = "superseded"


def import_database(
    store: Store,
    file: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Move the runner state of a LangBot database over, and compare every row.

    The report also counts rows that stay behind because LangBot itself does not see them:
    ``without value`` and ``unreadable`` are missing to it, ``superseded`` it does not find any
    more; and those that say something in a column that is not known here. ForeignSourceError if
    there is no such table; ConflictError if both have rows, or a row is in the store with other
    content; InvalidInputError, naming the row, if one contradicts itself or holds what is no
    JSON (NaN).
    """
    check_store(store)
    with SqliteSource(file) as source:
        rows = _Rows(source, _table(source))
        adoption = Adoption(store)
        fates = _fates(rows, progress)
        parts: list[Part] = [_Resets(rows, adoption), _Values(rows, adoption, fates[None])]
        parts += [
            LeftBehind(why, fates[why]) for why in (_EMPTY, _UNREADABLE, _SUPERSEDED) if fates[why]
        ]
        parts += source.unread(rows.table, (*_CONTEXT, *_OTHERS))
        return move(source, store, parts, dry_run=dry_run, progress=progress)


def _fates(rows: _Rows, progress: Progress | None) -> Counter[str | None]:
    """How many rows move, and how many stay behind for what reason."""
    fates: Counter[str | None] = Counter()
    for seen, row in enumerate(rows.values(), 1):
        fates[rows.fate(row)] += 1
        if progress is not None and not seen % _PAGE_ROWS:
            progress(Step("look", seen, None, "rows"))
    return fates


def _table(source: SqliteSource) -> str:
    """The table that holds the state."""
    there = [table for table in _TABLES if table in source.tables]
    if not there:
        raise ForeignSourceError(f"{source.path} has no table {' or '.join(_TABLES)}")
    filled = [table for table in there if next(source.ask(f"SELECT 1 FROM {table} LIMIT 1"), None)]
    if len(filled) > 1:
        raise ConflictError(
            f"{source.path} has state in {' and in '.join(filled)}: bring it into one of them first"
        )
    table = (filled or there)[0]
    lacking = {*_CONTEXT, *_OTHERS} - source.columns(table)
    if lacking:
        raise ForeignSourceError(f"{table} of {source.path} has no column {sorted(lacking)[0]}")
    return table


# --- rows of the source -------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of the table."""

    id: int
    scope: Any
    scope_key: Any
    state_key: Any
    value_json: Any
    created_at: Any
    updated_at: Any
    context: Context


class _Rows:
    """The table, read in order of its ids."""

    def __init__(self, source: SqliteSource, table: str) -> None:
        self._source = source
        self.table = table

    def values(self) -> Iterator[_Row]:
        """All rows but resets."""
        return self._where("runner_id IS NOT ?")

    def resets(self) -> Iterator[_Row]:
        """The rows that tell of a reset."""
        return self._where("runner_id IS ?")

    def _where(self, condition: str) -> Iterator[_Row]:
        columns = ", ".join((*_OTHERS, *_CONTEXT))
        query = f"SELECT {columns} FROM {self.table} WHERE {condition} ORDER BY id"
        for row in self._source.ask(query, (_RESETTER,)):
            yield _Row._make([*row[: len(_OTHERS)], Context(*row[len(_OTHERS) :])])

    def has_reset(self, context: Context) -> bool:
        """Was this conversation ever reset?"""
        query = (
            f"SELECT 1 FROM {self.table} WHERE runner_id = ? AND workspace_id IS ? "
            "AND bot_id IS ? AND conversation_id IS ?"
        )
        place = (context.workspace_id, context.bot_id, context.conversation_id)
        return next(self._source.ask(query, (_RESETTER, *place)), None) is not None

    def fate(self, row: _Row) -> str | None:
        """Why a row stays behind; None if it moves."""
        key = _key(self, row)
        if not row.value_json:
            return _EMPTY
        if self._is_superseded(row, key):
            return _SUPERSEDED
        try:
            json.loads(row.value_json)
        except json.JSONDecodeError:
            return _UNREADABLE
        except (TypeError, ValueError, RecursionError) as exc:
            raise _broken(self, row, f"its value cannot be read: {exc}") from exc
        return None

    def _is_superseded(self, row: _Row, key: str) -> bool:
        """Is there a row that the host finds in the place of this one?"""
        name = ALIASES.get(row.state_key, row.state_key)
        # All that become one: the later key before the older, the name before what stands for it.
        names = [name, *[alias for alias, meant in ALIASES.items() if meant == name]]
        places = [(one, other) for one in (key, _joined(row)) for other in names]
        better = places[: places.index((row.scope_key, row.state_key))]
        query = f"SELECT 1 FROM {self.table} WHERE scope_key = ? AND state_key = ?"
        return any(next(self._source.ask(query, place), None) for place in better)


def _key(rows: _Rows, row: _Row) -> str:
    """The key of the row's scope, as its columns make it; it must be the row's own."""
    try:
        made = scope_key(checked(row.context), row.scope) if row.scope in SCOPES else None
    except InvalidInputError as exc:
        raise _broken(rows, row, str(exc)) from exc
    if made is None:
        raise _broken(rows, row, f"its columns make no scope {row.scope!r}")
    if row.scope_key not in (made, _joined(row)):
        raise _broken(rows, row, "its scope_key is not what its columns make")
    return made


def _joined(row: _Row) -> str:
    """The key of the row's scope as it was once made."""
    context = row.context
    own: list[str | None] = []
    if row.scope == "conversation":
        own = [context.conversation_id] + ([context.thread_id] if context.thread_id else [])
    elif row.scope == "actor":
        own = list(context.actor or ())
    elif row.scope == "subject":
        own = list(context.subject or ())
    return ":".join([row.scope, context.runner_id, context.binding_identity, *map(str, own)])


def _broken(rows: _Rows, row: _Row, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"row {row.id} of {rows.table} cannot be moved: {why}; correct or delete it there"
    )


def _time_ms(rows: _Rows, row: _Row, text: Any) -> int:
    try:
        time_ms = utc_us(text) // 1000
    except ValueError as exc:
        raise _broken(rows, row, f"{text!r} is no time") from exc
    if time_ms < 0:
        raise _broken(rows, row, f"{text!r} is before 1970")
    return time_ms


# --- parts --------------------------------------------------------------------------------------


class _Values:
    """Values of all scopes."""

    name = "values"

    def __init__(self, rows: _Rows, adoption: Adoption, number: int) -> None:
        self._rows = rows
        self._adoption = adoption
        self._number = number

    def count(self) -> int:
        """How many there are."""
        return self._number

    def pages(self) -> Iterator[Sequence[_Row]]:
        """All of them in order, as many at a time as one write should hold."""
        rows = self._rows
        return _pages(row for row in rows.values() if rows.fate(row) is None)

    def is_stored(self, page: Sequence[_Row]) -> Sequence[bool]:
        """Which of them the store has; ConflictError if with other content."""
        return self._adoption.has_values([self._arrival(row) for row in page])

    def store(self, rows: Sequence[_Row]) -> None:
        """Put them into the store, in one write."""
        self._adoption.put_values([self._arrival(row) for row in rows])

    def _arrival(self, row: _Row) -> Arrival:
        rows = self._rows
        try:
            content = content_of(json.loads(row.value_json))
            name = checked_key(row.state_key)
        except StateRefusedError as exc:
            raise _broken(rows, row, str(exc)) from exc
        in_talk = row.scope == "conversation"
        return Arrival(
            row.context,
            row.scope,
            _key(rows, row),
            name,
            content,
            _time_ms(rows, row, row.created_at),
            _time_ms(rows, row, row.updated_at),
            1 if in_talk and rows.has_reset(row.context) else 0,
        )


class _Resets:
    """The latest reset of each conversation; others leave no trace in the source."""

    name = "resets"

    def __init__(self, rows: _Rows, adoption: Adoption) -> None:
        self._rows = rows
        self._adoption = adoption

    def count(self) -> int:
        """How many there are."""
        return sum(1 for _ in self._rows.resets())

    def pages(self) -> Iterator[Sequence[_Row]]:
        """All of them in order."""
        return _pages(self._rows.resets())

    def is_stored(self, page: Sequence[_Row]) -> Sequence[bool]:
        """Which of them the store has; ConflictError if with other content."""
        return self._adoption.has_resets([self._arrival(row) for row in page])

    def store(self, rows: Sequence[_Row]) -> None:
        """Put them into the store, in one write."""
        self._adoption.put_resets([self._arrival(row) for row in rows])

    def _arrival(self, row: _Row) -> ArrivedReset:
        rows, context = self._rows, row.context
        try:
            told = json.loads(row.value_json)
        except (TypeError, ValueError, RecursionError) as exc:
            raise _broken(rows, row, "its value is no JSON") from exc
        is_id = type(told) is str and bool(told)
        if not is_id or not context.conversation_id or row.state_key != "generation":
            raise _broken(rows, row, "it is no reset of a conversation")
        place = (context.workspace_id, context.bot_id, context.conversation_id)
        return ArrivedReset(*place, told, _time_ms(rows, row, row.created_at))


def _pages(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    """Rows in lists of as many as one write should hold."""
    page: list[_Row] = []
    size = 0
    for row in rows:
        page.append(row)
        size += len(row.value_json) if isinstance(row.value_json, str) else 0
        if len(page) >= _PAGE_ROWS or size >= _PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page
