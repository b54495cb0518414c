"""Trying again ends: with what was written, or with an error that says so."""

from __future__ import annotations

import time

import pytest

from casstore.engine.protocol import RowIs
from casstore.errors import BusyError, ConditionFailedError, InvalidInputError
from casstore.session import attempts

FAILED = ConditionFailedError(0, RowIs("records", b"k", None), b"x")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited; nobody really is."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


def test_it_is_tried_until_nobody_else_is_first(waits: list[float]) -> None:
    left = [FAILED] * 10

    def attempt() -> str:
        if left:
            raise left.pop()
        return "written"

    assert attempts.until_written("it", attempt) == "written"
    assert waits
    assert all(0 <= wait < 1 for wait in waits)


def test_it_is_not_tried_for_ever(waits: list[float]) -> None:
    tried: list[int] = []

    def attempt() -> None:
        tried.append(1)
        raise FAILED

    with pytest.raises(BusyError, match="thread 't' kept changing"):
        attempts.until_written("thread 't'", attempt)
    assert 10 < len(tried) < 1000


def test_other_errors_end_it_at_once(waits: list[float]) -> None:
    tried: list[int] = []

    def attempt() -> None:
        tried.append(1)
        raise InvalidInputError("no")

    with pytest.raises(InvalidInputError):
        attempts.until_written("it", attempt)
    assert len(tried) == 1
    assert waits == []
