"""The reference engine keeps the contract, and the model notices an engine that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import ObjectInfo, Row, StoredObject, Write, WriteResult
from casstore.testing import EngineContract, EngineFactory, compare_with_reference


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
def test_the_reference_agrees_with_itself(seed: int) -> None:
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
