"""Erases the values and runs of a person: by ``erase_actor``, or together with its sessions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from casstore.errors import CorruptionError, InvalidInputError
from casstore.records.schema import Key, RowPlace
from casstore.records.scoped.changes import REMOVED_AT_ONCE, Erased, Progress, remove_values
from casstore.records.scoped.scope_keys import ACTOR_TYPE
from casstore.records.scoped.tables import ScopedTables, Writer
from casstore.session.arguments import check_callable, check_text, list_of
from casstore.session.attempts import read_again, transaction
from casstore.session.records import Draft, Record, Table, row_links
from casstore.store import Store

_VALUE: Final = "value"
_RUN: Final = "run"


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
    progress: Progress | None = None,
) -> Erased:
    """Remove the index rows of a person, and the values and runs they point to."""
    if progress is not None:
        check_callable(progress, "progress")
    values = ended = 0
    while True:
        leads = list(islice(concerning(tables, person, workspace_id, bot_id), REMOVED_AT_ONCE))
        own = list(islice(runs_of(tables, person, workspace_id, bot_id), REMOVED_AT_ONCE))
        erased = erase_found(tables, [one.key for one in leads], [one.key for one in own])
        values += erased.values
        ended += erased.runs
        # A short batch is the last one.
        if max(len(leads), len(own)) < REMOVED_AT_ONCE:
            return Erased(values, ended)
        if progress is not None:
            progress(values)


@transaction("the state of a person")
def erase_found(tables: ScopedTables, leads: Sequence[Key], own: Sequence[Key]) -> Erased:
    """Remove these index rows, and the values and runs they point to, in one write."""
    draft = Draft(tables.store)
    people = _still(tables.people, leads)
    actors = _still(tables.run_actors, own)
    wanted = [(one.key[2:], tables.people.decode(one).origin) for one in people]
    values = remove_values(tables, draft, wanted)
    runs = _still(tables.runs, [one.key[2:] for one in actors])
    for table, records in (
        (tables.people, people),
        (tables.run_actors, actors),
        (tables.runs, runs),
    ):
        for record in records:
            draft.expect(table, record.key, record)
            draft.delete(table, record.key)
    draft.commit()
    return Erased(values, len(runs))


def _still(table: Table, keys: Sequence[Key]) -> list[Record]:
    """The current records of these keys, without those deleted since."""
    return [one for one in table.find_many(keys) if one is not None]


# --- together with sessions -----------------------------------------------------------------------


class ActorErasure:
    """Finds and erases values written by or about an actor, for ``maintenance.erasure``.

    ``actor_of`` returns the type and id of the actor for a subject of sessions; by default its id
    is the subject's name. ``workspace_id`` and ``bot_id`` as for ``erase_actor``.

    >>> from casstore.maintenance import erasure
    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> providers = [ActorErasure()]
    >>> found = erasure.plan(store, "anna", providers=providers)
    >>> erasure.execute(store, found, providers=providers).records_erased
    1
    """

    def __init__(
        self,
        actor_of: Callable[[str], Writer] | None = None,
        *,
        workspace_id: str | None = None,
        bot_id: str | None = None,
    ) -> None:
        if actor_of is not None:
            check_callable(actor_of, "actor_of")
        check_place(workspace_id, bot_id)
        self._actor_of = actor_of or (lambda subject: (ACTOR_TYPE, subject))
        self._place = (workspace_id, bot_id)

    @property
    def name(self) -> str:
        """The name of the record system."""
        return "scoped"

    def find(self, store: Store, subject: str) -> Sequence[str]:
        """The values and runs of the actor of a subject, each as a text that ``erase`` accepts."""
        tables, person = ScopedTables(store), checked_person(self._actor_of(subject))
        found = [_encode(_VALUE, one.key) for one in concerning(tables, person, *self._place)]
        return found + [_encode(_RUN, one.key) for one in runs_of(tables, person, *self._place)]

    def roots(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        """The digests of the objects that the values and runs in ``found`` link to."""
        for table, key in self._places(store, found):
            record = table.find(*key)
            if record is not None:
                yield from row_links(record.row)

    def rows(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        """The keys of the rows of the values and runs in ``found``."""
        for table, key in self._places(store, found):
            yield table.keys.key(key)

    def stays(self, store: Store, found: Sequence[str]) -> Sequence[Any]:
        """Always empty: scoped state has no holds or seals."""
        return ()

    def recipients(self, store: Store, found: Sequence[str]) -> Sequence[str]:
        """Always empty: scoped state does not record that third parties received it."""
        return ()

    def _places(self, store: Store, found: Sequence[str]) -> Iterator[RowPlace]:
        """The rows of the values and runs found."""
        tables = ScopedTables(store)
        for kind, key in map(_read, list_of(found, "found")):
            yield (tables.values if kind == _VALUE else tables.runs, key[2:])

    def erase(self, store: Store, subject: str, found: Sequence[str]) -> int:
        """Remove the values and runs in ``found``; returns how many were removed."""
        tables, found = ScopedTables(store), list_of(found, "found")
        erased = 0
        for start in range(0, len(found), REMOVED_AT_ONCE):
            entries = [_read(one) for one in found[start : start + REMOVED_AT_ONCE]]
            leads = [key for kind, key in entries if kind == _VALUE]
            own = [key for kind, key in entries if kind == _RUN]
            erased += sum(erase_found(tables, leads, own))
        return erased


def _encode(kind: str, key: tuple[str, ...]) -> str:
    return json.dumps([kind, *key], ensure_ascii=False)


def _read(text: str) -> tuple[str, tuple[str, ...]]:
    try:
        kind, *key = json.loads(text)
        if (kind, len(key)) not in ((_VALUE, 5), (_RUN, 3)):
            raise ValueError("neither a value nor a run")
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(
            f"found must be the result of ActorErasure.find, got the item {text!r:.80}"
        ) from exc
    return kind, tuple(key)
