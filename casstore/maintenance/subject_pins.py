"""The revisions of sessions that are about somebody, and the tags and pins on them.

What is erased takes its tags and pins along, also those that came after the plan: once the
session is gone, nobody could tell whose they were. Those of a session that is not about the
subject any more stay with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from casstore.engine.protocol import Condition, DeleteRow, RowIs, RowKey, Write
from casstore.errors import ConditionFailedError, CorruptionError
from casstore.session import keys, pins, subjects
from casstore.session.attempts import Attempts
from casstore.session.heads import HeadRow, decode_head, head_key
from casstore.session.scanning import scan
from casstore.session.state import Runtime, tombstone_key


def revisions_of(runtime: Runtime, key: bytes) -> Iterator[HeadRow]:
    """All revisions of a session, the head first; CorruptionError names a row that is none."""
    [head] = runtime.engine.get_rows([head_key(key)])
    if head is not None:
        yield decode_revision(head_key(key), head)
    for row in scan(runtime.engine, "history", keys.history(key, 0), keys.labels(key)):
        yield decode_revision(RowKey("history", row.key), row.value)


def decode_revision(place: RowKey, row: bytes) -> HeadRow:
    """A row of the heads or the history; if it cannot be read, the error names it."""
    try:
        return decode_head(row)
    except CorruptionError as exc:
        raise CorruptionError(
            f"row {place.key.hex()} of table {place.table} cannot be read: {exc}"
        ) from exc


def unpin(
    runtime: Runtime, subject: str, sessions: Iterable[str], planned: Sequence[tuple[str, str]]
) -> int:
    """Take away what was planned, and what names revisions of these sessions; how many."""
    owners: dict[str, list[bytes]] = {}
    for session in sessions:
        key = keys.session_key(session)
        for manifest in {row.manifest.hex() for row in revisions_of(runtime, key)}:
            owners.setdefault(manifest, []).append(key)
    now = [
        (pin.name, pin.digest.hex())
        for pin in pins.list_pins(runtime, "", expired=True)
        if pin.digest.hex() in owners
    ]
    return sum(
        _unpin(runtime, subject, name, digest, owners.get(digest, []))
        for name, digest in dict.fromkeys((*planned, *now))
    )


def _unpin(runtime: Runtime, subject: str, name: str, digest: str, owners: Sequence[bytes]) -> bool:
    """Take a pin away if it still names what it did, and not only what stays."""
    place = RowKey("pins", keys.part(name, "a name"))
    about = [keys.subjects(key) for key in owners]
    deleted = [tombstone_key(key) for key in owners]
    attempts = Attempts(f"the pin {name!r}")
    while True:
        attempts.begin()
        row, *rows = runtime.engine.get_rows([place, *about, *deleted])
        if row is None or pins.decode(row).digest.hex() != digest:
            return False
        named, gone = rows[: len(about)], rows[len(about) :]
        if owners and not any(
            tombstone is not None or subject in subjects.decode(one)
            for one, tombstone in zip(named, gone, strict=True)
        ):
            return False
        conditions: list[Condition] = [
            RowIs(*place, row),
            *[RowIs(*one, known) for one, known in zip(about, named, strict=True)],
        ]
        try:
            runtime.engine.write(Write(conditions=conditions, rows=[DeleteRow(*place)]))
        except ConditionFailedError:
            continue
        return True
