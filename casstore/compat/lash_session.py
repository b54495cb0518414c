"""A session database of lash into a session that can arrive: everything read, nothing written.

What a turn has committed there is known here by a receipt that no commit can match: lash hashes
a commit its own way, so nobody can tell whether a repeated turn is the same. It is refused
(``TurnConflictError``), and never done twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.compat.importing import LeftBehind, PartReport
from casstore.compat.lash_blobs import MAX_BLOB_BYTES, Blobs
from casstore.compat.lash_database import HeadRow, LashDatabase, MetaRow
from casstore.compat.lash_nodes import Findings, Found, Nodes, read_nodes
from casstore.compat.times import utc_us
from casstore.errors import BusyError, DamagedSourceError, InvalidInputError
from casstore.format.hashing import plain_hash
from casstore.records.json_values import storable
from casstore.session import intent, queue
from casstore.session.arriving import Arrival
from casstore.session.attachments import COMMITTED, INTENT
from casstore.session.data import Attachment, Batch, Checkpoint, SessionMeta, Usage
from casstore.session.receipts import SettledReceipt

_DELIVERIES: Final = {
    "earliest_safe_boundary": queue.EARLIEST,
    "after_current_turn_commit": queue.AFTER_TURN,
}
_SLOTS: Final = {"join": queue.JOIN, "exclusive": queue.EXCLUSIVE}
_HEAD_KEYS: Final = frozenset(
    (
        "schema_version", "session_id", "head_revision", "config", "agent_frames",
        "current_agent_frame_id", "checkpoint_ref", "leaf_node_id", "graph_node_count",
        "token_ledger",
    )
)  # fmt: skip
_MANIFEST_KEYS: Final = frozenset(
    (
        "schema_version", "turn_state", "tool_state_ref", "plugin_snapshot_ref",
        "plugin_snapshot_revision", "execution_state_ref",
    )
)  # fmt: skip
_HASH_BYTES: Final = 32
_LARGEST: Final = (1 << 63) - 1

FREED: Final = "batches whose claim had run out, which are free now"
FRAMES: Final = "frames whose execution state is gone"
DAMAGED: Final = "damaged blobs that were left out"
NO_TIME: Final = "times that cannot be read"


class Gathered(NamedTuple):
    """What a database holds, and what becomes of it."""

    arrival: Arrival
    #: What moves, and how many rows of it there are; then what stays behind.
    moving: Sequence[PartReport]
    left: Sequence[LeftBehind]
    findings: Sequence[Found]
    #: What the session's meta says of where it came from.
    origin: dict[str, Any]


def gather(
    database: LashDatabase,
    now_ms: int,
    *,
    name: str | None = None,
    leave_out: bool = False,
    max_blob_bytes: int = MAX_BLOB_BYTES,
) -> Gathered | None:
    """Read everything; None if the database holds no session yet.

    ``name`` is the id that the session gets. ``leave_out``: damage is told, and not an error.
    BusyError while somebody holds the session, or work of its queue, by their clock.
    """
    head, meta = database.head(), database.meta()
    if head is not None and meta is not None and head.session != meta.session:
        raise database.damaged(
            "the head",
            f"it is of session {head.session!r}, and session_meta of {meta.session!r}",
        )
    if head is not None:
        own = head.session
    elif meta is not None:
        own = meta.session
    else:
        return None
    blobs = Blobs(database.source, max_blob_bytes)
    return _Gathering(database, blobs, own, name or own, now_ms, leave_out=leave_out).run(
        head, meta
    )


class _Gathering:
    """One database on its way."""

    def __init__(
        self,
        database: LashDatabase,
        blobs: Blobs,
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
        self._findings = Findings()

    def run(self, head: HeadRow | None, meta: MetaRow | None) -> Gathered:
        """Everything, in the order in which the report tells it."""
        database, own = self._database, self._own
        fencing = self._fencing()
        told = {} if head is None else head.head
        # A head is only ever written by a commit, which counts from 1.
        revision = 0 if head is None else max(1, head.revision)
        nodes = Nodes([], [], None)
        checkpoint = Checkpoint()
        usage: list[Usage] = []
        origin: dict[str, Any] = {"schema_version": database.version}
        if head is not None:
            leaf = self._optional_text("the head", "leaf_node_id", told)
            nodes = read_nodes(database, leaf, self._findings, leave_out=self._leave_out)
            checkpoint = self._checkpoint(told)
            origin["head_revision"] = head.revision
        usage, written = self._usage()
        if head is None and usage:
            raise database.damaged("usage_deltas", "there is usage, and no head that it belongs to")
        if written:
            origin["cache_write_input_tokens"] = written
        receipts, turn, last_ms = self._receipts(revision)
        batches, last_batch, generation = self._batches()
        attachments = self._attachments()
        tagged = self._tagged()
        known = self._meta(meta, nodes, origin)
        arrival = Arrival(
            known,
            revision,
            max(last_ms, known.created_at_ms, _time_ms(nodes.drafts[-1].time) or 0)
            if nodes.drafts
            else max(last_ms, known.created_at_ms),
            turn,
            nodes.drafts,
            nodes.leaf,
            nodes.hidden,
            checkpoint,
            usage,
            receipts,
            attachments,
            batches,
            last_batch,
            max(fencing, generation),
            tagged,
        )
        return Gathered(
            arrival,
            self._moving(arrival),
            [
                *database.left_behind(own),
                *_unread("the head", told, _HEAD_KEYS),
                *database.unnamed_blobs(self._blobs.seen),
            ],
            self._findings.all(),
            origin,
        )

    def _moving(self, arrival: Arrival) -> list[PartReport]:
        counts = {
            "nodes": (self._database.count("graph_nodes"), len(arrival.nodes)),
            "usage": (self._database.count("usage_deltas"), len(arrival.usage)),
            "turns": (len(arrival.receipts), len(arrival.receipts)),
            "batches": (len(arrival.batches), len(arrival.batches)),
            "attachments": (len(arrival.attachments), len(arrival.attachments)),
            "artifacts": (self._database.count("artifact_refs"), len(arrival.tagged)),
        }
        return [PartReport(name, *numbers) for name, numbers in counts.items()]

    # --- the checkpoint -------------------------------------------------------------------------

    def _checkpoint(self, head: dict[str, Any]) -> Checkpoint:
        manifest: dict[str, Any] = {}
        ref = self._optional_text("the head", "checkpoint_ref", head)
        if ref is not None:
            found = self._component(ref, "the checkpoint")
            if found is not None and type(found) is not dict:
                raise self._blobs.damaged(ref, "the checkpoint is no map")
            manifest = found or {}
        for strange in sorted(manifest.keys() - _MANIFEST_KEYS):
            self._findings.add("keys of the checkpoint that are not known here", strange)
        revision = manifest.get("plugin_snapshot_revision")
        if revision is not None and (type(revision) is not int or not 0 <= revision <= _LARGEST):
            raise self._blobs.damaged(str(ref), f"no plugin revision {revision!r:.40}")
        frames = head.get("agent_frames", [])
        if type(frames) is not list:
            raise self._database.damaged("the head", "its agent_frames are no list")
        frame = self._optional_text("the head", "current_agent_frame_id", head)
        return Checkpoint(
            self._kept(f"blob {ref}", manifest.get("turn_state")),
            self._named(manifest, ref, "tool_state"),
            self._named(manifest, ref, "plugin_snapshot"),
            revision,
            self._named(manifest, ref, "execution_state"),
            [self._frame(at, each) for at, each in enumerate(frames)],
            frame or None,
            self._kept("the config of the head", head.get("config")),
        )

    def _named(self, manifest: dict[str, Any], ref: str | None, name: str) -> Any:
        """A component that the checkpoint names; None if it names none."""
        of = manifest.get(f"{name}_ref")
        if of is None:
            return None
        if type(of) is not str:
            raise self._blobs.damaged(str(ref), f"{name}_ref is no text")
        return self._component(of, name)

    def _component(self, ref: str, of: str) -> Any:
        """What a blob holds; None if it is damaged, and that is left out."""
        try:
            value = self._blobs.value(ref, of)
            if of == "execution_state":
                content = _as_bytes(value)
                if content is None:
                    raise self._blobs.damaged(ref, "the execution state is no array of bytes")
                return content
            try:
                return storable(value)
            except InvalidInputError as exc:
                raise self._blobs.damaged(ref, f"{of} holds more than JSON and bytes") from exc
        except DamagedSourceError:
            if not self._leave_out:
                raise
            self._findings.add(DAMAGED, ref)
            return None

    def _frame(self, at: int, frame: Any) -> Any:
        """A frame, with its execution state where that is still there.

        lash does not keep what only a frame names; so this may be gone, and is no damage.
        """
        place = f"frame {at + 1} of the head"
        if type(frame) is not dict:
            raise self._database.damaged(place, "it is no map")
        kept = dict(frame)
        snapshot = kept.get("execution_state_snapshot")
        ref = kept.get("execution_state_ref")
        if snapshot is not None:
            kept["execution_state_snapshot"] = _as_bytes(snapshot) or snapshot
        elif type(ref) is str:
            try:
                if self._blobs.find(ref) is None:
                    self._findings.add(FRAMES, str(kept.get("frame_id")))
                else:
                    kept["execution_state_snapshot"] = _as_bytes(self._blobs.value(ref, place))
            except DamagedSourceError:
                if not self._leave_out:
                    raise
                self._findings.add(DAMAGED, ref)
        bare = {name: each for name, each in kept.items() if name != "execution_state_snapshot"}
        plain = self._kept(place, bare)
        if plain is not bare:
            return plain
        return kept

    def _kept(self, place: str, value: Any) -> Any:
        try:
            return storable(value)
        except InvalidInputError as exc:
            raise self._database.damaged(place, str(exc)) from exc

    # --- rows beside ----------------------------------------------------------------------------

    def _usage(self) -> tuple[list[Usage], list[list[Any]]]:
        """The ledger, and what was put into caches by source and model, which it does not count."""
        usage: list[Usage] = []
        written: dict[tuple[str, str], int] = {}
        for source, model, into, out, cached, reasoning, cache_written in self._database.usage():
            usage.append(Usage(source, model, into, out, cached, reasoning))
            if cache_written:
                known = written.get((source, model), 0)
                written[source, model] = known + cache_written
        return usage, [[*each, number] for each, number in written.items()]

    def _receipts(self, revision: int) -> tuple[dict[str, SettledReceipt], str | None, int]:
        """The receipts, the turn that made the head, and when the last was committed."""
        receipts: dict[str, SettledReceipt] = {}
        made, last_ms = None, 0
        for turn, told, result, at_ms in self._database.turns(self._own):
            place = f"turn {turn!r}"
            given = self._database.number(place, "head_revision", result.get("head_revision", 0))
            receipts[turn] = SettledReceipt(
                intent.VERSION,
                _meaning(told),
                # Of a file that was put back, turns may tell of more than the head does.
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

    def _batches(self) -> tuple[list[Batch], int, int]:
        """The queue, its last number, and the latest lease that claimed any of it."""
        database = self._database
        batches: list[Batch] = []
        last = latest = 0
        for (
            seq, batch, source_key, delivery, slot, merge, available, enqueued, claim, owner,
            fence, expires, generation,
        ) in database.batches(self._own):  # fmt: skip
            place = f"batch {batch!r}"
            if delivery not in _DELIVERIES or slot not in _SLOTS:
                raise database.damaged(place, f"no policy {delivery!r:.40} and {slot!r:.40}")
            if claim is not None:
                if database.number(place, "claim_expires_at_ms", expires) > self._now_ms:
                    raise self._held(f"{place} of session {self._own!r}", owner, expires)
                self._findings.add(FREED, str(batch))
            if source_key is not None:
                database.text(place, "source_key", source_key)
            name = database.text(place, "batch_id", batch)
            batches.append(
                Batch(
                    name,
                    self._session,
                    database.number(place, "enqueue_seq", seq),
                    tuple(
                        [
                            {
                                "item_id": database.text(place, "item_id", item),
                                "payload": self._kept(place, database.json(place, payload)),
                            }
                            for item, payload in database.items(name)
                        ]
                    ),
                    source_key,
                    _DELIVERIES[delivery],
                    _SLOTS[slot],
                    self._merge_key(place, merge),
                    database.number(place, "available_at_ms", available),
                    database.number(place, "enqueued_at_ms", enqueued),
                    database.number(place, "claim_fencing_token", fence),
                    0,
                )
            )
            last = max(last, batches[-1].seq)
            latest = max(latest, database.number(place, "its lease generation", generation))
        return batches, last, latest

    def _merge_key(self, place: str, text: Any) -> str | None:
        """What batches have in common that join; None: it joins none."""
        told = self._database.json(place, text)
        if told == "never":
            return None
        if told == "payload_default":
            return "payload_default"
        if type(told) is dict and list(told) == ["group"] and type(told["group"]) is str:
            return f"group:{told['group']}"
        raise self._database.damaged(place, f"no merge key {text!r:.80}")

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
            try:
                tagged[tag_name(self._session, name)] = self._blobs.get(ref, f"artifact {name!r}")
            except DamagedSourceError:
                if not self._leave_out:
                    raise
                self._findings.add(DAMAGED, ref)
        return tagged

    def _fencing(self) -> int:
        """How often the session was given away; BusyError if somebody holds it."""
        latest = 0
        for owner, fencing, expires in self._database.leases(self._own):
            if owner is not None and expires > self._now_ms:
                raise self._held(f"session {self._own!r}", owner, expires)
            latest = max(latest, fencing)
        return latest

    def _held(self, what: str, owner: Any, expires: int) -> BusyError:
        return BusyError(
            f"{what} of {self._database.source.path} is held by {owner!r} for another "
            f"{(expires - self._now_ms + 999) // 1000} s: stop it, or wait, then import it"
        )

    # --- meta -----------------------------------------------------------------------------------

    def _meta(self, meta: MetaRow | None, nodes: Nodes, origin: dict[str, Any]) -> SessionMeta:
        first_ms = _time_ms(nodes.drafts[0].time) if nodes.drafts else None
        if meta is None:
            return SessionMeta(self._session, self._session, first_ms or 0)
        made_ms = _time_ms(meta.created_at)
        if made_ms is None:
            self._findings.add(NO_TIME, meta.created_at)
            made_ms = first_ms or 0
        origin["created_at"] = meta.created_at
        relation = meta.relation
        parent = relation.get("parent_session_id")
        if parent is not None and type(parent) is not str:
            raise self._database.damaged("the relation", "its parent is no text")
        if relation.keys() - {"kind", "parent_session_id", "caused_by"}:
            origin["relation"] = self._kept("the relation", relation)
        if self._own != self._session:
            origin["session_id"] = self._own
        return SessionMeta(
            self._session,
            meta.name or self._session,
            made_ms,
            meta.model or None,
            meta.cwd or None,
            parent,
            self._kept("the relation", relation.get("caused_by")),
        )

    def _optional_text(self, place: str, name: str, told: dict[str, Any]) -> str | None:
        value = told.get(name)
        return None if value is None else self._database.text(place, name, value)


def tag_name(session: str, artifact: str) -> str:
    """What the tag is called that keeps an artifact of a session."""
    return f"lash/{session}/{artifact}"


def _unread(place: str, told: dict[str, Any], known: frozenset[str]) -> list[LeftBehind]:
    """What a map says that nobody here knows; the ledger in it, which lash itself does not read."""
    left = [LeftBehind(f"key {name} of {place}", 1) for name in sorted(told.keys() - known)]
    ledger = told.get("token_ledger")
    if type(ledger) is list and ledger:
        left.append(LeftBehind(f"usage in {place}, which lash does not read", len(ledger)))
    return left


def _as_bytes(value: Any) -> bytes | None:
    """Bytes, which lash spells as numbers; None if they are none."""
    if type(value) is bytes:
        return value
    try:
        return bytes(value) if type(value) is list else None
    except (TypeError, ValueError):
        return None


def _meaning(told: str) -> bytes:
    """What stands in a receipt for lash's hash of a commit: no commit here comes to mean it."""
    return plain_hash(b"a turn committed by lash\0" + told.encode("utf-8", "surrogatepass"))


def _hash(ref: Any) -> bytes:
    try:
        found = bytes.fromhex(ref)
    except (TypeError, ValueError):
        return bytes(_HASH_BYTES)
    return found if len(found) == _HASH_BYTES else bytes(_HASH_BYTES)


def _time_ms(text: Any) -> int | None:
    """Milliseconds since 1970, of ``unix:`` and seconds or of RFC 3339; None if it is no time."""
    if type(text) is not str:
        return None
    try:
        number = int(text[5:]) * 1000 if text.startswith("unix:") else utc_us(text) // 1000
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number <= _LARGEST else None
