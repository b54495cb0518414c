"""Attachments whose putting fails, or is overtaken, at any of its writes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import StorageError
from casstore.maintenance import gc
from casstore.session.data import Attachment, Commit
from casstore.store import Store

CONTENT = b"the bytes of an image"


class Interrupted(MemoryEngine):
    """An engine that lets something happen, once, before one of its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_left = 0
        self.happens: Callable[[], object] = list

    def write(self, write: Write) -> WriteResult:
        """Let it happen, and write."""
        self.writes_left -= 1
        if self.writes_left == 0:
            self.happens()
        return super().write(write)


def fail() -> None:
    raise StorageError("the disk is gone")


def commit(store: Store, attachment: Attachment) -> None:
    store.session("s").commit(Commit(attachments=[attachment.id]))


def assert_kept(store: Store, attachment: Attachment) -> None:
    """What was put and committed is there, and stays."""
    found = store.session("s").attachments.find(attachment.id)
    assert found is not None
    assert (found.state, found.digest) == ("committed", attachment.digest)
    assert gc.collect(store, grace_ms=0).problem is None
    assert attachment.digest is not None
    assert store.get_blob(attachment.digest) == CONTENT


def test_attachment_bytes_survive_a_second_put_that_fails_at_any_write() -> None:
    for writes in count(1):
        engine = Interrupted()
        store = Store(engine)
        first = store.session("s").attachments.put(CONTENT)
        engine.writes_left, engine.happens = writes, fail
        try:
            store.session("s").attachments.put(CONTENT)
        except StorageError:
            engine.writes_left = 0
        survived = engine.writes_left > 0
        engine.writes_left = 0
        commit(store, first)
        assert_kept(store, first)
        if survived:
            break


def test_attachment_bytes_survive_a_commit_of_the_first_intent_during_a_second_put() -> None:
    for writes in count(1):
        engine = Interrupted()
        store = Store(engine)
        first = store.session("s").attachments.put(CONTENT)
        engine.happens = lambda: commit(Store(engine), first)  # noqa: B023
        engine.writes_left = writes
        again = store.session("s").attachments.put(CONTENT)
        assert again.digest == first.digest
        if engine.writes_left > 0:
            break
        assert_kept(store, first)


def test_gc_during_a_put_does_not_remove_the_attachment_bytes() -> None:
    for writes in count(1):
        engine = Interrupted()
        store = Store(engine)
        engine.happens = lambda: gc.collect(Store(engine), grace_ms=0)  # noqa: B023
        engine.writes_left = writes
        put = store.session("s").attachments.put(CONTENT)
        if engine.writes_left > 0:
            break
        commit(store, put)
        assert_kept(store, put)


def test_put_stores_its_bytes_though_their_id_is_committed_with_another_uri() -> None:
    store = Store(MemoryEngine())
    session = store.session("s")
    other = session.attachments.put(CONTENT)
    session.attachments.forget(other.id)
    gc.collect(store, grace_ms=0)
    session.attachments.intend(other.id, uri="elsewhere")
    commit(store, other)
    assert session.attachments.put(CONTENT).uri == "elsewhere"
    assert other.digest is not None
    assert store.get_blob(other.digest) == CONTENT


@pytest.mark.parametrize("length", [10, 1 << 20])
def test_putting_bytes_is_one_write(length: int) -> None:
    engine = Interrupted()
    Store(engine).session("s").attachments.put(bytes(length))
    assert engine.writes_left == -1
