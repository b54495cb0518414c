"""Finds and deletes state by runner, binding, bot or workspace.

The key of a scope is a hash of these ids, so they are read from the context in which each value was
first put. ``located`` and ``delete`` read every value of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.records.scoped.changes import REMOVED_AT_ONCE, Erased, Progress, remove_values
from casstore.records.scoped.runs import RunGrants
from casstore.records.scoped.scope import StateEntry, context_of, entries
from casstore.records.scoped.scope_keys import Context
from casstore.records.scoped.tables import ScopedTables
from casstore.session.arguments import check_callable, check_text
from casstore.session.attempts import transaction
from casstore.session.records import Draft, Record

_NAMES: Final = ("runner_id", "binding_identity", "bot_id", "workspace_id")


class ContextFilter(NamedTuple):
    """The ids that a context must have; None: any."""

    runner_id: str | None
    binding_identity: str | None
    bot_id: str | None
    workspace_id: str | None

    def includes(self, context: Context) -> bool:
        """Whether a context matches."""
        return all(
            wanted is None or wanted == getattr(context, name)
            for name, wanted in zip(_NAMES, self, strict=True)
        )


class Located(NamedTuple):
    """A value, and the scope and context it belongs to.

    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> [found] = state.list_state(runner_id="helper")
    >>> found.scope, found.context.bot_id, found.entry.value
    ('actor', 'bot', 'de')
    """

    scope: str
    scope_key: str
    #: The number of earlier resets of the conversation; 0 in other scopes.
    generation: int
    #: The context in which it was first put.
    context: Context
    entry: StateEntry


def check_where(where: ContextFilter) -> ContextFilter:
    """Require at least one valid id: without one, all state would match."""
    for name, wanted in zip(_NAMES, where, strict=True):
        if wanted is not None:
            check_text(wanted, name)
    if all(wanted is None for wanted in where):
        raise InvalidInputError(f"pass at least one of {', '.join(_NAMES)}")
    return where


def located(tables: ScopedTables, where: ContextFilter) -> Iterator[Located]:
    """The matching values that have not expired, by the key of their scope."""

    def read(record: Record) -> Located | None:
        stored = tables.values.decode(record)
        context = context_of(tables.store, stored)
        if not where.includes(context) or not stored.is_live(tables.store.engine.now_ms()):
            return None
        return Located(
            stored.scope_key.partition(":")[0],
            stored.scope_key,
            stored.generation,
            context,
            entries(tables, [stored])[0],
        )

    found = tables.values.read_each(tables.values.scan(), read)
    return (one for one in found if one is not None)


def delete(tables: ScopedTables, where: ContextFilter, progress: Progress | None) -> Erased:
    """End the matching runs, then remove the matching values, including expired ones."""
    if progress is not None:
        check_callable(progress, "progress")
    runs = RunGrants(tables)
    running = tables.runs.rows()
    ended = sum([runs.end(run.id) for run in running if where.includes(run.context)])
    removed = 0
    found = tables.values.read_each(
        tables.values.scan(), lambda record: (record.key, _matches(tables, where, record))
    )
    keys = (key for key, matches in found if matches)
    while batch := list(islice(keys, REMOVED_AT_ONCE)):
        removed += _remove(tables, where, batch)
        if progress is not None:
            progress(removed)
    return Erased(removed, ended)


@transaction("the state to delete")
def _remove(tables: ScopedTables, where: ContextFilter, keys: Sequence[tuple[str, ...]]) -> int:
    """Remove the matching values among ``keys`` in one write; returns how many."""
    draft = Draft(tables.store)
    # A value that another writer has put under one of these keys since may not match.
    still = [
        record
        for record in tables.values.find_many(keys)
        if record is not None and _matches(tables, where, record)
    ]
    origins = [(one.key, tables.values.decode(one).origin) for one in still]
    count = remove_values(tables, draft, origins)
    draft.commit()
    return count


def _matches(tables: ScopedTables, where: ContextFilter, record: Record) -> bool:
    return where.includes(context_of(tables.store, tables.values.decode(record)))
