"""Keeping states behind the writers of an environment, and returning to one (``relaxed``).

What a kept state is, and why it stays whole on the disk, ``kept`` says. Here is who keeps it: one
keeper for each environment that writes without flushes, with the read transactions that stand on
what it kept.
"""

from __future__ import annotations

import os
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, Final

import lmdb

from casstore.engine.lmdb import guard
from casstore.engine.lmdb.directory import FILE_MODE, StoreDirectory, storage_error
from casstore.engine.lmdb.kept import KeptFile, KeptState, read_kept
from casstore.engine.lmdb.translation import translate
from casstore.errors import (
    BusyError,
    CorruptionError,
    FormatVersionError,
    StorageError,
    UnsettledError,
)
from casstore.format.hashing import plain_hash

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment

# How often readers of those are looked for who were killed.
_DISMISS_S: Final = 1.0


def inode_of(handle: int) -> int:
    """The number of a file's inode, by which a copy is told from the file that was copied."""
    return os.fstat(handle).st_ino


def return_to_kept(directory: StoreDirectory, *, readonly: bool) -> None:
    """After a power loss, undo what came after the last state that was kept.

    Where none was kept, or none of this file, or what was kept is damaged, the marker stays,
    and the file has to prove itself. Call inside ``exclusive``, before LMDB sees the file.
    """
    boot = directory.ended_boot()
    if boot is None:
        return
    found = read_kept(directory.kept_path, boot)
    state = found.newest
    if state is None:
        return
    kinship = _compare(directory.data_path, state)
    if kinship is _Kinship.NONE:
        return
    if readonly:
        raise UnsettledError(
            f"{directory.path} was being written when the machine went down, or a flush failed; "
            "open it once for writing, which returns it to the last state that is whole"
        )
    if directory.others_present():
        # They read pages that would be written over, and LMDB counts transactions where all
        # who have the file open see it: the next one would go on from the older meta page.
        raise BusyError(
            f"{directory.path} has to return to the last state that is whole, and somebody still "
            "reads a later one; close it there"
        )
    if kinship is _Kinship.COPY and not _is_whole(directory.data_path, state):
        return
    guard.write_metas(directory.data_path, state.pages)
    if kinship is _Kinship.SAME and not found.doubtful:
        directory.clear_unsynced()


class _Kinship(Enum):
    """What the data file there is to the one that a state was kept of."""

    SAME = "the same"
    #: Copied with what was kept, but perhaps at another moment, while somebody wrote.
    COPY = "a copy"
    NONE = "none"


def _compare(data_path: str, state: KeptState) -> _Kinship:
    try:
        handle = os.open(data_path, os.O_RDONLY)
        try:
            if plain_hash(guard.read_root(handle, state.pages)) != state.root:
                return _Kinship.NONE
            same = inode_of(handle) == state.inode
        finally:
            os.close(handle)
    except OSError as exc:
        raise storage_error(f"cannot read {data_path}", exc) from exc
    except (CorruptionError, FormatVersionError):
        # What was kept are no meta pages, or those of another LMDB: it says nothing of this file.
        return _Kinship.NONE
    return _Kinship.SAME if same else _Kinship.COPY


def _is_whole(data_path: str, state: KeptState) -> bool:
    try:
        guard.verify_structure(data_path, state.pages)
    except CorruptionError:
        return False
    return True


class Wake:
    """Wakes the one thread that waits for it; a wake that comes early is kept.

    An Event does the same with Python code around its lock, and an interrupt inside that code
    leaves the lock held for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or the next one that waits."""
        try:
            self._lock.release()
        except RuntimeError:
            # Not locked: it is set already.
            return

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, and clear it; False when the time is up."""
        return self._lock.acquire(timeout=timeout_s)


class Keeper:
    """Keeps states of one environment, and has readers stand on what was kept last."""

    def __init__(self, env: Environment, directory: StoreDirectory, page_bytes: int) -> None:
        """Keep the state that this process begins with, before it writes anything."""
        self._env = env
        self._directory = directory
        self._page_bytes = page_bytes
        # Taken before the environment's ``write_lock`` by whoever keeps another state.
        self._keeping = threading.Lock()
        # What keeps LMDB from writing over the kept state.
        self._readers: list[lmdb.Transaction[bytes]] = []
        self._kept_transaction = -1
        self._dismissed_at = time.monotonic()
        # Why nothing more may be written. Once a flush has failed, a later one says nothing of
        # the pages that the first one lost.
        self._lost: StorageError | None = None
        #: Set by every commit: there is something to keep.
        self.unkept = Wake()
        boot = directory.boot()
        self._file = KeptFile(directory.kept_path, boot, FILE_MODE)
        try:
            # The file of one who was killed just now still says what the disk has of the rest.
            fresh = directory.unsynced_boot() != boot
            self._file.prepare(page_bytes, self._is_ours, fresh=fresh)
            directory.sync_names()
            with env.write_lock:
                self._settle(self._stand())
        except BaseException:
            self.step_down()
            self.close()
            raise

    @property
    def standing(self) -> list[int]:
        """The transactions that readers stand on."""
        return [reader.id() for reader in self._readers]

    def keep(self) -> None:
        """Keep the newest state, unless it is the one that was kept last."""
        env = self._env
        with self._keeping:
            with env.write_lock:
                env.gate.check()
                if self._is_kept():
                    return
                state = self._stand()
            # Writers go on. Who closes or forks waits.
            env.gate.enter()
            try:
                self._settle(state)
                self._dismiss_dead()
            finally:
                env.gate.leave()

    def keep_last(self) -> None:
        """Keep the state that this process leaves behind; hold ``write_lock``, the gate shut.

        Others may have the store open still, who keep states of their own.
        """
        if not self._is_kept():
            self._settle(self._stand())

    def step_down(self) -> None:
        """Let go of the readers: the environment that they were begun in is closed next."""
        self._readers = []

    def stand_again(self) -> None:
        """Keep a state in a new environment, before anything is written in it."""
        self._settle(self._stand())

    def fall(self, why: BaseException) -> None:
        """Let nothing more be written: nobody stands on the kept state, so its pages might go."""
        said = str(why) or "interrupted"
        self._lost = StorageError(f"{said}; close the store, and open it again")

    def require_flushed(self) -> None:
        """Raise if a state could not be kept, in a way that later ones do not make good."""
        if self._lost is not None:
            raise StorageError(*self._lost.args)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _is_ours(self, state: KeptState) -> bool:
        """Is a state that is there already one of this data file?

        Who writes a backup over the file has it go back, and nothing that is kept of it would
        count until it has come as far again.
        """
        return (
            state.inode == inode_of(self._env.data_handle)
            and state.transaction <= self._newest_transaction()
        )

    def _is_kept(self) -> bool:
        return self._kept_transaction == self._newest_transaction()

    def _newest_transaction(self) -> int:
        try:
            newest: int = self._env.handle.info()["last_txnid"]
        except lmdb.Error as exc:
            raise translate(exc, self._env.path) from exc
        return newest

    def _stand(self) -> KeptState:
        """Take the newest state, and have a reader stand on it; hold ``write_lock``."""
        env = self._env
        try:
            # No process commits while this one could.
            txn = env.begin_write()
            try:
                pages = os.pread(env.data_handle, 2 * self._page_bytes, 0)
                root = plain_hash(guard.read_root(env.data_handle, pages))
                reader = env.handle.begin()
                newest = txn.id() - 1
            finally:
                txn.abort()
        except lmdb.Error as exc:
            raise translate(exc, env.path) from exc
        except OSError as exc:
            raise storage_error(f"cannot read {env.data_path}", exc) from exc
        self._readers.append(reader)
        return KeptState(newest, pages, inode_of(env.data_handle), root)

    def _dismiss_dead(self) -> None:
        """Now and then, take away the readers of those who were killed.

        Each that writes has one on a state, and leaves it there.
        """
        now = time.monotonic()
        if now - self._dismissed_at < _DISMISS_S:
            return
        self._dismissed_at = now
        try:
            self._env.handle.reader_check()
        except lmdb.Error:
            # The state is kept. They stay for another round, which costs pages, not data.
            return

    def _settle(self, state: KeptState) -> None:
        """See a state onto the disk and keep it; from then on nobody need stand on older ones."""
        self.require_flushed()
        *older, reader = self._readers
        try:
            try:
                self._env.handle.sync(True)
            except lmdb.Error as exc:
                self._lost = StorageError(
                    f"{translate(exc, self._env.path)}; what was committed since then may be lost: "
                    "close the store, and open it when the disk is sound"
                )
                self._directory.mark_lost()
                raise self._lost from exc
            self._file.keep(state)
        except BaseException:
            # The state before stays the kept one, and whoever stands on it stays, too.
            self._readers.remove(reader)
            reader.abort()
            raise
        self._kept_transaction = state.transaction
        self._readers = [reader]
        for earlier in older:
            earlier.abort()
