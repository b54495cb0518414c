"""What a claim costs does not depend on how much waits behind it."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.session.data import Commit
from casstore.store import Store


def rows_read_by_a_claim(monkeypatch: pytest.MonkeyPatch, batches: int) -> int:
    engine = MemoryEngine()
    session = Store(engine).session("s")
    for number in range(batches):
        session.queue.enqueue([number])
    lease = session.claim_lease("worker", 60_000)
    assert lease is not None
    whole, read = engine.scan_rows, 0

    def scan_rows(*args: Any, **options: Any) -> Any:
        nonlocal read
        found = whole(*args, **options)
        read += len(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(engine, "scan_rows", scan_rows)
        claim = session.queue.claim(lease)
    assert claim is not None
    assert claim.batches[0].items == (0,)
    session.commit(Commit(completes=[claim], lease=lease))
    assert len(session.queue.batches()) == batches - 1
    return read


def test_a_claim_reads_no_more_of_a_longer_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_read_by_a_claim(monkeypatch, 400) == rows_read_by_a_claim(monkeypatch, 1200) > 0
