"""Converts messages to node payloads and back, and tracks pending calls.

A payload has the fields of the message that are not None, so search, diff and previews treat it
like the payloads of other sessions.
"""

from __future__ import annotations

from typing import Any, Final

from casstore.errors import CorruptionError, InvalidInputError
from casstore.records.log.data import ACTIVE, FOLDED, Message, NewMessage
from casstore.records.log.state import LogState
from casstore.records.log.view import MessageOrder
from casstore.session.data import Node

_TOOL: Final = "tool"
_TEXTS: Final = ("name", "tool_call_id")
_LISTS: Final = (list, tuple)


def payload_of(message: NewMessage) -> dict[str, Any]:
    """The payload of a message; InvalidInputError if it is invalid."""
    if not isinstance(message, NewMessage):
        raise InvalidInputError(f"message must be a NewMessage, got {type(message).__name__}")
    role, content, name, tool_calls, tool_call_id, round_index, meta = message
    if type(role) is not str or not role:
        raise InvalidInputError(f"role must be a str that is not empty, got {role!r}")
    payload: dict[str, Any] = {"role": role}
    if content is not None:
        payload["content"] = content
    if name is not None:
        payload["name"] = name
    if tool_call_id is not None:
        payload["tool_call_id"] = tool_call_id
    for field in _TEXTS:
        if type(payload.get(field, "")) is not str:
            raise InvalidInputError(f"{field} of a message must be a str or None")
    if tool_calls is not None:
        if type(tool_calls) not in _LISTS or any(type(one) is not dict for one in tool_calls):
            raise InvalidInputError(f"tool_calls must be a list of dicts, got {tool_calls!r:.80}")
        if tool_calls:
            payload["tool_calls"] = tool_calls
    if round_index is not None:
        check_number(round_index, "round")
        payload["round"] = round_index
    if meta is not None:
        if type(meta) is not dict:
            raise InvalidInputError(f"meta must be a dict, got {type(meta).__name__}")
        if meta:
            payload["meta"] = meta
    return payload


def check_payload(payload: object) -> None:
    """Refuse a payload that ``payload_of`` would not produce."""
    if type(payload) is not dict:
        raise InvalidInputError(f"a message must be a map, got {type(payload).__name__}")
    known = {name: value for name, value in payload.items() if name in NewMessage._fields}
    if payload_of(NewMessage(**{"role": "", **known})) != payload:
        raise InvalidInputError(
            "a message may have only the fields of NewMessage, and none that is None or empty"
        )


def check_number(number: object, what: str, *, least: int = 0) -> None:
    """InvalidInputError unless ``number`` is an int from ``least`` to 2**53 - 1."""
    if type(number) is not int or not least <= number < 1 << 53:
        raise InvalidInputError(
            f"{what} must be a whole number from {least} to 2**53 - 1, got {number!r}"
        )


def message_of(node: Node, view: MessageOrder) -> Message:
    """The message in a node; ``view`` says whether it is active or folded."""
    payload = node.payload
    try:
        number = int(node.id)
        return Message(
            number,
            payload["role"],
            payload.get("content"),
            payload.get("name"),
            payload.get("tool_calls"),
            payload.get("tool_call_id"),
            payload.get("round"),
            payload.get("meta", {}),
            ACTIVE if view.shows(number) else FOLDED,
            node.time if type(node.time) is int else 0,
        )
    except (ValueError, TypeError, AttributeError, KeyError) as exc:
        raise CorruptionError(f"node {node.id!r} does not hold a valid message") from exc


def call_ids(tool_calls: Any) -> tuple[str, ...]:
    """The ids of tool calls; a call without an id cannot be pending."""
    return tuple(str(one["id"]) for one in tool_calls or () if one.get("id"))


def after(state: LogState, number: int, payload: dict[str, Any]) -> LogState:
    """The state after a message: its calls become pending, or it is the result of a call."""
    tool_calls = payload.get("tool_calls")
    if tool_calls:
        ids = call_ids(tool_calls)
        return state._replace(calling=number if ids else 0, calls=ids, given=None)
    answered = payload.get("tool_call_id")
    if payload["role"] != _TOOL or answered not in state.calls:
        return state
    left = list(state.calls)
    left.remove(answered)
    # Drop the dict of ``set_pending``: only its caller could keep it up to date.
    return state._replace(calling=state.calling if left else 0, calls=tuple(left), given=None)
