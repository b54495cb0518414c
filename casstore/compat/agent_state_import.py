"""Imports databases of morrow's ``agent_state``: checkpoints, and data of users.

    checkpoints   id, session_id, label, payload (JSON), created_at (seconds)
    user_data     user_id, key, value (JSON), created_at (seconds)

morrow keeps them in two files; a source has either table, or both. Checkpoints are imported in the
order in which they were written, which morrow itself did not always keep.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from casstore.compat.importing import (
    ImportNote,
    ImportReport,
    Part,
    Presence,
    Row,
    RowPart,
    columns_bytes,
    other_content,
    paged,
    presence,
    run,
)
from casstore.compat.sqlite_source import SqliteSource
from casstore.engine.protocol import MAX_STAMP_MS
from casstore.errors import (
    ConflictError,
    CorruptionError,
    ForeignSourceError,
    InvalidInputError,
    InvalidValueError,
)
from casstore.format.canonical import encode
from casstore.maintenance.progress import Progress
from casstore.records.json_values import storable
from casstore.records.lifecycles.checkpoints import (
    NewCheckpoint,
    info_of,
    put_checkpoints,
)
from casstore.records.lifecycles.key_files import KeyStore
from casstore.records.lifecycles.lifecycles import Lifecycles
from casstore.records.lifecycles.tables import read_content
from casstore.records.lifecycles.user_data import NewValue
from casstore.session import keys as session_keys
from casstore.session.records import Record
from casstore.store import Store, check_store


def import_morrow(
    store: Store,
    source: str | os.PathLike[str],
    *,
    keys: KeyStore | None = None,
    secret: bytes | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the checkpoints and user data of a database.

    ``keys`` and ``secret`` as for ``Lifecycles``: with keys, user data is stored encrypted.
    ForeignSourceError if the file has neither table; ConflictError if the store holds a row with
    other content, or if a session got a checkpoint of another origin before all of its own were
    imported. Notes count values in columns that this release does not know.
    """
    check_store(store)
    life = Lifecycles(store, keys=keys, secret=secret)
    life.subjects.check()
    with SqliteSource(source) as database:
        parts: list[Part] = []
        notes: list[ImportNote] = []
        for kind in (_CheckpointTable, _UserDataTable):
            if kind.name in database.tables:
                parts.append(kind(database, life))
                notes += database.unread(kind.name, kind.columns)
        if not parts:
            raise ForeignSourceError(
                f"{database.path} has neither checkpoints nor user data of morrow"
            )
        return run(
            "morrow", database, store, parts, notes=notes, dry_run=dry_run, progress=progress
        )


class _TablePart(RowPart[Row]):
    """The rows of the table ``name`` in the order in which they were written."""

    columns: Sequence[str]

    def __init__(self, source: SqliteSource, life: Lifecycles) -> None:
        if not source.columns(self.name) >= frozenset(self.columns):
            raise ForeignSourceError(f"table {self.name} of {source.path} is not a table of morrow")
        self._source = source
        self._life = life

    def count(self) -> int:
        return self._source.number(f"SELECT count(*) FROM {self.name}")

    def pages(self) -> Iterator[Sequence[Row]]:
        query = f"SELECT {', '.join(self.columns)} FROM {self.name} ORDER BY rowid"
        for page in paged(self._source.ask(query), columns_bytes):
            yield [self.entry(row) for row in page]

    @abstractmethod
    def entry(self, row: Sequence[Any]) -> Row:
        """A row, converted; CorruptionError if it is invalid."""

    def damaged(self, reason: str) -> CorruptionError:
        """The error for an invalid row."""
        return CorruptionError(f"{self._source.path}: {reason}")

    def text(self, value: Any, what: str) -> str:
        """A text of the source."""
        if type(value) is not str:
            raise self.damaged(f"{what} is not a text")
        return value

    def value(self, text: Any, where: str) -> Any:
        """The stored form of a value of JSON."""
        document = self.text(text, where)
        try:
            value = json.loads(document)
        except (ValueError, RecursionError) as exc:
            raise self.damaged(f"{where} is not JSON: {exc}") from exc
        try:
            return storable(value)
        except InvalidValueError:
            # NaN and infinities, which Python writes into JSON: only the text can hold them.
            return {"json": document.encode()}

    def time_ms(self, seconds: Any, where: str) -> int:
        """Seconds of the source in milliseconds."""
        # A comparison with NaN is False.
        if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_STAMP_MS / 1000:
            raise self.damaged(f"{where} has no valid time")
        time_ms: int = round(seconds * 1000)
        return time_ms


class _CheckpointTable(_TablePart[NewCheckpoint]):
    """Checkpoints, each with the next number of its session."""

    name = "checkpoints"
    columns = ("id", "session_id", "label", "payload", "created_at")

    def entry(self, row: Sequence[Any]) -> NewCheckpoint:
        checkpoint, session, label, payload, created_at = row
        found = self.text(checkpoint, "the id of a checkpoint")
        where = f"checkpoint {found}"
        value = self.value(payload, where)
        if type(value) is not dict:
            raise self.damaged(f"the payload of {where} is not a map")
        owner = self.text(session, f"the session of {where}")
        try:
            session_keys.id_bytes(owner, "a session id")
        except InvalidInputError as exc:
            raise self.damaged(f"{where}: {exc}") from exc
        return NewCheckpoint(
            owner,
            self.text(label, f"the label of {where}"),
            value,
            found,
            self.time_ms(created_at, where),
        )

    def look(self, page: Sequence[NewCheckpoint]) -> list[Presence]:
        tables = self._life.tables
        known = tables.imported.find_many([(str(entry.id),) for entry in page])
        refs = [None if row is None else tables.imported.decode(row).ref for row in known]
        rows = iter(tables.find([tables.payload(ref) for ref in refs if ref is not None]))
        return presence(
            ref is not None and self._is_same(entry, next(rows))
            for entry, ref in zip(page, refs, strict=True)
        )

    def _is_same(self, entry: NewCheckpoint, row: Record | None) -> bool:
        if row is None:
            return False
        info = info_of(row)
        payload = read_content(self._life.store, self._life.tables.checkpoints.decode(row).content)
        found = NewCheckpoint(info.session, info.label, entry.payload, info.id, info.created_at_ms)
        if found != entry or not _same(payload, entry.payload):
            raise other_content(f"checkpoint {entry.id} of session {entry.session!r}")
        return True

    def store(self, rows: Sequence[NewCheckpoint]) -> None:
        for session in dict.fromkeys(entry.session for entry in rows):
            self._require_untouched(session)
        put_checkpoints(self._life.tables, self._life.subjects, rows, begin=True)

    def _require_untouched(self, session: str) -> None:
        """Raise ConflictError if the session's newest checkpoint was not imported.

        Imported checkpoints are appended, so they would count as newer than that one.
        """
        tables = self._life.tables
        for newest in tables.checkpoints.scan(session, reverse=True, page=1):
            if tables.imported.find(info_of(newest).id) is None:
                raise ConflictError(
                    f"session {session!r} got another checkpoint in the store before all of its "
                    "checkpoints were imported; import into another store"
                )
            return


class _UserDataTable(_TablePart[NewValue]):
    """Values of users."""

    name = "user_data"
    columns = ("user_id", "key", "value", "created_at")

    def entry(self, row: Sequence[Any]) -> NewValue:
        user, key, value, created_at = row
        name = self.text(key, "a key of user data")
        where = f"user data {name!r}"
        return NewValue(
            self.text(user, f"the user of {where}"),
            name,
            self.value(value, where),
            self.time_ms(created_at, where),
        )

    def look(self, page: Sequence[NewValue]) -> list[Presence]:
        found = self._life.users.find_many([(item.user, item.name) for item in page])
        for item, known in zip(page, found, strict=True):
            if known is not None and not (
                known.written_at_ms == item.at_ms and _same(known.value, item.value)
            ):
                raise other_content(f"user data {item.name!r}")
        return presence(known is not None for known in found)

    def store(self, rows: Sequence[NewValue]) -> None:
        self._life.users.put_many(rows)


def _same(one: Any, other: Any) -> bool:
    """Whether two stored values are equal; 1 and 1.0 are not."""
    return encode(one) == encode(other)
