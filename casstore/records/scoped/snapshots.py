"""Reads all values of several scopes as of one moment.

The keys are listed first, page by page. Then one transaction reads the rows of the scopes and of
all listed keys. If a scope counts as many values as were found, the snapshot is complete. Otherwise
a writer has added or removed a value, and the read is retried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from casstore.errors import LimitError
from casstore.records.schema import number_text
from casstore.records.scoped.runs import RunGuard
from casstore.records.scoped.scope import StateEntry, entries, read_rows
from casstore.records.scoped.tables import ScopedTables, ScopeRow, Spot, ValueRow
from casstore.session.attempts import ChangedMeanwhile, transaction

#: The default of ``max_bytes``: a snapshot is held in memory.
MAX_SNAPSHOT_BYTES: Final = 64 << 20


class Moment(NamedTuple):
    """The entries of each scope asked for, and the id of the conversation's latest reset."""

    scopes: list[list[StateEntry]]
    reset_id: str | None


def read_moment(
    tables: ScopedTables,
    spots: Sequence[Spot],
    *,
    prefix: str,
    max_bytes: int,
    guard: RunGuard | None,
) -> Moment:
    """Read the scopes as of one moment; LimitError if they hold more than ``max_bytes``."""
    reading = _SnapshotReader(tables, spots, max_bytes, guard)
    return reading.read(prefix)


class _SnapshotLook(NamedTuple):
    """Rows read in one transaction."""

    now_ms: int
    #: The current generation of the conversation.
    number: int
    reset_id: str | None
    heads: list[ScopeRow | None]
    values: list[list[ValueRow | None]]

    @property
    def is_whole(self) -> bool:
        """Whether each scope has as many values here as its row counts."""
        return all(
            len([one for one in values if one is not None]) == (0 if head is None else head.keys)
            for head, values in zip(self.heads, self.values, strict=True)
        )

    def wanted(self, prefix: str) -> list[list[ValueRow]]:
        """The values that have not expired and match ``prefix``."""
        return [
            [
                one
                for one in values
                if one is not None and one.is_live(self.now_ms) and one.key.startswith(prefix)
            ]
            for values in self.values
        ]


class _SnapshotReader:
    """The reads of one snapshot."""

    def __init__(
        self, tables: ScopedTables, spots: Sequence[Spot], max_bytes: int, guard: RunGuard | None
    ) -> None:
        self._tables = tables
        self._spots = spots
        self._max_bytes = max_bytes
        self._guard = guard
        # The generation that the last look found. The next look tries it first, and checks it.
        self._number = 0

    @transaction("the scopes of a snapshot")
    def read(self, prefix: str) -> Moment:
        """All values whose keys start with ``prefix``."""
        look = self._look_whole()
        wanted = look.wanted(prefix)
        if sum([one.charged_bytes for scope in wanted for one in scope]) > self._max_bytes:
            raise self._too_large()
        return Moment([entries(self._tables, scope) for scope in wanted], look.reset_id)

    def _look_whole(self) -> _SnapshotLook:
        """All values of the scopes."""
        number = self._number
        look = self._look([[] for _ in self._spots])
        if look.number == number and any(look.heads):
            look = self._look([*map(self._names, self._spots, look.heads)])
        if look.number != number or not look.is_whole:
            raise ChangedMeanwhile
        return look

    def _look(self, names: Sequence[Sequence[str]]) -> _SnapshotLook:
        """Read the rows of the scopes and of these keys in one transaction, and check the guard."""
        tables = self._tables
        scopes = [(self._place(spot), keys) for spot, keys in zip(self._spots, names, strict=True)]
        conversation = next((spot.conversation for spot in self._spots if spot.conversation), None)
        rows = read_rows(tables, scopes, conversation, self._guard)
        self._number = tables.latest_number(rows.reset)
        return _SnapshotLook(
            rows.now_ms,
            self._number,
            None if rows.reset is None else tables.resets.decode(rows.reset).id,
            [tables.scopes.decode_found(one) for one in rows.heads],
            rows.values,
        )

    def _names(self, spot: Spot, head: ScopeRow | None) -> list[str]:
        """The keys of a scope, in order, from several transactions; LimitError above the limit."""
        if head is None:
            return []
        names: list[str] = []
        left = self._max_bytes
        for record in self._tables.values.scan(*self._place(spot)):
            # Checked here too: values may have been added since the scope's row was read.
            left -= len(record.row)
            if left < 0:
                raise self._too_large()
            names.append(record.key[2])
        return sorted(names)

    def _place(self, spot: Spot) -> tuple[str, str]:
        return (spot.key, number_text(0 if spot.conversation is None else self._number))

    def _too_large(self) -> LimitError:
        return LimitError(
            f"the scopes hold more than {self._max_bytes} bytes; list their keys and read some"
        )
