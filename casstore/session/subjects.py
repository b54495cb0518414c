"""The subjects of a session (the people or things it is about), and an index by subject.

    session          → [subject, …], sorted
    subject, session → the session's id

Both rows are written in one transaction. A fork inherits the subjects of its source unless the
caller names others. The fork's write has a condition on the source's row, so it cannot miss a
subject that is added meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from casstore.engine.protocol import DeleteRow, PutRow, RowChange, RowIs, Write
from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    SessionNotFoundError,
)
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.session import keys
from casstore.session.arguments import list_of
from casstore.session.attempts import transaction
from casstore.session.scanning import scan
from casstore.session.state import Runtime, meta_key, tombstone_key

#: How many subjects a session may have.
MAX_SUBJECTS: Final = 1024


def checked(subjects: Iterable[str]) -> tuple[str, ...]:
    """Subjects sorted, without duplicates; InvalidInputError if one is not valid."""
    wanted = list_of(subjects, "subjects")
    for about in wanted:
        keys.id_bytes(about, "a subject")
    if len(wanted) > MAX_SUBJECTS:
        raise InvalidInputError(f"a session can have at most {MAX_SUBJECTS} subjects")
    return tuple(sorted(set(wanted)))


def decode(row: bytes | None) -> tuple[str, ...]:
    """The subjects in a session's row; empty if there is no row."""
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
    """The changes of rows that replace a session's subjects."""
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
    """The subjects of a session; SessionNotFoundError if it does not exist."""
    return decode(_row(runtime, session, keys.session_key(session)))


def _row(runtime: Runtime, session: str, key: bytes) -> bytes | None:
    head, meta, row = runtime.rows(session, [meta_key(key), keys.subjects(key)])
    if head is None and meta is None:
        raise SessionNotFoundError(session)
    return row


@transaction("the subjects of session {session!r}")
def change(
    runtime: Runtime,
    session: str,
    *,
    add: tuple[str, ...] = (),
    remove: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Add and remove subjects that were ``checked``; returns all subjects of the session."""
    key = keys.session_key(session)
    row = _row(runtime, session, key)
    before = decode(row)
    after = checked([about for about in (*before, *add) if about not in remove])
    if after == before:
        return after
    conditions = [RowIs(*tombstone_key(key), None), RowIs(*keys.subjects(key), row)]
    runtime.engine.write(Write(conditions=conditions, rows=changes(session, key, before, after)))
    return after


def sessions_of(runtime: Runtime, about: str) -> Iterator[str]:
    """The ids of the sessions with a subject, including those whose deletion was interrupted."""
    start = keys.subject(about)
    for row in scan(runtime.engine, "retention", start, keys.past(start)):
        yield row.value.decode()
