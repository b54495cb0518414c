"""A session: a graph of nodes, the checkpoint beside it, and its history, under one id.

``store.session("id")`` gives a handle; nothing is written until something is committed,
created or queued. Handles are cheap, hold no state that could be stale, and may be used
from many threads; two handles on one id, in any process, see the same session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from casstore.session import (
    adoption,
    catalogue,
    commit,
    expiry,
    history,
    keys,
    leases,
    loading,
    protection,
    subjects,
    tombstones,
)
from casstore.session.arguments import list_of
from casstore.session.attachments import Attachments
from casstore.session.attempts import read_again
from casstore.session.checkpoint import read_checkpoint
from casstore.session.data import (
    Checkpoint,
    Commit,
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
from casstore.session.loading import At
from casstore.session.loading import SessionState as SessionState
from casstore.session.nodes import PATH, Nodes
from casstore.session.queue import Queue
from casstore.session.state import Runtime


class Session:
    """One session of a store.

    The examples use ``session``, which stands at revision 2: a question (the node ``ask``, labelled
    ``start``), and then the answer (the node ``left``). ``store`` is its store.

    >>> question = NodeDraft("why", {"role": "user", "text": "why left?"})
    >>> session.commit(Commit(append=[question], lease=UNFENCED)).revision
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
        """Where the session stands; None if nothing was committed yet.

        SessionDeletedError if it was deleted; so for every other method.

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

        ``scope`` ``path`` gives the nodes from the root to the leaf (the stored one, or the
        one asked for), ``full`` every node in insertion order. Nodes are read when they are
        iterated over. ``hydrate`` loads the components; else they are links.

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
        >>> result = session.commit(Commit(append=[right], lease=UNFENCED))
        >>> [node.id for node in session.nodes()], [node.id for node in session.nodes("full")]
        (['ask', 'right'], ['ask', 'left', 'right'])
        """
        return read_again(
            lambda: loading.load_nodes(self._runtime, self.id, at, scope, leaf, payloads=payloads)
        )

    def node(self, node_id: str, *, at: At = None) -> Node | None:
        """One node by its id; None if it is not there, or hidden.

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
            lambda: read_checkpoint(
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
        """Name, model, directory and relation; SessionNotFoundError if there is no session.

        >>> head = store.fork("s", "fork")
        >>> store.session("fork").meta().parent
        's'
        """
        return catalogue.find_meta(self._runtime, self.id)

    def info(self) -> SessionInfo:
        """What a picker shows, without reading the graph.

        >>> info = session.info()
        >>> info.first_user_message, info.user_message_count, info.head.revision
        ('which way?', 1, 2)
        """
        return read_again(lambda: catalogue.find_info(self._runtime, self.id))

    # --- writing ------------------------------------------------------------------------

    def commit(self, change: Commit) -> CommitResult:
        """Take one step, all or nothing.

        Checked in this order, and the first that fails is raised: SessionBindingError,
        SessionDeletedError; TurnConflictError, or the stored result is returned (a replay
        needs no lease and no matching revision, and only releases the lease);
        LeaseLostError; HeadConflictError; ClaimLostError; AttachmentNotFoundError and
        AttachmentStateError; GraphError (DuplicateNodeError, UnknownParentError,
        UnknownLeafError, CycleError); ComponentNotFoundError. Values that cannot be stored
        are refused first, with InvalidValueError.

        >>> step = Commit(append=[NodeDraft("why", "why left?")], expected=2, lease=UNFENCED)
        >>> session.commit(step).revision
        3
        >>> session.commit(step._replace(append=[NodeDraft("how", "how?")]))
        Traceback (most recent call last):
        casstore.errors.HeadConflictError: session 's' is at revision 3, not 2
        """
        return commit.commit(self._runtime, self.id, change)

    def rewind(
        self,
        to: int | str | Entry,
        *,
        lease: Lease | Literal[Given.UNFENCED] | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """Make an earlier revision the head again, as a new revision: nothing is lost by it.

        >>> result = session.rewind("start", lease=UNFENCED)
        >>> result.revision, result.leaf
        (3, 'ask')
        >>> [node.id for node in session.nodes(at=2)]  # the answer is still there
        ['ask', 'left']
        """
        return read_again(
            lambda: commit.rewind(
                self._runtime, self.id, to, lease=lease, expected=expected, label=label
            )
        )

    def adopt(
        self,
        other: Session | str,
        *,
        lease: Lease | Literal[Given.UNFENCED] | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """Make the head of another session the next revision of this one: nothing is lost by it.

        Its graph, checkpoint and usage take the place of this session's, in one write whatever
        their length. Its turns, sent again to this session, are answered and do not run. What
        either hides stays hidden. Committed attachments in this store come along. Labels, queue,
        lease, name and earlier revisions of this session stay; the other session stays as it is.

        >>> better = NodeDraft("better", {"role": "assistant", "text": "right"})
        >>> head = store.fork("s", "try", at="start", append=[better])
        >>> result = session.adopt("try", lease=UNFENCED)
        >>> result.revision, [node.id for node in session.nodes()]
        (3, ['ask', 'better'])
        >>> session.entry().adopted
        Origin(session='try', revision=2, node=None)
        """
        name = other.id if isinstance(other, Session) else other
        return read_again(
            lambda: adoption.adopt(
                self._runtime, self.id, name, lease=lease, expected=expected, label=label
            )
        )

    def tombstone(self, node_ids: Sequence[str]) -> Hidden:
        """Hide nodes at once, in every revision of this session, until vacuum removes them.

        A path stays whole without a hidden node; the ids stay taken; forks made before keep
        showing the nodes, forks made after do not.

        >>> session.tombstone(["ask"]).hidden
        ('ask',)
        >>> [node.id for node in session.nodes()]
        ['left']
        """
        wanted = list_of(node_ids, "node ids")
        return read_again(lambda: tombstones.hide(self._runtime, self.id, wanted))

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
        """The session's revisions, newest first, from below ``before`` on.

        >>> [(entry.revision, entry.labels) for entry in session.history()]
        [(2, ()), (1, ('start',))]
        """
        return history.entries(self._runtime, self.id, before, limit)

    def entry(self, at: At = None) -> Entry:
        """One revision by number or label; RevisionNotFoundError if it is not there.

        >>> session.entry("start").revision, session.entry().revision
        (1, 2)
        """
        return read_again(lambda: history.entry(self._runtime, self.id, at))

    def label(self, name: str, at: At = None) -> Entry:
        """Name a revision. A label names one revision: given again, it moves.

        Of the revision's labels the entry has this one; ``entry`` reads them all.

        >>> session.label("answered").revision
        2
        >>> session.load("answered").leaf
        'left'
        """
        return read_again(lambda: history.put(self._runtime, self.id, name, at))

    def unlabel(self, name: str) -> bool:
        """Take a label away; False if there was none.

        >>> session.unlabel("start"), session.unlabel("start")
        (True, False)
        """
        return history.remove(self._runtime, self.id, name)

    def wait(self, after: int, timeout_s: float | None = None) -> Head | None:
        """Wait until the head is past revision ``after``, whoever moves it; None if time is up.

        >>> session.wait(after=1).revision  # it is past that already
        2
        >>> session.wait(after=2, timeout_s=0.01) is None
        True
        """
        return loading.wait(self._runtime, self.id, after, timeout_s)

    # --- how long it stays ----------------------------------------------------------------

    def subjects(self) -> tuple[str, ...]:
        """Whom the session is about.

        >>> names = session.add_subjects(["anna", "ben"])
        >>> session.subjects()
        ('anna', 'ben')
        """
        return subjects.find(self._runtime, self.id)

    def add_subjects(self, names: Sequence[str]) -> tuple[str, ...]:
        """Let it be about these as well; whom it is about then.

        >>> session.add_subjects(["anna"])
        ('anna',)
        >>> list(store.sessions_about("anna"))
        ['s']
        """
        return subjects.change(self._runtime, self.id, add=names)

    def remove_subjects(self, names: Sequence[str]) -> tuple[str, ...]:
        """Let it not be about these any more; whom it is about then.

        >>> names = session.add_subjects(["anna", "ben"])
        >>> session.remove_subjects(["anna"])
        ('ben',)
        """
        return subjects.change(self._runtime, self.id, remove=names)

    def expires_at_ms(self) -> int | None:
        """When retention may take it away; None: never.

        >>> session.expires_at_ms() is None
        True
        >>> session.expire_in(86_400_000) == session.expires_at_ms()
        True
        """
        return expiry.find(self._runtime, self.id)

    def expire_in(self, ttl_ms: int | None) -> int | None:
        """Let it expire ``ttl_ms`` from now, whatever was said before; None: never.

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
        """Keep a revision, and the session, from retention: ``by`` will come back to it.

        >>> kept = session.protect("start", by="reviewer", ttl_ms=86_400_000)
        >>> kept.revision, kept.by
        (1, 'reviewer')
        """
        return read_again(
            lambda: protection.protect(self._runtime, self.id, at, by=by, ttl_ms=ttl_ms, note=note)
        )

    def unprotect(self, by: str, revision: int | None = None) -> int:
        """Take away what ``by`` protects, or that of one revision; how many there were.

        >>> kept = session.protect("start", by="reviewer")
        >>> session.unprotect("reviewer"), session.unprotect("reviewer")
        (1, 0)
        """
        return protection.unprotect(self._runtime, self.id, by, revision)

    def protections(self, *, lapsed: bool = False) -> list[Protection]:
        """Who protects what, by revision; those whose time is up only if ``lapsed``.

        >>> kept = [session.protect(revision, by="reviewer") for revision in (2, 1)]
        >>> [(one.by, one.revision) for one in session.protections()]
        [('reviewer', 1), ('reviewer', 2)]
        """
        return protection.list_protections(self._runtime, self.id, lapsed=lapsed)

    # --- leases -------------------------------------------------------------------------

    def claim_lease(self, owner: str, ttl_ms: int) -> Lease | None:
        """Take the right to commit; None while anybody holds it, this owner included.

        >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
        >>> session.claim_lease("worker-2", ttl_ms=30_000) is None
        True
        >>> session.commit(Commit(append=[NodeDraft("n3", "go on")], lease=lease)).revision
        3
        """
        return leases.claim(self._runtime, self.id, owner, ttl_ms)

    def renew_lease(self, lease: Lease, ttl_ms: int) -> Lease:
        """Hold it until ``ttl_ms`` from now; LeaseLostError unless it is current and live.

        >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
        >>> lease = session.renew_lease(lease, ttl_ms=60_000)
        >>> lease.expires_at_ms - lease.claimed_at_ms >= 60_000
        True
        """
        return leases.renew(self._runtime, self.id, lease, ttl_ms)

    def release_lease(self, lease: Lease) -> bool:
        """Give it back; False, and nothing happens, if it is no longer the current one.

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
        >>> result = session.commit(Commit(attachments=[image.id], lease=UNFENCED))
        >>> session.attachments.find(image.id).state
        'committed'
        """
        return Attachments(self._runtime, self.id)
