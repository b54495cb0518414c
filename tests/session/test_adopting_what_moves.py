"""A session that moves, or goes, while it is adopted: all of it is adopted, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import HeadConflictError, SessionDeletedError
from casstore.maintenance import gc
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store


class Between(MemoryEngine):
    """An engine in which something happens right before the next write."""

    then: Callable[[], object] | None = None

    def write(self, write: Write) -> WriteResult:
        """Let it happen, and write."""
        if self.then is not None:
            then, self.then = self.then, None
            then()
        return super().write(write)


def said(name: str, **fields: str) -> Commit:
    return Commit(append=[NodeDraft(name, name)], **fields)  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Between:
    engine = Between()
    store = Store(engine)
    store.session("s").commit(said("a"))
    store.fork("s", "other", append=[NodeDraft("b", "b")])
    return engine


def test_adopt_includes_a_concurrent_commit_to_the_other_session_with_its_turn(
    engine: Between,
) -> None:
    store, theirs = Store(engine), Store(engine).session("other")
    engine.then = lambda: theirs.commit(said("c", turn="t"))
    store.session("s").adopt("other")
    assert [node.id for node in store.session("s").nodes()] == ["a", "b", "c"]
    assert store.session("s").commit(said("c", turn="t")).replayed


def test_a_concurrent_commit_to_the_adopting_session_stays_in_its_history(engine: Between) -> None:
    store, ours = Store(engine), Store(engine).session("s")
    engine.then = lambda: ours.commit(said("mine"))
    assert store.session("s").adopt("other").revision == 3
    assert [node.id for node in store.session("s").nodes(at=2)] == ["a", "mine"]
    engine.then = lambda: ours.commit(said("more"))
    with pytest.raises(HeadConflictError):
        store.session("s").adopt("other", expected=3)


def test_adopt_raises_if_the_other_session_is_deleted_concurrently(engine: Between) -> None:
    store = Store(engine)

    def go() -> None:
        Store(engine).delete_session("other")
        gc.collect(Store(engine), grace_ms=0)

    engine.then = go
    with pytest.raises(SessionDeletedError):
        store.session("s").adopt("other")
    assert [node.id for node in store.session("s").nodes()] == ["a"]


def test_deleting_and_collecting_an_adopted_session_loses_nothing_that_was_adopted(
    engine: Between,
) -> None:
    store = Store(engine)
    store.session("other").commit(said("c", turn="t"))
    image = store.session("other").attachments.put(b"pixels")
    store.session("other").attachments.commit([image.id])
    store.session("s").adopt("other")
    store.delete_session("other")
    gc.collect(store, grace_ms=0)
    assert [node.id for node in store.session("s").nodes()] == ["a", "b", "c"]
    assert store.session("s").commit(said("c", turn="t")).nodes == ("c",)
    assert image.digest is not None
    assert store.get_blob(image.digest) == b"pixels"
