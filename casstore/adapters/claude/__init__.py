"""The Claude Agent SDK on a store: transcripts of sessions and of their subagents.

    with casstore.open("agents") as store:
        options = ClaudeAgentOptions(session_store=CasstoreSessionStore(store))

Needs the extra: ``pip install '.[claude]'`` in the clone of casstore.
"""

from __future__ import annotations

try:
    import claude_agent_sdk as _  # noqa: F401
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "the Claude Agent SDK is not installed: pip install '.[claude]' in the clone of casstore",
        name=exc.name,
    ) from exc

from casstore.adapters.claude.session_store import CasstoreSessionStore, ExpiredSession

__all__ = ["CasstoreSessionStore", "ExpiredSession"]
