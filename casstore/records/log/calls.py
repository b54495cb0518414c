"""Tool calls that wait for their results: whole, as their message has them, until each is there.

Nothing is copied: a session notes which message makes the calls and which of them are without
result. A crash at any moment leaves exactly those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from casstore.errors import CorruptionError, InvalidInputError
from casstore.records.log import appending
from casstore.records.log.data import NewMessage, Pending
from casstore.records.log.ground import At, Change, Ground, LeaseGiven
from casstore.records.log.messages import payload_of
from casstore.records.log.reading import numbered
from casstore.session.arguments import check_callable, check_text, list_of
from casstore.session.attempts import read_again
from casstore.session.data import UNFENCED

Call = Mapping[str, Any]


def pending(ground: Ground, session: str) -> Pending | None:
    """The calls of a session that have no results; None if there are none."""
    return read_again(lambda: waiting(ground, ground.at(session)))


def waiting(ground: Ground, at: At) -> Pending | None:
    """The same at one revision."""
    state = at.state
    if not state.calling:
        return None
    found = numbered(ground, at).between(state.calling, state.calling)
    if not found:
        raise CorruptionError(f"message {state.calling} of session {at.session!r} is gone")
    node = found[0]
    left = list(state.calls)
    calls: list[Call] = []
    # From the end: of two calls with one id, the first has had its result.
    for call in reversed(node.payload.get("tool_calls") or ()):
        if str(call.get("id")) in left:
            left.remove(str(call["id"]))
            calls.append(call)
    return Pending(state.calling, node.payload.get("round"), tuple(reversed(calls)))


def name_of(call: Call) -> str | None:
    """The name of the tool that a call is to."""
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else call.get("name")
    return name if type(name) is str else None


def _result(call: Call, found: Pending, content: Any) -> NewMessage:
    return NewMessage(
        "tool", content, name_of(call), tool_call_id=str(call["id"]), round=found.round
    )


def abort(ground: Ground, session: str, reason: str, *, lease: LeaseGiven = UNFENCED) -> int:
    """Give every call that waits a result that says it was aborted; how many there were."""
    if type(reason) is not str:
        raise InvalidInputError(f"a reason is a str, not {type(reason).__name__}")

    def decide(at: At) -> tuple[Change | None, int]:
        found = waiting(ground, at)
        if found is None:
            return None, 0
        payloads = [
            payload_of(_result(call, found, f"<aborted: {reason}>")) for call in found.calls
        ]
        return appending.placed(ground, at, payloads)[0], len(payloads)

    return ground.change(session, decide, lease=lease)


def resume(
    ground: Ground,
    session: str,
    execute: Callable[[Call], Any],
    *,
    lease: LeaseGiven = UNFENCED,
) -> list[int]:
    """Execute the calls that wait, one after the other; the numbers of their results.

    Each result is appended as soon as it is there, so after a crash only the rest is left. What
    ``execute`` raises becomes the result's text: a call must have one.
    """
    # Called, it would fail, and every call that waits would have that as its result.
    check_callable(execute, "what executes calls")
    numbers: list[int] = []
    while (found := pending(ground, session)) is not None:
        call = found.calls[0]
        try:
            content = execute(call)
        except Exception as exc:
            # A tool is anybody's code and may raise anything. Nothing is hidden: the model is told,
            # and so is every reader of the log. What ends the process (Ctrl-C) passes through, and
            # the call goes on waiting.
            content = f"Error on resume: {exc}"
        numbers += appending.append(ground, session, [_result(call, found, content)], lease=lease)
    return numbers


def set_waiting(ground: Ground, session: str, waiting: Any) -> None:
    """Say which calls wait: ids of some that do, or None; or a dict, in a form of one's own."""
    ids: list[str] = []
    if waiting is not None and type(waiting) is not dict:
        ids = list_of(waiting, "ids of calls that wait")
        for one in ids:
            check_text(one, "the id of a call")

    def decide(at: At) -> tuple[Change | None, None]:
        state = at.state._replace(given=None)
        if waiting is None:
            state = state._replace(calling=0, calls=())
        elif type(waiting) is dict:
            state = state._replace(given=waiting)
        else:
            left = [one for one in at.state.calls if one in ids]
            state = state._replace(calling=state.calling if left else 0, calls=tuple(left))
        return (None if state == at.state else Change(state)), None

    ground.change(session, decide)
