"""A database of the SDK's SQLiteSession or AdvancedSQLiteSession, read as the SDK reads it.

A plain session consists of the messages with its id, in order. A session with branches has rows in
``message_structure`` that list the messages of each branch; branches may share messages. A database
may hold both kinds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.adapters.openai_agents.branches import MAIN
from casstore.adapters.openai_agents.conversation import TurnUsage
from casstore.compat.sqlite_source import SqliteSource, utc_us
from casstore.errors import CorruptionError, ForeignSourceError, InvalidInputError
from casstore.records.json_values import storable
from casstore.session.arguments import check_text, list_of

_SESSIONS: Final = "SELECT session_id, created_at FROM {sessions} ORDER BY session_id"
_SESSION: Final = "SELECT created_at FROM {sessions} WHERE session_id = ?"
_COUNT: Final = "SELECT count(*) FROM {messages}"
_COUNT_OF: Final = "SELECT count(*) FROM {messages} WHERE session_id = ?"
# SQLite enforces foreign keys only on request, so messages without a session may exist.
_STRAYS: Final = """
    SELECT DISTINCT session_id, NULL FROM {messages}
    WHERE session_id NOT IN (SELECT session_id FROM {sessions})"""
_PLAIN: Final = """
    SELECT id, NULL, NULL, created_at FROM {messages} WHERE session_id = ? ORDER BY id"""
_BRANCHED: Final = """
    SELECT m.id, s.id, s.user_turn_number, m.created_at
    FROM message_structure AS s JOIN {messages} AS m ON m.id = s.message_id
    WHERE s.session_id = ? AND s.branch_id = ? ORDER BY s.sequence_number, s.id"""
_BRANCHES: Final = """
    SELECT branch_id, min(created_at) FROM message_structure
    WHERE session_id = ? GROUP BY branch_id ORDER BY branch_id <> ?, min(id)"""
# As bytes, because a text that is not UTF-8 must not stop the import of other items.
_ITEM: Final = """
    SELECT CAST(message_data AS BLOB), typeof(message_data) FROM {messages} WHERE id = ?"""
_UNLINKED: Final = """
    SELECT id FROM {messages} WHERE session_id = ?
    AND id NOT IN (SELECT message_id FROM message_structure WHERE session_id = ?)"""
_CROSSED: Final = """
    SELECT s.id FROM message_structure AS s JOIN {messages} AS m ON m.id = s.message_id
    WHERE m.session_id <> s.session_id LIMIT 1"""
_OWNER: Final = """
    SELECT "table" FROM pragma_foreign_key_list('message_structure') WHERE "from" = 'message_id'"""
_USAGE: Final = """
    SELECT user_turn_number, requests, input_tokens, output_tokens, total_tokens,
        input_tokens_details, output_tokens_details FROM turn_usage
    WHERE session_id = ? AND branch_id = ? ORDER BY user_turn_number"""

_QUERIES: Final = (
    _SESSIONS, _SESSION, _COUNT, _COUNT_OF, _STRAYS, _PLAIN, _BRANCHED, _ITEM, _UNLINKED, _CROSSED,
)  # fmt: skip

_TABLE_COLUMNS: Final = frozenset(("id", "session_id", "message_data", "created_at"))
_STRUCTURE_COLUMNS: Final = frozenset(
    ("id", "session_id", "message_id", "branch_id", "sequence_number", "user_turn_number")
)
_MAX_REASON_CHARS: Final = 200


class SourceBranch(NamedTuple):
    """A branch as the database has it."""

    name: str
    created_at_ms: int


class SourceSession(NamedTuple):
    """A session as the database has it."""

    id: str
    created_at_ms: int
    #: Whether the database has rows that describe its branches.
    branched: bool


class SourceMessage(NamedTuple):
    """A message on a branch, without its content."""

    row: int
    #: The id of its node in a store; unique in the database.
    node: str
    #: The SDK's number of its turn, None: a plain session.
    turn: int | None
    time_ms: int | None


class Item(NamedTuple):
    """The content of a message."""

    #: In the form in which JSON is stored.
    payload: Any
    size_bytes: int


class UnreadableItemError(CorruptionError):
    """A message is not JSON that can be stored. ``reason`` says why."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"message {row} is not a valid item: {reason}")
        self.row = row
        self.reason = reason


class SdkDatabase:
    """Reads sessions, branches, items and usage."""

    def __init__(self, source: SqliteSource, sessions: str, messages: str) -> None:
        self._ask = source.ask
        self._path = source.path
        if not (
            "session_id" in source.columns(sessions) and source.columns(messages) >= _TABLE_COLUMNS
        ):
            raise ForeignSourceError(
                f"{source.path} has no tables {sessions} and {messages} as the SQLiteSession of "
                "the OpenAI Agents SDK makes them; if the tables have other names, pass these as "
                "sessions_table and messages_table"
            )
        names = {"sessions": _quoted(sessions), "messages": _quoted(messages)}
        self._sql = {text: text.format(**names) for text in _QUERIES}
        self._messages = messages
        self._encoding = source.encoding
        self._branched = self._has_branches(source)
        self._has_usage = self._branched and "user_turn_number" in source.columns("turn_usage")
        self._reserved = self._branched and "branch_id" in source.columns("branch_reservations")
        self._generations = "generation" in source.columns("session_clear_generations")

    def _has_branches(self, source: SqliteSource) -> bool:
        """Whether the database has branch tables that refer to this table of messages."""
        if not source.columns("message_structure") >= _STRUCTURE_COLUMNS:
            return False
        owners = [str(name).lower() for (name,) in self._ask(_OWNER)]
        if owners and self._messages.lower() not in owners:
            return False
        crossed = next(self._ask(self._sql[_CROSSED]), None)
        if crossed is not None:
            raise CorruptionError(
                f"row {crossed[0]} of message_structure in {self._path} gives a message of one "
                "session to another; the SDK writes no such row: remove it first"
            )
        return True

    # --- sessions and branches --------------------------------------------------------------

    def choose(self, wanted: Sequence[str] | None) -> tuple[str, ...] | None:
        """The requested sessions, without duplicates; InvalidInputError if one does not exist."""
        if wanted is None:
            return None
        names = list_of(wanted, "sessions")
        for name in names:
            check_text(name, "a session id")
            if self._find(name) is None:
                raise InvalidInputError(f"{self._path} has no session {name!r}")
        return tuple(dict.fromkeys(names))

    def _find(self, session: str) -> SourceSession | None:
        row = next(self._ask(self._sql[_SESSION], (session,)), None)
        if row is None and next(self._ask(self._sql[_PLAIN], (session,)), None) is None:
            return None
        created = None if row is None else row[0]
        return SourceSession(session, time_ms(created) or 0, self._is_branched(session))

    def count_messages(self, sessions: Sequence[str] | None) -> int:
        """All messages, or those of some sessions."""
        if sessions is None:
            return int(next(self._ask(self._sql[_COUNT]))[0])
        return sum(next(self._ask(self._sql[_COUNT_OF], (each,)))[0] for each in sessions)

    def sessions(self, chosen: Sequence[str] | None) -> Iterator[SourceSession]:
        """All sessions, also those without a message; or some of them."""
        if chosen is not None:
            yield from (found for name in chosen if (found := self._find(name)) is not None)
            return
        for query in (_SESSIONS, _STRAYS):
            for name, created in self._ask(self._sql[query]):
                if type(name) is not str:
                    raise CorruptionError(
                        f"a session in {self._path} is called {name!r:.100}, which is not text"
                    )
                yield SourceSession(name, time_ms(created) or 0, self._is_branched(name))

    def _is_branched(self, session: str) -> bool:
        asked = "SELECT 1 FROM message_structure WHERE session_id = ? LIMIT 1"
        return self._branched and next(self._ask(asked, (session,)), None) is not None

    def branches(self, session: SourceSession) -> list[SourceBranch]:
        """The branches of a session: ``main``, then the others in order of creation."""
        if not session.branched:
            return [SourceBranch(MAIN, session.created_at_ms)]
        found = [
            SourceBranch(name, time_ms(created) or 0)
            for name, created in self._ask(_BRANCHES, (session.id, MAIN))
        ]
        if not found or found[0].name != MAIN:
            found.insert(0, SourceBranch(MAIN, session.created_at_ms))
        # Times are in whole seconds. Added milliseconds keep the order within a second.
        for at in range(1, len(found)):
            before, own = found[at - 1].created_at_ms, found[at].created_at_ms
            if own // 1000 == before // 1000:
                found[at] = found[at]._replace(created_at_ms=max(own, before + 1))
        return found

    def reserved(self, session: str) -> frozenset[str]:
        """The reserved names of branches, including those of deleted ones."""
        if not self._reserved:
            return frozenset()
        asked = "SELECT branch_id FROM branch_reservations WHERE session_id = ?"
        found = frozenset(name for (name,) in self._ask(asked, (session,)))
        for name in found:
            if type(name) is not str:
                raise CorruptionError(
                    f"a branch of session {session!r} in {self._path} is called {name!r:.100}, "
                    "which is not text"
                )
        return found

    def clears(self, session: str) -> int:
        """The number of times that a session was cleared."""
        if not self._generations:
            return 0
        asked = "SELECT generation FROM session_clear_generations WHERE session_id = ?"
        found = next(self._ask(asked, (session,)), None)
        return 0 if found is None or type(found[0]) is not int else max(found[0], 0)

    # --- items ------------------------------------------------------------------------------

    def messages(self, session: SourceSession) -> Iterator[int]:
        """The rows of all messages of a session, on a branch or not."""
        return (row[0] for row in self._ask(self._sql[_PLAIN], (session.id,)))

    def unlinked(self, session: SourceSession) -> Iterator[int]:
        """The rows of messages that are on no branch, of a session that has branches."""
        if not session.branched:
            return iter(())
        return (row[0] for row in self._ask(self._sql[_UNLINKED], (session.id, session.id)))

    def path(
        self, session: SourceSession, branch: str, without: Collection[int] = ()
    ) -> Iterator[SourceMessage]:
        """The messages of a branch in the SDK's order, except some rows."""
        if session.branched:
            rows = self._ask(self._sql[_BRANCHED], (session.id, branch))
        else:
            rows = self._ask(self._sql[_PLAIN], (session.id,))
        for row, link, turn, created in rows:
            if row not in without:
                node = f"m{row}" if link is None else f"s{link}"
                yield SourceMessage(row, node, turn, time_ms(created))

    def item(self, row: int) -> Item:
        """The item of a message; UnreadableItemError if it is not valid."""
        found = next(self._ask(self._sql[_ITEM], (row,)), None)
        if found is None:
            raise CorruptionError(f"message {row} was not found again in {self._path}")
        raw, kind = found
        try:
            text = raw.decode(self._encoding) if kind == "text" else raw
            # Accept what Python's JSON accepts, as the SDK does.
            return Item(storable(json.loads(text), python=True), len(raw))
        except RecursionError as exc:
            raise UnreadableItemError(row, "nested too deeply") from exc
        except (ValueError, TypeError) as exc:
            raise UnreadableItemError(row, f"{exc}"[:_MAX_REASON_CHARS]) from exc

    # --- usage ------------------------------------------------------------------------------

    def usage(self, session: SourceSession, branch: str) -> list[TurnUsage]:
        """The recorded usage of the turns of a branch."""
        if not (self._has_usage and session.branched):
            return []
        found: list[TurnUsage] = []
        for *counts, input_details, output_details in self._ask(_USAGE, (session.id, branch)):
            # The SDK counts None as 0.
            turn, requests, taken, given, total = (0 if each is None else each for each in counts)
            if not all(type(each) is int for each in (turn, requests, taken, given, total)):
                raise CorruptionError(
                    f"the usage of turn {turn!r} of session {session.id!r}, branch {branch!r}, in "
                    f"{self._path} has counts that are not integers"
                )
            details = (_details(input_details), _details(output_details))
            found.append(TurnUsage(turn, requests, taken, given, total, *details))
        return found


def time_ms(text: Any) -> int | None:
    """Milliseconds since 1970 of a time in SQLite's format; None if it is invalid."""
    try:
        return utc_us(text) // 1000
    except ValueError:
        return None


def _details(text: Any) -> Any:
    """A breakdown of tokens; None, as for the SDK, if it cannot be read."""
    if type(text) is not str or not text:
        return None
    try:
        found = json.loads(text)
        return found if storable(found) is found else None
    except (ValueError, RecursionError):
        return None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
