"""A write as the arguments of one statement: arrays, digests sorted, each key once.

Objects are named by their place in one sorted list of digests, and so are the children they link
to: the server locks in that order, and all writers alike. Of several changes to a row the last
one counts, so it is the only one sent. Every key that the write looks at or changes has a lock, by
a number that is made from it here; two keys that share a number merely wait for each other.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from zlib import crc32

from casstore.engine.compression import Compressor
from casstore.engine.postgres.arrays import Blobs, Ints, Longs
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


class Request(NamedTuple):
    """What the statement is told of a write; who makes it, and when, comes before."""

    #: The numbers of its keys, and whether others may share them.
    locks: dict[int, bool]
    arguments: tuple[Any, ...]
    #: The digests of its objects, each once, in the order given.
    digests: list[bytes]

    def spelled(self, client: int) -> tuple[Any, ...]:
        """All that there is to tell, if a client with this number makes it."""
        if len(self.locks) > MAX_LOCKS:
            return (True, Longs(), Ints(), *self.arguments)
        ordered = sorted([*self.locks.items(), (client, False)])
        return (
            False,
            Longs([number for number, _ in ordered]),
            Ints([int(is_shared) for _, is_shared in ordered]),
            *self.arguments,
        )


def prepare(write: Write, store: int, compressor: Compressor) -> Request:
    """Spell a write that was validated."""
    last: dict[tuple[str, bytes], RowChange] = {}
    for change in write.rows:
        last[change.table, change.key] = change
    objects = _Objects(write, compressor)
    return Request(
        _locks(write, last, store),
        (
            *_conditions(write),
            *objects.arguments,
            *_rows(last),
            Blobs(sorted(set(write.deletes))),
        ),
        objects.digests,
    )


def lock_number(store: int, kind: int, key: bytes) -> int:
    """The number of the lock of one key of a table; ``CLIENT`` stands for none of them.

    The upper half is the store's own, and no other store of the database has it. Many keys have
    the same lower half: they wait for each other without need.
    """
    return (store & _UPPER) ^ crc32(key, kind)


def _locks(write: Write, last: dict[tuple[str, bytes], RowChange], store: int) -> dict[int, bool]:
    """The numbers to lock, and whether others may share them: who only looks lets others look."""
    locks: dict[int, bool] = {}
    for condition in write.conditions:
        if not isinstance(condition, ObjectsExist):
            locks[lock_number(store, TABLE_NUMBERS[condition.table], condition.key)] = True
    for table, key in last:
        locks[lock_number(store, TABLE_NUMBERS[table], key)] = False
    return locks


def _conditions(write: Write) -> tuple[Any, ...]:
    ops, places, tables, offsets = Ints(), Ints(), Ints(), Ints()
    keys, values = Blobs(), Blobs()
    for place, condition in enumerate(write.conditions):
        if isinstance(condition, ObjectsExist):
            continue
        ops.append(_OPS[type(condition)])
        places.append(place)
        tables.append(TABLE_NUMBERS[condition.table])
        keys.append(condition.key)
        # The third field is what the row is compared with, whatever the condition.
        values.append(condition[2])
        if isinstance(condition, RowLive | RowLapsed):
            offsets.append(min(condition.offset, _FAR))
        else:
            offsets.append(0)
    return ops, places, tables, keys, values, offsets


class _Objects:
    """The objects of a write, what they link to, and what is asked to be there."""

    def __init__(self, write: Write, compressor: Compressor) -> None:
        given: dict[bytes, NewObject] = {}
        for item in write.objects:
            # What came first under a digest stays (P2).
            given.setdefault(item.digest, item)
        self.digests = list(given)
        asked = [
            (place, digest)
            for place, condition in enumerate(write.conditions)
            if isinstance(condition, ObjectsExist)
            for digest in condition.digests
        ]
        names = set(given)
        for item in given.values():
            names.update(item.children)
        names.update([digest for _, digest in asked])
        ordered = sorted(names)
        # Arrays of the server count from one.
        place_of = {digest: place for place, digest in enumerate(ordered, 1)}
        kinds, codecs, sizes, children = Ints(), Ints(), Ints(), Ints()
        starts, ends = Ints(), Ints()
        contents = Blobs()
        total_bytes = 0
        for item in given.values():
            codec, _, content = compressor.compress(bytes(item.data))
            total_bytes += len(content)
            kinds.append(item.kind)
            codecs.append(codec)
            sizes.append(len(item.data))
            starts.append(len(children) + 1)
            children.extend([place_of[child] for child in item.children])
            ends.append(len(children))
            contents.append(content)
        if total_bytes > MAX_WRITE_BYTES:
            raise InvalidInputError(
                f"a write of {total_bytes} bytes at once (at most {MAX_WRITE_BYTES})"
            )
        self.arguments: tuple[Any, ...] = (
            Blobs(ordered),
            Ints([place_of[digest] for _, digest in asked]),
            Ints([place for place, _ in asked]),
            Ints([place_of[digest] for digest in given]),
            Blobs(self.digests),
            kinds,
            codecs,
            sizes,
            starts,
            ends,
            children,
            contents,
        )


def _rows(last: dict[tuple[str, bytes], RowChange]) -> tuple[Any, ...]:
    put_tables, gone_tables = Ints(), Ints()
    put_keys, put_values, gone_keys = Blobs(), Blobs(), Blobs()
    stamp_rows, stamp_offsets, stamp_adds = Ints(), Ints(), Longs()
    total_bytes = 0
    for change in last.values():
        number = TABLE_NUMBERS[change.table]
        if isinstance(change, DeleteRow):
            gone_tables.append(number)
            gone_keys.append(bytes(change.key))
            continue
        put_tables.append(number)
        put_keys.append(bytes(change.key))
        put_values.append(bytes(change.value))
        total_bytes += len(change.value)
        for offset, add_ms in change.stamps:
            stamp_rows.append(len(put_values))
            stamp_offsets.append(offset)
            stamp_adds.append(add_ms)
    if total_bytes > MAX_WRITE_BYTES:
        raise InvalidInputError(f"rows of {total_bytes} bytes at once (at most {MAX_WRITE_BYTES})")
    return (
        put_tables, put_keys, put_values, stamp_rows, stamp_offsets, stamp_adds,
        gone_tables, gone_keys,
    )  # fmt: skip


#: How many arguments there are, those before included.
ARGUMENTS: Final = 35
