"""Messages: converted to node payloads and back, appended, and read by number.

A payload has the fields of the message that are not None, so search, diff and previews treat it
like the payloads of other sessions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from casstore.errors import CorruptionError, InvalidInputError, NotFoundError
from casstore.records.log import usage
from casstore.records.log.data import (
    ACTIVE,
    FOLDED,
    Message,
    NewMessage,
    Tokens,
    check_number,
)
from casstore.records.log.state import LogState, MessageOrder
from casstore.records.log.tables import At, LeaseGiven, LogChange, LogTables
from casstore.session.arguments import check_kind, list_of
from casstore.session.attempts import read_again
from casstore.session.data import Node, NodeDraft
from casstore.session.loading import PATH, Nodes, open_nodes, visible_leaf
from casstore.session.records import Draft
from casstore.session.state import State

_TOOL: Final = "tool"
_TEXTS: Final = ("name", "tool_call_id")
_LISTS: Final = (list, tuple)


def payload_of(message: NewMessage) -> dict[str, Any]:
    """The payload of a message; InvalidInputError if it is invalid."""
    check_kind(message, "message", NewMessage)
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


# --- appending ------------------------------------------------------------------------------------


def append_messages(
    tables: LogTables,
    session: str,
    messages: Sequence[NewMessage],
    tokens: Tokens | None = None,
    *,
    lease: LeaseGiven = None,
    durability: str | None = None,
) -> list[int]:
    """Append messages to a session, all or none; returns their numbers.

    The same commit updates the pending calls and records the round's tokens.
    """
    given = list_of(messages, "messages")
    if not given:
        raise InvalidInputError("messages is empty; pass at least one message")
    payloads = [payload_of(message) for message in given]

    def decide(at: At) -> tuple[LogChange, list[int]]:
        change, numbers = placed(tables, at, payloads)
        if tokens is not None:
            draft = Draft(tables.store)
            usage.note(tables, draft, at, at.state.send, given[-1].round, tokens)
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


# --- reading --------------------------------------------------------------------------------------


class Numbered:
    """The nodes of a session by number, some of which may have been removed."""

    def __init__(self, nodes: Nodes, last: int) -> None:
        self.nodes = nodes
        # Numbers ascend along the path. If there are as many nodes as numbers, none is missing, and
        # a number gives its position without a search.
        self._whole = len(nodes) == last

    def between(self, first: int, last: int) -> Nodes:
        """The nodes from ``first`` to ``last``, inclusive."""
        return self.nodes[self._position(first) : self._position(last + 1)]

    def _position(self, number: int) -> int:
        if self._whole:
            return min(max(number - 1, 0), len(self.nodes))
        return bisect_left(
            range(len(self.nodes)), number, key=lambda place: int(self.nodes[place].id)
        )


def nodes_of(
    tables: LogTables, session: str, revision: State, last: int, *, payloads: bool = True
) -> Numbered:
    """The nodes of a session at a revision whose last message is ``last``."""
    runtime = tables.runtime
    hidden = runtime.hidden(revision.head)
    leaf, _ = visible_leaf(runtime, revision, hidden)
    nodes = open_nodes(runtime, session, revision, hidden, PATH, leaf, payloads=payloads)
    return Numbered(nodes, last)


def numbered(tables: LogTables, at: At, *, payloads: bool = True) -> Numbered:
    """As ``nodes_of``, for a session that was read."""
    return nodes_of(tables, at.session, at.revision, at.last, payloads=payloads)


def opened(tables: LogTables, session: str, *, payloads: bool = True) -> tuple[At, Numbered]:
    """The current revision of a session, and its nodes, read once: the caller repeats it."""
    at = tables.load(session)
    return at, numbered(tables, at, payloads=payloads)


def active_messages(tables: LogTables, session: str) -> list[Message]:
    """The messages shown, in their order: the context of the next call of a model."""

    def read() -> list[Message]:
        at, nodes = opened(tables, session)
        return [
            message_of(node, at.state.view)
            for first, last in at.state.view.shown(at.last)
            for node in nodes.between(first, last)
        ]

    return read_again(read)


def all_messages(
    tables: LogTables, session: str, first: int, last: int | None
) -> Iterator[Message]:
    """All current messages in order of arrival, including folded ones; read a page at a time."""
    check_number(first, "first")
    if last is not None:
        check_number(last, "last")
    at, nodes = read_again(lambda: opened(tables, session))
    return _from(tables, at, nodes, first, at.last if last is None else last)


def _from(tables: LogTables, at: At, nodes: Numbered, first: int, last: int) -> Iterator[Message]:
    """Yield messages by number; continue on the head if the revision is deleted meanwhile.

    Not ``read_again``: the messages that were yielded must not be read a second time.
    """
    last_error = ""
    while True:
        try:
            for node in nodes.between(first, last):
                yield message_of(node, at.state.view)
                first = int(node.id) + 1
            return
        except (CorruptionError, NotFoundError) as exc:
            # A message is the same at every revision that has it. If the same object is missing
            # again, the store is damaged.
            if repr(exc) == last_error:
                raise
            last_error = repr(exc)
            at, nodes = read_again(partial(opened, tables, at.session))


def find_message(tables: LogTables, session: str, number: int) -> Message | None:
    """One message; None if it does not exist or was removed."""
    check_number(number, "number")

    def read() -> Message | None:
        at, nodes = opened(tables, session)
        found = nodes.between(number, number)
        return message_of(found[0], at.state.view) if found else None

    return read_again(read)
