"""Checks rows, one by one and against each other.

Rows are read in pages, each a separate snapshot. Before two rows are reported as inconsistent, both
are read again in one snapshot.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.faults import Checking
from casstore.engine.protocol import Engine, Row, RowKey
from casstore.errors import CasstoreError, CorruptionError
from casstore.format.digest import Digest
from casstore.maintenance import findings as codes
from casstore.maintenance.findings import Findings, Where
from casstore.maintenance.roots import kept_name, live_roots
from casstore.maintenance.transfer.rows import OF_SESSIONS, label_revision
from casstore.session import catalogue, keys, leases, queue
from casstore.session.state import HeadRow, decode_head
from casstore.session.turns import decode_receipt

_PAGE: Final = 256
# The tables from which deleting a session removes rows.
_REMOVED_WITH_SESSION: Final = ("history", "queue", "receipts")
_REVISION_BYTES: Final = 8


class Revision(NamedTuple):
    """A revision, as its row has it."""

    session: str
    session_key: bytes
    place: RowKey
    row: bytes
    head: HeadRow
    is_head: bool


def name_of(session_key: bytes, long_id: str | None = None) -> str:
    """A session's id; if no row has it whole, the part that its key has."""
    try:
        name = keys.session_of(session_key)
    except (ValueError, CasstoreError):
        name = None
    return name or long_id or session_key.decode(errors="backslashreplace")


def session_of(table: str | None, key: bytes | None) -> str | None:
    """The id of the session that a row belongs to; None if it belongs to none."""
    if table not in OF_SESSIONS or not key:
        return None
    return name_of(keys.session_part(key))


class RowsCheck:
    """Checks the readable rows and reports findings."""

    def __init__(self, engine: Engine, checking: Checking, found: Findings) -> None:
        self._engine = engine
        self._checking = checking
        self._found = found
        self._judges: dict[str, Callable[[Row], object]] = {
            "history": self._history_row,
            "leases": lambda row: leases.decode_lease("", row.value),
            "queue": self._queue_row,
            "receipts": lambda row: decode_receipt(row.value),
            "sessions": lambda row: catalogue.decode_meta(row.key, row.value),
        }
        #: Tables that must not be read, because their pages are damaged.
        self.unsafe: frozenset[str] = frozenset()
        self.rows = 0

    # --- reading ------------------------------------------------------------------------

    def readable(self, table: str) -> Iterator[Row]:
        """All rows of a table but those that are damaged."""
        start = b""
        while True:
            page = self._checking.readable_rows(table, start=start, limit=_PAGE)
            yield from page
            if len(page) < _PAGE:
                return
            start = page[-1].key + b"\0"

    def now(self, places: Sequence[RowKey]) -> list[bytes | None]:
        """The current rows, from one snapshot; an empty list if one of them cannot be read.

        ``check_rows`` reports the damage; here it only means that the rows cannot be compared.
        """
        if any(place.table in self.unsafe for place in places):
            return []
        try:
            return self._engine.get_rows(places)
        except CorruptionError:
            return []

    def revisions(self, *tables: str) -> Iterator[Revision]:
        """All revisions whose rows can be read, those of the heads last."""
        for table in tables or ("history", "heads"):
            for row in self.readable(table):
                if table == "history" and keys.is_label(row.key):
                    continue
                try:
                    head = decode_head(row.value)
                except CorruptionError:
                    continue
                is_head = table == "heads"
                key = row.key if is_head else row.key[:-_REVISION_BYTES]
                name = name_of(key, head.long_id)
                yield Revision(name, key, RowKey(table, row.key), row.value, head, is_head)

    def revisions_by_session(self) -> Iterator[Revision]:
        """All revisions, session by session, each from its oldest revision to its head."""
        both = self.revisions("history"), self.revisions("heads")
        return heapq.merge(*both, key=lambda one: (one.session_key, one.is_head))

    def keepers(self) -> Iterator[tuple[str | None, str, bytes]]:
        """Rows other than revisions that keep objects: the session, a name, and the digest."""
        roots = live_roots(self._engine.now_ms())
        for table in ("queue", "attachments", "pins"):
            if table in self.unsafe:
                continue
            for row in self.readable(table):
                try:
                    name, digests = kept_name(table, row), list(roots.named(table, row))
                except (CasstoreError, ValueError):
                    continue
                for digest in digests:
                    yield session_of(table, row.key), name, digest

    # --- checking -----------------------------------------------------------------------

    def judge_with(self, table: str, judge: Callable[[Row], None]) -> None:
        """Register a function that checks the rows of a table."""
        self._judges[table] = judge

    def run(self, tables: Sequence[str], progress: Callable[[int], None]) -> None:
        """Check these tables."""
        roots = live_roots(self._engine.now_ms())
        for table in tables:
            judge = self._judges.get(table)
            session = b""
            last: int | None = None
            for row in self.readable(table):
                self.rows += 1
                if not self.rows % _PAGE:
                    progress(self.rows)
                try:
                    if table in roots.tables:
                        self._require_objects(table, row, list(roots.named(table, row)))
                    if judge is not None:
                        judge(row)
                except (CasstoreError, ValueError, IndexError, TypeError) as exc:
                    self._malformed(table, row, exc)
                    continue
                if table in _REMOVED_WITH_SESSION:
                    key = keys.session_part(row.key)
                    if key != session:
                        self._end_of_history(table, session, last)
                        session, last = key, None
                        self._owner(table, row, key)
                    if table == "history" and not keys.is_label(row.key):
                        last = self._follows(key, last, row)
            if table in _REMOVED_WITH_SESSION:
                self._end_of_history(table, session, last)
        progress(self.rows)

    def _malformed(self, table: str, row: Row, exc: Exception) -> None:
        if self.now([RowKey(table, row.key)]) != [row.value]:
            return
        where = Where(session_of(table, row.key), None, None, table, row.key)
        what = f"a row of table {table} cannot be decoded: {exc}"
        self._found.add(codes.ROW_MALFORMED, what, where)

    def _require_objects(self, table: str, row: Row, digests: list[bytes]) -> None:
        """Report missing objects that a row names, if it still does when read again."""
        missing = self._engine.missing(digests) if digests else []
        if not missing or self.now([RowKey(table, row.key)]) != [row.value]:
            return
        revision = decode_head(row.value).revision if table in ("heads", "history") else None
        for digest in missing:
            where = Where(session_of(table, row.key), revision, Digest(digest), table, row.key)
            what = f"a row of table {table} names object {digest.hex()}, which is not stored"
            self._found.add(codes.ROOT_MISSING, what, where)

    # --- single rows --------------------------------------------------------------------

    def _history_row(self, row: Row) -> None:
        if keys.is_label(row.key):
            self._label(row)
            return
        head = decode_head(row.value)
        key, number = row.key[:-_REVISION_BYTES], row.key[-_REVISION_BYTES:]
        rows = self.now([RowKey("heads", key), RowKey("history", row.key)])
        if rows[1:] != [row.value]:
            return
        wrong = head.revision != int.from_bytes(number, "big")
        current = self._revision_of(rows[0])
        if current is not None:
            wrong = wrong or head.revision >= current
        if wrong:
            name = name_of(key, head.long_id)
            where = Where(name, head.revision, None, "history", row.key)
            what = (
                f"the history of session {name!r} has revision {head.revision} under number "
                f"{int.from_bytes(number, 'big')}, or not below the revision of its head"
            )
            self._found.add(codes.HISTORY_WRONG, what, where)

    @staticmethod
    def _revision_of(head: bytes | None) -> int | None:
        try:
            return None if head is None else decode_head(head).revision
        except CorruptionError:
            return None

    def _label(self, row: Row) -> None:
        key = keys.session_part(row.key)
        revision = label_revision(row.value)
        label = row.value[_REVISION_BYTES:].decode()
        places = [RowKey("heads", key), RowKey("history", keys.history(key, revision))]
        rows = self.now([*places, RowKey("history", row.key)])
        if rows[1:] != [None, row.value]:
            return
        current = self._revision_of(rows[0])
        if current is not None and current != revision:
            name = name_of(key)
            where = Where(name, revision, None, "history", row.key)
            what = f"label {label!r} of session {name!r} names revision {revision}"
            self._found.add(codes.LABEL_DANGLING, what + ", which is not there", where)

    def _queue_row(self, row: Row) -> None:
        key = keys.session_part(row.key)
        if keys.is_queue_batch(row.key):
            names = queue.put_names(key, row.key, row.value)
            places = [RowKey("queue", row.key), *[RowKey("queue", name.key) for name in names]]
            rows = self.now(places)
            wrong = rows[1:] != [name.value for name in names]
        elif row.key == keys.queue_counter(key).key:
            return
        else:
            seq = int.from_bytes(row.value, "big")
            places = [RowKey("queue", row.key), keys.queue_batch(key, seq)]
            rows = self.now(places)
            wrong = rows[1:] == [None]
        if wrong and rows[:1] == [row.value]:
            name = name_of(key)
            what = f"a batch in the queue of session {name!r} and the rows that find it differ"
            self._found.add(codes.QUEUE_WRONG, what, Where(name, None, None, "queue", row.key))

    # --- sessions as a whole ------------------------------------------------------------

    def _owner(self, table: str, row: Row, key: bytes) -> None:
        """Report rows left of a deleted session, and the history of a session without a head."""
        places = [RowKey("heads", key), RowKey("tombstones", key), RowKey(table, row.key)]
        rows = self.now(places)
        if not rows or rows[2] is None or rows[0] is not None:
            return
        name = name_of(key)
        where = Where(name, None, None, table, row.key)
        if rows[1] is not None:
            what = f"session {name!r} was deleted, but still has rows in table {table}"
            self._found.add(codes.DELETION_UNFINISHED, what, where)
        elif table == "history":
            what = f"session {name!r} has earlier revisions, but no head"
            self._found.add(codes.HEAD_MISSING, what, where)

    def _follows(self, key: bytes, last: int | None, row: Row) -> int:
        revision = int.from_bytes(row.key[-_REVISION_BYTES:], "big")
        if last is not None and revision != last + 1:
            self._gap(key, last, revision)
        return revision

    def _end_of_history(self, table: str, key: bytes, last: int | None) -> None:
        if table != "history" or last is None:
            return
        rows = self.now([RowKey("heads", key)])
        head = self._revision_of(rows[0] if rows else None)
        if head is not None and head > last + 1:
            self._gap(key, last, head)

    def _gap(self, key: bytes, last: int, revision: int) -> None:
        start, stop = keys.history(key, last + 1), keys.history(key, revision)
        try:
            if self._engine.scan_rows("history", start=start, stop=stop, limit=1):
                # These revisions were committed since the rows before were read.
                return
        except CorruptionError:
            # There is a row, and its damage is reported already.
            return
        name = name_of(key)
        what = f"session {name!r} has no revisions between {last} and {revision}"
        self._found.add(codes.HISTORY_GAP, what, Where(name, revision, None, "history", None))
