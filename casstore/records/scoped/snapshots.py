"""All values of several scopes, as they were together at one moment.

Keys are not known beforehand, so they are listed first, page by page. Then the rows of the
scopes and of all these keys are read at once, and each scope says how many values it has: if
so many were found, they are all. If not, something came or went meanwhile, and it begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from casstore.errors import CorruptionError, LimitError
from casstore.records.scoped.layout import (
    LATEST,
    Head,
    Spot,
    Stored,
    Tables,
    decode_head,
    decode_reset,
    decode_value,
    latest_number,
    number_text,
)
from casstore.records.scoped.scope import Entry, Guard, entries
from casstore.session.attempts import Attempts, read_again
from casstore.session.records import Table, find_records

#: What a snapshot puts into memory unless the caller allows more.
MAX_SNAPSHOT_BYTES: Final = 64 << 20
_Place = tuple[Table, tuple[str, ...]]


class Moment(NamedTuple):
    """The entries of each scope asked for, and the id of the conversation's latest reset."""

    scopes: list[list[Entry]]
    reset_id: str | None


def read_moment(
    tables: Tables,
    spots: Sequence[Spot],
    *,
    prefix: str = "",
    generation: int | None = None,
    max_bytes: int = MAX_SNAPSHOT_BYTES,
    guard: Guard | None = None,
) -> Moment:
    """Read the scopes as of one moment; LimitError if they hold more than ``max_bytes``."""
    reading = _Reading(tables, spots, generation, max_bytes, guard)
    number = generation or 0
    before: list[bytes] | None = None
    attempts = Attempts("the scopes of a snapshot")
    while True:
        attempts.begin()
        look = reading.look(number, [[] for _ in spots])
        if look.number != number:
            number = look.number
            continue
        if any(look.heads):
            names = [
                reading.names(spot, number, head)
                for spot, head in zip(spots, look.heads, strict=True)
            ]
            look = reading.look(number, names)
            if look.number != number or not look.is_whole:
                number = look.number
                continue
        wanted = look.wanted(prefix)
        reading.charge(wanted)
        try:
            found = [entries(tables, scope) for scope in wanted]
        except CorruptionError:
            # Replaced between two reads, and what was there collected; unless nothing was.
            rows = [one.record.row for scope in wanted for one in scope]
            if before == rows:
                raise
            before = rows
            continue
        return Moment(found, look.reset_id)


class _Look(NamedTuple):
    """Rows of one moment."""

    now_ms: int
    #: The generation that conversations are in, or the one asked for.
    number: int
    reset_id: str | None
    heads: list[Head | None]
    values: list[list[Stored | None]]

    @property
    def is_whole(self) -> bool:
        """Are these all values that the scopes have?"""
        return all(
            len([one for one in values if one is not None]) == (0 if head is None else head.keys)
            for head, values in zip(self.heads, self.values, strict=True)
        )

    def wanted(self, prefix: str) -> list[list[Stored]]:
        """Those that can be seen."""
        return [
            [
                one
                for one in values
                if one is not None and one.is_live(self.now_ms) and one.key.startswith(prefix)
            ]
            for values in self.values
        ]


class _Reading:
    """What is read for one snapshot."""

    def __init__(
        self,
        tables: Tables,
        spots: Sequence[Spot],
        generation: int | None,
        max_bytes: int,
        guard: Guard | None,
    ) -> None:
        self._tables = tables
        self._spots = spots
        self._generation = generation
        self._max_bytes = max_bytes
        self._guard = guard

    def _place(self, spot: Spot, number: int) -> tuple[str, str]:
        return (spot.key, number_text(0 if spot.conversation is None else number))

    def names(self, spot: Spot, number: int, head: Head | None) -> list[str]:
        """The keys of a scope, in order, each page of its own moment."""
        if head is None:
            return []
        names: list[str] = []
        left = self._max_bytes
        for record in self._tables.values.scan(*self._place(spot, number)):
            # More may have come since the scope was asked how much it holds.
            left -= len(record.row)
            if left < 0:
                raise self._too_large()
            names.append(record.key[2])
        return sorted(names)

    def look(self, number: int, names: Sequence[Sequence[str]]) -> _Look:
        """The scopes and these keys, at one moment; once more if a run has ended in its midst."""
        return read_again(lambda: self._look(number, names), (CorruptionError,))

    def _look(self, number: int, names: Sequence[Sequence[str]]) -> _Look:
        tables, spots = self._tables, self._spots
        places: list[_Place] = [(tables.scopes, self._place(spot, number)) for spot in spots]
        for spot, keys in zip(spots, names, strict=True):
            places += [(tables.values, (*self._place(spot, number), key)) for key in keys]
        conversation = next((spot.conversation for spot in spots if spot.conversation), None)
        if conversation is not None:
            places.append((tables.resets, (conversation, LATEST)))
        if self._guard is not None:
            places.append(self._guard.place)
        found = find_records(tables.store, places)
        now_ms = tables.store.engine.now_ms()
        if self._guard is not None:
            self._guard.check(found.pop(), now_ms)
        reset = found.pop() if conversation is not None else None
        heads = [None if one is None else decode_head(one) for one in found[: len(spots)]]
        rows = iter(found[len(spots) :])
        values = [
            [None if row is None else decode_value(row) for row in islice(rows, len(keys))]
            for keys in names
        ]
        return _Look(
            now_ms,
            latest_number(reset) if self._generation is None else self._generation,
            None if reset is None else decode_reset(reset).id,
            heads,
            values,
        )

    def charge(self, wanted: Sequence[Sequence[Stored]]) -> None:
        """LimitError if these values are more than what may be read."""
        if sum([one.charged_bytes for scope in wanted for one in scope]) > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> LimitError:
        return LimitError(
            f"the scopes hold more than {self._max_bytes} bytes; list their keys and read some"
        )
