"""Rows whose time is over go, by kind; rows that somebody needs stay, whoever comes in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, PutRow, RowKey, Write
from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    SessionDeletedError,
)
from casstore.maintenance import gc, retention
from casstore.maintenance.condemned import forget_condemned, list_condemned
from casstore.maintenance.expiring import ExpiredRows, expire_rows
from casstore.maintenance.retention import Policy
from casstore.session import attempts, catalogue, keys
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.session_fixtures import interrupted, nothing_written
from casstore.testing.session_model import ModelRun
from tests.maintenance.lifetimes import (
    DAY_MS,
    HOUR_MS,
    CrashError,
    crash_everywhere,
    crashing,
    grow,
    step,
)

NOTHING = ExpiredRows(0, 0, 0, 0, 0)


def damage(store: Store, place: RowKey) -> None:
    store.engine.write(Write(rows=[PutRow(*place, b"\xc1")]))


def test_expire_rows_removes_nothing_that_is_still_in_use(store: Store) -> None:
    grow(store, "s", 5, turn=None)
    session = store.session("s")
    step(store, "s", "x", turn="turn", label="mark")
    store.fork("s", "fork", at=2)
    session.rewind(3)
    step(store, "s", "y")
    store.tag("tag", session.entry(1).manifest)
    store.pin("pin", session.entry(1).manifest, ttl_ms=HOUR_MS)
    session.protect(2, by="run", ttl_ms=HOUR_MS)
    session.protect(3, by="run")
    session.release_lease(session.claim_lease("worker", HOUR_MS))  # type: ignore[arg-type]
    with nothing_written(store):
        assert expire_rows(store, receipts_older_than_ms=1) == NOTHING


def test_expire_rows_removes_expired_pins_and_protections(store: Store, clock: ManualClock) -> None:
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
def test_a_pin_or_protection_renewed_meanwhile_stays(
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


def test_expired_pins_are_removed_though_one_of_the_batch_was_renewed_meanwhile(
    store: Store, clock: ManualClock
) -> None:
    blob = store.put_blob(b"kept")
    for name in ("a", "b", "c"):
        store.pin(name, blob, ttl_ms=HOUR_MS)
    clock.now_ms += HOUR_MS
    late = interrupted(store, before=lambda: store.pin("b", blob, ttl_ms=HOUR_MS))
    assert expire_rows(late).pins == 2
    assert [pin.name for pin in store.pins(expired=True)] == ["b"]


def test_more_rows_than_one_batch_are_removed_in_several_writes(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_WRITTEN_AT_ONCE", 2)
    blob = store.put_blob(b"kept")
    for number in range(5):
        store.pin(f"pin {number}", blob, ttl_ms=HOUR_MS)
    clock.now_ms += HOUR_MS
    assert expire_rows(store).pins == 5
    assert list(store.pins(expired=True)) == []


def test_a_receipt_of_unknown_time_stays(store: Store, clock: ManualClock) -> None:
    for turn in ("a", "b"):
        step(store, "s", turn, turn=turn)
    first = RowKey("history", keys.history(keys.session_key("s"), 1))
    store.engine.write(Write(rows=[DeleteRow(*first)]))
    clock.now_ms += HOUR_MS
    assert expire_rows(store, receipts_older_than_ms=0).receipts == 1
    [left] = store.engine.scan_rows("receipts")
    assert left.key == keys.session_key("s") + b"a"


def test_marks_of_use_are_kept_as_long_as_a_plan_can_be_executed(
    store: Store, clock: ManualClock
) -> None:
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


def test_expire_rows_removes_receipts_older_than_the_given_age(
    store: Store, clock: ManualClock
) -> None:
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


def test_the_fencing_number_never_decreases(store: Store, clock: ManualClock) -> None:
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
                if b"ss" in row.key + row.value and table != "tombstones"
            ]
            for table in (
                "heads", "history", "leases", "queue", "receipts", "sessions", "retention",
            )
        }  # fmt: skip
        assert left == {table: [] for table in left}
        assert [one.uri for one in list_condemned(died)] == ["s3://file"]
        assert list(died.sessions_about("anna")) == []
    assert count > 9


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


def test_forking_a_session_whose_deletion_is_unfinished_raises(store: Store) -> None:
    grow(store, "s", 4)

    def die() -> None:
        with pytest.raises(CrashError):
            crashing(store, 1).delete_session("s")
        assert store.engine.scan_rows("history") != []

    with pytest.raises(SessionDeletedError):
        interrupted(store, before=die).fork("s", "fork", at=2)
    assert list(store.sessions()) == []


@pytest.mark.parametrize("seed", range(3))
def test_sessions_agree_with_the_model_under_interleaved_retention_expiry_and_gc(
    lmdb_store: Store, seed: int
) -> None:
    """Forks of forks, rewinds and deletions, with retention, expiry and collection among them."""
    store = lmdb_store
    run = ModelRun(store, seed)
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
            expire_rows(store)
            swept += gc.collect(store, grace_ms=0).objects_swept
            engine = store.engine
            assert isinstance(engine, LmdbEngine)
            engine.verify()
            run.check(Store(store.engine), done)
        run.check(store, done)
    assert min(swept, removed) > 2


# --- condemned ------------------------------------------------------------------------------


def test_condemned_external_attachments_are_listed_until_they_are_forgotten(store: Store) -> None:
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


def test_an_attachment_declared_again_is_not_forgotten(store: Store) -> None:
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
