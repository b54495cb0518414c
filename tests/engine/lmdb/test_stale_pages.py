"""A page write that the disk lost leaves the page's earlier content: sound, but old.

Found by ``tools/torture.py replay``: without flushes a crash may keep the newest meta page
and lose one of the pages it relies on. LMDB reuses pages, so what lies there may be an older
version of the same table, which no check of structure tells from the right one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import casstore
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import CorruptionError
from tests.maintenance.wounds import engine_of

PAGE_BYTES = 4096
COMMITS = 24
LATEST = RowKey("heads", b"latest")


def commit(store: casstore.Store, number: int) -> None:
    """One commit: a value, a row of its own, and the row that all commits replace."""
    digest = store.put_value({"commit": number})
    rows = [PutRow("history", b"%04d" % number, digest), PutRow(*LATEST, b"%04d" % number)]
    store.engine.write(Write(rows=rows))


def observe(store: casstore.Store) -> str:
    """Everything the store says, in one word: how far it got, or what does not fit."""
    history = store.engine.scan_rows("history")
    store.get_many([row.value for row in history])
    latest = store.engine.get_rows([LATEST])[0] or b"none"
    keys = [row.key for row in history]
    return latest.decode() if keys and keys[-1] == latest else f"{keys[-1:]} and {latest!r}"


@pytest.mark.parametrize("engine", [0, 1])
def test_a_verifying_open_refuses_a_page_of_an_earlier_commit(engine: int, tmp_path: Path) -> None:
    place = tmp_path / "store"
    snapshots: list[bytes] = []
    with casstore.open(place, "relaxed", lmdb_version=engine) as store:
        for number in range(COMMITS):
            commit(store, number)
            engine_of(store).apply_log()
            snapshots.append((place / "data.mdb").read_bytes())
    newest = snapshots[-1]
    stale = {
        (page, snapshot[page : page + PAGE_BYTES])
        for snapshot in snapshots[-8:-1]
        # The meta pages come first; losing those is losing whole commits, which is allowed.
        for page in range(2 * PAGE_BYTES, len(snapshot), PAGE_BYTES)
        if snapshot[page : page + PAGE_BYTES] != newest[page : page + PAGE_BYTES]
    }
    refused, unnoticed = 0, []
    for number, (page, content) in enumerate(sorted(stale)):
        damaged = tmp_path / f"{engine}-{number}"
        damaged.mkdir()
        image = newest[:page] + content + newest[page + PAGE_BYTES :]
        (damaged / "data.mdb").write_bytes(image)
        try:
            with casstore.open(damaged, verify=True) as store:
                said = observe(store)
        except CorruptionError:
            refused += 1
            continue
        if said != f"{COMMITS - 1:04d}":
            unnoticed.append((page // PAGE_BYTES, said))
    assert refused > 0
    assert unnoticed == []
