"""Compacting: rewrites the whole store, in key order, into a file without free pages.

LMDB's file never shrinks, and rows inserted out of order leave its pages half empty. So the
store is copied: slabs are packed on the way, every table is written in key order, and each page
is filled before the next. Ids, digests, rows, creation time and LMDB's format do not change.

Nothing else may have the store open, in this process or another. The mutex of the store's directory
is held throughout; every opening of the store takes it, so no process can open the old file and
write to it unnoticed. If a program that does not use casstore's locks writes to the old file, the
transaction number in the file shows that, and the copy is deleted.

    compact/            the copy, a store of its own, while it is made
    1. apply the log; copy, each transaction flushed; verify the copy: structure, digests, rows,
       their sum
    2. compare it with the old store, name by name and row by row
    3. flush the file, rename it over the old one, flush the directory
    4. remove compact/

Until the rename the old store is untouched, and after it the new one is complete. If the process
is killed, the next process that opens or compacts the store removes compact/.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import lmdb

from casstore.engine.compression import NO_DICTIONARY, Compressor
from casstore.engine.lmdb import packing
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.applying import LOG_KEY, read_recovery_point
from casstore.engine.lmdb.creation import DICTIONARIES, INDEX, META, SLABS
from casstore.engine.lmdb.dictionaries import DictionaryShelf, dictionary_key
from casstore.engine.lmdb.directory import StoreDirectory, storage_error
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.lookup import SUM_KEY
from casstore.engine.lmdb.page_scan import Extent, read_extent, verify_structure
from casstore.engine.lmdb.translation import translate
from casstore.engine.lmdb.verification import verify_content
from casstore.errors import BusyError, CorruptionError, InvalidInputError

# How much one transaction writes at most: LMDB keeps it in memory until the commit.
_BATCH_BYTES: Final = 8 << 20
_BATCH_ROWS: Final = 65_536

#: Called with the name of the phase, the amount done in it and its total.
Tell = Callable[[str, int, int], None]


class Compacted(NamedTuple):
    """The result of compacting: the file before and after, and its content."""

    file_bytes_before: int
    file_bytes_after: int
    #: The length of all keys and values in the new file.
    content_bytes: int
    slabs_before: int
    slabs_after: int
    objects: int
    #: Objects that gc had removed, and whose bytes were still in the old file.
    objects_dropped: int
    #: Dictionaries that no slab needed any more.
    dictionaries_dropped: int


def compact(path: str, *, wait_s: float, tell: Tell) -> Compacted:
    """Rewrite the store at ``path`` and replace its file with the new one.

    ``tell`` is called with the progress. BusyError if the store is open and is not closed within
    ``wait_s``. This, CorruptionError, StorageFullError and whatever ``tell`` raises leave the store
    unchanged.
    """
    directory = StoreDirectory(path)
    directory.prepare(create=False)
    if os.path.islink(directory.data_path):
        raise InvalidInputError(
            f"{directory.data_path} is a link; renaming would move the store away from where it "
            "leads. Compact the directory that holds the file itself"
        )
    with directory.alone(wait_s):
        # Removes the rest of an earlier attempt, and flushes the writes of a killed process.
        old = Environment(path, create=False, prove=verify_content, directory=directory)
        try:
            old.retire_log()
            before = read_extent(directory.data_path)
            with directory.compaction_directory() as new_path:
                try:
                    report = _copy(old, new_path, before, tell)
                except CorruptionError:
                    # If the old file was written to meanwhile, that is the cause: raise that error.
                    _require_unchanged(directory, before)
                    raise
                old.close()
                _require_unchanged(directory, before)
                _swap(directory, new_path)
                file_bytes = os.stat(directory.data_path).st_size
        finally:
            old.close()
    return report._replace(file_bytes_before=before.file_bytes, file_bytes_after=file_bytes)


def _copy(old: Environment, new_path: str, before: Extent, tell: Tell) -> Compacted:
    """Fill a new store at ``new_path`` with everything in ``old``, and prove it."""
    new = Environment(
        new_path, map_bytes=before.map_bytes, lmdb_version=before.lmdb_version, prove=verify_content
    )
    try:
        copier = _Copier(old, new, tell)
        copier.copy()
        _compare(old, new, tell)
        tell("verify", 0, copier.objects)
        verify_content(new)
        tell("verify", copier.objects, copier.objects)
        report = copier.report()
    finally:
        new.close()
    verify_structure(os.path.join(new_path, os.path.basename(new.data_path)))
    return report


def _require_unchanged(directory: StoreDirectory, before: Extent) -> None:
    """BusyError if the old file has been written to since it was copied."""
    if read_extent(directory.data_path).transactions != before.transactions:
        raise BusyError(
            f"{directory.path} was written to while it was compacted, by a program that does not "
            "use casstore's locks; nothing was replaced: stop that program, and compact again"
        )


def _swap(directory: StoreDirectory, new_path: str) -> None:
    """Replace the old file with the new one.

    The log and the derived files are removed first: nothing needs them, and they may hold erased
    content.
    """
    try:
        directory.remove_log()
        directory.remove_derived()
        directory.take_over(new_path)
    except OSError as exc:
        raise storage_error(f"cannot put the new file of {directory.path} in place", exc) from exc


class _Batch:
    """Collects rows for the new store, and writes them in as few transactions as possible.

    Each transaction rewrites pages of the one before, and so leaves free pages in the file.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._rows: list[tuple[Any, list[tuple[bytes, bytes]]]] = []
        self._bytes = self._count = 0
        self.content_bytes = 0

    def begin(self, database: Any) -> None:
        """Direct the following rows to this database."""
        self._rows.append((database, []))

    def add(self, key: bytes, value: bytes) -> None:
        """Append a row; keys of one database must come in order."""
        self._rows[-1][1].append((key, value))
        self._bytes += len(key) + len(value)
        self._count += 1
        if self._bytes >= _BATCH_BYTES or self._count >= _BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Commit what was added."""
        env = self._env
        try:
            with env.tables_lock, env.begin_write() as txn:
                for database, rows in self._rows:
                    _, added = txn.cursor(db=database).putmulti(rows, append=True)
                    if added != len(rows):
                        # py-lmdb skips a row whose key is not above the one before.
                        raise CorruptionError("the keys of a table are out of order")
        except lmdb.Error as exc:
            _require_room(env)
            raise translate(exc, env.path) from exc
        self.content_bytes += self._bytes
        self._rows = [(self._rows[-1][0], [])]
        self._bytes = self._count = 0


def _require_room(env: Environment) -> None:
    """StorageFullError if the file cannot grow; LMDB reports a full disk as an I/O error."""
    if not hasattr(os, "posix_fallocate"):
        return
    end = os.fstat(env.data_handle).st_size
    try:
        os.posix_fallocate(env.data_handle, end, _BATCH_BYTES)
    except OSError as exc:
        raise storage_error(f"no space for a new file of {env.path}", exc) from exc


def _copied(env: Environment) -> list[str]:
    """The databases that are copied row by row."""
    return [name for name in env.databases if name not in (SLABS, DICTIONARIES, META)]


def _packed(
    selection: packing.SlabSelection, compressor: Compressor, scope: packing.PackScope
) -> list[tuple[bytes, bytes]]:
    """The slabs that replace those of a selection."""
    if selection.run is None:
        return [(slab.key, slab.value) for slab in selection.left]
    return packing.rewritten(selection.run, compressor, scope)


class _Copier:
    """Copies a store table by table; counts what it does."""

    def __init__(self, old: Environment, new: Environment, tell: Tell) -> None:
        self._old = old
        self._new = new
        self._report = tell
        self._batch = _Batch(new)
        self._slabs_before = self._slabs_after = self._dropped = self._dictionaries_dropped = 0
        self._named: set[int] = set()
        self.objects = 0

    def copy(self) -> None:
        """Copy everything, the slabs first: they name the dictionaries that are still needed."""
        old, new = self._old, self._new
        self._copy_slabs()
        shelf = DictionaryShelf(old)
        self._named.add(shelf.newest())
        self._copy_dictionaries(shelf)
        for name in _copied(old):
            count = self._copy_table(name, new.databases[name])
            if name == INDEX:
                self.objects = count
        self._batch.flush()
        self._copy_meta()

    def report(self) -> Compacted:
        """The result, without the lengths of the files, which the caller knows."""
        return Compacted(
            0, 0, self._batch.content_bytes, self._slabs_before, self._slabs_after,
            self.objects, self._dropped, self._dictionaries_dropped,
        )  # fmt: skip

    def _copy_slabs(self) -> None:
        old, batch = self._old, self._batch
        compressor = Compressor(DictionaryShelf(old).load)
        compressor.use(DictionaryShelf(old).newest())
        # Rewrite every slab that has dead objects, however few: they may be content to erase.
        scope = packing.scope_of(old, None)._replace(many_dead=0)
        next_id = 1
        batch.begin(self._new.slabs)
        # Most of the time goes into compressing, which releases the interpreter: one thread a core.
        threads = os.cpu_count() or 1
        ahead: deque[tuple[int, Future[list[tuple[bytes, bytes]]]]] = deque()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="casstore-compact")
        try:
            while next_id <= scope.newest or ahead:
                if next_id <= scope.newest:
                    selection = packing.read_run(old, compressor, next_id, scope)
                    next_id = selection.next_id
                    if selection.damaged:
                        why = selection.damaged[0].reason
                        raise CorruptionError(f"{old.path} is damaged and was left as it is: {why}")
                    self._slabs_before += len(selection.left)
                    if selection.run is not None:
                        self._slabs_before += len(selection.run.stored)
                        self._dropped += selection.run.dead_objects
                    ahead.append((next_id - 1, pool.submit(_packed, selection, compressor, scope)))
                if len(ahead) > 2 * threads or next_id > scope.newest:
                    last_id, packed = ahead.popleft()
                    for key, value in packed.result():
                        self._named.add(slabs.read_directory(key, value).dictionary)
                        batch.add(key, value)
                        self._slabs_after += 1
                    self._report("copy", min(last_id, scope.newest), scope.newest)
        finally:
            pool.shutdown(cancel_futures=True)

    def _copy_dictionaries(self, shelf: DictionaryShelf) -> None:
        with self._old.reading() as txn:
            rows = [
                (bytes(key), bytes(value)) for key, value in txn.cursor(db=self._old.dictionaries)
            ]
        wanted = {dictionary_key(number) for number in self._named - {NO_DICTIONARY}}
        for number in sorted(self._named - {NO_DICTIONARY}):
            shelf.load(number)  # raises if it is damaged or not there
        self._batch.begin(self._new.dictionaries)
        for key, value in rows:
            if key in wanted:
                self._batch.add(key, value)
            else:
                self._dictionaries_dropped += 1

    def _copy_table(self, name: str, target: Any) -> int:
        count = 0
        self._batch.begin(target)
        with self._old.reading() as txn:
            total = txn.stat(self._old.databases[name])["entries"]
            for key, value in txn.cursor(db=self._old.databases[name]):
                self._batch.add(bytes(key), bytes(value))
                count += 1
                if not count % _BATCH_ROWS:
                    self._report(name, count, max(count, total))
        return count

    def _copy_meta(self) -> None:
        """Copy all rows of ``meta``, the sum over all rows and the recovery point, with no log."""
        old, new = self._old, self._new
        with old.reading() as txn:
            rows = [(bytes(key), bytes(value)) for key, value in txn.cursor(db=old.meta)]
            total = txn.get(SUM_KEY)
            kept_sum = None if total is None else bytes(total)
            recovery_point = read_recovery_point(txn, old.path).retired()
            last = txn.cursor(db=old.slabs)
            newest = int.from_bytes(last.key(), "big") if last.last() else 0
        try:
            with new.tables_lock, new.begin_write() as txn:
                txn.drop(new.meta, delete=False)
                for key, value in rows:
                    txn.put(key, value, db=new.meta)
                if kept_sum is not None:
                    txn.put(SUM_KEY, kept_sum)
                txn.put(LOG_KEY, recovery_point.encode())
                if newest:
                    txn.put(packing.PACKED_TO_KEY, str(newest).encode(), db=new.meta)
        except lmdb.Error as exc:
            raise translate(exc, new.path) from exc
        self._batch.content_bytes += sum(len(key) + len(value) for key, value in rows)


def _compare(old: Environment, new: Environment, tell: Tell) -> None:
    """Raise unless both stores name the same objects and hold the same rows.

    ``verify_content`` checks that the names in the copy lead to the right bytes.
    """
    names = _copied(old)
    for at, name in enumerate(names):
        with old.reading_bytes() as before, new.reading_bytes() as after:
            rows = before.cursor(db=old.databases[name])
            if not _equal(rows, after.cursor(db=new.databases[name])):
                raise CorruptionError(f"the copy of {old.path} differs in table {name}")
        tell("compare", at + 1, len(names))


def _equal(one: Iterable[tuple[bytes, bytes]], other: Iterable[tuple[bytes, bytes]]) -> bool:
    try:
        return all(first == second for first, second in zip(one, other, strict=True))
    except ValueError:
        # One store ended before the other.
        return False
