"""Adopting a session: the head of another becomes the next revision of this one.

The write moves this session's head to the other's manifest, on condition that both heads are
unchanged since they were read. The other's graph, checkpoint and usage ledger are in the manifest,
so nothing of them is copied, whatever their length. The same write adds to this session:

    receipts      of the other's turns: repeated in this session, a turn returns its first result
    hidden nodes  that the other session hides
    attachments   that the other has committed and whose bytes this store has

Their cost is in proportion to their number: a fork has only those of its own commits. This
session keeps its history, labels, queue, lease, name and subjects; the other does not change.
"""

from __future__ import annotations

from casstore.engine.protocol import Condition, PutRow, RowIs, RowKey, Write
from casstore.errors import (
    HeadConflictError,
    InvalidInputError,
    SessionNotFoundError,
)
from casstore.format.digest import Digest
from casstore.objects.pieces import PieceWriter
from casstore.session import attachments, commit, keys, leases, marks, tombstones, turns
from casstore.session.attempts import transaction
from casstore.session.data import Commit, CommitResult, Lease, Origin
from casstore.session.scanning import scan
from casstore.session.state import ADOPT, HeadRow, Runtime, State, head_key, move_head, written_at
from casstore.session.turns import SettledReceipt, decode_receipt


@transaction("session {session!r}")
def adopt(
    runtime: Runtime,
    session: str,
    other: str,
    *,
    lease: Lease | None,
    expected: int | None,
    label: str | None,
) -> CommitResult:
    """Make the head of ``other`` the next revision; see ``Session.adopt``."""
    key, other_key = keys.session_key(session), keys.session_key(other)
    change = Commit(lease=lease, expected=expected, label=label)
    commit.checked_commit(change)
    commit.bind(session, change)
    if key == other_key:
        raise InvalidInputError(f"session {session!r} cannot adopt itself; rewind it instead")
    head_row, lease_row = runtime.rows(session, [leases.lease_key(key)])
    fenced = leases.require(session, key, lease_row, lease, runtime.engine.now_ms())
    if head_row is None:
        raise SessionNotFoundError(session)
    # From the same snapshot as the lease: a later head may be the next lease owner's commit.
    state = runtime.state_of(key, head_row)
    if expected is not None and expected != state.head.revision:
        raise HeadConflictError(session, expected, state.head.revision)
    theirs = runtime.get(other)
    writer = PieceWriter()
    head = _head(runtime, other, state, theirs, writer)
    conditions: list[Condition] = [
        fenced,
        RowIs(*head_key(key), state.row),
        RowIs(*head_key(other_key), theirs.row),
    ]
    put, changes = move_head(key, state, head, label)
    coming = _receipts(runtime, key, other, theirs, head.revision)
    new = _lacking(runtime, [*coming, *_attachments(runtime, session, other)])
    conditions += [RowIs(one.table, one.key, None) for one in new]
    changes += new
    if any(one.table == "attachments" for one in new):
        changes.append(marks.put_mark(key, 0))
    done = runtime.engine.write(Write(writer.objects, conditions, changes))
    row, head = written_at(head, put, done.now_ms)
    runtime.remember(key, theirs._replace(row=row, head=head, lease=lease_row))
    return CommitResult(head.revision, Digest(head.manifest), theirs.manifest.leaf_id, (), False)


def _head(
    runtime: Runtime, other: str, state: State, theirs: State, writer: PieceWriter
) -> HeadRow:
    hidden = tombstones.union(runtime, state.head, theirs.head, writer)
    return state.head._replace(
        revision=state.head.revision + 1,
        manifest=theirs.head.manifest,
        hidden=hidden,
        operation=ADOPT,
        turn=None,
        rewound_to=None,
        adopted=Origin(other, theirs.head.revision, None),
    )


def _receipts(
    runtime: Runtime, key: bytes, other: str, theirs: State, revision: int
) -> list[PutRow]:
    """The other's receipts as rows of this session, settled: each holds the result itself."""
    other_key = keys.session_key(other)
    now_ms = runtime.engine.now_ms()
    coming: list[PutRow] = []
    for row in scan(runtime.engine, "receipts", other_key, keys.past(other_key)):
        receipt = decode_receipt(row.value)
        leaf, nodes = turns.outcome(runtime, receipt)
        meant = receipt.session if isinstance(receipt, SettledReceipt) else None
        settled = SettledReceipt(
            receipt.version,
            receipt.content_hash,
            revision,
            theirs.head.manifest,
            leaf,
            nodes,
            now_ms,
            meant or other,
        )
        row_key = RowKey("receipts", key + keys.after_session(row.key))
        coming.append(turns.put_receipt_at(row_key, settled))
    return coming


def _attachments(runtime: Runtime, session: str, other: str) -> list[PutRow]:
    """The other's committed attachments, except those at a URI: these have one owner."""
    return [
        attachments.put_as_is(one._replace(session=session))
        for one in attachments.Attachments(runtime, other).list(state=attachments.COMMITTED)
        if one.digest is not None and one.uri is None
    ]


def _lacking(runtime: Runtime, coming: list[PutRow]) -> list[PutRow]:
    """Those of the rows whose keys this session does not have: its own rows take precedence."""
    row_keys = [RowKey(one.table, one.key) for one in coming]
    known = runtime.engine.get_rows(row_keys) if row_keys else []
    return [one for one, row in zip(coming, known, strict=True) if row is None]
