"""Agent sessions: working state, and the checkpoints that are created from it.

A checkpoint holds the selected values, and stays when the session is closed. The checkpoints of a
session are numbered 1, 2, 3 … across all processes. The newest checkpoint is the one with the
highest number; clocks do not matter.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from casstore.errors import (
    ConflictError,
    CorruptionError,
    SessionExistsError,
    SessionNotFoundError,
    SessionUserError,
)
from casstore.records.lifecycles.annotation import PROCESS, Annotation, Note, checked
from casstore.records.lifecycles.notes import Annotating, put_note
from casstore.records.lifecycles.references import CHECKPOINT, Ref, checkpoint_ref, not_found
from casstore.records.lifecycles.removal import Emptying, delete_record
from casstore.records.lifecycles.subjects import Subjects
from casstore.records.lifecycles.tables import (
    CHECKPOINTS,
    IMPORTED,
    SESSIONS,
    AgentCheckpointRow,
    AgentSessionRow,
    ImportedRow,
    LifecycleChange,
    LifecycleTables,
    content,
    read_content,
)
from casstore.records.lifecycles.working_state import WorkingState
from casstore.records.schema import RowPlace, text_number
from casstore.session import keys
from casstore.session.arguments import check_text, list_of
from casstore.session.records import Record


class CheckpointInfo(NamedTuple):
    """A checkpoint as listed, without its content.

    >>> info = life.create_session("s1").checkpoint("begun")
    >>> info.session, info.number, info.label
    ('s1', 1, 'begun')
    """

    session: str
    #: Counts from 1 in each session.
    number: int
    id: str
    label: str
    created_at_ms: int

    @property
    def ref(self) -> Ref:
        """The reference to this checkpoint, to name it as a source of derived records.

        >>> info = life.create_session("s1", user="anna").checkpoint("begun")
        >>> about = Annotation(["learned_context"], sources=[info.ref])
        >>> fact = life.records.put("facts", "city", "Ulm", about)
        >>> life.find_note(fact).sources == (info.ref,)
        True
        """
        return checkpoint_ref(self.session, self.number)


class AgentCheckpoint(NamedTuple):
    """A checkpoint and its content.

    >>> work = life.create_session("s1")
    >>> work.working.set("draft", "a text")
    >>> info = work.checkpoint("first")
    >>> work.find_checkpoint("first").payload
    {'draft': 'a text'}
    """

    info: CheckpointInfo
    payload: dict[str, Any]


class AgentSession:
    """One agent session: ``working`` is held in memory, checkpoints are durable.

    A context manager. Leaving it closes the session, which discards the working state and nothing
    else. Safe for any number of threads and processes.

    The examples use ``life``, a ``Lifecycles``.

    >>> with life.create_session("s1") as work:
    ...     work.working.set("draft", "a text")
    ...     info = work.checkpoint("first", ["draft"])
    >>> work.working.names(), [info.label for info in work.checkpoints()]
    ([], ['first'])
    """

    def __init__(self, tables: LifecycleTables, subjects: Subjects, session: str) -> None:
        self._tables = tables
        self._subjects = subjects
        self.id = session
        self.working = WorkingState()

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Discard the working state; checkpoints stay.

        >>> work = life.create_session("s1")
        >>> work.working.set("draft", "a text")
        >>> work.close()
        >>> work.working.names()
        []
        """
        self.working.clear()

    def checkpoint(
        self,
        label: str,
        names: Iterable[str] | None = None,
        annotation: Annotation | None = None,
    ) -> CheckpointInfo:
        """Store the values of ``names`` in the working state as a checkpoint; None: all values.

        Names that do not exist are left out.

        InvalidValueError, with the path, if a value cannot be stored exactly as it is.

        >>> work = life.create_session("s1")
        >>> work.working.set("draft", "a text")
        >>> work.working.set("scratch", object())
        >>> work.checkpoint("first", ["draft"]).number
        1
        """
        wanted = None if names is None else list_of(names, "names")
        for name in wanted or ():
            check_text(name, "an entry of names")
        entry = NewCheckpoint(self.id, label, self.working.chosen(wanted))
        return put_checkpoints(self._tables, self._subjects, [entry], annotation)[0]

    def find_checkpoint(self, label: str) -> AgentCheckpoint | None:
        """The newest checkpoint with this label, or None.

        >>> work = life.create_session("s1")
        >>> for text in ("a text", "a better text"):
        ...     work.working.set("draft", text)
        ...     info = work.checkpoint("draft")
        >>> work.find_checkpoint("draft").payload
        {'draft': 'a better text'}
        """

        def read() -> AgentCheckpoint | None:
            for index in self._tables.labels.scan(self.id, label, reverse=True, page=1):
                record = self._tables.checkpoints.find(self.id, index.key[2])
                # If the checkpoint was removed between the two reads, the previous one is the
                # newest. If its session was deleted, another checkpoint may now have its number.
                if record is not None and info_of(record).label == label:
                    return self._read(record)
            return None

        return self._tables.look(read)

    def get_checkpoint(self, number: int) -> AgentCheckpoint:
        """One checkpoint by its number; RecordNotFoundError if it does not exist.

        >>> work = life.create_session("s1")
        >>> info = work.checkpoint("begun")
        >>> work.get_checkpoint(info.number).info.label
        'begun'
        """
        ref = checkpoint_ref(self.id, number)

        def read() -> AgentCheckpoint:
            record = self._tables.checkpoints.find(ref.owner, ref.name)
            if record is None:
                raise not_found(ref)
            return self._read(record)

        return self._tables.look(read)

    def checkpoints(self) -> Iterator[CheckpointInfo]:
        """All checkpoints, the oldest first.

        >>> work = life.create_session("s1")
        >>> for label in ("begun", "done"):
        ...     info = work.checkpoint(label)
        >>> [(info.number, info.label) for info in work.checkpoints()]
        [(1, 'begun'), (2, 'done')]
        """
        table = self._tables.checkpoints
        return table.read_each(table.scan(self.id), info_of)

    def delete_checkpoint(self, number: int) -> bool:
        """Remove a checkpoint; False if it does not exist. Its number is not reused.

        RecordSealedError or RecordHeldError if it must stay.

        >>> work = life.create_session("s1")
        >>> info = work.checkpoint("begun")
        >>> work.delete_checkpoint(1), work.checkpoint("again").number
        (True, 2)
        """
        return delete_record(self._tables, checkpoint_ref(self.id, number), drop_checkpoint)

    def _read(self, record: Record) -> AgentCheckpoint:
        row = CHECKPOINTS.read(record)
        payload = read_content(self._tables.store, row.content)
        if type(payload) is not dict:
            raise CorruptionError(f"checkpoint {record.key!r} is damaged; check the store")
        return AgentCheckpoint(CheckpointInfo(*row[:5]), payload)


def info_of(record: Record) -> CheckpointInfo:
    """The checkpoint of a row, without its content."""
    return CheckpointInfo(*CHECKPOINTS.read(record)[:5])


class NewCheckpoint(NamedTuple):
    """A checkpoint to be written; it gets a new id and the current time unless it is imported."""

    session: str
    label: str
    payload: dict[str, Any]
    id: str | None = None
    at_ms: int | None = None


def put_checkpoints(
    tables: LifecycleTables,
    subjects: Subjects,
    entries: Sequence[NewCheckpoint],
    annotation: Annotation | None = None,
    *,
    begin: bool = False,
) -> list[CheckpointInfo]:
    """Add checkpoints to sessions, in one write, each with the next number.

    SessionNotFoundError if a session does not exist, unless ``begin`` creates it; ConflictError if
    a checkpoint with one of the given ids exists.
    """
    for entry in entries:
        check_text(entry.label, "label")
        keys.id_bytes(entry.session, "a session id")
    ids = [str(uuid.uuid4()) if entry.id is None else entry.id for entry in entries]
    given = [entry.id for entry in entries if entry.id is not None]
    sessions = list(dict.fromkeys(entry.session for entry in entries))
    said = None
    if annotation is not None:
        said = checked(annotation, has_subject=True, default=PROCESS)
    annotating = Annotating(subjects, said)

    def step(change: LifecycleChange) -> list[CheckpointInfo]:
        read = annotating.read(change, [(tables.sessions, (session,)) for session in sessions])
        now_ms = tables.store.engine.now_ms()
        before = {record.key[0]: SESSIONS.read(record) for record in read if record is not None}
        rows = {
            session: _begun(tables, session, now_ms, None)
            if begin and record is None
            else _required(session, record)
            for session, record in zip(sessions, read, strict=True)
        }
        # Read after the sessions: a writer that adds one of these ids changes its session row, so
        # this write would fail.
        if given and _are_there(tables, given):
            raise ConflictError("another writer has imported some of the checkpoints; import again")
        made: list[CheckpointInfo] = []
        for entry, checkpoint_id in zip(entries, ids, strict=True):
            row = rows[entry.session]
            row = rows[entry.session] = row._replace(made=row.made + 1)
            at_ms = now_ms if entry.at_ms is None else entry.at_ms
            info = CheckpointInfo(entry.session, row.made, checkpoint_id, entry.label, at_ms)
            payload = content(change.draft, entry.payload)
            stored = change.put(tables.checkpoints, AgentCheckpointRow(*info, payload))
            if entry.id is not None:
                change.put(tables.imported, ImportedRow(entry.id, info.ref))
            annotating.annotate(change, info.ref, None, stored, now_ms, row.user)
            made.append(info)
        for session, row in rows.items():
            change.put(tables.sessions, row, before.get(session))
        return made

    return tables.change("a session", step)


def _are_there(tables: LifecycleTables, ids: Sequence[str]) -> bool:
    """Does a checkpoint exist that was imported under one of these ids?"""
    known = [row for row in tables.imported.find_many([(one,) for one in ids]) if row]
    return any(tables.find([tables.payload(IMPORTED.read(one).ref) for one in known]))


def _required(session: str, record: Record | None) -> AgentSessionRow:
    if record is None:
        raise SessionNotFoundError(session)
    return SESSIONS.read(record)


def _begun(tables: LifecycleTables, session: str, now_ms: int, user: str | None) -> AgentSessionRow:
    """The row of a new session.

    Records may be derived from checkpoints of an earlier session with the same id. The new session
    does not reuse their numbers, or an erasure would treat those records as derived from it.
    """
    derived = tables.derived.scan(CHECKPOINT, session, reverse=True, page=1)
    last = next(derived, None)
    made = 0 if last is None else text_number(last.key[2])
    return AgentSessionRow(session, now_ms, made, user)


def create_session(
    tables: LifecycleTables, subjects: Subjects, session: str, user: str | None
) -> None:
    """Create a session, with or without a user; SessionExistsError if it exists.

    The user is stored as a hash, in the session's row and in the index of subjects.
    """
    keys.id_bytes(session, "a session id")
    hashed = None if user is None else subjects.hash(user)

    def step(change: LifecycleChange) -> None:
        places: list[RowPlace] = [(tables.sessions, (session,))]
        [known] = change.read(places) if hashed is None else subjects.read(change, places)
        if known is not None:
            raise SessionExistsError(session)
        now_ms = tables.store.engine.now_ms()
        change.put(tables.sessions, _begun(tables, session, now_ms, hashed))

    tables.change("a session", step)


def adopt(tables: LifecycleTables, subjects: Subjects, session: str, user: str) -> None:
    """Assign a session without a user to a user; SessionUserError if it has another user."""
    hashed = subjects.hash(user)

    def step(change: LifecycleChange) -> None:
        [known] = subjects.read(change, [(tables.sessions, (session,))])
        row = _required(session, known)
        if row.user is None:
            change.put(tables.sessions, row._replace(user=hashed), row)
        elif row.user != hashed:
            raise SessionUserError(session)

    tables.change("a session", step)


def drop_checkpoint(change: LifecycleChange, ref: Ref, row: Record, note: Note | None) -> None:
    """Remove a checkpoint that is neither sealed nor held."""
    tables, checkpoint = change.tables, CHECKPOINTS.read(row)
    change.remove(tables.checkpoints, checkpoint)
    change.delete((tables.imported, (checkpoint.id,)))
    put_note(change, ref, note, None)


class EndingSession(Emptying):
    """Deletes a session with its checkpoints; the session stays while any checkpoint stays."""

    def __init__(self, tables: LifecycleTables, session: str) -> None:
        super().__init__(tables, (tables.sessions, (session,)), CHECKPOINT, tables.checkpoints)

    def _drop(self, change: LifecycleChange, ref: Ref, row: Record, note: Note | None) -> None:
        drop_checkpoint(change, ref, row, note)

    def _leave(self, change: LifecycleChange, owner: Record, gone: int, *, is_last: bool) -> None:
        if is_last and not self._any_stay:
            change.remove(self._tables.sessions, SESSIONS.read(owner))
