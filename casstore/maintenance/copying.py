"""Everything of one store into another, whatever engines they have: only what is lacking.

The source may be in use. Each session is copied as of one moment: its head is read first,
what came before it does not change, and in the target the head is written last. Queued work
is copied before the sessions and attachments after them, so that what a commit does in
between is done twice in the copy rather than not at all. Whatever a row names is stored
before the row (P3). Stopped anywhere, the copy is sound and goes on when it is called again.

The target may be in use as well. What is keyed by session comes with its head, in one write, on
condition that nobody has moved the one that is there. The node table comes before, in pieces, and
is keyed by lineage: a lineage that grows here for the source's nodes must not be one that somebody
in the target may append to. So a session there that stands on it is first put on a lineage of its
own, which goes on from it as a fork's does.
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
    BusyError,
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    SessionDeletedError,
    SessionDivergedError,
    SessionNotFoundError,
)
from casstore.format.node import NodeHeader
from casstore.maintenance.arriving_labels import ArrivingLabels, arriving_labels
from casstore.maintenance.carried import CARRIED, owner
from casstore.maintenance.displaced import displaced
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.roots import ROOTS
from casstore.maintenance.sameness import is_same_store
from casstore.maintenance.sending import Sender, StoreTarget
from casstore.maintenance.unneeded_lineages import sweep_lineages
from casstore.objects import graph
from casstore.records.runs import copied
from casstore.session import catalogue, keys, marks, pins, prepared
from casstore.session.catalogue import KnownSession
from casstore.session.heads import (
    LINEAGE_BYTES,
    Base,
    HeadRow,
    decode_head,
    encode_head,
    head_key,
)
from casstore.session.lineage import (
    decode_base,
    decode_page,
    encode_page,
    new_lineage,
    read_seq,
    successor,
)
from casstore.session.receipts import decode_receipt
from casstore.session.scanning import scan
from casstore.session.state import Runtime, State, meta_key, tombstone_key
from casstore.store import Store, check_store

_PAGE: Final = 256
_MAX_ATTEMPTS: Final = 8
# What belongs to a session beside its head, and goes with it.
_OF_SESSIONS: Final = ("history", "queue", "receipts")
# What goes with a session wherever it goes.
_KNOWN_OF_SESSIONS: Final = ("sessions", "attachments")
# Copied for each session by itself.
_WITH_HEADS: Final = ("heads", "history", "nodes", "receipts")
_BEFORE_HEADS: Final = ("queue",)
# Heads are the first to be removed where the source has none. Lineages go by what is left in the
# target: what the source has swept since may be what a session that was copied stands on.
_KEPT_APART: Final = ("heads", "nodes")
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
    had_runs = copied.has_runs(target)
    for table in _BEFORE_HEADS:
        work.copy_table(table)
    work.copy_sessions()
    work.copy_deletions()
    for table in _AFTER_HEADS:
        work.copy_table(table)
    if mirror:
        for table in ("heads", *[name for name in CARRIED if name not in _KEPT_APART]):
            work.remove_strange(table)
        work.sweep()
    elif had_runs:
        work.tidy_runs()
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
        # Up to which number the nodes of a lineage were copied, the first row that it has, and
        # what it goes on from.
        self._lineages: dict[bytes, int] = {}
        self._first_rows: dict[bytes, bytes] = {}
        self._bases: dict[bytes, Base | None] = {}
        # Which session of the target stands on a lineage, as far as that was asked for.
        self._owners: dict[bytes, bytes] | None = None
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
        for _ in range(_MAX_ATTEMPTS):
            page = self._source.scan_rows(table, start=start, stop=stop, limit=_PAGE)
            rows = [row for row in page if (table, row.key) != keys.removals()]
            if table == "pins":
                rows = self._whole_pins(rows)
            try:
                self._put(table, rows, self._named(table, rows))
            except (ObjectNotFoundError, ConditionFailedError):
                # A row went away and what it kept was collected, before it could be copied; or a
                # session was deleted in the target just now.
                continue
            return page
        raise self._busy(f"rows of {table}")

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
        for _ in range(_MAX_ATTEMPTS):
            head = self._source.get_rows([head_key(key)])[0]
            if head is None:
                return  # deleted since it was listed
            there = self._target.get_rows([head_key(key)])[0]
            try:
                self._copy_state(key, head)
            except (ObjectNotFoundError, ConditionFailedError):
                # Collected before it could be copied; or somebody has moved it in the target, or
                # swept there what no row reached yet.
                self._lineages.clear()
                continue
            except CorruptionError:
                # Damage, unless it was deleted or vacuumed in the middle, here or there, and
                # collected.
                found = [one.get_rows([head_key(key)])[0] for one in (self._source, self._target)]
                if found == [head, there]:
                    raise
                continue
            return
        raise self._busy(f"session {keys.session_of(key)!r}")

    def _copy_state(self, key: bytes, head: bytes) -> None:
        row = decode_head(head)
        there, deleted = self._target.get_rows([head_key(key), tombstone_key(key)])
        if deleted is not None:
            raise SessionDeletedError(self._name(key, row))
        changes: list[RowChange] = []
        named: list[bytes] = []
        first_rows: list[bytes] = []
        revisions = self._new_revisions(key, row, there, has_moved=there != head)
        if revisions or there != head:
            self._copy_objects(head, revisions)
            decoded = [decode_head(one.value) for one in revisions]
            first_rows = self._copy_lineages(key, row, decoded)
            now = self._target.get_rows([head_key(key)])[0]
            if not _is_same_but_for_lineage(there, now):
                raise ConditionFailedError(0, RowIs(*head_key(key), there), now)
            named = [*self._named("history", revisions), *self._named("heads", [Row(key, head)])]
            changes += [PutRow("history", one.key, one.value) for one in revisions]
            there = now
            changes += self._forgotten(key, row, there)
            changes += self._changes("receipts", list(self._receipts(key, row.revision)))
            if there != head:
                changes.append(PutRow(*head_key(key), head))
            changes.append(marks.put_removals())
        labels = self._labels(key, row, there, revisions, moves=there != head)
        changes += labels.changes
        if changes:
            conditions: list[Condition] = [
                RowIs(*head_key(key), there),
                RowIs(*tombstone_key(key), None),
                *[prepared.is_there(first) for first in first_rows],
                *labels.conditions,
            ]
            self._write(changes, named, conditions)
        if there != head:
            self._sessions += 1
            if self._owners is not None:
                self._owners[row.lineage] = key

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
        chain = self._runtime.chain(self._runtime.decode(encode_head(row)))
        theirs = self._target_runtime.chain(self._target_runtime.decode(encode_head(known)))
        left = set(theirs.digests(theirs.seqs()))
        return left <= set(chain.digests(chain.seqs()))

    @staticmethod
    def _nodes(runtime: Runtime, state: State) -> list[NodeHeader]:
        chain = runtime.chain(state)
        return graph.read_headers(runtime.reader(), chain.digests(chain.seqs()))

    def _copy_objects(self, head: bytes, revisions: Sequence[Row]) -> None:
        state = self._runtime.decode(head)
        chain = self._runtime.chain(state)
        # Nodes from the oldest on, so that the walk never has far to go.
        self._sender.send(place.digest for place in chain.places(chain.seqs()))
        self._sender.send(self._named("history", revisions))
        self._sender.send(self._named("heads", [Row(b"", head)]))
        self._objects.flush()

    def _receipts(self, key: bytes, revision: int) -> Iterator[Row]:
        for receipt in scan(self._source, "receipts", key, keys.past(key)):
            if decode_receipt(receipt.value).revision <= revision:
                yield receipt

    # --- the node table ------------------------------------------------------------------------

    def _copy_lineages(self, key: bytes, head: HeadRow, rows: Sequence[HeadRow]) -> list[bytes]:
        """Copy what the node table says of these revisions, and no more than that.

        Nodes that were appended since must not come along: in the target others may get
        their numbers. Returns the first rows of all lineages that these revisions need.
        """
        needed: set[bytes] = set()
        # A lineage only grows, so the last revision on it has all of it.
        for row in {row.lineage: row for row in [*rows, head]}.values():
            manifest = graph.read_manifest(self._runtime.reader(), row.manifest)
            self._copy_lineage(key, head, row.lineage, manifest.next_seq)
            needed.add(row.lineage)
            base = row.base
            while base is not None:
                is_new = self._copy_lineage(key, head, base.lineage, base.limit)
                if not is_new and base.lineage in needed:
                    break
                needed.add(base.lineage)
                base = self._base_of(base.lineage)
        return [self._first_rows[one] for one in needed if one in self._first_rows]

    def _base_of(self, lineage: bytes) -> Base | None:
        if lineage not in self._bases:
            [found] = self._source.get_rows([RowKey("nodes", keys.lineage_row(lineage))])
            self._bases[lineage] = None if found is None else decode_base(found)
        return self._bases[lineage]

    def _copy_lineage(self, key: bytes, head: HeadRow, lineage: bytes, limit: int) -> bool:
        """Copy the nodes below ``limit``; False if that was done before."""
        if self._lineages.get(lineage, -1) >= limit:
            return False
        batch: list[Row] = []
        for row in _below(scan(self._source, "nodes", lineage, _past(lineage)), limit):
            self._first_rows.setdefault(lineage, row.key)
            batch.append(row)
            if len(batch) == _PAGE:
                self._put_nodes(key, head, lineage, batch)
                batch = []
        self._put_nodes(key, head, lineage, batch)
        self._lineages[lineage] = limit
        return True

    def _put_nodes(self, key: bytes, head: HeadRow, lineage: bytes, rows: Sequence[Row]) -> None:
        name = self._name(key, head)
        changes, conditions = self._new_nodes(name, rows)
        if not changes:
            return
        # Nobody but this session stands on its own one.
        if self._free(key, lineage) or (
            lineage != head.lineage and self._free(self._owner(lineage), lineage)
        ):
            # Who stood on it may have appended to it after we looked.
            changes, conditions = self._new_nodes(name, rows)
        if changes:
            self._write(changes, (), conditions)

    def _new_nodes(
        self, session: str, rows: Sequence[Row]
    ) -> tuple[list[RowChange], list[Condition]]:
        """The rows that the target lacks; and that it still has those that it has."""
        there = self._target.get_rows([RowKey("nodes", row.key) for row in rows]) if rows else []
        changes: list[RowChange] = []
        conditions: list[Condition] = []
        for row, known in zip(rows, there, strict=True):
            if known is not None:
                conditions.append(RowIs("nodes", row.key, known))
            if row.value == known:
                continue
            if known is not None and _goes_another_way(row, known):
                raise SessionDivergedError(
                    session,
                    "shares nodes with one that went another way in the target, where others "
                    "have their places; export it",
                )
            if not _is_longer(row.key, known, row.value):
                changes.append(PutRow("nodes", row.key, row.value))
        return changes, conditions

    def _owner(self, lineage: bytes) -> bytes | None:
        if self._owners is None:
            heads = scan(self._target, "heads", b"", None)
            self._owners = {decode_head(row.value).lineage: row.key for row in heads}
        return self._owners.get(lineage)

    def _free(self, key: bytes | None, lineage: bytes) -> bool:
        """If this session of the target stands on this lineage, put it on one of its own."""
        there = None if key is None else self._target.get_rows([head_key(key)])[0]
        row = None if there is None else decode_head(there)
        if key is None or row is None or row.lineage != lineage:
            return False
        manifest = graph.read_manifest(self._target_runtime.reader(), row.manifest)
        moved = row._replace(lineage=new_lineage(), base=successor(row, manifest.next_seq))
        # If it moves just now, the session that is copied is begun with again.
        is_there = RowIs(*head_key(key), there)
        self._write([PutRow(*head_key(key), encode_head(moved))], (), [is_there])
        return True

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

    def tidy_runs(self) -> None:
        """Remove from the target what its runs have moved on from, by what was copied."""
        self._removed += copied.tidy(self._source_store, self._target_store)

    def remove_strange(self, table: str) -> None:
        """Remove the target's rows that the source does not have."""
        self._remove(table, self._strange(table))

    def sweep(self) -> None:
        """Remove the lineages that no session of the target needs any more."""
        self._removed += sweep_lineages(self._target, self._progress).rows

    def _strange(self, table: str) -> Iterator[Row]:
        start = b""
        while True:
            page = self._target.scan_rows(table, start=start, limit=_PAGE)
            places = [RowKey(table, row.key) for row in page]
            there = self._source.get_rows(places) if places else []
            yield from [
                row
                for place, row, known in zip(places, page, there, strict=True)
                if known is None and place != keys.removals()
            ]
            if len(page) < _PAGE:
                return
            start = page[-1].key + b"\0"

    def _remove(self, table: str, rows: Iterator[Row]) -> None:
        batch: list[RowChange] = []
        for row in rows:
            batch.append(DeleteRow(table, row.key))
            if len(batch) == _PAGE:
                self._delete(table, batch)
                batch = []
        if batch:
            self._delete(table, batch)

    def _delete(self, table: str, batch: Sequence[RowChange]) -> None:
        # Whoever counts in the target what revisions reach must know that some have gone.
        told = [marks.put_removals()] if table in ("heads", "history") else []
        self._target.write(Write(rows=[*batch, *told]))
        self._removed += len(batch)

    @staticmethod
    def _name(key: bytes, row: HeadRow) -> str:
        return row.long_id or keys.session_of(key) or ""

    @staticmethod
    def _busy(what: str) -> BusyError:
        return BusyError(f"{what} kept changing while being copied; try again")


def _past(lineage: bytes) -> bytes | None:
    """The first key behind those of a lineage; None if there is none."""
    number = int.from_bytes(lineage, "big") + 1
    return None if number >> (8 * LINEAGE_BYTES) else number.to_bytes(LINEAGE_BYTES, "big")


def _below(rows: Iterable[Row], limit: int) -> Iterator[Row]:
    """The rows of a lineage that say something of nodes below ``limit``, and say no more."""
    for row in rows:
        if keys.is_lineage_page(row.key):
            page = decode_page(row.value).below(limit)
            if page.distances:
                yield Row(row.key, encode_page(page))
        elif not keys.is_lineage_node(row.key) or read_seq(row.value) < limit:
            yield row


def _is_same_but_for_lineage(before: bytes | None, now: bytes | None) -> bool:
    """Is this the head that was there, maybe on a lineage of its own since?"""
    if before is None or now is None:
        return before is now
    one, other = decode_head(before), decode_head(now)
    return one._replace(lineage=b"", base=None) == other._replace(lineage=b"", base=None)


def _beside_the_graph(row: HeadRow) -> HeadRow:
    """What a vacuum leaves as it is."""
    return row._replace(manifest=b"", lineage=b"", base=None, hidden=None)


def _goes_another_way(row: Row, known: bytes) -> bool:
    """Do a lineage's row and the target's row of the same key speak of different nodes?"""
    if not keys.is_lineage_page(row.key):
        return True
    ours, theirs = decode_page(row.value), decode_page(known)
    stop = min(ours.stop, theirs.stop)
    return ours.below(stop) != theirs.below(stop)


def _is_longer(key: bytes, known: bytes | None, value: bytes) -> bool:
    """Does the target list more nodes in this page already?"""
    if known is None or not keys.is_lineage_page(key):
        return False
    return len(decode_page(known).distances) > len(decode_page(value).distances)
