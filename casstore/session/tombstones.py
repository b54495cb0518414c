"""Hidden nodes: gone from every read at once, their rows and bytes until vacuum.

The hidden ids of a session are a stored map that its head row names, so a fork inherits
them with the row, and what either hides later is its own. They hide in every revision of
the session. What a reader sees where a node is hidden:

* in the middle of a path: the path without it, whole above and below;
* at the leaf: the latest visible message takes its place (the leaf is healed);
* by id: nothing. The id stays taken until vacuum: appending it again is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from casstore.engine.protocol import PutRow, RowIs, Write
from casstore.errors import BusyError, ConditionFailedError
from casstore.format import splitting
from casstore.format.manifest import FIELD_ROOM, NOTHING
from casstore.format.splitting import Spelled
from casstore.objects import graph as objects
from casstore.objects import keyed
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import keys, messages
from casstore.session.arguments import list_of
from casstore.session.data import Hidden
from casstore.session.heads import HeadRow, encode_head
from casstore.session.state import Runtime, State

_HEAL_BATCH: Final = 64
_MAX_ATTEMPTS: Final = 64


def hide(runtime: Runtime, session: str, node_ids: Sequence[str]) -> Hidden:
    """Hide nodes of a session; ids that it does not have are reported and left."""
    key = keys.session_key(session)
    named = {node: keys.part(node, "a node id") for node in list_of(node_ids, "node ids")}
    wanted, parts = list(named), list(named.values())
    for _ in range(_MAX_ATTEMPTS):
        state = runtime.find(session)
        if state is None:
            return Hidden((), (), tuple(wanted))
        hidden = runtime.hidden(state.head)
        places = runtime.chain(state).find(parts)
        found = [node for node, place in zip(wanted, places, strict=True) if place is not None]
        fresh = [node for node in found if node not in hidden]
        outcome = Hidden(
            tuple(fresh),
            tuple([node for node in found if node in hidden]),
            tuple([node for node, place in zip(wanted, places, strict=True) if place is None]),
        )
        if not fresh:
            return outcome
        writer = PieceWriter()
        head = state.head._replace(hidden=_add(runtime, state.head, fresh, writer))
        try:
            # The revision stays: nothing was committed. Writers who read the row before
            # find it changed and read it again.
            runtime.engine.write(
                Write(
                    writer.objects,
                    [RowIs("heads", key, state.row)],
                    [PutRow("heads", key, encode_head(head))],
                )
            )
        except ConditionFailedError:
            continue
        return outcome
    raise BusyError(f"session {session!r} kept moving while nodes were being hidden")


def _add(runtime: Runtime, head: HeadRow, node_ids: list[str], writer: PieceWriter) -> bytes:
    put = dict.fromkeys(node_ids, True)
    digest = splitting.root_object(_changed(runtime, head, put, (), writer), writer.emit)
    writer.keep_reachable(digest)
    return digest


def reveal(
    runtime: Runtime, head: HeadRow, node_ids: Sequence[str], writer: PieceWriter
) -> bytes | None:
    """The hidden ids without those that a new graph gives to new nodes; None if none is left."""
    if runtime.hidden(head) <= set(node_ids):
        return None
    return splitting.root_object(_changed(runtime, head, {}, node_ids, writer), writer.emit)


def _changed(
    runtime: Runtime,
    head: HeadRow,
    put: dict[str, bool],
    drop: Sequence[str],
    writer: PieceWriter,
) -> Spelled:
    spelled = NOTHING if head.hidden is None else splitting.link_part(head.hidden)
    reader = PendingReader(runtime.engine, writer)
    return keyed.change_map(reader, spelled, put, drop, FIELD_ROOM, writer.emit)


def heal_leaf(runtime: Runtime, state: State, hidden: frozenset[str]) -> str | None:
    """The latest visible message, to take the place of a leaf that is hidden."""
    reader = runtime.reader()
    chain = runtime.chain(state)
    seqs = chain.seqs()
    for stop in range(len(seqs), 0, -_HEAL_BATCH):
        batch = list(chain.places(seqs[max(0, stop - _HEAL_BATCH) : stop]))
        for node in reversed(objects.read_nodes(reader, [place.digest for place in batch])):
            if node.header.id not in hidden and messages.message_in(node.payload) is not None:
                found: str = node.header.id
                return found
    return None
