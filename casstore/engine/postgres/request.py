"""Encodes a write as the parameters of one statement: two arrays, each digest and key once.

Objects and children are referred to by their position in one list of digests. All integers are in
one array and all byte strings in another, in the order in which the function ``write`` in
``tables`` reads them. Of several changes to a row only the last is sent. Every key that the write
checks or changes has an advisory lock, whose number is computed from the key here; two keys with
the same number only wait for each other.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from zlib import crc32

from psycopg.pq.abc import PGresult

from casstore.engine.compression import Compressor
from casstore.engine.postgres.arrays import (
    BOOL,
    BYTEA,
    BYTEA_ARRAY,
    FALSE,
    INT4,
    INT8,
    INT8_ARRAY,
    TRUE,
    blobs,
    int4,
    long,
    longs,
    read_longs,
)
from casstore.engine.protocol import (
    DeleteRow,
    NewObject,
    ObjectsExist,
    RowChange,
    RowIs,
    RowLapsed,
    RowLive,
    RowStarts,
    Write,
)
from casstore.errors import InvalidInputError

#: The numbers of the protocol's tables. A number is never reused; 5 and 13 belonged to tables that
#: no longer exist.
TABLE_NUMBERS: Final = {
    "attachments": 1,
    "heads": 2,
    "history": 3,
    "leases": 4,
    "pins": 6,
    "queue": 7,
    "receipts": 8,
    "records": 9,
    "retention": 10,
    "sessions": 11,
    "tombstones": 12,
}

#: In place of a table's number in the number of a lock: the lock is that of a client.
CLIENT: Final = 0
# The bits of a lock number that come from the store's number.
_UPPER: Final = 0x7FFF_FFFF_0000_0000

# A write with more keys than this takes the store's lock exclusively: the server's lock table is
# shared by all clients and small.
MAX_LOCKS: Final = 64
# The limit on a write as encoded. The server limits an array, and a message, to one gigabyte.
MAX_WRITE_BYTES: Final = 768 << 20

_OPS: Final = {RowIs: 0, RowStarts: 1, RowLive: 2, RowLapsed: 3}
# The highest offset of a time that is sent. It is beyond the end of any row, and fits into the four
# bytes that the server uses for offsets.
_FAR: Final = 1 << 30

#: The types of the function's parameters, in order.
PARAMETER_TYPES: Final = (
    BYTEA, INT8, INT8, BOOL, INT8_ARRAY,
    INT4, INT4, INT4, INT4, INT4, INT4, INT4, INT4,
    INT8_ARRAY, INT4, INT4, INT4, INT4,
    BYTEA_ARRAY, INT4, INT4,
)  # fmt: skip


class Request(NamedTuple):
    """The parameters of a write, except the client, its number and the time."""

    store: int
    #: The lock numbers of its keys; True if the lock is shared, because the key is only checked.
    locks: dict[int, bool]
    parameters: list[bytes]
    #: The digests of its objects, each once, in order.
    digests: list[bytes]

    def encoded(
        self, client: bytes, number: int, given_ms: int | None, *, lasting: bool
    ) -> list[bytes | None]:
        """All parameters. ``number``: of this write, among those of the connection ``client``."""
        if len(self.locks) > MAX_LOCKS:
            locks = [self.store]
        else:
            shared = {**self.locks, lock_number(self.store, CLIENT, client): False}
            locks = [~lock if shared[lock] else lock for lock in sorted(shared)]
            locks.insert(0, ~self.store)
        return [
            client,
            long(number),
            None if given_ms is None else long(given_ms),
            TRUE if lasting else FALSE,
            longs(locks),
            *self.parameters,
        ]


class Answer(NamedTuple):
    """The server's result of a write."""

    now_ms: int
    new_objects: int
    #: The position of the condition that failed, and the value of its row.
    failed: int | None
    actual: bytes | None
    #: The digest of a child or required object that is missing.
    missing: bytes | None
    #: The epoch of the write (see ``collection``); None if the write was made before, by a call
    #: whose answer was lost.
    epoch: int | None
    #: True if listeners are registered, so that the writer must notify them.
    watched: bool
    #: If some objects were stored already: for each object its id if it is new, else 0.
    stored: list[int] | None


def read_answer(result: PGresult) -> Answer:
    """Decode the one row that a write returns."""
    now_ms, new, failed, actual, missing, epoch, watched, stored = [
        result.get_value(0, column) for column in range(8)
    ]
    assert now_ms is not None
    assert new is not None
    return Answer(
        int.from_bytes(now_ms, "big", signed=True),
        int.from_bytes(new, "big"),
        None if failed is None else int.from_bytes(failed, "big"),
        actual,
        missing,
        None if epoch is None else int.from_bytes(epoch, "big"),
        watched == TRUE,
        None if stored is None else read_longs(stored),
    )


def prepare(write: Write, store: int, compressor: Compressor) -> Request:
    """Encode a validated write."""
    objects = _Objects(write, compressor)
    upper = store & _UPPER
    # Conditions only need shared locks.
    locks: dict[int, bool] = {}
    ops: list[int] = []
    op_keys: list[bytes] = []
    op_values: list[bytes | None] = []
    for place, condition in enumerate(write.conditions):
        if isinstance(condition, ObjectsExist):
            continue
        # The third field is the value to compare with, in every condition.
        key, kind = condition[1], TABLE_NUMBERS[condition[0]]
        offset = min(condition[3], _FAR) if len(condition) == 4 else 0
        ops += (_OPS[type(condition)], place, kind, offset)
        op_keys.append(key)
        op_values.append(condition[2])
        locks[upper ^ crc32(key, kind)] = True

    last: dict[tuple[str, bytes], RowChange] = {}
    for change in write.rows:
        last[change[0], change[1]] = change
    put_kinds: list[int] = []
    put_keys: list[bytes] = []
    put_values: list[bytes] = []
    stamps: list[int] = []
    gone_kinds: list[int] = []
    gone_keys: list[bytes] = []
    for change in last.values():
        key, kind = change[1], TABLE_NUMBERS[change[0]]
        locks[upper ^ crc32(key, kind)] = False
        if isinstance(change, DeleteRow):
            gone_kinds.append(kind)
            gone_keys.append(key)
            continue
        put_kinds.append(kind)
        put_keys.append(key)
        put_values.append(change.value)
        for offset, add_ms in change.stamps:
            stamps += (len(put_values), offset, add_ms)
    deletes = sorted(set(write.deletes))

    strings = blobs(
        [
            *objects.names, *objects.contents, *op_keys, *op_values, *put_keys, *put_values,
            *gone_keys, *deletes,
        ]
    )  # fmt: skip
    if len(strings) > MAX_WRITE_BYTES:
        raise InvalidInputError(
            f"a write of {len(strings)} bytes is too long; the limit is {MAX_WRITE_BYTES}"
        )
    asked, named, given, put = (
        len(op_keys),
        len(objects.names),
        len(objects.contents),
        len(put_keys),
    )
    orders_at = 4 * asked + 5 * given
    stamps_at = orders_at + given + put
    tail = [*stamps, *objects.wanted, *gone_kinds]
    numbers = longs(
        [
            *ops, *objects.numbers(stamps_at + len(tail)), *objects.order, *put_kinds, *tail,
            *objects.children,
        ]
    )  # fmt: skip
    head = (
        asked, len(objects.wanted) // 2, named, given, put, len(stamps) // 3, len(gone_keys),
        len(deletes),
    )  # fmt: skip
    return Request(
        store,
        locks,
        [
            *map(int4, head),
            numbers,
            *map(int4, (4 * asked, orders_at, orders_at + given, stamps_at)),
            strings,
            *map(int4, (named + given, named + given + 2 * asked)),
        ],
        objects.digests,
    )


def lock_number(store: int, kind: int, key: bytes) -> int:
    """The lock number of one key of a table; ``CLIENT`` is for the locks of clients.

    The upper half identifies the store within the database. Different keys may have the same lower
    half: then they wait for each other without need.
    """
    return (store & _UPPER) ^ crc32(key, kind)


class _Objects:
    """The objects of a write, their children, and the objects that conditions require."""

    def __init__(self, write: Write, compressor: Compressor) -> None:
        given: dict[bytes, NewObject] = {}
        for item in write.objects:
            # The first object with a digest counts (P2).
            given.setdefault(item[0], item)
        # All writers store objects in the order of digests, so they cannot deadlock.
        self.digests = sorted(given)
        # SQL arrays count from one. The objects come first.
        place_of = {digest: place for place, digest in enumerate(self.digests, 1)}
        self.order = [place_of[digest] for digest in given]
        self._numbers: list[int] = []
        self.children: list[int] = []
        self.contents: list[bytes] = []
        children = self.children
        total_bytes = 0
        for digest in self.digests:
            _, kind, data, links = given[digest]
            codec, _, content = compressor.compress(bytes(data))
            total_bytes += len(content)
            if total_bytes > MAX_WRITE_BYTES:
                raise InvalidInputError(
                    f"a write is too long; the limit is {MAX_WRITE_BYTES} bytes"
                )
            first = len(children) + 1
            for child in links:
                children.append(place_of.setdefault(child, len(place_of) + 1))
            self._numbers += (kind, codec, len(data), first, len(children))
            self.contents.append(content)
        self.wanted: list[int] = []
        for at, condition in enumerate(write.conditions):
            if isinstance(condition, ObjectsExist):
                for digest in condition.digests:
                    self.wanted += (place_of.setdefault(digest, len(place_of) + 1), at)
        self.names = list(place_of)

    def numbers(self, children_at: int) -> list[int]:
        """Five numbers for each object: kind, codec, size, positions of its first and last child.

        ``children_at``: where the children begin in the array of integers.
        """
        numbers = self._numbers
        numbers[3::5] = [first + children_at for first in numbers[3::5]]
        numbers[4::5] = [last + children_at for last in numbers[4::5]]
        return numbers
