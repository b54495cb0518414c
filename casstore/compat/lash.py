"""Session databases of lash moved over: each becomes a session, whole or not at all.

A database is read whole, turned into a session, and compared with it once it is there. A session
says in its meta what it was made of; so an import that is repeated does nothing, and one whose
source has moved on since is refused. A dry run does all of it but the writing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from casstore.compat.importing import PartReport, used_bytes
from casstore.compat.lash_blobs import MAX_BLOB_BYTES
from casstore.compat.lash_database import LashDatabase
from casstore.compat.lash_findings import Found
from casstore.compat.lash_session import Gathered, gather
from casstore.compat.lash_verify import verify
from casstore.compat.sqlite_source import SqliteSource
from casstore.engine.files import storage_error
from casstore.engine.paths import path_text
from casstore.engine.protocol import RowKey
from casstore.errors import (
    ConditionFailedError,
    ConflictError,
    ForeignSourceError,
    InvalidInputError,
    SessionDeletedError,
    SessionExistsError,
    SourceNotFoundError,
    SourceVersionError,
)
from casstore.maintenance.progress import Progress, Step
from casstore.session import keys
from casstore.session.arriving import Built, appear, build, with_extra
from casstore.session.catalogue import decode_meta
from casstore.session.data import SessionMeta
from casstore.session.heads import head_key
from casstore.session.state import Runtime, meta_key, tombstone_key
from casstore.store import Store, check_store

#: Where a session's meta says that it came from lash: ``meta.extra["lash"]``.
ORIGIN: Final = "lash"
#: What became of a database.
IMPORTED: Final = "imported"
UNCHANGED: Final = "unchanged"
EMPTY: Final = "empty"

_SUFFIX: Final = ".db"


class SessionReport(NamedTuple):
    """What became of one database."""

    file: str
    #: The id of the session in the store; None if the database holds none.
    session: str | None
    outcome: str
    #: The revision that it has, as it had in lash.
    revision: int
    #: What moves, by kind, and then what stays behind.
    parts: tuple[PartReport, ...]
    #: What is not as it was.
    findings: tuple[Found, ...]


class LashReport(NamedTuple):
    """What an import did, or would do. Sizes in bytes; None if the engine does not tell."""

    dry_run: bool
    sessions: tuple[SessionReport, ...]
    #: Databases in a directory that are not of sessions.
    skipped: tuple[str, ...]
    source_bytes: int
    store_bytes_before: int | None
    store_bytes: int | None


def import_sessions(
    store: Store,
    *places: str | os.PathLike[str],
    name: str | None = None,
    leave_out_damaged: bool = False,
    max_blob_bytes: int = MAX_BLOB_BYTES,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> LashReport:
    """Move session databases over: files, or directories full of them (``*.db``).

    Each session keeps its id, or gets ``name`` if it is the only one. Damage in a database
    is an error that names it; with ``leave_out_damaged`` what is damaged stays behind, and is told.

    ForeignSourceError if a file is none of lash, SourceVersionError if of a version not known here,
    DamagedSourceError, BusyError while somebody holds a session, SessionExistsError and
    ConflictError if one is there that is another, SessionDeletedError. Raising from ``progress``
    stops it between two sessions or in one, which then is not there; calling again goes on.
    """
    check_store(store)
    if not places:
        raise InvalidInputError("name a database of lash, or a directory of them")
    before = used_bytes(store)
    files = [file for place in places for file in _files(Path(path_text(place)))]
    if name is not None and len(files) != 1:
        raise InvalidInputError(f"{len(files)} databases cannot all be called {name!r}")
    named = {Path(place) for place in places}
    reports: list[SessionReport] = []
    skipped: list[str] = []
    planned: dict[str, bytes] = {}
    size = 0
    for file in files:
        try:
            with SqliteSource(file) as source:
                moved = _Move(store, LashDatabase(source), planned, dry_run, progress)
                reports.append(moved.run(name, leave_out_damaged, max_blob_bytes))
                source.require_unchanged()
                size += source.size_bytes
        except SourceVersionError:
            raise
        except ForeignSourceError:
            if file in named:
                raise
            skipped.append(str(file))
    if not reports:
        raise ForeignSourceError(f"there is no session database of lash in {places[0]}")
    return LashReport(dry_run, tuple(reports), tuple(skipped), size, before, used_bytes(store))


def _files(place: Path) -> Iterator[Path]:
    """The databases at a place."""
    # Unlike the method of a path, it says no of names that are too long.
    if not os.path.isdir(place):
        yield place
        return
    try:
        there = sorted(place.iterdir())
    except OSError as exc:
        raise storage_error(f"cannot read {place}", exc) from exc
    found = [each for each in there if each.suffix == _SUFFIX and os.path.isfile(each)]
    if not found:
        raise SourceNotFoundError(f"there is no file *{_SUFFIX} in {place}")
    yield from found


class _Move:
    """One database on its way into a store."""

    def __init__(
        self,
        store: Store,
        database: LashDatabase,
        planned: dict[str, bytes],
        dry_run: bool,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._runtime = Runtime(store)
        self._database = database
        # What would be there by now, though a dry run has not written it.
        self._planned = planned
        self._dry_run = dry_run
        self._progress = progress

    def run(self, name: str | None, leave_out: bool, max_blob_bytes: int) -> SessionReport:
        """Move it, unless that was done."""
        file = str(self._database.source.path)
        self._tell("read", 0, self._database.count("graph_nodes"), "nodes")
        gathered = gather(
            self._database,
            self._store.engine.now_ms(),
            name=name,
            leave_out=leave_out,
            max_blob_bytes=max_blob_bytes,
        )
        if gathered is None:
            return SessionReport(file, None, EMPTY, 0, (), ())
        arrival = gathered.arrival
        session = arrival.meta.session
        try:
            built = build(self._runtime, arrival)
        except InvalidInputError as exc:
            raise self._database.damaged(f"session {session!r}", str(exc)) from exc
        outcome = UNCHANGED
        if not self._is_there(gathered, built):
            outcome = IMPORTED
            self._planned[session] = built.content
            if not self._dry_run:
                self._store_it(gathered, built)
        elif not self._dry_run:
            verify(self._store, gathered, fresh=False, progress=self._progress)
        done = outcome == IMPORTED
        parts = [
            part if done else part._replace(imported=0) for part in gathered.moving if part.found
        ]
        parts += [PartReport(left.name, left.count(), 0) for left in gathered.left]
        return SessionReport(
            file, session, outcome, arrival.revision, tuple(parts), tuple(gathered.findings)
        )

    def _store_it(self, gathered: Gathered, built: Built) -> None:
        meta = gathered.arrival.meta
        origin = {**gathered.origin, "content": built.content.hex()}
        whole = with_extra(built, meta._replace(extra={ORIGIN: origin}))
        told = None
        if self._progress is not None:
            told = self._stored
        try:
            appear(self._runtime, meta.session, whole, told)
        except ConditionFailedError as exc:
            # Somebody made it meanwhile: what it is, the next look says.
            if not self._is_there(gathered, built):
                raise ConflictError(
                    f"something of session {meta.session!r} is in the store already, or came "
                    "to be there meanwhile; import it under another name"
                ) from exc
        verify(self._store, gathered, fresh=True, progress=self._progress)

    def _stored(self, done: int, total: int) -> None:
        self._tell("store", done, total, "objects")

    def _tell(self, phase: str, done: int, total: int, unit: str) -> None:
        if self._progress is not None:
            self._progress(Step(phase, done, total, unit))

    def _is_there(self, gathered: Gathered, built: Built) -> bool:
        """Was this moved before? ConflictError if something else stands in its place."""
        session = gathered.arrival.meta.session
        key = keys.session_key(session)
        places: Sequence[RowKey] = (tombstone_key(key), head_key(key), meta_key(key))
        deleted, head, row = self._store.engine.get_rows(places)
        if deleted is not None:
            raise SessionDeletedError(session)
        if head is None and row is None:
            return self._is_planned(session, built)
        origin = {} if row is None else _origin(decode_meta(key, row))
        if not origin:
            raise SessionExistsError(session)
        if origin.get("content") != built.content.hex():
            here = gathered.origin.get("head_revision", 0)
            raise ConflictError(
                f"session {session!r} came from lash at revision {origin.get('head_revision', 0)}, "
                f"and {self._database.source.path} holds another, at revision {here}: import it "
                "under another name, or into another store"
            )
        return True

    def _is_planned(self, session: str, built: Built) -> bool:
        """Would it be there, after the databases before this one?"""
        content = self._planned.get(session)
        if content is not None and self._dry_run and content != built.content:
            raise ConflictError(
                f"{self._database.source.path} holds another session {session!r} than a database "
                "before it: import it under another name"
            )
        return content is not None and self._dry_run


def _origin(meta: SessionMeta) -> dict[str, Any]:
    """What a session says of its origin in lash; nothing if it has none."""
    extra = meta.extra
    origin = extra.get(ORIGIN) if type(extra) is dict else None
    return origin if type(origin) is dict else {}
