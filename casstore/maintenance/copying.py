"""Everything of one store into another, whatever engines they have: only what is lacking.

The source may be in use. Each session is copied as of one moment: its head is read first,
what came before it does not change, and in the target the head is written last. Queued work
is copied before the sessions and attachments after them, so that what a commit does in
between is done twice in the copy rather than not at all. Whatever a row names is stored
before the row (P3). Stopped anywhere, the copy is sound and goes on when it is called again.

The target may be in use as well. What is keyed by session comes with its head, in one write, on
condition that no other writer has moved the one that is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    Engine,
    ObjectsExist,
    PutRow,
    Row,
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
    SessionNotFoundError,
)
from casstore.format.node import NodeHeader
from casstore.maintenance import systems
from casstore.maintenance.arriving_labels import ArrivingLabels, arriving_labels
from casstore.maintenance.carried import CARRIED, owner
from casstore.maintenance.displaced import displaced
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.roots import ROOTS
from casstore.maintenance.sameness import is_same_store
from casstore.maintenance.sending import Sender, StoreTarget
from casstore.objects import graph
from casstore.session import catalogue, keys, pins
from casstore.session.attempts import Attempts
from casstore.session.catalogue import KnownSession
from casstore.session.heads import HeadRow, decode_head, encode_head, head_key
from casstore.session.receipts import decode_receipt
from casstore.session.scanning import scan
from casstore.session.state import Runtime, State, meta_key, tombstone_key
from casstore.store import Store, check_store

_PAGE: Final = 256
# What belongs to a session beside its head, and goes with it.
_OF_SESSIONS: Final = ("history", "queue", "receipts")
# What goes with a session wherever it goes.
_KNOWN_OF_SESSIONS: Final = ("sessions", "attachments")
# Copied for each session by itself.
_WITH_HEADS: Final = ("heads", "history", "receipts")
_BEFORE_HEADS: Final = ("queue",)
_AFTER_HEADS: Final = tuple(
    sorted(set(CARRIED) - {*_WITH_HEADS, *_BEFORE_HEADS, "tombstones"}),
)


class CopyReport(NamedTuple):
    """What a copy did."""

    #: Sessions that are new in the target, or have moved.
    sessions: int
    #: Objects that the target lacked, and their bytes before compression.
    new_objects: int
    object_bytes: int
    #: Rows written, and rows removed because the source has them no more.
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

    Every object is proven on its way. Where the target has a row of its own under the same key,
    the source's takes its place; but a session that is not an earlier state of the source's
    stops the copy with SessionDivergedError, or SessionDeletedError. With ``mirror`` rows that the
    source does not have are removed; gc gives back what only they kept.

    ``sessions`` names those to copy, and nothing else: their revisions, labels, receipts,
    attachments and what is known of them. Leases and queued work stay where the work is done, as
    do pins, retention and records. SessionNotFoundError if one of them is not there.

    InvalidInputError if both are the same store, by whatever name.

    >>> copy(store, other).sessions
    1
    >>> [node.id for node in other.session("s").nodes()]
    ['ask', 'left']
    """
    check_store(source)
    check_store(target)
    if mirror and sessions is not None:
        raise InvalidInputError("a mirror has everything; choose sessions or mirror")
    if is_same_store(source.engine, target.engine):
        # Each row is looked up in the source after it was listed in the target: one that is deleted
        # and made again in between would be taken for strange, and removed.
        raise InvalidInputError("a store cannot be copied onto itself")
    work = _Copying(source, target, progress, mirror=mirror)
    if sessions is not None:
        work.copy_chosen(sessions)
        return work.report()
    held = systems.names(target.engine)
    for table in _BEFORE_HEADS:
        work.copy_table(table)
    work.copy_sessions()
    work.copy_deletions()
    for table in _AFTER_HEADS:
        work.copy_table(table)
    if mirror:
        # Heads are the first to go where the source has none.
        for table in ("heads", *[name for name in CARRIED if name != "heads"]):
            work.remove_strange(table)
    else:
        work.tidy_records(held)
    return work.report()


class _Copying:
    """One copy on its way."""

    def __init__(
        self, source: Store, target: Store, progress: Progress | None, *, mirror: bool
    ) -> None:
        self._runtime = Runtime(source)
        self._source_store, self._target_store = source, target
        self._mirror = mirror
        self._source: Engine = source.engine
        self._target: Engine = target.engine
        self._progress = progress
        self._objects = StoreTarget(self._target)
        self._sender = Sender(
            self._runtime.reader(), self._objects.lacking, self._objects.take, progress
        )
        self._target_runtime = Runtime(target)
        self._sessions = 0
        self._rows = 0
        self._removed = 0

    def report(self) -> CopyReport:
        """What was done so far."""
        return CopyReport(
            self._sessions,
            self._objects.new_objects,
            self._sender.object_bytes,
            self._rows,
            self._removed,
        )

    # --- tables --------------------------------------------------------------------------------

    def copy_table(self, table: str, start: bytes = b"", stop: bytes | None = None) -> None:
        """Copy the rows of a table, or of a part of it, as they are, after what they name."""
        while True:
            page = self._page(table, start, stop)
            if page:
                start = page[-1].key + b"\0"
            if len(page) < _PAGE:
                return

    def _page(self, table: str, start: bytes, stop: bytes | None) -> list[Row]:
        attempts = Attempts(f"rows of {table}")
        while True:
            attempts.begin()
            page = self._source.scan_rows(table, start=start, stop=stop, limit=_PAGE)
            rows = [row for row in page if (table, row.key) != keys.sign()]
            if table == "pins":
                rows = self._whole_pins(rows)
            try:
                self._put(table, rows, self._named(table, rows))
            except (ObjectNotFoundError, ConditionFailedError):
                # A row went away and what it kept was collected, before it could be copied; or a
                # session was deleted in the target just now.
                continue
            return page

    def _named(self, table: str, rows: Iterable[Row]) -> list[bytes]:
        if table not in ROOTS.tables:
            return []
        return [name for row in rows for name in ROOTS.named(table, row)]

    def _whole_pins(self, rows: list[Row]) -> list[Row]:
        """The pins without those whose time is up and whose object is gone.

        Earlier releases left such pins behind when they collected.
        """
        now_ms = self._source.now_ms()
        lapsed = {
            row.key: pins.decode_pin(row.value).digest
            for row in rows
            if pins.kept_digest(row.value, now_ms) is None
        }
        gone = set(self._source.missing(list(lapsed.values())))
        return [row for row in rows if lapsed.get(row.key) not in gone]

    def _put(self, table: str, rows: Sequence[Row], named: Sequence[bytes]) -> None:
        """Write those rows that are not in the target already."""
        changes, conditions = self._of_the_living(table, self._changes(table, rows))
        if changes:
            self._sender.send(named)
            self._objects.flush()
            gone = displaced(self._source, self._target, table, changes)
            self._write([*changes, *gone], named, conditions)
            self._rows -= len(gone)
            self._removed += len(gone)

    def _of_the_living(
        self, table: str, changes: list[PutRow]
    ) -> tuple[list[PutRow], list[Condition]]:
        """The rows without those of sessions that only the target has deleted; that none is since.

        SessionDeletedError if the source still has such a session: nothing would remove its rows
        from the target again. What only speaks of one stays behind.
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

    def _changes(self, table: str, rows: Sequence[Row]) -> list[PutRow]:
        changes: list[PutRow] = []
        for start in range(0, len(rows), _PAGE):
            page = rows[start : start + _PAGE]
            there = self._target.get_rows([RowKey(table, row.key) for row in page])
            changes += [
                PutRow(table, row.key, row.value)
                for row, known in zip(page, there, strict=True)
                if row.value != known
            ]
        return changes

    def _write(
        self,
        changes: Sequence[RowChange],
        named: Sequence[bytes] = (),
        conditions: Sequence[Condition] = (),
    ) -> None:
        exist = [ObjectsExist(sorted(set(named)))] if named else []
        self._target.write(Write(conditions=[*conditions, *exist], rows=changes))
        self._rows += len(changes)

    # --- sessions ------------------------------------------------------------------------------

    def copy_sessions(self) -> None:
        """Copy every session that has a head."""
        for row in scan(self._source, "heads", b"", None):
            self._copy_session(row.key)
            self._tell_sessions()

    def copy_chosen(self, sessions: Collection[str]) -> None:
        """Copy these sessions, and nothing that belongs to others or to where they run."""
        chosen = {name: keys.session_key(name) for name in sessions}
        places = [RowKey(table, key) for key in chosen.values() for table in ("heads", "sessions")]
        there = self._source.get_rows(places) if places else []
        for at, name in enumerate(chosen):
            if there[2 * at] is None and there[2 * at + 1] is None:
                raise SessionNotFoundError(name)
        for key in chosen.values():
            self._copy_session(key)
            for table in _KNOWN_OF_SESSIONS:
                self.copy_table(table, key, keys.past(key))
            self._tell_sessions()

    def _tell_sessions(self) -> None:
        if self._progress is not None:
            self._progress(Step("sessions", self._sessions, None, "sessions"))

    def _copy_session(self, key: bytes) -> None:
        attempts = Attempts(f"session {keys.session_of(key)!r}")
        while True:
            attempts.begin()
            head = self._source.get_rows([head_key(key)])[0]
            if head is None:
                return  # deleted since it was listed
            there = self._target.get_rows([head_key(key)])[0]
            try:
                self._copy_state(key, head)
            except (ObjectNotFoundError, ConditionFailedError):
                # Collected before it could be copied; or another writer has moved it in the target.
                continue
            except CorruptionError:
                # Damage, unless it was deleted or vacuumed in the middle, here or there, and
                # collected.
                found = [one.get_rows([head_key(key)])[0] for one in (self._source, self._target)]
                if found == [head, there]:
                    raise
                continue
            return

    def _copy_state(self, key: bytes, head: bytes) -> None:
        row = decode_head(head)
        there, deleted = self._target.get_rows([head_key(key), tombstone_key(key)])
        if deleted is not None:
            raise SessionDeletedError(self._name(key, row))
        changes: list[RowChange] = []
        named: list[bytes] = []
        revisions = self._new_revisions(key, row, there, has_moved=there != head)
        if revisions or there != head:
            self._copy_objects(head, revisions)
            named = [*self._named("history", revisions), *self._named("heads", [Row(key, head)])]
            changes += [PutRow("history", one.key, one.value) for one in revisions]
            changes += self._forgotten(key, row, there)
            changes += self._changes("receipts", list(self._receipts(key, row.revision)))
            if there != head:
                changes.append(PutRow(*head_key(key), head))
        labels = self._labels(key, row, there, revisions, moves=there != head)
        changes += labels.changes
        if changes:
            conditions: list[Condition] = [
                RowIs(*head_key(key), there),
                RowIs(*tombstone_key(key), None),
                *labels.conditions,
            ]
            self._write(changes, named, conditions)
        if there != head:
            self._sessions += 1

    def _new_revisions(
        self, key: bytes, row: HeadRow, there: bytes | None, *, has_moved: bool
    ) -> list[Row]:
        """The rows of earlier revisions that the target has not, or has otherwise."""
        first = self._require_ancestor(key, row, there) if has_moved else row.revision
        if self._mirror:
            # A vacuum may have rewritten any of them.
            first = 0
        low, high = keys.history(key, first), keys.history(key, row.revision)
        found = list(scan(self._source, "history", low, high))
        return [Row(change.key, change.value) for change in self._changes("history", found)]

    def _labels(
        self,
        key: bytes,
        row: HeadRow,
        there: bytes | None,
        revisions: Sequence[Row],
        *,
        moves: bool,
    ) -> ArrivingLabels:
        """The labels that the target has not, or has for others, of what it has or gets."""
        labels = [
            label
            for label in scan(self._source, "history", keys.labels(key), keys.past(key))
            if int.from_bytes(label.value[:8], "big") <= row.revision
        ]
        coming = {row.revision, *[decode_head(one.value).revision for one in revisions]}
        if there is not None:
            # It is the head, or becomes history in the same write.
            coming.add(decode_head(there).revision)
        changes = self._changes("history", labels)
        return arriving_labels(self._target, key, changes, coming, moves=moves)

    def _forgotten(self, key: bytes, row: HeadRow, there: bytes | None) -> list[PutRow]:
        """The target's last revision as history, if retention has removed it in the source.

        So nothing is lost by what takes its place. A mirror forgets it, too.
        """
        if there is None or self._mirror or decode_head(there).revision >= row.revision:
            return []
        place = RowKey("history", keys.history(key, decode_head(there).revision))
        is_known = self._source.get_rows([place])[0] is not None
        return [] if is_known else [PutRow(*place, there)]

    def _require_ancestor(self, key: bytes, row: HeadRow, there: bytes | None) -> int:
        """From which revision on history is to be copied."""
        if there is None:
            return 0
        known = decode_head(there)
        same: HeadRow | None = row if known.revision == row.revision else None
        if known.revision < row.revision:
            place = RowKey("history", keys.history(key, known.revision))
            found = self._source.get_rows([place])[0]
            same = None if found is None else decode_head(found)
        if same is not None and same.manifest == known.manifest:
            return known.revision
        if same is not None and self._is_rewritten(same, known):
            return 0
        if same is None and known.revision < row.revision and self._has_outgrown(row, known):
            return known.revision
        raise SessionDivergedError(
            self._name(key, row), "is not an earlier state of the one that is copied"
        )

    def _is_rewritten(self, row: HeadRow, known: HeadRow) -> bool:
        """Is this the target's revision, from which a vacuum has removed nodes since?

        It keeps everything else, and the time by which the engine committed it among it.
        """
        if _beside_the_graph(row) != _beside_the_graph(known):
            return False
        ours, theirs = self._runtime.decode(encode_head(row)), encode_head(known)
        left = self._nodes(self._runtime, ours)
        return {node.id for node in left} < {
            node.id
            for node in self._nodes(self._target_runtime, self._target_runtime.decode(theirs))
        }

    def _has_outgrown(self, row: HeadRow, known: HeadRow) -> bool:
        """Has the source all nodes of the target's revision, which retention has removed there?"""
        if row.created_at_ms != known.created_at_ms:
            return False
        ours = self._digests(self._runtime, self._runtime.decode(encode_head(row)))
        theirs = self._target_runtime.decode(encode_head(known))
        return set(self._digests(self._target_runtime, theirs)) <= set(ours)

    @staticmethod
    def _digests(runtime: Runtime, state: State) -> list[bytes]:
        index = runtime.index(state.manifest)
        return index.digests(range(index.count))

    def _nodes(self, runtime: Runtime, state: State) -> list[NodeHeader]:
        return graph.read_headers(runtime.reader(), self._digests(runtime, state))

    def _copy_objects(self, head: bytes, revisions: Sequence[Row]) -> None:
        index = self._runtime.index(self._runtime.decode(head).manifest)
        # Nodes from the oldest on, so that the walk never has far to go.
        self._sender.send(place.digest for place in index.places())
        self._sender.send(self._named("history", revisions))
        self._sender.send(self._named("heads", [Row(b"", head)]))
        self._objects.flush()

    def _receipts(self, key: bytes, revision: int) -> Iterator[Row]:
        for receipt in scan(self._source, "receipts", key, keys.past(key)):
            if decode_receipt(receipt.value).revision <= revision:
                yield receipt

    # --- what is gone --------------------------------------------------------------------------

    def copy_deletions(self) -> None:
        """Delete in the target the sessions that were deleted in the source."""
        for row in scan(self._source, "tombstones", b"", None):
            while not self._delete_session(row):
                pass

    def _delete_session(self, tombstone: Row) -> bool:
        """Delete a session in the target; False if it appeared there just now.

        Stopped in the middle, the next copy finds by the row of the unfinished deletion, or by
        the tombstone that is not there yet, that there is something left to do.
        """
        key = tombstone.key
        places = [tombstone_key(key), keys.unfinished(key), head_key(key), meta_key(key)]
        deleted, unfinished, head, meta = self._target.get_rows(places)
        if deleted == tombstone.value and unfinished is None:
            return True
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
            # A copy that was cut short may have brought what is known beside a session, and not
            # the session.
            self._remove_rows_of(key)
            self._removed += catalogue.clear(self._target_runtime, keys.session_of(key) or "", key)
            unseen = [RowIs(*head_key(key), None), RowIs(*meta_key(key), None)]
            beside = [DeleteRow(*keys.expiry(key)), DeleteRow(*keys.policy(key))]
            try:
                self._write([put, *beside], conditions=unseen)
            except ConditionFailedError:
                return False
            return True
        self._remove_rows_of(key)
        self._removed += catalogue.clear(self._target_runtime, name, key)
        return True

    def _remove_rows_of(self, key: bytes) -> None:
        # Attachments as well: the source has those whose bytes are to be deleted, and the others
        # come with them.
        for table in (*_OF_SESSIONS, "attachments"):
            self._remove(table, scan(self._target, table, key, keys.past(key)))

    def tidy_records(self, held: Collection[str]) -> None:
        """Let systems of which the target had rows remove those that the copy has outdated."""
        for name in held:
            system = systems.load(name)
            # Rows of a system that is not installed stay as they were copied.
            if not isinstance(system, str):
                self._removed += system.after_copy(self._source_store, self._target_store)

    def remove_strange(self, table: str) -> None:
        """Remove the target's rows that the source does not have."""
        self._remove(table, self._strange(table))

    def _strange(self, table: str) -> Iterator[Row]:
        start = b""
        while True:
            page = self._target.scan_rows(table, start=start, limit=_PAGE)
            places = [RowKey(table, row.key) for row in page]
            there = self._source.get_rows(places) if places else []
            yield from [
                row
                for place, row, known in zip(places, page, there, strict=True)
                if known is None and place != keys.sign()
            ]
            if len(page) < _PAGE:
                return
            start = page[-1].key + b"\0"

    def _remove(self, table: str, rows: Iterator[Row]) -> None:
        batch: list[RowChange] = []
        for row in rows:
            batch.append(DeleteRow(table, row.key))
            if len(batch) == _PAGE:
                self._delete(batch)
                batch = []
        if batch:
            self._delete(batch)

    def _delete(self, batch: Sequence[RowChange]) -> None:
        self._target.write(Write(rows=batch))
        self._removed += len(batch)

    @staticmethod
    def _name(key: bytes, row: HeadRow) -> str:
        return row.long_id or keys.session_of(key) or ""


def _beside_the_graph(row: HeadRow) -> HeadRow:
    """What a vacuum leaves as it is."""
    return row._replace(manifest=b"", hidden=None)
