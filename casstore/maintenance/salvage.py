"""Salvage: every session that can still be proven, out of a damaged store into a new one.

The damaged file is never given to LMDB, which may die of it, and never written to. What is
taken over was proven: objects by their digests, rows by their checksums. A revision counts
only whole; a session stands in the new store at its newest whole revision. What could not
be taken over is listed by name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import casstore.store
from casstore.engine.id_set import IdSet
from casstore.engine.lmdb.excavation import NEWEST, Excavation, LostRows, Marked, require_data_file
from casstore.engine.paths import path_text
from casstore.engine.protocol import (
    NewObject,
    ObjectsExist,
    PutRow,
    Row,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import (
    CasstoreError,
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
)
from casstore.format.digest import Digest
from casstore.format.hashing import Kind
from casstore.format.manifest import decode_manifest
from casstore.maintenance.carried import OF_SESSIONS, OF_THE_STORE
from casstore.maintenance.directories import require_directory
from casstore.maintenance.graph_proof import rebuild_node_index
from casstore.maintenance.loss_naming import LostPiece, name_losses
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.roots import ROOTS
from casstore.maintenance.salvaged_rows import (
    LostRow,
    RowTarget,
    StrayRow,
    named_by,
    retention_of_session,
    store_rows,
)
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import attachments, keys, queue
from casstore.session.heads import HeadRow, decode_head, encode_head
from casstore.session.receipts import SettledReceipt, decode_receipt
from casstore.session.scanning import scan
from casstore.store import Store

# What one write takes into the new store.
_BATCH_OBJECTS: Final = 512
_BATCH_BYTES: Final = 4 << 20
# How many lost revisions, and lost pieces, are listed of one session.
_LISTED: Final = 20

WHOLE: Final = "whole"
PARTIAL: Final = "partial"
LOST: Final = "lost"
DELETED: Final = "deleted"
EXISTS: Final = "exists"


class SalvagedSession(NamedTuple):
    """What became of one session.

    ``outcome``: ``whole`` (at its head, with every revision), ``partial`` (an earlier revision
    is the head now, or revisions before it are missing), ``lost`` (no revision is whole),
    ``deleted`` (it was, and stays so), ``exists`` (the target has another one of this id,
    which was left as it is).
    """

    session: str
    outcome: str
    #: The revision that it stands at in the target, and in the source.
    revision: int | None
    head_revision: int | None
    revisions_saved: int
    #: Revisions that are not whole: the newest of them, and how many.
    revisions_lost: tuple[int, ...]
    revisions_lost_count: int
    #: What its newest revision lacks.
    lost: tuple[LostPiece, ...]
    #: Some of its rows were found in pages that nothing leads to, and may be outdated.
    from_strays: bool


class SalvageReport(NamedTuple):
    """What salvage took over, and what it did not."""

    source: str
    sessions: tuple[SalvagedSession, ...]
    objects_saved: int
    #: Objects that some row reaches and that are damaged or gone, or lack a part.
    objects_lost: int
    rows_saved: int
    rows_lost: tuple[LostRow, ...]
    #: Policies, protections and the like that were taken over though they may be outdated.
    rows_from_strays: tuple[StrayRow, ...]
    #: Rows that the target has otherwise, and queues: they were left as they are. Those of a
    #: session that is there with its head are not counted.
    rows_existing: int
    #: Where rows may be missing of which not even the name is known.
    gaps: tuple[LostRows, ...]
    dictionaries_lost: tuple[int, ...]
    #: Slabs and rows that were found in pages to which no tree leads.
    stray_slabs: int
    stray_rows: int

    @property
    def complete(self) -> bool:
        """Was everything taken over?"""
        return not (self.rows_lost or self.gaps or self.objects_lost) and all(
            one.outcome in (WHOLE, DELETED, EXISTS) for one in self.sessions
        )

    def outcomes(self, outcome: str) -> tuple[str, ...]:
        """The ids of the sessions that came out in this way."""
        return tuple([one.session for one in self.sessions if one.outcome == outcome])


def salvage(
    source: str | os.PathLike[str],
    target: Store | str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> SalvageReport:
    """Copy all that can be proven of the store at ``source`` into ``target``.

    ``target`` is a store, or where to open or create one; it may hold sessions already, and
    those stay as they are. Repeating is harmless. Nobody may write to the source meanwhile.

    >>> store.close()
    >>> report = salvage(place / "store", other)
    >>> report.complete, report.outcomes("whole")
    (True, ('s',))
    """
    place = require_directory(
        source,
        "salvage",
        "restore the server's backup, or copy what can be read: casstore copy",
    )
    if isinstance(target, Store):
        return _Salvage(place, target, progress).run()
    into = path_text(target)
    if not casstore.store.is_server(into):
        _require_apart(place, into)
    # Before a target is made for nothing.
    require_data_file(place)
    with casstore.store.open(target) as opened:
        return _Salvage(place, opened, progress).run()


def _require_apart(source: str, target: str) -> None:
    inner, outer = os.path.realpath(target), os.path.realpath(source)
    if os.path.commonpath([inner, outer]) == outer:
        raise InvalidInputError(
            f"the target {target} lies in the damaged store {source}; choose another place"
        )


class _Revision(NamedTuple):
    row: Row
    head: HeadRow
    rank: int


class _Salvage:
    def __init__(self, source: str, target: Store, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._progress = progress
        held = getattr(target.engine, "path", None)
        if isinstance(held, str):
            _require_apart(source, held)
        self._objects_saved = 0
        self._incomplete = 0
        self._rows = RowTarget(target.engine, progress)

    def _tell(self, phase: str, done: int, total: int | None, unit: str) -> None:
        if self._progress is not None:
            self._progress(Step(phase, done, total, unit))

    def run(self) -> SalvageReport:
        with Excavation(
            self._source, lambda done, total: self._tell("dig", done, total, "pages")
        ) as found:
            marked = found.mark(self._roots(found))
            left = self._copy_objects(found, marked.ids)
            if left and self._rebuild_indexes(found, marked):
                self._copy_objects(found, left)
            sessions = {
                key: self._copy_session(found, marked, key) for key in self._session_keys(found)
            }
            taken = {key: one.outcome != EXISTS for key, one in sessions.items()}
            for table in OF_THE_STORE:
                self._rows.put([], store_rows(table, found, self._rows, taken))
            return SalvageReport(
                self._source,
                tuple(sessions.values()),
                self._objects_saved,
                self._incomplete,
                self._rows.saved,
                tuple(self._rows.lost),
                tuple(self._rows.strays),
                self._rows.existing,
                tuple(found.lost_rows()),
                tuple(found.lost_dictionaries()),
                found.stray_slabs,
                found.stray_rows,
            )

    # --- objects --------------------------------------------------------------------------

    def _roots(self, found: Excavation) -> Iterator[bytes]:
        """Every digest that a row names; rows that make no sense name nothing."""
        for table in ROOTS.tables:
            for row in found.rows(table):
                try:
                    yield from named_by(table, row)
                except CorruptionError:
                    continue

    def _copy_objects(self, found: Excavation, ids: IdSet | list[int]) -> list[int]:
        """Store what is whole, children before parents; again while that helps others.

        Usually once is enough: a child's id is lower. Only where an object is lost, and
        was stored a second time later, its parents have to wait for that one. Returns the ids
        of the objects that are not whole.
        """
        todo: Iterable[int] = ids
        total = len(ids)
        while True:
            saved = self._objects_saved
            left: list[int] = []
            batch: list[tuple[int, NewObject]] = []
            size_bytes = 0
            for done, object_id in enumerate(todo):
                item = found.find(object_id)
                if isinstance(item, str):
                    left.append(object_id)
                    continue
                batch.append((object_id, found.arriving(object_id, item)))
                size_bytes += len(item.data)
                if len(batch) >= _BATCH_OBJECTS or size_bytes >= _BATCH_BYTES:
                    left += self._store(batch)
                    batch, size_bytes = [], 0
                    self._tell("copy", done, total, "objects")
            left += self._store(batch)
            self._incomplete = len(left)
            if not left or self._objects_saved == saved:
                return left
            todo = sorted(left)

    def _rebuild_indexes(self, found: Excavation, marked: Marked) -> int:
        """Make the lost parts of node indexes again from the nodes; how many manifests need that.

        An index follows from its nodes, so what is made here has the digests that the manifest
        names.
        """
        rebuilt = 0
        for digest, object_id in marked.places.items():
            item = found.find(object_id)
            if isinstance(item, str) or item.kind != Kind.MANIFEST or self._rows.has(digest):
                continue
            writer = PieceWriter()
            reader = PendingReader(self._target.engine, writer)
            try:
                manifest = decode_manifest(digest, item.data)
                tail = rebuild_node_index(reader, digest, manifest, writer.emit)
            except CasstoreError:
                # Nodes are lost, too.
                continue
            if tail == manifest.node_index:
                rebuilt += 1
                writer.flush(self._target.engine)
        return rebuilt

    def _store(self, batch: list[tuple[int, NewObject]]) -> list[int]:
        """Store those whose parts are all there; the ids of the others."""
        own = {item.digest for _, item in batch}
        asked = {child for _, item in batch for child in item.children if child not in own}
        absent = set(self._target.engine.missing(list(asked)))
        whole: list[NewObject] = []
        there: set[bytes] = set()
        left: list[int] = []
        for object_id, item in batch:
            if any(child in absent or (child in own and child not in there)
                   for child in item.children):  # fmt: skip
                left.append(object_id)
                continue
            there.add(item.digest)
            whole.append(item)
        if whole:
            self._target.engine.write(Write(objects=whole))
            self._objects_saved += len(whole)
        return left

    # --- sessions -------------------------------------------------------------------------

    def _session_keys(self, found: Excavation) -> Iterator[bytes]:
        """The keys of all sessions that any row speaks of, in order."""
        seen: set[bytes] = set()
        for table in OF_SESSIONS:
            start = b""
            while True:
                row = next(found.rows(table, start), None)
                if row is None:
                    break
                key = keys.session_part(row.key)
                seen.add(key)
                start = keys.past(key)
        yield from sorted(seen)

    def _copy_session(self, found: Excavation, marked: Marked, key: bytes) -> SalvagedSession:
        stop = keys.past(key)
        heads = list(_ranked(found, "heads", key, key + b"\1"))
        history = list(_ranked(found, "history", keys.history(key, 0), keys.labels(key)))
        revisions = {one.head.revision: one for one in (*history, *heads)}
        newest = revisions[max(revisions)] if revisions else None
        name = _session_name(found, key, newest)
        tombstone = next(found.rows("tombstones", key, key + b"\1"), None)
        strays = any(one.rank > NEWEST for one in revisions.values())
        if tombstone is not None:
            outcome = self._put_deletion(found, key, stop, name, tombstone)
            return SalvagedSession(name, outcome, None, None, 0, (), 0, (), from_strays=False)
        whole = [
            one for one in sorted(revisions.values(), key=lambda one: one.head.revision)
            if self._rows.has(one.head.manifest)
        ]  # fmt: skip
        broken = sorted(
            (revision for revision, one in revisions.items() if one not in whole), reverse=True
        )
        pieces: list[LostPiece] = []
        if broken:
            lacking = revisions[broken[0]].head
            pieces = name_losses(
                found,
                marked.places.get(lacking.manifest),
                lacking.manifest,
                lacking.revision,
                self._rows.has,
            )
        outcome = self._put_session(found, key, stop, name, newest, whole, pieces)
        if outcome not in (EXISTS, LOST) and (broken or pieces or (whole and not heads)):
            outcome = PARTIAL
        return SalvagedSession(
            name,
            outcome,
            whole[-1].head.revision if whole else None,
            None if newest is None else newest.head.revision,
            len(whole),
            tuple(broken[:_LISTED]),
            len(broken),
            tuple(pieces[:_LISTED]),
            strays,
        )

    def _put_deletion(
        self, found: Excavation, key: bytes, stop: bytes, name: str, tombstone: Row
    ) -> str:
        """A session that was deleted stays so, unless the target has one of this id."""
        places = [RowKey(table, key) for table in ("tombstones", "heads", "sessions")]
        deleted, *there = self._target.engine.get_rows(places)
        if any(row is not None for row in there):
            return EXISTS
        rows = [
            *self._attachment_rows(found, key, stop, name),
            *self._retention_rows(found, key, name, frozenset(), deleted=True),
        ]
        if deleted is not None:
            # The tombstone came last, and what is left of the session may be tidied up since.
            return DELETED
        nobody = [RowIs(*place, None) for place in places[1:]]
        try:
            self._rows.put(nobody, [*rows, PutRow("tombstones", *tombstone)])
        except ConditionFailedError:
            return EXISTS
        return DELETED

    def _put_session(
        self,
        found: Excavation,
        key: bytes,
        stop: bytes,
        name: str,
        newest: _Revision | None,
        whole: Sequence[_Revision],
        pieces: list[LostPiece],
    ) -> str:
        head = None
        if whole and newest is not None:
            head = self._head_row(whole[-1], newest, pieces)
        there = self._target.engine.get_rows([RowKey("heads", key), RowKey("tombstones", key)])
        if there[1] is not None or (there[0] is not None and there[0] != head):
            return EXISTS
        rows = self._session_rows(found, key, stop, name, whole)
        if there[0] is not None:
            # The head came last, and since then others may have leased, queued and renamed here.
            # What is lost is told all the same.
            for _ in rows:
                pass
            return WHOLE
        nobody = [RowIs("tombstones", key, None), RowIs("heads", key, None)]
        try:
            self._rows.put(nobody, rows)
            if head is not None:
                manifest = ObjectsExist([whole[-1].head.manifest])
                self._rows.write([*nobody, manifest], [PutRow("heads", key, head)])
        except (ConditionFailedError, ObjectNotFoundError):
            # Somebody else uses the target: theirs counts.
            return EXISTS
        if head is None and (newest is not None or any(found.rows("receipts", key, stop))):
            return LOST
        return WHOLE

    def _head_row(self, chosen: _Revision, newest: _Revision, pieces: list[LostPiece]) -> bytes:
        """The row of the revision chosen, hiding what the newest hides."""
        hidden = newest.head.hidden
        if hidden is not None and not self._rows.has(hidden):
            pieces.append(
                LostPiece(newest.head.revision, "the map of hidden nodes", Digest(hidden),
                          "nodes that were hidden may be seen again")
            )  # fmt: skip
            hidden = chosen.head.hidden
            if hidden is not None and not self._rows.has(hidden):
                hidden = None
        if hidden == chosen.head.hidden:
            return chosen.row.value
        return encode_head(chosen.head._replace(hidden=hidden))

    def _session_rows(
        self,
        found: Excavation,
        key: bytes,
        stop: bytes,
        name: str,
        whole: Sequence[_Revision],
    ) -> Iterator[PutRow]:
        """All rows of a session but its head."""
        saved = {one.head.revision for one in whole}
        for one in whole[:-1]:
            value = one.row.value
            if one.head.hidden is not None and not self._rows.has(one.head.hidden):
                value = encode_head(one.head._replace(hidden=None))
            yield PutRow("history", keys.history(key, one.head.revision), value)
        for row in found.rows("history", keys.labels(key), stop):
            revision = int.from_bytes(row.value[:8], "big")
            if revision in saved:
                yield PutRow("history", *row)
            else:
                label = row.value[8:].decode(errors="replace")
                self._rows.lose("history", name, f"label {label!r}", f"revision {revision} is lost")
        for table in ("sessions", "leases"):
            for row in found.rows(table, key, key + b"\1"):
                yield PutRow(table, *row)
        newest = max(saved) if saved else 0
        for row in found.rows("receipts", key, stop):
            # A turn whose outcome is lost may be taken again.
            try:
                receipt = decode_receipt(row.value)
            except CorruptionError as exc:
                self._rows.lose("receipts", name, row.key.hex(), str(exc))
                continue
            settled = isinstance(receipt, SettledReceipt)
            if receipt.revision <= newest and (settled or self._rows.has(receipt.manifest)):
                yield PutRow("receipts", *row)
            else:
                turn = keys.after_session(row.key).decode(errors="replace")
                why = f"revision {receipt.revision} is lost"
                self._rows.lose("receipts", name, f"turn {turn!r}", why)
        yield from self._queue_rows(found, key, stop, name)
        yield from self._attachment_rows(found, key, stop, name)
        yield from self._retention_rows(found, key, name, saved)

    def _queue_rows(
        self, found: Excavation, key: bytes, stop: bytes, name: str
    ) -> Iterator[PutRow]:
        last = 0
        rows: list[PutRow] = []
        for row in found.rows("queue", key, stop):
            if not keys.is_queue_batch(row.key):
                if row.key == keys.queue_counter(key).key:
                    last = max(last, int.from_bytes(row.value[:8], "big"))
                continue
            seq = int.from_bytes(row.key[-8:], "big")
            last = max(last, seq)
            digest = _queued(row)
            if digest is None or not self._rows.has(digest):
                self._rows.lose("queue", name, f"batch {seq}", "its items are lost")
                continue
            rows.append(PutRow("queue", *row))
            # Rows that only find batches are made anew.
            rows += queue.put_names(key, row.key, row.value)
        if last:
            rows.append(PutRow(*keys.queue_counter(key), last.to_bytes(8, "big")))
        there = set(scan(self._target.engine, "queue", key, stop))
        if there <= {Row(put.key, put.value) for put in rows}:
            yield from rows
        else:
            # A queue of its own, or one that went on: of two, the numbers would be mixed up.
            self._rows.existing += 1

    def _attachment_rows(
        self, found: Excavation, key: bytes, stop: bytes, name: str
    ) -> Iterator[PutRow]:
        for row in found.rows("attachments", key, stop):
            try:
                one = attachments.decode(name, row.value)
            except CorruptionError as exc:
                self._rows.lose("attachments", name, row.key.hex(), str(exc))
                continue
            if one.digest is None or self._rows.has(one.digest):
                yield PutRow("attachments", *row)
            else:
                self._rows.lose("attachments", name, f"attachment {one.id!r}", "its bytes are lost")

    def _retention_rows(
        self,
        found: Excavation,
        key: bytes,
        name: str,
        saved: Collection[int],
        *,
        deleted: bool = False,
    ) -> Iterator[PutRow]:
        return retention_of_session(
            found, self._rows, key, name, is_saved=saved.__contains__, deleted=deleted
        )


# --- rows of the source, which prove that they were written, not that they make sense --------


def _decoded_head(row: Row) -> HeadRow | None:
    try:
        return decode_head(row.value)
    except CorruptionError:
        return None


def _ranked(found: Excavation, table: str, start: bytes, stop: bytes) -> Iterator[_Revision]:
    for row, rank in found.ranked_rows(table, start, stop):
        head = _decoded_head(row)
        if head is not None:
            yield _Revision(row, head, rank)


def _queued(row: Row) -> bytes | None:
    try:
        return queue.items_digest(row.key, row.value)
    except CorruptionError:
        return None


def _session_name(found: Excavation, key: bytes, newest: _Revision | None) -> str:
    """The id of a session; its key in hexadecimal if no row has it whole."""
    name = keys.session_of(key)
    if name is None and newest is not None:
        name = newest.head.long_id
    return key.hex() if name is None else name
