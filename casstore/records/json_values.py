"""Values that came as JSON into values that can be stored, and back.

Nearly all of them can be stored as they are. JSON also has numbers of any size, halves of
surrogate pairs and any depth; a value with such a thing is kept as its text, as a map of one
key to bytes, which JSON itself never has.
"""

from __future__ import annotations

import json
from typing import Any, Final

from casstore.errors import InvalidValueError, LimitError
from casstore.format import splitting
from casstore.format.hashing import DIGEST_BYTES
from casstore.format.limits import MAX_DEPTH

_TEXT: Final = "json"
# What holds such a value may itself be inside of something.
_DEPTH: Final = MAX_DEPTH - 8


def as_text(value: Any) -> dict[str, bytes]:
    """A value of JSON in the form that can always be stored; InvalidValueError if it is none."""
    try:
        return {_TEXT: json.dumps(value, allow_nan=False, separators=(",", ":")).encode()}
    except RecursionError as exc:
        raise LimitError("a value is nested too deeply") from exc
    except (TypeError, ValueError) as exc:
        raise InvalidValueError(f"not a value of JSON: {exc}") from exc


def storable(value: Any) -> Any:
    """The value, or its text if it cannot be stored as it is."""
    try:
        splitting.spell(value, _DEPTH, _nowhere)
    except InvalidValueError:
        return as_text(value)
    return value


def restored(value: Any) -> Any:
    """What ``storable`` or ``as_text`` was given."""
    if type(value) is dict and len(value) == 1 and type(value.get(_TEXT)) is bytes:
        return json.loads(value[_TEXT])
    return value


def _nowhere(kind: int, data: bytes, children: list[bytes]) -> bytes:
    return bytes(DIGEST_BYTES)
