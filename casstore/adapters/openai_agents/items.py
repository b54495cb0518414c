"""Reads items of a conversation: their role, kind and tool."""

from __future__ import annotations

import json
from typing import Any, Final

# Calls whose items carry no name: the kind is the tool.
_NAMELESS: Final = frozenset(
    (
        "computer_call",
        "file_search_call",
        "web_search_call",
        "code_interpreter_call",
        "shell_call",
        "apply_patch_call",
    )
)
_SEARCH_CALL: Final = "tool_search_call"
_SEARCH_OUTPUT: Final = "tool_search_output"
_SEARCH: Final = "tool_search"
_REMOTE: Final = frozenset(("mcp_call", "mcp_approval_request"))
_CALLS: Final = (
    _NAMELESS | _REMOTE | {"tool_call", "function_call", "custom_tool_call", _SEARCH_CALL}
)


def is_user(item: Any) -> bool:
    """Whether a turn starts with this item."""
    return type(item) is dict and item.get("role") == "user"


def kind_of(item: Any) -> str:
    """``user``, ``assistant``, or the item's type."""
    if type(item) is dict:
        if item.get("role") in ("user", "assistant"):
            return str(item["role"])
        if item.get("type"):
            return str(item["type"])
    return "other"


def tool_of(item: Any) -> str | None:
    """The tool that an item calls or answers for, qualified by its server or namespace."""
    if type(item) is not dict:
        return None
    kind, name = item.get("type"), item.get("name")
    if kind in _REMOTE and "server_label" in item:
        parts = [str(part) for part in (item["server_label"], name) if part]
        return ".".join(parts) or None
    if kind in _NAMELESS:
        return str(kind)
    if kind in (_SEARCH_CALL, _SEARCH_OUTPUT):
        return _SEARCH
    if name is None:
        return None
    namespace = item.get("namespace")
    if not name or not namespace or namespace == name:
        return str(name)
    return f"{namespace}.{name}"


def tool_calls(turn: list[Any]) -> list[str | None]:
    """The tools called in the items of one turn, once for each call."""
    called = [tool_of(item) for item in turn if kind_of(item) in _CALLS]
    if _SEARCH not in called:
        # The provider may run a search without a call; then only the output names the tool.
        called += [_SEARCH for item in turn if kind_of(item) == _SEARCH_OUTPUT]
    return called


def texts_in(content: Any) -> list[str]:
    """The text of a user's message."""
    if type(content) is str:
        return [content]
    parts = content if type(content) is list else []
    found = [part.get("text") for part in parts if type(part) is dict]
    return [text for text in found if type(text) is str]


def preview(content: Any, max_chars: int | None = None) -> str:
    """The content as text, truncated to a length."""
    text = content if type(content) is str else json.dumps(content, ensure_ascii=False)
    if max_chars is not None and len(text) > max_chars:
        return text[:max_chars] + "..."
    return text
