"""What is remembered of long lists: what the newest ones were made of, by the digest of the list.

What is kept is never handed out, only copies of it, so nobody can change it. A digest stands for
one content for ever, so nothing in here can be out of date. It may have been deleted from the
store, though: a write that builds on it asks for it within its transaction.
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
# What a message takes beside its text.
_OBJECT_BYTES: Final = 1500


class Form(Enum):
    """How the elements of a list are stored."""

    #: Each is an object that the serialiser spells: messages.
    OBJECTS = "objects"
    #: They are plain data, and the serialiser has spelled nothing of it: maps, texts, numbers.
    PLAIN = "plain"
    #: They are plain data with objects in it, or beside it.
    MIXED = "mixed"


class KnownList(NamedTuple):
    """A list, and what the serialiser makes of its elements, joined."""

    length: int
    body: bytes
    #: Who has found all of them safe to load.
    passed_by: StrictSerializer
    #: What they are when loaded, if these are objects that can be copied, and were loaded before.
    objects: Sequence[Original] | None = None
    form: Form = Form.OBJECTS

    @property
    def size_bytes(self) -> int:
        """How much memory it takes, about."""
        loaded = 0 if self.objects is None else len(self.body) + _OBJECT_BYTES * self.length
        return len(self.body) + loaded


class KnownLists:
    """Lists by digest, those used last, up to a number of bytes."""

    def __init__(self, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._known: OrderedDict[bytes, KnownList] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """How much is kept, about."""
        return self._size_bytes

    def find(self, value: Any) -> KnownList | None:
        """What the list that a channel links to was made of, if it is known."""
        if type(value) is not Link:
            return None
        with self._lock:
            found = self._known.get(value.digest)
            if found is not None:
                self._known.move_to_end(value.digest)
            return found

    def remember(self, value: Any, known: KnownList, instead_of: Any = None) -> None:
        """Keep what a list was made of; the one that it has grown from is no longer needed."""
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
    """A list on its way into the store: how its channel holds it, and what it was made of."""

    value: Any
    known: KnownList
    #: What the channel held before.
    before: Any
