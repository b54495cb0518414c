"""Stores long lists, such as messages: from step to step most elements stay the same.

So the serialised and loaded elements of recent lists are cached (``known_lists``). Putting a list
compares its beginning with the cached one and stores only new elements; reading does not fetch or
check cached elements again.

Lists of objects, as messages of LangChain are, are dealt with here; those of plain data, in
``plain_lists``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from casstore.adapters.langgraph.copies import Original, begins_with, originals
from casstore.adapters.langgraph.encoding import PLAIN_TYPES, object_payload, stored_object
from casstore.adapters.langgraph.known_lists import Form, KeptList, KnownList, KnownLists
from casstore.adapters.langgraph.plain_lists import PlainLists
from casstore.adapters.langgraph.serializer import StrictSerializer, cut_objects
from casstore.errors import CorruptionError
from casstore.format.canonical import Link
from casstore.session.records import Draft

# A list longer than this is not loaded only to be cached: it may never be read.
_LOADED_AT_ONCE: Final = 16


class ListCodec:
    """Encodes and decodes lists with the strict serialiser."""

    __slots__ = ("_known", "_plain", "_serde")

    def __init__(self, serde: StrictSerializer, known: KnownLists) -> None:
        self._serde = serde
        self._known = known
        self._plain = PlainLists(serde)

    def keep(self, draft: Draft, value: Any, before: Any) -> KeptList | None:
        """Store a list with a write; None if it is not a list, or cannot be split.

        ``before`` is the previous value of the channel, perhaps the list that this one has grown
        from.
        """
        if type(value) not in (list, tuple):
            return None
        old = self._known.find(before)
        if not PLAIN_TYPES.isdisjoint(map(type, value)):
            return self._plain.keep(draft, value, before, old)
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
            # Extensions are self-delimiting, so these are the elements of the old list.
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
        """A list that starts with the old one, whose elements are not serialised again."""
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
        """Load checked bytes, to be cached and copied; None if loading fails.

        The error is raised when the list is read.
        """
        try:
            objects = self._serde.load_objects(count, body)
        except CorruptionError:
            return None
        return originals(objects)

    def remember(self, kept: Sequence[KeptList]) -> None:
        """Cache the lists that were put."""
        for each in kept:
            self._known.remember(each.value, each.known, each.before)

    def load_known(self, value: Any) -> list[Any] | None:
        """The list that a channel links to, if cached; its objects are new ones each time."""
        known = self._known.find(value)
        if known is None:
            return None
        if known.form is not Form.OBJECTS:
            return self._plain.load_known(known)
        if known.passed_by is not self._serde:
            self._check(cut_objects(known.body) or ())
        elif known.objects is not None:
            return [original.copy() for original in known.objects]
        return self._load(value, known, remember=True)

    def load(self, value: Any, stored: Any, *, remember: bool) -> list[Any] | None:
        """Decode a list that was read by a link; None if it is not one. ``remember`` caches it."""
        if type(value) is not Link or type(stored) is not list:
            return None
        parts: list[bytes] = []
        for item in stored:
            part = object_payload(item)
            if part is None or cut_objects(part) != [part]:
                found, known = self._plain.load(stored)
                if remember and known is not None:
                    self._known.remember(value, known)
                return found
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
                # The caller gets copies, so the cached objects do not change.
                return [original.copy() for original in kept]
        return objects

    def _check(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            self._serde.check(part)
