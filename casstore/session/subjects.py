"""Whom a session is about: names given to it, and an index to find it by them.

    of a session     → [subject, …], sorted
    subject, session → the session's id

Both are written together. A fork is about whom its source is about, unless it is told
otherwise; the source's row is a condition of the fork, so no subject slips through between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from casstore.engine.protocol import DeleteRow, PutRow, RowChange, RowIs, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    SessionNotFoundError,
)
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.session import keys
from casstore.session.arguments import list_of
from casstore.session.attempts import Attempts
from casstore.session.scanning import scan
from casstore.session.state import Runtime, meta_key, tombstone_key

#: How many subjects a session may have.
MAX_SUBJECTS: Final = 1024


def checked(subjects: Iterable[str]) -> tuple[str, ...]:
    """Subjects in order, each once; refused if they cannot be any."""
    wanted = list_of(subjects, "subjects")
    for about in wanted:
        keys.id_bytes(about, "a subject")
    if len(wanted) > MAX_SUBJECTS:
        raise InvalidInputError(f"a session has at most {MAX_SUBJECTS} subjects")
    return tuple(sorted(set(wanted)))


def decode(row: bytes | None) -> tuple[str, ...]:
    """The subjects that a session's row names; none if there is no row."""
    if row is None:
        return ()
    try:
        found = unpack_checked(row)
    except (TypeError, ValueError) as exc:
        raise CorruptionError("the subjects of a session are damaged") from exc
    if type(found) is not list or not all(type(about) is str for about in found):
        raise CorruptionError("the subjects of a session are damaged")
    return tuple(found)


def changes(
    session: str, key: bytes, before: tuple[str, ...], after: tuple[str, ...]
) -> list[RowChange]:
    """The rows by which a session is about others than before."""
    rows: list[RowChange] = [
        DeleteRow(*keys.subject_session(about, key)) for about in before if about not in after
    ]
    rows += [
        PutRow(*keys.subject_session(about, key), session.encode())
        for about in after
        if about not in before
    ]
    if after:
        rows.append(PutRow(*keys.subjects(key), pack_checked(list(after))))
    else:
        rows.append(DeleteRow(*keys.subjects(key)))
    return rows


def find(runtime: Runtime, session: str) -> tuple[str, ...]:
    """Whom a session is about; SessionNotFoundError if there is none."""
    return decode(_row(runtime, session, keys.session_key(session)))


def _row(runtime: Runtime, session: str, key: bytes) -> bytes | None:
    head, meta, row = runtime.rows(session, [meta_key(key), keys.subjects(key)])
    if head is None and meta is None:
        raise SessionNotFoundError(session)
    return row


def change(
    runtime: Runtime, session: str, *, add: Iterable[str] = (), remove: Iterable[str] = ()
) -> tuple[str, ...]:
    """Let a session be about more, or fewer; whom it is about then."""
    key = keys.session_key(session)
    added, removed = checked(add), checked(remove)
    attempts = Attempts(f"the subjects of session {session!r}")
    while True:
        attempts.begin()
        row = _row(runtime, session, key)
        before = decode(row)
        after = checked([about for about in (*before, *added) if about not in removed])
        if after == before:
            return after
        conditions = [RowIs(*tombstone_key(key), None), RowIs(*keys.subjects(key), row)]
        try:
            runtime.engine.write(
                Write(conditions=conditions, rows=changes(session, key, before, after))
            )
        except ConditionFailedError:
            continue
        return after


def sessions_of(runtime: Runtime, about: str) -> Iterator[str]:
    """The sessions about somebody, those included whose deletion was cut short."""
    start = keys.subject(about)
    for row in scan(runtime.engine, "retention", start, keys.past(start)):
        yield row.value.decode()
