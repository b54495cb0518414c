"""Copies a store while it is in use: one snapshot of it, in a directory of its own.

LMDB copies a snapshot within a read transaction, which may take long. So a *dumping* thread lets
LMDB write into a pipe, and a *saving* thread copies from the pipe into the file. The calling thread
reports progress and can stop the copy. Closing the store or forking the process need not wait: it
aborts the copy, which after a fork is restarted.

The copy is built under a temporary name. The commits that are only in the redo log are applied to
it, and everything in it is verified. State of the running store is removed: the notes for its
garbage collector, and its log, lock and reserve files. Then the copy is flushed and renamed.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import lmdb

from casstore.engine.files import TAKEN, open_regular, part_directory
from casstore.engine.forks import Descriptor, open_pipe
from casstore.engine.lmdb import notes
from casstore.engine.lmdb.directory import (
    DATA_FILE,
    LOCK_FILE,
    LOCKS,
    StoreDirectory,
    storage_error,
    sync_directory,
)
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.log import LOG_FILE
from casstore.engine.lmdb.memtable import LoggedEntry
from casstore.engine.lmdb.reserve import RESERVE_FILE
from casstore.engine.lmdb.translation import translate
from casstore.engine.lmdb.verification import verify_content
from casstore.engine.protocol import HotCopyReport
from casstore.errors import (
    BusyError,
    CasstoreError,
    InvalidInputError,
    StorageError,
    TargetExistsError,
)

_CHUNK_BYTES: Final = 1 << 20
_REPORT_S: Final = 0.05
# How many times at most a copy is tried if forks abort it.
_MAX_ATTEMPTS: Final = 16

Progress = Callable[[int, int | None], None]


def copy_store(
    env: Environment, target: str, *, compact: bool, replace: bool, progress: Progress | None
) -> HotCopyReport:
    """Copy the store of an open environment to ``target``."""
    target_path = os.path.realpath(target)
    store_path = os.path.realpath(env.path)
    if os.path.commonpath((target_path, store_path)) == store_path:
        raise InvalidInputError(f"{target} is inside the store itself; choose another directory")
    if os.path.lexists(target):
        if not replace:
            raise TargetExistsError(target)
        # Only a store may be replaced with a store.
        StoreDirectory(target).prepare(create=False)
    # Commits that the copy of the tables may lack.
    with env.snapshot() as (_, view):
        entries = view.entries()
    with part_directory(target_path) as part:
        data = os.path.join(part.path, DATA_FILE)
        for _ in range(_MAX_ATTEMPTS):
            if _Copy(env, data, compact=compact).run(progress):
                break
            env.gate.check()
        else:
            raise BusyError(
                f"the copy of {env.path} was aborted {_MAX_ATTEMPTS} times, because the process "
                "forked; copy again when it forks less often"
            )
        objects = _make_sound(part.path, env, entries)
        try:
            size_bytes = os.stat(data).st_size
            if replace and os.path.lexists(target_path):
                _replace(data, target_path)
                sync_directory(os.path.dirname(target_path))
            else:
                part.publish()
        except OSError as exc:
            if exc.errno in TAKEN:
                raise TargetExistsError(target) from exc
            raise storage_error(f"cannot create {target}", exc) from exc
    return HotCopyReport(size_bytes, objects)


class _Copy:
    """One attempt to copy a snapshot into the file ``path``."""

    def __init__(self, env: Environment, path: str, *, compact: bool) -> None:
        self._env = env
        self._path = path
        self._compact = compact
        # Set when the caller is done or interrupted: both threads should end.
        self._stop = threading.Event()
        self._error: CasstoreError | None = None
        # True if the copy was aborted for a close or a fork.
        self._gave_way = False
        # The bytes copied so far.
        self._done = 0
        # True while the dumping thread holds ``tables_lock`` to keep writers out; ``_turn`` guards
        # it, because the saving thread may release the lock.
        self._turn = threading.Lock()
        self._keeps_out = False

    def run(self, progress: Progress | None) -> bool:
        """Copy everything; False if the copy was aborted for a close or a fork."""
        # Start only the saving thread, which starts the other: after a Ctrl-C between the two, a
        # dumping thread alone would wait for the pipe inside LMDB, and block closing and forking.
        save = threading.Thread(target=self._save, name="casstore-copy", daemon=True)
        try:
            copying = True
            save.start()
            while copying:
                save.join(_REPORT_S)
                copying = save.is_alive()
                # Called at least once, however fast the copy is.
                if progress is not None:
                    progress(self._done, None if self._compact else self._total())
        except RuntimeError as exc:
            if save.ident is not None:
                raise
            raise StorageError(f"{self._env.path} cannot be copied: {exc}") from exc
        finally:
            # Also if the caller is interrupted: both threads end at the next chunk.
            self._stop.set()
            # A thread that was interrupted while starting sees the stop before it does anything.
            if save.ident is not None:
                save.join()
        if self._gave_way:
            return False
        if self._error is not None:
            raise self._error
        return True

    def _total(self) -> int | None:
        try:
            return os.fstat(self._env.data_handle).st_size
        except OSError:
            # The store was closed meanwhile: the threads notice that.
            return None

    def _dump(self, into: Descriptor) -> None:
        """Have LMDB write the snapshot into the pipe."""
        # Writing to a closed pipe must not kill the process, whatever its handler of SIGPIPE.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        # LMDB waits for a running write transaction before it takes its snapshot; if one of this
        # process were aborted meanwhile, it would wait for the copy, for ever. So keep the writers
        # of this process out until the snapshot is taken.
        self._env.tables_lock.acquire()
        self._keeps_out = True
        try:
            self._env.gate.enter()
        except CasstoreError as exc:
            self._error = exc
            self._let_writers_in()
            into.close()
            return
        try:
            self._env.handle.copyfd(into.fileno(), compact=self._compact)
        except lmdb.Error as exc:
            if not self._stop.is_set() and not self._gave_way and self._error is None:
                self._error = translate(exc, self._env.path)
        finally:
            self._let_writers_in()
            into.close()
            self._env.gate.leave()

    def _let_writers_in(self) -> None:
        with self._turn:
            if self._keeps_out:
                self._keeps_out = False
                self._env.tables_lock.release()

    def _save(self) -> None:
        """Start the dumping thread, and copy from the pipe into the file."""
        if self._stop.is_set():
            return
        try:
            # These are closed in a forked child. If it kept the writing end open, the saving thread
            # would wait for the end of the pipe for ever.
            out, into = open_pipe()
        except OSError as exc:
            self._error = storage_error(f"cannot copy {self._env.path}", exc)
            return
        dump = threading.Thread(target=self._dump, args=(into,), name="casstore-copy", daemon=True)
        try:
            dump.start()
        except RuntimeError as exc:
            self._error = StorageError(f"{self._env.path} cannot be copied: {exc}")
            into.close()
            out.close()
            return
        try:
            self._write(out)
        finally:
            # The dumping thread sees that the pipe is closed.
            out.close()
            dump.join()

    def _write(self, out: Descriptor) -> None:
        """Copy from the pipe into the file, until it ends or is stopped."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with open(open_regular(self._path, flags), "wb", buffering=0) as target:
                while not self._stop.is_set():
                    if self._env.gate.is_awaited:
                        self._gave_way = True
                        return
                    chunk = os.read(out.fileno(), _CHUNK_BYTES)
                    # LMDB has written something, so the snapshot is taken.
                    self._let_writers_in()
                    if not chunk:
                        os.fsync(target.fileno())
                        return
                    view = memoryview(chunk)
                    while view:
                        view = view[target.write(view) :]
                    self._done += len(chunk)
        except OSError as exc:
            self._error = storage_error(f"cannot write {self._path}", exc)


def _make_sound(part: str, source: Environment, entries: Sequence[LoggedEntry]) -> int:
    """Apply ``entries`` to a copy, verify it, and remove state of its source.

    Returns the number of objects.
    """
    objects: list[int] = []
    env = Environment(
        part,
        create=False,
        verify=True,
        instead_of_log=entries,
        map_bytes=source.map_bytes,
        prove=lambda opened: objects.append(verify_content(opened)),
    )
    try:
        with env.writing() as txn:
            notes.end(env, txn)
    finally:
        env.close()
    try:
        for name in (LOCK_FILE, LOG_FILE, RESERVE_FILE):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(part, name))
        shutil.rmtree(os.path.join(part, LOCKS))
        handle = os.open(os.path.join(part, DATA_FILE), os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        sync_directory(part)
    except OSError as exc:
        raise storage_error(f"cannot write {part}", exc) from exc
    return objects[0]


def _replace(data: str, target: str) -> None:
    """Replace the data file of the store at ``target`` with the file ``data``.

    BusyError if a process has that store open.
    """
    directory = StoreDirectory(target)
    with directory.exclusive():
        if directory.others_present():
            raise BusyError(f"{target} is open; close it before it is replaced")
        # First: if this fails, the old store is unchanged.
        directory.make_alike(data)
        # The new file is marked as needing no log: a log that exists belongs to the old file.
        os.replace(data, directory.data_path)
        directory.remove_derived()
        directory.sync_names()
