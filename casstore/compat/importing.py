"""How a foreign database moves over: part by part, page by page, then read back and compared.

What the store has already, and equal, is passed over; so an import that was stopped goes on
where it was when it is started again, and one that is repeated does nothing. What the
store has otherwise ends it. A dry run does the same and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from casstore.errors import ConflictError
from casstore.maintenance.progress import Progress, Step
from casstore.session.arguments import check_flag
from casstore.store import Store

#: Whose databases can be moved, and the function (``Import``) that moves one, as ``module:name``.
IMPORTERS: Final[Mapping[str, str]] = {
    "agent-harness": "casstore.compat.agent_harness_import:import_database",
    "langbot": "casstore.compat.langbot:import_database",
    "power-loop": "casstore.compat.power_loop_import:import_database",
    "morrow": "casstore.compat.agent_state_import:import_agent_state",
}


class Source(Protocol):
    """A database that is moved over."""

    @property
    def size_bytes(self) -> int:
        """How much it takes."""
        ...

    def require_unchanged(self) -> None:
        """ConflictError if somebody wrote to it meanwhile, and not all was read of one moment."""
        ...


class Part(Protocol):
    """Rows of one kind in a database, and where they belong in a store."""

    @property
    def name(self) -> str:
        """What they are called: "messages", "approvals" …"""
        ...

    def count(self) -> int:
        """How many there are."""
        ...

    def pages(self) -> Iterator[Sequence[Any]]:
        """All of them in order, as many at a time as one write should hold."""
        ...

    def is_stored(self, page: Sequence[Any]) -> Sequence[bool]:
        """Which of them the store has; ConflictError, naming the row, if with other content."""
        ...

    def store(self, rows: Sequence[Any]) -> None:
        """Put them into the store, in one write."""
        ...


class LeftBehind:
    """Rows that stay behind (a ``Part``): told, and nothing else."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._number = number

    def count(self) -> int:
        """How many there are."""
        return self._number

    def pages(self) -> Iterator[Sequence[int]]:
        """All of them, as mere numbers."""
        if self._number:
            yield range(self._number)

    def is_stored(self, page: Sequence[int]) -> Sequence[bool]:
        """There is nothing to do for them."""
        return [True] * len(page)

    def store(self, rows: Sequence[int]) -> None:
        """They are not stored."""
        raise AssertionError("nothing of this is ever missing")


class Import(Protocol):
    """A function that moves a database over."""

    def __call__(
        self,
        store: Store,
        file: str,
        /,
        *,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ImportReport:
        """Move it; see ``move``."""
        ...


class PartReport(NamedTuple):
    """What became of one kind of rows."""

    name: str
    #: In the source.
    found: int
    #: Moved now, or that would be; the others were in the store already.
    imported: int


class ImportReport(NamedTuple):
    """What an import did, or would do. Sizes in bytes; None if the engine does not tell."""

    dry_run: bool
    parts: tuple[PartReport, ...]
    source_bytes: int
    store_bytes_before: int | None
    store_bytes: int | None

    @property
    def imported(self) -> int:
        """All rows moved now."""
        return sum(part.imported for part in self.parts)


@runtime_checkable
class _Measured(Protocol):
    """An engine that knows how much it takes."""

    def used_bytes(self) -> int:
        """The bytes in use."""
        ...


def used_bytes(store: Store) -> int | None:
    """How much a store takes; None if its engine does not tell."""
    engine = store.engine
    return engine.used_bytes() if isinstance(engine, _Measured) else None


def move(
    source: Source,
    store: Store,
    parts: Sequence[Part],
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Move all parts in the order given, then compare every row with the source.

    Raising from ``progress`` stops it between two pages; the next call goes on from there.
    ConflictError if a row is in the store with other content.
    """
    check_flag(dry_run, "whether nothing is written")
    before = used_bytes(store)
    reports = [_copy(part, dry_run, progress) for part in parts]
    if not dry_run:
        for part, report in zip(parts, reports, strict=True):
            _verify(part, report.found, progress)
    source.require_unchanged()
    return ImportReport(dry_run, tuple(reports), source.size_bytes, before, used_bytes(store))


def _copy(part: Part, dry_run: bool, progress: Progress | None) -> PartReport:
    total, done, imported = part.count(), 0, 0
    for page in part.pages():
        stored = part.is_stored(page)
        missing = [row for row, there in zip(page, stored, strict=True) if not there]
        if missing and not dry_run:
            part.store(missing)
        done += len(page)
        imported += len(missing)
        if progress is not None:
            progress(Step("look" if dry_run else "copy", done, total, part.name))
    return PartReport(part.name, done, imported)


def _verify(part: Part, total: int, progress: Progress | None) -> None:
    done = 0
    for page in part.pages():
        if not all(part.is_stored(page)):
            raise ConflictError(f"some {part.name} were changed or deleted in the midst of it")
        done += len(page)
        if progress is not None:
            progress(Step("verify", done, total, part.name))
