"""Appends messages; the same commit updates the pending calls and records the round's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from casstore.errors import InvalidInputError
from casstore.records.log import usage
from casstore.records.log.data import NewMessage, Tokens
from casstore.records.log.messages import after, payload_of
from casstore.records.log.tables import At, LeaseGiven, LogChange, LogTables
from casstore.session.arguments import list_of
from casstore.session.data import NodeDraft
from casstore.session.records import Draft


def append(
    tables: LogTables,
    session: str,
    messages: Sequence[NewMessage],
    tokens: Tokens | None = None,
    *,
    lease: LeaseGiven = None,
    durability: str | None = None,
) -> list[int]:
    """Append messages to a session, all or none; returns their numbers."""
    given = list_of(messages, "messages")
    if not given:
        raise InvalidInputError("messages is empty; pass at least one message")
    payloads = [payload_of(message) for message in given]

    def decide(at: At) -> tuple[LogChange, list[int]]:
        change, numbers = placed(tables, at, payloads)
        if tokens is not None:
            draft = Draft(tables.store)
            used_in = given[-1].round
            usage.note(tables, draft, at, at.state.send, used_in, tokens)
            change = change._replace(also=draft.as_write())
        return change, numbers

    return tables.change(session, decide, lease=lease, from_memory=True, durability=durability)


def placed(
    tables: LogTables, at: At, payloads: Sequence[dict[str, Any]]
) -> tuple[LogChange, list[int]]:
    """The change that appends these payloads as messages, and their numbers."""
    now_ms = tables.now_ms()
    state, number = at.state, at.last
    drafts: list[NodeDraft] = []
    for payload in payloads:
        number += 1
        state = after(state, number, payload)
        drafts.append(NodeDraft(str(number), payload, time=now_ms))
    return LogChange(state, drafts), list(range(at.last + 1, number + 1))
