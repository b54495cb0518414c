"""What LMDB says, in our words: who catches an error must know what to do about it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb
import pytest

from casstore.engine.lmdb.translation import translate
from casstore.errors import (
    BusyError,
    CasstoreError,
    ClosedError,
    CorruptionError,
    ReadOnlyError,
    StorageError,
    StorageFullError,
)


def told(error: type[lmdb.Error], text: str, code: int = 0) -> lmdb.Error:
    """An error as py-lmdb raises it."""
    said = error(text)
    vars(said)["code"] = code
    return said


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (told(lmdb.MapFullError, "mdb_put"), StorageFullError),
        (told(lmdb.ReadersFullError, "mdb_txn_begin"), BusyError),
        (told(lmdb.ReadonlyError, "mdb_put"), ReadOnlyError),
        (told(lmdb.CorruptedError, "mdb_get"), CorruptionError),
        (told(lmdb.PageNotFoundError, "mdb_get"), CorruptionError),
        (told(lmdb.InvalidError, "mdb_env_open"), CorruptionError),
        (told(lmdb.VersionMismatchError, "mdb_env_open"), CorruptionError),
        # A handle that does not fit: LMDB's text speaks of closing, and nobody has closed it.
        (
            told(lmdb.BadDbiError, "MDB_BAD_DBI: The specified DBI handle was closed/changed"),
            CorruptionError,
        ),
        (told(lmdb.Error, "Attempt to operate on closed/deleted/dropped object."), ClosedError),
        (told(lmdb.Error, "something else"), StorageError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_every_error_has_a_type(said: lmdb.Error, means: type[CasstoreError]) -> None:
    found = translate(said, "my-store")
    assert type(found) is means
    assert "my-store" in str(found)


def test_a_full_disk_is_one_whoever_says_so() -> None:
    said = told(lmdb.DiskError, "mdb_txn_commit", errno.ENOSPC)
    assert type(translate(said, "s")) is StorageFullError
    assert type(translate(told(lmdb.Error, "MDB_SHORT_WRITE"), "s")) is StorageFullError


@pytest.mark.parametrize(
    ("free_bytes", "kind"), [(4096, StorageFullError), (1 << 30, StorageError)]
)
def test_a_write_cut_short_on_a_full_disk_is_no_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, kind: type[StorageError]
) -> None:
    """LMDB calls it an I/O error, and says nothing of room."""
    said = told(lmdb.Error, "mdb_txn_commit: Input/output error", errno.EIO)
    room = list(os.statvfs(tmp_path))
    room[1], room[4] = 1, free_bytes
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(room))
    assert type(translate(said, str(tmp_path))) is kind
