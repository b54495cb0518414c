"""The revisions of a subject's sessions, and the tags and pins on them.

Erasing a session removes its tags and pins, also the pins on files that a forced restore of a
workspace saved, and those created after the plan: once the session is
deleted, they can no longer be attributed to the subject. A session that no longer has the subject
keeps its tags and pins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from casstore.engine.protocol import Condition, DeleteRow, RowIs, RowKey, Write
from casstore.errors import ConditionFailedError
from casstore.maintenance.rows import decoded
from casstore.session import keys, pins, subjects
from casstore.session.attempts import Attempts
from casstore.session.scanning import scan
from casstore.session.state import HeadRow, Runtime, decode_head, head_key, tombstone_key


def revisions_of(runtime: Runtime, key: bytes) -> Iterator[HeadRow]:
    """All revisions of a session, the head first; CorruptionError names a damaged row."""
    [head] = runtime.engine.get_rows([head_key(key)])
    if head is not None:
        yield decoded(head_key(key), head, decode_head)
    for row in scan(runtime.engine, "history", keys.history(key, 0), keys.labels(key)):
        yield decoded(RowKey("history", row.key), row.value, decode_head)


def unpin(
    runtime: Runtime, subject: str, sessions: Iterable[str], planned: Sequence[tuple[str, str]]
) -> int:
    """Remove the planned pins, and those on revisions of these sessions; returns how many."""
    owners: dict[str, list[bytes]] = {}
    known = {session: keys.session_key(session) for session in sessions}
    for key in known.values():
        for manifest in {row.manifest.hex() for row in revisions_of(runtime, key)}:
            owners.setdefault(manifest, []).append(key)
    now = [
        (pin.name, pin.digest.hex())
        for pin in pins.list_pins(runtime, "", expired=True)
        if pin.digest.hex() in owners or pins.owner_of(pin.name) in known
    ]

    def owners_of(name: str, digest: str) -> list[bytes]:
        owner = pins.owner_of(name)
        saved = [known[owner]] if owner in known else []
        return [*owners.get(digest, ()), *saved]

    return sum(
        _unpin(runtime, subject, name, digest, owners_of(name, digest))
        for name, digest in dict.fromkeys((*planned, *now))
    )


def _unpin(runtime: Runtime, subject: str, name: str, digest: str, owners: Sequence[bytes]) -> bool:
    """Remove a pin if it still names the same object, unless only kept sessions have the object."""
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
