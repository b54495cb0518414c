"""Converts nodes of lash into nodes of a session.

A node keeps its id, parent, cause, frame and time; its payload is the rest of its row. A message of
the conversation is stored under ``message`` with its role in small letters, which is how a session
recognises messages. A node whose parent is gone becomes a root.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.compat.importing import Notes
from casstore.compat.lash_database import LashDatabase
from casstore.errors import CycleError, DamagedSourceError, InvalidInputError
from casstore.records.json_values import storable
from casstore.session.data import NodeDraft
from casstore.session.messages import message_in

# The keys of a row that are not payload.
_HEADER: Final = ("node_id", "parent_node_id", "caused_by", "agent_frame_id", "timestamp")
_ROLES: Final = {"User": "user", "Assistant": "assistant", "System": "system"}

_ORPHANS: Final = "nodes whose parent is gone, stored as roots"
_LATE_PARENTS: Final = "nodes inserted before their parent, stored after it"
_AS_TEXT: Final = "payloads stored as their JSON, in bytes"
_HEALED: Final = "leaf that is gone or hidden, replaced by the latest message"
_DAMAGED: Final = "damaged nodes, left out"


class LashGraph(NamedTuple):
    """The graph of a session."""

    drafts: list[NodeDraft]
    hidden: list[str]
    leaf: str | None


def read_nodes(
    database: LashDatabase, leaf: str | None, notes: Notes, *, leave_out: bool
) -> LashGraph:
    """The graph of the session. ``leave_out``: damaged nodes are noted and left out."""
    drafts: list[NodeDraft] = []
    hidden: list[str] = []
    for node, text, is_hidden in database.nodes():
        try:
            drafts.append(_draft(database, node, text, notes))
        except DamagedSourceError:
            if not leave_out:
                raise
            notes.add(_DAMAGED, node)
            continue
        if is_hidden:
            hidden.append(node)
    drafts = _with_parents(drafts, notes)
    _require_no_cycle(database, drafts)
    gone = set(hidden)
    visible = [draft for draft in drafts if draft.id not in gone]
    if leaf is not None and leaf not in {draft.id for draft in visible}:
        notes.add(_HEALED, leaf)
        said = [draft.id for draft in visible if message_in(draft.payload) is not None]
        leaf = said[-1] if said else None
    return LashGraph(drafts, hidden, leaf)


def _draft(database: LashDatabase, node: str, text: Any, notes: Notes) -> NodeDraft:
    place = f"node {node!r}"
    fields = database.object(place, text)
    if fields.get("node_id") != node:
        raise database.damaged(place, f"its JSON has the id {fields.get('node_id')!r:.80}")
    parent, frame = fields.get("parent_node_id"), fields.get("agent_frame_id")
    for name, value in (("parent_node_id", parent), ("agent_frame_id", frame)):
        if value is not None and type(value) is not str:
            raise database.damaged(place, f"its {name} is not a text")
    time = fields.get("timestamp")
    if time is not None and type(time) is not str:
        raise database.damaged(place, "its timestamp is not a text")
    payload = _payload({name: value for name, value in fields.items() if name not in _HEADER})
    try:
        kept = storable(payload)
        cause = storable(fields.get("caused_by"))
    except InvalidInputError as exc:
        raise database.damaged(place, str(exc)) from exc
    if kept is not payload or cause is not fields.get("caused_by"):
        notes.add(_AS_TEXT, node)
    return NodeDraft(node, kept, parent, cause, frame or None, time)


def _payload(payload: dict[str, Any]) -> dict[str, Any]:
    """A payload with the message of a conversation under ``message``."""
    event = payload.get("event")
    if payload.get("kind") == "event" and type(event) is dict and "message" not in payload:
        said = event.get("Conversation")
        if len(event) == 1 and type(said) is dict:
            payload = {name: value for name, value in payload.items() if name != "event"}
            payload["message"] = said
    said = payload.get("message")
    if type(said) is dict and type(said.get("role")) is str:
        payload = {**payload, "message": {**said, "role": _ROLES.get(said["role"], said["role"])}}
    return payload


def _with_parents(drafts: list[NodeDraft], notes: Notes) -> list[NodeDraft]:
    """The nodes; those whose parent does not exist become roots."""
    there = {draft.id for draft in drafts}
    before: set[str] = set()
    placed: list[NodeDraft] = []
    for draft in drafts:
        parent = draft.parent
        if parent is not None and parent not in there:
            notes.add(_ORPHANS, draft.id)
            draft = draft._replace(parent=None)
        elif parent is not None and parent not in before:
            notes.add(_LATE_PARENTS, draft.id)
        before.add(draft.id)
        placed.append(draft)
    return placed


def _require_no_cycle(database: LashDatabase, drafts: list[NodeDraft]) -> None:
    parents = {draft.id: draft.parent for draft in drafts}
    done: set[str] = set()
    for node in parents:
        waiting: set[str] = set()
        step: Any = node
        while step is not None and step not in done:
            if step in waiting:
                raise CycleError(step, f"of {database.source.path} is its own ancestor")
            waiting.add(step)
            step = parents[step]
        done |= waiting
