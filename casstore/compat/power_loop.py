"""The API of power-loop's session store on casstore: same calls, rows and errors.

    from casstore.compat.power_loop import SessionStore
    loop = StatefulAgentLoop(llm=llm, store=SessionStore.open("sessions"))

A fold (power-loop: compaction) replaces messages by a note. The API differs where the original lost
data: a call is one transaction, safe from any process; a note stays at the position where its fold
began; pending calls keep all their data; usage is recorded for each send; writes to an unknown
session raise an error. The id of a closed session is never reused.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Final

import casstore.store
from casstore.errors import (
    InvalidInputError,
    NotALogError,
    SessionDeletedError,
    SessionExistsError,
    SessionNotFoundError,
)
from casstore.records.json_values import restored, storable
from casstore.records.log import Message, NewMessage, SessionLog, Tokens
from casstore.records.log.data import LogSession
from casstore.store import Store

DEFAULT_DB_PATH: Final = "./power_loop_sessions"
MAX_SPAWN_DEPTH: Final = 3
_MEMORY: Final = ":memory:"
# The errors for a session that does not exist.
_GONE: Final = (SessionNotFoundError, SessionDeletedError)
# The keys of the dict that power-loop's own loop passes as pending.
_LOOP_KEYS: Final = frozenset(("assistant_seq", "round_index", "tool_call_ids", "tool_calls"))


class SessionKind(StrEnum):
    """The kind of a session."""

    ROOT = "root"
    SUBAGENT = "subagent"


class SessionStatus(StrEnum):
    """The status of a session."""

    ACTIVE = "active"
    ARCHIVED = "archived"


class SubagentLifecycle(StrEnum):
    """How long a child session stays."""

    EPHEMERAL = "ephemeral"
    LINKED = "linked"
    DETACHED = "detached"


class MessageState(StrEnum):
    """Whether a message is active or folded into a note."""

    ACTIVE = "active"
    COMPACTED_OUT = "compacted_out"


@dataclass
class SessionRow:
    """A session."""

    session_id: str
    created_at: int
    updated_at: int
    system_prompt: str | None
    model: str | None
    config: dict[str, Any]
    status: SessionStatus
    kind: SessionKind
    parent_session_id: str | None
    spawn_tool_call_id: str | None
    spawn_depth: int
    lifecycle: SubagentLifecycle
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class MessageRow:
    """A message. ``content`` is a text or any structure, as it was passed."""

    session_id: str
    seq: int
    role: str
    name: str | None
    content: Any
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None
    round_index: int | None
    state: MessageState
    meta: dict[str, Any]
    created_at: int


@dataclass
class SessionStateRow:
    """The state of a session."""

    session_id: str
    next_seq: int
    round_index: int
    last_compact_seq: int
    pending: dict[str, Any] | None


@dataclass
class CompactionRow:
    """A fold: its note, and the lowest and highest number folded."""

    session_id: str
    compact_seq: int
    note_seq: int
    from_seq: int
    to_seq: int
    before_tokens: int | None
    after_tokens: int | None
    round_index: int | None
    created_at: int


class UnknownSessionError(SessionNotFoundError, ValueError):
    """The session does not exist, or was closed."""

    def __init__(self, session: str, what: str = "unknown session") -> None:
        super().__init__(session)
        # The same message as the original, because callers may match it.
        self.args = (f"{what}: {session}",)


class DuplicateSessionError(SessionExistsError, sqlite3.IntegrityError):
    """A session with this id exists."""


@contextmanager
def _known(session_id: str) -> Iterator[None]:
    """Raise an unknown session as the error that callers of the original expect."""
    try:
        yield
    except _GONE as exc:
        raise UnknownSessionError(session_id) from exc


class SessionStore:
    """Sessions and their messages; a context manager. Safe from many threads and processes.

    >>> with SessionStore.open(place / "sessions") as sessions:
    ...     name = sessions.create_session(system_prompt="be brief")
    ...     number = sessions.append_message(name, role="user", content="hello")
    ...     [message.content for message in sessions.load_active_messages(name)]
    ['hello']
    """

    def __init__(
        self, store: Store, path: str = _MEMORY, *, depth_limit: int = MAX_SPAWN_DEPTH
    ) -> None:
        self._store = store
        #: The session log that holds all data, including what the original did not store.
        self.log = SessionLog(store, depth_limit=depth_limit)
        self.path = path

    @classmethod
    def open(
        cls, path: str | os.PathLike[str] = DEFAULT_DB_PATH, *, durability: str = "relaxed"
    ) -> SessionStore:
        """Open or create the store in a directory; ``":memory:"``: in memory only.

        ``durability`` as for ``casstore.open``; the default is at least as durable as the original.
        """
        name = os.fspath(path)
        if name == _MEMORY:
            from casstore.engine.memory import MemoryEngine

            return cls(Store(MemoryEngine()))
        place = Path(name).expanduser()
        if os.path.isfile(place):
            raise InvalidInputError(
                f"{place} is a file, but a store is a directory; to import a power-loop database, "
                f"run: casstore import power-loop {place}"
            )
        return cls(casstore.store.open(place, durability), str(place))

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- sessions -------------------------------------------------------------------------

    def create_session(
        self,
        *,
        system_prompt: str | None = None,
        model: str | None = None,
        config: dict[str, Any] | None = None,
        parent_session_id: str | None = None,
        spawn_tool_call_id: str | None = None,
        kind: SessionKind = SessionKind.ROOT,
        lifecycle: SubagentLifecycle = SubagentLifecycle.EPHEMERAL,
        metadata: dict[str, Any] | None = None,
        session_id: str | None = None,
    ) -> str:
        """Create a session; returns its id. ValueError if the parent is unknown or too deep.

        SessionDeletedError if a session with this id was closed.
        """
        try:
            made = self.log.create(
                session_id or None,
                parent=parent_session_id,
                kind=_text(kind),
                lifecycle=_text(lifecycle),
                spawn_call=spawn_tool_call_id,
                prompt=system_prompt,
                model=model,
                config=kept(dict(config or {})),
                metadata=kept(dict(metadata or {})),
            )
        except SessionNotFoundError as exc:
            raise UnknownSessionError(exc.session, "parent session not found") from exc
        except SessionExistsError as exc:
            raise DuplicateSessionError(exc.session) from exc
        return made.id

    def get_session(self, session_id: str) -> SessionRow | None:
        """A session; None if it does not exist."""
        found = self.log.find(session_id)
        return None if found is None else _session_row(found)

    def list_sessions(self) -> list[SessionRow]:
        """All sessions, by id."""
        return [_session_row(found) for found in self.log.sessions()]

    def list_children(self, parent_session_id: str) -> list[SessionRow]:
        """The direct children of a session, in the order of creation."""
        return [_session_row(found) for found in self.log.children(parent_session_id)]

    def archive_session(self, session_id: str) -> None:
        """Mark a session as archived; nothing else changes."""
        with _known(session_id):
            self.log.archive(session_id)

    def close_session(self, session_id: str, *, cascade: bool = True) -> int:
        """Delete a session and its children that are not detached; returns how many."""
        return self.log.close(session_id, cascade=cascade)

    def update_session_prompt(self, session_id: str, system_prompt: str | None) -> None:
        """Change the prompt of a session."""
        with _known(session_id):
            self.log.update(session_id, prompt=system_prompt)

    # --- messages ---------------------------------------------------------------------------

    def append_message(
        self,
        session_id: str,
        *,
        role: str,
        content: Any = None,
        tool_calls: list[dict[str, Any]] | None = None,
        tool_call_id: str | None = None,
        name: str | None = None,
        round_index: int | None = None,
        meta: dict[str, Any] | None = None,
    ) -> int:
        """Append a message; returns its number.

        In the same transaction its tool calls become pending, and the call that it answers stops
        being pending, so ``set_pending`` has nothing left to do.
        """
        message = NewMessage(
            role=role,
            content=content,
            name=name,
            tool_calls=encode_calls(tool_calls) if tool_calls else None,
            tool_call_id=tool_call_id,
            round=round_index,
            meta=kept(meta) if meta else None,
        )
        with _known(session_id):
            return self.log.append(session_id, message)

    def load_active_messages(self, session_id: str) -> list[MessageRow]:
        """The messages that an agent continues with, in order.

        The note that replaces folded messages stands where the first of them stood.
        """
        try:
            return [_message_row(session_id, one) for one in self.log.active(session_id)]
        except _GONE:
            return []

    def load_all_messages(self, session_id: str) -> list[MessageRow]:
        """All messages by number, including folded ones."""
        try:
            return [_message_row(session_id, one) for one in self.log.messages(session_id)]
        except _GONE:
            return []

    def get_message(self, session_id: str, seq: int) -> MessageRow | None:
        """One message; None if it does not exist."""
        try:
            found = self.log.message(session_id, seq)
        except _GONE:
            return None
        return None if found is None else _message_row(session_id, found)

    # --- compaction ---------------------------------------------------------------------------

    def record_compaction(
        self,
        session_id: str,
        *,
        from_seq: int,
        to_seq: int,
        note_content: str,
        before_tokens: int | None,
        after_tokens: int | None,
        round_index: int | None,
        note_meta: dict[str, Any] | None = None,
    ) -> tuple[int, int]:
        """Fold the active messages from one to another into a note; returns (fold, note).

        From and to are positions in the active order: a note has a high number and may come before
        lower numbers.
        """
        with _known(session_id):
            shown = [one.number for one in self.log.active(session_id)]
            if from_seq in shown and to_seq in shown:
                low, high = sorted((shown.index(from_seq), shown.index(to_seq)))
                chosen = shown[low : high + 1]
            else:
                chosen = [number for number in shown if from_seq <= number <= to_seq]
            fold = self.log.fold(
                session_id,
                chosen,
                note_content,
                before_tokens=before_tokens,
                after_tokens=after_tokens,
                round=round_index,
                meta=encode_meta(note_meta) if note_meta else None,
                # power-loop keeps the first system message in memory even if it is a note; a
                # session loaded from the store must have it, too.
                keep_notes=True,
            )
        return fold.number, fold.note

    def list_compactions(self, session_id: str) -> list[CompactionRow]:
        """All folds of a session, oldest first."""
        try:
            folds = self.log.folds(session_id)
        except _GONE:
            return []
        return [
            CompactionRow(
                session_id,
                fold.number,
                fold.note,
                fold.first,
                fold.last,
                fold.before_tokens,
                fold.after_tokens,
                fold.round,
                fold.created_at_ms,
            )
            for fold in folds
        ]

    # --- state ----------------------------------------------------------------------------

    def get_state(self, session_id: str) -> SessionStateRow | None:
        """The state of a session; None if it does not exist."""
        try:
            counters = self.log.counters(session_id)
            pending = self._pending(session_id)
        except (*_GONE, NotALogError):
            return None
        return SessionStateRow(
            session_id, counters.next_number, counters.round, counters.folds, pending
        )

    def set_round_index(self, session_id: str, round_index: int) -> None:
        """Record the current round. Round 0 begins a new send."""
        with _known(session_id):
            self.log.start_round(session_id, round_index, new_send=round_index == 0)

    def set_pending(self, session_id: str, pending: dict[str, Any] | None) -> None:
        """Record the pending calls, as a dict of any form; None or {}: no calls.

        A dict in the form of power-loop's own loop refers to calls of stored messages: all their
        data is kept, even if the dict omits it.
        """
        with _known(session_id):
            if not pending:
                self.log.set_pending(session_id, None)
                return
            if not isinstance(pending, dict):
                raise InvalidInputError(f"pending must be a dict, got {type(pending).__name__}")
            ids = _ids_of_calls(pending)
            if ids and self._are_waiting(session_id, ids):
                self.log.set_pending(session_id, ids)
            else:
                self.log.set_pending(session_id, self._completed(session_id, pending, ids))

    def _are_waiting(self, session_id: str, ids: list[str]) -> bool:
        """True if messages make these calls and all of them are pending."""
        known = self.log.pending(session_id)
        return known is not None and {*ids} <= {str(call["id"]) for call in known.calls}

    def _pending(self, session_id: str) -> dict[str, Any] | None:
        given = self.log.given_pending(session_id)
        if given is not None:
            found: dict[str, Any] = restored(given)
            return found
        known = self.log.pending(session_id)
        if known is None:
            return None
        return {
            "assistant_seq": known.number,
            "round_index": known.round,
            "tool_call_ids": [str(call["id"]) for call in known.calls],
            "tool_calls": decode_calls(known.calls),
        }

    def _completed(self, session_id: str, pending: dict[str, Any], ids: list[str] | None) -> Any:
        """``pending``, with the data that the store has of its calls if it gives only their ids."""
        before = (self._pending(session_id) or {}).get("tool_calls")
        if ids and "tool_calls" not in pending and type(before) is list:
            left = [one for one in before if isinstance(one, dict) and str(one.get("id")) in ids]
            pending = {**pending, "tool_calls": left} if left else pending
        return kept({**pending})

    # --- usage ------------------------------------------------------------------------------

    def record_usage(
        self,
        session_id: str,
        *,
        round_index: int,
        prompt_tokens: int | None,
        completion_tokens: int | None,
        total_tokens: int | None,
        model: str | None = None,
    ) -> None:
        """Record the usage of a round of the current send."""
        tokens = Tokens(prompt_tokens, completion_tokens, total_tokens, model)
        with _known(session_id):
            self.log.record_usage(session_id, tokens, round=round_index)


def _ids_of_calls(pending: dict[str, Any]) -> list[str] | None:
    """The ids of pending calls, if ``pending`` has the form of power-loop's loop; else None."""
    calls = pending.get("tool_calls") or []
    if not pending.keys() <= _LOOP_KEYS or type(calls) is not list:
        return None
    if not all(isinstance(call, dict) for call in calls):
        return None
    ids = pending.get("tool_call_ids")
    if ids is None:
        ids = [str(call.get("id")) for call in calls]
    return ids if type(ids) is list and all(type(one) is str for one in ids) else None


def _text(value: Any) -> str:
    """The value of an enumeration member of any class, or the text itself."""
    return str(value.value) if isinstance(value, Enum) else str(value)


def _session_row(found: LogSession) -> SessionRow:
    return SessionRow(
        session_id=found.id,
        created_at=found.created_at_ms,
        updated_at=found.updated_at_ms,
        system_prompt=found.prompt,
        model=found.model,
        config=restored(found.config),
        status=SessionStatus(found.status),
        kind=SessionKind(found.kind),
        parent_session_id=found.parent,
        spawn_tool_call_id=found.spawn_call,
        spawn_depth=found.depth,
        lifecycle=SubagentLifecycle(found.lifecycle),
        metadata=restored(found.metadata),
    )


def _message_row(session_id: str, found: Message) -> MessageRow:
    calls = found.tool_calls
    return MessageRow(
        session_id=session_id,
        seq=found.number,
        role=found.role,
        name=found.name,
        content=found.content,
        tool_calls=None if calls is None else decode_calls(calls),
        tool_call_id=found.tool_call_id,
        round_index=found.round,
        state=MessageState(found.state),
        meta=decode_meta(found.meta),
        created_at=found.created_at_ms,
    )


# --- values -------------------------------------------------------------------------------------
#
# power-loop stores Python's JSON. A log holds no integer above 64 bits, no NaN, no key that is not
# a text, and no unlimited depth: such a value is stored as its text (``json_values``). The fields
# of a call and the entries of a note's meta are converted one by one, because the log itself reads
# some of these fields, and adds entries.


def kept(value: Any) -> Any:
    """The stored form of a value; InvalidValueError if it is not JSON."""
    return storable(value, python=True)


def encode_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The stored form of a note's meta, to which the log adds entries."""
    given: dict[str, Any] = restored(kept(dict(meta)))
    return {name: kept(value) for name, value in given.items()}


def decode_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta of any message as it was passed; it is stored whole or entry by entry."""
    return {name: restored(value) for name, value in restored(dict(meta)).items()}


def encode_calls(calls: Any) -> Any:
    """The stored form of tool calls; anything else unchanged, for the log to refuse."""
    if not isinstance(calls, list | tuple) or not all(type(call) is dict for call in calls):
        return calls
    return [{name: kept(value) for name, value in call.items()} for call in calls]


def decode_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls as they were passed."""
    return [{name: restored(value) for name, value in call.items()} for call in calls]
