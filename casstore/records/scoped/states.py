"""``ScopedState``: access by context and policy for a host, and by grant for a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from casstore.engine.protocol import Write
from casstore.errors import StateRefusedError
from casstore.records.scoped import erasure, generations, places, runs
from casstore.records.scoped import policy as policies
from casstore.records.scoped.changes import Erased, Progress
from casstore.records.scoped.generations import Generation
from casstore.records.scoped.places import ContextFilter, Located
from casstore.records.scoped.policy import DEFAULT, Quota, Reason, StatePolicy, UpdateOutcome
from casstore.records.scoped.runs import RUN_MS, STATE, RunGrants, RunGuard
from casstore.records.scoped.scope import MAX_LISTED, KeyPage, Scope, StateEntry
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
from casstore.records.scoped.tables import RunGrant, ScopedTables, Spot
from casstore.session.arguments import check_count, check_text
from casstore.store import Store

_CONVERSATION_ID: Final = "external.conversation_id"
Snapshot = dict[str, dict[str, Any]]


class ScopedState:
    """The state that a host program stores for its runners. Safe to share between threads.

    A **runner** is a plugin or bot of the host; a **binding** says where the host uses it. A
    **scope** is the state of one runner in one binding, for one conversation, actor, subject or the
    runner itself. Runners access it only through ``run``.

    The examples use ``state``, which is empty, and ``context``: anna talks to the runner
    ``helper`` in the conversation ``c1`` with the bot ``bot``.

    >>> scope = state.scope(context, "actor")
    >>> entry = scope.put("language", "de")
    >>> state.snapshot(context)["actor"]
    {'language': 'de'}
    """

    def __init__(self, store: Store) -> None:
        self._tables = ScopedTables(store)
        self._runs = RunGrants(self._tables)

    # --- for the host -------------------------------------------------------------------

    def scope(self, context: Context, scope: str, policy: StatePolicy = DEFAULT) -> Scope:
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
        policy: StatePolicy,
        scope: str,
        key: str,
        value: Any,
        *,
        ttl_ms: int | None = None,
    ) -> UpdateOutcome:
        """Put a value, or return why it was refused; does not raise StateRefusedError.

        >>> policy = StatePolicy(scopes=("actor",))
        >>> outcome = state.update(context, policy, "runner", "mode", "fast")
        >>> outcome.ok, outcome.reason
        (False, <Reason.SCOPE_NOT_ENABLED: 'scope_not_enabled'>)
        """
        try:
            entry = self.scope(context, scope, policy).put(key, value, ttl_ms=ttl_ms)
        except StateRefusedError as refused:
            return UpdateOutcome(False, str(refused), Reason(refused.reason), None)
        return UpdateOutcome(True, None, None, entry.version)

    def snapshot(
        self,
        context: Context,
        policy: StatePolicy = DEFAULT,
        *,
        prefix: str = "",
        max_bytes: int = MAX_SNAPSHOT_BYTES,
    ) -> Snapshot:
        """The values of all four scopes by key, as of one moment.

        Scopes that the policy does not allow or whose identity is missing are empty.
        The scope of the conversation, if allowed, has ``external.conversation_id`` even if it was
        never put: the id of the latest reset, or else of the conversation. ``prefix`` selects keys;
        LimitError if the values exceed ``max_bytes``.

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
        policy: StatePolicy = DEFAULT,
        *,
        caller: str,
        capabilities: Sequence[str] = (STATE,),
        ttl_ms: int = RUN_MS,
    ) -> RunGrant:
        """Store the grant of a run. Repeating it with the same grant continues the run.

        RunFrozenError if the run is active with another grant. A run ends with ``end_run``, or
        after ``ttl_ms`` unless ``renew_run`` extends it.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")  # in any process
        >>> reached.put("actor", "language", "de").value
        'de'
        """
        return self._runs.begin(
            run_id, context, policy, caller=caller, capabilities=capabilities, ttl_ms=ttl_ms
        )

    def find_run(self, run_id: str) -> RunGrant | None:
        """The grant of a run, or None if it does not exist or has ended.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> state.find_run("run-1").caller, state.find_run("run-2")
        ('me/agent', None)
        """
        return self._runs.find(run_id)

    def renew_run(self, run_id: str, *, ttl_ms: int = RUN_MS) -> bool:
        """Extend a run to ``ttl_ms`` from now; False if it has ended.

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
        """The state that a run may access; StateRefusedError if it has ended, or to another caller.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> try:
        ...     state.run("run-1", caller="somebody/else")
        ... except casstore.errors.StateRefusedError as refused:
        ...     refused.reason
        <Reason.WRONG_CALLER: 'wrong_caller'>
        """
        return RunState(self._tables, runs.admitted(self._tables, run_id, caller))

    # --- resets and erasure ---------------------------------------------------------------

    def reset(
        self,
        *,
        workspace_id: str | None,
        bot_id: str | None,
        conversation_id: str,
        note: Any = None,
    ) -> Generation:
        """Reset a conversation, in all its threads and for all runners and bindings.

        Its earlier values stay; ``Scope.find`` reads them only with ``generation``. Other scopes,
        and any history that the caller stores elsewhere, do not change.

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
        """A reset to write in the transaction of a session's commit, as ``Commit(also=…)``.

        >>> conversation = {"workspace_id": None, "bot_id": "bot", "conversation_id": "c1"}
        >>> generation, write = state.prepare_reset(**conversation)
        >>> note = NodeDraft("reset", {"role": "system", "text": "begun anew"})
        >>> result = session.commit(Commit(append=[note], also=write))
        >>> state.generation(**conversation).number
        1
        """
        key = conversation_key(workspace_id, bot_id, conversation_id)
        return generations.prepare_reset(self._tables, key, note)

    def generation(
        self, *, workspace_id: str | None, bot_id: str | None, conversation_id: str
    ) -> Generation | None:
        """The latest reset of a conversation, or None.

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
        progress: Progress | None = None,
    ) -> int:
        """Remove the values of generations before ``before``; returns how many.

        Without ``before``: all earlier generations. ``progress`` is called with the number removed
        so far; if it raises, calling again continues.

        >>> conversation = {"workspace_id": None, "bot_id": "bot", "conversation_id": "c1"}
        >>> entry = state.scope(context, "conversation").put("topic", "cheese")
        >>> generation = state.reset(**conversation)
        >>> state.drop_history(**conversation)
        1
        """
        key = conversation_key(workspace_id, bot_id, conversation_id)
        return generations.drop_history(self._tables, key, before, progress)

    def erase_actor(
        self,
        actor_id: str,
        actor_type: str = ACTOR_TYPE,
        *,
        workspace_id: str | None = None,
        bot_id: str | None = None,
        progress: Progress | None = None,
    ) -> Erased:
        """Remove all values written by or about an actor, in all scopes and generations.

        Its runs end. ``workspace_id`` and ``bot_id`` limit the erasure. One transaction removes up
        to 512 values; between two, ``progress`` is called with the number removed so far. If it
        raises, calling again continues. gc and compact reclaim the space.

        >>> for scope in ("actor", "conversation"):
        ...     entry = state.scope(context, scope).put("language", "de")
        >>> state.erase_actor("anna")
        Erased(values=2, runs=0)
        """
        person = erasure.checked_person((actor_type, actor_id))
        erasure.check_place(workspace_id, bot_id)
        return erasure.erase(self._tables, person, workspace_id, bot_id, progress)

    # --- by runner, binding, bot or workspace ---------------------------------------------

    def list_state(
        self,
        *,
        runner_id: str | None = None,
        binding_identity: str | None = None,
        bot_id: str | None = None,
        workspace_id: str | None = None,
    ) -> Iterator[Located]:
        """The values whose context has all the given ids; InvalidInputError if none is given.

        In all scopes and generations, by the key of their scope. Reads all state of the store.

        >>> entry = state.scope(context, "actor").put("language", "de")
        >>> [(found.scope, found.entry.key) for found in state.list_state(bot_id="bot")]
        [('actor', 'language')]
        """
        where = ContextFilter(runner_id, binding_identity, bot_id, workspace_id)
        return places.located(self._tables, places.check_where(where))

    def delete_state(
        self,
        *,
        runner_id: str | None = None,
        binding_identity: str | None = None,
        bot_id: str | None = None,
        workspace_id: str | None = None,
        progress: Progress | None = None,
    ) -> Erased:
        """Remove the values that ``list_state`` returns, and end the runs with such contexts.

        Each transaction removes up to 512 values. ``progress`` is called after each with the number
        removed so far; if it raises, calling again continues. Values put concurrently may stay.
        Resets stay; gc and compact free the bytes.

        >>> entry = state.scope(context, "actor").put("language", "de")
        >>> state.delete_state(runner_id="helper")
        Erased(values=1, runs=0)
        """
        where = ContextFilter(runner_id, binding_identity, bot_id, workspace_id)
        return places.delete(self._tables, places.check_where(where), progress)


class RunState:
    """The state that one run may access, by the policy and scopes of its grant.

    >>> run = state.begin_run("run-1", context, caller="me/agent")
    >>> reached = state.run("run-1", caller="me/agent")
    >>> entry = reached.put("actor", "language", "de")
    >>> reached.snapshot()["actor"]
    {'language': 'de'}
    """

    def __init__(self, tables: ScopedTables, run: RunGrant) -> None:
        self._tables = tables
        self._guard = RunGuard(tables, run)
        #: The grant of the run.
        self.run = run

    def scope(self, scope: str | None) -> Scope:
        """One scope; StateRefusedError if the run may not access it.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> scope = state.run("run-1", caller="me/agent").scope("actor")
        >>> scope.put("language", "de").value
        'de'
        """
        if not scope:
            policies.refuse(Reason.NO_SCOPE, "scope is missing: pass one")
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

    def find(self, scope: str | None, key: str | None) -> StateEntry | None:
        """A value of a scope, or None if it does not exist.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")
        >>> entry = reached.put("actor", "language", "de")
        >>> reached.find("actor", "language").value, reached.find("actor", "colour")
        ('de', None)
        """
        return self._scope_and_key(scope, key).find(key or "")

    def put(
        self, scope: str | None, key: str | None, value: Any, *, ttl_ms: int | None = None
    ) -> StateEntry:
        """Write a value, replacing an existing one.

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
    ) -> StateEntry:
        """Write a value if the key has the version ``expected``; None: if it does not exist.

        >>> run = state.begin_run("run-1", context, caller="me/agent")
        >>> reached = state.run("run-1", caller="me/agent")
        >>> entry = reached.swap("actor", "count", 1, expected=None)
        >>> reached.swap("actor", "count", 2, expected=entry.version).value
        2
        """
        scoped = self._scope_and_key(scope, key)
        return scoped.swap(key or "", value, expected=expected, ttl_ms=ttl_ms)

    def delete(self, scope: str | None, key: str | None, *, expected: str | None = None) -> bool:
        """Remove a value; False if it does not exist.

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
    ) -> KeyPage:
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
            policies.refuse(Reason.NO_KEY, "key is missing: pass one")
        return self.scope(scope)


def _scope(
    tables: ScopedTables,
    context: Context,
    policy: StatePolicy,
    scope: str,
    key: str,
    guard: RunGuard | None,
) -> Scope:
    quota = policy.quotas.get(scope, Quota())
    return Scope(tables, Spot.of(context, scope, key), context, quota, guard)


def _snapshot(
    tables: ScopedTables,
    context: Context,
    policy: StatePolicy,
    keys: dict[str, str],
    prefix: str,
    max_bytes: int,
    guard: RunGuard | None,
) -> Snapshot:
    check_text(prefix, "prefix")
    check_count(max_bytes, "max_bytes")
    start = real_key(prefix)
    snapshot: Snapshot = {scope: {} for scope in SCOPES}
    if not policy.enabled:
        return snapshot
    scopes = [scope for scope in SCOPES if scope in policy.scopes and scope in keys]
    moment = read_moment(
        tables,
        [Spot.of(context, scope, keys[scope]) for scope in scopes],
        prefix=start,
        max_bytes=max_bytes,
        guard=guard,
    )
    for scope, found in zip(scopes, moment.scopes, strict=True):
        snapshot[scope] = {entry.key: entry.value for entry in found}
    if "conversation" in scopes and _CONVERSATION_ID.startswith(start):
        snapshot["conversation"].setdefault(
            _CONVERSATION_ID, moment.reset_id or context.conversation_id
        )
    return snapshot
