"""Removes a session's hidden nodes from all of its revisions, for vacuum.

Readers see the same before and after, at every revision. New nodes and manifests are written first,
in steps, while no row names them. Then one write replaces all changed rows: history, the receipts
of turns, and the head, which then has no hidden nodes. Its conditions require that these rows are
unchanged. It must be one write because nodes are hidden by digest: a rewritten node has another
digest than in a revision that is not rewritten yet, so no single digest would hide it in both.

A concurrent commit makes that write fail. The retry then rewrites only the new revisions. If more
nodes were hidden meanwhile, all revisions are rewritten again.
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
from casstore.format.digest import Digest, Kind
from casstore.format.graph import FIELD_DEPTH, NIL, Manifest, encode_manifest
from casstore.format.splitting import Encoded
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.attempts import Attempts, read_again
from casstore.session.rewritten_graph import NONE, RewrittenGraph
from casstore.session.scanning import scan
from casstore.session.state import (
    HeadRow,
    HiddenNodes,
    Runtime,
    State,
    decode_head,
    encode_head,
    head_key,
)
from casstore.session.tombstones import heal_leaf
from casstore.session.turns import Receipt, decode_receipt, encode_receipt, receipt_key

_READ_BATCH: Final = 256


class Rewritten(NamedTuple):
    """The result of removing a session's hidden nodes."""

    #: The nodes that were removed: their digests, with their ids.
    removed: HiddenNodes
    #: The number of nodes after a hidden one, which were rewritten.
    nodes_rewritten: int
    revisions_rewritten: int
    #: Objects that the removed nodes linked to: long texts, containers, blobs.
    linked: frozenset[bytes]


_NOTHING: Final = Rewritten({}, 0, 0, frozenset())


class _Exchange(NamedTuple):
    """A row and its replacement."""

    row_key: RowKey
    old: bytes
    new: bytes


class _Revision(NamedTuple):
    """A revision that was rewritten without hidden nodes."""

    row: _Exchange
    #: Its new manifest, and the exchange of the receipt of its turn; None: it did not change.
    manifest: bytes | None = None
    receipt: _Exchange | None = None


def rewrite_hidden(
    runtime: Runtime, session: str, *, progress: Callable[[int], None] | None = None
) -> Rewritten:
    """Remove a session's hidden nodes from all of its revisions.

    Other sessions do not change, even if they share these nodes. ``progress`` is called with the
    number of revisions processed; if it raises, the session is left unchanged. ContendedError if
    other writers keep changing the session, SessionDeletedError if it was deleted.
    """
    key = keys.session_key(session)
    work: _Work | None = None
    moved = False
    # Not a ``transaction``: an attempt reuses rewritten nodes, depending on the error of the last.
    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        state = read_again(lambda: runtime.find(session))
        if state is None or state.head.hidden is None:
            return _NOTHING
        if work is None or work.named != state.head.hidden:
            work = _Work(runtime, key, state.head.hidden, runtime.hidden(state.head))
        try:
            return work.run(state, progress)
        except ConditionFailedError as exc:
            condition = exc.condition
            if isinstance(condition, ObjectsExist) or _is_receipts(condition):
                # Begin again: gc may have removed the new objects, which no row names yet, or a
                # receipt has changed (expired, or was settled).
                work = None
        except ObjectNotFoundError:
            work = None
        except CorruptionError:
            # The row may be stale: if the session was deleted or vacuumed meanwhile, gc may have
            # removed the objects. A second such error, with the row unchanged, is damage.
            if moved and runtime.rows(session)[0] == state.row:
                raise
            moved, work = True, None


class _Work:
    """The rewriting of one session, for one set of hidden nodes."""

    def __init__(self, runtime: Runtime, key: bytes, named: bytes, hidden: HiddenNodes) -> None:
        self.named = named
        self._runtime = runtime
        self._key = key
        self._hidden = hidden
        self._graph = RewrittenGraph(runtime, hidden)
        self._linked = _outside(runtime.reader(), hidden)
        self._revisions: dict[int, _Revision] = {}

    def run(self, state: State, progress: Callable[[int], None] | None) -> Rewritten:
        """Rewrite the revisions that are not rewritten yet, then replace the rows."""
        fresh: list[tuple[RowKey, bytes, HeadRow]] = []
        current: list[int] = []
        for row_key, row in self._rows(state):
            head = state.head if row == state.row else decode_head(row)
            current.append(head.revision)
            known = self._revisions.get(head.revision)
            if known is not None and known.row.old == row:
                # Rewritten by an earlier attempt. A commit may have moved its row to the history
                # since.
                moved = known.row._replace(row_key=row_key)
                self._revisions[head.revision] = known._replace(row=moved)
            else:
                fresh.append((row_key, row, head))
        for start in range(0, len(fresh), _READ_BATCH):
            self._revise(fresh[start : start + _READ_BATCH])
            if progress is not None:
                progress(start)
        self._graph.writer.flush(self._runtime.engine)
        revisions = [self._revisions[revision] for revision in current]
        self._switch(revisions)
        return Rewritten(
            self._hidden,
            len(self._graph.rewritten),
            sum([revision.manifest is not None for revision in revisions]),
            self._linked,
        )

    def _rows(self, state: State) -> Iterator[tuple[RowKey, bytes]]:
        """The rows of all revisions, oldest first; the last is the head in ``state``."""
        # Only up to that head: if it has moved since, the final write fails.
        start, stop = keys.history(self._key, 0), keys.history(self._key, state.head.revision)
        for row in scan(self._runtime.engine, "history", start, stop):
            yield RowKey("history", row.key), row.value
        yield head_key(self._key), state.row

    def _revise(self, rows: Sequence[tuple[RowKey, bytes, HeadRow]]) -> None:
        receipts = self._receipts([head for _, _, head in rows])
        for row_key, row, head in rows:
            after = head._replace(hidden=None)
            old = objects.read_manifest(self._graph.reader, head.manifest)
            manifest: bytes | None = None
            receipt: _Exchange | None = None
            if self._graph.follow(old):
                new = self._manifest(State(row, head, old))
                manifest = self._graph.writer.emit(Kind.MANIFEST, *encode_manifest(new))
                after = after._replace(manifest=manifest)
                found = receipts.get(head.revision)
                if found is not None:
                    previous = decode_receipt(found[1])
                    if isinstance(previous, Receipt) and previous.manifest == head.manifest:
                        whole = self._receipt(previous, old, new, manifest)
                        receipt = _Exchange(*found, encode_receipt(whole))
            exchange = _Exchange(row_key, row, encode_head(after))
            self._revisions[head.revision] = _Revision(exchange, manifest, receipt)

    # --- manifests ----------------------------------------------------------------------

    def _manifest(self, state: State) -> Manifest:
        old, graph = state.manifest, self._graph
        leaf_id, position = old.leaf_id, NONE
        if old.leaf in self._hidden:
            # Readers saw another node as the leaf (``heal_leaf``): it becomes the leaf.
            leaf_id = heal_leaf(self._runtime, state, self._hidden)
            if leaf_id is not None:
                listed = graph.old.find([leaf_id])[0]
                assert listed is not None
                position = listed.position
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

    def _tips(self, old: Manifest, leaf_id: str | None) -> Encoded:
        """The ends of all branches of the new graph; NIL if the leaf is the only one."""
        graph = self._graph
        ends: dict[str, bytes]
        if old.tips.data != NIL.data:
            [tips] = objects.load_encoded(graph.reader, (old.tips,))
            ends = {node_id: bytes(link.digest) for node_id, link in tips.items()}
        elif old.leaf_id is not None and old.leaf is not None:
            ends = {old.leaf_id: old.leaf}
        else:
            ends = {}
        found: dict[str, Link] = {}
        for node_id, digest in ends.items():
            became = graph.node(graph.old.position_of(node_id, digest))
            if digest in self._hidden:
                # The branch now ends in the nearest visible ancestor, unless it has other children.
                if became.position == NONE or graph.has_child(became.position):
                    continue
                node_id = objects.read_headers(graph.reader, [became.digest])[0].id
            found[node_id] = Link(Digest(became.digest))
        if set(found) <= {leaf_id}:
            return NIL
        return splitting.encode_split(found, FIELD_DEPTH, graph.writer.emit)

    # --- receipts -----------------------------------------------------------------------

    def _receipts(self, heads: Sequence[HeadRow]) -> dict[int, tuple[RowKey, bytes]]:
        """The receipts of the turns of these revisions, by revision: row key and row."""
        row_keys = {
            head.revision: receipt_key(self._key, head.turn)
            for head in heads
            if head.turn is not None
        }
        found = self._runtime.engine.get_rows(list(row_keys.values())) if row_keys else []
        return {
            revision: (row_key, row)
            for (revision, row_key), row in zip(row_keys.items(), found, strict=True)
            if row is not None
        }

    def _receipt(self, receipt: Receipt, old: Manifest, new: Manifest, manifest: bytes) -> Receipt:
        """The receipt for the new manifest; a replay returns the same result as before."""
        graph = self._graph
        gone = graph.hidden_between(receipt.first, receipt.first + receipt.node_count)
        removed = dict(receipt.removed)
        positions = [at for at in range(len(removed) + receipt.node_count) if at not in removed]
        for position, node_id in gone.items():
            removed[positions[position - receipt.first]] = node_id
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

    # --- replacing the rows -------------------------------------------------------------

    def _switch(self, revisions: Sequence[_Revision]) -> None:
        exchanges = [revision.row for revision in revisions]
        exchanges += [one.receipt for one in revisions if one.receipt is not None]
        changed = [each for each in exchanges if each.new != each.old]
        conditions: list[Condition] = [RowIs(*each.row_key, each.old) for each in changed]
        # If a manifest exists, so do all objects that it links to.
        made = [revision.manifest for revision in revisions if revision.manifest is not None]
        conditions.append(ObjectsExist(made))
        rows: list[RowChange] = [PutRow(*each.row_key, each.new) for each in changed]
        self._runtime.engine.write(Write(conditions=conditions, rows=rows))


def _is_receipts(condition: object) -> bool:
    return isinstance(condition, RowIs) and condition.table == "receipts"


def _outside(reader: PieceReader, hidden: HiddenNodes) -> frozenset[bytes]:
    """The objects that hidden nodes link to, other than their parents."""
    found: set[bytes] = set()
    digests = list(hidden)
    for start in range(0, len(digests), _READ_BATCH):
        found |= objects.read_outside(reader, digests[start : start + _READ_BATCH])
    return frozenset(found)
