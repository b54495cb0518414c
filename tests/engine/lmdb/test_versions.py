"""The version of a store's rows: it changes with every row, and leads to the rows that changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.log import FLUSHED, PUBLISHED
from casstore.engine.protocol import DeleteRow, NewObject, PutRow, Versioning, Write
from casstore.format.digest import Digest
from casstore.maintenance import recover


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LmdbEngine]:
    """An engine whose log is in use."""
    made = LmdbEngine(str(tmp_path / "s"))
    for key in (b"a", b"b", b"c"):
        put(made, key)
    yield made
    made.close()


def put(engine: LmdbEngine, key: bytes, value: bytes = b"") -> None:
    engine.write(Write(rows=[PutRow("pins", key, value)]))


def test_every_changed_row_changes_the_rows_version(engine: LmdbEngine) -> None:
    assert isinstance(engine, Versioning)
    seen = [engine.rows_version()]
    assert engine.rows_version() == seen[0]
    put(engine, b"a", b"1")
    seen.append(engine.rows_version())
    engine.write(Write(rows=[DeleteRow("pins", b"a")]))
    seen.append(engine.rows_version())
    assert len(set(seen)) == 3


def test_changed_keys_returns_the_keys_changed_in_the_table_since_a_version(
    engine: LmdbEngine,
) -> None:
    since = engine.rows_version()
    assert engine.changed_keys("pins", since) == []
    put(engine, b"b", b"1")
    engine.write(Write(rows=[DeleteRow("pins", b"c"), PutRow("heads", b"h", b"")]))
    assert engine.changed_keys("pins", since) == [b"b", b"c"]
    assert engine.changed_keys("heads", since) == [b"h"]
    assert engine.changed_keys("pins", engine.rows_version()) == []


def test_changed_keys_returns_none_if_the_log_no_longer_has_the_changes(engine: LmdbEngine) -> None:
    since = engine.rows_version()
    put(engine, b"b", b"1")
    # Larger than what is logged: it goes straight into the tables.
    content = bytes(2 << 20)
    new = NewObject(bytes(Digest.of_blob(content)), 0, content, ())
    engine.write(Write([new], rows=[PutRow("pins", b"large", b"")]))
    assert engine.changed_keys("pins", since) is None
    assert engine.changed_keys("pins", engine.rows_version()) == []


@pytest.mark.parametrize("since", [b"", b"something else", bytes(24)])
def test_changed_keys_returns_none_for_a_version_of_another_store(
    engine: LmdbEngine, since: bytes
) -> None:
    assert engine.changed_keys("pins", since) is None


def test_the_version_stays_when_the_store_is_closed_and_opened(tmp_path: Path) -> None:
    engine = LmdbEngine(str(tmp_path / "s"))
    for key in (b"a", b"b", b"c"):
        put(engine, key)
    before = engine.rows_version()
    engine.close()
    again = LmdbEngine(str(tmp_path / "s"))
    assert again.rows_version() == before
    put(again, b"d")
    assert again.rows_version() != before
    again.close()


def test_a_version_counts_only_commits_that_a_power_loss_cannot_undo(tmp_path: Path) -> None:
    """After a power loss later commits get the same LSNs, and would look like known ones."""
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    for key in (b"a", b"b", b"c"):
        put(engine, key)
    engine.rows_version()
    log = engine._env.recent._log
    assert log is not None
    assert log.lsns[FLUSHED] == log.lsns[PUBLISHED]
    engine.close()


def test_discarding_the_log_discards_the_index_that_knows_its_commits(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with casstore.open(tmp_path / "s") as store:
        session = store.session("s")
        session.append("something to find")
        assert isinstance(store.engine, LmdbEngine)
        store.engine.apply_log()
        for number in range(4):
            session.append(f"find number {number}")
        assert len(store.search("find")) == 5
        shutil.copytree(tmp_path / "s", killed, ignore=shutil.ignore_patterns("lock*"))
    assert (killed / "search.sqlite").exists()
    assert recover.recover(killed, discard_log=True).commits_discarded
    assert not (killed / "search.sqlite").exists()
    with casstore.open(killed) as store:
        head = store.session("s").head()
        assert head is not None
        assert len(store.search("find")) == head.revision < 5
