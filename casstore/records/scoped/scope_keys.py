"""Contexts, and the key that each scope has in a context.

A runner is a plugin or bot of the host program; a binding says where the host uses it.

    key = scope ‖ ":v2:" ‖ SHA-256 of JSON {version, scope, runner, binding, bot, workspace, …}

The JSON contains the scope's ids by name, so scopes that differ in one never share a key, whatever
the ids contain. A scope whose own id the context lacks has no key and cannot be used.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.session.arguments import check_kind, check_text

#: The scopes, in the order in which snapshots and messages list them.
SCOPES: Final = ("conversation", "actor", "subject", "runner")
#: The default type of an actor or subject.
ACTOR_TYPE: Final = "user"
SUBJECT_TYPE: Final = "unknown"
#: The binding identity of a runner without a binding.
UNKNOWN_BINDING: Final = "unknown_binding"
_VERSION: Final = 2
#: Permanent aliases of keys: both names refer to the same value.
ALIASES: Final = {"conversation_id": "external.conversation_id"}


class Context(NamedTuple):
    """The runner, binding, conversation, actor and subject of a call.

    An empty id counts as missing.

    >>> context = Context("helper", bot_id="bot", conversation_id="c1", actor_id="anna")
    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> ben = context._replace(actor_id="ben")
    >>> state.scope(ben, "actor").find("language") is None
    True
    """

    runner_id: str
    binding_identity: str = UNKNOWN_BINDING
    bot_id: str | None = None
    workspace_id: str | None = None
    conversation_id: str | None = None
    thread_id: str | None = None
    actor_id: str | None = None
    actor_type: str | None = None
    subject_id: str | None = None
    subject_type: str | None = None

    @property
    def actor(self) -> tuple[str, str] | None:
        """The type and id of the actor, or None if unknown.

        >>> Context("helper", actor_id="anna").actor
        ('user', 'anna')
        """
        return (self.actor_type or ACTOR_TYPE, self.actor_id) if self.actor_id else None

    @property
    def subject(self) -> tuple[str, str] | None:
        """The type and id of the subject, or None if unknown.

        >>> Context("helper", subject_id="7", subject_type="ticket").subject
        ('ticket', '7')
        """
        return (self.subject_type or SUBJECT_TYPE, self.subject_id) if self.subject_id else None


def binding_identity(
    binding_id: str | None = None, *, scope_type: str | None = None, scope_id: str | None = None
) -> str:
    """The identity of a binding in keys: its id, or else the scope that it is bound to.

    A type contains no colon, so two different scopes never have the same identity.

    >>> binding_identity("binding-1"), binding_identity(scope_type="bot", scope_id="b1")
    ('binding-1', 'bot:b1')
    """
    for value in (binding_id, scope_type, scope_id):
        if value is not None:
            check_text(value, "binding_id, scope_type or scope_id")
    if binding_id:
        return binding_id
    if not (scope_type and scope_id):
        return UNKNOWN_BINDING
    if ":" in scope_type:
        raise InvalidInputError(f"scope_type must not contain a colon, got {scope_type!r}")
    return f"{scope_type}:{scope_id}"


def checked(context: Context) -> Context:
    """Return the context; InvalidInputError if it is not a Context, or a field is not a str."""
    check_kind(context, "context", Context)
    for name, value in zip(Context._fields, context, strict=True):
        needed = name in ("runner_id", "binding_identity")
        if value is None and not needed:
            continue
        if type(value) is not str or (needed and not value):
            what = "a str that is not empty" if needed else "a str or None"
            raise InvalidInputError(f"{name} must be {what}, got {value!r}")
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise InvalidInputError(f"{name} {value!r} holds a lone surrogate") from exc
    return context


def scope_key(context: Context, scope: str) -> str | None:
    """The key of a scope; None if the context lacks the id that the scope needs.

    >>> scope_key(context, "actor") == state.scope(context, "actor").key
    True
    >>> scope_key(context, "subject") is None  # it says of nothing what it is about
    True
    """
    return key_of(checked(context), scope)


def key_of(context: Context, scope: str) -> str | None:
    """As ``scope_key``, for a checked context."""
    own: dict[str, str | None] = {}
    if scope == "conversation":
        if not context.conversation_id:
            return None
        own = {"conversation_id": context.conversation_id, "thread_id": context.thread_id}
    elif scope == "actor":
        if context.actor is None:
            return None
        own["actor_type"], own["actor_id"] = context.actor
    elif scope == "subject":
        if context.subject is None:
            return None
        own["subject_type"], own["subject_id"] = context.subject
    elif scope != "runner":
        raise InvalidInputError(f"no scope {scope!r}; there are {', '.join(SCOPES)}")
    dimensions = {
        "version": _VERSION,
        "scope": scope,
        "runner_id": context.runner_id,
        "binding_identity": context.binding_identity,
        "bot_id": context.bot_id,
        "workspace_id": context.workspace_id,
        **own,
    }
    return f"{scope}:v{_VERSION}:{_hash(dimensions)}"


def scope_keys(context: Context) -> dict[str, str]:
    """The keys of all scopes whose id the context has."""
    keys = {scope: key_of(context, scope) for scope in SCOPES}
    return {scope: key for scope, key in keys.items() if key is not None}


def conversation_key(
    workspace_id: str | None, bot_id: str | None, conversation_id: str | None
) -> str:
    """The key of a conversation across all threads, runners and bindings."""
    if not conversation_id:
        raise InvalidInputError("conversation_id must not be empty")
    place = Context("any", "any", bot_id, workspace_id, conversation_id)
    checked(place)
    return f"v1:{_hash([workspace_id, bot_id, conversation_id])}"


def real_key(key: str) -> str:
    """The stored key of a key or alias."""
    return ALIASES.get(key, key)


def _hash(dimensions: Any) -> str:
    encoded = json.dumps(dimensions, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(encoded.encode()).hexdigest()
