"""Values and resets that come from elsewhere, with the times and contexts that they had there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from casstore.errors import ConditionFailedError, ConflictError
from casstore.format.canonical import Link
from casstore.records.json_values import restored
from casstore.records.scoped.changes import changed, put_head, put_leads
from casstore.records.scoped.contents import Content
from casstore.records.scoped.layout import (
    LATEST,
    Head,
    Stored,
    Tables,
    charged_bytes,
    context_in_row,
    decode_head,
    decode_reset,
    decode_value,
    latest_number,
    new_head,
    number_text,
    value_in_row,
)
from casstore.records.scoped.scope import get_linked
from casstore.records.scoped.scope_keys import Context, conversation_key
from casstore.session.attempts import Attempts
from casstore.session.records import Draft, Record, find_records
from casstore.store import Store


class Arrival(NamedTuple):
    """A value from elsewhere."""

    context: Context
    scope: str
    scope_key: str
    #: As it is stored: no alias.
    key: str
    content: Content
    created_ms: int
    updated_ms: int
    generation: int

    @property
    def place(self) -> tuple[str, str]:
        """Where it belongs."""
        return (self.scope_key, number_text(self.generation))


class ArrivedReset(NamedTuple):
    """A reset from elsewhere: the first of its conversation."""

    workspace_id: str | None
    bot_id: str | None
    conversation_id: str
    id: str
    at_ms: int

    @property
    def key(self) -> str:
        """The name of the conversation."""
        return conversation_key(self.workspace_id, self.bot_id, self.conversation_id)


class Adoption:
    """Takes values and resets over; what is there already, and the same, stays."""

    def __init__(self, store: Store) -> None:
        self._tables = Tables(store)

    # --- values -------------------------------------------------------------------------

    def has_values(self, arrivals: Sequence[Arrival]) -> list[bool]:
        """Which of these are there; ConflictError if one is there and is not the same."""
        tables = self._tables
        rows = tables.values.find_many([(*one.place, one.key) for one in arrivals])
        found = [None if row is None else decode_value(row) for row in rows]
        links = [
            told
            for one in found
            if one is not None
            for told in (one.value, one.context)
            if type(told) is Link
        ]
        linked = iter(get_linked(tables.store, links))

        def whole(told: Any) -> Any:
            return next(linked) if type(told) is Link else told

        there: list[bool] = []
        for arrival, stored in zip(arrivals, found, strict=True):
            if stored is not None:
                value, context = restored(whole(stored.value)), Context(*whole(stored.context))
                if not _is_same(arrival, stored, value, context):
                    raise ConflictError(
                        f"{arrival.key!r} of scope {arrival.scope_key} is in the store with "
                        "other content: delete one of the two"
                    )
            there.append(stored is not None)
        return there

    def put_values(self, arrivals: Sequence[Arrival]) -> None:
        """Take these over in one write; ConflictError if one of them is there meanwhile."""
        tables = self._tables
        places = sorted({one.place for one in arrivals})
        attempts = Attempts("the scopes of an import")
        while True:
            attempts.begin()
            asked: list[Any] = [(tables.scopes, place) for place in places]
            asked += [(tables.values, (*one.place, one.key)) for one in arrivals]
            found = find_records(tables.store, asked)
            if any(found[len(places) :]):
                raise ConflictError("some of the values came into the store by another way")
            draft = Draft(tables.store)
            heads = dict(zip(places, found[: len(places)], strict=True))
            for place, record in heads.items():
                come = [one for one in arrivals if one.place == place]
                self._draft_scope(draft, place, record, come)
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return

    def _draft_scope(
        self, draft: Draft, place: tuple[str, str], record: Record | None, come: list[Arrival]
    ) -> None:
        tables = self._tables
        draft.expect(tables.scopes, place, record)
        head = _first_head(come[0]) if record is None else decode_head(record)
        for one in come:
            size_bytes = one.content.size_bytes
            head = changed(head, come_bytes=charged_bytes(one.key, size_bytes))
            writer = one.context.actor
            draft.put(
                tables.values,
                (*place, one.key),
                [
                    head.version,
                    head.version,
                    one.created_ms,
                    one.updated_ms,
                    None,
                    size_bytes,
                    None if writer is None else list(writer),
                    context_in_row(draft, one.context),
                    value_in_row(draft, one.content.stored, size_bytes),
                ],
            )
            put_leads(tables, draft, one.scope, one.context, (*place, one.key), head.version)
        put_head(tables, draft, place, head, first=record is None)

    # --- resets -------------------------------------------------------------------------

    def has_resets(self, arrivals: Sequence[ArrivedReset]) -> list[bool]:
        """Which of these are there; ConflictError if the first of a conversation is another."""
        first = number_text(1)
        rows = self._tables.resets.find_many([(one.key, first) for one in arrivals])
        for arrival, row in zip(arrivals, rows, strict=True):
            if row is not None and decode_reset(row)[1:3] != (arrival.id, arrival.at_ms):
                raise ConflictError(
                    f"conversation {arrival.conversation_id!r} was reset in the store, not as "
                    "in the source"
                )
        return [row is not None for row in rows]

    def put_resets(self, arrivals: Sequence[ArrivedReset]) -> None:
        """Take these over in one write."""
        tables = self._tables
        attempts = Attempts("the resets of an import")
        while True:
            attempts.begin()
            latest = tables.resets.find_many([(one.key, LATEST) for one in arrivals])
            if any(latest_number(one) for one in latest):
                raise ConflictError("some of the conversations were reset in the store meanwhile")
            draft = Draft(tables.store)
            for one in arrivals:
                row = [1, one.id, one.at_ms, None]
                draft.expect(tables.resets, (one.key, LATEST), None)
                draft.put(tables.resets, (one.key, LATEST), row)
                draft.put(tables.resets, (one.key, number_text(1)), row)
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return


def _first_head(arrival: Arrival) -> Head:
    context = arrival.context
    if arrival.scope != "conversation":
        return new_head(None)
    return new_head(conversation_key(context.workspace_id, context.bot_id, context.conversation_id))


def _is_same(arrival: Arrival, stored: Stored, value: Any, context: Context) -> bool:
    return (
        # As JSON says it: 1 is not 1.0, nor true.
        json.dumps(value, sort_keys=True) == json.dumps(arrival.content.value, sort_keys=True)
        and context == arrival.context
        and (stored.created_ms, stored.updated_ms) == (arrival.created_ms, arrival.updated_ms)
    )
