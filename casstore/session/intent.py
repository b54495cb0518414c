"""What a commit means, as a hash: how a repeated turn is recognised.

The hash is made by the store, over a list of what counts, and its version is stored with
it. What a retry does anew is not on the list: ids of nodes, their times, the expected
revision, leases, tokens. The structure of the nodes counts by position in the commit.

    turn content v1 = [1, session, replaced?, nodes, leaf, checkpoint, usage,
                       batch ids, attachment ids, label]
    node            = [position of the parent in the commit or nil, frame, cause, payload]
"""

from __future__ import annotations

from typing import Any, Final

from casstore.format.canonical import pack_checked
from casstore.format.hashing import turn_hash
from casstore.format.splitting import Spelled
from casstore.session.data import LAST, LEAF, Commit
from casstore.session.graph import SpelledNode

VERSION: Final = 1


def intent_hash(
    session: str, change: Commit, nodes: list[SpelledNode], components: Spelled
) -> bytes:
    """The hash of a commit's meaning. ``components``: its checkpoint, as it was stored."""
    positions = {node[0]: at for at, node in enumerate(nodes)}
    leaf: Any = change.leaf
    if leaf is LAST:
        leaf = len(nodes) - 1 if nodes else None
    else:
        leaf = positions.get(leaf, False)
    checkpoint = None if change.checkpoint is None else components.data
    steps: list[list[Any]] = []
    for at, (_, _, above, frame, _, cause, payload, _) in enumerate(nodes):
        if above is LEAF:
            parent = at - 1 if at else None
        else:
            parent = None if above is None else positions.get(above)
        steps.append([parent, frame, cause[0], payload[0]])
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


def _batch_ids(change: Commit) -> list[str]:
    return sorted({batch.id for claim in change.completes for batch in claim.batches})
