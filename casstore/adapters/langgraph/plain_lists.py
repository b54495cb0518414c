"""Long lists of plain data, as messages without a class are, and of plain data with objects in it.

Their elements are stored taken apart (``encoding``), which takes long for a long list. But what the
serialiser makes of a list, at the speed of C, tells whether it begins as it did: equal bytes are
equal elements, since each says itself where it ends. Then only what came new is taken apart.

Where nothing went through the serialiser when the elements were taken apart, its bytes load as the
same list, and need not be looked at: they name nothing. They are kept in memory and come from
nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from casstore.adapters.langgraph import encoding
from casstore.adapters.langgraph.known_lists import Form, KeptList, KnownList
from casstore.adapters.langgraph.serializer import StrictSerializer
from casstore.session.records import Draft


class PlainLists:
    """Lists of plain data into stored ones and back."""

    __slots__ = ("_serde",)

    def __init__(self, serde: StrictSerializer) -> None:
        self._serde = serde

    def keep(
        self, draft: Draft, value: Sequence[Any], before: Any, old: KnownList | None
    ) -> KeptList | None:
        """Store a list with a write; None if the serialiser does not take it whole.

        ``old`` is what the channel held, if it is known what that was made of.
        """
        body = self._serde.dump_objects(value)
        if body is None:
            return None
        if (
            old is not None
            # What another serialiser lets pass may be forbidden here.
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
        """The stored forms of elements, and whether the serialiser had a part in them."""
        form = Form.PLAIN

        def dump(value: Any) -> tuple[str, bytes]:
            nonlocal form
            form = Form.MIXED
            return self._serde.dumps_typed(value)

        return encoding.encode_items(items, dump), form

    def load_known(self, known: KnownList) -> list[Any] | None:
        """A list that is known, made anew; None if it has to be read."""
        if known.form is not Form.PLAIN:
            return None
        return self._serde.load_objects(known.length, known.body)

    def load(self, stored: list[Any]) -> tuple[list[Any], KnownList | None]:
        """The list of these stored forms, and what it is made of, if that can be told."""
        form = Form.PLAIN

        def load(spelled: tuple[str, bytes]) -> Any:
            nonlocal form
            form = Form.MIXED
            return self._serde.loads_typed(spelled)

        found = [encoding.decode(item, load) for item in stored]
        body = self._serde.dump_objects(found)
        if body is None:
            return found, None
        return found, KnownList(len(found), body, self._serde, form=form)
