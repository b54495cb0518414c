"""Names of threads, runs and artifacts: what may be one, and numbers that sort as texts."""

from __future__ import annotations

from typing import Any, Final

from casstore.engine.protocol import MAX_STAMP_MS
from casstore.errors import InvalidInputError
from casstore.session import keys

_MAX_ID_BYTES: Final = 1024
_MAX_PART_BYTES: Final = 255
# As many digits as 2**63 has.
_DIGITS: Final = 19
MAX_NUMBER: Final = (1 << 63) - 1


def check_id(text: Any, what: str) -> str:
    """A text that can name something, or InvalidInputError."""
    spelled = keys.id_bytes(text, what)
    if len(spelled) > _MAX_ID_BYTES:
        raise InvalidInputError(f"{what} has at most {_MAX_ID_BYTES} bytes, not {len(spelled)}")
    return str(text)


def check_path(path: Any) -> str:
    """A relative path that leads nowhere but down, with one spelling; else InvalidInputError.

    It names something in a store. But somebody will write it to a disk one day.
    """
    check_id(path, "a path")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise InvalidInputError(
                f"a path is relative and has no empty, '.' or '..' parts, unlike {path!r}"
            )
        if len(part.encode()) > _MAX_PART_BYTES:
            raise InvalidInputError(f"a part of a path has at most {_MAX_PART_BYTES} bytes")
    if "\\" in path or path[1:2] == ":" or any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise InvalidInputError(
            f"a path has no backslashes, drives or control characters, unlike {path!r}"
        )
    return str(path)


def check_time(at_ms: Any, now_ms: int) -> int:
    """A time that a caller has given, or now if it is None; InvalidInputError if it is none."""
    if at_ms is None:
        return now_ms
    if type(at_ms) is not int or not 0 <= at_ms <= MAX_STAMP_MS:
        raise InvalidInputError(
            f"at_ms must be a number of milliseconds since 1970, not {at_ms!r:.80}"
        )
    return at_ms


def number_text(number: int) -> str:
    """A number from 0 on as a text; texts are in order as the numbers are."""
    return f"{number:0{_DIGITS}d}"


def check_number(number: Any, what: str) -> int:
    """A number that has a text, or InvalidInputError."""
    if type(number) is not int or not 0 <= number <= MAX_NUMBER:
        raise InvalidInputError(f"{what} is a number from 0 on, not {number!r}")
    return number
