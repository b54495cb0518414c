"""The receipt of a turn: the hash of the commit's content, and its result.

    receipt = version (1) ‖ intent (32) ‖ revision (8) ‖ manifest (32)
              ‖ [first position, number of nodes]

The ids of the nodes that the commit created are read through its manifest when needed. When vacuum
removes some of these nodes, it records their ids in the receipt, and the leaf if it was one of
them: two more items, [[position, id] …] and an id or nil.

A receipt that outlives its revision is settled: it holds what was read through the revision,
[leaf, [node id, …], committed_at]. A receipt that came with an adopted session is settled, too, and
has one more item: the session that the turn was committed to, whose id is part of the hash.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.hashing import DIGEST_BYTES

_INTENT_AT: Final = 1
_REVISION_AT: Final = _INTENT_AT + DIGEST_BYTES
_MANIFEST_AT: Final = _REVISION_AT + 8
_NODES_AT: Final = _MANIFEST_AT + DIGEST_BYTES


class Receipt(NamedTuple):
    """The receipt of a turn whose revision exists."""

    version: int
    intent: bytes
    revision: int
    manifest: bytes
    #: The nodes it created: ``node_count`` of its manifest's graph, from this position on.
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
        places = range(len(left) + len(gone))
        return tuple([gone[at] if at in gone else next(found) for at in places])


class SettledReceipt(NamedTuple):
    """The receipt of a turn whose revision was deleted, or belongs to an adopted session."""

    version: int
    intent: bytes
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
            receipt.intent,
            receipt.revision.to_bytes(8, "big"),
            receipt.manifest,
            pack_checked(fields),
        )
    )


def decode_receipt(row: bytes) -> Receipt | SettledReceipt:
    """Decode a receipt; CorruptionError if it is damaged. The caller checks its version."""
    try:
        version, intent = row[0], row[_INTENT_AT:_REVISION_AT]
        revision = int.from_bytes(row[_REVISION_AT:_MANIFEST_AT], "big")
        manifest = row[_MANIFEST_AT:_NODES_AT]
        fields = unpack_checked(row[_NODES_AT:])
        if len(fields) in _SETTLED_FIELDS and type(fields[0]) is not int:
            leaf, nodes, at_ms, *of = fields
            return SettledReceipt(
                version, intent, revision, manifest, leaf, tuple(nodes), int(at_ms), *of
            )
        first, count, *more = fields
        removed, leaf = more or ((), None)
        return Receipt(
            version,
            intent,
            revision,
            manifest,
            first,
            count,
            tuple([(at, node) for at, node in removed]),
            leaf,
        )
    except (TypeError, ValueError, IndexError) as exc:
        raise CorruptionError("the receipt of a turn is damaged") from exc
