"""Databases of morrow's ``agent_state`` into a store: checkpoints, and data of users.

    checkpoints   id, session_id, label, payload (JSON), created_at (seconds)
    user_data     user_id, key, value (JSON), created_at (seconds)

The original keeps them in two files; either may be given, or one with both. Checkpoints go
in the order in which they were written, which the original itself did not always know.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from casstore.compat import importing
from casstore.compat.importing import ImportReport
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
from casstore.records.lifecycles.contents import read_content
from casstore.records.lifecycles.keys import KeyStore
from casstore.records.lifecycles.lifecycles import Lifecycles
from casstore.records.lifecycles.references import Ref
from casstore.records.lifecycles.tables import fields
from casstore.records.lifecycles.user_data import NewValue
from casstore.session import keys as session_keys
from casstore.session.records import Record
from casstore.store import Store, check_store

_PAGE: Final = 100
_PAGE_BYTES: Final = 4 << 20
_TABLES: Final = {
    "checkpoints": ("id", "session_id", "label", "payload", "created_at"),
    "user_data": ("user_id", "key", "value", "created_at"),
}


def import_agent_state(
    store: Store,
    file: str | os.PathLike[str],
    *,
    keys: KeyStore | None = None,
    secret: bytes | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Move the checkpoints and user data of a database over, and compare all of them.

    The file is as it was afterwards. ``keys`` and ``secret`` as for ``Lifecycles``: with keys,
    user data arrives encrypted. ConflictError if the store has a row otherwise, or has
    gone on with a session; ForeignSourceError if the file is of something else. The report also
    counts what stays behind: rows that say something in a column that is not known here.
    """
    check_store(store)
    life = Lifecycles(store, keys=keys, secret=secret)
    life.subjects.check()
    with SqliteSource(file) as source:
        parts: list[importing.Part] = []
        for table, columns in _TABLES.items():
            if table in source.tables:
                if not frozenset(columns) <= source.columns(table):
                    raise ForeignSourceError(f"{file}: its table {table} is not that of morrow")
                kind = _Checkpoints if table == "checkpoints" else _UserData
                parts += kind(source, life), *source.unread(table, columns)
        if not parts:
            raise ForeignSourceError(f"{file} has neither checkpoints nor user data of morrow")
        return importing.move(source, store, parts, dry_run=dry_run, progress=progress)


class _Rows:
    """The rows of one table in the order in which they were written."""

    def __init__(self, source: SqliteSource, life: Lifecycles, table: str) -> None:
        self._source = source
        self._life = life
        self._table = table
        self._query = f"SELECT {', '.join(_TABLES[table])} FROM {table} ORDER BY rowid"

    def count(self) -> int:
        """How many there are."""
        return int(next(self._source.ask(f"SELECT count(*) FROM {self._table}"))[0])

    def raw_pages(self) -> Iterator[list[tuple[Any, ...]]]:
        """All rows, as many at a time as one write should hold."""
        page: list[tuple[Any, ...]] = []
        room = _PAGE_BYTES
        for row in self._source.ask(self._query):
            page.append(row)
            room -= sum([len(each) for each in row if isinstance(each, str | bytes)])
            if len(page) == _PAGE or room <= 0:
                yield page
                page, room = [], _PAGE_BYTES
        if page:
            yield page

    def text(self, value: Any, what: str) -> str:
        """A text of the source."""
        if type(value) is not str:
            raise CorruptionError(f"{self._source.path}: {what} is no text")
        return value

    def value(self, text: Any, where: str) -> Any:
        """A value of JSON, in the form in which it is kept."""
        spelled = self.text(text, where)
        try:
            value = json.loads(spelled)
        except (ValueError, RecursionError) as exc:
            raise CorruptionError(f"{self._source.path}: {where} is no JSON: {exc}") from exc
        try:
            return storable(value)
        except InvalidValueError:
            # Numbers that are none, as Python's JSON writes them: only the text has them.
            return {"json": spelled.encode()}

    def time_ms(self, seconds: Any, where: str) -> int:
        """A time of the source in milliseconds."""
        if type(seconds) not in (int, float) or not math.isfinite(seconds):
            raise CorruptionError(f"{self._source.path}: the time of {where} is none")
        found: int = round(seconds * 1000)
        if not 0 <= found <= MAX_STAMP_MS:
            raise CorruptionError(f"{self._source.path}: the time of {where} is none")
        return found


class _Checkpoints(_Rows):
    """Checkpoints, each with the next number of its session."""

    name = "checkpoints"

    def __init__(self, source: SqliteSource, life: Lifecycles) -> None:
        super().__init__(source, life, "checkpoints")

    def pages(self) -> Iterator[Sequence[NewCheckpoint]]:
        """All of them in order."""
        for page in self.raw_pages():
            yield [self._entry(*row) for row in page]

    def _entry(
        self, checkpoint: Any, session: Any, label: Any, payload: Any, created_at: Any
    ) -> NewCheckpoint:
        found = self.text(checkpoint, "the id of a checkpoint")
        where = f"checkpoint {found}"
        value = self.value(payload, where)
        if type(value) is not dict:
            raise CorruptionError(f"{self._source.path}: {where} is no map")
        owner = self.text(session, f"the session of {where}")
        try:
            session_keys.id_bytes(owner, "a session id")
        except InvalidInputError as exc:
            raise CorruptionError(f"{self._source.path}: {where}: {exc}") from exc
        return NewCheckpoint(
            owner,
            self.text(label, f"the label of {where}"),
            value,
            found,
            self.time_ms(created_at, where),
        )

    def is_stored(self, page: Sequence[NewCheckpoint]) -> list[bool]:
        """Which of them the store has."""
        tables = self._life.tables
        known = tables.imported.find_many([(str(entry.id),) for entry in page])
        refs = [None if place is None else Ref(*place.value) for place in known]
        rows = iter(tables.find([tables.payload(ref) for ref in refs if ref is not None]))
        return [
            ref is not None and self._is_same(entry, next(rows))
            for entry, ref in zip(page, refs, strict=True)
        ]

    def _is_same(self, entry: NewCheckpoint, row: Record | None) -> bool:
        if row is None:
            return False
        info = info_of(row)
        payload = read_content(self._life.store, fields(row))
        found = NewCheckpoint(info.session, info.label, payload, info.id, info.created_at_ms)
        if found[:2] != entry[:2] or found[3:] != entry[3:] or not _same(payload, entry.payload):
            raise ConflictError(
                f"checkpoint {entry.id} of session {entry.session!r} is in the store with other "
                "content; import into another store"
            )
        return True

    def store(self, rows: Sequence[NewCheckpoint]) -> None:
        """Put them into the store, in one write, with sessions that are not there."""
        for session in dict.fromkeys(entry.session for entry in rows):
            self._require_untouched(session)
        put_checkpoints(self._life.tables, self._life.subjects, rows, begin=True)

    def _require_untouched(self, session: str) -> None:
        """What is added counts as newer than what is there, so that must be from the source."""
        tables = self._life.tables
        for newest in tables.checkpoints.scan(session, reverse=True, page=1):
            if tables.imported.find(info_of(newest).id) is None:
                raise ConflictError(
                    f"session {session!r} went on in the store before all of it was imported; "
                    "import into another store"
                )
            return


class _UserData(_Rows):
    """Values of users."""

    name = "user_data"

    def __init__(self, source: SqliteSource, life: Lifecycles) -> None:
        super().__init__(source, life, "user_data")

    def pages(self) -> Iterator[Sequence[NewValue]]:
        """All of them in order."""
        for page in self.raw_pages():
            yield [self._entry(*row) for row in page]

    def _entry(self, user: Any, key: Any, value: Any, created_at: Any) -> NewValue:
        name = self.text(key, "a key of user data")
        where = f"user data {name!r}"
        return NewValue(
            self.text(user, f"the user of {where}"),
            name,
            self.value(value, where),
            self.time_ms(created_at, where),
        )

    def is_stored(self, page: Sequence[NewValue]) -> list[bool]:
        """Which of them the store has."""
        found = self._life.users.find_many([(item.user, item.name) for item in page])
        for item, known in zip(page, found, strict=True):
            if known is not None and not (
                known.written_at_ms == item.at_ms and _same(known.value, item.value)
            ):
                raise ConflictError(
                    f"user data {item.name!r} is in the store with other content; "
                    "import into another store"
                )
        return [known is not None for known in found]

    def store(self, rows: Sequence[NewValue]) -> None:
        """Put them into the store, in one write."""
        self._life.users.put_many(rows)


def _same(one: Any, other: Any) -> bool:
    """Are two stored values the same? 1 and 1.0 are not."""
    return encode(one) == encode(other)
