"""Arguments that cannot be: refused with an error of the store, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.errors import InvalidInputError
from casstore.session.data import UNFENCED, Commit, NodeDraft
from casstore.store import Store

ODD: Any = 5
SURROGATE = "a\ud800"

CALLS: dict[str, Callable[[Store], object]] = {
    "the prefix of sessions": lambda store: list(store.sessions(prefix=SURROGATE)),
    "the prefix of pins": lambda store: list(store.pins(prefix=SURROGATE)),
    "a text as time": lambda store: store.session("s").commit(
        Commit(append=[NodeDraft("n", 1, time=SURROGATE)], lease=UNFENCED)
    ),
    "a number as time": lambda store: store.session("s").commit(
        Commit(append=[NodeDraft("n", 1, time=1 << 64)], lease=UNFENCED)
    ),
    "subjects": lambda store: store.create_session("s", subjects=ODD),
    "items": lambda store: store.session("s").queue.enqueue(ODD),
    "node ids": lambda store: store.session("s").tombstone(ODD),
    "attachment ids": lambda store: store.session("s").attachments.commit(ODD),
}


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        yield store


@pytest.mark.parametrize("call", CALLS)
def test_it_is_refused(store: Store, call: str) -> None:
    with pytest.raises(InvalidInputError):
        CALLS[call](store)
    assert list(store.sessions()) == []
