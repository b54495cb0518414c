"""A session goes while it is read: whole, or an error that says so; damage is still damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, Write
from casstore.errors import CorruptionError, RevisionNotFoundError, SessionDeletedError
from casstore.maintenance import gc, vacuum
from casstore.session.data import Checkpoint, Commit, NodeDraft
from casstore.session.session import Session
from casstore.store import Store

LONG = "of its own " * 200
NODES = 600
# More readings than any of the calls below makes.
_MAX_READINGS = 40


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine: Any = MemoryEngine()
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with Store(engine) as store:
        yield store


def fill(store: Store, name: str) -> Session:
    session = store.session(name)
    for step in range(3):
        session.commit(
            Commit(
                append=[NodeDraft(f"n{step}-{at}", [name, at, LONG]) for at in range(NODES // 3)],
                checkpoint=Checkpoint(tool_state={name: [LONG, step]}),
            )
        )
    return session


def everything(session: Session, at: int | None) -> Any:
    state = session.load(at)
    assert state is not None
    return [list(state.nodes), state.checkpoint]


def by_id(session: Session, at: int | None) -> Any:
    return session.node("n0-7", at=at)


def checkpoint(session: Session, at: int | None) -> Any:
    return session.checkpoint(at, hydrate=True)


READINGS: list[Callable[[Session, int | None], Any]] = [everything, by_id, checkpoint]


def read_while(store: Store, reading: int, happens: Callable[[], None], read: Any) -> Any:
    """Read, and let something happen before the given request for objects."""
    engine: Any = store.engine
    whole = engine.get_many
    readings = 0

    def get_many(digests: Any) -> Any:
        nonlocal readings
        readings += 1
        if readings == reading:
            engine.get_many = whole
            happens()
        return whole(digests)

    engine.get_many = get_many
    try:
        return read()
    finally:
        engine.get_many = whole


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("at", [None, 2])
def test_reading_a_session_during_its_deletion_is_complete_or_raises(
    store: Store, reading: Any, at: int | None
) -> None:
    told = 0
    for number in range(1, _MAX_READINGS):
        session = fill(store, f"s{number}")
        gone: list[bool] = []

        def goes(session: Session = session, gone: list[bool] = gone) -> None:
            gone.append(store.delete_session(session.id))
            gc.collect(store, grace_ms=0)

        expected = reading(session, at)
        try:
            found = read_while(store, number, goes, partial(reading, session, at))
        except SessionDeletedError:
            told += 1
        else:
            assert found == expected
        if not gone:
            assert told
            return  # it makes no more readings than that
    pytest.fail("it makes more readings than were tried")


def test_reading_a_revision_that_is_pruned_concurrently_raises_revision_not_found_error(
    store: Store,
) -> None:
    session = fill(store, "s")
    revision = session.load(1)
    assert revision is not None
    # The first revision is taken away under the reader, and all that only it had.
    key = store.engine.scan_rows("history", limit=1)[0].key
    session.commit(Commit(replace=[NodeDraft("alone", "x")], checkpoint=Checkpoint()))

    def goes() -> None:
        rows = [row.key for row in store.engine.scan_rows("history", limit=100)]
        assert key in rows
        store.engine.write(Write(rows=[DeleteRow("history", each) for each in rows]))
        gc.collect(store, grace_ms=0)

    with pytest.raises(RevisionNotFoundError):
        read_while(store, 2, goes, lambda: list(revision.nodes))
    with pytest.raises(RevisionNotFoundError):
        session.load(1)


def test_reading_a_session_during_a_vacuum_returns_the_visible_nodes(store: Store) -> None:
    session = fill(store, "s")
    session.tombstone(["n0-7"])
    visible = [node.id for node in session.nodes()]

    def goes() -> None:
        vacuum.vacuum(store, grace_ms=0)

    for number in (1, 2, 3):
        told = read_while(store, number, goes, session.load)
        assert told is not None
        assert [node.id for node in told.nodes] == visible


def test_a_missing_object_of_an_existing_session_still_raises_corruption_error(
    store: Store,
) -> None:
    session = fill(store, "s")
    digest = session.nodes()[5].digest
    store.engine.write(Write(deletes=[digest]))
    with pytest.raises(CorruptionError):
        list(session.nodes())
    with pytest.raises(CorruptionError):
        session.node("n0-5")
