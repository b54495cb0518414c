"""Imports session databases of lash: each becomes a session, whole or not at all.

A database is read whole and converted into a session (``lash_session``); one last write publishes
it (``maintenance.transfer.building``). The session's meta records what it was made of, so that a
repeated import recognises it, and an import whose source has changed since raises ConflictError.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from casstore.compat.importing import (
    IMPORTED,
    UNCHANGED,
    ImportedSession,
    ImportNote,
    ImportReport,
    Notes,
    Part,
    PartReport,
    Unit,
    Wrote,
    combined,
    run,
)
from casstore.compat.lash_checkpoint import MAX_BLOB_BYTES
from casstore.compat.lash_database import LashDatabase
from casstore.compat.lash_session import Gathered, gather
from casstore.compat.sqlite_source import SqliteSource
from casstore.engine.files import path_text, storage_error
from casstore.engine.protocol import RowKey
from casstore.errors import (
    ConflictError,
    CycleError,
    ForeignSourceError,
    InvalidInputError,
    NotFoundError,
    SessionDeletedError,
    SessionExistsError,
    SourceNotFoundError,
    SourceVersionError,
)
from casstore.format.canonical import encode
from casstore.format.digest import Digest
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.transfer.building import Arrival, appear, build, with_extra
from casstore.session import keys, leases
from casstore.session.catalogue import decode_meta
from casstore.session.data import NodeDraft, SessionMeta, Usage
from casstore.session.state import head_key, meta_key, runtime_of, tombstone_key
from casstore.session.turns import encode_receipt, receipt_key
from casstore.store import Store, check_store

#: The key of a session's ``meta.extra`` that records its origin in lash.
ORIGIN: Final = "lash"

_KIND: Final = "lash"
_SUFFIX: Final = ".db"
_PAGE: Final = 500
_SKIPPED: Final = "databases that are not session databases of lash, left out"
_EMPTY: Final = "databases without a session, left out"


def import_lash(
    store: Store,
    source: str | os.PathLike[str],
    *,
    name: str | None = None,
    leave_out_damaged: bool = False,
    max_blob_bytes: int = MAX_BLOB_BYTES,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a session database, or all of a directory (``*.db``).

    Each session keeps its id, or gets ``name`` if the source is one database. A damaged row raises
    DamagedSourceError with its name; with ``leave_out_damaged`` it is noted and left out.

    ForeignSourceError if a file is not of lash, SourceVersionError if its version is unknown,
    BusyError while a lease of a session is valid, SessionExistsError, SessionDeletedError or
    ConflictError if the store holds another session of that id. Raising from ``progress`` stops
    the import; a session that is not complete is not visible, and the next call imports it.
    """
    check_store(store)
    place = Path(path_text(source))
    files = _files(place)
    if name is not None and len(files) != 1:
        raise InvalidInputError(
            f"name {name!r} is for one database, and {place} holds {len(files)}; import them one "
            "by one"
        )
    reports: list[ImportReport] = []
    notes = Notes()
    planned: dict[str, bytes] | None = {} if dry_run else None
    for file in files:
        try:
            with SqliteSource(file) as opened:
                database = LashDatabase(opened)
                if progress is not None:
                    progress(Step("read", 0, database.count("graph_nodes"), "nodes"))
                gathered = gather(
                    database, store.engine.now_ms(),
                    name=name, leave_out=leave_out_damaged, max_blob_bytes=max_blob_bytes,
                )  # fmt: skip
                unit = (
                    None
                    if gathered is None
                    else _LashSessionUnit(store, database, gathered, planned, progress)
                )
                part = _LashSessionPart(opened.name, unit)
                reports.append(
                    run(_KIND, opened, store, [part], dry_run=dry_run, progress=progress)
                )
        except SourceVersionError:
            raise
        except ForeignSourceError:
            if file == place:
                raise
            notes.add(_SKIPPED, str(file))
    if not reports:
        raise ForeignSourceError(f"{place} holds no session database of lash")
    return combined(_KIND, str(place), dry_run, reports, notes.all())


def _files(place: Path) -> list[Path]:
    """The database at a path, or those in a directory."""
    # Unlike Path.is_dir, this returns False for a name that is too long.
    if not os.path.isdir(place):
        return [place]
    try:
        there = sorted(place.iterdir())
    except OSError as exc:
        raise storage_error(f"cannot read {place}", exc) from exc
    found = [each for each in there if each.suffix == _SUFFIX and os.path.isfile(each)]
    if not found:
        raise SourceNotFoundError(f"there is no file *{_SUFFIX} in {place}")
    return found


class _LashSessionPart(Part):
    """The session of one database, or none."""

    name = "nodes"

    def __init__(self, source: str, unit: _LashSessionUnit | None) -> None:
        self._source = source
        self._unit = unit

    def count(self) -> int:
        return 0 if self._unit is None else self._unit.size

    def units(self) -> Iterator[Unit]:
        if self._unit is not None:
            yield self._unit

    def notes(self) -> Sequence[ImportNote]:
        if self._unit is None:
            return [ImportNote(_EMPTY, 1, (self._source,))]
        return self._unit.gathered.notes


class _LashSessionUnit(Unit):
    """A converted session."""

    def __init__(
        self,
        store: Store,
        database: LashDatabase,
        gathered: Gathered,
        planned: dict[str, bytes] | None,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._runtime = runtime_of(store)
        self._path = database.source.path
        # In a dry run: the content of the sessions of earlier databases, which are not written.
        self._planned = planned
        self._progress = progress
        self._written = False
        self._outcome = UNCHANGED
        self.gathered = gathered
        self.size = len(gathered.arrival.nodes)
        self._session = gathered.arrival.meta.session
        try:
            self._built = build(self._runtime, gathered.arrival)
        except CycleError as exc:
            raise CycleError(exc.node, f"of {self._path} is its own ancestor") from exc
        except InvalidInputError as exc:
            raise database.damaged(f"session {self._session!r}", str(exc)) from exc

    def session(self) -> ImportedSession:
        return ImportedSession(self._session, self._outcome, str(self._path))

    def compare(self) -> Sequence[PartReport]:
        parts = [PartReport("sessions", 1, 1), *self.gathered.parts]
        is_stored = self._is_stored()
        if is_stored:
            _verify(self._store, self.gathered.arrival, fresh=self._written)
        if is_stored or self._is_planned():
            return [part._replace(imported=0) for part in parts]
        self._outcome = IMPORTED
        return parts

    def write(self, wrote: Wrote) -> None:
        meta = self.gathered.arrival.meta
        origin = {**self.gathered.origin, "content": self._built.content.hex()}
        whole = with_extra(self._built, meta._replace(extra={ORIGIN: origin}))
        try:
            appear(self._runtime, self._session, whole, self._report)
        except SessionExistsError as exc:
            # Another process may have imported it at the same time.
            if not self._is_stored():
                raise ConflictError(
                    f"the store holds other rows of session {self._session!r}; import it under "
                    "another name"
                ) from exc
        self._written = True

    def _report(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(Step("store", done, total, "objects"))

    def _is_stored(self) -> bool:
        """Whether this content was imported before; ConflictError if the id has other content."""
        session, content = self._session, self._built.content
        key = keys.session_key(session)
        places: Sequence[RowKey] = (tombstone_key(key), head_key(key), meta_key(key))
        deleted, head, row = self._store.engine.get_rows(places)
        if deleted is not None:
            raise SessionDeletedError(session)
        if head is None and row is None:
            return False
        origin = {} if row is None else _origin(decode_meta(key, row))
        if not origin:
            raise SessionExistsError(session)
        if origin.get("content") != content.hex():
            here = self.gathered.origin.get("head_revision", 0)
            raise ConflictError(
                f"session {session!r} came from lash at revision {origin.get('head_revision', 0)}, "
                f"and {self._path} holds another, at revision {here}; import it under another "
                "name, or into another store"
            )
        return True

    def _is_planned(self) -> bool:
        """Whether an earlier database of a dry run has this content, so that it would be stored."""
        if self._planned is None:
            return False
        session, content = self._session, self._built.content
        is_planned = session in self._planned
        if self._planned.setdefault(session, content) != content:
            raise ConflictError(
                f"{self._path} holds another session {session!r} than a database before it; "
                "import it under another name"
            )
        return is_planned


def _origin(meta: SessionMeta) -> dict[str, Any]:
    """The origin in lash that a session's meta records; empty if it records none."""
    extra = meta.extra
    origin = extra.get(ORIGIN) if type(extra) is dict else None
    return origin if type(origin) is dict else {}


# --- reading back -------------------------------------------------------------------------------


def _verify(store: Store, arrival: Arrival, *, fresh: bool) -> None:
    """Raise ConflictError unless the store holds what was read.

    ``fresh``: this import wrote it, and everything must be equal. Otherwise only the imported
    revision is compared, which never changes; if retention removed it, nothing is compared.
    """
    if arrival.revision:
        try:
            _verify_revision(store, arrival, fresh=fresh)
        except NotFoundError:
            if fresh:
                raise _differs(arrival, "its head") from None
            return
    if fresh:
        _verify_rows(store, arrival)


def _verify_revision(store: Store, arrival: Arrival, *, fresh: bool) -> None:
    session, at = store.session(arrival.meta.session), arrival.revision
    wanted = {draft.id: draft for draft in arrival.nodes}
    for page in session.nodes("full", at=at).pages(_PAGE):
        for node in page:
            found = NodeDraft(*node[:6])
            draft = wanted.pop(node.id, None)
            if draft is not None and not fresh:
                # Vacuum gives a node whose parent was hidden the next visible one.
                found = found._replace(parent=draft.parent)
            if draft is None or not _same(found, draft):
                raise _differs(arrival, f"node {node.id!r}")
    # ``wanted`` now has the nodes that the session does not show. Right after the import these must
    # be the hidden ones; later, more may have been hidden.
    if fresh and wanted.keys() != set(arrival.hidden):
        raise _differs(arrival, f"node {min(wanted.keys() ^ set(arrival.hidden))!r}")
    checkpoint = session.checkpoint(at, hydrate=True)
    given = arrival.checkpoint._replace(frames=tuple(arrival.checkpoint.frames))
    for name in given._fields:
        if not _same(getattr(checkpoint, name), getattr(given, name)):
            raise _differs(arrival, f"its {name}")
    if list(session.usage(at)) != _ledger(arrival.usage):
        raise _differs(arrival, "its usage")


def _ledger(entries: Iterable[Usage]) -> list[Usage]:
    """Usage summed by source and model, in the order of first use, without empty entries."""
    merged: dict[tuple[str, str], Usage] = {}
    for entry in entries:
        known = merged.get((entry.source, entry.model), Usage(entry.source, entry.model))
        sums = [a + b for a, b in zip(known[2:], entry[2:], strict=True)]
        merged[entry.source, entry.model] = Usage(entry.source, entry.model, *sums)
    return [entry for entry in merged.values() if entry.total]


def _verify_rows(store: Store, arrival: Arrival) -> None:
    """Compare the rows of a session outside its revisions."""
    name = arrival.meta.session
    session, key = store.session(name), keys.session_key(name)
    head = session.head()
    if arrival.revision and (
        head is None
        or (head.revision, head.leaf, head.turn, head.node_count)
        != (arrival.revision, arrival.leaf, arrival.turn, len(arrival.nodes))
    ):
        raise _differs(arrival, "its head")
    if session.meta()._replace(extra=None) != arrival.meta._replace(extra=None):
        raise _differs(arrival, "its meta")
    for found, batch in zip_longest(session.queue.batches(), arrival.batches):
        if found is None or batch is None or not _same(found, batch):
            raise _differs(arrival, "its queue")
    by_id = {one.id: one for one in session.attachments.list()}
    if by_id != {one.id: one for one in arrival.attachments}:
        raise _differs(arrival, "its attachments")
    places = [receipt_key(key, turn) for turn in arrival.receipts]
    rows = store.engine.get_rows([*places, leases.lease_key(key)])
    if rows[:-1] != [encode_receipt(one) for one in arrival.receipts.values()]:
        raise _differs(arrival, "its turns")
    fencing = 0 if rows[-1] is None else leases.decode_lease(name, rows[-1]).fencing
    if fencing < arrival.fencing:
        raise _differs(arrival, "its lease")
    for tag, body in arrival.tagged.items():
        pin = store.find_pin(tag)
        if pin is None or pin.digest != Digest.of_blob(body):
            raise _differs(arrival, f"tag {tag!r}")


def _same(found: Any, wanted: Any) -> bool:
    """Whether two values are equal and of equal types: 1, 1.0 and True are three values."""
    return encode(_plain(found)) == encode(_plain(wanted))


def _plain(value: Any) -> Any:
    return [list(value)] if isinstance(value, tuple) else value


def _differs(arrival: Arrival, what: str) -> ConflictError:
    return ConflictError(
        f"session {arrival.meta.session!r} differs from its source: {what}; another process "
        "changed it during the import"
    )
