"""The digests of nodes that vacuum removed from sessions, until the objects are collected.

    record vacuum.removed / session / number = the digests, joined (32 bytes each)

A tag, a pin or a fork may keep a hidden node after vacuum has removed it from its session, and
then no row of the session names it any more. So vacuum stores the digests in records, as bytes,
not as links: they keep nothing alive. Each vacuum checks which of these objects are still
stored, reports the rows that keep them, and removes the digests of the others.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Final

from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES
from casstore.maintenance.keepers import still_stored
from casstore.session.records import Draft, Record, Table
from casstore.store import Store

# How many digests one record holds at most.
_A_RECORD: Final = 512
_NUMBER_BYTES: Final = 8


def _table(store: Store) -> Table:
    return Table(store, "vacuum.removed", 2)


def remember(store: Store, session: str, digests: Collection[bytes]) -> None:
    """Store the digests of what vacuum removed from a session.

    >>> remember(store, "s", [store.put_blob(b"hidden")])
    >>> len(remembered(store))
    1
    """
    draft = Draft(store)
    ordered = sorted(digests)
    for start in range(0, len(ordered), _A_RECORD):
        number = secrets.token_hex(_NUMBER_BYTES)
        draft.put(_table(store), (session, number), b"".join(ordered[start : start + _A_RECORD]))
    draft.commit()


def remembered(store: Store) -> set[bytes]:
    """The stored digests, whether or not their objects are still stored.

    >>> remembered(store)  # nothing was removed yet
    set()
    """
    return {digest for record in _table(store).scan() for digest in _digests(record)}


def find_kept(store: Store) -> set[bytes]:
    """The digests whose objects are still stored; the others are removed from the records.

    >>> remember(store, "s", [store.put_blob(b"kept"), Digest.of_blob(b"gone")])
    >>> len(find_kept(store)), len(remembered(store))
    (1, 1)
    """
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
