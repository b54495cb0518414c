"""Converts JSON values to storable values and back.

Most JSON values can be stored unchanged. JSON also allows numbers of any size, lone surrogates and
any nesting depth. A value with one of these is stored as its JSON text: a map of one key to bytes,
which cannot be confused with a JSON value because JSON has no bytes.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, Final

from casstore.errors import ExpansionError, InvalidValueError, LimitError
from casstore.format import splitting
from casstore.format.digest import name_piece
from casstore.format.limits import MAX_DEPTH

_TEXT: Final = "json"
# The value may be stored inside another value, so leave some depth for it.
_DEPTH: Final = MAX_DEPTH - 8


def loads(text: str | bytes) -> Any:
    """Parse JSON text; ValueError also for Python's extensions to JSON.

    The extensions are NaN and infinities, including numbers that Python reads as one, such as
    1e999.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def as_text(value: Any, *, python: bool = False) -> dict[str, bytes]:
    """The text form of a JSON value, always storable; InvalidValueError if it is not JSON.

    ``python`` accepts NaN and infinities, which Python's JSON has in addition to the standard.
    """
    try:
        return {_TEXT: json.dumps(value, allow_nan=python, separators=(",", ":")).encode()}
    except RecursionError as exc:
        raise LimitError("a value is nested too deeply") from exc
    except (TypeError, ValueError) as exc:
        raise InvalidValueError(f"not a value of JSON: {exc}") from exc


def storable(value: Any, *, python: bool = False) -> Any:
    """The value, or its text form if the value cannot be stored; ``python`` as for ``as_text``."""
    try:
        splitting.encode_split(value, _DEPTH, name_piece)
    except ExpansionError:
        # The value repeats shared parts too often; its JSON text would repeat them as well.
        raise
    except InvalidValueError:
        return as_text(value, python=python)
    # A value that looks like the text form would be decoded as one.
    return as_text(value, python=python) if _is_text(value) else value


def restored(value: Any) -> Any:
    """The value that was passed to ``storable`` or ``as_text``."""
    return json.loads(value[_TEXT]) if _is_text(value) else value


def _is_text(value: Any) -> bool:
    return type(value) is dict and len(value) == 1 and type(value.get(_TEXT)) is bytes


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number
