"""What power-loop keeps as Python's JSON, as a session log keeps it, and back.

Nearly everything is kept as it is. A log has no number above 64 bits, no NaN, no key that is no
text and not every depth: such a value is kept as its text (``json_values``), the arguments of a
call and the entries of a note's meta each by itself, for the log reads and adds others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from casstore.records.json_values import restored, storable


def kept(value: Any) -> Any:
    """A value as it is kept; InvalidValueError if it is none of JSON."""
    return storable(value, python=True)


def kept_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta of a note, to which the log adds."""
    told: dict[str, Any] = restored(kept(dict(meta)))
    return {name: kept(value) for name, value in told.items()}


def told_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The meta of any message as it was given: kept whole, or entry by entry."""
    return {name: restored(value) for name, value in restored(dict(meta)).items()}


def kept_calls(calls: Any) -> Any:
    """Tool calls, with what each of them says; what are none of these, for the log to refuse."""
    if not isinstance(calls, list | tuple) or not all(type(call) is dict for call in calls):
        return calls
    return [{name: kept(value) for name, value in call.items()} for call in calls]


def told_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls as they were given."""
    return [{name: restored(value) for name, value in call.items()} for call in calls]
