"""The data types of the session API: arguments and results, without behaviour.

Everything here is a NamedTuple: it prints, compares, unpacks and ``_replace``s.
Times are milliseconds since 1970 by the engine's clock and end in ``_ms``.

The examples use ``session`` and ``store`` as those of ``Session`` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict

from casstore.engine.protocol import Write
from casstore.errors import render_time
from casstore.format.digest import Digest
from casstore.format.printing import count

if TYPE_CHECKING:
    from casstore.objects.edit import Edit


class Given(Enum):
    """The default values of parameters for which None means something else."""

    #: A node's parent: the node before it in the commit, or else the session's leaf.
    LEAF = "leaf"
    #: A commit's leaf: the last node appended, or else the current leaf.
    LAST = "last"


LEAF: Final = Given.LEAF
LAST: Final = Given.LAST

Time = str | int | float | None


class NodeDraft(NamedTuple):
    """A node to append with an id, a parent or other fields chosen by the caller.

    ``time`` is set by the caller (RFC 3339 or a number) and not interpreted.

    >>> ask = NodeDraft("n1", {"role": "user", "text": "hello"})
    >>> answer = NodeDraft("n2", {"role": "assistant", "text": "hello to you"})
    >>> session.append(ask, answer).leaf
    'n2'
    """

    id: str
    payload: Any
    parent: str | Literal[Given.LEAF] | None = LEAF
    cause: Any = None
    frame: str | None = None
    time: Time = None


class Node(NamedTuple):
    """A stored node. It can be passed to a commit unchanged, for example of another session.

    ``seq`` is its number in insertion order, ``depth`` the length of the path from the root to
    it, ``digest`` identifies the node and its whole path.

    >>> node = session.node("left")
    >>> node.payload["text"], node.parent, node.depth
    ('left', 'ask', 2)
    """

    id: str
    payload: Any
    parent: str | None
    cause: Any
    frame: str | None
    time: Time
    seq: int
    depth: int
    digest: Digest


class Usage(NamedTuple):
    """Tokens used by one source with one model.

    >>> used = Usage("agent", "model-1", input=900, output=120, cached_input=800)
    >>> result = session.commit(usage=[used])
    >>> [(entry.model, entry.total) for entry in session.usage()]  # with what was used before
    [('model-1', 2040)]
    """

    source: str
    model: str
    input: int = 0
    output: int = 0
    cached_input: int = 0
    reasoning: int = 0

    @property
    def total(self) -> int:
        """Input, output and reasoning tokens; cached tokens are part of the input.

        >>> Usage("agent", "model-1", input=900, output=120, cached_input=800).total
        1020
        """
        return self.input + self.output + self.reasoning


class Checkpoint(NamedTuple):
    """The state of a session in addition to its graph.

    ``tool_state``, ``plugin_snapshot`` and ``execution_state`` are components. When written, a
    value is stored, and a ``Link`` refers to an object that is stored already. When read, they are
    links, or values if hydrated. None means that there is no such component. ``others`` holds
    components with names that the caller chooses. All other fields are plain values.

    >>> changed = session.checkpoint()._replace(turn_state={"turn": 2})  # its components are links
    >>> result = session.commit(checkpoint=changed)
    >>> loaded = session.load().checkpoint
    >>> loaded.turn_state, loaded.tool_state
    ({'turn': 2}, {'cwd': '/repo'})
    """

    turn_state: Any = None
    tool_state: Any = None
    plugin_snapshot: Any = None
    plugin_revision: int | None = None
    execution_state: Any = None
    frames: Sequence[Any] = ()
    current_frame: str | None = None
    config: Any = None
    #: Components with names that the caller chooses.
    others: Mapping[str, Any] | None = None


class Lease(NamedTuple):
    """The right to commit to a session until ``expires_at_ms``.

    ``fencing`` counts the leases ever granted on the session and never decreases. The first four
    fields identify a lease: it commits, renews and is released by them alone. The times are those
    of the claim or renewal that returned it; 0 if they are not known.

    >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
    >>> lease.owner, lease.fencing
    ('worker-1', 1)
    >>> session.append("go on", lease=lease).revision
    3
    """

    session: str
    owner: str
    token: bytes
    fencing: int
    claimed_at_ms: int = 0
    expires_at_ms: int = 0


class Batch(NamedTuple):
    """Work queued for a session.

    >>> batch = session.queue.enqueue(["fix the test"], batch_id="b1")
    >>> batch.id, batch.items, batch.fence
    ('b1', ('fix the test',), 0)
    """

    id: str
    session: str
    seq: int
    items: Sequence[Any]
    source_key: str | None
    delivery: str
    slot: str
    merge_key: str | None
    available_at_ms: int
    enqueued_at_ms: int
    #: The number of times it was claimed. Only the latest claim can complete it.
    fence: int
    #: The generation (``Lease.fencing``) of the lease that claimed it last; 0: never claimed. The
    #: batch is held only while that lease is live.
    held_by: int


class Claim(NamedTuple):
    """Batches claimed together. The claim holds as long as the lease it was made with is live.

    >>> batch = session.queue.enqueue(["fix the test"], batch_id="b1")
    >>> claim = session.queue.claim(session.claim_lease("worker-1", ttl_ms=30_000))
    >>> [batch.id for batch in claim.batches]
    ['b1']
    """

    id: str
    session: str
    fencing: int
    batches: tuple[Batch, ...]


class Attachment(NamedTuple):
    """Bytes that belong to a session: a blob of this store (``digest``), or stored at ``uri``.

    >>> image = session.attachments.put(b"pixels")
    >>> image.state, image.digest == Digest.of_blob(b"pixels")
    ('intent', True)
    """

    id: str
    session: str
    uri: str | None
    digest: Digest | None
    owner: str | None
    state: str  # "intent", "committed" or "condemned"
    intent_at_ms: int
    committed_at_ms: int | None


class Commit(NamedTuple):
    """A change to a session, applied atomically.

    ``append`` creates nodes: each item is a payload (any value), a ``NodeDraft`` or a ``Node``.
    ``replace`` replaces the graph by these nodes. Without both, the graph stays. ``leaf`` moves
    the leaf. ``components`` sets these components of the checkpoint (None deletes one), then
    ``edits`` changes parts of these; all others stay. ``checkpoint`` replaces the checkpoint.
    ``expected`` is the revision that the head must have (0: no commit yet); None: any.
    Without a ``lease`` the commit fails while the session is leased. ``release`` releases the
    lease with the commit. ``turn`` makes the commit idempotent: repeated with the same content, it
    returns the first result; the ids of nodes are not part of the content. ``completes``
    removes claimed work from the queue, ``attachments`` are committed with it, ``usage`` is added
    to the ledger, ``label`` names the revision. ``also`` has rows of other systems that are
    written in the same transaction; see ``records.Draft``. They are not part of a turn's content:
    a replayed commit writes nothing. ``durability`` says what this commit waits for, ``full`` or
    ``relaxed``; None: what the store was opened with.

    >>> step = Commit(append=[{"role": "user", "text": "and then?"}], expected=2, turn="turn-3")
    >>> session.commit(step).revision, session.commit(step).replayed
    (3, True)
    """

    append: Sequence[Any] = ()
    replace: Sequence[Any] | None = None
    leaf: str | Literal[Given.LAST] | None = LAST
    checkpoint: Checkpoint | None = None
    expected: int | None = None
    lease: Lease | None = None
    release: bool = False
    turn: str | None = None
    label: str | None = None
    usage: Sequence[Usage] = ()
    completes: Sequence[Claim] = ()
    attachments: Sequence[str] = ()
    session: str | None = None
    also: Write | None = None
    durability: str | None = None
    components: Mapping[str, Any] | None = None
    edits: Mapping[str, Sequence[Edit]] | None = None


class CommitFields(TypedDict, total=False):
    """The fields of a ``Commit``, as keyword arguments."""

    append: Sequence[Any]
    replace: Sequence[Any] | None
    leaf: str | Literal[Given.LAST] | None
    checkpoint: Checkpoint | None
    expected: int | None
    lease: Lease | None
    release: bool
    turn: str | None
    label: str | None
    usage: Sequence[Usage]
    completes: Sequence[Claim]
    attachments: Sequence[str]
    session: str | None
    also: Write | None
    durability: str | None
    components: Mapping[str, Any] | None
    edits: Mapping[str, Sequence[Edit]] | None


class CommitResult(NamedTuple):
    """The result of a commit; if ``replayed``, that of the first commit of the turn.

    >>> result = session.append(NodeDraft("next", "hello"))
    >>> result.revision, result.leaf, result.nodes, result.replayed
    (3, 'next', ('next',), False)
    """

    revision: int
    manifest: Digest
    leaf: str | None
    #: The ids of the nodes that the commit created, in order.
    nodes: tuple[str, ...]
    replayed: bool

    def __str__(self) -> str:
        made = count(len(self.nodes), "node")
        replayed = ", replayed" if self.replayed else ""
        return f"revision {self.revision}: {made} appended, leaf {self.leaf!r}{replayed}"


class Origin(NamedTuple):
    """Where a forked session comes from.

    >>> store.fork("s", "other", at="start").origin
    Origin(session='s', revision=1, node=None)
    """

    session: str
    revision: int
    node: str | None


class Entry(NamedTuple):
    """One revision of a session, the head or an earlier one.

    >>> entry = session.entry("start")
    >>> entry.revision, entry.operation, entry.labels
    (1, 'commit', ('start',))
    >>> print(entry._replace(committed_at_ms=1_795_010_602_000))
    revision 1 of 's': commit at 2026-11-18T14:03:22Z, labelled 'start'
    """

    session: str
    revision: int
    manifest: Digest
    #: What made the revision: commit, rewind, fork or adopt.
    operation: str
    committed_at_ms: int
    turn: str | None
    labels: tuple[str, ...]
    #: The revision that a rewind restored.
    rewound_to: int | None
    #: The session and revision that an adoption took as this revision.
    adopted: Origin | None = None

    def __str__(self) -> str:
        text = f"revision {self.revision} of {self.session!r}: {self.operation}"
        if self.rewound_to is not None:
            text += f" to revision {self.rewound_to}"
        if self.adopted is not None:
            text += f" of {self.adopted.session!r} at revision {self.adopted.revision}"
        text += f" at {render_time(self.committed_at_ms)}"
        if self.turn is not None:
            text += f", turn {self.turn!r}"
        if self.labels:
            text += f", labelled {', '.join(map(repr, self.labels))}"
        return text


class Head(NamedTuple):
    """The newest revision of a session.

    >>> head = session.head()
    >>> head.revision, head.leaf, head.node_count
    (2, 'left', 2)
    >>> print(head._replace(committed_at_ms=1_795_010_602_000))
    's' at revision 2: 2 nodes, leaf 'left', committed 2026-11-18T14:03:22Z
    """

    session: str
    revision: int
    manifest: Digest
    leaf: str | None
    node_count: int
    created_at_ms: int
    committed_at_ms: int
    turn: str | None
    origin: Origin | None

    def __str__(self) -> str:
        text = (
            f"{self.session!r} at revision {self.revision}: {count(self.node_count, 'node')}, "
            f"leaf {self.leaf!r}, committed {render_time(self.committed_at_ms)}"
        )
        if self.turn is not None:
            text += f", turn {self.turn!r}"
        if self.origin is not None:
            text += f", forked from {self.origin.session!r} at revision {self.origin.revision}"
        return text


class SessionMeta(NamedTuple):
    """The metadata of a session. ``extra`` is for the caller and not interpreted.

    >>> session.update_meta(model="model-1", cwd="/repo").cwd
    '/repo'
    """

    session: str
    name: str
    created_at_ms: int
    model: str | None = None
    cwd: str | None = None
    #: The id of the session that this one was started or forked from, if any.
    parent: str | None = None
    cause: Any = None
    extra: Any = None


class SessionInfo(NamedTuple):
    """The summary of a session that a picker shows. Only messages on the active path count.

    >>> info = session.info()
    >>> info.first_user_message, info.user_message_count
    ('which way?', 1)
    """

    meta: SessionMeta
    #: None: created, but nothing was committed yet.
    head: Head | None
    first_user_message: str | None
    user_message_count: int


class Hidden(NamedTuple):
    """The result of ``tombstone``: ids that it hid, that were hidden before, and that are unknown.

    >>> session.tombstone(["left", "nowhere"])
    Hidden(hidden=('left',), already=(), unknown=('nowhere',))
    """

    hidden: tuple[str, ...]
    already: tuple[str, ...]
    unknown: tuple[str, ...]


class Pin(NamedTuple):
    """A name that keeps an object and all it links to. A tag is a pin that does not expire.

    >>> tag = store.tag("release", session.head().manifest, note="what we shipped")
    >>> tag.name, tag.expires_at_ms, tag.note
    ('release', None, 'what we shipped')
    """

    name: str
    digest: Digest
    created_at_ms: int
    expires_at_ms: int | None
    note: str | None
    #: The session whose erasure removes the pin; None: no session owns it.
    session: str | None = None


class Protection(NamedTuple):
    """A revision that ``by`` protects from retention until ``until_ms``; None: without end.

    >>> kept = session.protect("start", by="reviewer", note="come back to this")
    >>> kept.revision, kept.by, kept.until_ms
    (1, 'reviewer', None)
    """

    session: str
    revision: int
    by: str
    created_at_ms: int
    until_ms: int | None
    note: str | None
