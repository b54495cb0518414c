"""State by where it belongs: to a runner, a binding, a bot or a workspace.

The key of a scope is a hash of its dimensions, so these are found in the context that each value
was put in first. Both functions read every value of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.records.scoped.changes import REMOVED_AT_ONCE
from casstore.records.scoped.layout import Tables, decode_value
from casstore.records.scoped.removal import Erased, Pulse, Removal
from casstore.records.scoped.runs import Runs, decode_run
from casstore.records.scoped.scope import Entry, context_of, entries
from casstore.records.scoped.scope_keys import Context
from casstore.session.arguments import check_callable, check_text
from casstore.session.attempts import Attempts
from casstore.session.records import Record

_NAMES: Final = ("runner_id", "binding_identity", "bot_id", "workspace_id")


class Where(NamedTuple):
    """The dimensions that a context must have; None: any."""

    runner_id: str | None
    binding_identity: str | None
    bot_id: str | None
    workspace_id: str | None

    def includes(self, context: Context) -> bool:
        """Has a context all of them?"""
        return all(
            wanted is None or wanted == getattr(context, name)
            for name, wanted in zip(_NAMES, self, strict=True)
        )


class Located(NamedTuple):
    """A value, and where it belongs.

    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> [found] = state.list_state(runner_id="helper")
    >>> found.scope, found.context.bot_id, found.entry.value
    ('actor', 'bot', 'de')
    """

    scope: str
    scope_key: str
    #: How often the conversation was reset before; 0 in other scopes.
    generation: int
    #: Where it was put first.
    context: Context
    entry: Entry


def check_where(where: Where) -> Where:
    """Refuse what would be everybody's state, or is no name."""
    for name, wanted in zip(_NAMES, where, strict=True):
        if wanted is not None:
            check_text(wanted, name)
    if all(wanted is None for wanted in where):
        raise InvalidInputError(f"give one of {', '.join(_NAMES)}, or more of them")
    return where


def located(tables: Tables, where: Where) -> Iterator[Located]:
    """The values that belong there and have not expired, by the key of their scope."""

    def read(record: Record) -> Located | None:
        stored = decode_value(record)
        context = context_of(tables.store, stored)
        if not where.includes(context) or not stored.is_live(tables.store.engine.now_ms()):
            return None
        scope_key, generation, _ = record.key
        return Located(
            scope_key.partition(":")[0],
            scope_key,
            int(generation),
            context,
            entries(tables, [stored])[0],
        )

    found = tables.values.read_each(tables.values.scan(), read)
    return (one for one in found if one is not None)


def delete(tables: Tables, where: Where, pulse: Pulse | None) -> Erased:
    """End the runs that belong there, then remove the values, expired ones too."""
    if pulse is not None:
        check_callable(pulse, "a pulse")
    runs = Runs(tables)
    running = tables.runs.read_each(tables.runs.scan(), decode_run)
    ended = sum([runs.end(run.id) for run in running if where.includes(run.context)])
    removed = 0
    found = tables.values.read_each(
        tables.values.scan(), lambda record: _belongs(tables, where, record)
    )
    keys = (key for key in found if key is not None)
    while batch := list(islice(keys, REMOVED_AT_ONCE)):
        removed += _remove(tables, where, batch)
        if pulse is not None:
            pulse(removed)
    return Erased(removed, ended)


def _remove(tables: Tables, where: Where, keys: Sequence[tuple[str, ...]]) -> int:
    """Remove values in one write; how many."""
    attempts = Attempts("the state of a place")
    while True:
        attempts.begin()
        # A value of this key that was put since may belong elsewhere.
        still = [
            record
            for record in tables.values.find_many(keys)
            if record is not None and _belongs(tables, where, record)
        ]
        removal = Removal(tables)
        count = removal.values([(one.key, decode_value(one).origin) for one in still])
        if removal.commit():
            return count


def _belongs(tables: Tables, where: Where, record: Record) -> tuple[str, ...] | None:
    """The key of a value that belongs there; None if it does not."""
    return record.key if where.includes(context_of(tables.store, decode_value(record))) else None
