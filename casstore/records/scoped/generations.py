"""Resets of a conversation: what was before stays, and is seen only by who asks for it.

A reset is one number more. The values of the conversation's scopes lie under the number that
was the latest when they were put, so a reset moves and deletes nothing, however much there is.
Whoever writes expects the number to be the latest still. Numbers count up; the clock is told
along, and decides nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from casstore.engine.protocol import Write
from casstore.errors import ConditionFailedError
from casstore.records.json_values import restored
from casstore.records.scoped.contents import Content, content_of
from casstore.records.scoped.layout import (
    LATEST,
    Reset,
    Tables,
    decode_reset,
    latest_number,
    number_text,
)
from casstore.session.attempts import Attempts
from casstore.session.records import Draft


class Generation(NamedTuple):
    """What a conversation began anew with: its number, from 1 on, and an id that is new to all.

    ``note`` is what the caller wants to know later: where the history that it keeps
    elsewhere begins to count, for one.

    >>> conversation = {"workspace_id": None, "bot_id": "bot", "conversation_id": "c1"}
    >>> generation = state.reset(**conversation, note="bored")
    >>> generation.number, generation.note
    (1, 'bored')
    """

    number: int
    id: str
    at_ms: int
    note: Any


def reset(tables: Tables, conversation: str, note: Any) -> Generation:
    """Begin a conversation anew."""
    content = content_of(note)
    attempts = Attempts("the resets of a conversation")
    while True:
        attempts.begin()
        draft = Draft(tables.store)
        generation = _draft_reset(tables, draft, conversation, content)
        try:
            draft.commit()
        except ConditionFailedError:
            continue
        return generation


def prepare_reset(tables: Tables, conversation: str, note: Any) -> tuple[Generation, Write]:
    """A reset that goes beside the commit of a session, and happens with it or not at all."""
    draft = Draft(tables.store)
    generation = _draft_reset(tables, draft, conversation, content_of(note))
    return generation, draft.as_write()


def _draft_reset(tables: Tables, draft: Draft, conversation: str, note: Content) -> Generation:
    latest = tables.resets.find(conversation, LATEST)
    number = latest_number(latest) + 1
    row = [number, str(uuid.uuid4()), tables.store.engine.now_ms(), note.stored]
    draft.expect(tables.resets, (conversation, LATEST), latest)
    draft.put(tables.resets, (conversation, LATEST), row)
    draft.put(tables.resets, (conversation, number_text(number)), row)
    return _told(Reset(*row))


def latest(tables: Tables, conversation: str) -> Generation | None:
    """The latest reset; None if there was none."""
    record = tables.resets.find(conversation, LATEST)
    return None if record is None else _told(decode_reset(record))


def all_of(tables: Tables, conversation: str) -> Iterator[Generation]:
    """All resets, in order."""
    for record in tables.resets.scan(conversation):
        if record.key[1] != LATEST:
            yield _told(decode_reset(record))


def _told(row: Reset) -> Generation:
    return Generation(row.number, row.id, row.at_ms, restored(row.note))
