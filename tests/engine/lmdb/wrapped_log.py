"""Brings the redo log of an open store into a state that tests of its readers need."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from casstore.engine.lmdb import recent
from casstore.engine.lmdb.applying import full_slabs
from casstore.engine.lmdb.log import MAX_LOG_BYTES
from casstore.store import Store
from tests.maintenance.wounds import engine_of


def wrap_log(store: Store) -> None:
    """Leave commits that only the log holds, and of which the oldest has the highest offset.

    One commit is made while the log is applied. Those after it reach the end of the file, so the
    newest ones are at its start again.
    """
    engine = engine_of(store)
    assert engine._behind is not None
    engine._behind.stop()
    source = random.Random(9)

    def put() -> None:
        store.put_blob(source.randbytes(20_000))

    def put_first(*given: Any) -> Any:
        put()
        return full_slabs(*given)

    # The next commit begins a new log.
    engine._env.retire_log()
    for _ in range(16):
        put()
    with patch.object(recent, "full_slabs", put_first):
        assert engine._env.recent.apply_concurrently()
    memtable = engine._env.recent.memtable
    # The file may have grown before.
    for _ in range(MAX_LOG_BYTES // 20_000):
        if memtable.last.offset >= memtable.recovery_point.applied.offset:
            put()
    assert memtable.last.offset < memtable.recovery_point.applied.offset
