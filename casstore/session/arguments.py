"""Refusing arguments that callers get wrong, before anything is read or written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from casstore.engine.protocol import DURABILITIES, FULL
from casstore.errors import InvalidInputError


def is_durable(durability: str | None) -> bool | None:
    """Does a call with this durability wait for the disk? None: if the store was opened so."""
    if durability is None:
        return None
    if durability not in DURABILITIES:
        raise InvalidInputError(f"durability must be 'full' or 'relaxed', got {durability!r:.40}")
    return durability == FULL


def check_count(number: Any, what: str, *, least: int = 0) -> None:
    """Refuse what is not a whole number from ``least`` on."""
    if type(number) is not int or number < least:
        raise InvalidInputError(f"{what} is a whole number from {least} on, not {number!r}")


def check_text(text: Any, what: str) -> None:
    """Refuse what is not a text, or none that can be spelled as UTF-8."""
    if type(text) is not str:
        raise InvalidInputError(f"{what} is a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"{what} {text[:40]!r} holds a lone surrogate") from exc


def check_flag(flag: Any, what: str) -> None:
    """Refuse what is neither True nor False: a text that says no would mean yes."""
    if type(flag) is not bool:
        raise InvalidInputError(f"{what} is True or False, not {flag!r:.40}")


def check_callable(function: Any, what: str) -> None:
    """Refuse what cannot be called, before there is anything to call it about."""
    if not callable(function):
        raise InvalidInputError(f"{what} is a function, not {type(function).__name__}")


def check_seconds(seconds: Any, what: str) -> None:
    """Refuse what is not a number of seconds, however many; below 0 is none."""
    try:
        is_known = isinstance(seconds, int | float) and not math.isnan(seconds)
    except OverflowError:
        is_known = False
    if not is_known:
        raise InvalidInputError(f"{what} is a number of seconds, not {seconds!r:.40}")


def list_of(items: Iterable[Any], what: str) -> list[Any]:
    """The items as a list; a single text is refused, for its letters are not what was meant."""
    if isinstance(items, str | bytes | dict) or not isinstance(items, Iterable):
        raise InvalidInputError(
            f"{what} are a list, not {type(items).__name__}; one is a list of one"
        )
    return list(items)


def dict_of(mapping: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    """The mapping as a dict; None: an empty one."""
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise InvalidInputError(f"{what} is a dict, not {type(mapping).__name__}")
    return dict(mapping)
