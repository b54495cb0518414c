"""The two look-ups in a store's tables: a row by its key, and an object's id by its digest.

**Rows.** Digests prove objects; rows have no digest, and they decide which objects are reachable.
So each row has a checksum over its table, key and value: a damaged row is never returned as data
(P1). The store also has one sum over all rows (``RowSum``): if a crash reverts a page to an older
state, each of its rows is valid, and only the sum shows that they are not the latest.

    stored row  =  value ‖ first 8 bytes of h
    h           =  BLAKE3(length of table, 1 byte ‖ table ‖ length of key, 2 bytes ‖ key ‖ value)
    sum         =  all h added as big-endian numbers, modulo 2^256; in the unnamed database,
                   whose page every transaction writes anyway

**The index** leads from a digest to the id of the object.

    key      first 6 bytes of the digest ‖ id, big-endian, without leading zero bytes
    value    none

This row is the object's *name*: an object without it cannot be found, and gc deletes objects by
deleting their names. The whole digest is in the directory of the object's slab (several objects
stored as one value, see ``slab``), where links and reads need it anyway; a second copy here would
be most of the index. So a look-up finds a candidate, rarely several, and compares the digest in its
slab. Two digests with the same first bytes are two rows: no answer depends on the first bytes
alone, even if an attacker chose the content. If the digest of a candidate differs, the directory
that it was read from must pass its checksum, or a damaged digest would look like an absent object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import lmdb

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.memtable import MemtableView, Unchanged
from casstore.engine.protocol import MAX_ROW_KEY_BYTES, TABLES
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES, plain_hash

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment


CHECKSUM_BYTES: Final = 8
SUM_KEY: Final = b"rows_sum"
_SUM_RANGE: Final = 1 << (8 * DIGEST_BYTES)


# The input to a row's hash starts with the length of the table's name, and the name; then
# the length of the key.
_TABLE_PREFIXES: Final = {table: bytes((len(table),)) + table.encode() for table in TABLES}
_KEY_LENGTHS: Final = [length.to_bytes(2, "big") for length in range(MAX_ROW_KEY_BYTES + 1)]


def row_hash(table: str, key: bytes, value: bytes) -> bytes:
    """The hash ``h`` of one row (see above)."""
    return plain_hash(b"".join((_TABLE_PREFIXES[table], _KEY_LENGTHS[len(key)], key, value)))


#: The value of a row, without its checksum; and the hash of the row.
ProvenRow = tuple[bytes, bytes]


def prove_row(table: str, key: bytes, stored: bytes | memoryview) -> ProvenRow:
    """The value and hash of a stored row; CorruptionError if its checksum is wrong."""
    whole = bytes(stored)
    value = whole[:-CHECKSUM_BYTES]
    try:
        length = _KEY_LENGTHS[len(key)]
    except IndexError as exc:
        # LMDB trusts the key length in a page, also of a damaged one.
        raise CorruptionError(
            f"a row of table {table} has a key of {len(key)} bytes; the limit is "
            f"{MAX_ROW_KEY_BYTES}"
        ) from exc
    # As ``row_hash`` does; inlined for speed, because every look-up of a row comes through here.
    hashed = plain_hash(b"".join((_TABLE_PREFIXES[table], length, key, value)))
    if whole[-CHECKSUM_BYTES:] != hashed[:CHECKSUM_BYTES]:
        # Also reached by a row that is too short to have a checksum.
        raise CorruptionError(f"row {key.hex()} of table {table} is damaged")
    return value, hashed


def open_row(table: str, key: bytes, stored: bytes | memoryview) -> bytes:
    """The value of a stored row; CorruptionError if its checksum is wrong."""
    return prove_row(table, key, stored)[0]


#: Two neighbouring keys, between which a table has no row.
Gap = tuple[bytes, bytes]
# The ends of a gap before the first key, and after the last.
_FIRST_KEY: Final = b""
_BEHIND_ALL: Final = b"\xff" * (MAX_ROW_KEY_BYTES + 1)


def find_row(
    cursor: lmdb.Cursor[bytes] | lmdb.Cursor[memoryview], table: str, key: bytes
) -> bytes | Gap:
    """The value of the row ``key``; if the row certainly does not exist, the gap around the key.

    A damaged key misleads a search, but never far: on a leaf page to the neighbour of the damaged
    row, on a branch page to where the order of keys is broken. So if the row is not found, both of
    its neighbours must pass their checksums and enclose the key; otherwise CorruptionError.

    ``cursor`` must be new: a used one would search its own page first, not descend from the root.
    """
    below, above = _FIRST_KEY, _BEHIND_ALL
    if cursor.set_range(key):
        name, stored = cursor.item()
        if name == key:
            return prove_row(table, key, stored)[0]
        above = bytes(name)
        prove_row(table, above, stored)
        more = cursor.prev()
    else:
        more = cursor.last()
    if more:
        name, stored = cursor.item()
        below = bytes(name)
        prove_row(table, below, stored)
    if not below < key < above:
        raise _out_of_order(table, key)
    return below, above


def likely_row(
    txn: lmdb.Transaction[bytes] | lmdb.Transaction[memoryview],
    database: lmdb._Database,
    table: str,
    key: bytes,
) -> bytes | None:
    """The value of the row ``key``; None if it certainly does not exist.

    Fast if the row exists; slower than ``find_row`` if not.
    """
    stored = txn.get(key, None, database)
    if stored is not None:
        return prove_row(table, key, stored)[0]
    found = find_row(txn.cursor(database), table, key)
    return None if isinstance(found, tuple) else found


def _out_of_order(table: str, key: bytes) -> CorruptionError:
    return CorruptionError(f"the keys of table {table} are out of order around {key.hex()}")


# A bound of a scan may be longer than any key: a caller that continues a scan adds a byte to the
# last key. LMDB refuses to seek to such a bound, so its first 511 bytes are sought instead. At most
# one key lies between the two, that of exactly these 511 bytes; the comparisons below exclude it.


def seek_first(cursor: lmdb.Cursor[memoryview], start: bytes) -> bool:
    """Move to the first key that is not below ``start``."""
    found = cursor.set_range(start[:MAX_ROW_KEY_BYTES]) if start else cursor.first()
    return cursor.next() if found and bytes(cursor.key()) < start else found


def seek_last(cursor: lmdb.Cursor[memoryview], stop: bytes | None) -> bool:
    """Move to the last key below ``stop``."""
    if stop is None:
        return cursor.last()
    found = cursor.set_range(stop[:MAX_ROW_KEY_BYTES]) if stop else cursor.first()
    if not found:
        return cursor.last()
    return bytes(cursor.key()) < stop or cursor.prev()


class RowSum:
    """The sum of the hashes of all rows of a store. Each change of a row subtracts and adds one."""

    __slots__ = ("_total",)

    def __init__(self, stored: bytes | None = None) -> None:
        self._total = 0 if stored is None else int.from_bytes(stored, "big")

    def add(self, hashed: bytes) -> None:
        """Add a row by its hash."""
        self._total += int.from_bytes(hashed, "big")

    def subtract(self, hashed: bytes) -> None:
        """Subtract a row by its hash."""
        self._total -= int.from_bytes(hashed, "big")

    def equals(self, other: RowSum) -> bool:
        """True if both sums are equal."""
        return self.encode() == other.encode()

    def encode(self) -> bytes:
        """The sum as it is stored."""
        return (self._total % _SUM_RANGE).to_bytes(DIGEST_BYTES, "big")


PREFIX_BYTES: Final = 6
_MAX_PROVEN: Final = 4096

AnyTransaction: TypeAlias = "lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]"
AnyCursor: TypeAlias = "lmdb.Cursor[bytes] | lmdb.Cursor[memoryview]"


def index_key(digest: bytes, object_id: int) -> bytes:
    """The key of the index row that names an object."""
    return digest[:PREFIX_BYTES] + object_id.to_bytes((object_id.bit_length() + 7) >> 3, "big")


def read_key(key: bytes) -> int:
    """The id in the key of an index row."""
    encoded = key[PREFIX_BYTES:]
    if not 0 < len(encoded) <= slabs.ID_BYTES or not encoded[0]:
        raise CorruptionError(f"row {key.hex()} of the index is damaged")
    return int.from_bytes(encoded, "big")


class Proven:
    """A cache of ids by digest, each of which was compared with the digest in its slab.

    It saves reading the slab again: a session links to the same objects many times. Ids are never
    reused, so a cached pair stays true. The object may have lost its name since: the user of the
    cache looks that up in the index every time.
    """

    __slots__ = ("ids",)

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}

    def note(self, digest: bytes, object_id: int) -> None:
        """Cache a pair: the slab lists this digest under this id."""
        if len(self.ids) >= _MAX_PROVEN:
            self.ids = {}
        self.ids[digest] = object_id


class DigestIndex:
    """Looks digests up in the index, within one transaction."""

    __slots__ = ("_digest_of", "_env", "_names", "_slabs", "_txn", "has_row")

    def __init__(
        self,
        env: Environment,
        txn: AnyTransaction,
        digest_of: Callable[[int], bytes] | None = None,
    ) -> None:
        """``digest_of`` returns the digest that a slab lists under an id, for callers that read
        slabs anyway.
        """
        self._env = env
        self._txn = txn
        self._names: AnyCursor = txn.cursor(db=env.index)
        #: Returns True if the index has a row with this key (``index_key``). For callers that know
        #: the id already.
        self.has_row: Callable[[bytes], bool] = self._names.set_key
        self._slabs: AnyCursor | None = None
        self._digest_of = digest_of

    def find(self, digest: bytes) -> int | None:
        """The id of an object; None if the index certainly has no name for it."""
        prefix, names = digest[:PREFIX_BYTES], self._names
        more = names.set_range(prefix)
        while more:
            key = bytes(names.key())
            if key[:PREFIX_BYTES] != prefix:
                break
            object_id = read_key(key)
            if self._listed(object_id) == digest:
                return object_id
            # The candidate is another object with the same first bytes, or its slab is damaged.
            self._require_prefix(object_id, prefix)
            more = names.next()
        return None

    def find_many(self, digests: Sequence[bytes], proven: Proven) -> list[int | None]:
        """The ids of objects, in order; ``proven`` saves reading their slabs."""
        names, ids = self._names, proven.ids
        found: list[int | None] = []
        for digest in digests:
            known = ids.get(digest)
            if known is None or not names.set_key(index_key(digest, known)):
                prefix = digest[:PREFIX_BYTES]
                known = None
                # The common case: a new object, and no digest in the index has its prefix.
                if names.set_range(prefix) and names.key()[:PREFIX_BYTES] == prefix:
                    known = self.find(digest)
                    if known is not None:
                        proven.note(digest, known)
            found.append(known)
        return found

    def between(self, first: bytes, last: bytes) -> Iterator[tuple[bytes, int]]:
        """The digests from ``first`` to ``last`` in order, each with its id."""
        names = self._names
        more = names.set_range(first[:PREFIX_BYTES])
        # Digests with the same first bytes: the index orders them by id, so they are sorted here.
        alike: list[tuple[bytes, int]] = []
        prefix = b""
        while more:
            key = bytes(names.key())
            if key[:PREFIX_BYTES] != prefix:
                yield from sorted(alike)
                alike, prefix = [], key[:PREFIX_BYTES]
                if prefix > last[:PREFIX_BYTES]:
                    return
            object_id = read_key(key)
            digest = self._listed(object_id)
            if digest[:PREFIX_BYTES] != prefix:
                self._require_prefix(object_id, prefix)
            if first <= digest <= last:
                alike.append((digest, object_id))
            more = names.next()
        yield from sorted(alike)

    def _listed(self, object_id: int) -> bytes:
        """The digest that a slab lists under an id; the slab's checksum is not compared."""
        if self._digest_of is not None:
            return self._digest_of(object_id)
        _, value, position = self._seek(object_id)
        return slabs.digest_at(value, position)

    def _require_prefix(self, object_id: int, prefix: bytes) -> None:
        """Raise unless a directory with a valid checksum lists such a digest under this id."""
        key, value, position = self._seek(object_id)
        if slabs.read_directory(key, value).digest(position)[:PREFIX_BYTES] != prefix:
            raise self._astray(object_id)

    def _seek(self, object_id: int) -> tuple[bytes | memoryview, bytes | memoryview, int]:
        """The key and value of the slab that holds this id, and the position of the id in it."""
        cursor = self._slabs
        if cursor is None:
            cursor = self._slabs = self._txn.cursor(db=self._env.slabs)
        if cursor.set_range(slabs.slab_key(object_id)):
            key, value = cursor.item()
            position = object_id - int.from_bytes(key, "big") + slabs.count_of(value) - 1
            if position >= 0:
                return key, value, position
        raise self._astray(object_id)

    def _astray(self, object_id: int) -> CorruptionError:
        return CorruptionError(
            f"the index of {self._env.path} leads to id {object_id}: no slab lists a digest with "
            "these first bytes there"
        )


def find_id(env: Environment, txn: AnyTransaction, digest: bytes) -> int | None:
    """The id that the index has for a digest; None if it has none."""
    return DigestIndex(env, txn).find(digest)


def is_named(
    txn: AnyTransaction, env: Environment, view: MemtableView | None, digest: bytes, object_id: int
) -> bool:
    """True if a look-up of this digest finds this id.

    ``view``: the commits that the tables lack, which decide first; None: only the table ``index``
    decides.
    """
    if view is not None:
        recent = view.find_id(digest)
        if not isinstance(recent, Unchanged):
            return recent == object_id
    return 0 < object_id <= slabs.MAX_ID and (
        txn.get(index_key(digest, object_id), None, env.index) is not None
    )
