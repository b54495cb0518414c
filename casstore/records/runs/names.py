"""Arguments of runs, checked: ids, paths, times and numbers; and values compared as stored."""

from __future__ import annotations

from typing import Any, Final

from casstore.engine.protocol import MAX_STAMP_MS
from casstore.errors import InvalidInputError
from casstore.format import splitting
from casstore.format.digest import Digest, name_piece
from casstore.records.schema import MAX_NUMBER
from casstore.session import keys
from casstore.session.arguments import check_count

_MAX_ID_BYTES: Final = 1024
_MAX_PART_BYTES: Final = 255


def check_id(text: Any, what: str) -> str:
    """The id, if it is a text of at most 1,024 bytes; else InvalidInputError."""
    encoded = keys.id_bytes(text, what)
    if len(encoded) > _MAX_ID_BYTES:
        raise InvalidInputError(
            f"{what} must have at most {_MAX_ID_BYTES} bytes, got {len(encoded)}"
        )
    return str(text)


def check_path(path: Any) -> str:
    """The path, if it is relative, canonical and stays below its root; else InvalidInputError.

    The store only uses it as a name, but callers write artifacts to disk under it.
    """
    check_id(path, "a path")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise InvalidInputError(
                f"path must be relative without empty, '.' or '..' parts, got {path!r}"
            )
        if len(part.encode()) > _MAX_PART_BYTES:
            raise InvalidInputError(
                f"each part of path must have at most {_MAX_PART_BYTES} bytes, got {part!r:.80}"
            )
    if "\\" in path or path[1:2] == ":" or any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise InvalidInputError(
            f"path must not have backslashes, drives or control characters, got {path!r}"
        )
    return str(path)


def check_time(at_ms: Any, now_ms: int) -> int:
    """The time that a caller has given, or now if it is None; InvalidInputError if not a time."""
    if at_ms is None:
        return now_ms
    if type(at_ms) is not int or not 0 <= at_ms <= MAX_STAMP_MS:
        raise InvalidInputError(
            f"at_ms must be a number of milliseconds since 1970, got {at_ms!r:.80}"
        )
    return at_ms


def check_number(number: Any, what: str) -> int:
    """The number, if a key can hold it; else InvalidInputError."""
    check_count(number, what, most=MAX_NUMBER)
    return int(number)


def value_digest(value: Any) -> Digest:
    """The digest that a value has when it is stored; stores nothing."""
    return Digest(splitting.split(value, name_piece))


def same_value(one: Any, other: Any) -> bool:
    """True if two values are stored alike; 1, 1.0 and True are not."""
    return value_digest(one) == value_digest(other)
