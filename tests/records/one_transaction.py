"""Shows that an operation is one transaction: whichever of its changes fails, nothing happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.batches import BatchBuilder, Job
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import TABLES, RowChange, Write, WriteResult
from casstore.errors import CasstoreError, StorageError
from casstore.store import Store

# More row changes than any operation under test makes.
_MAX_CHANGES = 500


class InjectedError(StorageError):
    """Raised in the middle of a transaction."""


class _Breaking(list[RowChange]):
    """Row changes that fail at one of them, once they are being made.

    Before that an engine may go through them as often as it likes.
    """

    def __init__(self, rows: Sequence[RowChange], at: int) -> None:
        super().__init__(rows)
        self._at = at
        self.are_made = False

    def __iter__(self) -> Iterator[RowChange]:
        for number, row in enumerate(super().__iter__()):
            if self.are_made and number == self._at:
                raise InjectedError(f"change {number} fails")
            yield row


def _run(
    builder: BatchBuilder, job: Job, run: Any = BatchBuilder.run
) -> WriteResult | CasstoreError:
    rows = job.write.rows
    if isinstance(rows, _Breaking):
        rows.are_made = True
    result: WriteResult | CasstoreError = run(builder, job)
    return result


def contents(store: Store) -> tuple[Any, ...]:
    """Everything that a store holds: its rows and the digests of its objects."""
    engine: Any = store.engine
    rows = [(table, tuple(engine.scan_rows(table, limit=1_000_000))) for table in TABLES]
    return (*rows, tuple(engine.digests(bytes(32), b"\xff" * 32, limit=1_000_000)))


def assert_one_transaction(
    folder: Path,
    prepare: Callable[[Store], Any],
    operate: Callable[[Store, Any], Any],
    *,
    clock: Callable[[], int] | None = None,
) -> None:
    """Run an operation on LMDB with each of its row changes failing in turn, then unhindered.

    ``prepare`` makes the store ready; what it returns goes to ``operate``. Every time that a
    change fails the store must be as before, and in the end there must have been one write.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        Store(LmdbEngine(str(folder), durability="relaxed", clock=clock)) as store,
    ):
        patch.setattr(BatchBuilder, "run", _run)
        given = prepare(store)
        engine: Any = store.engine
        whole: Callable[[Write], WriteResult] = engine.write
        before = contents(store)
        writes: list[int] = []
        for broken in range(_MAX_CHANGES):

            def write(change: Write, at: int = broken) -> WriteResult:
                if not (change.rows or change.objects or change.deletes):
                    return whole(change)
                writes.append(len(change.rows))
                return whole(change._replace(rows=_Breaking(change.rows, at)))

            writes.clear()
            engine.write = write
            try:
                operate(store, given)
            except InjectedError:
                assert contents(store) == before, f"change {broken} failed and left something"
            else:
                assert broken > 0, "the operation changes no row"
                assert writes == [broken], f"{len(writes)} writes of {writes} rows"
                assert contents(store) != before
                return
            finally:
                engine.write = whole
        pytest.fail(f"more than {_MAX_CHANGES} row changes")
