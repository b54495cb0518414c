"""Facts that stand in several rows, and whether the rows agree, beside writers.

What few rows say of each other is judged by rows of one moment. What must be counted takes
several readings; it counts only if the row that changes with everything counted is the same
before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import RowKey
from casstore.errors import CasstoreError
from casstore.maintenance.findings import Findings, Where
from casstore.maintenance.rows_check import RowsCheck
from casstore.session.records import Table

_AT_ONCE: Final = 128
# How often something is counted that changes meanwhile; then the next check may find it.
_LOOKS: Final = 3

#: What is wrong with rows of one moment, in the order asked for; None: nothing.
Judge = Callable[[Sequence[bytes | None]], str | None]
# A row that makes no sense is told by whoever looks at that row; here it says nothing.
_NO_SENSE: Final = (CasstoreError, ValueError, TypeError, KeyError, IndexError)


def where_is(table: Table, key: Sequence[str], session: str | None = None) -> Where:
    """The place of a record."""
    return Where(session, table="records", key=table.keys.key(tuple(key)))


class Wrong(NamedTuple):
    """Something that does not agree."""

    code: str
    what: str
    where: Where


class _Question(NamedTuple):
    code: str
    where: Where
    places: Sequence[RowKey]
    judge: Judge


class Facts:
    """Asks whether rows agree, many questions at a time, and tells where they do not."""

    def __init__(self, rows: RowsCheck, found: Findings) -> None:
        self._rows = rows
        self._found = found
        self._asked: list[_Question] = []

    def ask(self, code: str, where: Where, places: Sequence[RowKey], judge: Judge) -> None:
        """Have the rows at these places judged, soon."""
        self._asked.append(_Question(code, where, places, judge))
        if len(self._asked) >= _AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Judge what was asked so far."""
        asked, self._asked = self._asked, []
        values = self._rows.now([place for one in asked for place in one.places])
        for one in asked:
            # Nothing at all: one of the rows is damaged, and the others must not suffer for it.
            own = values[: len(one.places)] if values else self._rows.now(one.places)
            values = values[len(one.places) :]
            if own:
                self._judge(one, own)

    def _judge(self, one: _Question, values: Sequence[bytes | None]) -> None:
        try:
            what = one.judge(values)
        except _NO_SENSE:
            return
        if what is not None:
            self._found.add(one.code, what, one.where)

    def count(self, guard: RowKey, look: Callable[[bytes], Iterable[Wrong]]) -> None:
        """Tell what ``look`` finds wrong, if the row that guards it stays as it was given."""
        for _ in range(_LOOKS):
            before = self._rows.now([guard])
            if not before or before[0] is None:
                return
            try:
                wrong = list(look(before[0]))
            except _NO_SENSE:
                return
            if not wrong:
                return
            if self._rows.now([guard]) == before:
                for one in wrong:
                    self._found.add(*one)
                return
