"""The hash of a commit's content, by which a repeated turn is recognised.

The store computes the hash over the list below and stores its version with it. The list leaves out
what may differ in a retry: ids and times of nodes, the expected revision, leases, tokens. Parents
and the leaf are identified by their position in the commit.

    turn content v1 = [1, session, replaced?, nodes, leaf, checkpoint, usage,
                       batch ids, attachment ids, label]
    node            = [position of the parent in the commit or nil, frame, cause, payload]
    checkpoint      = nil if it stays, the components as stored if it is replaced, or
                      [{component: as stored, or nil}, {component: [edit, …]}] if it is changed
    edit            = [Set, Delete, Insert or Append, path, value]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from casstore.format.canonical import pack_checked
from casstore.format.hashing import turn_hash
from casstore.format.limits import MAX_DEPTH
from casstore.format.splitting import Encoded, encode_split
from casstore.objects.edit import Delete, Edit
from casstore.objects.pieces import PieceWriter
from casstore.session.data import LAST, LEAF, Commit
from casstore.session.graph import EncodedNode

VERSION: Final = 1


def intent_hash(
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
