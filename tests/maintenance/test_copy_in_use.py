"""A copy into a store that is in use: what is there stays right, wherever the copy is stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from casstore import UNFENCED, Checkpoint, Store
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, PutRow, Row, Write
from casstore.errors import CorruptionError, SessionDeletedError, SessionDivergedError
from casstore.maintenance import findings as codes
from casstore.maintenance import gc, retention, sending, vacuum
from casstore.maintenance.check import check
from casstore.maintenance.copying import copy
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.exporting import export_session
from casstore.maintenance.importing import import_session
from casstore.maintenance.retention import Policy
from casstore.session import keys
from casstore.session.heads import Base, decode_head, encode_head, head_key
from casstore.testing import ManualClock
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
        left = ahead

        def commit(write: Write, target: Store = target, engine: Watched = engine) -> None:
            nonlocal left
            left -= 1
            if not left:
                engine.before = None
                step(target, "s", message("ours"))

        engine.before = commit
        try:
            copy(source, target)
        except SessionDivergedError:
            assert ids(target, "s") == ["a", "ours"]
            assert target.session("s").node("theirs") is None
            assert check(target, level="full").sound
        else:
            assert left > 0
            break
    assert ahead > 2, "nothing was ever in between"


def test_a_session_that_appears_in_the_target_meanwhile_stays(make_memory: MakeStore) -> None:
    source = make_memory()
    step(source, "s", message("a"))
    step(source, "s", message("b"))
    for ahead in range(1, 40):
        engine = Watched()
        target, left = Store(engine), ahead

        def create(write: Write, target: Store = target, engine: Watched = engine) -> None:
            nonlocal left
            left -= 1
            if not left:
                engine.before = None
                step(target, "s", message("ours"))

        engine.before = create
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
def test_a_copy_that_is_stopped_leaves_sessions_that_go_on(
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
def test_a_fork_that_has_more_of_a_session_than_the_target_does_not_meet_it_there(
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


def test_a_fork_of_a_session_that_went_another_way_is_refused_and_comes_as_a_bundle(
    make_store: MakeStore, tmp_path: object
) -> None:
    """Its nodes took the places of the target's: there one message was shown for another."""
    source, target = make_store(), make_store()
    step(source, "s", message("a"))
    copy(source, target)
    step(source, "s", message("theirs"))
    step(target, "s", message("ours"))
    source.fork("s", "fork")
    with pytest.raises(SessionDivergedError, match="export it"):
        copy(source, target, sessions=["fork"])
    assert ids(target, "s") == ["a", "ours"]
    export_session(source, "fork", f"{tmp_path}/fork")
    import_session(target, f"{tmp_path}/fork")
    assert ids(target, "fork") == ["a", "theirs"]
    assert ids(target, "s") == ["a", "ours"]
    assert check(target, level="full").sound


def shown(store: Store, name: str) -> object:
    """All of a session but what lineages are called."""
    told = seen(store, name)
    return told["head"], told["revisions"]


@pytest.mark.parametrize("mirror", [False, True])
def test_a_session_goes_on_whose_last_copied_revision_retention_has_removed(
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
def test_nothing_of_the_targets_is_taken_for_what_retention_has_removed(
    make_store: MakeStore, way: str
) -> None:
    source, target = make_store(), make_store()
    step(source, "s", message("a"))
    copy(source, target)
    if way == "rewound":
        # On a lineage of its own, where nothing of the source's is in its place.
        target.session("s").rewind(1, lease=UNFENCED)
    step(target, "s", message("ours"))
    for number in range(4):
        step(source, "s", message(f"n{number}"))
    retention.execute(source, retention.plan(source, policy=Policy(last=1)))
    for mirror in (False, True):
        with pytest.raises(SessionDivergedError):
            copy(source, target, mirror=mirror)
        assert ids(target, "s") == ["a", "ours"]


def test_a_session_made_in_the_target_is_not_one_of_which_retention_has_removed_the_beginning() -> (
    None
):
    """It has the same node, and another beginning: what it was called and did is its own."""
    source, target = Store(MemoryEngine(clock=ManualClock())), Store(MemoryEngine())
    for node in ("a", "b", "c"):
        step(source, "s", message(node))
    step(target, "s", message("a"), turn="ours")
    retention.execute(source, retention.plan(source, policy=Policy(last=1)))
    with pytest.raises(SessionDivergedError):
        copy(source, target)
    assert ids(target, "s") == ["a"]


def test_what_vacuum_has_removed_goes_from_a_mirror(make_store: MakeStore) -> None:
    source, target = make_store(), make_store()
    for name in ("s", "rewound"):
        step(source, name, message("a"))
        step(source, name, message("secret", "nobody may read this"))
        step(source, name, message("b"))
    source.session("rewound").rewind(1, lease=UNFENCED)
    copy(source, target)
    step(source, "s", message("c"))
    source.session("s").tombstone(["secret"])
    source.session("rewound").rewind(3, lease=UNFENCED)
    source.session("rewound").tombstone(["secret"])
    source.session("rewound").rewind(1, lease=UNFENCED)
    vacuum.vacuum(source, grace_ms=0)
    copy(source, target, mirror=True)
    for name in ("s", "rewound"):
        assert shown(target, name) == shown(source, name)
        for entry in target.session(name).history():
            assert target.session(name).node("secret", at=entry.revision) is None
    gc.collect(target, grace_ms=0)
    assert check(target, level="full").sound
    assert copy(source, target, mirror=True)[:4] == (0, 0, 0, 0)


def test_a_fork_whose_nodes_have_others_in_their_places_is_found(make_store: MakeStore) -> None:
    """Nobody looked whether a lineage on which a session stands has what forks know of it."""
    store = make_store()
    step(store, "s", message("a"))
    store.fork("s", "other")
    step(store, "s", message("b"))
    step(store, "other", message("x"))
    store.fork("s", "fork")
    assert check(store, level="full").sound
    key, other = keys.session_key("fork"), keys.session_key("other")
    [row, theirs] = store.engine.get_rows([head_key(key), head_key(other)])
    assert row is not None
    assert theirs is not None
    moved = decode_head(row)._replace(base=Base(decode_head(theirs).lineage, 2, None))
    store.engine.write(Write(rows=[PutRow(*head_key(key), encode_head(moved))]))
    report = check(store)
    assert list(report.counts) == [codes.NODE_TABLE_WRONG]
    assert [finding.where.session for finding in report.findings] == ["fork"]


def test_what_is_collected_in_the_target_before_anything_names_it_is_sent_again(
    make_memory: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that linked to it waited to be written, and were taken for sent at every attempt."""
    monkeypatch.setattr(sending, "_WRITE_OBJECTS", 1)
    source = make_memory()
    step(source, "s", message("a"))
    step(source, "s", message("b"))
    for ahead in range(1, 40):
        engine = Watched()
        target, left = Store(engine), ahead

        def collect(write: Write, target: Store = target, engine: Watched = engine) -> None:
            nonlocal left
            left -= 1
            if not left:
                engine.before = None
                gc.collect(target, grace_ms=0)

        engine.before = collect
        copy(source, target)
        assert ids(target, "s") == ["a", "b"]
        assert check(target, level="full").sound
        if left > 0:
            break
    assert ahead > 2, "nothing was ever in between"


def test_a_deletion_whose_copy_was_stopped_is_finished_by_the_next(make_memory: MakeStore) -> None:
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
def test_a_session_that_appears_in_the_target_while_its_deletion_is_copied_goes_whole(
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
def test_a_session_deleted_in_the_target_right_before_it_arrives_stays_deleted(
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


@pytest.mark.parametrize("has_head", [False, True])
def test_a_lineage_swept_in_the_target_right_before_it_is_named_is_copied_again(
    make_memory: MakeStore, has_head: bool
) -> None:
    source, engine = make_memory(), Watched()
    target = Store(engine)
    step(source, "s", message("a"))
    if has_head:
        copy(source, target)
        # On a lineage of its own, which goes on from the first.
        source.session("s").rewind(1, lease=UNFENCED)
    step(source, "s", message("b"))
    swept: list[int] = []

    def sweep(write: Write) -> None:
        if any(change.table == "heads" for change in write.rows):
            engine.before = None
            swept.append(expire_rows(target).lineages)

    engine.before = sweep
    copy(source, target)
    assert swept == [1]
    assert seen(target, "s") == seen(source, "s")
    assert check(target, level="full").sound


def test_labels_and_turns_of_a_commit_made_meanwhile_come_with_their_revision(
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
def test_what_is_collected_of_one_revision_is_missed_though_another_is_there(
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


def test_a_lineage_that_another_goes_on_from_is_copied_again_if_it_was_swept(
    make_memory: MakeStore,
) -> None:
    """A sweep that was stopped has taken that one alone."""
    source, engine = make_memory(), Watched()
    target = Store(engine)
    step(source, "s", message("a"))
    source.fork("s", "fork")
    step(source, "fork", message("b"))
    base = decode_head(rows_of(source)["heads"][0].value).base
    assert base is not None

    def sweep(write: Write) -> None:
        if any(change.table == "heads" for change in write.rows):
            engine.before = None
            start, stop = base.lineage, keys.past_lineage(base.lineage)
            rows = engine.scan_rows("nodes", start=start, stop=stop)
            engine.write(Write(rows=[DeleteRow("nodes", row.key) for row in rows]))

    engine.before = sweep
    copy(source, target, sessions=["fork"])
    assert engine.before is None
    assert seen(target, "fork") == seen(source, "fork")
    assert check(target, level="full").sound


def test_a_session_goes_on_that_came_by_no_node_since_retention_removed_its_last_copied_revision(
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


def test_damage_in_the_source_is_told_and_not_taken_for_somebody_at_work(
    make_memory: MakeStore,
) -> None:
    source, target = make_memory(), make_memory()
    step(source, "s", message("a"))
    rows = source.engine.scan_rows("nodes")
    source.engine.write(Write(rows=[DeleteRow("nodes", row.key) for row in rows]))
    with pytest.raises(CorruptionError):
        copy(source, target)
    assert rows_of(target)["heads"] == []
