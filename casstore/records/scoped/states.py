"""The face of scoped state: by context and policy for a host, through a gate for a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from casstore.engine.protocol import Write
from casstore.errors import StateRefusedError
from casstore.records.scoped import generations, places, removal, runs
from casstore.records.scoped import policy as policies
from casstore.records.scoped.generations import Generation
from casstore.records.scoped.layout import Spot, Tables
from casstore.records.scoped.places import Located, Where
from casstore.records.scoped.policy import DEFAULT, Outcome, Policy, Quota, Reason
from casstore.records.scoped.removal import Erased, Pulse
from casstore.records.scoped.runs import RUN_MS, STATE, Run, RunGuard, Runs
from casstore.records.scoped.scope import MAX_LISTED, Entry, Guard, Page, Scope
from casstore.records.scoped.scope_keys import (
    ACTOR_TYPE,
    SCOPES,
    Context,
    checked,
    conversation_key,
    real_key,
    scope_keys,
)
from casstore.records.scoped.snapshots import MAX_SNAPSHOT_BYTES, read_moment
from casstore.session.arguments import check_count, check_text
from casstore.store import Store

_CONVERSATION_ID: Final = "external.conversation_id"
Snapshot = dict[str, dict[str, Any]]


class ScopedState:
    """The state that a host keeps for the runners it is bound to. Safe to share by threads.

    A scope belongs to one runner, one binding, and one conversation, actor, subject or the
    runner itself. Runners reach it through ``run`` alone.

    The examples use ``state``, in which nothing is yet, and ``context``: anna talks to the runner
    ``helper`` in the conversation ``c1`` with the bot ``bot``.

    >>> scope = state.scope(context, "actor")
    >>> entry = scope.put("language", "de")
    >>> state.snapshot(context)["actor"]
    {'language': 'de'}
    """

    def __init__(self, store: Store) -> None:
        self._tables = Tables(store)
        self._runs = Runs(self._tables)

    # --- for the host -------------------------------------------------------------------

    def scope(self, context: Context, scope: str, policy: Policy = DEFAULT) -> Scope:
        """One scope; StateRefusedError if the policy forbids it or its identity is missing.

        >>> entry = state.scope(context, "actor").put("language", "de")
        >>> elsewhere = context._replace(conversation_id="c2")
        >>> state.scope(elsewhere, "actor").find("language").value
        'de'
        """
        policies.check_policy(policy)
        key = policies.allowed_key(checked(context), policy, scope)
        return _scope(self._tables, context, policy, scope, key, None)

    def update(
        self,
        context: Context,
        policy: Policy,
        scope: str,
        key: str,
        value: Any,
        *,
        ttl_ms: int | None = None,
    ) -> Outcome:
        """Put a value, or say why not: a refusal is told and not raised.

        >>> told = state.update(context, Policy(scopes=("actor",)), "runner", "mode", "fast")
        >>> told.ok, told.reason
        (False, <Reason.SCOPE_NOT_ENABLED: 'scope_not_enabled'>)
        """
        try:
            entry = self.scope(context, scope, policy).put(key, value, ttl_ms=ttl_ms)
        except StateRefusedError as refused:
            return Outcome(False, str(refused), Reason(refused.reason), None)
        return Outcome(True, None, None, entry.version)

    def snapshot(
        self,
        context: Context,
        policy: Policy = DEFAULT,
        *,
        prefix: str = "",
        max_bytes: int = MAX_SNAPSHOT_BYTES,
    ) -> Snapshot:
        """The values of all four scopes by key, at one moment; empty where there is nothing.

        Scopes that the policy does not allow or whose identity is missing are empty.
        ``external.conversation_id`` is told even if nobody has put it: the id of the latest
        reset, or the conversation's. ``prefix`` leaves out other keys; LimitError if the values
        take more than ``max_bytes``.

        >>> entry = state.scope(context, "actor").put("language", "de")
        >>> found = state.snapshot(context)
        >>> found["actor"], found["conversation"]
        ({'language': 'de'}, {'external.conversation_id': 'c1'})
        """
        policies.check_policy(policy)
        keys = scope_keys(checked(context))
        return _snapshot(self._tables, context, policy, keys, prefix, max_bytes, None)

    # --- for runs -----------------------------------------------------------------------

    def begin_run(
        self,
        run_id: str,
        context: Context,
        policy: Policy = DEFAULT,
        *,
        caller: str,
        capabilities: Sequence[str] = (STATE,),
        ttl_ms: int = RUN_MS,
    ) -> Run:
        """Freeze what a run may do. Begun twice with the same, it is one run.

        RunFrozenError if it goes on with something else. It ends with ``end_run``, or after
        ``ttl_ms`` if nobody renews it.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")  # in any process
        >>> reached.put("actor", "language", "de").value
        'de'
        """
        return self._runs.begin(
            run_id, context, policy, caller=caller, capabilities=capabilities, ttl_ms=ttl_ms
        )

    def find_run(self, run_id: str) -> Run | None:
        """What a run may do; None if there is none or it has ended.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> state.find_run("run-1").caller, state.find_run("run-2")
        ('me/agent', None)
        """
        return self._runs.find(run_id)

    def renew_run(self, run_id: str, *, ttl_ms: int = RUN_MS) -> bool:
        """Let a run last so long from now on; False if it does not go on.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> state.renew_run("run-1", ttl_ms=60_000)
        True
        """
        return self._runs.renew(run_id, ttl_ms)

    def end_run(self, run_id: str) -> bool:
        """End a run; False if it had ended before.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> state.end_run("run-1"), state.end_run("run-1")
        (True, False)
        """
        return self._runs.end(run_id)

    def run(self, run_id: str | None, *, caller: str | None) -> RunState:
        """State as a run may reach it; StateRefusedError if it may not, or not for this caller.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> try:
        ...     state.run("run-1", caller="somebody/else")
        ... except casstore.errors.StateRefusedError as refused:
        ...     refused.reason
        <Reason.WRONG_CALLER: 'wrong_caller'>
        """
        return RunState(self._tables, runs.admitted(self._tables, run_id, caller))

    # --- conversations begun anew, and people who leave ---------------------------------

    def reset(
        self,
        *,
        workspace_id: str | None,
        bot_id: str | None,
        conversation_id: str,
        note: Any = None,
    ) -> Generation:
        """Begin a conversation anew, in all its threads and for all runners and bindings.

        What its scopes held is seen no more, unless by ``generation``. Other scopes, and
        whatever history the caller keeps, stay as they are.

        >>> scope = state.scope(context, "conversation")
        >>> entry = scope.put("topic", "cheese")
        >>> state.reset(workspace_id=None, bot_id="bot", conversation_id="c1").number
        1
        >>> scope.find("topic"), scope.find("topic", generation=0).value
        (None, 'cheese')
        """
        key = conversation_key(workspace_id, bot_id, conversation_id)
        return generations.reset(self._tables, key, note)

    def prepare_reset(
        self,
        *,
        workspace_id: str | None,
        bot_id: str | None,
        conversation_id: str,
        note: Any = None,
    ) -> tuple[Generation, Write]:
        """A reset to go beside the commit of a session: ``Commit(beside=…)``.

        >>> conversation = {"workspace_id": None, "bot_id": "bot", "conversation_id": "c1"}
        >>> generation, write = state.prepare_reset(**conversation)
        >>> told = NodeDraft("reset", {"role": "system", "text": "begun anew"})
        >>> result = session.commit(Commit(append=[told], beside=write, lease=UNFENCED))
        >>> state.generation(**conversation).number
        1
        """
        key = conversation_key(workspace_id, bot_id, conversation_id)
        return generations.prepare_reset(self._tables, key, note)

    def generation(
        self, *, workspace_id: str | None, bot_id: str | None, conversation_id: str
    ) -> Generation | None:
        """The latest reset of a conversation; None if there was none.

        >>> conversation = {"workspace_id": None, "bot_id": "bot", "conversation_id": "c1"}
        >>> state.generation(**conversation) is None
        True
        >>> state.reset(**conversation) == state.generation(**conversation)
        True
        """
        key = conversation_key(workspace_id, bot_id, conversation_id)
        return generations.latest(self._tables, key)

    def generations(
        self, *, workspace_id: str | None, bot_id: str | None, conversation_id: str
    ) -> list[Generation]:
        """All resets of a conversation, in order.

        >>> conversation = {"workspace_id": None, "bot_id": "bot", "conversation_id": "c1"}
        >>> for why in ("bored", "lost"):
        ...     generation = state.reset(**conversation, note=why)
        >>> [(one.number, one.note) for one in state.generations(**conversation)]
        [(1, 'bored'), (2, 'lost')]
        """
        key = conversation_key(workspace_id, bot_id, conversation_id)
        return list(generations.all_of(self._tables, key))

    def drop_history(
        self,
        *,
        workspace_id: str | None,
        bot_id: str | None,
        conversation_id: str,
        before: int | None = None,
        pulse: Pulse | None = None,
    ) -> int:
        """Remove what a conversation's scopes held before generation ``before``; how many values.

        Without ``before``: all that is not seen any more. ``pulse`` is told how many are gone;
        raising from it stops the work, and calling again goes on with it.

        >>> conversation = {"workspace_id": None, "bot_id": "bot", "conversation_id": "c1"}
        >>> entry = state.scope(context, "conversation").put("topic", "cheese")
        >>> generation = state.reset(**conversation)
        >>> state.drop_history(**conversation)
        1
        """
        key = conversation_key(workspace_id, bot_id, conversation_id)
        return removal.drop_history(self._tables, key, before, pulse)

    def erase_actor(
        self,
        actor_id: str,
        actor_type: str = ACTOR_TYPE,
        *,
        workspace_id: str | None = None,
        bot_id: str | None = None,
        pulse: Pulse | None = None,
    ) -> Erased:
        """Remove all that an actor has written or that is about it, in every scope and generation.

        Its runs end. With ``workspace_id`` or ``bot_id``, only what was written there. One
        transaction for up to 512 values; with more, ``pulse`` is told between two how many are
        gone, and may raise: calling again goes on. The bytes go with gc and compact.

        >>> for scope in ("actor", "conversation"):
        ...     entry = state.scope(context, scope).put("language", "de")
        >>> state.erase_actor("anna")
        Erased(values=2, runs=0)
        """
        person = removal.checked_person((actor_type, actor_id))
        removal.check_place(workspace_id, bot_id)
        return removal.erase(self._tables, person, workspace_id, bot_id, pulse)

    # --- by where it belongs --------------------------------------------------------------

    def list_state(
        self,
        *,
        runner_id: str | None = None,
        binding_identity: str | None = None,
        bot_id: str | None = None,
        workspace_id: str | None = None,
    ) -> Iterator[Located]:
        """The values of a runner, a binding, a bot or a workspace, or of several of these at once.

        In all scopes and generations, by the key of their scope. Reads all state of the store.

        >>> entry = state.scope(context, "actor").put("language", "de")
        >>> [(found.scope, found.entry.key) for found in state.list_state(bot_id="bot")]
        [('actor', 'language')]
        """
        where = Where(runner_id, binding_identity, bot_id, workspace_id)
        return places.located(self._tables, places.check_where(where))

    def delete_state(
        self,
        *,
        runner_id: str | None = None,
        binding_identity: str | None = None,
        bot_id: str | None = None,
        workspace_id: str | None = None,
        pulse: Pulse | None = None,
    ) -> Erased:
        """Remove what ``list_state`` gives, and end the runs that belong there.

        Each transaction removes up to 512 values. ``pulse`` is called after each with the number
        removed so far; if it raises, calling again continues. Values put concurrently may stay.
        Resets stay; gc and compact free the bytes.

        >>> entry = state.scope(context, "actor").put("language", "de")
        >>> state.delete_state(runner_id="helper")
        Erased(values=1, runs=0)
        """
        where = Where(runner_id, binding_identity, bot_id, workspace_id)
        return places.delete(self._tables, places.check_where(where), pulse)


class RunState:
    """State as one run may reach it: its frozen policy, its frozen scopes.

    >>> run = state.begin_run("run-1", context, caller="me/agent")
    >>> reached = state.run("run-1", caller="me/agent")
    >>> entry = reached.put("actor", "language", "de")
    >>> reached.snapshot()["actor"]
    {'language': 'de'}
    """

    def __init__(self, tables: Tables, run: Run) -> None:
        self._tables = tables
        self._guard = RunGuard(tables, run)
        #: What was frozen.
        self.run = run

    def scope(self, scope: str | None) -> Scope:
        """One scope; StateRefusedError if the run may not reach it.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> scope = state.run("run-1", caller="me/agent").scope("actor")
        >>> scope.put("language", "de").value
        'de'
        """
        if not scope:
            policies.refuse(Reason.NO_SCOPE, "which scope? give one")
        policies.require_allowed(self.run.policy, scope)
        key = self.run.scope_keys.get(scope)
        if key is None:
            policies.refuse_identity(scope)
        return _scope(self._tables, self.run.context, self.run.policy, scope, key, self._guard)

    def snapshot(self, *, prefix: str = "", max_bytes: int = MAX_SNAPSHOT_BYTES) -> Snapshot:
        """As ``ScopedState.snapshot``, of the run's own scopes.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")
        >>> entry = reached.put("actor", "language", "de")
        >>> reached.snapshot()["actor"]
        {'language': 'de'}
        """
        run = self.run
        return _snapshot(
            self._tables, run.context, run.policy, run.scope_keys, prefix, max_bytes, self._guard
        )

    def find(self, scope: str | None, key: str | None) -> Entry | None:
        """A value of a scope; None if there is none.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")
        >>> entry = reached.put("actor", "language", "de")
        >>> reached.find("actor", "language").value, reached.find("actor", "colour")
        ('de', None)
        """
        return self._scope_and_key(scope, key).find(key or "")

    def put(
        self, scope: str | None, key: str | None, value: Any, *, ttl_ms: int | None = None
    ) -> Entry:
        """Write a value: the last one wins.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")
        >>> reached.put("actor", "language", "de", ttl_ms=60_000).value
        'de'
        """
        return self._scope_and_key(scope, key).put(key or "", value, ttl_ms=ttl_ms)

    def swap(
        self,
        scope: str | None,
        key: str | None,
        value: Any,
        *,
        expected: str | None,
        ttl_ms: int | None = None,
    ) -> Entry:
        """Write a value if the key is at this version; None: if it is not there.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")
        >>> entry = reached.swap("actor", "count", 1, expected=None)
        >>> reached.swap("actor", "count", 2, expected=entry.version).value
        2
        """
        scoped = self._scope_and_key(scope, key)
        return scoped.swap(key or "", value, expected=expected, ttl_ms=ttl_ms)

    def delete(self, scope: str | None, key: str | None, *, expected: str | None = None) -> bool:
        """Remove a value; was there one?

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")
        >>> entry = reached.put("actor", "language", "de")
        >>> reached.delete("actor", "language"), reached.delete("actor", "language")
        (True, False)
        """
        return self._scope_and_key(scope, key).delete(key or "", expected=expected)

    def list_keys(
        self,
        scope: str | None,
        prefix: str = "",
        *,
        limit: int = MAX_LISTED,
        after: str | None = None,
    ) -> Page:
        """Keys of a scope that start with ``prefix``, in order.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")
        >>> for key in ("ui.colour", "ui.size", "language"):
        ...     entry = reached.put("actor", key, "a value")
        >>> reached.list_keys("actor", "ui.").keys
        ['ui.colour', 'ui.size']
        """
        return self.scope(scope).list_keys(prefix, limit=limit, after=after)

    def _scope_and_key(self, scope: str | None, key: str | None) -> Scope:
        if scope and not key:
            policies.refuse(Reason.NO_KEY, "which key? give one")
        return self.scope(scope)


def _spot(context: Context, scope: str, key: str) -> Spot:
    conversation = None
    if scope == "conversation":
        place = (context.workspace_id, context.bot_id, context.conversation_id)
        conversation = conversation_key(*place)
    return Spot(scope, key, conversation)


def _scope(
    tables: Tables, context: Context, policy: Policy, scope: str, key: str, guard: Guard | None
) -> Scope:
    quota = policy.quotas.get(scope, Quota())
    return Scope(tables, _spot(context, scope, key), context, quota, guard)


def _snapshot(
    tables: Tables,
    context: Context,
    policy: Policy,
    keys: dict[str, str],
    prefix: str,
    max_bytes: int,
    guard: Guard | None,
) -> Snapshot:
    check_text(prefix, "a prefix")
    check_count(max_bytes, "how many bytes a snapshot may take")
    start = real_key(prefix)
    told: Snapshot = {scope: {} for scope in SCOPES}
    if not policy.enabled:
        return told
    scopes = [scope for scope in SCOPES if scope in policy.scopes and scope in keys]
    moment = read_moment(
        tables,
        [_spot(context, scope, keys[scope]) for scope in scopes],
        prefix=start,
        max_bytes=max_bytes,
        guard=guard,
    )
    for scope, found in zip(scopes, moment.scopes, strict=True):
        told[scope] = {entry.key: entry.value for entry in found}
    if "conversation" in scopes and _CONVERSATION_ID.startswith(start):
        told["conversation"].setdefault(
            _CONVERSATION_ID, moment.reset_id or context.conversation_id
        )
    return told
