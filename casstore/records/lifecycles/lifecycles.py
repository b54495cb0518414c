"""``Lifecycles``: three kinds of state by lifetime, and the annotations of their records.

    working state    in memory, gone with the session
    checkpoints      created explicitly, kept until the retention of their class ends
    user data        by user, in tables of its own, erased as a whole

Removing one kind of state never removes another.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Final, NamedTuple

from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    RecordHeldError,
    RecordSealedError,
    SessionExistsError,
    SessionNotFoundError,
)
from casstore.format.digest import plain_hash
from casstore.records.lifecycles.annotation import (
    IDENTITY,
    PROCESS,
    Hold,
    Note,
    Seal,
    check_hold,
    check_reason,
    check_seal,
)
from casstore.records.lifecycles.checkpoints import (
    AgentSession,
    EndingSession,
    adopt,
    create_session,
    drop_checkpoint,
)
from casstore.records.lifecycles.kept_records import KeptRecords, drop_record
from casstore.records.lifecycles.key_files import KeyStore, check_key_store
from casstore.records.lifecycles.notes import note_of, put_note, write_seal
from casstore.records.lifecycles.references import (
    AGENT,
    CHECKPOINT,
    RECORD,
    USER,
    Ref,
    checked_ref,
    not_found,
)
from casstore.records.lifecycles.removal import Removal, Stayed, remove_unless_kept
from casstore.records.lifecycles.subjects import Subjects
from casstore.records.lifecycles.tables import (
    SESSIONS,
    USERS,
    LifecycleChange,
    LifecycleTables,
    UserRow,
)
from casstore.records.lifecycles.user_data import UserData
from casstore.records.lifecycles.user_rows import FreshKeys, UserRows, user_of
from casstore.records.schema import RowPlace
from casstore.session.records import Record
from casstore.store import Store

#: The class of a record that is not annotated, by kind of record.
DEFAULT_CLASS: Final = {CHECKPOINT: PROCESS, USER: IDENTITY, RECORD: PROCESS}


class SessionEnd(NamedTuple):
    """How many checkpoints of a session were deleted, and which stayed.

    The session itself is deleted if none stayed.

    >>> info = life.create_session("s1").checkpoint("begun")
    >>> life.delete_session("s1")
    SessionEnd(deleted=1, stayed=())
    """

    deleted: int
    stayed: tuple[Stayed, ...]


class Lifecycles:
    """Working state, checkpoints, user data and annotated records of one store.

    ``keys`` is a key store such as ``FileKeys``: with it, user data is encrypted, with a key for
    each user. ``secret`` prevents guessing subjects from their hashes; a store is always used with
    the same secret, or always without.

    The examples use ``life``, which is empty. ``store`` is its store.

    >>> with life.create_session("s1", user="anna") as work:
    ...     work.working.set("plan", ["read", "write"])
    ...     info = work.checkpoint("planned", ["plan"])
    >>> life.restore("s1").find_checkpoint("planned").payload
    {'plan': ['read', 'write']}
    """

    def __init__(
        self, store: Store, *, keys: KeyStore | None = None, secret: bytes | None = None
    ) -> None:
        if keys is not None:
            check_key_store(keys)
            # Fail here rather than at the first value: the package may not be installed.
            import_module("casstore.records.lifecycles.encryption")
        self.store = store
        self.tables = LifecycleTables(store)
        self.subjects = Subjects(self.tables, secret)
        self._rows = UserRows(self.tables, keys)
        self.users = UserData(self.tables, self.subjects, self._rows)
        self.records = KeptRecords(self.tables, self.subjects)

    # --- sessions -----------------------------------------------------------------------

    def create_session(
        self, session: str | None = None, *, user: str | None = None
    ) -> AgentSession:
        """Create a session, optionally for a user; SessionExistsError if it exists.

        >>> with life.create_session("s1", user="anna") as work:
        ...     info = work.checkpoint("begun")
        >>> list(life.sessions(user="anna"))
        ['s1']
        """
        name = secrets.token_hex(16) if session is None else session
        create_session(self.tables, self.subjects, name, user)
        return AgentSession(self.tables, self.subjects, name)

    def open_session(self, session: str, *, user: str | None = None) -> AgentSession:
        """Open a session, creating it if needed; a session without a user is assigned to ``user``.

        SessionUserError if it belongs to another user.

        >>> life.open_session("s1").id, life.open_session("s1", user="anna").id
        ('s1', 's1')
        >>> life.is_for("s1", "anna")
        True
        """
        if self.tables.sessions.find(session) is None:
            with suppress(SessionExistsError):  # another writer has just created it
                return self.create_session(session, user=user)
        if user is not None:
            adopt(self.tables, self.subjects, session, user)
        return AgentSession(self.tables, self.subjects, session)

    def restore(self, session: str) -> AgentSession:
        """An existing session: empty working state, and all its checkpoints.

        SessionNotFoundError if it does not exist.

        >>> info = life.create_session("s1").checkpoint("begun")
        >>> again = life.restore("s1")  # in another process, as a rule
        >>> [info.label for info in again.checkpoints()]
        ['begun']
        """
        if self.tables.sessions.find(session) is None:
            raise SessionNotFoundError(session)
        return AgentSession(self.tables, self.subjects, session)

    def sessions(self, *, user: str | None = None) -> Iterator[str]:
        """The ids of all sessions, or of one user's sessions.

        >>> for name, user in (("s1", "anna"), ("s2", "ben")):
        ...     work = life.create_session(name, user=user)
        >>> list(life.sessions()), list(life.sessions(user="ben"))
        (['s1', 's2'], ['s2'])
        """
        if user is None:
            return (record.key[0] for record in self.tables.sessions.scan())
        self.subjects.check()
        return (
            record.key[2] for record in self.tables.subjects.scan(self.subjects.hash(user), AGENT)
        )

    def is_for(self, session: str, user: str) -> bool:
        """Whether a session belongs to a user. SessionNotFoundError if it does not exist.

        >>> work = life.create_session("s1", user="anna")
        >>> life.is_for("s1", "anna"), life.is_for("s1", "ben")
        (True, False)
        """
        record = self.tables.sessions.find(session)
        if record is None:
            raise SessionNotFoundError(session)
        self.subjects.check()
        return SESSIONS.read(record).user == self.subjects.hash(user)

    def delete_session(self, session: str) -> SessionEnd:
        """Remove a session and its checkpoints; held or sealed ones stay, and so does the session.

        Each write removes up to 5,000 checkpoints. SessionNotFoundError if it does not exist.

        >>> info = life.create_session("s1").checkpoint("begun")
        >>> life.hold(info.ref, Hold("tax law", 2**42))
        >>> end = life.delete_session("s1")
        >>> end.deleted, [stayed.basis for stayed in end.stayed]
        (0, ['tax law'])
        """
        if self.tables.sessions.find(session) is None:
            raise SessionNotFoundError(session)
        ending = EndingSession(self.tables, session)
        ending.run()
        return SessionEnd(ending.deleted, tuple(ending.stayed))

    # --- annotations ----------------------------------------------------------------------

    def find_note(self, ref: Ref) -> Note | None:
        """The note of a record, or None; RecordNotFoundError if the record does not exist.

        >>> chat = life.users.put("anna", "chat", "I moved to Ulm")
        >>> about = Annotation(["learned_context"], sources=[chat])
        >>> fact = life.records.put("facts", "city", "Ulm", about)
        >>> note = life.find_note(fact)
        >>> note.classes, note.subjects == (chat.owner,)  # about whom its source is about
        (('learned_context',), True)
        """
        ref = checked_ref(ref)

        def read() -> Note | None:
            row, noted = self.tables.find([self._row(ref), self.tables.note(ref)])
            if row is None:
                raise not_found(ref)
            return note_of(noted)

        return self.tables.look(read)

    def hold(self, ref: Ref, hold: Hold) -> None:
        """Keep a record until a given time. RecordHeldError if an existing hold lasts longer.

        >>> invoice = life.records.put("invoices", "7", {"total": 90}, Annotation(["compliance"]))
        >>> life.hold(invoice, Hold("tax law", store.engine.now_ms() + 10 * 365 * 86_400_000))
        >>> try:
        ...     life.records.delete("invoices", "7")
        ... except casstore.errors.RecordHeldError as exc:
        ...     exc.basis
        'tax law'
        """
        check_hold(hold)

        def step(before: Note, now_ms: int, row: bytes) -> Note:
            held = before.hold
            if held is not None and held.until_ms > max(now_ms, hold.until_ms):
                raise RecordHeldError(str(ref), held.basis, held.until_ms)
            return before._replace(hold=hold)

        self._annotate(ref, step, is_kept=True)

    def seal(self, ref: Ref, seal: Seal) -> None:
        """Forbid changing or removing a record until ``lift_seal``; RecordSealedError if sealed.

        >>> consent = life.users.put("anna", "consent", {"given": True})
        >>> life.seal(consent, Seal(action="consent-1", basis="proof of consent"))
        >>> try:
        ...     life.users.put("anna", "consent", {"given": False})
        ... except casstore.errors.RecordSealedError as exc:
        ...     exc.action
        'consent-1'
        """
        check_seal(seal)

        def step(before: Note, now_ms: int, row: bytes) -> Note:
            if before.seal is not None:
                raise RecordSealedError(str(ref), before.seal.action)
            return before._replace(seal=write_seal(seal, row, now_ms))

        self._annotate(ref, step, is_kept=True)

    def lift_hold(self, ref: Ref, *, review: str) -> None:
        """End a hold early; the reason is stored with the record.

        >>> invoice = life.records.put("invoices", "7", {"total": 90}, Annotation(["compliance"]))
        >>> life.hold(invoice, Hold("tax law", 2**42))
        >>> life.lift_hold(invoice, review="the law has changed")
        >>> life.records.delete("invoices", "7")
        True
        """
        self._lift(ref, review, lambda note: note._replace(hold=None))

    def lift_seal(self, ref: Ref, *, review: str) -> None:
        """Remove the seal of a record; the reason is stored with the record.

        >>> consent = life.users.put("anna", "consent", {"given": True})
        >>> life.seal(consent, Seal(action="consent-1", basis="proof of consent"))
        >>> life.lift_seal(consent, review="the case is closed")
        >>> life.users.delete("anna", "consent")
        True
        """
        self._lift(ref, review, lambda note: note._replace(seal=None))

    def verify_seal(self, ref: Ref) -> None:
        """CorruptionError if a record has changed since it was sealed.

        InvalidInputError if it is not sealed.

        >>> consent = life.users.put("anna", "consent", {"given": True})
        >>> life.seal(consent, Seal(action="consent-1", basis="proof of consent"))
        >>> life.verify_seal(consent)  # raises if it is another by now
        """
        ref = checked_ref(ref)

        def read() -> None:
            row, noted = self.tables.find([self._row(ref), self.tables.note(ref)])
            note = note_of(noted)
            if note is None or note.seal is None:
                raise InvalidInputError(f"{ref} is not sealed")
            if row is None or plain_hash(row.row).hex() != note.seal.hash:
                raise CorruptionError(f"{ref} has changed since it was sealed")

        self.tables.look(read)

    def _row(self, ref: Ref) -> RowPlace:
        if ref.kind == USER:
            self.subjects.check()
        return self.tables.payload(ref)

    def _lift(self, ref: Ref, review: str, lifted: Callable[[Note], Note]) -> None:
        check_reason(review, "a review")

        def step(before: Note, now_ms: int, row: bytes) -> Note:
            return lifted(before)._replace(reviews=(*before.reviews, review))

        self._annotate(ref, step, is_kept=False)

    def _annotate(
        self, ref: Ref, decide: Callable[[Note, int, bytes], Note], *, is_kept: bool
    ) -> None:
        """Change a record's note; with ``is_kept``, a user's value first gets a key of its own."""
        ref = checked_ref(ref)
        tables, fresh = self.tables, FreshKeys(self._rows.keys)
        owner: list[RowPlace] = []
        if ref.kind == USER:
            owner = [(tables.people, (ref.owner,))]
        elif ref.kind == CHECKPOINT:
            owner = [(tables.sessions, (ref.owner,))]

        def step(change: LifecycleChange) -> None:
            fresh.begin()
            row, noted, *whose = change.read([self._row(ref), tables.note(ref)], owner)
            if row is None:
                raise not_found(ref)
            now_ms, before = tables.store.engine.now_ms(), note_of(noted)
            stored = row.row
            if is_kept and ref.kind == USER:
                user = user_of(ref.owner, whose[0])
                stored = self._with_own_key(change, fresh, ref, row, user)
            note = before if before is not None else self._default_note(ref, row, whose)
            put_note(change, ref, before, decide(note, now_ms, stored))

        with fresh:
            tables.change(str(ref), step)

    def _with_own_key(
        self, change: LifecycleChange, fresh: FreshKeys, ref: Ref, row: Record, person: UserRow
    ) -> bytes:
        """The row of a user's value, re-encrypted under its own key if needed."""
        before = USERS.read(row)
        if before.key is None or before.key != person.key:
            return row.row
        value = self._rows.opened(before)
        key = self._rows.key_for(fresh, ref, person, stays=True)
        return self._rows.put(change, ref, key, value, before.at_ms)

    def _default_note(self, ref: Ref, row: Record, whose: Sequence[Record | None]) -> Note:
        about: tuple[str, ...] = ()
        if ref.kind == USER:
            about = (ref.owner,)
        elif whose and whose[0] is not None:
            user = SESSIONS.read(whose[0]).user
            about = () if user is None else (user,)
        return Note(
            (DEFAULT_CLASS[ref.kind],),
            about,
            derived_at_ms=self.tables.written_at_ms(ref.kind, row),
        )

    # --- removing records -------------------------------------------------------------------

    def remove(self, ref: Ref, *, only: bytes | None = None) -> Removal:
        """Remove one record of any kind, unless it is sealed or held.

        With ``only``, it is removed only if its row (``Record.row``) is still this one.

        >>> ref = life.users.put("anna", "language", "en")
        >>> life.remove(ref).there, life.remove(ref).there
        (True, False)
        """
        ref = checked_ref(ref)
        if only is not None and type(only) is not bytes:
            raise InvalidInputError(f"only must be bytes, got {type(only).__name__}")

        def step(change: LifecycleChange) -> Removal:
            if ref.kind == USER:
                self.subjects.check()
                return self.users.remove(change, ref, only)
            drop = drop_checkpoint if ref.kind == CHECKPOINT else drop_record
            return remove_unless_kept(change, ref, drop, only)

        removal = self.tables.change(str(ref), step)
        if ref.kind == USER and removal.there:
            self._rows.destroy_here()
        return removal
