"""What scoped state accepts: policies, values and keys; and the order of refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple, NoReturn

from casstore.errors import InvalidInputError, StateRefusedError
from casstore.records.json_values import storable
from casstore.records.scoped.scope_keys import SCOPES, Context, key_of, real_key
from casstore.session.arguments import check_count, check_flag, check_kind

#: The most bytes of a value's JSON, in UTF-8.
MAX_VALUE_BYTES: Final = 262_144
#: The most characters of a key.
MAX_KEY_CHARACTERS: Final = 255
_LISTS: Final = frozenset((tuple, list, set, frozenset))


class Reason(StrEnum):
    """Why state was refused. Of several reasons, the first in this order is reported.

    >>> outcome = state.update(context, StatePolicy(enabled=False), "actor", "language", "de")
    >>> outcome.reason == Reason.DISABLED
    True
    """

    # The run that the call is made through.
    NO_RUN_ID = "no_run_id"
    NO_SCOPE = "no_scope"
    NO_KEY = "no_key"
    RUN_NOT_ACTIVE = "run_not_active"
    NO_CALLER = "no_caller"
    WRONG_CALLER = "wrong_caller"
    NOT_CAPABLE = "not_capable"
    # The policy.
    DISABLED = "disabled"
    UNKNOWN_SCOPE = "unknown_scope"
    SCOPE_NOT_ENABLED = "scope_not_enabled"
    MISSING_IDENTITY = "missing_identity"
    # The value, then the key.
    NOT_JSON = "not_json"
    TOO_LARGE = "too_large"
    BAD_KEY = "bad_key"
    # The quota of the scope.
    TOO_MANY_KEYS = "too_many_keys"
    TOO_MANY_BYTES = "too_many_bytes"


class Quota(NamedTuple):
    """The limits of one scope. Bytes are those of the keys and of the values' JSON, in UTF-8.

    >>> policy = StatePolicy(quotas={"actor": Quota(max_keys=1)})
    >>> [state.update(context, policy, "actor", key, 1).ok for key in ("a", "b")]
    [True, False]
    """

    max_keys: int | None = None
    max_bytes: int | None = None


class StatePolicy(NamedTuple):
    """What a binding allows: whether state is enabled, which scopes, and their quotas.

    >>> policy = StatePolicy(scopes=("actor",), quotas={"actor": Quota(max_keys=100)})
    >>> [state.update(context, policy, scope, "k", 1).ok for scope in ("actor", "conversation")]
    [True, False]
    """

    enabled: bool = True
    scopes: tuple[str, ...] = ("conversation", "actor")
    #: By scope.
    quotas: Mapping[str, Quota] = {}


#: The policy that applies by default.
DEFAULT: Final = StatePolicy()


class UpdateOutcome(NamedTuple):
    """The result of an update, with a message for people and a reason for programs.

    >>> outcome = state.update(context, StatePolicy(), "actor", "language", "de")
    >>> outcome.ok, outcome.reason
    (True, None)
    """

    ok: bool
    message: str | None = None
    reason: Reason | None = None
    #: The version that the update created.
    version: str | None = None


def check_policy(policy: StatePolicy) -> None:
    """Refuse an invalid policy: a mistyped scope would allow, or limit, nothing."""
    check_kind(policy, "policy", StatePolicy)
    enabled, scopes, quotas = policy
    check_flag(enabled, "enabled of a policy")
    if type(scopes) not in _LISTS or not all(scope in SCOPES for scope in scopes):
        raise InvalidInputError(
            f"scopes of a policy must be among {', '.join(SCOPES)}, got {scopes!r:.80}"
        )
    if not isinstance(quotas, Mapping):
        raise InvalidInputError(f"quotas of a policy must be a dict, got {type(quotas).__name__}")
    for scope, quota in quotas.items():
        if scope not in SCOPES:
            raise InvalidInputError(
                f"quotas has the unknown scope {scope!r}; the scopes are {', '.join(SCOPES)}"
            )
        check_kind(quota, "a quota", Quota)
        for bound, what in zip(quota, ("keys", "bytes"), strict=True):
            if bound is not None:
                check_count(bound, f"a quota of {what}")


def refuse(reason: Reason, message: str) -> NoReturn:
    """Raise StateRefusedError."""
    raise StateRefusedError(reason, message)


def allowed_key(context: Context, policy: StatePolicy, scope: str) -> str:
    """The key of an allowed scope; else StateRefusedError with the first reason."""
    require_allowed(policy, scope)
    key = key_of(context, scope)
    if key is None:
        refuse_identity(scope)
    return key


def require_allowed(policy: StatePolicy, scope: str) -> None:
    """StateRefusedError if the policy does not allow the scope."""
    if not policy.enabled:
        refuse(Reason.DISABLED, "the binding's policy does not enable state")
    if scope not in SCOPES:
        refuse(Reason.UNKNOWN_SCOPE, f"there is no scope {scope!r}; scopes: {', '.join(SCOPES)}")
    if scope not in policy.scopes:
        refuse(Reason.SCOPE_NOT_ENABLED, f"the binding's policy does not enable scope {scope!r}")


def refuse_identity(scope: str) -> NoReturn:
    """Refuse a scope whose identity the context does not have."""
    refuse(Reason.MISSING_IDENTITY, f"scope {scope!r} needs {scope}_id, which the context lacks")


# --- values and keys ------------------------------------------------------------------------------


class Content(NamedTuple):
    """A JSON value as it is read, as it is stored, and the length of its JSON."""

    value: Any
    stored: Any
    size_bytes: int


def content_of(value: Any) -> Content:
    """The value as JSON: tuples become lists, keys text. StateRefusedError if it is not JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        size_bytes = len(text.encode())
    except RecursionError:
        refuse(Reason.NOT_JSON, "the value is not JSON: it is nested too deeply")
    except (TypeError, ValueError) as exc:
        refuse(Reason.NOT_JSON, f"the value is not JSON: {exc}")
    if size_bytes > MAX_VALUE_BYTES:
        refuse(
            Reason.TOO_LARGE,
            f"the JSON of the value has {size_bytes} bytes, more than the {MAX_VALUE_BYTES} of "
            "scoped state: store it as a blob, and its digest here",
        )
    plain = json.loads(text)
    return Content(plain, storable(plain), size_bytes)


def checked_key(key: Any) -> str:
    """The stored key, with an alias replaced; StateRefusedError if it is invalid."""
    if type(key) is not str or not 0 < len(key) <= MAX_KEY_CHARACTERS:
        refuse(
            Reason.BAD_KEY,
            f"a key of state is a text of 1 to {MAX_KEY_CHARACTERS} characters, "
            f"not {str(key)[:40]!r}",
        )
    try:
        key.encode()
    except UnicodeEncodeError:
        refuse(Reason.BAD_KEY, f"the key {key[:40]!r} holds a lone surrogate")
    return real_key(key)
