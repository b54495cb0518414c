"""A session: a graph of nodes, a checkpoint and its history, under one id.

``store.session("id")`` returns a handle and writes nothing. Handles are cheap, hold no state that
can become stale, and can be used from many threads. Two handles on one id, in any process, see the
same session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from casstore.errors import InvalidInputError
from casstore.session import (
    adoption,
    catalogue,
    checkpoint,
    commit,
    compare,
    expiry,
    forks,
    found,
    graph,
    history,
    keys,
    leases,
    loading,
    protection,
    subjects,
    tombstones,
    turns,
)
from casstore.session.arguments import list_of
from casstore.session.attachments import Attachments
from casstore.session.attempts import read_again
from casstore.session.data import (
    LEAF,
    Checkpoint,
    Claim,
    Commit,
    CommitFields,
    CommitResult,
    Entry,
    Given,
    Head,
    Hidden,
    Lease,
    Node,
    Protection,
    SessionInfo,
    SessionMeta,
    Usage,
)
from casstore.session.loading import PATH, At, Nodes
from casstore.session.loading import SessionState as SessionState
from casstore.session.queue import Queue
from casstore.session.state import Runtime

if TYPE_CHECKING:
    from datetime import datetime

    from casstore.objects.edit import Edit
    from casstore.session.compare import Comparison
    from casstore.session.found import Hit
    from casstore.session.holding import HeldSession


class Session:
    """One session of a store.

    The examples use ``session``, which is at revision 2: a question (the node ``ask``, labelled
    ``start``), and then the answer (the node ``left``). ``store`` is its store.

    >>> session.append({"role": "user", "text": "why left?"}).revision
    3
    >>> [node.payload["text"] for node in session.load().nodes]
    ['which way?', 'left', 'why left?']
    """

    def __init__(self, runtime: Runtime, session_id: str) -> None:
        keys.session_key(session_id)
        self._runtime = runtime
        self.id = session_id

    def __repr__(self) -> str:
        return f"Session({self.id!r})"

    # --- reading ------------------------------------------------------------------------

    def head(self) -> Head | None:
        """The newest revision; None if nothing was committed yet.

        This and every other method raises SessionDeletedError if the session was deleted.

        >>> head = session.head()
        >>> head.revision, head.leaf
        (2, 'left')
        """
        return read_again(lambda: loading.find_head(self._runtime, self.id))

    def load(
        self,
        at: At = None,
        *,
        scope: Literal["path", "full"] = PATH,
        leaf: str | None = None,
        hydrate: bool = True,
    ) -> SessionState | None:
        """The session, now or ``at`` an earlier revision; None if nothing was committed yet.

        The ``scope`` ``path`` has the nodes from the root to ``leaf`` (by default the stored leaf),
        ``full`` has every node in insertion order. Nodes are read when they are iterated over.
        ``hydrate`` loads the components; without it they are links.

        >>> state = session.load()
        >>> [node.payload["text"] for node in state.nodes], state.checkpoint.tool_state
        (['which way?', 'left'], {'cwd': '/repo'})
        >>> [node.id for node in session.load(at="start").nodes]
        ['ask']
        """
        return read_again(
            lambda: loading.load(self._runtime, self.id, at, scope, leaf, hydrate=hydrate)
        )

    def nodes(
        self,
        scope: Literal["path", "full"] = PATH,
        *,
        leaf: str | None = None,
        at: At = None,
        payloads: bool = True,
    ) -> Nodes:
        """The nodes alone: a sequence with a length, read in pages as it is iterated over.

        Without ``payloads`` every payload is None, and long contents are not read.

        >>> right = NodeDraft("right", {"role": "assistant", "text": "right"}, parent="ask")
        >>> result = session.append(right)
        >>> [node.id for node in session.nodes()], [node.id for node in session.nodes("full")]
        (['ask', 'right'], ['ask', 'left', 'right'])
        """
        return read_again(
            lambda: loading.load_nodes(self._runtime, self.id, at, scope, leaf, payloads=payloads)
        )

    def node(self, node_id: str, *, at: At = None) -> Node | None:
        """One node by its id; None if the session does not have it, or hides it.

        >>> session.node("left").payload["text"]
        'left'
        >>> session.node("left", at="start") is None
        True
        """
        return read_again(lambda: loading.find_node(self._runtime, self.id, node_id, at))

    def checkpoint(self, at: At = None, *, hydrate: bool = False) -> Checkpoint:
        """The checkpoint alone; its components as links, or loaded if ``hydrate``.

        >>> session.checkpoint(hydrate=True).tool_state
        {'cwd': '/repo'}
        """
        return read_again(
            lambda: checkpoint.read_checkpoint(
                self._runtime.reader(), self._runtime.at(self.id, at).manifest, hydrate=hydrate
            )
        )

    def usage(self, at: At = None) -> tuple[Usage, ...]:
        """The ledger: one entry for each source and model, in order of first use.

        >>> [(entry.source, entry.model, entry.total) for entry in session.usage()]
        [('agent', 'model-1', 1020)]
        """
        return read_again(lambda: loading.load_usage(self._runtime, self.id, at))

    def meta(self) -> SessionMeta:
        """The session's name, model, directory and parent; SessionNotFoundError if it is unknown.

        >>> head = store.fork("s", "fork")
        >>> store.session("fork").meta().parent
        's'
        """
        return catalogue.find_meta(self._runtime, self.id)

    def info(self) -> SessionInfo:
        """The summary that a list of sessions shows, without reading the graph.

        >>> info = session.info()
        >>> info.first_user_message, info.user_message_count, info.head.revision
        ('which way?', 1, 2)
        """
        return read_again(lambda: catalogue.find_info(self._runtime, self.id))

    def search(
        self,
        words: str,
        *,
        kinds: Sequence[str] | None = None,
        since: int | datetime | None = None,
        limit: int = 20,
        fresh: bool = True,
    ) -> list[Hit]:
        """The nodes and components of this session in which all words occur, best first.

        The same as ``Store.search`` with this session alone. ``sessions`` of a hit names only it.

        >>> [(hit.node, hit.snippet) for hit in session.search("which way")]
        [('ask', 'which way?')]
        """
        # SessionDeletedError if it was deleted.
        self._runtime.rows(self.id)
        return found.search(
            self._runtime.store,
            words,
            kinds=kinds,
            sessions=[self.id],
            since=since,
            limit=limit,
            fresh=fresh,
        )

    # --- writing ------------------------------------------------------------------------

    def append(
        self,
        /,
        *payloads: Any,
        parent: str | Literal[Given.LEAF] | None = LEAF,
        turn: str | None = None,
        lease: Lease | None = None,
        release: bool = False,
        expected: int | None = None,
        label: str | None = None,
        completes: Sequence[Claim] = (),
        attachments: Sequence[str] = (),
        usage: Sequence[Usage] = (),
        edits: Mapping[str, Sequence[Edit]] | None = None,
        durability: str | None = None,
        **components: Any,
    ) -> CommitResult:
        """Append a node for each payload, and set the components that are given by keyword.

        A payload is any value, and its node gets a generated id; pass a ``NodeDraft`` to choose
        the id and more. ``parent`` is the parent of the first node: the leaf, unless it is given.
        Other components stay as they are; None deletes a component. A component with a method
        ``component_link(session)``, such as a ``Workspace``, stores itself and returns the link.
        The rest is as in ``Commit``.

        >>> session.append({"role": "user", "text": "why left?"}).revision
        3
        >>> reply = {"role": "assistant", "text": "it is shorter"}
        >>> first = session.append(reply, tool_state={"cwd": "/left"}, turn="t1")
        >>> session.append(reply, tool_state={"cwd": "/left"}, turn="t1").nodes == first.nodes
        True
        >>> session.checkpoint(hydrate=True).tool_state
        {'cwd': '/left'}
        """
        for name, body in components.items():
            checkpoint.check_keyword(name)
            if hasattr(body, "component_link"):
                components[name] = body.component_link(self)
        nodes: Sequence[Any] = payloads
        if parent is not LEAF:
            nodes = graph.with_parent(payloads, parent)
        return self.commit(
            append=nodes,
            turn=turn,
            lease=lease,
            release=release,
            expected=expected,
            label=label,
            completes=completes,
            attachments=attachments,
            usage=usage,
            edits=edits,
            durability=durability,
            components=components,
        )

    def edit(
        self,
        component: str,
        *edits: Edit,
        turn: str | None = None,
        lease: Lease | None = None,
        expected: int | None = None,
        label: str | None = None,
        durability: str | None = None,
    ) -> CommitResult:
        """Change parts of one component, as a new revision.

        Of ``tool_state``, ``plugin_snapshot``, ``execution_state`` and ``others``, only the parts
        on the paths of the edits are read and written; of the other components, the whole value.
        PathNotFoundError if there is no such component or part.

        >>> result = session.edit("tool_state", Set(["files"], {"a.py": "pass"}), Delete(["cwd"]))
        >>> session.checkpoint(hydrate=True).tool_state
        {'files': {'a.py': 'pass'}}
        """
        return self.commit(
            edits={component: edits},
            turn=turn,
            lease=lease,
            expected=expected,
            label=label,
            durability=durability,
        )

    def commit(
        self, change: Commit | None = None, /, **fields: Unpack[CommitFields]
    ) -> CommitResult:
        """Commit a change atomically: a ``Commit``, or its fields by keyword.

        The checks run in this order, and the first that fails is raised: SessionBindingError,
        SessionDeletedError; TurnConflictError, or the stored result is returned (a replay
        needs no lease and no matching revision, and only releases the lease);
        LeaseHeldError, LeaseLostError; HeadConflictError; ClaimLostError;
        AttachmentNotFoundError and AttachmentStateError; GraphError (DuplicateNodeError,
        UnknownParentError, UnknownLeafError, CycleError); PathNotFoundError of an edit;
        ComponentNotFoundError. Values that cannot be stored are refused first, with
        InvalidValueError.

        >>> session.commit(append=["why left?"], expected=2, label="asked").revision
        3
        >>> session.commit(Commit(append=["how?"], expected=2))
        Traceback (most recent call last):
        casstore.errors.HeadConflictError: session 's' is at revision 3, not 2
        """
        if change is None:
            change = Commit(**fields)
        elif fields:
            raise InvalidInputError(
                f"commit takes a Commit or fields, got both: {', '.join(fields)}"
            )
        return commit.commit(self._runtime, self.id, change)

    def find_turn(self, turn: str) -> CommitResult | None:
        """The result of a turn that was committed; None if it was not.

        Call it before running a turn again: the model would answer with another text, and
        committing that under the same turn raises TurnConflictError.

        >>> session.find_turn("t1") is None
        True
        >>> result = session.append("it is shorter", turn="t1")
        >>> session.find_turn("t1").nodes == result.nodes
        True
        """
        return turns.find_turn(self._runtime, self.id, turn)

    def fork(
        self,
        target: str,
        *,
        at: At = None,
        node: str | None = None,
        subjects: Sequence[str] | None = None,
        append: Sequence[Any] = (),
    ) -> Session:
        """Make a new session that continues this one, and return it; see ``Store.fork``.

        >>> other = session.fork("other", at="start")
        >>> result = other.append({"role": "assistant", "text": "right"})
        >>> [node.payload["text"] for node in other.nodes()]
        ['which way?', 'right']
        """
        forks.fork(self._runtime, self.id, target, at, node, subjects, append)
        return Session(self._runtime, target)

    def diff(self, other: Session | str, *, at: At = None, other_at: At = None) -> Comparison:
        """The differences from this session to another one; ``print`` renders them.

        Either side may be an earlier revision. Reads only what differs.

        >>> other = session.fork("other", at="start")
        >>> result = other.append(NodeDraft("right", {"role": "assistant", "text": "right"}))
        >>> found = session.diff(other)
        >>> [node.id for node in found.added], [node.id for node in found.dropped]
        (['right'], ['left'])
        >>> print(session.diff(session, at=1))
        1 node added, 0 dropped, 2 changes in the components; both continue node 'ask'
        + node 'left': {'role': 'assistant', 'text': 'left'}
        + $.tool_state: {'cwd': '/repo'}
        + $.usage: [['agent', 'model-1', 900, 120, 0, 0]]
        """
        return read_again(
            lambda: compare.compare_places(self._runtime, (self.id, at), (_id_of(other), other_at))
        )

    def rewind(
        self,
        to: int | str | Entry,
        *,
        lease: Lease | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """Make an earlier revision the head again, as a new revision. The history is kept.

        >>> result = session.rewind("start")
        >>> result.revision, result.leaf
        (3, 'ask')
        >>> [node.id for node in session.nodes(at=2)]  # the answer is still there
        ['ask', 'left']
        """
        return commit.rewind(
            self._runtime, self.id, to, lease=lease, expected=expected, label=label
        )

    def adopt(
        self,
        other: Session | str,
        *,
        lease: Lease | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """Make the head of another session the next revision of this one. The history is kept.

        Its graph, checkpoint and usage replace those of this session, in one write whose size does
        not depend on theirs. Its turns, committed again to this session, are replayed. Nodes that
        either session hides stay hidden. Its committed attachments are copied if their bytes are in
        this store. This session keeps its labels, queue, lease, name and earlier revisions; the
        other session does not change.

        >>> other = session.fork("try", at="start")
        >>> result = other.append(NodeDraft("better", {"role": "assistant", "text": "right"}))
        >>> result = session.adopt(other)
        >>> result.revision, [node.id for node in session.nodes()]
        (3, ['ask', 'better'])
        >>> session.entry().adopted
        Origin(session='try', revision=2, node=None)
        """
        return adoption.adopt(
            self._runtime, self.id, _id_of(other), lease=lease, expected=expected, label=label
        )

    def tombstone(self, node_ids: Sequence[str]) -> Hidden:
        """Hide nodes at once, in every revision of this session, until vacuum removes them.

        Paths skip hidden nodes. Their ids cannot be reused. Forks made earlier still show the
        nodes, later forks do not.

        >>> session.tombstone(["ask"]).hidden
        ('ask',)
        >>> [node.id for node in session.nodes()]
        ['left']
        """
        return tombstones.hide(self._runtime, self.id, list_of(node_ids, "node_ids"))

    def rename(self, name: str) -> SessionMeta:
        """Change the session's name. Its id stays.

        >>> session.rename("Finding the way").name
        'Finding the way'
        """
        return self.update_meta(name=name)

    def update_meta(self, /, **changes: Any) -> SessionMeta:
        """Change name, model, cwd, parent, cause or extra.

        >>> meta = session.update_meta(model="model-1", extra={"ticket": 7})
        >>> session.meta().model, session.meta().extra
        ('model-1', {'ticket': 7})
        """
        return catalogue.update(self._runtime, self.id, changes)

    # --- history ------------------------------------------------------------------------

    def history(self, *, before: int | None = None, limit: int | None = None) -> Iterator[Entry]:
        """The session's revisions, newest first; with ``before``, only those below it.

        >>> [(entry.revision, entry.labels) for entry in session.history()]
        [(2, ()), (1, ('start',))]
        """
        return history.entries(self._runtime, self.id, before, limit)

    def entry(self, at: At = None) -> Entry:
        """One revision by number or label; RevisionNotFoundError if it does not exist.

        >>> session.entry("start").revision, session.entry().revision
        (1, 2)
        """
        return read_again(lambda: history.entry(self._runtime, self.id, at))

    def label(self, name: str, at: At = None) -> Entry:
        """Name a revision (None: the head). If the label exists, it moves to this revision.

        The returned entry has only this label; ``entry`` reads all labels.

        >>> session.label("answered").revision
        2
        >>> session.load("answered").leaf
        'left'
        """
        return history.put(self._runtime, self.id, name, at)

    def unlabel(self, name: str) -> bool:
        """Remove a label; False if there was none.

        >>> session.unlabel("start"), session.unlabel("start")
        (True, False)
        """
        return history.remove(self._runtime, self.id, name)

    def wait(self, after: int, timeout_s: float | None = None) -> Head | None:
        """Wait until any process moves the head past revision ``after``; None after ``timeout_s``.

        >>> session.wait(after=1).revision  # it is past that already
        2
        >>> session.wait(after=2, timeout_s=0.01) is None
        True
        """
        return loading.wait(self._runtime, self.id, after, timeout_s)

    # --- retention ------------------------------------------------------------------------

    def subjects(self) -> tuple[str, ...]:
        """The subjects of the session: the people or things it is about.

        >>> names = session.add_subjects(["anna", "ben"])
        >>> session.subjects()
        ('anna', 'ben')
        """
        return subjects.find(self._runtime, self.id)

    def add_subjects(self, names: Sequence[str]) -> tuple[str, ...]:
        """Add subjects; returns all subjects of the session.

        >>> session.add_subjects(["anna"])
        ('anna',)
        >>> list(store.sessions_about("anna"))
        ['s']
        """
        return subjects.change(self._runtime, self.id, add=subjects.checked(names))

    def remove_subjects(self, names: Sequence[str]) -> tuple[str, ...]:
        """Remove subjects; returns the remaining ones.

        >>> names = session.add_subjects(["anna", "ben"])
        >>> session.remove_subjects(["anna"])
        ('ben',)
        """
        return subjects.change(self._runtime, self.id, remove=subjects.checked(names))

    def expires_at_ms(self) -> int | None:
        """When retention may delete the session; None: never.

        >>> session.expires_at_ms() is None
        True
        >>> session.expire_in(86_400_000) == session.expires_at_ms()
        True
        """
        return expiry.find(self._runtime, self.id)

    def expire_in(self, ttl_ms: int | None) -> int | None:
        """Set the session to expire ``ttl_ms`` from now, replacing any earlier expiry; None: never.

        >>> day_ms = 86_400_000
        >>> session.expire_in(30 * day_ms) > session.head().committed_at_ms + 29 * day_ms
        True
        >>> session.expire_in(None) is None  # it stays after all
        True
        """
        return expiry.change(self._runtime, self.id, ttl_ms)

    def protect(
        self, at: At = None, *, by: str, ttl_ms: int | None = None, note: str | None = None
    ) -> Protection:
        """Protect a revision, and so the session, from retention, in the name of ``by``.

        >>> kept = session.protect("start", by="reviewer", ttl_ms=86_400_000)
        >>> kept.revision, kept.by
        (1, 'reviewer')
        """
        return protection.protect(self._runtime, self.id, at, by=by, ttl_ms=ttl_ms, note=note)

    def unprotect(self, by: str, revision: int | None = None) -> int:
        """End all protections by ``by``, or that of one revision; returns how many.

        >>> kept = session.protect("start", by="reviewer")
        >>> session.unprotect("reviewer"), session.unprotect("reviewer")
        (1, 0)
        """
        return protection.unprotect(self._runtime, self.id, by, revision)

    def protections(self, *, lapsed: bool = False) -> list[Protection]:
        """The protections of the session, by revision; expired ones only if ``lapsed``.

        >>> kept = [session.protect(revision, by="reviewer") for revision in (2, 1)]
        >>> [(one.by, one.revision) for one in session.protections()]
        [('reviewer', 1), ('reviewer', 2)]
        """
        return protection.list_protections(self._runtime, self.id, lapsed=lapsed)

    # --- leases -------------------------------------------------------------------------

    def hold(self, owner: str, *, ttl_s: float = 30, wait_s: float = 0) -> HeldSession:
        """A context manager that holds the lease of the session, and renews it in the background.

        LeaseHeldError if another owner still holds the lease after ``wait_s``. Another process
        can claim the session ``ttl_s`` after this process was killed.

        >>> batch = session.queue.enqueue(["fix the test"])
        >>> with session.hold("worker-1") as held:
        ...     for work in held.work(wait_s=0):
        ...         result = held.append("done", completes=[work])
        >>> session.nodes()[-1].payload
        'done'
        """
        from casstore.session.holding import HeldSession

        return HeldSession(self._runtime, self.id, owner, ttl_s, wait_s)

    def claim_lease(self, owner: str, ttl_ms: int, *, wait_s: float | None = None) -> Lease | None:
        """Claim the right to commit; None while any lease is live, also one of the same owner.

        With ``wait_s`` it waits up to this long for the lease, then raises LeaseHeldError, which
        names the owner and when the lease expires. ``hold`` does the same and renews the lease.

        >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
        >>> session.claim_lease("worker-2", ttl_ms=30_000) is None
        True
        >>> try:
        ...     session.claim_lease("worker-2", ttl_ms=30_000, wait_s=0)
        ... except casstore.errors.LeaseHeldError as exc:
        ...     exc.owner, exc.expires_at_ms == lease.expires_at_ms
        ('worker-1', True)
        >>> session.append("go on", lease=lease).revision
        3
        """
        return leases.claim(self._runtime, self.id, owner, ttl_ms, wait_s)

    def renew_lease(self, lease: Lease, ttl_ms: int) -> Lease:
        """Extend a lease to ``ttl_ms`` from now; LeaseLostError unless it is current and live.

        >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
        >>> lease = session.renew_lease(lease, ttl_ms=60_000)
        >>> lease.expires_at_ms - lease.claimed_at_ms >= 60_000
        True
        """
        return leases.renew(self._runtime, self.id, lease, ttl_ms)

    def release_lease(self, lease: Lease) -> bool:
        """Release a lease; False, without effect, if it is not the current one.

        >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
        >>> session.release_lease(lease), session.release_lease(lease)
        (True, False)
        >>> session.claim_lease("worker-2", ttl_ms=30_000).fencing
        2
        """
        return leases.release(self._runtime, self.id, lease)

    # --- queue and attachments --------------------------------------------------------------

    @property
    def queue(self) -> Queue:
        """Work waiting for this session.

        >>> batch = session.queue.enqueue(["fix the test"])
        >>> [batch.items for batch in session.queue.pending()]
        [('fix the test',)]
        """
        return Queue(self._runtime, self.id)

    @property
    def attachments(self) -> Attachments:
        """Bytes that belong to this session.

        >>> image = session.attachments.put(b"pixels")
        >>> result = session.commit(attachments=[image.id])
        >>> session.attachments.find(image.id).state
        'committed'
        """
        return Attachments(self._runtime, self.id)


def _id_of(session: Session | str) -> str:
    return session.id if isinstance(session, Session) else session
