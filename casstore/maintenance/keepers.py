"""The rows that keep objects alive, and the digests that vacuum looks up there.

``find_keepers`` follows links from child to parent. A child's id is lower than its parents', so one
pass in order of ascending ids finds every object that reaches the given ones. The pass reads the
links of every object in the store, so it is for diagnosis, not for routine use.

A tag, a pin or a fork may keep a hidden node after vacuum has removed it from its session, and
then no row of the session names it any more. So vacuum stores the digests of removed nodes in
records, as bytes, not as links: they keep nothing alive. Each vacuum checks which of these objects
are still stored, reports the rows that keep them, and removes the digests of the others:

    record vacuum.removed / session / number = the digests, joined (32 bytes each)
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from casstore.engine.protocol import Engine, ObjectInfo, Row
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES
from casstore.maintenance.roots import ROOTS
from casstore.session import keys, pins
from casstore.session.records import Draft, Record, Table
from casstore.session.scanning import scan
from casstore.session.state import decode_head, head_key
from casstore.store import Store

# How many digests one record holds at most.
_A_RECORD: Final = 512
_NUMBER_BYTES: Final = 8
_PAGE: Final = 4096
# How many ids one step of the pass covers: their objects are in memory at once.
_WINDOW: Final = 1 << 16

_KINDS: Final = {
    "heads": "session",
    "history": "session",
    "pins": "pin",
    "queue": "queue",
    "attachments": "attachment",
}


class Keeper(NamedTuple):
    """The rows of one kind and one owner that keep objects alive.

    Attributes:
        kind: session, pin, queue or attachment
        name: the name of the pin, otherwise the session
        rows: its rows: revisions, batches, attachments
    """

    kind: str
    name: str
    rows: int


def find_keepers(engine: Engine, digests: Collection[bytes]) -> tuple[Keeper, ...]:
    """The owners of all rows that reach any of these objects, by kind and name."""
    if not digests:
        return ()
    reaching = _reaching(engine, digests)
    found: Counter[tuple[str, str]] = Counter()
    for table in ROOTS.tables:
        for row in scan(engine, table, b"", None):
            if not reaching.isdisjoint(ROOTS.named(table, row)):
                found[_KINDS.get(table, table), _name(engine, table, row)] += 1
    return tuple([Keeper(*who, rows) for who, rows in sorted(found.items())])


def _reaching(engine: Engine, digests: Collection[bytes]) -> set[bytes]:
    """The digests of these objects and of all objects that reach them."""
    reaching = set(digests)
    ids: set[int] = set()
    for info in _ascending(engine):
        if info.digest in reaching or not ids.isdisjoint(info.children):
            ids.add(info.id)
            reaching.add(info.digest)
    return reaching


def _ascending(engine: Engine) -> Iterator[ObjectInfo]:
    newest = engine.scan_objects(limit=1)
    stop = newest[0].id + 1 if newest else 0
    for low in range(0, stop, _WINDOW):
        window: list[ObjectInfo] = []
        before = min(low + _WINDOW, stop)
        while before > low:
            page = engine.scan_objects(before=before, limit=_PAGE)
            window += [info for info in page if info.id >= low]
            before = page[-1].id if page else low
        yield from reversed(window)


def _name(engine: Engine, table: str, row: Row) -> str:
    if table == "pins":
        return pins.decode_pin(row.value).name
    if table in ("heads", "history"):
        long_id = decode_head(row.value).long_id
        if long_id is not None:
            return long_id
    if b"\0" not in row.key:
        return row.key.hex()
    key = keys.session_part(row.key)
    session = keys.session_of(key)
    if session is not None:
        return session
    head = engine.get_rows([head_key(key)])[0]
    return (None if head is None else decode_head(head).long_id) or key.hex()


# --- what vacuum removed ------------------------------------------------------------------------


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
        stored = set(before).difference(store.engine.missing(before))
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
