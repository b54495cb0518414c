"""What sessions mean, in dictionaries: the side that is too simple to be wrong.

Only the plain data of ``casstore.session.data`` and the errors are shared with the runtime.
Every revision holds its whole graph, a hidden node is a name in a set, a fork is a copy. Each
method does what the method of that name promises, or raises the error that it promises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from casstore.errors import (
    AttachmentNotFoundError,
    AttachmentStateError,
    ClaimLostError,
    ComponentNotFoundError,
    CycleError,
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    LeaseHeldError,
    LeaseLostError,
    NameTakenError,
    NodeNotFoundError,
    RevisionNotFoundError,
    SessionDeletedError,
    SessionExistsError,
    SessionNotFoundError,
    TurnConflictError,
    UnknownLeafError,
    UnknownParentError,
)
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.session.data import (
    LAST,
    LEAF,
    Attachment,
    Batch,
    Checkpoint,
    Claim,
    Commit,
    CommitResult,
    Hidden,
    Lease,
    Node,
    NodeDraft,
    Origin,
    Pin,
    SessionMeta,
    Usage,
)

COMPONENTS = ("tool_state", "plugin_snapshot", "execution_state")


def encode_split(value: Any) -> str:
    """A value as text: equal texts for equal values, and 1, 1.0 and True are not equal."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{encode_split(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(encode_split, value)) + "]"
    return repr(value)


def name_of(*parts: Any) -> bytes:
    """A name for what these parts say together."""
    return hashlib.sha256(encode_split(parts).encode()).digest()


# --- messages -----------------------------------------------------------------------------


def message_in(payload: Any) -> dict[str, Any] | None:
    """The message that a payload is or holds."""
    for one in (payload, payload.get("message") if isinstance(payload, dict) else None):
        if isinstance(one, dict) and isinstance(one.get("role"), str):
            return one
    return None


def user_text(payload: Any) -> str | None:
    """What the user wrote; None if it is not a message of the user."""
    message = message_in(payload)
    if message is None or message["role"] != "user":
        return None
    parts = message.get("parts", [])
    if parts and all(part["kind"] == "tool_result" for part in parts):
        return None
    if "text" in message:
        return str(message["text"])
    return next((str(part["text"]) for part in parts if "text" in part), "")


# --- revisions ----------------------------------------------------------------------------


class ModelNode(NamedTuple):
    """A node; ``name`` says what it is and what its whole path is."""

    id: str
    payload: Any
    parent: str | None
    cause: Any
    frame: str | None
    time: Any
    seq: int
    depth: int
    name: bytes


class Revision(NamedTuple):
    """A revision."""

    number: int = 0
    nodes: dict[str, ModelNode] = {}  # noqa: RUF012  (never changed, always copied)
    leaf: str | None = None
    next_seq: int = 0
    checkpoint: Checkpoint = Checkpoint()
    usage: tuple[Usage, ...] = ()
    operation: str = ""
    committed_at_ms: int = 0
    turn: str | None = None
    rewound_to: int | None = None

    def path(self, leaf: str | None) -> list[ModelNode]:
        """The nodes from the root to ``leaf``, hidden or not."""
        found: list[ModelNode] = []
        while leaf is not None:
            found.append(self.nodes[leaf])
            leaf = found[-1].parent
        return found[::-1]

    def name(self) -> bytes:
        """A name for all that the revision's manifest says."""
        parents = {node.parent for node in self.nodes.values()}
        return name_of(
            self.leaf,
            None if self.leaf is None else self.nodes[self.leaf].name,
            sorted(node.name for node in self.nodes.values() if node.id not in parents),
            self.next_seq,
            self.fields(),
        )

    def fields(self) -> dict[str, Any]:
        """What the revision holds beside its graph; None where there is nothing."""
        fields = self.checkpoint._asdict()
        fields["frames"] = list(self.checkpoint.frames) or None
        fields["usage"] = [list(entry) for entry in self.usage] or None
        return fields

    def ledger(self) -> tuple[Usage, ...]:
        """The usage that counts something."""
        return tuple(entry for entry in self.usage if entry.total)


class Receipt(NamedTuple):
    """That a turn was committed: what it meant, and its result."""

    meaning: str
    result: CommitResult


class SessionModel:
    """One session."""

    def __init__(self) -> None:
        self.revisions: dict[int, Revision] = {}
        self.labels: dict[str, int] = {}
        # The names of hidden nodes.
        self.hidden: set[bytes] = set()
        self.created_at_ms = 0
        self.origin: Origin | None = None
        self.meta: SessionMeta | None = None
        self.lease: Lease | None = None
        self.queue: list[Batch] = []
        self.enqueued = 0
        self.receipts: dict[str, Receipt] = {}
        self.attachments: dict[str, Attachment] = {}

    def copy(self) -> SessionModel:
        """Another one that may go another way."""
        other = SessionModel()
        other.__dict__.update(
            {
                name: value.copy() if isinstance(value, dict | set | list) else value
                for name, value in self.__dict__.items()
            }
        )
        return other

    @property
    def exists(self) -> bool:
        """Is it listed?"""
        return bool(self.revisions) or self.meta is not None

    @property
    def head(self) -> Revision | None:
        """The newest revision."""
        return self.revisions[max(self.revisions)] if self.revisions else None

    def visible(self, revision: Revision) -> list[ModelNode]:
        """The nodes that are not hidden, in order of insertion."""
        return self.unhidden(revision.nodes.values())

    def unhidden(self, nodes: Iterable[ModelNode]) -> list[ModelNode]:
        """Those of ``nodes`` that are not hidden."""
        return [node for node in nodes if node.name not in self.hidden]

    def is_hidden(self, revision: Revision, node: str | None) -> bool:
        """Is this node of a revision hidden?"""
        return node in revision.nodes and revision.nodes[node].name in self.hidden

    def leaf(self, revision: Revision) -> str | None:
        """The leaf, or the latest visible message in place of one that is hidden."""
        if not self.is_hidden(revision, revision.leaf):
            return revision.leaf
        messages = [node.id for node in self.visible(revision) if message_in(node.payload)]
        return messages[-1] if messages else None

    def path(self, revision: Revision, leaf: str | None) -> list[ModelNode]:
        """The visible nodes on the path to ``leaf``."""
        return self.unhidden(revision.path(leaf))

    def labels_at(self, revision: int) -> tuple[str, ...]:
        """The labels of a revision."""
        found = [label for label, number in self.labels.items() if number == revision]
        return tuple(sorted(found, key=str.encode))


class Model:
    """One store."""

    def __init__(self, now_ms: int, names: dict[str, bytes]) -> None:
        self.now_ms = now_ms
        #: The digests of all component bodies that may come, by their spelling.
        self.names = names
        self.sessions: dict[str, SessionModel] = {}
        self.deleted: set[str] = set()
        self.pins: dict[str, Pin] = {}
        self.tags: set[str] = set()
        #: What a component's link stands for.
        self.stored: dict[bytes, Any] = {}
        # Names here and digests there: equal here means equal there.
        self._digests: dict[bytes, bytes] = {}
        self._names: dict[bytes, bytes] = {}

    def copy(self) -> Model:
        """Another one that may go another way."""
        other = Model(self.now_ms, self.names)
        other.sessions = {name: one.copy() for name, one in self.sessions.items()}
        other.deleted = set(self.deleted)
        other.pins = dict(self.pins)
        other.tags = set(self.tags)
        other.stored = dict(self.stored)
        other._digests = dict(self._digests)
        other._names = dict(self._names)
        return other

    def matches(self, name: bytes, digest: bytes) -> bool:
        """Has the same content always had this digest, and no other content?"""
        known = self._digests.setdefault(name, digest) == digest
        return self._names.setdefault(digest, name) == name and known

    # --- finding ----------------------------------------------------------------------------

    def at_hand(self, session: str) -> SessionModel:
        """A session that may be used, whether there is anything in it or not."""
        if session in self.deleted:
            raise SessionDeletedError(session)
        return self.sessions.setdefault(session, SessionModel())

    def _existing(self, session: str) -> tuple[SessionModel, Revision]:
        one = self.at_hand(session)
        if one.head is None:
            raise SessionNotFoundError(session)
        return one, one.head

    def at(self, session: str, at: int | str | None) -> Revision:
        """A revision by number or label."""
        one, head = self._existing(session)
        if at is None:
            return head
        number = one.labels.get(at, -1) if isinstance(at, str) else at
        if number not in one.revisions:
            raise RevisionNotFoundError(session, at)
        return one.revisions[number]

    # --- committing -------------------------------------------------------------------------

    def commit(self, session: str, change: Commit, manifest: bytes) -> CommitResult:
        """Take one step; ``manifest`` is the digest that the runtime gave it."""
        one = self.at_hand(session)
        meaning = self._meaning(session, change)
        if change.turn in one.receipts:
            receipt = one.receipts[change.turn]
            if receipt.meaning != meaning:
                raise TurnConflictError(session, change.turn)
            if change.release and isinstance(change.lease, Lease):
                self.release_lease(session, change.lease)
            return receipt.result._replace(replayed=True)
        self._require_lease(session, one, change.lease)
        old = one.head or Revision()
        if change.expected is not None and change.expected != old.number:
            raise HeadConflictError(session, change.expected, old.number)
        completed = self._completed(session, one, change.completes)
        committed = [self._committed(session, one, name) for name in change.attachments]
        new, created = self._grown(one, old, change)
        if change.checkpoint is not None:
            new = new._replace(checkpoint=self._hydrated(change.checkpoint))
        new = new._replace(
            number=old.number + 1,
            usage=_merged(old.usage, change.usage),
            operation="commit",
            committed_at_ms=self.now_ms,
            turn=change.turn,
            rewound_to=None,
        )
        # Everything is checked: from here on it happens.
        if change.replace is not None:
            # A graph that has the very same node wants it back.
            one.hidden -= {node.name for node in new.nodes.values()}
        if one.head is None:
            one.created_at_ms = self.now_ms
        one.revisions[new.number] = new
        one.queue = [batch for batch in one.queue if batch.id not in completed]
        one.attachments.update({attachment.id: attachment for attachment in committed})
        if change.label is not None:
            one.labels[change.label] = new.number
        if change.checkpoint is not None:
            bodies = [getattr(new.checkpoint, name) for name in COMPONENTS]
            self.stored.update({self.names[encode_split(body)]: body for body in bodies if body})
        if change.release and isinstance(change.lease, Lease):
            self.release_lease(session, change.lease)
        result = CommitResult(new.number, Digest(manifest), new.leaf, tuple(created), False)
        if change.turn is not None:
            one.receipts[change.turn] = Receipt(meaning, result)
        return result

    def _require_lease(self, session: str, one: SessionModel, lease: Any) -> None:
        live = self.live_lease(one)
        if lease is None:
            if live is not None:
                raise LeaseHeldError(session, live.owner, live.expires_at_ms)
        elif live is None or not _same(lease, live):
            raise LeaseLostError(session, "")

    def _completed(self, session: str, one: SessionModel, claims: Sequence[Claim]) -> set[str]:
        live = self.live_lease(one)
        found: set[str] = set()
        for claim in claims:
            for batch in claim.batches:
                if live is None or live.fencing != claim.fencing or not _held(one, claim, batch):
                    raise ClaimLostError(session, batch.id)
                found.add(batch.id)
        return found

    def _committed(self, session: str, one: SessionModel, name: str) -> Attachment:
        known = one.attachments.get(name)
        if known is None:
            raise AttachmentNotFoundError(session, name)
        if known.state == "condemned":
            raise AttachmentStateError(session, name, known.state)
        if known.state == "committed":
            return known
        return known._replace(state="committed", committed_at_ms=self.now_ms)

    def _grown(
        self, one: SessionModel, old: Revision, change: Commit
    ) -> tuple[Revision, list[str]]:
        """The graph after a commit, and the ids of the nodes that are new, in order."""
        drafts = list(change.append)
        if change.replace is not None or one.head is None:
            drafts = list(change.append if change.replace is None else change.replace)
            old = old._replace(nodes={}, leaf=None, next_seq=0)
        parents: dict[str, str | None] = {}
        before = one.leaf(old)
        for draft in drafts:
            if draft.id in parents:
                raise DuplicateNodeError(draft.id, "")
            parents[draft.id] = before if draft.parent is LEAF else draft.parent
            before = draft.id
        for node in parents:
            if node in old.nodes:
                raise DuplicateNodeError(node, "")
        by_id = {draft.id: draft for draft in drafts}
        ordered: list[str] = []
        for node in parents:
            _after_parents(node, parents, ordered)
        nodes = dict(old.nodes)
        for seq, node in enumerate(ordered, old.next_seq):
            parent = parents[node]
            if parent is not None and (parent not in nodes or one.is_hidden(old, parent)):
                raise UnknownParentError(node, "")
            nodes[node] = _node(by_id[node], seq, None if parent is None else nodes[parent])
            if change.replace is None and nodes[node].name in one.hidden:
                raise DuplicateNodeError(node, "")
        leaf = old.leaf
        if change.leaf is not LAST:
            leaf = change.leaf
            if leaf is not None and (leaf not in nodes or one.is_hidden(old, leaf)):
                raise UnknownLeafError(leaf, "")
        elif drafts:
            leaf = drafts[-1].id
        new = old._replace(nodes=nodes, leaf=leaf, next_seq=old.next_seq + len(drafts))
        return new, ordered

    def _hydrated(self, given: Checkpoint) -> Checkpoint:
        """A checkpoint with what its links stand for."""
        bodies: dict[str, Any] = {}
        for name in COMPONENTS:
            body = getattr(given, name)
            if isinstance(body, Link):
                if bytes(body.digest) not in self.stored:
                    raise ComponentNotFoundError(name, body.digest)
                body = self.stored[bytes(body.digest)]
            bodies[name] = body
        return given._replace(**bodies, frames=tuple(given.frames))

    def _meaning(self, session: str, change: Commit) -> str:
        """What a retry must have in common with the first commit of a turn."""
        drafts = list(change.append if change.replace is None else change.replace)
        places = {draft.id: at for at, draft in enumerate(drafts)}
        nodes = [
            [
                (at - 1 if at else None)
                if draft.parent is LEAF
                else places.get(draft.parent or ""),
                draft.frame,
                draft.cause,
                draft.payload,
            ]
            for at, draft in enumerate(drafts)
        ]
        leaf: Any = len(drafts) - 1 if drafts else None
        if change.leaf is not LAST:
            leaf = places.get(change.leaf or "", False)
        checkpoint: Any = None
        if change.checkpoint is not None:
            links = {
                name: getattr(change.checkpoint, name)
                for name in COMPONENTS
                if isinstance(getattr(change.checkpoint, name), Link)
            }
            known = {
                name: self.stored.get(bytes(link.digest), link) for name, link in links.items()
            }
            frames = list(change.checkpoint.frames)
            checkpoint = list(change.checkpoint._replace(**known, frames=frames))
        return encode_split(
            [
                session,
                change.replace is not None,
                nodes,
                leaf,
                checkpoint,
                [list(entry) for entry in change.usage],
                sorted({batch.id for claim in change.completes for batch in claim.batches}),
                sorted(set(change.attachments)),
                change.label,
            ]
        )

    # --- going elsewhere --------------------------------------------------------------------

    def rewind(
        self, session: str, to: int | str, lease: Any, expected: int | None, label: str | None
    ) -> CommitResult:
        """Make an earlier revision the newest."""
        one = self.at_hand(session)
        self._require_lease(session, one, lease)
        one, head = self._existing(session)
        if expected is not None and expected != head.number:
            raise HeadConflictError(session, expected, head.number)
        target = self.at(session, to)
        new = target._replace(
            number=head.number + 1,
            operation="rewind",
            committed_at_ms=self.now_ms,
            turn=None,
            rewound_to=target.number,
        )
        one.revisions[new.number] = new
        if label is not None:
            one.labels[label] = new.number
        return CommitResult(new.number, Digest(bytes(32)), new.leaf, (), False)

    def fork(self, source: str, target: str, at: int | str | None, node: str | None) -> Revision:
        """Copy a session as it is or was, or only the path to a node."""
        one, _ = self._existing(source)
        revision = self.at(source, at)
        if node is not None:
            if node not in revision.nodes or one.is_hidden(revision, node):
                raise NodeNotFoundError(source, node)
            kept = {each.id: each for each in revision.path(node)}
            revision = revision._replace(
                nodes=kept, leaf=node, next_seq=revision.nodes[node].seq + 1
            )
        taken = self.sessions.get(target)
        if taken is not None and taken.exists:
            raise SessionExistsError(target)
        made = self.at_hand(target)
        revision = revision._replace(
            operation="fork", committed_at_ms=self.now_ms, turn=None, rewound_to=None
        )
        made.revisions[revision.number] = revision
        made.hidden = set(one.hidden)
        made.created_at_ms = self.now_ms
        made.origin = Origin(source, revision.number, node)
        return revision

    def delete(self, session: str) -> bool:
        """Take a session away for good."""
        one = self.sessions.get(session)
        if one is None or not one.exists:
            return False
        del self.sessions[session]
        self.deleted.add(session)
        return True

    def tombstone(self, session: str, nodes: Sequence[str]) -> Hidden:
        """Hide nodes."""
        one = self.at_hand(session)
        head = one.head or Revision()
        wanted = list(dict.fromkeys(nodes))
        found = [node for node in wanted if node in head.nodes]
        already = [node for node in found if one.is_hidden(head, node)]
        fresh = [node for node in found if node not in already]
        one.hidden |= {head.nodes[node].name for node in fresh}
        unknown = [node for node in wanted if node not in head.nodes]
        return Hidden(tuple(fresh), tuple(already), tuple(unknown))

    def label(self, session: str, name: str, at: int | str | None) -> int:
        """Name a revision; its number."""
        number = self.at(session, at).number
        self.sessions[session].labels[name] = number
        return number

    def retain(self, session: str, last: int, *, labelled: bool, pinned: set[int]) -> int:
        """Forget all but the last revisions and what else must stay; how many went."""
        one = self.at_hand(session)
        numbers = sorted(one.revisions, reverse=True)
        kept = set(numbers[:last]) | set(numbers[:1]) | pinned
        if labelled:
            kept |= set(one.labels.values())
        lease = self.live_lease(one)
        if lease is not None:
            before = [n for n in numbers if one.revisions[n].committed_at_ms < lease.claimed_at_ms]
            kept |= {n for n in numbers if not before or n >= before[0]}
        gone = [number for number in numbers if number not in kept]
        for number in gone:
            del one.revisions[number]
        one.labels = {name: n for name, n in one.labels.items() if n in one.revisions}
        return len(gone)

    def unlabel(self, session: str, name: str) -> bool:
        """Take a label away."""
        return self.at_hand(session).labels.pop(name, None) is not None

    # --- meta -------------------------------------------------------------------------------

    def create(self, session: str, name: str | None, extra: Any) -> SessionMeta:
        """Write the meta of a session down, unless it has some."""
        one = self.at_hand(session)
        if one.meta is None:
            known = SessionMeta(session, session, self.now_ms)
            if one.revisions:
                # It began when it was committed or forked first.
                known = self.meta(session)
            one.meta = known._replace(name=name or session, extra=extra)
        return one.meta

    def meta(self, session: str) -> SessionMeta:
        """The meta of a session, its own or made up."""
        one = self.at_hand(session)
        if one.meta is not None:
            return one.meta
        self._existing(session)
        parent = None if one.origin is None else one.origin.session
        return SessionMeta(session, session, one.created_at_ms, parent=parent)

    def rename(self, session: str, name: str) -> SessionMeta:
        """Change the name of a session."""
        meta = self.meta(session)._replace(name=name)
        self.sessions[session].meta = meta
        return meta

    # --- leases -----------------------------------------------------------------------------

    def live_lease(self, one: SessionModel) -> Lease | None:
        """The lease that somebody holds."""
        lease = one.lease
        return lease if lease is not None and lease.expires_at_ms > self.now_ms else None

    def claim_lease(self, session: str, owner: str, ttl_ms: int, token: bytes) -> Lease | None:
        """Take the lease; ``token`` is the one that the runtime gave it."""
        _require_time(ttl_ms)
        one = self.at_hand(session)
        if self.live_lease(one) is not None:
            return None
        fencing = 1 if one.lease is None else one.lease.fencing + 1
        one.lease = Lease(session, owner, token, fencing, self.now_ms, self.now_ms + ttl_ms)
        return one.lease

    def renew_lease(self, session: str, lease: Lease, ttl_ms: int) -> Lease:
        """Hold on to a lease."""
        _require_time(ttl_ms)
        one = self.at_hand(session)
        live = self.live_lease(one)
        if live is None or not _same(lease, live):
            raise LeaseLostError(session, "")
        one.lease = live._replace(expires_at_ms=self.now_ms + ttl_ms)
        return one.lease

    def release_lease(self, session: str, lease: Lease) -> bool:
        """Give a lease back; its time may be up."""
        one = self.at_hand(session)
        if one.lease is None or not _same(lease, one.lease) or not one.lease.expires_at_ms:
            return False
        one.lease = one.lease._replace(expires_at_ms=0)
        return True

    # --- queue ------------------------------------------------------------------------------

    def enqueue(self, session: str, wanted: Batch) -> Batch:
        """Queue a batch, or find the one with its source key."""
        if not wanted.items:
            raise InvalidInputError("")
        one = self.at_hand(session)
        for batch in one.queue:
            if batch.source_key is not None and batch.source_key == wanted.source_key:
                return batch
        if any(batch.id == wanted.id for batch in one.queue):
            raise InvalidInputError("")
        one.enqueued += 1
        batch = wanted._replace(seq=one.enqueued, enqueued_at_ms=self.now_ms)
        one.queue.append(batch)
        return batch

    def claim(
        self, session: str, lease: Lease, boundary: str, limit: int, exactly: list[str] | None
    ) -> Claim | None:
        """Take the next batches."""
        one = self.at_hand(session)
        live = self.live_lease(one)
        if live is None or not _same(lease, live):
            raise LeaseLostError(session, "")
        ready = [
            batch
            for batch in one.queue
            if batch.available_at_ms <= self.now_ms and batch.held_by != lease.fencing
        ]
        if not ready or not limit or (boundary == "checkpoint" and ready[0].delivery != "earliest"):
            return None
        first, group = ready[0], ready[:1]
        if first.slot == "join" and first.merge_key is not None:
            for batch in ready[1:limit]:
                if batch[6:8] + batch[5:6] != first[6:8] + first[5:6]:
                    break
                group.append(batch)
        if exactly is not None and [batch.id for batch in group] != exactly:
            return None
        taken = [b._replace(fence=b.fence + 1, held_by=lease.fencing) for b in group]
        self._put_back(one, taken)
        claim_id = f"{taken[0].seq}:{taken[0].fence}"
        return Claim(claim_id, session, lease.fencing, tuple(taken))

    def _put_back(self, one: SessionModel, changed: Sequence[Batch]) -> None:
        by_id = {batch.id: batch for batch in changed}
        one.queue = [by_id.get(batch.id, batch) for batch in one.queue]

    def verify_claim(self, session: str, claim: Claim) -> None:
        """Raise unless every batch is held by this claim."""
        self._completed(session, self.at_hand(session), [claim])

    def abandon(self, session: str, claim: Claim) -> int:
        """Give batches back."""
        one = self.at_hand(session)
        held = [batch for batch in claim.batches if _held(one, claim, batch)]
        self._put_back(one, [batch._replace(held_by=0) for batch in held])
        return len(held)

    def pending(self, one: SessionModel) -> list[Batch]:
        """The batches that nobody holds."""
        live = self.live_lease(one)
        return [batch for batch in one.queue if live is None or batch.held_by != live.fencing]

    def cancel(self, session: str, batch_id: str) -> Batch | None:
        """Remove a batch that nobody holds."""
        one = self.at_hand(session)
        for batch in self.pending(one):
            if batch.id == batch_id:
                one.queue.remove(batch)
                return batch
        return None

    # --- attachments ------------------------------------------------------------------------

    def intend(self, session: str, name: str, uri: str | None, owner: str | None) -> Attachment:
        """Announce an attachment."""
        one = self.at_hand(session)
        known = one.attachments.get(name)
        if known is not None and known.state == "condemned":
            raise AttachmentStateError(session, name, known.state)
        if known is None or known.state == "intent":
            one.attachments[name] = Attachment(
                name, session, uri, None, owner, "intent", self.now_ms, None
            )
        return one.attachments[name]

    def put_attachment(self, session: str, digest: Digest) -> Attachment:
        """Store an attachment here."""
        known = self.intend(session, digest.hex(), None, None)
        if known.state == "intent":
            known = known._replace(digest=digest)
            self.sessions[session].attachments[known.id] = known
        return known

    def commit_attachments(self, session: str, names: Sequence[str]) -> tuple[Attachment, ...]:
        """Commit attachments without a commit."""
        one = self.at_hand(session)
        committed = [self._committed(session, one, name) for name in names]
        one.attachments.update({attachment.id: attachment for attachment in committed})
        return tuple(committed)

    def condemn(self, session: str, name: str) -> Attachment:
        """Let no commit refer to it any more."""
        one = self.at_hand(session)
        known = one.attachments.get(name)
        if known is None:
            raise AttachmentNotFoundError(session, name)
        if known.state == "committed":
            raise AttachmentStateError(session, name, known.state)
        one.attachments[name] = known._replace(state="condemned")
        return one.attachments[name]

    def forget(self, session: str, name: str) -> bool:
        """Remove an attachment that is not committed."""
        one = self.at_hand(session)
        known = one.attachments.get(name)
        if known is None:
            return False
        if known.state == "committed":
            raise AttachmentStateError(session, name, known.state)
        del one.attachments[name]
        return True

    # --- pins -------------------------------------------------------------------------------

    def is_pinned(self, name: str) -> bool:
        """Is there a pin of this name, and its time not up?"""
        known = self.pins.get(name)
        return known is not None and (
            known.expires_at_ms is None or known.expires_at_ms > self.now_ms
        )

    def pin(
        self, name: str, digest: Digest, ttl_ms: int | None, *, tag: bool, move: bool = False
    ) -> Pin:
        """Let a name keep something; what a tag keeps it gives up only if moved."""
        known = self.pins.get(name)
        if known is not None and not move:
            if not tag and name in self.tags:
                raise NameTakenError(name, known.digest)
            if tag and self.is_pinned(name) and known.digest != digest:
                raise NameTakenError(name, known.digest)
        expires = None if ttl_ms is None else self.now_ms + ttl_ms
        self.pins[name] = Pin(name, digest, self.now_ms, expires, None)
        (self.tags.add if tag else self.tags.discard)(name)
        return self.pins[name]

    def unpin(self, name: str) -> bool:
        """Take a pin away, in time or not."""
        self.tags.discard(name)
        return self.pins.pop(name, None) is not None


def _require_time(ttl_ms: int) -> None:
    if ttl_ms < 1:
        raise InvalidInputError("")


def _same(lease: Lease, other: Lease) -> bool:
    """Is this the same lease, renewed or not?"""
    return lease[:5] == other[:5]


def _held(one: SessionModel, claim: Claim, batch: Batch) -> bool:
    """Is a batch of a claim still held by it?"""
    return any(
        (now.id, now.seq, now.fence, now.held_by)
        == (batch.id, batch.seq, batch.fence, claim.fencing)
        for now in one.queue
    )


def _after_parents(node: str, parents: dict[str, str | None], ordered: list[str]) -> None:
    """Put a node in order, its parents before it."""
    waiting: list[str] = []
    step: str | None = node
    while step is not None and step in parents and step not in ordered:
        if step in waiting:
            raise CycleError(step, "")
        waiting.append(step)
        step = parents[step]
    ordered.extend(reversed(waiting))


def _node(draft: NodeDraft | Node, seq: int, parent: ModelNode | None) -> ModelNode:
    depth = 1 if parent is None else parent.depth + 1
    fields = draft.payload, draft.cause, draft.frame, draft.time, seq
    name = name_of(draft.id, *fields, None if parent is None else parent.name)
    above = None if parent is None else parent.id
    return ModelNode(
        draft.id, draft.payload, above, draft.cause, draft.frame, draft.time, seq, depth, name
    )


def _merged(ledger: tuple[Usage, ...], added: Sequence[Usage]) -> tuple[Usage, ...]:
    merged = {entry[:2]: entry for entry in ledger}
    for entry in added:
        known = merged.get(entry[:2], Usage(entry.source, entry.model))
        sums = [a + b for a, b in zip(known[2:], entry[2:], strict=True)]
        merged[entry[:2]] = Usage(entry.source, entry.model, *sums)
    return tuple(merged.values())
