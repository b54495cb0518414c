"""Imports values and resets with their original times and contexts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from casstore.errors import ConflictError
from casstore.format.canonical import Link
from casstore.records.json_values import restored
from casstore.records.schema import RowPlace, number_text
from casstore.records.scoped.changes import changed, put_scope, put_value
from casstore.records.scoped.policy import Content
from casstore.records.scoped.scope import get_linked
from casstore.records.scoped.scope_keys import Context, conversation_key
from casstore.records.scoped.tables import (
    LATEST,
    ScopedTables,
    Spot,
    ValueRow,
    charged_bytes,
    context_in_row,
    new_scope,
    value_in_row,
)
from casstore.session.attempts import transaction
from casstore.session.records import Draft, Record, find_records
from casstore.store import Store


class ArrivedValue(NamedTuple):
    """A value to import."""

    context: Context
    scope: str
    scope_key: str
    #: The stored key, not an alias.
    key: str
    content: Content
    created_ms: int
    updated_ms: int
    generation: int

    @property
    def place(self) -> tuple[str, str]:
        """The key of the row of its scope: the scope's key and the generation."""
        return (self.scope_key, number_text(self.generation))


class ArrivedReset(NamedTuple):
    """A reset to import: the first of its conversation."""

    workspace_id: str | None
    bot_id: str | None
    conversation_id: str
    id: str
    at_ms: int

    @property
    def key(self) -> str:
        """The key of the conversation."""
        return conversation_key(self.workspace_id, self.bot_id, self.conversation_id)


class Adoption:
    """Imports values and resets: ``has_…`` finds those stored, ``put_…`` adds the others."""

    def __init__(self, store: Store) -> None:
        self._tables = ScopedTables(store)

    # --- values -------------------------------------------------------------------------

    def has_values(self, arrivals: Sequence[ArrivedValue]) -> list[bool]:
        """For each, whether it is stored; ConflictError if it is stored and differs."""
        tables = self._tables
        rows = tables.values.find_many([(*one.place, one.key) for one in arrivals])
        found = [tables.values.decode_found(row) for row in rows]
        links = [
            part
            for one in found
            if one is not None
            for part in (one.value, one.context)
            if type(part) is Link
        ]
        linked = iter(get_linked(tables.store, links))

        def whole(part: Any) -> Any:
            return next(linked) if type(part) is Link else part

        there: list[bool] = []
        for arrival, stored in zip(arrivals, found, strict=True):
            if stored is not None:
                value, context = restored(whole(stored.value)), Context(*whole(stored.context))
                if not _is_same(arrival, stored, value, context):
                    raise ConflictError(
                        f"{arrival.key!r} of scope {arrival.scope_key} is in the store with "
                        "other content: delete it in the store or in the source"
                    )
            there.append(stored is not None)
        return there

    @transaction("the scopes of an import")
    def put_values(self, arrivals: Sequence[ArrivedValue]) -> None:
        """Import values in one write; ConflictError if another writer has put one of them."""
        tables = self._tables
        places = sorted({one.place for one in arrivals})
        asked: list[RowPlace] = [(tables.scopes, place) for place in places]
        asked += [(tables.values, (*one.place, one.key)) for one in arrivals]
        found = find_records(tables.store, asked)
        if any(found[len(places) :]):
            raise ConflictError("another writer has put some of the values; import them again")
        draft = Draft(tables.store)
        for place, record in zip(places, found, strict=False):
            come = [one for one in arrivals if one.place == place]
            self._draft_scope(draft, place, record, come)
        draft.commit()

    def _draft_scope(
        self, draft: Draft, place: tuple[str, str], record: Record | None, come: list[ArrivedValue]
    ) -> None:
        tables = self._tables
        draft.expect(tables.scopes, place, record)
        before = tables.scopes.decode_found(record)
        head = before or new_scope(
            Spot.of(come[0].context, come[0].scope, come[0].scope_key), come[0].generation
        )
        for one in come:
            size_bytes = one.content.size_bytes
            head = changed(head, come_bytes=charged_bytes(one.key, size_bytes))
            value = ValueRow(
                scope_key=one.scope_key,
                generation=one.generation,
                key=one.key,
                version=head.version,
                origin=head.version,
                created_ms=one.created_ms,
                updated_ms=one.updated_ms,
                expires_ms=None,
                size_bytes=size_bytes,
                writer=one.context.actor,
                context=context_in_row(draft, one.context),
                value=value_in_row(draft, one.content.stored, size_bytes),
            )
            put_value(tables, draft, one.scope, one.context, value)
        put_scope(tables, draft, head, before)

    # --- resets -------------------------------------------------------------------------

    def has_resets(self, arrivals: Sequence[ArrivedReset]) -> list[bool]:
        """For each, whether it is stored; ConflictError if the first reset stored is another."""
        first = number_text(1)
        tables = self._tables
        rows = tables.resets.find_many([(one.key, first) for one in arrivals])
        for arrival, row in zip(arrivals, rows, strict=True):
            if row is not None and tables.resets.decode(row)[3:5] != (arrival.id, arrival.at_ms):
                raise ConflictError(
                    f"the first reset of conversation {arrival.conversation_id!r} in the store is "
                    "not that of the source"
                )
        return [row is not None for row in rows]

    @transaction("the resets of an import")
    def put_resets(self, arrivals: Sequence[ArrivedReset]) -> None:
        """Import resets in one write; ConflictError if another writer has reset a conversation."""
        tables = self._tables
        latest = tables.resets.find_many([(one.key, LATEST) for one in arrivals])
        if any(tables.latest_number(one) for one in latest):
            raise ConflictError(
                "another writer has reset some of the conversations; import them again"
            )
        draft = Draft(tables.store)
        for one in arrivals:
            draft.expect(tables.resets, (one.key, LATEST), None)
            tables.put_reset(draft, one.key, 1, one.id, one.at_ms, None)
        draft.commit()


def _is_same(arrival: ArrivedValue, stored: ValueRow, value: Any, context: Context) -> bool:
    return (
        # Compare as JSON: 1 differs from 1.0 and from true.
        json.dumps(value, sort_keys=True) == json.dumps(arrival.content.value, sort_keys=True)
        and context == arrival.context
        and (stored.created_ms, stored.updated_ms) == (arrival.created_ms, arrival.updated_ms)
    )
