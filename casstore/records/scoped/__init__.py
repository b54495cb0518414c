"""Scoped state: what a host stores for its runners, by conversation, actor, subject and runner."""

from casstore.records.scoped.changes import Erased
from casstore.records.scoped.erasure import ActorErasure
from casstore.records.scoped.generations import Generation
from casstore.records.scoped.places import Located
from casstore.records.scoped.policy import (
    MAX_KEY_CHARACTERS,
    MAX_VALUE_BYTES,
    Quota,
    Reason,
    StatePolicy,
    UpdateOutcome,
)
from casstore.records.scoped.scope import KeyPage, Scope, ScopeUsage, StateEntry
from casstore.records.scoped.scope_keys import SCOPES, Context, binding_identity, scope_key
from casstore.records.scoped.states import RunState, ScopedState
from casstore.records.scoped.tables import RunGrant

__all__ = [
    "MAX_KEY_CHARACTERS",
    "MAX_VALUE_BYTES",
    "SCOPES",
    "ActorErasure",
    "Context",
    "Erased",
    "Generation",
    "KeyPage",
    "Located",
    "Quota",
    "Reason",
    "RunGrant",
    "RunState",
    "Scope",
    "ScopeUsage",
    "ScopedState",
    "StateEntry",
    "StatePolicy",
    "UpdateOutcome",
    "binding_identity",
    "scope_key",
]
