"""What a log knows of sessions that their store has deleted: it goes with them, or after them.

A store deletes the graph of a session and knows nothing of logs. Until the rows here are gone
they hold what somebody wanted gone: the prompt, the metadata, what was used. Sessions below
stay, as roots: nobody has asked for them to go. A fork that nobody has adopted has no row of its
own, but what was used, folded and delivered in it stands under its name as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Final

from casstore.records.log import tree
from casstore.records.log.ground import Ground
from casstore.session import keys
from casstore.session.records import Draft, Table
from casstore.session.state import tombstone_key
from casstore.store import Store

_PAGE: Final = 256


def forget(store: Store, session: str) -> bool:
    """Remove what is known of a session that its store has deleted; was there anything?"""
    ground = Ground(store)
    if not _are_deleted(ground, [session])[0]:
        return False
    if tree.close(ground, session, cascade=False):
        return True
    # Nothing is added to what is deleted for good, so no condition is needed.
    draft = Draft(store)
    rows = [(table, row) for table in _below(ground) for row in table.scan(session)]
    for table, row in rows:
        draft.delete(table, row.key)
    draft.commit()
    return bool(rows)


def sweep(store: Store, pulse: Callable[[int], None] | None = None) -> int:
    """Remove what is known of all such sessions; of how many.

    ``pulse`` is told how many sessions were looked at; raising from it stops the work.
    """
    ground = Ground(store)
    seen = forgotten = 0
    # Whatever has usage has totals, too.
    for table in (ground.sessions, ground.totals, ground.folds, ground.inbox):
        names = (session for session, _ in groupby(table.scan(), lambda record: record.key[0]))
        while page := list(islice(names, _PAGE)):
            for session, is_deleted in zip(page, _are_deleted(ground, page), strict=True):
                forgotten += is_deleted and forget(store, session)
                seen += 1
                if pulse is not None:
                    pulse(seen)
    return forgotten


def row_keys(store: Store, session: str) -> Iterator[bytes]:
    """The keys of the rows that go with a session."""
    ground = Ground(store)
    for table in (ground.sessions, *_below(ground)):
        for record in table.scan(session):
            yield table.keys.key(record.key)


def _below(ground: Ground) -> tuple[Table, ...]:
    """What stands under the name of a session, beside its own row."""
    return ground.totals, ground.folds, ground.usage, ground.inbox


def _are_deleted(ground: Ground, sessions: list[str]) -> list[bool]:
    places = [tombstone_key(keys.session_key(session)) for session in sessions]
    return [row is not None for row in ground.store.engine.get_rows(places)]
