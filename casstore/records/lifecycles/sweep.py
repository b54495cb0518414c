"""Removes expired records: a seal takes precedence over a hold, and a hold over the class.

A record expires when it is older than the maximum age of each of its classes. A class without a
maximum age never expires. A sealed record is never removed; a held one not before its hold ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.maintenance.progress import Progress, Step
from casstore.records.lifecycles.annotation import CLASSES, Note
from casstore.records.lifecycles.lifecycles import DEFAULT_CLASS, Lifecycles
from casstore.records.lifecycles.notes import note_now
from casstore.records.lifecycles.references import ROWS, Ref
from casstore.records.lifecycles.removal import HELD, SEALED, Stayed, objection
from casstore.session.arguments import check_count, check_flag, check_kind
from casstore.session.records import Record

#: The most entries of ``RecordSweepReport.stayed``.
LISTED: Final = 100
_PAGE: Final = 256


class RecordSweepReport(NamedTuple):
    """The result of a sweep, or of a dry run."""

    dry_run: bool
    looked_at: int
    swept: int
    #: Expired records that are sealed or held; ``stayed`` lists the first of them.
    sealed: int
    held: int
    stayed: tuple[Stayed, ...]


def sweep(
    life: Lifecycles,
    max_age_ms: Mapping[str, int],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RecordSweepReport:
    """Remove records that are older than their classes allow, unless they changed since read.

    ``max_age_ms`` has the maximum age of each class that expires. An exception raised by
    ``progress`` stops the sweep between two pages.

    >>> from casstore.records.lifecycles.user_data import NewValue
    >>> [old] = life.users.put_many([NewValue("anna", "language", "en", at_ms=0)])
    >>> new = life.users.put("anna", "city", "Ulm")
    >>> sweep(life, {"identity": 30 * 86_400_000}).swept
    1
    >>> list(life.users.names("anna"))
    ['city']
    """
    check_flag(dry_run, "dry_run")
    if not isinstance(max_age_ms, Mapping):
        raise InvalidInputError(
            f"max_age_ms must be a dict by class, got {type(max_age_ms).__name__}"
        )
    for name, age_ms in max_age_ms.items():
        if name not in CLASSES:
            raise InvalidInputError(f"a class in max_age_ms must be one of {CLASSES}, got {name!r}")
        check_count(age_ms, "an age in max_age_ms")
    check_kind(life, "life", Lifecycles)
    looked_at = swept = 0
    kept = {SEALED: 0, HELD: 0}
    stayed: list[Stayed] = []
    for page in _pages(life):
        notes = life.tables.find([life.tables.note(one.ref) for one in page])
        now_ms = life.store.engine.now_ms()
        for (ref, row, written_at_ms), noted in zip(page, notes, strict=True):
            note = note_now(life.tables, noted)
            if not _is_over(ref, written_at_ms, note, max_age_ms, now_ms):
                continue
            stays = objection(ref, note, now_ms)
            if stays is None and not dry_run:
                # Another process may have held, sealed or replaced it since it was read.
                removal = life.remove(ref, only=row)
                stays = removal.stays
                swept += removal.there and stays is None
            elif stays is None:
                swept += 1
            if stays is not None:
                kept[stays.reason] += 1
                stayed += [stays] if len(stayed) < LISTED else []
        looked_at += len(page)
        if progress is not None:
            progress(Step("sweep", looked_at, None, "records"))
    return RecordSweepReport(
        dry_run=dry_run,
        looked_at=looked_at,
        swept=swept,
        sealed=kept[SEALED],
        held=kept[HELD],
        stayed=tuple(stayed),
    )


class _Candidate(NamedTuple):
    """A record as it was read."""

    ref: Ref
    row: bytes
    written_at_ms: int


def _pages(life: Lifecycles) -> Iterator[list[_Candidate]]:
    for kind in ROWS:
        table, _ = life.tables.payload(Ref(kind, "", ""))

        def looked_at(record: Record, kind: str = kind) -> _Candidate:
            return _Candidate(
                Ref(kind, *record.key), record.row, life.tables.written_at_ms(kind, record)
            )

        records = table.read_each(table.scan(), looked_at)
        while page := list(islice(records, _PAGE)):
            yield page


def _is_over(
    ref: Ref, written_at_ms: int, note: Note | None, max_age_ms: Mapping[str, int], now_ms: int
) -> bool:
    classes = note.classes if note is not None else (DEFAULT_CLASS[ref.kind],)
    if not all(each in max_age_ms for each in classes):
        return False
    return now_ms - written_at_ms > max(max_age_ms[each] for each in classes)
