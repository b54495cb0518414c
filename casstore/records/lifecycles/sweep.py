"""Sweeping records whose class lets them go: first the seal counts, then the hold, then the class.

A record goes once it is older than every one of its classes allows. A class without an age
keeps for good. What is sealed never goes; what is held goes after the end of its hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.maintenance.progress import Progress, Step
from casstore.records.lifecycles.annotation import CLASSES, Note
from casstore.records.lifecycles.lifecycles import DEFAULT_CLASS, Lifecycles
from casstore.records.lifecycles.notes import HELD, SEALED, Stayed, note_now, objection
from casstore.records.lifecycles.references import ROWS, Ref
from casstore.records.lifecycles.tables import fields
from casstore.session.arguments import check_count, check_flag
from casstore.session.records import Record

#: How many records that stayed a report lists.
LISTED: Final = 100
_PAGE: Final = 256


class SweepReport(NamedTuple):
    """What a sweep did, or would do."""

    dry_run: bool
    looked_at: int
    swept: int
    #: Old enough to go, and sealed or held; the first of them.
    sealed: int
    held: int
    stayed: tuple[Stayed, ...]


def sweep(
    life: Lifecycles,
    max_age_ms: Mapping[str, int],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SweepReport:
    """Remove records that are older than their classes allow, each as it was looked at.

    ``max_age_ms`` has an age for each class that lets anything go. Raising from ``progress``
    stops between two pages.

    >>> from casstore.records.lifecycles.user_data import NewValue
    >>> [old] = life.users.put_many([NewValue("anna", "language", "en", at_ms=0)])
    >>> new = life.users.put("anna", "city", "Ulm")
    >>> sweep(life, {"identity": 30 * 86_400_000}).swept
    1
    >>> list(life.users.names("anna"))
    ['city']
    """
    check_flag(dry_run, "whether nothing is removed")
    if not isinstance(max_age_ms, Mapping):
        raise InvalidInputError(f"ages are a dict by class, not {type(max_age_ms).__name__}")
    for name, age_ms in max_age_ms.items():
        if name not in CLASSES:
            raise InvalidInputError(f"a class is one of {CLASSES}, not {name!r}")
        check_count(age_ms, "an age")
    if not isinstance(life, Lifecycles):
        raise InvalidInputError(f"what is swept is Lifecycles, not {type(life).__name__}")
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
                # Somebody may have held, sealed or replaced it just now.
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
    return SweepReport(dry_run, looked_at, swept, kept[SEALED], kept[HELD], tuple(stayed))


class _Candidate(NamedTuple):
    """A record as it was looked at."""

    ref: Ref
    row: bytes
    written_at_ms: int


def _pages(life: Lifecycles) -> Iterator[list[_Candidate]]:
    for kind in ROWS:
        table, _ = life.tables.payload(Ref(kind, "", ""))

        def looked_at(record: Record, kind: str = kind) -> _Candidate:
            return _Candidate(Ref(kind, *record.key), record.row, int(fields(record)["t"]))

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
