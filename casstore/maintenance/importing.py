"""A bundle into a store: proven first, objects next, and last the rows by which it is seen.

Nothing is written before the whole file was proven. Then the objects are stored in batches;
until a row names them they are kept by gc's grace. One last write makes the session appear, on
condition that everything that its rows name is stored. A reader of the store sees all of it or
nothing (P5). If gc removed some of it in between, the objects are stored again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

from casstore.engine.paths import path_text
from casstore.engine.protocol import (
    Condition,
    Engine,
    ObjectsExist,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    SessionDeletedError,
    SessionDivergedError,
    SessionExistsError,
)
from casstore.format import bundle as layout
from casstore.maintenance.arriving_labels import ArrivingLabels, arriving_labels
from casstore.maintenance.bundle import BundleReader
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.sending import StoreTarget
from casstore.maintenance.session_rows import SessionRows
from casstore.maintenance.verification import (
    DEFAULT_LIMITS,
    BundleLimits,
    Proof,
    new_object,
)
from casstore.session import attachments, catalogue, keys
from casstore.session import subjects as whom
from casstore.session.arguments import check_flag
from casstore.session.arriving import REMEDY
from casstore.session.attempts import Attempts
from casstore.session.commit import put_label, put_receipt
from casstore.session.heads import HeadRow, encode_head, head_key
from casstore.session.state import Runtime, State, meta_key, tombstone_key
from casstore.store import Store, check_store

_PAGE: Final = 2048

REFUSE: Final = "refuse"
FAST_FORWARD: Final = "fast-forward"
_ON_CONFLICT: Final = (REFUSE, FAST_FORWARD)


class ImportOutcome(Enum):
    """What an import did.

    >>> from casstore.maintenance.exporting import export_session
    >>> exported = export_session(store, "s", place / "s.bundle")
    >>> [import_session(other, place / "s.bundle").outcome.value for _ in range(2)]
    ['created', 'unchanged']
    """

    #: The session is new.
    CREATED = "created"
    #: It was there in an earlier state, and has moved on.
    FORWARDED = "forwarded"
    #: It was there as it is in the file.
    UNCHANGED = "unchanged"


class BundleReport(NamedTuple):
    """What the import of a bundle wrote, or would write."""

    outcome: ImportOutcome
    session: str
    #: Revisions that were not there before.
    revisions: int
    objects: int
    #: Objects that were not there before.
    new_objects: int
    object_bytes: int
    #: Revisions in the bundle.
    bundled_revisions: int


def import_session(
    store: Store,
    source: str | os.PathLike[str],
    *,
    name: str | None = None,
    subjects: Iterable[str] = (),
    on_conflict: str = REFUSE,
    limits: BundleLimits = DEFAULT_LIMITS,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> BundleReport:
    """Bring the session of a bundle into a store, under its own id or another ``name``.

    A bundle does not say whom its session is about. ``subjects`` does, from the moment at which
    it appears, beside those that a session of that id has already.

    If a session of that id is there with the same content, nothing happens. If it is in an
    earlier state, ``on_conflict="fast-forward"`` moves it on; anything else is refused:
    SessionExistsError, SessionDivergedError, SessionDeletedError. Raises what
    ``verify_bundle`` raises, and ObjectsMissingError if the file is thin and leaves out
    something that this store lacks. A ``dry_run`` proves the file, makes the same comparisons and
    writes nothing.

    >>> from casstore.maintenance.exporting import export_session
    >>> exported = export_session(store, "s", place / "s.bundle")
    >>> import_session(other, place / "s.bundle").outcome
    <ImportOutcome.CREATED: 'created'>
    >>> other.session("s").head().leaf
    'left'
    """
    check_store(store)
    if on_conflict not in _ON_CONFLICT:
        raise InvalidInputError(
            f"no way {on_conflict!r} to settle a conflict; there are {', '.join(_ON_CONFLICT)}"
        )
    if name is not None:
        keys.session_key(name)
    check_flag(dry_run, "dry_run")
    about = whom.checked(subjects)
    with BundleReader(path_text(source)) as reader:
        proof = Proof(reader, limits, store.engine, progress)
        proof.run()
        work = _Import(store, reader, proof, name, about, on_conflict, dry_run, progress)
        return work.run()


class _Import:
    """One proven bundle on its way in."""

    def __init__(
        self,
        store: Store,
        reader: BundleReader,
        proof: Proof,
        name: str | None,
        about: tuple[str, ...],
        on_conflict: str,
        dry_run: bool,
        progress: Progress | None,
    ) -> None:
        self._runtime = Runtime(store)
        self._about = about
        self._engine: Engine = store.engine
        self._reader = reader
        self._proof = proof
        self._progress = progress
        self._on_conflict = on_conflict
        self._dry_run = dry_run
        self._rows = _renamed(proof.rows, name)
        self._key = keys.session_key(self._rows.session)
        self._new_objects = 0

    def run(self) -> BundleReport:
        """Try until nobody has come in between."""
        attempts = Attempts(f"session {self._rows.session!r}", REMEDY)
        while True:
            attempts.begin()
            existing = self._existing()
            try:
                changes, labels, outcome, added = self._plan(existing)
            except CorruptionError:
                # Damage, unless it was vacuumed or deleted in the middle, and collected.
                if self._existing() == existing:
                    raise
                continue
            if self._dry_run:
                if outcome is not ImportOutcome.UNCHANGED:
                    self._new_objects = self._count_missing()
            elif outcome is not ImportOutcome.UNCHANGED:
                try:
                    self._store_objects()
                    self._appear(existing, changes, labels)
                except (ConditionFailedError, ObjectNotFoundError):
                    # The session moved, or a collector took something before a row named it.
                    continue
            elif self._about:
                whom.change(self._runtime, self._rows.session, add=self._about)
            return BundleReport(
                outcome,
                self._rows.session,
                added,
                len(self._proof.objects.known),
                self._new_objects,
                self._reader.totals.object_bytes if self._reader.totals else 0,
                len(self._rows.revisions),
            )

    # --- what is there ------------------------------------------------------------------------

    def _existing(self) -> tuple[bytes | None, bytes | None]:
        """The head and meta rows that are there now."""
        wanted = [tombstone_key(self._key), head_key(self._key), meta_key(self._key)]
        deleted, head, meta = self._engine.get_rows(wanted)
        if deleted is not None:
            raise SessionDeletedError(self._rows.session)
        return head, meta

    def _plan(
        self, existing: tuple[bytes | None, bytes | None]
    ) -> tuple[list[PutRow], ArrivingLabels, ImportOutcome, int]:
        """The rows by which the session appears, and what that makes of the one that is there."""
        head, meta = existing
        rows = self._rows
        if head is None:
            if meta is not None:
                raise SessionExistsError(rows.session)
            heads = self._placed(rows.revisions)
            changes = self._without_what_is_there(self._changes(heads, heads))
            labels = self._labels(heads, moves=True)
            return changes, labels, ImportOutcome.CREATED, len(heads)
        state = self._runtime.decode(head)
        newer = self._require_ancestor(state)
        placed = self._placed(newer)
        if placed:
            last = placed[-1]
        else:
            # Only what the head row says beside may have changed: hidden nodes.
            last = state.head._replace(hidden=rows.revisions[-1].hidden)
        changes = self._changes([*placed[:-1], last], placed)
        if placed:
            place = keys.history(self._key, state.head.revision)
            changes.append(PutRow("history", place, head))
        changes = self._without_what_is_there(changes)
        labels = self._labels([state.head, *placed], moves=bool(placed))
        if not changes and not labels.changes:
            return [], labels, ImportOutcome.UNCHANGED, 0
        if self._on_conflict != FAST_FORWARD:
            raise SessionExistsError(rows.session)
        return changes, labels, ImportOutcome.FORWARDED, len(newer)

    def _require_ancestor(self, state: State) -> list[HeadRow]:
        """The newer revisions, if the session that is there is an earlier state."""
        session = self._rows.session
        known = {row.revision: row for row in self._rows.revisions}
        same = known.get(state.head.revision)
        if same is None or same.manifest != state.head.manifest:
            raise SessionDivergedError(session, "is not an earlier state of the one in the file")
        if not set(self._runtime.hidden(state.head)) <= self._proof.hidden:
            raise SessionDivergedError(session, "hides nodes that the file shows")
        return [row for row in self._rows.revisions if row.revision > state.head.revision]

    # --- rows ---------------------------------------------------------------------------------

    def _placed(self, revisions: Sequence[HeadRow]) -> list[HeadRow]:
        """Revisions as this store has them."""
        session = self._rows.session
        long_id = session if keys.is_cut(session) else None
        return [row._replace(long_id=long_id) for row in revisions]

    def _changes(self, heads: Sequence[HeadRow], placed: Sequence[HeadRow]) -> list[PutRow]:
        """The rows of the session: revisions, the last of them the head, and what belongs to it."""
        key, rows = self._key, self._rows
        changes = [
            PutRow("history", keys.history(key, row.revision), encode_head(row))
            for row in heads[:-1]
        ]
        changes.append(PutRow(*head_key(key), encode_head(heads[-1])))
        if rows.meta is not None:
            changes.append(catalogue.put_meta(rows.meta))
        changes += [attachments.put_as_is(one) for one in rows.attachments]
        by_revision = {row.revision: row for row in placed}
        for turn, receipt in rows.receipts.items():
            row = by_revision.get(receipt.revision)
            if row is not None:
                whole = receipt._replace(manifest=row.manifest)
                changes.append(put_receipt(key, turn, whole))
        return changes

    def _labels(self, coming: Sequence[HeadRow], *, moves: bool) -> ArrivingLabels:
        """The labels of the file, as far as there are revisions for them here."""
        puts = [put_label(self._key, *label) for label in self._rows.labels.items()]
        revisions = {row.revision for row in coming}
        new = self._without_what_is_there(puts)
        return arriving_labels(self._engine, self._key, new, revisions, moves=moves)

    def _without_what_is_there(self, changes: list[PutRow]) -> list[PutRow]:
        """The changes that change something; what is known of an attachment here stays."""
        found = self._engine.get_rows([RowKey(change.table, change.key) for change in changes])
        return [
            change
            for change, row in zip(changes, found, strict=True)
            if row is None or (row != change.value and change.table != "attachments")
        ]

    # --- writing ------------------------------------------------------------------------------

    def _store_objects(self) -> None:
        reader, proven = self._reader, self._reader.totals
        target = StoreTarget(self._engine)
        for block in reader.blocks():
            if block.type != layout.OBJECTS:
                continue
            for packed in reader.objects(block):
                item = new_object(packed)
                if not self._proof.has_proven(item):
                    raise reader.fail(block.offset, "the file changed while it was read")
                target.take(item)
            if self._progress is not None:
                self._progress(Step("store", block.offset, reader.size_bytes, "bytes"))
        if reader.totals != proven:
            raise reader.fail(reader.size_bytes, "the file changed while it was read")
        target.flush()
        self._new_objects += target.new_objects

    def _count_missing(self) -> int:
        """The number of objects of the bundle that the store lacks."""
        known = iter(self._proof.objects.known)
        missing = 0
        while page := list(islice(known, _PAGE)):
            missing += len(self._engine.missing(page))
        return missing

    def _appear(
        self,
        existing: tuple[bytes | None, bytes | None],
        changes: Sequence[PutRow],
        labels: ArrivingLabels,
    ) -> None:
        head, meta = existing
        conditions: list[Condition] = [
            RowIs(*tombstone_key(self._key), None),
            RowIs(*head_key(self._key), head),
            RowIs(*meta_key(self._key), meta),
            ObjectsExist(sorted(self._rows.named())),
            # Announced or condemned just now: then that is what is known of it here.
            *[
                RowIs(change.table, change.key, None)
                for change in changes
                if change.table == "attachments"
            ],
            *labels.conditions,
        ]
        rows: list[RowChange] = [*changes, *labels.changes]
        if self._about:
            place = keys.subjects(self._key)
            [row] = self._engine.get_rows([place])
            before = whom.decode(row)
            conditions.append(RowIs(*place, row))
            rows += whom.changes(
                self._rows.session, self._key, before, whom.checked([*before, *self._about])
            )
        self._engine.write(Write(conditions=conditions, rows=rows))


def _renamed(rows: SessionRows, name: str | None) -> SessionRows:
    """The rows of the session under another id. What a turn meant included the old one."""
    if name is None or name == rows.session:
        return rows
    return SessionRows(
        name,
        None if rows.meta is None else rows.meta._replace(session=name),
        rows.revisions,
        rows.labels,
        [one._replace(session=name) for one in rows.attachments],
        {},
    )
