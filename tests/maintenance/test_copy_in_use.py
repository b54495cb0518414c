"""A copy into a store that is in use: what is there stays right, wherever the copy is stopped."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from casstore import Store
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import SessionDivergedError
from casstore.maintenance.check import check
from casstore.maintenance.copying import copy
from casstore.maintenance.exporting import export_session
from casstore.maintenance.importing import import_session
from tests.maintenance import sessions
from tests.maintenance.sessions import MakeStore, message, seen, step


class Watched(MemoryEngine):
    """Calls ``before`` with each write from the time on that it is set."""

    before: Callable[[Write], None] | None = None

    def write(self, write: Write) -> WriteResult:
        if self.before is not None:
            self.before(write)
        return super().write(write)


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
