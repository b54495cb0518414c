"""The schemas of scoped state.

    scoped.scopes         scope key, generation         birth, changes, keys, bytes, soonest expiry,
                                                        conversation
    scoped.conversations  conversation, scope key, generation
                                                        index of the scopes of a conversation
    scoped.values         scope key, generation, key    version, origin, times, size, writer,
                                                        context, value
    scoped.people         type, id, scope key, generation, key
                                                        leads from a person to a value
    scoped.resets         conversation, number          a reset; under "", a copy of the latest
    scoped.runs           run                           the grant of a run, fixed when it begins
    scoped.run_actors     type, id, run                 index of the runs of an actor

A **person** is an actor who wrote a value, or the subject of its scope. The **birth** of a scope's
row is a random id.

Every write to a scope changes its row in ``scoped.scopes`` and makes the row that it has read a
condition. So concurrent writes to a scope conflict, and the counts stay exact. The row is deleted
with the last value. A new row of the scope has another birth, so a version (birth and number of
changes) is never issued twice.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, NamedTuple

from casstore.format.canonical import Link
from casstore.records.schema import Index, Key, Parent, RowTable, Schema, number_text
from casstore.records.scoped.policy import StatePolicy
from casstore.records.scoped.scope_keys import Context, conversation_key
from casstore.session.records import Draft, Record
from casstore.store import Store

#: The slot of the copy of a conversation's latest reset.
LATEST: Final = ""
_BIRTH_BYTES: Final = 6
# Values and contexts up to these sizes are stored in the row.
_VALUE_IN_ROW_BYTES: Final = 224
_CONTEXT_IN_ROW_BYTES: Final = 128
# A text of this length is stored as an object of its own even inside a row, and would be read with
# every read of the row. So a value or context that may contain one is replaced by a link.
_LONG_BYTES: Final = 512

#: The type and id of an actor.
Writer = tuple[str, str]


class Spot(NamedTuple):
    """A scope: its kind, its key, and the conversation whose resets apply to it."""

    scope: str
    key: str
    conversation: str | None

    @staticmethod
    def of(context: Context, scope: str, key: str) -> Spot:
        """A scope of a context, with the key that it has there."""
        if scope != "conversation":
            return Spot(scope, key, None)
        place = (context.workspace_id, context.bot_id, context.conversation_id)
        return Spot(scope, key, conversation_key(*place))


class ScopeRow(NamedTuple):
    """The row of a scope."""

    scope_key: str
    generation: int
    birth: str
    changes: int
    keys: int
    size_bytes: int
    #: No value expires earlier than this; None: no value expires.
    soonest_ms: int | None
    #: The conversation that the scope belongs to; None: it is a scope of another kind.
    conversation: str | None

    @property
    def version(self) -> str:
        """The version of the latest change."""
        return f"{self.birth}-{self.changes}"


def new_scope(spot: Spot, generation: int) -> ScopeRow:
    """The row of a scope that holds no values yet."""
    birth = secrets.token_hex(_BIRTH_BYTES)
    return ScopeRow(
        scope_key=spot.key,
        generation=generation,
        birth=birth,
        changes=0,
        keys=0,
        size_bytes=0,
        soonest_ms=None,
        conversation=spot.conversation,
    )


class ValueRow(NamedTuple):
    """The row of a value."""

    scope_key: str
    generation: int
    key: str
    version: str
    #: The version with which it was put first: distinguishes it from other values of this key.
    origin: str
    created_ms: int
    updated_ms: int
    expires_ms: int | None
    size_bytes: int
    #: The actor who wrote it last.
    writer: tuple[str, str] | None
    #: The context in which it was put first, or a link to it.
    context: list[str | None] | Link
    #: The value, or a link to it.
    value: Any

    @property
    def row_key(self) -> Key:
        """The key of the row."""
        return self.scope_key, number_text(self.generation), self.key

    @property
    def charged_bytes(self) -> int:
        """The bytes counted towards the quota of its scope."""
        return charged_bytes(self.key, self.size_bytes)

    def is_live(self, now_ms: int) -> bool:
        """True if it has not expired."""
        return self.expires_ms is None or self.expires_ms > now_ms


def charged_bytes(key: str, size_bytes: int) -> int:
    """The bytes that a value of this key counts towards the quota of its scope."""
    return len(key.encode()) + size_bytes


class PersonRow(NamedTuple):
    """Leads from a person to a value that the person wrote, or that is about the person."""

    type: str
    id: str
    scope_key: str
    generation: int
    key: str
    #: The origin of the value: a later value of the same key has another.
    origin: str
    workspace_id: str | None
    bot_id: str | None


class ResetRow(NamedTuple):
    """A reset of a conversation."""

    conversation: str
    #: ``number`` as a text, or LATEST.
    slot: str
    number: int
    id: str
    at_ms: int
    note: Any


class RunGrant(NamedTuple):
    """What a run may do, fixed when it begins.

    >>> run = state.begin_run("run-1", context, caller="me/agent")
    >>> run.caller, run.policy.scopes
    ('me/agent', ('conversation', 'actor'))
    """

    id: str
    caller: str
    capabilities: tuple[str, ...]
    policy: StatePolicy
    context: Context
    #: By scope; scopes that the context has no identity for are missing.
    scope_keys: dict[str, str]
    started_ms: int
    expires_ms: int


SCOPE_ROWS: Final = Schema(
    "scoped.scopes",
    ScopeRow,
    2,
    indexes=[
        Index(
            "scoped.conversations",
            3,
            lambda row: [] if row.conversation is None else [(row.conversation, *row[:2])],
            ends_with_key=True,
        )
    ],
)
PEOPLE: Final = Schema("scoped.people", PersonRow, 5)
VALUES: Final = Schema(
    "scoped.values",
    ValueRow,
    3,
    parents=[
        Parent(SCOPE_ROWS, lambda row: row[:2]),
        Parent(
            PEOPLE,
            lambda row: None if row.writer is None else (*row.writer, *row[:3]),
            lambda row, person: bool(person.origin == row.origin),
            finds=True,
        ),
    ],
)
RESETS: Final = Schema("scoped.resets", ResetRow, 2)
RUNS: Final = Schema(
    "scoped.runs",
    RunGrant,
    1,
    indexes=[
        Index(
            "scoped.run_actors",
            3,
            lambda row: [] if row.context.actor is None else [(*row.context.actor, row.id)],
            ends_with_key=True,
        )
    ],
)
SCHEMAS: Final = (SCOPE_ROWS, PEOPLE, VALUES, RESETS, RUNS)


class ScopedTables:
    """The tables of scoped state in a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.scopes = RowTable(store, SCOPE_ROWS)
        [self.conversations] = self.scopes.indexes
        self.values = RowTable(store, VALUES)
        self.people = RowTable(store, PEOPLE)
        self.resets = RowTable(store, RESETS)
        self.runs = RowTable(store, RUNS)
        [self.run_actors] = self.runs.indexes

    def latest_number(self, reset: Record | None) -> int:
        """The current generation of a conversation, by its latest reset; 0 without a reset."""
        return 0 if reset is None else self.resets.decode(reset).number

    def put_reset(
        self, draft: Draft, conversation: str, number: int, reset_id: str, at_ms: int, note: Any
    ) -> ResetRow:
        """Add a reset to a draft, under its number and as the latest."""
        row = ResetRow(
            conversation=conversation,
            slot=number_text(number),
            number=number,
            id=reset_id,
            at_ms=at_ms,
            note=note,
        )
        self.resets.put(draft, row)
        self.resets.put(draft, row._replace(slot=LATEST))
        return row


def value_in_row(draft: Draft, stored: Any, size_bytes: int) -> Any:
    """The value, or a link to it if it is long."""
    if size_bytes >= _LONG_BYTES:
        return draft.keep(stored)
    return draft.keep_long(stored, least_bytes=_VALUE_IN_ROW_BYTES)


def context_in_row(draft: Draft, context: Context) -> Any:
    """The context, or a link to it if it is long."""
    stored = list(context)
    if sum([len(one.encode()) for one in stored if one is not None]) >= _LONG_BYTES:
        return draft.keep(stored)
    return draft.keep_long(stored, least_bytes=_CONTEXT_IN_ROW_BYTES)
