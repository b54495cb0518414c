"""Short words for what the tests of retention, expiry and erasure do, and how they crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from casstore.engine.protocol import Engine, Write, WriteResult
from casstore.session.data import Commit, CommitResult, NodeDraft
from casstore.store import Store

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def step(store: Store, session: str, *ids: str, text: str = "", **fields: Any) -> CommitResult:
    drafts = [NodeDraft(each, {"role": "user", "text": f"{each} {text}"}) for each in ids]
    return store.session(session).commit(Commit(append=drafts, **fields))


def grow(store: Store, session: str, revisions: int, **fields: Any) -> None:
    for _ in range(revisions):
        head = store.session(session).head()
        step(store, session, f"n{0 if head is None else head.revision}", **fields)


def revisions(store: Store, session: str) -> list[int]:
    return [entry.revision for entry in store.session(session).history()]


class CrashError(Exception):
    """The process is gone."""


class Failing:
    """Stands before an engine and lets so many writes through; then the process is gone."""

    def __init__(self, engine: Engine, writes: int) -> None:
        self._engine = engine
        self._left = writes

    def write(self, write: Write) -> WriteResult:
        if not self._left:
            raise CrashError
        self._left -= 1
        return self._engine.write(write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def crashing(store: Store, writes: int) -> Store:
    """The same store through a handle whose process dies after so many writes."""
    return Store(cast(Engine, Failing(store.engine, writes)))


def crash_everywhere(
    make: Callable[[], Store], work: Callable[[Store], object], limit: int = 60
) -> Iterator[Store]:
    """A store for each number of writes after which ``work`` died, until it came through."""
    for writes in range(limit):
        store = make()
        try:
            work(crashing(store, writes))
        except CrashError:
            yield store
        else:
            yield store
            return
    raise AssertionError("never came through")
