"""Deleting a session amid writers who never stop."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.engine.protocol import PutRow
from casstore.errors import SessionDeletedError
from casstore.session.data import UNFENCED, Commit, NodeDraft
from casstore.store import Store


def test_who_keeps_committing_does_not_keep_a_session_from_being_deleted(any_store: Store) -> None:
    # Once a commit came between each reading and its write, and the call gave up as busy.
    session = any_store.session("s")
    session.commit(Commit(append=[NodeDraft("0", 0)], lease=UNFENCED))
    engine: Any = any_store.engine
    write = engine.write
    commits: list[int] = []

    def beside(change: Any) -> Any:
        deletes = any(isinstance(row, PutRow) and row.table == "tombstones" for row in change.rows)
        if deletes:
            commits.append(len(commits) + 1)
            node = NodeDraft(str(commits[-1]), commits[-1])
            session.commit(Commit(append=[node], lease=UNFENCED))
        return write(change)

    engine.write = beside
    assert any_store.delete_session("s") is True
    engine.write = write
    assert commits == [1]
    with pytest.raises(SessionDeletedError):
        session.load()
    assert engine.scan_rows("history") == []
