"""Opens the index of a store: in its directory, in its schema on a server, or in memory.

A file that is damaged, or of another version of casstore, is deleted with a warning and rebuilt.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar
from weakref import WeakKeyDictionary, finalize

from casstore.engine.forks import Lock
from casstore.engine.protocol import Engine
from casstore.errors import ReadOnlyError, StorageError
from casstore.search import postgres, sqlite
from casstore.search.sqlite import DamagedIndexError, SqliteIndex
from casstore.search.tables import Database
from casstore.store import Store

Result = TypeVar("Result")

_MAX_IDLE: Final = 4

_lock = Lock()
_in_memory: Final[WeakKeyDictionary[Engine, tuple[Lock, SqliteIndex]]] = WeakKeyDictionary()
# Open files that no call uses. They are closed with their engine.
_idle: Final[WeakKeyDictionary[Engine, list[SqliteIndex]]] = WeakKeyDictionary()


def with_index(store: Store, work: Callable[[Database], Result]) -> Result:
    """Call ``work`` with the store's index; again with an empty one if the file is damaged.

    ReadOnlyError if the store is open read-only and has no index that can be read.
    """
    try:
        with _opened(store.engine) as db:
            return work(_required(store, db))
    except DamagedIndexError as exc:
        directory, readonly = _directory(store.engine)
        assert directory is not None, "only a file is damaged in this way"
        if readonly:
            raise StorageError(
                f"{exc}; the store is open read-only, so it is not rebuilt: "
                "run `casstore search --rebuild`"
            ) from exc
        sqlite.remove(directory)
        warnings.warn(f"the search index is rebuilt: {exc}", RuntimeWarning, stacklevel=4)
    try:
        with _opened(store.engine) as db:
            return work(_required(store, db))
    except DamagedIndexError as exc:
        raise StorageError(
            f"{exc}; the index is damaged again after a rebuild: check the disk"
        ) from exc


def _required(store: Store, db: Database | None) -> Database:
    if db is None:
        raise ReadOnlyError(
            "this store has no search index, and is open read-only; run `casstore search "
            "--rebuild`, or open it for writing"
        )
    return db


def _directory(engine: Engine) -> tuple[str | None, bool]:
    """The directory of an engine that has one, and whether it is open read-only."""
    path = getattr(engine, "path", None)
    return (path if isinstance(path, str) else None), bool(getattr(engine, "readonly", False))


@contextmanager
def _opened(engine: Engine) -> Iterator[Database | None]:
    directory, readonly = _directory(engine)
    if directory is not None:
        index = _take(engine) or sqlite.opened(directory, readonly=readonly)
        if index is None:
            yield None
            return
        try:
            with sqlite.translated(index.path):
                yield index
        except BaseException:
            index.close()
            raise
        _put_back(engine, index)
        return
    if isinstance(engine, postgres.Server):
        with postgres.opened(engine) as on_server:
            yield on_server
        return
    with _lock:
        if engine not in _in_memory:
            _in_memory[engine] = Lock(), sqlite.in_memory()
        lock, index = _in_memory[engine]
    with lock:
        yield index


def _take(engine: Engine) -> SqliteIndex | None:
    """An open file of this engine that no other call uses."""
    while True:
        with _lock:
            idle = _idle.get(engine)
            index = idle.pop() if idle else None
        if index is None or index.is_in_place():
            return index
        index.close()


def _put_back(engine: Engine, index: SqliteIndex) -> None:
    with _lock:
        idle = _idle.get(engine)
        if idle is None:
            idle = _idle[engine] = []
            finalize(engine, _close_all, idle)
        if len(idle) < _MAX_IDLE:
            idle.append(index)
            return
    index.close()


def _close_all(idle: list[SqliteIndex]) -> None:
    while idle:
        idle.pop().close()


def remove(store: Store) -> None:
    """Delete the index; the next search builds it again.

    ReadOnlyError if the store is open read-only.
    """
    directory, readonly = _directory(store.engine)
    if readonly:
        raise ReadOnlyError("cannot delete the search index: the store is open read-only")
    if directory is not None:
        sqlite.remove(directory)
        return
    with _opened(store.engine) as db:
        assert db is not None
        with db.writing():
            db.clear()
