"""What vacuum has removed from sessions and what is stored all the same.

    vacuum.removed / session / number → the digests, joined (32 bytes each)

A tag, a pin or a fork may keep a hidden node after the session has lost it. Nothing in the
session says so any more, so vacuum writes down the digests, as bytes, which keep nothing alive.
Each further vacuum looks which of them are stored still, reports who keeps them, and forgets
the others.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Final

from casstore.errors import CorruptionError
from casstore.format.hashing import DIGEST_BYTES
from casstore.maintenance.keepers import still_stored
from casstore.records.rows import Draft, Record, Table
from casstore.store import Store

_A_RECORD: Final = 512
_NUMBER_BYTES: Final = 8


def _table(store: Store) -> Table:
    return Table(store, "vacuum.removed", 2)


def remember(store: Store, session: str, digests: Collection[bytes]) -> None:
    """Write down what a session has lost."""
    draft = Draft(store)
    ordered = sorted(digests)
    for start in range(0, len(ordered), _A_RECORD):
        number = secrets.token_hex(_NUMBER_BYTES)
        draft.put(_table(store), (session, number), b"".join(ordered[start : start + _A_RECORD]))
    draft.commit()


def remembered(store: Store) -> set[bytes]:
    """All that was written down, whether or not it is still stored."""
    return {digest for record in _table(store).scan() for digest in _digests(record)}


def find_kept(store: Store) -> set[bytes]:
    """What is still stored of all that was written down; what is not is forgotten."""
    table = _table(store)
    kept: set[bytes] = set()
    for record in table.scan():
        before = _digests(record)
        stored = still_stored(store.engine, before)
        kept |= stored
        if len(stored) < len(before):
            draft = Draft(store)
            if stored:
                draft.put(table, record.key, b"".join(sorted(stored)))
            else:
                draft.delete(table, record.key)
            draft.commit()
    return kept


def _digests(record: Record) -> list[bytes]:
    joined = record.value
    if type(joined) is not bytes or len(joined) % DIGEST_BYTES:
        raise CorruptionError(f"record vacuum.removed {' / '.join(record.key)} is damaged")
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]
