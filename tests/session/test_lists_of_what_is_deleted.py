"""A session deleted while it is listed: the whole list, or that it was deleted, never a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Row, RowKey, Write, WriteResult
from casstore.errors import SessionDeletedError
from casstore.session.data import Commit, NodeDraft
from casstore.session.session import Session
from casstore.store import Store


class Interrupted(MemoryEngine):
    """An engine that lets something happen, once, before one of its calls about rows."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 1_760_000_000_000)
        self.calls_left = 0
        self.happens: Callable[[], object] = list

    def _called(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            self.happens()

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """Let it happen, and answer."""
        self._called()
        return super().get_rows(keys)

    def scan_rows(
        self,
        table: str,
        *,
        start: bytes = b"",
        stop: bytes | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[Row]:
        """Let it happen, and answer."""
        self._called()
        return super().scan_rows(table, start=start, stop=stop, limit=limit, reverse=reverse)

    def write(self, write: Write) -> WriteResult:
        """Let it happen, and write."""
        self._called()
        return super().write(write)


def made(engine: Interrupted) -> Session:
    session = Store(engine).session("s")
    for at in range(3):
        node = NodeDraft(f"n{at}", at)
        session.commit(Commit(append=[node], label=f"label {at}"))
        session.queue.enqueue([at], batch_id=f"b{at}")
        session.attachments.intend(f"a{at}", uri=f"elsewhere/{at}")
        session.protect(at + 1, by="somebody")
    return session


LISTS: dict[str, Callable[[Session], object]] = {
    "history": lambda session: list(session.history()),
    "one revision with its labels": lambda session: session.entry(2),
    "what is queued": lambda session: session.queue.batches(),
    "what nobody holds": lambda session: session.queue.pending(),
    "attachments": lambda session: session.attachments.list(),
    "attachments that nobody committed": lambda session: session.attachments.uncommitted(
        older_than_ms=1_760_000_000_000
    ),
    "protections": lambda session: session.protections(),
    "taking protections away": lambda session: session.unprotect("somebody"),
}


@pytest.mark.parametrize("listed", LISTS)
def test_a_list_during_a_deletion_is_complete_or_raises_session_deleted_error(listed: str) -> None:
    look = LISTS[listed]
    whole = look(made(Interrupted()))
    for calls in count(1):
        engine = Interrupted()
        session = made(engine)
        engine.happens = lambda: Store(engine).delete_session("s")  # noqa: B023
        engine.calls_left = calls
        try:
            found = look(session)
        except SessionDeletedError:
            continue
        assert found == whole, f"deleted before call {calls}"
        if engine.calls_left > 0:
            break


def test_renewing_a_lease_during_a_deletion_raises_session_deleted_error() -> None:
    for calls in count(1):
        engine = Interrupted()
        session = made(engine)
        lease = session.claim_lease("owner", 1000)
        assert lease is not None
        engine.happens = lambda: Store(engine).delete_session("s")  # noqa: B023
        engine.calls_left = calls
        try:
            renewed = session.renew_lease(lease, 2000)
        except SessionDeletedError:
            continue
        assert renewed.expires_at_ms == lease.expires_at_ms + 1000
        break


def test_concurrent_unprotect_calls_count_each_protection_once() -> None:
    for calls in count(1):
        engine = Interrupted()
        session = made(engine)
        taken: list[int] = []
        engine.happens = lambda: taken.append(Store(engine).session("s").unprotect("somebody", 2))  # noqa: B023
        engine.calls_left = calls
        assert session.unprotect("somebody") + sum(taken) == 3
        if engine.calls_left > 0:
            break
