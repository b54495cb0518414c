"""Resets of a conversation: earlier values stay, and are read only by generation number.

A reset increments the generation. Values of the conversation's scopes are stored under the
generation in which they were put, so a reset moves and deletes nothing. Every write to such a scope
makes the latest reset a condition. The time of a reset is stored for readers and is never compared.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from casstore.engine.protocol import Write
from casstore.records.json_values import restored
from casstore.records.schema import Key, number_text
from casstore.records.scoped.changes import REMOVED_AT_ONCE, Progress, remove_values
from casstore.records.scoped.policy import Content, content_of
from casstore.records.scoped.tables import LATEST, ResetRow, ScopedTables
from casstore.session.arguments import check_callable, check_count
from casstore.session.attempts import transaction
from casstore.session.records import Draft


class Generation(NamedTuple):
    """A reset of a conversation: its number, from 1 on, and a unique id.

    ``note`` is for the caller, for example the position in a history that is stored elsewhere.

    >>> conversation = {"workspace_id": None, "bot_id": "bot", "conversation_id": "c1"}
    >>> generation = state.reset(**conversation, note="bored")
    >>> generation.number, generation.note
    (1, 'bored')
    """

    number: int
    id: str
    at_ms: int
    note: Any


@transaction("the resets of a conversation")
def reset(tables: ScopedTables, conversation: str, note: Any) -> Generation:
    """Reset a conversation."""
    content = content_of(note)
    draft = Draft(tables.store)
    generation = _draft_reset(tables, draft, conversation, content)
    draft.commit()
    return generation


def prepare_reset(tables: ScopedTables, conversation: str, note: Any) -> tuple[Generation, Write]:
    """A reset to be written in the same transaction as a commit of a session."""
    draft = Draft(tables.store)
    generation = _draft_reset(tables, draft, conversation, content_of(note))
    return generation, draft.as_write()


def _draft_reset(
    tables: ScopedTables, draft: Draft, conversation: str, note: Content
) -> Generation:
    latest = tables.resets.find(conversation, LATEST)
    number = tables.latest_number(latest) + 1
    draft.expect(tables.resets, (conversation, LATEST), latest)
    now_ms = tables.store.engine.now_ms()
    row = tables.put_reset(draft, conversation, number, str(uuid.uuid4()), now_ms, note.stored)
    return _public(row)


def latest(tables: ScopedTables, conversation: str) -> Generation | None:
    """The latest reset, or None."""
    record = tables.resets.find(conversation, LATEST)
    return None if record is None else _public(tables.resets.decode(record))


def all_of(tables: ScopedTables, conversation: str) -> Iterator[Generation]:
    """All resets, in order."""
    for record in tables.resets.scan(conversation):
        if record.key[1] != LATEST:
            yield _public(tables.resets.decode(record))


def _public(row: ResetRow) -> Generation:
    return Generation(row.number, row.id, row.at_ms, restored(row.note))


def drop_history(
    tables: ScopedTables, conversation: str, before: int | None, progress: Progress | None = None
) -> int:
    """Remove the values of earlier generations of a conversation; returns how many."""
    if before is not None:
        check_count(before, "before")
    if progress is not None:
        check_callable(progress, "progress")
    number = tables.latest_number(tables.resets.find(conversation, LATEST))
    # The latest generation is in use and is never removed.
    end = number_text(number if before is None else min(before, number))
    dropped = 0
    for record in tables.conversations.scan(conversation):
        _, *place = record.key
        while place[1] < end:
            count = _drop_some(tables, tuple(place))
            if not count:
                break
            dropped += count
            if progress is not None:
                progress(dropped)
    return dropped


@transaction("scope {place[0]}")
def _drop_some(tables: ScopedTables, place: Key) -> int:
    """Remove one batch of values of a scope; returns how many."""
    draft = Draft(tables.store)
    found = islice(tables.values.scan(*place), REMOVED_AT_ONCE)
    count = remove_values(tables, draft, [(record.key, None) for record in found])
    draft.commit()
    return count
