"""Converts a session database of lash into an ``Arrival``; writes nothing.

A committed turn gets a receipt, the row that records the result of a turn, that no commit matches:
lash hashes commits in its own way, so a repeated commit cannot be compared with the imported one.
Repeating the turn raises ``TurnConflictError``, so it is never done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.compat.importing import ImportNote, Notes, PartReport
from casstore.compat.lash_checkpoint import MAX_BLOB_BYTES, CheckpointReader, LashBlobs
from casstore.compat.lash_database import LashDatabase, LashHeadRow, MetaRow
from casstore.compat.lash_nodes import LashGraph, read_nodes
from casstore.compat.lash_queue import QueueReader, held
from casstore.compat.sqlite_source import utc_us
from casstore.format.digest import plain_hash
from casstore.maintenance.transfer.building import Arrival
from casstore.session import turns
from casstore.session.attachments import COMMITTED, INTENT
from casstore.session.data import Attachment, Checkpoint, SessionMeta, Usage
from casstore.session.turns import SettledReceipt

_HEAD_KEYS: Final = frozenset(
    (
        "schema_version", "session_id", "head_revision", "config", "agent_frames",
        "current_agent_frame_id", "checkpoint_ref", "leaf_node_id", "graph_node_count",
        "token_ledger",
    )
)  # fmt: skip
_HASH_BYTES: Final = 32
_LARGEST: Final = (1 << 63) - 1

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
    name: str | None = None,
    leave_out: bool = False,
    max_blob_bytes: int = MAX_BLOB_BYTES,
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
    if head is not None:
        own = head.session
    elif meta is not None:
        own = meta.session
    else:
        return None
    blobs = LashBlobs(database.source, max_blob_bytes)
    return _Gathering(database, blobs, own, name or own, now_ms, leave_out=leave_out).run(
        head, meta
    )


class _Gathering:
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
        fields = {} if head is None else head.head
        # A head is only ever written by a commit, which counts from 1.
        revision = 0 if head is None else max(1, head.revision)
        nodes = LashGraph([], [], None)
        checkpoint = Checkpoint()
        usage: list[Usage] = []
        origin: dict[str, Any] = {"schema_version": database.version}
        if head is not None:
            leaf = database.optional_text("the head", "leaf_node_id", fields)
            nodes = read_nodes(database, leaf, self._notes, leave_out=self._leave_out)
            checkpoint = self._checkpoints.read(fields)
            origin["head_revision"] = head.revision
        usage, written = self._usage()
        if head is None and usage:
            raise database.damaged("usage_deltas", "there is usage, but no head")
        if written:
            origin["cache_write_input_tokens"] = written
        receipts, turn, last_ms = self._receipts(revision)
        batches, generation = QueueReader(
            database, self._notes, own, self._session, self._now_ms
        ).read()
        attachments = self._attachments()
        tagged = self._tagged()
        known = self._meta(meta, nodes, origin)
        arrival = Arrival(
            meta=known,
            revision=revision,
            committed_at_ms=max(last_ms, known.created_at_ms, _time_ms(nodes.drafts[-1].time) or 0)
            if nodes.drafts
            else max(last_ms, known.created_at_ms),
            turn=turn,
            nodes=nodes.drafts,
            leaf=nodes.leaf,
            hidden=nodes.hidden,
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

    # --- other rows -----------------------------------------------------------------------------

    def _usage(self) -> tuple[list[Usage], list[list[Any]]]:
        """The ledger, and the tokens written to caches, which a ledger does not count."""
        usage: list[Usage] = []
        written: dict[tuple[str, str], int] = {}
        for source, model, into, out, cached, reasoning, cache_written in self._database.usage():
            usage.append(Usage(source, model, into, out, cached, reasoning))
            if cache_written:
                known = written.get((source, model), 0)
                written[source, model] = known + cache_written
        return usage, [[*each, number] for each, number in written.items()]

    def _receipts(self, revision: int) -> tuple[dict[str, SettledReceipt], str | None, int]:
        """The receipts, the turn that made the head, and the time of the latest turn."""
        receipts: dict[str, SettledReceipt] = {}
        made, last_ms = None, 0
        for turn, commit_hash, result, at_ms in self._database.turns(self._own):
            place = f"turn {turn!r}"
            given = self._database.number(place, "head_revision", result.get("head_revision", 0))
            receipts[turn] = SettledReceipt(
                turns.VERSION,
                _meaning(commit_hash),
                # In a restored file, turns may have later revisions than the head.
                min(given, revision),
                _hash(result.get("checkpoint_ref")),
                None,
                (),
                at_ms,
            )
            if given == revision:
                made = turn
            last_ms = max(last_ms, at_ms)
        return receipts, made if revision else None, last_ms

    def _attachments(self) -> list[Attachment]:
        return [
            Attachment(
                name,
                self._session,
                uri or None,
                None,
                owner,
                INTENT if committed is None else COMMITTED,
                intent_at_ms,
                committed,
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

    def _fencing(self) -> int:
        """The fencing counter of the session; BusyError if a lease is still valid."""
        latest = 0
        for owner, fencing, expires in self._database.leases(self._own):
            if owner is not None and expires > self._now_ms:
                what = f"session {self._own!r}"
                raise held(self._database, what, owner, expires, self._now_ms)
            latest = max(latest, fencing)
        return latest

    # --- meta -----------------------------------------------------------------------------------

    def _meta(self, meta: MetaRow | None, nodes: LashGraph, origin: dict[str, Any]) -> SessionMeta:
        first_ms = _time_ms(nodes.drafts[0].time) if nodes.drafts else None
        if meta is None:
            return SessionMeta(self._session, self._session, first_ms or 0)
        made_ms = _time_ms(meta.created_at)
        if made_ms is None:
            self._notes.add(_NO_TIME, meta.created_at)
            made_ms = first_ms or 0
        origin["created_at"] = meta.created_at
        relation = meta.relation
        parent = relation.get("parent_session_id")
        if parent is not None and type(parent) is not str:
            raise self._database.damaged("the relation", "its parent is not a text")
        if relation.keys() - {"kind", "parent_session_id", "caused_by"}:
            origin["relation"] = self._database.kept("the relation", relation)
        if self._own != self._session:
            origin["session_id"] = self._own
        return SessionMeta(
            self._session,
            meta.name or self._session,
            made_ms,
            meta.model or None,
            meta.cwd or None,
            parent,
            self._database.kept("the relation", relation.get("caused_by")),
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


def _meaning(commit_hash: str) -> bytes:
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
        number = int(text[5:]) * 1000 if text.startswith("unix:") else utc_us(text) // 1000
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number <= _LARGEST else None
