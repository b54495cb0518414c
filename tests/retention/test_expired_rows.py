"""Rows whose time is over go, by kind; rows that somebody needs stay, whoever comes in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, PutRow, RowKey, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    SessionDeletedError,
)
from casstore.maintenance import gc, lapsed_rows, retention, unneeded_lineages, vacuum
from casstore.maintenance.check import check
from casstore.maintenance.condemned import forget_condemned, list_condemned
from casstore.maintenance.copying import CopyReport, copy
from casstore.maintenance.expiring import ExpiredRows, expire_rows
from casstore.maintenance.exporting import export_session
from casstore.maintenance.importing import import_session
from casstore.maintenance.progress import Step
from casstore.maintenance.retention import Policy
from casstore.maintenance.unneeded_lineages import SweptLineages, sweep_lineages
from casstore.session import catalogue, keys, marks
from casstore.session.data import UNFENCED, Commit, NodeDraft
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.session_fixtures import interrupted, nothing_written
from casstore.testing.session_model import _Run
from tests.retention.lifetimes import (
    DAY_MS,
    HOUR_MS,
    CrashError,
    crash_everywhere,
    crashing,
    grow,
    revisions,
    step,
)

NOTHING = ExpiredRows(0, 0, 0, 0, 0, 0, 0, complete=True)


def node_rows(store: Store) -> int:
    return len(store.engine.scan_rows("nodes", limit=1_000_000))


def damage(store: Store, place: RowKey) -> None:
    store.engine.write(Write(rows=[PutRow(*place, b"\xc1")]))


def test_nothing_of_a_store_in_use_is_over(store: Store) -> None:
    grow(store, "s", 5, turn=None)
    session = store.session("s")
    step(store, "s", "x", turn="turn", label="mark")
    store.fork("s", "fork", at=2)
    session.rewind(3, lease=UNFENCED)
    step(store, "s", "y")
    store.tag("tag", session.entry(1).manifest)
    store.pin("pin", session.entry(1).manifest, ttl_ms=HOUR_MS)
    session.protect(2, by="run", ttl_ms=HOUR_MS)
    session.protect(3, by="run")
    session.release_lease(session.claim_lease("worker", HOUR_MS))  # type: ignore[arg-type]
    with nothing_written(store):
        assert expire_rows(store, receipts_older_than_ms=1) == NOTHING


def test_pins_and_protections_go_when_their_time_is_up(store: Store, clock: ManualClock) -> None:
    grow(store, "s", 3)
    session = store.session("s")
    manifest = session.entry(1).manifest
    store.tag("tag", manifest)
    store.pin("short", manifest, ttl_ms=HOUR_MS)
    store.pin("long", manifest, ttl_ms=HOUR_MS + 1)
    session.protect(1, by="short", ttl_ms=HOUR_MS)
    session.protect(1, by="long", ttl_ms=HOUR_MS + 1)
    session.protect(1, by="for good")
    clock.now_ms += HOUR_MS
    assert expire_rows(store) == NOTHING._replace(pins=1, protections=1)
    assert [pin.name for pin in store.pins(expired=True)] == ["long", "tag"]
    assert [one.by for one in session.protections(lapsed=True)] == ["for good", "long"]


@pytest.mark.parametrize("what", ["pin", "protection"])
def test_what_is_given_more_time_meanwhile_stays(
    store: Store, clock: ManualClock, what: str
) -> None:
    grow(store, "s", 2)
    session = store.session("s")

    def renew() -> None:
        if what == "pin":
            store.pin("pin", session.entry(1).manifest, ttl_ms=HOUR_MS)
        else:
            session.protect(1, by="run", ttl_ms=HOUR_MS)

    renew()
    clock.now_ms += HOUR_MS
    assert expire_rows(interrupted(store, before=renew)) == NOTHING
    assert len(list(store.pins())) + len(session.protections()) == 1


def test_what_is_over_goes_though_something_beside_it_was_given_more_time(
    store: Store, clock: ManualClock
) -> None:
    blob = store.put_blob(b"kept")
    for name in ("a", "b", "c"):
        store.pin(name, blob, ttl_ms=HOUR_MS)
    clock.now_ms += HOUR_MS
    late = interrupted(store, before=lambda: store.pin("b", blob, ttl_ms=HOUR_MS))
    assert expire_rows(late).pins == 2
    assert [pin.name for pin in store.pins(expired=True)] == ["b"]


def test_more_than_goes_in_one_write_goes_in_several(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lapsed_rows, "_BATCH", 2)
    blob = store.put_blob(b"kept")
    for number in range(5):
        store.pin(f"pin {number}", blob, ttl_ms=HOUR_MS)
    clock.now_ms += HOUR_MS
    assert expire_rows(store).pins == 5
    assert list(store.pins(expired=True)) == []


def test_a_receipt_of_which_nobody_knows_the_time_stays(store: Store, clock: ManualClock) -> None:
    for turn in ("a", "b"):
        step(store, "s", turn, turn=turn)
    first = RowKey("history", keys.history(keys.session_key("s"), 1))
    store.engine.write(Write(rows=[DeleteRow(*first)]))
    clock.now_ms += HOUR_MS
    assert expire_rows(store, receipts_older_than_ms=0).receipts == 1
    [left] = store.engine.scan_rows("receipts")
    assert left.key == keys.session_key("s") + b"a"


def test_marks_outlive_every_plan_that_may_ask_for_them(store: Store, clock: ManualClock) -> None:
    grow(store, "s", 4)
    plan = list(retention.plan(store, policy=Policy(last=1)).to_json())
    session = store.session("s")
    session.label("mark", 1)
    session.unlabel("mark")
    session.protect(2, by="run")
    session.unprotect("run")
    store.pin("pin", session.entry(3).manifest)
    store.unpin("pin")
    clock.now_ms += 7 * DAY_MS
    assert expire_rows(store).marks == 0
    report = retention.execute(store, retention.Plan.from_json(plan))
    assert (report.skipped_count, report.revisions_removed) == (3, 0)
    clock.now_ms += DAY_MS
    # One for each revision, one for the session that was protected.
    assert expire_rows(store).marks == 4
    assert store.engine.scan_rows("retention") == []


def test_receipts_go_when_they_are_as_old_as_was_said(store: Store, clock: ManualClock) -> None:
    session = store.session("s")
    for turn in ("a", "b", "c", "d"):
        step(store, "s", turn, turn=turn)
        clock.now_ms += HOUR_MS
    retention.execute(store, retention.plan(store, policy=Policy(last=2)))
    assert expire_rows(store).receipts == 0
    assert expire_rows(store, receipts_older_than_ms=4 * HOUR_MS + 1).receipts == 0
    # "a" and "b" have outlived their revisions.
    assert expire_rows(store, receipts_older_than_ms=4 * HOUR_MS).receipts == 1
    assert expire_rows(store, receipts_older_than_ms=2 * HOUR_MS).receipts == 2
    again = Commit(append=[NodeDraft("d", {"role": "user", "text": "d "})], turn="d")
    assert session.commit(again).replayed
    assert expire_rows(store, receipts_older_than_ms=HOUR_MS).receipts == 1
    for bad in (-1, 1.5, True, "1"):
        with pytest.raises(InvalidInputError):
            expire_rows(store, receipts_older_than_ms=bad)  # type: ignore[arg-type]


def test_the_count_of_leases_never_goes_back(store: Store, clock: ManualClock) -> None:
    step(store, "s", "a")
    session = store.session("s")
    lease = session.claim_lease("worker", 1)
    assert lease is not None
    clock.now_ms += 100 * DAY_MS
    expire_rows(store)
    retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    again = session.claim_lease("worker", 1)
    assert again is not None
    assert again.fencing == lease.fencing + 1
    store.delete_session("s")
    expire_rows(store)
    with pytest.raises(SessionDeletedError):
        session.claim_lease("worker", 1)


def test_a_deletion_that_was_cut_short_is_finished(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_DELETE_BATCH", 1)

    def make() -> Store:
        store = Store(MemoryEngine(clock=clock))
        step(store, "kept", "a")
        store.create_session("s" * 300, subjects=["anna", "berta"], ttl_ms=5)
        step(store, "s" * 300, "x", turn="t", label="mark")
        step(store, "s" * 300, "y", turn="u")
        session = store.session("s" * 300)
        session.protect(1, by="run")
        retention.set_policy(store, Policy(last=1), "s" * 300)
        session.attachments.intend("file", uri="s3://file")
        session.attachments.put(b"bytes")
        session.queue.enqueue([1], source_key="k")
        session.release_lease(session.claim_lease("w", 9))  # type: ignore[arg-type]
        return store

    count = 0
    for died in crash_everywhere(make, lambda store: store.delete_session("s" * 300)):
        gone = died.engine.get_rows([RowKey("heads", keys.session_key("s" * 300))]) == [None]
        unfinished = died.engine.scan_rows("retention", start=b"\x06", stop=b"\x07")
        report = expire_rows(died)
        assert report.deletions == len(unfinished)
        if not gone:
            continue
        count += 1
        left = {
            table: [
                row
                for row in died.engine.scan_rows(table)
                if b"ss" in row.key + row.value and table not in ("tombstones", "nodes")
            ]
            for table in (
                "heads", "history", "leases", "queue", "receipts", "sessions", "retention",
            )
        }  # fmt: skip
        assert left == {table: [] for table in left}
        assert [one.uri for one in list_condemned(died)] == ["s3://file"]
        assert list(died.sessions_about("anna")) == []
    assert count > 9


# --- lineages -------------------------------------------------------------------------------


def test_the_node_table_of_a_deleted_session_goes(store: Store) -> None:
    grow(store, "kept", 3)
    before = node_rows(store)
    grow(store, "s", 70)
    store.session("s").rewind(30, lease=UNFENCED)
    grow(store, "s", 3)
    store.delete_session("s")
    report = expire_rows(store)
    assert (report.lineages, report.complete) == (2, True)
    assert report.lineage_rows > 76
    assert node_rows(store) == before
    assert len(list(store.session("kept").nodes())) == 3


def test_lineages_that_a_fork_goes_on_from_stay(store: Store) -> None:
    grow(store, "s", 40)
    store.fork("s", "one", at=20)
    grow(store, "one", 2)
    store.fork("one", "two")
    step(store, "two", "mine")
    store.delete_session("s")
    store.delete_session("one")
    with nothing_written(store):
        assert expire_rows(store).lineages == 0
    fresh = Store(store.engine).session("two")
    assert len(list(fresh.nodes())) == 23
    assert fresh.node("n7") is not None
    store.delete_session("two")
    assert expire_rows(store).lineages == 3
    assert node_rows(store) == 0


def test_lineages_that_a_rewind_left_go_with_the_revisions_they_were_of(store: Store) -> None:
    grow(store, "s", 5)
    session = store.session("s")
    session.rewind(2, lease=UNFENCED)
    step(store, "s", "other")
    session.commit(Commit(replace=[NodeDraft("anew", 1)], lease=UNFENCED))
    assert expire_rows(store).lineages == 0
    retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    assert expire_rows(store).lineages == 2
    assert [node.id for node in session.nodes("full")] == ["anew"]


@pytest.mark.parametrize("table", ["heads", "history", "nodes"])
def test_a_row_that_cannot_be_read_keeps_every_lineage(store: Store, table: str) -> None:
    grow(store, "s", 3)
    store.fork("s", "fork", at=2)
    step(store, "fork", "mine")
    grow(store, "gone", 3)
    store.delete_session("gone")
    key = keys.session_key("s")
    place = {
        "heads": RowKey("heads", key),
        "history": RowKey("history", keys.history(key, 1)),
        "nodes": next(
            RowKey("nodes", row.key)
            for row in store.engine.scan_rows("nodes")
            if row.key[8:] == b"\0"
        ),
    }[table]
    damage(store, place)
    with nothing_written(store), pytest.raises(CorruptionError):
        expire_rows(store)


class Between:
    """Stands before an engine and does something when a scan of a table begins or a write comes."""

    def __init__(self, engine: Any, when: str, do: Callable[[], object]) -> None:
        self._engine = engine
        self._when = when
        self._do: Callable[[], object] | None = do

    def _come(self, what: str) -> None:
        if what == self._when and self._do is not None:
            do, self._do = self._do, None
            do()

    def scan_rows(self, table: str, **limits: Any) -> Any:
        self._come(table)
        return self._engine.scan_rows(table, **limits)

    def write(self, write: Write) -> Any:
        self._come("write")
        return self._engine.write(write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize("when", ["heads", "history", "nodes", "write"])
@pytest.mark.parametrize("then", ["delete", "retain"])
def test_a_fork_made_while_lineages_are_counted_keeps_them(
    store: Store, when: str, then: str
) -> None:
    """The fork shares a lineage of which the only other owner goes right after it was made."""
    grow(store, "zz", 3)
    store.session("zz").commit(Commit(replace=[NodeDraft("anew", 1)], lease=UNFENCED))
    grow(store, "gone", 3)
    store.delete_session("gone")

    def come() -> None:
        store.fork("zz", "aa", at=3)
        if then == "delete":
            store.delete_session("zz")
        else:
            retention.execute(store, retention.plan(store, sessions=["zz"], policy=Policy(last=1)))

    report = sweep_lineages(Between(store.engine, when, come))
    assert report.complete
    fresh = Store(store.engine).session("aa")
    assert [node.id for node in fresh.nodes()] == ["n0", "n1", "n2"]
    assert fresh.node("n1") is not None
    step(store, "aa", "more")
    assert sweep_lineages(store.engine).lineages == 0


@pytest.mark.parametrize("when", ["heads", "history", "nodes", "write"])
def test_a_head_that_moves_while_lineages_are_counted_keeps_them(store: Store, when: str) -> None:
    step(store, "aa", "n0", "n1", "n2")
    grow(store, "gone", 3)
    store.delete_session("gone")

    def come() -> None:
        store.session("aa").commit(Commit(replace=[NodeDraft("anew", 1)], lease=UNFENCED))

    assert sweep_lineages(Between(store.engine, when, come)).lineages == 1
    fresh = Store(store.engine).session("aa")
    assert [node.id for node in fresh.nodes(at=1)] == ["n0", "n1", "n2"]


class Preparing:
    """Stands before an engine; when a head is written, others sweep, and are overtaken by it.

    They find the lineages stored, and that no row reaches them. Before they remove one, the
    head is there.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.swept: list[SweptLineages] = []

    def write(self, write: Write) -> Any:
        if self.swept or not any(change.table == "heads" for change in write.rows):
            return self._engine.write(write)
        done: list[Any] = []

        def overtake() -> None:
            done.append(self._engine.write(write))

        self.swept.append(sweep_lineages(Between(self._engine, "write", overtake)))
        return done[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize("how", ["vacuum", "import", "copy"])
def test_lineages_stay_that_are_reached_just_before_they_would_go(
    store: Store, how: str, tmp_path: Path
) -> None:
    source = Store(MemoryEngine())
    grow(source, "s", 4)
    engine = Preparing(store.engine)
    if how == "vacuum":
        grow(store, "s", 4)
        store.session("s").tombstone(["n1"])
        vacuum.rewrite_hidden(Store(engine, close=lambda: None), "s")
    elif how == "import":
        export_session(source, "s", tmp_path / "s.bundle")
        import_session(Store(engine, close=lambda: None), tmp_path / "s.bundle")
    else:
        copy(source, Store(engine, close=lambda: None))
    assert [one.complete for one in engine.swept] == [True]
    assert check(store, level="full").sound
    left = ["n0", "n2", "n3"] if how == "vacuum" else ["n0", "n1", "n2", "n3"]
    assert [node.id for node in store.session("s").nodes()] == left


@pytest.mark.parametrize("when", ["heads", "history", "nodes", "write"])
def test_a_deletion_that_a_copy_brings_is_noticed_by_who_counts_lineages(
    store: Store, when: str
) -> None:
    source = Store(MemoryEngine())
    grow(source, "gone", 2)
    grow(source, "zz", 3)
    source.session("zz").commit(Commit(replace=[NodeDraft("anew", 1)], lease=UNFENCED))
    copy(source, store)
    source.delete_session("gone")
    copy(source, store)

    def come() -> None:
        store.fork("zz", "aa", at=3)
        source.delete_session("zz")
        copy(source, store)

    assert sweep_lineages(Between(store.engine, when, come)).complete
    fresh = Store(store.engine).session("aa")
    assert [node.id for node in fresh.nodes()] == ["n0", "n1", "n2"]


@pytest.mark.parametrize("what", ["a session", "a revision"])
def test_a_copy_that_removes_something_says_so_to_who_counts_lineages(
    store: Store, what: str
) -> None:
    source = Store(MemoryEngine())
    grow(source, "one", 1)
    grow(source, "s", 3)
    copy(source, store)
    before = store.engine.get_rows([keys.removals()])
    if what == "a session":
        source.delete_session("one")
        copy(source, store)
    else:
        retention.execute(source, retention.plan(source, policy=Policy(last=1)))
        copy(source, store, mirror=True)
    assert store.engine.get_rows([keys.removals()]) != before


@pytest.mark.parametrize("mirror", [False, True])
def test_a_copy_does_not_bring_back_the_row_by_which_who_counts_lineages_knows(
    store: Store, mirror: bool
) -> None:
    """Were it the same as before, a sweep would go on with what it knew before."""
    source = Store(MemoryEngine())
    grow(source, "s", 3)
    if not mirror:
        grow(source, "gone", 1)
        source.delete_session("gone")
    known = source.engine.get_rows([keys.removals()])[0]
    # What a copy leaves that was stopped before the session appeared.
    rows = [PutRow("nodes", *row) for row in source.engine.scan_rows("nodes")]
    rows += [] if known is None else [PutRow(*keys.removals(), known)]
    store.engine.write(Write(rows=rows))
    between = Between(store.engine, "write", lambda: copy(source, store, mirror=mirror))
    sweep_lineages(between)
    assert check(store, level="full").sound
    assert len(store.session("s").nodes()) == 3


@pytest.mark.parametrize("table", ["nodes", "heads"])
def test_the_rest_of_a_lineage_stays_if_it_is_copied_anew_before_it_goes(
    store: Store, table: str
) -> None:
    """A sweep was stopped within a lineage, and another is about to remove what it left.

    Before it does, a copy finds the rest and writes what it lacks: the first row.
    """
    source = Store(MemoryEngine())
    grow(source, "s", 40)
    # By which the two are told apart: else the copy would put a sign into the target, and the
    # sweep would find out by that alone.
    source.engine.write(Write(rows=[marks.put_removals()]))
    [first, *rest] = source.engine.scan_rows("nodes")
    store.engine.write(Write(rows=[PutRow("nodes", *row) for row in rest]))
    copied: list[CopyReport] = []

    class Overtaken:
        """Removes rows just before a copy writes to a table."""

        def __init__(self, remove: Write) -> None:
            self.remove: Write | None = remove
            self.failed: ConditionFailedError | None = None

        def write(self, write: Write) -> Any:
            remove, to = self.remove, {change.table for change in write.rows}
            if remove is not None and table in to:
                self.remove = None
                try:
                    store.engine.write(remove)
                except ConditionFailedError as exc:
                    self.failed = exc
            return store.engine.write(write)

        def __getattr__(self, name: str) -> Any:
            return getattr(store.engine, name)

    class Sweeping:
        def write(self, write: Write) -> Any:
            if copied:
                return store.engine.write(write)
            engine: Any = Overtaken(write)
            copied.append(copy(source, Store(engine, close=lambda: None)))
            if engine.failed is not None:
                raise engine.failed
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(store.engine, name)

    sweep_lineages(Sweeping())
    assert [one.sessions for one in copied] == [1]
    assert check(store, level="full").sound
    assert len(store.session("s").nodes()) == 40
    assert store.engine.get_rows([RowKey("nodes", first.key)]) == [first.value]


def test_no_fork_is_made_of_what_a_deleted_session_has_yet_to_lose(store: Store) -> None:
    grow(store, "s", 4)

    def die() -> None:
        with pytest.raises(CrashError):
            crashing(store, 1).delete_session("s")
        assert store.engine.scan_rows("history") != []

    with pytest.raises(SessionDeletedError):
        interrupted(store, before=die).fork("s", "fork", at=2)
    assert list(store.sessions()) == []


def test_when_sessions_are_deleted_again_and_again_it_says_so(store: Store) -> None:
    for number in range(20):
        grow(store, f"s{number}", 1)
    waiting = iter(range(20))

    class Busy:
        def write(self, write: Write) -> Any:
            store.delete_session(f"s{next(waiting)}")
            return store.engine.write(write)

        def __getattr__(self, name: str) -> Any:
            return getattr(store.engine, name)

    store.delete_session(f"s{next(waiting)}")
    assert sweep_lineages(Busy()) == SweptLineages(0, 0, complete=False)
    assert sweep_lineages(store.engine) == SweptLineages(5, 10, complete=True)


def test_progress_is_told_and_may_stop_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unneeded_lineages, "_READ_BATCH", 4)
    monkeypatch.setattr(unneeded_lineages, "DELETE_BATCH", 3)
    for number in range(5):
        grow(store, f"s{number}", 2)
        if number:
            store.delete_session(f"s{number}")
    told: list[Step] = []

    def stop(step: Step) -> None:
        told.append(step)
        if step.unit == "lineages" and step.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        expire_rows(store, progress=stop)
    assert told[-1] == Step("lineages", 2, None, "lineages")
    assert node_rows(store) < 5 * 3
    assert expire_rows(store).complete
    assert (node_rows(store), revisions(store, "s0")) == (3, [2, 1])


@pytest.mark.parametrize("seed", range(3))
def test_sessions_agree_with_their_model_whatever_goes_in_between(
    lmdb_store: Store, seed: int
) -> None:
    """Forks of forks, rewinds and deletions, with retention, expiry and collection among them."""
    store = lmdb_store
    run = _Run(store, seed)
    swept = removed = 0
    for number in range(60):
        done = f"seed {seed}, step {number}: {run.step()}"
        if not number % 3:
            last = run.random.choice([1, 2, 4])
            plan = retention.plan(store, policy=Policy(last=last))
            removed += retention.execute(store, plan).revisions_removed
            for model in run.models.values():
                for gone in sorted(model.revisions)[:-last]:
                    del model.revisions[gone]
            swept += expire_rows(store).lineages
            gc.collect(store, grace_ms=0)
            engine = store.engine
            assert isinstance(engine, LmdbEngine)
            engine.verify()
            run.check(Store(store.engine), done)
        run.check(store, done)
    assert min(swept, removed) > 2


# --- condemned ------------------------------------------------------------------------------


def test_bytes_elsewhere_are_listed_until_they_are_said_to_be_deleted(store: Store) -> None:
    for name in ("s", "t", "long " * 100):
        step(store, name, "a")
        store.session(name).attachments.intend("video", uri=f"s3://{name}", owner="me")
        store.session(name).attachments.put(b"here")
    store.session("t").attachments.intend("other", uri="s3://other")
    store.session("t").attachments.condemn("other")
    assert [one.uri for one in list_condemned(store)] == ["s3://other"]
    store.session("s").attachments.commit(["video"])
    store.delete_session("s")
    store.delete_session("long " * 100)
    found = {one.uri: one for one in list_condemned(store)}
    assert sorted(found) == ["s3://" + "long " * 100, "s3://other", "s3://s"]
    assert found["s3://s"][:4] == ("s", "video", "s3://s", "me")
    assert found["s3://" + "long " * 100].session is None
    assert [one.uri for one in list_condemned(store, session="t")] == ["s3://other"]
    for one in found.values():
        assert forget_condemned(store, one)
        assert not forget_condemned(store, one)
    assert list(list_condemned(store)) == []
    assert store.session("t").attachments.find("video") is not None


def test_what_is_not_condemned_is_not_forgotten(store: Store) -> None:
    step(store, "s", "a")
    attachments = store.session("s").attachments
    attachments.intend("video", uri="s3://video")
    attachments.condemn("video")
    [found] = list_condemned(store)
    attachments.forget("video")
    attachments.intend("video", uri="s3://video")
    assert not forget_condemned(store, found)
    assert attachments.find("video") is not None
    damage(store, RowKey("attachments", found.key))
    with pytest.raises(CorruptionError, match=found.key.hex()):
        list(list_condemned(store))
