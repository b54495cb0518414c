"""Removing values by whom they concern, or by generation: many at once, the counts kept exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from casstore.errors import ConditionFailedError, InvalidInputError
from casstore.records.scoped.changes import REMOVED_AT_ONCE, changed, forget, known, put_head
from casstore.records.scoped.layout import (
    LATEST,
    Stored,
    Tables,
    Writer,
    decode_head,
    decode_person,
    decode_value,
    latest_number,
    number_text,
)
from casstore.session.arguments import check_callable, check_count, check_text
from casstore.session.attempts import Attempts
from casstore.session.records import Draft, Record, Table, find_records

_Key = tuple[str, ...]

#: Told how many values are gone, between two writes.
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


class Removal:
    """One write that removes values, and other records with them."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._draft = Draft(tables.store)

    def values(self, wanted: Sequence[tuple[_Key, str | None]]) -> int:
        """Remove values by their keys, with an origin only those that have it; how many."""
        tables = self._tables
        places = sorted({key[:2] for key, _ in wanted})
        asked: list[tuple[Table, _Key]] = [(tables.scopes, place) for place in places]
        asked += [(tables.values, key) for key, _ in wanted]
        found = find_records(tables.store, asked)
        heads = dict(zip(places, found[: len(places)], strict=True))
        going: dict[_Key, list[Stored]] = {place: [] for place in places}
        for (key, origin), record in zip(wanted, found[len(places) :], strict=True):
            stored = None if record is None else decode_value(record)
            if stored is not None and origin in (None, stored.origin):
                going[key[:2]].append(stored)
        for place, gone in going.items():
            if not gone:
                continue
            record = heads[place]
            self._draft.expect(tables.scopes, place, record)
            head = known(None if record is None else decode_head(record), place[0])
            for stored in gone:
                forget(tables, self._draft, stored)
            put_head(tables, self._draft, (place[0], place[1]), changed(head, gone=gone))
        return sum([len(gone) for gone in going.values()])

    def record(self, table: Table, record: Record) -> None:
        """Remove a record that is as it was found."""
        self._draft.expect(table, record.key, record)
        self._draft.delete(table, record.key)

    def commit(self) -> bool:
        """Remove all of it; False, and nothing happened, if somebody has changed some."""
        try:
            self._draft.commit()
        except ConditionFailedError:
            return False
        return True


# --- everything about a person ------------------------------------------------------------------


def checked_person(person: Writer) -> Writer:
    """The type and id of a person; refused if one lacks, for that would be everybody's."""
    if not isinstance(person, tuple | list) or len(person) != 2:
        raise InvalidInputError(f"an actor is named by its type and its id, not by {person!r:.80}")
    kind, name = person
    check_text(kind, "the type of an actor")
    check_text(name, "an actor")
    if not kind or not name:
        raise InvalidInputError(f"an actor has a type and an id, unlike {person!r:.80}")
    return kind, name


def check_place(workspace_id: str | None, bot_id: str | None) -> None:
    """Refuse a place that cannot be: nothing is there, and nothing would be removed."""
    for told, what in ((workspace_id, "a workspace"), (bot_id, "a bot")):
        if told is not None:
            check_text(told, what)


def concerning(
    tables: Tables, person: Writer, workspace_id: str | None, bot_id: str | None
) -> Iterator[Record]:
    """What leads from a person to values, in the whole store or at one place of it."""
    for record in tables.people.scan(*person):
        told = decode_person(record)
        if workspace_id in (None, told.workspace_id) and bot_id in (None, told.bot_id):
            yield record


def runs_of(
    tables: Tables, person: Writer, workspace_id: str | None, bot_id: str | None
) -> Iterator[Record]:
    """What leads from an actor to its runs."""
    for record in tables.run_actors.scan(*person):
        run_workspace_id, run_bot_id = record.value
        if workspace_id in (None, run_workspace_id) and bot_id in (None, run_bot_id):
            yield record


def erase(
    tables: Tables,
    person: Writer,
    workspace_id: str | None,
    bot_id: str | None,
    pulse: Pulse | None = None,
) -> Erased:
    """Remove all that leads from a person, and what it leads to."""
    if pulse is not None:
        check_callable(pulse, "a pulse")
    values = ended = 0
    while True:
        leads = list(islice(concerning(tables, person, workspace_id, bot_id), REMOVED_AT_ONCE))
        own = list(islice(runs_of(tables, person, workspace_id, bot_id), REMOVED_AT_ONCE))
        erased = erase_found(tables, leads, own)
        values += erased.values
        ended += erased.runs
        # Fewer than there could be: these were all.
        if max(len(leads), len(own)) < REMOVED_AT_ONCE:
            return Erased(values, ended)
        if pulse is not None:
            pulse(values)


def erase_found(tables: Tables, leads: Sequence[Record], own: Sequence[Record]) -> Erased:
    """Remove in one write what these records lead to, and the records."""
    attempts = Attempts("what concerns a person")
    while True:
        attempts.begin()
        leads = _still(tables.people, leads)
        own = _still(tables.run_actors, own)
        removal = Removal(tables)
        values = removal.values([(one.key[2:], decode_person(one).origin) for one in leads])
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
    """The records as they are now; not those that are gone."""
    return [one for one in table.find_many([one.key for one in records]) if one is not None]


# --- what is not seen any more ------------------------------------------------------------------


def drop_history(
    tables: Tables, conversation: str, before: int | None, pulse: Pulse | None = None
) -> int:
    """Remove the values of earlier generations of a conversation; how many."""
    if before is not None:
        check_count(before, "a generation")
    if pulse is not None:
        check_callable(pulse, "a pulse")
    latest = latest_number(tables.resets.find(conversation, LATEST))
    # The latest is in use and stays, whatever is asked for.
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


def _drop_some(tables: Tables, place: _Key) -> int:
    """Remove values of one scope, as many as one write does; how many."""
    attempts = Attempts(f"scope {place[0]}")
    while True:
        attempts.begin()
        found = islice(tables.values.scan(*place), REMOVED_AT_ONCE)
        removal = Removal(tables)
        count = removal.values([(record.key, None) for record in found])
        if removal.commit():
            return count
