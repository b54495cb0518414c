"""``import_session``: writes the session of a bundle, an exported file, into a store.

The whole file is proven before anything is written. Then the objects are stored and the rows are
published, as ``maintenance.transfer`` describes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

from casstore.engine.files import path_text
from casstore.engine.protocol import RowIs
from casstore.errors import SessionDivergedError, SessionExistsError
from casstore.format import bundle as layout
from casstore.maintenance.bundle_file import BundleReader
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.transfer import publish
from casstore.maintenance.transfer.objects import StoreTarget
from casstore.maintenance.transfer.publish import Arriving, Existing, Publication
from casstore.maintenance.transfer.rows import SessionRows
from casstore.maintenance.verify import (
    DEFAULT_LIMITS,
    BundleLimits,
    Proof,
    new_object,
)
from casstore.session import keys
from casstore.session import subjects as whom
from casstore.session.arguments import check_choice, check_flag
from casstore.session.state import HeadRow, Runtime, meta_key, runtime_of
from casstore.store import Store, check_store

_PAGE: Final = 2048

REFUSE: Final = "refuse"
FAST_FORWARD: Final = "fast-forward"


class ImportOutcome(Enum):
    """What an import did.

    >>> from casstore.maintenance.export import export_session
    >>> exported = export_session(store, "s", place / "s.bundle")
    >>> [import_session(other, place / "s.bundle").outcome.value for _ in range(2)]
    ['created', 'unchanged']
    """

    #: The session is new.
    CREATED = "created"
    #: The store had an earlier state of it, and now has the newer one.
    FORWARDED = "forwarded"
    #: The store had it as it is in the file.
    UNCHANGED = "unchanged"


class BundleReport(NamedTuple):
    """What the import of a bundle wrote; in a dry run, what it would write.

    Attributes:
        outcome: what the import did
        session: the session in the store
        revisions: revisions that the store did not have before
        objects: objects in the bundle
        new_objects: objects that the store did not have before
        object_bytes: the size of the objects, uncompressed
        bundled_revisions: revisions in the bundle
    """

    outcome: ImportOutcome
    session: str
    revisions: int
    objects: int
    new_objects: int
    object_bytes: int
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
    """Write the session of a bundle into a store, under its own id or another ``name``.

    A bundle names no subjects. ``subjects`` are added to those that a session of that id has, in
    the write that publishes it.

    If the store has a session of that id with the same content, nothing happens. If it has an
    earlier state, ``on_conflict="fast-forward"`` adds the newer revisions; anything else raises
    SessionExistsError, SessionDivergedError, SessionDeletedError. Raises what
    ``verify_bundle`` raises, and ObjectsMissingError if the file is thin and leaves out
    objects that this store lacks. A ``dry_run`` proves the file, makes the same comparisons and
    writes nothing.

    >>> from casstore.maintenance.export import export_session
    >>> exported = export_session(store, "s", place / "s.bundle")
    >>> import_session(other, place / "s.bundle").outcome
    <ImportOutcome.CREATED: 'created'>
    >>> other.session("s").head().leaf
    'left'
    """
    check_store(store)
    check_choice(on_conflict, "on_conflict", (REFUSE, FAST_FORWARD))
    if name is not None:
        keys.session_key(name)
    check_flag(dry_run, "dry_run")
    about = whom.checked(subjects)
    with BundleReader(path_text(source)) as reader:
        proof = Proof(reader, limits, store.engine, progress)
        proof.run()
        rows = proof.rows.renamed(name)
        key = keys.session_key(rows.session)
        return _Import(
            runtime_of(store), reader, proof, rows, key, about, on_conflict, dry_run, progress,
            StoreTarget(store.engine),
        ).run()  # fmt: skip


class _Import(NamedTuple):
    """The import of one proven bundle."""

    runtime: Runtime
    reader: BundleReader
    proof: Proof
    rows: SessionRows
    key: bytes
    about: tuple[str, ...]
    on_conflict: str
    dry_run: bool
    progress: Progress | None
    target: StoreTarget

    def run(self) -> BundleReport:
        """Import; retried when another writer changes the session meanwhile."""
        return publish.settle(
            f"session {self.rows.session!r}",
            lambda: publish.existing(self.runtime.engine, self.key, self.rows.session),
            self._attempt,
        )

    def _attempt(self, existing: Existing) -> BundleReport:
        revisions, added = self._require_earlier(existing)
        arriving = Arriving(
            self.key,
            revisions,
            self.rows.stored_labels(),
            self.rows.stored_others(revisions[-added:] if added else ()),
        )
        publication = publish.plan(self.runtime.engine, arriving, existing.head)
        outcome = self._outcome(existing, publication)
        missing = 0
        if self.dry_run:
            if outcome is not ImportOutcome.UNCHANGED:
                missing = self._count_missing()
        elif outcome is not ImportOutcome.UNCHANGED:
            self._store_objects()
            self._publish(existing, publication)
        elif self.about:
            whom.change(self.runtime, self.rows.session, add=self.about)
        return BundleReport(
            outcome,
            self.rows.session,
            added,
            len(self.proof.objects.known),
            self.target.new_objects + missing,
            self.reader.totals.object_bytes if self.reader.totals else 0,
            len(self.rows.revisions),
        )

    # --- conflicts ----------------------------------------------------------------------------

    def _require_earlier(self, existing: Existing) -> tuple[list[HeadRow], int]:
        """The revisions that the store is to get, of which the last becomes the head.

        The number of them that are new comes second. A bundle may come from anywhere, so unlike a
        copy it only adds: the store's head must be among its revisions, unchanged.
        """
        placed = self.rows.stored_revisions()
        if existing.head is None:
            if existing.meta is not None:
                raise SessionExistsError(self.rows.session)
            return placed, len(placed)
        here = self.runtime.decode(existing.head).head
        if (here.revision, here.manifest) not in {(row.revision, row.manifest) for row in placed}:
            raise SessionDivergedError(
                self.rows.session, "is not an earlier state of the one in the file"
            )
        if not set(self.runtime.hidden(here)) <= self.proof.hidden:
            raise SessionDivergedError(self.rows.session, "hides nodes that the file shows")
        newer = [row for row in placed if row.revision > here.revision]
        # With no newer revision, the file can only add hidden nodes: take its set, a superset.
        return newer or [here._replace(hidden=placed[-1].hidden)], len(newer)

    def _outcome(self, existing: Existing, publication: Publication) -> ImportOutcome:
        if existing.head is None:
            return ImportOutcome.CREATED
        if not publication.rows:
            return ImportOutcome.UNCHANGED
        if self.on_conflict != FAST_FORWARD:
            raise SessionExistsError(self.rows.session)
        return ImportOutcome.FORWARDED

    # --- writing ------------------------------------------------------------------------------

    def _store_objects(self) -> None:
        reader, proven = self.reader, self.reader.totals
        report = Phase(self.progress, "store", "bytes")
        for block in reader.blocks():
            if block.type != layout.OBJECTS:
                continue
            for packed in reader.objects(block):
                item = new_object(packed)
                if not self.proof.has_proven(item):
                    raise reader.fail(block.offset, "the file changed while it was read")
                self.target.take(item)
            report(block.offset, reader.size_bytes)
        if reader.totals != proven:
            raise reader.fail(reader.size_bytes, "the file changed while it was read")
        self.target.flush()

    def _count_missing(self) -> int:
        """The number of objects of the bundle that the store lacks."""
        known = iter(self.proof.objects.known)
        missing = 0
        while page := list(islice(known, _PAGE)):
            missing += len(self.runtime.engine.missing(page))
        return missing

    def _publish(self, existing: Existing, publication: Publication) -> None:
        rows, conditions, named, _ = publication
        conditions.append(RowIs(*meta_key(self.key), existing.meta))
        if self.about:
            place = keys.subjects(self.key)
            [row] = self.runtime.engine.get_rows([place])
            before = whom.decode(row)
            conditions.append(RowIs(*place, row))
            after = whom.checked([*before, *self.about])
            rows += whom.changes(self.rows.session, self.key, before, after)
        publish.write(self.runtime.engine, rows, conditions, named)
