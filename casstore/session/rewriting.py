"""Removing a session's hidden nodes from all of its revisions.

What a reader sees is the same before and after, at every revision. New nodes and manifests
are written first, in steps, while no row names them. Then one write replaces
all changed rows, on condition that each is still as it was read: history, the
receipts of turns, and the head, which names no hidden nodes any more. It is one write
because a node is hidden by its digest: were some revisions on the new graph and some on
the old one, no single digest would hide a node in all of them.

A concurrent commit makes that write fail; then only the new revisions are rewritten, and it is
retried. If more was hidden meanwhile, everything starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import (
    Condition,
    ObjectsExist,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    ObjectNotFoundError,
)
from casstore.format import splitting
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.format.manifest import FIELD_ROOM, NOTHING, Manifest
from casstore.format.splitting import Spelled
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.attempts import Attempts, read_again
from casstore.session.commit import receipt_key
from casstore.session.heads import HeadRow, decode_head, encode_head, head_key
from casstore.session.receipts import Receipt, decode_receipt, encode_receipt
from casstore.session.rewritten_graph import NONE, RewrittenGraph
from casstore.session.scanning import scan
from casstore.session.state import HiddenNodes, Runtime, State
from casstore.session.tombstones import heal_leaf

_READ_BATCH: Final = 256


class Rewritten(NamedTuple):
    """What became of a session's hidden nodes."""

    #: Nodes that were hidden, by the digests they had.
    removed: HiddenNodes
    #: Nodes that came after a hidden one, written anew.
    nodes_rewritten: int
    revisions_rewritten: int
    #: What the removed nodes kept outside themselves: long texts, containers, linked blobs.
    beside: frozenset[bytes]


_NOTHING: Final = Rewritten({}, 0, 0, frozenset())


class _Exchange(NamedTuple):
    """A row, and the one to take its place."""

    place: RowKey
    old: bytes
    new: bytes


class _Revision(NamedTuple):
    """A revision without hidden nodes."""

    row: _Exchange
    #: The new manifest, if its graph changed, and the receipt of its turn.
    manifest: bytes | None = None
    receipt: _Exchange | None = None


def rewrite_hidden(
    runtime: Runtime, session: str, *, pulse: Callable[[int], None] | None = None
) -> Rewritten:
    """Remove a session's hidden nodes from all of its revisions.

    Other sessions stay as they are, also those that share these nodes. ``pulse`` is told
    how many revisions were looked at; raising from it leaves the session as it was.
    BusyError if the session keeps moving, SessionDeletedError if it is gone.
    """
    key = keys.session_key(session)
    work: _Work | None = None
    moved = False
    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        state = read_again(lambda: runtime.find(session))
        if state is None or state.head.hidden is None:
            return _NOTHING
        if work is None or work.named != state.head.hidden:
            work = _Work(runtime, key, state.head.hidden, runtime.hidden(state.head))
        try:
            return work.run(state, pulse)
        except ConditionFailedError as exc:
            condition = exc.condition
            if isinstance(condition, ObjectsExist) or _is_receipts(condition):
                # No row names what was prepared, so gc may have removed it. And a receipt may
                # have expired, or come to stand alone.
                work = None
        except ObjectNotFoundError:
            work = None
        except CorruptionError:
            # What a row named when it was read may be gone if the row is: a session that was
            # deleted or vacuumed meanwhile, and collected. What is there twice is damage.
            if moved and runtime.rows(session)[0] == state.row:
                raise
            moved, work = True, None


class _Work:
    """All that is known of one session with one set of hidden nodes."""

    def __init__(self, runtime: Runtime, key: bytes, named: bytes, hidden: HiddenNodes) -> None:
        self.named = named
        self._runtime = runtime
        self._key = key
        self._hidden = hidden
        self._graph = RewrittenGraph(runtime, hidden)
        self._beside = _outside(runtime.reader(), hidden)
        self._revisions: dict[int, _Revision] = {}

    def run(self, state: State, pulse: Callable[[int], None] | None) -> Rewritten:
        """Prepare what is not prepared yet, and put it in place."""
        fresh: list[tuple[RowKey, bytes, HeadRow]] = []
        current: list[int] = []
        for place, row in self._rows(state):
            head = state.head if row == state.row else decode_head(row)
            current.append(head.revision)
            known = self._revisions.get(head.revision)
            if known is not None and known.row.old == row:
                # What was the head may stand in history now.
                moved = known.row._replace(place=place)
                self._revisions[head.revision] = known._replace(row=moved)
            else:
                fresh.append((place, row, head))
        for start in range(0, len(fresh), _READ_BATCH):
            self._revise(fresh[start : start + _READ_BATCH])
            if pulse is not None:
                pulse(start)
        self._graph.writer.flush(self._runtime.engine)
        revisions = [self._revisions[revision] for revision in current]
        self._switch(revisions)
        return Rewritten(
            self._hidden,
            len(self._graph.rewritten),
            sum([revision.manifest is not None for revision in revisions]),
            self._beside,
        )

    def _rows(self, state: State) -> Iterator[tuple[RowKey, bytes]]:
        """All revisions, oldest first."""
        # Up to the head that was seen: if it has moved since, the exchange will find out.
        start, stop = keys.history(self._key, 0), keys.history(self._key, state.head.revision)
        for row in scan(self._runtime.engine, "history", start, stop):
            yield RowKey("history", row.key), row.value
        yield head_key(self._key), state.row

    def _revise(self, rows: Sequence[tuple[RowKey, bytes, HeadRow]]) -> None:
        receipts = self._receipts([head for _, _, head in rows])
        for place, row, head in rows:
            after = head._replace(hidden=None)
            old = objects.read_manifest(self._graph.reader, head.manifest)
            manifest: bytes | None = None
            receipt: _Exchange | None = None
            if self._graph.follow(old):
                new = self._manifest(State(row, head, old))
                manifest = objects.write_manifest(new, self._graph.writer.emit)
                after = after._replace(manifest=manifest)
                found = receipts.get(head.revision)
                if found is not None:
                    told = decode_receipt(found[1])
                    if isinstance(told, Receipt) and told.manifest == head.manifest:
                        whole = self._receipt(told, old, new, manifest)
                        receipt = _Exchange(*found, encode_receipt(whole))
            exchange = _Exchange(place, row, encode_head(after))
            self._revisions[head.revision] = _Revision(exchange, manifest, receipt)

    # --- manifests ----------------------------------------------------------------------

    def _manifest(self, state: State) -> Manifest:
        old, graph = state.manifest, self._graph
        leaf_id, position = old.leaf_id, NONE
        if old.leaf in self._hidden:
            # What readers saw in its place becomes the leaf.
            leaf_id = heal_leaf(self._runtime, state, self._hidden)
            if leaf_id is not None:
                place = graph.old.find([leaf_id])[0]
                assert place is not None
                position = place.position
        elif old.leaf is not None and leaf_id is not None:
            position = graph.old.position_of(leaf_id, old.leaf)
        leaf = None if position == NONE else graph.node(position)
        return old._replace(
            leaf_id=leaf_id,
            nodes=graph.count,
            next_seq=graph.next_seq,
            leaf=None if leaf is None else leaf.digest,
            tips=self._tips(old, leaf_id),
            node_index=graph.tail,
        )

    def _tips(self, old: Manifest, leaf_id: str | None) -> Spelled:
        """The ends of all branches of the new graph; nil if the leaf is the only one."""
        graph = self._graph
        ends: dict[str, bytes]
        if old.tips.data != NOTHING.data:
            [tips] = objects.load_spelled(graph.reader, (old.tips,))
            ends = {node_id: bytes(link.digest) for node_id, link in tips.items()}
        elif old.leaf_id is not None and old.leaf is not None:
            ends = {old.leaf_id: old.leaf}
        else:
            ends = {}
        found: dict[str, Link] = {}
        for node_id, digest in ends.items():
            became = graph.node(graph.old.position_of(node_id, digest))
            if digest in self._hidden:
                # The branch ends in the nearest visible ancestor, unless that has others.
                if became.position == NONE or graph.has_child(became.position):
                    continue
                node_id = objects.read_headers(graph.reader, [became.digest])[0].id
            found[node_id] = Link(Digest(became.digest))
        if set(found) <= {leaf_id}:
            return NOTHING
        return splitting.spell(found, FIELD_ROOM, graph.writer.emit)

    # --- receipts -----------------------------------------------------------------------

    def _receipts(self, heads: Sequence[HeadRow]) -> dict[int, tuple[RowKey, bytes]]:
        """The receipts of the turns of these revisions."""
        places = {
            head.revision: receipt_key(self._key, head.turn)
            for head in heads
            if head.turn is not None
        }
        found = self._runtime.engine.get_rows(list(places.values())) if places else []
        return {
            revision: (place, row)
            for (revision, place), row in zip(places.items(), found, strict=True)
            if row is not None
        }

    def _receipt(self, receipt: Receipt, old: Manifest, new: Manifest, manifest: bytes) -> Receipt:
        """The receipt that gives the same result from what is left."""
        graph = self._graph
        gone = graph.hidden_between(receipt.first, receipt.first + receipt.node_count)
        removed = dict(receipt.removed)
        places = [at for at in range(len(removed) + receipt.node_count) if at not in removed]
        for position, node_id in gone.items():
            removed[places[position - receipt.first]] = node_id
        leaf = receipt.leaf
        if leaf is None and old.leaf_id != new.leaf_id:
            leaf = old.leaf_id
        return receipt._replace(
            manifest=manifest,
            first=graph.new_position(receipt.first),
            node_count=receipt.node_count - len(gone),
            removed=tuple(sorted(removed.items())),
            leaf=leaf,
        )

    # --- putting it in place ------------------------------------------------------------

    def _switch(self, revisions: Sequence[_Revision]) -> None:
        exchanges = [revision.row for revision in revisions]
        exchanges += [one.receipt for one in revisions if one.receipt is not None]
        changed = [each for each in exchanges if each.new != each.old]
        conditions: list[Condition] = [RowIs(*each.place, each.old) for each in changed]
        # A manifest that is there has all it links to.
        made = [revision.manifest for revision in revisions if revision.manifest is not None]
        conditions.append(ObjectsExist(made))
        rows: list[RowChange] = [PutRow(*each.place, each.new) for each in changed]
        self._runtime.engine.write(Write(conditions=conditions, rows=rows))


def _is_receipts(condition: object) -> bool:
    return isinstance(condition, RowIs) and condition.table == "receipts"


def _outside(reader: PieceReader, hidden: HiddenNodes) -> frozenset[bytes]:
    """What hidden nodes link to beside their parents."""
    found: set[bytes] = set()
    digests = list(hidden)
    for start in range(0, len(digests), _READ_BATCH):
        found |= objects.read_outside(reader, digests[start : start + _READ_BATCH])
    return frozenset(found)
