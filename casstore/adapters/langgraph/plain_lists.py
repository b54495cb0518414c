"""Stores long lists of plain data, such as messages without a class, also mixed with objects.

Encoding the elements one by one (``encoding``) is slow for a long list. Serialising the whole list
is fast, and shows whether it starts with the cached list: elements are self-delimiting, so equal
bytes are equal elements. Then only the new elements are encoded.

If no element needed the serialiser when it was encoded, the serialised bytes load as the same list.
They name no types, so they are loaded without a check; they are cached in memory and never come
from the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from casstore.adapters.langgraph import encoding
from casstore.adapters.langgraph.known_lists import Form, KeptList, KnownList
from casstore.adapters.langgraph.serializer import StrictSerializer
from casstore.session.records import Draft


class PlainLists:
    """Encodes and decodes lists of plain data."""

    __slots__ = ("_serde",)

    def __init__(self, serde: StrictSerializer) -> None:
        self._serde = serde

    def keep(
        self, draft: Draft, value: Sequence[Any], before: Any, old: KnownList | None
    ) -> KeptList | None:
        """Store a list with a write; None if the serialiser does not take it whole.

        ``old`` is the previous value of the channel, if its elements are cached.
        """
        body = self._serde.dump_objects(value)
        if body is None:
            return None
        if (
            old is not None
            # Another serialiser may accept what this one forbids.
            and old.passed_by is self._serde
            and body.startswith(old.body)
        ):
            if len(value) == old.length:
                return KeptList(before, old, before)
            items, form = self._taken_apart(value[old.length :])
            if old.form is not Form.PLAIN:
                form = Form.MIXED
            kept = draft.extend(before, items)
        else:
            items, form = self._taken_apart(value)
            kept = draft.keep_long(items)
        return KeptList(kept, KnownList(len(value), body, self._serde, form=form), before)

    def _taken_apart(self, items: Sequence[Any]) -> tuple[list[Any], Form]:
        """The stored forms of elements, and whether the serialiser encoded any part of them."""
        form = Form.PLAIN

        def dump(value: Any) -> tuple[str, bytes]:
            nonlocal form
            form = Form.MIXED
            return self._serde.dumps_typed(value)

        return encoding.encode_items(items, dump), form

    def load_known(self, known: KnownList) -> list[Any] | None:
        """A new copy of a cached list; None if it has to be read."""
        if known.form is not Form.PLAIN:
            return None
        return self._serde.load_objects(known.length, known.body)

    def load(self, stored: list[Any]) -> tuple[list[Any], KnownList | None]:
        """The list of these stored forms, and its elements if they can be cached."""
        form = Form.PLAIN

        def load(encoded: tuple[str, bytes]) -> Any:
            nonlocal form
            form = Form.MIXED
            return self._serde.loads_typed(encoded)

        found = [encoding.decode(item, load) for item in stored]
        body = self._serde.dump_objects(found)
        if body is None:
            return found, None
        return found, KnownList(len(found), body, self._serde, form=form)
