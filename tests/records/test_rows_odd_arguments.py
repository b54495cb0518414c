"""Arguments that cannot be: refused with an error of the store, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from casstore import aio
from casstore.maintenance import copy
from casstore.records.lifecycles import Lifecycles
from casstore.records.log import SessionLog
from casstore.records.runs import Runs
from casstore.records.scoped import ScopedState
from casstore.session.records import Draft, Table
from casstore.store import Store
from tests.records.refusals import CountingEngine, assert_refused

ODD: Any = 5
NONE: Any = None


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    with Store(engine) as store:
        draft = Draft(store)
        draft.put(_table(store), ("a", "b"), 1)
        draft.commit()
        yield store


def _table(store: Store) -> Table:
    return Table(store, "some.table", 2)


def _changed(store: Store, change: Callable[[Draft, Table], object]) -> None:
    draft = Draft(store)
    change(draft, _table(store))
    draft.commit()


CALLS: dict[str, Callable[[Store], object]] = {
    "a name that is a number": lambda store: Table(store, ODD, 1),
    "a name beyond ASCII": lambda store: Table(store, "tablé", 1),
    "keys of no texts": lambda store: Table(store, "name", 0),
    "keys of none": lambda store: Table(store, "name", NONE),
    "keys of one and a half": lambda store: Table(store, "name", 1.5),  # type: ignore[arg-type]
    "keys to find": lambda store: _table(store).find_many(ODD),
    "a key to find": lambda store: _table(store).find_many([ODD]),
    "a part of a key to find": lambda store: _table(store).find("a"),
    "a page that is none": lambda store: _table(store).scan_starting("", page=NONE),
    "an order that is a text": lambda store: _table(store).scan(reverse="no"),  # type: ignore[arg-type]
    "more groups than texts": lambda store: _table(store).groups(1 << 70),
    "a table that is its name": lambda store: _changed(
        store,
        lambda draft, table: draft.put("some.table", ("a", "c"), 1),  # type: ignore[arg-type]
    ),
    "a part of a key": lambda store: _changed(
        store, lambda draft, table: draft.put(table, ("a",), 1)
    ),
    "a key of nothing": lambda store: _changed(store, lambda draft, table: draft.put(table, (), 1)),
    "a key that is a text": lambda store: _changed(
        store,
        lambda draft, table: draft.put(table, "ab", 1),  # type: ignore[arg-type]
    ),
    "a key that is a number": lambda store: _changed(
        store, lambda draft, table: draft.put(table, ODD, 1)
    ),
    "a part of a key to delete": lambda store: _changed(
        store, lambda draft, table: draft.delete(table, ("a",))
    ),
    "a part of a key to expect": lambda store: _changed(
        store, lambda draft, table: draft.expect(table, ("a",), None)
    ),
    "a record to expect": lambda store: _changed(
        store, lambda draft, table: draft.expect(table, ("a", "b"), ODD)
    ),
    "a record to copy": lambda store: _changed(
        store, lambda draft, table: draft.copy(table, NONE, ("a", "c"))
    ),
    "a list to extend": lambda store: _changed(store, lambda draft, table: draft.extend(NONE, [1])),
    "items to extend by": lambda store: _changed(
        store, lambda draft, table: draft.extend(draft.keep([1]), ODD)
    ),
    "how long is long": lambda store: _changed(
        store,
        lambda draft, table: draft.keep_long([1], least_bytes="9"),  # type: ignore[arg-type]
    ),
    "what also happens": lambda store: _changed(store, lambda draft, table: draft.also(NONE)),
}


@pytest.mark.parametrize("call", CALLS)
def test_record_table_calls_refuse_invalid_arguments(
    engine: CountingEngine, store: Store, call: str
) -> None:
    assert_refused(engine, lambda: CALLS[call](store))
    assert [record.key for record in _table(store).scan()] == [("a", "b")]


NO_STORES: dict[str, Any] = {
    "a path": "my-store",
    "nothing": None,
    "one that is awaited": aio.AsyncStore.__new__(aio.AsyncStore),
}
ON_STORES: dict[str, Callable[[Any], object]] = {
    "a log": SessionLog,
    "runs": Runs,
    "scoped state": ScopedState,
    "lifecycles": Lifecycles,
    "a draft": Draft,
}


@pytest.mark.parametrize("made", ON_STORES)
@pytest.mark.parametrize("given", NO_STORES)
def test_anything_but_a_store_is_refused(engine: CountingEngine, given: str, made: str) -> None:
    assert_refused(engine, lambda: ON_STORES[made](NO_STORES[given]))


def test_copy_refuses_paths_in_place_of_stores(engine: CountingEngine, store: Store) -> None:
    assert_refused(engine, lambda: copy.copy("a", "b"))  # type: ignore[arg-type]
    assert_refused(engine, lambda: copy.copy(store, "b"))  # type: ignore[arg-type]
