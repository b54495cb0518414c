"""The state of a session (its head row, manifest and leaf), and the cache of states.

    head    = revision (8) ‖ created_at (8) ‖ committed_at (8) ‖ manifest (32) ‖ details
    details = [operation, turn, hidden, rewound_to, origin, adopted, long id],
              without the nils at its end

The head row names the current revision. Numbers are big-endian; the engine stamps the times. When
a commit moves the head, the old row becomes the history row of its revision, byte for byte. A head
row that was replaced never recurs, and the state follows from the row alone. So a cached state is
valid whenever the same row is read. ``Runtime`` has the cache; the other session modules share it.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from casstore.engine.protocol import PutRow, RowChange, RowKey, Stamp
from casstore.errors import (
    ClosedError,
    CorruptionError,
    InvalidInputError,
    RevisionNotFoundError,
    SessionBindingError,
    SessionDeletedError,
    SessionNotFoundError,
)
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import DIGEST_BYTES, Digest
from casstore.format.graph import Manifest, NodeHeader
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.objects import graph as objects
from casstore.objects import values
from casstore.objects.node_index import IndexCache, NodeIndex
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.data import Entry, Head, Origin

if TYPE_CHECKING:
    from casstore.session.holding import Renewer
    from casstore.store import Store


_FIXED: Final = Struct(">QQQ32s")
_CREATED_AT: Final = 8
_COMMITTED_AT: Final = 16
_STAMPS: Final = (Stamp(_COMMITTED_AT),)
_NEW_STAMPS: Final = (*_STAMPS, Stamp(_CREATED_AT))

COMMIT: Final = "commit"
REWIND: Final = "rewind"
FORK: Final = "fork"
ADOPT: Final = "adopt"
OPERATIONS: Final = (COMMIT, REWIND, FORK, ADOPT)
_DETAILS: Final = 7
_NOTHING_MORE: Final = (None,) * 5


class HeadRow(NamedTuple):
    """The decoded row of a head or an earlier revision."""

    revision: int
    created_at_ms: int
    committed_at_ms: int
    manifest: bytes
    #: The hidden nodes, as a stored map from digest to id; None: no node is hidden.
    hidden: bytes | None
    operation: str
    turn: str | None
    rewound_to: int | None
    origin: Origin | None
    #: The session and revision whose head became this revision.
    adopted: Origin | None
    #: The session's id if it is too long for its key; else None.
    long_id: str | None


def head_key(key: bytes) -> RowKey:
    """The key of a session's head row."""
    return RowKey("heads", key)


def encode_head(row: HeadRow) -> bytes:
    """Encode a head row."""
    details: list[Any] = [OPERATIONS.index(row.operation), row.turn]
    more = (row.hidden, row.rewound_to, row.origin, row.adopted, row.long_id)
    if more != _NOTHING_MORE:
        details += more
    while details[-1] is None:
        details.pop()
    fixed = _FIXED.pack(row.revision, row.created_at_ms, row.committed_at_ms, row.manifest)
    return fixed + pack_checked(details)


def decode_head(data: bytes) -> HeadRow:
    """Decode a head row; CorruptionError if it is damaged."""
    try:
        revision, created_at_ms, committed_at_ms, manifest = _FIXED.unpack_from(data)
        details = unpack_checked(data[_FIXED.size :])
        details += [None] * (_DETAILS - len(details))
        operation, turn, hidden, rewound_to, origin, adopted, long_id = details
        return HeadRow(
            revision=revision,
            created_at_ms=created_at_ms,
            committed_at_ms=committed_at_ms,
            manifest=manifest,
            hidden=hidden,
            operation=OPERATIONS[operation],
            turn=turn,
            rewound_to=rewound_to,
            origin=None if origin is None else Origin(*origin),
            adopted=None if adopted is None else Origin(*adopted),
            long_id=long_id,
        )
    except (ValueError, TypeError, IndexError, struct.error) as exc:
        raise CorruptionError("a head row is damaged") from exc


def manifest_in(data: bytes) -> bytes:
    """The manifest that a head row names, without decoding the rest of the row."""
    return data[_FIXED.size - DIGEST_BYTES : _FIXED.size]


def written_at(head: HeadRow, put: PutRow, now_ms: int) -> tuple[bytes, HeadRow]:
    """The head row that the engine wrote for ``put`` at ``now_ms``, encoded and decoded."""
    value = put.value
    # Engines stamp times before 1970 as 0.
    now_ms = max(0, now_ms)
    time = now_ms.to_bytes(8, "big")
    created_at_ms = head.created_at_ms
    if put.stamps is _NEW_STAMPS:
        created_at_ms = now_ms
        value = value[:_CREATED_AT] + time + value[_COMMITTED_AT:]
    row = value[:_COMMITTED_AT] + time + value[_COMMITTED_AT + 8 :]
    return row, head._replace(created_at_ms=created_at_ms, committed_at_ms=now_ms)


def public_entry(session: str, row: HeadRow, labels: tuple[str, ...]) -> Entry:
    """A revision as callers see it."""
    return Entry(
        session=session,
        revision=row.revision,
        manifest=Digest(row.manifest),
        operation=row.operation,
        committed_at_ms=row.committed_at_ms,
        turn=row.turn,
        labels=labels,
        rewound_to=row.rewound_to,
        adopted=row.adopted,
    )


def public_head(session: str, row: HeadRow, leaf: str | None, node_count: int) -> Head:
    """A head as callers see it."""
    return Head(
        session=session,
        revision=row.revision,
        manifest=Digest(row.manifest),
        leaf=leaf,
        node_count=node_count,
        created_at_ms=row.created_at_ms,
        committed_at_ms=row.committed_at_ms,
        turn=row.turn,
        origin=row.origin,
    )


_KEPT_STATES: Final = 1024
_KEPT_HIDDEN: Final = 64

#: Digests of nodes that a session hides, with their ids.
HiddenNodes = Mapping[bytes, str]
_NOTHING_HIDDEN: Final[HiddenNodes] = {}


class Leaf(NamedTuple):
    """A leaf: its header, and its position in insertion order."""

    header: NodeHeader
    position: int


class State(NamedTuple):
    """A decoded revision: the head, or an earlier one. ``row`` is its head or history row."""

    row: bytes
    head: HeadRow
    manifest: Manifest
    #: The leaf, if it has been read or written.
    leaf: Leaf | None = None
    #: The lease row as a commit read it last. It may be stale; the write checks it.
    lease: bytes | None = None


def move_head(
    key: bytes, before: State | None, head: HeadRow, label: str | None = None
) -> tuple[PutRow, list[RowChange]]:
    """The change that makes ``head`` a session's head, at the engine's time; and all changes with
    it: the head before goes into history, and a label names the new one if given.
    """
    put = PutRow("heads", key, encode_head(head), _NEW_STAMPS if before is None else _STAMPS)
    changes: list[RowChange] = [put]
    if before is not None:
        changes.append(PutRow("history", keys.history(key, before.head.revision), before.row))
    if label is not None:
        changes.append(put_label(key, label, head.revision))
    return put, changes


def put_label(key: bytes, label: str, revision: int) -> PutRow:
    """The row change that makes a label name a revision."""
    value = revision.to_bytes(8, "big") + keys.id_bytes(label, "a label")
    return PutRow("history", keys.label(key, label), value)


class _ClosedEngine:
    """Stands for the engine of a closed store."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("this store is closed")


class Runtime:
    """The context that the session modules share: the engine and the cached states."""

    def __init__(self, store: Store) -> None:
        """Use ``runtime_of``: every store has one runtime."""
        self.store = store
        #: The engine of the store; once that is closed, every use raises ClosedError.
        self.engine = store.engine
        #: The cached states of heads, by session key. They may be stale: compare the row.
        self.states: OrderedDict[bytes, State] = OrderedDict()
        self._hidden: OrderedDict[bytes, HiddenNodes] = OrderedDict()
        self.index_cache = IndexCache()
        self._lock = threading.Lock()
        self._renewer: Renewer | None = None

    def close(self) -> None:
        """Make every later use raise ClosedError: the store is closed."""
        closed: Any = _ClosedEngine()
        self.engine = closed

    def renewer(self) -> Renewer:
        """The thread that renews the leases held with this store."""
        from casstore.session.holding import Renewer

        with self._lock:
            if self._renewer is None:
                self._renewer = Renewer()
            return self._renewer

    def reader(self) -> PieceReader:
        """A new reader of objects."""
        return PieceReader(self.engine)

    def remember(self, key: bytes, state: State) -> None:
        """Cache the state of a session's head."""
        with self._lock:
            self.states[key] = state
            self.states.move_to_end(key)
            while len(self.states) > _KEPT_STATES:
                self.states.popitem(last=False)

    def state_of(self, key: bytes, row: bytes) -> State:
        """The state of a head row, from the cache or decoded."""
        known = self.states.get(key)
        if known is not None and known.row == row:
            return known
        state = self.decode(row)
        self.remember(key, state)
        return state

    def decode(self, row: bytes) -> State:
        """Decode a head row or a history row."""
        head = decode_head(row)
        manifest = objects.read_manifest(self.reader(), head.manifest)
        return State(row, head, manifest)

    def hidden(self, head: HeadRow) -> HiddenNodes:
        """The nodes that a head row hides: their digests, with their ids."""
        if head.hidden is None:
            return _NOTHING_HIDDEN
        known = self._hidden.get(head.hidden)
        if known is None:
            reader = self.reader()
            stored = reader.follow((head.hidden,))[0]
            found = values.read_value(reader, head.hidden, stored, max_bytes=DEFAULT_MAX_BYTES)
            known = {Digest.from_hex(name): node_id for name, node_id in found.items()}
            with self._lock:
                self._hidden[head.hidden] = known
                while len(self._hidden) > _KEPT_HIDDEN:
                    self._hidden.popitem(last=False)
        return known

    def index(self, manifest: Manifest) -> NodeIndex:
        """The nodes of a manifest's graph."""
        reader = PieceReader(self.engine)
        return NodeIndex(reader, self.index_cache, manifest.node_index, manifest.nodes)

    # --- reading states -----------------------------------------------------------------

    def rows(self, session: str, extra: Sequence[RowKey] = ()) -> list[bytes | None]:
        """The head row of a session and more rows, read in one snapshot.

        SessionDeletedError if the session was deleted.
        """
        key = keys.session_key(session)
        rows = self.engine.get_rows([head_key(key), *extra])
        # A deletion writes the tombstone and removes the head in one transaction, so a session
        # with a head was not deleted.
        if rows[0] is None and self.engine.get_rows([tombstone_key(key)])[0] is not None:
            raise SessionDeletedError(session)
        return rows

    def find(self, session: str) -> State | None:
        """The head of a session; None if nothing was committed yet.

        This, ``at`` and ``earlier`` read objects that gc may remove meanwhile: public methods call
        them in ``read_again``.
        """
        row = self.rows(session)[0]
        return None if row is None else self.state_of(keys.session_key(session), row)

    def get(self, session: str) -> State:
        """The head of a session, or SessionNotFoundError."""
        state = self.find(session)
        if state is None:
            raise SessionNotFoundError(session)
        return state

    def at(self, session: str, at: int | str | Entry | None) -> State:
        """A session's head, or an earlier revision of it by number, label or entry.

        SessionBindingError if the entry is of another session.
        """
        _bind_entry(session, at)
        state = self.get(session)
        if at is None:
            return state
        return self.earlier(session, state, at)

    def earlier(self, session: str, head: State, at: int | str | Entry) -> State:
        """As ``at``, for a caller that has read the head."""
        _bind_entry(session, at)
        key = keys.session_key(session)
        revision: object = at
        if isinstance(at, Entry):
            revision = at.revision
        elif isinstance(at, str):
            try:
                label_key = RowKey("history", keys.label(key, at))
            except InvalidInputError as exc:
                raise RevisionNotFoundError(session, at) from exc
            row = self.engine.get_rows([label_key])[0]
            if row is None:
                raise self._nothing_at(session, at)
            revision = int.from_bytes(row[:8], "big")
        if type(revision) is not int or not 0 <= revision < 1 << 63:
            raise RevisionNotFoundError(session, at)
        found = head
        if revision != head.head.revision:
            row = self.engine.get_rows([RowKey("history", keys.history(key, revision))])[0]
            if row is None:
                raise self._nothing_at(session, at if isinstance(at, str) else revision)
            found = self.decode(row)
        if isinstance(at, Entry) and found.head.manifest != at.manifest:
            # A vacuum has rewritten the revision since the entry was read.
            raise RevisionNotFoundError(session, f"{at.revision} with manifest {at.manifest.hex()}")
        return found

    def require_kept(self, session: str, state: State) -> None:
        """Raise SessionDeletedError or RevisionNotFoundError if the revision is gone or rewritten.

        Then a missing object is no damage: gc may have removed it.
        """
        key, revision = keys.session_key(session), state.head.revision
        rows = self.rows(session, [RowKey("history", keys.history(key, revision))])
        if state.row not in rows:
            raise RevisionNotFoundError(session, revision)

    def _nothing_at(self, session: str, at: object) -> RevisionNotFoundError:
        # If the session was deleted between the two reads, its history is gone: raise that.
        self.rows(session)
        return RevisionNotFoundError(session, at)


def _bind_entry(session: str, at: int | str | Entry | None) -> None:
    """SessionBindingError if ``at`` is an entry of another session."""
    if isinstance(at, Entry) and at.session != session:
        raise SessionBindingError(session, at.session)


def runtime_of(store: Store) -> Runtime:
    """The runtime of a store, which all its users share."""
    return store._runtime


def meta_key(key: bytes) -> RowKey:
    """The key of a session's meta row."""
    return RowKey("sessions", key)


def tombstone_key(key: bytes) -> RowKey:
    """The key of a session's tombstone."""
    return RowKey("tombstones", key)
