"""Values that came as JSON into values that can be stored, and back.

Nearly all of them can be stored as they are. JSON also has numbers of any size, halves of
surrogate pairs and any depth; a value with such a thing is kept as its text, as a map of one
key to bytes, which JSON itself never has.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, Final

from casstore.errors import ExpansionError, InvalidValueError, LimitError
from casstore.format import splitting
from casstore.format.hashing import digest_of
from casstore.format.limits import MAX_DEPTH

_TEXT: Final = "json"
# What holds such a value may itself be inside of something.
_DEPTH: Final = MAX_DEPTH - 8


def loads(text: str | bytes) -> Any:
    """The value of a text in JSON; ValueError also for what only Python's JSON has.

    That is NaN, and infinities, however they are spelled: Python reads 1e999 as one.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def as_text(value: Any, *, python: bool = False) -> dict[str, bytes]:
    """A value of JSON in the form that can always be stored; InvalidValueError if it is none.

    ``python``: what Python's own JSON says beyond the standard, NaN and infinities, counts too.
    """
    try:
        return {_TEXT: json.dumps(value, allow_nan=python, separators=(",", ":")).encode()}
    except RecursionError as exc:
        raise LimitError("a value is nested too deeply") from exc
    except (TypeError, ValueError) as exc:
        raise InvalidValueError(f"not a value of JSON: {exc}") from exc


def storable(value: Any, *, python: bool = False) -> Any:
    """The value, or its text if it cannot be stored as it is; ``python`` as for ``as_text``."""
    try:
        splitting.spell(value, _DEPTH, lambda kind, data, children: digest_of(kind, data))
    except ExpansionError:
        # Its text would be as large.
        raise
    except InvalidValueError:
        return as_text(value, python=python)
    # What looks like a text would be read as one.
    return as_text(value, python=python) if _is_text(value) else value


def restored(value: Any) -> Any:
    """What ``storable`` or ``as_text`` was given."""
    return json.loads(value[_TEXT]) if _is_text(value) else value


def _is_text(value: Any) -> bool:
    return type(value) is dict and len(value) == 1 and type(value.get(_TEXT)) is bytes


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number
