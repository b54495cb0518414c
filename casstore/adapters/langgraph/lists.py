"""Stores lists, such as messages: from step to step most elements stay the same.

So the serialised and loaded elements of recent lists are cached (``KnownLists``), with the end of
the stored list. Putting a list compares its beginning with the cached one and stores only new
elements; reading does not fetch or check cached elements again.

Elements that are objects, as messages of LangChain are, are stored as the serialiser's bytes. Plain
data, also mixed with objects, is encoded element by element (``encoding``). That is slow for a long
list, but serialising all of it is fast, and shows whether it starts with the cached list:
serialised elements are self-delimiting, so equal bytes are equal elements. If no element needed the
serialiser when it was encoded, the serialised bytes load as the same list. They name no types, so
they are loaded without a check; they are cached in memory and never come from the store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from casstore.adapters.langgraph import encoding
from casstore.adapters.langgraph.copies import Original, begins_with, originals
from casstore.adapters.langgraph.encoding import PLAIN_TYPES, object_payload, stored_object
from casstore.adapters.langgraph.layout import Channel
from casstore.adapters.langgraph.serializer import StrictSerializer, cut_objects
from casstore.engine.forks import Lock
from casstore.errors import CorruptionError
from casstore.format.canonical import Link
from casstore.format.expansion import most_cost
from casstore.format.limits import MAX_REPEATED_BYTES
from casstore.format.splitting import Encoded, ListTail
from casstore.session.records import Draft

_MAX_KEPT_BYTES: Final = 64 << 20
# The approximate memory of a message in addition to its text.
_OBJECT_BYTES: Final = 1500
# More new elements than this are not loaded just to be cached: the list may never be read.
_LOADED_AT_ONCE: Final = 16


class Form(Enum):
    """How the elements of a list are stored."""

    #: Objects that the serialiser encodes: messages.
    OBJECTS = "objects"
    #: Plain data that the serialiser has not encoded: maps, texts, numbers.
    PLAIN = "plain"
    #: Plain data that contains objects, or is mixed with them.
    MIXED = "mixed"
    #: Holds bytes or bytearrays. Equal ones of both types have equal serialised bytes, so no list
    #: is compared with this one.
    BYTES = "bytes"


class KnownList(NamedTuple):
    """A list, and the serialised forms of its elements, joined."""

    length: int
    body: bytes
    #: The serialiser that has checked all elements. Another one may refuse them.
    passed_by: StrictSerializer
    #: The loaded elements, if they were loaded before and can be copied.
    objects: Sequence[Original] | None = None
    form: Form = Form.OBJECTS
    #: The end of the stored list; None if it must be read.
    tail: ListTail | None = None

    @property
    def size_bytes(self) -> int:
        """The approximate memory it uses."""
        loaded = 0 if self.objects is None else len(self.body) + _OBJECT_BYTES * self.length
        return len(self.body) + loaded


class KnownLists:
    """The most recently used lists by the key of their channel, up to a number of bytes.

    Callers only get copies, so they cannot change the cache. A key always names the same content,
    so the cache is never stale. But gc may have deleted the list from the store: a write that
    builds on it checks in its transaction that it exists.
    """

    def __init__(self, max_bytes: int = _MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._known: OrderedDict[bytes, KnownList] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The approximate memory in use."""
        return self._size_bytes

    def find(self, key: bytes | None, serde: StrictSerializer) -> KnownList | None:
        """The elements of a list, if they are cached and ``serde`` has checked them."""
        if key is None:
            return None
        with self._lock:
            found = self._known.get(key)
            if found is None or found.passed_by is not serde:
                return None
            self._known.move_to_end(key)
            return found

    def remember(
        self, key: bytes | None, known: KnownList, instead_of: bytes | None = None
    ) -> None:
        """Cache the elements of a list, in place of the list that it has grown from."""
        if key is None:
            return
        size_bytes = known.size_bytes
        if size_bytes > self._max_bytes:
            known = known._replace(objects=None)
            size_bytes = known.size_bytes
        with self._lock:
            for old in (key, instead_of):
                if old is not None and (dropped := self._known.pop(old, None)) is not None:
                    self._size_bytes -= dropped.size_bytes
            if size_bytes > self._max_bytes:
                return
            self._known[key] = known
            self._size_bytes += size_bytes
            while self._size_bytes > self._max_bytes:
                self._size_bytes -= self._known.popitem(last=False)[1].size_bytes


class KeptList(NamedTuple):
    """A list to be stored: its stored form and encoding, and its elements."""

    value: tuple[Any, Encoded]
    known: KnownList
    #: Where to remember it once it is stored.
    cache: KnownLists


class ListCodec:
    """Encodes and decodes lists with the strict serialiser."""

    __slots__ = ("_known", "_serde")

    def __init__(self, serde: StrictSerializer, known: KnownLists) -> None:
        self._serde = serde
        self._known = known

    def keep(self, draft: Draft, value: Any, before: Channel | None) -> KeptList | None:
        """Add a list to a write; None if the value is not a list, or cannot be split.

        ``before`` is the channel's previous state, perhaps the list that this one has grown from.
        """
        if type(value) not in (list, tuple):
            return None
        old = None if before is None else self._known.find(before.key, self._serde)
        if old is not None and old.form is Form.BYTES:
            old = None
        if not PLAIN_TYPES.isdisjoint(map(type, value)):
            new = self._plain(value, old)
            if (
                old is not None
                and new is not None
                and most_cost(len(new[1].body)) > MAX_REPEATED_BYTES
            ):
                # In a list this long, parts may repeat too often. That is measured only if all of
                # the list is encoded now.
                old, new = None, self._plain(value, None)
        else:
            new = self._objects(value, old)
        if new is None:
            return None
        items, known = new
        start: Sequence[Any] = ()
        tail: ListTail | None = ListTail()
        # Fewer items than elements: the list has grown from the old one.
        if before is not None and old is not None and len(items) < known.length:
            start, tail = before.value, old.tail
            if type(start) is Link:
                if not items:
                    return KeptList((start, Encoded(b"", [], start.digest)), old, self._known)
                tail, start = tail or draft.open_list(start), ()
            elif tail is None:
                start, items, tail = (), [*start, *items], ListTail()
        encoded, tail = draft.append(tail or ListTail(), items)
        return KeptList(([*start, *items], encoded), known._replace(tail=tail), self._known)

    def _objects(
        self, value: Sequence[Any], old: KnownList | None
    ) -> tuple[list[Any], KnownList] | None:
        """The stored forms of a list's objects, and the list to cache.

        If the list begins with ``old``, only those of the objects after it.
        """
        serde = self._serde
        loaded: Sequence[Original] | None = ()
        if old is not None and old.objects is not None and begins_with(value, old.objects):
            # The old elements need not be serialised again.
            start, loaded = old.body, old.objects
            added = serde.dump_objects(value[old.length :])
            body = None if added is None else start + added
        else:
            body = serde.dump_objects(value)
            start = b""
            if old is not None and body is not None and body.startswith(old.body):
                # Extensions are self-delimiting, so these are the elements of the old list.
                start, loaded = old.body, None
        parts = None if body is None else cut_objects(body, len(start))
        if body is None or parts is None:
            return None
        for part in parts:
            serde.check(part)
        if loaded is not None and len(parts) <= _LOADED_AT_ONCE:
            more = self._loaded(len(parts), body[len(start) :])
            loaded = None if more is None else [*loaded, *more]
        else:
            loaded = None
        return [stored_object(part) for part in parts], KnownList(len(value), body, serde, loaded)

    def _loaded(self, count: int, body: bytes) -> Sequence[Original] | None:
        """Load checked bytes, to be cached and copied; None if loading fails.

        The error is raised when the list is read.
        """
        try:
            objects = self._serde.load_objects(count, body)
        except CorruptionError:
            return None
        return originals(objects)

    def _plain(
        self, value: Sequence[Any], old: KnownList | None
    ) -> tuple[list[Any], KnownList] | None:
        """As ``_objects``, for a list that has plain data in it."""
        serde = self._serde
        body = serde.dump_objects(value)
        if body is None:
            return None
        form, new = Form.PLAIN, value
        if old is not None and body.startswith(old.body):
            new = value[old.length :]
            if old.form is not Form.PLAIN:
                form = Form.MIXED

        def dump(each: Any) -> tuple[str, bytes]:
            nonlocal form
            tag, payload = serde.dumps_typed(each)
            if form is not Form.BYTES:
                form = Form.BYTES if tag in ("bytes", "bytearray") else Form.MIXED
            return tag, payload

        items = encoding.encode_items(new, dump) if new else []
        return items, KnownList(len(value), body, serde, form=form)

    def load_known(self, key: bytes | None) -> list[Any] | None:
        """The list with this key, if cached; its objects are new ones each time."""
        known = self._known.find(key, self._serde)
        if known is None or known.form in (Form.MIXED, Form.BYTES):
            return None
        if known.objects is not None:
            return [original.copy() for original in known.objects]
        return self._load(key, known, remember=known.form is Form.OBJECTS)

    def load(self, key: bytes | None, stored: Any, *, remember: bool) -> list[Any] | None:
        """Decode a list that was read; None if it is not one. ``remember`` caches it."""
        if key is None or type(stored) is not list:
            return None
        serde = self._serde
        parts: list[bytes] = []
        for item in stored:
            part = object_payload(item)
            if part is None or cut_objects(part) != [part]:
                return self._load_plain(key, stored, remember=remember)
            parts.append(part)
        for part in parts:
            serde.check(part)
        known = KnownList(len(parts), b"".join(parts), serde)
        return self._load(key, known, remember=remember)

    def _load(self, key: bytes | None, known: KnownList, *, remember: bool) -> list[Any]:
        objects = self._serde.load_objects(known.length, known.body)
        if remember:
            kept = originals(objects)
            self._known.remember(key, known._replace(objects=kept))
            if kept is not None:
                # The caller gets copies, so the cached objects do not change.
                return [original.copy() for original in kept]
        return objects

    def _load_plain(self, key: bytes, stored: list[Any], *, remember: bool) -> list[Any]:
        form = Form.PLAIN

        def load(encoded: tuple[str, bytes]) -> Any:
            nonlocal form
            if form is not Form.BYTES:
                form = Form.BYTES if encoded[0] in ("bytes", "bytearray") else Form.MIXED
            return self._serde.loads_typed(encoded)

        found = [encoding.decode(item, load) for item in stored]
        if remember and (body := self._serde.dump_objects(found)) is not None:
            self._known.remember(key, KnownList(len(found), body, self._serde, form=form))
        return found
