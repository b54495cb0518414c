"""Labels that come to a session from elsewhere: only for revisions that it has here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import Condition, Engine, PutRow, RowChange, RowIs, RowKey
from casstore.session import keys, marks

_REVISION_BYTES: Final = 8


class ArrivingLabels(NamedTuple):
    """The rows to write, and what must hold when they are."""

    changes: list[RowChange]
    conditions: list[Condition]


def arriving_labels(
    engine: Engine, key: bytes, labels: Sequence[PutRow], coming: Collection[int], *, moves: bool
) -> ArrivingLabels:
    """Those of ``labels`` whose revisions are ``coming`` in the same write, or are there already.

    Retention may have removed others here, and a label must name something. One for a revision
    that is there leaves a mark, as every label does: a plan made before must not remove it. So
    does one for a session that does not move meanwhile, which may be about to go as idle.
    """
    earlier = sorted({_revision(label) for label in labels}.difference(coming))
    places = {number: RowKey("history", keys.history(key, number)) for number in earlier}
    rows = engine.get_rows(list(places.values())) if places else []
    there = {
        number: RowIs(*places[number], row)
        for number, row in zip(earlier, rows, strict=True)
        if row is not None
    }
    taken = [label for label in labels if _revision(label) in coming or _revision(label) in there]
    changes: list[RowChange] = [*taken, *[marks.put_mark(key, number) for number in there]]
    if taken and not moves:
        changes.append(marks.put_mark(key, 0))
    return ArrivingLabels(changes, list(there.values()))


def _revision(label: PutRow) -> int:
    return int.from_bytes(label.value[:_REVISION_BYTES], "big")
