"""Protections: revisions that retention must keep, for example for a run that waits.

    protection = until (8, 0: without end) ‖ created_at (8) ‖ [by, note]

Retention keeps a protected revision and its session. If the row of a protection is damaged,
retention keeps every revision of the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import (
    DeleteRow,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    Stamp,
    Write,
)
from casstore.errors import CorruptionError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.session import keys, marks
from casstore.session.arguments import check_ms
from casstore.session.attempts import ChangedMeanwhile, transaction
from casstore.session.data import Protection
from casstore.session.loading import At
from casstore.session.scanning import scan
from casstore.session.state import Runtime, head_key, tombstone_key

#: The offset of the end time in the row; a time of 0 means no end.
UNTIL: Final = 0
_CREATED_AT: Final = 8
_DETAILS: Final = 16


@transaction("session {session!r}")
def protect(
    runtime: Runtime, session: str, at: At, *, by: str, ttl_ms: int | None, note: str | None
) -> Protection:
    """Protect a revision for ``by``, replacing an earlier protection by it."""
    revision, write = plan(runtime, session, at, by=by, ttl_ms=ttl_ms, note=note)
    # Fails if the head has moved meanwhile: then the revision is in history.
    done = runtime.engine.write(write)
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
    """The number of a revision, and the write that protects it, to be combined with other writes.

    The write requires that the revision's row is unchanged, in the table where it was found.
    """
    key = keys.session_key(session)
    state = runtime.at(session, at)
    revision = state.head.revision
    current = runtime.rows(session)[0] == state.row
    row_key = head_key(key) if current else RowKey("history", keys.history(key, revision))
    conditions = [RowIs(*row_key, state.row), RowIs(*tombstone_key(key), None)]
    rows = changes(session, revision, by=by, ttl_ms=ttl_ms, note=note)
    return revision, Write(conditions=conditions, rows=rows)


def changes(
    session: str, revision: int, *, by: str, ttl_ms: int | None = None, note: str | None = None
) -> list[RowChange]:
    """The rows that protect a revision. The caller's write must require that it exists."""
    key = keys.session_key(session)
    keys.id_bytes(by, "by")
    if ttl_ms is not None:
        check_ms(ttl_ms, "ttl_ms", least=1)
    if note is not None:
        keys.id_bytes(note, "note")
    stamps = [Stamp(_CREATED_AT)]
    if ttl_ms is not None:
        stamps.append(Stamp(UNTIL, ttl_ms))
    value = bytes(_DETAILS) + pack_checked([by, note])
    return [
        PutRow(*keys.protection(key, revision, by), value, stamps),
        # The session's mark makes a retention plan fail that would delete the whole session.
        marks.put_mark(key, 0),
        marks.put_mark(key, revision),
    ]


def release(session: str, revision: int, *, by: str) -> DeleteRow:
    """The change that ends the protection of a revision by ``by``, if there is one."""
    return DeleteRow(*keys.protection(keys.session_key(session), revision, by))


@transaction("session {session!r}")
def unprotect(runtime: Runtime, session: str, by: str, revision: int | None) -> int:
    """End all protections by ``by``, or that of one revision; returns how many."""
    key = keys.session_key(session)
    keys.id_bytes(by, "by")
    found = [
        row_key
        for row_key, protection in scan_protections(runtime, session)
        if protection.by == by and revision in (None, protection.revision)
    ]
    _, *rows = runtime.rows(session, found)
    if None in rows:
        raise ChangedMeanwhile  # another process has removed some of them: its call counts those
    if found:
        still = [RowIs(*row_key, row) for row_key, row in zip(found, rows, strict=True)]
        runtime.engine.write(
            Write(
                conditions=[RowIs(*tombstone_key(key), None), *still],
                rows=[DeleteRow(*row_key) for row_key in found],
            )
        )
    return len(found)


def list_protections(runtime: Runtime, session: str, *, lapsed: bool) -> list[Protection]:
    """The protections of a session, by revision; expired ones only if ``lapsed``."""
    found = [protection for _, protection in scan_protections(runtime, session)]
    # Checked after the scan: a deletion writes the tombstone before it removes rows.
    runtime.rows(session)
    now_ms = runtime.engine.now_ms()
    return [one for one in found if lapsed or not is_lapsed(one, now_ms)]


def scan_protections(runtime: Runtime, session: str) -> Iterator[tuple[RowKey, Protection]]:
    """All protections of a session and their row keys; CorruptionError if one is damaged."""
    start = keys.protections(keys.session_key(session))
    for row in scan(runtime.engine, "retention", start, keys.past(start)):
        yield RowKey("retention", row.key), decode(session, row.key, row.value)


def decode(session: str, key: bytes, row: bytes) -> Protection:
    """Decode a protection's row; CorruptionError if it is damaged."""
    try:
        by, note = unpack_checked(row[_DETAILS:])
        if type(by) is not str:
            raise ValueError("by is not a text")
    except (TypeError, ValueError) as exc:
        raise CorruptionError(f"row {key.hex()} of table retention is not a protection") from exc
    return Protection(
        session,
        keys.protected_revision(key),
        by,
        int.from_bytes(row[_CREATED_AT:_DETAILS], "big"),
        int.from_bytes(row[UNTIL:_CREATED_AT], "big") or None,
        note,
    )


def is_lapsed(protection: Protection, now_ms: int) -> bool:
    """True if the protection has expired."""
    return protection.until_ms is not None and protection.until_ms <= now_ms
