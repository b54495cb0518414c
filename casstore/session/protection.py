"""Revisions that must stay because somebody will come back to them: a run that waits.

    protection = until (8, 0: for good) ‖ created_at (8) ‖ [by, note]

Retention keeps a protected revision, and the session it belongs to. A protection that
cannot be read keeps everything: it is never taken for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import (
    MAX_STAMP_MS,
    DeleteRow,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    Stamp,
    Write,
)
from casstore.errors import ConditionFailedError, CorruptionError, InvalidInputError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.session import keys, marks
from casstore.session.attempts import Attempts
from casstore.session.data import Protection
from casstore.session.heads import head_key
from casstore.session.loading import At
from casstore.session.scanning import scan
from casstore.session.state import Runtime, tombstone_key

#: Where the time stands in the row; 0 there: no end.
UNTIL: Final = 0
_CREATED_AT: Final = 8
_DETAILS: Final = 16


def protect(
    runtime: Runtime, session: str, at: At, *, by: str, ttl_ms: int | None, note: str | None
) -> Protection:
    """Keep a revision for somebody; given again, for the time given now."""
    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        revision, write = plan(runtime, session, at, by=by, ttl_ms=ttl_ms, note=note)
        try:
            done = runtime.engine.write(write)
        except ConditionFailedError:
            continue  # the head moved, and what it was is in history now
        until_ms = None if ttl_ms is None else done.now_ms + ttl_ms
        return Protection(session, revision, by, done.now_ms, until_ms, note)


def plan(
    runtime: Runtime,
    session: str,
    at: At,
    *,
    by: str,
    ttl_ms: int | None = None,
    note: str | None = None,
) -> tuple[int, Write]:
    """The revision found, and the write by which it is kept: alone, or together with others.

    Under the condition that the revision still stands where it was found.
    """
    key = keys.session_key(session)
    state = runtime.at(session, at)
    revision = state.head.revision
    current = runtime.rows(session)[0] == state.row
    place = head_key(key) if current else RowKey("history", keys.history(key, revision))
    conditions = [RowIs(*place, state.row), RowIs(*tombstone_key(key), None)]
    rows = changes(session, revision, by=by, ttl_ms=ttl_ms, note=note)
    return revision, Write(conditions=conditions, rows=rows)


def changes(
    session: str, revision: int, *, by: str, ttl_ms: int | None = None, note: str | None = None
) -> list[RowChange]:
    """The rows by which a revision is kept, which the write must know to be there."""
    key = keys.session_key(session)
    keys.id_bytes(by, "a protector")
    if ttl_ms is not None and (type(ttl_ms) is not int or not 0 < ttl_ms <= MAX_STAMP_MS):
        raise InvalidInputError(f"a protection lasts 1 ms or more, not {ttl_ms!r}")
    if note is not None:
        keys.id_bytes(note, "a note")
    stamps = [Stamp(_CREATED_AT)]
    if ttl_ms is not None:
        stamps.append(Stamp(UNTIL, ttl_ms))
    value = bytes(_DETAILS) + pack_checked([by, note])
    return [
        PutRow(*keys.protection(key, revision, by), value, stamps),
        # Also that of the session: it must not be taken away as a whole.
        marks.put_mark(key, 0),
        marks.put_mark(key, revision),
    ]


def release(session: str, revision: int, *, by: str) -> DeleteRow:
    """The change by which somebody's protection of one revision ends; it need not be there."""
    return DeleteRow(*keys.protection(keys.session_key(session), revision, by))


def unprotect(runtime: Runtime, session: str, by: str, revision: int | None) -> int:
    """Take away what somebody protects, or that of one revision; how many there were."""
    key = keys.session_key(session)
    keys.id_bytes(by, "a protector")
    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        found = [
            place
            for place, protection in scan_protections(runtime, session)
            if protection.by == by and revision in (None, protection.revision)
        ]
        _, *rows = runtime.rows(session, found)
        if None in rows:
            continue  # taken away by somebody else just now, who counts them
        if found:
            still = [RowIs(*place, row) for place, row in zip(found, rows, strict=True)]
            try:
                runtime.engine.write(
                    Write(
                        conditions=[RowIs(*tombstone_key(key), None), *still],
                        rows=[DeleteRow(*place) for place in found],
                    )
                )
            except ConditionFailedError:
                continue
        return len(found)


def list_protections(runtime: Runtime, session: str, *, lapsed: bool) -> list[Protection]:
    """Who protects what of a session, by revision; those whose time is up only if asked for."""
    found = [protection for _, protection in scan_protections(runtime, session)]
    # Only now: what is being deleted loses them one after the other, but says so first.
    runtime.rows(session)
    now_ms = runtime.engine.now_ms()
    return [one for one in found if lapsed or not is_lapsed(one, now_ms)]


def scan_protections(runtime: Runtime, session: str) -> Iterator[tuple[RowKey, Protection]]:
    """All protections of a session and where they stand; CorruptionError if one is damaged."""
    start = keys.protections(keys.session_key(session))
    for row in scan(runtime.engine, "retention", start, keys.past(start)):
        yield RowKey("retention", row.key), decode(session, row.key, row.value)


def decode(session: str, key: bytes, row: bytes) -> Protection:
    """A protection as its row holds it."""
    try:
        by, note = unpack_checked(row[_DETAILS:])
        if type(by) is not str:
            raise ValueError("nobody is named")
    except (TypeError, ValueError) as exc:
        raise CorruptionError(f"row {key.hex()} of table retention is no protection") from exc
    return Protection(
        session,
        keys.protected_revision(key),
        by,
        int.from_bytes(row[_CREATED_AT:_DETAILS], "big"),
        int.from_bytes(row[UNTIL:_CREATED_AT], "big") or None,
        note,
    )


def is_lapsed(protection: Protection, now_ms: int) -> bool:
    """Is its time up?"""
    return protection.until_ms is not None and protection.until_ms <= now_ms
