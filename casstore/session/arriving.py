"""A session that comes from another store: built beside what is there, and seen all at once.

Its objects are stored first, in batches, and one last write makes it appear, with its queue,
attachments, receipts and names, on condition that
there is no session of that id and that everything the rows name is stored. Who reads the store sees
all of it or nothing (P5). If a collector took some of it in between, it is stored again.

The other store has counted, and the counting goes on: the revision is given, not 1, and there are
no earlier ones, as where retention has removed them; the fencing of leases, the fences of batches
and their numbers start where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import (
    Condition,
    NewObject,
    ObjectsExist,
    PutRow,
    RowIs,
    Write,
)
from casstore.errors import ConditionFailedError, InvalidInputError, ObjectNotFoundError
from casstore.format import splitting
from casstore.format.canonical import pack_checked
from casstore.format.hashing import Kind, plain_hash
from casstore.format.manifest import NOTHING, Manifest
from casstore.objects import graph as objects
from casstore.objects.node_index import NodeIndex
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import (
    attachments,
    catalogue,
    checkpoint,
    graph,
    heads,
    keys,
    leases,
    marks,
    pins,
    queue,
)
from casstore.session.attempts import Attempts
from casstore.session.commit import put_receipt
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
from casstore.session.heads import HeadRow, head_key
from casstore.session.receipts import SettledReceipt, encode_receipt
from casstore.session.state import Runtime, meta_key, tombstone_key

#: For ContendedError: gc may be what removes objects before a row names them.
REMEDY: Final = "try again, or collect with a longer grace period"
_WRITE_OBJECTS: Final = 2048
_WRITE_BYTES: Final = 4 << 20
_LARGEST: Final = (1 << 63) - 1

#: Told how many objects are stored, and of how many.
Told = Callable[[int, int], None]


class Arrival(NamedTuple):
    """A session as it is to be."""

    meta: SessionMeta
    #: 0: it was made, and nothing was committed yet. Then it has no nodes and no checkpoint.
    revision: int = 0
    committed_at_ms: int = 0
    turn: str | None = None
    #: With explicit parents, which are among them; in the order in which they were inserted.
    nodes: Sequence[NodeDraft] = ()
    leaf: str | None = None
    #: The ids of nodes that are there and not shown.
    hidden: Sequence[str] = ()
    checkpoint: Checkpoint = Checkpoint()
    usage: Sequence[Usage] = ()
    receipts: Mapping[str, SettledReceipt] = {}
    attachments: Sequence[Attachment] = ()
    batches: Sequence[Batch] = ()
    #: The number of the last batch that was ever queued.
    last_batch: int = 0
    #: How often its lease was given away.
    fencing: int = 0
    #: Tags, and the bytes that each of them keeps.
    tagged: Mapping[str, bytes] = {}


class Built(NamedTuple):
    """A session that could appear: its objects, and its rows."""

    objects: Sequence[NewObject]
    rows: Sequence[PutRow]
    tags: Mapping[str, bytes]
    named: frozenset[bytes]
    manifest: bytes | None
    #: A hash of everything that was given, the meta's ``extra`` aside.
    content: bytes


def build(runtime: Runtime, arrival: Arrival) -> Built:
    """Make a session's objects and rows, and write nothing.

    GraphError, InvalidInputError or InvalidValueError for what cannot be.
    """
    return _Builder(runtime, arrival).run()


def with_extra(built: Built, meta: SessionMeta) -> Built:
    """The same with another meta row: what it says of the session may tell of ``content``."""
    put = catalogue.put_meta(meta)
    rows = [put if (row.table, row.key) == (put.table, put.key) else row for row in built.rows]
    return built._replace(rows=rows)


def appear(runtime: Runtime, session: str, built: Built, told: Told | None = None) -> None:
    """Store a session that was built, and make it appear.

    ConditionFailedError if one of that id, or something of it, came to be there meanwhile.
    """
    attempts = Attempts(f"session {session!r}", REMEDY)
    while True:
        attempts.begin()
        conditions = _unclaimed(runtime, session, built)
        try:
            _store(runtime, built, told)
            runtime.engine.write(
                Write(
                    conditions=[*conditions, ObjectsExist(sorted(built.named))],
                    rows=[*built.rows, *_tag_rows(built)],
                )
            )
        except ObjectNotFoundError:
            continue
        except ConditionFailedError as exc:
            if isinstance(exc.condition, ObjectsExist):
                # gc removed something before a row named it.
                continue
            raise
        return


def _unclaimed(runtime: Runtime, session: str, built: Built) -> list[Condition]:
    """That nothing of such a session is there, and that its tags are free, or the same."""
    key = keys.session_key(session)
    places = [
        tombstone_key(key),
        head_key(key),
        meta_key(key),
        leases.lease_key(key),
        keys.queue_counter(key),
    ]
    conditions: list[Condition] = [RowIs(*place, None) for place in places]
    for name, digest in built.tags.items():
        conditions.append(pins.is_free(runtime, name, digest))
    return conditions


def _tag_rows(built: Built) -> list[PutRow]:
    rows: list[PutRow] = []
    for name, digest in built.tags.items():
        rows += [pins.put_tag(name, digest), marks.put_pin_mark(digest)]
    return rows


def _store(runtime: Runtime, built: Built, told: Told | None) -> None:
    """Write the objects. Until the head is there, no row names them."""
    done = 0
    for batch in _batches(built.objects):
        runtime.engine.write(Write(objects=batch))
        done += len(batch)
        if told is not None:
            told(done, len(built.objects))


def _batches(items: Iterable[NewObject]) -> Iterable[list[NewObject]]:
    batch: list[NewObject] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.data)
        if len(batch) >= _WRITE_OBJECTS or size >= _WRITE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Builder:
    """One arrival on its way to rows."""

    def __init__(self, runtime: Runtime, arrival: Arrival) -> None:
        self._runtime = runtime
        self._arrival = arrival
        self._key = keys.session_key(arrival.meta.session)
        self._writer = PieceWriter()
        self._named: set[bytes] = set()
        self._rows: list[PutRow] = []

    def run(self) -> Built:
        """Spell everything."""
        given = self._arrival
        for number in (given.revision, given.committed_at_ms, given.fencing, given.last_batch):
            if type(number) is not int or not 0 <= number <= _LARGEST:
                raise InvalidInputError(f"a number from 0 to {_LARGEST}, not {number!r}")
        manifest: bytes | None = None
        if given.revision:
            manifest = self._head()
        elif given.nodes or given.usage or given.checkpoint != Checkpoint():
            raise InvalidInputError("a session in which nothing was committed has no content")
        self._rows.append(catalogue.put_meta(given.meta))
        tags = {name: self._writer.emit(Kind.BLOB, body, []) for name, body in given.tagged.items()}
        self._named.update(tags.values())
        self._beside()
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
        spelled = graph.spell_nodes(given.nodes, writer)
        grown = graph.change_graph(self._runtime, None, change, spelled, writer)
        manifest = Manifest(
            leaf_id=grown.leaf_id,
            nodes=grown.node_count,
            next_seq=grown.next_seq,
            leaf=grown.leaf_digest,
            components=checkpoint.encode_checkpoint(given.checkpoint, writer),
            ledger=checkpoint.add_usage(self._runtime.reader(), NOTHING, given.usage, writer),
            tips=grown.tips,
            node_index=grown.node_index,
        )
        digest = objects.write_manifest(manifest, writer.emit)
        hidden = self._hidden(manifest, grown.nodes)
        # A long map of tips is made step by step, and each step leaves its pieces behind.
        writer.keep_reachable(digest, *([] if hidden is None else [hidden]))
        self._named.update([digest] if hidden is None else [digest, hidden])
        session = given.meta.session
        row = HeadRow(
            given.revision,
            given.meta.created_at_ms,
            given.committed_at_ms,
            digest,
            hidden,
            heads.COMMIT,
            given.turn,
            None,
            None,
            None,
            session if keys.is_cut(session) else None,
        )
        self._rows.append(PutRow(*head_key(self._key), heads.encode_head(row)))
        return digest

    def _hidden(self, manifest: Manifest, nodes: Sequence[str]) -> bytes | None:
        """The stored map of what is hidden; None if nothing is."""
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
            raise InvalidInputError("what is hidden must be among the nodes")
        return splitting.split(found, self._writer.emit)

    def _beside(self) -> None:
        """The rows that a session has beside its head."""
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
            lease = Lease(given.meta.session, _NOBODY, bytes(16), given.fencing, 0, 0)
            self._rows.append(leases.put_released(key, lease))

    def _content(self, manifest: bytes | None, tags: Mapping[str, bytes]) -> bytes:
        given = self._arrival
        told: list[Any] = [
            manifest,
            sorted(given.hidden),
            [given.revision, given.committed_at_ms, given.turn, given.fencing, given.last_batch],
            catalogue.put_meta(given.meta._replace(extra=None)).value,
            sorted([turn, encode_receipt(one)] for turn, one in given.receipts.items()),
            sorted(attachments.put_as_is(one).value for one in given.attachments),
            sorted(row.value for row in self._rows if row.table == "queue"),
            sorted([name, digest] for name, digest in tags.items()),
        ]
        return plain_hash(pack_checked(told))


# Who is said to have held the lease last, before the session came here.
_NOBODY: Final = "moved in"
