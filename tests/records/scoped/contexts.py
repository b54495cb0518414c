"""Contexts and policies that the tests of scoped state use."""

from __future__ import annotations

from typing import Any

from casstore.records.scoped import SCOPES, Context, StatePolicy

RUNNER = "plugin:me/agent/default"
HERE = Context(
    RUNNER,
    "binding-1",
    bot_id="bot-1",
    workspace_id="space-1",
    conversation_id="talk-1",
    actor_id="ann",
    subject_id="ticket-7",
    subject_type="ticket",
)
ALL = StatePolicy(scopes=SCOPES)
TALK: dict[str, Any] = {"workspace_id": "space-1", "bot_id": "bot-1", "conversation_id": "talk-1"}
