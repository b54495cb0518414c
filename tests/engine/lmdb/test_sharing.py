"""Handles of one store share its engine, and each has a durability of its own."""

from __future__ import annotations

from pathlib import Path

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.log import FLUSHED, PUBLISHED
from casstore.testing.inspection import open_places


def test_a_second_open_may_wait_for_the_disk_where_the_first_does_not(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as first:
        with casstore.open(tmp_path / "s", "full") as second:
            for number in range(3):
                first.put_blob(b"%d" % number)
            engine = first.engine
            assert isinstance(engine, LmdbEngine)
            log = engine._env.recent._log
            assert log is not None
            digest = second.put_blob(b"waits")
            assert log.lsns[FLUSHED] == log.lsns[PUBLISHED]
        assert first.get_blob(digest) == b"waits"
    assert open_places() == []
