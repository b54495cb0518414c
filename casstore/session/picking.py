"""What a picker shows: the first message of the user on the active path, and how many.

Every node counts the messages of the user on its path, and the manifest links to the
first of them, so none of this takes a walk. Only where the leaf moves to another branch
is the first one looked for, by halving the path.
"""

from __future__ import annotations

from typing import Any

from casstore.errors import LimitError
from casstore.format.node import NodeHeader
from casstore.objects import graph as objects
from casstore.objects.node_index import NodeIndex
from casstore.session import messages
from casstore.session.nodes import PATH, open_nodes, visible_leaf
from casstore.session.state import HiddenNodes, Runtime, State


def find_first_user(
    runtime: Runtime, index: NodeIndex, leaf: NodeHeader, position: int
) -> bytes | None:
    """The first message of the user on the path that ends in a stored node."""
    if not leaf.users:
        return None
    path = index.path(position, leaf.depth)
    reader = runtime.reader()
    low, high = 0, len(path) - 1
    while low < high:
        middle = (low + high) // 2
        if objects.read_headers(reader, index.digests((path[middle],)))[0].users:
            high = middle
        else:
            low = middle + 1
    return index.place(path[low]).digest


def picked(runtime: Runtime, session: str, state: State) -> tuple[str | None, int]:
    """The first message of the user on the active path, and how many there are."""
    hidden = runtime.hidden(state.head)
    if hidden:
        return _picked_by_reading(runtime, session, state, hidden)
    manifest = state.manifest
    if manifest.leaf is None or manifest.first_user is None:
        return None, 0
    reader = runtime.reader()
    known = state.leaf
    leaf = objects.read_headers(reader, [manifest.leaf])[0] if known is None else known.header
    payload: Any
    try:
        payload = objects.read_nodes(reader, [manifest.first_user])[0].payload
    except LimitError:
        # One payload that is too large to be read must not hide the other sessions of a list.
        [(_, payload)] = objects.begun_payloads(reader, [manifest.first_user])
    return messages.user_text(payload), leaf.users


def _picked_by_reading(
    runtime: Runtime, session: str, state: State, hidden: HiddenNodes
) -> tuple[str | None, int]:
    # Nodes count over their whole path, and what is hidden must not count.
    leaf = visible_leaf(runtime, state, hidden)[0]
    first: str | None = None
    count = 0
    for node in open_nodes(runtime, session, state, hidden, PATH, leaf):
        if messages.is_user_message(node.payload):
            first = messages.user_text(node.payload) if first is None else first
            count += 1
    return first, count
