"""State by how long it lives: working state, checkpoints, user data; classes, holds, seals.

    life = Lifecycles(store)
    with life.create_session("s1", user="anna") as session:
        session.working.set("draft", "...")
        session.checkpoint("first draft", ["draft"])
    life.users.put("anna", "language", "en")

``docs/guides/lifecycles.md`` is the guide.
"""

from __future__ import annotations

from casstore.records.lifecycles.annotation import CLASSES, Annotation, Hold, Note, Seal
from casstore.records.lifecycles.checkpoints import AgentCheckpoint, AgentSession, CheckpointInfo
from casstore.records.lifecycles.key_files import FileKeys, KeyStore
from casstore.records.lifecycles.lifecycles import Lifecycles, SessionEnd
from casstore.records.lifecycles.references import Ref
from casstore.records.lifecycles.removal import Stayed
from casstore.records.lifecycles.user_data import UserErasure

__all__ = [
    "CLASSES",
    "AgentCheckpoint",
    "AgentSession",
    "Annotation",
    "CheckpointInfo",
    "FileKeys",
    "Hold",
    "KeyStore",
    "Lifecycles",
    "Note",
    "Ref",
    "Seal",
    "SessionEnd",
    "Stayed",
    "UserErasure",
]
