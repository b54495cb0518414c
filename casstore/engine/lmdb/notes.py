"""Notes that writers leave for the garbage collector: rows that they wrote, objects put again.

    collection   "open" → token (16) ‖ until (8)         a collection is running: the announcement
                 "c" ‖ number (8) → table (1) ‖ key       a row that was written meanwhile
    meta         "leftovers" → nothing                    slabs may hold objects without names
                 "collected" → LSN (8)                    the commit at which one last completed
    touches      number (8) → id (8) ‖ time (8)           an object that was put again

A collector reads rows and objects in many short transactions, and commits continue meanwhile. It
announces itself first. From then on every transaction that writes rows to the tables notes their
keys, and the collector reads those rows again before it removes anything. Without a collector, the
usual case, this costs a transaction one look-up.

Putting an object again restarts its grace period. The object is stored already, in a slab with the
time of the first put, so the new time is stored in a *touch*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import lmdb

from casstore.engine.lmdb import slab as slabs
from casstore.engine.protocol import TABLES, RowKey
from casstore.errors import CorruptionError

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment

TOKEN_BYTES: Final = 16
_OPEN: Final = b"open"
_LEFTOVERS: Final = b"leftovers"
COLLECTED_KEY: Final = b"collected"
_CHANGE: Final = b"c"
_BEHIND_CHANGES: Final = b"d"
_NUMBER_BYTES: Final = 8
_TIME_BYTES: Final = 8
_TABLE_NUMBERS: Final = {table: bytes((number,)) for number, table in enumerate(TABLES)}
# After this time an announcement expires, so that a killed collector does not make writers take
# notes for ever. A running collector renews its announcement long before.
OPEN_MS: Final = 3_600_000
# An object that was put or touched less than this time ago is not touched again.
TOUCH_INTERVAL_MS: Final = 60_000
_REMEMBERED_TOUCHES: Final = 4096

#: A transaction of either kind.
Txn: TypeAlias = "lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]"


class Touch(NamedTuple):
    """An object that was put again, and when."""

    object_id: int
    at_ms: int


# --- for writers ----------------------------------------------------------------------------


def note_rows(
    env: Environment, txn: lmdb.Transaction[bytes], places: Iterable[tuple[str, bytes]], now_ms: int
) -> None:
    """Note for the collector, if one is announced, that these rows were written."""
    is_open = txn.get(_OPEN, None, env.collection)
    if is_open is None:
        return
    if int.from_bytes(is_open[TOKEN_BYTES:], "big") <= now_ms:
        # Expired: the collector was killed; or it runs, and will see that its announcement is gone.
        txn.delete(_OPEN, db=env.collection)
        return
    number = _next_change(env, txn)
    for table, key in places:
        txn.put(
            _CHANGE + number.to_bytes(_NUMBER_BYTES, "big"),
            _TABLE_NUMBERS[table] + key,
            db=env.collection,
        )
        number += 1


def _next_change(env: Environment, txn: lmdb.Transaction[bytes]) -> int:
    with txn.cursor(env.collection) as cursor:
        found = cursor.prev() if cursor.set_range(_BEHIND_CHANGES) else cursor.last()
        if found and cursor.key()[:1] == _CHANGE:
            return int.from_bytes(cursor.key()[1:], "big") + 1
        return 1


class RecentTouches:
    """When objects were last stored or touched, so that they are not touched repeatedly."""

    def __init__(self) -> None:
        self._at_ms: dict[int, int] = {}

    def is_young(self, object_id: int, now_ms: int, stored_at_ms: Callable[[int], int]) -> bool:
        """True if this object was stored or touched less than TOUCH_INTERVAL_MS ago.

        ``stored_at_ms`` is called for an object whose time this process does not remember.
        """
        at_ms = self._at_ms.get(object_id)
        if at_ms is None:
            at_ms = stored_at_ms(object_id)
            self.remember(object_id, at_ms)
        return at_ms <= now_ms < at_ms + TOUCH_INTERVAL_MS

    def remember(self, object_id: int, at_ms: int) -> None:
        """Record when an object was stored or touched."""
        if len(self._at_ms) >= _REMEMBERED_TOUCHES:
            # What is forgotten costs a read of the slab, or a superfluous touch.
            self._at_ms.clear()
        self._at_ms[object_id] = at_ms


def touch(
    env: Environment, txn: lmdb.Transaction[bytes], object_ids: Iterable[int], now_ms: int
) -> None:
    """Record that these objects were put again now."""
    with txn.cursor(env.touches) as cursor:
        number = int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 1
    for object_id in object_ids:
        txn.put(
            number.to_bytes(_NUMBER_BYTES, "big"),
            slabs.slab_key(object_id) + now_ms.to_bytes(_TIME_BYTES, "big"),
            db=env.touches,
        )
        number += 1


# --- for the collector ------------------------------------------------------------------------


def announce(
    env: Environment, txn: lmdb.Transaction[bytes], token: bytes, now_ms: int, *, first: bool
) -> None:
    """Begin or renew the announcement of a collection; ``first``: begin, and drop earlier notes."""
    if first:
        txn.drop(env.collection, delete=False)
    txn.put(_OPEN, token + (now_ms + OPEN_MS).to_bytes(_TIME_BYTES, "big"), db=env.collection)


def is_announced(env: Environment, txn: Txn, token: bytes) -> bool:
    """True if writers still note rows for the collector with this token."""
    is_open = txn.get(_OPEN, None, env.collection)
    return is_open is not None and bytes(is_open[:TOKEN_BYTES]) == token


def end(env: Environment, txn: lmdb.Transaction[bytes]) -> None:
    """Withdraw the announcement, so that writers note no more rows; drop all notes."""
    txn.drop(env.collection, delete=False)


def changes_after(env: Environment, txn: Txn, number: int) -> Iterator[tuple[int, RowKey]]:
    """The notes of rows with higher numbers than ``number``, each with its number."""
    with txn.cursor(env.collection) as cursor:
        more = cursor.set_range(_CHANGE + (number + 1).to_bytes(_NUMBER_BYTES, "big"))
        while more:
            name, row = bytes(cursor.key()), bytes(cursor.value())
            if name[:1] != _CHANGE:
                return
            if not row or row[0] >= len(TABLES):
                raise CorruptionError(
                    f"note {name.hex()} of {env.path}, which names a changed row to gc, is damaged"
                )
            yield int.from_bytes(name[1:], "big"), RowKey(TABLES[row[0]], row[1:])
            more = cursor.next()


def touches_after(env: Environment, txn: Txn, number: int) -> Iterator[tuple[int, Touch]]:
    """The touches with higher numbers than ``number``, each with its number."""
    with txn.cursor(env.touches) as cursor:
        more = cursor.set_range((number + 1).to_bytes(_NUMBER_BYTES, "big"))
        while more:
            value = bytes(cursor.value())
            if len(value) != slabs.ID_BYTES + _TIME_BYTES:
                raise CorruptionError(f"a touch of {env.path} is damaged")
            touched = Touch(
                int.from_bytes(value[: slabs.ID_BYTES], "big"),
                int.from_bytes(value[slabs.ID_BYTES :], "big"),
            )
            yield int.from_bytes(cursor.key(), "big"), touched
            more = cursor.next()


def forget_touches(
    env: Environment, txn: lmdb.Transaction[bytes], before_ms: int, limit: int
) -> None:
    """Remove at most ``limit`` of the oldest touches, if they are from before ``before_ms``.

    The last touch stays: the next number is one more than its number, and a collector asks for
    numbers above the highest it has seen.
    """
    with txn.cursor(env.touches) as cursor:
        last = cursor.key() if cursor.last() else b""
        more = cursor.first()
        while more and limit and cursor.key() != last:
            if int.from_bytes(cursor.value()[slabs.ID_BYTES :], "big") >= before_ms:
                return
            # After a deletion, the cursor is on the next row.
            more = cursor.delete()
            limit -= 1


def has_leftovers(env: Environment) -> bool:
    """True if slabs may hold objects without names: a collection has deleted names since."""
    with env.reading() as txn:
        return txn.get(_LEFTOVERS, None, env.meta) is not None


def note_leftovers(env: Environment, txn: lmdb.Transaction[bytes], *, there: bool) -> None:
    """Set whether slabs may hold objects without names."""
    if there:
        txn.put(_LEFTOVERS, b"", db=env.meta)
    else:
        txn.delete(_LEFTOVERS, db=env.meta)


def note_collected(env: Environment, txn: lmdb.Transaction[bytes], lsn: int) -> None:
    """Record that a collection completed at this commit."""
    txn.put(COLLECTED_KEY, lsn.to_bytes(_NUMBER_BYTES, "big"), db=env.meta)


def collected_at(env: Environment, txn: Txn) -> int:
    """The commit at which a collection last completed; 0: none has."""
    found = txn.get(COLLECTED_KEY, None, env.meta)
    return 0 if found is None else int.from_bytes(found, "big")
