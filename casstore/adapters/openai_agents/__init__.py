"""The OpenAI Agents SDK on a store: conversations with branches from any turn.

    with casstore.open("agents") as store:
        await Runner.run(agent, "hello", session=CasstoreSession(store, "a conversation"))

Needs the extra: ``pip install '.[openai-agents]'`` in the clone of casstore.
"""

from __future__ import annotations

try:
    import agents as _  # noqa: F401
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "the OpenAI Agents SDK is not installed: "
        "pip install '.[openai-agents]' in the clone of casstore",
        name=exc.name,
    ) from exc

from casstore.adapters.openai_agents.branches import Branch
from casstore.adapters.openai_agents.importing import import_sessions
from casstore.adapters.openai_agents.session import CasstoreSession

__all__ = ["Branch", "CasstoreSession", "import_sessions"]
