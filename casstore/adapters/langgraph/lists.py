"""Long lists of objects, as messages are: what the newest ones were made of.

At each step most of a list is as it was. So of the lists put or read last, the serialised bytes of
all elements are kept, under the digest of the list, and what loading them gives. Putting compares
the beginning of a list with these and stores what came new; reading need not fetch or check
them again. What is kept is never handed out, only copies of it, so nobody can change it.

A digest stands for one content for ever, so nothing in here can be out of date. It may have been
deleted from the store, though: a write that builds on it asks for it within its transaction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.adapters.langgraph.copies import Original, begins_with, originals
from casstore.adapters.langgraph.encoding import PLAIN_TYPES, object_payload, stored_object
from casstore.adapters.langgraph.serializer import StrictSerializer, cut_objects
from casstore.engine.forks import Lock
from casstore.errors import CorruptionError
from casstore.format.canonical import Link
from casstore.records.rows import Draft

_MAX_KEPT_BYTES: Final = 64 << 20
# What a message takes beside its text.
_OBJECT_BYTES: Final = 1500
# A list as long as that is not loaded only to be remembered: it may never be read.
_LOADED_AT_ONCE: Final = 16


class KnownList(NamedTuple):
    """A list whose elements are all objects of the serialiser, and their bytes, joined."""

    length: int
    body: bytes
    #: Who has found all of them safe to load.
    passed_by: StrictSerializer
    #: What they are when loaded, if these are objects that can be copied, and were loaded before.
    objects: Sequence[Original] | None = None

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
        old = self._known.find(before)
        if (
            old is not None
            and old.objects is not None
            and old.passed_by is self._serde
            and begins_with(value, old.objects)
        ):
            return self._grown(draft, before, old, value[old.length :])
        body = self._serde.dump_objects(value)
        if body is None:
            return None
        if old is not None and body.startswith(old.body):
            # Extensions say themselves where they end: these are the elements of the old list.
            new = cut_objects(body, len(old.body))
            if new is None:
                return None
            self._check(new)
            if old.passed_by is not self._serde:
                self._check(cut_objects(old.body) or ())
            kept = draft.extend(before, [stored_object(part) for part in new]) if new else before
            return KeptList(kept, KnownList(old.length + len(new), body, self._serde), before)
        parts = cut_objects(body)
        if parts is None:
            return None
        self._check(parts)
        kept = draft.keep_long([stored_object(part) for part in parts])
        objects = None
        if len(parts) <= _LOADED_AT_ONCE:
            objects = self._loaded(len(parts), body)
        return KeptList(kept, KnownList(len(parts), body, self._serde, objects), before)

    def _grown(
        self, draft: Draft, before: Any, old: KnownList, items: Sequence[Any]
    ) -> KeptList | None:
        """A list that begins as the old one, whose elements need not be serialised again."""
        if not items:
            return KeptList(before, old, before)
        added = self._serde.dump_objects(items)
        new = None if added is None else cut_objects(added)
        if added is None or new is None or old.objects is None:
            return None
        self._check(new)
        objects = self._loaded(len(new), added)
        known = KnownList(
            old.length + len(new),
            old.body + added,
            self._serde,
            None if objects is None else [*old.objects, *objects],
        )
        kept = draft.extend(before, [stored_object(part) for part in new])
        return KeptList(kept, known, before)

    def _loaded(self, count: int, body: bytes) -> Sequence[Original] | None:
        """What checked bytes are when they are loaded, to be kept and copied; None if that fails.

        Whoever reads the list is told then what is wrong with it.
        """
        try:
            objects = self._serde.load_objects(count, body)
        except CorruptionError:
            return None
        return originals(objects)

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
        elif known.objects is not None:
            return [original.copy() for original in known.objects]
        return self._load(value, known, remember=True)

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
        return self._load(value, known, remember=remember)

    def _load(self, value: Any, known: KnownList, *, remember: bool) -> list[Any]:
        objects = self._serde.load_objects(known.length, known.body)
        if remember:
            kept = originals(objects)
            self._known.remember(value, known._replace(passed_by=self._serde, objects=kept))
            if kept is not None:
                # The caller's are copies: these here stay as they are.
                return [original.copy() for original in kept]
        return objects

    def _check(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            self._serde.check(part)
