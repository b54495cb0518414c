"""``copy``: copies all of one store, or chosen sessions, into another, whatever their engines.

Only what the target lacks is written. Both stores may be in use. Each session is read at one moment
and published as ``maintenance.transfer`` describes. Queued work is copied before the sessions, and
attachments after them: a batch that a commit completes in between is queued in the copy as well,
rather than lost, and an attachment of that commit is not missing. The objects that a row names are
stored before the row (P3).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    Engine,
    PutRow,
    Row,
    RowChange,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import (
    InvalidInputError,
    SessionDeletedError,
    SessionDivergedError,
    SessionNotFoundError,
)
from casstore.maintenance import systems
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.transfer import publish
from casstore.maintenance.transfer import rows as session_rows
from casstore.maintenance.transfer.objects import Sender, StoreTarget
from casstore.maintenance.transfer.publish import Arriving, Existing
from casstore.maintenance.transfer.rows import CARRIED, label_revision, owner
from casstore.objects import graph
from casstore.session import catalogue, keys, pins
from casstore.session.arguments import check_flag, list_of
from casstore.session.attempts import ChangedMeanwhile, transaction
from casstore.session.catalogue import KnownSession
from casstore.session.scanning import scan
from casstore.session.state import (
    HeadRow,
    Runtime,
    decode_head,
    encode_head,
    head_key,
    meta_key,
    runtime_of,
    tombstone_key,
)
from casstore.session.turns import decode_receipt
from casstore.store import Store, check_store

_PAGE: Final = 256
_SIGN_BYTES: Final = 8
# Copied with the head of each session.
_WITH_HEADS: Final = ("heads", "history", "receipts")
_BEFORE_HEADS: Final = ("queue",)
_AFTER_HEADS: Final = tuple(
    sorted(set(CARRIED) - {*_WITH_HEADS, *_BEFORE_HEADS, "tombstones"}),
)
# Copied with a chosen session, after its head.
_OF_CHOSEN: Final = ("sessions", "attachments")
# The tables whose rows are removed from the target when the source has deleted a session. The rows
# of attachments whose bytes the host has yet to delete are copied again later.
_OF_DELETED: Final = ("history", "queue", "receipts", "attachments")


class CopyReport(NamedTuple):
    """What a copy did.

    Attributes:
        sessions: sessions that are new in the target, or had another head there
        new_objects: objects that the target lacked
        object_bytes: their size, uncompressed
        rows: rows written
        rows_removed: rows removed from the target because the source no longer has them
    """

    sessions: int
    new_objects: int
    object_bytes: int
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

    Every object is verified when it is read. A row of the source replaces the target's row of the
    same key; but a session that is not an earlier state of the source's raises
    SessionDivergedError, and one that was deleted in the target SessionDeletedError. With
    ``mirror`` the target's rows that the source does not have are removed; gc then removes the
    objects that only these rows kept.

    ``sessions`` copies these sessions alone: their revisions, labels, receipts, attachments and
    meta. Leases and queued work stay where the work is done, as do pins, retention and records.
    SessionNotFoundError if the source does not have one of them.

    InvalidInputError if both are the same store, even when opened by different names.

    >>> copy(store, other).sessions
    1
    >>> [node.id for node in other.session("s").nodes()]
    ['ask', 'left']
    """
    check_store(source)
    check_store(target)
    check_flag(mirror, "mirror")
    chosen = None if sessions is None else list_of(sessions, "sessions")
    if mirror and chosen is not None:
        raise InvalidInputError("mirror copies everything; choose sessions or mirror")
    if is_same_store(source.engine, target.engine):
        # A mirror looks up in the source each row that it lists in the target. A row deleted and
        # created again in between would be removed.
        raise InvalidInputError("a store cannot be copied onto itself")
    work = _Copying(source, target, progress, mirror=mirror)
    if chosen is not None:
        work.copy_chosen(chosen)
        return work.report()
    held = systems.names(target.engine)
    for table in _BEFORE_HEADS:
        work.copy_table(table)
    work.copy_sessions()
    work.copy_deletions()
    for table in _AFTER_HEADS:
        work.copy_table(table)
    if mirror:
        # Heads first: without a head the other rows of a session are not read.
        for table in ("heads", *[name for name in CARRIED if name != "heads"]):
            work.remove_strange(table)
    else:
        work.tidy_records(held)
    return work.report()


class _Copying:
    """One call of ``copy``."""

    def __init__(
        self, source: Store, target: Store, progress: Progress | None, *, mirror: bool
    ) -> None:
        self._runtime = runtime_of(source)
        self._source_store, self._target_store = source, target
        self._mirror = mirror
        self._source: Engine = source.engine
        self._target: Engine = target.engine
        self._report = Phase(progress, "sessions", "sessions")
        self._objects = StoreTarget(self._target)
        self._sender = Sender(
            self._runtime.reader(), self._objects.lacking, self._objects.take, progress
        )
        self._target_runtime = runtime_of(target)
        self._sessions = 0
        self._rows = 0
        self._removed = 0

    def report(self) -> CopyReport:
        """What the copy has done so far."""
        return CopyReport(
            self._sessions,
            self._objects.new_objects,
            self._sender.object_bytes,
            self._rows,
            self._removed,
        )

    # --- tables --------------------------------------------------------------------------------

    def copy_table(self, table: str, start: bytes = b"", stop: bytes | None = None) -> None:
        """Copy the rows of a table, or of a part of it, after the objects that they name."""
        while True:
            page = self._page(table, start, stop)
            if page:
                start = page[-1].key + b"\0"
            if len(page) < _PAGE:
                return

    def _page(self, table: str, start: bytes, stop: bytes | None) -> list[Row]:
        # An attempt fails if a row was removed and the objects that it named were collected, or if
        # a session was deleted in the target.
        return publish.settle(
            f"rows of {table}",
            lambda: self._source.scan_rows(table, start=start, stop=stop, limit=_PAGE),
            lambda page: self._copy_page(table, page),
        )

    def _copy_page(self, table: str, page: list[Row]) -> list[Row]:
        rows = [row for row in page if (table, row.key) != keys.sign()]
        if table == "pins":
            rows = self._whole_pins(rows)
        puts = [PutRow(table, *row) for row in rows]
        changes, conditions = self._of_the_living(table, list(self._lacking(puts)))
        if changes:
            named = publish.named_by(changes)
            self._sender.send(named)
            self._objects.flush()
            gone = publish.displaced(self._source, self._target, table, changes)
            self._write([*changes, *gone], conditions, named)
            self._rows -= len(gone)
            self._removed += len(gone)
        return page

    def _whole_pins(self, rows: list[Row]) -> list[Row]:
        """The pins without those that have expired and whose object is gone."""
        now_ms = self._source.now_ms()
        lapsed = {
            row.key: pins.decode_pin(row.value).digest
            for row in rows
            if pins.kept_digest(row.value, now_ms) is None
        }
        gone = set(self._source.missing(list(lapsed.values())))
        return [row for row in rows if lapsed.get(row.key) not in gone]

    def _of_the_living(
        self, table: str, changes: list[PutRow]
    ) -> tuple[list[PutRow], list[Condition]]:
        """The rows without those of sessions that only the target has deleted.

        The conditions require that no other session is deleted before the write.
        SessionDeletedError if the source still has such a session: nothing would remove its rows
        from the target.
        """
        owners = [owner(table, change.key) for change in changes]
        places = [tombstone_key(key) for key in sorted({key for key in owners if key is not None})]
        deleted = self._target.get_rows(places) if places else []
        conditions = [RowIs(*place, row) for place, row in zip(places, deleted, strict=True)]
        gone: set[bytes | None] = set()
        for _, key, row in conditions:
            if row is None:
                continue
            there = [tombstone_key(key), head_key(key), meta_key(key)]
            known, head, meta = self._source.get_rows(there)
            if known is not None:
                continue
            if head is not None or meta is not None:
                raise SessionDeletedError(catalogue.name_of(KnownSession(key, head, meta)))
            gone.add(key)
        left = [one for one, key in zip(changes, owners, strict=True) if key not in gone]
        return left, list(conditions)

    def _lacking(self, puts: Iterable[PutRow]) -> Iterator[PutRow]:
        """The rows that the target lacks or has with another value."""
        return (put for put, _ in publish.changed(self._target, list(puts)))

    def _write(
        self,
        changes: Sequence[RowChange],
        conditions: Sequence[Condition] = (),
        named: Iterable[bytes] = (),
    ) -> None:
        publish.write(self._target, changes, conditions, named)
        self._rows += len(changes)

    # --- sessions ------------------------------------------------------------------------------

    def copy_sessions(self) -> None:
        """Copy every session that has a head."""
        for row in scan(self._source, "heads", b"", None):
            self._copy_session(row.key)
            self._report(self._sessions)

    def copy_chosen(self, sessions: Collection[str]) -> None:
        """Copy these sessions without leases and queued work."""
        chosen = {name: keys.session_key(name) for name in sessions}
        places = [RowKey(table, key) for key in chosen.values() for table in ("heads", "sessions")]
        there = self._source.get_rows(places) if places else []
        for at, name in enumerate(chosen):
            if there[2 * at] is None and there[2 * at + 1] is None:
                raise SessionNotFoundError(name)
        for key in chosen.values():
            self._copy_session(key)
            for table in _OF_CHOSEN:
                self.copy_table(table, key, keys.past(key))
            self._report(self._sessions)

    def _copy_session(self, key: bytes) -> None:
        publish.settle(
            f"session {keys.session_of(key)!r}",
            lambda: self._observe(key),
            lambda rows: self._copy_state(key, *rows) if rows is not None else None,
        )

    def _observe(self, key: bytes) -> tuple[bytes, Existing] | None:
        """The head row of the source and what the target has; None if the session was deleted."""
        [head] = self._source.get_rows([head_key(key)])
        if head is None:
            return None
        return head, publish.existing(
            self._target, key, keys.name_of(key, decode_head(head).long_id)
        )

    def _copy_state(self, key: bytes, head: bytes, existing: Existing) -> None:
        row, there = decode_head(head), existing.head
        first = row.revision if there == head else self._require_earlier(key, row, there)
        if self._mirror:
            # Compare all: vacuum may have rewritten any revision, and retention have settled any
            # receipt.
            first = 0
        past = session_rows.revision_rows(self._source, key, first, row.revision)
        receipts: Iterable[PutRow] = ()
        if self._mirror or there != head:
            receipts = session_rows.receipt_rows(self._source, key)
        if there is not None:
            # The target has most of these rows: decode only the others.
            past, receipts = self._lacking(past), self._lacking(receipts)
        arriving = Arriving(
            key,
            [*[decode_head(put.value) for put in past], row],
            [
                put
                for put in session_rows.label_rows(self._source, key)
                if label_revision(put.value) <= row.revision
            ],
            [put for put in receipts if decode_receipt(put.value).revision <= row.revision],
        )
        # The target's head becomes history; in a mirror only if the source has that revision.
        rows, conditions, named, _ = publish.plan(
            self._target, arriving, there, keep_replaced=not self._mirror
        )
        if named:
            state = self._runtime.decode(head)
            self._sender.send(session_rows.ordered_names(self._runtime, state, named))
            self._objects.flush()
        if rows:
            self._write(rows, conditions, named)
        if there != head:
            self._sessions += 1

    # --- conflicts -----------------------------------------------------------------------------

    def _require_earlier(self, key: bytes, row: HeadRow, there: bytes | None) -> int:
        """The first revision to copy; SessionDivergedError if ``there`` is not an earlier state."""
        if there is None:
            return 0
        known = decode_head(there)
        same: HeadRow | None = row if known.revision == row.revision else None
        if known.revision < row.revision:
            place = RowKey("history", keys.history(key, known.revision))
            [found] = self._source.get_rows([place])
            same = None if found is None else decode_head(found)
        if same is not None and same.manifest == known.manifest:
            return known.revision
        if same is not None and self._is_rewritten(same, known):
            return 0
        if same is None and known.revision < row.revision and self._has_outgrown(row, known):
            return known.revision
        raise SessionDivergedError(
            keys.name_of(key, row.long_id), "is not an earlier state of the one that is copied"
        )

    def _is_rewritten(self, row: HeadRow, known: HeadRow) -> bool:
        """Whether ``row`` is the target's revision ``known`` after a vacuum removed nodes from it.

        A vacuum keeps the rest of the row, and with it the time of the commit.
        """
        if known._replace(manifest=row.manifest, hidden=row.hidden) != row:
            return False
        return _node_ids(self._runtime, row) < _node_ids(self._target_runtime, known)

    def _has_outgrown(self, row: HeadRow, known: HeadRow) -> bool:
        """Whether ``row`` has all nodes of ``known``, which retention removed in the source."""
        if row.created_at_ms != known.created_at_ms:
            return False
        theirs = _nodes(self._target_runtime, known)
        return set(theirs) <= set(_nodes(self._runtime, row))

    # --- deletions -----------------------------------------------------------------------------

    def copy_deletions(self) -> None:
        """Delete in the target the sessions that were deleted in the source."""
        for row in scan(self._source, "tombstones", b"", None):
            self._delete_session(row)

    @transaction("a session that was deleted in the source")
    def _delete_session(self, tombstone: Row) -> None:
        """Delete a session in the target.

        If it is interrupted, the next attempt or copy continues: it finds the row of the unfinished
        deletion, or no tombstone.
        """
        key = tombstone.key
        places = [tombstone_key(key), keys.unfinished(key), head_key(key), meta_key(key)]
        deleted, unfinished, head, meta = self._target.get_rows(places)
        if deleted == tombstone.value and unfinished is None:
            return
        put = PutRow(*tombstone_key(key), tombstone.value)
        if unfinished is not None:
            name = unfinished.decode()
            self._write([put])
        elif head is not None or meta is not None:
            known = KnownSession(key, head, meta)
            name = catalogue.name_of(known)
            gone = catalogue.burial(known).rows
            self._write([put, *[row for row in gone if row[:2] != tombstone_key(key)]])
        else:
            # An interrupted copy may have left rows of the session without its head.
            self._clear(key, keys.session_of(key) or "")
            unseen = [RowIs(*head_key(key), None), RowIs(*meta_key(key), None)]
            deletions = [DeleteRow(*keys.expiry(key)), DeleteRow(*keys.policy(key))]
            self._write([put, *deletions], conditions=unseen)
            return
        self._clear(key, name)

    def _clear(self, key: bytes, name: str) -> None:
        for table in _OF_DELETED:
            self._remove(table, scan(self._target, table, key, keys.past(key)))
        self._removed += catalogue.clear(self._target_runtime, name, key)

    def tidy_records(self, held: Collection[str]) -> None:
        """Remove rows of record systems in the target that do not fit the copied rows.

        ``held``: the names of the systems that had rows in the target before the copy.
        """
        for name in held:
            system = systems.load(name)
            # Rows of a system that is not installed stay as they were copied.
            if not isinstance(system, str):
                self._removed += system.after_copy(self._source_store, self._target_store)

    def remove_strange(self, table: str) -> None:
        """Remove the target's rows that the source does not have."""
        self._remove(table, self._strange(table))

    def _strange(self, table: str) -> Iterator[Row]:
        rows = scan(self._target, table, b"", None)
        while page := list(islice(rows, _PAGE)):
            places = [RowKey(table, row.key) for row in page]
            there = self._source.get_rows(places)
            yield from [
                row
                for place, row, known in zip(places, page, there, strict=True)
                if known is None and place != keys.sign()
            ]

    def _remove(self, table: str, rows: Iterator[Row]) -> None:
        while batch := list(islice(rows, _PAGE)):
            self._target.write(Write(rows=[DeleteRow(table, row.key) for row in batch]))
            self._removed += len(batch)


def _nodes(runtime: Runtime, row: HeadRow) -> list[bytes]:
    index = runtime.index(runtime.decode(encode_head(row)).manifest)
    return index.digests(range(index.count))


def _node_ids(runtime: Runtime, row: HeadRow) -> set[str]:
    headers = graph.read_headers(runtime.reader(), _nodes(runtime, row))
    return {node.id for node in headers}


@transaction("the target")
def is_same_store(source: Engine, target: Engine) -> bool:
    """Whether a row that is written to ``target`` can be read from ``source``.

    Paths and addresses do not show it: a directory has many names, a server is reached in many
    ways, and a copy of all files has the identity of the original. So a row that no copy carries
    gets a random value in ``target``, unless the values that both have already differ.
    """
    if source is target:
        return True
    before, there, after = _sign(target), _sign(source), _sign(target)
    if before != after:
        raise ChangedMeanwhile  # another process has just written one
    if there != before:
        return False
    put = PutRow(*keys.sign(), secrets.token_bytes(_SIGN_BYTES))
    target.write(Write(rows=[put]))
    if _sign(source) == put.value:
        return True
    if _sign(target) != put.value:
        raise ChangedMeanwhile
    # The target had it while the source was read.
    return False


def _sign(engine: Engine) -> bytes | None:
    return engine.get_rows([keys.sign()])[0]
