"""Unique times: each is later than every time issued before, in any process.

Frameworks order lists by the time of the last change, and two changes at the same time would tie.
So each write reserves times of its own, **ticks** (integers in a unit that the caller chooses), in
its own transaction:

    <name>   tick modulo ``SLOTS``, two digits      the latest tick of this slot, 8 bytes

A write that reserves a tick makes the slot of the tick a condition, and stores the tick in it. Two
writers that choose the same tick conflict, and the later one retries; writers that choose different
ticks rarely conflict. The greatest tick of all slots is the latest ever issued, because a slot only
changes to a tick greater than those of all slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from casstore.engine.forks import Lock
from casstore.engine.protocol import PutRow, RowIs, RowKey, Write
from casstore.errors import CorruptionError
from casstore.session.records import Draft, Record, Table
from casstore.store import Store

#: How many concurrent writes can reserve a tick without conflicting with each other.
SLOTS: Final = 16
_KEYS: Final = [f"{slot:02}" for slot in range(SLOTS)]
_TICK_BYTES: Final = 8


class ClockReading(NamedTuple):
    """The slots of a clock and some records, read in one transaction."""

    slots: Sequence[bytes | None]
    records: Sequence[Record | None]


class UniqueTimes:
    """Issues ticks of one clock of a store. Safe for threads.

    ``name`` is the table of its slots.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = Lock()
        self._last = 0
        #: For each slot, how many writes in progress in this process have reserved it.
        self._busy: dict[int, int] = {}
        # The keys of the slots and the common prefix of their rows, computed at the first read: the
        # same in every store.
        self._places: list[RowKey] = []
        self._start = b""

    def read(
        self,
        store: Store,
        table: Table,
        keys: Sequence[tuple[str, ...]],
        also: Sequence[tuple[Table, tuple[str, ...]]] = (),
    ) -> ClockReading:
        """Read the slots, the records of ``keys``, and those of ``also``, in one transaction."""
        if not self._places:
            slots = Table(store, self._name, 1)
            row = Draft(store).put(slots, (_KEYS[0],), bytes(_TICK_BYTES))
            self._start = row[:-_TICK_BYTES]
            self._places = [slots.place(key) for key in _KEYS]
        others = [other.place(*key) for other, key in also]
        rows = store.engine.get_rows([*self._places, *[table.place(*key) for key in keys], *others])
        found = zip([*keys, *[key for _, key in also]], rows[SLOTS:], strict=True)
        return ClockReading(
            rows[:SLOTS], [None if row is None else Record(store, key, row) for key, row in found]
        )

    @contextmanager
    def reserve(
        self, draft: Draft, reading: ClockReading, now: int, *, count: int = 1
    ) -> Iterator[int]:
        """Reserve ``count`` consecutive ticks, none below ``now``, in a draft; yields the first.

        Leave the context after the draft is committed. The commit raises ConditionFailedError if
        another write has changed a slot since ``reading``: read again, and rebuild the draft.
        """
        latest = self._latest(reading)
        with self._lock:
            first = max(now, latest + 1, self._last + 1)
            # Threads of one process choose different slots if enough are free.
            for _ in range(SLOTS):
                slots = _slots(first, count)
                if self._busy.keys().isdisjoint(slots):
                    break
                first += 1
            self._last = first + count - 1
            for slot in slots:
                self._busy[slot] = self._busy.get(slot, 0) + 1
        draft.also(
            Write(
                conditions=[RowIs(*self._places[slot], reading.slots[slot]) for slot in slots],
                rows=[
                    PutRow(*self._places[slot], self._start + tick.to_bytes(_TICK_BYTES, "big"))
                    for slot, tick in slots.items()
                ],
            )
        )
        try:
            yield first
        finally:
            with self._lock:
                for slot in slots:
                    left = self._busy.pop(slot) - 1
                    if left:
                        self._busy[slot] = left

    def _latest(self, reading: ClockReading) -> int:
        # The rows have one length and one prefix, so the greatest row has the latest tick.
        row = max(filter(None, reading.slots), default=None)
        if row is None:
            return 0
        if row[:-_TICK_BYTES] != self._start:
            raise CorruptionError(f"a row of {self._name!r} holds no time; check the store")
        return int.from_bytes(row[-_TICK_BYTES:], "big")


def _slots(first: int, count: int) -> dict[int, int]:
    """The slots of ticks, and the last tick of each."""
    return {tick % SLOTS: tick for tick in range(max(first, first + count - SLOTS), first + count)}
