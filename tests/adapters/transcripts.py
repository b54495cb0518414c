"""Transcripts as the Claude Agent SDK's command writes them, made up."""

from __future__ import annotations

import random
import uuid
from typing import Any

Entry = dict[str, Any]


def new_id(source: random.Random) -> str:
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


def transcript(session: str, count: int, *, seed: int = 0, chars: int = 1500) -> list[Entry]:
    """User and assistant in turn, each the child of the one before."""
    source = random.Random(seed)
    entries: list[Entry] = []
    parent = None
    for at in range(count):
        role = ("user", "assistant")[at % 2]
        text = source.randbytes(chars // 2).hex()
        content: Any = text if role == "user" else [{"type": "text", "text": text}]
        entries.append(
            {
                "parentUuid": parent,
                "isSidechain": False,
                "userType": "external",
                "cwd": "/home/ada/project",
                "sessionId": session,
                "version": "2.1.0",
                "gitBranch": "main",
                "type": role,
                "message": {"role": role, "content": content},
                "uuid": new_id(source),
                "timestamp": f"2026-01-01T00:{at // 60 % 60:02d}:{at % 60:02d}.{at % 1000:03d}Z",
            }
        )
        parent = entries[-1]["uuid"]
    return entries
