"""What goes into a session and what comes out: plain data, no behaviour.

Everything here is a NamedTuple: it prints, compares, unpacks and ``_replace``s.
Times are milliseconds since 1970 by the engine's clock and end in ``_ms``.

The examples use ``session`` and ``store`` as those of ``Session`` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal, NamedTuple

from casstore.engine.protocol import Write
from casstore.format.digest import Digest


class Given(Enum):
    """Marks for arguments that None cannot stand for, because None means something."""

    #: A node's parent: the node before it in the commit, or else the session's leaf.
    LEAF = "leaf"
    #: A commit's leaf: the last node appended, or else the leaf that is.
    LAST = "last"
    #: In place of a lease: commit without one, as long as nobody holds one.
    UNFENCED = "unfenced"


LEAF: Final = Given.LEAF
LAST: Final = Given.LAST
UNFENCED: Final = Given.UNFENCED

Time = str | int | float | None


class NodeDraft(NamedTuple):
    """A node on its way in. ``time`` is the runtime's own (RFC 3339 or a number).

    >>> ask = NodeDraft("n1", {"role": "user", "text": "hello"})
    >>> answer = NodeDraft("n2", {"role": "assistant", "text": "hello to you"})
    >>> session.commit(Commit(append=[ask, answer], lease=UNFENCED)).leaf
    'n2'
    """

    id: str
    payload: Any
    parent: str | Literal[Given.LEAF] | None = LEAF
    cause: Any = None
    frame: str | None = None
    time: Time = None


class Node(NamedTuple):
    """A node as it comes out. May go into another commit as it is.

    ``seq`` is its place in insertion order, ``depth`` the length of the path that ends
    in it, ``digest`` names it and its whole path.

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
    >>> result = session.commit(Commit(usage=[used], lease=UNFENCED))
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
        """Input, output and reasoning; what was cached is part of the input.

        >>> Usage("agent", "model-1", input=900, output=120, cached_input=800).total
        1020
        """
        return self.input + self.output + self.reasoning


class Checkpoint(NamedTuple):
    """The state of a session beside its graph.

    ``tool_state``, ``plugin_snapshot`` and ``execution_state`` are components: going in,
    a body is stored and a ``Link`` means what is stored already; coming out they are
    links, or bodies if hydrated. None is no component. The rest are plain values, but for
    ``others``: components that the runtime names itself.

    >>> beside = session.checkpoint()._replace(turn_state={"turn": 2})  # its components are links
    >>> result = session.commit(Commit(checkpoint=beside, lease=UNFENCED))
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
    #: Components of the runtime itself, by name.
    others: Mapping[str, Any] | None = None


class Lease(NamedTuple):
    """The right to commit to a session until ``expires_at_ms``.

    ``fencing`` counts the leases ever given on the session and never goes back. The first four
    fields identify a lease: it commits, renews and is released by them alone. The times are those
    of the claim or renewal that returned it; 0 if they are not known.

    >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
    >>> lease.owner, lease.fencing
    ('worker-1', 1)
    >>> session.commit(Commit(append=[NodeDraft("n3", "go on")], lease=lease)).revision
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
    #: How often it was claimed; completing needs the latest claim.
    fence: int
    #: The lease generation that holds it; 0 if none ever did. Held only while that lease lives.
    held_by: int


class Claim(NamedTuple):
    """Batches taken together, held as long as the lease that took them lives.

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
    """Bytes that belong to a session: in a blob here (``digest``), or at ``uri``.

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
    """One step of a session, all or nothing.

    ``append`` creates nodes; ``replace`` starts the graph anew with these; neither
    leaves it. ``leaf`` moves the leaf. ``checkpoint`` None keeps the one that is.
    ``expected`` is the revision the head must have (0: none yet), None: any.
    ``lease`` is required, or ``UNFENCED``; ``release`` gives it back with the commit.
    ``turn`` makes the commit idempotent: repeated with the same content it returns the
    first result. ``completes`` removes claimed work from the queue, ``attachments`` are
    committed with it, ``usage`` is added to the ledger, ``label`` names the revision.
    ``beside`` are rows of other systems that change with it; see ``records.Draft``. It is no
    part of what a turn means: a commit that is replayed writes nothing. ``durability`` says what
    this commit waits for, ``full`` or ``relaxed``; None: what the store was opened with.

    >>> step = Commit(
    ...     append=[NodeDraft("next", {"role": "user", "text": "and then?"})],
    ...     expected=2,
    ...     turn="turn-3",
    ...     lease=UNFENCED,
    ... )
    >>> session.commit(step).revision, session.commit(step).replayed
    (3, True)
    """

    append: Sequence[NodeDraft | Node] = ()
    replace: Sequence[NodeDraft | Node] | None = None
    leaf: str | Literal[Given.LAST] | None = LAST
    checkpoint: Checkpoint | None = None
    expected: int | None = None
    lease: Lease | Literal[Given.UNFENCED] | None = None
    release: bool = False
    turn: str | None = None
    label: str | None = None
    usage: Sequence[Usage] = ()
    completes: Sequence[Claim] = ()
    attachments: Sequence[str] = ()
    session: str | None = None
    beside: Write | None = None
    durability: str | None = None


class CommitResult(NamedTuple):
    """What a commit did, or did the first time if ``replayed``.

    >>> result = session.commit(Commit(append=[NodeDraft("next", "hello")], lease=UNFENCED))
    >>> result.revision, result.leaf, result.nodes, result.replayed
    (3, 'next', ('next',), False)
    """

    revision: int
    manifest: Digest
    leaf: str | None
    #: The ids of the nodes that it created, in order.
    nodes: tuple[str, ...]
    replayed: bool


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
    """

    session: str
    revision: int
    manifest: Digest
    #: commit, rewind, fork or adopt
    operation: str
    committed_at_ms: int
    turn: str | None
    labels: tuple[str, ...]
    #: The revision a rewind went back to.
    rewound_to: int | None
    #: The session and revision that were adopted.
    adopted: Origin | None = None


class Head(NamedTuple):
    """Where a session stands.

    >>> head = session.head()
    >>> head.revision, head.leaf, head.node_count
    (2, 'left', 2)
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


class SessionMeta(NamedTuple):
    """What is known of a session beside its content. ``extra`` is the runtime's own.

    >>> session.update_meta(model="model-1", cwd="/repo").cwd
    '/repo'
    """

    session: str
    name: str
    created_at_ms: int
    model: str | None = None
    cwd: str | None = None
    #: The session it was started or forked from; None: a root.
    parent: str | None = None
    cause: Any = None
    extra: Any = None


class SessionInfo(NamedTuple):
    """What a picker shows. Messages are counted on the active path.

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
    """What tombstoning did: ids now hidden, hidden before, and not known.

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


class Protection(NamedTuple):
    """A revision that must stay for somebody, for a time or (None) for good.

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
