"""What may be done with state, and in which order it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple, NoReturn

from casstore.errors import CorruptionError, InvalidInputError, StateRefusedError
from casstore.records.scoped.scope_keys import SCOPES, Context, key_of
from casstore.session.arguments import check_count, check_flag

_LISTS: Final = frozenset((tuple, list, set, frozenset))


class Reason(StrEnum):
    """Why state was refused. Of several reasons the first of these is told.

    >>> told = state.update(context, Policy(enabled=False), "actor", "language", "de")
    >>> told.reason == Reason.DISABLED
    True
    """

    # The gate of a run.
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
    """What one scope may hold. Bytes: of the keys and of the values' JSON, as UTF-8.

    >>> policy = Policy(quotas={"actor": Quota(max_keys=1)})
    >>> [state.update(context, policy, "actor", key, 1).ok for key in ("a", "b")]
    [True, False]
    """

    max_keys: int | None = None
    max_bytes: int | None = None


class Policy(NamedTuple):
    """What a binding allows.

    >>> policy = Policy(scopes=("actor",), quotas={"actor": Quota(max_keys=100)})
    >>> [state.update(context, policy, scope, "k", 1).ok for scope in ("actor", "conversation")]
    [True, False]
    """

    enabled: bool = True
    scopes: tuple[str, ...] = ("conversation", "actor")
    #: By scope.
    quotas: Mapping[str, Quota] = {}

    def plain(self) -> list[Any]:
        """The policy as a value that can be stored.

        >>> policy = Policy(scopes=("actor",), quotas={"actor": Quota(max_keys=100)})
        >>> Policy.from_plain(policy.plain()) == policy
        True
        """
        quotas = {scope: list(quota) for scope, quota in self.quotas.items()}
        return [self.enabled, list(self.scopes), quotas]

    @staticmethod
    def from_plain(told: Any) -> Policy:
        """The policy that ``plain`` has spelled.

        >>> stored = store.put_value(Policy(scopes=("actor",)).plain())
        >>> Policy.from_plain(store.get_value(stored)).scopes
        ('actor',)
        """
        try:
            enabled, scopes, quotas = told
            return Policy(enabled, tuple(scopes), {s: Quota(*q) for s, q in quotas.items()})
        except (TypeError, ValueError, AttributeError) as exc:
            raise CorruptionError("a policy is damaged") from exc


#: What is allowed if nothing else is said.
DEFAULT: Final = Policy()


class Outcome(NamedTuple):
    """Whether an update was made, and if not, why: for a person, and for a program.

    >>> told = state.update(context, Policy(), "actor", "language", "de")
    >>> told.ok, told.reason
    (True, None)
    """

    ok: bool
    message: str | None = None
    reason: Reason | None = None
    #: The version that the update has made.
    version: str | None = None


def check_policy(policy: Policy) -> None:
    """Refuse what is no policy: what is misspelled in one would allow, or bound, nothing."""
    if not isinstance(policy, Policy):
        raise InvalidInputError(f"a policy is a Policy, not {type(policy).__name__}")
    enabled, scopes, quotas = policy
    check_flag(enabled, "whether a policy enables state")
    if type(scopes) not in _LISTS or not all(scope in SCOPES for scope in scopes):
        raise InvalidInputError(
            f"the scopes of a policy are some of {', '.join(SCOPES)}, not {scopes!r:.80}"
        )
    if not isinstance(quotas, Mapping):
        raise InvalidInputError(f"the quotas of a policy are a dict, not {type(quotas).__name__}")
    for scope, quota in quotas.items():
        if scope not in SCOPES:
            raise InvalidInputError(f"a quota of the scope {scope!r}, which there is not")
        if not isinstance(quota, Quota):
            raise InvalidInputError(f"a quota is a Quota, not {type(quota).__name__}")
        for bound, what in zip(quota, ("keys", "bytes"), strict=True):
            if bound is not None:
                check_count(bound, f"a quota of {what}")


def refuse(reason: Reason, message: str) -> NoReturn:
    """Raise StateRefusedError."""
    raise StateRefusedError(reason, message)


def allowed_key(context: Context, policy: Policy, scope: str) -> str:
    """The key of a scope that may be used; StateRefusedError if not, the first reason told."""
    require_allowed(policy, scope)
    key = key_of(context, scope)
    if key is None:
        refuse_identity(scope)
    return key


def require_allowed(policy: Policy, scope: str) -> None:
    """StateRefusedError if the policy does not allow the scope."""
    if not policy.enabled:
        refuse(Reason.DISABLED, "the binding's policy does not enable state")
    if scope not in SCOPES:
        refuse(Reason.UNKNOWN_SCOPE, f"there is no scope {scope!r}; scopes: {', '.join(SCOPES)}")
    if scope not in policy.scopes:
        refuse(Reason.SCOPE_NOT_ENABLED, f"the binding's policy does not enable scope {scope!r}")


def refuse_identity(scope: str) -> NoReturn:
    """Refuse a scope that has no key here."""
    refuse(Reason.MISSING_IDENTITY, f"scope {scope!r} needs an identity that is not known here")
