"""Any thread may read a dictionary at any time, also while others close or fork."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.dictionaries import DictionaryShelf
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import ClosedError

CONTENT = b"what many objects have in common " * 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    yield engine
    engine.close()


def test_loading_a_dictionary_holds_the_gate_that_close_and_fork_wait_for(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing and forking wait for those inside; LMDB dies of a transaction that outlives it."""
    env, shelf = engine._env, engine._shelf
    number = shelf.add(CONTENT)
    handle = env.handle
    inside: list[bool] = []

    class Watched:
        def begin(self, **options: Any) -> Any:
            inside.append(env.gate.is_inside)
            return handle.begin(**options)

        def __getattr__(self, name: str) -> Any:
            return getattr(handle, name)

    monkeypatch.setattr(env, "handle", Watched())
    assert shelf.load(number) == CONTENT
    assert (inside, env.gate.is_inside) == ([True], False)
    # A thread that reads already does not enter a second time, and is not put out by it.
    with env.reading():
        assert shelf.load(number) == CONTENT
        assert env.gate.is_inside
    assert (inside, env.gate.is_inside) == ([True] * 3, False)


def test_loading_a_dictionary_from_a_closed_store_raises_closed_error(engine: LmdbEngine) -> None:
    number = engine._shelf.add(CONTENT)
    shelf = DictionaryShelf(engine._env)
    engine.close()
    with pytest.raises(ClosedError):
        shelf.load(number)
