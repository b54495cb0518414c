"""A copy into a store that is in use: what is there stays right, wherever the copy is stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casstore import Checkpoint, Commit, Store
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, Row, RowKey, Write
from casstore.errors import CorruptionError, SessionDeletedError, SessionDivergedError
from casstore.maintenance import gc, retention, vacuum
from casstore.maintenance.check import check
from casstore.maintenance.copy import copy
from casstore.maintenance.export import export_session
from casstore.maintenance.import_ import import_session
from casstore.maintenance.retention import Policy
from casstore.maintenance.transfer import objects
from casstore.session import keys
from casstore.session.state import head_key
from casstore.testing import ManualClock
from casstore.testing.engine_fixtures import find_object
from casstore.testing.inspection import replace_object
from tests.maintenance import sessions
from tests.maintenance.sessions import MakeStore, Watched, message, rows_of, seen, step


def ids(store: Store, name: str) -> list[str]:
    return [node.id for node in store.session(name).nodes("full")]


def test_a_commit_in_the_target_meanwhile_is_not_lost(make_memory: MakeStore) -> None:
    """It was acknowledged, and then a head took its place whose nodes were not in the table."""
    for ahead in range(1, 40):
        engine = Watched()
        source, target = make_memory(), Store(engine)
        step(source, "s", message("a"))
        copy(source, target)
        step(source, "s", message("theirs"))
        engine.at_write(ahead, partial(step, target, "s", message("ours")))
        try:
            copy(source, target)
        except SessionDivergedError:
            assert ids(target, "s") == ["a", "ours"]
            assert target.session("s").node("theirs") is None
            assert check(target, level="full").sound
        else:
            assert engine.before is not None
            break
    assert ahead > 2, "nothing was ever in between"


def test_a_session_created_in_the_target_during_a_copy_stays(make_memory: MakeStore) -> None:
    source = make_memory()
    step(source, "s", message("a"))
    step(source, "s", message("b"))
    for ahead in range(1, 40):
        engine = Watched()
        target = Store(engine)
        engine.at_write(ahead, partial(step, target, "s", message("ours")))
        try:
            copy(source, target, sessions=["s"])
        except SessionDivergedError:
            assert ids(target, "s") == ["ours"]
            assert [entry.revision for entry in target.session("s").history()] == [1]
            assert check(target, level="full").sound
        else:
            break
    assert ahead > 2


@pytest.mark.parametrize("seed", range(3))
def test_sessions_accept_commits_in_the_target_of_a_stopped_copy(
    make_memory: MakeStore, seed: int
) -> None:
    """The node table was ahead of the head: ids seemed to be taken, nodes took others' places."""
    source = make_memory()
    rng, names = random.Random(seed), ["r"]
    sessions.grow(source, rng, names, 25)
    begin = Store(MemoryEngine())
    copy(source, begin)
    before = {name: seen(begin, name) for name in names if begin.session(name).head() is not None}
    sessions.grow(source, rng, names, 15, prefix="more-")
    for limit in range(0, 10_000, 3):
        engine = Watched()
        target = Store(engine)
        copy(begin, target)
        left = limit

        def stop(write: Write) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1

        engine.before = stop
        try:
            copy(source, target)
            break
        except KeyboardInterrupt:
            engine.before = None
        assert check(target, level="full").sound
        for name in names:
            head = target.session(name).head()
            if head is None:
                continue
            theirs = seen(target, name)
            if name in before and head.revision == before[name]["head"].revision:
                assert theirs["revisions"] == before[name]["revisions"]
            else:
                assert theirs["revisions"] == seen(source, name)["revisions"]
            was = ids(target, name)
            step(target, name, message("ours"), message("more-0"), expected=None)
            assert ids(target, name) == [*was, "ours", "more-0"]
            assert target.session(name).node("more-1") is None or "more-1" in was
        assert check(target, level="full").sound
    assert limit > 6


@pytest.mark.parametrize("ways", ["memory memory", "lmdb postgres", "postgres lmdb"])
def test_copying_a_fork_adds_no_nodes_to_its_source_session_in_the_target(
    request: pytest.FixtureRequest, ways: str
) -> None:
    source, target = [request.getfixturevalue(f"make_{way}")() for way in ways.split()]
    step(source, "s", message("a"))
    copy(source, target)
    step(source, "s", message("b"), message("c"))
    source.fork("s", "fork")
    copy(source, target, sessions=["fork"])
    step(target, "s", message("ours"), message("b"))
    assert ids(target, "s") == ["a", "ours", "b"]
    assert ids(target, "fork") == ["a", "b", "c"]
    assert target.session("s").node("c") is None
    assert check(target, level="full").sound


def test_a_fork_of_a_session_that_diverged_in_the_target_is_copied(
    make_store: MakeStore,
) -> None:
    """Its nodes took the places of the target's: there one message was shown for another."""
    source, target = make_store(), make_store()
    step(source, "s", message("a"))
    copy(source, target)
    step(source, "s", message("theirs"))
    step(target, "s", message("ours"))
    source.fork("s", "fork")
    copy(source, target, sessions=["fork"])
    assert ids(target, "fork") == ["a", "theirs"]
    assert ids(target, "s") == ["a", "ours"]
    assert check(target, level="full").sound


def shown(store: Store, name: str) -> object:
    """All of a session that a reader sees."""
    told = seen(store, name)
    return told["head"], told["revisions"]


@pytest.mark.parametrize("mirror", [False, True])
def test_a_copy_updates_a_session_whose_last_copied_revision_retention_removed(
    make_store: MakeStore, *, mirror: bool
) -> None:
    """A backup was never brought up to date again: the session seemed to have gone another way."""
    source, target = make_store(), make_store()
    for number in range(4):
        step(source, "s", message(f"n{number}"))
    copy(source, target)
    for number in range(4, 9):
        step(source, "s", message(f"n{number}"))
    retention.execute(source, retention.plan(source, policy=Policy(last=2)))
    assert copy(source, target, mirror=mirror).sessions == 1
    assert ids(target, "s") == [f"n{number}" for number in range(9)]
    left = [entry.revision for entry in target.session("s").history()]
    assert left == ([9, 8] if mirror else [9, 8, 4, 3, 2, 1])
    assert check(target, level="full").sound
    if mirror:
        assert shown(target, "s") == shown(source, "s")


@pytest.mark.parametrize("way", ["appended", "rewound"])
def test_a_diverged_session_is_not_mistaken_for_one_that_retention_pruned(
    make_store: MakeStore, way: str
) -> None:
    source, target = make_store(), make_store()
    step(source, "s", message("a"))
    copy(source, target)
    if way == "rewound":
        target.session("s").rewind(1)
    step(target, "s", message("ours"))
    for number in range(4):
        step(source, "s", message(f"n{number}"))
    retention.execute(source, retention.plan(source, policy=Policy(last=1)))
    for mirror in (False, True):
        with pytest.raises(SessionDivergedError):
            copy(source, target, mirror=mirror)
        assert ids(target, "s") == ["a", "ours"]


def test_a_session_created_in_the_target_is_not_mistaken_for_a_pruned_one() -> None:
    """It has the same node, and another beginning: what it was called and did is its own."""
    source, target = Store(MemoryEngine(clock=ManualClock())), Store(MemoryEngine())
    for node in ("a", "b", "c"):
        step(source, "s", message(node))
    step(target, "s", message("a"), turn="ours")
    retention.execute(source, retention.plan(source, policy=Policy(last=1)))
    with pytest.raises(SessionDivergedError):
        copy(source, target)
    assert ids(target, "s") == ["a"]


def test_a_mirror_removes_nodes_that_vacuum_removed_from_the_source(make_store: MakeStore) -> None:
    source, target = make_store(), make_store()
    for name in ("s", "rewound"):
        step(source, name, message("a"))
        step(source, name, message("secret", "nobody may read this"))
        step(source, name, message("b"))
    source.session("rewound").rewind(1)
    copy(source, target)
    step(source, "s", message("c"))
    source.session("s").tombstone(["secret"])
    source.session("rewound").rewind(3)
    source.session("rewound").tombstone(["secret"])
    source.session("rewound").rewind(1)
    vacuum.vacuum(source, grace_ms=0)
    copy(source, target, mirror=True)
    for name in ("s", "rewound"):
        assert shown(target, name) == shown(source, name)
        for entry in target.session(name).history():
            assert target.session(name).node("secret", at=entry.revision) is None
    gc.collect(target, grace_ms=0)
    assert check(target, level="full").sound
    assert copy(source, target, mirror=True)[:4] == (0, 0, 0, 0)


def test_a_mirror_replays_a_turn_whose_revision_retention_has_removed(
    make_store: MakeStore,
) -> None:
    """Retention settles the receipt and leaves the head as it is."""
    source, target = make_store(), make_store()
    turn = Commit(append=[message("a")], turn="t1")
    first = source.session("s").commit(turn)
    step(source, "s", message("b"))
    copy(source, target, mirror=True)
    retention.execute(source, retention.plan(source, policy=Policy(last=1)))
    copy(source, target, mirror=True)
    gc.collect(target, grace_ms=0)
    again = target.session("s").commit(turn)
    assert (again.replayed, again.revision) == (True, first.revision)
    assert rows_of(target)["receipts"] == rows_of(source)["receipts"]
    assert check(target, level="full").sound


def test_a_copy_resends_objects_that_gc_removed_from_the_target_before_their_rows(
    make_memory: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that linked to it waited to be written, and were taken for sent at every attempt."""
    monkeypatch.setattr(objects, "_WRITE_OBJECTS", 1)
    source = make_memory()
    step(source, "s", message("a"))
    step(source, "s", message("b"))
    for ahead in range(1, 40):
        engine = Watched()
        target = Store(engine)
        engine.at_write(ahead, partial(gc.collect, target, grace_ms=0))
        copy(source, target)
        assert ids(target, "s") == ["a", "b"]
        assert check(target, level="full").sound
        if engine.before is not None:
            break
    assert ahead > 2, "nothing was ever in between"


def test_the_next_copy_finishes_a_deletion_whose_copy_was_stopped(make_memory: MakeStore) -> None:
    """Revisions that nobody could see any more kept all of the session, for ever."""
    for ahead in range(100):
        source = make_memory()
        sessions.fill(source)
        source.session("s").add_subjects(["alice"])
        source.session("s").protect(1, by="a run")
        retention.set_policy(source, Policy(last=3), "s")
        engine = Watched()
        target, left = Store(engine), ahead
        copy(source, target)
        source.delete_session("s")

        def stop(write: Write) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

        engine.before = stop
        try:
            copy(source, target)
        except KeyboardInterrupt:
            engine.before = None
            copy(source, target)
        else:
            break
        assert rows_of(target) == rows_of(source)
    assert ahead > 2, "it was never stopped"
    assert rows_of(target) == rows_of(source)


@pytest.mark.parametrize("had", ["nothing", "a queue"])
def test_copying_a_deletion_removes_a_session_created_in_the_target_meanwhile(
    make_memory: MakeStore, had: str
) -> None:
    source, engine = make_memory(), Watched()
    step(source, "s", message("a"))
    source.delete_session("s")
    target = Store(engine)
    if had == "a queue":
        target.session("s").queue.enqueue(["work"])

    def appear(write: Write) -> None:
        engine.before = None
        for node in ("a", "b"):
            step(target, "s", message(node))

    engine.before = appear
    copy(source, target)
    assert engine.before is None
    assert rows_of(target) == rows_of(source)


@pytest.mark.parametrize("has_head", [False, True])
def test_a_session_deleted_in_the_target_before_its_head_is_written_stays_deleted(
    make_memory: MakeStore, has_head: bool
) -> None:
    source, engine = make_memory(), Watched()
    target = Store(engine)
    step(source, "s", message("a"))
    if has_head:
        copy(source, target)
    step(source, "s", message("b"), label="mark", turn="t")

    def delete(write: Write) -> None:
        if any((change.table, change.key) == head_key(key) for change in write.rows):
            engine.before = None
            step(target, "s", message("ours"), expected=None)
            target.delete_session("s")

    key = keys.session_key("s")
    engine.before = delete
    with pytest.raises(SessionDeletedError):
        copy(source, target)
    left = rows_of(target)
    assert [table for table in ("heads", "history", "receipts") if left[table]] == []


def test_a_copy_takes_labels_and_turns_only_with_their_revision(
    make_memory: MakeStore,
) -> None:
    """A turn that was answered in the copy by a revision that it does not have."""

    class Committing(MemoryEngine):
        """Somebody commits once the head was read, before turns and labels are."""

        before: Callable[[], None] | None = None

        def scan_rows(self, table: str, **limits: Any) -> list[Row]:
            before, self.before = self.before, None if table == "receipts" else self.before
            if before is not None and table == "receipts":
                before()
            return super().scan_rows(table, **limits)

    engine = Committing()
    source, target = Store(engine), make_memory()
    step(source, "s", message("a"), turn="first")
    engine.before = lambda: step(source, "s", message("b"), turn="late", label="late")
    copy(source, target)
    assert engine.before is None
    theirs = rows_of(target)
    assert [row.key for row in theirs["receipts"]] == [keys.session_key("s") + b"first"]
    assert theirs["history"] == []
    copy(source, target)
    assert rows_of(target) == rows_of(source)


@pytest.mark.parametrize("kept", [1, 2])
def test_a_copy_resends_objects_of_a_collected_revision_though_another_one_is_complete(
    make_memory: MakeStore, kept: int
) -> None:
    source, engine = make_memory(), Watched()
    target = Store(engine)
    for node in ("a", "b"):
        step(source, "s", message(node))
    # A fork keeps one of the two in the target.
    source.fork("s", "fork", at=kept)
    copy(source, target, sessions=["fork"])

    def collect(write: Write) -> None:
        if any(change.table == "heads" for change in write.rows):
            engine.before = None
            assert gc.collect(target, grace_ms=0).objects_swept

    engine.before = collect
    copy(source, target, sessions=["s"])
    assert engine.before is None
    assert check(target, level="full").sound
    assert seen(target, "s") == seen(source, "s")


def test_a_session_of_the_target_with_more_nodes_is_not_taken_for_one_from_before_a_vacuum(
    make_memory: MakeStore,
) -> None:
    source, target = make_memory(), make_memory()
    step(source, "s", message("a"))
    step(target, "s", message("a"), message("ours"), turn="ours")
    for mirror in (False, True):
        with pytest.raises(SessionDivergedError):
            copy(source, target, mirror=mirror)
    assert ids(target, "s") == ["a", "ours"]


def test_a_copy_updates_a_pruned_session_that_gained_no_nodes(
    make_memory: MakeStore,
) -> None:
    source, target = make_memory(), make_memory()
    step(source, "s", message("a"))
    copy(source, target)
    for number in range(2):
        step(source, "s", checkpoint=Checkpoint(turn_state=number))
    retention.execute(source, retention.plan(source, policy=Policy(last=1)))
    copy(source, target)
    assert target.session("s").checkpoint().turn_state == 1
    assert [entry.revision for entry in target.session("s").history()] == [3, 1]


def wreck(store: Store, digest: bytes) -> None:
    """Flip a bit of an object."""
    engine = store.engine
    assert isinstance(engine, MemoryEngine)
    stored = find_object(engine, digest)
    assert stored is not None
    replace_object(engine, digest, bytes((stored.data[0] ^ 1,)) + stored.data[1:])


def test_damage_in_the_source_is_reported_and_not_taken_for_concurrent_work(
    make_memory: MakeStore,
) -> None:
    source, target = make_memory(), make_memory()
    step(source, "s", message("a"))
    wreck(source, source.session("s").nodes()[0].digest)
    with pytest.raises(CorruptionError):
        copy(source, target)
    assert rows_of(target)["heads"] == []


# --- rows that belong together ----------------------------------------------------------------


def with_work(store: Store, name: str, *, has_head: bool) -> None:
    """A session of which something is known in every table that is copied row by row."""
    store.create_session(name, subjects=["her"])
    if has_head:
        step(store, name, message("a"))
    session = store.session(name)
    session.queue.enqueue(["work"], batch_id="b")
    session.attachments.put(b"bytes")
    session.claim_lease("worker", 60_000)
    session.expire_in(3_600_000)
    retention.set_policy(store, Policy(last=3), name)


@pytest.mark.parametrize("chosen", [None, ["s"]])
@pytest.mark.parametrize("has_head", [False, True])
def test_a_copy_writes_no_rows_of_a_session_that_only_the_target_deleted(
    make_store: MakeStore, has_head: bool, chosen: list[str] | None
) -> None:
    """Work came before the copy was refused; one without a revision came back from the dead."""
    source, target = make_store(), make_store()
    source.create_session("s")
    if has_head:
        step(source, "s", message("a"))
    copy(source, target)
    target.delete_session("s")
    before = rows_of(target)
    with_work(source, "s", has_head=False)
    for _ in range(2):
        with pytest.raises(SessionDeletedError):
            copy(source, target, sessions=chosen)
        assert rows_of(target) == before
    assert list(target.sessions()) == []


@pytest.mark.parametrize("table", ["queue", "attachments", "leases", "retention", "sessions"])
def test_a_session_deleted_in_the_target_just_as_a_row_of_it_comes_stays_deleted(
    make_memory: MakeStore, table: str
) -> None:
    source, engine = make_memory(), Watched()
    target = Store(engine)
    source.create_session("s")
    copy(source, target)
    with_work(source, "s", has_head=False)
    source.session("s").rename("another name")

    def delete(write: Write) -> None:
        if any(change.table == table for change in write.rows):
            engine.before = None
            target.delete_session("s")

    engine.before = delete
    with pytest.raises(SessionDeletedError):
        copy(source, target)
    assert engine.before is None
    left = rows_of(target)
    assert [name for name, rows in left.items() if rows] == ["tombstones"]


def test_a_copy_omits_queued_work_of_a_session_that_neither_store_has(
    make_memory: MakeStore,
) -> None:
    """It must not stop the copy of all others."""
    source, target = make_memory(), make_memory()
    target.create_session("s")
    target.delete_session("s")
    source.session("s").queue.enqueue(["work for a session that is not there yet"])
    step(source, "other", message("a"))
    source.session("other").queue.enqueue(["work"])
    copy(source, target)
    assert ids(target, "other") == ["a"]
    assert len(target.session("other").queue.batches()) == 1
    assert not check(target).findings


def test_a_session_deleted_in_the_source_after_a_stopped_copy_leaves_no_rows(
    make_memory: MakeStore,
) -> None:
    """Whom it was about, its lease and its policy stayed for ever."""
    for limit in range(40):
        source, engine = make_memory(), Watched()
        target, left = Store(engine), limit
        with_work(source, "s", has_head=False)

        def stop(write: Write) -> None:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1

        engine.before = stop
        try:
            copy(source, target)
        except KeyboardInterrupt:
            engine.before = None
        source.delete_session("s")
        # Stopped once more, right before it is called deleted.
        engine.before = lambda write: _stop_at("tombstones", write)
        with pytest.raises(KeyboardInterrupt):
            copy(source, target)
        engine.before = None
        copy(source, target)
        assert rows_of(target) == rows_of(source)
        if left:
            break
    assert limit > 5


def _stop_at(table: str, write: Write) -> None:
    if any(change.table == table for change in write.rows):
        raise KeyboardInterrupt


def test_a_copy_replaces_a_batch_whose_id_the_source_has_reused(make_store: MakeStore) -> None:
    """It was found by nothing any more, and would have been done once more."""
    source, target = make_store(), make_store()
    step(source, "s", message("a"))
    ours, theirs = source.session("s").queue, target.session("s").queue
    ours.enqueue(["first"], batch_id="b", source_key="k")
    ours.enqueue(["stays"], batch_id="c")
    copy(source, target)
    ours.cancel("b")
    ours.enqueue(["second"], batch_id="b", source_key="another key")
    report = copy(source, target)
    assert theirs.batches() == ours.batches()
    assert rows_of(target) == rows_of(source)
    assert report.rows_removed == 2
    assert not check(target).findings


def test_only_a_mirror_removes_batches_that_the_source_no_longer_has(make_store: MakeStore) -> None:
    source, target = make_store(), make_store()
    step(source, "s", message("a"))
    source.session("s").queue.enqueue(["first"], batch_id="b", source_key="k")
    copy(source, target)
    source.session("s").queue.cancel("b")
    source.session("s").queue.enqueue(["second"], batch_id="c")
    copy(source, target)
    assert [batch.id for batch in target.session("s").queue.batches()] == ["b", "c"]
    assert not check(target).findings
    copy(source, target, mirror=True)
    assert rows_of(target) == rows_of(source)


def test_a_copied_batch_replaces_the_batch_with_the_same_key_in_the_target(
    make_store: MakeStore,
) -> None:
    source, target = make_store(), make_store()
    step(source, "s", message("a"))
    copy(source, target)
    source.session("s").queue.enqueue(["theirs"], batch_id="b", source_key="k")
    target.session("s").queue.enqueue(["ours"], batch_id="ours", source_key="k")
    copy(source, target)
    assert rows_of(target) == rows_of(source)


def test_a_copy_removes_a_subject_that_the_session_no_longer_has(make_store: MakeStore) -> None:
    """The index of the target still had her, and erasing her found a session that stayed."""
    source, target = make_store(), make_store()
    source.create_session("s", subjects=["her", "both"])
    copy(source, target)
    source.session("s").add_subjects(["him"])
    source.session("s").remove_subjects(["her"])
    copy(source, target)
    assert {name: list(target.sessions_about(name)) for name in ("her", "him", "both")} == {
        "her": [], "him": ["s"], "both": ["s"],
    }  # fmt: skip
    assert rows_of(target) == rows_of(source)
    assert not check(target).findings


# --- labels -----------------------------------------------------------------------------------


def bring_by_copy(source: Store, target: Store, place: Path) -> None:
    copy(source, target, sessions=["s"])


def bring_by_file(source: Store, target: Store, place: Path) -> None:
    export_session(source, "s", place / "bundle", replace=True)
    import_session(target, place / "bundle", on_conflict="fast-forward")


Bring = Callable[[Store, Store, Path], None]
BRINGING = pytest.mark.parametrize("bring", [bring_by_copy, bring_by_file])


@BRINGING
@pytest.mark.parametrize("moves", [False, True])
def test_a_label_of_a_revision_that_retention_removed_in_the_target_is_not_copied(
    make_store: MakeStore, tmp_path: Path, bring: Bring, moves: bool
) -> None:
    """It named nothing."""
    source, target = make_store(), make_store()
    for name in "abcd":
        step(source, "s", message(name))
    bring(source, target, tmp_path)
    retention.execute(target, retention.plan(target, policy=Policy(last=2)))
    for revision in (2, 3, 4):
        source.session("s").label(f"label {revision}", revision)
    if moves:
        step(source, "s", message("e"), label="label 5")
    bring(source, target, tmp_path)
    labels = [entry.labels for entry in target.session("s").history()]
    assert labels == [("label 5",)] * moves + [("label 4",), ("label 3",)]
    assert not check(target).findings


@BRINGING
@pytest.mark.parametrize("moves", [False, True])
def test_a_copied_label_protects_its_revision_from_an_earlier_plan(
    make_store: MakeStore, tmp_path: Path, bring: Bring, moves: bool
) -> None:
    """The revision went, and the label named nothing."""
    source, target = make_store(), make_store()
    for name in "abc":
        step(source, "s", message(name))
    bring(source, target, tmp_path)
    plan = [*retention.plan(target, policy=Policy(last=1)).to_json()]
    source.session("s").label("kept", 2)
    if moves:
        step(source, "s", message("d"))
    bring(source, target, tmp_path)
    report = retention.execute(target, retention.Plan.from_json(plan))
    assert (report.revisions_removed, report.skipped[0].revision) == (1, 2)
    assert target.session("s").entry("kept").revision == 2


@BRINGING
def test_a_copied_label_protects_its_session_from_deletion_as_idle(
    tmp_path: Path, bring: Bring
) -> None:
    clock = ManualClock()
    source, target = [Store(MemoryEngine(clock=clock)) for _ in range(2)]
    step(source, "s", message("a"))
    bring(source, target, tmp_path)
    clock.now_ms += 1000
    plan = [*retention.plan(target, policy=Policy(last=1, idle_ms=1000)).to_json()]
    source.session("s").label("kept", 1)
    bring(source, target, tmp_path)
    assert retention.execute(target, retention.Plan.from_json(plan)).sessions_deleted == 0
    assert target.session("s").entry("kept").revision == 1


@BRINGING
def test_a_label_copied_during_the_deletion_as_idle_keeps_its_session(
    tmp_path: Path, bring: Bring
) -> None:
    clock = ManualClock()
    source, engine = Store(MemoryEngine(clock=clock)), Watched(clock=clock)
    target = Store(engine)
    step(source, "s", message("a"))
    bring(source, target, tmp_path)
    clock.now_ms += 1000
    plan = retention.plan(target, policy=Policy(last=1, idle_ms=1000))
    source.session("s").label("kept", 1)

    def arrive(write: Write) -> None:
        if any(change.table == "tombstones" for change in write.rows):
            engine.before = None
            bring(source, target, tmp_path)

    engine.before = arrive
    assert retention.execute(target, plan).sessions_deleted == 0
    assert engine.before is None
    assert target.session("s").entry("kept").revision == 1


@BRINGING
def test_a_label_copied_during_retention_keeps_its_revision(
    make_memory: MakeStore, tmp_path: Path, bring: Bring
) -> None:
    source, engine = make_memory(), Watched()
    target = Store(engine)
    for name in "abc":
        step(source, "s", message(name))
    bring(source, target, tmp_path)
    plan = retention.plan(target, policy=Policy(last=1))
    source.session("s").label("kept", 2)

    def arrive(write: Write) -> None:
        if any(isinstance(change, DeleteRow) for change in write.rows):
            engine.before = None
            bring(source, target, tmp_path)

    engine.before = arrive
    assert retention.execute(target, plan).revisions_removed == 1
    assert engine.before is None
    assert target.session("s").entry("kept").revision == 2


@BRINGING
def test_a_revision_removed_during_the_copy_of_its_label_leaves_no_label(
    make_memory: MakeStore, tmp_path: Path, bring: Bring
) -> None:
    source, engine = make_memory(), Watched()
    target = Store(engine)
    for name in "abc":
        step(source, "s", message(name))
    bring(source, target, tmp_path)
    source.session("s").label("late", 2)

    def prune(write: Write) -> None:
        if any(change.table == "history" for change in write.rows):
            engine.before = None
            retention.execute(target, retention.plan(target, policy=Policy(last=1)))

    engine.before = prune
    bring(source, target, tmp_path)
    assert engine.before is None
    assert [entry.labels for entry in target.session("s").history()] == [()]
    assert not check(target).findings


# --- what goes from the source meanwhile --------------------------------------------------------


class Going(MemoryEngine):
    """Calls ``after`` once, when a row of ``got`` was asked for, or the rows of ``listed`` were."""

    got = listed = ""
    after: Callable[[], None] | None = None

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        rows = super().get_rows(keys)
        self._tell(any(place.table == self.got for place in keys))
        return rows

    def scan_rows(self, table: str, **bounds: Any) -> list[Row]:
        rows = super().scan_rows(table, **bounds)
        self._tell(table == self.listed)
        return rows

    def _tell(self, is_it: bool) -> None:
        if is_it and self.after is not None:
            after, self.after = self.after, None
            after()


def test_a_session_that_goes_right_after_its_head_was_read_is_left_out() -> None:
    """With its node table: that it has none is no damage."""
    engine = Going()
    source, target = Store(engine), Store(MemoryEngine())
    step(source, "s", message("a"))
    step(source, "z", message("a"))
    engine.got = "heads"
    done: list[str] = []

    def delete() -> None:
        source.delete_session("s")
        gc.collect(source, grace_ms=0)
        done.append("s")

    engine.after = delete
    copy(source, target)
    assert done == ["s"]
    assert [info.meta.session for info in target.sessions()] == ["z"]
    assert not check(target).findings


def test_a_pin_removed_with_its_object_right_after_it_was_read_is_left_out() -> None:
    engine = Going()
    source, target = Store(engine), Store(MemoryEngine())
    source.pin("gone", source.put_blob(b"gone"))
    source.pin("kept", source.put_blob(b"kept"))
    engine.listed = "pins"

    def unpin() -> None:
        source.unpin("gone")
        assert gc.collect(source, grace_ms=0).objects_swept == 1

    engine.after = unpin
    copy(source, target)
    assert [pin.name for pin in target.pins()] == ["kept"]
