"""A store copied while it is in use: one moment of it, in a directory of its own.

LMDB copies a snapshot under a read transaction, which may take long. Two threads do that
through a pipe, so that the caller can be told how far it has come and can stop it, and so
that closing the store or forking the process need not wait: the copy gives way. After a fork
it starts anew.

The copy is built beside its place. It is opened there, and everything in it is verified; what
belonged to the running store alone is removed: the notes for its collector, who is not at
work here, and LMDB's lock file. Then it is flushed and renamed.
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
from casstore.engine.lmdb.log import LOG_FILE, Position
from casstore.engine.lmdb.memtable import Entry
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
_PULSE_S: Final = 0.05
# How often a copy starts anew because it had to give way.
_MAX_ATTEMPTS: Final = 16

Pulse = Callable[[int, int | None], None]


def copy_store(
    env: Environment, target: str, *, compact: bool, replace: bool, pulse: Pulse | None
) -> HotCopyReport:
    """Copy the store of an open environment to ``target``."""
    place = os.path.realpath(target)
    own = os.path.realpath(env.path)
    if os.path.commonpath((place, own)) == own:
        raise InvalidInputError(f"{target} lies in the store itself; choose a place outside")
    if os.path.lexists(target):
        if not replace:
            raise TargetExistsError(target)
        # Only a store may be replaced by one.
        StoreDirectory(target).prepare(create=False)
    # What the copy of the tables may not hold yet.
    with env.snapshot() as (_, view):
        entries = view.entries()
    with part_directory(place) as part:
        data = os.path.join(part.path, DATA_FILE)
        for _ in range(_MAX_ATTEMPTS):
            if _Copy(env, data, compact=compact).run(pulse):
                break
            env.gate.check()
        else:
            raise BusyError(f"copying {env.path} had to give way to forks again and again")
        objects = _make_sound(part.path, env, entries)
        try:
            size_bytes = os.stat(data).st_size
            if replace and os.path.lexists(place):
                _replace(data, place)
                sync_directory(os.path.dirname(place))
            else:
                part.publish()
        except OSError as exc:
            if exc.errno in TAKEN:
                raise TargetExistsError(target) from exc
            raise storage_error(f"cannot create {target}", exc) from exc
    return HotCopyReport(size_bytes, objects)


class _Copy:
    """One attempt: LMDB writes into a pipe, and a second thread from there into the file."""

    def __init__(self, env: Environment, path: str, *, compact: bool) -> None:
        self._env = env
        self._path = path
        self._compact = compact
        self._stop = threading.Event()
        self._error: CasstoreError | None = None
        self._gave_way = False
        self._done = 0
        # Held while whether writers are kept out is asked or changed.
        self._turn = threading.Lock()
        self._keeps_out = False

    def run(self, pulse: Pulse | None) -> bool:
        """Copy everything; False if it had to give way."""
        # Only this one is begun here, where Ctrl-C may come at any moment: the other would wait
        # inside LMDB for somebody to read, and whoever closes the store or forks for it.
        save = threading.Thread(target=self._save, name="casstore-copy", daemon=True)
        try:
            copying = True
            save.start()
            while copying:
                save.join(_PULSE_S)
                copying = save.is_alive()
                # At least once, however quick it was.
                if pulse is not None:
                    pulse(self._done, None if self._compact else self._total())
        except RuntimeError as exc:
            if save.ident is not None:
                raise
            raise StorageError(f"{self._env.path} cannot be copied: {exc}") from exc
        finally:
            # Also if the caller is interrupted: both end at the next chunk.
            self._stop.set()
            # One that was interrupted as it began finds that out before it does anything.
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
            # Closed meanwhile; the copy says so itself.
            return None

    def _dump(self, into: Descriptor) -> None:
        """Have LMDB write the snapshot into the pipe."""
        # Who stops reading must not kill the process, whatever it does with this signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        # LMDB waits for writers before it takes its snapshot, and a transaction that is given up in
        # this process would wait for the copy in turn. Writers here wait until it has begun.
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
        """Have LMDB write, and what comes out of the pipe into the file."""
        if self._stop.is_set():
            return
        try:
            # A copy in a child would keep the pipe open, and who reads from it waiting.
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
            # Who writes into it is told that nobody reads any more.
            out.close()
            dump.join()

    def _write(self, out: Descriptor) -> None:
        """Write what comes out of the pipe into the file, until it ends or must end."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with open(open_regular(self._path, flags), "wb", buffering=0) as target:
                while not self._stop.is_set():
                    if self._env.gate.is_awaited:
                        self._gave_way = True
                        return
                    chunk = os.read(out.fileno(), _CHUNK_BYTES)
                    # Whatever comes is of a snapshot that LMDB has.
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


def _make_sound(part: str, source: Environment, entries: Sequence[tuple[Position, Entry]]) -> int:
    """Complete a copy, verify it, and remove what belongs to its source; the number of objects."""
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
    """Put a data file in the place of another store's, which nobody may have open."""
    directory = StoreDirectory(target)
    with directory.exclusive():
        if directory.others_present():
            raise BusyError(f"{target} is open; close it before it is replaced")
        # Before anything else: if that cannot be, the old store is what it was.
        directory.make_alike(data)
        # It says that it needs no log: what lies there belongs to the old file.
        os.replace(data, directory.data_path)
        directory.sync_names()
