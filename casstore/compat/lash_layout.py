"""The layout of lash's session databases, version by version: tables, columns, what stays behind.

Versions 1, 3, 8, 11 and 12 are known from the statements that make them, 4 from how it is
described; between them others came and went.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: The versions whose layout is known.
VERSIONS: Final = (1, 3, 4, 8, 11, 12)
HAS_QUEUE: Final = 3
HAS_LEASES: Final = 4
HAS_CACHE_WRITES: Final = 8
HAS_INPUTS: Final = 8
HAS_GENERATIONS: Final = 11
HAS_OWNERS: Final = 12

# In every version.
_ALWAYS: Final = {
    "blobs": "hash content",
    "session_head": "singleton session_id head_json head_revision",
    "graph_nodes": "seq node_id node_json tombstoned",
    "usage_deltas": "seq source model input_tokens output_tokens",
    "session_meta": "singleton session_id session_name created_at model cwd relation_json",
    "attachment_manifest": "attachment_id session_id canonical_uri intent_at_ms committed_at_ms",
}
_QUEUE: Final = {
    "runtime_turn_commits": "session_id turn_id turn_commit_hash result_json committed_at_ms",
    "queued_work_batches": (
        "enqueue_seq batch_id session_id source_key delivery_policy slot_policy merge_key_json "
        "available_at_ms enqueued_at_ms claim_id claim_owner_id claim_token claim_fencing_token"
    ),
    "queued_work_items": "batch_id item_index item_id payload_json",
    "artifact_refs": "artifact_ref blob_ref",
}
_LEASES: Final = (
    "session_id lease_owner_id lease_token lease_fencing_token lease_claimed_at_ms "
    "lease_expires_at_ms"
)
_INPUTS: Final = (
    "enqueue_seq input_id session_id source_key ingress_json state input_json enqueued_at_ms "
    "claim_id claim_owner_id claim_token claim_fencing_token"
)
# States of inputs that are yet to be said to somebody; the others are done with.
WAITING: Final = "('pending_active', 'deferred_next_turn', 'accepted')"
_IDENTITY: Final = ("owner_incarnation_id", "owner_liveness_json")
# Tables that are known, and whose rows have no place in a session.
LEFT: Final = {
    "runtime_turn_checkpoints": "turns in their midst (runtime_turn_checkpoints)",
    "runtime_effect_journal": "effects of turns (runtime_effect_journal)",
}


def columns_of(version: int) -> dict[str, frozenset[str]]:
    """The tables of a version that are read, and their columns."""
    tables = dict(_ALWAYS)
    tokens = " cached_input_tokens reasoning_tokens"
    if version >= HAS_CACHE_WRITES:
        tokens = " cache_read_input_tokens cache_write_input_tokens reasoning_output_tokens"
    tables["usage_deltas"] += tokens
    claims = " claim_claimed_at_ms claim_expires_at_ms"
    if version >= HAS_GENERATIONS:
        claims = " claim_session_lease_generation"
    if version >= HAS_QUEUE:
        tables.update(_QUEUE)
        tables["queued_work_batches"] += claims
    if version >= HAS_INPUTS:
        tables["pending_turn_inputs"] = _INPUTS + claims
    if version >= HAS_LEASES:
        tables["session_execution_leases"] = _LEASES
    if version >= HAS_OWNERS:
        tables["attachment_manifest"] += " owner_kind owner_id"
    return {table: frozenset(named.split()) for table, named in tables.items()}


# Columns that some have, and that say who held something: nobody does after the move.
SPARE: Final[dict[str, Sequence[str]]] = {
    "session_execution_leases": [f"lease_{each}" for each in _IDENTITY],
    "queued_work_batches": [f"claim_{each}" for each in _IDENTITY],
    "pending_turn_inputs": [f"claim_{each}" for each in _IDENTITY],
    "artifact_refs": ["namespace"],
}
