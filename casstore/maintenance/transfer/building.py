"""Builds a session that another system describes: its objects, and rows published in one write.

``build`` encodes an ``Arrival`` and writes nothing; ``appear`` stores the objects and publishes the
rows, with queue, attachments, receipts and tags, on condition that the store has no session of that
id.

Counters continue where the other system's were. The revision is given, and has no history, as after
retention. The fencing numbers of leases and the numbers and fences of batches are given as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import NewObject, PutRow, RowIs
from casstore.errors import InvalidInputError, SessionExistsError
from casstore.format import splitting
from casstore.format.canonical import pack_checked
from casstore.format.digest import Kind, plain_hash
from casstore.format.graph import NIL, Manifest, encode_manifest
from casstore.maintenance.transfer.objects import StoreTarget
from casstore.maintenance.transfer.publish import settle, write
from casstore.objects.node_index import NodeIndex
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import (
    attachments,
    catalogue,
    checkpoint,
    graph,
    keys,
    leases,
    marks,
    pins,
    queue,
)
from casstore.session.data import (
    Attachment,
    Batch,
    Checkpoint,
    Commit,
    Lease,
    NodeDraft,
    SessionMeta,
    Usage,
)
from casstore.session.state import (
    COMMIT,
    HeadRow,
    Runtime,
    encode_head,
    head_key,
    meta_key,
    tombstone_key,
)
from casstore.session.turns import SettledReceipt, encode_receipt, put_receipt

_LARGEST: Final = (1 << 63) - 1
# Stands in the row of the lease for the owner that the other system granted it to last.
_FORMER_OWNER: Final = "moved in"

#: Called with the number of objects that are stored, and the number of all.
Progress = Callable[[int, int], None]


class Arrival(NamedTuple):
    """The description of a session that is to be built."""

    meta: SessionMeta
    #: 0: it was created, and nothing was committed yet. Then it has no nodes and no checkpoint.
    revision: int = 0
    committed_at_ms: int = 0
    turn: str | None = None
    #: In the order in which they were inserted, with explicit parents, which are among them.
    nodes: Sequence[NodeDraft] = ()
    leaf: str | None = None
    #: The ids of those nodes that are hidden.
    hidden: Sequence[str] = ()
    checkpoint: Checkpoint = Checkpoint()
    usage: Sequence[Usage] = ()
    receipts: Mapping[str, SettledReceipt] = {}
    attachments: Sequence[Attachment] = ()
    batches: Sequence[Batch] = ()
    #: The number of the last batch that was ever queued.
    last_batch: int = 0
    #: How many times its lease was granted.
    fencing: int = 0
    #: Tags, each with the bytes that it names.
    tagged: Mapping[str, bytes] = {}


class Built(NamedTuple):
    """The objects and rows of a session that ``appear`` can publish."""

    objects: Sequence[NewObject]
    rows: Sequence[PutRow]
    tags: Mapping[str, bytes]
    named: frozenset[bytes]
    manifest: bytes | None
    #: A hash of the whole ``Arrival`` except ``extra`` of its meta.
    content: bytes


def build(runtime: Runtime, arrival: Arrival) -> Built:
    """Encode a session's objects and rows, and write nothing.

    GraphError, InvalidInputError or InvalidValueError if the description is invalid.
    """
    return _ArrivalBuilder(runtime, arrival).run()


def with_extra(built: Built, meta: SessionMeta) -> Built:
    """The same session with another meta row, whose ``extra`` may contain ``content``."""
    put = catalogue.put_meta(meta)
    rows = [put if (row.table, row.key) == (put.table, put.key) else row for row in built.rows]
    return built._replace(rows=rows)


def appear(runtime: Runtime, session: str, built: Built, progress: Progress | None = None) -> None:
    """Store the objects of a session that was built, and publish its rows.

    SessionExistsError if the store has rows of a session of that id.
    """
    settle(
        f"session {session!r}", lambda: None, lambda _: _appear(runtime, session, built, progress)
    )


def _appear(runtime: Runtime, session: str, built: Built, progress: Progress | None) -> None:
    engine, key = runtime.engine, keys.session_key(session)
    places = [
        tombstone_key(key),
        head_key(key),
        meta_key(key),
        leases.lease_key(key),
        keys.queue_counter(key),
    ]
    if any(row is not None for row in engine.get_rows(places)):
        raise SessionExistsError(session)
    conditions = [RowIs(*place, None) for place in places]
    rows = list(built.rows)
    for name, digest in built.tags.items():
        conditions.append(pins.is_free(runtime, name, digest))
        rows += [pins.put_tag(name, digest), marks.put_pin_mark(digest)]
    total = len(built.objects)
    target = StoreTarget(engine, None if progress is None else lambda done: progress(done, total))
    for item in built.objects:
        target.take(item)
    target.flush()
    write(engine, rows, conditions, built.named)


class _ArrivalBuilder:
    """Encodes one ``Arrival``."""

    def __init__(self, runtime: Runtime, arrival: Arrival) -> None:
        self._runtime = runtime
        self._arrival = arrival
        self._key = keys.session_key(arrival.meta.session)
        self._writer = PieceWriter()
        self._named: set[bytes] = set()
        self._rows: list[PutRow] = []

    def run(self) -> Built:
        """Encode everything."""
        given = self._arrival
        for number in (given.revision, given.committed_at_ms, given.fencing, given.last_batch):
            if type(number) is not int or not 0 <= number <= _LARGEST:
                raise InvalidInputError(
                    "revision, committed_at_ms, fencing and last_batch must be ints from 0 to "
                    f"{_LARGEST}, got {number!r}"
                )
        manifest: bytes | None = None
        if given.revision:
            manifest = self._head()
        elif given.nodes or given.usage or given.checkpoint != Checkpoint():
            raise InvalidInputError("a session at revision 0 has no nodes, usage or checkpoint")
        self._rows.append(catalogue.put_meta(given.meta))
        tags = {name: self._writer.emit(Kind.BLOB, body, []) for name, body in given.tagged.items()}
        self._named.update(tags.values())
        self._others()
        return Built(
            self._writer.objects,
            self._rows,
            tags,
            frozenset(self._named),
            manifest,
            self._content(manifest, tags),
        )

    def _head(self) -> bytes:
        given, writer = self._arrival, self._writer
        for entry in given.usage:
            checkpoint.check_usage(entry)
        change = Commit(replace=given.nodes, leaf=given.leaf)
        encoded = graph.encode_nodes(given.nodes, writer)
        grown = graph.change_graph(self._runtime, None, change, encoded, writer)
        manifest = Manifest(
            leaf_id=grown.leaf_id,
            nodes=grown.node_count,
            next_seq=grown.next_seq,
            leaf=grown.leaf_digest,
            components=checkpoint.with_ledger(
                self._runtime.reader(),
                NIL,
                checkpoint.encode_checkpoint(given.checkpoint, writer),
                given.usage,
                writer,
            ),
            tips=grown.tips,
            node_index=grown.node_index,
        )
        digest = writer.emit(Kind.MANIFEST, *encode_manifest(manifest))
        hidden = self._hidden(manifest, grown.nodes)
        # A long map of tips is built in steps, and each step leaves pieces that nothing links to.
        writer.keep_reachable(digest, *([] if hidden is None else [hidden]))
        self._named.update([digest] if hidden is None else [digest, hidden])
        session = given.meta.session
        row = HeadRow(
            revision=given.revision,
            created_at_ms=given.meta.created_at_ms,
            committed_at_ms=given.committed_at_ms,
            manifest=digest,
            hidden=hidden,
            operation=COMMIT,
            turn=given.turn,
            rewound_to=None,
            origin=None,
            adopted=None,
            long_id=session if keys.is_cut(session) else None,
        )
        self._rows.append(PutRow(*head_key(self._key), encode_head(row)))
        return digest

    def _hidden(self, manifest: Manifest, nodes: Sequence[str]) -> bytes | None:
        """The digest of the map of hidden nodes; None if no node is hidden."""
        wanted = set(self._arrival.hidden)
        if not wanted:
            return None
        reader = PendingReader(self._runtime.engine, self._writer)
        index = NodeIndex(reader, self._runtime.index_cache, manifest.node_index, manifest.nodes)
        found = {
            digest.hex(): node
            for node, digest in zip(nodes, index.digests(range(index.count)), strict=True)
            if node in wanted
        }
        if len(found) != len(wanted):
            raise InvalidInputError("hidden must be ids of nodes of the session")
        return splitting.split(found, self._writer.emit)

    def _others(self) -> None:
        """The rows of a session other than head and meta."""
        given, key = self._arrival, self._key
        self._rows += [put_receipt(key, turn, one) for turn, one in given.receipts.items()]
        self._rows += [attachments.put_as_is(one) for one in given.attachments]
        for batch in given.batches:
            items = splitting.split(list(batch.items), self._writer.emit)
            self._named.add(items)
            self._rows += queue.put_as_is(key, batch, items)
        if given.last_batch:
            counter = given.last_batch.to_bytes(8, "big")
            self._rows.append(PutRow(*keys.queue_counter(key), counter))
        if given.fencing:
            lease = Lease(given.meta.session, _FORMER_OWNER, bytes(16), given.fencing, 0, 0)
            self._rows.append(leases.put_released(key, lease))

    def _content(self, manifest: bytes | None, tags: Mapping[str, bytes]) -> bytes:
        given = self._arrival
        content: list[Any] = [
            manifest,
            sorted(given.hidden),
            [given.revision, given.committed_at_ms, given.turn, given.fencing, given.last_batch],
            catalogue.put_meta(given.meta._replace(extra=None)).value,
            sorted([turn, encode_receipt(one)] for turn, one in given.receipts.items()),
            sorted(attachments.put_as_is(one).value for one in given.attachments),
            sorted(row.value for row in self._rows if row.table == "queue"),
            sorted([name, digest] for name, digest in tags.items()),
        ]
        return plain_hash(pack_checked(content))
