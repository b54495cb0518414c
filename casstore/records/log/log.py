"""The session log: sessions of numbered messages, below one another, on a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from casstore.errors import SessionNotFoundError
from casstore.records.log import (
    appending,
    calls,
    folding,
    inbox,
    pruning,
    reading,
    sending,
    transfer,
    tree,
    usage,
)
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
from casstore.records.log.ground import Ground, LeaseGiven
from casstore.session import leases
from casstore.session.arguments import check_count, dict_of
from casstore.session.data import UNFENCED, Lease
from casstore.store import Store


class SessionLog:
    """Sessions of messages. Every call is one transaction, safe beside others anywhere.

    A session of the log is a session of the store with the same id, and its messages are the
    nodes: ``store.session(id)`` reads, forks and exports it. ``lease`` is needed
    only while somebody holds the session's. Calls on an unknown session raise
    SessionNotFoundError, on a closed one SessionDeletedError.

    The examples use ``log``, with the session ``chat``: a question and an answer. ``store`` is its
    store.

    >>> log.append("chat", NewMessage("user", "why left?"))
    3
    >>> [message.content for message in log.active("chat")]
    ['which way?', 'left', 'why left?']
    """

    def __init__(self, store: Store, *, depth_limit: int = DEPTH_LIMIT) -> None:
        check_count(depth_limit, "a depth limit")
        self._ground = Ground(store)
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
        """Make a session, below ``parent`` if one is given: then its kind is "subagent".

        SessionNotFoundError without such a parent, SpawnDepthError if it would stand too
        deep, SessionExistsError if the id is taken.

        >>> log.create("research", parent="chat", lifecycle="linked").kind
        'subagent'
        """
        name = tree.new_id() if session is None else session
        row = tree.Row(
            0, 0, ACTIVE, kind, lifecycle, parent, 0, 0, spawn_call, prompt, model,
            dict_of(config, "config"), dict_of(metadata, "metadata"), 0,
        )  # fmt: skip
        return tree.create(self._ground, name, row, self.depth_limit)

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
        """Let a fork of a session, or one that came in a bundle, be a session of the log.

        It has the messages already, and their state. Errors as for ``create``.

        >>> head = store.fork("chat", "another way")
        >>> log.adopt("another way", metadata={"user": "anna"}).id
        'another way'
        >>> log.append("another way", NewMessage("assistant", "right"))
        3
        """
        row = tree.Row(
            0, 0, ACTIVE, ROOT, lifecycle, parent, 0, 0, None, prompt, model,
            dict_of(config, "config"), dict_of(metadata, "metadata"), 0,
        )  # fmt: skip
        return tree.adopt(self._ground, session, row, self.depth_limit)

    def find(self, session: str) -> LogSession | None:
        """A session; None if it is not there.

        >>> log.find("chat").status, log.find("nowhere")
        ('active', None)
        """
        return tree.find(self._ground, session)

    def get(self, session: str) -> LogSession:
        """A session; SessionNotFoundError if it is not there.

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
        """All sessions in order of id, from behind ``after`` on; read a page at a time.

        >>> made = log.create("another")
        >>> [session.id for session in log.sessions()]
        ['another', 'chat']
        """
        return tree.listed(self._ground, after, limit)

    def children(self, session: str) -> list[LogSession]:
        """The sessions right below one, in the order in which they were made.

        >>> for name in ("research", "critic"):
        ...     made = log.create(name, parent="chat")
        >>> [child.id for child in log.children("chat")]
        ['research', 'critic']
        """
        return tree.children(self._ground, session)

    def update(self, /, session: str, **changes: Any) -> LogSession:
        """Change ``prompt``, ``model``, ``config`` or ``metadata``.

        >>> log.update("chat", model="model-2", metadata={"user": "anna"}).model
        'model-2'
        """
        return tree.update_known(self._ground, session, changes)

    def archive(self, session: str) -> LogSession:
        """Mark a session as archived. It stays as it is, and still takes messages.

        >>> log.archive("chat").status
        'archived'
        """
        return tree.update(self._ground, session, {"status": ARCHIVED})

    def finish(self, session: str, status: str) -> bool:
        """Tell how a session below another ended; True if it went, being ephemeral.

        It goes only with the status "completed".

        >>> made = log.create("research", parent="chat")
        >>> log.finish("research", "failed"), log.finish("research", "completed")
        (False, True)
        """
        return tree.finish(self._ground, session, status)

    def close(self, session: str, *, cascade: bool = True) -> int:
        """Take a session away for good, and those below it that are not detached.

        What is detached becomes a root, with all below it; without ``cascade`` so do all
        children. How many sessions went; 0 if there is no such session.

        >>> made = log.create("research", parent="chat")
        >>> log.close("chat"), log.close("chat")
        (2, 0)
        """
        return tree.close(self._ground, session, cascade=cascade)

    # --- messages -------------------------------------------------------------------------

    def append(
        self,
        session: str,
        message: NewMessage,
        *,
        tokens: Tokens | None = None,
        lease: LeaseGiven = UNFENCED,
        durability: str | None = None,
    ) -> int:
        """Put a message at the end of a session; its number.

        With ``tokens``, what its round has used is noted in the same transaction. A message
        with tool calls lets them wait for results; a tool's result ends the waiting of its
        call. ``durability`` is what this call waits for: ``full``, ``relaxed``, or as the store
        was opened.

        >>> answer = NewMessage("assistant", "because it is shorter", round=0)
        >>> log.append("chat", answer, tokens=Tokens(prompt=12, completion=4, total=16))
        3
        >>> log.totals("chat").total
        16
        """
        return appending.append(
            self._ground, session, [message], tokens, lease=lease, durability=durability
        )[0]

    def extend(
        self,
        session: str,
        messages: Sequence[NewMessage],
        *,
        lease: LeaseGiven = UNFENCED,
        durability: str | None = None,
    ) -> list[int]:
        """Put several messages at the end of a session, all or none.

        >>> messages = [NewMessage("user", "why left?"), NewMessage("assistant", "it is shorter")]
        >>> log.extend("chat", messages)
        [3, 4]
        """
        return appending.append(self._ground, session, messages, lease=lease, durability=durability)

    def active(self, session: str) -> list[Message]:
        """The messages that an agent goes on from, in their order: notes, and not what they
        stand for.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> [message.content for message in log.active("chat")]
        ['they chose the way']
        """
        return reading.active(self._ground, session)

    def messages(self, session: str, first: int = 1, last: int | None = None) -> Iterator[Message]:
        """All messages by number, folded ones too; from ``first`` to ``last``.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> [message.number for message in log.messages("chat")]
        [1, 2, 3]
        """
        return reading.every(self._ground, session, first, last)

    def message(self, session: str, number: int) -> Message | None:
        """One message; None if there is none of this number, or it was pruned.

        >>> log.message("chat", 2).content
        'left'
        """
        return reading.find(self._ground, session, number)

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
        lease: LeaseGiven = UNFENCED,
    ) -> Fold:
        """Let one note stand for these active messages, where the first of them stands.

        The originals stay readable. A note that is shown must be among them, unless
        ``keep_notes``. InvalidInputError if one is not active, or waits for results.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> fold.messages, [message.content for message in log.active("chat")]
        ([1, 2], ['they chose the way'])
        >>> log.message("chat", 1).content
        'which way?'
        """
        return folding.fold(
            self._ground,
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
        return list(folding.folds(self._ground, session))

    def prune(self, session: str, *, keep_recent: int = 0, older_than_ms: int | None = None) -> int:
        """Remove folded messages for good; how many. Those that are active stay.

        The ``keep_recent`` newest of them stay, and those younger than ``older_than_ms``. The
        bytes come back with ``vacuum``.

        >>> fold = log.fold("chat", [1, 2], "they chose the way")
        >>> log.prune("chat", keep_recent=1)
        1
        >>> [message.number for message in log.messages("chat")]
        [2, 3]
        """
        return pruning.prune(self._ground, session, keep_recent, older_than_ms)

    # --- sends, rounds, calls ---------------------------------------------------------------

    def send(self, session: str, message: NewMessage, *, lease: LeaseGiven = UNFENCED) -> int:
        """Append what a user sends, and begin a new send; PendingCallsError while calls wait.

        >>> log.send("chat", NewMessage("user", "why left?")), log.counters("chat").send
        (3, 1)
        """
        return sending.send(self._ground, session, message, lease=lease)

    def start_round(self, session: str, round: int, *, new_send: bool = False) -> None:
        """Note down which round of the send is going on.

        >>> log.start_round("chat", 2)
        >>> log.counters("chat").round
        2
        """
        sending.start_round(self._ground, session, round, new_send=new_send)

    def counters(self, session: str) -> Counters:
        """The number of the next message, the send, the round, and how many folds there were.

        >>> counters = log.counters("chat")
        >>> counters.next_number, counters.folds
        (3, 0)
        """
        at = self._ground.at(session)
        return Counters(at.last + 1, at.state.send, at.state.round, at.state.folds)

    def pending(self, session: str) -> Pending | None:
        """The tool calls that wait for their results, whole; None if none does.

        >>> call = {"id": "c1", "name": "read", "arguments": {"path": "map.txt"}}
        >>> number = log.append("chat", NewMessage("assistant", tool_calls=[call]))
        >>> [waiting["name"] for waiting in log.pending("chat").calls]
        ['read']
        """
        return calls.pending(self._ground, session)

    def set_pending(self, session: str, waiting: Any) -> None:
        """Say which calls wait, for those who know better: ids of some that do; None: none.

        A dict is kept as it is, instead of calls that messages have made.

        >>> calls = [{"id": "c1", "name": "read"}, {"id": "c2", "name": "list"}]
        >>> number = log.append("chat", NewMessage("assistant", tool_calls=calls))
        >>> log.set_pending("chat", ["c2"])
        >>> [waiting["id"] for waiting in log.pending("chat").calls]
        ['c2']
        """
        calls.set_waiting(self._ground, session, waiting)

    def given_pending(self, session: str) -> Any:
        """The dict that ``set_pending`` was given; None if there is none.

        >>> log.set_pending("chat", {"tool": "read", "since": "noon"})
        >>> log.given_pending("chat")
        {'since': 'noon', 'tool': 'read'}
        """
        return self._ground.at(session).state.given

    def resume(
        self,
        session: str,
        execute: Callable[[Mapping[str, Any]], Any],
        *,
        lease: LeaseGiven = UNFENCED,
    ) -> list[int]:
        """Execute the calls that wait; the numbers of their results.

        Each result is appended when it is there. What ``execute`` raises becomes its text.

        >>> call = {"id": "c1", "name": "read"}
        >>> number = log.append("chat", NewMessage("assistant", tool_calls=[call]))
        >>> log.resume("chat", lambda call: f"ran {call['name']}")
        [4]
        >>> log.message("chat", 4).content
        'ran read'
        """
        return calls.resume(self._ground, session, execute, lease=lease)

    def abort(self, session: str, reason: str = "aborted", *, lease: LeaseGiven = UNFENCED) -> int:
        """Give every call that waits the result ``<aborted: reason>``; how many there were.

        >>> call = {"id": "c1", "name": "read"}
        >>> number = log.append("chat", NewMessage("assistant", tool_calls=[call]))
        >>> log.abort("chat", "the user said stop")
        1
        >>> log.message("chat", 4).content
        '<aborted: the user said stop>'
        """
        return calls.abort(self._ground, session, reason, lease=lease)

    # --- usage ------------------------------------------------------------------------------

    def record_usage(
        self, session: str, tokens: Tokens, *, send: int | None = None, round: int | None = None
    ) -> None:
        """Note down what a round has used, by default the one that is going on.

        Noted again it is corrected.

        >>> log.record_usage("chat", Tokens(prompt=10, completion=2, total=12))
        >>> log.record_usage("chat", Tokens(prompt=10, completion=3, total=13))
        >>> log.totals("chat").total
        13
        """
        usage.record(self._ground, session, tokens, send, round)

    def usage(self, session: str) -> list[RoundUsage]:
        """What each round has used, in order of sends and rounds.

        >>> for number in (0, 1):
        ...     log.record_usage("chat", Tokens(total=12), round=number)
        >>> [(used.round, used.tokens.total) for used in log.usage("chat")]
        [(0, 12), (1, 12)]
        """
        return list(usage.rounds(self._ground, session))

    def totals(self, session: str) -> UsageTotals:
        """What a session has used in all, pruned rounds too.

        >>> for number in (0, 1):
        ...     log.record_usage("chat", Tokens(total=12), round=number)
        >>> log.totals("chat").rounds, log.totals("chat").total
        (2, 24)
        """
        return usage.totals(self._ground, session)

    def prune_usage(self, session: str, *, keep_recent: int = 0) -> int:
        """Remove all rounds but the newest; how many went. The totals stay.

        >>> for number in (0, 1):
        ...     log.record_usage("chat", Tokens(total=12), round=number)
        >>> log.prune_usage("chat", keep_recent=1), log.totals("chat").total
        (1, 24)
        """
        return usage.prune(self._ground, session, keep_recent)

    # --- leases and inbox ---------------------------------------------------------------------

    def claim_lease(self, session: str, owner: str, ttl_ms: int) -> Lease | None:
        """Take the right to change a session; None while anybody has it, this owner included.

        >>> lease = log.claim_lease("chat", "worker-1", 30_000)
        >>> log.claim_lease("chat", "worker-2", 30_000) is None
        True
        >>> log.append("chat", NewMessage("assistant", "right"), lease=lease)
        3
        """
        self._ground.at(session)
        return self.store.session(session).claim_lease(owner, ttl_ms)

    def renew_lease(self, lease: Lease, ttl_ms: int) -> Lease:
        """Hold it until ``ttl_ms`` from now; LeaseLostError unless it is current and live.

        >>> lease = log.claim_lease("chat", "worker-1", 30_000)
        >>> lease = log.renew_lease(lease, 60_000)
        >>> lease.expires_at_ms - lease.claimed_at_ms >= 60_000
        True
        """
        leases.check_lease(lease)
        return self.store.session(lease.session).renew_lease(lease, ttl_ms)

    def release_lease(self, lease: Lease) -> bool:
        """Give it back; False if it is no longer the current one.

        >>> lease = log.claim_lease("chat", "worker-1", 30_000)
        >>> log.release_lease(lease), log.release_lease(lease)
        (True, False)
        """
        leases.check_lease(lease)
        return self.store.session(lease.session).release_lease(lease)

    def put_inbox(self, session: str, item: str, message: NewMessage) -> bool:
        """Let a message wait to be delivered; False if the item waits, or was ever delivered.

        >>> mail = NewMessage("user", "a mail")
        >>> log.put_inbox("chat", "mail-1", mail), log.put_inbox("chat", "mail-1", mail)
        (True, False)
        """
        return inbox.put(self._ground, session, item, message)

    def deliver_inbox(self, session: str, lease: Lease, *, limit: int = 32) -> list[int]:
        """Append what waits, in order, and take it out of the inbox; the messages' numbers.

        >>> waits = log.put_inbox("chat", "mail-1", NewMessage("user", "a mail"))
        >>> log.deliver_inbox("chat", log.claim_lease("chat", "worker-1", 30_000))
        [3]
        >>> log.message("chat", 3).content
        'a mail'
        """
        return inbox.deliver(self._ground, session, lease, limit)

    # --- moving -------------------------------------------------------------------------------

    def export(self, session: str) -> Iterator[dict[str, Any]]:
        """Everything of a session, entry by entry, for ``import_session``.

        >>> copy = SessionLog(other).import_session(log.export("chat"))
        >>> [message.content for message in SessionLog(other).active(copy.id)]
        ['which way?', 'left']
        """
        return transfer.export(self._ground, session)

    def import_session(
        self, entries: Iterable[Mapping[str, Any]], session: str | None = None
    ) -> LogSession:
        """Make a session of an export: a root under a new id, or the one given.

        Sessions of more than a thousand messages come in in steps, and are seen when the last
        is done. FormatError if the export is of a newer version, SessionExistsError if the id
        is taken, InvalidInputError if it is damaged.

        >>> log.import_session(log.export("chat"), "a copy").id
        'a copy'
        >>> [message.content for message in log.active("a copy")]
        ['which way?', 'left']
        """
        name = tree.new_id() if session is None else session
        transfer.bring_in(self._ground, entries, name)
        return self.get(name)
