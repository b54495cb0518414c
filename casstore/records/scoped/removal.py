"""Removes values by person or by generation, in batches, and keeps the counts exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from casstore.errors import ConditionFailedError, CorruptionError, InvalidInputError
from casstore.records.schema import Key, RowPlace, number_text
from casstore.records.scoped.changes import REMOVED_AT_ONCE, changed, forget, known, put_scope
from casstore.records.scoped.layout import (
    LATEST,
    ScopedTables,
    ValueRow,
    Writer,
)
from casstore.session.arguments import check_callable, check_count, check_text
from casstore.session.attempts import Attempts, read_again
from casstore.session.records import Draft, Record, Table, find_records

#: Called between two writes with the number of values removed so far.
Pulse = Callable[[int], None]


class Erased(NamedTuple):
    """What an erasure removed.

    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> run = state.begin_run("run-1", context, caller="me/agent")
    >>> state.erase_actor("anna")
    Erased(values=1, runs=1)
    """

    values: int
    runs: int


class ValueRemoval:
    """One write that removes values, and other records with them."""

    def __init__(self, tables: ScopedTables) -> None:
        self._tables = tables
        self._draft = Draft(tables.store)

    def values(self, wanted: Sequence[tuple[Key, str | None]]) -> int:
        """Add the removal of values to the write; returns how many exist.

        With an origin, a value of that key with another origin stays.
        """
        tables = self._tables
        places = sorted({key[:2] for key, _ in wanted})
        asked: list[RowPlace] = [(tables.scopes, place) for place in places]
        asked += [(tables.values, key) for key, _ in wanted]
        found = find_records(tables.store, asked)
        heads = dict(zip(places, found[: len(places)], strict=True))
        going: dict[Key, list[ValueRow]] = {place: [] for place in places}
        for (key, origin), record in zip(wanted, found[len(places) :], strict=True):
            stored = tables.values.decode_found(record)
            if stored is not None and origin in (None, stored.origin):
                going[key[:2]].append(stored)
        for place, gone in going.items():
            if not gone:
                continue
            record = heads[place]
            self._draft.expect(tables.scopes, place, record)
            head = known(tables.scopes.decode_found(record), place[0])
            for stored in gone:
                forget(tables, self._draft, stored)
            put_scope(tables, self._draft, changed(head, gone=gone), head)
        return sum([len(gone) for gone in going.values()])

    def record(self, table: Table, record: Record) -> None:
        """Add the removal of a record to the write, on condition that it is unchanged."""
        self._draft.expect(table, record.key, record)
        self._draft.delete(table, record.key)

    def commit(self) -> bool:
        """Write everything; False, and nothing is written, if another writer has changed a row."""
        try:
            self._draft.commit()
        except ConditionFailedError:
            return False
        return True


# --- everything about a person ------------------------------------------------------------------


def checked_person(person: Writer) -> Writer:
    """Check the type and id of a person; an empty one would match everyone's values."""
    if not isinstance(person, tuple | list) or len(person) != 2:
        raise InvalidInputError(f"an actor must be a pair of type and id, got {person!r:.80}")
    kind, name = person
    check_text(kind, "actor_type")
    check_text(name, "actor_id")
    if not kind or not name:
        raise InvalidInputError(f"actor_type and actor_id must not be empty, got {person!r:.80}")
    return kind, name


def check_place(workspace_id: str | None, bot_id: str | None) -> None:
    """Refuse an invalid workspace or bot: nothing would match, and nothing be removed."""
    for value, what in ((workspace_id, "a workspace"), (bot_id, "a bot")):
        if value is not None:
            check_text(value, what)


def concerning(
    tables: ScopedTables, person: Writer, workspace_id: str | None, bot_id: str | None
) -> Iterator[Record]:
    """The index rows from a person to values, in the whole store or one workspace or bot."""
    for record in tables.people.scan(*person):
        lead = tables.people.decode(record)
        if workspace_id in (None, lead.workspace_id) and bot_id in (None, lead.bot_id):
            yield record


def runs_of(
    tables: ScopedTables, person: Writer, workspace_id: str | None, bot_id: str | None
) -> Iterator[Record]:
    """The index rows that lead from an actor to its runs."""
    for record in tables.run_actors.scan(*person):
        key = tables.run_actors.leads_to(record)
        # If the run ends while its row is read, gc may collect the objects of the row.
        run = read_again(partial(tables.runs.get, *key), (CorruptionError,))
        # An index row whose run is gone still names the actor, so it is erased too.
        if run is None or (
            workspace_id in (None, run.context.workspace_id)
            and bot_id in (None, run.context.bot_id)
        ):
            yield record


def erase(
    tables: ScopedTables,
    person: Writer,
    workspace_id: str | None,
    bot_id: str | None,
    pulse: Pulse | None = None,
) -> Erased:
    """Remove the index rows of a person, and the values and runs they point to."""
    if pulse is not None:
        check_callable(pulse, "pulse")
    values = ended = 0
    while True:
        leads = list(islice(concerning(tables, person, workspace_id, bot_id), REMOVED_AT_ONCE))
        own = list(islice(runs_of(tables, person, workspace_id, bot_id), REMOVED_AT_ONCE))
        erased = erase_found(tables, leads, own)
        values += erased.values
        ended += erased.runs
        # A short batch is the last one.
        if max(len(leads), len(own)) < REMOVED_AT_ONCE:
            return Erased(values, ended)
        if pulse is not None:
            pulse(values)


def erase_found(tables: ScopedTables, leads: Sequence[Record], own: Sequence[Record]) -> Erased:
    """Remove these index rows, and the values and runs they point to, in one write."""
    attempts = Attempts("the state of a person")
    while True:
        attempts.begin()
        leads = _still(tables.people, leads)
        own = _still(tables.run_actors, own)
        removal = ValueRemoval(tables)
        values = removal.values([(one.key[2:], tables.people.decode(one).origin) for one in leads])
        for record in leads:
            removal.record(tables.people, record)
        running = [one for one in tables.runs.find_many([one.key[2:] for one in own]) if one]
        for record in own:
            removal.record(tables.run_actors, record)
        for record in running:
            removal.record(tables.runs, record)
        if removal.commit():
            return Erased(values, len(running))


def _still(table: Table, records: Sequence[Record]) -> list[Record]:
    """The current records, without those deleted since."""
    return [one for one in table.find_many([one.key for one in records]) if one is not None]


# --- earlier generations ------------------------------------------------------------------------


def drop_history(
    tables: ScopedTables, conversation: str, before: int | None, pulse: Pulse | None = None
) -> int:
    """Remove the values of earlier generations of a conversation; returns how many."""
    if before is not None:
        check_count(before, "before")
    if pulse is not None:
        check_callable(pulse, "pulse")
    latest = tables.latest_number(tables.resets.find(conversation, LATEST))
    # The latest generation is in use and is never removed.
    end = number_text(latest if before is None else min(before, latest))
    dropped = 0
    for record in tables.conversations.scan(conversation):
        _, *place = record.key
        while place[1] < end:
            count = _drop_some(tables, tuple(place))
            if not count:
                break
            dropped += count
            if pulse is not None:
                pulse(dropped)
    return dropped


def _drop_some(tables: ScopedTables, place: Key) -> int:
    """Remove one batch of values of a scope; returns how many."""
    attempts = Attempts(f"scope {place[0]}")
    while True:
        attempts.begin()
        found = islice(tables.values.scan(*place), REMOVED_AT_ONCE)
        removal = ValueRemoval(tables)
        count = removal.values([(record.key, None) for record in found])
        if removal.commit():
            return count
