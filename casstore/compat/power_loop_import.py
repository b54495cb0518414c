"""Imports a database of power-loop 0.2.0: every session with its messages, folds and usage.

Numbers, ids and times stay. The import repairs what power-loop lost, as far as its rows allow: the
note that replaces folded (compacted) messages is placed where these began, pending calls get their
data back from the message that makes them, and a session whose parent is gone becomes a root.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from casstore.compat.importing import (
    ImportNote,
    ImportReport,
    Part,
    Presence,
    RowPart,
    columns_bytes,
    other_content,
    paged,
    presence,
    run,
)
from casstore.compat.power_loop import encode_calls, kept
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import (
    ForeignSourceError,
    InvalidInputError,
)
from casstore.maintenance.progress import Progress
from casstore.records.log import (
    Fold,
    NewMessage,
    RoundUsage,
    Tokens,
    UsageTotals,
    folding,
    tree,
    usage,
)
from casstore.records.log.data import FOLDED, check_number
from casstore.records.log.intake import Arrived, Intake, Rest, check_rest
from casstore.records.log.messages import call_ids, nodes_of, payload_of
from casstore.records.log.state import LogState, MessageOrder, runs_of
from casstore.records.log.tables import LogSessionRow, LogTables
from casstore.session import keys
from casstore.session.attempts import read_again, transaction
from casstore.session.records import Draft
from casstore.store import Store, check_store

_NO_LIMIT: Final = 1 << 30

# --- rows of power-loop ---------------------------------------------------------------------------

# Each field is named as its column. SQLite keeps any type in any column.


class _SourceSession(NamedTuple):
    session_id: str
    created_at: Any
    updated_at: Any
    system_prompt: Any
    model: Any
    config_json: Any
    status: Any
    kind: Any
    parent_session_id: Any
    spawn_tool_call_id: Any
    spawn_depth: Any
    lifecycle: Any
    metadata_json: Any


class _SourceMessage(NamedTuple):
    session_id: str
    seq: Any
    role: Any
    name: Any
    content: Any
    tool_calls_json: Any
    tool_call_id: Any
    round_index: Any
    state: Any
    meta_json: Any
    created_at: Any


class _SourceCompaction(NamedTuple):
    session_id: str
    compact_seq: Any
    note_seq: Any
    from_seq: Any
    to_seq: Any
    before_tokens: Any
    after_tokens: Any
    round_index: Any
    created_at: Any


class _SourceUsage(NamedTuple):
    session_id: str
    round_index: Any
    prompt_tokens: Any
    completion_tokens: Any
    total_tokens: Any
    model: Any
    created_at: Any


class _SourceState(NamedTuple):
    session_id: str
    next_seq: Any
    round_index: Any
    last_compact_seq: Any
    pending_json: Any


SourceRow = TypeVar(
    "SourceRow", _SourceSession, _SourceMessage, _SourceCompaction, _SourceUsage, _SourceState
)
_TABLES: Final[dict[type[Any], str]] = {
    _SourceSession: "sessions",
    _SourceMessage: "messages",
    _SourceCompaction: "compactions",
    _SourceUsage: "usage_rounds",
    _SourceState: "session_state",
}


def _rows_of(
    source: SqliteSource, kind: type[SourceRow], session: str, order: str = "session_id"
) -> Iterator[SourceRow]:
    """The rows of a session in the table of ``kind``."""
    columns = ", ".join(kind._fields)
    query = f"SELECT {columns} FROM {_TABLES[kind]} WHERE session_id = ? ORDER BY {order}"
    return (kind(*row) for row in source.ask(query, (session,)))


def import_power_loop(
    store: Store,
    source: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a database of power-loop.

    ForeignSourceError if it is not one of power-loop 0.2.0. Notes count rows of sessions that the
    database does not have; they are left out.
    """
    check_store(store)
    tables = LogTables(store)
    with SqliteSource(source) as database:
        _require_known(database)
        parts: list[Part] = [_MessagePart(database, tables), _RestPart(database, tables)]
        return run(
            "power-loop", database, store, parts,
            notes=_orphans(database), dry_run=dry_run, progress=progress,
        )  # fmt: skip


def _require_known(source: SqliteSource) -> None:
    for kind, table in _TABLES.items():
        found = source.columns(table)
        if found != frozenset(kind._fields):
            raise ForeignSourceError(
                f"{source.path} is not a database of power-loop 0.2.0: its table {table} has "
                f"{', '.join(sorted(found)) or 'no columns'}"
            )


def _orphans(source: SqliteSource) -> Iterator[ImportNote]:
    """Rows of sessions that the database does not have, as an interrupted close leaves them."""
    for table in _TABLES.values():
        number = source.number(
            f"SELECT count(*) FROM {table} "
            "WHERE session_id NOT IN (SELECT session_id FROM sessions)"
        )
        if number:
            yield ImportNote(f"{table} of no session, left out", number)


class _MessagePart(RowPart[tuple[str, Arrived]]):
    """The messages, session by session. A session is visible once all of it is written."""

    name = "messages"

    def __init__(self, source: SqliteSource, tables: LogTables) -> None:
        self._source = source
        self._tables = tables

    def count(self) -> int:
        return self._source.number("SELECT count(*) FROM messages JOIN sessions USING (session_id)")

    def pages(self) -> Iterator[Sequence[tuple[str, Arrived]]]:
        """Pages of one session each."""
        for (session,) in self._source.ask("SELECT session_id FROM sessions ORDER BY session_id"):
            keys.id_bytes(session, "a session id")
            rows = _rows_of(self._source, _SourceMessage, session, "seq")
            for page in paged(rows, columns_bytes):
                yield [(session, _arrived(row)) for row in page]

    def look(self, page: Sequence[tuple[str, Arrived]]) -> Sequence[Presence]:
        session = page[0][0]
        state = read_again(lambda: self._tables.runtime.find(session))
        if state is None or state.manifest.leaf_id is None:
            return [Presence.MISSING] * len(page)
        # Raises if the session is not a log.
        self._tables.states.read(session, state)
        last = int(state.manifest.leaf_id)
        numbered = nodes_of(self._tables, session, state, last)
        nodes = {
            int(node.id): (node.payload, node.time)
            for node in numbered.between(page[0][1].number, page[-1][1].number)
        }
        for _, message in page:
            if nodes.get(message.number, message[1:]) != message[1:]:
                raise other_content(f"message {message.number} of session {session!r}")
        return presence(message.number in nodes for _, message in page)

    def store(self, rows: Sequence[tuple[str, Arrived]]) -> None:
        Intake(self._tables, rows[0][0]).add([message for _, message in rows])


class _RestPart(RowPart[Rest]):
    """The sessions, parents first. Writing its row makes a session visible."""

    name = "sessions"

    def __init__(self, source: SqliteSource, tables: LogTables) -> None:
        self._source = source
        self._tables = tables

    def count(self) -> int:
        return self._source.number("SELECT count(*) FROM sessions")

    def pages(self) -> Iterator[Sequence[Rest]]:
        """Pages of one session, each a write."""
        known: dict[str, str | None] = dict(
            self._source.ask(
                "SELECT session_id, parent_session_id FROM sessions "
                "ORDER BY spawn_depth, created_at, session_id"
            )
        )
        done: set[str] = set()
        left = list(known)
        while left:
            # power-loop's depths may be wrong; parents must come first.
            ready = [name for name in left if known[name] not in known or known[name] in done]
            if not ready:
                raise InvalidInputError(f"session {left[0]!r} is its own ancestor")
            for name in ready:
                [row] = _rows_of(self._source, _SourceSession, name)
                parent = known[name] if known[name] in known else None
                yield [self._checked(row, parent)]
                done.add(name)
            left = [name for name in left if name not in done]

    def _checked(self, row: _SourceSession, parent: str | None) -> Rest:
        """The converted row; InvalidInputError if it cannot be stored, so that dry runs find it."""
        session = row.session_id
        try:
            rest = self._rest(row, parent)
            check_rest(rest, self._last(session))
        except (TypeError, InvalidInputError) as exc:
            # SQLite keeps texts in columns of numbers.
            raise InvalidInputError(f"session {session!r}: {exc}") from exc
        return rest

    def _rest(self, row: _SourceSession, parent: str | None) -> Rest:
        session = row.session_id
        public = LogSessionRow(
            session=session,
            created_at_ms=row.created_at,
            updated_at_ms=row.updated_at,
            status=row.status,
            kind=row.kind,
            lifecycle=row.lifecycle,
            parent=parent,
            place=0,
            depth=0,
            spawn_call=row.spawn_tool_call_id,
            prompt=row.system_prompt,
            model=row.model,
            config=kept(_decoded(session, row.config_json) or {}),
            metadata=kept(_decoded(session, row.metadata_json) or {}),
            children=0,
        )
        rounds = self._usage(session)
        used = [one.tokens for one in rounds]
        totals = UsageTotals(
            len(rounds),
            sum(tokens.prompt or 0 for tokens in used),
            sum(tokens.completion or 0 for tokens in used),
            sum(tokens.total or 0 for tokens in used),
        )
        state, folds = self._state(session)
        return Rest(public, state, folds, rounds, totals)

    def _last(self, session: str) -> int:
        asked = "SELECT max(seq) FROM messages WHERE session_id = ?"
        return self._source.number(asked, (session,))

    def _usage(self, session: str) -> list[RoundUsage]:
        return [
            RoundUsage(
                0,
                row.round_index,
                Tokens(row.prompt_tokens, row.completion_tokens, row.total_tokens, row.model),
                row.created_at,
            )
            for row in _rows_of(self._source, _SourceUsage, session, "round_index")
        ]

    def _state(self, session: str) -> tuple[LogState, list[Fold]]:
        messages = [
            (number, state == FOLDED)
            for number, state in self._source.ask(
                "SELECT seq, state FROM messages WHERE session_id = ? ORDER BY seq", (session,)
            )
        ]
        folds, view = _folds(self._source, session, messages)
        shown = {number for number, folded in messages if not folded}
        notes = tuple(fold.note for fold in folds if fold.note in shown)
        none = _SourceState(session, 0, 0, 0, None)
        row = next(_rows_of(self._source, _SourceState, session), none)
        state = LogState(
            round=row.round_index,
            folds=max(row.last_compact_seq, len(folds)),
            view=view,
            notes=notes,
        )
        pending = _decoded(session, row.pending_json)
        return _with_pending(self._source, session, state, pending), folds

    def session_of(self, page: Sequence[Rest]) -> str | None:
        return page[0].row.session

    def look(self, page: Sequence[Rest]) -> Sequence[Presence]:
        [rest] = page
        tables, session = self._tables, rest.row.session
        record = tables.sessions.find(session)
        if record is None:
            # ``store`` checks this again; here, because a dry run does not call it.
            Intake(tables, session).require_none_behind(self._last(session))
            return [Presence.MISSING]
        row = tables.sessions.decode(record)
        at = tables.at(session)
        found = Rest(
            row._replace(place=0, depth=0, children=0, brought_in=0),
            at.state,
            list(folding.folds(tables, session)),
            list(usage.rounds(tables, session)),
            usage.totals(tables, session),
        )
        kind = row.kind if rest.row.parent is not None else rest.row.kind
        if found != rest._replace(row=rest.row._replace(kind=kind)):
            raise other_content(f"session {session!r}")
        return [Presence.EQUAL]

    def store(self, rows: Sequence[Rest]) -> None:
        [rest] = rows
        self._store_rest(rest)

    @transaction("the parent of session {rest.row.session!r}")
    def _store_rest(self, rest: Rest) -> None:
        tables, session = self._tables, rest.row.session
        draft = Draft(tables.store)
        row = tree.below_parent(tables, draft, rest.row, _NO_LIMIT)
        intake = Intake(tables, session)
        intake.require_none_behind(self._last(session))
        intake.finish([], rest._replace(row=row), draft)


# --- conversion -----------------------------------------------------------------------------


def _arrived(row: _SourceMessage) -> Arrived:
    session = row.session_id
    try:
        meta = _decoded(session, row.meta_json) or None
        message = NewMessage(
            role=row.role,
            content=row.content,
            name=row.name,
            tool_calls=encode_calls(_decoded(session, row.tool_calls_json)),
            tool_call_id=row.tool_call_id,
            round=row.round_index,
            meta=None if meta is None else kept(meta),
        )
        check_number(row.seq, "a message", least=1)
        check_number(row.created_at, "the time of a message")
        return Arrived(row.seq, payload_of(message), row.created_at)
    except InvalidInputError as exc:
        raise InvalidInputError(f"message {row.seq} of session {session!r}: {exc}") from exc


def _decoded(session: str, text: Any) -> Any:
    if text is None or text == "":
        return None
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidInputError(f"session {session!r} holds invalid JSON: {exc}") from exc


def _folds(
    source: SqliteSource, session: str, messages: Sequence[tuple[int, bool]]
) -> tuple[list[Fold], MessageOrder]:
    """The folds with their exact sets, and the order of the visible messages.

    power-loop keeps ranges. A range folded those of its messages that no earlier range had folded.
    """
    gone = [number for number, folded in messages if folded]
    left = set(gone)
    # The position of each message: its own number, or for a note where its fold began.
    places = {number: (number, 0) for number, _ in messages}
    folds: list[Fold] = []
    for row in _rows_of(source, _SourceCompaction, session, "compact_seq"):
        first, last = row.from_seq, row.to_seq
        taken = [each for each in gone if first <= each <= last and each in left]
        left.difference_update(taken)
        # A fold with an inverted range folded nothing; keep its row.
        runs = tuple(runs_of(taken)) or ((min(first, last), max(first, last)),)
        folds.append(
            Fold(
                number=row.compact_seq,
                note=row.note_seq,
                runs=runs,
                before_tokens=row.before_tokens,
                after_tokens=row.after_tokens,
                round=row.round_index,
                created_at_ms=row.created_at,
            )
        )
        if row.note_seq in places:
            places[row.note_seq] = (places.get(first, (first, 0))[0], row.compact_seq)
    shown = [number for number, folded in messages if not folded]
    if not gone and not folds:
        return folds, MessageOrder()
    shown.sort(key=lambda number: (*places[number], number))
    return folds, MessageOrder(tuple(runs_of(shown)), max(places, default=0))


def _with_pending(source: SqliteSource, session: str, state: LogState, pending: Any) -> LogState:
    """``state`` with its pending calls: as calls of the message that makes them, else as given."""
    if not pending:
        return state
    if type(pending) is not dict:
        return state._replace(given=kept(pending))
    ids = list(pending.get("tool_call_ids") or call_ids(pending.get("tool_calls")))
    calling = source.first(
        "SELECT seq, tool_calls_json FROM messages WHERE session_id = ? AND state = 'active' AND "
        "tool_calls_json IS NOT NULL ORDER BY seq DESC LIMIT 1",
        (session,),
    )
    if calling is not None:
        number, text = calling
        own = call_ids(_decoded(session, text))
        if ids and set(ids) <= set(own):
            waiting = tuple(one for one in own if one in ids)
            return state._replace(calling=number, calls=waiting)
    return state._replace(given=kept(pending))
