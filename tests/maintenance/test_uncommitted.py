"""Attachments that were announced and never committed: found and given up, in all sessions."""

from __future__ import annotations

import pytest

from casstore.engine.protocol import PutRow, Write
from casstore.errors import (
    AttachmentNotFoundError,
    AttachmentStateError,
    CorruptionError,
    InvalidInputError,
)
from casstore.maintenance import gc
from casstore.maintenance.check import check
from casstore.maintenance.condemned import list_condemned
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.uncommitted import (
    GivenUp,
    Uncommitted,
    give_up,
    list_uncommitted,
    sweep_uncommitted,
)
from casstore.session import attempts, keys
from casstore.session.attachments import attachment_key
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.session_fixtures import interrupted, nothing_written
from tests.maintenance.lifetimes import HOUR_MS, step

LONG_ID = "session " * 40


def listed(store: Store, older_than_ms: int) -> list[tuple[str | None, str, str]]:
    found = list_uncommitted(store, older_than_ms=older_than_ms)
    return [(one.session, one.attachment, one.state) for one in found]


def test_list_uncommitted_includes_attachments_of_sessions_without_commits(
    store: Store, clock: ManualClock
) -> None:
    step(store, "begun", "a")
    store.session("begun").attachments.intend("done", uri="s3://done")
    step(store, "begun", "b", attachments=["done"])
    store.session("begun").attachments.intend("left", uri="s3://left", owner="host")
    image = store.session("never").attachments.put(b"pixels")
    store.session("never").attachments.intend("nowhere")
    store.session("never").attachments.condemn("nowhere")
    then_ms = clock.now_ms
    clock.now_ms += HOUR_MS
    store.session("never").attachments.intend("young")
    assert listed(store, then_ms) == [
        ("begun", "left", "intent"),
        ("never", image.id, "intent"),
        ("never", "nowhere", "condemned"),
    ]
    assert listed(store, then_ms - 1) == []
    assert len(listed(store, clock.now_ms)) == 4
    left = next(list_uncommitted(store, older_than_ms=then_ms))
    assert left[2:7] == ("s3://left", None, "host", "intent", then_ms)


def test_list_uncommitted_names_a_session_with_a_long_id_only_if_it_has_commits(
    store: Store, clock: ManualClock
) -> None:
    step(store, LONG_ID, "a")
    for session in (LONG_ID, "never " + LONG_ID):
        store.session(session).attachments.intend("left")
    assert sorted([one[0] or "" for one in listed(store, clock.now_ms)]) == ["", LONG_ID]
    assert expire_rows(store, attachments_older_than_ms=0).attachments == 2
    assert listed(store, clock.now_ms) == []


def test_a_sweep_removes_what_is_in_the_store_and_condemns_what_is_elsewhere(
    store: Store, clock: ManualClock
) -> None:
    never = store.session("never").attachments
    image = never.put(b"pixels")
    never.intend("nowhere")
    never.intend("condemned")
    never.condemn("condemned")
    never.intend("video", uri="s3://video")
    clock.now_ms += HOUR_MS
    never.intend("young", uri="s3://young")
    assert expire_rows(store, attachments_older_than_ms=HOUR_MS + 1).removed == 0
    assert expire_rows(store).attachments == 0
    gone = expire_rows(store, attachments_older_than_ms=HOUR_MS)
    assert (gone.attachments, gone.condemned) == (3, 1)
    assert [(one.id, one.state) for one in never.list()] == [
        ("video", "condemned"),
        ("young", "intent"),
    ]
    assert [one.uri for one in list_condemned(store)] == ["s3://video"]
    assert image.digest is not None
    gc.collect(store, grace_ms=0)
    assert store.missing([image.digest]) == [image.digest]
    with pytest.raises(AttachmentStateError):
        step(store, "never", "a", attachments=["video"])
    with pytest.raises(AttachmentNotFoundError):
        step(store, "never", "a", attachments=[image.id])
    step(store, "never", "a", attachments=["young"])
    # The condemned one waits for its bytes to be deleted, and is not counted again.
    with nothing_written(store):
        assert sweep_uncommitted(store, older_than_ms=clock.now_ms) == GivenUp(0, 0)
    assert check(store, level="full").sound


@pytest.mark.parametrize("what", ["commit", "intend"])
def test_an_attachment_committed_or_announced_during_the_sweep_stays(
    store: Store, clock: ManualClock, what: str
) -> None:
    session = store.session("s").attachments
    for name in ("a", "b"):
        session.intend(name, uri=f"s3://{name}")
    then_ms = clock.now_ms
    clock.now_ms += HOUR_MS

    def meanwhile() -> None:
        if what == "commit":
            session.commit(["a"])
        else:
            session.intend("a", uri="s3://a")

    late = interrupted(store, before=meanwhile)
    assert sweep_uncommitted(late, older_than_ms=then_ms) == GivenUp(0, 1)
    states = {one.id: one.state for one in session.list()}
    assert states == {"a": "committed" if what == "commit" else "intent", "b": "condemned"}


def test_give_up_abandons_one_attachment_of_the_list(store: Store, clock: ManualClock) -> None:
    never = store.session("never").attachments
    never.intend("elsewhere", uri="s3://elsewhere")
    never.intend("nowhere")
    elsewhere, nowhere = list_uncommitted(store, older_than_ms=clock.now_ms)
    assert (give_up(store, elsewhere), give_up(store, nowhere)) == (True, True)
    assert [(one.id, one.state) for one in never.list()] == [("elsewhere", "condemned")]
    with nothing_written(store):
        assert (give_up(store, elsewhere), give_up(store, nowhere)) == (False, False)


def test_uncommitted_attachments_are_swept_in_several_batches(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_WRITTEN_AT_ONCE", 2)
    for number in range(5):
        store.session(f"never {number}").attachments.intend("left")
    assert sweep_uncommitted(store, older_than_ms=clock.now_ms) == GivenUp(5, 0)
    assert listed(store, clock.now_ms) == []


def test_a_row_that_cannot_be_read_is_named(store: Store, clock: ManualClock) -> None:
    place = attachment_key(keys.session_key("s"), "a")
    store.engine.write(Write(rows=[PutRow(*place, b"\xc1")]))
    for look in (list_uncommitted, sweep_uncommitted):
        with pytest.raises(CorruptionError, match=place.key.hex()):
            list(look(store, older_than_ms=clock.now_ms))


def test_arguments_that_are_wrong_are_named(store: Store) -> None:
    for older in (-1, "1d", None, True):
        with pytest.raises(InvalidInputError, match="older_than_ms"):
            list_uncommitted(store, older_than_ms=older)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="older_than_ms"):
            sweep_uncommitted(store, older_than_ms=older)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="Uncommitted"):
        give_up(store, "video")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="attachments_older_than_ms"):
        expire_rows(store, attachments_older_than_ms=-1)
    assert Uncommitted._fields[-1] == "key"
