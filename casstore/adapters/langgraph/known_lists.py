"""A cache of long lists: the elements of those used last, by the digest of the list.

Callers only get copies, so they cannot change the cache. A digest always names the same content, so
the cache is never stale. But gc may have deleted the list from the store: a write that builds on it
checks in its transaction that it exists.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from casstore.adapters.langgraph.copies import Original
from casstore.adapters.langgraph.serializer import StrictSerializer
from casstore.engine.forks import Lock
from casstore.format.canonical import Link

_MAX_KEPT_BYTES: Final = 64 << 20
# The approximate memory of a message in addition to its text.
_OBJECT_BYTES: Final = 1500


class Form(Enum):
    """How the elements of a list are stored."""

    #: Objects that the serialiser encodes: messages.
    OBJECTS = "objects"
    #: Plain data that the serialiser has not encoded: maps, texts, numbers.
    PLAIN = "plain"
    #: Plain data that contains objects, or is mixed with them.
    MIXED = "mixed"


class KnownList(NamedTuple):
    """A list, and the serialised forms of its elements, joined."""

    length: int
    body: bytes
    #: The serialiser that has checked all elements.
    passed_by: StrictSerializer
    #: The loaded elements, if they were loaded before and can be copied.
    objects: Sequence[Original] | None = None
    form: Form = Form.OBJECTS

    @property
    def size_bytes(self) -> int:
        """The approximate memory it uses."""
        loaded = 0 if self.objects is None else len(self.body) + _OBJECT_BYTES * self.length
        return len(self.body) + loaded


class KnownLists:
    """The most recently used lists by digest, up to a number of bytes."""

    def __init__(self, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._known: OrderedDict[bytes, KnownList] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The approximate memory in use."""
        return self._size_bytes

    def find(self, value: Any) -> KnownList | None:
        """The elements of the list that a channel links to, if cached."""
        if type(value) is not Link:
            return None
        with self._lock:
            found = self._known.get(value.digest)
            if found is not None:
                self._known.move_to_end(value.digest)
            return found

    def remember(self, value: Any, known: KnownList, instead_of: Any = None) -> None:
        """Cache the elements of a list, in place of the list that it has grown from."""
        if type(value) is not Link:
            return
        with self._lock:
            self._drop(value.digest)
            if type(instead_of) is Link:
                self._drop(instead_of.digest)
            if known.size_bytes > self._max_bytes:
                known = known._replace(objects=None)
            if known.size_bytes > self._max_bytes:
                return
            self._known[value.digest] = known
            self._size_bytes += known.size_bytes
            while self._size_bytes > self._max_bytes:
                self._size_bytes -= self._known.popitem(last=False)[1].size_bytes

    def _drop(self, digest: bytes) -> None:
        dropped = self._known.pop(digest, None)
        if dropped is not None:
            self._size_bytes -= dropped.size_bytes


class KeptList(NamedTuple):
    """A list to be stored: the channel's value, and its elements."""

    value: Any
    known: KnownList
    #: The previous value of the channel.
    before: Any
