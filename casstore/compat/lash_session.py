"""Converts a session database of lash into an ``Arrival``; writes nothing.

A node keeps its id, parent, cause, frame and time; its payload is the rest of its row. A message of
the conversation is stored under ``message`` with its role in small letters, which is how a session
recognises messages. A node whose parent is gone becomes a root.

The queue gets lash's batches, unclaimed, then the inputs that wait for a turn. A lease or claim
that is still valid raises BusyError, because the work would be done twice. The fencing counters
stay, so that an old claim cannot complete a batch.

A committed turn gets a receipt, the row that records the result of a turn, that no commit matches:
lash hashes commits in its own way, so a repeated commit cannot be compared with the imported one.
Repeating the turn raises ``TurnConflictError``, so it is never done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.compat.importing import ImportNote, Notes, PartReport
from casstore.compat.lash_checkpoint import CheckpointReader, LashBlobs
from casstore.compat.lash_database import BatchRow, InputRow, LashDatabase, LashHeadRow, MetaRow
from casstore.compat.sqlite_source import utc_ms
from casstore.errors import BusyError, DamagedSourceError
from casstore.format.digest import plain_hash
from casstore.maintenance.transfer.building import Arrival
from casstore.session import queue, turns
from casstore.session.attachments import COMMITTED, INTENT
from casstore.session.data import Attachment, Batch, Checkpoint, NodeDraft, SessionMeta, Usage
from casstore.session.messages import message_in
from casstore.session.turns import SettledReceipt

_HEAD_KEYS: Final = frozenset(
    (
        "schema_version", "session_id", "head_revision", "config", "agent_frames",
        "current_agent_frame_id", "checkpoint_ref", "leaf_node_id", "graph_node_count",
        "token_ledger",
    )
)  # fmt: skip
# The keys of a node that are not payload.
_NODE_HEADER: Final = ("node_id", "parent_node_id", "caused_by", "agent_frame_id", "timestamp")
_ROLES: Final = {"User": "user", "Assistant": "assistant", "System": "system"}
_DELIVERIES: Final = {
    "earliest_safe_boundary": queue.EARLIEST,
    "after_current_turn_commit": queue.AFTER_TURN,
}
_SLOTS: Final = {"join": queue.JOIN, "exclusive": queue.EXCLUSIVE}
_HASH_BYTES: Final = 32
_LARGEST: Final = (1 << 63) - 1

_ORPHANS: Final = "nodes whose parent is gone, stored as roots"
_LATE_PARENTS: Final = "nodes inserted before their parent, stored after it"
_AS_TEXT: Final = "payloads stored as their JSON, in bytes"
_HEALED: Final = "leaf that is gone or hidden, replaced by the latest message"
_DAMAGED: Final = "damaged nodes, left out"
_FREED: Final = "batches and inputs whose claim has expired, stored unclaimed"
_INPUTS: Final = "inputs that wait for a turn, stored as batches after the others"
_NO_TIME: Final = "times that cannot be read, stored as the time of the first node"


class Gathered(NamedTuple):
    """A converted database."""

    arrival: Arrival
    #: The rows by kind; ``imported`` counts those that the arrival holds.
    parts: Sequence[PartReport]
    notes: Sequence[ImportNote]
    #: The part of the session's metadata that describes its origin.
    origin: dict[str, Any]


def gather(
    database: LashDatabase,
    now_ms: int,
    *,
    name: str | None,
    leave_out: bool,
    max_blob_bytes: int,
) -> Gathered | None:
    """Convert a whole database; None if it holds no session yet.

    ``name`` is the id that the session gets. ``leave_out``: damaged rows are noted and left out.
    BusyError while a lease of the session or a claim of its queue is valid at ``now_ms``.
    """
    head, meta = database.head(), database.meta()
    if head is not None and meta is not None and head.session != meta.session:
        raise database.damaged(
            "the head",
            f"it belongs to session {head.session!r}, but session_meta to {meta.session!r}",
        )
    first = head or meta
    if first is None:
        return None
    blobs = LashBlobs(database.source, max_blob_bytes)
    own = first.session
    gathering = _Conversion(database, blobs, own, name or own, now_ms, leave_out=leave_out)
    return gathering.run(head, meta)


class _LashGraph(NamedTuple):
    """The graph of a session."""

    drafts: list[NodeDraft]
    hidden: list[str]
    leaf: str | None


class _Conversion:
    """The conversion of one database."""

    def __init__(
        self,
        database: LashDatabase,
        blobs: LashBlobs,
        own: str,
        session: str,
        now_ms: int,
        *,
        leave_out: bool,
    ) -> None:
        self._database = database
        self._blobs = blobs
        # The id of the session in lash, and here.
        self._own = own
        self._session = session
        self._now_ms = now_ms
        self._leave_out = leave_out
        self._notes = Notes()
        self._checkpoints = CheckpointReader(database, blobs, self._notes, leave_out=leave_out)

    def run(self, head: LashHeadRow | None, meta: MetaRow | None) -> Gathered:
        """Convert everything, in the order of the report."""
        database, own = self._database, self._own
        fencing = self._fencing()
        fields: dict[str, Any] = {}
        revision = 0
        graph, checkpoint = _LashGraph([], [], None), Checkpoint()
        origin: dict[str, Any] = {"schema_version": database.version}
        if head is not None:
            fields = head.head
            # A head is only ever written by a commit, which counts from 1.
            revision = max(1, head.revision)
            graph = self._graph(fields.get("leaf_node_id"))
            checkpoint = self._checkpoints.read(fields)
            origin["head_revision"] = head.revision
        usage, written = self._usage()
        if head is None and usage:
            raise database.damaged("usage_deltas", "there is usage, but no head")
        if written:
            origin["cache_write_input_tokens"] = written
        receipts, turn, last_ms = self._receipts(revision)
        batches, generation = self._queue()
        attachments = self._attachments()
        tagged = self._tagged()
        known = self._meta(meta, graph, origin)
        last_node_ms = _time_ms(graph.drafts[-1].time) if graph.drafts else None
        arrival = Arrival(
            meta=known,
            revision=revision,
            committed_at_ms=max(last_ms, known.created_at_ms, last_node_ms or 0),
            turn=turn,
            nodes=graph.drafts,
            leaf=graph.leaf,
            hidden=graph.hidden,
            checkpoint=checkpoint,
            usage=usage,
            receipts=receipts,
            attachments=attachments,
            batches=batches,
            last_batch=max([batch.seq for batch in batches], default=0),
            fencing=max(fencing, generation),
            tagged=tagged,
        )
        return Gathered(
            arrival,
            self._parts(arrival),
            [
                *self._notes.all(),
                *database.left_out(own),
                *_unread("the head", fields, _HEAD_KEYS),
                *database.unnamed_blobs(self._blobs.seen),
            ],
            origin,
        )

    def _parts(self, arrival: Arrival) -> list[PartReport]:
        counts = {
            "nodes": (self._database.count("graph_nodes"), len(arrival.nodes)),
            "usage": (self._database.count("usage_deltas"), len(arrival.usage)),
            "turns": (len(arrival.receipts), len(arrival.receipts)),
            "batches and inputs": (len(arrival.batches), len(arrival.batches)),
            "attachments": (len(arrival.attachments), len(arrival.attachments)),
            "artifacts": (self._database.count("artifact_refs"), len(arrival.tagged)),
        }
        return [PartReport(name, *numbers) for name, numbers in counts.items() if numbers[0]]

    # --- nodes ----------------------------------------------------------------------------------

    def _graph(self, head_leaf: Any) -> _LashGraph:
        leaf = self._database.optional_text("the head", "leaf_node_id", head_leaf)
        drafts: list[NodeDraft] = []
        hidden: list[str] = []
        for node, text, is_hidden in self._database.nodes():
            try:
                drafts.append(self._draft(node, text))
            except DamagedSourceError:
                if not self._leave_out:
                    raise
                self._notes.add(_DAMAGED, node)
                continue
            if is_hidden:
                hidden.append(node)
        drafts = self._with_parents(drafts)
        gone = set(hidden)
        visible = [draft for draft in drafts if draft.id not in gone]
        if leaf is not None and leaf not in {draft.id for draft in visible}:
            self._notes.add(_HEALED, leaf)
            said = [draft.id for draft in visible if message_in(draft.payload) is not None]
            leaf = said[-1] if said else None
        return _LashGraph(drafts, hidden, leaf)

    def _draft(self, node: str, text: Any) -> NodeDraft:
        database, place = self._database, f"node {node!r}"
        fields = database.object(place, text)
        if fields.get("node_id") != node:
            raise database.damaged(place, f"its JSON has the id {fields.get('node_id')!r:.80}")
        parent, frame, time = [
            database.optional_text(place, name, fields.get(name))
            for name in ("parent_node_id", "agent_frame_id", "timestamp")
        ]
        given = fields.get("caused_by")
        payload = _payload(
            {name: value for name, value in fields.items() if name not in _NODE_HEADER}
        )
        kept, cause = database.kept(place, payload), database.kept(place, given)
        if kept is not payload or cause is not given:
            self._notes.add(_AS_TEXT, node)
        return NodeDraft(
            id=node, payload=kept, parent=parent, cause=cause, frame=frame or None, time=time
        )

    def _with_parents(self, drafts: list[NodeDraft]) -> list[NodeDraft]:
        """The nodes; those whose parent does not exist become roots."""
        there = {draft.id for draft in drafts}
        before: set[str] = set()
        placed: list[NodeDraft] = []
        for draft in drafts:
            parent = draft.parent
            if parent is not None and parent not in there:
                self._notes.add(_ORPHANS, draft.id)
                draft = draft._replace(parent=None)
            elif parent is not None and parent not in before:
                self._notes.add(_LATE_PARENTS, draft.id)
            before.add(draft.id)
            placed.append(draft)
        return placed

    # --- the queue ------------------------------------------------------------------------------

    def _queue(self) -> tuple[list[Batch], int]:
        """The queue, and the latest lease generation that claimed a batch (0 before version 11)."""
        database = self._database
        batches: list[Batch] = []
        latest = 0
        for row in database.batches(self._own):
            place = f"batch {row.id!r}"
            batches.append(self._batch(place, row))
            self._require_free(place, row)
            latest = max(latest, database.number(place, "its lease generation", row.generation))
        last = batches[-1].seq if batches else 0
        for number, waiting in enumerate(database.waiting_inputs(self._own), last + 1):
            place = f"input {waiting.id!r}"
            batches.append(self._input(place, number, waiting))
            self._require_free(place, waiting)
            self._notes.add(_INPUTS, batches[-1].id)
        return batches, latest

    def _batch(self, place: str, row: BatchRow) -> Batch:
        database = self._database
        if row.delivery not in _DELIVERIES or row.slot not in _SLOTS:
            raise database.damaged(
                place, f"its policies {row.delivery!r:.40} and {row.slot!r:.40} are unknown"
            )
        name = database.text(place, "batch_id", row.id)
        items = [
            {
                "item_id": database.text(place, "item_id", item),
                "payload": database.kept(place, database.json(place, payload)),
            }
            for item, payload in database.items(name)
        ]
        return Batch(
            id=name,
            session=self._session,
            seq=database.number(place, "enqueue_seq", row.seq),
            items=tuple(items),
            source_key=database.optional_text(place, "source_key", row.source_key),
            delivery=_DELIVERIES[row.delivery],
            slot=_SLOTS[row.slot],
            merge_key=self._merge_key(place, row.merge_key),
            available_at_ms=database.number(place, "available_at_ms", row.available_at_ms),
            enqueued_at_ms=database.number(place, "enqueued_at_ms", row.enqueued_at_ms),
            fence=database.number(place, "claim_fencing_token", row.fence),
            held_by=0,
        )

    def _merge_key(self, place: str, text: Any) -> str | None:
        """The key that batches must share to be joined; None: the batch is never joined."""
        policy = self._database.json(place, text)
        if policy == "never":
            return None
        if policy == "payload_default":
            return "payload_default"
        if type(policy) is dict and list(policy) == ["group"] and type(policy["group"]) is str:
            return f"group:{policy['group']}"
        raise self._database.damaged(place, f"its merge key {text!r:.80} is unknown")

    def _input(self, place: str, seq: int, row: InputRow) -> Batch:
        """An input as a batch of one item, delivered during the turn it is for, or after it."""
        database = self._database
        scope = database.object(place, row.ingress)
        payload = {
            "type": "turn_input",
            "ingress": database.kept(place, scope),
            "input": database.kept(place, database.json(place, row.content)),
        }
        name = database.text(place, "input_id", row.id)
        source_key = database.optional_text(place, "source_key", row.source_key)
        return Batch(
            id=name,
            session=self._session,
            seq=seq,
            items=({"item_id": name, "payload": payload},),
            # With a prefix, because a batch may have the same source key.
            source_key=None if source_key is None else f"input:{source_key}",
            delivery=queue.EARLIEST if scope.get("scope") == "active_turn" else queue.AFTER_TURN,
            slot=queue.EXCLUSIVE,
            merge_key=None,
            available_at_ms=0,
            enqueued_at_ms=database.number(place, "enqueued_at_ms", row.enqueued_at_ms),
            fence=0,
            held_by=0,
        )

    # --- leases and claims ----------------------------------------------------------------------

    def _fencing(self) -> int:
        """The fencing counter of the session; BusyError if a lease is still valid."""
        latest = 0
        for owner, fencing, expires_ms in self._database.leases(self._own):
            if owner is not None:
                self._require_expired(f"session {self._own!r}", owner, expires_ms)
            latest = max(latest, fencing)
        return latest

    def _require_free(self, place: str, row: BatchRow | InputRow) -> None:
        if row.claim is None:
            return
        until_ms = self._database.number(place, "claim_expires_at_ms", row.expires_at_ms)
        self._require_expired(f"{place} of session {self._own!r}", row.owner, until_ms)
        self._notes.add(_FREED, str(row.id))

    def _require_expired(self, what: str, owner: Any, until_ms: int) -> None:
        """Raise BusyError if a lease or claim is still valid."""
        left_s = (until_ms - self._now_ms + 999) // 1000
        if left_s > 0:
            raise BusyError(
                f"{what} of {self._database.source.path} is held by {owner!r} for another "
                f"{left_s} s; stop it, or wait, then import again"
            )

    # --- other rows -----------------------------------------------------------------------------

    def _usage(self) -> tuple[list[Usage], list[list[Any]]]:
        """The ledger, and the tokens written to caches, which a ledger does not count."""
        usage: list[Usage] = []
        written: dict[tuple[str, str], int] = {}
        for source, model, into, out, cached, reasoning, cache_written in self._database.usage():
            usage.append(
                Usage(
                    source=source,
                    model=model,
                    input=into,
                    output=out,
                    cached_input=cached,
                    reasoning=reasoning,
                )
            )
            if cache_written:
                written[source, model] = written.get((source, model), 0) + cache_written
        return usage, [[*each, number] for each, number in written.items()]

    def _receipts(self, revision: int) -> tuple[dict[str, SettledReceipt], str | None, int]:
        """The receipts, the turn that made the head, and the time of the latest turn."""
        receipts: dict[str, SettledReceipt] = {}
        made, last_ms = None, 0
        for turn, commit_hash, result, at_ms in self._database.turns(self._own):
            place = f"turn {turn!r}"
            given = self._database.number(place, "head_revision", result.get("head_revision", 0))
            receipts[turn] = SettledReceipt(
                version=turns.VERSION,
                content_hash=_content_hash(commit_hash),
                # In a restored file, turns may have later revisions than the head.
                revision=min(given, revision),
                manifest=_hash(result.get("checkpoint_ref")),
                leaf=None,
                nodes=(),
                committed_at_ms=at_ms,
            )
            if given == revision:
                made = turn
            last_ms = max(last_ms, at_ms)
        return receipts, made if revision else None, last_ms

    def _attachments(self) -> list[Attachment]:
        return [
            Attachment(
                id=name,
                session=self._session,
                uri=uri or None,
                digest=None,
                owner=owner,
                state=INTENT if committed is None else COMMITTED,
                intent_at_ms=intent_at_ms,
                committed_at_ms=committed,
            )
            for name, uri, owner, intent_at_ms, committed in self._database.attachments(self._own)
        ]

    def _tagged(self) -> dict[str, bytes]:
        tagged: dict[str, bytes] = {}
        for name, ref in self._database.artifacts():
            content = self._checkpoints.content(ref, f"artifact {name!r}")
            if content is not None:
                tagged[tag_name(self._session, name)] = content
        return tagged

    # --- meta -----------------------------------------------------------------------------------

    def _meta(self, meta: MetaRow | None, graph: _LashGraph, origin: dict[str, Any]) -> SessionMeta:
        first_ms = _time_ms(graph.drafts[0].time) if graph.drafts else None
        if meta is None:
            return SessionMeta(self._session, self._session, first_ms or 0)
        made_ms = _time_ms(meta.created_at)
        if made_ms is None:
            self._notes.add(_NO_TIME, meta.created_at)
            made_ms = first_ms or 0
        origin["created_at"] = meta.created_at
        relation = meta.relation
        parent = self._database.optional_text(
            "the relation", "parent_session_id", relation.get("parent_session_id")
        )
        if relation.keys() - {"kind", "parent_session_id", "caused_by"}:
            origin["relation"] = self._database.kept("the relation", relation)
        if self._own != self._session:
            origin["session_id"] = self._own
        return SessionMeta(
            session=self._session,
            name=meta.name or self._session,
            created_at_ms=made_ms,
            model=meta.model or None,
            cwd=meta.cwd or None,
            parent=parent,
            cause=self._database.kept("the relation", relation.get("caused_by")),
        )


def tag_name(session: str, artifact: str) -> str:
    """The name of the tag that keeps an artifact of a session."""
    return f"lash/{session}/{artifact}"


def _unread(place: str, fields: dict[str, Any], known: frozenset[str]) -> list[ImportNote]:
    """Notes about unknown keys of a map, and about its ledger, which lash itself does not read."""
    left = [
        ImportNote(f"unknown key {name} of {place}, left out", 1)
        for name in sorted(fields.keys() - known)
    ]
    ledger = fields.get("token_ledger")
    if type(ledger) is list and ledger:
        left.append(
            ImportNote(f"usage in {place}, which lash does not read, left out", len(ledger))
        )
    return left


def _payload(payload: dict[str, Any]) -> dict[str, Any]:
    """A payload with the message of a conversation under ``message``."""
    event = payload.get("event")
    if payload.get("kind") == "event" and type(event) is dict and "message" not in payload:
        said = event.get("Conversation")
        if len(event) == 1 and type(said) is dict:
            payload = {name: value for name, value in payload.items() if name != "event"}
            payload["message"] = said
    said = payload.get("message")
    if type(said) is dict and type(said.get("role")) is str:
        payload = {**payload, "message": {**said, "role": _ROLES.get(said["role"], said["role"])}}
    return payload


def _content_hash(commit_hash: str) -> bytes:
    """A hash in place of the hash of a commit's content in its receipt: no commit has this one."""
    return plain_hash(b"a turn committed by lash\0" + commit_hash.encode("utf-8", "surrogatepass"))


def _hash(ref: Any) -> bytes:
    try:
        found = bytes.fromhex(ref)
    except (TypeError, ValueError):
        return bytes(_HASH_BYTES)
    return found if len(found) == _HASH_BYTES else bytes(_HASH_BYTES)


def _time_ms(text: Any) -> int | None:
    """Milliseconds since 1970 of ``unix:SECONDS`` or RFC 3339; None if it is not a time."""
    if type(text) is not str:
        return None
    try:
        number = int(text[5:]) * 1000 if text.startswith("unix:") else utc_ms(text)
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number <= _LARGEST else None
