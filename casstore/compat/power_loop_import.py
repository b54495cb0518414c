"""A database of power-loop 0.2.0 moved over: every session with its messages, folds and usage.

Numbers, ids and times stay. What power-loop had lost or mixed up is put right as far as its rows
tell: a note stands where its fold began, calls that wait have their data back from the message that
makes them, and a session whose parent is gone is a root.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.compat.importing import ImportReport, LeftBehind, Part, move
from casstore.compat.power_loop_values import kept, kept_calls
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import (
    ConditionFailedError,
    ConflictError,
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
from casstore.records.log.data import FOLDED
from casstore.records.log.ground import Ground
from casstore.records.log.intake import Arrived, Intake, Rest, check_rest
from casstore.records.log.messages import call_ids, check_number, payload_of
from casstore.records.log.reading import nodes_of
from casstore.records.log.state import LogState
from casstore.records.log.tree import Row
from casstore.records.log.view import View, runs_of
from casstore.session import keys
from casstore.session.attempts import Attempts, read_again
from casstore.session.records import Draft
from casstore.store import Store, check_store

# A write holds so much at the most.
_PAGE: Final = 500
_PAGE_BYTES: Final = 4 << 20
_NO_LIMIT: Final = 1 << 30
_COLUMNS: Final = {
    "sessions": (
        "session_id created_at updated_at system_prompt model config_json status kind "
        "parent_session_id spawn_tool_call_id spawn_depth lifecycle metadata_json"
    ),
    "messages": (
        "session_id seq role name content tool_calls_json tool_call_id round_index state "
        "meta_json created_at"
    ),
    "compactions": (
        "session_id compact_seq note_seq from_seq to_seq before_tokens after_tokens round_index "
        "created_at"
    ),
    "usage_rounds": (
        "session_id round_index prompt_tokens completion_tokens total_tokens model created_at"
    ),
    "session_state": "session_id next_seq round_index last_compact_seq pending_json",
}


def import_database(
    store: Store,
    file: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Move a database over; see ``importing.move``.

    The report also counts rows that stay behind because their sessions are not there.
    ForeignSourceError if it is not one of power-loop 0.2.0.
    """
    check_store(store)
    ground = Ground(store)
    with SqliteSource(file) as source:
        _require_known(source)
        parts: list[Part] = [_Messages(source, ground), _Sessions(source, ground), *_left(source)]
        return move(source, store, parts, dry_run=dry_run, progress=progress)


def _require_known(source: SqliteSource) -> None:
    for table, named in _COLUMNS.items():
        wanted, found = frozenset(named.split()), source.columns(table)
        if found != wanted:
            raise ForeignSourceError(
                f"{source.path} is no database of power-loop 0.2.0: its table {table} has "
                f"{', '.join(sorted(found)) or 'no columns'}"
            )


def _left(source: SqliteSource) -> Iterator[LeftBehind]:
    """Rows of sessions that are not there: noted for nobody, or left by a close that was cut."""
    for table in _COLUMNS:
        [(number,)] = source.ask(
            f"SELECT count(*) FROM {table} "
            "WHERE session_id NOT IN (SELECT session_id FROM sessions)"
        )
        if number:
            yield LeftBehind(f"{table} of no session", number)


class _Messages:
    """The messages, session by session. Until a session is whole, nobody sees it."""

    name = "messages"

    def __init__(self, source: SqliteSource, ground: Ground) -> None:
        self._source = source
        self._ground = ground

    def count(self) -> int:
        """How many there are."""
        [(count,)] = self._source.ask(
            "SELECT count(*) FROM messages JOIN sessions USING (session_id)"
        )
        return int(count)

    def pages(self) -> Iterator[Sequence[Any]]:
        """Each of one session, and of few messages if they are long."""
        for (session,) in self._source.ask("SELECT session_id FROM sessions ORDER BY session_id"):
            keys.id_bytes(session, "a session id")
            page: list[tuple[str, Arrived]] = []
            room = _PAGE_BYTES
            for row in _messages(self._source, session):
                page.append((session, _arrived(session, row)))
                room -= sum([len(each) for each in row if isinstance(each, str | bytes)])
                if len(page) == _PAGE or room <= 0:
                    yield page
                    page, room = [], _PAGE_BYTES
            if page:
                yield page

    def is_stored(self, page: Sequence[Any]) -> Sequence[bool]:
        """Compare with the nodes of the session."""
        session = page[0][0]
        state = read_again(lambda: self._ground.runtime.find(session))
        if state is None or state.manifest.leaf_id is None:
            return [False] * len(page)
        # Only to refuse what is no log.
        self._ground.states.read(session, state)
        last = int(state.manifest.leaf_id)
        numbered = nodes_of(self._ground, session, state, last)
        nodes = {
            int(node.id): (node.payload, node.time)
            for node in numbered.between(page[0][1].number, page[-1][1].number)
        }
        stored: list[bool] = []
        for _, message in page:
            found = nodes.get(message.number)
            if found is not None and found != message[1:]:
                raise ConflictError(
                    f"message {message.number} of session {session!r} is there with other content"
                )
            stored.append(found is not None)
        return stored

    def store(self, rows: Sequence[Any]) -> None:
        """Append them to what there is of the session."""
        Intake(self._ground, rows[0][0]).add([message for _, message in rows])


class _Source(NamedTuple):
    """All of a session but its messages, as it is to be."""

    session: str
    rest: Rest


class _Sessions:
    """The sessions, parents first: with each, all of it comes to be seen at once."""

    name = "sessions"

    def __init__(self, source: SqliteSource, ground: Ground) -> None:
        self._source = source
        self._ground = ground

    def count(self) -> int:
        """How many there are."""
        return int(next(self._source.ask("SELECT count(*) FROM sessions"))[0])

    def pages(self) -> Iterator[Sequence[Any]]:
        """One at a time: each is a write of its own."""
        columns = ", ".join(_COLUMNS["sessions"].split())
        known: dict[str, str | None] = dict(
            self._source.ask("SELECT session_id, parent_session_id FROM sessions")
        )
        done: set[str] = set()
        left = [
            name
            for (name,) in self._source.ask(
                "SELECT session_id FROM sessions ORDER BY spawn_depth, created_at, session_id"
            )
        ]
        while left:
            # A depth may be wrong in power-loop; what counts is that parents come first.
            ready = [name for name in left if known[name] not in known or known[name] in done]
            if not ready:
                raise InvalidInputError(f"session {left[0]!r} stands below itself")
            for name in ready:
                [row] = self._source.ask(
                    f"SELECT {columns} FROM sessions WHERE session_id = ?", (name,)
                )
                parent = known[name] if known[name] in known else None
                yield [_Source(name, self._checked(name, row, parent))]
                done.add(name)
            left = [name for name in left if name not in done]

    def _checked(self, session: str, row: tuple[Any, ...], parent: str | None) -> Rest:
        """What is to be, or InvalidInputError, here and not when it is stored: for dry runs."""
        try:
            rest = self._rest(session, row, parent)
            check_rest(rest, self._last(session))
        except (TypeError, InvalidInputError) as exc:
            # SQLite keeps a text in a column of numbers, and does not compare as we do.
            raise InvalidInputError(f"session {session!r}: {exc}") from exc
        return rest

    def _rest(self, session: str, row: tuple[Any, ...], parent: str | None) -> Rest:
        made, updated, prompt, model, config, status, kind = row[1:8]
        spawn_call, lifecycle, metadata = row[9], row[11], row[12]
        public = Row(
            made, updated, status, kind, lifecycle, parent, 0, 0, spawn_call, prompt, model,
            kept(_decoded(session, config) or {}), kept(_decoded(session, metadata) or {}),
            0,
        )  # fmt: skip
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
        return int(next(self._source.ask(asked, (session,)))[0] or 0)

    def _usage(self, session: str) -> list[RoundUsage]:
        return [
            RoundUsage(0, number, Tokens(*tokens), created)
            for number, *tokens, created in self._source.ask(
                "SELECT round_index, prompt_tokens, completion_tokens, total_tokens, model, "
                "created_at FROM usage_rounds WHERE session_id = ? ORDER BY round_index",
                (session,),
            )
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
        rows = list(
            self._source.ask(
                "SELECT round_index, last_compact_seq, pending_json FROM session_state "
                "WHERE session_id = ?",
                (session,),
            )
        )
        number, folded, pending = rows[0] if rows else (0, 0, None)
        state = LogState(round=number, folds=max(folded, len(folds)), view=view, notes=notes)
        return _with_pending(self._source, session, state, _decoded(session, pending)), folds

    def is_stored(self, page: Sequence[Any]) -> Sequence[bool]:
        """Compare everything that is to be with what is."""
        [wanted] = page
        ground, session = self._ground, wanted.session
        record = ground.sessions.find(session)
        if record is None:
            # Nothing may stand in its way; asked here and not when it is stored: for dry runs.
            Intake(ground, session).require_none_behind(self._last(session))
            return [False]
        row = tree.decode(record)
        at = ground.at(session)
        rest = wanted.rest
        found = Rest(
            row._replace(place=0, depth=0, children=0, brought_in=0),
            at.state,
            list(folding.folds(ground, session)),
            list(usage.rounds(ground, session)),
            usage.totals(ground, session),
        )
        kind = row.kind if rest.row.parent is not None else rest.row.kind
        if found != rest._replace(row=rest.row._replace(kind=kind)):
            raise ConflictError(f"session {session!r} is there with other content")
        return [True]

    def store(self, rows: Sequence[Any]) -> None:
        """Make the session whole."""
        [wanted] = rows
        ground, session, rest = self._ground, wanted.session, wanted.rest
        attempts = Attempts(f"the parent of session {session!r}")
        while True:
            attempts.begin()
            draft = Draft(ground.store)
            row = tree.below_parent(ground, draft, session, rest.row, _NO_LIMIT)
            try:
                intake = Intake(ground, session)
                intake.require_none_behind(self._last(session))
                intake.finish([], rest._replace(row=row), draft)
            except ConditionFailedError:
                continue
            return


# --- rows of power-loop ---------------------------------------------------------------------


def _messages(source: SqliteSource, session: str) -> Iterator[tuple[Any, ...]]:
    return source.ask(
        "SELECT seq, role, name, content, tool_calls_json, tool_call_id, round_index, meta_json, "
        "created_at FROM messages WHERE session_id = ? ORDER BY seq",
        (session,),
    )


def _arrived(session: str, row: tuple[Any, ...]) -> Arrived:
    number, role, name, content, tool_calls, call_id, round_index, meta, created = row
    try:
        known = _decoded(session, meta) or None
        message = NewMessage(
            role,
            content,
            name,
            kept_calls(_decoded(session, tool_calls)),
            call_id,
            round_index,
            None if known is None else kept(known),
        )
        check_number(number, "a message", least=1)
        check_number(created, "the time of a message")
        return Arrived(number, payload_of(message), created)
    except InvalidInputError as exc:
        raise InvalidInputError(f"message {number} of session {session!r}: {exc}") from exc


def _decoded(session: str, text: Any) -> Any:
    if text is None or text == "":
        return None
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidInputError(f"session {session!r} holds what is no JSON: {exc}") from exc


def _folds(
    source: SqliteSource, session: str, messages: Sequence[tuple[int, bool]]
) -> tuple[list[Fold], View]:
    """The folds with their exact sets, and the order that is shown.

    power-loop keeps ranges. What a range has folded is what is folded in it and was not before.
    """
    gone = [number for number, folded in messages if folded]
    left = set(gone)
    # Where each message stands: at its own number, a note where its fold began.
    places = {number: (number, 0) for number, _ in messages}
    folds: list[Fold] = []
    for number, note, first, last, before, after, round_index, created in source.ask(
        "SELECT compact_seq, note_seq, from_seq, to_seq, before_tokens, after_tokens, round_index, "
        "created_at FROM compactions WHERE session_id = ? ORDER BY compact_seq",
        (session,),
    ):
        taken = [each for each in gone if first <= each <= last and each in left]
        left.difference_update(taken)
        # A fold whose range was upside down has folded nothing; its row is all that is known.
        runs = tuple(runs_of(taken)) or ((min(first, last), max(first, last)),)
        folds.append(Fold(number, note, runs, before, after, round_index, created))
        if note in places:
            places[note] = (places.get(first, (first, 0))[0], number)
    shown = [number for number, folded in messages if not folded]
    if not gone and not folds:
        return folds, View()
    shown.sort(key=lambda number: (*places[number], number))
    return folds, View(tuple(runs_of(shown)), max(places, default=0))


def _with_pending(source: SqliteSource, session: str, state: LogState, pending: Any) -> LogState:
    """The calls that wait, by the message that makes them; as they were given if there is none."""
    if not pending:
        return state
    if type(pending) is not dict:
        return state._replace(given=kept(pending))
    ids = list(pending.get("tool_call_ids") or call_ids(pending.get("tool_calls")))
    rows = source.ask(
        "SELECT seq, tool_calls_json FROM messages WHERE session_id = ? AND state = 'active' AND "
        "tool_calls_json IS NOT NULL ORDER BY seq DESC LIMIT 1",
        (session,),
    )
    for number, text in rows:
        own = call_ids(_decoded(session, text))
        if ids and set(ids) <= set(own):
            waiting = tuple(one for one in own if one in ids)
            return state._replace(calling=number, calls=waiting)
    return state._replace(given=kept(pending))
