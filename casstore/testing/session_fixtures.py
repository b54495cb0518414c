"""Fixtures and helpers of the session suites: a store on a manual clock, and short calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import pytest

from casstore.engine.protocol import (
    TABLES,
    Engine,
    ObjectInfo,
    Row,
    RowKey,
    StoredObject,
    Write,
    WriteResult,
)
from casstore.session.data import (
    Batch,
    Claim,
    Commit,
    CommitResult,
    Entry,
    Lease,
    Node,
    NodeDraft,
)
from casstore.session.session import Session, SessionState
from casstore.store import Store
from casstore.testing.engine_fixtures import EngineFixtures, all_objects, all_rows

MINUTE_MS = 60_000
THREADS = 8
# Long enough for a slow machine; a deadlock fails the test after this time.
TIMEOUT_S = 120.0

Answer = TypeVar("Answer")


class SessionFixtures(EngineFixtures):
    """The fixtures of all session suites. A subclass overrides ``make_engine``."""

    @pytest.fixture
    def store(self, clocked: Engine) -> Store:
        """One empty store that uses ``clock``."""
        return Store(clocked)

    @pytest.fixture
    def session(self, store: Store) -> Session:
        """A session without commits."""
        return store.session("alpha")

    @pytest.fixture
    def other(self, store: Store) -> Session:
        """Another session of the same store."""
        return store.session("beta")


# --- writing ----------------------------------------------------------------------


def message(
    node_id: str, text: str | None = None, *, role: str = "user", **fields: Any
) -> NodeDraft:
    """A node with a message."""
    said = f"this is {node_id}" if text is None else text
    return NodeDraft(node_id, {"role": role, "text": said}, **fields)


def step(session: Session, /, *nodes: str | NodeDraft | Node, **fields: Any) -> CommitResult:
    """Append nodes in one commit without a lease; a str becomes a new message with that id."""
    drafts = [message(node) if isinstance(node, str) else node for node in nodes]
    return session.commit(Commit(append=drafts, **fields))


def grow_branches(session: Session) -> None:
    """Create the graph ``a → b`` and ``a → c → d`` in one commit; the leaf is ``d``."""
    step(session, "a", "b", message("c", parent="a"), "d")


def grow_long(session: Session, *, nodes: int = 600, chars: int = 4000) -> int:
    """Create a long path of long messages; returns their approximate size in bytes."""
    for start in range(0, nodes, 100):
        numbers = range(start, min(start + 100, nodes))
        step(session, *(message(f"n{n}", f"{n:07} " * (chars // 8)) for n in numbers))
    return nodes * chars


def hold(session: Session, owner: str = "worker", ttl_ms: int = MINUTE_MS) -> Lease:
    """Claim a lease, which must be free."""
    lease = session.claim_lease(owner, ttl_ms)
    assert lease is not None, f"{session!r} is leased"
    return lease


def enqueue(session: Session, text: str = "work", **fields: Any) -> Batch:
    """Queue one item."""
    return session.queue.enqueue([{"text": text}], **fields)


def take(session: Session, lease: Lease, **fields: Any) -> Claim:
    """Claim work, which must be queued."""
    claim = session.queue.claim(lease, **fields)
    assert claim is not None, "nothing to claim"
    return claim


def fill(session: Session) -> None:
    """Create rows of the session in every table that can have some."""
    step(session, "a", turn="turn", label="mark")
    session.tombstone(["a"])
    enqueue(session, source_key="key", batch_id="batch")
    session.attachments.intend("file", uri="file:///file")
    session.add_subjects(["anna"])
    session.expire_in(MINUTE_MS)
    session.protect(by="run")
    session.release_lease(hold(session))


# --- reading ----------------------------------------------------------------------


def ids(nodes: Iterable[Node]) -> list[str]:
    """The ids of nodes, in their order."""
    return [node.id for node in nodes]


def path(session: Session, at: int | str | Entry | None = None) -> list[str]:
    """The ids on the active path, from the root to the leaf."""
    return ids(session.nodes(at=at))


def full(session: Session, at: int | str | Entry | None = None) -> list[str]:
    """The ids of all nodes, in order of insertion."""
    return ids(session.nodes("full", at=at))


def load(
    session: Session,
    at: int | str | Entry | None = None,
    *,
    scope: Literal["path", "full"] = "path",
    leaf: str | None = None,
    hydrate: bool = True,
) -> SessionState:
    """Load a session, which must have a head."""
    state = session.load(at, scope=scope, leaf=leaf, hydrate=hydrate)
    assert state is not None, f"nothing was committed to {session!r}"
    return state


def revision(session: Session) -> int:
    """The revision of the head; 0 without a head."""
    head = session.head()
    return 0 if head is None else head.revision


def batch_ids(batches: Iterable[Batch]) -> list[str]:
    """The ids of batches, in their order."""
    return [batch.id for batch in batches]


# --- watching what is written and read ------------------------------------------------


class EngineContents(NamedTuple):
    """All rows and objects of an engine."""

    rows: dict[str, list[Row]]
    objects: list[ObjectInfo]

    @property
    def row_count(self) -> int:
        """The number of rows in all tables."""
        return sum(map(len, self.rows.values()))


def contents_of(store: Store) -> EngineContents:
    """All rows and objects of a store, for comparison."""
    rows = {table: all_rows(store.engine, table) for table in TABLES}
    return EngineContents(rows, all_objects(store.engine))


@contextmanager
def nothing_written(store: Store) -> Iterator[None]:
    """Check that the block changes no row and no object."""
    before = contents_of(store)
    yield
    assert contents_of(store) == before


class BytesWritten:
    """The number of bytes of objects stored in the ``with`` block."""

    count = 0


@contextmanager
def bytes_written(store: Store) -> Iterator[BytesWritten]:
    """Measure the bytes of objects that the block adds to a store."""
    known = {info.id for info in all_objects(store.engine)}
    written = BytesWritten()
    yield written
    new = [info for info in all_objects(store.engine) if info.id not in known]
    written.count = sum(info.size_bytes for info in new)


class ReadCounter:
    """Wraps an engine and counts the bytes that are read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.bytes_read = 0

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """Read objects, and count them."""
        found = self._engine.get_many(digests)
        self.bytes_read += sum(len(item.data) for item in found if item is not None)
        return found

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """Read rows, and count them."""
        found = self._engine.get_rows(keys)
        self.bytes_read += sum(len(value) for value in found if value is not None)
        return found

    def scan_rows(self, table: str, **limits: Any) -> list[Row]:
        """Scan rows, and count them."""
        found = self._engine.scan_rows(table, **limits)
        self.bytes_read += sum(len(row.key) + len(row.value) for row in found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def counted(session: Session, store: Store) -> tuple[Session, ReadCounter]:
    """The same session on an engine that counts its reads, and the counter."""
    counter = ReadCounter(store.engine)
    return Store(cast(Engine, counter)).session(session.id), counter


class Interruption:
    """Wraps an engine and runs a function just before or after its next write."""

    def __init__(
        self,
        engine: Engine,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._engine = engine
        self._before = before
        self._after = after

    def write(self, write: Write) -> WriteResult:
        """Write; run the function once, before or after."""
        before, self._before = self._before, None
        if before is not None:
            before()
        result = self._engine.write(write)
        after, self._after = self._after, None
        if after is not None:
            after()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def interrupted(
    store: Store,
    *,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Store:
    """Another handle on the store; ``before`` or ``after`` runs at its next write, as a race."""
    return Store(cast(Engine, Interruption(store.engine, before, after)))


# --- threads ----------------------------------------------------------------------


def start(work: Callable[[], Answer]) -> Future[Answer]:
    """Run ``work`` on a daemon thread, so that a deadlock does not keep the process alive."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as exc:  # any exception must reach the test that waits
            answer.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return answer


def at_once(store: Store, work: Callable[[Store, int], Answer]) -> list[Answer | Exception]:
    """Run ``work`` on eight threads that start together, each with its own handle.

    Returns their results and exceptions.
    """
    barrier = threading.Barrier(THREADS, timeout=TIMEOUT_S)
    engine = store.engine

    def run(number: int) -> Answer:
        handle = Store(engine)
        barrier.wait()
        return work(handle, number)

    answers = [start(partial(run, number)) for number in range(THREADS)]
    results: list[Answer | Exception] = []
    for answer in answers:
        exc = answer.exception(TIMEOUT_S)
        if exc is None:
            results.append(answer.result())
        elif isinstance(exc, Exception):
            results.append(exc)
        else:
            raise exc
    return results
