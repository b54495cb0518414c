"""A damaged store, dug out page by page: what proves itself is taken, wherever it lies.

LMDB is not asked. What the tree of the newest meta page reaches counts first; then the tree
of the meta page before it, which is the state one commit earlier; then pages that nothing
leads to. Those may be left over from any time. Objects and slabs prove themselves whatever
their age: ids are not given twice and a digest names its bytes. A row of an old page is true
but may be outdated, so such rows count only where the newest tree has lost the place for
them. Of several the greatest is taken, because most rows start with what counts up in them:
a revision, a fence, a state.

The journal lies over the tables of its tree, entry by entry. A commit only adds to it or
empties it, so as long as the newest tree has one, what the tree before has of it belongs to
it, too. Entries that no tree leads to were laid in place, or are lost; their rows count as
those of old pages do.

A long slab lies apart from its key. If the leaf that held the key is gone, the index says
where the slab's objects belong, and the checksum, which covers the key, confirms it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.id_set import IdSet
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.creation import DICTIONARIES, JOURNAL, SLABS
from casstore.engine.lmdb.dictionaries import open_dictionary
from casstore.engine.lmdb.directory import DATA_FILE
from casstore.engine.lmdb.index import PREFIX_BYTES, read_key
from casstore.engine.lmdb.journal import Entry as JournalEntry
from casstore.engine.lmdb.journal import open_entry
from casstore.engine.lmdb.pages import (
    LEAF,
    OVERFLOW,
    Entry,
    Lost,
    Meta,
    Page,
    PageFile,
    read_record,
)
from casstore.engine.lmdb.rows import CHECKSUM_BYTES, prove_row
from casstore.engine.lmdb.slab import Directory, Slab
from casstore.engine.protocol import TABLES, NewObject, Row, StoredObject
from casstore.errors import CorruptionError, StoreNotFoundError
from casstore.format.digest import DIGEST_BYTES, check_object

# Where something was found; the lower one counts.
NEWEST: Final = 0
BEFORE: Final = 1
STRAY: Final = 2

_ID_BYTES: Final = 8
_NUMBER_BYTES: Final = 4
# Inflated slabs that are kept: neighbours are asked for one after the other.
_KEPT_BYTES: Final = 32 << 20
_KEPT_DIRECTORIES: Final = 64
# How many of a slab's objects are looked for in the index to learn where it belongs.
_WANTED_NAMES: Final = 8
# How many places are tried for slabs that the index does not know either.
_MAX_TRIES: Final = 1 << 20
# How many slabs are tried to see whether a dictionary is theirs.
_TRIED_SLABS: Final = 3
_SCRATCH_MAP_BYTES: Final = 1 << 40
_ROWS_A_TRANSACTION: Final = 10_000

#: Tables whose rows are worth saving. The nodes' can be made anew from the manifests.
SAVED_TABLES: Final = tuple(table for table in TABLES if table != "nodes")
_SAVED: Final = frozenset(SAVED_TABLES)

# Tables whose rows start with what counts up: the greater of two is the newer one.
_COUNTING: Final = frozenset(
    ("attachments", "heads", "history", "leases", "queue", "receipts", "tombstones")
)

# Tables whose rows tell, by a number that only grows or by being there at all, that they are
# newer than what is known.
_TELLING: Final = ("heads", "history", "leases", "receipts", "sessions", "tombstones")
_NUMBER_AT_START: Final = 8

DigProgress = Callable[[int, int], None]


class LostRows(NamedTuple):
    """A range of keys of a table in which rows may be missing."""

    table: str
    low: bytes
    high: bytes | None
    why: str


class _Found(NamedTuple):
    """A slab and where it lies. Ordered by its last id, then by how much it counts."""

    last_id: int
    rank: int
    objects: int
    page: int
    #: The position in its leaf, or -1: it lies in a run of its own, of ``size`` bytes.
    entry: int
    size: int


class _Taken(NamedTuple):
    """A row that was found. ``on_top``: by the journal, and it counts before the table's."""

    table: str
    key: bytes
    rank: int
    #: None: the row is gone.
    value: bytes | None
    on_top: bool = False


class _Keyless(NamedTuple):
    """A slab in a run of pages that no leaf leads to."""

    page: Page
    directory: Directory


class Excavation:
    """Everything that can still be proven in the data file of a damaged store.

    Reads only. Use as a context manager: rows are kept in a scratch file until the end.
    """

    def __init__(self, path: str, progress: DigProgress | None = None) -> None:
        data_path = os.path.join(path, DATA_FILE)
        if not os.path.exists(data_path):
            raise StoreNotFoundError(f"no store at {path}")
        self._progress = progress
        self._file = PageFile(data_path)
        self._scratch_path = tempfile.mkdtemp(prefix="casstore-salvage-")
        self._scratch: lmdb.Environment | None = None
        try:
            self._scratch = lmdb.open(
                self._scratch_path,
                map_size=_SCRATCH_MAP_BYTES,
                max_dbs=len(SAVED_TABLES),
                sync=False,
                lock=False,
            )
            self._tables = {name: self._scratch.open_db(name.encode()) for name in SAVED_TABLES}
            self._waiting: list[_Taken] = []
            #: What can be read of the journals, by rank and key, and whether there is one.
            self._journals: list[dict[bytes, JournalEntry]] = [{}, {}]
            self._has_journal = [False, False]
            #: Rows that are known to be gone.
            self._gone: set[tuple[str, bytes]] = set()
            self._visited = IdSet()
            #: Parts of tables, by rank, that could not be read.
            self._gaps: list[dict[str, list[Lost]]] = [{}, {}]
            self._slabs: list[_Found] = []
            self._dictionaries: dict[int, bytes] = {}
            self._compressor = Compressor(self._dictionary)
            self._decoded: OrderedDict[_Found, Slab] = OrderedDict()
            self._decoded_bytes = 0
            self._directories: OrderedDict[_Found, Directory] = OrderedDict()
            #: Names of lost objects, by id, as the index tells.
            self._lost_names: dict[int, bytes] = {}
            self.stray_rows = 0
            self.stray_slabs = 0
            self._dig()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file and drop the scratch file."""
        self._file.close()
        if self._scratch is not None:
            self._scratch.close()
        shutil.rmtree(self._scratch_path, ignore_errors=True)

    def __enter__(self) -> Excavation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- digging ------------------------------------------------------------------------

    def _dig(self) -> None:
        metas = self._file.metas()
        for rank in (NEWEST, BEFORE):
            self._dig_tree(metas[rank] if rank < len(metas) else None, rank)
        self._lay_journals()
        if len(metas) == 1:
            # The one that is left may be the older. Then the last commit is to be found in
            # pages that nothing leads to: by rows that say that they are newer.
            why = "a meta page is lost, and with it perhaps the way to the last commit"
            for table in (*_TELLING, SLABS, DICTIONARIES):
                self._gaps[NEWEST][table].append(Lost(0, b"", None, why))
            self._gone.clear()
        self._keep_rows()
        runs = self._dig_strays()
        self._keep_rows()
        if self._gaps[NEWEST][SLABS]:
            self._place_slabs(runs)
        self._slabs.sort()
        if self._gaps[NEWEST][DICTIONARIES]:
            self._place_dictionaries(runs)

    def _dig_tree(self, meta: Meta | None, rank: int) -> None:
        roots: dict[str, int] = {}
        broken: list[Lost] = []
        if meta is not None:
            for _, entry in self._file.walk(meta.main.root, broken.append, self._visit):
                if entry.is_database and entry.value is not None:
                    # Format 1 ends names in a zero byte.
                    name = entry.key.rstrip(b"\0").decode(errors="replace")
                    roots[name] = read_record(entry.value).root
        gaps = self._gaps[rank]
        for name in (SLABS, DICTIONARIES, *SAVED_TABLES):
            gaps[name] = []
            if name not in roots:
                why = broken[0].why if broken else "no meta page leads to it"
                gaps[name].append(Lost(0, b"", None, why))
                continue
            if name == SLABS:
                self._dig_slabs(roots[name], rank)
            elif name == DICTIONARIES:
                self._dig_dictionaries(roots[name], rank)
            else:
                self._dig_rows(name, roots[name], rank)
        gaps[JOURNAL] = []
        if JOURNAL in roots:
            self._dig_journal(roots[JOURNAL], rank)
        # Only so that their pages are known to belong to somebody.
        for name in sorted(roots.keys() - gaps.keys()):
            for _, entry in self._file.walk(roots[name], lambda lost: None, self._visit):
                self._visit_run(entry)

    def _visit(self, page: int, pages: int) -> bool:
        # The tree before shares most pages with the newest.
        self._visited.add(page)
        return True

    def _visit_run(self, entry: Entry) -> None:
        if entry.value is None:
            for page in range(entry.run, entry.run + min(self._file.run_length(entry.size), 8192)):
                self._visited.add(page)

    def _dig_slabs(self, root: int, rank: int) -> None:
        gaps = self._gaps[rank][SLABS]
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            if not self._take_slab(page, entry, rank):
                why = f"the slab under key {entry.key.hex()} is damaged"
                gaps.append(Lost(page, entry.key, entry.key + b"\0", why))

    def _take_slab(self, page: int, entry: Entry, rank: int) -> bool:
        if len(entry.key) != _ID_BYTES:
            return False
        value = self._file.value(entry)
        try:
            directory = slabs.read_directory(entry.key, value or b"")
        except CorruptionError:
            return False
        last_id = directory.first_id + directory.objects - 1
        if directory.first_id < 1:
            return False
        if entry.value is None:
            found = _Found(last_id, rank, directory.objects, entry.run, -1, entry.size)
        else:
            at = self._position_of(page, entry)
            found = _Found(last_id, rank, directory.objects, page, at, entry.size)
        self._slabs.append(found)
        return True

    def _position_of(self, number: int, entry: Entry) -> int:
        page = self._file.page(number)
        return -1 if page is None else page.entries.index(entry)

    def _dig_dictionaries(self, root: int, rank: int) -> None:
        gaps = self._gaps[rank][DICTIONARIES]
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            if not self._take_dictionary(entry):
                why = f"dictionary {int.from_bytes(entry.key, 'big')} is damaged"
                gaps.append(Lost(page, entry.key, entry.key + b"\0", why))

    def _take_dictionary(self, entry: Entry) -> bool:
        if len(entry.key) != _NUMBER_BYTES:
            return False
        number = int.from_bytes(entry.key, "big")
        try:
            content = open_dictionary(number, self._file.value(entry), self._file.path)
        except CorruptionError:
            return False
        self._dictionaries.setdefault(number, content)
        return True

    def _dig_rows(self, table: str, root: int, rank: int) -> None:
        gaps = self._gaps[rank][table]
        # A damaged row may have lost its key, too: its place is anywhere between the rows
        # on both sides.
        below, damaged = b"", False
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            value = self._prove(table, entry)
            if value is None:
                damaged = True
                continue
            if damaged:
                gaps.append(Lost(page, below, entry.key, "a row is damaged"))
                damaged = False
            below = entry.key + b"\0"
            if rank == NEWEST or self._is_lost(table, entry.key, NEWEST):
                self._take_row(table, entry.key, rank, value)
        if damaged:
            gaps.append(Lost(0, below, None, "a row is damaged"))

    def _dig_journal(self, root: int, rank: int) -> None:
        gaps = self._gaps[rank][JOURNAL]
        self._has_journal[rank] = True
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            opened = self._open_entry(entry)
            if opened is None:
                gaps.append(Lost(page, entry.key, entry.key + b"\0", "an entry is damaged"))
            else:
                self._journals[rank][entry.key] = opened
        if gaps:
            # Any row may have been changed by what is lost.
            why = f"a part of the journal is lost: {gaps[0].why}"
            for table in SAVED_TABLES:
                self._gaps[rank][table].append(Lost(gaps[0].page, b"", None, why))

    def _open_entry(self, entry: Entry) -> JournalEntry | None:
        stored = self._file.value(entry)
        if stored is None or len(entry.key) != _ID_BYTES:
            return None
        try:
            return open_entry(entry.key, stored)[0]
        except CorruptionError:
            return None

    def _lay_journals(self) -> None:
        """Change the rows of each tree as its journal says, in the order of its entries."""
        newest, before = self._journals
        for (table, key), value in _fold(before).items():
            if self._is_lost(table, key, NEWEST):
                self._waiting.append(_Taken(table, key, BEFORE, value, on_top=True))
        self._keep_rows()
        if self._has_journal[NEWEST] and self._gaps[NEWEST][JOURNAL]:
            newest = before | newest
        for (table, key), value in _fold(newest).items():
            self._waiting.append(_Taken(table, key, NEWEST, value, on_top=True))
            if value is None:
                self._gone.add((table, key))
        self._keep_rows()

    def _prove(self, table: str, entry: Entry) -> bytes | None:
        stored = self._file.value(entry)
        if stored is None or len(stored) < CHECKSUM_BYTES or not 0 < len(entry.key) < 512:
            return None
        try:
            return prove_row(table, entry.key, stored)[0]
        except CorruptionError:
            return None

    def _is_lost(self, table: str, key: bytes, rank: int) -> bool:
        return any(
            gap.low <= key and (gap.high is None or key < gap.high)
            for gap in self._gaps[rank][table]
        )

    def _dig_strays(self) -> list[Page]:
        """Take what lies in pages that no tree leads to; give runs of pages that nobody claims."""
        runs: list[Page] = []
        wounded = [table for table in SAVED_TABLES if self._gaps[NEWEST][table]]
        total = self._file.page_count
        for page in self._file.pages():
            if self._progress is not None and not page.number % 4096:
                self._progress(page.number, total)
            if page.number in self._visited:
                continue
            if page.kind == OVERFLOW:
                runs.append(page)
            elif page.kind == LEAF:
                for entry in page.entries:
                    self._take_stray(page.number, entry, wounded)
        taken = {found.page for found in self._slabs if found.entry < 0}
        return [page for page in runs if page.number not in taken]

    def _take_stray(self, page: int, entry: Entry, wounded: list[str]) -> None:
        if len(entry.key) == _ID_BYTES and self._take_slab(page, entry, STRAY):
            self.stray_slabs += 1
            return
        if len(entry.key) == _NUMBER_BYTES and self._take_dictionary(entry):
            return
        for table in wounded:
            if self._may_be_stray(table, entry.key):
                value = self._prove(table, entry)
                if value is not None:
                    self._take_row(table, entry.key, STRAY, value)
                    self.stray_rows += 1
                    return
        opened = self._open_entry(entry) if wounded else None
        if opened is None:
            return
        for (table, key), value in _fold({entry.key: opened}).items():
            if value is not None and self._may_be_stray(table, key):
                self._take_row(table, key, STRAY, value)
                self.stray_rows += 1

    def _may_be_stray(self, table: str, key: bytes) -> bool:
        """Can a row be lost here, so that one of an old page counts?"""
        # Work that was done must not come back while it is known to be done.
        ranks = (NEWEST, BEFORE) if table == "queue" else (NEWEST,)
        return (table, key) not in self._gone and all(
            self._is_lost(table, key, rank) for rank in ranks
        )

    # --- what lost its key ----------------------------------------------------------------

    def _open_keyless(self, page: Page) -> Directory | None:
        value = self._file.run_content(page)
        try:
            return slabs.read_directory(bytes(_ID_BYTES), value or b"", check=False)
        except CorruptionError:
            return None

    def _place_slabs(self, runs: list[Page]) -> None:
        """Find out which ids belong to slabs whose leaf is gone."""
        opened = [(page, self._open_keyless(page)) for page in runs]
        keyless = [_Keyless(page, directory) for page, directory in opened if directory is not None]
        wanted: dict[bytes, list[tuple[int, int]]] = {}
        for number, (_, directory) in enumerate(keyless):
            alive = [at for at, kind in enumerate(directory.kinds) if kind & 0x7F != slabs.DEAD]
            for at in alive[:_WANTED_NAMES]:
                prefix = directory.digest(at)[:PREFIX_BYTES]
                wanted.setdefault(prefix, []).append((number, at))
        placed: set[int] = set()
        for name, object_id in self._index_rows():
            for number, position in wanted.get(name[:PREFIX_BYTES], ()):
                first_id = object_id - position
                if number not in placed and self._place(keyless[number], first_id):
                    placed.add(number)
        # Those left may fit where no slab is known.
        tries = 0
        rest = [one for number, one in enumerate(keyless) if number not in placed]
        for one in rest:
            for first_id in self._free_places(one.directory.objects):
                tries += 1
                if tries > _MAX_TRIES:
                    return
                if self._place(one, first_id):
                    break

    def _place(self, one: _Keyless, first_id: int) -> bool:
        last_id = first_id + one.directory.objects - 1
        if first_id < 1 or last_id > slabs.MAX_ID:
            return False
        value = self._file.run_content(one.page)
        try:
            slabs.read_directory(slabs.slab_key(last_id), value or b"")
        except CorruptionError:
            return False
        size = 0 if value is None else len(value)
        self._slabs.append(_Found(last_id, STRAY, one.directory.objects, one.page.number, -1, size))
        self.stray_slabs += 1
        return True

    def _place_dictionaries(self, runs: list[Page]) -> None:
        """Find out which numbers belong to dictionaries whose leaf is gone."""
        needy: dict[int, list[_Found]] = {}
        for found in self._slabs:
            number = self._directory(found).dictionary
            if number and number not in self._dictionaries:
                needy.setdefault(number, []).append(found)
        for page in runs:
            if not needy:
                return
            content = self._open_dictionary(page)
            for number, users in list(needy.items()):
                if content is not None and self._inflates(users[:_TRIED_SLABS], number, content):
                    self._dictionaries[number] = content
                    del needy[number]
                    break

    def _open_dictionary(self, page: Page) -> bytes | None:
        """The dictionary in a run of pages; where its frame ends, the frame itself says."""
        value = self._file.run_content(page)
        try:
            return open_dictionary(0, value, self._file.path)
        except CorruptionError:
            return None

    def _inflates(self, users: list[_Found], number: int, content: bytes) -> bool:
        """Does a dictionary give the right bytes for one of these slabs?"""
        self._dictionaries[number] = content
        # One of its own: a compressor keeps what it has loaded.
        kept, self._compressor = self._compressor, Compressor(self._dictionary)
        try:
            for found in users:
                first_id = found.last_id - found.objects + 1
                for object_id in range(first_id, found.last_id + 1):
                    if not isinstance(self.find(object_id), str):
                        return True
            return False
        finally:
            self._compressor = kept
            self._decoded.clear()
            self._decoded_bytes = 0
            del self._dictionaries[number]

    def _free_places(self, count: int) -> Iterator[int]:
        """First ids at which a slab of ``count`` objects would overlap no known one."""
        next_id = 1
        for found in sorted(self._slabs):
            first_id = found.last_id - found.objects + 1
            yield from range(next_id, first_id - count + 1)
            next_id = max(next_id, found.last_id + 1)
        # Behind the last there may be more, but not many: one leaf's worth.
        yield from range(next_id, next_id + slabs.MAX_OBJECTS)

    def _index_rows(self) -> Iterator[tuple[bytes, int]]:
        """A digest, or how it begins, and an id: whatever names an object, of any time.

        What only looks so may be among them: proven where it is used.
        """
        for page in self._file.pages():
            for entry in page.entries:
                opened = self._open_entry(entry) if len(entry.key) == _ID_BYTES else None
                if opened is not None:
                    yield from opened.named.items()
                elif entry.value is not None and not entry.size:
                    try:
                        yield entry.key[:PREFIX_BYTES], read_key(entry.key)
                    except CorruptionError:
                        continue

    # --- rows -----------------------------------------------------------------------------

    def _take_row(self, table: str, key: bytes, rank: int, value: bytes) -> None:
        self._waiting.append(_Taken(table, key, rank, value))
        if len(self._waiting) >= _ROWS_A_TRANSACTION:
            self._keep_rows()

    def _keep_rows(self) -> None:
        assert self._scratch is not None
        with self._scratch.begin(write=True) as txn:
            for table, key, rank, value, on_top in self._waiting:
                database = self._tables[table]
                known = txn.get(key, db=database)
                over = on_top and known is not None and known[0] >= rank
                if value is None:
                    if over:
                        txn.delete(key, db=database)
                    continue
                if (
                    known is not None
                    and not over
                    and (
                        # Only a number that has grown says for sure that a row is newer.
                        (
                            known[0] == NEWEST
                            and value[:_NUMBER_AT_START] <= known[1:][:_NUMBER_AT_START]
                        )
                        or (known[0] < rank and table not in _COUNTING)
                        or (rank != NEWEST and known[1:] >= value)
                    )
                ):
                    continue
                txn.put(key, bytes((rank,)) + value, db=database)
        self._waiting.clear()

    def rows(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[Row]:
        """The rows of a table in order."""
        for row, _ in self.ranked_rows(table, start, stop):
            yield row

    def ranked_rows(
        self, table: str, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[Row, int]]:
        """The rows of a table in order, each with where it was found."""
        assert self._scratch is not None
        with self._scratch.begin() as txn, txn.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(start) if start else cursor.first()
            while more:
                key, value = cursor.item()
                if stop is not None and key >= stop:
                    return
                yield Row(key, value[1:]), value[0]
                more = cursor.next()

    def lost_rows(self) -> list[LostRows]:
        """Where rows may be missing, table by table."""
        return [
            LostRows(table, gap.low, gap.high, gap.why)
            for table in SAVED_TABLES
            for gap in self._gaps[NEWEST][table]
        ]

    def lost_dictionaries(self) -> list[int]:
        """Dictionaries that slabs name and that are gone."""
        named = {self._directory(found).dictionary for found in self._slabs if found.rank == NEWEST}
        return sorted(number for number in named if number and number not in self._dictionaries)

    # --- objects --------------------------------------------------------------------------

    def _dictionary(self, number: int) -> bytes:
        found = self._dictionaries.get(number)
        if found is None:
            raise CorruptionError(f"dictionary {number} is lost")
        return found

    def _value(self, found: _Found) -> bytes:
        if found.entry < 0:
            pages = self._file.run_length(found.size)
            data = self._file.read(found.page, pages)
            if data is None:
                raise CorruptionError(f"page {found.page} cannot be read")
            return data[self._file.header_bytes : self._file.header_bytes + found.size]
        page = self._file.page(found.page)
        value = None if page is None else page.entries[found.entry].value
        if value is None:
            raise CorruptionError(f"page {found.page} cannot be read")
        return value

    def _directory(self, found: _Found) -> Directory:
        decoded = self._decoded.get(found)
        if decoded is not None:
            return decoded.directory
        known = self._directories.get(found)
        if known is None:
            known = slabs.read_directory(slabs.slab_key(found.last_id), self._value(found))
            self._directories[found] = known
            if len(self._directories) > _KEPT_DIRECTORIES:
                self._directories.popitem(last=False)
        return known

    def _slab(self, found: _Found) -> Slab:
        known = self._decoded.get(found)
        if known is not None:
            self._decoded.move_to_end(found)
            return known
        value = self._value(found)
        directory = slabs.read_directory(slabs.slab_key(found.last_id), value)
        payload = value[directory.payload_at :]

        def inflate(raw_bytes: int) -> bytes:
            # A slab that was found without its leaf is not known to the byte.
            own = payload[:raw_bytes] if directory.codec == slabs.CODEC_RAW else payload
            return self._compressor.inflate(directory.codec, directory.dictionary, own, raw_bytes)

        slab = Slab(directory, inflate)
        self._decoded[found] = slab
        self._decoded_bytes += slab.size_bytes
        while self._decoded_bytes > _KEPT_BYTES and len(self._decoded) > 2:
            _, dropped = self._decoded.popitem(last=False)
            self._decoded_bytes -= dropped.size_bytes
        return slab

    def _holders(self, object_id: int) -> list[_Found]:
        """The slabs that hold an id, those first that count more."""
        at = bisect_left(self._slabs, (object_id,))
        found: list[_Found] = []
        while at < len(self._slabs) and self._slabs[at].last_id < object_id + slabs.MAX_OBJECTS:
            one = self._slabs[at]
            if one.last_id - one.objects < object_id:
                found.append(one)
            at += 1
        return sorted(found, key=lambda one: one.rank)

    def digest_of(self, object_id: int) -> bytes:
        """The name of an object, from a directory, or from what names it beside."""
        for found in self._holders(object_id):
            directory = self._directory(found)
            return directory.digest(object_id - directory.first_id)
        name = self._lost_names.get(object_id)
        if name is None:
            raise CorruptionError(f"object {object_id} is lost, and its name with it")
        return name

    def children_of(self, object_id: int) -> tuple[int, ...]:
        """The ids that an object links to, whether or not its bytes are there."""
        for found in self._holders(object_id):
            directory = self._directory(found)
            position = object_id - directory.first_id
            if directory.kinds[position] & ~slabs.KEEPS_LINKS == slabs.DEAD:
                continue
            decoded = self._decoded.get(found)
            if decoded is not None:
                return decoded.children(position)
            return directory.children(position, sum(directory.child_counts[:position]))
        return ()

    def find(self, object_id: int) -> StoredObject | str:
        """An object, proven by its digest; or why it cannot be had."""
        why = "it is gone"
        for found in self._holders(object_id):
            try:
                slab = self._slab(found)
                position = object_id - slab.first_id
                kind = slab.kind(position)
                if kind == slabs.DEAD:
                    continue
                item = StoredObject(kind, slab.data(position, self.digest_of))
                check_object(slab.directory.digest(position), *item)
                return item
            except CorruptionError as exc:
                why = str(exc)
        return why

    def sketch(self, object_id: int) -> StoredObject | None:
        """An object that cannot be proven because names of what it links to are lost.

        ``stand_in`` stands for these. Only to be looked at. None if that is not what it lacks.
        """
        if all(map(self._has_name, self.children_of(object_id))):
            return None
        for found in self._holders(object_id):
            try:
                slab = self._slab(found)
                position = object_id - slab.first_id
                if slab.kind(position) != slabs.DEAD:
                    data = slab.data(position, self._name_or_stand_in)
                    return StoredObject(slab.kind(position), data)
            except CorruptionError:
                continue
        return None

    def stand_in(self, object_id: int) -> bytes:
        """What stands for the lost name of an object in a sketch."""
        return object_id.to_bytes(DIGEST_BYTES, "big")

    def _name_or_stand_in(self, object_id: int) -> bytes:
        return self.digest_of(object_id) if self._has_name(object_id) else self.stand_in(object_id)

    def _has_name(self, object_id: int) -> bool:
        try:
            self.digest_of(object_id)
        except CorruptionError:
            return False
        return True

    def arriving(self, object_id: int, item: StoredObject) -> NewObject:
        """An object that was found, in the form in which a store takes it in."""
        children = [self.digest_of(child) for child in self.children_of(object_id)]
        return NewObject(self.digest_of(object_id), item.kind, item.data, children)

    def mark(self, roots: Iterable[bytes]) -> Marked:
        """Find all ids that the objects of these names are made of."""
        wanted = set(roots)
        while True:
            marked = self._mark(wanted)
            lost = {each for each in marked.ids if each not in marked.held}
            self._find_names(lost - self._lost_names.keys())
            # The same object may have been stored before, or again, under another id.
            more = {self._lost_names[each] for each in lost if each in self._lost_names} - wanted
            if not more:
                return marked
            wanted |= more

    def _find_names(self, unknown: set[int]) -> None:
        """Learn the names of lost objects: from journals, or where the same is stored again."""
        begins: dict[bytes, list[int]] = {}
        for name, object_id in self._index_rows() if unknown else ():
            if object_id not in unknown:
                continue
            if len(name) == DIGEST_BYTES:
                self._lost_names[object_id] = name
            else:
                begins.setdefault(name, []).append(object_id)
        for found in self._slabs if begins else ():
            try:
                directory = self._directory(found)
            except CorruptionError:
                continue
            for position in range(directory.objects):
                name = directory.digest(position)
                # One that only begins alike does no harm: whatever links to it is proven.
                for object_id in begins.get(name[:PREFIX_BYTES], ()):
                    self._lost_names.setdefault(object_id, name)

    def _mark(self, wanted: set[bytes]) -> Marked:
        marked = Marked(IdSet(), IdSet(), {})
        for found in reversed(self._slabs):
            try:
                directory = self._directory(found)
            except CorruptionError:
                # It was there when the file was first read.
                continue
            child_at = len(directory.distances)
            for position in range(directory.objects - 1, -1, -1):
                child_at -= directory.child_counts[position]
                if directory.kinds[position] & ~slabs.KEEPS_LINKS == slabs.DEAD:
                    continue
                object_id = directory.first_id + position
                marked.held.add(object_id)
                name = directory.digest(position)
                if name in wanted:
                    marked.ids.add(object_id)
                    marked.places.setdefault(name, object_id)
                if object_id in marked.ids:
                    for child in directory.children(position, child_at):
                        if 0 < child < object_id:
                            marked.ids.add(child)
        return marked


class Marked(NamedTuple):
    """What some roots reach: ids, those of them that a slab holds (and others), and the roots'."""

    ids: IdSet
    held: IdSet
    places: dict[bytes, int]


def _fold(entries: Mapping[bytes, JournalEntry]) -> dict[tuple[str, bytes], bytes | None]:
    """The rows that entries of a journal amount to, in the tables that are worth saving."""
    rows: dict[tuple[str, bytes], bytes | None] = {}
    for _, entry in sorted(entries.items()):
        rows.update({place: value for place, value in entry.rows.items() if place[0] in _SAVED})
    return rows
