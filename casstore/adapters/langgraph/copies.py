"""Copies and compares messages, which is faster than serialising and loading them.

A copy shares only immutable objects with its original. Two objects count as the same only if their
serialised bytes are equal: 1 is not True, 0.0 is not -0.0, and the order of keys counts. Only
messages made of plain data are copied; all others are serialised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_TYPES

_ATOMS: Final = frozenset((str, int, bool, bytes, type(None), float))
_CONTAINERS: Final = frozenset((dict, list))
# The nesting limit: deeper values are serialised instead.
_MAX_DEPTH: Final = 32
_set: Final = object.__setattr__


class _Shape(NamedTuple):
    """Properties shared by all messages of one class."""

    kind: Any
    names: list[str]
    types: list[type]
    #: Fields that a copy needs its own object for. For these, == is not enough to show that they
    #: have the same serialised form.
    containers: list[str]


# Shared by many messages, to keep few objects in memory.
@lru_cache(maxsize=256)
def _shape(kind: Any, names: tuple[str, ...], types: tuple[type, ...]) -> _Shape:
    containers = [name for name, each in zip(names, types, strict=True) if each in _CONTAINERS]
    return _Shape(kind, [*names], [*types], containers)


class Original:
    """A cached message to copy from and compare with; callers only get copies."""

    __slots__ = ("extra", "fields", "given", "shape")

    def __init__(self, message: Any) -> None:
        self.fields: dict[str, Any] = message.__dict__
        self.extra = message.__pydantic_extra__
        self.given: set[str] = message.__pydantic_fields_set__
        kind: Any = type(message)
        types = tuple(map(type, self.fields.values()))
        self.shape = _shape(kind, tuple(self.fields), types)

    def copy(self) -> Any:
        """A new copy of this message."""
        kind, _, _, containers = self.shape
        fields = self.fields.copy()
        for name in containers:
            value = fields[name]
            # Most of these fields are empty.
            fields[name] = _copy_plain(value) if value else type(value)()
        # The same steps as pydantic's own copy, with objects that are not shared.
        new = kind.__new__(kind)
        _set(new, "__dict__", fields)
        _set(new, "__pydantic_extra__", _copy_plain(self.extra))
        _set(new, "__pydantic_fields_set__", self.given.copy())
        _set(new, "__pydantic_private__", None)
        return new

    def is_same_inside(self, other: Any) -> bool:
        """Whether the other object, whose fields are all equal, has the same serialised form."""
        fields = other.__dict__
        for name in self.shape.containers:
            if fields[name] and not _is_same_plain(fields[name], self.fields[name]):
                return False
        extra = other.__pydantic_extra__
        return other.__pydantic_private__ is None and (
            (not extra and not self.extra) or _is_same_plain(extra, self.extra)
        )


def originals(objects: Sequence[Any]) -> list[Original] | None:
    """Objects to cache, which the caller must not share; None if one cannot be copied."""
    return [Original(one) for one in objects] if all(map(_is_copyable, objects)) else None


def begins_with(objects: Sequence[Any], kept: Sequence[Original]) -> bool:
    """Whether the first of these objects are the same as the cached ones."""
    if len(objects) < len(kept):
        return False
    try:
        return all(map(_is_same, objects, kept))
    except Exception:
        # An object of the application, perhaps an array, that cannot be compared as a bool. Cached
        # values are plain data, so it differs.
        return False


def _is_same(one: Any, original: Original) -> bool:
    kind, names, types, _ = original.shape
    # A fast comparison in C; equal values that are serialised differently are compared below.
    return (
        type(one) is kind
        and (fields := one.__dict__) == original.fields
        and [*fields] == names
        and [*map(type, fields.values())] == types
        and original.is_same_inside(one)
    )


def _is_copyable(one: Any) -> bool:
    """Whether it is a message of a type that LangGraph lists as safe, made only of plain data."""
    kind = type(one)
    return (
        issubclass(kind, BaseMessage)
        and (kind.__module__, kind.__name__) in SAFE_MSGPACK_TYPES
        and one.__pydantic_private__ is None
        # Floats that are fields themselves would need an exact comparison.
        and float not in map(type, one.__dict__.values())
        and _is_plain(one.__dict__, _MAX_DEPTH)
        and _is_plain(one.__pydantic_extra__, _MAX_DEPTH)
    )


def _copy_plain(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {name: _copy_plain(each) for name, each in value.items()}
    if kind is list:
        return [_copy_plain(each) for each in value]
    return value


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in _ATOMS:
        return True
    if not depth or kind not in _CONTAINERS:
        return False
    if kind is dict and not all(type(name) is str for name in value):
        return False
    return all(_is_plain(each, depth - 1) for each in (value.values() if kind is dict else value))


def _is_same_plain(value: Any, other: Any) -> bool:
    kind = type(value)
    if kind is not type(other):
        return False
    if kind is dict:
        return [*value] == [*other] and all(map(_is_same_plain, value.values(), other.values()))
    if kind is list:
        return len(value) == len(other) and all(map(_is_same_plain, value, other))
    if kind is float:
        # NaN is never the same, and 0.0 differs from -0.0.
        return bool(value == other) and repr(value) == repr(other)
    return kind in _ATOMS and bool(value == other)
