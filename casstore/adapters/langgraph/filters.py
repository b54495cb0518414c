"""Filters on the values of items, as LangGraph spells them.

A key of a filter is only ever looked up, and never part of a query.
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
# A filter nested deeper than stored values can be finds nothing.
_MAX_DEPTH: Final = 64


def matches(value: Any, wanted: Mapping[str, Any]) -> bool:
    """Has a value everything that a filter asks for?"""
    return isinstance(value, dict) and all(
        _meets(value.get(key), want, _MAX_DEPTH) for key, want in wanted.items()
    )


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
            f"filters compare with $eq, $ne, {', '.join(_ORDERED)}, not {name!r}"
        )
    try:
        # As LangGraph does: numbers, also such as are spelled as text.
        return _ORDERED[name](float(value), float(than))
    except (TypeError, ValueError):
        return False
