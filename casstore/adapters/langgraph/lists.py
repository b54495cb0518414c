"""Long lists of objects, as messages are: what the newest ones were made of.

At each step most of a list is as it was. So of the lists put or read last, the serialised bytes of
all elements are kept, under the digest of the list. Putting serialises a list whole,
compares its beginning with these and stores what came new; reading need not fetch or check
them again. No live object is kept, so nobody can change what is.

A digest stands for one content for ever, so nothing in here can be out of date. It may have been
deleted from the store, though: a write that builds on it asks for it within its transaction.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.adapters.langgraph.encoding import PLAIN_TYPES, object_payload, stored_object
from casstore.adapters.langgraph.serializer import StrictSerializer, cut_objects
from casstore.format.canonical import Link
from casstore.records.rows import Draft

_MAX_KEPT_BYTES: Final = 32 << 20


class KnownList(NamedTuple):
    """A list whose elements are all objects of the serialiser, and their bytes, joined."""

    length: int
    body: bytes
    #: Who has found all of them safe to load.
    passed_by: StrictSerializer


class KnownLists:
    """Lists by digest, those used last, up to a number of bytes."""

    def __init__(self, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
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
            if len(known.body) > self._max_bytes:
                return
            self._known[value.digest] = known
            self._size_bytes += len(known.body)
            while self._size_bytes > self._max_bytes:
                self._size_bytes -= len(self._known.popitem(last=False)[1].body)

    def _drop(self, digest: bytes) -> None:
        dropped = self._known.pop(digest, None)
        if dropped is not None:
            self._size_bytes -= len(dropped.body)


class KeptList(NamedTuple):
    """A list on its way into the store: how its channel holds it, and what it was made of."""

    value: Any
    known: KnownList
    #: What the channel held before.
    before: Any


class ListCodec:
    """Lists of objects into stored ones and back, through the strict serialiser."""

    __slots__ = ("_known", "_serde")

    def __init__(self, serde: StrictSerializer, known: KnownLists) -> None:
        self._serde = serde
        self._known = known

    def keep(self, draft: Draft, value: Any, before: Any) -> KeptList | None:
        """Store a list with a write; None if it is no list of objects.

        ``before`` is what the channel held: perhaps the list that this one has grown from.
        """
        if type(value) not in (list, tuple) or not PLAIN_TYPES.isdisjoint(map(type, value)):
            return None
        body = self._serde.dump_objects(value)
        if body is None:
            return None
        old = self._known.find(before)
        if old is not None and body.startswith(old.body):
            # Extensions say themselves where they end: these are the elements of the old list.
            new = cut_objects(body, len(old.body))
            if new is None:
                return None
            self._check(new)
            if old.passed_by is not self._serde:
                self._check(cut_objects(old.body) or ())
            kept = draft.extend(before, [stored_object(part) for part in new]) if new else before
            length = old.length + len(new)
        else:
            parts = cut_objects(body)
            if parts is None:
                return None
            self._check(parts)
            kept = draft.keep_long([stored_object(part) for part in parts])
            length = len(parts)
        return KeptList(kept, KnownList(length, body, self._serde), before)

    def remember(self, kept: Sequence[KeptList]) -> None:
        """Note what was put."""
        for each in kept:
            self._known.remember(each.value, each.known, each.before)

    def load_known(self, value: Any) -> list[Any] | None:
        """The list that a channel links to, if it is known; its objects are new ones each time."""
        known = self._known.find(value)
        if known is None:
            return None
        if known.passed_by is not self._serde:
            self._check(cut_objects(known.body) or ())
        return self._serde.load_objects(known.length, known.body)

    def load(self, value: Any, stored: Any, *, remember: bool) -> list[Any] | None:
        """The list that was read by a link; None if it is no list of objects."""
        if type(value) is not Link or type(stored) is not list:
            return None
        parts: list[bytes] = []
        for item in stored:
            part = object_payload(item)
            if part is None or cut_objects(part) != [part]:
                return None
            parts.append(part)
        self._check(parts)
        known = KnownList(len(parts), b"".join(parts), self._serde)
        if remember:
            self._known.remember(value, known)
        return self._serde.load_objects(known.length, known.body)

    def _check(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            self._serde.check(part)
