"""The receipt of a turn: what the commit meant, and what it gave.

    receipt = version (1) ‖ intent (32) ‖ revision (8) ‖ manifest (32)
              ‖ [first position, number of nodes]

The ids of the nodes that the commit created are read through its manifest when they are asked
for. Nodes that were removed since are not there any more, so vacuum writes them down, and
the leaf if it was one of them: two more items, [[position, id] …] and an id or nil.

A receipt that outlives its revision is settled: it tells itself what it needed the revision
for, [leaf, [node id, …], committed_at]. So is one that came with an adopted session, with
one more item: the session that the turn was sent to, whose id is a part of what it meant.
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
    """What a turn's commit meant and gave."""

    version: int
    intent: bytes
    revision: int
    manifest: bytes
    #: The nodes it created: ``node_count`` of its manifest's graph, from this position on.
    first: int
    node_count: int
    #: Those of them that were removed since: their places among all it created, and ids.
    removed: tuple[tuple[int, str], ...] = ()
    #: The leaf that it gave, if that was removed.
    leaf: str | None = None

    def all_nodes(self, left: list[str]) -> tuple[str, ...]:
        """The ids of all nodes it created, given those that are left."""
        found = iter(left)
        gone = dict(self.removed)
        places = range(len(left) + len(gone))
        return tuple([gone[at] if at in gone else next(found) for at in places])


class SettledReceipt(NamedTuple):
    """What a turn's commit meant and gave, where its revision is gone."""

    version: int
    intent: bytes
    revision: int
    manifest: bytes
    leaf: str | None
    nodes: tuple[str, ...]
    committed_at_ms: int
    #: The session that the turn was sent to; None: the one that has the receipt.
    session: str | None = None


_SETTLED_FIELDS: Final = (3, 4)


def encode_receipt(receipt: Receipt | SettledReceipt) -> bytes:
    """Spell a receipt."""
    told: list[Any]
    if isinstance(receipt, SettledReceipt):
        told = [receipt.leaf, list(receipt.nodes), receipt.committed_at_ms]
        if receipt.session is not None:
            told.append(receipt.session)
    else:
        told = [receipt.first, receipt.node_count]
        if receipt.removed or receipt.leaf is not None:
            told += [[list(each) for each in receipt.removed], receipt.leaf]
    return b"".join(
        (
            bytes((receipt.version,)),
            receipt.intent,
            receipt.revision.to_bytes(8, "big"),
            receipt.manifest,
            pack_checked(told),
        )
    )


def decode_receipt(row: bytes) -> Receipt | SettledReceipt:
    """Read a receipt; CorruptionError if it is none. Its version is not judged."""
    try:
        version, intent = row[0], row[_INTENT_AT:_REVISION_AT]
        revision = int.from_bytes(row[_REVISION_AT:_MANIFEST_AT], "big")
        manifest = row[_MANIFEST_AT:_NODES_AT]
        told = unpack_checked(row[_NODES_AT:])
        if len(told) in _SETTLED_FIELDS and type(told[0]) is not int:
            leaf, nodes, at_ms, *of = told
            return SettledReceipt(
                version, intent, revision, manifest, leaf, tuple(nodes), int(at_ms), *of
            )
        first, count, *more = told
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
