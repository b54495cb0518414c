"""A session: a graph of nodes, the checkpoint beside it, and its history, under one id.

``store.session("id")`` gives a handle; nothing is written until something is committed,
created or queued. Handles are cheap, hold no state that could be stale, and may be used
from many threads; two handles on one id, in any process, see the same session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from casstore.session import (
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
    watching,
)
from casstore.session.arguments import list_of
from casstore.session.attachments import Attachments
from casstore.session.attempts import settled
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
    """One session of a store."""

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
        """
        return settled(lambda: loading.find_head(self._runtime, self.id))

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
        """
        return settled(
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
        """
        return settled(
            lambda: loading.load_nodes(self._runtime, self.id, at, scope, leaf, payloads=payloads)
        )

    def node(self, node_id: str, *, at: At = None) -> Node | None:
        """One node by its id; None if it is not there, or hidden."""
        return settled(lambda: loading.find_node(self._runtime, self.id, node_id, at))

    def checkpoint(self, at: At = None, *, hydrate: bool = False) -> Checkpoint:
        """The checkpoint alone; its components as links, or loaded if ``hydrate``."""
        return settled(
            lambda: read_checkpoint(
                self._runtime.reader(), self._runtime.at(self.id, at).manifest, hydrate=hydrate
            )
        )

    def usage(self, at: At = None) -> tuple[Usage, ...]:
        """The ledger: one entry for each source and model, in order of first use."""
        return settled(lambda: loading.load_usage(self._runtime, self.id, at))

    def meta(self) -> SessionMeta:
        """Name, model, directory and relation; SessionNotFoundError if there is no session."""
        return catalogue.find_meta(self._runtime, self.id)

    def info(self) -> SessionInfo:
        """What a picker shows, without reading the graph."""
        return settled(lambda: catalogue.find_info(self._runtime, self.id))

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
        """Make an earlier revision the head again, as a new revision: nothing is lost by it."""
        return settled(
            lambda: commit.rewind(
                self._runtime, self.id, to, lease=lease, expected=expected, label=label
            )
        )

    def tombstone(self, node_ids: Sequence[str]) -> Hidden:
        """Hide nodes at once, in every revision of this session, until vacuum removes them.

        A path stays whole without a hidden node; the ids stay taken; forks made before keep
        showing the nodes, forks made after do not.
        """
        wanted = list_of(node_ids, "node ids")
        return settled(lambda: tombstones.hide(self._runtime, self.id, wanted))

    def rename(self, name: str) -> SessionMeta:
        """Change the session's name. Its id stays."""
        return self.update_meta(name=name)

    def update_meta(self, **changes: Any) -> SessionMeta:
        """Change name, model, cwd, parent, cause or extra."""
        return catalogue.update(self._runtime, self.id, changes)

    # --- history ------------------------------------------------------------------------

    def history(self, *, before: int | None = None, limit: int | None = None) -> Iterator[Entry]:
        """The session's revisions, newest first, from below ``before`` on."""
        return history.entries(self._runtime, self.id, before, limit)

    def entry(self, at: At = None) -> Entry:
        """One revision by number or label; RevisionNotFoundError if it is not there."""
        return settled(lambda: history.entry(self._runtime, self.id, at))

    def label(self, name: str, at: At = None) -> Entry:
        """Name a revision. A label names one revision: given again, it moves.

        Of the revision's labels the entry has this one; ``entry`` reads them all.
        """
        return settled(lambda: history.put(self._runtime, self.id, name, at))

    def unlabel(self, name: str) -> bool:
        """Take a label away; False if there was none."""
        return history.remove(self._runtime, self.id, name)

    def wait(self, after: int, timeout_s: float | None = None) -> Head | None:
        """Wait until the head is past revision ``after``, whoever moves it; None if time is up."""
        return watching.wait(self._runtime, self.id, after, timeout_s)

    # --- how long it stays ----------------------------------------------------------------

    def subjects(self) -> tuple[str, ...]:
        """Whom the session is about."""
        return subjects.find(self._runtime, self.id)

    def add_subjects(self, names: Sequence[str]) -> tuple[str, ...]:
        """Let it be about these as well; whom it is about then."""
        return subjects.change(self._runtime, self.id, add=names)

    def remove_subjects(self, names: Sequence[str]) -> tuple[str, ...]:
        """Let it not be about these any more; whom it is about then."""
        return subjects.change(self._runtime, self.id, remove=names)

    def expires_at_ms(self) -> int | None:
        """When retention may take it away; None: never."""
        return expiry.find(self._runtime, self.id)

    def expire_in(self, ttl_ms: int | None) -> int | None:
        """Let it expire ``ttl_ms`` from now, whatever was said before; None: never."""
        return expiry.change(self._runtime, self.id, ttl_ms)

    def protect(
        self, at: At = None, *, by: str, ttl_ms: int | None = None, note: str | None = None
    ) -> Protection:
        """Keep a revision, and the session, from retention: ``by`` will come back to it."""
        return settled(
            lambda: protection.protect(self._runtime, self.id, at, by=by, ttl_ms=ttl_ms, note=note)
        )

    def unprotect(self, by: str, revision: int | None = None) -> int:
        """Take away what ``by`` protects, or that of one revision; how many there were."""
        return protection.unprotect(self._runtime, self.id, by, revision)

    def protections(self, *, lapsed: bool = False) -> list[Protection]:
        """Who protects what, by revision; those whose time is up only if ``lapsed``."""
        return protection.list_protections(self._runtime, self.id, lapsed=lapsed)

    # --- leases -------------------------------------------------------------------------

    def claim_lease(self, owner: str, ttl_ms: int) -> Lease | None:
        """Take the right to commit; None while anybody holds it, this owner included."""
        return leases.claim(self._runtime, self.id, owner, ttl_ms)

    def renew_lease(self, lease: Lease, ttl_ms: int) -> Lease:
        """Hold it until ``ttl_ms`` from now; LeaseLostError unless it is current and live."""
        return leases.renew(self._runtime, self.id, lease, ttl_ms)

    def release_lease(self, lease: Lease) -> bool:
        """Give it back; False, and nothing happens, if it is no longer the current one."""
        return leases.release(self._runtime, self.id, lease)

    # --- queue and attachments --------------------------------------------------------------

    @property
    def queue(self) -> Queue:
        """Work waiting for this session."""
        return Queue(self._runtime, self.id)

    @property
    def attachments(self) -> Attachments:
        """Bytes that belong to this session."""
        return Attachments(self._runtime, self.id)
