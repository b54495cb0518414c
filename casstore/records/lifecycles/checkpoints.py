"""Sessions of agents: working state, and the checkpoints that were promoted from it.

A checkpoint holds what it was told to, and stays when the session ends. Checkpoints of a
session are counted, 1, 2, 3 …, whichever process makes them; the newest is the one with the
highest number, whatever any clock says.
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
from casstore.records.lifecycles.contents import content, read_content
from casstore.records.lifecycles.emptying import Emptying
from casstore.records.lifecycles.notes import (
    Removal,
    Sources,
    made,
    note_of,
    objection,
    put_note,
    write_seal,
)
from casstore.records.lifecycles.references import AGENT, CHECKPOINT, Ref, checkpoint_ref, not_found
from casstore.records.lifecycles.subjects import Subjects
from casstore.records.lifecycles.tables import Change, Place, Tables, fields
from casstore.records.lifecycles.working_state import WorkingState
from casstore.session import keys
from casstore.session.arguments import check_text, list_of
from casstore.session.records import Record


class CheckpointInfo(NamedTuple):
    """A checkpoint as it is listed, without what it holds.

    >>> info = life.create_session("s1").checkpoint("begun")
    >>> info.session, info.number, info.label
    ('s1', 1, 'begun')
    """

    session: str
    #: 1, 2, 3 … in the session.
    number: int
    id: str
    label: str
    created_at_ms: int

    @property
    def ref(self) -> Ref:
        """Its name, for what is derived from it.

        >>> info = life.create_session("s1", user="anna").checkpoint("begun")
        >>> about = Annotation(["learned_context"], sources=[info.ref])
        >>> fact = life.records.put("facts", "city", "Ulm", about)
        >>> life.find_note(fact).sources == (info.ref,)
        True
        """
        return checkpoint_ref(self.session, self.number)


class Checkpoint(NamedTuple):
    """A checkpoint and what it holds.

    >>> work = life.create_session("s1")
    >>> work.working.set("draft", "a text")
    >>> info = work.checkpoint("first")
    >>> work.find_checkpoint("first").payload
    {'draft': 'a text'}
    """

    info: CheckpointInfo
    payload: dict[str, Any]


class SessionRow(NamedTuple):
    """The row of a session."""

    started_at_ms: int
    #: Checkpoints made so far; those that were removed count, too.
    made: int
    #: The hash of the user it is for.
    user: str | None

    @staticmethod
    def of(record: Record) -> SessionRow:
        """As a row says."""
        told = fields(record)
        try:
            return SessionRow(told["t"], told["n"], told.get("u"))
        except KeyError as exc:
            raise CorruptionError(f"the row of session {record.key[0]!r} is damaged") from exc

    def to_value(self) -> dict[str, Any]:
        """As the row holds it."""
        told: dict[str, Any] = {"t": self.started_at_ms, "n": self.made}
        return told if self.user is None else {**told, "u": self.user}


class AgentSession:
    """One session: ``working`` is for now, checkpoints are for later.

    A context manager; leaving it closes the session, which forgets the working state and
    nothing else. For any number of threads, and of processes.

    The examples use ``life``, a ``Lifecycles``.

    >>> with life.create_session("s1") as work:
    ...     work.working.set("draft", "a text")
    ...     info = work.checkpoint("first", ["draft"])
    >>> work.working.names(), [info.label for info in work.checkpoints()]
    ([], ['first'])
    """

    def __init__(self, tables: Tables, subjects: Subjects, session: str) -> None:
        self._tables = tables
        self._subjects = subjects
        self.id = session
        self.working = WorkingState()

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the working state; checkpoints stay.

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
        """Promote working state: these names where they exist; None: all; an empty list: nothing.

        InvalidValueError, with the path, if a value cannot be stored exactly as it is.

        >>> work = life.create_session("s1")
        >>> work.working.set("draft", "a text")
        >>> work.working.set("scratch", object())
        >>> work.checkpoint("first", ["draft"]).number
        1
        """
        wanted = None if names is None else list_of(names, "names of working state")
        for name in wanted or ():
            check_text(name, "a name of working state")
        entry = NewCheckpoint(self.id, label, self.working.chosen(wanted))
        return put_checkpoints(self._tables, self._subjects, [entry], annotation)[0]

    def find_checkpoint(self, label: str) -> Checkpoint | None:
        """The newest checkpoint of this label; None if there is none.

        >>> work = life.create_session("s1")
        >>> for text in ("a text", "a better text"):
        ...     work.working.set("draft", text)
        ...     info = work.checkpoint("draft")
        >>> work.find_checkpoint("draft").payload
        {'draft': 'a better text'}
        """

        def read() -> Checkpoint | None:
            for index in self._tables.labels.scan(self.id, label, reverse=True, page=1):
                record = self._tables.checkpoints.find(self.id, index.key[2])
                # If it was removed between the two reads, the one before is the newest; if its
                # whole session was, another may have got its number.
                if record is not None and info_of(record).label == label:
                    return self._read(record)
            return None

        return self._tables.look(read)

    def get_checkpoint(self, number: int) -> Checkpoint:
        """One checkpoint by its number; RecordNotFoundError if there is none.

        >>> work = life.create_session("s1")
        >>> info = work.checkpoint("begun")
        >>> work.get_checkpoint(info.number).info.label
        'begun'
        """
        ref = checkpoint_ref(self.id, number)

        def read() -> Checkpoint:
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
        """Remove a checkpoint; False if there is none. Its number is not given again.

        RecordSealedError or RecordHeldError if it must stay.

        >>> work = life.create_session("s1")
        >>> info = work.checkpoint("begun")
        >>> work.delete_checkpoint(1), work.checkpoint("again").number
        (True, 2)
        """
        ref = checkpoint_ref(self.id, number)

        def step(change: Change) -> bool:
            removal = remove_checkpoint(change, self._tables, ref)
            if removal.stays is not None:
                raise removal.stays.as_error()
            return removal.there

        return self._tables.change(str(ref), step)

    def _read(self, record: Record) -> Checkpoint:
        payload = read_content(self._tables.store, fields(record))
        if type(payload) is not dict:
            raise CorruptionError(f"checkpoint {record.key!r} is damaged")
        return Checkpoint(info_of(record), payload)


def info_of(record: Record) -> CheckpointInfo:
    """What a row says of its checkpoint."""
    told = fields(record)
    try:
        return CheckpointInfo(record.key[0], int(record.key[1]), told["i"], told["l"], told["t"])
    except (KeyError, ValueError) as exc:
        raise CorruptionError(f"checkpoint {record.key!r} is damaged") from exc


class NewCheckpoint(NamedTuple):
    """A checkpoint on its way in; of a new id and of now, unless it comes from elsewhere."""

    session: str
    label: str
    payload: dict[str, Any]
    id: str | None = None
    at_ms: int | None = None


def put_checkpoints(
    tables: Tables,
    subjects: Subjects,
    entries: Sequence[NewCheckpoint],
    annotation: Annotation | None = None,
    *,
    begin: bool = False,
) -> list[CheckpointInfo]:
    """Add checkpoints to sessions, in one write, each with the next number.

    SessionNotFoundError if one is not there, unless it is to ``begin`` with this; ConflictError
    if a checkpoint of an id that is given is there.
    """
    for entry in entries:
        check_text(entry.label, "a label")
        keys.id_bytes(entry.session, "a session id")
    ids = [str(uuid.uuid4()) if entry.id is None else entry.id for entry in entries]
    given = [entry.id for entry in entries if entry.id is not None]
    sessions = list(dict.fromkeys(entry.session for entry in entries))
    said = None
    if annotation is not None:
        said = checked(annotation, has_subject=True, default=PROCESS)
    sources = Sources(tables, () if said is None else said.sources)

    def step(change: Change) -> list[CheckpointInfo]:
        parts = sources.places()
        places: list[Place] = [(tables.sessions, (session,)) for session in sessions]
        places += [*parts, *(subjects.places() if said is not None else [])]
        read = change.read(places, sources.sessions())
        now_ms = tables.store.engine.now_ms()
        rows = {
            session: _begun(tables, session, now_ms, None)
            if begin and record is None
            else _required(session, record)
            for session, record in zip(sessions, read, strict=False)
        }
        end = len(sessions) + len(parts)
        about = sources.subjects(read[len(sessions) : end], read[len(places) :])
        about |= sources.session_subjects(change, subjects)
        subjects.require(read[end : len(places)], change)
        # Asked after the sessions: who adds one of them changes its session, and this write fails.
        if given and _are_there(tables, given):
            raise ConflictError("some of the checkpoints came into the store meanwhile")
        made_now: list[CheckpointInfo] = []
        for entry, checkpoint_id in zip(entries, ids, strict=True):
            row = rows[entry.session]
            row = rows[entry.session] = row._replace(made=row.made + 1)
            at_ms = now_ms if entry.at_ms is None else entry.at_ms
            info = CheckpointInfo(entry.session, row.made, checkpoint_id, entry.label, at_ms)
            stored = change.put(
                tables.payload(info.ref),
                {"i": info.id, "l": info.label, "t": at_ms, **content(change.draft, entry.payload)},
            )
            change.put(_label(tables, info), None)
            if entry.id is not None:
                change.put((tables.imported, (entry.id,)), list(info.ref))
            if said is not None:
                named = {subjects.hash(subject) for subject in said.subjects}
                everybody = about | named | ({row.user} if row.user is not None else set())
                checked(said, has_subject=bool(everybody), default=PROCESS)
                note = made(said, everybody, now_ms)
                if said.seal is not None:
                    note = note._replace(seal=write_seal(said.seal, stored, now_ms))
                put_note(change, tables, info.ref, None, note)
            made_now.append(info)
        for session, row in rows.items():
            change.put((tables.sessions, (session,)), row.to_value())
        return made_now

    return tables.change("a session", step)


def _are_there(tables: Tables, ids: Sequence[str]) -> bool:
    """Is any of the checkpoints there that were imported under these ids?"""
    known = [place for place in tables.imported.find_many([(one,) for one in ids]) if place]
    return any(tables.find([tables.payload(Ref(*place.value)) for place in known]))


def _required(session: str, record: Record | None) -> SessionRow:
    if record is None:
        raise SessionNotFoundError(session)
    return SessionRow.of(record)


def _begun(tables: Tables, session: str, now_ms: int, user: str | None) -> SessionRow:
    """The row of a session that begins.

    Something may be derived from checkpoints of a session that had its id before. None of its own
    gets such a number, or an erasure would take that for derived from it.
    """
    derived = tables.derived.scan(CHECKPOINT, session, reverse=True, page=1)
    last = next(derived, None)
    return SessionRow(now_ms, 0 if last is None else int(last.key[2]), user)


def _label(tables: Tables, info: CheckpointInfo) -> Place:
    return tables.labels, (info.session, info.label, info.ref.name)


def create_sessions(
    tables: Tables,
    subjects: Subjects,
    sessions: Sequence[str],
    user: str | None,
    *,
    at_ms: int | None = None,
) -> None:
    """Begin sessions for a user, or for nobody, in one write; SessionExistsError if one is there.

    The user is kept as a hash, in the session's row and in the index of subjects.
    """
    for session in sessions:
        keys.id_bytes(session, "a session id")
    hashed = None if user is None else subjects.hash(user)

    def step(change: Change) -> None:
        places: list[Place] = [(tables.sessions, (session,)) for session in sessions]
        read = change.read([*places, *(subjects.places() if hashed is not None else [])])
        for session, record in zip(sessions, read, strict=False):
            if record is not None:
                raise SessionExistsError(session)
        subjects.require(read[len(sessions) :], change)
        now_ms = tables.store.engine.now_ms() if at_ms is None else at_ms
        for session, place in zip(sessions, places, strict=True):
            change.put(place, _begun(tables, session, now_ms, hashed).to_value())
            if hashed is not None:
                change.put((tables.subjects, (hashed, *Ref(AGENT, session))), None)

    tables.change("a session", step)


def remove_checkpoint(
    change: Change, tables: Tables, ref: Ref, only: bytes | None = None
) -> Removal:
    """Remove a checkpoint in a change, unless something speaks against it; ``only`` this row."""
    row, noted = change.read([tables.payload(ref), tables.note(ref)])
    if row is None or only not in (None, row.row):
        return Removal(there=False)
    note = note_of(noted)
    stays = objection(ref, note, tables.store.engine.now_ms())
    if stays is None:
        drop_checkpoint(change, tables, ref, row, note)
    return Removal(True, stays, note)


def adopt(tables: Tables, subjects: Subjects, session: str, user: str) -> None:
    """Let a session that is nobody's be a user's; SessionUserError if it is somebody else's."""
    hashed = subjects.hash(user)

    def step(change: Change) -> None:
        place: Place = (tables.sessions, (session,))
        known, *setting = change.read([place, *subjects.places()])
        row = _required(session, known)
        subjects.require(setting, change)
        if row.user is None:
            change.put(place, row._replace(user=hashed).to_value())
            change.put((tables.subjects, (hashed, *Ref(AGENT, session))), None)
        elif row.user != hashed:
            raise SessionUserError(session)

    tables.change("a session", step)


def drop_checkpoint(
    change: Change, tables: Tables, ref: Ref, row: Record, note: Note | None
) -> None:
    """Remove a checkpoint that nothing speaks for."""
    info = info_of(row)
    change.delete(tables.payload(ref))
    change.delete(_label(tables, info))
    change.delete((tables.imported, (info.id,)))
    put_note(change, tables, ref, note, None)


class EndingSession(Emptying):
    """A session with its checkpoints on its way out; it stays as long as any of them does."""

    def __init__(self, tables: Tables, session: str) -> None:
        super().__init__(tables, (tables.sessions, (session,)), CHECKPOINT, tables.checkpoints)

    def _drop(
        self, change: Change, ref: Ref, row: Record, note: Note | None, owner: Record | None
    ) -> None:
        drop_checkpoint(change, self._tables, ref, row, note)

    def _leave(self, change: Change, owner: Record, gone: int, *, is_last: bool) -> None:
        row, session = SessionRow.of(owner), owner.key[0]
        if not is_last or self._any_stay:
            return
        change.delete(self._owner)
        if row.user is not None:
            change.delete((self._tables.subjects, (row.user, *Ref(AGENT, session))))
