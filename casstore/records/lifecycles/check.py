"""The three lifecycles: checkpoints and their labels, users' counts, notes, seals and indexes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from casstore.engine.protocol import Row
from casstore.format.hashing import plain_hash
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.maintenance.findings import ERROR, Meaning
from casstore.records.lifecycles.annotation import Note
from casstore.records.lifecycles.checkpoints import SessionRow, info_of
from casstore.records.lifecycles.references import AGENT, Ref
from casstore.records.lifecycles.tables import Tables, fields
from casstore.records.lifecycles.user_rows import Person
from casstore.session.records import Record, Table
from casstore.store import Store

SEAL_BROKEN: Final = "seal_broken"

#: What only the check of lifecycles finds.
CODES: Final = {
    SEAL_BROKEN: Meaning(
        ERROR, "a record is not as it was when it was sealed",
        "find out who changed it outside casstore; a backup may have what was sealed",
    ),
}  # fmt: skip


class LifecyclesCheck:
    """Judges the records of the lifecycles."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._tables = Tables(store)
        self._facts = facts

    def judges(self) -> Judges:
        """For each table, the function that checks a record of it."""
        tables = self._tables
        return {
            tables.sessions: self._session,
            tables.checkpoints: self._checkpoint,
            tables.labels: self._label,
            tables.people: self._person,
            tables.users: self._user_value,
            tables.notes: self._note,
            tables.subjects: self._subject,
            tables.derived: self._derived,
        }

    def _record(self, table: Table, key: Sequence[str], row: bytes) -> Record:
        return table.record_of(Row(table.keys.key(tuple(key)), row))

    # --- sessions and checkpoints -----------------------------------------------------------------

    def _session(self, record: Record) -> None:
        told, tables, session = SessionRow.of(record), self._tables, record.key[0]
        if told.user is None:
            return
        places = [
            tables.sessions.place(session),
            tables.subjects.place(told.user, *Ref(AGENT, session)),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or values[1] is not None:
                return None
            return f"the agent's session {session!r} is not found by its user"

        where = where_is(tables.sessions, record.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    def _checkpoint(self, record: Record) -> None:
        info, tables = info_of(record), self._tables
        places = [
            tables.checkpoints.place(*record.key),
            tables.sessions.place(info.session),
            tables.labels.place(info.session, info.label, info.ref.name),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, session, label = values
            title = f"checkpoint {info.number} of the agent's session {info.session!r}"
            if own != record.row:
                return None
            if session is None:
                return f"{title} has lost its session"
            if SessionRow.of(self._record(tables.sessions, (info.session,), session)).made < (
                info.number
            ):
                return f"{title} has a number that the session has not given yet"
            return f"{title} is not found by its label" if label is None else None

        where = where_is(tables.checkpoints, record.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    def _label(self, record: Record) -> None:
        tables, (session, label, number) = self._tables, record.key
        places = [tables.labels.place(*record.key), tables.checkpoints.place(session, number)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, found = values
            if own != record.row:
                return None
            if found is not None:
                checkpoint = self._record(tables.checkpoints, (session, number), found)
                if info_of(checkpoint).label == label:
                    return None
            return f"label {label!r} of the agent's session {session!r} leads to no checkpoint"

        where = where_is(tables.labels, record.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    # --- users ------------------------------------------------------------------------------------

    def _person(self, record: Record) -> None:
        Person.of(record)
        table, user = self._tables.people, record.key[0]
        self._facts.count(
            table.place(user), lambda row: self._look(user, self._record(table, (user,), row))
        )

    def _look(self, user: str, record: Record) -> Iterator[Wrong]:
        told = Person.of(record).values
        count = sum(1 for _ in self._tables.users.scan(user))
        if count != told:
            says = f"user {user} counts {told} values, and has {count}"
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where_is(self._tables.people, (user,)))

    def _user_value(self, record: Record) -> None:
        fields(record)
        tables, (user, name) = self._tables, record.key
        places = [tables.users.place(user, name), tables.people.place(user)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or values[1] is not None:
                return None
            return f"value {name!r} is of user {user}, of whom nothing is known"

        self._facts.ask(codes.RECORD_ORPHANED, where_is(tables.users, record.key), places, judge)

    # --- notes ------------------------------------------------------------------------------------

    def _note(self, record: Record) -> None:
        note, tables, ref = Note.from_value(record.value), self._tables, Ref(*record.key)
        place, where = tables.notes.place(*ref), where_is(tables.notes, record.key)
        table, key = tables.payload(ref)
        payload = table.place(*key)

        def judge_record(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or values[1] is not None:
                return None
            return f"something is said of {ref}, which is not there"

        self._facts.ask(codes.RECORD_ORPHANED, where, [place, payload], judge_record)
        indexed = [tables.subjects.place(subject, *ref) for subject in note.subjects]
        indexed += [tables.derived.place(*source, *ref) for source in note.sources]

        def judge_index(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or None not in values:
                return None
            return f"{ref} is not found by whom it is about, or by what it was derived from"

        self._facts.ask(codes.RECORD_INDEX_WRONG, where, [place, *indexed], judge_index)
        seal = note.seal
        if seal is None:
            return

        def judge_seal(values: Sequence[bytes | None]) -> str | None:
            own, row = values
            if own != record.row or row is None or plain_hash(row).hex() == seal.hash:
                return None
            return f"{ref} is not as it was sealed for {seal.action!r}"

        self._facts.ask(SEAL_BROKEN, where, [place, payload], judge_seal)

    def _subject(self, record: Record) -> None:
        tables, (subject, *rest) = self._tables, record.key
        ref = Ref(*rest)
        table, key = tables.notes, tuple(ref)
        if ref.kind == AGENT:
            table, key = tables.sessions, (ref.owner,)
        places = [
            tables.subjects.place(*record.key),
            table.place(*key),
            tables.settings.place("subjects"),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, found, secret = values
            if own != record.row:
                return None
            if secret is None:
                return "subjects are hashed, but it is not known with which secret"
            if found is not None:
                owner = self._record(table, key, found)
                if ref.kind == AGENT and SessionRow.of(owner).user == subject:
                    return None
                if ref.kind != AGENT and subject in Note.from_value(owner.value).subjects:
                    return None
            return f"the index of subjects leads to {ref}, which does not say so"

        where = where_is(tables.subjects, record.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    def _derived(self, record: Record) -> None:
        tables = self._tables
        source, ref = Ref(*record.key[:3]), Ref(*record.key[3:])
        places = [tables.derived.place(*record.key), tables.notes.place(*ref)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, found = values
            if own != record.row:
                return None
            if (
                found is not None
                and source in Note.from_value(self._record(tables.notes, ref, found).value).sources
            ):
                return None
            return f"{ref} is listed as derived from {source}, and does not say so"

        where = where_is(tables.derived, record.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)
