"""Every operation on a session, with other operations and gc between any two of its engine calls.

What an operation has read of a session may be vacuumed, deleted or pruned, and collected, before
its next read. Then it sees the session as it is now, or raises that it was deleted; it reports no
damage, and leaves none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.errors import ConflictError, GraphError, NotFoundError
from casstore.maintenance import check, gc, retention, vacuum
from casstore.maintenance.copy import copy
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.export import export_session
from casstore.maintenance.import_ import import_session
from casstore.maintenance.policy import Policy
from casstore.records.log import NewMessage, SessionLog
from casstore.records.runs import Runs
from casstore.session.data import Checkpoint, Commit, NodeDraft
from casstore.store import Store
from casstore.testing.inspection import copy_contents

_names = count(1)
# What an operation may say if somebody else was first.
TOLD = (ConflictError, GraphError, NotFoundError)

# Long enough to be an object of its own.
LONG = "all of it " * 500

Operation = Callable[[Store], object]


class Interrupted(MemoryEngine):
    """An engine that lets something happen before one of its calls."""

    def __init__(
        self, before: MemoryEngine | None = None, *, clock: Callable[[], int] | None = None
    ) -> None:
        super().__init__(clock=clock)
        self.calls_left = -1
        self.happens: Callable[[], object] = list
        if before is not None:
            copy_contents(before, self)

    def _called(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            self.happens()


def _interruptible(name: str) -> Callable[..., Any]:
    whole = getattr(MemoryEngine, name)

    def call(self: Interrupted, *arguments: Any, **named: Any) -> Any:
        self._called()
        return whole(self, *arguments, **named)

    return call


for _name in ("get_rows", "scan_rows", "get_many", "missing", "write"):
    setattr(Interrupted, _name, _interruptible(_name))


def another() -> str:
    return f"new {next(_names)}"


def said(name: str, number: int = 3) -> list[NodeDraft]:
    return [NodeDraft(f"{name}-{at}", {"role": "user", "n": [name, at]}) for at in range(number)]


def turn(store: Store, step: int) -> None:
    state = Checkpoint(turn_state={"step": step}, tool_state={"tools": [step] * 50})
    store.session("s").commit(Commit(append=said(f"n{step}"), checkpoint=state, turn=f"t{step}"))


@pytest.fixture(scope="module")
def filled() -> MemoryEngine:
    """Sessions of some length, one with a hidden node and a fork. Nobody may change it."""
    engine = MemoryEngine()
    store = Store(engine)
    session = store.session("s")
    for step in range(4):
        turn(store, step)
    session.label("second", 2)
    session.tombstone(["n3-1"])
    session.queue.enqueue([LONG], batch_id="batch", source_key="key")
    store.fork("s", "fork", at=2)
    log = SessionLog(store)
    log.create("log")
    for number in range(4):
        log.append("log", NewMessage("user", f"message {number}"))
    runs = Runs(store)
    runs.create_thread("thread", "planner")
    runs.create_run("thread", "run", "planner", "graph")
    runs.append_message("thread", "user", LONG)
    runs.put_artifact("thread", "run", "report", LONG, "report")
    return engine


def commit(**change: Any) -> Operation:
    return lambda store: store.session("s").commit(Commit(**change))


def work(store: Store) -> None:
    session = store.session("s")
    lease = session.claim_lease("worker", 60_000)
    assert lease is not None
    session.queue.enqueue(["something"])
    claim = session.queue.claim(lease)
    if claim is not None:
        session.commit(Commit(append=said(another(), 1), lease=lease, completes=[claim]))


def export(store: Store) -> None:
    with tempfile.TemporaryDirectory() as place:
        export_session(store, "s", Path(place) / "bundle")


def forward(store: Store) -> None:
    with tempfile.TemporaryDirectory() as place:
        bundle = Path(place) / "bundle"
        export_session(store, "s", bundle)
        import_session(store, bundle, on_conflict="fast-forward")
        import_session(store, bundle, name=another())


def copied(store: Store) -> None:
    target = Store(MemoryEngine())
    copy(store, target)
    assert check.check(target, level="full").sound


OPERATIONS: dict[str, Operation] = {
    "append": commit(append=said("new")),
    "append at a node": commit(append=[NodeDraft("new", 1, parent="n1-1")]),
    "move the leaf": commit(leaf="n1-1"),
    "replace": commit(replace=said("new")),
    "a turn again": lambda store: turn(store, 1),
    "fork": lambda store: store.fork("s", another()),
    "fork a revision": lambda store: store.fork("s", another(), at=1),
    "fork a node": lambda store: store.fork("s", another(), at=2, node="n0-1"),
    "rewind": lambda store: store.session("s").rewind(2),
    "rewind to a label": lambda store: store.session("s").rewind("second"),
    "hide": lambda store: store.session("s").tombstone(["n0-1", "n2-2"]),
    "label": lambda store: store.session("s").label(another(), 2),
    "protect": lambda store: store.session("s").protect(2, by="me"),
    "head": lambda store: store.session("s").head(),
    "wait": lambda store: store.session("s").wait(after=0, timeout_s=0),
    "history": lambda store: list(store.session("s").history()),
    "entry": lambda store: store.session("s").entry(2),
    "digests": lambda store: list(store.session("s").nodes().digests()),
    "batches": lambda store: store.session("s").queue.batches(),
    "pending": lambda store: store.session("s").queue.pending(),
    "cancel": lambda store: store.session("s").queue.cancel("batch"),
    "enqueue again": lambda store: store.session("s").queue.enqueue([0], source_key="key"),
    "work": work,
    "nodes": lambda store: list(store.session("s").nodes("full")),
    "node": lambda store: store.session("s").node("n1-1", at=2),
    "checkpoint": lambda store: store.session("s").checkpoint(2, hydrate=True),
    "info": lambda store: store.session("s").info(),
    "list": lambda store: list(store.sessions()),
    "compare": lambda store: store.compare(("s", 1), "fork"),
    "export": export,
    "import": forward,
    "copy": copied,
    "log: append": lambda store: SessionLog(store).append("log", NewMessage("user", "more")),
    "log: fold": lambda store: SessionLog(store).fold("log", [1, 2], "in short"),
    "log: active": lambda store: SessionLog(store).active("log"),
    "log: export": lambda store: list(SessionLog(store).export("log")),
    "log: prune": lambda store: SessionLog(store).prune("log"),
    "runs: messages": lambda store: Runs(store).messages("thread"),
    "runs: artifact": lambda store: Runs(store).put_artifact(
        "thread", "run", "report", LONG, "report"
    ),
}


def _collect(store: Store) -> None:
    gc.collect(store, grace_ms=0)


def _delete(store: Store) -> None:
    store.delete_session("s")
    store.delete_session("log")
    Runs(store).delete_thread("thread")
    _collect(store)


def _prune(store: Store) -> None:
    plan = retention.plan(store, policy=Policy(last=1, labelled=False))
    retention.execute(store, plan)
    store.session("s").queue.cancel("batch")
    _collect(store)


COLLECTIONS: dict[str, Operation] = {
    "vacuum": lambda store: vacuum.vacuum(store, grace_ms=0),
    "delete": _delete,
    "prune": _prune,
}


# The first calls are interrupted each, then one in sixteen; CASSTORE_EVERY_CALL=1 interrupts all.
_EACH_OF = 6
_STRIDE = 1 if os.environ.get("CASSTORE_EVERY_CALL") else 16


def _calls(phase: str) -> Iterator[int]:
    """The numbers of the calls to interrupt; ``phase`` decides which ones of the later."""
    yield from range(1, _EACH_OF + 1)
    yield from count(_EACH_OF + 1 + crc32(phase.encode()) % _STRIDE, _STRIDE)


def interruptions(
    filled: MemoryEngine, operation: Operation, midst: Operation, phase: str = ""
) -> Iterator[Store]:
    """The store after the operation, with something else before its first call, its second …"""
    for at in _calls(phase):
        engine = Interrupted(filled)
        store = Store(engine)
        # What is remembered of sessions is what anybody has who works on them.
        list(store.session("s").nodes())
        happened: list[bool] = []

        def happens(engine: Interrupted = engine, happened: list[bool] = happened) -> None:
            happened.append(True)
            midst(Store(engine))

        engine.happens, engine.calls_left = happens, at
        try:
            operation(store)
        except TOLD:
            assert happened
        if not happened:
            return
        engine.calls_left = -1
        yield Store(engine)


@pytest.mark.parametrize("collection", COLLECTIONS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_collection_between_any_two_engine_calls_leaves_the_store_sound(
    filled: MemoryEngine, operation: str, collection: str
) -> None:
    done = 0
    for store in interruptions(
        filled, OPERATIONS[operation], COLLECTIONS[collection], operation + collection
    ):
        done += 1
        assert check.check(store, level="full").sound, f"before call {done}"
        assert gc.collect(store, grace_ms=0).problem is None
        for info in store.sessions():
            session = store.session(info.meta.session)
            for entry in session.history():
                list(session.nodes(at=entry))
                session.checkpoint(entry, hydrate=True)
    assert done


def _copy_into(filled: MemoryEngine) -> Operation:
    """Copy from a store that has gone on, with a new session and a fork of it."""
    source = Store(Interrupted(filled))
    commit(append=said("later"))(source)
    source.session("t").commit(Commit(append=said("first")))
    source.fork("t", "u")
    source.session("u").commit(Commit(append=said("second")))
    return lambda store: copy(source, store)


def _rewrite(store: Store) -> None:
    assert vacuum.rewrite_hidden(store, "s").outcome in (
        vacuum.VacuumOutcome.DONE,
        vacuum.VacuumOutcome.NOTHING,
    )


@pytest.mark.parametrize("operation", ["vacuum", "import", "copy"])
def test_a_sweep_during_vacuum_import_or_copy_leaves_the_store_sound(
    filled: MemoryEngine, operation: str
) -> None:
    """Objects are written before a row names them: the sweep keeps them, or the writer repeats."""
    makes: dict[str, Operation] = {
        "vacuum": _rewrite,
        "import": forward,
        "copy": _copy_into(filled),
    }
    done = 0
    for store in interruptions(filled, makes[operation], expire_rows, operation):
        done += 1
        assert check.check(store, level="full").sound, f"before call {done}"
    assert done


def test_a_copy_does_not_report_damage_when_its_target_session_is_vacuumed(
    filled: MemoryEngine,
) -> None:
    """The copy reads the target's session, too, and what it read may be collected."""
    done = 0
    for store in interruptions(filled, _copy_into(filled), COLLECTIONS["vacuum"]):
        done += 1
        assert check.check(store, level="full").sound, f"before call {done}"
    assert done
