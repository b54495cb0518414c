"""Finds the faults of a store, one by one: in its pages, rows, slabs and index.

``maintenance.check`` calls this step by step (see ``engine.faults.Checking``). Everything is read
in snapshots. LMDB trusts its pages, so they are checked first, without LMDB but within a read
transaction, which keeps writers from reusing them. Tables with damaged pages must not be read
through LMDB at all. Rows that are only in the log were checked when the log was read; its objects
are examined after those of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.faults import (
    DICTIONARY_DAMAGED,
    HEADER_DAMAGED,
    INDEX_DANGLING,
    OBJECT_DAMAGED,
    PAGE_DAMAGED,
    ROW_DAMAGED,
    ROWS_SUM_WRONG,
    SLAB_DAMAGED,
    SLABS_OVERLAP,
    Examination,
    Examined,
    Fault,
    Progress,
    Structure,
)
from casstore.engine.id_set import IdSet
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.creation import DATABASES, DICTIONARIES, INDEX, META, SLABS
from casstore.engine.lmdb.dictionaries import DictionaryShelf, open_dictionary
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.lookup import (
    PREFIX_BYTES,
    SUM_KEY,
    DigestIndex,
    RowSum,
    is_named,
    open_row,
    prove_row,
    read_key,
    seek_first,
)
from casstore.engine.lmdb.memtable import MemtableView, Unchanged, merge
from casstore.engine.lmdb.page_scan import Lost, PageFile, read_record
from casstore.engine.lmdb.reader import SlabCache, SlabReader
from casstore.engine.protocol import Row
from casstore.errors import BusyError, CasstoreError, CorruptionError
from casstore.format.digest import check_object
from casstore.format.header import CREATED_KEY, require_header

MARK_KEY: Final = b"checked"
# The name of LMDB's unnamed database in faults. It holds the records of all other databases.
_UNNAMED: Final = "main"
# The limits on the work of one read transaction, so that none is open long.
_SLABS_A_BATCH: Final = 64
_BYTES_A_BATCH: Final = 8 << 20
_NAMES_A_BATCH: Final = 4096
_BEGIN_TRIES: Final = 64
_ROWS_A_REPORT: Final = 4096


def check_header(env: Environment) -> list[Fault]:
    """Check the store header, the dictionaries, and that the ids of slabs do not overlap."""
    faults: list[Fault] = []
    with env.reading() as txn:
        try:
            require_header(lambda key: _bytes_of(txn.get(key, db=env.meta)), env.path)
        except CasstoreError as exc:
            faults.append(Fault(HEADER_DAMAGED, str(exc), table=META))
        created = _bytes_of(txn.get(CREATED_KEY, db=env.meta))
        if created is None or not created.isdigit():
            what = f"the time of creation is {created!r}"
            faults.append(Fault(HEADER_DAMAGED, what, table=META, key=CREATED_KEY))
        for key, row in txn.cursor(db=env.dictionaries):
            number = int.from_bytes(key, "big")
            try:
                open_dictionary(number, bytes(row), env.path)
            except CorruptionError as exc:
                fault = Fault(DICTIONARY_DAMAGED, str(exc), table=DICTIONARIES, key=bytes(key))
                faults.append(fault)
        ids = above = 0
        for key, value in txn.cursor(db=env.slabs):
            last_id = int.from_bytes(key, "big")
            try:
                count = slabs.count_of(value)
            except CorruptionError as exc:
                faults.append(_slab_fault(bytes(key), above, str(exc)))
                continue
            if not above < last_id - count + 1 <= last_id:
                faults.append(_overlap(bytes(key), last_id - count + 1, above))
            ids += count
            above = max(above, last_id)
        named = txn.stat(env.index)["entries"]
        if named > ids:
            what = f"the index names {named} objects, but slabs hold {ids} at the most"
            faults.append(Fault(INDEX_DANGLING, what, table=INDEX))
    return faults


def _bytes_of(row: memoryview | None) -> bytes | None:
    return None if row is None else bytes(row)


def _slab_fault(key: bytes, above: int, what: str) -> Fault:
    last_id = int.from_bytes(key, "big")
    return Fault(
        SLAB_DAMAGED, what, table=SLABS, key=key, first_id=above + 1, last_id=max(last_id, above)
    )


def _overlap(key: bytes, first_id: int, above: int) -> Fault:
    what = f"a slab starts at id {first_id}, but one before it ends at {above}"
    return Fault(SLABS_OVERLAP, what, table=SLABS, key=key)


# --- structure ------------------------------------------------------------------------------


def check_structure(env: Environment, data_path: str) -> Structure:
    """Walk the pages of all tables without LMDB, as one snapshot has them."""
    for _ in range(_BEGIN_TRIES):
        with env.reading() as txn, PageFile(data_path) as pages:
            metas = [meta for meta in pages.metas() if meta.transaction == txn.id()]
            if metas:
                return _walk_tables(pages, metas[0].main.root)
        # Two commits since the transaction began: its meta page was overwritten.
    raise BusyError(
        f"commits to {env.path} come faster than its meta pages can be read; check again"
    )


def _walk_tables(pages: PageFile, root: int) -> Structure:
    visited = IdSet()
    faults: list[Fault] = []
    unsafe: set[str] = set()

    def visit(page: int, count: int) -> bool:
        fresh = page not in visited
        visited.add(page)
        return fresh

    def note(table: str) -> Callable[[Lost], None]:
        def lost(part: Lost) -> None:
            unsafe.add(table)
            faults.append(Fault(PAGE_DAMAGED, part.why, table=table, key=part.low))

        return lost

    records: dict[str, tuple[int, int]] = {}
    for _, entry in pages.walk(root, note(_UNNAMED), visit):
        if entry.is_database and entry.value is not None:
            record = read_record(entry.value)
            records[entry.key.rstrip(b"\0").decode(errors="replace")] = record.root, record.entries
    if _UNNAMED in unsafe:
        return Structure(faults, frozenset((*DATABASES, _UNNAMED)))
    for table in DATABASES:
        if table not in records:
            note(table)(Lost(root, b"", None, f"table {table} is not there"))
            continue
        start, entries = records[table]
        lost = note(table)
        found = 0
        for page, entry in pages.walk(start, lost, visit):
            found += 1
            if entry.value is None and pages.value(entry) is None:
                why = f"page {entry.run}, which holds a long value, is damaged"
                lost(Lost(page, entry.key, None, why))
        if table not in unsafe and found != entries:
            lost(Lost(start, b"", None, f"{found} entries where {entries} should be"))
    return Structure(faults, frozenset(unsafe))


# --- rows -----------------------------------------------------------------------------------


def check_rows(
    env: Environment, tables: Sequence[str], progress: Progress | None, *, whole: bool
) -> list[Fault]:
    """Check rows, and with ``whole`` the sum over all rows if ``tables`` are all tables.

    In one snapshot: else the sum could differ because of a commit.
    """
    faults: list[Fault] = []
    total = RowSum()
    seen = 0
    with env.reading() as txn:
        for table in tables:
            for key, stored in txn.cursor(db=env.tables[table]):
                name = bytes(key)
                try:
                    total.add(prove_row(table, name, stored)[1])
                except CorruptionError as exc:
                    faults.append(Fault(ROW_DAMAGED, str(exc), table=table, key=name))
                seen += 1
                if progress is not None and not seen % _ROWS_A_REPORT:
                    progress(seen)
        # The sum is not compared if a row is damaged or a table left out: it would differ.
        known = RowSum(_bytes_of(txn.get(SUM_KEY)))
        if not faults and whole and set(tables) == set(env.tables) and not total.equals(known):
            what = "the rows are not those last written: some are older or missing"
            faults.append(Fault(ROWS_SUM_WRONG, what, table=_UNNAMED, key=SUM_KEY))
    return faults


def readable_rows(env: Environment, table: str, start: bytes, limit: int) -> list[Row]:
    """At most ``limit`` rows from the key ``start`` on; damaged ones are left out."""
    with env.snapshot() as (txn, view):
        changed = view.changed_between(table, start, None, reverse=False)
        rows = merge(_readable(env, txn, table, start), changed, reverse=False)
        return [Row(*row) for row in islice(rows, limit)]


def _readable(
    env: Environment, txn: lmdb.Transaction[memoryview], table: str, start: bytes
) -> Iterator[tuple[bytes, bytes]]:
    cursor = txn.cursor(db=env.tables[table])
    more = seek_first(cursor, start)
    while more:
        key = bytes(cursor.key())
        try:
            yield key, open_row(table, key, cursor.value())
        except CorruptionError:
            # ``check_rows`` has reported it.
            pass
        more = cursor.next()


# --- objects ----------------------------------------------------------------------------------


def examine(
    env: Environment,
    compressor: Compressor,
    after: int,
    content: Callable[[int], bool] | None,
) -> Examination:
    """Examine the objects of the next slabs with ids above ``after``: of the tables, then the log.

    ``content(id)`` returns whether to read and check an object's bytes; None: of no object.
    """
    found = Examination([], [], None)
    with env.snapshot() as (txn, view):
        reader = SlabReader(txn.cursor(db=env.slabs), SlabCache(0), compressor, view)
        cursor = txn.cursor(db=env.slabs)
        more = cursor.set_range(slabs.slab_key(after + 1))
        # The end of the slab before: packing may have joined it to this one since the last call.
        above = int.from_bytes(cursor.key(), "big") if more and cursor.prev() else 0
        if more:
            cursor.set_range(slabs.slab_key(after + 1))
        size_bytes = 0
        for _ in range(_SLABS_A_BATCH):
            if not more or size_bytes > _BYTES_A_BATCH:
                break
            key = bytes(cursor.key())
            try:
                directory = slabs.read_directory(key, cursor.value())
            except CorruptionError as exc:
                found.faults.append(_slab_fault(key, max(above, after), str(exc)))
            else:
                if directory.first_id <= above:
                    found.faults.append(_overlap(key, directory.first_id, above))
                size_bytes += _examine_slab(
                    env, txn, view, reader, directory, after, content, found
                )
            above = after = int.from_bytes(key, "big")
            more = cursor.next()
        if not more:
            for key, value in view.slabs():
                directory = slabs.read_directory(key, value)
                _examine_slab(env, txn, view, reader, directory, after, content, found)
    return found._replace(after=after if more else None)


def _examine_slab(
    env: Environment,
    txn: lmdb.Transaction[memoryview],
    view: MemtableView,
    reader: SlabReader,
    directory: slabs.SlabDirectory,
    after: int,
    content: Callable[[int], bool] | None,
    found: Examination,
) -> int:
    child_at = 0
    size_bytes = 0
    for position in range(directory.objects):
        object_id = directory.first_id + position
        children = directory.children(position, child_at)
        child_at += directory.child_counts[position]
        kind = directory.kinds[position] & ~slabs.KEEPS_LINKS
        if object_id <= after or kind == slabs.DEAD:
            continue
        digest = directory.digest(position)
        named = is_named(txn, env, view, digest, object_id)
        one = Examined(object_id, digest, kind, children, named)
        if named and content is not None and content(object_id):
            one = _with_content(reader, one)
            size_bytes += 0 if one.item is None else len(one.item.data)
        found.objects.append(one)
    return size_bytes


def _with_content(reader: SlabReader, one: Examined) -> Examined:
    try:
        item = reader.object(one.id)
        check_object(one.digest, item.kind, item.data)
        links = tuple([reader.digest(child) for child in one.children])
    except CorruptionError as exc:
        return one._replace(fault=Fault(OBJECT_DAMAGED, str(exc), one.digest))
    return one._replace(item=item, links=links)


def find_ids(env: Environment, digests: Sequence[bytes]) -> list[int | None]:
    """The ids of these digests by the log and the index, in one snapshot."""
    ids: list[int | None] = []
    with env.snapshot() as (txn, view):
        index = DigestIndex(env, txn)
        for digest in digests:
            found = view.find_id(digest)
            ids.append(_indexed(index, digest) if isinstance(found, Unchanged) else found)
    return ids


def _indexed(index: DigestIndex, digest: bytes) -> int | None:
    try:
        return index.find(digest)
    except CorruptionError:
        # The check of the index reports it; no read reaches the object through this row.
        return None


def find_names(env: Environment, ids: Sequence[int]) -> list[bytes | None]:
    """The digests under which the index names these ids, in one snapshot."""
    names: list[bytes | None] = []
    with env.snapshot() as (txn, view):
        cursor = txn.cursor(db=env.slabs)
        for object_id in ids:
            recent = view.slab_of(object_id)
            if recent is not None:
                directory = slabs.read_directory(*recent)
                digest: bytes | None = directory.digest(object_id - directory.first_id)
            else:
                digest = _digest_at(cursor, object_id)
            named = digest is not None and is_named(txn, env, view, digest, object_id)
            names.append(digest if named else None)
    return names


def check_index(
    env: Environment, excused: Callable[[int], bool], progress: Progress | None
) -> list[Fault]:
    """Find index rows that lead to no object or to another one, or name a digest twice."""
    faults: list[Fault] = []
    start = b""
    seen = 0
    # The digests found so far with the same first bytes, by digest the key of the index row. Two
    # rows for one digest are a fault.
    alike: dict[bytes, bytes] = {}
    while True:
        with env.reading() as txn:
            cursor = txn.cursor(db=env.index)
            more = cursor.set_range(start) if start else cursor.first()
            slab = txn.cursor(db=env.slabs)
            for _ in range(_NAMES_A_BATCH):
                if not more:
                    return faults
                key = bytes(cursor.key())
                # In the same snapshot as the name, so that no commit comes in between.
                faults += _check_name(slab, key, bytes(cursor.value()), excused, alike)
                start = key + b"\0"
                more = cursor.next()
                seen += 1
        if progress is not None:
            progress(seen)


def _check_name(
    slab: lmdb.Cursor[memoryview],
    key: bytes,
    value: bytes,
    excused: Callable[[int], bool],
    alike: dict[bytes, bytes],
) -> list[Fault]:
    """The faults of one row of the index."""
    prefix = key[:PREFIX_BYTES]
    try:
        object_id = read_key(key)
        if value:
            raise CorruptionError(f"row {key.hex()} of the index has a value")
    except CorruptionError as exc:
        return [Fault(INDEX_DANGLING, str(exc), table=INDEX, key=key)]
    if excused(object_id):
        return []
    digest = _digest_at(slab, object_id)
    if digest is None or digest[:PREFIX_BYTES] != prefix:
        what = f"the index leads from {prefix.hex()} to id {object_id}, which has no such digest"
        return [Fault(INDEX_DANGLING, what, table=INDEX, key=key)]
    if alike and not next(iter(alike)).startswith(prefix):
        alike.clear()
    if digest in alike:
        what = f"the index names {digest.hex()} twice"
        return [Fault(INDEX_DANGLING, what, digest, INDEX, key)]
    alike[digest] = key
    return []


def _digest_at(cursor: lmdb.Cursor[memoryview], object_id: int) -> bytes | None:
    """The digest that a slab lists under an id; None if no slab does, or the object is dead."""
    if not 0 < object_id <= slabs.MAX_ID or not cursor.set_range(slabs.slab_key(object_id)):
        return None
    value = cursor.value()
    try:
        position = object_id - (int.from_bytes(cursor.key(), "big") - slabs.count_of(value) + 1)
        if position < 0 or slabs.is_dead_at(value, position):
            return None
        return slabs.digest_at(value, position)
    except CorruptionError:
        return None


# --- the mark ---------------------------------------------------------------------------------


def read_mark(env: Environment) -> bytes | None:
    """What the last check passed to ``write_mark``; None if there was none."""
    with env.reading() as txn:
        return _bytes_of(txn.get(MARK_KEY, db=env.meta))


def write_mark(env: Environment, mark: bytes) -> None:
    """Save bytes for the next check."""
    env.require_writable()
    with env.writing() as txn:
        txn.put(MARK_KEY, mark, db=env.meta)


def fresh_compressor(env: Environment) -> Compressor:
    """A compressor without cached dictionaries, so that the check reads them from the file."""
    return Compressor(DictionaryShelf(env).load)
