"""Recognises messages among payloads, for the first message and the count that a picker shows.

A payload may be any value. It is a message if it is a map with a text under ``role``, or has such a
map under ``message``. It is a user's message if the role is ``user`` and the content is more than
the results of tools.
"""

from __future__ import annotations

from typing import Any, Final

IMAGE_TEXT: Final = "[Image attached]"
_RESULT_KINDS: Final = frozenset(
    ("tool_result", "tool-result", "function_call_output", "ToolResult")
)


def message_in(payload: Any) -> dict[str, Any] | None:
    """The message that a payload is or contains; None if it is not a message."""
    if type(payload) is not dict:
        return None
    if type(payload.get("role")) is str:
        return payload
    inner = payload.get("message")
    if type(inner) is dict and type(inner.get("role")) is str:
        return inner
    return None


def is_user_message(payload: Any) -> bool:
    """True if the payload is a user's message, and more than the results of tools."""
    message = message_in(payload)
    if message is None or message["role"] != "user":
        return False
    if type(message.get("content")) is str and "parts" not in message:
        # The common case: plain text.
        return True
    parts = _parts(message)
    return not parts or not all(_is_result(part) for part in parts)


def user_text(payload: Any) -> str:
    """The first text of a message; ``IMAGE_TEXT`` if it has only an image; else ``""``."""
    message = message_in(payload) or {}
    for key in ("text", "content"):
        if type(message.get(key)) is str:
            whole: str = message[key]
            return whole
    image = False
    for part in _parts(message):
        if type(part) is str:
            return part
        if type(part) is dict:
            text = part.get("text")
            if type(text) is not str and "kind" in part and not _is_result(part):
                # A part with a ``kind`` may have its text under ``content``; an image has none.
                text = part.get("content") or None
            if type(text) is str:
                return text
        image = image or "image" in _kind(part).lower()
    return IMAGE_TEXT if image or "image" in _kind(message) else ""


def _parts(message: dict[str, Any]) -> list[Any]:
    for key in ("parts", "content"):
        if type(message.get(key)) is list:
            parts: list[Any] = message[key]
            return parts
    return []


def _is_result(part: Any) -> bool:
    return _kind(part) in _RESULT_KINDS


def _kind(part: Any) -> str:
    if type(part) is not dict:
        return ""
    kind = part.get("type", part.get("kind"))
    return kind if type(kind) is str else ""
