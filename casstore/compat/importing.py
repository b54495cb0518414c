"""The framework of all importers: compare, write, read back, report.

An importer opens its source, checks that it can read it, and describes it as parts. A part lists
units; a unit is what one step moves: a page of rows, a thread, a session. ``run`` does the rest.

- A unit that the store holds with equal content is not written. So a repeated import changes
  nothing, and an import that was stopped or killed continues where it was.
- If the store holds a row with other content, the unit raises ConflictError and writes nothing.
- After the last write, ``run`` reads every unit back and compares it with the source.
- A dry run makes the same comparisons, writes nothing, and reports what the real run would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from casstore.errors import ConflictError
from casstore.maintenance.progress import Progress, Step
from casstore.session.arguments import check_flag
from casstore.store import Store

Row = TypeVar("Row")

#: The most rows, and about the most bytes, that one write holds. An interruption loses one write.
PAGE_ROWS: Final = 256
PAGE_BYTES: Final = 4 << 20

#: What an import did to a session, or would do.
IMPORTED: Final = "imported"
UPDATED: Final = "updated"
UNCHANGED: Final = "unchanged"

# A note names at most this many examples.
_MAX_EXAMPLES: Final = 100


# --- the report ---------------------------------------------------------------------------------


class PartReport(NamedTuple):
    """How many rows of one kind were read and written."""

    name: str
    #: Rows in the source.
    found: int
    #: Rows that the store lacked, and that were written now, or would be.
    imported: int = 0
    #: Rows that the store held in an earlier state, and that were brought up to date.
    updated: int = 0


class ImportNote(NamedTuple):
    """Rows that were left out, or are stored in another form."""

    what: str
    number: int
    #: The first of them, by name.
    examples: tuple[str, ...] = ()


class ImportedSession(NamedTuple):
    """A session of a source, and the result of its import."""

    session: str
    #: ``imported``, ``updated`` or ``unchanged``.
    outcome: str
    #: The file it was read from.
    source: str


class ImportReport(NamedTuple):
    """The result of an import, or the expected result from a dry run."""

    kind: str
    #: A path, or the address of a server without user and password.
    source: str
    dry_run: bool
    parts: tuple[PartReport, ...]
    #: Empty if the source holds records, which belong to no session.
    sessions: tuple[ImportedSession, ...]
    notes: tuple[ImportNote, ...]
    source_bytes: int
    #: None: the engine does not know its size.
    store_bytes_before: int | None
    store_bytes: int | None

    @property
    def imported(self) -> int:
        """The rows of all parts that were written, or would be."""
        return sum(part.imported + part.updated for part in self.parts)

    def part(self, name: str) -> PartReport:
        """The part of that name; one without rows if the source has no such part."""
        return next((part for part in self.parts if part.name == name), PartReport(name, 0))

    def note(self, what: str) -> ImportNote:
        """The note with these words; one with the number 0 if it does not exist."""
        return next((note for note in self.notes if note.what == what), ImportNote(what, 0))


class Notes:
    """Collects notes: counts them by what they say, and keeps the first examples."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, what: str, example: str | None = None, number: int = 1) -> None:
        """Count ``number`` more rows under the note ``what``."""
        self._numbers[what] += number
        examples = self._examples.setdefault(what, [])
        if example is not None and len(examples) < _MAX_EXAMPLES:
            examples.append(example)

    def extend(self, notes: Iterable[ImportNote]) -> None:
        """Add notes that were collected elsewhere."""
        for what, number, examples in notes:
            self.add(what, number=number)
            known = self._examples[what]
            known += examples[: _MAX_EXAMPLES - len(known)]

    def all(self) -> tuple[ImportNote, ...]:
        """All notes, in the order of their first occurrence."""
        found = self._examples.items()
        return tuple([ImportNote(what, self._numbers[what], tuple(named)) for what, named in found])


def combined(
    kind: str,
    source: str,
    dry_run: bool,
    reports: Sequence[ImportReport],
    notes: Sequence[ImportNote],
) -> ImportReport:
    """One report of several imports in a row, such as those of all files in a directory."""
    all_notes = Notes()
    all_notes.extend(notes)
    for report in reports:
        all_notes.extend(report.notes)
    return ImportReport(
        kind=kind,
        source=source,
        dry_run=dry_run,
        parts=_summed(part for report in reports for part in report.parts),
        sessions=tuple([session for report in reports for session in report.sessions]),
        notes=all_notes.all(),
        source_bytes=sum(report.source_bytes for report in reports),
        store_bytes_before=reports[0].store_bytes_before if reports else None,
        store_bytes=reports[-1].store_bytes if reports else None,
    )


def _summed(parts: Iterable[PartReport]) -> tuple[PartReport, ...]:
    """The parts added up by name, in the order of first occurrence."""
    sums: dict[str, PartReport] = {}
    for name, *numbers in parts:
        known = sums.get(name, PartReport(name, 0))
        sums[name] = PartReport(name, *map(sum, zip(known[1:], numbers, strict=True)))
    return tuple(sums.values())


# --- what an importer provides ------------------------------------------------------------------


class Source(Protocol):
    """A file or a server that an import reads."""

    @property
    def name(self) -> str:
        """The path or address, without user and password."""
        ...

    @property
    def size_bytes(self) -> int:
        """The bytes that the source takes."""
        ...

    def require_unchanged(self) -> None:
        """Raise ConflictError if the source changed while it was read."""
        ...


#: Called by a unit that takes several writes, with the rows of each.
Wrote = Callable[[int], None]


class Unit(ABC):
    """The rows that one step of an import moves."""

    #: What this unit adds to the ``count`` of its part, usually its number of rows.
    size: int = 1

    @abstractmethod
    def compare(self) -> Sequence[PartReport]:
        """Compare the unit with the store, and count what the store lacks.

        Raises ConflictError, naming the row, if the store holds it with other content. Converts
        what it would write, so that a dry run finds what cannot be converted.
        """

    @abstractmethod
    def write(self, wrote: Wrote) -> None:
        """Write what ``compare`` found missing."""

    def session(self) -> ImportedSession | None:
        """The session that this unit belongs to; called after ``compare``."""
        return None


class Part(ABC):
    """Units of one kind, in the order in which they are written."""

    #: What ``count`` and the progress count: "messages", "checkpoints" …
    name: str

    @abstractmethod
    def count(self) -> int:
        """The sum of the sizes of all units."""

    @abstractmethod
    def units(self) -> Iterator[Unit]:
        """All units; ``run`` calls this twice, to write and to read back."""

    def notes(self) -> Sequence[ImportNote]:
        """Notes about what the units left out or changed; called after the first pass."""
        return ()


class Presence(Enum):
    """Whether the store holds a row of the source."""

    MISSING = "missing"
    EQUAL = "equal"
    #: In an earlier state, which may be replaced.
    OUTDATED = "outdated"


class RowPart(Part, Generic[Row]):
    """Independent rows of one kind: a unit is a page of them."""

    @abstractmethod
    def pages(self) -> Iterator[Sequence[Row]]:
        """All rows, converted, in pages of bounded size (``paged``)."""

    @abstractmethod
    def look(self, page: Sequence[Row]) -> Sequence[Presence]:
        """Whether the store holds each row; ConflictError if it holds one with other content."""

    @abstractmethod
    def store(self, rows: Sequence[Row]) -> None:
        """Write rows of the page that was looked at last, in one transaction."""

    def session_of(self, page: Sequence[Row]) -> str | None:
        """The id of the session that is complete with this page; None if no session is."""
        return None

    def units(self) -> Iterator[Unit]:
        """The pages."""
        return (_PageUnit(self, page) for page in self.pages())


class _PageUnit(Unit):
    """A page of rows."""

    def __init__(self, part: RowPart[Any], rows: Sequence[Any]) -> None:
        self._part = part
        self._rows = rows
        self._found: Sequence[Presence] = ()
        self.size = len(rows)

    def compare(self) -> Sequence[PartReport]:
        self._found = self._part.look(self._rows)
        tally = Counter(self._found)
        return [
            PartReport(
                self._part.name,
                len(self._rows),
                tally[Presence.MISSING],
                tally[Presence.OUTDATED],
            )
        ]

    def write(self, wrote: Wrote) -> None:
        found = zip(self._rows, self._found, strict=True)
        self._part.store([row for row, presence in found if presence is not Presence.EQUAL])

    def session(self) -> ImportedSession | None:
        session = self._part.session_of(self._rows)
        if session is None:
            return None
        is_there = all(presence is Presence.EQUAL for presence in self._found)
        return ImportedSession(session, UNCHANGED if is_there else IMPORTED, "")


def other_content(what: str) -> ConflictError:
    """The error if the store holds ``what``, a row of the source, with other content."""
    return ConflictError(f"the store holds {what} with other content; import into another store")


def presence(is_there: Iterable[bool]) -> list[Presence]:
    """EQUAL for True, MISSING for False."""
    return [Presence.EQUAL if one else Presence.MISSING for one in is_there]


def paged(rows: Iterable[Row], size_of: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Rows in pages of at most PAGE_ROWS rows, which end when they reach PAGE_BYTES."""
    page: list[Row] = []
    size = 0
    for row in rows:
        page.append(row)
        size += size_of(row)
        if len(page) >= PAGE_ROWS or size >= PAGE_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


def columns_bytes(row: Sequence[Any]) -> int:
    """About the bytes of a database row: its texts and blobs."""
    return sum([len(value) for value in row if isinstance(value, str | bytes)])


# --- running ------------------------------------------------------------------------------------


@runtime_checkable
class _SizedEngine(Protocol):
    """An engine that can report its size."""

    def used_bytes(self) -> int:
        """The bytes in use."""
        ...


def used_bytes(store: Store) -> int | None:
    """The bytes that a store takes; None if its engine does not know."""
    engine = store.engine
    return engine.used_bytes() if isinstance(engine, _SizedEngine) else None


def run(
    kind: str,
    source: Source,
    store: Store,
    parts: Sequence[Part],
    *,
    notes: Iterable[ImportNote] = (),
    dry_run: bool = False,
    overlay: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import all parts in the order given, then read every unit back and compare it.

    Raising from ``progress`` stops the import between two writes; the next call continues.
    ``overlay`` says that ``store`` keeps its writes in memory. A dry run then writes to it, because
    units may depend on earlier ones.
    """
    check_flag(dry_run, "dry_run")
    before = used_bytes(store)
    work = _ImportRun(source.name, writes=overlay or not dry_run, progress=progress)
    noted = Notes()
    for part in parts:
        work.copy(part, "look" if dry_run else "copy")
        noted.extend(part.notes())
    if not dry_run:
        for part in parts:
            work.verify(part)
    noted.extend(notes)
    source.require_unchanged()
    return ImportReport(
        kind=kind,
        source=source.name,
        dry_run=dry_run,
        parts=_summed(work.tallies),
        sessions=tuple(work.sessions.values()),
        notes=noted.all(),
        source_bytes=source.size_bytes,
        store_bytes_before=before,
        store_bytes=used_bytes(store),
    )


class _ImportRun:
    """One import under way."""

    def __init__(self, source: str, *, writes: bool, progress: Progress | None) -> None:
        self._source = source
        self._writes = writes
        self._progress = progress
        self.tallies: tuple[PartReport, ...] = ()
        self.sessions: dict[str, ImportedSession] = {}

    def copy(self, part: Part, phase: str) -> None:
        """Compare every unit, and write what the store lacks."""
        total, done = part.count(), 0
        # A part without rows is in the report as well.
        self.tallies += (PartReport(part.name, 0),)

        def tell(rows: int) -> None:
            if self._progress is not None:
                self._progress(Step(phase, min(done + rows, total), total, part.name))

        for unit in part.units():
            found = unit.compare()
            if self._writes and _lacks(found):
                written = 0

                def wrote(rows: int) -> None:
                    nonlocal written
                    written += rows
                    tell(written)

                unit.write(wrote)
            self.tallies = _summed((*self.tallies, *found))
            session = unit.session()
            if session is not None:
                place = session.source or self._source
                self.sessions[session.session] = session._replace(source=place)
            tell(unit.size)
            done += unit.size

    def verify(self, part: Part) -> None:
        """Read every unit back; ConflictError if the store lacks a row of it."""
        total, done = part.count(), 0
        for unit in part.units():
            if _lacks(unit.compare()):
                session = unit.session()
                place = "" if session is None else f" of session {session.session!r}"
                raise ConflictError(
                    f"another process changed or deleted some of the {part.name}{place} during the "
                    "import; import again"
                )
            done += unit.size
            if self._progress is not None:
                self._progress(Step("verify", min(done, total), total, part.name))


def _lacks(found: Iterable[PartReport]) -> bool:
    return any(part.imported or part.updated for part in found)
