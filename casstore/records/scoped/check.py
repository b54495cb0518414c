"""Scoped state: the counts of a scope, versions, the ways from people to values, resets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from casstore.engine.protocol import Row
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.records.scoped.layout import (
    LATEST,
    Head,
    Stored,
    Tables,
    decode_head,
    decode_person,
    decode_reset,
    decode_value,
    number_text,
)
from casstore.records.scoped.runs import decode_run
from casstore.session.records import Record
from casstore.store import Store


class ScopedCheck:
    """Judges the records of scoped state."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._tables = Tables(store)
        self._facts = facts

    def judges(self) -> Judges:
        """For each table, the function that checks a record of it."""
        tables = self._tables
        return {
            tables.scopes: self._scope,
            tables.values: self._value,
            tables.conversations: self._conversation,
            tables.resets: self._reset,
            tables.runs: self._run,
            tables.run_actors: self._run_actor,
        }

    # --- scopes ---------------------------------------------------------------------------------

    def _scope(self, record: Record) -> None:
        head, tables = decode_head(record), self._tables
        own = tables.scopes.place(*record.key)
        self._facts.count(own, lambda row: self._look(record.key, self._head(record.key, row)))
        if head.conversation is None:
            return
        places = [own, tables.conversations.place(head.conversation, *record.key)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or values[1] is not None:
                return None
            return f"scope {record.key[0]} is not found by its conversation"

        where = where_is(tables.scopes, record.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    def _head(self, key: tuple[str, ...], row: bytes) -> Head:
        table = self._tables.scopes
        return decode_head(table.record_of(Row(table.keys.key(key), row)))

    def _look(self, key: tuple[str, ...], head: Head) -> Iterator[Wrong]:
        keys = size_bytes = 0
        soonest_ms: int | None = None
        strange: Stored | None = None
        for record in self._tables.values.scan(*key):
            stored = decode_value(record)
            keys += 1
            size_bytes += stored.charged_bytes
            if stored.expires_ms is not None:
                soonest_ms = min(soonest_ms or stored.expires_ms, stored.expires_ms)
            if not _was_given(stored.version, head):
                strange = stored
        where = where_is(self._tables.scopes, key)
        if (keys, size_bytes) != (head.keys, head.size_bytes):
            says = (
                f"scope {key[0]} counts {head.keys} values of {head.size_bytes} bytes, and has "
                f"{keys} of {size_bytes}"
            )
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)
        if soonest_ms is not None and (head.soonest_ms is None or head.soonest_ms > soonest_ms):
            says = f"a value of scope {key[0]} expires before the scope says that any does"
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)
        if strange is not None:
            says = (
                f"value {strange.key!r} of scope {key[0]} has version {strange.version}, which "
                f"the scope, at {head.version}, has not given"
            )
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)

    def _value(self, record: Record) -> None:
        stored, tables = decode_value(record), self._tables
        own = tables.values.place(*record.key)
        places = [own, tables.scopes.place(*record.key[:2])]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or values[1] is not None:
                return None
            return f"value {stored.key!r} is of scope {record.key[0]}, which is not there"

        self._facts.ask(codes.RECORD_ORPHANED, where_is(tables.values, record.key), places, judge)
        if stored.writer is not None:
            self._writer(record, stored, stored.writer)

    def _writer(self, record: Record, stored: Stored, writer: tuple[str, str]) -> None:
        tables, lead = self._tables, (*writer, *record.key)
        places = [tables.values.place(*record.key), tables.people.place(*lead)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, found = values
            if own != record.row:
                return None
            if found is not None:
                row = Row(tables.people.keys.key(lead), found)
                if decode_person(tables.people.record_of(row)).origin == stored.origin:
                    return None
            return f"value {stored.key!r} of scope {record.key[0]} is not found by who wrote it"

        self._facts.ask(
            codes.RECORD_INDEX_WRONG, where_is(tables.values, record.key), places, judge
        )

    def _conversation(self, record: Record) -> None:
        tables, (conversation, *place) = self._tables, record.key
        places = [tables.conversations.place(*record.key), tables.scopes.place(*place)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, scope = values
            if own != record.row:
                return None
            if scope is not None and self._head(tuple(place), scope).conversation == conversation:
                return None
            return f"a conversation leads to scope {place[0]}, which is not one of it"

        where = where_is(tables.conversations, record.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    # --- resets and runs --------------------------------------------------------------------------

    def _reset(self, record: Record) -> None:
        """Numbers have no gap, and the latest stands once more under no number."""
        reset, table = decode_reset(record), self._tables.resets
        conversation, number = record.key
        before = number_text(reset.number - 1)
        places = [table.place(*record.key), table.place(conversation, LATEST)]
        if number == LATEST:
            places.append(table.place(conversation, number_text(reset.number)))
        elif reset.number > 1:
            places.append(table.place(conversation, before))

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, latest, *other = values
            if own != record.row:
                return None
            if number != LATEST and number != number_text(reset.number):
                return f"reset {reset.number} of a conversation stands under {number}"
            if latest is None:
                return f"reset {reset.number} of a conversation has no latest one beside it"
            if number == LATEST:
                return None if other == [own] else "the latest reset of a conversation is lost"
            row = Row(table.keys.key((conversation, LATEST)), latest)
            if decode_reset(table.record_of(row)).number < reset.number:
                return f"reset {reset.number} of a conversation is not known to the latest"
            return f"reset {reset.number - 1} of a conversation is lost" if None in other else None

        self._facts.ask(codes.RECORD_COUNT_WRONG, where_is(table, record.key), places, judge)

    def _run(self, record: Record) -> None:
        run, tables = decode_run(record), self._tables
        actor = run.context.actor
        if actor is None:
            return
        places = [tables.runs.place(*record.key), tables.run_actors.place(*actor, *record.key)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or values[1] is not None:
                return None
            return f"run {record.key[0]!r} of scoped state is not found by who acts in it"

        self._facts.ask(codes.RECORD_INDEX_WRONG, where_is(tables.runs, record.key), places, judge)

    def _run_actor(self, record: Record) -> None:
        tables, (*actor, run) = self._tables, record.key
        places = [tables.run_actors.place(*record.key), tables.runs.place(run)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, found = values
            if own != record.row:
                return None
            if found is not None:
                row = Row(tables.runs.keys.key((run,)), found)
                if decode_run(tables.runs.record_of(row)).context.actor == tuple(actor):
                    return None
            return f"an actor leads to run {run!r} of scoped state, which is not one of theirs"

        where = where_is(tables.run_actors, record.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)


def _was_given(version: str, head: Head) -> bool:
    """Can a scope have given this version before its latest change?"""
    birth, _, number = version.rpartition("-")
    return birth == head.birth and 0 < int(number) <= head.changes
