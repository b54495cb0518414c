"""Checks of arguments, one for each type, before anything is read or written.

Each raises InvalidInputError that names the parameter, what is allowed and the value:
``ttl_s must be a positive number, got -1``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from casstore.engine.protocol import DURABILITIES, FULL, MAX_STAMP_MS
from casstore.errors import InvalidInputError


def invalid(name: str, allowed: str, value: Any) -> InvalidInputError:
    """The error for an invalid argument."""
    return InvalidInputError(f"{name} must be {allowed}, got {value!r:.60}")


def is_durable(durability: str | None) -> bool | None:
    """True if a call with this durability waits for the disk; None: as the store was opened.

    InvalidInputError if it is not a durability.
    """
    if durability is None:
        return None
    check_choice(durability, "durability", DURABILITIES)
    return durability == FULL


def check_choice(value: Any, name: str, allowed: Sequence[str]) -> None:
    """Require one of the ``allowed`` texts."""
    if type(value) is not str or value not in allowed:
        raise invalid(name, " or ".join(map(repr, allowed)), value)


def check_kind(value: Any, name: str, kind: type) -> None:
    """Require an instance of a class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
        raise invalid(name, f"{article} {kind.__name__}", value)


def check_count(number: Any, name: str, *, least: int = 0, most: int | None = None) -> None:
    """Require a whole number."""
    if type(number) is not int or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise invalid(name, f"a whole number {limits}", number)


def check_ms(time_ms: Any, name: str, *, least: int = 0) -> None:
    """Require a duration in milliseconds that an engine can add to its clock."""
    check_count(time_ms, name, least=least, most=MAX_STAMP_MS)


def check_text(text: Any, name: str) -> None:
    """Require a str that can be encoded as UTF-8."""
    if type(text) is not str:
        raise invalid(name, "a str", text)
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise invalid(name, "a str without lone surrogates", text) from exc


def check_flag(flag: Any, name: str) -> None:
    """Require a bool: the text "no" would count as true."""
    if type(flag) is not bool:
        raise invalid(name, "a bool", flag)


def check_callable(function: Any, name: str) -> None:
    """Require something that can be called."""
    if not callable(function):
        raise invalid(name, "a function", function)


def check_seconds(seconds: Any, name: str) -> None:
    """Require a number of seconds. Below 0 counts as 0, and it may be infinite."""
    if not _is_number(seconds):
        raise invalid(name, "a number of seconds", seconds)


def check_positive(number: Any, name: str, *, most: float = math.inf) -> None:
    """Require a finite number above 0."""
    if not _is_number(number) or not 0 < number < math.inf or number > most:
        raise invalid(name, "a positive number", number)


def _is_number(number: Any) -> bool:
    try:
        return (
            isinstance(number, int | float)
            and not isinstance(number, bool)
            and not math.isnan(number)
        )
    except OverflowError:
        return False


def list_of(items: Iterable[Any], name: str) -> list[Any]:
    """The items as a list. A single str is refused: it would be a list of its characters."""
    if isinstance(items, str | bytes | dict) or not isinstance(items, Iterable):
        raise invalid(name, "a list", items)
    return list(items)


def dict_of(mapping: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """The mapping as a dict; None: an empty one."""
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise invalid(name, "a dict", mapping)
    return dict(mapping)
