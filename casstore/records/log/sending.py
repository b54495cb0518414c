"""Sends and their rounds: what a user sends begins one, and each answer of a model is a round."""

from __future__ import annotations

from casstore.errors import PendingCallsError
from casstore.records.log import appending, calls
from casstore.records.log.data import NewMessage
from casstore.records.log.ground import At, Change, Ground, LeaseGiven
from casstore.records.log.messages import check_number, payload_of
from casstore.session.arguments import check_flag
from casstore.session.data import UNFENCED


def send(ground: Ground, session: str, message: NewMessage, *, lease: LeaseGiven = UNFENCED) -> int:
    """Append a message that begins a new send; PendingCallsError while calls wait."""
    payload = payload_of(message)

    def decide(at: At) -> tuple[Change, int]:
        waiting = calls.waiting(ground, at)
        if waiting is not None:
            raise PendingCallsError(session, waiting.number, waiting.calls)
        change, numbers = appending.placed(ground, at, [payload])
        begun = change.state._replace(send=change.state.send + 1, round=0)
        return change._replace(state=begun), numbers[0]

    return ground.change(session, decide, lease=lease)


def start_round(ground: Ground, session: str, number: int, *, new_send: bool) -> None:
    """Note down which round of a send is going on."""
    check_number(number, "a round")
    check_flag(new_send, "whether it is a new send")

    def decide(at: At) -> tuple[Change | None, None]:
        state = at.state._replace(round=number, send=at.state.send + new_send)
        return (None if state == at.state else Change(state)), None

    ground.change(session, decide)
