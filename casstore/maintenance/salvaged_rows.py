"""Rows of a damaged store on their way into a new one, and a list of those that stay behind.

A row names what must be there (P3): one whose objects, revision or session are lost is left
out and listed. What the new store has already stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple, Protocol

from casstore.engine.protocol import (
    Condition,
    Engine,
    PutRow,
    Row,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import CasstoreError, ConditionFailedError, CorruptionError
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.roots import ROOTS
from casstore.session import keys, pins, protection, subjects
from casstore.session.records import row_name

# What one write takes into the new store.
_BATCH_ROWS: Final = 2000


class LostRow(NamedTuple):
    """A row that was left out, because what it names is gone."""

    table: str
    session: str | None
    name: str
    why: str


class StrayRow(NamedTuple):
    """A row that was taken over though it may be outdated: nothing else says what it says."""

    table: str
    session: str | None
    name: str


class FoundRows(Protocol):
    """What is left of a store's rows."""

    def rows(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[Row]:
        """The rows of a table in order."""
        ...

    def ranked_rows(
        self, table: str, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[Row, int]]:
        """The same, each with how old the place is where it was found; 0: the newest."""
        ...


class RowTarget:
    """A store that rows go into, and the account of them."""

    def __init__(self, engine: Engine, progress: Progress | None) -> None:
        self.engine = engine
        self._progress = progress
        self.saved = 0
        #: Rows that the target has otherwise, and keeps.
        self.existing = 0
        self.lost: list[LostRow] = []
        self.strays: list[StrayRow] = []

    def has(self, *digests: bytes | None) -> bool:
        """Does the target hold all of these objects?"""
        return not self.engine.missing([digest for digest in digests if digest is not None])

    def lose(self, table: str, session: str | None, name: str, why: str) -> None:
        """Tell that a row was left out."""
        self.lost.append(LostRow(table, session, name, why))

    def put(self, conditions: Sequence[Condition], puts: Iterable[PutRow]) -> None:
        """Write rows, in batches, each under the conditions; what the target has otherwise stays.

        Somebody may have gone on with it there since an earlier try.
        """
        for batch in _batches(puts):
            while not self._put_absent(conditions, batch):
                pass

    def _put_absent(self, conditions: Sequence[Condition], puts: Sequence[PutRow]) -> bool:
        """Write the rows that the target lacks; False if somebody put one there just now."""
        there = self.engine.get_rows([RowKey(put.table, put.key) for put in puts])
        absent = [put for put, known in zip(puts, there, strict=True) if known is None]
        places = [RowIs(put.table, put.key, None) for put in absent]
        try:
            self.write([*conditions, *places], absent)
        except ConditionFailedError as exc:
            if exc.index < len(conditions):
                raise
            return False
        self.existing += sum(
            known not in (None, put.value) for put, known in zip(puts, there, strict=True)
        )
        return True

    def write(self, conditions: Sequence[Condition], puts: Sequence[PutRow]) -> None:
        """Write rows if the conditions hold."""
        if puts:
            self.engine.write(Write(conditions=conditions, rows=puts))
            self.saved += len(puts)
            if self._progress is not None:
                self._progress(Step("rows", self.saved, None, "rows"))


def _batches(puts: Iterable[PutRow]) -> Iterator[list[PutRow]]:
    batch: list[PutRow] = []
    for put in puts:
        batch.append(put)
        if len(batch) >= _BATCH_ROWS:
            yield batch
            batch = []
    yield batch


# --- what belongs to no session -----------------------------------------------------------------


def store_rows(
    table: str, found: FoundRows, target: RowTarget, taken: Mapping[bytes, bool]
) -> Iterator[PutRow]:
    """What is to be carried of a table that belongs to the store as a whole.

    ``taken`` has the keys of the sessions that were found, and whether they were taken over;
    if not, the target has another one.
    """
    if table == "retention":
        return _retention_of_store(found, target, taken)
    if table in ROOTS.tables:
        return _whole_rows(table, found, target)
    return (PutRow(table, *row) for row in found.rows(table))


def _whole_rows(table: str, found: FoundRows, target: RowTarget) -> Iterator[PutRow]:
    """The rows of which everything that they name was saved."""
    name_of = _NAMES[table]
    page: list[tuple[Row, list[bytes]]] = []

    def sorted_out() -> Iterator[PutRow]:
        named = {digest for _, digests in page for digest in digests}
        absent = set(target.engine.missing(list(named)))
        for row, digests in page:
            gone = [digest for digest in digests if digest in absent]
            if gone:
                target.lose(table, None, name_of(row), f"object {gone[0].hex()} is lost")
            else:
                yield PutRow(table, *row)
        page.clear()

    for row in found.rows(table):
        try:
            page.append((row, named_by(table, row)))
        except CorruptionError:
            target.lose(table, None, row.key.hex(), "the row makes no sense")
        if len(page) >= _BATCH_ROWS:
            yield from sorted_out()
    yield from sorted_out()


def named_by(table: str, row: Row) -> list[bytes]:
    """The objects that a row names."""
    return list(ROOTS.named(table, row))


def _pin_name(row: Row) -> str:
    return pins.name_of(row.value)


def _record_name(row: Row) -> str:
    try:
        return row_name(row.key, row.value)
    except (CasstoreError, ValueError):
        # It is spelled as no release spells it; its key finds it all the same.
        return f"record {row.key.hex()}"


_NAMES: Final[dict[str, Callable[[Row], str]]] = {"pins": _pin_name, "records": _record_name}


# --- retention -----------------------------------------------------------------------------------


def retention_of_session(
    found: FoundRows,
    target: RowTarget,
    key: bytes,
    name: str,
    *,
    is_saved: Callable[[int], bool],
    deleted: bool = False,
) -> Iterator[PutRow]:
    """How long a session stays, who protects it, and whom it is about.

    Rows that make no sense go along: a policy or protection that cannot be read keeps
    everything, and must not be taken for none. Of a session that was deleted only what its
    deletion has yet to do.
    """
    for start, stop in keys.retention_rows(key):
        for row, rank in found.ranked_rows("retention", start, stop):
            what = _retention_name(row, key)
            if deleted and not _outlives_session(row, key):
                continue
            revision = _protected(row, key)
            if revision is not None and not is_saved(revision):
                target.lose("retention", name, what, f"revision {revision} is lost")
                continue
            if rank:
                target.strays.append(StrayRow("retention", name, what))
            yield PutRow("retention", *row)
    yield from _subjects_index(found, target, key, name)


def _subjects_index(found: FoundRows, target: RowTarget, key: bytes, name: str) -> Iterator[PutRow]:
    """The rows that find a session by its subjects, made anew from whom it is about."""
    place = keys.subjects(key)
    row = next(found.rows("retention", place.key, place.key + b"\0"), None)
    there = target.engine.get_rows([place])[0]
    if row is not None and there not in (None, row.value):
        return  # about somebody else in the target, which has its own index of them
    try:
        about = subjects.decode(None if row is None else row.value)
    except CorruptionError:
        return
    for one in about:
        yield PutRow(*keys.subject_session(one, key), name.encode())


def _protected(row: Row, key: bytes) -> int | None:
    """The revision that a row protects, if it is a protection."""
    if not row.key.startswith(keys.protections(key)):
        return None
    return keys.protected_revision(row.key)


def _outlives_session(row: Row, key: bytes) -> bool:
    return row.key in (keys.unfinished(key).key, keys.subjects(key).key)


def _retention_name(row: Row, key: bytes) -> str:
    revision = _protected(row, key)
    if revision is not None:
        try:
            by = repr(protection.decode("", row.key, row.value).by)
        except CorruptionError:
            by = "somebody"
        return f"protection of revision {revision} by {by}"
    named = {
        keys.policy(key).key: "policy",
        keys.expiry(key).key: "expiry",
        keys.subjects(key).key: "subjects",
        keys.unfinished(key).key: "unfinished deletion",
    }
    return named.get(row.key, "mark")


def _retention_of_store(
    found: FoundRows, target: RowTarget, taken: Mapping[bytes, bool]
) -> Iterator[PutRow]:
    """The default policy and other rows that belong to no session; and those that lost theirs."""
    first_index, past_index = keys.subjects_index()
    before = found.ranked_rows("retention", b"", first_index)
    # Behind the index stands what only a newer release knows.
    for row, rank in chain(before, found.ranked_rows("retention", past_index)):
        try:
            key = keys.retention_session(row.key)
        except CasstoreError as exc:
            target.lose("retention", None, row.key.hex(), str(exc))
            continue
        if key is None:
            if rank and row.key == keys.policy(None).key:
                target.strays.append(StrayRow("retention", None, "the default policy"))
            yield PutRow("retention", *row)
        elif key not in taken:
            name = keys.session_of(key) or key.hex()
            target.lose("retention", name, _retention_name(row, key), "its session is lost")
    yield from _subjects_from_index(found, target, taken)


def _subjects_from_index(
    found: FoundRows, target: RowTarget, taken: Mapping[bytes, bool]
) -> Iterator[PutRow]:
    """Whom sessions are about of which only the index still says it: erasing must find them."""
    about: dict[bytes, list[str]] = {}
    names: dict[bytes, str] = {}
    for row, rank in found.ranked_rows("retention", *keys.subjects_index()):
        key = keys.retention_session(row.key)
        assert key is not None
        place = keys.subjects(key).key
        if any(found.rows("retention", place, place + b"\0")) or not taken.get(key, True):
            continue
        subject, name = keys.subject_of(row.key), row.value.decode(errors="replace")
        if subject is None or key not in taken:
            why = "its session is lost" if subject else "only the end of its index is left"
            target.lose("retention", name, f"subject {subject or row.key.hex()!r}", why)
            continue
        if rank:
            target.strays.append(StrayRow("retention", name, f"subject {subject!r}"))
        about.setdefault(key, []).append(subject)
        names[key] = name
    for key, found_subjects in about.items():
        for change in subjects.changes(names[key], key, (), tuple(sorted(found_subjects))):
            assert isinstance(change, PutRow)
            yield change
