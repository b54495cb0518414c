"""Hidden nodes: no read returns them; vacuum removes them and their bytes later.

The hidden nodes of a session are a stored map from digest to id, named by its head row. A fork
inherits the map; after that, each session hides nodes independently. A digest identifies one node
and its path, so the node is hidden in every revision that has it, but another node with the same
id is not. What a reader sees where a node is hidden:

* in the middle of a path: the path without it;
* at the leaf: the latest visible message takes its place (the leaf is healed);
* by id: nothing. The id cannot be reused in a graph that has the node, and the same node (the same
  digest) cannot be appended to any graph of the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from casstore.engine.protocol import PutRow, RowIs, Write, reclaiming
from casstore.errors import HeadConflictError
from casstore.format import splitting
from casstore.format.graph import FIELD_DEPTH, NIL
from casstore.format.splitting import Encoded
from casstore.objects import graph as objects
from casstore.objects import keyed
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import keys, messages
from casstore.session.arguments import list_of
from casstore.session.attempts import transaction
from casstore.session.data import Hidden
from casstore.session.state import HeadRow, HiddenNodes, Runtime, State, encode_head

_HEAL_BATCH: Final = 64


@transaction("session {session!r}")
def hide(
    runtime: Runtime, session: str, node_ids: Sequence[str], expected: int | None = None
) -> Hidden:
    """Hide nodes of a session; the result also lists the ids that it does not have.

    ``expected``: the revision that the ids are from; HeadConflictError if the head is at another.
    """
    key = keys.session_key(session)
    wanted = list(dict.fromkeys(list_of(node_ids, "node_ids")))
    for node in wanted:
        keys.id_bytes(node, "a node id")
    state = runtime.find(session)
    if state is None:
        return Hidden((), (), tuple(wanted))
    if expected is not None and state.head.revision != expected:
        raise HeadConflictError(session, expected, state.head.revision)
    hidden = runtime.hidden(state.head)
    places = dict(zip(wanted, runtime.index(state.manifest).find(wanted), strict=True))
    found = {node: place.digest for node, place in places.items() if place is not None}
    fresh = {node: digest for node, digest in found.items() if digest not in hidden}
    outcome = Hidden(
        tuple(fresh),
        tuple([node for node in found if node not in fresh]),
        tuple([node for node in wanted if node not in found]),
    )
    if not fresh:
        return outcome
    writer = PieceWriter()
    head = state.head._replace(hidden=_add(runtime, state.head, fresh, writer))
    # The revision number stays: nothing was committed. A writer that read the old row
    # fails its condition and reads the row again.
    with reclaiming(runtime.engine):
        runtime.engine.write(
            Write(
                writer.objects,
                [RowIs("heads", key, state.row)],
                [PutRow("heads", key, encode_head(head))],
            )
        )
    return outcome


def _add(runtime: Runtime, head: HeadRow, nodes: dict[str, bytes], writer: PieceWriter) -> bytes:
    put = {digest.hex(): node_id for node_id, digest in nodes.items()}
    digest = splitting.root_object(_changed(runtime, head, put, (), writer), writer.emit)
    writer.keep_reachable(digest)
    return digest


def union(runtime: Runtime, head: HeadRow, other: HeadRow, writer: PieceWriter) -> bytes | None:
    """The digest of the map of nodes that either of two sessions hides; None if there are none."""
    ours, theirs = runtime.hidden(head), runtime.hidden(other)
    put = {digest.hex(): node_id for digest, node_id in theirs.items() if digest not in ours}
    if not put:
        return head.hidden
    if not ours:
        return other.hidden
    digest = splitting.root_object(_changed(runtime, head, put, (), writer), writer.emit)
    writer.keep_reachable(digest)
    return digest


def reveal(
    runtime: Runtime, head: HeadRow, digests: Sequence[bytes], writer: PieceWriter
) -> bytes | None:
    """The digest of the map of hidden nodes without ``digests``; None if no node is left in it."""
    hidden = runtime.hidden(head)
    again = [digest for digest in digests if digest in hidden]
    if len(again) == len(hidden):
        return None
    if not again:
        return head.hidden
    drop = [digest.hex() for digest in again]
    return splitting.root_object(_changed(runtime, head, {}, drop, writer), writer.emit)


def _changed(
    runtime: Runtime,
    head: HeadRow,
    put: dict[str, str],
    drop: Sequence[str],
    writer: PieceWriter,
) -> Encoded:
    encoded = NIL if head.hidden is None else splitting.link_part(head.hidden)
    reader = PendingReader(runtime.engine, writer)
    return keyed.change_map(reader, encoded, put, drop, FIELD_DEPTH, writer.emit)


def heal_leaf(runtime: Runtime, state: State, hidden: HiddenNodes) -> str | None:
    """The id of the latest visible message, which readers see as the leaf; None: there is none."""
    reader = runtime.reader()
    index = runtime.index(state.manifest)
    for stop in range(index.count, 0, -_HEAL_BATCH):
        batch = index.digests(range(max(0, stop - _HEAL_BATCH), stop))
        visible = [digest for digest in batch if digest not in hidden]
        for node_id, payload in reversed(objects.begun_payloads(reader, visible)):
            if messages.message_in(payload) is not None:
                return str(node_id)
    return None
