"""Calls that are refused: with the error of a wrong call, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import InvalidInputError

SURROGATE = "a\ud800"


def odd(value: object) -> Any:
    """A value of a type that the call does not take."""
    return value


ODD = odd(5)
NONE = odd(None)
UNHASHABLE = odd([])
NAN = odd(float("nan"))


class CountingEngine(MemoryEngine):
    """Counts the writes that it is asked for."""

    writes = 0

    def write(self, write: Write) -> WriteResult:
        self.writes += 1
        return super().write(write)


def assert_refused(engine: CountingEngine, call: Callable[[], object]) -> None:
    before = engine.writes
    with pytest.raises(InvalidInputError) as refused:
        _run(call)
    assert engine.writes == before
    assert str(refused.value)


def _run(call: Callable[[], object]) -> None:
    """Call it, and read to its end what it gives."""
    found = call()
    if isinstance(found, Iterator):
        list(found)
