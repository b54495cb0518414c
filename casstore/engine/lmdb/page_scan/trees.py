"""The trees of a damaged file: their ranks, and the key ranges that could not be read.

A rank says where a row or a slab was found. Of several versions the lowest rank counts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from casstore.engine.lmdb.page_scan.pages import Lost
from casstore.engine.protocol import TABLES

#: The tree of the newest meta page.
NEWEST: Final = 0
#: The tree of the other meta page: the state one commit earlier.
BEFORE: Final = 1
#: A page that neither tree refers to.
STRAY: Final = 2

#: Tables whose rows are salvaged.
SAVED_TABLES: Final = TABLES

#: The table of a ``LostRows`` when it is not known which table lost rows.
ANY_TABLE: Final = "any table"


class LostRows(NamedTuple):
    """A range of keys of a table in which rows may be missing."""

    table: str
    low: bytes
    high: bytes | None
    why: str


class Gaps:
    """Key ranges that could not be read, by table; apart for the newest tree and the one before.

    ``rank`` is ``NEWEST`` or ``BEFORE``.
    """

    def __init__(self) -> None:
        self._gaps: list[dict[str, list[Lost]]] = [{}, {}]

    def begin(self, rank: int, table: str) -> list[Lost]:
        """A new list for the gaps of a table, to be filled while the table is read."""
        found = self._gaps[rank][table] = []
        return found

    def of(self, rank: int, table: str) -> list[Lost]:
        """The gaps of a table."""
        return self._gaps[rank][table]

    def known(self, rank: int) -> set[str]:
        """The tables for which ``begin`` was called."""
        return set(self._gaps[rank])

    def has(self, table: str, key: bytes, rank: int) -> bool:
        """True if ``key`` is in a range of keys of the table that could not be read."""
        return any(
            gap.low <= key and (gap.high is None or key < gap.high)
            for gap in self._gaps[rank][table]
        )

    def damaged_tables(self) -> list[str]:
        """The tables that have a gap in the newest tree."""
        return [table for table in SAVED_TABLES if self._gaps[NEWEST][table]]

    def any_rows(self, rank: int) -> bool:
        """True if a table of rows has a gap in this tree."""
        return any(self._gaps[rank][table] for table in SAVED_TABLES)

    def lost_rows(self) -> list[LostRows]:
        """The gaps of the newest tree, table by table."""
        return [
            LostRows(table, gap.low, gap.high, gap.why)
            for table in SAVED_TABLES
            for gap in self._gaps[NEWEST][table]
        ]
