"""Finds the rows that keep given objects alive, by following links from child to parent.

A child's id is lower than its parents', so one pass in order of ascending ids finds every object
that reaches them. The pass reads the links of every object in the store, so it is for diagnosis,
not for routine use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from casstore.engine.protocol import Engine, ObjectInfo, Row
from casstore.maintenance.roots import ROOTS
from casstore.session import keys, pins
from casstore.session.scanning import scan
from casstore.session.state import decode_head, head_key

_FIND_BATCH: Final = 1024
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
    """The rows of one kind and one owner that keep objects alive."""

    #: session, pin (or tag), queue or attachment
    kind: str
    #: The name of the pin; otherwise the id of the session that it belongs to.
    name: str
    #: How many of its rows: revisions, batches, attachments.
    rows: int


def still_stored(engine: Engine, digests: Collection[bytes]) -> set[bytes]:
    """Those of ``digests`` that are stored."""
    wanted = list(digests)
    stored: set[bytes] = set()
    for start in range(0, len(wanted), _FIND_BATCH):
        batch = wanted[start : start + _FIND_BATCH]
        stored |= set(batch) - set(engine.missing(batch))
    return stored


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
