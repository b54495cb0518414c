"""The engine contract on LMDB, on both of the engines that py-lmdb bundles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest

from casstore.engine.lmdb import examination, lookup, marking, memtable, recent
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Engine
from casstore.testing import EngineFactory, PersistentEngineContract, Reopen, compare_with_reference


class LmdbContract(PersistentEngineContract):
    """The whole contract; subclasses name LMDB's engine and the durability."""

    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def make_engine(self, tmp_path: Path) -> Iterator[EngineFactory]:
        made: list[LmdbEngine] = []
        names = count()

        def make(*, clock: Callable[[], int] | None = None) -> Engine:
            engine = LmdbEngine(str(tmp_path / str(next(names))), clock=clock, **self.options)
            made.append(engine)
            return engine

        yield make
        for engine in made:
            engine.close()

    @pytest.fixture
    def reopen(self) -> Iterator[Reopen]:
        made: list[LmdbEngine] = []

        def again(engine: Engine) -> Engine:
            assert isinstance(engine, LmdbEngine)
            engine.close()
            made.append(LmdbEngine(engine.path, **self.options))
            return made[-1]

        yield again
        for engine in made:
            engine.close()

    @pytest.mark.parametrize("seed", range(6))
    def test_the_lmdb_engine_agrees_with_the_reference_engine(
        self, make_engine: EngineFactory, reopen: Reopen, seed: int
    ) -> None:
        compare_with_reference(make_engine(), seed, 150, reopen=reopen)


class TestLmdb09(LmdbContract):
    options: ClassVar[dict[str, Any]] = {"lmdb_version": 0, "durability": "relaxed"}


class TestLmdb10(LmdbContract):
    options: ClassVar[dict[str, Any]] = {"lmdb_version": 1, "durability": "relaxed"}


class TestLmdbWithoutCache(LmdbContract):
    """And with a log that is applied after every few changes, and not used by longer writes."""

    options: ClassVar[dict[str, Any]] = {"cache_bytes": 0, "durability": "full"}

    @pytest.fixture(autouse=True)
    def applies_often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (memtable, recent):
            monkeypatch.setattr(module, "APPLY_CHANGES", 5)
        monkeypatch.setattr(recent, "MAX_LOGGED_BYTES", 400)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_objects_whose_digests_share_a_prefix_are_distinguished_as_by_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, applied: bool
) -> None:
    """Six bytes of a digest hardly ever meet; one does all the time, and nothing may differ."""
    for module in (examination, lookup, marking):
        monkeypatch.setattr(module, "PREFIX_BYTES", 1)
    if applied:
        monkeypatch.setattr(recent, "MAX_LOGGED_BYTES", 0)
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", auto_train=False)
    try:
        compare_with_reference(engine, seed, 100)
    finally:
        engine.close()
