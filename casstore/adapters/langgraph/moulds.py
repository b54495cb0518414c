"""Messages that were built before, by the bytes they were built from.

LangGraph reads a conversation whole at the start of each turn, and building a message runs
all of its validators. From the same bytes the same message comes out; so the second time a
message is filled with what the first one held. Nobody gets hold of a mould: whatever could
be changed in a message is made anew each time.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from langchain_core.messages import BaseMessage

# What of it moulds may hold, about: their keys are the bytes of messages.
_MAX_BYTES: Final = 8 << 20
# Nothing deeper than this is copied; such messages are built each time.
_MAX_DEPTH: Final = 8
_FIXED: Final = frozenset((str, int, float, bool, bytes, type(None)))
_set: Final = object.__setattr__


class Mould(NamedTuple):
    """What a message held when it was built."""

    cls: type[BaseMessage]
    #: Its fields; of those that can be changed, the originals.
    fields: dict[str, Any]
    #: The names of these. Most are empty, and need no copying.
    empty_dicts: tuple[str, ...]
    empty_lists: tuple[str, ...]
    filled: tuple[str, ...]
    fields_set: frozenset[str]
    has_extra: bool


class Moulds:
    """Moulds of the messages built last, up to a number of bytes."""

    __slots__ = ("_max_bytes", "_moulds", "size_bytes")

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._moulds: dict[bytes, Mould] = {}
        #: The bytes of all keys.
        self.size_bytes = 0

    def fill(self, data: bytes) -> BaseMessage | None:
        """A new message like the one that these bytes gave before; None: there was none."""
        mould = self._moulds.get(data)
        return None if mould is None else _filled(mould)

    def keep(self, data: bytes, made: Any) -> None:
        """Take a mould of what was just built of these bytes, if it is simple enough."""
        mould = _mould_of(made) if len(data) <= self._max_bytes else None
        if mould is None:
            return
        # Threads may race here; then a little more or less is kept.
        if self.size_bytes + len(data) > self._max_bytes:
            self._moulds, self.size_bytes = {}, 0
        self._moulds[data] = mould
        self.size_bytes += len(data)


def _mould_of(made: Any) -> Mould | None:
    if not isinstance(made, BaseMessage) or made.__pydantic_private__ is not None:
        return None
    fields: dict[str, Any] = {}
    changeable: dict[str, Any] = {}
    for name, value in made.__dict__.items():
        if type(value) not in _FIXED:
            if not _is_plain(value, _MAX_DEPTH):
                return None
            value = changeable[name] = _copied(value)
        fields[name] = value
    mould = Mould(
        type(made),
        fields,
        tuple([name for name, value in changeable.items() if value == {}]),
        tuple([name for name, value in changeable.items() if value == []]),
        tuple([name for name, value in changeable.items() if value]),
        frozenset(made.__pydantic_fields_set__),
        made.__pydantic_extra__ is not None,
    )
    # Extra fields, and whatever a release of pydantic may do otherwise, show here.
    return mould if _filled(mould) == made else None


def _filled(mould: Mould) -> BaseMessage:
    cls, originals, empty_dicts, empty_lists, filled, fields_set, has_extra = mould
    fields = originals.copy()
    for name in empty_dicts:
        fields[name] = {}
    for name in empty_lists:
        fields[name] = []
    for name in filled:
        fields[name] = _copied(fields[name])
    # As pydantic copies a model.
    message = cls.__new__(cls)
    _set(message, "__dict__", fields)
    _set(message, "__pydantic_extra__", {} if has_extra else None)
    _set(message, "__pydantic_fields_set__", set(fields_set))
    _set(message, "__pydantic_private__", None)
    return message


def _is_plain(value: Any, room: int) -> bool:
    """Is this made of lists, dicts and what cannot be changed, and of nothing else?"""
    kind = type(value)
    if kind in _FIXED:
        return True
    if not room:
        return False
    if kind is list:
        return all(_is_plain(item, room - 1) for item in value)
    return kind is dict and all(
        type(key) in _FIXED and _is_plain(item, room - 1) for key, item in value.items()
    )


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    return value
