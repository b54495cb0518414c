"""Every table goes along when a store goes elsewhere, and what salvage leaves out it lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES, DeleteRow, PutRow, Row, RowKey, Write
from casstore.maintenance import gc
from casstore.maintenance.backup import backup
from casstore.maintenance.check import check
from casstore.maintenance.copy import copy
from casstore.maintenance.policy import Policy, find_policy, set_policy
from casstore.maintenance.salvage import salvage
from casstore.maintenance.transfer.rows import CARRIED
from casstore.session import keys
from casstore.session.catalogue import KnownSession, bury
from casstore.session.records import Draft, Table
from casstore.session.state import runtime_of
from casstore.store import Store
from casstore.testing.engine_fixtures import all_rows
from tests.maintenance.wounds import (
    LONG,
    lose_slab,
    open_store,
    overwrite,
    pages_of,
    populate,
    step,
    wounding,
)

# Made anew, and what no session uses is not made again.
TABLES_AS_THEY_ARE = TABLES


def bury_halfway(store: Store, session: str) -> None:
    """Delete a session as far as somebody who is killed in the middle does."""
    key = keys.session_key(session)
    head, meta = store.engine.get_rows([RowKey("heads", key), RowKey("sessions", key)])
    bury(runtime_of(store), KnownSession(key, head, meta))


def fill(store: Store) -> None:
    """Rows in every table, and of every kind in those that have several."""
    populate(store)
    store.delete_session("s2")
    s1 = store.session("s1")
    set_policy(store, Policy(last=3))
    set_policy(store, Policy(everything=True), "s1")
    s1.expire_in(3_600_000)
    s1.protect(at=4, by="run 1", note="waits")
    s1.add_subjects(["alice", "bob"])
    step(store, "halfway", "a")
    store.session("halfway").add_subjects(["carol"])
    bury_halfway(store, "halfway")
    draft = Draft(store)
    draft.put(Table(store, "some.table", 2), ("a", "b"), {"short": 1})
    draft.put(Table(store, "some.table", 2), ("a", "long"), [LONG, {"deep": LONG + "!"}])
    draft.commit()


def rows_of(store: Store) -> dict[str, list[Row]]:
    rows = {table: all_rows(store.engine, table) for table in TABLES_AS_THEY_ARE}
    return {**rows, "retention": retention_of(store)}


def retention_of(store: Store) -> list[Row]:
    """All but the row that tells stores apart."""
    rows = all_rows(store.engine, "retention")
    return [row for row in rows if row.key != keys.sign().key]


def test_carried_lists_every_table() -> None:
    """Whoever adds a table says here how it is carried, or copies would lose it."""
    assert sorted(CARRIED) == sorted(TABLES)


@pytest.mark.parametrize("way", ["copy", "mirror", "backup", "backup with update", "salvage"])
def test_copy_backup_and_salvage_carry_every_row_of_every_table(tmp_path: Path, way: str) -> None:
    with open_store(tmp_path / "s") as store:
        fill(store)
        before = rows_of(store)
        # Otherwise a table that is forgotten would not be missed.
        assert [table for table, rows in before.items() if not rows] == []
        kinds = {row.key[0] for row in all_rows(store.engine, "retention")}
        # The sign by which stores are told apart comes with the first comparison.
        assert kinds == set(range(10)) - {keys.sign().key[0]}
        if way in ("copy", "mirror"):
            with open_store(tmp_path / "t") as target:
                copy(store, target, mirror=way == "mirror")
        elif way.startswith("backup"):
            backup(store, tmp_path / "t")
            if way == "backup with update":
                set_policy(store, Policy(last=4))
                before = rows_of(store)
                backup(store, tmp_path / "t", update=True)
    if way == "salvage":
        assert salvage(tmp_path / "s", tmp_path / "t").complete
        # Of a session whose deletion was cut short only that is carried, not what was to go.
        gone = keys.session_key("halfway")
        for table in ("history", "receipts", "queue"):
            before[table] = [row for row in before[table] if not row.key.startswith(gone)]
    with open_store(tmp_path / "t", verify=True) as target:
        assert rows_of(target) == before
        assert check(target, level="full").sound
        assert gc.collect(target, grace_ms=0).outcome is not gc.Outcome.REFUSED
        assert rows_of(target) == before
        found = Table(target, "some.table", 2).find("a", "long")
        assert found is not None
        assert found.value == [LONG, {"deep": LONG + "!"}]


# --- what salvage leaves out -------------------------------------------------------------------


def test_a_protection_of_a_lost_revision_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        for number in range(5):
            step(store, "s1", f"n{number}")
        for revision in (2, 5):
            store.session("s1").protect(at=revision, by=f"run {revision}")
        manifest = store.session("s1").entry(5).manifest
    lose_slab(path, manifest)
    report = salvage(path, tmp_path / "t")
    assert [row for row in report.rows_lost if row.table == "retention"] == [
        ("retention", "s1", "protection of revision 5 by 'run 5'", "revision 5 is lost")
    ]
    with open_store(tmp_path / "t") as store:
        assert [one.by for one in store.session("s1").protections()] == ["run 2"]


def test_salvage_lists_a_record_with_lost_content_and_saves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        table = Table(store, "some.table", 1)
        for name in ("a", "b"):
            draft = Draft(store)
            link = draft.keep({"text": f"{name} {LONG}"})
            draft.put(table, (name,), link)
            draft.commit()
            step(store, "between", name)
        lost = link.digest
    lose_slab(path, lost)
    report = salvage(path, tmp_path / "t")
    [row] = [row for row in report.rows_lost if row.table == "records"]
    assert (row.name, row.why) == ("record some.table b", f"object {lost.hex()} is lost")
    with open_store(tmp_path / "t") as store:
        assert [found.key for found in Table(store, "some.table", 1).scan()] == [("a",)]
        assert check(store, level="full").sound


def test_salvage_keeps_rows_of_the_target_that_have_the_same_name(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        fill(store)
        # Then the index alone tells whom the session is about that stays behind.
        store.engine.write(Write(rows=[DeleteRow(*keys.subjects(keys.session_key("s1")))]))
    with Store(MemoryEngine()) as target:
        set_policy(target, Policy(last=9))
        draft = Draft(target)
        draft.put(Table(target, "some.table", 2), ("a", "b"), "its own")
        draft.commit()
        step(target, "s1", "its own")
        report = salvage(tmp_path / "s", target)
        assert report.outcomes("exists") == ("s1",)
        # The policy and the record.
        assert report.rows_existing == 2
        assert find_policy(target) == Policy(last=9)
        found = Table(target, "some.table", 2).find("a", "b")
        assert found is not None
        assert found.value == "its own"
        # Nor does it come under the rules of the one that was not taken over.
        assert find_policy(target, "s1") is None
        assert target.session("s1").subjects() == ()
        assert list(target.sessions_about("alice")) == []
        before = rows_of(target)
        assert salvage(tmp_path / "s", target).rows_existing == 2
        assert rows_of(target) == before


def test_salvage_carries_retention_rows_that_it_cannot_decode(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "a")
        step(store, "s1", "b")
        set_policy(store, Policy(last=1))
        key = keys.session_key("s1")
        places = [keys.policy(key), keys.subjects(key), keys.protection(key, 2, "run")]
        strange = [PutRow(*place, b"\x7fof a newer release") for place in places]
        store.engine.write(Write(rows=strange))
        before = retention_of(store)
    report = salvage(path, tmp_path / "t")
    assert report.complete
    assert report.rows_from_strays == ()
    with open_store(tmp_path / "t") as store:
        assert retention_of(store) == before


@pytest.mark.parametrize("left", ["subjects", "subject 'alice'"])
def test_salvage_lists_the_retention_rules_of_a_lost_session(tmp_path: Path, left: str) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "a")
        step(store, "s2", "a")
        set_policy(store, Policy(last=1), "s1")
        store.session("s1").add_subjects(["alice"])
    with wounding(path) as cut:
        key = keys.session_key("s1")
        for table in ("heads", "sessions"):
            if any(row == key for row, _ in cut.rows(table)):
                cut.delete(table, key)
        if left != "subjects":
            # Then the index alone tells whom it was about.
            cut.delete(*keys.subjects(key))
        cut.fix_sum()
    report = salvage(path, tmp_path / "t")
    assert {(row.session, row.name, row.why) for row in report.rows_lost} == {
        ("s1", "policy", "its session is lost"),
        ("s1", left, "its session is lost"),
    }
    with open_store(tmp_path / "t") as store:
        assert retention_of(store) == []


@pytest.mark.parametrize("left", ["the subjects", "the index"])
def test_salvage_restores_subjects_from_the_subjects_row_or_from_its_index(
    tmp_path: Path, left: str
) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "a")
        store.session("s1").add_subjects(["alice", "bob"])
        before = retention_of(store)
        key = keys.session_key("s1")
        gone = [keys.subject_session(about, key) for about in ("alice", "bob")]
        if left == "the index":
            gone = [keys.subjects(key)]
        store.engine.write(Write(rows=[DeleteRow(*place) for place in gone]))
    salvage(path, tmp_path / "t")
    with open_store(tmp_path / "t") as store:
        assert retention_of(store) == before
        assert store.session("s1").subjects() == ("alice", "bob")


def test_salvage_lists_and_omits_a_retention_row_of_an_unknown_kind(tmp_path: Path) -> None:
    """It went without a word, and all was said to have been taken over."""
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "a")
        set_policy(store, Policy(last=1))
        strange = [PutRow("retention", kind + b"strange", b"") for kind in (b"\x0a", b"\xff")]
        store.engine.write(Write(rows=strange))
    report = salvage(path, tmp_path / "t")
    assert [(row.table, row.name) for row in report.rows_lost] == [
        ("retention", put.key.hex()) for put in strange
    ]
    assert not report.complete
    with open_store(tmp_path / "t") as store:
        assert [row.key for row in retention_of(store)] == [keys.policy(None).key]


def test_salvage_lists_and_omits_a_long_subject_that_only_its_index_names(tmp_path: Path) -> None:
    """Of a subject too long for its key, the index alone has only the beginning."""
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "a")
        store.session("s1").add_subjects(["alice " * 100])
        gone = DeleteRow(*keys.subjects(keys.session_key("s1")))
        store.engine.write(Write(rows=[gone]))
    report = salvage(path, tmp_path / "t")
    assert report.outcomes("whole") == ("s1",)
    assert not report.complete
    [row] = [row for row in report.rows_lost if row.why == "only the end of its index is left"]
    assert (row.table, row.session) == ("retention", "s1")
    with open_store(tmp_path / "t") as store:
        assert store.session("s1").subjects() == ()


def test_rules_from_old_pages_are_reported(tmp_path: Path) -> None:
    """What stood there a commit earlier may have been changed since; nothing else says it."""
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "a")
        set_policy(store, Policy(last=5))
        set_policy(store, Policy(last=1), "s1")
        store.session("s1").protect(by="run")
        store.session("s1").add_subjects(["alice"])
        store.engine.write(Write(rows=[DeleteRow(*keys.subjects(keys.session_key("s1")))]))
    old = pages_of(path, "retention")[0]
    with open_store(path) as store:
        set_policy(store, Policy(last=6))
    new = [page for page in pages_of(path, "retention")[0] if page not in old]
    assert new
    overwrite(path, *new)
    report = salvage(path, tmp_path / "t")
    assert "retention" in {gap.table for gap in report.gaps}
    told = {(row.session, row.name) for row in report.rows_from_strays}
    assert {("s1", "policy"), ("s1", "protection of revision 1 by 'run'"),
            ("s1", "subject 'alice'"), (None, "the default policy")} <= told  # fmt: skip
    with open_store(tmp_path / "t") as store:
        assert find_policy(store, "s1") == Policy(last=1)
