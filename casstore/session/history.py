"""The revisions of a session and their labels.

    session ‖ revision      → the head row as it was at that revision
    session ‖ 255 ‖ label   → revision (8) ‖ the label

The head row is the newest revision; the next commit moves the row to the table ``history``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import DeleteRow, RowIs, RowKey, Write
from casstore.session import keys, marks
from casstore.session.arguments import check_count
from casstore.session.attempts import ChangedMeanwhile, read_again, transaction
from casstore.session.data import Entry
from casstore.session.loading import At
from casstore.session.scanning import scan
from casstore.session.state import (
    Runtime,
    decode_head,
    head_key,
    public_entry,
    put_label,
    tombstone_key,
)

_PAGE: Final = 256
_MAX_REVISION: Final = (1 << 63) - 1


def entries(
    runtime: Runtime, session: str, before: int | None, limit: int | None
) -> Iterator[Entry]:
    """The revisions of a session (only those below ``before``), newest first, read in pages."""
    for number, what in ((limit, "limit"), (before, "before")):
        if number is not None:
            check_count(number, what)
    return _entries(runtime, session, before, limit)


def _entries(
    runtime: Runtime, session: str, before: int | None, limit: int | None
) -> Iterator[Entry]:
    key = keys.session_key(session)
    state = read_again(lambda: runtime.find(session))
    if state is None:
        return
    labels = _labels(runtime, session)
    left = _MAX_REVISION if limit is None else limit
    stop = _MAX_REVISION if before is None else before
    head = state.head
    if head.revision < stop and left:
        yield public_entry(session, head, labels.get(head.revision, ()))
        left -= 1
    stop = min(stop, head.revision)
    while left > 0:
        page = runtime.engine.scan_rows(
            "history",
            start=keys.history(key, 0),
            stop=keys.history(key, stop),
            limit=min(_PAGE, left),
            reverse=True,
        )
        # Deleting removes the head first, so a session with a head had all of these revisions.
        runtime.rows(session)
        for row in page:
            found = decode_head(row.value)
            yield public_entry(session, found, labels.get(found.revision, ()))
            stop = found.revision
        left -= len(page)
        if len(page) < _PAGE:
            return


def labels_of(runtime: Runtime, key: bytes) -> dict[int, tuple[str, ...]]:
    """The labels of a session by revision, for a session key; does not check if it was deleted."""
    labels: dict[int, tuple[str, ...]] = {}
    for row in scan(runtime.engine, "history", keys.labels(key), keys.past(key)):
        revision = int.from_bytes(row.value[:8], "big")
        labels[revision] = (*labels.get(revision, ()), row.value[8:].decode())
    return labels


def _labels(runtime: Runtime, session: str) -> dict[int, tuple[str, ...]]:
    """The labels by revision; SessionDeletedError if the session was deleted meanwhile."""
    labels = labels_of(runtime, keys.session_key(session))
    runtime.rows(session)
    return labels


def entry(runtime: Runtime, session: str, at: At) -> Entry:
    """One revision of a session, with all its labels."""
    state = runtime.at(session, at)
    labels = _labels(runtime, session)
    return public_entry(session, state.head, labels.get(state.head.revision, ()))


@transaction("session {session!r}")
def put(runtime: Runtime, session: str, name: str, at: At) -> Entry:
    """Set a label to a revision; if it exists, it moves.

    The returned entry has only this label. Label rows are keyed by name, so finding the other
    labels of the revision would mean reading all labels of the session.
    """
    key = keys.session_key(session)
    state = runtime.at(session, at)
    revision = state.head.revision
    row = keys.history(key, revision)
    current = runtime.rows(session)[0] == state.row
    if at is None and not current:
        raise ChangedMeanwhile  # the label is for the head at the time of the write
    row_key = head_key(key) if current else RowKey("history", row)
    # The session's mark changes, too: retention must not delete a labelled session as idle.
    changes = [put_label(key, name, revision), marks.put_mark(key, 0)]
    if not current:
        changes.append(marks.put_mark(key, revision))
    # Fails if the head has moved meanwhile: then the revision is in history.
    runtime.engine.write(
        Write(
            conditions=[RowIs(*row_key, state.row), RowIs(*tombstone_key(key), None)],
            rows=changes,
        )
    )
    return public_entry(session, state.head, (name,))


@transaction("session {session!r}")
def remove(runtime: Runtime, session: str, name: str) -> bool:
    """Remove a label; False if there was none."""
    key = keys.session_key(session)
    row_key = RowKey("history", keys.label(key, name))
    row = runtime.rows(session, [row_key])[1]
    if row is None:
        return False
    conditions = [RowIs(*tombstone_key(key), None), RowIs(*row_key, row)]
    runtime.engine.write(Write(conditions=conditions, rows=[DeleteRow(*row_key)]))
    return True
