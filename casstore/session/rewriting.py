"""A session rid of its hidden nodes: every revision that had one stands on a graph without.

What a reader sees is the same before and after, at every revision. New nodes, manifests
and lineages are written first, in steps, where no row knows of them. Then one write puts
all changed rows in place, on condition that each is still as it was read: history, the
receipts of turns, and the head, which names no hidden nodes any more. It is one write
because a node is hidden by its digest: were some revisions on the new graph and some on
the old one, no single digest would hide a node in all of them.

A commit beside it makes that write fail; then only what came new is mirrored, and it is
tried again. If more was hidden meanwhile, everything starts again.
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
from casstore.objects.pieces import PieceReader, PieceWriter
from casstore.session import keys, marks, prepared
from casstore.session.attempts import attempts
from casstore.session.commit import receipt_key
from casstore.session.heads import HeadRow, decode_head, encode_head, head_key
from casstore.session.mirroring import NONE, Line, Mirrors
from casstore.session.receipts import Receipt, decode_receipt, encode_receipt
from casstore.session.scanning import scan
from casstore.session.state import HiddenNodes, Runtime, State
from casstore.session.tombstones import heal_leaf

_READ_BATCH: Final = 256
_WRITE_BYTES: Final = 4 << 20


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


class _Revision(NamedTuple):
    """A row of the head or of history, and the one to take its place."""

    place: RowKey
    old: bytes
    new: bytes
    #: If its graph changed: the revision before and after, and the lineage it was on.
    change: _Change | None


class _Change(NamedTuple):
    before: HeadRow
    old: Manifest
    after: HeadRow
    new: Manifest
    line: Line


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
    for _ in attempts(f"session {session!r}"):
        state = runtime.find(session)
        if state is None or state.head.hidden is None:
            return _NOTHING
        if work is None or work.named != state.head.hidden:
            work = _Work(runtime, key, state.head.hidden, runtime.hidden(state.head))
        try:
            return work.run(state, pulse)
        except ConditionFailedError as exc:
            if prepared.has_gone(exc):
                # No row reaches the lineages that were prepared, so they may have been swept.
                work = None
        except ObjectNotFoundError:
            # Nobody refers to what was prepared, so a collector may have taken it.
            work = None
        except CorruptionError:
            # What a row named when it was read may be gone if the row is: a session that was
            # deleted or vacuumed meanwhile, and collected. What is there twice is damage.
            if moved and runtime.rows(session)[0] == state.row:
                raise
            moved, work = True, None
    raise AssertionError("attempts raises at its end")


class _Work:
    """All that is known of one session with one set of hidden nodes."""

    def __init__(self, runtime: Runtime, key: bytes, named: bytes, hidden: HiddenNodes) -> None:
        self.named = named
        self._runtime = runtime
        self._key = key
        self._hidden = hidden
        self._mirrors = Mirrors(runtime, hidden)
        self._beside = _outside(runtime.reader(), hidden)
        self._revisions: dict[int, _Revision] = {}
        self._seqs: dict[bytes, int] = {}

    def run(self, state: State, pulse: Callable[[int], None] | None) -> Rewritten:
        """Prepare what is not prepared yet, and put it in place."""
        fresh: list[tuple[RowKey, bytes, HeadRow]] = []
        current: list[int] = []
        for place, row in self._rows(state):
            head = state.head if row == state.row else decode_head(row)
            current.append(head.revision)
            known = self._revisions.get(head.revision)
            if known is not None and known.old == row:
                # What was the head may stand in history now.
                self._revisions[head.revision] = known._replace(place=place)
            else:
                fresh.append((place, row, head))
        self._mirror([head for _, _, head in fresh])
        for start in range(0, len(fresh), _READ_BATCH):
            self._revise(fresh[start : start + _READ_BATCH])
            if pulse is not None:
                pulse(start)
        revisions = [self._revisions[revision] for revision in current]
        self._switch(revisions)
        return Rewritten(
            self._hidden,
            self._mirrors.nodes_written,
            sum([revision.change is not None for revision in revisions]),
            self._beside,
        )

    def _rows(self, state: State) -> Iterator[tuple[RowKey, bytes]]:
        """All revisions, oldest first."""
        # Up to the head that was seen: if it has moved since, the exchange will find out.
        start, stop = keys.history(self._key, 0), keys.history(self._key, state.head.revision)
        for row in scan(self._runtime.engine, "history", start, stop):
            yield RowKey("history", row.key), row.value
        yield head_key(self._key), state.row

    def _mirror(self, heads: Sequence[HeadRow]) -> None:
        """Write the nodes that all these revisions need, each lineage once."""
        # The last revision on a lineage has all that the others have.
        latest = {head.lineage: head for head in heads}
        for head in latest.values():
            line = self._mirrors.line(head.lineage, head.base)
            manifest = objects.read_manifest(self._runtime.reader(), head.manifest)
            line.extend(manifest.next_seq)
        self._mirrors.flush()

    def _revise(self, rows: Sequence[tuple[RowKey, bytes, HeadRow]]) -> None:
        reader = self._runtime.reader()
        writer = PieceWriter()
        for place, row, head in rows:
            line = self._mirrors.line(head.lineage, head.base)
            after = head._replace(hidden=None)
            change: _Change | None = None
            if line.first_hidden is not None:
                old = objects.read_manifest(reader, head.manifest)
                if line.is_changed(old.next_seq):
                    new = self._manifest(State(row, head, old), line, writer)
                    name, base = line.target(old.next_seq)
                    digest = objects.write_manifest(new, writer.emit)
                    after = after._replace(manifest=digest, lineage=name, base=base)
                    change = _Change(head, old, after, new, line)
            self._revisions[head.revision] = _Revision(place, row, encode_head(after), change)
            if writer.size_bytes >= _WRITE_BYTES:
                writer.flush(self._runtime.engine)
        writer.flush(self._runtime.engine)

    # --- manifests ----------------------------------------------------------------------

    def _manifest(self, state: State, line: Line, writer: PieceWriter) -> Manifest:
        old, hidden = state.manifest, self._hidden
        leaf_id, seq = old.leaf_id, NONE
        if old.leaf in hidden:
            # What readers saw in its place becomes the leaf.
            leaf_id = heal_leaf(self._runtime, state, hidden)
            if leaf_id is not None:
                place = self._runtime.chain(state).find([keys.part(leaf_id, "a node id")])[0]
                assert place is not None
                seq = place.seq
        elif old.leaf is not None:
            seq = self._seq(old.leaf)
        leaf = None if seq == NONE else line.node(seq)
        return old._replace(
            leaf_id=leaf_id,
            nodes=old.nodes - line.hidden_below(old.next_seq),
            next_seq=line.new_seq(old.next_seq),
            leaf=None if leaf is None else leaf.digest,
            first_user=None if leaf is None else leaf.first_user,
            tips=self._tips(old, leaf_id, line, writer),
        )

    def _seq(self, digest: bytes) -> int:
        seq = self._seqs.get(digest)
        if seq is None:
            seq = self._seqs[digest] = self._mirrors.headers([digest])[0].seq
        return seq

    def _tips(self, old: Manifest, leaf_id: str | None, line: Line, writer: PieceWriter) -> Spelled:
        """The ends of all branches of the new graph; nil if the leaf is the only one."""
        ends: dict[str, bytes]
        if old.tips.data != NOTHING.data:
            [tips] = objects.load_spelled(self._runtime.reader(), (old.tips,))
            ends = {node_id: bytes(link.digest) for node_id, link in tips.items()}
        elif old.leaf_id is not None and old.leaf is not None:
            ends = {old.leaf_id: old.leaf}
        else:
            ends = {}
        found: dict[str, Link] = {}
        for node_id, digest in ends.items():
            seq = self._seq(digest)
            if digest in self._hidden:
                # The branch ends in the nearest visible ancestor, unless that has others.
                seq = line.visible(seq)
                if seq == NONE or line.has_child(seq, old.next_seq):
                    continue
                node_id = self._mirrors.headers([line.node(seq).digest])[0].id
            found[node_id] = Link(Digest(line.node(seq).digest))
        if set(found) <= {leaf_id}:
            return NOTHING
        return splitting.spell(found, FIELD_ROOM, writer.emit)

    # --- putting it in place ------------------------------------------------------------

    def _switch(self, revisions: Sequence[_Revision]) -> None:
        conditions: list[Condition] = []
        rows: list[RowChange] = []
        manifests: list[bytes] = []
        for revision in revisions:
            if revision.new != revision.old:
                conditions.append(RowIs(*revision.place, revision.old))
                rows.append(PutRow(*revision.place, revision.new))
            if revision.change is not None:
                manifests.append(revision.change.after.manifest)
        for place, old, new in self._receipts(revisions):
            conditions.append(RowIs(*place, old))
            rows.append(PutRow(*place, new))
        # A manifest that is there has all it links to.
        conditions.append(ObjectsExist(manifests))
        conditions += [prepared.is_there(first) for first in self._mirrors.first_rows()]
        rows.append(marks.put_removals())
        self._runtime.engine.write(Write(conditions=conditions, rows=rows))

    def _receipts(self, revisions: Sequence[_Revision]) -> Iterator[tuple[RowKey, bytes, bytes]]:
        """The receipts of turns whose revisions have changed, before and after."""
        turns = [
            (receipt_key(self._key, revision.change.before.turn), revision.change)
            for revision in revisions
            if revision.change is not None and revision.change.before.turn is not None
        ]
        for start in range(0, len(turns), _READ_BATCH):
            batch = turns[start : start + _READ_BATCH]
            found = self._runtime.engine.get_rows([place for place, _ in batch])
            for (place, change), row in zip(batch, found, strict=True):
                receipt = None if row is None else decode_receipt(row)
                if not isinstance(receipt, Receipt) or receipt.manifest != change.before.manifest:
                    continue
                assert row is not None
                yield place, row, encode_receipt(self._receipt(receipt, change))

    def _receipt(self, receipt: Receipt, change: _Change) -> Receipt:
        """The receipt that gives the same result from what is left."""
        line = change.line
        stop = receipt.first + receipt.node_count
        gone = line.hidden_ids(receipt.first, stop)
        removed = dict(receipt.removed)
        places = [at for at in range(len(removed) + receipt.node_count) if at not in removed]
        for seq, node_id in gone.items():
            removed[places[seq - receipt.first]] = node_id
        leaf = receipt.leaf
        if leaf is None and change.old.leaf_id != change.new.leaf_id:
            leaf = change.old.leaf_id
        return receipt._replace(
            manifest=change.after.manifest,
            lineage=change.after.lineage,
            base=change.after.base,
            first=line.new_seq(receipt.first),
            node_count=receipt.node_count - len(gone),
            removed=tuple(sorted(removed.items())),
            leaf=leaf,
        )


def _outside(reader: PieceReader, hidden: HiddenNodes) -> frozenset[bytes]:
    """What hidden nodes link to beside their parents."""
    found: set[bytes] = set()
    digests = list(hidden)
    for start in range(0, len(digests), _READ_BATCH):
        found |= objects.read_outside(reader, digests[start : start + _READ_BATCH])
    return frozenset(found)
