"""Parses payloads for display: the role, and blocks of text, calls, results and images.

A payload may be anything. The usual ways to write a message are known: a text or a list of parts
under ``content``, ``text`` or ``parts``, tool calls inside or next to it, items of a Responses
API, LangChain's messages, entries of a transcript. Everything else is shown as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from casstore.format.canonical import Link
from casstore.format.value_json import plain
from casstore.objects.stored import BytesBeginning
from casstore.session.messages import message_in

TEXT: Final = "text"
THINKING: Final = "thinking"
CALL: Final = "call"
RESULT: Final = "result"
IMAGE: Final = "image"
LINK: Final = "link"
JSON: Final = "json"

_CALLS: Final = frozenset(("tool_use", "tool_call", "function_call", "tool-call", "ToolCall"))
_RESULTS: Final = frozenset(
    ("tool_result", "tool-result", "function_call_output", "ToolResult", "tool_call_output")
)
_TEXTS: Final = frozenset(("text", "input_text", "output_text", "refusal", "Text"))
_THOUGHTS: Final = frozenset(("thinking", "reasoning", "redacted_thinking", "summary_text"))
# Other names of roles, in LangChain and in some APIs, and the role that each is shown as.
_ROLES: Final = {
    "human": "user",
    "ai": "assistant",
    "function": "tool",
    "model": "assistant",
    "developer": "system",
}
_COMPACTIONS: Final = frozenset(("compaction", "compact_boundary", "summary", "context_summary"))
_DEEPEST: Final = 8
_LINE: Final = 96


class Block(NamedTuple):
    """One part of a message."""

    kind: str
    text: str = ""
    #: Of a call: the tool. Of an image: its media type.
    name: str = ""
    #: The id that a call and its result have in common.
    call: str = ""
    is_error: bool = False
    #: Of an image: the path in the payload to its base64 text or URL.
    path: tuple[str | int, ...] = ()
    #: Of a link: the digest that it names, in hexadecimal.
    digest: str = ""


class ParsedPayload(NamedTuple):
    """A parsed payload."""

    #: user, assistant, tool, system, or another role unchanged; empty: not a message
    role: str
    blocks: tuple[Block, ...]
    #: Whether it is a summary that replaces messages.
    is_compaction: bool = False
    #: Tokens and costs that the message itself names.
    usage: str = ""


def read_message(payload: Any) -> ParsedPayload:
    """The role of a payload, and its content as blocks.

    >>> message = read_message({"role": "user", "content": [{"type": "text", "text": "hello"}]})
    >>> message.role, message.blocks[0].text
    ('user', 'hello')
    """
    outer = payload if type(payload) is dict else {}
    message = message_in(payload)
    place: tuple[str | int, ...] = ()
    if message is not None and message is not payload:
        place = ("message",)
    if message is None and type(outer.get("type")) is str:
        message = _of_item(outer)
    if message is None:
        return ParsedPayload("", tuple(_of_other(payload)), _is_compaction(outer))
    role = _ROLES.get(message["role"], message["role"])
    blocks = [*_content(message, place), *_side_calls(message)]
    if role == "tool" and "tool_call_id" in message:
        is_error = message.get("status") == "error"
        blocks = [_as_result(one, str(message["tool_call_id"]), is_error) for one in blocks]
    if blocks and role == "user" and all(one.kind == RESULT for one in blocks):
        role = "tool"
    if not blocks:
        rest = {key: value for key, value in message.items() if key != "role"}
        blocks = [Block(JSON, as_json(rest))] if rest else []
    return ParsedPayload(role, tuple(blocks), _is_compaction(outer), _usage(message))


def _of_item(item: dict[str, Any]) -> dict[str, Any] | None:
    """An item of a Responses API, or a LangChain message, as a message with role and content."""
    kind = item["type"]
    if kind in ("human", "ai", "system", "tool") and "content" in item:
        return {**item, "role": kind}
    if kind in _RESULTS:
        return {"role": "tool", "content": [item]}
    if kind == "reasoning" or (kind in _CALLS and ("name" in item or "function" in item)):
        return {"role": "assistant", "content": [item]}
    return None


def _of_other(payload: Any) -> Iterator[Block]:
    if type(payload) is str:
        yield Block(TEXT, payload)
    elif isinstance(payload, Link):
        yield Block(LINK, digest=payload.digest.hex())
    elif payload is not None:
        yield Block(JSON, as_json(payload))


def _content(message: dict[str, Any], place: tuple[str | int, ...]) -> Iterator[Block]:
    for key in ("text", "content", "parts"):
        value = message.get(key)
        if type(value) is str:
            if value:
                yield Block(TEXT, value)
        elif type(value) is list:
            for at, part in enumerate(value):
                yield from _part(part, (*place, key, at))
        elif value is not None:
            yield from _part(value, (*place, key))


def _part(part: Any, place: tuple[str | int, ...], depth: int = 0) -> Iterator[Block]:
    if type(part) is str:
        yield Block(TEXT, part)
        return
    if isinstance(part, Link):
        yield Block(LINK, digest=part.digest.hex())
        return
    if type(part) is not dict or depth > _DEEPEST:
        yield Block(JSON, as_json(part))
        return
    kind = part.get("type", part.get("kind"))
    kind = kind if type(kind) is str else ""
    if kind in _THOUGHTS:
        yield Block(THINKING, _first_text(part, "thinking", "text", "summary", "content"))
    elif kind in _CALLS:
        yield _call(part)
    elif kind in _RESULTS:
        yield from _results(part, place, depth)
    elif "image" in kind.lower():
        yield _image(part, place)
    elif kind in _TEXTS or (not kind and type(part.get("text")) is str):
        yield Block(TEXT, _first_text(part, "text", "refusal", "content"))
    else:
        yield Block(JSON, as_json(part))


def _call(part: dict[str, Any]) -> Block:
    function = part.get("function")
    inner = function if type(function) is dict else part
    name = inner.get("name", part.get("tool", ""))
    given = next((inner[key] for key in ("input", "arguments", "args") if key in inner), None)
    if type(given) is str:
        # Some APIs send the arguments as JSON in a text.
        try:
            given = json.loads(given)
        except ValueError:
            pass
    text = given if type(given) is str else _brief_json(given)
    return Block(CALL, text, str(name), _call_id(part))


def _call_id(part: dict[str, Any]) -> str:
    for key in ("tool_use_id", "tool_call_id", "call_id", "id"):
        if type(part.get(key)) is str:
            return str(part[key])
    return ""


def _results(part: dict[str, Any], place: tuple[str | int, ...], depth: int) -> Iterator[Block]:
    call = _call_id(part)
    is_error = part.get("is_error") is True
    for key in ("content", "output", "result"):
        if key not in part:
            continue
        value = part[key]
        if type(value) is list:
            for at, inner in enumerate(value):
                for block in _part(inner, (*place, key, at), depth + 1):
                    yield _as_result(block, call, is_error)
            return
        text = value if type(value) is str else as_json(value)
        yield Block(RESULT, text, call=call, is_error=is_error)
        return
    yield Block(RESULT, "", call=call, is_error=is_error)


def _as_result(block: Block, call: str, is_error: bool) -> Block:
    if block.kind in (TEXT, JSON):
        return block._replace(kind=RESULT, call=call, is_error=is_error)
    return block


def _image(part: dict[str, Any], place: tuple[str | int, ...]) -> Block:
    source = part.get("source")
    if type(source) is dict:
        if isinstance(source.get("data"), Link):
            return Block(LINK, digest=source["data"].digest.hex())
        where = (*place, "source", "data")
        return Block(IMAGE, _url_of(source.get("data")), str(source.get("media_type", "")),
                     path=where)  # fmt: skip
    for key in ("data", "image_url", "url"):
        value = part.get(key)
        if isinstance(value, Link):
            return Block(LINK, digest=value.digest.hex())
        if type(value) is dict and type(value.get("url")) is str:
            return Block(IMAGE, _url_of(value["url"]), path=(*place, key, "url"))
        if type(value) is str:
            return Block(IMAGE, _url_of(value), path=(*place, key))
    return Block(JSON, as_json(part))


def _url_of(data: Any) -> str:
    """The data of an image if it is a URL elsewhere, otherwise the empty text."""
    if type(data) is str and not data.startswith("data:") and "://" in data[:12]:
        return data
    return ""


def _side_calls(message: dict[str, Any]) -> Iterator[Block]:
    """Tool calls under ``tool_calls``, as in Chat Completions and LangChain, not in the content."""
    known: set[str] = set()
    content = message.get("content")
    if type(content) is list:
        known = {_call_id(part) for part in content if type(part) is dict}
    calls = message.get("tool_calls")
    for call in calls if type(calls) is list else ():
        if type(call) is dict and (not _call_id(call) or _call_id(call) not in known):
            yield _call(call)


def _first_text(part: dict[str, Any], *names: str) -> str:
    for name in names:
        value = part.get(name)
        if type(value) is str:
            return value
        if type(value) is list:
            texts = [one.get("text") if type(one) is dict else one for one in value]
            return "\n\n".join([text for text in texts if type(text) is str])
    return ""


def _is_compaction(outer: dict[str, Any]) -> bool:
    names = (outer.get("type"), outer.get("kind"), outer.get("subtype"))
    return outer.get("isCompactSummary") is True or any(
        type(name) is str and name in _COMPACTIONS for name in names
    )


def _usage(message: dict[str, Any]) -> str:
    """The token counts and the cost in a message, in words."""
    used = message.get("usage", message.get("usage_metadata"))
    words: list[str] = []
    if type(used) is dict:
        for label, names in (
            ("tokens in", ("input_tokens", "prompt_tokens", "input")),
            ("out", ("output_tokens", "completion_tokens", "output")),
        ):
            number = next((used[name] for name in names if type(used.get(name)) is int), None)
            if number is not None:
                words.append(f"{number:,} {label}")
    for holder in (message, used if type(used) is dict else {}):
        for name in ("cost", "cost_usd", "total_cost_usd"):
            cost = holder.get(name)
            if type(cost) in (int, float):
                return " · ".join([*words, f"${cost:,.4f}"])
    return " · ".join(words)


def _brief_json(value: Any) -> str:
    """JSON on one line if it fits."""
    text = json.dumps(_printable(value), ensure_ascii=False)
    return text if len(text) <= _LINE else as_json(value)


def as_json(value: Any) -> str:
    """A value as indented JSON; bytes by their length, links by their digest."""
    return json.dumps(_printable(value), ensure_ascii=False, indent=1)


def without_bytes(value: Any) -> Any:
    """The value with bytes replaced by their length: --redact cannot search inside bytes."""
    if isinstance(value, bytes):
        length = value.size_bytes if isinstance(value, BytesBeginning) else len(value)
        return f"<{length:,} bytes>"
    if isinstance(value, dict):
        return {key: without_bytes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_bytes(item) for item in value]
    return value


def _printable(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        length = value.size_bytes if isinstance(value, BytesBeginning) else len(value)
        if length > 64:
            return f"<{length:,} bytes, {bytes(value[:8]).hex()}…>"
        return plain(value)
    if isinstance(value, Link):
        return plain(value)
    if isinstance(value, dict):
        return {str(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value
