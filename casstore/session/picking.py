"""The first user message on the active path and the number of user messages, for session lists.

Every node stores the number of user messages on its path. So the leaf has the total, and a search
over the positions of the path finds the first message. The search starts at the root, because the
message is usually among the first nodes.
"""

from __future__ import annotations

from typing import Any

from casstore.errors import LimitError
from casstore.format.graph import NodeHeader
from casstore.objects import graph as objects
from casstore.objects.node_index import NodeIndex
from casstore.objects.pieces import PieceReader
from casstore.session import messages
from casstore.session.loading import PATH, open_nodes, visible_leaf
from casstore.session.state import HiddenNodes, Runtime, State


def find_first_user(
    reader: PieceReader, index: NodeIndex, leaf: NodeHeader, position: int
) -> bytes:
    """The digest of the first user message on the path to a leaf; there must be at least one."""
    # Where the path has every node up to the leaf, positions are depths.
    path = range(leaf.depth) if position == leaf.depth - 1 else index.path(position, leaf.depth)
    low, high, step = 0, len(path) - 1, 1
    while low < high:
        # Exponential search from the root, then binary search.
        middle = min(low + step - 1, (low + high) // 2)
        if objects.read_headers(reader, index.digests((path[middle],)))[0].users:
            high, step = middle, len(path)
        else:
            low, step = middle + 1, 2 * step
    return index.place(path[low]).digest


def picked(runtime: Runtime, session: str, state: State) -> tuple[str | None, int]:
    """The text of the first user message on the active path, and the number of user messages."""
    hidden = runtime.hidden(state.head)
    if hidden:
        return _picked_by_reading(runtime, session, state, hidden)
    manifest = state.manifest
    if manifest.leaf is None or manifest.leaf_id is None:
        return None, 0
    reader = runtime.reader()
    index = runtime.index(manifest)
    if state.leaf is not None:
        leaf, position = state.leaf
    else:
        [leaf] = objects.read_headers(reader, [manifest.leaf])
        position = index.position_of(manifest.leaf_id, manifest.leaf)
    if not leaf.users:
        return None, 0
    first = find_first_user(reader, index, leaf, position)
    payload: Any
    try:
        payload = objects.read_nodes(reader, [first])[0].payload
    except LimitError:
        # One payload that is too large to read must not fail the listing of all sessions.
        [(_, payload)] = objects.begun_payloads(reader, [first])
    return messages.user_text(payload), leaf.users


def _picked_by_reading(
    runtime: Runtime, session: str, state: State, hidden: HiddenNodes
) -> tuple[str | None, int]:
    # The stored counts include hidden nodes, which must not count here.
    leaf = visible_leaf(runtime, state, hidden)[0]
    first: str | None = None
    count = 0
    for node in open_nodes(runtime, session, state, hidden, PATH, leaf):
        if messages.is_user_message(node.payload):
            first = messages.user_text(node.payload) if first is None else first
            count += 1
    return first, count
