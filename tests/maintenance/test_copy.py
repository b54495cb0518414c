"""A store copied into another: everything, only what is lacking, and never half a session."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import casstore
from casstore import Commit, Store
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, PutRow, RowKey, Write, WriteResult
from casstore.errors import (
    ContendedError,
    InvalidInputError,
    SessionDeletedError,
    SessionDivergedError,
    SessionNotFoundError,
    StorageError,
)
from casstore.maintenance import gc
from casstore.maintenance.backup import backup
from casstore.maintenance.check import check
from casstore.maintenance.copy import copy, is_same_store
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.policy import Policy, set_policy
from casstore.maintenance.progress import Step
from casstore.session import attempts, keys
from casstore.testing.engine_fixtures import all_objects
from tests.maintenance import sessions
from tests.maintenance.sessions import MakeStore, rows_of


def digests(store: Store) -> set[bytes]:
    return {info.digest for info in all_objects(store.engine)}


def fill(store: Store, seed: int = 0) -> list[str]:
    names = ["r"]
    sessions.grow(store, random.Random(seed), names, 40)
    sessions.fill(store)
    sessions.step(store, "gone", sessions.message("a"))
    store.delete_session("gone")
    store.create_session("only a name")
    head = store.session("s").head()
    assert head is not None
    store.tag("release", head.manifest)
    store.pin("for a while", store.put_blob(b"kept by a pin"), ttl_ms=3_600_000)
    store.session("s").claim_lease("worker", 60_000)
    store.session("later").queue.enqueue(["work for a session that is not there yet"])
    store.engine.write(Write(rows=[PutRow("records", b"some", b"\x00\xa3row")]))
    return names


WAYS = (
    "memory memory", "memory lmdb", "lmdb memory", "lmdb lmdb",
    "lmdb postgres", "postgres lmdb", "postgres postgres",
)  # fmt: skip


@pytest.mark.parametrize("ways", WAYS)
def test_a_copy_has_every_row_and_every_object_that_a_row_reaches(
    request: pytest.FixtureRequest, ways: str
) -> None:
    source, target = [request.getfixturevalue(f"make_{way}")() for way in ways.split()]
    names = fill(source)
    source.put_blob(b"nobody refers to this")
    report = copy(source, target)
    assert rows_of(target) == rows_of(source)
    assert gc.collect(source, grace_ms=0).outcome is gc.Outcome.SWEPT
    assert digests(target) == digests(source)
    assert report.new_objects == len(digests(target))
    for name in [*names, "s"]:
        if source.session(name).head() is not None:
            assert sessions.seen(target, name) == sessions.seen(source, name)


@contextmanager
def second_handle(store: Store) -> Iterator[Store]:
    """Another handle on a store, which knows it by another name if it has one."""
    engine = store.engine
    if isinstance(engine, MemoryEngine):
        yield Store(engine)
    elif isinstance(engine, LmdbEngine):
        name = Path(engine.path).with_name("another name")
        name.symlink_to(engine.path)
        with casstore.open(name, auto_train=False) as other:
            yield other
    else:
        from casstore.engine.postgres.engine import PostgresEngine

        assert isinstance(engine, PostgresEngine)
        with Store(PostgresEngine(engine.address)) as other:
            yield other


@pytest.mark.parametrize("has_sign", [False, True])
@pytest.mark.parametrize("way", ["memory", "lmdb", "postgres"])
def test_copying_a_store_onto_itself_through_any_handle_is_refused(
    request: pytest.FixtureRequest, way: str, *, has_sign: bool
) -> None:
    store = request.getfixturevalue(f"make_{way}")()
    fill(store)
    if not has_sign:
        store.engine.write(Write(rows=[DeleteRow(*keys.sign())]))
    before = rows_of(store)
    with second_handle(store) as other:
        for source, target in [(store, store), (store, other), (other, store)]:
            ways: list[dict[str, Any]] = [{}, {"mirror": True}, {"sessions": ["s"]}]
            for options in ways:
                with pytest.raises(InvalidInputError, match="onto itself"):
                    copy(source, target, **options)
    assert rows_of(store) == before


class _Restless(MemoryEngine):
    """Another process compares stores whenever the sign is read, for a while."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def get_rows(self, keys_: Sequence[RowKey]) -> list[bytes | None]:
        if list(keys_) == [keys.sign()] and self.times:
            self.times -= 1
            self.write(Write(rows=[PutRow(*keys.sign(), secrets.token_bytes(8))]))
        return super().get_rows(keys_)


@pytest.mark.parametrize("times", range(1, 9))
def test_a_store_in_use_is_not_copied_onto_itself(times: int) -> None:
    engine = _Restless(times)
    by_another_name: Any = SimpleNamespace(get_rows=engine.get_rows)
    assert is_same_store(by_another_name, engine)


@pytest.mark.parametrize("times", range(1, 9))
def test_is_same_store_distinguishes_a_target_that_changes_meanwhile(times: int) -> None:
    assert not is_same_store(MemoryEngine(), _Restless(times))
    assert not is_same_store(_Restless(times), MemoryEngine())


def test_is_same_store_raises_contended_error_if_the_target_keeps_changing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "MAX_ATTEMPTS", 8)
    with pytest.raises(ContendedError, match="the target kept changing"):
        is_same_store(MemoryEngine(), _Restless(10**6))


def test_a_backup_can_be_the_target_of_a_copy_from_its_source(
    make_lmdb: MakeStore, tmp_path: Path
) -> None:
    source = make_lmdb()
    fill(source)
    backup(source, tmp_path / "backup")
    sessions.step(source, "since then", sessions.message("a"))
    with casstore.open(tmp_path / "backup", auto_train=False) as target:
        assert copy(source, target).sessions == 1
        assert rows_of(target) == rows_of(source)


def test_a_second_copy_sends_only_new_objects(make_store: MakeStore) -> None:
    source, target = make_store(), make_store()
    fill(source)
    copy(source, target)
    assert copy(source, target)[:4] == (0, 0, 0, 0)
    sessions.step(source, "r", sessions.message("new"))
    report = copy(source, target)
    assert (report.sessions, report.new_objects) == (1, 2)
    assert rows_of(target) == rows_of(source)


@pytest.mark.parametrize("seed", range(6))
def test_repeated_mirrors_follow_random_changes_of_the_source(
    make_memory: MakeStore, seed: int
) -> None:
    source, target = make_memory(), make_memory()
    rng, names = random.Random(seed), ["r"]
    for turn in range(5):
        sessions.grow(source, rng, names, 12, prefix=f"turn{turn}-")
        if len(names) > 3:
            source.delete_session(names.pop(rng.randrange(len(names))))
            names = names or [f"anew {turn}"]
        copy(source, target, mirror=True)
        for name in names:
            if source.session(name).head() is not None:
                assert sessions.seen(target, name) == sessions.seen(source, name)
        assert rows_of(target) == rows_of(source)
        gc.collect(target, grace_ms=0)
        gc.collect(source, grace_ms=0)
        assert digests(target) == digests(source)


def test_only_a_mirror_removes_rows_that_the_source_no_longer_has(make_store: MakeStore) -> None:
    source, target = make_store(), make_store()
    fill(source)
    copy(source, target)
    source.unpin("release")
    source.session("s").unlabel("shown")
    copy(source, target)
    assert target.find_pin("release") is not None
    report = copy(source, target, mirror=True)
    assert report.rows_removed == 2
    assert rows_of(target) == rows_of(source)


def with_all_that_goes(store: Store) -> None:
    """Give a session rows of every kind that deleting it takes away."""
    session = store.session("s")
    session.protect(by="me")
    session.add_subjects(["her"])
    session.expire_in(3_600_000)
    set_policy(store, Policy(last=3), session="s")


def test_a_session_deleted_in_the_source_is_deleted_in_the_target(make_store: MakeStore) -> None:
    """With whom it was about: once that and its protections stayed for ever."""
    source, target = make_store(), make_store()
    fill(source)
    with_all_that_goes(source)
    copy(source, target)
    source.delete_session("s")
    copy(source, target)
    with pytest.raises(SessionDeletedError):
        target.session("s").head()
    assert rows_of(target) == rows_of(source)


def test_a_copy_deletes_queue_and_attachments_of_a_session_deleted_without_commits(
    make_store: MakeStore,
) -> None:
    source, target = make_store(), make_store()
    session = source.session("s")
    session.queue.enqueue(["work"])
    session.attachments.put(b"announced")
    session.claim_lease("worker", 60_000)
    copy(source, target)
    assert source.delete_session("s") is True
    copy(source, target)
    assert rows_of(target) == rows_of(source)
    with pytest.raises(SessionDeletedError):
        target.session("s").claim_lease("worker", 60_000)


@pytest.mark.parametrize("finishes", ["a copy", "a vacuum"])
def test_the_next_copy_or_vacuum_finishes_a_deletion_interrupted_in_the_target(
    finishes: str,
) -> None:
    """Once the tombstone told the next copy that all was done, and the rest was kept for ever."""
    source, target = Store(MemoryEngine()), Store(MemoryEngine())
    fill(source)
    with_all_that_goes(source)
    copy(source, target)
    source.delete_session("s")
    engine: Any = target.engine
    write = engine.write

    def die(change: Write) -> Any:
        raise StorageError("killed")

    def last(change: Write) -> Any:
        engine.write = die
        return write(change)

    engine.write = last
    with pytest.raises(StorageError):
        copy(source, target)
    engine.write = write
    with pytest.raises(SessionDeletedError):
        target.session("s").head()
    assert rows_of(target) != rows_of(source)
    if finishes == "a copy":
        copy(source, target)
    else:
        assert expire_rows(target).deletions == 1
    assert rows_of(target) == rows_of(source)


def test_a_diverged_session_stops_the_copy_and_stays_unchanged(make_store: MakeStore) -> None:
    source, target = make_store(), make_store()
    sessions.step(source, "s", sessions.message("a"))
    copy(source, target)
    sessions.step(source, "s", sessions.message("theirs"))
    sessions.step(target, "s", sessions.message("ours"))
    for _ in range(2):
        with pytest.raises(SessionDivergedError):
            copy(source, target)
        assert [node.id for node in target.session("s").nodes()] == ["a", "ours"]
        sessions.step(target, "s", sessions.message("further"), expected=None)
        target.session("s").rewind(2)
    other = Store(MemoryEngine())
    sessions.step(other, "s", sessions.message("a"))
    other.delete_session("s")
    with pytest.raises(SessionDeletedError):
        copy(source, other)
    with pytest.raises(InvalidInputError):
        copy(source, source)


def test_a_copy_stopped_at_any_write_leaves_a_sound_target_and_can_continue(
    make_memory: MakeStore,
) -> None:
    source = make_memory()
    fill(source, seed=3)
    survived = False
    for limit in range(0, 10_000, 9):
        left = limit

        class Weak(MemoryEngine):
            def write(self, write: Write) -> WriteResult:
                nonlocal left
                if not left:
                    raise KeyboardInterrupt
                left -= 1
                return super().write(write)

        target = Store(Weak())
        try:
            copy(source, target)
            survived = True
        except KeyboardInterrupt:
            pass
        assert gc.plan(target, grace_ms=0).report.outcome is not gc.Outcome.REFUSED
        for info in target.sessions():
            name = info.meta.session
            if info.head is not None:
                # Whole but for what is copied after all sessions: their names, attachments.
                ours, theirs = sessions.seen(source, name), sessions.seen(target, name)
                assert theirs["head"] == ours["head"]
                for mine, yours in zip(ours["revisions"], theirs["revisions"], strict=True):
                    labels = {"entry": mine["entry"]._replace(labels=())}
                    assert yours | {"entry": yours["entry"]._replace(labels=())} == mine | labels
        left = -1
        copy(source, target)
        assert rows_of(target) == rows_of(source)
        if survived:
            break
    assert limit > 12


@pytest.mark.parametrize("ways", ["lmdb postgres", "postgres lmdb"])
def test_a_copy_that_is_stopped_repeatedly_makes_progress_and_completes(
    request: pytest.FixtureRequest, ways: str
) -> None:
    source, target = [request.getfixturevalue(f"make_{way}")() for way in ways.split()]
    fill(source, seed=4)
    sent = 0
    for patience in range(3, 1000, 40):
        left = patience

        def stop(step: Step) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt

        try:
            sent += copy(source, target, progress=stop).new_objects
            break
        except KeyboardInterrupt:
            assert gc.plan(target, grace_ms=0).report.outcome is not gc.Outcome.REFUSED
    assert patience > 3, "it was never stopped"
    assert rows_of(target) == rows_of(source)
    # The last one sent only what those before it had not.
    assert sent < len(digests(target))
    assert check(target, level="full").sound


def test_a_copy_omits_nodes_committed_after_it_read_the_head(
    make_memory: MakeStore,
) -> None:
    """A commit lands after the head was read and before its node table was.

    Copied as it then is, the table would know a node that the copied head does not have, and
    the copy would take that id for taken, and find the node once it has as many itself.
    """
    source, target = make_memory(), make_memory()
    sessions.step(source, "s", sessions.message("a"))
    moved = False

    def commit(step: Step) -> None:
        nonlocal moved
        if step.phase == "send" and not moved:
            moved = True
            sessions.step(source, "s", sessions.message("late"), sessions.message("later"))

    copy(source, target, progress=commit)
    assert moved
    assert [node.id for node in target.session("s").nodes()] == ["a"]
    sessions.step(target, "s", sessions.message("mine"), sessions.message("late"))
    assert target.session("s").node("later") is None
    assert [node.id for node in target.session("s").nodes("full")] == ["a", "mine", "late"]


def test_a_session_deleted_and_collected_during_a_copy_is_left_out(make_memory: MakeStore) -> None:
    source, target = make_memory(), make_memory()
    sessions.step(source, "a", *[sessions.message(f"n{n}", f"{n} " * 900) for n in range(100)])
    sessions.step(source, "b", sessions.message("b"))

    def delete(step: Step) -> None:
        if step.phase == "send":
            source.delete_session("a")
            gc.collect(source, grace_ms=0)

    copy(source, target, progress=delete)
    with pytest.raises(SessionDeletedError):
        target.session("a").head()
    assert [node.id for node in target.session("b").nodes()] == ["b"]
    assert gc.collect(target, grace_ms=0).outcome is gc.Outcome.SWEPT


def test_a_mirror_keeps_the_nodes_of_a_session_that_goes_from_the_source_at_the_end(
    make_memory: MakeStore,
) -> None:
    """Its head was looked at already when it went."""
    source, target = make_memory(), make_memory()
    for name in ("kept", "s"):
        source.create_session(name)
        sessions.step(source, name, sessions.message("a"), sessions.message("b"))
    copy(source, target)
    done: list[bool] = []

    class Going:
        """Stands before an engine; a session goes when the heads of the target were compared."""

        def __init__(self) -> None:
            self.heads = 0

        def get_rows(self, places: list[RowKey]) -> list[bytes | None]:
            self.heads += len(places) == 2 and places[0].table == "heads"
            if self.heads and not done and places[0].table == "sessions":
                source.delete_session("s")
                done.append(True)
            return source.engine.get_rows(places)

        def __getattr__(self, name: str) -> Any:
            return getattr(source.engine, name)

    going: Any = Going()
    copy(Store(going, close=lambda: None), target, mirror=True)
    assert done
    assert check(target, level="full").sound
    copy(source, target, mirror=True)
    assert check(target, level="full").sound
    assert [info.meta.session for info in target.sessions()] == ["kept"]


def test_work_completed_during_a_copy_is_in_the_copy_as_batch_or_commit(
    make_memory: MakeStore,
) -> None:
    source, target = make_memory(), make_memory()
    session = source.session("s")
    sessions.step(source, "s", sessions.message("a"))
    session.queue.enqueue(["work"], batch_id="work")
    done = False

    def work(step: Step) -> None:
        nonlocal done
        if step.phase == "sessions" and not done:
            done = True
            lease = session.claim_lease("worker", 1000)
            claim = session.queue.claim(lease) if lease is not None else None
            assert claim is not None
            session.commit(
                Commit(append=[sessions.message("done")], completes=[claim], lease=lease)
            )

    copy(source, target, progress=work)
    assert done
    has_work = bool(target.session("s").queue.batches())
    has_result = target.session("s").node("done") is not None
    assert has_work or has_result


def test_a_copy_of_chosen_sessions_omits_their_queue_and_leases(
    make_memory: MakeStore, make_lmdb: MakeStore
) -> None:
    source, target = make_memory(), make_lmdb()
    fill(source)
    source.fork("s", "a fork of it")
    sessions.step(source, "a fork of it", sessions.message("on its own"))
    source.session("a fork of it").queue.enqueue(["work"])
    source.session("a fork of it").claim_lease("worker", 60_000)
    report = copy(source, target, sessions=["a fork of it", "only a name"])
    assert report.sessions == 1
    names = [info.meta.session for info in target.sessions()]
    assert names == ["a fork of it", "only a name"]
    assert sessions.seen(target, "a fork of it") == sessions.seen(source, "a fork of it")
    for table in ("queue", "leases", "pins", "records", "retention", "tombstones"):
        assert rows_of(target)[table] == []
    assert gc.collect(target, grace_ms=0).outcome is not gc.Outcome.REFUSED
    assert copy(source, target, sessions=["a fork of it"])[:4] == (0, 0, 0, 0)
    # The rest can follow, and then nothing is lacking.
    copy(source, target)
    assert rows_of(target) == rows_of(source)


def test_choosing_a_missing_session_raises_by_name_and_copies_nothing(
    make_memory: MakeStore,
) -> None:
    source, target = make_memory(), make_memory()
    sessions.step(source, "s", sessions.message("a"))
    with pytest.raises(SessionNotFoundError, match="nobody"):
        copy(source, target, sessions=["s", "nobody"])
    assert digests(target) == set()
    with pytest.raises(InvalidInputError, match="mirror"):
        copy(source, target, sessions=["s"], mirror=True)
    assert copy(source, target, sessions=[]) == (0, 0, 0, 0, 0)
