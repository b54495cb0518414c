"""The proof of single transactions can tell one from two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from casstore.session.records import Draft, Table
from casstore.store import Store
from tests.records.one_transaction import assert_one_transaction


def prepare(store: Store) -> Table:
    table = Table(store, "t", 1)
    draft = Draft(store)
    draft.put(table, ("old",), 1)
    draft.commit()
    return table


def together(store: Store, table: Table) -> None:
    draft = Draft(store)
    draft.put(table, ("a",), ["x" * 1000])
    draft.put(table, ("b",), 2)
    draft.delete(table, ("old",))
    draft.commit()


def one_by_one(store: Store, table: Table) -> None:
    for key in ("a", "b"):
        draft = Draft(store)
        draft.put(table, (key,), 1)
        draft.commit()


def nothing(store: Store, table: Any) -> None:
    pass


def test_assert_one_transaction_accepts_one_write(tmp_path: Path) -> None:
    assert_one_transaction(tmp_path / "s", prepare, together)


@pytest.mark.parametrize("operate", [one_by_one, nothing])
def test_assert_one_transaction_rejects_two_writes_or_none(tmp_path: Path, operate: Any) -> None:
    with pytest.raises(AssertionError):
        assert_one_transaction(tmp_path / "s", prepare, operate)
