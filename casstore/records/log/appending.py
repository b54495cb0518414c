"""Messages coming in: numbered, with the calls that wait and the tokens that were used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from casstore.errors import InvalidInputError
from casstore.records.log import usage
from casstore.records.log.data import NewMessage, Tokens
from casstore.records.log.ground import At, Change, Ground, LeaseGiven
from casstore.records.log.messages import after, payload_of
from casstore.session.arguments import list_of
from casstore.session.data import UNFENCED, NodeDraft
from casstore.session.records import Draft


def append(
    ground: Ground,
    session: str,
    messages: Sequence[NewMessage],
    tokens: Tokens | None = None,
    *,
    lease: LeaseGiven = UNFENCED,
    durability: str | None = None,
) -> list[int]:
    """Put messages at the end of a session, all or none; their numbers."""
    given = list_of(messages, "messages")
    if not given:
        raise InvalidInputError("there is no message to append")
    payloads = [payload_of(message) for message in given]

    def decide(at: At) -> tuple[Change, list[int]]:
        change, numbers = placed(ground, at, payloads)
        if tokens is not None:
            draft = Draft(ground.store)
            used_in = given[-1].round
            usage.note(ground, draft, at, at.state.send, used_in, tokens)
            change = change._replace(beside=draft.as_write())
        return change, numbers

    return ground.change(session, decide, lease=lease, from_memory=True, durability=durability)


def placed(ground: Ground, at: At, payloads: Sequence[dict[str, Any]]) -> tuple[Change, list[int]]:
    """Payloads as the next nodes of a session, and what becomes of its state."""
    now_ms = ground.now_ms()
    state, number = at.state, at.last
    drafts: list[NodeDraft] = []
    for payload in payloads:
        number += 1
        state = after(state, number, payload)
        drafts.append(NodeDraft(str(number), payload, time=now_ms))
    return Change(state, drafts), list(range(at.last + 1, number + 1))
