"""Rows of a copy's target that must go when those come that take the place of others.

    queue        who finds a batch by its id or source key: the source has given both anew
    retention    who finds a session by whom it was about

A copy that is no mirror leaves rows that the source has no more. These belong to rows that it
replaces, so they go with them, in the same write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from casstore.engine.protocol import DeleteRow, Engine, PutRow, RowKey
from casstore.session import keys, queue, subjects

_SEQ_BYTES: Final = 8


def displaced(
    source: Engine, target: Engine, table: str, changes: Sequence[PutRow]
) -> list[DeleteRow]:
    """What must go from the target when these rows of the source come."""
    if table == "queue":
        return _work(source, target, changes)
    if table == "retention":
        return _found_by_subject(target, changes)
    return []


def _work(source: Engine, target: Engine, changes: Sequence[PutRow]) -> list[DeleteRow]:
    """Batches whose id or source key has gone over to another, and rows that found them."""
    coming = {RowKey(change.table, change.key): change.value for change in changes}
    known = dict(zip(coming, target.get_rows(list(coming)), strict=True))
    # A batch that is replaced by another one of its number; or that was found by what finds
    # another one now, if the source has done or cancelled it.
    replaced = {place for place in coming if keys.is_queue_batch(place.key)}
    left = {
        keys.queue_batch(keys.session_part(place.key), int.from_bytes(row, "big"))
        for place, row in known.items()
        if row is not None and len(row) == _SEQ_BYTES and not _is_counter(place.key)
    }
    asked = sorted(left - replaced)
    over = [
        place
        for place, row in zip(asked, source.get_rows(asked) if asked else [], strict=True)
        if row is None
    ]
    gone: list[DeleteRow] = []
    batches = [*over, *sorted(replaced)]
    for place, row in zip(batches, target.get_rows(batches) if batches else [], strict=True):
        if row is None:
            continue
        key = keys.session_part(place.key)
        names = [RowKey(name.table, name.key) for name in queue.put_names(key, place.key, row)]
        seq = place.key[-_SEQ_BYTES:]
        if place in replaced:
            kept = {name[:2] for name in queue.put_names(key, place.key, coming[place])}
            names = [name for name in names if name not in kept]
        else:
            gone.append(DeleteRow(*place))
        gone += [
            DeleteRow(*name)
            for name, finds in zip(names, target.get_rows(names) if names else [], strict=True)
            if finds == seq and name not in coming
        ]
    return gone


def _is_counter(key: bytes) -> bool:
    return key == keys.queue_counter(keys.session_part(key)).key


def _found_by_subject(target: Engine, changes: Sequence[PutRow]) -> list[DeleteRow]:
    """The rows that find a session by somebody whom it is not about any more."""
    gone: list[DeleteRow] = []
    start = keys.subjects(b"").key
    for change in changes:
        if not change.key.startswith(start):
            continue
        key = change.key[len(start) :]
        [row] = target.get_rows([keys.subjects(key)])
        after = subjects.decode(change.value)
        gone += [
            DeleteRow(*keys.subject_session(about, key))
            for about in subjects.decode(row)
            if about not in after
        ]
    return gone
