"""What a commit means, as a hash: how a repeated turn is recognised.

The hash is made by the store, over a list of what counts, and its version is stored with
it. What a retry does anew is not on the list: ids of nodes, their times, the expected
revision, leases, tokens. The structure of the nodes counts by position in the commit.

    turn content v1 = [1, session, replaced?, nodes, leaf, checkpoint, usage,
                       batch ids, attachment ids, label]
    node            = [position of the parent in the commit or nil, frame, cause, payload]

A message that carries its own id (a map with ``role`` and ``parts``; parts are maps with
``kind``, ``content`` and ``prune_state``) counts without it, and a frame without its
``created_at``: both are made anew by a retry. Keys of that name anywhere else are data.
"""

from __future__ import annotations

from typing import Any, Final

from casstore.format.canonical import pack_checked
from casstore.format.hashing import digest_of, turn_hash
from casstore.format.manifest import Manifest
from casstore.format.node import NULL, spell_payload
from casstore.session.data import LAST, LEAF, Commit
from casstore.session.graph import SpelledNode

VERSION: Final = 1


def intent_hash(
    session: str, change: Commit, nodes: list[SpelledNode], manifest: Manifest
) -> bytes:
    """The hash of a commit's meaning. ``manifest`` holds the checkpoint as it was stored."""
    drafts = change.append if change.replace is None else change.replace
    positions = {node[0]: at for at, node in enumerate(nodes)}
    leaf: Any = change.leaf
    if leaf is LAST:
        leaf = len(nodes) - 1 if nodes else None
    else:
        leaf = positions.get(leaf, False)
    checkpoint = None
    if change.checkpoint is not None:
        checkpoint = [
            manifest.plugin_revision,
            manifest.current_frame,
            *manifest[7:10],
            manifest.turn_state.data,
            _frames(change.checkpoint.frames),
            manifest.config.data,
        ]
    steps: list[list[Any]] = []
    for at, (_, _, above, frame, _, cause, payload, _) in enumerate(nodes):
        if above is LEAF:
            parent = at - 1 if at else None
        else:
            parent = None if above is None else positions.get(above)
        steps.append([parent, frame, cause[0], _payload(drafts[at].payload, payload[0])])
    content = [
        VERSION,
        session,
        change.replace is not None,
        steps,
        leaf,
        checkpoint,
        [list(entry) for entry in change.usage] if change.usage else [],
        _batch_ids(change) if change.completes else [],
        sorted(set(change.attachments)) if change.attachments else [],
        change.label,
    ]
    return turn_hash(pack_checked(content))


def _batch_ids(change: Commit) -> list[str]:
    return sorted({batch.id for claim in change.completes for batch in claim.batches})


def _payload(payload: Any, spelled: bytes) -> bytes:
    if type(payload) is not dict:
        return spelled
    if "parts" in payload and _is_message(payload):
        return _spelled(_without_ids(payload))
    inner: Any = payload.get("message")
    if inner is not None and _is_message(inner):
        return _spelled({**payload, "message": _without_ids(inner)})
    return spelled


def _is_message(value: Any) -> bool:
    return type(value) is dict and "role" in value and type(value.get("parts")) is list


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "id"}
    plain["parts"] = [
        {key: value for key, value in part.items() if key != "id"} if _is_part(part) else part
        for part in message["parts"]
    ]
    return plain


def _is_part(value: Any) -> bool:
    return type(value) is dict and all(key in value for key in ("kind", "content", "prune_state"))


def _frames(frames: Any) -> bytes:
    if not frames:
        return NULL.data
    return _spelled(
        [
            {key: value for key, value in frame.items() if key != "created_at"}
            if type(frame) is dict
            else frame
            for frame in frames
        ]
    )


def _spelled(value: Any) -> bytes:
    """The value as it would be stored, without storing it."""
    return spell_payload(value, "", _name).data


def _name(kind: int, data: bytes, children: list[bytes]) -> bytes:
    return digest_of(kind, data)
