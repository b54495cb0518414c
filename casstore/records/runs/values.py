"""Values compared as they would be stored."""

from __future__ import annotations

from typing import Any

from casstore.format import splitting
from casstore.format.digest import Digest
from casstore.format.hashing import digest_of


def value_digest(value: Any) -> Digest:
    """The digest that a value has when it is stored; nothing is."""
    return Digest(splitting.split(value, lambda kind, data, children: digest_of(kind, data)))


def same_value(one: Any, other: Any) -> bool:
    """Are two values stored alike? 1, 1.0 and True are not."""
    return value_digest(one) == value_digest(other)
