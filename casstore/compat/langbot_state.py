"""LangBot's ``PersistentStateStore`` on a store, with the same async calls.

Events, bindings and descriptors are LangBot's own, or objects with the same attributes. Checks are
in the same order as in LangBot, with messages of casstore. Differences: prefixes are literal, NaN
is refused, and an unreadable value raises an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from casstore.errors import InvalidInputError, StateRefusedError
from casstore.records.scoped import (
    Context,
    Located,
    Quota,
    Scope,
    ScopedState,
    StatePolicy,
    binding_identity,
)
from casstore.records.scoped.scope_keys import SCOPES, conversation_key
from casstore.records.scoped.tables import ScopedTables, Spot
from casstore.store import Store

_Outcome = tuple[bool, str | None]


class PersistentStateStore:
    """State of runners, for LangBot's host and its State API.

    >>> states = PersistentStateStore(store)
    >>> where = ("actor:helper:anna", "language")
    >>> asyncio.run(states.state_set(*where, "de", "helper", "binding-1", "actor"))
    (True, None)
    >>> asyncio.run(states.state_get(*where))
    'de'
    """

    def __init__(self, store: Store) -> None:
        self._tables = ScopedTables(store)
        self._states = ScopedState(store)

    # --- by event and binding ---------------------------------------------------------------

    async def build_snapshot_from_event(
        self, event: Any, binding: Any, descriptor: Any
    ) -> dict[str, dict[str, Any]]:
        """The values of all four scopes, from one snapshot."""
        context, policy = context_of(event, binding, descriptor), _policy(binding)
        return await asyncio.to_thread(self._states.snapshot, context, policy)

    async def apply_update_from_event(
        self,
        event: Any,
        binding: Any,
        descriptor: Any,
        scope: str,
        key: str,
        value: Any,
        logger: Any = None,
    ) -> _Outcome:
        """Set a value; (True, None), or (False, the reason)."""
        context, policy = context_of(event, binding, descriptor), _policy(binding)
        outcome = await asyncio.to_thread(self._states.update, context, policy, scope, key, value)
        return outcome.ok, outcome.message

    # --- by the key of a scope ----------------------------------------------------------------

    async def state_get(self, scope_key: str, state_key: str) -> Any:
        """A value; None if it does not exist or is null."""

        def get() -> Any:
            scope = self._known(scope_key)
            entry = None if scope is None else scope.find(state_key)
            return None if entry is None else entry.value

        return await asyncio.to_thread(get)

    async def state_set(
        self,
        scope_key: str,
        state_key: str,
        value: Any,
        runner_id: str,
        binding_identity: str,
        scope: str,
        context: Mapping[str, Any] | None = None,
        logger: Any = None,
    ) -> _Outcome:
        """Set a value in the scope that ``scope_key`` names; (True, None), or (False, why not)."""
        fields = context or {}
        place = Context(
            runner_id,
            binding_identity,
            *[fields.get(name) for name in Context._fields[2:]],
        )

        def put() -> _Outcome:
            try:
                self._scope(scope, scope_key, place).put(state_key, value)
            except StateRefusedError as refused:
                return False, str(refused)
            return True, None

        return await asyncio.to_thread(put)

    async def state_delete(self, scope_key: str, state_key: str) -> bool:
        """Delete a value; True if it existed."""

        def delete() -> bool:
            scope = self._known(scope_key)
            return scope is not None and scope.delete(state_key)

        return await asyncio.to_thread(delete)

    async def state_list(
        self, scope_key: str, prefix: str | None = None, limit: int = 100
    ) -> tuple[list[str], bool]:
        """At most ``limit`` keys in order, never more than 100, and whether there are more."""

        def list_keys() -> tuple[list[str], bool]:
            scope = self._known(scope_key)
            if scope is None:
                return [], False
            page = scope.list_keys(prefix or "", limit=limit)
            return page.keys, page.has_more

        return await asyncio.to_thread(list_keys)

    # --- by runner, binding, bot or workspace, which are columns of LangBot's table -------------

    async def list_state(
        self,
        *,
        runner_id: str | None = None,
        binding_identity: str | None = None,
        bot_id: str | None = None,
        workspace_id: str | None = None,
    ) -> list[Located]:
        """The values of a runner, a binding, a bot or a workspace."""
        return await asyncio.to_thread(
            lambda: list(
                self._states.list_state(
                    runner_id=runner_id,
                    binding_identity=binding_identity,
                    bot_id=bot_id,
                    workspace_id=workspace_id,
                )
            )
        )

    async def delete_state(
        self,
        *,
        runner_id: str | None = None,
        binding_identity: str | None = None,
        bot_id: str | None = None,
        workspace_id: str | None = None,
    ) -> int:
        """Delete the values of a runner, a binding, a bot or a workspace; returns how many."""
        erased = await asyncio.to_thread(
            self._states.delete_state,
            runner_id=runner_id,
            binding_identity=binding_identity,
            bot_id=bot_id,
            workspace_id=workspace_id,
        )
        return erased.values

    # --- resets -------------------------------------------------------------------------------

    async def reset_runner_context(
        self, workspace: str | None, bot: str | None, conversation: str
    ) -> str:
        """Reset a conversation; returns the id of the new generation."""
        made = await asyncio.to_thread(
            self._states.reset,
            workspace_id=workspace,
            bot_id=bot,
            conversation_id=conversation,
        )
        return made.id

    async def get_reset_generation(
        self, workspace: str | None, bot: str | None, conversation: str
    ) -> str | None:
        """The id of the latest generation; None if the conversation was never reset."""
        latest = await asyncio.to_thread(
            self._states.generation,
            workspace_id=workspace,
            bot_id=bot,
            conversation_id=conversation,
        )
        return None if latest is None else latest.id

    # --- scopes -------------------------------------------------------------------------------

    def _known(self, key: str) -> Scope | None:
        """The scope with this key; None if it never had a value and was never reset."""
        record = next(iter(self._tables.scopes.scan(key, page=1)), None)
        if record is None:
            return None
        spot = Spot(key.partition(":")[0], key, self._tables.scopes.decode(record).conversation)
        return Scope(self._tables, spot, Context("unknown"), Quota(), None)

    def _scope(self, scope: str, key: str, context: Context) -> Scope:
        if scope not in SCOPES:
            raise InvalidInputError(f"unknown scope {scope!r}; the scopes are {', '.join(SCOPES)}")
        conversation = None
        if scope == "conversation":
            place = (context.workspace_id, context.bot_id, context.conversation_id)
            conversation = conversation_key(*place)
        return Scope(self._tables, Spot(scope, key, conversation), context, Quota(), None)


def context_of(event: Any, binding: Any, descriptor: Any) -> Context:
    """The context of a LangBot event."""
    bound = binding.scope
    return Context(
        runner_id=descriptor.id,
        binding_identity=binding_identity(
            binding.binding_id, scope_type=bound.scope_type, scope_id=bound.scope_id
        ),
        bot_id=event.bot_id,
        workspace_id=event.workspace_id,
        conversation_id=event.conversation_id,
        thread_id=event.thread_id,
        actor_id=event.actor.actor_id if event.actor else None,
        actor_type=event.actor.actor_type if event.actor else None,
        subject_id=event.subject.subject_id if event.subject else None,
        subject_type=event.subject.subject_type if event.subject else None,
    )


def _policy(binding: Any) -> StatePolicy:
    policy = binding.state_policy
    # Truthy as in LangBot; scopes that are not listed allow nothing.
    scopes = tuple([scope for scope in policy.state_scopes if scope in SCOPES])
    return StatePolicy(bool(policy.enable_state), scopes)
