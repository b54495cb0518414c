"""``SessionLog``: a tree of sessions with numbered messages, in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from casstore.errors import SessionNotFoundError
from casstore.records.log import calls, folding, inbox, transfer, tree, usage
from casstore.records.log.data import (
    ACTIVE,
    ARCHIVED,
    DEPTH_LIMIT,
    EPHEMERAL,
    ROOT,
    Counters,
    Fold,
    LogSession,
    Message,
    NewMessage,
    Pending,
    RoundUsage,
    Tokens,
    UsageTotals,
)
from casstore.records.log.messages import (
    active_messages,
    all_messages,
    append_messages,
    find_message,
)
from casstore.records.log.tables import LeaseGiven, LogSessionRow, LogTables
from casstore.session import leases
from casstore.session.arguments import check_count, dict_of
from casstore.session.data import Lease
from casstore.store import Store


class SessionLog:
    """Sessions of messages. A call that writes is one transaction, unless it says otherwise.

    Safe for concurrent processes. A session of the log is a session of the store with the same id,
    and its messages are the nodes: ``store.session(id)`` reads, forks and exports it. ``lease`` is
    required only while the session is leased. Calls on an unknown session raise
    SessionNotFoundError, on a closed one SessionDeletedError. The module ``data`` defines sends,
    rounds, folds and lifecycles.

    The examples use ``log``, with the session ``chat``: a question and an answer. ``store`` is its
    store.

    >>> log.append("chat", NewMessage("user", "why left?"))
    3
    >>> [message.content for message in log.active("chat")]
    ['which way?', 'left', 'why left?']
    """

    def __init__(self, store: Store, *, depth_limit: int = DEPTH_LIMIT) -> None:
        check_count(depth_limit, "depth_limit")
        self._tables = LogTables(store)
        self.store = store
        self.depth_limit = depth_limit

    # --- sessions -------------------------------------------------------------------------

    def create(
        self,
        session: str | None = None,
        *,
        parent: str | None = None,
        kind: str = ROOT,
        lifecycle: str = EPHEMERAL,
        spawn_call: str | None = None,
        prompt: str | None = None,
        model: str | None = None,
        config: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> LogSession:
        """Create a session, as a child of ``parent`` if given: then its kind is "subagent".

        SessionNotFoundError if the parent does not exist, SpawnDepthError if the session would be
        too deep, SessionExistsError if the id is taken.

        >>> log.create("research", parent="chat", lifecycle="linked").kind
        'subagent'
        """
        name = tree.new_id() if session is None else session
        row = LogSessionRow(
            session=name,
            created_at_ms=0,
            updated_at_ms=0,
            status=ACTIVE,
            kind=kind,
            lifecycle=lifecycle,
            parent=parent,
            place=0,
            depth=0,
            spawn_call=spawn_call,
            prompt=prompt,
            model=model,
            config=dict_of(config, "config"),
            metadata=dict_of(metadata, "metadata"),
            children=0,
        )
        return tree.create(self._tables, row, self.depth_limit)

    def adopt(
        self,
        session: str,
        *,
        parent: str | None = None,
        lifecycle: str = EPHEMERAL,
        prompt: str | None = None,
        model: str | None = None,
        config: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> LogSession:
        """Add a forked session, or one imported from a bundle, to the log.

        Its messages and their state stay. Errors as for ``create``, and SessionNotFoundError if the
        store has no such session.

        >>> head = store.fork("chat", "another way")
        >>> log.adopt("another way", metadata={"user": "anna"}).id
        'another way'
        >>> log.append("another way", NewMessage("assistant", "right"))
        3
        """
        row = LogSessionRow(
            session=session,
            created_at_ms=0,
            updated_at_ms=0,
            status=ACTIVE,
            kind=ROOT,
            lifecycle=lifecycle,
            parent=parent,
            place=0,
            depth=0,
            spawn_call=None,
            prompt=prompt,
            model=model,
            config=dict_of(config, "config"),
            metadata=dict_of(metadata, "metadata"),
            children=0,
        )
        return tree.adopt(self._tables, row, self.depth_limit)

    def find(self, session: str) -> LogSession | None:
        """A session, or None if it does not exist.

        >>> log.find("chat").status, log.find("nowhere")
        ('active', None)
        """
        return tree.find(self._tables, session)

    def get(self, session: str) -> LogSession:
        """A session; SessionNotFoundError if it does not exist.

        >>> log.get("nowhere")
        Traceback (most recent call last):
        casstore.errors.SessionNotFoundError: no session 'nowhere' in this store
        """
        found = self.find(session)
        if found is None:
            raise SessionNotFoundError(session)
        return found

    def sessions(
        self, *, after: str | None = None, limit: int | None = None
    ) -> Iterator[LogSession]:
        """All sessions in order of id, starting after ``after``; read a page at a time.

        >>> made = log.create("another")
        >>> [session.id for session in log.sessions()]
        ['another', 'chat']
        """
        return tree.listed(self._tables, after, limit)

    def children(self, session: str) -> list[LogSession]:
        """The direct children of a session, in order of creation.

        >>> for name in ("research", "critic"):
        ...     made = log.create(name, parent="chat")
        >>> [child.id for child in log.children("chat")]
        ['research', 'critic']
        """
        return tree.children(self._tables, session)

    def update(self, /, session: str, **changes: Any) -> LogSession:
        """Change ``prompt``, ``model``, ``config`` or ``metadata``.

        >>> log.update("chat", model="model-2", metadata={"user": "anna"}).model
        'model-2'
        """
        return tree.update_known(self._tables, session, changes)

    def archive(self, session: str) -> LogSession:
        """Mark a session as archived. Nothing else changes; messages can still be appended.

        >>> log.archive("chat").status
        'archived'
        """
        return tree.update(self._tables, session, {"status": ARCHIVED})

    def finish(self, session: str, status: str) -> bool:
        """Delete a child session if it is ephemeral and ``status`` is "completed"; True if deleted.

        With any other status the session stays as it is; the status is not stored.

        >>> made = log.create("research", parent="chat")
        >>> log.finish("research", "failed"), log.finish("research", "completed")
        (False, True)
        """
        return tree.finish(self._tables, session, status)

    def close(self, session: str, *, cascade: bool = True) -> int:
        """Delete a session and its descendants that are not detached. This cannot be undone.

        A detached child becomes a root, with its own subtree; without ``cascade`` every child does.
        Returns the number of deleted sessions; 0 if the session does not exist.

        >>> made = log.create("research", parent="chat")
        >>> log.close("chat"), log.close("chat")
        (2, 0)
        """
        return tree.close(self._tables, session, cascade=cascade)

    # --- messages -------------------------------------------------------------------------

    def append(
        self,
        session: str,
        message: NewMessage,
        *,
        tokens: Tokens | None = None,
        lease: LeaseGiven = None,
        durability: str | None = None,
    ) -> int:
        """Append a message to a session; returns its number.

        ``tokens`` are recorded as the usage of its round in the same transaction. The tool calls of
        a message are pending until the results are appended. ``durability`` is what this call waits
        for: ``full``, ``relaxed``, or by default that of the store.

        >>> answer = NewMessage("assistant", "because it is shorter", round=0)
        >>> log.append("chat", answer, tokens=Tokens(prompt=12, completion=4, total=16))
        3
        >>> log.totals("chat").total
        16
        """
        return append_messages(
            self._tables, session, [message], tokens, lease=lease, durability=durability
        )[0]

    def extend(
        self,
        session: str,
        messages: Sequence[NewMessage],
        *,
        lease: LeaseGiven = None,
        durability: str | None = None,
    ) -> list[int]:
        """Append several messages to a session, all or none; returns their numbers.

        >>> messages = [NewMessage("user", "why left?"), NewMessage("assistant", "it is shorter")]
        >>> log.extend("chat", messages)
        [3, 4]
        """
        return append_messages(self._tables, session, messages, lease=lease, durability=durability)

    def active(self, session: str) -> list[Message]:
        """The agent's context: messages in order, with notes in place of the folded messages.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> [message.content for message in log.active("chat")]
        ['they chose the way']
        """
        return active_messages(self._tables, session)

    def messages(self, session: str, first: int = 1, last: int | None = None) -> Iterator[Message]:
        """All messages by number from ``first`` to ``last``, including folded ones.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> [message.number for message in log.messages("chat")]
        [1, 2, 3]
        """
        return all_messages(self._tables, session, first, last)

    def message(self, session: str, number: int) -> Message | None:
        """One message; None if it does not exist or was pruned.

        >>> log.message("chat", 2).content
        'left'
        """
        return find_message(self._tables, session, number)

    def fold(
        self,
        session: str,
        messages: Iterable[int],
        note: Any,
        *,
        before_tokens: int | None = None,
        after_tokens: int | None = None,
        round: int | None = None,
        meta: Mapping[str, Any] | None = None,
        keep_notes: bool = False,
        lease: LeaseGiven = None,
    ) -> Fold:
        """Replace these active messages by one note, at the position of the first of them.

        The originals stay readable. An active note must be among them, unless ``keep_notes``.
        InvalidInputError if a message is not active or has pending calls.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> fold.messages, [message.content for message in log.active("chat")]
        ([1, 2], ['they chose the way'])
        >>> log.message("chat", 1).content
        'which way?'
        """
        return folding.fold(
            self._tables,
            session,
            messages,
            note,
            before_tokens=before_tokens,
            after_tokens=after_tokens,
            round_index=round,
            meta=dict_of(meta, "meta"),
            keep_notes=keep_notes,
            lease=lease,
        )

    def folds(self, session: str) -> list[Fold]:
        """Every fold of a session, oldest first.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> [(fold.messages, fold.note) for fold in log.folds("chat")]
        [([1, 2], 3)]
        """
        return list(folding.folds(self._tables, session))

    def prune(self, session: str, *, keep_recent: int = 0, older_than_ms: int | None = None) -> int:
        """Remove folded messages permanently; returns how many. Active messages stay.

        The ``keep_recent`` newest folded messages stay, and those younger than ``older_than_ms``.
        ``vacuum`` reclaims the space.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> log.prune("chat", keep_recent=1)
        1
        >>> [message.number for message in log.messages("chat")]
        [2, 3]
        """
        return folding.prune(self._tables, session, keep_recent, older_than_ms)

    # --- sends, rounds, calls ---------------------------------------------------------------

    def send(self, session: str, message: NewMessage, *, lease: LeaseGiven = None) -> int:
        """Append a user's message and start a new send; PendingCallsError while calls are pending.

        >>> log.send("chat", NewMessage("user", "why left?")), log.counters("chat").send
        (3, 1)
        """
        return calls.send(self._tables, session, message, lease=lease)

    def start_round(self, session: str, round: int, *, new_send: bool = False) -> None:
        """Record the number of the current round; ``new_send`` also starts a new send.

        >>> log.start_round("chat", 2)
        >>> log.counters("chat").round
        2
        """
        calls.start_round(self._tables, session, round, new_send=new_send)

    def counters(self, session: str) -> Counters:
        """The number of the next message, the send, the round, and the number of folds.

        >>> counters = log.counters("chat")
        >>> counters.next_number, counters.folds
        (3, 0)
        """
        at = self._tables.at(session)
        return Counters(at.last + 1, at.state.send, at.state.round, at.state.folds)

    def pending(self, session: str) -> Pending | None:
        """The tool calls without a result, in full, or None.

        >>> call = {"id": "c1", "name": "read", "arguments": {"path": "map.txt"}}
        >>> number = log.append("chat", NewMessage("assistant", tool_calls=[call]))
        >>> [waiting["name"] for waiting in log.pending("chat").calls]
        ['read']
        """
        return calls.pending(self._tables, session)

    def set_pending(self, session: str, waiting: Any) -> None:
        """Reduce the pending calls to those with these ids, or with None to no calls.

        A dict leaves the calls pending: it is stored for ``given_pending`` until they change.

        >>> calls = [{"id": "c1", "name": "read"}, {"id": "c2", "name": "list"}]
        >>> number = log.append("chat", NewMessage("assistant", tool_calls=calls))
        >>> log.set_pending("chat", ["c2"])
        >>> [waiting["id"] for waiting in log.pending("chat").calls]
        ['c2']
        """
        calls.set_waiting(self._tables, session, waiting)

    def given_pending(self, session: str) -> Any:
        """The dict that was passed to ``set_pending``, or None; changed pending calls remove it.

        >>> log.set_pending("chat", {"tool": "read", "since": "noon"})
        >>> log.given_pending("chat")
        {'since': 'noon', 'tool': 'read'}
        """
        return self._tables.at(session).state.given

    def resume(
        self,
        session: str,
        execute: Callable[[Mapping[str, Any]], Any],
        *,
        lease: LeaseGiven = None,
    ) -> list[int]:
        """Execute the pending calls; returns the numbers of their results.

        Each result is appended, in a transaction of its own, as soon as it exists. An exception
        becomes the text of the result.

        >>> call = {"id": "c1", "name": "read"}
        >>> number = log.append("chat", NewMessage("assistant", tool_calls=[call]))
        >>> log.resume("chat", lambda call: f"ran {call['name']}")
        [4]
        >>> log.message("chat", 4).content
        'ran read'
        """
        return calls.resume(self._tables, session, execute, lease=lease)

    def abort(self, session: str, reason: str = "aborted", *, lease: LeaseGiven = None) -> int:
        """Append the result ``<aborted: reason>`` for every pending call; returns how many.

        >>> call = {"id": "c1", "name": "read"}
        >>> number = log.append("chat", NewMessage("assistant", tool_calls=[call]))
        >>> log.abort("chat", "the user said stop")
        1
        >>> log.message("chat", 4).content
        '<aborted: the user said stop>'
        """
        return calls.abort(self._tables, session, reason, lease=lease)

    # --- usage ------------------------------------------------------------------------------

    def record_usage(
        self, session: str, tokens: Tokens, *, send: int | None = None, round: int | None = None
    ) -> None:
        """Record the tokens of a round, by default the current one.

        Recording a round again replaces its tokens, also in the totals.

        >>> log.record_usage("chat", Tokens(prompt=10, completion=2, total=12))
        >>> log.record_usage("chat", Tokens(prompt=10, completion=3, total=13))
        >>> log.totals("chat").total
        13
        """
        usage.record(self._tables, session, tokens, send, round)

    def usage(self, session: str) -> list[RoundUsage]:
        """The tokens of each round, in order of sends and rounds.

        >>> for number in (0, 1):
        ...     log.record_usage("chat", Tokens(total=12), round=number)
        >>> [(used.round, used.tokens.total) for used in log.usage("chat")]
        [(0, 12), (1, 12)]
        """
        return list(usage.rounds(self._tables, session))

    def totals(self, session: str) -> UsageTotals:
        """The tokens of a session in total, including pruned rounds.

        >>> for number in (0, 1):
        ...     log.record_usage("chat", Tokens(total=12), round=number)
        >>> log.totals("chat").rounds, log.totals("chat").total
        (2, 24)
        """
        return usage.totals(self._tables, session)

    def prune_usage(self, session: str, *, keep_recent: int = 0) -> int:
        """Remove the usage of all but the ``keep_recent`` newest rounds; returns how many.

        The totals stay.

        >>> for number in (0, 1):
        ...     log.record_usage("chat", Tokens(total=12), round=number)
        >>> log.prune_usage("chat", keep_recent=1), log.totals("chat").total
        (1, 24)
        """
        return usage.prune(self._tables, session, keep_recent)

    # --- leases and inbox ---------------------------------------------------------------------

    def claim_lease(self, session: str, owner: str, ttl_ms: int) -> Lease | None:
        """Claim the exclusive lease of a session; None while it is leased, even by the same owner.

        >>> lease = log.claim_lease("chat", "worker-1", 30_000)
        >>> log.claim_lease("chat", "worker-2", 30_000) is None
        True
        >>> log.append("chat", NewMessage("assistant", "right"), lease=lease)
        3
        """
        self._tables.at(session)
        return self.store.session(session).claim_lease(owner, ttl_ms)

    def renew_lease(self, lease: Lease, ttl_ms: int) -> Lease:
        """Extend a lease to ``ttl_ms`` from now; LeaseLostError unless it is current and live.

        >>> lease = log.claim_lease("chat", "worker-1", 30_000)
        >>> lease = log.renew_lease(lease, 60_000)
        >>> lease.expires_at_ms - lease.claimed_at_ms >= 60_000
        True
        """
        leases.check_lease(lease)
        return self.store.session(lease.session).renew_lease(lease, ttl_ms)

    def release_lease(self, lease: Lease) -> bool:
        """Release a lease; False if it is not the current one.

        >>> lease = log.claim_lease("chat", "worker-1", 30_000)
        >>> log.release_lease(lease), log.release_lease(lease)
        (True, False)
        """
        leases.check_lease(lease)
        return self.store.session(lease.session).release_lease(lease)

    def put_inbox(self, session: str, item: str, message: NewMessage) -> bool:
        """Queue a message under the id ``item``; False if it is queued, or was delivered before.

        >>> mail = NewMessage("user", "a mail")
        >>> log.put_inbox("chat", "mail-1", mail), log.put_inbox("chat", "mail-1", mail)
        (True, False)
        """
        return inbox.put(self._tables, session, item, message)

    def deliver_inbox(self, session: str, lease: Lease, *, limit: int = 32) -> list[int]:
        """Append up to ``limit`` queued messages in order, and dequeue them; returns their numbers.

        >>> waits = log.put_inbox("chat", "mail-1", NewMessage("user", "a mail"))
        >>> log.deliver_inbox("chat", log.claim_lease("chat", "worker-1", 30_000))
        [3]
        >>> log.message("chat", 3).content
        'a mail'
        """
        return inbox.deliver(self._tables, session, lease, limit)

    # --- moving -------------------------------------------------------------------------------

    def export(self, session: str) -> Iterator[dict[str, Any]]:
        """The entries of a session in full, for ``import_session``.

        >>> copy = SessionLog(other).import_session(log.export("chat"))
        >>> [message.content for message in SessionLog(other).active(copy.id)]
        ['which way?', 'left']
        """
        return transfer.export(self._tables, session)

    def import_session(
        self, entries: Iterable[Mapping[str, Any]], session: str | None = None
    ) -> LogSession:
        """Create a session from an export: a root, under a new id or the given one.

        More than a thousand messages are imported in several commits, and the session is visible
        after the last. FormatError if the export is of another version, SessionExistsError if the
        id is taken, InvalidInputError if the export is damaged.

        >>> log.import_session(log.export("chat"), "a copy").id
        'a copy'
        >>> [message.content for message in log.active("a copy")]
        ['which way?', 'left']
        """
        name = tree.new_id() if session is None else session
        transfer.bring_in(self._tables, entries, name)
        return self.get(name)
