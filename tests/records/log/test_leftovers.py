"""What a log knows of sessions that others delete: it does not outlive them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import casstore
from casstore.maintenance import erasure, gc, retention
from casstore.maintenance.check import check
from casstore.maintenance.compact import compact
from casstore.maintenance.expiring import expire_rows
from casstore.records.log import NewMessage, SessionLog, Tokens
from casstore.store import Store

CANARY = "canary-7d1f55aa"
# So long that it is an object, which the first message has too.
LONG = "weather " * 500


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        yield store


def filled(store: Store) -> SessionLog:
    """A session that says the canary wherever a log keeps something, and others below it."""
    log = SessionLog(store)
    log.create("hers", prompt=LONG, config={"k": CANARY}, metadata={"user": CANARY})
    store.session("hers").add_subjects(["anna"])
    log.extend("hers", [NewMessage("user", LONG), NewMessage("user", CANARY)])
    log.fold("hers", [1], "a note")
    log.append("hers", NewMessage("assistant", "c"), tokens=Tokens(1, 1, 2, CANARY))
    log.put_inbox("hers", f"mail {CANARY}", NewMessage("user", "d"))
    lease = log.claim_lease("hers", "worker", 60_000)
    assert lease is not None
    log.deliver_inbox("hers", lease)
    log.release_lease(lease)
    log.create("below", parent="hers", lifecycle="linked")
    log.create("further below", parent="below")
    return log


def by_erasure(store: Store) -> None:
    plan = erasure.plan(store, "anna")
    # Its own rows are nobody else's.
    assert [one.name for one in plan.sharing.sharers if one.name.startswith("record")] == []
    assert erasure.execute(store, plan).sessions_deleted == 1


def by_retention(store: Store) -> None:
    store.session("hers").expire_in(0)
    assert retention.execute(store, retention.plan(store)).sessions_deleted == 1


def by_deletion(store: Store) -> None:
    assert store.delete_session("hers")
    assert expire_rows(store).records == 1
    assert expire_rows(store).records == 0


@pytest.mark.parametrize("delete", [by_erasure, by_retention, by_deletion])
def test_erasure_retention_and_deletion_leave_no_log_rows_or_bytes_of_the_session(
    store: Store, tmp_path: Path, delete: Callable[[Store], None]
) -> None:
    log = filled(store)
    delete(store)
    assert [(one.id, one.parent, one.depth) for one in log.sessions()] == [
        ("below", None, 0),
        ("further below", "below", 1),
    ]
    assert log.close("hers") == 0
    assert check(store).findings == ()
    gc.collect(store, grace_ms=0)
    store.close()
    compact(str(tmp_path / "store"))
    for file in (tmp_path / "store").rglob("*"):
        assert file.is_dir() or CANARY.encode() not in file.read_bytes(), file


@pytest.mark.parametrize("delete", [by_erasure, by_retention, by_deletion])
def test_nothing_is_left_of_a_fork_that_was_not_adopted(
    store: Store, delete: Callable[[Store], None]
) -> None:
    log = SessionLog(store)
    log.create("first")
    log.extend("first", [NewMessage("user", "a"), NewMessage("user", "b")])
    store.fork("first", "hers")
    store.session("hers").add_subjects(["anna"])
    log.fold("hers", [1], "a note")
    log.append("hers", NewMessage("assistant", "c"), tokens=Tokens(1, 1, 2, CANARY))
    log.put_inbox("hers", f"mail {CANARY}", NewMessage("user", "d"))
    lease = log.claim_lease("hers", "worker", 60_000)
    assert lease is not None
    log.deliver_inbox("hers", lease)
    log.release_lease(lease)
    delete(store)
    left = store.engine.scan_rows("records", start=b"log.", stop=b"log/", limit=100)
    assert [row.key for row in left] == [b"log.sessions\0first\0"]
    assert log.active("first")[0].content == "a"


def test_a_repeated_erasure_finishes_a_stopped_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(store)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("casstore.records.log.system.forget", stop)
        with pytest.raises(KeyboardInterrupt):
            erasure.execute(store, erasure.plan(store, "anna"))
    assert log.find("hers") is None
    erasure.execute(store, erasure.plan(store, "anna"))
    left = store.engine.scan_rows("records", start=b"", stop=None, limit=100)
    assert [row for row in left if CANARY.encode() in row.key + row.value] == []
