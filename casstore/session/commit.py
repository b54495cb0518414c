"""One step of a session, all or nothing.

The values are spelled once. Then: read every row that the commit depends on in one
request, check in the order that callers may rely on, make the objects, and hand the
engine one write whose conditions say that those rows are still as they were read. If
they are not, nothing was written and it starts again from the reading, where the same
checks give whatever error is now the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, get_args

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
    FormatError,
    HeadConflictError,
    InvalidInputError,
    NotFoundError,
    ObjectNotFoundError,
    SessionBindingError,
    TurnConflictError,
)
from casstore.format.digest import Digest
from casstore.format.manifest import NOTHING, Manifest
from casstore.format.splitting import Spelled
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceWriter
from casstore.session import (
    attachments,
    checkpoint,
    graph,
    heads,
    intent,
    keys,
    leases,
    queue,
)
from casstore.session.arguments import is_durable
from casstore.session.attempts import Attempts
from casstore.session.data import LAST, UNFENCED, Commit, CommitResult, Entry, Given, Lease
from casstore.session.graph import Grown, SpelledNode
from casstore.session.heads import HeadRow, head_key
from casstore.session.receipts import (
    Receipt,
    SettledReceipt,
    decode_receipt,
    encode_receipt,
)
from casstore.session.state import Runtime, State, tombstone_key

_LISTS: Final = frozenset((list, tuple))
_EMPTY: Final = Manifest()
# What the parts of a write beside a commit hold.
_BESIDE: Final = (
    frozenset((NewObject,)),
    frozenset(get_args(Condition)),
    frozenset(get_args(RowChange)),
)


class _Spelled(NamedTuple):
    """A commit's values, spelled: what does not depend on where the session stands."""

    writer: PieceWriter
    nodes: list[SpelledNode]
    components: Spelled
    intent: bytes | None


class _Rows(NamedTuple):
    """The rows that a commit depends on, of one moment."""

    head: bytes | None
    lease: bytes | None
    receipt: bytes | None
    batches: Sequence[bytes | None]
    attachments: Sequence[bytes | None]


def commit(runtime: Runtime, session: str, change: Commit) -> CommitResult:
    """Take one step; see ``Session.commit``."""
    key = keys.session_key(session)
    check_commit(change)
    receipt = None if change.turn is None else receipt_key(key, change.turn)
    first = _spell(session, change)
    bind(session, change)
    spelled: _Spelled | None = first
    known = runtime.recall(key)
    if known is not None and _is_worth_a_try(change, known):
        result = _try_at_once(runtime, session, key, change, first, receipt, known)
        if result is not None:
            return result
        spelled = None
    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        if spelled is None:
            # What an attempt before has added is of no use: it may depend on what has moved.
            spelled = _spell(session, change)
        rows = _read(runtime, session, key, change, receipt)
        if change.turn is not None and rows.receipt is not None:
            return _replay(runtime, session, key, change, spelled, rows)
        attempt = _Attempt(runtime, session, key, change, receipt)
        try:
            return attempt.run(spelled, attempt.checked(rows))
        except ConditionFailedError as exc:
            if attempt.is_of_others(exc):
                raise
        except (CorruptionError, InvalidInputError, NotFoundError):
            # Judged by a head that may have moved on, and lost its pieces to a collector.
            if runtime.rows(session)[0] == rows.head:
                raise
        spelled = None


def _is_worth_a_try(change: Commit, known: State) -> bool:
    """Could this commit be made on top of what is known, without reading anything first?"""
    _, _, _, _, expected, lease, _, _, _, _, completes, named, _, _, _ = change
    return not (
        completes
        or named
        or lease is None
        or (expected is not None and expected != known.head.revision)
    )


def _try_at_once(
    runtime: Runtime,
    session: str,
    key: bytes,
    change: Commit,
    spelled: _Spelled,
    receipt: RowKey | None,
    known: State,
) -> CommitResult | None:
    """Commit on top of the head seen last, without reading any row first.

    Usually no other writer has moved it. The conditions of the write then say so, and that
    the turn is new; whatever fails here is left to the careful way, which raises the errors in
    the order that is promised.
    """
    row, _, _, _, seen_lease = known
    lease = change.lease
    conditions: list[Condition] = []
    if receipt is not None:
        conditions.append(RowIs("receipts", receipt.key, None))
    if isinstance(lease, Lease):
        conditions.append(leases.live(key, lease))
    else:
        conditions.append(leases.free(key, seen_lease))
    conditions.append(RowIs("heads", key, row))
    attempt = _Attempt(runtime, session, key, change, receipt, conditions)
    attempt.lease = seen_lease
    try:
        return attempt.run(spelled, known)
    except (ConflictError, InvalidInputError, NotFoundError, CorruptionError):
        # Also what looks like damage: of a head that is none any more, pieces may be collected.
        # And a ledger that would overflow: that is judged last, and maybe not by this head.
        return None


def check_commit(change: Commit) -> None:
    """Refuse what is wrong with the commit itself."""
    if not isinstance(change, Commit):
        raise InvalidInputError(f"a commit is a Commit, not {type(change).__name__}")
    append, replace, leaf, _, expected, _, _, _, label, usage, completes, named, _, beside, _ = (
        change
    )
    if not _LISTS.issuperset(map(type, (append, usage, completes, named))) or (
        replace is not None and type(replace) not in _LISTS
    ):
        raise _no_list(change)
    is_durable(change.durability)
    if beside is not None:
        _check_beside(beside)
    if append and replace is not None:
        raise InvalidInputError("a commit appends nodes or replaces the graph, not both")
    if expected is not None and (type(expected) is not int or expected < 0):
        raise InvalidInputError(f"an expected revision is a number from 0 on: {expected!r}")
    if label is not None:
        keys.id_bytes(label, "a label")
    if leaf is not LAST and leaf is not None:
        keys.id_bytes(leaf, "a leaf")
    for name in named:
        keys.id_bytes(name, "an attachment id")
    for entry in usage:
        checkpoint.check_usage(entry)
    for claim in completes:
        queue.check_claim(claim)


def _check_beside(beside: Write) -> None:
    """Refuse what no draft of records would give: it is put together with the commit's own."""
    if not isinstance(beside, Write) or beside.deletes:
        raise InvalidInputError("what changes beside a commit is a Write that deletes no objects")
    lists = (beside.objects, beside.conditions, beside.rows)
    for parts, kinds in zip(lists, _BESIDE, strict=True):
        if type(parts) not in _LISTS or not kinds.issuperset(map(type, parts)):
            raise InvalidInputError(
                "what changes beside a commit are lists of objects, conditions and rows, not "
                f"{parts!r:.80}"
            )


def _no_list(change: Commit) -> InvalidInputError:
    """The error for the first of a commit's lists that is none."""
    lists = {
        "attachment ids": change.attachments,
        "claims": change.completes,
        "usage entries": change.usage,
    }
    nodes: object = change.append if type(change.append) not in _LISTS else change.replace
    what, items = next(
        ((what, items) for what, items in lists.items() if type(items) not in _LISTS),
        ("nodes", nodes),
    )
    return InvalidInputError(f"{what} are a list or tuple, not {type(items).__name__}")


def bind(session: str, change: Commit) -> None:
    """Refuse what belongs to another session."""
    if change.session is not None and change.session != session:
        raise SessionBindingError(session, change.session)
    lease = change.lease
    if lease is not None and lease is not UNFENCED:
        leases.bind(session, lease)
    for claim in change.completes:
        queue.bind(session, claim)


def _spell(session: str, change: Commit) -> _Spelled:
    writer = PieceWriter()
    nodes = graph.spell_nodes(change.append if change.replace is None else change.replace, writer)
    components = NOTHING
    if change.checkpoint is not None:
        components = checkpoint.encode_checkpoint(change.checkpoint, writer)
    meaning = None
    if change.turn is not None:
        meaning = intent.intent_hash(session, change, nodes, components)
    return _Spelled(writer, nodes, components, meaning)


def _read(
    runtime: Runtime, session: str, key: bytes, change: Commit, receipt_at: RowKey | None = None
) -> _Rows:
    wanted = [leases.lease_key(key)]
    if receipt_at is not None:
        wanted.append(receipt_at)
    batches = queue.claimed_rows(key, change.completes) if change.completes else []
    named = [attachments.attachment_key(key, name) for name in change.attachments]
    head, lease, *rest = runtime.rows(session, wanted + batches + named)
    receipt = rest.pop(0) if receipt_at is not None else None
    return _Rows(head, lease, receipt, rest[: len(batches)], rest[len(batches) :])


class _Attempt:
    """A commit against the rows of one moment."""

    def __init__(
        self,
        runtime: Runtime,
        session: str,
        key: bytes,
        change: Commit,
        receipt: RowKey | None,
        conditions: Sequence[Condition] = (),
    ) -> None:
        self._runtime = runtime
        self._session = session
        self._key = key
        self._change = change
        self._receipt = receipt
        # Written only if these hold.
        self._conditions = list(conditions)
        self._changes: list[RowChange] = []
        # The row of the lease as it was seen last, for the next commit without one.
        self.lease: bytes | None = None

    def run(self, spelled: _Spelled, state: State | None) -> CommitResult:
        """Make the objects and write them."""
        change = self._change
        writer, nodes, components, meaning = spelled
        grown = graph.change_graph(self._runtime, state, change, nodes, writer)
        before = _EMPTY if state is None else state.manifest
        if change.checkpoint is None:
            components = before.components
        ledger = before.ledger
        if change.usage:
            ledger = checkpoint.add_usage(self._runtime.reader(), ledger, change.usage, writer)
        tips = grown.tips
        manifest = Manifest(
            grown.leaf_id,
            grown.node_count,
            grown.next_seq,
            grown.leaf_digest,
            tips,
            grown.node_index,
            ledger,
            components,
        )
        digest = objects.write_manifest(manifest, writer.emit)
        if tips is not NOTHING and tips.links and tips.outlined:
            # A long map is changed step by step, and each step leaves its pieces behind.
            writer.keep_reachable(digest, *([] if grown.hidden is None else [grown.hidden]))
        head = self._next_head(state, grown, digest)
        if meaning is not None and self._receipt is not None:
            self._changes.append(_put_receipt(self._receipt, meaning, head, grown))
        return self._write(state, head, manifest, grown, writer)

    # --- checking, in the order promised ----------------------------------------------------

    def checked(self, rows: _Rows) -> State | None:
        """The state that the commit starts from, if everything is as it must be."""
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
            places = [attachments.attachment_key(self._key, name) for name in change.attachments]
            conditions, committed = attachments.commit_rows(
                self._session, change.attachments, places, rows.attachments
            )
            self._conditions += conditions
            self._changes += committed
        return state

    # --- writing --------------------------------------------------------------------------

    def is_of_others(self, failed: ConditionFailedError) -> bool:
        """Did a condition fail that came with ``beside``? Trying again would not help."""
        return failed.index >= len(self._conditions)

    def _next_head(self, state: State | None, grown: Grown, manifest: bytes) -> HeadRow:
        revision, created_at_ms, origin = 0, 0, None
        if state is not None:
            revision, created_at_ms, *_, origin, _, _ = state.head
        return HeadRow(
            revision + 1,
            created_at_ms,
            0,
            manifest,
            grown.hidden,
            heads.COMMIT,
            self._change.turn,
            None,
            origin,
            None,
            self._session if keys.is_cut(self._session) else None,
        )

    def _write(
        self,
        state: State | None,
        head: HeadRow,
        manifest: Manifest,
        grown: Grown,
        writer: PieceWriter,
    ) -> CommitResult:
        change = self._change
        put = heads.put_head(self._key, head, new=state is None)
        self._changes += move_head(self._key, state, put, change.label)
        if change.release and isinstance(change.lease, Lease):
            self._changes.append(leases.put_released(self._key, change.lease))
        write: Write = CheckedWrite(
            writer.objects, self._conditions, self._changes, durable=is_durable(change.durability)
        )
        if change.beside is not None:
            write = _together(write, change.beside)
        try:
            done = self._runtime.engine.write(write)
        except ObjectNotFoundError as exc:
            raise checkpoint.name_missing(manifest, exc) from exc
        # The row as the engine has written it, its own time in it.
        row, head = heads.written_at(head, put, done.now_ms)
        *_, nodes, leaf = grown
        self._runtime.remember(self._key, State(row, head, manifest, leaf, self.lease))
        return CommitResult(
            head.revision, Digest.known(head.manifest), manifest.leaf_id, nodes, False
        )


def _together(own: Write, beside: Write) -> Write:
    """Both as one write. The session's own conditions are tried first."""
    return Write(
        [*own.objects, *beside.objects],
        [*own.conditions, *beside.conditions],
        [*own.rows, *beside.rows],
        durable=beside.durable if own.durable is None else own.durable,
    )


def move_head(key: bytes, state: State | None, put: PutRow, label: str | None) -> list[RowChange]:
    """The rows by which a head moves: itself, what it was into history, and its label."""
    changes: list[RowChange] = [put]
    revision = 1
    if state is not None:
        before = state.head.revision
        revision = before + 1
        changes.append(PutRow("history", keys.history(key, before), state.row))
    if label is not None:
        changes.append(put_label(key, label, revision))
    return changes


def put_label(key: bytes, label: str, revision: int) -> PutRow:
    """The row by which a label names a revision."""
    value = revision.to_bytes(8, "big") + keys.id_bytes(label, "a label")
    return PutRow("history", keys.label(key, label), value)


# --- rewinding ----------------------------------------------------------------------------


def rewind(
    runtime: Runtime,
    session: str,
    to: int | str | Entry,
    *,
    lease: Lease | Literal[Given.UNFENCED] | None,
    expected: int | None,
    label: str | None,
) -> CommitResult:
    """Make an earlier revision the head again; see ``Session.rewind``."""
    key = keys.session_key(session)
    change = Commit(lease=lease, expected=expected, label=label)
    check_commit(change)
    bind(session, change)
    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        rows = _read(runtime, session, key, change)
        condition = leases.require(session, key, rows.lease, lease, runtime.engine.now_ms())
        state = runtime.get(session)
        if expected is not None and expected != state.head.revision:
            raise HeadConflictError(session, expected, state.head.revision)
        target = runtime.at(session, to)
        conditions = [condition, RowIs(*head_key(key), state.row)]
        if target.row != state.row:
            # What the head will name must still be reachable when its row is written.
            place = RowKey("history", keys.history(key, target.head.revision))
            conditions.append(RowIs(*place, target.row))
        head = state.head._replace(
            revision=state.head.revision + 1,
            manifest=target.head.manifest,
            operation=heads.REWIND,
            turn=None,
            rewound_to=target.head.revision,
            adopted=None,
        )
        put = heads.put_head(key, head, new=False)
        try:
            done = runtime.engine.write(
                Write(conditions=conditions, rows=move_head(key, state, put, label))
            )
        except ConditionFailedError:
            continue
        # The next commit starts from here, and need not read what is known.
        row, head = heads.written_at(head, put, done.now_ms)
        runtime.remember(key, target._replace(row=row, head=head, lease=rows.lease))
        return CommitResult(
            head.revision, Digest(head.manifest), target.manifest.leaf_id, (), False
        )


# --- receipts -----------------------------------------------------------------------------


def receipt_key(key: bytes, turn: str) -> RowKey:
    """Where it is written down that a turn was committed."""
    return RowKey("receipts", key + keys.part(turn, "a turn id"))


def _put_receipt(place: RowKey, meaning: bytes, head: HeadRow, grown: Grown) -> PutRow:
    count = len(grown.nodes)
    receipt = Receipt(
        intent.VERSION,
        meaning,
        head.revision,
        head.manifest,
        grown.node_count - count,
        count,
    )
    return PutRow(*place, encode_receipt(receipt))


def put_receipt(key: bytes, turn: str, receipt: Receipt | SettledReceipt) -> PutRow:
    """The change that writes a receipt down."""
    return put_receipt_at(receipt_key(key, turn), receipt)


def put_receipt_at(place: RowKey, receipt: Receipt | SettledReceipt) -> PutRow:
    """The same where the key of its row is known."""
    return PutRow(*place, encode_receipt(receipt))


def _replay(
    runtime: Runtime, session: str, key: bytes, change: Commit, spelled: _Spelled, rows: _Rows
) -> CommitResult:
    """The result of the first commit of a turn; only a lease is still released."""
    row = rows.receipt
    assert row is not None
    if row[0] != intent.VERSION:
        raise FormatError(
            f"the receipt of turn {change.turn!r} has version {row[0]}, this release reads "
            f"{intent.VERSION}: upgrade casstore"
        )
    receipt = decode_receipt(row)
    meaning = spelled.intent
    if isinstance(receipt, SettledReceipt) and receipt.session is not None:
        # It was sent to a session that was adopted since.
        meaning = intent.intent_hash(receipt.session, change, spelled.nodes, spelled.components)
    if receipt.intent != meaning:
        raise TurnConflictError(session, str(change.turn))
    try:
        leaf, nodes = outcome(runtime, receipt)
    except CorruptionError:
        # Its revision may have gone just now, and then the receipt tells all by itself.
        settled = runtime.rows(session, [receipt_key(key, str(change.turn))])[1]
        if settled is None or settled == row:
            raise
        receipt = decode_receipt(settled)
        leaf, nodes = outcome(runtime, receipt)
    if change.release and isinstance(change.lease, Lease):
        leases.release(runtime, session, change.lease)
    # The first commit may not have waited for the disk, and this one may have to.
    runtime.engine.write(Write(durable=is_durable(change.durability)))
    return CommitResult(receipt.revision, Digest(receipt.manifest), leaf, nodes, True)


def outcome(
    runtime: Runtime, receipt: Receipt | SettledReceipt
) -> tuple[str | None, tuple[str, ...]]:
    """The leaf and the nodes that a receipt tells of, from it or from what it names."""
    if isinstance(receipt, SettledReceipt):
        return receipt.leaf, receipt.nodes
    reader = runtime.reader()
    manifest = objects.read_manifest(reader, receipt.manifest)
    stop = receipt.first + receipt.node_count
    if stop > manifest.nodes:
        raise CorruptionError("the receipt of a turn counts nodes that its manifest does not have")
    digests = runtime.index(manifest).digests(range(receipt.first, stop))
    created = objects.read_headers(reader, digests)
    leaf = manifest.leaf_id if receipt.leaf is None else receipt.leaf
    return leaf, receipt.all_nodes([header.id for header in created])


def settle_receipt(runtime: Runtime, row: bytes, committed_at_ms: int) -> bytes:
    """The receipt of a turn whose revision is about to go: a replay will still answer."""
    receipt = decode_receipt(row)
    if receipt.version != intent.VERSION:
        raise CorruptionError("the receipt of a turn cannot be read")
    if isinstance(receipt, SettledReceipt):
        return row
    leaf, nodes = outcome(runtime, receipt)
    return encode_receipt(SettledReceipt(*receipt[:4], leaf, nodes, committed_at_ms))
