"""Turns: the hash that recognises a repeated turn, and the receipt, which stores its result.

A commit with a turn writes a receipt in the same write. If the turn is committed again, ``commit``
finds the receipt, and ``replay`` compares the hash of the content and returns the stored result.

The hash is computed over the list below. The list leaves out what may differ in a retry: ids and
times of nodes, the expected revision, leases, tokens. Parents and the leaf are identified by their
position in the commit.

    turn content v1 = [1, session, replaced?, nodes, leaf, checkpoint, usage,
                       batch ids, attachment ids, label]
    node            = [position of the parent in the commit or nil, frame, cause, payload]
    checkpoint      = nil if it stays, the components as stored if it is replaced, or
                      [{component: as stored, or nil}, {component: [edit, …]}] if it is changed
    edit            = [Set, Delete, Insert or Append, path, value]

The receipt is a row:

    receipt = version of the list (1) ‖ hash of the content (32) ‖ revision (8) ‖ manifest (32)
              ‖ [first position, number of nodes]

The ids of the nodes that the commit created are read through its manifest when needed. When vacuum
removes some of these nodes, it adds two items to the receipt: [[position, id] …] of these nodes,
and the id of the leaf, if vacuum removed that, or nil.

When retention removes the revision, the receipt is *settled*: it then holds the result itself,
[leaf, [node id, …], committed_at]. A receipt that came with an adopted session is settled, too, and
has one more item: the session that the turn was committed to, whose id is part of the hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import CorruptionError, FormatError, TurnConflictError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import DIGEST_BYTES, Digest, turn_hash
from casstore.format.limits import MAX_DEPTH
from casstore.format.splitting import Encoded, encode_split
from casstore.objects import graph as objects
from casstore.objects.edit import Delete, Edit
from casstore.objects.pieces import PieceWriter
from casstore.session import keys, leases
from casstore.session.arguments import is_durable
from casstore.session.data import LAST, LEAF, Commit, CommitResult, Lease
from casstore.session.graph import EncodedNode
from casstore.session.state import Runtime

VERSION: Final = 1


def hash_content(
    session: str,
    change: Commit,
    nodes: list[EncodedNode],
    components: Encoded,
    changes: Mapping[str, Encoded | None],
) -> bytes:
    """The hash of a commit's content.

    ``components`` is its checkpoint and ``changes`` the components that it sets, as stored.
    """
    positions = {node.id: at for at, node in enumerate(nodes)}
    leaf: Any = change.leaf
    if leaf is LAST:
        leaf = len(nodes) - 1 if nodes else None
    else:
        leaf = positions.get(leaf, False)
    checkpoint: Any = None if change.checkpoint is None else components.data
    if changes or change.edits:
        checkpoint = [
            {name: None if one is None else one.data for name, one in changes.items()},
            {name: [_edit(step) for step in steps] for name, steps in (change.edits or {}).items()},
        ]
    steps: list[list[Any]] = []
    for at, node in enumerate(nodes):
        if node.parent is LEAF:
            parent = at - 1 if at else None
        else:
            parent = None if node.parent is None else positions.get(node.parent)
        steps.append([parent, node.frame, node.cause.data, node.payload.data])
    content = [
        VERSION,
        session,
        change.replace is not None,
        steps,
        leaf,
        checkpoint,
        [list(entry) for entry in change.usage] if change.usage else [],
        _batch_ids(change) if change.completes else [],
        sorted(set(change.attachments)) if change.attachments else [],
        change.label,
    ]
    return turn_hash(pack_checked(content))


def _edit(edit: Edit) -> list[Any]:
    value = (
        None
        if isinstance(edit, Delete)
        else encode_split(edit.value, MAX_DEPTH, PieceWriter().emit)
    )
    return [type(edit).__name__, list(edit.path), None if value is None else value.data]


def _batch_ids(change: Commit) -> list[str]:
    return sorted({batch.id for claim in change.completes for batch in claim.batches})


_CONTENT_HASH_AT: Final = 1
_REVISION_AT: Final = _CONTENT_HASH_AT + DIGEST_BYTES
_MANIFEST_AT: Final = _REVISION_AT + 8
_NODES_AT: Final = _MANIFEST_AT + DIGEST_BYTES


class Receipt(NamedTuple):
    """The receipt of a turn whose revision exists."""

    version: int
    content_hash: bytes
    revision: int
    manifest: bytes
    #: The nodes that the commit created: ``node_count`` nodes of its manifest's graph, from this
    #: position on.
    first: int
    node_count: int
    #: The created nodes that vacuum has removed: their positions among all created, and their ids.
    removed: tuple[tuple[int, str], ...] = ()
    #: The resulting leaf, if vacuum has removed it.
    leaf: str | None = None

    def all_nodes(self, left: list[str]) -> tuple[str, ...]:
        """The ids of all nodes that the commit created, given those that remain."""
        found = iter(left)
        gone = dict(self.removed)
        positions = range(len(left) + len(gone))
        return tuple([gone[at] if at in gone else next(found) for at in positions])


class SettledReceipt(NamedTuple):
    """A receipt that holds the result itself: its revision is removed, or of another session."""

    version: int
    content_hash: bytes
    revision: int
    manifest: bytes
    leaf: str | None
    nodes: tuple[str, ...]
    committed_at_ms: int
    #: The session that the turn was committed to; None: the one that has the receipt.
    session: str | None = None


_SETTLED_FIELDS: Final = (3, 4)


def encode_receipt(receipt: Receipt | SettledReceipt) -> bytes:
    """Encode a receipt."""
    fields: list[Any]
    if isinstance(receipt, SettledReceipt):
        fields = [receipt.leaf, list(receipt.nodes), receipt.committed_at_ms]
        if receipt.session is not None:
            fields.append(receipt.session)
    else:
        fields = [receipt.first, receipt.node_count]
        if receipt.removed or receipt.leaf is not None:
            fields += [[list(each) for each in receipt.removed], receipt.leaf]
    return b"".join(
        (
            bytes((receipt.version,)),
            receipt.content_hash,
            receipt.revision.to_bytes(8, "big"),
            receipt.manifest,
            pack_checked(fields),
        )
    )


def decode_receipt(row: bytes) -> Receipt | SettledReceipt:
    """Decode a receipt; CorruptionError if it is damaged. The caller checks ``version``."""
    try:
        version, content_hash = row[0], row[_CONTENT_HASH_AT:_REVISION_AT]
        revision = int.from_bytes(row[_REVISION_AT:_MANIFEST_AT], "big")
        manifest = row[_MANIFEST_AT:_NODES_AT]
        fields = unpack_checked(row[_NODES_AT:])
        if len(fields) in _SETTLED_FIELDS and type(fields[0]) is not int:
            leaf, nodes, at_ms, *of = fields
            return SettledReceipt(
                version, content_hash, revision, manifest, leaf, tuple(nodes), int(at_ms), *of
            )
        first, count, *more = fields
        removed, leaf = more or ((), None)
        return Receipt(
            version,
            content_hash,
            revision,
            manifest,
            first,
            count,
            tuple([(at, node) for at, node in removed]),
            leaf,
        )
    except (TypeError, ValueError, IndexError) as exc:
        raise CorruptionError("the stored result of a turn is damaged") from exc


# --- the rows of receipts, and the results of turns -------------------------------------------


def receipt_key(key: bytes, turn: str) -> RowKey:
    """The key of a turn's receipt."""
    return RowKey("receipts", key + keys.part(turn, "a turn id"))


def put_receipt(key: bytes, turn: str, receipt: Receipt | SettledReceipt) -> PutRow:
    """The change that writes a receipt."""
    return put_receipt_at(receipt_key(key, turn), receipt)


def put_receipt_at(row_key: RowKey, receipt: Receipt | SettledReceipt) -> PutRow:
    """The change that writes a receipt, given the key of its row."""
    return PutRow(*row_key, encode_receipt(receipt))


def decode_known(turn: str, row: bytes) -> Receipt | SettledReceipt:
    """Decode a receipt; FormatError if a newer release has written it."""
    if row[0] != VERSION:
        raise FormatError(
            f"the stored result of turn {turn!r} has version {row[0]}, this release reads "
            f"{VERSION}: upgrade casstore"
        )
    return decode_receipt(row)


def result(
    runtime: Runtime, session: str, turn: str, row: bytes, receipt: Receipt | SettledReceipt
) -> CommitResult:
    """The result that a receipt records."""
    try:
        leaf, nodes = outcome(runtime, receipt)
    except CorruptionError:
        # If retention has removed its revision meanwhile, the receipt in the store is settled now.
        settled = runtime.rows(session, [receipt_key(keys.session_key(session), turn)])[1]
        if settled is None or settled == row:
            raise
        receipt = decode_receipt(settled)
        leaf, nodes = outcome(runtime, receipt)
    return CommitResult(receipt.revision, Digest(receipt.manifest), leaf, nodes, True)


def replay(
    runtime: Runtime,
    session: str,
    change: Commit,
    content_hash: bytes | None,
    content: tuple[list[EncodedNode], Encoded, Mapping[str, Encoded | None]],
    row: bytes,
) -> CommitResult:
    """The result of the first commit of a turn, given its receipt ``row``.

    Writes only a release of the lease, if asked to. TurnConflictError if ``content_hash``, the
    hash of ``content``, differs from the first commit's.
    """
    turn = str(change.turn)
    receipt = decode_known(turn, row)
    if isinstance(receipt, SettledReceipt) and receipt.session is not None:
        # The turn was committed to a session that this one has adopted since, so the hash has that
        # session's id.
        content_hash = hash_content(receipt.session, change, *content)
    if receipt.content_hash != content_hash:
        raise TurnConflictError(session, turn)
    first = result(runtime, session, turn, row, receipt)
    if change.release and isinstance(change.lease, Lease):
        leases.release(runtime, session, change.lease)
    # The first commit may have been relaxed, while this one must wait for the disk.
    runtime.engine.write(Write(durable=is_durable(change.durability)))
    return first


def find_turn(runtime: Runtime, session: str, turn: str) -> CommitResult | None:
    """The result of a turn; see ``Session.find_turn``."""
    row_key = receipt_key(keys.session_key(session), turn)
    row = runtime.rows(session, [row_key])[1]
    if row is None:
        return None
    return result(runtime, session, turn, row, decode_known(turn, row))


def outcome(
    runtime: Runtime, receipt: Receipt | SettledReceipt
) -> tuple[str | None, tuple[str, ...]]:
    """The leaf and the node ids of a turn's result: from a settled receipt, else its manifest."""
    if isinstance(receipt, SettledReceipt):
        return receipt.leaf, receipt.nodes
    reader = runtime.reader()
    manifest = objects.read_manifest(reader, receipt.manifest)
    stop = receipt.first + receipt.node_count
    if stop > manifest.nodes:
        raise CorruptionError("the stored result of a turn has more nodes than its revision")
    digests = runtime.index(manifest).digests(range(receipt.first, stop))
    created = objects.read_headers(reader, digests)
    leaf = manifest.leaf_id if receipt.leaf is None else receipt.leaf
    return leaf, receipt.all_nodes([header.id for header in created])


def settle_receipt(runtime: Runtime, row: bytes, committed_at_ms: int) -> bytes:
    """The row of a turn's receipt, settled, before its revision is removed: replays still work."""
    receipt = decode_receipt(row)
    if receipt.version != VERSION:
        raise CorruptionError(
            f"the stored result of a turn has version {receipt.version}, this release reads "
            f"{VERSION}"
        )
    if isinstance(receipt, SettledReceipt):
        return row
    leaf, nodes = outcome(runtime, receipt)
    settled = SettledReceipt(
        version=receipt.version,
        content_hash=receipt.content_hash,
        revision=receipt.revision,
        manifest=receipt.manifest,
        leaf=leaf,
        nodes=nodes,
        committed_at_ms=committed_at_ms,
    )
    return encode_receipt(settled)
