"""The methods of the SDK's AdvancedSQLiteSession, with the same names and results."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from casstore.adapters.openai_agents.branches import Branch
from casstore.adapters.openai_agents.conversation import TurnUsage
from casstore.errors import InvalidInputError

if TYPE_CHECKING:
    from casstore.adapters.openai_agents.session import Turn

_PREVIEW_CHARS: Final = 100
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


class SqliteNames(ABC):
    """The additional methods of AdvancedSQLiteSession, based on those of a session."""

    @property
    @abstractmethod
    def current_branch(self) -> str:
        """As in the session."""

    @abstractmethod
    async def branch(self, turn: int | None = None, name: str | None = None) -> str:
        """As in the session."""

    @abstractmethod
    async def switch(self, name: str) -> None:
        """As in the session."""

    @abstractmethod
    async def branches(self) -> list[Branch]:
        """As in the session."""

    @abstractmethod
    async def turns(self, branch_id: str | None = None) -> list[Turn]:
        """As in the session."""

    @abstractmethod
    async def usage(self, branch_id: str | None = None) -> dict[str, list[TurnUsage]]:
        """As in the session."""

    # --- branches -------------------------------------------------------------------------

    async def create_branch_from_turn(
        self, turn_number: int, branch_name: str | None = None
    ) -> str:
        """Create a branch before the message of a turn, and switch to it; returns its name."""
        return await self.branch(turn_number, branch_name)

    async def create_branch_from_content(
        self, search_term: str, branch_name: str | None = None
    ) -> str:
        """Create a branch before the first user message that contains a text; returns its name."""
        found = await self.find_turns_by_content(search_term)
        if not found:
            raise InvalidInputError(f"no message of the user contains {search_term!r}")
        return await self.branch(found[0]["turn"], branch_name)

    async def switch_to_branch(self, branch_id: str) -> None:
        """Switch to another branch."""
        await self.switch(branch_id)

    async def list_branches(self) -> list[dict[str, Any]]:
        """All branches, oldest first, with their counts."""
        return [
            {
                "branch_id": each.name,
                "message_count": each.items,
                "user_turns": each.turns,
                "is_current": each.name == self.current_branch,
                "created_at": _time_text(each.created_at_ms),
            }
            for each in await self.branches()
        ]

    # --- turns ----------------------------------------------------------------------------

    async def get_conversation_turns(self, branch_id: str | None = None) -> list[dict[str, Any]]:
        """The turns of a branch, by the user's message in full and cut to a hundred characters."""
        return [_shown(turn, _PREVIEW_CHARS) for turn in await self.turns(branch_id) if turn.number]

    async def find_turns_by_content(
        self, search_term: str, branch_id: str | None = None
    ) -> list[dict[str, Any]]:
        """The turns whose user message contains a text; ASCII letters match in either case."""
        pattern = re.compile(re.escape(search_term), re.IGNORECASE | re.ASCII)
        return [
            _shown(turn, None)
            for turn in await self.turns(branch_id)
            if turn.number
            and any(pattern.search(text) for text in texts_in(turn.items[0].get("content", "")))
        ]

    async def get_conversation_by_turns(
        self, branch_id: str | None = None
    ) -> dict[int, list[dict[str, str | None]]]:
        """For each turn, the kinds of its items and the tools they call."""
        return {
            turn.number: [
                {"type": kind_of(item), "tool_name": tool_of(item)} for item in turn.items
            ]
            for turn in await self.turns(branch_id)
        }

    async def get_tool_usage(
        self, branch_id: str | None = None
    ) -> list[tuple[str | None, int, int]]:
        """The tools called in each turn of a branch: tool, number of calls, turn."""
        return [
            (tool, count, turn.number)
            for turn in await self.turns(branch_id)
            for tool, count in sorted(Counter(tool_calls(turn.items)).items(), key=str)
        ]

    # --- usage ----------------------------------------------------------------------------

    async def get_session_usage(self, branch_id: str | None = None) -> dict[str, int] | None:
        """The recorded usage of a branch, or of all together; None if none is recorded."""
        rows = [row for each in (await self.usage(branch_id)).values() for row in each]
        if not rows:
            return None
        return {
            "requests": sum(row.requests for row in rows),
            "input_tokens": sum(row.input_tokens for row in rows),
            "output_tokens": sum(row.output_tokens for row in rows),
            "total_tokens": sum(row.total_tokens for row in rows),
            "total_turns": len(rows),
        }

    async def get_turn_usage(
        self, user_turn_number: int | None = None, branch_id: str | None = None
    ) -> list[dict[str, Any]] | dict[str, Any]:
        """The recorded usage of the turns of a branch, or of one turn; {} if it has none."""
        name = self.current_branch if branch_id is None else branch_id
        rows = (await self.usage(name)).get(name, [])
        if user_turn_number is None:
            return [{"user_turn_number": row.turn, **_counts(row)} for row in rows]
        return next((_counts(row) for row in rows if row.turn == user_turn_number), {})


def _counts(row: TurnUsage) -> dict[str, Any]:
    return {
        "requests": row.requests,
        "input_tokens": row.input_tokens,
        "output_tokens": row.output_tokens,
        "total_tokens": row.total_tokens,
        "input_tokens_details": row.input_details,
        "output_tokens_details": row.output_details,
    }


def _shown(turn: Turn, max_chars: int | None) -> dict[str, Any]:
    content = turn.items[0].get("content", "")
    return {
        "turn": turn.number,
        "content": preview(content, max_chars),
        "full_content": content,
        "timestamp": _time_text(turn.began_at_ms),
        "can_branch": True,
    }


def _time_text(time_ms: int | None) -> str | None:
    """A time in SQLite's format."""
    if not time_ms:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


# --- items: their kind, tool and text ---------------------------------------------------------


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
