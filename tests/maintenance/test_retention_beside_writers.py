"""Retention, expiry and collection that never rest, beside writers who use old revisions."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import (
    CorruptionError,
    HeadConflictError,
    ObjectNotFoundError,
    RevisionNotFoundError,
)
from casstore.maintenance import gc, retention
from casstore.maintenance.retention import Policy
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.session_fixtures import start
from tests.maintenance.lifetimes import step

STEPS = 50
WRITERS = 3
PATIENCE_S = 120


def texts(session: Session, at: int | str | None = None) -> list[str]:
    return [node.payload["text"] for node in session.nodes(at=at)]


class Writer:
    """Commits, and uses revisions that may go at any moment; what it was promised must hold."""

    def __init__(self, store: Store, number: int) -> None:
        self.store = Store(store.engine, close=lambda: None)
        self.random = random.Random(number)
        self.number = number
        self.session = self.store.session(f"s{number % 2}")
        #: What was promised: how to read it, and what must come.
        self.promised: list[tuple[Callable[[], list[str]], list[str]]] = []
        self.done: dict[str, int] = {}

    def run(self) -> None:
        for count in range(STEPS):
            name = f"{self.number}.{count}"
            step(self.store, self.session.id, name, text="long " * 500, turn=name)
            kind = self.random.choice(["label", "protect", "pin", "fork", "rewind"])
            head = self.session.head()
            assert head is not None
            at = max(1, head.revision - self.random.randrange(6))
            try:
                expected = texts(self.session, at)
                getattr(self, kind)(name, at, expected)
            except (RevisionNotFoundError, HeadConflictError, ObjectNotFoundError):
                continue  # it was too late, and said so
            except CorruptionError as exc:
                # The reading above may meet a revision that has just gone.
                assert "missing" in str(exc) or "node table" in str(exc), exc  # noqa: PT017
                continue
            self.done[kind] = self.done.get(kind, 0) + 1
            for read, known in self.promised[-8:]:
                assert read() == known

    def label(self, name: str, at: int, expected: list[str]) -> None:
        self.session.label(name, at)
        self.promised.append((lambda: texts(self.session, name), expected))

    def protect(self, name: str, at: int, expected: list[str]) -> None:
        self.session.protect(at, by=name)
        self.promised.append((lambda: texts(self.session, at), expected))

    def pin(self, name: str, at: int, expected: list[str]) -> None:
        manifest = self.session.entry(at).manifest
        self.store.pin(name, manifest)
        # The row may have gone before; the pin keeps the objects in any case.
        self.promised.append((lambda: [str(len(self.store.missing([manifest])))], ["0"]))

    def fork(self, name: str, at: int, expected: list[str]) -> None:
        self.store.fork(self.session.id, name, at=at)
        self.promised.append((lambda: texts(self.store.session(name)), expected))

    def rewind(self, name: str, at: int, expected: list[str]) -> None:
        head = self.session.head()
        assert head is not None
        result = self.session.rewind(at, expected=head.revision, label=name)
        self.promised.append((lambda: texts(self.session, name), expected))
        assert result.revision > at


def test_retention_and_gc_concurrent_with_writers_remove_nothing_that_is_protected(
    tmp_path: Path,
) -> None:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with Store(engine) as store:
        writers = [Writer(store, number) for number in range(WRITERS)]
        for name in ("s0", "s1"):
            step(store, name, "first")
        resting = threading.Event()
        removed = []

        def care() -> None:
            while not resting.is_set():
                plan = list(retention.plan(store, policy=Policy(last=2)).to_json())
                report = retention.execute(store, retention.Plan.from_json(plan))
                swept = gc.collect(store, grace_ms=0).objects_swept
                removed.append((report.revisions_removed, swept))

        caring = start(care)
        running = [start(writer.run) for writer in writers]
        try:
            for one in running:
                one.result(PATIENCE_S)
        finally:
            resting.set()
        caring.result(PATIENCE_S)
        gc.collect(store, grace_ms=0)
        engine.verify()
        for writer in writers:
            for read, expected in writer.promised:
                assert read() == expected
        done = {kind for writer in writers for kind in writer.done}
        assert {"label", "protect", "pin", "fork"} <= done
        assert sum(count for count, _ in removed) > 20
