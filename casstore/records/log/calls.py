"""Pending tool calls, and sends, which require that no call is pending.

A session records which message makes the calls and which of them have no result; the calls
themselves stay in the message. So after a crash at any moment, exactly those without a result are
pending.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from casstore.errors import CorruptionError, InvalidInputError, PendingCallsError
from casstore.records.log.data import NewMessage, Pending, check_number
from casstore.records.log.messages import append_messages, numbered, payload_of, placed
from casstore.records.log.tables import At, LeaseGiven, LogChange, LogTables
from casstore.session.arguments import check_callable, check_flag, check_text, list_of
from casstore.session.attempts import read_again

Call = Mapping[str, Any]


def pending(tables: LogTables, session: str) -> Pending | None:
    """The calls of a session that have no result yet, or None."""
    return read_again(lambda: waiting(tables, tables.load(session)))


def waiting(tables: LogTables, at: At) -> Pending | None:
    """As ``pending``, at one revision."""
    state = at.state
    if not state.calling:
        return None
    found = numbered(tables, at).between(state.calling, state.calling)
    if not found:
        raise CorruptionError(
            f"message {state.calling} of session {at.session!r} has pending tool calls, but is gone"
        )
    node = found[0]
    left = list(state.calls)
    calls: list[Call] = []
    # Search from the end: of two calls with the same id, the first already has its result.
    for call in reversed(node.payload.get("tool_calls") or ()):
        if str(call.get("id")) in left:
            left.remove(str(call["id"]))
            calls.append(call)
    return Pending(state.calling, node.payload.get("round"), tuple(reversed(calls)))


def name_of(call: Call) -> str | None:
    """The name of the tool of a call."""
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else call.get("name")
    return name if type(name) is str else None


def _result(call: Call, found: Pending, content: Any) -> NewMessage:
    return NewMessage(
        "tool", content, name_of(call), tool_call_id=str(call["id"]), round=found.round
    )


def abort(tables: LogTables, session: str, reason: str, *, lease: LeaseGiven = None) -> int:
    """Append an "aborted" result for every pending call; returns how many there were."""
    if type(reason) is not str:
        raise InvalidInputError(f"reason must be a str, got {type(reason).__name__}")

    def decide(at: At) -> tuple[LogChange | None, int]:
        found = waiting(tables, at)
        if found is None:
            return None, 0
        payloads = [
            payload_of(_result(call, found, f"<aborted: {reason}>")) for call in found.calls
        ]
        return placed(tables, at, payloads)[0], len(payloads)

    return tables.change(session, decide, lease=lease)


def resume(
    tables: LogTables,
    session: str,
    execute: Callable[[Call], Any],
    *,
    lease: LeaseGiven = None,
) -> list[int]:
    """Execute the pending calls in order; returns the numbers of their results.

    Each result is appended as soon as it exists, so after a crash only the other calls are pending.
    An exception raised by ``execute`` becomes the text of the result: every call needs a result.
    """
    # Check it first: otherwise the TypeError would be stored as the result of every call.
    check_callable(execute, "execute")
    numbers: list[int] = []
    while (found := pending(tables, session)) is not None:
        call = found.calls[0]
        try:
            content = execute(call)
        except Exception as exc:
            # A tool may raise anything. The error is stored as the result, so the model and every
            # reader of the log see it. KeyboardInterrupt and SystemExit propagate, and the call
            # stays pending.
            content = f"Error on resume: {exc}"
        numbers += append_messages(tables, session, [_result(call, found, content)], lease=lease)
    return numbers


def set_waiting(tables: LogTables, session: str, waiting: Any) -> None:
    """Reduce the pending calls to these ids, or to none (None); or store a dict of the caller's."""
    ids: list[str] = []
    if waiting is not None and type(waiting) is not dict:
        ids = list_of(waiting, "waiting")
        for one in ids:
            check_text(one, "an id in waiting")

    def decide(at: At) -> tuple[LogChange | None, None]:
        state = at.state._replace(given=None)
        if waiting is None:
            state = state._replace(calling=0, calls=())
        elif type(waiting) is dict:
            state = state._replace(given=waiting)
        else:
            left = [one for one in at.state.calls if one in ids]
            state = state._replace(calling=state.calling if left else 0, calls=tuple(left))
        return (None if state == at.state else LogChange(state)), None

    tables.change(session, decide)


# --- sends and their rounds -----------------------------------------------------------------------


def send(tables: LogTables, session: str, message: NewMessage, *, lease: LeaseGiven = None) -> int:
    """Append a message that starts a new send; PendingCallsError while calls are pending."""
    payload = payload_of(message)

    def decide(at: At) -> tuple[LogChange, int]:
        found = waiting(tables, at)
        if found is not None:
            raise PendingCallsError(session, found.number, found.calls)
        change, numbers = placed(tables, at, [payload])
        begun = change.state._replace(send=change.state.send + 1, round=0)
        return change._replace(state=begun), numbers[0]

    return tables.change(session, decide, lease=lease)


def start_round(tables: LogTables, session: str, number: int, *, new_send: bool) -> None:
    """Record the current round of a send."""
    check_number(number, "round")
    check_flag(new_send, "new_send")

    def decide(at: At) -> tuple[LogChange | None, None]:
        state = at.state._replace(round=number, send=at.state.send + new_send)
        return (None if state == at.state else LogChange(state)), None

    tables.change(session, decide)
