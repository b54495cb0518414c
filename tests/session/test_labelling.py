"""A label costs the same however many the session has."""

from __future__ import annotations

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Row, Write
from casstore.session import keys
from casstore.session.data import Commit, NodeDraft
from casstore.session.state import put_label
from casstore.store import Store


class RowsRead(MemoryEngine):
    """An engine that counts the rows it hands out in lists."""

    rows_listed = 0

    def scan_rows(
        self,
        table: str,
        *,
        start: bytes = b"",
        stop: bytes | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[Row]:
        found = super().scan_rows(table, start=start, stop=stop, limit=limit, reverse=reverse)
        self.rows_listed += len(found)
        return found


def test_label_and_unlabel_read_no_other_label() -> None:
    engine = RowsRead()
    session = Store(engine).session("s")
    session.commit(Commit(append=[NodeDraft("a", 1)]))
    session.commit(Commit(append=[NodeDraft("b", 2)]))
    key = keys.session_key("s")
    engine.write(Write(rows=[put_label(key, f"label {number}", 1) for number in range(1000)]))
    for at, revision in ((1, 1), (None, 2), ("label 7", 1)):
        entry = session.label("mine", at)
        assert (entry.revision, entry.labels) == (revision, ("mine",))
    assert session.unlabel("mine")
    assert engine.rows_listed == 0
    assert len(session.entry(1).labels) == 1000
