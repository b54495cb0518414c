"""Filters on the values of items, in LangGraph's syntax.

The key of a filter is only looked up in the value; it is never part of a query.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from casstore.errors import InvalidInputError

_ORDERED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
# The nesting limit of stored values; a deeper filter could match nothing and is refused.
_MAX_DEPTH: Final = 64


def matches(value: Any, wanted: Mapping[str, Any]) -> bool:
    """Whether a value matches a filter."""
    return isinstance(value, dict) and all(
        _meets(_looked_up(value, key), want, _MAX_DEPTH) for key, want in wanted.items()
    )


def _looked_up(value: dict[str, Any], key: str) -> Any:
    """The field of a key; as in SqliteStore, ``user.name`` may be a field of a field."""
    if key in value or "." not in str(key):
        return value.get(key)
    found: Any = value
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _meets(value: Any, want: Any, room: int) -> bool:
    if not room:
        raise InvalidInputError("a filter is nested too deep")
    if isinstance(want, dict):
        if any(isinstance(key, str) and key.startswith("$") for key in want):
            return all(_compares(value, name, than) for name, than in want.items())
        return isinstance(value, dict) and all(
            _meets(value.get(key), each, room - 1) for key, each in want.items()
        )
    if isinstance(want, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(want)
            and all(
                _meets(mine, theirs, room - 1) for mine, theirs in zip(value, want, strict=True)
            )
        )
    return bool(value == want)


def _compares(value: Any, name: str, than: Any) -> bool:
    if name == "$eq":
        return bool(value == than)
    if name == "$ne":
        return bool(value != than)
    if name not in _ORDERED:
        raise InvalidInputError(
            f"a filter operator must be $eq, $ne, {', '.join(_ORDERED)}, got {name!r}"
        )
    compare = _ORDERED[name]
    try:
        # As LangGraph does: compare numbers, including numbers in text form.
        return compare(float(value), float(than))
    except (TypeError, ValueError):
        # As its stores in databases do: compare other texts, such as dates, by their characters.
        return type(value) is type(than) is str and compare(value, than)
