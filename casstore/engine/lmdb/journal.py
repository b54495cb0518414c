"""What is stored but not yet laid into its tables: the last row changes and names.

A small commit changes a row here and a row there, in half a dozen tables, and names its
objects in an index that is ordered by hash. Each of these is a page of its own to write. So
a transaction writes all that it changes as one entry behind the others; when enough has
gathered, the next one lays it all in place, in order, each row once.

    key      8 bytes big-endian, higher than all before
    entry    a row as others are (see ``rows``), holding a list:
             rows      [table, key, value or nil, …]
             named     digest (32) ‖ id (8), joined
             unnamed   digest (32) ‖ id (8), joined

Whoever looks a row or a name up looks here first, and only then into the table. What the
journal holds is read once for each transaction and kept; a process that has followed it
reads only what others have added.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import lmdb

from casstore.engine.lmdb.creation import INDEX
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.index import AnyTransaction as AnyTransaction
from casstore.engine.lmdb.index import find_id, index_key, names
from casstore.engine.lmdb.rows import (
    CHECKSUM_BYTES,
    JOURNAL,
    SUM_KEY,
    Gap,
    RowSum,
    find_row,
    prove_row,
    row_hash,
)
from casstore.engine.lmdb.slab import ID_BYTES as _ID_BYTES
from casstore.engine.lmdb.slab import read_id, slab_key
from casstore.engine.protocol import TABLES
from casstore.errors import CorruptionError, InvalidInputError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.hashing import DIGEST_BYTES

# How many changes gather before they are laid in place, and how many bytes. More save
# pages, and make the one commit that lays them wait longer.
SETTLE_CHANGES: Final = 512
SETTLE_BYTES: Final = 256 << 10
# A row this long has pages of its own, in the journal as in its table: it is laid at once.
_LONG_ROW_BYTES: Final = 2048
# How many rows of the tables are kept in memory, and how long they may be.
_MAX_LAID: Final = 1024
_MAX_LAID_BYTES: Final = 1280
_MAX_GAPS: Final = 1024
# Never a gap, and lower than all.
_BEFORE_ALL: Final = (b"", b"")

_TABLES: Final = frozenset(TABLES)
_NAME_BYTES: Final = DIGEST_BYTES + 8

#: The rows that changed, by table and key; None: the row went.
Changes = dict[tuple[str, bytes], bytes | None]
#: A digest, and the id of the object.
Name = tuple[bytes, int]


class Pending:
    """What the journal holds at one moment. Never changed once it was handed out."""

    __slots__ = (
        "_by_table",
        "_gaps",
        "_laid",
        "changes",
        "ids",
        "last",
        "next_id",
        "own_ids",
        "proof",
        "rows",
        "size_bytes",
        "total",
        "unnamed",
    )

    def __init__(self) -> None:
        #: The key of the last entry, and its checksum; empty if there is none.
        self.last = self.proof = b""
        self.rows: Changes = {}
        # The same by table, once somebody has asked for that.
        self._by_table: dict[str, list[tuple[bytes, bytes | None]]] | None = None
        #: The ids of objects by digest; None: the index must not be believed, it is gone.
        self.ids: dict[bytes, int | None] = {}
        #: Names of old, each a digest and an id, that the index may still hold.
        self.unnamed: set[Name] = set()
        self.changes = 0
        self.size_bytes = 0
        #: The part of the store's sum that the entries are.
        self.total = 0
        # Rows that were looked up in the tables. Those do not change while the journal grows,
        # so all states from one settling to the next share what they have found.
        self._laid: dict[tuple[str, bytes], bytes] = {}
        # And where nothing was found, by table, in order: what is new is often looked for in
        # the same gap, behind the last of its kind.
        self._gaps: dict[str, list[Gap]] = {}
        #: What writers of this process have found in the index, and the first id that no slab
        #: has, 0 if that is not known. Others change both without the journal, so a state has
        #: them only from states of this process, transaction by transaction.
        self.own_ids: dict[bytes, int] = {}
        self.next_id = 0

    def copy(self) -> Pending:
        """A state that may be added to; the tables are still those of this one."""
        other = Pending.__new__(Pending)
        other.last, other.proof = self.last, self.proof
        other.rows = self.rows.copy()
        other._by_table = None
        other.ids = self.ids.copy()
        other.unnamed = self.unnamed
        other.changes, other.size_bytes, other.total = self.changes, self.size_bytes, self.total
        other._laid, other._gaps = self._laid, self._gaps
        other.own_ids, other.next_id = self.own_ids, self.next_id
        return other

    def seen_again(self) -> Pending:
        """The same, by somebody who does not know what has happened outside of the journal."""
        other = self.copy()
        other.own_ids, other.next_id = {}, 0
        return other

    def add(self, rows: Changes, named: Mapping[bytes, int], unnamed: list[Name]) -> None:
        """Take over what a transaction changed. On a copy."""
        self.rows.update(rows)
        self.changes += len(rows) + len(named) + len(unnamed)
        if unnamed:
            self.ids.update(dict.fromkeys([digest for digest, _ in unnamed]))
            self.unnamed = self.unnamed.union(unnamed)
        self.ids.update(named)

    def find_row(
        self, txn: AnyTransaction, env: Environment, table: str, key: bytes, *, likely: bool = False
    ) -> bytes | None:
        """A row; None if it is certainly not there. ``likely`` it is, so that is tried first."""
        place = (table, key)
        if place in self.rows:
            return self.rows[place]
        laid = self._laid
        if place in laid:
            return laid[place]
        gaps = self._gaps.get(table)
        if gaps is None:
            gaps = self._gaps[table] = [_BEFORE_ALL]
        gap = gaps[bisect_right(gaps, (key, b"")) - 1]
        if gap[0] < key < gap[1]:
            return None
        database = env.tables[table]
        stored = txn.get(key, None, database) if likely else None
        found: bytes | Gap
        if stored is not None:
            found = prove_row(table, key, stored)[0]
        else:
            found = find_row(txn.cursor(database), table, key)
        if isinstance(found, tuple):
            if len(gaps) < _MAX_GAPS:
                insort(gaps, found)
            return None
        if len(found) <= _MAX_LAID_BYTES:
            if len(laid) >= _MAX_LAID:
                laid.clear()
            laid[place] = found
        return found

    def find_id(self, txn: AnyTransaction, env: Environment, digest: bytes) -> int | None:
        """The id of an object; None if it is not stored."""
        if digest in self.ids:
            return self.ids[digest]
        return find_id(env, txn, digest)

    def is_named(
        self, txn: AnyTransaction, env: Environment, digest: bytes, object_id: int
    ) -> bool:
        """Is an object known by its id? For those who have the digest from its own slab."""
        if digest in self.ids:
            return self.ids[digest] == object_id
        return names(env, txn, digest, object_id)

    def index_changes(self) -> list[tuple[bytes, bytes | None]]:
        """What changed in the index, in the order of keys; None: the row went."""
        changed: dict[bytes, bytes | None] = {index_key(*name): None for name in self.unnamed}
        for digest, object_id in self.ids.items():
            if object_id is not None:
                changed[index_key(digest, object_id)] = b""
        return sorted(changed.items())

    def changed_between(
        self, table: str, start: bytes, stop: bytes | None, *, reverse: bool
    ) -> list[tuple[bytes, bytes | None]]:
        """What changed in a part of a table, in the order of keys or its reverse."""
        if self._by_table is None:
            self._by_table = by_table(self.rows)
        changes = self._by_table.get(table)
        if not changes:
            return []
        return sorted(
            [
                (key, value)
                for key, value in changes
                if key >= start and (stop is None or key < stop)
            ],
            reverse=reverse,
        )


def by_table(rows: Changes) -> dict[str, list[tuple[bytes, bytes | None]]]:
    """Changed rows, table by table."""
    tables: dict[str, list[tuple[bytes, bytes | None]]] = {}
    for (table, key), value in rows.items():
        if table not in tables:
            tables[table] = []
        tables[table].append((key, value))
    return tables


class Journal:
    """The journal as a process follows it: the states of the last transactions."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        # By transaction: the newest that was seen, and the one before it, in which readers may
        # still be. Replaced, never changed, so that nobody needs a lock.
        self._newest = self._before = (0, Pending())

    def at(self, txn: AnyTransaction, seen: int) -> Pending:
        """What the journal holds for ``txn``, which sees the work of transaction ``seen``."""
        for number, pending in (self._newest, self._before):
            if number == seen:
                return pending
        pending = self._follow(txn)
        self.note(seen, pending)
        return pending

    def note(self, seen: int, pending: Pending) -> None:
        """Keep the state that transaction ``seen`` left, which was committed."""
        if seen > self._newest[0]:
            self._before = self._newest
            self._newest = seen, pending
        else:
            self._before = seen, pending

    def _follow(self, txn: AnyTransaction) -> Pending:
        """The state of ``txn``: from one that was seen before, or from the file alone."""
        cursor = txn.cursor(self._env.journal)
        if not cursor.first():
            return Pending()
        for _, known in (self._newest, self._before):
            # If the last is still there, so are those before it: they go all together.
            if (
                known.last
                and cursor.set_key(known.last)
                and bytes(cursor.value()).endswith(known.proof)
            ):
                known = known.seen_again()
                return _read_on(cursor, known) if cursor.next() else known
        cursor.first()
        return _read_on(cursor, Pending())


def read_pending(env: Environment, txn: AnyTransaction) -> Pending:
    """What the journal holds, from the file, every entry proven."""
    cursor = txn.cursor(env.journal)
    return _read_on(cursor, Pending()) if cursor.first() else Pending()


def _read_on(cursor: lmdb.Cursor[bytes] | lmdb.Cursor[memoryview], known: Pending) -> Pending:
    """``known`` and all entries from the cursor's on."""
    pending = known.copy()
    more = True
    while more:
        key = bytes(cursor.key())
        entry, size_bytes, hashed = open_entry(key, cursor.value())
        pending.add(*entry)
        pending.last, pending.proof = key, hashed[:CHECKSUM_BYTES]
        pending.size_bytes += size_bytes
        pending.total += int.from_bytes(hashed, "big")
        more = cursor.next()
    return pending


class Entry(NamedTuple):
    """What one transaction changed."""

    rows: Changes
    named: dict[bytes, int]
    unnamed: list[Name]


def open_entry(key: bytes, stored: bytes | memoryview) -> tuple[Entry, int, bytes]:
    """An entry as it is stored, checked; how long it is, and the hash that stands for it."""
    value, hashed = prove_row(JOURNAL, key, stored)
    return _decode(key, value), len(value), hashed


def _decode(key: bytes, value: bytes) -> Entry:
    try:
        spelled, named, unnamed = unpack_checked(value)
        rows: Changes = {}
        for at in range(0, len(spelled), 3):
            table, row_key, row = spelled[at : at + 3]
            if table not in _TABLES:
                raise ValueError(f"no table {table!r}")
            rows[table, row_key] = row
        entry = Entry(rows, dict(_split_names(named)), list(_split_names(unnamed)))
    except (TypeError, ValueError, IndexError, InvalidInputError) as exc:
        raise CorruptionError(f"entry {key.hex()} of the journal is damaged") from exc
    return entry


def _split_names(joined: bytes) -> Iterator[Name]:
    for at in range(0, len(joined), _NAME_BYTES):
        middle = at + DIGEST_BYTES
        yield joined[at:middle], read_id(joined[middle : at + _NAME_BYTES])


def _join_names(names: Iterable[Name]) -> bytes:
    return b"".join([digest + slab_key(object_id) for digest, object_id in names])


def count_names(env: Environment, txn: AnyTransaction, pending: Pending) -> int:
    """How many objects the index will name when the journal is laid in place."""
    number: int = txn.stat(env.index)["entries"]
    for key, value in pending.index_changes():
        number += (value is not None) - (txn.get(key, None, env.index) is not None)
    return number


def append(
    env: Environment,
    txn: lmdb.Transaction[bytes],
    pending: Pending,
    rows: Changes,
    named: dict[bytes, int],
    unnamed: list[Name],
) -> Pending:
    """Store what a transaction changes, in the journal or, with all before it, in place.

    Gives the state that it leaves.
    """
    after = pending.copy()
    after.add(rows, named, unnamed)
    longest = max(map(len, filter(None, rows.values())), default=0)
    if after.changes > SETTLE_CHANGES or longest > _LONG_ROW_BYTES:
        return _settled(env, txn, after)
    spelled: list[str | bytes | None] = []
    for place, value in rows.items():
        spelled += place
        spelled.append(value)
    names = b"".join([name + own.to_bytes(_ID_BYTES, "big") for name, own in named.items()])
    entry = pack_checked([spelled, names, _join_names(unnamed) if unnamed else b""])
    after.size_bytes += len(entry)
    if after.size_bytes > SETTLE_BYTES:
        return _settled(env, txn, after)
    # Transactions count up, but a store that was copied counts from the beginning.
    key = txn.id().to_bytes(8, "big")
    if key <= pending.last:
        key = (int.from_bytes(pending.last, "big") + 1).to_bytes(8, "big")
    hashed = row_hash(JOURNAL, key, entry)
    after.last, after.proof = key, hashed[:CHECKSUM_BYTES]
    if not txn.put(key, entry + after.proof, append=True, db=env.journal):
        # py-lmdb reports an out-of-order append by returning False.
        raise CorruptionError(f"{env.path}: entry {key.hex()} is not the journal's last")
    counted = int.from_bytes(hashed, "big")
    after.total += counted
    total = RowSum(txn.get(SUM_KEY))
    total.add_number(counted)
    txn.put(SUM_KEY, total.encode())
    return after


def _settled(env: Environment, txn: lmdb.Transaction[bytes], pending: Pending) -> Pending:
    """Lay everything in place; the state that this leaves."""
    _lay(env, txn, pending)
    return Pending()


def laid_rows(
    env: Environment, txn: AnyTransaction, pending: Pending, database: str
) -> Iterator[tuple[bytes, bytes]]:
    """All that a database will hold when the journal is laid in place, as it is stored."""
    stored = ((bytes(key), bytes(value)) for key, value in txn.cursor(env.databases[database]))
    changed: list[tuple[bytes, bytes | None]] = []
    if database == INDEX:
        changed = pending.index_changes()
    elif database in _TABLES:
        for key, value in pending.changed_between(database, b"", None, reverse=False):
            proof = b"" if value is None else row_hash(database, key, value)[:CHECKSUM_BYTES]
            changed.append((key, None if value is None else value + proof))
    return merge(stored, changed, reverse=False)


def laid_sum(env: Environment, txn: AnyTransaction, pending: Pending) -> RowSum:
    """What the sum over all rows will be when the journal is laid in place."""
    known = txn.get(SUM_KEY)
    total = RowSum(None if known is None else bytes(known))
    total.subtract_number(pending.total)
    for (table, key), value in pending.rows.items():
        stored = txn.get(key, None, env.tables[table])
        if stored is not None:
            total.subtract(prove_row(table, key, stored)[1])
        if value is not None:
            total.add(row_hash(table, key, value))
    return total


def settle(env: Environment, txn: lmdb.Transaction[bytes]) -> bool:
    """Lay all that the journal holds in place, so that the tables alone say it all.

    For those who go through whole tables in a transaction of their own. False if there was
    nothing to do.
    """
    pending = read_pending(env, txn)
    if not pending.last:
        return False
    _lay(env, txn, pending)
    return True


def forget_names(env: Environment, txn: lmdb.Transaction[bytes]) -> None:
    """Leave only rows in the journal: the index was made anew, and alone says what is named."""
    pending = read_pending(env, txn)
    if not pending.ids:
        return
    total = RowSum(txn.get(SUM_KEY))
    total.subtract_number(pending.total)
    txn.put(SUM_KEY, total.encode())
    txn.drop(env.journal, delete=False)
    if pending.rows:
        empty = Pending()
        # Keys go on from the last: it tells those who follow the journal that it is another.
        empty.last = pending.last
        append(env, txn, empty, pending.rows, {}, [])


def settle_now(env: Environment) -> None:
    """Lay all that the journal holds in place, in a transaction of its own."""
    with env.writing() as txn:
        if not settle(env, txn):
            txn.abort()


def _lay(env: Environment, txn: lmdb.Transaction[bytes], pending: Pending) -> None:
    """Write every row and name where it belongs, and begin the journal anew."""
    total = RowSum(txn.get(SUM_KEY))
    total.subtract_number(pending.total)
    for table, changes in by_table(pending.rows).items():
        _lay_rows(txn, env.tables[table], table, changes, total)
    _lay_names(env, txn, pending)
    if pending.last:
        txn.drop(env.journal, delete=False)
    txn.put(SUM_KEY, total.encode())


def _lay_rows(
    txn: lmdb.Transaction[bytes],
    database: lmdb._Database,
    table: str,
    changes: list[tuple[bytes, bytes | None]],
    total: RowSum,
) -> None:
    """Each row is read once and written once: when LMDB replaces a long value by a shorter
    one within a transaction, it keeps the longer run of pages, which its own verifier then
    calls damage.
    """
    puts: list[tuple[bytes, bytes]] = []
    for key, value in changes:
        stored = txn.get(key, None, database)
        if stored is not None:
            total.subtract(prove_row(table, key, stored)[1])
        if value is not None:
            hashed = row_hash(table, key, value)
            total.add(hashed)
            puts.append((key, value + hashed[:CHECKSUM_BYTES]))
        elif stored is not None:
            txn.delete(key, db=database)
    if puts:
        # In order, neighbours share the way down the tree.
        puts.sort()
        txn.cursor(database).putmulti(puts)


def _lay_names(env: Environment, txn: lmdb.Transaction[bytes], pending: Pending) -> None:
    added: list[tuple[bytes, bytes]] = []
    for key, value in pending.index_changes():
        if value is None:
            txn.delete(key, db=env.index)
        else:
            added.append((key, value))
    if added:
        _, number = txn.cursor(env.index).putmulti(added, overwrite=False)
        if number != len(added):
            # Each was looked up before it was named, and was not there.
            raise CorruptionError(f"{env.path}: the index is out of order")


def merge(
    stored: Iterator[tuple[bytes, bytes]],
    changed: list[tuple[bytes, bytes | None]],
    *,
    reverse: bool,
) -> Iterator[tuple[bytes, bytes]]:
    """Rows of a table with what changed since; both in the order of keys, or its reverse."""
    ahead = iter(changed)
    change = next(ahead, None)
    for key, value in stored:
        while change is not None and (change[0] > key if reverse else change[0] < key):
            if change[1] is not None:
                yield change[0], change[1]
            change = next(ahead, None)
        if change is None or change[0] != key:
            yield key, value
            continue
        if change[1] is not None:
            yield key, change[1]
        change = next(ahead, None)
    while change is not None:
        if change[1] is not None:
            yield change[0], change[1]
        change = next(ahead, None)
