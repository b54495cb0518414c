"""Checks values and keys of scoped state: valid JSON within the size limits."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from casstore.records.json_values import storable
from casstore.records.scoped.policy import Reason, refuse
from casstore.records.scoped.scope_keys import real_key

#: The most bytes of a value's JSON, in UTF-8.
MAX_VALUE_BYTES: Final = 262_144
#: The most characters of a key.
MAX_KEY_CHARACTERS: Final = 255


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
