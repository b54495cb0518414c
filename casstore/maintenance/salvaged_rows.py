"""Selects the rows of a damaged store that a new one can take, and lists those that it cannot.

A row names what must be there (P3): a row whose objects, revision or session are lost is left out
and listed. The target's own rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple, Protocol, TypeVar

from casstore.engine.protocol import Engine, PutRow, Row, RowIs, RowKey
from casstore.errors import CasstoreError, CorruptionError
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.roots import ROOTS, kept_name
from casstore.maintenance.transfer import publish
from casstore.maintenance.transfer.publish import Arriving
from casstore.maintenance.transfer.rows import CARRIED, label_revision
from casstore.session import keys, protection, queue, subjects
from casstore.session.scanning import scan
from casstore.session.state import HeadRow
from casstore.session.turns import SettledReceipt, decode_receipt

# The most rows of no session in one write to the new store.
_BATCH_ROWS: Final = 2000
_SEQ_BYTES: Final = 8
_Item = TypeVar("_Item")


class LostRow(NamedTuple):
    """A row that was left out, because what it names is gone."""

    table: str
    session: str | None
    name: str
    why: str


class StrayRow(NamedTuple):
    """A row that was taken over though it may be outdated: no newer one was found."""

    table: str
    session: str | None
    name: str


class RowSource(Protocol):
    """What is left of a store's rows."""

    def rows(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[Row]:
        """The rows of a table in order."""
        ...

    def ranked_rows(
        self, table: str, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[Row, int]]:
        """The same, each with the age of the page where it was found; 0: the newest."""
        ...


class RowTarget:
    """The target store, with counts and lists of the rows that were written, kept and lost."""

    def __init__(self, engine: Engine, progress: Progress | None) -> None:
        self.engine = engine
        self._report = Phase(progress, "rows", "rows")
        self.saved = 0
        #: Rows that the target has with another value, and keeps.
        self.existing = 0
        self.lost: list[LostRow] = []
        self.strays: list[StrayRow] = []

    def has(self, *digests: bytes | None) -> bool:
        """Whether the target holds all of these objects."""
        return not self.engine.missing([digest for digest in digests if digest is not None])

    def without_lost_map(self, row: HeadRow) -> HeadRow:
        """The revision without its map of hidden nodes if the target lacks that."""
        return row if self.has(row.hidden) else row._replace(hidden=None)

    def lose(self, table: str, session: str | None, name: str, why: str) -> None:
        """List a row that is left out."""
        self.lost.append(LostRow(table, session, name, why))

    def put_session(self, arriving: Arriving, name: str, unless: Sequence[RowKey]) -> bool:
        """Write what the target lacks of a session; False if it has one of the rows ``unless``."""

        def attempt(there: list[bytes | None]) -> bool:
            if any(row is not None for row in there):
                return False
            found = publish.plan(self.engine, arriving, None, keeps=CARRIED)
            if found.rows:
                unseen = [RowIs(*place, None) for place in unless]
                publish.write(self.engine, found.rows, [*found.conditions, *unseen], found.named)
            self._count(len(found.rows), found.kept)
            return True

        return publish.settle(
            f"session {name!r}", lambda: self.engine.get_rows(list(unless)), attempt
        )

    def put(self, puts: Iterable[PutRow]) -> None:
        """Write the rows of no session that the target lacks."""
        for batch in _batches(puts):
            self._put(batch)

    def _put(self, puts: list[PutRow]) -> None:
        publish.settle(
            "the salvaged rows",
            lambda: list(publish.changed(self.engine, puts)),
            self._put_absent,
        )

    def _put_absent(self, differing: list[tuple[PutRow, bytes | None]]) -> None:
        absent = [put for put, row in differing if row is None]
        if absent:
            unseen = [RowIs(put.table, put.key, None) for put in absent]
            publish.write(self.engine, absent, unseen, publish.named_by(absent))
        self._count(len(absent), len(differing) - len(absent))

    def _count(self, written: int, kept: int) -> None:
        self.saved += written
        self.existing += kept
        if written:
            self._report(self.saved)

    def whole_rows(self, table: str, rows: Iterable[Row], session: str | None) -> Iterator[PutRow]:
        """The rows that can be read and whose objects were saved; lists the others as lost."""
        for page in _batches(rows):
            named: dict[Row, list[bytes]] = {}
            for row in page:
                try:
                    named[row] = list(ROOTS.named(table, row))
                except CorruptionError as exc:
                    self.lose(table, session, _name_or_key(table, row), str(exc))
            asked = {digest for digests in named.values() for digest in digests}
            absent = set(self.engine.missing(list(asked)))
            for row, digests in named.items():
                gone = [digest for digest in digests if digest in absent]
                if gone:
                    why = f"object {gone[0].hex()} is lost"
                    self.lose(table, session, _name_or_key(table, row), why)
                else:
                    yield PutRow(table, *row)


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    ahead = iter(items)
    while batch := list(islice(ahead, _BATCH_ROWS)):
        yield batch


def _name_or_key(table: str, row: Row) -> str:
    try:
        return kept_name(table, row)
    except (CasstoreError, ValueError):
        # The row cannot be read; its key finds it all the same.
        return row.key.hex()


# --- rows of a session --------------------------------------------------------------------------


class FoundRevision(NamedTuple):
    """A revision that was found, and the age of the page where it was found."""

    head: HeadRow
    rank: int


class SessionRemains(NamedTuple):
    """The rows that were found of one session, and the target that they are copied to."""

    found: RowSource
    target: RowTarget
    key: bytes
    name: str

    def rows(self, table: str) -> Iterator[Row]:
        """The rows that belong to the session in a table that is keyed by session."""
        return self.found.rows(table, self.key, keys.past(self.key))

    def arriving(self, revisions: Sequence[HeadRow]) -> Arriving:
        """The session at these revisions, of which the last is the head, with all its other rows.

        Lists the rows that are lost.
        """
        saved = {row.revision for row in revisions}
        return Arriving(self.key, revisions, list(self._labels(saved)), list(self._others(saved)))

    def deleted(self, tombstone: Row) -> Arriving:
        """The deleted session: its tombstone, and what its unfinished deletion needs."""
        rows = [*self._attachments(), *self._retention((), deleted=True)]
        return Arriving(self.key, (), (), [*rows, PutRow("tombstones", *tombstone)])

    def _others(self, saved: Collection[int]) -> Iterator[PutRow]:
        """The rows other than revisions and labels that go with these revisions."""
        for table in ("sessions", "leases"):
            for row in self.found.rows(table, self.key, self.key + b"\1"):
                yield PutRow(table, *row)
        yield from self._receipts(max(saved, default=0))
        yield from self._queue()
        yield from self._attachments()
        yield from self._retention(saved)

    def _labels(self, saved: Collection[int]) -> Iterator[PutRow]:
        for row in self.found.rows("history", keys.labels(self.key), keys.past(self.key)):
            revision = label_revision(row.value)
            if revision in saved:
                yield PutRow("history", *row)
            else:
                label = row.value[_SEQ_BYTES:].decode(errors="replace")
                self._lose("history", f"label {label!r}", f"revision {revision} is lost")

    def _receipts(self, newest: int) -> Iterator[PutRow]:
        """The receipts of turns whose revision is saved; other turns can be committed again."""
        for row in self.rows("receipts"):
            try:
                receipt = decode_receipt(row.value)
            except CorruptionError as exc:
                self._lose("receipts", row.key.hex(), str(exc))
                continue
            settled = isinstance(receipt, SettledReceipt)
            if receipt.revision <= newest and (settled or self.target.has(receipt.manifest)):
                yield PutRow("receipts", *row)
            else:
                turn = keys.after_session(row.key).decode(errors="replace")
                self._lose("receipts", f"turn {turn!r}", f"revision {receipt.revision} is lost")

    def _queue(self) -> Iterator[PutRow]:
        """The batches, and the rows by which they are found, rebuilt from them.

        Nothing if the target has a queue with other rows: batches of both may have the same
        numbers.
        """
        last = 0
        batches: list[Row] = []
        for row in self.rows("queue"):
            if keys.is_queue_batch(row.key):
                last = max(last, int.from_bytes(row.key[-_SEQ_BYTES:], "big"))
                batches.append(row)
            elif row.key == keys.queue_counter(self.key).key:
                last = max(last, int.from_bytes(row.value[:_SEQ_BYTES], "big"))
        whole = self.target.whole_rows("queue", batches, self.name)
        puts = [
            put
            for batch in whole
            for put in (batch, *queue.put_names(self.key, batch.key, batch.value))
        ]
        if last:
            puts.append(PutRow(*keys.queue_counter(self.key), last.to_bytes(_SEQ_BYTES, "big")))
        there = set(scan(self.target.engine, "queue", self.key, keys.past(self.key)))
        if there <= {Row(put.key, put.value) for put in puts}:
            yield from puts
        else:
            self.target.existing += 1

    def _attachments(self) -> Iterator[PutRow]:
        """The attachments whose bytes were saved, or lie outside the store."""
        return self.target.whole_rows("attachments", self.rows("attachments"), self.name)

    def _retention(self, saved: Collection[int], *, deleted: bool = False) -> Iterator[PutRow]:
        """The policy, expiry, protections and subjects of the session.

        Rows that cannot be read are copied: such a policy or protection keeps everything.
        ``deleted``: only the rows that the session's unfinished deletion needs.
        """
        key = self.key
        for start, stop in keys.retention_rows(key):
            for row, rank in self.found.ranked_rows("retention", start, stop):
                what = _retention_name(row, key)
                if deleted and not _outlives_session(row, key):
                    continue
                revision = _protected(row, key)
                if revision is not None and revision not in saved:
                    self._lose("retention", what, f"revision {revision} is lost")
                    continue
                if rank:
                    self.target.strays.append(StrayRow("retention", self.name, what))
                yield PutRow("retention", *row)
        yield from self._subjects_index()

    def _subjects_index(self) -> Iterator[PutRow]:
        """The rows that find the session by its subjects, rebuilt from its subjects."""
        place = keys.subjects(self.key)
        row = next(self.found.rows("retention", place.key, place.key + b"\0"), None)
        there = self.target.engine.get_rows([place])[0]
        if row is not None and there not in (None, row.value):
            return  # the target has other subjects for it, with an index of their own
        try:
            about = subjects.decode(None if row is None else row.value)
        except CorruptionError:
            return
        for one in about:
            yield PutRow(*keys.subject_session(one, self.key), self.name.encode())

    def _lose(self, table: str, name: str, why: str) -> None:
        self.target.lose(table, self.name, name, why)


# --- rows of the store --------------------------------------------------------------------------


def store_rows(
    table: str, found: RowSource, target: RowTarget, taken: Mapping[bytes, bool]
) -> Iterator[PutRow]:
    """The rows to copy of a table that belongs to the store as a whole.

    ``taken`` has the keys of the sessions that were found, and whether they were taken over;
    if not, the target has another session of that id.
    """
    if table == "retention":
        return _retention_of_store(found, target, taken)
    return target.whole_rows(table, found.rows(table), None)


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
            by = "an unknown owner"
        return f"protection of revision {revision} by {by}"
    named = {
        keys.policy(key).key: "policy",
        keys.expiry(key).key: "expiry",
        keys.subjects(key).key: "subjects",
        keys.unfinished(key).key: "unfinished deletion",
    }
    return named.get(row.key, "mark")


def _retention_of_store(
    found: RowSource, target: RowTarget, taken: Mapping[bytes, bool]
) -> Iterator[PutRow]:
    """The default policy and other rows of no session; lists the rows whose session is lost."""
    first_index, past_index = keys.subjects_index()
    before = found.ranked_rows("retention", b"", first_index)
    # Kinds of rows that only a newer release knows sort behind the index.
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
    found: RowSource, target: RowTarget, taken: Mapping[bytes, bool]
) -> Iterator[PutRow]:
    """The subjects of sessions of which only the index is left: erasing must find them."""
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
