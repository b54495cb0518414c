"""The version of a store's rows: it changes with every row, and leads to the rows that changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import DeleteRow, NewObject, PutRow, Versioning, Write
from casstore.format.digest import Digest


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
