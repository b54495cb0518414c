"""Values and keys of state, checked: what JSON can say, and not too much of it."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from casstore.records.json_values import storable
from casstore.records.scoped.policy import Reason, refuse
from casstore.records.scoped.scope_keys import real_key

#: The UTF-8 of a value's JSON has at most so many bytes.
MAX_VALUE_BYTES: Final = 262_144
#: A key has at most so many characters.
MAX_KEY_CHARACTERS: Final = 255


class Content(NamedTuple):
    """A value of JSON: as it will be read, as it is stored, and how long its JSON is."""

    value: Any
    stored: Any
    size_bytes: int


def content_of(value: Any) -> Content:
    """A value as JSON has it: tuples are lists, keys are texts. StateRefusedError if it cannot."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        size_bytes = len(text.encode())
    except RecursionError:
        refuse(Reason.NOT_JSON, "the value is no JSON: it is nested too deeply")
    except (TypeError, ValueError) as exc:
        refuse(Reason.NOT_JSON, f"the value is no JSON: {exc}")
    if size_bytes > MAX_VALUE_BYTES:
        refuse(
            Reason.TOO_LARGE,
            f"the JSON of the value has {size_bytes} bytes, more than the {MAX_VALUE_BYTES} of "
            "scoped state: store it as a blob, and its digest here",
        )
    told = json.loads(text)
    return Content(told, storable(told), size_bytes)


def checked_key(key: Any) -> str:
    """The key as it is stored, an alias replaced; StateRefusedError if it cannot be one."""
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
