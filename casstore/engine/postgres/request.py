"""A write as the parameters of one statement: few arrays, each digest and each key once.

Objects are named by their place in one list of digests, and so are the children they link to.
Small numbers that belong together share an array: what a server does with an array costs more than
what is in it. Of several changes to a row the last one counts, so it is the only one sent. Every
key that the write looks at or changes has a lock, by a number that is made from it here; two keys
that share a number merely wait for each other.
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
    INT4_ARRAY,
    INT8,
    INT8_ARRAY,
    TRUE,
    blobs,
    ints,
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

#: How the tables of the protocol are numbered. A number is never given to another table.
TABLE_NUMBERS: Final = {
    "attachments": 1,
    "heads": 2,
    "history": 3,
    "leases": 4,
    "nodes": 5,
    "pins": 6,
    "queue": 7,
    "receipts": 8,
    "records": 9,
    "retention": 10,
    "sessions": 11,
    "tombstones": 12,
    "usage": 13,
}

#: Where the tables have their numbers, among locks.
CLIENT: Final = 0
_UPPER: Final = 0x7FFF_FFFF_0000_0000

# More keys than this have the store to themselves for the moment of their write: the server's
# table of locks is shared by all, and it is not large.
MAX_LOCKS: Final = 64
# An array, and a message, end at a gigabyte; compressed content may be longer than it was.
MAX_WRITE_BYTES: Final = 768 << 20

_OPS: Final = {RowIs: 0, RowStarts: 1, RowLive: 2, RowLapsed: 3}
# No row is as long; the server counts with four bytes.
_FAR: Final = 1 << 30
_NO_LOCKS: Final = longs([])

#: What the parameters of the function are, in its order; those of a request come last.
PARAMETER_TYPES: Final = (
    INT8, BYTEA, INT8, INT8, BOOL,
    BOOL, INT8_ARRAY,
    INT4_ARRAY, BYTEA_ARRAY, BYTEA_ARRAY,
    BYTEA_ARRAY, INT4_ARRAY,
    INT4_ARRAY, INT4_ARRAY, BYTEA_ARRAY,
    INT4_ARRAY, BYTEA_ARRAY, BYTEA_ARRAY, INT8_ARRAY,
    INT4_ARRAY, BYTEA_ARRAY, BYTEA_ARRAY,
)  # fmt: skip


class Request(NamedTuple):
    """What the statement is told of a write; who makes it, and when, comes before."""

    store: int
    #: The numbers of its keys, and whether others may share them.
    locks: dict[int, bool]
    #: Parameters as they are sent; None where there is nothing to say.
    parameters: list[bytes | None]
    #: The digests of its objects, each once, in the order given.
    digests: list[bytes]

    def spelled(
        self, client: bytes, number: int, given_ms: int | None, *, lasting: bool
    ) -> list[bytes | None]:
        """All that there is to tell if it is the write of this number of a client."""
        if len(self.locks) > MAX_LOCKS:
            alone, numbers = TRUE, _NO_LOCKS
        else:
            locks = {**self.locks, lock_number(self.store, CLIENT, client): False}
            alone = FALSE
            # Those that others may share come inverted.
            numbers = longs([~lock if locks[lock] else lock for lock in sorted(locks)])
        return [
            long(self.store),
            client,
            long(number),
            None if given_ms is None else long(given_ms),
            TRUE if lasting else FALSE,
            alone,
            numbers,
            *self.parameters,
        ]


class Answer(NamedTuple):
    """What the server says became of a write."""

    now_ms: int
    new_objects: int
    #: The condition that does not hold, and what stands in its row.
    failed: int | None
    actual: bytes | None
    #: An object that is not there.
    missing: bytes | None
    #: None if the write had been made before, by a call whose answer was lost.
    epoch: int | None
    watched: bool
    #: If some of the objects were there already: for each its number, 0 if it was.
    stored: list[int] | None


def read_answer(result: PGresult) -> Answer:
    """Read the one row that a write is answered with."""
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
    """Spell a write that was validated."""
    last: dict[tuple[str, bytes], RowChange] = {}
    for change in write.rows:
        last[change[0], change[1]] = change
    upper = store & _UPPER
    # Who only looks lets others look.
    locks: dict[int, bool] = {}
    parameters: list[bytes | None] = []
    asked = _conditions(write, upper, locks, parameters)
    digests = _objects(write, asked, compressor, parameters)
    _rows(last, upper, locks, parameters)
    parameters.append(blobs(sorted(set(write.deletes))) if write.deletes else None)
    return Request(store, locks, parameters, digests)


def lock_number(store: int, kind: int, key: bytes) -> int:
    """The number of the lock of one key of a table; ``CLIENT`` stands for none of them.

    The upper half is the store's own, and no other store of the database has it. Many keys have
    the same lower half: they wait for each other without need.
    """
    return (store & _UPPER) ^ crc32(key, kind)


def _conditions(
    write: Write, upper: int, locks: dict[int, bool], parameters: list[bytes | None]
) -> list[tuple[int, bytes]]:
    """Add what rows are asked for; returns the objects asked for, each with its condition."""
    ops: list[int] = []
    keys: list[bytes] = []
    values: list[bytes | None] = []
    asked: list[tuple[int, bytes]] = []
    for place, condition in enumerate(write.conditions):
        if isinstance(condition, ObjectsExist):
            asked.extend([(place, digest) for digest in condition.digests])
            continue
        # The third field is what the row is compared with, whatever the condition.
        table, key, value = condition[:3]
        kind = TABLE_NUMBERS[table]
        offset = min(condition[3], _FAR) if len(condition) == 4 else 0
        ops += (_OPS[type(condition)], place, kind, offset)
        keys.append(key)
        values.append(value)
        locks[upper ^ crc32(key, kind)] = True
    if ops:
        parameters += (ints(ops), blobs(keys), blobs(values))
    else:
        parameters += (None, None, None)
    return asked


def _objects(
    write: Write,
    asked: list[tuple[int, bytes]],
    compressor: Compressor,
    parameters: list[bytes | None],
) -> list[bytes]:
    """Add the objects, what they link to, and what is asked to be there."""
    given: dict[bytes, NewObject] = {}
    for item in write.objects:
        # What came first under a digest stays (P2).
        given.setdefault(item.digest, item)
    digests = list(given)
    # Arrays of the server count from one. The objects come first, in their order.
    place_of = {digest: place for place, digest in enumerate(digests, 1)}
    names = list(digests)
    for item in given.values():
        for child in item.children:
            if child not in place_of:
                names.append(child)
                place_of[child] = len(names)
    for _, digest in asked:
        if digest not in place_of:
            names.append(digest)
            place_of[digest] = len(names)
    numbers: list[int] = []
    children: list[int] = []
    contents: list[bytes] = []
    total_bytes = 0
    for _, kind, data, links in given.values():
        codec, _, content = compressor.compress(bytes(data))
        total_bytes += len(content)
        first = len(children) + 1
        children += [place_of[child] for child in links]
        numbers += (kind, codec, len(data), first, len(children))
        contents.append(content)
    if total_bytes > MAX_WRITE_BYTES:
        raise InvalidInputError(
            f"a write of {total_bytes} bytes at once (at most {MAX_WRITE_BYTES})"
        )
    wanted: list[int] = []
    for place, digest in asked:
        wanted += (place_of[digest], place)
    parameters += (
        blobs(names) if names else None,
        ints(wanted) if wanted else None,
        ints(numbers) if numbers else None,
        ints(children) if children else None,
        blobs(contents) if contents else None,
    )
    return digests


def _rows(
    last: dict[tuple[str, bytes], RowChange],
    upper: int,
    locks: dict[int, bool],
    parameters: list[bytes | None],
) -> None:
    """Add how rows change."""
    put_kinds: list[int] = []
    put_keys: list[bytes] = []
    put_values: list[bytes] = []
    stamps: list[int] = []
    gone_kinds: list[int] = []
    gone_keys: list[bytes] = []
    total_bytes = 0
    for change in last.values():
        kind, key = TABLE_NUMBERS[change[0]], bytes(change[1])
        locks[upper ^ crc32(key, kind)] = False
        if isinstance(change, DeleteRow):
            gone_kinds.append(kind)
            gone_keys.append(key)
            continue
        put_kinds.append(kind)
        put_keys.append(key)
        put_values.append(bytes(change.value))
        total_bytes += len(change.value)
        for offset, add_ms in change.stamps:
            stamps += (len(put_values), offset, add_ms)
    if total_bytes > MAX_WRITE_BYTES:
        raise InvalidInputError(f"rows of {total_bytes} bytes at once (at most {MAX_WRITE_BYTES})")
    if put_kinds:
        parameters += (ints(put_kinds), blobs(put_keys), blobs(put_values))
    else:
        parameters += (None, None, None)
    parameters.append(longs(stamps) if stamps else None)
    if gone_kinds:
        parameters += (ints(gone_kinds), blobs(gone_keys))
    else:
        parameters += (None, None)
