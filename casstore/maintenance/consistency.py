"""Checks that rows which state the same fact agree, while writers change them.

A question about a few rows is judged by rows read in one transaction. A count needs several reads:
a wrong count is reported only if a *guard* row is the same before and after them. Every write that
changes what is counted must change the guard as well. The checks of retention and of record systems
(``systems``) use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import RowKey
from casstore.errors import CasstoreError
from casstore.maintenance.findings import Findings, Where
from casstore.maintenance.rows_check import RowsCheck
from casstore.session.records import Record, Table

_AT_ONCE: Final = 128
# How many times at most a count that is wrong is made, because its guard changed meanwhile; after
# that it is not reported.
_LOOKS: Final = 3

#: For each table of a system, the function that checks a record of it.
Judges = Mapping[Table, Callable[[Record], None]]
#: Takes rows of one transaction, in the order asked for; returns the fault, None if there is none.
Judge = Callable[[Sequence[bytes | None]], str | None]
# The errors of decoding a damaged row. The check of that row reports it; the comparison of rows
# leaves it out.
_UNDECODABLE: Final = (CasstoreError, ValueError, TypeError, KeyError, IndexError)


def where_is(table: Table, key: Sequence[str], session: str | None = None) -> Where:
    """The place of a record, for a finding.

    >>> str(where_is(Table(store, "notes.pages", 2), ["anna", "1"]))
    'table records, key 6e6f7465732e706167657300616e6e61003100'
    """
    return Where(session, table="records", key=table.keys.key(tuple(key)))


class Wrong(NamedTuple):
    """A disagreement that ``Facts.count`` reports.

    >>> where = where_is(Table(store, "notes.totals", 1), ["anna"])
    >>> Wrong("notes_total_wrong", "anna has 2 pages", where).what
    'anna has 2 pages'
    """

    code: str
    what: str
    where: Where


class _Question(NamedTuple):
    code: str
    where: Where
    places: Sequence[RowKey]
    judge: Judge


class Facts:
    """Asks whether rows agree, many questions at a time, and reports where they do not."""

    def __init__(self, rows: RowsCheck, found: Findings) -> None:
        self._rows = rows
        self._found = found
        self._asked: list[_Question] = []

    def ask(self, code: str, where: Where, places: Sequence[RowKey], judge: Judge) -> None:
        """Queue a question: ``judge`` is called with the rows at ``places``, of one transaction."""
        self._asked.append(_Question(code, where, places, judge))
        if len(self._asked) >= _AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Judge all queued questions."""
        asked, self._asked = self._asked, []
        values = self._rows.now([place for one in asked for place in one.places])
        for one in asked:
            # Empty: one of the rows is damaged. Read the rows of each question by themselves.
            own = values[: len(one.places)] if values else self._rows.now(one.places)
            values = values[len(one.places) :]
            if own:
                self._judge(one, own)

    def _judge(self, one: _Question, values: Sequence[bytes | None]) -> None:
        try:
            what = one.judge(values)
        except _UNDECODABLE:
            return
        if what is not None:
            self._found.add(one.code, what, one.where)

    def count(self, guard: RowKey, look: Callable[[bytes], Iterable[Wrong]]) -> None:
        """Report what ``look`` finds wrong, given the row at ``guard``, if that stays the same."""
        for _ in range(_LOOKS):
            before = self._rows.now([guard])
            if not before or before[0] is None:
                return
            try:
                wrong = list(look(before[0]))
            except _UNDECODABLE:
                return
            if not wrong:
                return
            if self._rows.now([guard]) == before:
                for one in wrong:
                    self._found.add(*one)
                return
