"""Commits to a session: atomic, with optimistic concurrency control.

``commit`` encodes the values, and usually builds on the cached head without reading a row
(``_try_at_once``): the conditions of its one write verify that no other commit came between. If one
fails, nothing was written. Then each attempt reads every row that the commit depends on in one
request, checks them in the documented order (``_Attempt.checked``) and requires in its write that
they are unchanged. A turn that has a receipt is a replay (``turns.replay``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, get_args

from casstore.engine.protocol import (
    CheckedWrite,
    Condition,
    NewObject,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import (
    ConditionFailedError,
    ConflictError,
    CorruptionError,
    HeadConflictError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    SessionBindingError,
    SessionNotFoundError,
)
from casstore.format.digest import Digest, Kind
from casstore.format.graph import NIL, Manifest, encode_manifest
from casstore.format.splitting import Encoded
from casstore.objects.pieces import PieceWriter
from casstore.session import attachments, checkpoint, graph, keys, leases, queue, turns
from casstore.session.arguments import check_count, check_kind, invalid, is_durable
from casstore.session.attempts import Attempts, transaction
from casstore.session.data import LAST, Commit, CommitResult, Entry, Lease
from casstore.session.graph import EncodedNode, Grown
from casstore.session.state import (
    COMMIT,
    REWIND,
    HeadRow,
    Runtime,
    State,
    head_key,
    move_head,
    tombstone_key,
    written_at,
)
from casstore.session.turns import (
    Receipt,
    encode_receipt,
)

_LISTS: Final = frozenset((list, tuple))
_EMPTY: Final = Manifest()
# The types allowed in the lists of ``Commit.also``: objects, conditions, rows.
_ALSO_TYPES: Final = (
    frozenset((NewObject,)),
    frozenset(get_args(Condition)),
    frozenset(get_args(RowChange)),
)


class _EncodedCommit(NamedTuple):
    """A commit's encoded values: the part that does not depend on the session's head."""

    writer: PieceWriter
    nodes: list[EncodedNode]
    components: Encoded
    #: Single components that are set; None: deleted.
    changes: dict[str, Encoded | None]
    #: The hash of the content (``turns.hash_content``); None: the commit has no turn.
    content_hash: bytes | None


class _CommitRows(NamedTuple):
    """The rows that a commit depends on, read in one snapshot."""

    head: bytes | None
    lease: bytes | None
    receipt: bytes | None
    batches: Sequence[bytes | None]
    attachments: Sequence[bytes | None]


def commit(runtime: Runtime, session: str, change: Commit) -> CommitResult:
    """Commit a change; see ``Session.commit``."""
    key = keys.session_key(session)
    change = checked_commit(change)
    receipt_key = None if change.turn is None else turns.receipt_key(key, change.turn)
    encoded = _encode(session, change)
    # Only the first attempt uses these values. Each later one encodes them again, without the
    # objects of the failed attempt: those may depend on the previous head.
    first: _EncodedCommit | None = encoded
    if change.session is not None or change.lease is not None or change.completes:
        bind(session, change)
    # The cached head; it may be stale.
    known = runtime.states.get(key)
    if known is not None and not (
        change.completes
        or change.attachments
        or (change.expected is not None and change.expected != known.head.revision)
    ):
        result = _try_at_once(runtime, session, key, change, encoded, receipt_key, known)
        if result is not None:
            return result
        first = None
    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        encoded = first or _encode(session, change)
        first = None
        rows = _read(runtime, session, key, change, receipt_key)
        if change.turn is not None and rows.receipt is not None:
            return turns.replay(
                runtime,
                session,
                change,
                encoded.content_hash,
                (encoded.nodes, encoded.components, encoded.changes),
                rows.receipt,
            )
        attempt = _Attempt(runtime, session, key, change, receipt_key)
        try:
            return attempt.run(encoded, attempt.checked(rows))
        except ConditionFailedError as exc:
            if attempt.is_from_also(exc):
                raise
        except (CorruptionError, InvalidInputError, NotFoundError):
            # The head may be stale, and gc may have removed the objects it refers to.
            if runtime.rows(session)[0] == rows.head:
                raise


def _try_at_once(
    runtime: Runtime,
    session: str,
    key: bytes,
    change: Commit,
    encoded: _EncodedCommit,
    receipt_key: RowKey | None,
    known: State,
) -> CommitResult | None:
    """Commit on top of the cached head, without reading any row first.

    Usually no other writer has moved the head. The conditions of the write verify that, and that
    the turn is new. None if anything fails: the caller then reads the rows and raises errors in
    the documented order.
    """
    lease, seen_lease = change.lease, known.lease
    conditions: list[Condition] = []
    if receipt_key is not None:
        conditions.append(RowIs("receipts", receipt_key.key, None))
    if isinstance(lease, Lease):
        conditions.append(leases.live(key, lease))
    else:
        conditions.append(leases.free(key, seen_lease))
    conditions.append(RowIs("heads", key, known.row))
    attempt = _Attempt(runtime, session, key, change, receipt_key, conditions)
    attempt.lease = seen_lease
    try:
        return attempt.run(encoded, known)
    except (ConflictError, InvalidInputError, NotFoundError, CorruptionError):
        # CorruptionError: the cached head may be stale, and gc may have removed the objects it
        # refers to. InvalidInputError: for example, the usage ledger would overflow; the retry
        # raises it in the documented order.
        return None


def checked_commit(change: Commit) -> Commit:
    """Check the fields of a commit that can be checked without the session.

    Returns it with a ``NodeDraft`` for each bare payload, so that each node has an id.
    """
    if type(change) is not Commit:
        check_kind(change, "commit", Commit)
    append, replace, leaf = change.append, change.replace, change.leaf
    lists = (append, change.usage, change.completes, change.attachments)
    if not _LISTS.issuperset(map(type, lists)) or (
        replace is not None and type(replace) not in _LISTS
    ):
        raise _no_list(change)
    if change.durability is not None:
        is_durable(change.durability)
    if change.also is not None:
        _check_also(change.also)
    if append and replace is not None:
        raise InvalidInputError("a commit appends nodes or replaces the graph, not both")
    if change.components or change.edits:
        if change.checkpoint is not None:
            raise InvalidInputError(
                "a commit changes components or replaces the checkpoint, not both"
            )
        if change.edits:
            checkpoint.check_edits(change.edits)
    if change.expected is not None:
        check_count(change.expected, "expected")
    if change.label is not None:
        keys.id_bytes(change.label, "label")
    if leaf is not LAST and leaf is not None:
        keys.id_bytes(leaf, "leaf")
    for name in change.attachments:
        keys.id_bytes(name, "an attachment id")
    for entry in change.usage:
        checkpoint.check_usage(entry)
    for claim in change.completes:
        queue.check_claim(claim)
    if replace is not None:
        return change._replace(replace=graph.as_drafts(replace))
    return change._replace(append=graph.as_drafts(append)) if append else change


def _check_also(also: Write) -> None:
    """Check ``Commit.also``, which is merged into the commit's own write."""
    if not isinstance(also, Write) or also.deletes:
        raise InvalidInputError("also must be a Write that deletes no objects")
    lists = (also.objects, also.conditions, also.rows)
    for parts, kinds in zip(lists, _ALSO_TYPES, strict=True):
        if type(parts) not in _LISTS or not kinds.issuperset(map(type, parts)):
            raise InvalidInputError(
                f"also must have lists of objects, conditions and rows, got {parts!r:.80}"
            )


def _no_list(change: Commit) -> InvalidInputError:
    """The error for the first field of a commit that must be a list and is not."""
    lists = ("attachments", "completes", "usage", "append", "replace")
    name = next(name for name in lists if type(getattr(change, name)) not in _LISTS)
    return invalid(name, "a list or tuple", getattr(change, name))


def bind(session: str, change: Commit) -> None:
    """SessionBindingError if the commit, its lease or a claim is for another session."""
    if change.session is not None and change.session != session:
        raise SessionBindingError(session, change.session)
    lease = change.lease
    if lease is not None:
        leases.bind(session, lease)
    for claim in change.completes:
        queue.bind(session, claim)


def _encode(session: str, change: Commit) -> _EncodedCommit:
    writer = PieceWriter()
    nodes = graph.encode_nodes(change.append if change.replace is None else change.replace, writer)
    components = NIL
    if change.checkpoint is not None:
        components = checkpoint.encode_checkpoint(change.checkpoint, writer)
    changes = checkpoint.encode_changes(change.components, writer) if change.components else {}
    content_hash = None
    if change.turn is not None:
        content_hash = turns.hash_content(session, change, nodes, components, changes)
    return _EncodedCommit(writer, nodes, components, changes, content_hash)


def _read(
    runtime: Runtime, session: str, key: bytes, change: Commit, receipt_key: RowKey | None = None
) -> _CommitRows:
    wanted = [leases.lease_key(key)]
    if receipt_key is not None:
        wanted.append(receipt_key)
    batches = queue.claimed_rows(key, change.completes) if change.completes else []
    named = [attachments.attachment_key(key, name) for name in change.attachments]
    head, lease, *rest = runtime.rows(session, wanted + batches + named)
    receipt = rest.pop(0) if receipt_key is not None else None
    return _CommitRows(head, lease, receipt, rest[: len(batches)], rest[len(batches) :])


class _Attempt:
    """One attempt at a commit, based on the cached head or on one snapshot of the rows."""

    def __init__(
        self,
        runtime: Runtime,
        session: str,
        key: bytes,
        change: Commit,
        receipt_key: RowKey | None,
        conditions: Sequence[Condition] = (),
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._key = key
        self._change = change
        self._receipt_key = receipt_key
        # The conditions of the write.
        self._conditions = list(conditions)
        self._changes: list[RowChange] = []
        # The lease row that this attempt saw, cached for the condition of the next commit.
        self.lease: bytes | None = None

    def run(self, encoded: _EncodedCommit, state: State | None) -> CommitResult:
        """Build the objects and rows on top of ``state``, and write them."""
        change = self._change
        writer, components, changes = encoded.writer, encoded.components, encoded.changes
        grown = graph.change_graph(self._runtime, state, change, encoded.nodes, writer)
        before = _EMPTY if state is None else state.manifest
        if change.checkpoint is None:
            components = before.components
            if changes or change.edits:
                components = checkpoint.change_components(
                    self._runtime.engine, components, changes, change.edits or {}, writer
                )
        if change.usage or change.checkpoint is not None:
            components = checkpoint.with_ledger(
                self._runtime.reader(), before.components, components, change.usage, writer
            )
        tips = grown.tips
        manifest = Manifest(
            leaf_id=grown.leaf_id,
            nodes=grown.node_count,
            next_seq=grown.next_seq,
            leaf=grown.leaf_digest,
            tips=tips,
            node_index=grown.node_index,
            components=components,
        )
        digest = writer.emit(Kind.MANIFEST, *encode_manifest(manifest))
        if change.edits or tips.outlined:
            # Edits, and changes of a long map of tips, are applied one by one: drop the pieces that
            # only an intermediate result has.
            writer.keep_reachable(digest, *([] if grown.hidden is None else [grown.hidden]))
        if state is None:
            revision, created_at_ms, origin = 1, 0, None
            long_id = self._session if keys.is_cut(self._session) else None
        else:
            before_head = state.head
            revision, created_at_ms = before_head.revision + 1, before_head.created_at_ms
            origin, long_id = before_head.origin, before_head.long_id
        head = HeadRow(
            revision=revision,
            created_at_ms=created_at_ms,
            committed_at_ms=0,
            manifest=digest,
            hidden=grown.hidden,
            operation=COMMIT,
            turn=change.turn,
            rewound_to=None,
            origin=origin,
            adopted=None,
            long_id=long_id,
        )
        if encoded.content_hash is not None and self._receipt_key is not None:
            count = len(grown.nodes)
            receipt = Receipt(
                version=turns.VERSION,
                content_hash=encoded.content_hash,
                revision=revision,
                manifest=digest,
                first=grown.node_count - count,
                node_count=count,
            )
            self._changes.append(PutRow(*self._receipt_key, encode_receipt(receipt)))
        return self._write(state, head, manifest, grown, writer)

    # --- checking, in the documented order --------------------------------------------------

    def checked(self, rows: _CommitRows) -> State | None:
        """Check the rows, and add what they require to the write; the state to build on."""
        runtime, change = self._runtime, self._change
        now_ms = runtime.engine.now_ms()
        self.lease = rows.lease
        self._conditions.append(
            leases.require(self._session, self._key, rows.lease, change.lease, now_ms)
        )
        state = None if rows.head is None else runtime.state_of(self._key, rows.head)
        revision = 0 if state is None else state.head.revision
        if change.expected is not None and change.expected != revision:
            raise HeadConflictError(self._session, change.expected, revision)
        self._conditions.append(RowIs(*head_key(self._key), rows.head))
        if rows.head is None:
            self._conditions.append(RowIs(*tombstone_key(self._key), None))
        if change.completes:
            generation = leases.live_generation(rows.lease, now_ms)
            conditions, changes = queue.complete(
                self._session, self._key, change.completes, rows.batches, generation
            )
            self._conditions += conditions
            self._changes += changes
        if change.attachments:
            row_keys = [attachments.attachment_key(self._key, name) for name in change.attachments]
            conditions, committed = attachments.commit_rows(
                self._session, change.attachments, row_keys, rows.attachments
            )
            self._conditions += conditions
            self._changes += committed
        return state

    # --- writing --------------------------------------------------------------------------

    def is_from_also(self, failed: ConditionFailedError) -> bool:
        """True if the failed condition is from ``also``: a retry would not read its rows again."""
        return failed.index >= len(self._conditions)

    def _write(
        self,
        state: State | None,
        head: HeadRow,
        manifest: Manifest,
        grown: Grown,
        writer: PieceWriter,
    ) -> CommitResult:
        change = self._change
        put, changes = move_head(self._key, state, head, change.label)
        self._changes += changes
        if change.release and isinstance(change.lease, Lease):
            self._changes.append(leases.put_released(self._key, change.lease))
        durable = None if change.durability is None else is_durable(change.durability)
        write: Write = CheckedWrite(
            writer.objects, self._conditions, self._changes, durable=durable
        )
        if change.also is not None:
            write = _together(write, change.also)
        try:
            done = self._runtime.engine.write(write)
        except ObjectNotFoundError as exc:
            raise checkpoint.name_missing(manifest, exc) from exc
        # The head row with the time that the engine has stamped.
        row, head = written_at(head, put, done.now_ms)
        self._runtime.remember(self._key, State(row, head, manifest, grown.leaf, self.lease))
        return CommitResult(
            head.revision, Digest.known(head.manifest), manifest.leaf_id, grown.nodes, False
        )


def _together(own: Write, also: Write) -> Write:
    """Merge both into one write. The session's own conditions are checked first."""
    return Write(
        [*own.objects, *also.objects],
        [*own.conditions, *also.conditions],
        [*own.rows, *also.rows],
        durable=also.durable if own.durable is None else own.durable,
    )


# --- rewinding ----------------------------------------------------------------------------


@transaction("session {session!r}")
def rewind(
    runtime: Runtime,
    session: str,
    to: int | str | Entry,
    *,
    lease: Lease | None,
    expected: int | None,
    label: str | None,
) -> CommitResult:
    """Make an earlier revision the head again; see ``Session.rewind``."""
    key = keys.session_key(session)
    change = Commit(lease=lease, expected=expected, label=label)
    checked_commit(change)
    bind(session, change)
    rows = _read(runtime, session, key, change)
    condition = leases.require(session, key, rows.lease, lease, runtime.engine.now_ms())
    if rows.head is None:
        raise SessionNotFoundError(session)
    # From the same snapshot as the lease: a later head may be the next lease owner's commit.
    state = runtime.state_of(key, rows.head)
    if expected is not None and expected != state.head.revision:
        raise HeadConflictError(session, expected, state.head.revision)
    target = runtime.at(session, to)
    conditions = [condition, RowIs(*head_key(key), state.row)]
    if target.row != state.row:
        # The revision's objects must still be reachable when the head is written.
        row_key = RowKey("history", keys.history(key, target.head.revision))
        conditions.append(RowIs(*row_key, target.row))
    head = state.head._replace(
        revision=state.head.revision + 1,
        manifest=target.head.manifest,
        operation=REWIND,
        turn=None,
        rewound_to=target.head.revision,
        adopted=None,
    )
    put, changes = move_head(key, state, head, label)
    done = runtime.engine.write(Write(conditions=conditions, rows=changes))
    # Cached for the next commit.
    row, head = written_at(head, put, done.now_ms)
    runtime.remember(key, target._replace(row=row, head=head, lease=rows.lease))
    return CommitResult(head.revision, Digest(head.manifest), target.manifest.leaf_id, (), False)
