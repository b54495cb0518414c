"""Session databases of lash moved over: everything is there as it was, or said not to be."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgpack
import pytest

from casstore.compat.lash import EMPTY, IMPORTED, UNCHANGED, LashReport, import_sessions
from casstore.compat.lash_database import VERSIONS
from casstore.engine.memory import MemoryEngine
from casstore.errors import (
    BusyError,
    ConflictError,
    CycleError,
    DamagedSourceError,
    ForeignSourceError,
    InvalidInputError,
    NameTakenError,
    SessionDeletedError,
    SessionExistsError,
    SourceNotFoundError,
    SourceVersionError,
    StorageError,
    TurnConflictError,
)
from casstore.maintenance.check import check
from casstore.maintenance.copying import copy
from casstore.maintenance.gc import collect
from casstore.maintenance.progress import Step
from casstore.session.data import UNFENCED, Attachment, Commit, NodeDraft, Usage
from casstore.store import Store
from tests.compat.lash_files import SESSION, LashFile, message

WITH_QUEUE = [version for version in VERSIONS if version >= 3]


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        yield store


@pytest.fixture
def file(tmp_path: Path) -> LashFile:
    """A version 4 database with something of everything."""
    return filled(tmp_path / "s1.db", 4)


def filled(path: Path, version: int) -> LashFile:
    """A database with something of everything that its version has."""
    made = LashFile(path, version)
    made.meta(
        relation_json=json.dumps(
            {
                "kind": "child",
                "parent_session_id": "above",
                "caused_by": {"type": "turn", "session_id": "above", "turn_id": "t"},
            }
        )
    )
    made.node("u1")
    made.node(
        "a1", "u1", kind="event", event={"Conversation": message("a1", "Assistant")},
        caused_by={"type": "tool_call", "session_id": "s1", "call_id": "c"}, agent_frame_id="f1",
    )  # fmt: skip
    made.node("protocol:1", "a1", kind="event", event={"Protocol": {"step": [1, 2.5, None]}})
    made.node("u2", "a1")
    made.node("plugin:1", "u2", kind="plugin", plugin_type="todo", body={"items": ["x" * 3000]})
    frame = {
        "frame_id": "f1", "session_id": SESSION, "status": "active", "created_at": "2026",
        "execution_state_snapshot": [1, 2, 255],
    }  # fmt: skip
    made.head(
        "plugin:1",
        checkpoint_ref=made.checkpoint(
            tool_state={"tools": {"a": "y" * 5000}, "n": 3},
            plugin_snapshot={"plugins": {"p": {"meta": {"state": None}, "artifacts": []}}},
            plugin_snapshot_revision=9,
            execution_state=list(range(256)),
        ),
        agent_frames=[frame],
        current_agent_frame_id="f1",
    )
    more = (4,) if version >= 8 else ()
    made.usage("main", "m", 10, 5, 2, 1, *more)
    made.usage("other", "m", 1, 1, 0, 0, *more)
    made.usage("main", "m", 7, 3, 0, 0, *more)
    made.attachment("aa" * 32, 1_750_000_000_500)
    made.attachment("bb" * 32)
    if version >= 3:
        made.turn("t1", 4)
        made.turn("t2", 5, at_ms=1_750_000_200_000)
        made.batch("qwb:1", 3, [{"type": "turn_input", "input": {"text": "go"}}], source_key="k")
        made.batch(
            "qwb:2", 5, [1, 2], delivery_policy="earliest_safe_boundary", slot_policy="join",
            merge_key_json='{"group":"g"}', available_at_ms=99, claim_fencing_token=6,
        )  # fmt: skip
        made.batch("qwb:3", 6, slot_policy="join", merge_key_json='"payload_default"')
        made.artifact("module:a", b"fn main() {}")
    if version >= 4:
        made.lease(41)
    return made


def parts(report: LashReport) -> dict[str, tuple[int, int]]:
    [one] = report.sessions
    return {part.name: (part.found, part.imported) for part in one.parts}


def findings(report: LashReport) -> dict[str, tuple[int, str]]:
    [one] = report.sessions
    return {found.what: (found.number, found.first) for found in one.findings}


def is_sound(store: Store) -> bool:
    return not check(store).findings


# --- everything -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_is_there_as_it_was(tmp_path: Path, store: Store, version: int) -> None:
    file = filled(tmp_path / "s1.db", version)
    before = file.path.read_bytes()
    report = import_sessions(store, file.path)
    assert file.path.read_bytes() == before
    assert [one.outcome for one in report.sessions] == [IMPORTED]
    session = store.session(SESSION)
    head = session.head()
    assert head is not None
    assert (head.revision, head.leaf, head.node_count) == (5, "plugin:1", 5)
    nodes = list(session.nodes("full"))
    assert [node.id for node in nodes] == ["u1", "a1", "protocol:1", "u2", "plugin:1"]
    assert [node.parent for node in nodes] == [None, "u1", "a1", "a1", "u2"]
    assert nodes[1].cause == {"type": "tool_call", "session_id": "s1", "call_id": "c"}
    assert (nodes[1].frame, nodes[1].time) == ("f1", "2026-06-01T10:00:00+00:00")
    assert nodes[0].payload == {"kind": "event", "message": message("u1", "user")}
    assert nodes[2].payload == {"kind": "event", "event": {"Protocol": {"step": [1, 2.5, None]}}}
    assert nodes[4].payload == {
        "kind": "plugin", "plugin_type": "todo", "body": {"items": ["x" * 3000]},
    }  # fmt: skip
    assert [node.id for node in session.nodes()] == ["u1", "a1", "u2", "plugin:1"]
    checkpoint = session.checkpoint(hydrate=True)
    assert checkpoint.turn_state == {"turn_index": 7, "token_usage": {}}
    assert checkpoint.tool_state == {"tools": {"a": "y" * 5000}, "n": 3}
    assert checkpoint.plugin_snapshot == {"plugins": {"p": {"meta": {"state": None}, "artifacts": []}}}
    assert checkpoint.plugin_revision == 9
    assert checkpoint.execution_state == bytes(range(256))
    assert checkpoint.frames[0]["execution_state_snapshot"] == b"\1\2\xff"
    assert (checkpoint.current_frame, checkpoint.config) == (
        "f1", {"provider_id": "p", "model": {"id": "m"}},
    )  # fmt: skip
    assert session.usage() == (Usage("main", "m", 17, 8, 2, 1), Usage("other", "m", 1, 1, 0, 0))
    meta = session.meta()
    assert (meta.name, meta.created_at_ms, meta.model, meta.cwd, meta.parent, meta.cause) == (
        "a name", 1_750_000_000_000, "m", "/work", "above",
        {"type": "turn", "session_id": "above", "turn_id": "t"},
    )  # fmt: skip
    origin = meta.extra["lash"]
    assert (origin["schema_version"], origin["head_revision"], origin["created_at"]) == (
        version, 5, "unix:1750000000",
    )  # fmt: skip
    assert session.attachments.list() == [
        Attachment(
            "aa" * 32, SESSION, f"lash-attachment://{'aa' * 32}", None, None, "committed",
            1_750_000_000_001, 1_750_000_000_500,
        ),
        Attachment(
            "bb" * 32, SESSION, f"lash-attachment://{'bb' * 32}", None, None, "intent",
            1_750_000_000_001, None,
        ),
    ]  # fmt: skip
    info = session.info()
    assert (info.first_user_message, info.user_message_count) == ("text of u1", 2)
    if version >= 8:
        assert origin["cache_write_input_tokens"] == [["main", "m", 8], ["other", "m", 4]]
    assert is_sound(store)


@pytest.mark.parametrize("version", WITH_QUEUE)
def test_queue_turns_names_and_counters_move(tmp_path: Path, store: Store, version: int) -> None:
    file = filled(tmp_path / "s1.db", version)
    report = import_sessions(store, file.path)
    session = store.session(SESSION)
    one, two, three = session.queue.batches()
    assert (one.id, one.seq, one.source_key, one.delivery, one.slot, one.merge_key) == (
        "qwb:1", 3, "k", "after_turn", "exclusive", None,
    )  # fmt: skip
    assert one.items == (
        {"item_id": "qwb:1:0", "payload": {"type": "turn_input", "input": {"text": "go"}}},
    )
    assert (two.seq, two.delivery, two.slot, two.merge_key, two.available_at_ms, two.fence) == (
        5, "earliest", "join", "group:g", 99, 6,
    )  # fmt: skip
    assert (three.items, three.merge_key) == ((), "payload_default")
    assert [batch.enqueued_at_ms - 1_750_000_000_000 for batch in (one, two, three)] == [3, 5, 6]
    assert session.queue.enqueue(["new"], source_key="k").id == "qwb:1"
    assert session.queue.enqueue(["new"]).seq == 7
    name = f"lash/s1/{'modules/' if version >= 8 else ''}module:a"
    assert [pin.name for pin in store.pins()] == [name]
    pin = store.find_pin(name)
    assert pin is not None
    collect(store, grace_ms=0)
    assert store.get_blob(pin.digest) == b"fn main() {}"
    assert parts(report)["turns"] == (2, 2)
    lease = session.claim_lease("me", ttl_ms=1000)
    assert lease is not None
    assert lease.fencing == (42 if version >= 4 else 1)
    claim = session.queue.claim(lease)
    assert claim is not None
    assert (claim.batches[0].id, claim.batches[0].fence) == ("qwb:1", 1)


def test_the_session_goes_on_from_where_it_was(file: LashFile, store: Store) -> None:
    import_sessions(store, file.path)
    session = store.session(SESSION)
    result = session.commit(
        Commit(append=[NodeDraft("n", {"role": "user", "content": "on"})], expected=5, lease=UNFENCED)
    )
    assert result.revision == 6
    assert [node.id for node in session.nodes()][-2:] == ["plugin:1", "n"]
    assert session.load(5) is not None
    assert [entry.revision for entry in session.history()] == [6, 5]
    with Store(MemoryEngine()) as other:
        copy(store, other)
        assert other.session(SESSION).head() == session.head()
    assert is_sound(store)


def test_a_turn_repeated_after_the_move_is_refused(file: LashFile, store: Store) -> None:
    """lash hashes a commit its own way: nobody can tell that it is the same, so it is not done."""
    import_sessions(store, file.path)
    session = store.session(SESSION)
    head = session.head()
    for turn in ("t1", "t2"):
        with pytest.raises(TurnConflictError):
            session.commit(Commit(append=[NodeDraft(f"n{turn}", 1)], turn=turn, lease=UNFENCED))
    assert session.head() == head
    assert head is not None
    assert (head.turn, head.committed_at_ms) == ("t2", 1_780_308_000_000)
    assert session.commit(Commit(append=[NodeDraft("n", 1)], turn="t3", lease=UNFENCED))
