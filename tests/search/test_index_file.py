"""The file of the index: updated in parts, resumed, rebuilt when damaged, safe to delete."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import NodeDraft
from casstore.engine.protocol import Engine, Row
from casstore.errors import ReadOnlyError, StorageError
from casstore.search import indexing, rebuild, remove, update
from casstore.search.sqlite import DamagedIndexError, translated
from casstore.session.attempts import read_again
from casstore.store import Store


def fill(store: Store, sessions: int = 3, nodes: int = 10) -> None:
    for session in range(sessions):
        drafts = [f"needle {session} {number}" for number in range(nodes)]
        store.session(f"s{session}").append(*drafts)


def test_an_update_reads_only_what_has_changed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, sessions=20)
    assert update(store).texts_added == 200
    sessions_read = 0
    tables: list[str] = []
    scan_rows = type(store.engine).scan_rows

    def counted(attempt: Callable[[], bool]) -> bool:
        nonlocal sessions_read
        sessions_read += 1
        return read_again(attempt)

    def noted_scan(self: Engine, table: str, **options: Any) -> list[Row]:
        tables.append(table)
        return scan_rows(self, table, **options)

    monkeypatch.setattr(indexing, "read_again", counted)
    monkeypatch.setattr(type(store.engine), "scan_rows", noted_scan)
    assert update(store).texts_added == 0
    assert (sessions_read, tables) == (0, [])
    store.session("s7").append("one more")
    assert update(store).texts_added == 1
    assert sessions_read == 1
    assert "heads" not in tables


def test_a_write_without_text_does_not_change_the_index(store: Store, place: Path) -> None:
    fill(store)
    update(store)
    before = (place / "search.sqlite").stat().st_mtime_ns
    lease = store.session("s0").claim_lease("worker", ttl_ms=60_000)
    assert lease is not None
    assert len(store.search("needle", limit=100)) == 30
    assert (place / "search.sqlite").stat().st_mtime_ns == before


def test_an_update_that_was_interrupted_continues_where_it_stopped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_BUDGET", 100)
    fill(store, sessions=2, nodes=500)

    def interrupt(step: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            update(store, progress=interrupt)
    report = update(store)
    assert 0 < report.texts_added <= 710
    assert report.texts == 1000
    assert len(store.search("needle", limit=2000)) == 1000


def test_a_process_that_is_killed_while_indexing_leaves_an_index_that_is_completed(
    place: Path,
) -> None:
    with casstore.open(place, "relaxed") as store:
        fill(store, sessions=2, nodes=600)
    script = (
        "import casstore, os, sys\n"
        "from casstore.search import indexing, update\n"
        "indexing._BUDGET = 100\n"
        "steps = []\n"
        "def report(step):\n"
        "    steps.append(step)\n"
        "    if len(steps) == 3: os.kill(os.getpid(), 9)\n"
        "update(casstore.open(sys.argv[1]), progress=report)\n"
    )
    root = str(Path(casstore.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script, str(place)], env={**os.environ, "PYTHONPATH": root}
    )
    assert done.returncode == -9
    with casstore.open(place) as store:
        report = update(store)
        assert (report.texts_added < 1200, report.texts) == (True, 1200)
        assert len(store.search("needle", limit=2000)) == 1200


def test_threads_that_search_at_the_same_time_share_one_index(store: Store) -> None:
    fill(store, sessions=4, nodes=50)
    counts: list[int] = []

    def work() -> None:
        counts.append(len(store.search("needle", limit=1000)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [200] * 4
    assert update(store).texts == 200


def test_the_file_is_for_its_owner_alone_and_may_be_deleted_at_any_time(
    store: Store, place: Path
) -> None:
    fill(store)
    assert len(store.search("needle", limit=100)) == 30
    file = place / "search.sqlite"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.unlink()
    assert len(store.search("needle", limit=100)) == 30
    remove(store)
    assert not file.exists()


def test_a_link_in_place_of_the_file_is_refused(store: Store, place: Path, tmp_path: Path) -> None:
    (place / "search.sqlite").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"search\.sqlite: it is a symbolic link"):
        store.search("needle")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("damage", ["text", "zeros", "middle", "cut", "version"])
def test_a_damaged_index_is_rebuilt_with_a_warning(place: Path, damage: str) -> None:
    with casstore.open(place) as store:
        fill(store, sessions=5, nodes=60)
        assert len(store.search("needle", limit=2000)) == 300
    file = place / "search.sqlite"
    content = file.read_bytes()
    if damage == "version":
        connection = sqlite3.connect(file)
        with connection:
            connection.execute("UPDATE meta SET value = x'00' WHERE name = 'version'")
        connection.close()
    else:
        changed = {
            "text": b"not a database" * 100,
            "zeros": bytes(100) + content[100:],
            "middle": content[:8192] + b"\xff" * (len(content) - 8192),
            "cut": content[: len(content) // 2],
        }
        file.write_bytes(changed[damage])
    with casstore.open(place) as store:
        with pytest.warns(RuntimeWarning, match="the search index is rebuilt"):
            assert len(store.search("needle", limit=2000)) == 300
        assert len(store.search("needle", limit=2000)) == 300


def test_an_index_copied_from_another_store_yields_no_hits_and_is_rebuilt(
    store: Store, place: Path, tmp_path: Path
) -> None:
    fill(store)
    assert len(store.search("needle", limit=100)) == 30
    with casstore.open(tmp_path / "other") as other:
        other.session("s0").append(NodeDraft("only", "other needle"))
        shutil.copy(place / "search.sqlite", tmp_path / "other" / "search.sqlite")
        assert other.search("needle", fresh=False) == []
        assert [hit.node for hit in other.search("needle")] == ["only"]
        assert update(other).texts == 1


def test_a_read_only_store_uses_the_index_that_is_there_and_writes_nothing(place: Path) -> None:
    with casstore.open(place) as store:
        fill(store)
    with (
        casstore.open(place, readonly=True) as reader,
        pytest.raises(ReadOnlyError, match="casstore search --rebuild"),
    ):
        reader.search("needle")
    assert not (place / "search.sqlite").exists()
    with casstore.open(place) as store:
        store.search("needle")
        hidden = store.search("needle")[0]
        store.session(str(hidden.session)).tombstone([str(hidden.node)])
        store.session("s1").append("a newer needle")
    before = (place / "search.sqlite").read_bytes()
    with casstore.open(place, readonly=True) as reader:
        found = reader.search("needle", limit=100)
        with pytest.raises(ReadOnlyError):
            rebuild(reader)
    # The newest text is missing, and the hidden one is not shown.
    assert len(found) == 29
    assert (place / "search.sqlite").read_bytes() == before


def test_an_index_with_more_removed_texts_than_others_is_rebuilt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "_LEAST_GARBAGE", 50)
    for number in range(4):
        store.session(f"s{number}").append(*[f"straw {number} {at}" for at in range(100)])
    assert update(store).texts == 400
    for number in range(3):
        store.delete_session(f"s{number}")
    assert update(store).texts == 100
    assert update(store).texts_added == 100
    assert update(store).texts_added == 0
    assert len(store.search("straw", limit=1000)) == 100


def test_rebuilding_gives_the_same_answers(store: Store) -> None:
    fill(store)
    store.session("s0").fork("fork").append("needle of the fork", tool_state="needle")
    before = store.search("needle", limit=100)
    report = rebuild(store)
    assert (report.texts_added, report.texts, report.sessions) == (32, 32, 4)
    after = store.search("needle", limit=100)
    keep = [hit._replace(score=0) for hit in before]
    assert sorted(keep) == sorted([hit._replace(score=0) for hit in after])


def test_a_store_on_which_nothing_was_searched_has_no_index(store: Store, place: Path) -> None:
    fill(store)
    store.gc()
    store.check()
    assert "search.sqlite" not in os.listdir(place)


def test_an_sqlite_error_that_contains_the_word_full_is_not_a_full_disk() -> None:
    with pytest.raises(DamagedIndexError), translated("search.db"):
        sqlite3.connect(":memory:").execute("SELECT full")
