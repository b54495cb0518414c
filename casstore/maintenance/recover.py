"""recover: apply the redo log of a store that was not closed, or discard that log.

Opening such a store reads its log, so ``recover`` is not needed before that. It leaves a data file
that needs no log, as closing the store does. If the log is lost or damaged, ``recover`` is the way
to give up the commits that only the log held. No other process may have the store open.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from casstore.engine.lmdb.applying import LOG_KEY
from casstore.engine.lmdb.directory import StoreDirectory
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.log import (
    LOG_FILE,
    RecoveryPoint,
    decode_recovery_point,
    surviving_records,
)
from casstore.engine.lmdb.page_scan import PageFile
from casstore.engine.lmdb.verification import verify_content
from casstore.errors import CorruptionError
from casstore.maintenance.files import require_directory
from casstore.session.arguments import check_flag


class RecoverReport(NamedTuple):
    """What recovering did.

    Attributes:
        needed_log: false: the store was closed, and nothing was changed
        commits_recovered: commits read from the log, now in data.mdb
        commits_discarded: readable commits that were lost with the log, if it was discarded
    """

    needed_log: bool
    commits_recovered: int
    commits_discarded: int | None


def recover(path: str | os.PathLike[str], *, discard_log: bool = False) -> RecoverReport:
    """Make the data file of the store at ``path`` complete, so that it needs no log.

    ``discard_log`` gives up the commits that only the log holds. The data file is sound without
    them: it has all commits up to the one that was applied last. BusyError if the store
    is open; CorruptionError if the log is missing or damaged and ``discard_log`` is False. After
    any error the store is unchanged.

    >>> store.close()
    >>> recover(place / "store").needed_log
    False
    """
    check_flag(discard_log, "discard_log")
    directory = _open_directory(path)
    with directory.alone(0.0):
        state = _read_log_state(directory)
        if not state.in_use:
            return RecoverReport(False, 0, None)
        readable = _count_readable(directory, state)
        env = Environment(
            directory.path,
            create=False,
            instead_of_log=() if discard_log else None,
            prove=verify_content,
            directory=directory,
        )
        try:
            recovered = env.recent.recovered
            env.retire_log()
        finally:
            env.close()
    return RecoverReport(True, recovered, readable if discard_log else None)


def count_unapplied(path: str | os.PathLike[str]) -> int | None:
    """How many commits only the log holds, as far as it can be read; None: the store was closed.

    Changes nothing. BusyError if the store is open.

    >>> store.close()
    >>> count_unapplied(place / "store") is None
    True
    """
    directory = _open_directory(path)
    with directory.alone(0.0):
        state = _read_log_state(directory)
        return _count_readable(directory, state) if state.in_use else None


def _open_directory(path: str | os.PathLike[str]) -> StoreDirectory:
    place = require_directory(path, "recover", "PostgreSQL recovers when the server starts")
    directory = StoreDirectory(place)
    directory.prepare(create=False)
    return directory


def _read_log_state(directory: StoreDirectory) -> RecoveryPoint:
    """The recovery point in the tables, read without LMDB: opening the store may need the log."""
    with PageFile(directory.data_path) as file:
        for meta in file.metas()[:1]:
            for _, entry in file.walk(meta.main.root, lambda lost: None, lambda page, pages: True):
                # LMDB's format 1 ends the names of databases in a zero byte.
                if entry.key.rstrip(b"\0") == LOG_KEY:
                    state = decode_recovery_point(entry.value or b"")
                    if state is not None:
                        return state
    raise CorruptionError(
        f"{directory.data_path} does not say which log it needs, or that row is damaged"
    )


def _count_readable(directory: StoreDirectory, state: RecoveryPoint) -> int:
    """How many records of the log that the tables need, and do not hold yet, can be read."""
    records = surviving_records(os.path.join(directory.path, LOG_FILE)) or []
    numbers = {each.lsn for each in records if each.log_id == state.log_id}
    return sum(number > state.applied.lsn for number in numbers)
