"""Everything of one store into another, whatever engines they have: only what is lacking.

The source may be in use. Each session is copied as of one moment: its head is read first,
what came before it does not change, and in the target the head is written last. Queued work
is copied before the sessions and attachments after them, so that what a commit does in
between is done twice in the copy rather than not at all. Whatever a row names is stored
before the row (P3). Stopped anywhere, the copy is sound and goes on when it is called again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import (
    DeleteRow,
    Engine,
    ObjectsExist,
    PutRow,
    Row,
    RowChange,
    RowKey,
    Write,
)
from casstore.errors import (
    BusyError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    SessionDeletedError,
    SessionDivergedError,
    SessionNotFoundError,
)
from casstore.maintenance.carried import CARRIED
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.roots import ROOTS
from casstore.maintenance.sending import Sender, StoreTarget
from casstore.objects import graph
from casstore.session import keys
from casstore.session.heads import LINEAGE_BYTES, HeadRow, decode_head, head_key
from casstore.session.lineage import decode_base, decode_page, encode_page, read_seq
from casstore.session.receipts import decode_receipt
from casstore.session.scanning import scan
from casstore.session.state import Runtime, tombstone_key
from casstore.store import Store

_PAGE: Final = 256
_MAX_ATTEMPTS: Final = 8
# What belongs to a session beside its head, and goes with it.
_OF_SESSIONS: Final = ("history", "queue", "receipts")
# What goes with a session wherever it goes.
_KNOWN_OF_SESSIONS: Final = ("sessions", "attachments")
# Copied for each session by itself.
_WITH_HEADS: Final = ("heads", "history", "nodes", "receipts")
_BEFORE_HEADS: Final = ("queue",)
_AFTER_HEADS: Final = tuple(
    sorted(set(CARRIED) - {*_WITH_HEADS, *_BEFORE_HEADS, "tombstones"}),
)


class CopyReport(NamedTuple):
    """What a copy did."""

    #: Sessions that are new in the target, or have moved.
    sessions: int
    #: Objects that the target lacked, and their bytes before compression.
    new_objects: int
    object_bytes: int
    #: Rows written, and rows removed because the source has them no more.
    rows: int
    rows_removed: int


def copy(
    source: Store,
    target: Store,
    *,
    sessions: Collection[str] | None = None,
    mirror: bool = False,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy all sessions, pins, tags and other rows, and all that they name.

    Every object is proven on its way. Where the target has a row of its own under the same key,
    the source's takes its place; but a session that is not an earlier state of the source's
    stops the copy with SessionDivergedError, or SessionDeletedError. With ``mirror`` rows that the
    source does not have are removed; gc gives back what only they kept.

    ``sessions`` names those to copy, and nothing else: their revisions, labels, receipts,
    attachments and what is known of them. Leases and queued work stay where the work is done, as
    do pins, retention and records. SessionNotFoundError if one of them is not there.
    """
    if source.engine is target.engine:
        raise InvalidInputError("a store cannot be copied onto itself")
    if mirror and sessions is not None:
        raise InvalidInputError("a mirror has everything; choose sessions or mirror")
    work = _Copying(source, target, progress)
    if sessions is not None:
        work.copy_chosen(sessions)
        return work.report()
    for table in _BEFORE_HEADS:
        work.copy_table(table)
    work.copy_sessions()
    work.copy_deletions()
    for table in _AFTER_HEADS:
        work.copy_table(table)
    if mirror:
        for table in ("heads", *[name for name in CARRIED if name != "heads"]):
            work.remove_strange(table)
    return work.report()


class _Copying:
    """One copy on its way."""

    def __init__(self, source: Store, target: Store, progress: Progress | None) -> None:
        self._runtime = Runtime(source)
        self._source: Engine = source.engine
        self._target: Engine = target.engine
        self._progress = progress
        self._objects = StoreTarget(self._target)
        self._sender = Sender(
            self._runtime.reader(), self._objects.lacking, self._objects.take, progress
        )
        # Up to which number the nodes of a lineage were copied.
        self._lineages: dict[bytes, int] = {}
        self._sessions = 0
        self._rows = 0
        self._removed = 0

    def report(self) -> CopyReport:
        """What was done so far."""
        return CopyReport(
            self._sessions,
            self._objects.new_objects,
            self._sender.object_bytes,
            self._rows,
            self._removed,
        )

    # --- tables --------------------------------------------------------------------------------

    def copy_table(self, table: str, start: bytes = b"", stop: bytes | None = None) -> None:
        """Copy the rows of a table, or of a part of it, as they are, after what they name."""
        while True:
            page = self._page(table, start, stop)
            if page:
                start = page[-1].key + b"\0"
            if len(page) < _PAGE:
                return

    def _page(self, table: str, start: bytes, stop: bytes | None) -> list[Row]:
        for _ in range(_MAX_ATTEMPTS):
            page = self._source.scan_rows(table, start=start, stop=stop, limit=_PAGE)
            try:
                self._put(table, page, self._named(table, page))
            except ObjectNotFoundError:
                # A row went away and what it kept was collected, before it could be copied.
                continue
            return page
        raise self._busy(f"rows of {table}")

    def _named(self, table: str, rows: Iterable[Row]) -> list[bytes]:
        if table not in ROOTS.tables:
            return []
        now_ms = self._source.now_ms()
        return [name for row in rows for name in ROOTS.named(table, row, now_ms)]

    def _put(self, table: str, rows: Sequence[Row], named: Sequence[bytes]) -> None:
        """Write those rows that are not in the target already."""
        there = self._target.get_rows([RowKey(table, row.key) for row in rows]) if rows else []
        changed = [row for row, known in zip(rows, there, strict=True) if row.value != known]
        if not changed:
            return
        self._sender.send(named)
        self._objects.flush()
        self._write(
            [PutRow(table, row.key, row.value) for row in changed],
            named,
        )

    def _write(self, changes: Sequence[RowChange], named: Sequence[bytes] = ()) -> None:
        conditions = [ObjectsExist(sorted(set(named)))] if named else []
        self._target.write(Write(conditions=conditions, rows=changes))
        self._rows += len(changes)

    # --- sessions ------------------------------------------------------------------------------

    def copy_sessions(self) -> None:
        """Copy every session that has a head."""
        for row in scan(self._source, "heads", b"", None):
            self._copy_session(row.key)
            self._tell_sessions()

    def copy_chosen(self, sessions: Collection[str]) -> None:
        """Copy these sessions, and nothing that belongs to others or to where they run."""
        chosen = {name: keys.session_key(name) for name in sessions}
        places = [RowKey(table, key) for key in chosen.values() for table in ("heads", "sessions")]
        there = self._source.get_rows(places) if places else []
        for at, name in enumerate(chosen):
            if there[2 * at] is None and there[2 * at + 1] is None:
                raise SessionNotFoundError(name)
        for key in chosen.values():
            self._copy_session(key)
            for table in _KNOWN_OF_SESSIONS:
                self.copy_table(table, key, keys.past(key))
            self._tell_sessions()

    def _tell_sessions(self) -> None:
        if self._progress is not None:
            self._progress(Step("sessions", self._sessions, None, "sessions"))

    def _copy_session(self, key: bytes) -> None:
        for _ in range(_MAX_ATTEMPTS):
            head = self._source.get_rows([head_key(key)])[0]
            if head is None:
                return  # deleted since it was listed
            try:
                self._copy_state(key, head)
            except ObjectNotFoundError:
                continue
            except CorruptionError:
                # Damage, unless it was deleted and collected in the middle.
                if self._source.get_rows([head_key(key)])[0] == head:
                    raise
                continue
            return
        raise self._busy(f"session {keys.session_of(key)!r}")

    def _copy_state(self, key: bytes, head: bytes) -> None:
        row = decode_head(head)
        there, deleted = self._target.get_rows([head_key(key), tombstone_key(key)])
        if deleted is not None:
            raise SessionDeletedError(self._name(key, row))
        if there != head:
            first = self._require_ancestor(key, row, there)
            low, high = keys.history(key, first), keys.history(key, row.revision)
            revisions = list(scan(self._source, "history", low, high))
            self._copy_objects(head, revisions)
            self._copy_lineages([*[decode_head(one.value) for one in revisions], row])
            for start in range(0, len(revisions), _PAGE):
                page = revisions[start : start + _PAGE]
                self._put("history", page, self._named("history", page))
            self._copy_receipts(key, row.revision)
            self._write([PutRow(*head_key(key), head)], self._named("heads", [Row(key, head)]))
            self._sessions += 1
        labels = [
            label
            for label in scan(self._source, "history", keys.labels(key), keys.past(key))
            if int.from_bytes(label.value[:8], "big") <= row.revision
        ]
        self._put("history", labels, ())

    def _require_ancestor(self, key: bytes, row: HeadRow, there: bytes | None) -> int:
        """From which revision on history is to be copied."""
        if there is None:
            return 0
        known = decode_head(there)
        same: HeadRow | None = row if known.revision == row.revision else None
        if known.revision < row.revision:
            place = RowKey("history", keys.history(key, known.revision))
            found = self._source.get_rows([place])[0]
            same = None if found is None else decode_head(found)
        if same is None or same.manifest != known.manifest:
            raise SessionDivergedError(
                self._name(key, row), "is not an earlier state of the one that is copied"
            )
        return known.revision

    def _copy_objects(self, head: bytes, revisions: Sequence[Row]) -> None:
        state = self._runtime.decode(head)
        chain = self._runtime.chain(state)
        # Nodes from the oldest on, so that the walk never has far to go.
        self._sender.send(place.digest for place in chain.places(chain.seqs()))
        self._sender.send(self._named("history", revisions))
        self._sender.send(self._named("heads", [Row(b"", head)]))
        self._objects.flush()

    def _copy_receipts(self, key: bytes, revision: int) -> None:
        batch: list[Row] = []
        for receipt in scan(self._source, "receipts", key, keys.past(key)):
            if decode_receipt(receipt.value).revision <= revision:
                batch.append(receipt)
            if len(batch) == _PAGE:
                self._put("receipts", batch, ())
                batch = []
        self._put("receipts", batch, ())

    # --- the node table ------------------------------------------------------------------------

    def _copy_lineages(self, rows: Sequence[HeadRow]) -> None:
        """Copy what the node table says of these revisions, and no more than that.

        Nodes that were appended since must not come along: in the target others may get
        their numbers.
        """
        # A lineage only grows, so the last revision on it has all of it.
        for row in {row.lineage: row for row in rows}.values():
            manifest = graph.read_manifest(self._runtime.reader(), row.manifest)
            self._copy_lineage(row.lineage, manifest.next_seq)
            base = row.base
            while base is not None:
                if not self._copy_lineage(base.lineage, base.limit):
                    break
                place = RowKey("nodes", keys.lineage_row(base.lineage))
                found = self._source.get_rows([place])[0]
                base = None if found is None else decode_base(found)

    def _copy_lineage(self, lineage: bytes, limit: int) -> bool:
        """Copy the nodes below ``limit``; False if that was done before."""
        if self._lineages.get(lineage, -1) >= limit:
            return False
        self._lineages[lineage] = limit
        batch: list[Row] = []
        for row in _below(scan(self._source, "nodes", lineage, _past(lineage)), limit):
            batch.append(row)
            if len(batch) == _PAGE:
                self._put_nodes(batch)
                batch = []
        self._put_nodes(batch)
        return True

    def _put_nodes(self, rows: Sequence[Row]) -> None:
        there = self._target.get_rows([RowKey("nodes", row.key) for row in rows]) if rows else []
        changes = [
            PutRow("nodes", row.key, row.value)
            for row, known in zip(rows, there, strict=True)
            if row.value != known and not _is_longer(row.key, known, row.value)
        ]
        if changes:
            self._write(changes)

    # --- what is gone --------------------------------------------------------------------------

    def copy_deletions(self) -> None:
        """Delete in the target the sessions that were deleted in the source."""
        for row in scan(self._source, "tombstones", b"", None):
            place = RowKey("tombstones", row.key)
            if self._target.get_rows([place])[0] == row.value:
                continue
            gone = [DeleteRow(table, row.key) for table in ("heads", "sessions", "leases")]
            self._write([PutRow(*place, row.value), *gone])
            for table in (*_OF_SESSIONS, "attachments"):
                self._remove(table, scan(self._target, table, row.key, keys.past(row.key)))

    def remove_strange(self, table: str) -> None:
        """Remove the target's rows that the source does not have."""
        self._remove(table, self._strange(table))

    def _strange(self, table: str) -> Iterator[Row]:
        start = b""
        while True:
            page = self._target.scan_rows(table, start=start, limit=_PAGE)
            places = [RowKey(table, row.key) for row in page]
            there = self._source.get_rows(places) if places else []
            yield from [row for row, known in zip(page, there, strict=True) if known is None]
            if len(page) < _PAGE:
                return
            start = page[-1].key + b"\0"

    def _remove(self, table: str, rows: Iterator[Row]) -> None:
        batch: list[RowChange] = []
        for row in rows:
            batch.append(DeleteRow(table, row.key))
            if len(batch) == _PAGE:
                self._target.write(Write(rows=batch))
                self._removed += len(batch)
                batch = []
        if batch:
            self._target.write(Write(rows=batch))
            self._removed += len(batch)

    @staticmethod
    def _name(key: bytes, row: HeadRow) -> str:
        return row.long_id or keys.session_of(key) or ""

    @staticmethod
    def _busy(what: str) -> BusyError:
        return BusyError(f"{what} kept changing while being copied; try again")


def _past(lineage: bytes) -> bytes | None:
    """The first key behind those of a lineage; None if there is none."""
    number = int.from_bytes(lineage, "big") + 1
    return None if number >> (8 * LINEAGE_BYTES) else number.to_bytes(LINEAGE_BYTES, "big")


def _below(rows: Iterable[Row], limit: int) -> Iterator[Row]:
    """The rows of a lineage that say something of nodes below ``limit``, and say no more."""
    for row in rows:
        if keys.is_lineage_page(row.key):
            page = decode_page(row.value).below(limit)
            if page.distances:
                yield Row(row.key, encode_page(page))
        elif not keys.is_lineage_node(row.key) or read_seq(row.value) < limit:
            yield row


def _is_longer(key: bytes, known: bytes | None, value: bytes) -> bool:
    """Does the target list more nodes in this page already?"""
    if known is None or not keys.is_lineage_page(key):
        return False
    return len(decode_page(known).distances) > len(decode_page(value).distances)
