"""The tools that write: fork, label, append. Each is one call of the store's own interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from casstore.errors import InvalidInputError
from casstore.mcp.reading import At, Document
from casstore.store import Store


def fork_session(
    store: Store, session: str, new_session: str, at: At, node: str | None
) -> Document:
    """Make a new session that continues another one."""
    head = store.fork(session, new_session, at=at, node=node)
    return {"session": new_session, "revision": head.revision, "leaf": head.leaf}


def label_revision(store: Store, session: str, label: str, at: At) -> Document:
    """Give a revision a label; if the label exists, it moves to this revision."""
    entry = store.session(session).label(label, at)
    return {"session": session, "revision": entry.revision, "label": label}


def append_nodes(
    store: Store,
    session: str,
    payloads: Sequence[Any],
    turn: str | None,
    expected_revision: int | None,
) -> Document:
    """Append a node for each payload, as one commit."""
    if not payloads:
        raise InvalidInputError("payloads must have at least one payload")
    result = store.session(session).append(*payloads, turn=turn, expected=expected_revision)
    return {
        "session": session,
        "revision": result.revision,
        "nodes": list(result.nodes),
        "replayed": result.replayed,
    }
