"""Reads a session database of lash: its versions, their tables and columns, typed rows.

One file holds one session. Its version is ``user_version``; versions 1, 3, 8, 11 and 12 are known
from the statements that create them, 4 from its description. A database must have every table and
column of its version. Other tables and columns are noted and left out. lash's other databases
(processes, triggers, effects) are not session databases, and later versions, which keep all
sessions in one file, are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.compat.importing import ImportNote
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import (
    DamagedSourceError,
    ForeignSourceError,
    InvalidInputError,
    SourceVersionError,
)
from casstore.records import json_values

#: The versions whose layout is known.
VERSIONS: Final = (1, 3, 4, 8, 11, 12)
_HAS_QUEUE: Final = 3
_HAS_LEASES: Final = 4
_HAS_CACHE_WRITES: Final = 8
_HAS_INPUTS: Final = 8
_HAS_GENERATIONS: Final = 11
_HAS_OWNERS: Final = 12

# The tables of every version.
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
# The states of inputs that no turn has completed.
_WAITING: Final = "('pending_active', 'deferred_next_turn', 'accepted')"
_IDENTITY: Final = ("owner_incarnation_id", "owner_liveness_json")
# Known tables whose rows a session cannot hold.
_LEFT_OUT: Final = {
    "runtime_turn_checkpoints": "unfinished turns (runtime_turn_checkpoints), left out",
    "runtime_effect_journal": "effects of turns (runtime_effect_journal), left out",
}


def _columns_of(version: int) -> dict[str, frozenset[str]]:
    """The tables of a version that the import reads, and their columns."""
    tables = dict(_ALWAYS)
    tokens = " cached_input_tokens reasoning_tokens"
    if version >= _HAS_CACHE_WRITES:
        tokens = " cache_read_input_tokens cache_write_input_tokens reasoning_output_tokens"
    tables["usage_deltas"] += tokens
    claims = " claim_claimed_at_ms claim_expires_at_ms"
    if version >= _HAS_GENERATIONS:
        claims = " claim_session_lease_generation"
    if version >= _HAS_QUEUE:
        tables.update(_QUEUE)
        tables["queued_work_batches"] += claims
    if version >= _HAS_INPUTS:
        tables["pending_turn_inputs"] = _INPUTS + claims
    if version >= _HAS_LEASES:
        tables["session_execution_leases"] = _LEASES
    if version >= _HAS_OWNERS:
        tables["attachment_manifest"] += " owner_kind owner_id"
    return {table: frozenset(named.split()) for table, named in tables.items()}


# Optional columns that name the holder of a lease or claim; an import carries no holders over.
_SPARE: Final[dict[str, Sequence[str]]] = {
    "session_execution_leases": [f"lease_{each}" for each in _IDENTITY],
    "queued_work_batches": [f"claim_{each}" for each in _IDENTITY],
    "pending_turn_inputs": [f"claim_{each}" for each in _IDENTITY],
    "artifact_refs": ["namespace"],
}


class LashHeadRow(NamedTuple):
    """The row of the head."""

    session: str
    head: dict[str, Any]
    revision: int


class MetaRow(NamedTuple):
    """The row of the session's meta data."""

    session: str
    name: str
    created_at: str
    model: str
    cwd: str | None
    relation: dict[str, Any]


class BatchRow(NamedTuple):
    """A row of the queue; SQLite stores values of any type in any column."""

    seq: Any
    id: Any
    source_key: Any
    delivery: Any
    slot: Any
    merge_key: Any
    available_at_ms: Any
    enqueued_at_ms: Any
    claim: Any
    owner: Any
    expires_at_ms: Any
    fence: Any
    generation: Any


class InputRow(NamedTuple):
    """A row of the inputs for turns; its values may be of any type, too."""

    id: Any
    source_key: Any
    ingress: Any
    content: Any
    enqueued_at_ms: Any
    claim: Any
    owner: Any
    expires_at_ms: Any


class LashDatabase:
    """One database, its rows typed. DamagedSourceError names an invalid row."""

    def __init__(self, source: SqliteSource) -> None:
        self.source = source
        if not {"session_head", "graph_nodes", "session_meta"} <= source.tables:
            raise ForeignSourceError(f"{source.path} is not a session database of lash")
        self.version = source.number("PRAGMA user_version")
        if self.version not in VERSIONS:
            raise SourceVersionError(str(source.path), self.version, VERSIONS)
        self._columns = _columns_of(self.version)
        # From this version on, a claim lasts as long as the session's lease and has no expiry.
        self._has_generations = self.version >= _HAS_GENERATIONS
        self._expires = "0" if self._has_generations else "claim_expires_at_ms"
        for table, wanted in self._columns.items():
            lacking = wanted - source.columns(table)
            if lacking:
                raise ForeignSourceError(
                    f"{table} of {source.path} has no column {sorted(lacking)[0]}, which version "
                    f"{self.version} has"
                )

    # --- rows of which a database has one -------------------------------------------------------

    def head(self) -> LashHeadRow | None:
        """The head; None if nothing was committed."""
        for session, text, revision in self.source.ask(
            "SELECT session_id, head_json, head_revision FROM session_head"
        ):
            place = "the head"
            return LashHeadRow(
                self.text(place, "session_id", session),
                self.object(place, text),
                self.number(place, "head_revision", revision),
            )
        return None

    def meta(self) -> MetaRow | None:
        """The metadata, or None."""
        place = "the row of session_meta"
        for *texts, cwd, relation in self.source.ask(
            "SELECT session_id, session_name, created_at, model, cwd, relation_json "
            "FROM session_meta"
        ):
            names = ("session_id", "session_name", "created_at", "model")
            session, name, created_at, model = [
                self.text(place, *each) for each in zip(names, texts, strict=True)
            ]
            return MetaRow(
                session=session,
                name=name,
                created_at=created_at,
                model=model,
                cwd=self.optional_text(place, "cwd", cwd),
                relation={} if relation is None else self.object(place, relation),
            )
        return None

    # --- rows of which it has many --------------------------------------------------------------

    def count(self, table: str, condition: str = "true", *values: Any) -> int:
        """How many rows of a table meet a condition; 0 if the version has no such table."""
        if table not in self.source.tables:
            return 0
        quoted = table.replace('"', '""')
        return self.source.number(f'SELECT count(*) FROM "{quoted}" WHERE {condition}', values)

    def nodes(self) -> Iterator[tuple[str, Any, bool]]:
        """Id, text and whether it is hidden, of every node in the order of insertion."""
        for seq, node, text, hidden in self.source.ask(
            "SELECT seq, node_id, node_json, tombstoned FROM graph_nodes ORDER BY seq"
        ):
            place = f"row {seq} of graph_nodes"
            name = self.text(place, "node_id", node)
            yield name, text, bool(self.number(place, "tombstoned", hidden))

    def usage(self) -> Iterator[tuple[str, str, int, int, int, int, int]]:
        """Source, model and tokens: input, output, cache read, reasoning, cache write."""
        cached, reasoning, written = (
            ("cache_read_input_tokens", "reasoning_output_tokens", "cache_write_input_tokens")
            if self.version >= _HAS_CACHE_WRITES
            else ("cached_input_tokens", "reasoning_tokens", "0")
        )
        for seq, source, model, *tokens in self.source.ask(
            f"SELECT seq, source, model, input_tokens, output_tokens, {cached}, {reasoning}, "
            f"{written} FROM usage_deltas ORDER BY seq"
        ):
            place = f"row {seq} of usage_deltas"
            counts = [self.number(place, "a number of tokens", each) for each in tokens]
            names = self.text(place, "source", source), self.text(place, "model", model)
            yield (*names, *counts)  # type: ignore[misc]  # five of them

    def turns(self, session: str) -> Iterator[tuple[str, str, dict[str, Any], int]]:
        """Id, hash, result and time of every turn that was committed."""
        if self.version < _HAS_QUEUE:
            return
        for turn, commit_hash, result, at_ms in self.source.ask(
            "SELECT turn_id, turn_commit_hash, result_json, committed_at_ms "
            "FROM runtime_turn_commits WHERE session_id = ? ORDER BY committed_at_ms, turn_id",
            (session,),
        ):
            place = f"turn {turn!r}"
            yield (
                self.text(place, "turn_id", turn),
                self.text(place, "turn_commit_hash", commit_hash),
                self.object(place, result),
                self.number(place, "committed_at_ms", at_ms),
            )

    def batches(self, session: str) -> Iterator[BatchRow]:
        """The queue, in order."""
        if self.version < _HAS_QUEUE:
            return
        generation = "claim_session_lease_generation" if self._has_generations else "0"
        for row in self.source.ask(
            "SELECT enqueue_seq, batch_id, source_key, delivery_policy, slot_policy, "
            "merge_key_json, available_at_ms, enqueued_at_ms, claim_id, claim_owner_id, "
            f"{self._expires}, claim_fencing_token, {generation} FROM queued_work_batches "
            "WHERE session_id = ? ORDER BY enqueue_seq",
            (session,),
        ):
            yield BatchRow._make(row)

    def items(self, batch: str) -> Iterator[tuple[Any, ...]]:
        """Ids and payloads of a batch, in order."""
        yield from self.source.ask(
            "SELECT item_id, payload_json FROM queued_work_items WHERE batch_id = ? "
            "ORDER BY item_index",
            (batch,),
        )

    def waiting_inputs(self, session: str) -> Iterator[InputRow]:
        """The inputs that no turn has completed, in order."""
        if self.version < _HAS_INPUTS:
            return
        for row in self.source.ask(
            "SELECT input_id, source_key, ingress_json, input_json, enqueued_at_ms, claim_id, "
            f"claim_owner_id, {self._expires} FROM pending_turn_inputs WHERE session_id = ? "
            f"AND state IN {_WAITING} ORDER BY enqueue_seq",
            (session,),
        ):
            yield InputRow._make(row)

    def attachments(self, session: str) -> Iterator[tuple[str, str, str | None, int, int | None]]:
        """Id, uri, owner, and when it was announced and committed."""
        owner = "owner_kind || ':' || owner_id" if self.version >= _HAS_OWNERS else "NULL"
        for name, uri, owned, intent, committed in self.source.ask(
            f"SELECT attachment_id, canonical_uri, {owner}, intent_at_ms, committed_at_ms "
            "FROM attachment_manifest WHERE session_id = ? ORDER BY attachment_id",
            (session,),
        ):
            place = f"attachment {name!r}"
            yield (
                self.text(place, "attachment_id", name),
                self.text(place, "canonical_uri", uri),
                self.optional_text(place, "owner", owned),
                self.number(place, "intent_at_ms", intent),
                None if committed is None else self.number(place, "committed_at_ms", committed),
            )

    def artifacts(self) -> Iterator[tuple[str, str]]:
        """Names of artifacts, and the blobs they refer to."""
        if self.version < _HAS_QUEUE:
            return
        # Independent of the version: the namespace was added when other programs used the table.
        spaced = "namespace" in self.source.columns("artifact_refs")
        name = "namespace || '/' || artifact_ref" if spaced else "artifact_ref"
        for artifact, blob in self.source.ask(
            f"SELECT {name}, blob_ref FROM artifact_refs ORDER BY 1"
        ):
            place = f"artifact {artifact!r}"
            yield self.text(place, "artifact_ref", artifact), self.text(place, "blob_ref", blob)

    def leases(self, session: str) -> Iterator[tuple[str | None, int, int]]:
        """The last owner of the session or of a turn, the fencing counter, and the expiry."""
        for table in ("session_execution_leases", "runtime_turn_checkpoints"):
            if table not in self.source.tables:
                continue
            for owner, fencing, expires in self.source.ask(
                f"SELECT lease_owner_id, lease_fencing_token, lease_expires_at_ms FROM {table} "
                "WHERE session_id = ?",
                (session,),
            ):
                place = f"a lease in {table}"
                yield (
                    self.optional_text(place, "lease_owner_id", owner),
                    self.number(place, "lease_fencing_token", fencing),
                    self.number(place, "lease_expires_at_ms", expires),
                )

    # --- what is left out -----------------------------------------------------------------------

    def left_out(self, session: str) -> Iterator[ImportNote]:
        """Rows of the database that a session cannot hold."""
        for table in sorted(self.source.tables):
            if table.startswith("sqlite_"):
                continue
            if table in _LEFT_OUT or table not in self._columns:
                name = _LEFT_OUT.get(table, f"rows of the unknown table {table}, left out")
                yield from _some(name, self.count(table))
                continue
            known = {*self._columns[table], *_SPARE.get(table, ())}
            yield from self.source.unread(table, known)
        for table in ("queued_work_batches", "runtime_turn_commits", "attachment_manifest"):
            number = self.count(table, "session_id IS NOT ?", session)
            yield from _some(f"rows of {table} of other sessions, left out", number)
        number = self.count(
            "pending_turn_inputs", f"session_id IS NOT ? OR state NOT IN {_WAITING}", session
        )
        yield from _some("inputs of completed turns or other sessions, left out", number)
        number = self.count(
            "queued_work_items", "batch_id NOT IN (SELECT batch_id FROM queued_work_batches)"
        )
        yield from _some("queued items of no batch, left out", number)

    def unnamed_blobs(self, named: set[str]) -> Iterator[ImportNote]:
        """Blobs that no row refers to, which lash's own collection would delete."""
        number = sum(name not in named for (name,) in self.source.ask("SELECT hash FROM blobs"))
        yield from _some("unreferenced blobs, left out", number)

    # --- types ----------------------------------------------------------------------------------

    def damaged(self, place: str, reason: str) -> DamagedSourceError:
        """The error for an invalid row."""
        return DamagedSourceError(str(self.source.path), place, reason)

    def text(self, place: str, column: str, value: Any) -> str:
        """The value, which must be a text; else DamagedSourceError."""
        if type(value) is not str:
            raise self.damaged(place, f"{column} is {type(value).__name__}, not a text")
        return value

    def number(self, place: str, column: str, value: Any) -> int:
        """The value, which must be an integer of 0 or more; else DamagedSourceError."""
        if type(value) is not int or value < 0:
            raise self.damaged(place, f"{column} is {value!r:.40}, not an integer of 0 or more")
        return value

    def json(self, place: str, text: Any) -> Any:
        """The value of a text in JSON."""
        document = self.text(place, "its JSON", text)
        try:
            return json_values.loads(document)
        except (ValueError, RecursionError) as exc:
            raise self.damaged(place, f"it holds invalid JSON: {exc}") from exc

    def object(self, place: str, text: Any) -> dict[str, Any]:
        """The map that a text in JSON holds."""
        value = self.json(place, text)
        if type(value) is not dict:
            raise self.damaged(place, "its JSON is not a map")
        return value

    def optional_text(self, place: str, column: str, value: Any) -> str | None:
        """The value, which must be a text or None; else DamagedSourceError."""
        return None if value is None else self.text(place, column, value)

    def kept(self, place: str, value: Any) -> Any:
        """The stored form of a value of JSON."""
        try:
            return json_values.storable(value)
        except InvalidInputError as exc:
            raise self.damaged(place, str(exc)) from exc


def _some(what: str, number: int) -> Iterator[ImportNote]:
    if number:
        yield ImportNote(what, number)
