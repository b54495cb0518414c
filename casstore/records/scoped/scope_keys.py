"""Whose state it is: the dimensions of a place, and the one key of each scope in it.

    key = scope ‖ ":v2:" ‖ SHA-256 of JSON {version, scope, runner, binding, bot, workspace, …}

Every dimension stands in the JSON under its name, so no two places share a key, whatever
their ids look like. A scope whose identity is not known has no key: it cannot be used, and is
never shared by those who lack one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.session.arguments import check_text

#: In the order in which they are told.
SCOPES: Final = ("conversation", "actor", "subject", "runner")
#: What an actor or subject is if its type is not said.
ACTOR_TYPE: Final = "user"
SUBJECT_TYPE: Final = "unknown"
#: The binding of those who have none.
UNKNOWN_BINDING: Final = "unknown_binding"
_VERSION: Final = 2
#: Other names of keys, for good: both lead to the same state.
ALIASES: Final = {"conversation_id": "external.conversation_id"}


class Context(NamedTuple):
    """Where something happens: which runner, bound how, in which conversation, by and about whom.

    An empty id is none.

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
        """The type and id of who acts; None if nobody is known to.

        >>> Context("helper", actor_id="anna").actor
        ('user', 'anna')
        """
        return (self.actor_type or ACTOR_TYPE, self.actor_id) if self.actor_id else None

    @property
    def subject(self) -> tuple[str, str] | None:
        """The type and id of what it is about; None if that is not known.

        >>> Context("helper", subject_id="7", subject_type="ticket").subject
        ('ticket', '7')
        """
        return (self.subject_type or SUBJECT_TYPE, self.subject_id) if self.subject_id else None


def binding_identity(
    binding_id: str | None = None, *, scope_type: str | None = None, scope_id: str | None = None
) -> str:
    """What a binding is called in keys: its id, else what it is bound to.

    Two things it could be bound to never have one name: a type has no colon.

    >>> binding_identity("binding-1"), binding_identity(scope_type="bot", scope_id="b1")
    ('binding-1', 'bot:b1')
    """
    for told in (binding_id, scope_type, scope_id):
        if told is not None:
            check_text(told, "what a binding is called, or bound to,")
    if binding_id:
        return binding_id
    if not (scope_type and scope_id):
        return UNKNOWN_BINDING
    if ":" in scope_type:
        raise InvalidInputError(f"the type of a binding has no colon, unlike {scope_type!r}")
    return f"{scope_type}:{scope_id}"


def checked(context: Context) -> Context:
    """The context itself; InvalidInputError if it is none, or a dimension of it is no text."""
    if not isinstance(context, Context):
        raise InvalidInputError(f"a context is a Context, not {type(context).__name__}")
    for name, told in zip(Context._fields, context, strict=True):
        needed = name in ("runner_id", "binding_identity")
        if told is None and not needed:
            continue
        if type(told) is not str or (needed and not told):
            raise InvalidInputError(f"{name} is a text, not {told!r}")
        try:
            told.encode()
        except UnicodeEncodeError as exc:
            raise InvalidInputError(f"{name} {told!r} holds a lone surrogate") from exc
    return context


def scope_key(context: Context, scope: str) -> str | None:
    """The key of a scope; None if the context lacks the identity that it needs.

    >>> scope_key(context, "actor") == state.scope(context, "actor").key
    True
    >>> scope_key(context, "subject") is None  # it says of nothing what it is about
    True
    """
    return key_of(checked(context), scope)


def key_of(context: Context, scope: str) -> str | None:
    """The same of a context that was checked."""
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
    """The keys of all scopes that the context has the identity for."""
    keys = {scope: key_of(context, scope) for scope in SCOPES}
    return {scope: key for scope, key in keys.items() if key is not None}


def conversation_key(
    workspace_id: str | None, bot_id: str | None, conversation_id: str | None
) -> str:
    """The name of a conversation as a whole: all threads, whoever runs and is bound in it."""
    if not conversation_id:
        raise InvalidInputError("a conversation has an id")
    place = Context("any", "any", bot_id, workspace_id, conversation_id)
    checked(place)
    return f"v1:{_hash([workspace_id, bot_id, conversation_id])}"


def real_key(key: str) -> str:
    """What a key is called in the store."""
    return ALIASES.get(key, key)


def _hash(dimensions: Any) -> str:
    spelled = json.dumps(dimensions, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(spelled.encode()).hexdigest()
