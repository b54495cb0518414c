"""Creating a store: complete, or not at all.

LMDB writes the first pages of a new file without flushing them, so a crash may leave a file that
cannot be opened. So a store is built under a temporary name, and renamed when its first transaction
is flushed.
"""

from __future__ import annotations

import os
from typing import Final

import lmdb

from casstore.engine.conditions import wall_clock_ms
from casstore.engine.files import open_regular
from casstore.engine.lmdb.applying import LOG_KEY
from casstore.engine.lmdb.directory import (
    FILE_MODE,
    NEW_FILE,
    NEW_LOCK_FILE,
    StoreDirectory,
    storage_error,
)
from casstore.engine.lmdb.log import first_recovery_point
from casstore.engine.protocol import TABLES
from casstore.format.header import header_rows

INDEX: Final = "index"
SLABS: Final = "slabs"
DICTIONARIES: Final = "dictionaries"
META: Final = "meta"
COLLECTION: Final = "collection"
TOUCHES: Final = "touches"
# The slots for readers while the store is built; it has no readers yet, and LMDB needs a few.
_NEW_READERS: Final = 16
#: The LMDB databases of a store, by name.
DATABASES: Final = (INDEX, SLABS, DICTIONARIES, META, COLLECTION, TOUCHES, *TABLES)


def create_store(directory: StoreDirectory, map_bytes: int, lmdb_version: int) -> None:
    """Create the data file of a new store; the caller holds the directory's mutex.

    Raises StorageError or lmdb.Error.
    """
    new = os.path.join(directory.path, NEW_FILE)
    new_lock = os.path.join(directory.path, NEW_LOCK_FILE)
    try:
        for leftover in (new, new_lock):
            if os.path.lexists(leftover):
                os.unlink(leftover)
        directory.reserve_lock_file(NEW_LOCK_FILE, _NEW_READERS)
        # Create the file here, as LMDB would follow a symbolic link. It accepts an empty file.
        os.close(open_regular(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        _build(new, map_bytes, lmdb_version)
        os.unlink(new_lock)
        os.rename(new, directory.data_path)
        directory.sync_names()
    except OSError as exc:
        raise storage_error(f"cannot create {directory.path}", exc) from exc


def _build(path: str, map_bytes: int, lmdb_version: int) -> None:
    env = lmdb.open(
        os.fsencode(path),
        subdir=False,
        mode=FILE_MODE,
        map_size=map_bytes,
        max_dbs=len(DATABASES),
        lib_version=lmdb_version,
        max_readers=_NEW_READERS,
    )
    try:
        with env.begin(write=True) as txn:
            for name in DATABASES:
                env.open_db(name.encode(), txn=txn)
            meta = env.open_db(META.encode(), txn=txn)
            for key, value in header_rows(wall_clock_ms()).items():
                txn.put(key, value, db=meta)
            txn.put(LOG_KEY, first_recovery_point().encode())
    finally:
        env.close()
