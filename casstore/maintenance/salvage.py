"""``salvage``: every session that can still be proven, out of a damaged store into a new one.

The damaged file is never opened with LMDB, which may crash on it, and never written to. Only what
is proven is taken over: objects by their digests, rows by their checksums. A revision is taken over
whole or not at all; a session is in the new store at its newest whole revision. What could not be
taken over is listed by name.

Reading is salvage's own: objects are found by the ids of the damaged store, and every row may be
lost by itself. What is proven is written as ``maintenance.transfer`` describes: its objects first,
then the rows of a session in one write.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import casstore.store
from casstore.engine.files import path_text
from casstore.engine.id_set import IdSet
from casstore.engine.lmdb.page_scan import NEWEST, LostRows, Marked, PageScan, require_data_file
from casstore.engine.protocol import NewObject, Row
from casstore.errors import CasstoreError, CorruptionError, InvalidInputError
from casstore.format.digest import Digest, Kind
from casstore.format.graph import decode_manifest
from casstore.maintenance.files import require_directory
from casstore.maintenance.graph_proof import rebuild_node_index
from casstore.maintenance.loss_naming import LostPiece, name_losses
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.roots import ROOTS
from casstore.maintenance.salvaged_rows import (
    FoundRevision,
    LostRow,
    RowTarget,
    SessionRemains,
    StrayRow,
    store_rows,
)
from casstore.maintenance.transfer.objects import StoreTarget
from casstore.maintenance.transfer.rows import OF_SESSIONS, OF_THE_STORE
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import keys
from casstore.session.state import (
    HeadRow,
    decode_head,
    encode_head,
    head_key,
    meta_key,
    tombstone_key,
)
from casstore.store import Store

# The most objects and bytes that are looked up at once in the new store.
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
    ``deleted`` (it was deleted, and stays so), ``exists`` (the target has another session of this
    id, which was left as it is).

    Attributes:
        session: the session
        revision: its revision in the new store
        head_revision: its revision in the damaged store
        revisions_saved: revisions saved
        revisions_lost: the newest revisions that are not whole
        revisions_lost_count: revisions lost
        lost: what its newest incomplete revision lacks
        from_strays: true: some of its rows may be outdated: no table refers to their pages
    """

    session: str
    outcome: str
    revision: int | None
    head_revision: int | None
    revisions_saved: int
    revisions_lost: tuple[int, ...]
    revisions_lost_count: int
    lost: tuple[LostPiece, ...]
    from_strays: bool


class SalvageReport(NamedTuple):
    """What salvage took over, and what it did not.

    Attributes:
        source: the damaged store
        sessions: the outcome for each session
        objects_saved: objects copied
        objects_lost: objects that a row reaches and that are lost, or lack a part
        rows_saved: rows copied
        rows_lost: rows left out, and why
        rows_from_strays: policies, protections and similar rows that may be outdated
        rows_existing: rows that the target has with other content, and queues, left unchanged; not
            those of a session whose head the target has
        gaps: damaged parts of tables, in which rows with unknown names may be missing
        dictionaries_lost: compression dictionaries that are lost
        stray_slabs: slabs found in pages that no tree links to
        stray_rows: rows found in such pages
    """

    source: str
    sessions: tuple[SalvagedSession, ...]
    objects_saved: int
    objects_lost: int
    rows_saved: int
    rows_lost: tuple[LostRow, ...]
    rows_from_strays: tuple[StrayRow, ...]
    rows_existing: int
    gaps: tuple[LostRows, ...]
    dictionaries_lost: tuple[int, ...]
    stray_slabs: int
    stray_rows: int

    @property
    def complete(self) -> bool:
        """Whether everything was taken over."""
        return not (self.rows_lost or self.gaps or self.objects_lost) and all(
            one.outcome in (WHOLE, DELETED, EXISTS) for one in self.sessions
        )

    def outcomes(self, outcome: str) -> tuple[str, ...]:
        """The ids of the sessions with this outcome."""
        return tuple([one.session for one in self.sessions if one.outcome == outcome])


def salvage(
    source: str | os.PathLike[str],
    target: Store | str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> SalvageReport:
    """Copy all that can be proven of the store at ``source`` into ``target``.

    ``target`` is a store, or where to open or create one; it may hold sessions already, and
    those stay as they are. Repeating is harmless. No process may write to the source meanwhile.

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
    # Raises if the source has no data file, before the target is created.
    require_data_file(place)
    with casstore.store.open(target) as opened:
        return _Salvage(place, opened, progress).run()


def _require_apart(source: str, target: str) -> None:
    inner, outer = os.path.realpath(target), os.path.realpath(source)
    if os.path.commonpath([inner, outer]) == outer:
        raise InvalidInputError(
            f"the target {target} lies in the damaged store {source}; choose another place"
        )


class _Salvage:
    """One call of ``salvage``."""

    def __init__(self, source: str, target: Store, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._progress = progress
        held = getattr(target.engine, "path", None)
        if isinstance(held, str):
            _require_apart(source, held)
        self._objects = StoreTarget(target.engine)
        self._objects_saved = 0
        self._incomplete = 0
        self._rows = RowTarget(target.engine, progress)

    def run(self) -> SalvageReport:
        with PageScan(self._source, Phase(self._progress, "read", "pages")) as found:
            marked = found.mark(self._roots(found))
            left = self._copy_objects(found, marked.ids)
            if left and self._rebuild_indexes(found, marked):
                self._copy_objects(found, left)
            sessions = {
                key: self._copy_session(found, marked, key) for key in self._session_keys(found)
            }
            taken = {key: one.outcome != EXISTS for key, one in sessions.items()}
            for table in OF_THE_STORE:
                self._rows.put(store_rows(table, found, self._rows, taken))
            return SalvageReport(
                source=self._source,
                sessions=tuple(sessions.values()),
                objects_saved=self._objects_saved,
                objects_lost=self._incomplete,
                rows_saved=self._rows.saved,
                rows_lost=tuple(self._rows.lost),
                rows_from_strays=tuple(self._rows.strays),
                rows_existing=self._rows.existing,
                gaps=tuple(found.lost_rows()),
                dictionaries_lost=tuple(found.lost_dictionaries()),
                stray_slabs=found.stray_slabs,
                stray_rows=found.stray_rows,
            )

    # --- objects --------------------------------------------------------------------------

    def _roots(self, found: PageScan) -> Iterator[bytes]:
        """Every digest that a row names; rows that cannot be read name nothing."""
        for table in ROOTS.tables:
            for row in found.rows(table):
                try:
                    yield from ROOTS.named(table, row)
                except CorruptionError:
                    continue

    def _copy_objects(self, found: PageScan, ids: IdSet | list[int]) -> list[int]:
        """Store the objects that are whole with all they link to; returns the ids of the others.

        Children come before parents, as a child's id is lower, so one pass is usually enough. But
        an object that is lost may have been stored again, under a higher id than its parents have:
        the next pass stores these.
        """
        report = Phase(self._progress, "copy", "objects")
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
                    report(done, total)
            left += self._store(batch)
            self._objects.flush()
            self._incomplete = len(left)
            if not left or self._objects_saved == saved:
                return left
            todo = sorted(left)

    def _rebuild_indexes(self, found: PageScan, marked: Marked) -> int:
        """Rebuild the lost parts of node indexes from the nodes; the number of manifests repaired.

        An index follows from its nodes, so the rebuilt parts have the digests that the manifest
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
                # Nodes are lost as well.
                continue
            if tail == manifest.node_index:
                rebuilt += 1
                writer.flush(self._target.engine)
        return rebuilt

    def _store(self, batch: list[tuple[int, NewObject]]) -> list[int]:
        """Store the objects whose children are all stored; the ids of the others."""
        children = {child for _, item in batch for child in item.children}
        absent = set(self._objects.lacking(list(children)))
        left: list[int] = []
        for object_id, item in batch:
            if not absent.isdisjoint(item.children):
                left.append(object_id)
                continue
            absent.discard(item.digest)
            self._objects.take(item)
            self._objects_saved += 1
        return left

    # --- sessions -------------------------------------------------------------------------

    def _session_keys(self, found: PageScan) -> Iterator[bytes]:
        """The keys of all sessions of which any row was found, in order."""
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

    def _copy_session(self, found: PageScan, marked: Marked, key: bytes) -> SalvagedSession:
        heads = list(_ranked(found, "heads", key, key + b"\1"))
        history = list(_ranked(found, "history", keys.history(key, 0), keys.labels(key)))
        revisions = {one.head.revision: one for one in (*history, *heads)}
        newest = revisions[max(revisions)] if revisions else None
        name = _session_name(key, newest)
        remains = SessionRemains(found, self._rows, key, name)
        tombstone = next(found.rows("tombstones", key, key + b"\1"), None)
        if tombstone is not None:
            outcome = self._put_deletion(remains, tombstone)
            return SalvagedSession(name, outcome, None, None, 0, (), 0, (), from_strays=False)
        whole = [
            one for one in sorted(revisions.values(), key=lambda one: one.head.revision)
            if self._rows.has(one.head.manifest)
        ]  # fmt: skip
        saved = {one.head.revision for one in whole}
        broken = sorted(set(revisions) - saved, reverse=True)
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
        outcome = self._put_session(remains, newest, whole, pieces)
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
            any(one.rank > NEWEST for one in revisions.values()),
        )

    def _put_deletion(self, remains: SessionRemains, tombstone: Row) -> str:
        """A session that was deleted stays deleted, unless the target has one of this id."""
        key = remains.key
        existing = [head_key(key), meta_key(key)]
        deleted, *there = self._target.engine.get_rows([tombstone_key(key), *existing])
        if any(row is not None for row in there):
            return EXISTS
        arriving = remains.deleted(tombstone)
        # If an earlier salvage wrote the tombstone, the deletion may have been finished since.
        if deleted is not None or self._rows.put_session(arriving, remains.name, existing):
            return DELETED
        return EXISTS

    def _put_session(
        self,
        remains: SessionRemains,
        newest: FoundRevision | None,
        whole: Sequence[FoundRevision],
        pieces: list[LostPiece],
    ) -> str:
        """Write the rows of a session that the target lacks.

        Returns what became of the session: one of the constants above. Adds to ``pieces`` what is
        lost.
        """
        existing = [head_key(remains.key), tombstone_key(remains.key)]
        revisions = [self._rows.without_lost_map(one.head) for one in whole]
        if newest is not None and revisions:
            revisions[-1] = self._with_hidden(revisions[-1], newest.head, pieces)
        there, deleted = self._target.engine.get_rows(existing)
        if deleted is not None:
            return EXISTS
        if there is not None and there not in [encode_head(row) for row in revisions[-1:]]:
            return EXISTS
        arriving = remains.arriving(revisions)
        if there is not None:
            # An earlier salvage wrote the session, which may have been leased, queued to and
            # renamed since. Only the list of losses was needed.
            return WHOLE
        if not self._rows.put_session(arriving, remains.name, existing):
            return EXISTS
        is_lost = not revisions and (newest is not None or any(remains.rows("receipts")))
        return LOST if is_lost else WHOLE

    def _with_hidden(self, chosen: HeadRow, newest: HeadRow, pieces: list[LostPiece]) -> HeadRow:
        """The revision chosen, with the hidden nodes of the newest unless their map is lost."""
        if newest.hidden is None or self._rows.has(newest.hidden):
            return chosen._replace(hidden=newest.hidden)
        pieces.append(
            LostPiece(
                newest.revision,
                "the map of hidden nodes",
                Digest(newest.hidden),
                "nodes that were hidden may be seen again",
            )
        )
        return chosen


def _ranked(found: PageScan, table: str, start: bytes, stop: bytes) -> Iterator[FoundRevision]:
    """The revisions whose rows can be decoded: some rows match their checksum and cannot."""
    for row, rank in found.ranked_rows(table, start, stop):
        try:
            yield FoundRevision(decode_head(row.value), rank)
        except CorruptionError:
            continue


def _session_name(key: bytes, newest: FoundRevision | None) -> str:
    """The id of a session; its key in hexadecimal if no row has the whole id."""
    name = keys.session_of(key)
    if name is None and newest is not None:
        name = newest.head.long_id
    return key.hex() if name is None else name
