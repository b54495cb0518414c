"""Plans as plain data for JSON: named tuples become their fields, and are read back by their types.

``read_plain`` accepts only what ``plain`` returns for that type, because a plan says what to remove
and may come from any file.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from casstore.format.digest import Digest
from casstore.maintenance.policy import Policy, policy_fields, policy_from


def plain(value: Any) -> Any:
    """A value of a plan as dicts, lists, texts and numbers.

    >>> plain((Policy(last=2), None, Digest.of_blob(b"")))
    [{'last': 2}, None, 'af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262']
    """
    if isinstance(value, Policy):
        return policy_fields(value)
    if isinstance(value, Digest):
        return value.hex()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return plain(dict(zip(value._fields, value, strict=True)))
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return value


def read_plain(kind: Any, value: Any) -> Any:
    """The value of a type that ``plain`` was given; TypeError, KeyError or ValueError if it is not.

    >>> read_plain(tuple[Policy, ...], [{"last": 2}])[0].last
    2
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Policy:
        return policy_from(value)
    if kind is Digest:
        return Digest.from_hex(value)
    if origin is UnionType:
        return None if value is None else read_plain(parts[0], value)
    if origin is tuple:
        _require(list, value)
        if parts[-1] is Ellipsis:
            return tuple([read_plain(parts[0], one) for one in value])
        return tuple([read_plain(part, one) for part, one in zip(parts, value, strict=True)])
    if origin is dict:
        _require(dict, value)
        return {name: read_plain(parts[1], one) for name, one in value.items()}
    if hasattr(kind, "_fields"):
        _require(dict, value)
        types = _types_of(kind)
        return kind(**{name: read_plain(types[name], one) for name, one in value.items()})
    _require(kind, value)
    return value


@cache
def _types_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _require(kind: type, value: Any) -> None:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
