"""Deleting a session while writers continue, and between two engine calls of other operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES, PutRow
from casstore.errors import ConflictError, GraphError, NotFoundError, SessionDeletedError
from casstore.maintenance import gc
from casstore.maintenance.condemned import list_condemned
from casstore.session import catalogue, keys
from casstore.session.data import Commit, NodeDraft
from casstore.session.session import Session
from casstore.session.state import head_key, meta_key
from casstore.store import Store
from casstore.testing.engine_fixtures import all_rows
from casstore.testing.session_deletion import CALLS
from casstore.testing.session_fixtures import MINUTE_MS, fill, hold, interrupted, step
from tests.session.test_interleaving import Interrupted

NOW_MS: Final = 1_760_000_000_000
KEY: Final = keys.session_key("alpha")


def test_a_session_with_constant_commits_can_be_deleted(any_store: Store) -> None:
    # Once a commit came between each reading and its write, and the call gave up as busy.
    session = any_store.session("s")
    session.commit(Commit(append=[NodeDraft("0", 0)]))
    engine: Any = any_store.engine
    write = engine.write
    commits: list[int] = []

    def also(change: Any) -> Any:
        deletes = any(isinstance(row, PutRow) and row.table == "tombstones" for row in change.rows)
        if deletes:
            commits.append(len(commits) + 1)
            node = NodeDraft(str(commits[-1]), commits[-1])
            session.commit(Commit(append=[node]))
        return write(change)

    engine.write = also
    assert any_store.delete_session("s") is True
    engine.write = write
    assert commits == [1]
    with pytest.raises(SessionDeletedError):
        session.load()
    assert engine.scan_rows("history") == []


# --- before its first commit ------------------------------------------------------------------

_BEFORE: dict[str, Callable[[Session], object]] = {
    "work": lambda session: session.queue.enqueue(["long " * 500], source_key="key"),
    "lease": lambda session: session.claim_lease("worker", MINUTE_MS),
    "attachment": lambda session: session.attachments.put(b"announced"),
}


@pytest.mark.parametrize("name", ["s", "long " * 100])
@pytest.mark.parametrize("what", _BEFORE)
def test_deleting_a_session_without_commits_removes_its_queue_and_attachments(
    any_store: Store, what: str, name: str
) -> None:
    # Once there was no session to delete, and what waited for it stayed, with all its bytes.
    _BEFORE[what](any_store.session(name))
    assert any_store.delete_session(name) is True
    gc.collect(any_store, grace_ms=0)
    left = {table: len(all_rows(any_store.engine, table)) for table in TABLES}
    assert {table: rows for table, rows in left.items() if rows} == {
        "tombstones": 1,
    }
    assert any_store.engine.scan_objects() == []
    # No counter begins anew.
    with pytest.raises(SessionDeletedError):
        _BEFORE[what](any_store.session(name))
    assert any_store.delete_session(name) is False


def test_deleting_a_session_without_commits_condemns_its_external_attachments(
    any_store: Store,
) -> None:
    any_store.session("s").attachments.intend("video", uri="s3://bucket/video")
    assert any_store.delete_session("s") is True
    assert [one.uri for one in list_condemned(any_store)] == ["s3://bucket/video"]
    assert any_store.delete_session("s") is False


def test_deleting_a_session_removes_a_concurrent_first_commit(
    any_store: Store,
) -> None:
    any_store.session("s").queue.enqueue(["first"])
    amid = interrupted(any_store, before=lambda: step(any_store.session("s"), "a"))
    assert amid.delete_session("s") is True
    assert list(any_store.sessions()) == []
    assert any_store.engine.scan_rows("queue") == []


# --- in the midst of a call -------------------------------------------------------------------

# The row of an earlier revision is there until it is cleared, unlike that of the head.
_ALL_CALLS: dict[str, Callable[[Store, Session], object]] = {
    **CALLS,
    "label earlier": lambda _, session: session.label("label", 1),
    "protect earlier": lambda _, session: session.protect(1, by="another"),
}
_CLAIMING = ("renew_lease", "release_lease", "queue.claim", "queue.claim_exactly")


def _filled() -> MemoryEngine:
    engine = MemoryEngine(clock=lambda: NOW_MS)
    store = Store(engine)
    fill(store.session("alpha"))
    step(store.session("alpha"), "a2")
    store.session("alpha").attachments.put(b"kept here")
    step(store.session("beta"), "a")
    return engine


def _with_lease(call: str) -> Callable[[Store, Session], object]:
    """The call; where it needs a lease, with one that is held."""

    def run(_: Store, session: Session) -> object:
        lease = hold(session)
        if call == "queue.claim":
            return session.queue.claim(lease)
        if call == "queue.claim_exactly":
            return session.queue.claim_exactly(lease, ["batch"])
        return session.renew_lease(lease, 2) if "renew" in call else session.release_lease(lease)

    return run if call in _CLAIMING else _ALL_CALLS[call]


def _of_alpha(engine: MemoryEngine) -> dict[tuple[str, bytes], bytes]:
    """Every row of the session, and of those it was about."""
    return {
        (table, row.key): row.value
        for table in TABLES
        for row in all_rows(engine, table)
        if table != "nodes" and b"alpha" in row.key
    }


@pytest.mark.parametrize("is_cut_short", [False, True])
@pytest.mark.parametrize("call", _ALL_CALLS)
def test_a_call_during_a_deletion_leaves_no_rows_of_the_session(
    call: str, *, is_cut_short: bool
) -> None:
    """Nobody would find what came to be afterwards, and it would keep what it names."""
    filled = _filled()
    gone = Interrupted(filled, clock=lambda: NOW_MS)
    Store(gone).delete_session("alpha")
    for at in count(1):
        engine = Interrupted(filled, clock=lambda: NOW_MS)
        store = Store(engine)
        rows: list[dict[tuple[str, bytes], bytes]] = []

        def delete(
            engine: Interrupted = engine, rows: list[dict[tuple[str, bytes], bytes]] = rows
        ) -> None:
            if is_cut_short:
                [head, meta] = engine.get_rows([head_key(KEY), meta_key(KEY)])
                engine.write(catalogue.burial(catalogue.KnownSession(KEY, head, meta), moving=True))
            else:
                Store(engine).delete_session("alpha")
            rows.append(_of_alpha(engine))

        engine.happens, engine.calls_left = delete, at
        with suppress(ConflictError, NotFoundError, GraphError):
            _with_lease(call)(store, store.session("alpha"))
        engine.calls_left = -1
        if not rows:
            break
        # Nothing is done to what is yet to be cleared, either: it would be acknowledged, and lost.
        assert _of_alpha(engine) == rows[0], f"before call {at}"
        if is_cut_short:
            Store(engine).delete_session("alpha")
        assert _of_alpha(engine) == _of_alpha(gone), f"before call {at}"
    assert at > 1
