"""Session databases as lash writes them, of every version whose layout is known, for tests."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgpack

SESSION = "s1"
_CLAIMS = {
    3: "claim_claimed_at_ms INTEGER NOT NULL DEFAULT 0, "
    "claim_expires_at_ms INTEGER NOT NULL DEFAULT 0",
    11: "claim_session_lease_generation INTEGER NOT NULL DEFAULT 0",
}


def tables(version: int) -> list[str]:
    """The statements by which a database of a version is made."""
    counted = "AUTOINCREMENT" if version < 4 else ""
    tokens = "cached_input_tokens INTEGER NOT NULL, reasoning_tokens INTEGER NOT NULL"
    if version >= 8:
        tokens = (
            "cache_read_input_tokens INTEGER NOT NULL, cache_write_input_tokens INTEGER NOT NULL, "
            "reasoning_output_tokens INTEGER NOT NULL"
        )
    identity = (
        "{0}_owner_incarnation_id TEXT, {0}_owner_liveness_json TEXT," if version >= 8 else ""
    )
    owner = "owner_kind TEXT, owner_id TEXT," if version >= 12 else ""
    key = "PRIMARY KEY (session_id, attachment_id)"
    made = [
        "CREATE TABLE blobs (hash TEXT PRIMARY KEY, content BLOB NOT NULL)",
        "CREATE TABLE session_head (singleton INTEGER PRIMARY KEY CHECK (singleton = 1), "
        "session_id TEXT NOT NULL DEFAULT 'root', head_json TEXT NOT NULL DEFAULT '{}', "
        "head_revision INTEGER NOT NULL DEFAULT 0)",
        f"CREATE TABLE graph_nodes (seq INTEGER PRIMARY KEY {counted}, "
        "node_id TEXT NOT NULL UNIQUE, node_json TEXT NOT NULL, "
        "tombstoned INTEGER NOT NULL DEFAULT 0)",
        f"CREATE TABLE usage_deltas (seq INTEGER PRIMARY KEY {counted}, source TEXT NOT NULL, "
        f"model TEXT NOT NULL, input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, "
        f"{tokens})",
        "CREATE TABLE session_meta (singleton INTEGER PRIMARY KEY CHECK (singleton = 1), "
        "session_id TEXT NOT NULL, session_name TEXT NOT NULL, created_at TEXT NOT NULL, "
        "model TEXT NOT NULL, cwd TEXT, relation_json TEXT)",
        "CREATE TABLE attachment_manifest (attachment_id TEXT NOT NULL, session_id TEXT NOT NULL, "
        f"canonical_uri TEXT NOT NULL, intent_at_ms INTEGER NOT NULL, committed_at_ms INTEGER, "
        f"{owner} {key})",
    ]
    if version < 4:
        made += [
            "CREATE TABLE runtime_turn_checkpoints (session_id TEXT NOT NULL, "
            "turn_id TEXT NOT NULL, checkpoint_json TEXT, checkpoint_hash TEXT, "
            "lease_owner_id TEXT, lease_token TEXT, "
            "lease_fencing_token INTEGER NOT NULL DEFAULT 0, "
            "lease_claimed_at_ms INTEGER NOT NULL DEFAULT 0, "
            "lease_expires_at_ms INTEGER NOT NULL DEFAULT 0, updated_at_ms INTEGER NOT NULL, "
            "PRIMARY KEY (session_id, turn_id))",
            "CREATE TABLE runtime_effect_journal (session_id TEXT NOT NULL, "
            "turn_id TEXT NOT NULL, idempotency_key TEXT NOT NULL, envelope_hash TEXT NOT NULL, "
            "effect_kind TEXT NOT NULL, outcome_json TEXT NOT NULL, "
            "created_at_ms INTEGER NOT NULL, PRIMARY KEY (session_id, turn_id, idempotency_key))",
        ]
    claims = _CLAIMS[11 if version >= 11 else 3]
    if version >= 3:
        space = "namespace TEXT NOT NULL," if version >= 8 else ""
        made += [
            "CREATE TABLE runtime_turn_commits (session_id TEXT NOT NULL, turn_id TEXT NOT NULL, "
            "turn_commit_hash TEXT NOT NULL, result_json TEXT NOT NULL, "
            "committed_at_ms INTEGER NOT NULL, PRIMARY KEY (session_id, turn_id))",
            f"CREATE TABLE queued_work_batches (enqueue_seq INTEGER PRIMARY KEY {counted}, "
            "batch_id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, source_key TEXT, "
            "delivery_policy TEXT NOT NULL, slot_policy TEXT NOT NULL, "
            "merge_key_json TEXT NOT NULL, available_at_ms INTEGER NOT NULL, "
            "enqueued_at_ms INTEGER NOT NULL, claim_id TEXT, claim_owner_id TEXT, "
            f"{identity.format('claim')} claim_token TEXT, "
            f"claim_fencing_token INTEGER NOT NULL DEFAULT 0, {claims}, "
            "UNIQUE (session_id, source_key) ON CONFLICT IGNORE)",
            "CREATE TABLE queued_work_items (batch_id TEXT NOT NULL, item_index INTEGER NOT NULL, "
            "item_id TEXT NOT NULL, payload_json TEXT NOT NULL, "
            "PRIMARY KEY (batch_id, item_index))",
            f"CREATE TABLE artifact_refs ({space} artifact_ref TEXT NOT NULL, "
            "blob_ref TEXT NOT NULL)",
        ]
    if version >= 4:
        made.append(
            "CREATE TABLE session_execution_leases (session_id TEXT PRIMARY KEY, "
            f"lease_owner_id TEXT, {identity.format('lease')} lease_token TEXT, "
            "lease_fencing_token INTEGER NOT NULL DEFAULT 0, "
            "lease_claimed_at_ms INTEGER NOT NULL DEFAULT 0, "
            "lease_expires_at_ms INTEGER NOT NULL DEFAULT 0)"
        )
    if version >= 8:
        made.append(
            "CREATE TABLE pending_turn_inputs (enqueue_seq INTEGER PRIMARY KEY, "
            "input_id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, source_key TEXT, "
            "ingress_json TEXT NOT NULL, state TEXT NOT NULL, input_json TEXT NOT NULL, "
            "enqueued_at_ms INTEGER NOT NULL, claim_id TEXT, claim_owner_id TEXT, "
            f"{identity.format('claim')} claim_token TEXT, "
            f"claim_fencing_token INTEGER NOT NULL DEFAULT 0, {claims})"
        )
    return made


class LashFile:
    """A database on its way to be written."""

    def __init__(self, path: Path, version: int = 4, session: str = SESSION) -> None:
        self.path = path
        self.version = version
        self.session = session
        with self._open() as made:
            for statement in tables(version):
                made.execute(statement)
            made.execute(f"PRAGMA user_version = {version}")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path)) as database, database:
            # Nobody needs this file after a power loss, and a flush for each row takes its time.
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA journal_mode = MEMORY")
            database.execute("BEGIN")
            yield database

    def run(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Change something."""
        with self._open() as database:
            database.execute(statement, values)

    def insert(self, table: str, **values: Any) -> None:
        """Put a row in."""
        marks = ", ".join("?" for _ in values)
        self.run(
            f"INSERT OR REPLACE INTO {table} ({', '.join(values)}) VALUES ({marks})",
            list(values.values()),
        )

    # --- blobs ----------------------------------------------------------------------------------

    def blob(
        self,
        content: bytes,
        *,
        kind: str = "GenericBlob",
        squeeze: bool = False,
        numbers: bool = True,
        bare: bool = False,
    ) -> str:
        """Store bytes as a blob; its name."""
        name = sha256(content).hexdigest()
        held = zlib.compress(content) if squeeze else content
        stored = msgpack.packb(
            {
                "descriptor": {"kind": kind, "hints": ["Compressible"]},
                "compression": "Zlib" if squeeze else "None",
                "content": list(held) if numbers else held,
            }
        )
        self.insert("blobs", hash=name, content=content if bare else stored)
        return name

    def value(self, value: Any, **how: Any) -> str:
        """Store a value as a blob; its name."""
        return self.blob(msgpack.packb(value), **how)

    # --- the head -------------------------------------------------------------------------------

    def checkpoint(self, **parts: Any) -> str:
        """Store a manifest, and the components that are given; its name."""
        manifest: dict[str, Any] = {
            "schema_version": 1,
            "turn_state": parts.pop("turn_state", {"turn_index": 7, "token_usage": {}}),
        }
        for name in ("tool_state", "plugin_snapshot", "execution_state"):
            if name in parts:
                manifest[f"{name}_ref"] = self.value(parts.pop(name), squeeze=name == "tool_state")
        manifest.update(parts)
        return self.value(manifest, kind="CheckpointManifest")

    def head(self, leaf: str | None = None, *, revision: int = 5, **more: Any) -> None:
        """Write the head."""
        told: dict[str, Any] = {
            "schema_version": 1,
            "session_id": self.session,
            "head_revision": revision,
            "config": {"provider_id": "p", "model": {"id": "m"}},
            "agent_frames": [],
            "graph_node_count": 0,
            **more,
        }
        if leaf is not None:
            told["leaf_node_id"] = leaf
        self.insert(
            "session_head",
            singleton=1,
            session_id=self.session,
            head_json=json.dumps(told),
            head_revision=revision,
        )

    def meta(self, **changed: Any) -> None:
        """Write what is known of the session."""
        row = {
            "session_id": self.session,
            "session_name": "a name",
            "created_at": "unix:1750000000",
            "model": "m",
            "cwd": "/work",
            "relation_json": json.dumps({"kind": "root"}),
            **changed,
        }
        self.insert("session_meta", singleton=1, **row)

    # --- rows -----------------------------------------------------------------------------------

    def node(
        self, node: str, parent: str | None = None, *, hidden: bool = False, **more: Any
    ) -> None:
        """Append a node; a message of the user unless it is said what it is."""
        told: dict[str, Any] = {"node_id": node, "timestamp": "2026-06-01T10:00:00+00:00"}
        if parent is not None:
            told["parent_node_id"] = parent
        told.update(more or {"kind": "event", "event": {"Conversation": message(node)}})
        self.insert("graph_nodes", node_id=node, node_json=json.dumps(told), tombstoned=int(hidden))

    def usage(self, source: str, model: str, *tokens: int) -> None:
        """Add to the ledger: input, output, cached, reasoning, and what went into a cache."""
        row: dict[str, Any] = {
            "source": source, "model": model, "input_tokens": tokens[0], "output_tokens": tokens[1],
        }  # fmt: skip
        names = ["cached_input_tokens", "reasoning_tokens"]
        if self.version >= 8:
            names = [
                "cache_read_input_tokens", "reasoning_output_tokens", "cache_write_input_tokens",
            ]  # fmt: skip
        row.update(zip(names, tokens[2:], strict=True))
        self.insert("usage_deltas", **row)

    def turn(
        self, turn: str, revision: int, *, at_ms: int = 1_750_000_100_000, **more: Any
    ) -> None:
        """Note that a turn was committed."""
        result = {"head_revision": revision, "checkpoint_ref": "ab" * 32, "manifest": {}}
        row = {
            "session_id": self.session,
            "turn_commit_hash": sha256(turn.encode()).hexdigest(),
            "result_json": json.dumps(result),
            **more,
        }
        self.insert("runtime_turn_commits", turn_id=turn, committed_at_ms=at_ms, **row)

    def batch(self, batch: str, seq: int, items: Sequence[Any] = (), **changed: Any) -> None:
        """Queue a batch."""
        row = {
            "session_id": self.session,
            "delivery_policy": "after_current_turn_commit",
            "slot_policy": "exclusive",
            "merge_key_json": '"never"',
            "available_at_ms": 0,
            "enqueued_at_ms": 1_750_000_000_000 + seq,
            **changed,
        }
        self.insert("queued_work_batches", enqueue_seq=seq, batch_id=batch, **row)
        for at, payload in enumerate(items):
            self.insert(
                "queued_work_items",
                batch_id=batch,
                item_index=at,
                item_id=f"{batch}:{at}",
                payload_json=json.dumps(payload),
            )

    def waiting(self, name: str, state: str = "deferred_next_turn", **changed: Any) -> None:
        """An input for a turn."""
        row = {
            "session_id": self.session,
            "ingress_json": '{"scope":"next_turn"}',
            "input_json": json.dumps({"text": name}),
            "enqueued_at_ms": 1_750_000_000_009,
            **changed,
        }
        self.insert("pending_turn_inputs", input_id=name, state=state, **row)

    def attachment(self, name: str, committed_ms: int | None = None, **changed: Any) -> None:
        """Announce an attachment, or commit it."""
        row = {
            "session_id": self.session,
            "canonical_uri": f"lash-attachment://{name}",
            "intent_at_ms": 1_750_000_000_001,
            "committed_at_ms": committed_ms,
            **changed,
        }
        self.insert("attachment_manifest", attachment_id=name, **row)

    def artifact(self, name: str, content: bytes) -> str:
        """Let a name keep a blob; the name of that."""
        blob = self.blob(content, kind="LashlangModule")
        space = {"namespace": "modules"} if self.version >= 8 else {}
        self.insert("artifact_refs", artifact_ref=name, blob_ref=blob, **space)
        return blob

    def lease(self, fencing: int, *, owner: str | None = None, expires_ms: int = 0) -> None:
        """The lease that was given last."""
        self.insert(
            "session_execution_leases",
            session_id=self.session,
            lease_owner_id=owner,
            lease_fencing_token=fencing,
            lease_expires_at_ms=expires_ms,
        )


def message(node: str, role: str = "User", text: str | None = None) -> dict[str, Any]:
    """A message as a conversation has it."""
    part = {
        "id": f"{node}.p0", "kind": "Text", "prune_state": "Intact",
        "content": f"text of {node}" if text is None else text,
    }  # fmt: skip
    return {"id": node, "role": role, "parts": [part]}
