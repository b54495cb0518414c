"""Where the trees of a damaged store could not be read, so that something may be missing."""

from __future__ import annotations

from typing import Final, NamedTuple

from casstore.engine.lmdb.excavation.ranks import NEWEST, SAVED_TABLES
from casstore.engine.lmdb.pages import Lost

#: Stands where it is not known which table has lost rows.
ANY_TABLE: Final = "any table"


class LostRows(NamedTuple):
    """A range of keys of a table in which rows may be missing."""

    table: str
    low: bytes
    high: bytes | None
    why: str


class Gaps:
    """Parts of tables that could not be read, by the tree and the table."""

    def __init__(self) -> None:
        self._gaps: list[dict[str, list[Lost]]] = [{}, {}]

    def begin(self, rank: int, table: str) -> list[Lost]:
        """A list for the gaps of a table, to be filled while it is read."""
        found = self._gaps[rank][table] = []
        return found

    def of(self, rank: int, table: str) -> list[Lost]:
        """What is missing of a table."""
        return self._gaps[rank][table]

    def known(self, rank: int) -> set[str]:
        """The tables that were looked for in a tree."""
        return set(self._gaps[rank])

    def has(self, table: str, key: bytes, rank: int) -> bool:
        """Is the place of a key lost?"""
        return any(
            gap.low <= key and (gap.high is None or key < gap.high)
            for gap in self._gaps[rank][table]
        )

    def wounded(self) -> list[str]:
        """The tables of which the newest tree has lost a part."""
        return [table for table in SAVED_TABLES if self._gaps[NEWEST][table]]

    def any_rows(self, rank: int) -> bool:
        """Could any row not be read in a tree?"""
        return any(self._gaps[rank][table] for table in SAVED_TABLES)

    def lost_rows(self) -> list[LostRows]:
        """Where rows may be missing, table by table."""
        return [
            LostRows(table, gap.low, gap.high, gap.why)
            for table in SAVED_TABLES
            for gap in self._gaps[NEWEST][table]
        ]
