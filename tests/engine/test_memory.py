"""The reference engine keeps the contract; contract and model notice an engine that does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from casstore.engine.conditions import require
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import ObjectInfo, PutRow, Row, StoredObject, Write, WriteResult
from casstore.testing import EngineContract, EngineFactory, compare_with_reference
from casstore.testing.engine_inputs import InputContract
from casstore.testing.engine_threads import THREADS, TIMEOUT_S, ThreadContract


class TestMemoryEngine(EngineContract):
    @pytest.fixture
    def make_engine(self) -> Iterator[EngineFactory]:
        made: list[MemoryEngine] = []

        def make(*, clock: Callable[[], int] | None = None) -> MemoryEngine:
            made.append(MemoryEngine(clock=clock))
            return made[-1]

        yield make
        for engine in made:
            engine.close()


@pytest.mark.parametrize("seed", range(10))
def test_the_memory_engine_agrees_with_the_reference_engine(seed: int) -> None:
    compare_with_reference(MemoryEngine(), seed, 300)


class _AlteredData(MemoryEngine):
    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        found = super().get_many(digests)
        return [item and item._replace(data=item.data.rstrip(b"\x00")) for item in found]


class _ConditionsIgnored(MemoryEngine):
    def write(self, write: Write) -> WriteResult:
        return super().write(write._replace(conditions=()))


class _DeletesIgnored(MemoryEngine):
    def write(self, write: Write) -> WriteResult:
        return super().write(write._replace(deletes=()))


class _RowsBackwards(MemoryEngine):
    def write(self, write: Write) -> WriteResult:
        return super().write(write._replace(rows=write.rows[::-1]))


class _StopIncluded(MemoryEngine):
    def scan_rows(
        self,
        table: str,
        *,
        start: bytes = b"",
        stop: bytes | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[Row]:
        stop = stop and stop + b"\x00"
        return super().scan_rows(table, start=start, stop=stop, limit=limit, reverse=reverse)


class _IdsReused(MemoryEngine):
    def write(self, write: Write) -> WriteResult:
        infos = self.scan_objects(limit=1)
        self._next_id = infos[0].id + 1 if infos else 1
        return super().write(write)


class _ChildrenLost(MemoryEngine):
    def scan_objects(self, *, before: int | None = None, limit: int = 1000) -> list[ObjectInfo]:
        infos = super().scan_objects(before=before, limit=limit)
        return [info._replace(children=info.children[:1]) for info in infos]


@pytest.mark.parametrize(
    "broken",
    [
        _AlteredData,
        _ConditionsIgnored,
        _DeletesIgnored,
        _RowsBackwards,
        _StopIncluded,
        _IdsReused,
        _ChildrenLost,
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_model_notices_a_broken_engine(broken: type[MemoryEngine], seed: int) -> None:
    with pytest.raises(AssertionError, match=f"^seed {seed}, step "):
        compare_with_reference(broken(), seed, 2000)


# --- engines whose writes are not isolated --------------------------------------------------


class _Unlocked(MemoryEngine):
    """Nothing keeps two writes apart."""

    def __init__(self) -> None:
        super().__init__()
        self._lock: Any = nullcontext()


class _JudgedApart(MemoryEngine):
    """Judging and changing are each under the lock, and between them is a gap.

    Writers under a condition meet there: all have judged before the first of them changes anything.
    """

    def __init__(self, writers: int) -> None:
        super().__init__()
        self._gap = threading.Barrier(writers, timeout=TIMEOUT_S)

    def write(self, write: Write) -> WriteResult:
        with self._lock:
            has_object = self._objects.__contains__
            require(write.conditions, self._find_row, has_object, self._clock())
        if write.conditions:
            self._gap.wait()
        return super().write(write._replace(conditions=()))


def test_the_contract_notices_unserialised_writes() -> None:
    with pytest.raises(AssertionError):
        ThreadContract().test_no_write_comes_between_the_conditions_of_another_and_its_changes(
            _Unlocked()
        )


def test_the_contract_notices_a_gap_between_conditions_and_changes() -> None:
    with pytest.raises(AssertionError):
        ThreadContract().test_of_threads_that_swap_the_same_revision_exactly_one_wins(
            _JudgedApart(THREADS)
        )


# --- engines that keep what they were given -------------------------------------------------


class _Trusting(MemoryEngine):
    """Takes bytes that can change, and keeps them as they are."""

    def write(self, write: Write) -> WriteResult:
        def held(given: Any) -> Any:
            return bytes(given) if isinstance(given, bytearray | memoryview) else given

        safe = Write(
            objects=[item._replace(data=held(item.data)) for item in write.objects],
            conditions=write.conditions,
            rows=[
                row._replace(value=held(row.value)) if isinstance(row, PutRow) else row
                for row in write.rows
            ],
            deletes=write.deletes,
        )
        result = super().write(safe)
        for row in write.rows:
            if isinstance(row, PutRow):
                self._rows[row.table][row.key] = row.value
        for item in write.objects:
            kept = self._objects[item.digest]
            self._objects[item.digest] = kept._replace(data=item.data)
        return result


class _ListsKept(MemoryEngine):
    """Reads the children of an object when they are asked for, from the list it was given."""

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[bytes, Sequence[bytes]] = {}

    def write(self, write: Write) -> WriteResult:
        result = super().write(write)
        self._given.update({item.digest: item.children for item in write.objects})
        return result

    def scan_objects(self, *, before: int | None = None, limit: int = 1000) -> list[ObjectInfo]:
        found = super().scan_objects(before=before, limit=limit)
        return [
            info._replace(
                children=tuple([self._objects[one].info.id for one in self._given[info.digest]])
            )
            for info in found
        ]


@pytest.mark.parametrize("place", ["data", "value of a row"])
def test_the_contract_notices_an_engine_that_keeps_bytes_that_can_change(place: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        InputContract().test_bytes_that_can_change_are_refused(_Trusting(), place)


def test_the_contract_notices_an_engine_that_keeps_the_lists_of_a_write() -> None:
    with pytest.raises(AssertionError):
        InputContract().test_the_caller_may_change_its_lists_after_the_write_returns(_ListsKept())
