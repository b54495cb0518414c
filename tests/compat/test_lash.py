"""Session databases of lash moved over: everything is there as it was, or said not to be."""

from __future__ import annotations

import json
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgpack
import pytest

from casstore.compat.importing import IMPORTED, UNCHANGED, ImportNote, ImportReport
from casstore.compat.lash_database import VERSIONS
from casstore.compat.lash_import import import_lash
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
from casstore.maintenance.copy import copy
from casstore.maintenance.export import export_session
from casstore.maintenance.gc import collect
from casstore.maintenance.import_ import import_session
from casstore.maintenance.policy import Policy
from casstore.maintenance.progress import Step
from casstore.maintenance.retention import execute
from casstore.maintenance.retention_planning import plan
from casstore.maintenance.vacuum import vacuum
from casstore.session.data import Attachment, Commit, NodeDraft, Usage
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


def parts(report: ImportReport) -> dict[str, tuple[int, int]]:
    return {part.name: (part.found, part.imported) for part in report.parts}


def notes(report: ImportReport) -> dict[str, tuple[int | str, ...]]:
    return {note.what: (note.number, *note.examples[:1]) for note in report.notes}


def is_sound(store: Store) -> bool:
    return not check(store).findings


# --- everything -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_an_imported_session_has_everything_of_the_source(
    tmp_path: Path, any_store: Store, version: int
) -> None:
    store = any_store
    file = filled(tmp_path / "s1.db", version)
    before = file.path.read_bytes()
    report = import_lash(store, file.path)
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
    assert checkpoint.plugin_snapshot == {
        "plugins": {"p": {"meta": {"state": None}, "artifacts": []}}
    }
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
def test_queue_turns_names_and_counters_move(
    tmp_path: Path, any_store: Store, version: int
) -> None:
    store = any_store
    file = filled(tmp_path / "s1.db", version)
    report = import_lash(store, file.path)
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


def test_the_session_continues_from_where_it_was(file: LashFile, store: Store) -> None:
    import_lash(store, file.path)
    session = store.session(SESSION)
    result = session.commit(
        Commit(append=[NodeDraft("n", {"role": "user", "content": "on"})], expected=5)
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
    """Hashes of lash are computed differently, so a repeated commit cannot be compared."""
    import_lash(store, file.path)
    session = store.session(SESSION)
    head = session.head()
    for turn in ("t1", "t2"):
        with pytest.raises(TurnConflictError):
            session.commit(Commit(append=[NodeDraft(f"n{turn}", 1)], turn=turn))
    assert session.head() == head
    assert head is not None
    assert (head.turn, head.committed_at_ms) == ("t2", 1_780_308_000_000)
    assert session.commit(Commit(append=[NodeDraft("n", 1)], turn="t3"))


def test_turns_with_a_later_revision_than_the_head_get_that_of_the_head(
    file: LashFile, store: Store
) -> None:
    """As in a file that was put back; a copy takes along what is not beyond the head."""
    file.turn("t9", 9)
    import_lash(store, file.path)
    with Store(MemoryEngine()) as other:
        copy(store, other)
        with pytest.raises(TurnConflictError):
            other.session(SESSION).commit(Commit(turn="t9"))


# --- the graph ------------------------------------------------------------------------------------


def test_hidden_nodes_are_imported_hidden_and_the_path_stays_complete(
    file: LashFile, store: Store
) -> None:
    """In lash, hiding a node in the middle of a path cuts it: what is above it is not seen."""
    file.run("UPDATE graph_nodes SET tombstoned = 1 WHERE node_id = 'a1'")
    import_lash(store, file.path)
    session = store.session(SESSION)
    assert [node.id for node in session.nodes()] == ["u1", "u2", "plugin:1"]
    assert session.node("a1") is None
    assert session.tombstone(["a1", "u1"]).already == ("a1",)
    with pytest.raises(InvalidInputError, match="already"):
        session.commit(Commit(append=[NodeDraft("a1", 1)]))
    assert is_sound(store)


@pytest.mark.parametrize("lost", ["gone", "hidden"])
def test_a_lost_leaf_falls_back_to_the_latest_message(
    file: LashFile, store: Store, lost: str
) -> None:
    if lost == "gone":
        file.run("DELETE FROM graph_nodes WHERE node_id = 'plugin:1'")
    else:
        file.run("UPDATE graph_nodes SET tombstoned = 1 WHERE node_id = 'plugin:1'")
    told = notes(import_lash(store, file.path))
    head = store.session(SESSION).head()
    assert head is not None
    assert head.leaf == "u2"
    [(number, first)] = [found for what, found in told.items() if what.startswith("leaf")]
    assert (number, first) == (1, "plugin:1")


def test_a_missing_leaf_of_a_session_without_messages_becomes_no_leaf(
    tmp_path: Path, store: Store
) -> None:
    file = LashFile(tmp_path / "a.db")
    file.node("plugin:1", kind="plugin", plugin_type="p", body=1)
    file.head("nowhere")
    import_lash(store, file.path)
    state = store.session(SESSION).load()
    assert state is not None
    assert (state.leaf, list(state.nodes)) == (None, [])
    assert len(store.session(SESSION).nodes("full")) == 1


def test_a_node_without_its_parent_becomes_a_root_and_is_reported(
    file: LashFile, store: Store
) -> None:
    file.node("lost", "vacuumed")
    file.node("below", "lost")
    told = notes(import_lash(store, file.path))
    assert told["nodes whose parent is gone, stored as roots"] == (1, "lost")
    node = store.session(SESSION).node("lost")
    assert node is not None
    assert node.parent is None
    assert [one.id for one in store.session(SESSION).nodes(leaf="below")] == ["lost", "below"]


def test_a_parent_inserted_late_goes_first(file: LashFile, store: Store) -> None:
    file.node("child", "late")
    file.node("late", "u1")
    told = notes(import_lash(store, file.path))
    assert told["nodes inserted before their parent, stored after it"] == (1, "child")
    assert [one.id for one in store.session(SESSION).nodes(leaf="child")] == ["u1", "late", "child"]


def test_a_session_that_is_its_own_ancestor_is_refused(file: LashFile, store: Store) -> None:
    file.node("x", "y")
    file.node("y", "x")
    for dry_run in (True, False):
        with pytest.raises(CycleError, match=r"of .*s1\.db is its own ancestor"):
            import_lash(store, file.path, dry_run=dry_run)
    assert not list(store.sessions())


def test_messages_of_every_encoding_are_recognised_as_messages(
    tmp_path: Path, store: Store
) -> None:
    file = LashFile(tmp_path / "a.db", 1)
    file.node("old", kind="message", message=message("old", "User", "hello"))
    result = message("r", "User")
    result["parts"][0]["kind"] = "ToolResult"
    file.node("r", "old", kind="event", event={"Conversation": result})
    file.node("strange", "r", kind="event", event={"Conversation": message("strange", "Narrator")})
    file.node("two", "strange", kind="event", event={"Conversation": {"role": "User"}, "Tool": 1})
    file.head("two")
    import_lash(store, file.path)
    session = store.session(SESSION)
    info = session.info()
    assert (info.first_user_message, info.user_message_count) == ("hello", 1)
    roles = [node.payload.get("message", {}).get("role") for node in session.nodes()]
    assert roles == ["user", "user", "Narrator", None]
    last = session.node("two")
    assert last is not None
    assert last.payload == {"kind": "event", "event": {"Conversation": {"role": "User"}, "Tool": 1}}


def test_an_abandoned_branch_is_imported(file: LashFile, store: Store) -> None:
    import_lash(store, file.path)
    path = [node.id for node in store.session(SESSION).nodes(leaf="protocol:1")]
    assert path == ["u1", "a1", "protocol:1"]


def test_a_session_with_many_branches_and_nodes_is_imported(tmp_path: Path, store: Store) -> None:
    file = LashFile(tmp_path / "a.db")
    rows = []
    for at in range(1500):
        told: dict[str, Any] = {"node_id": f"n{at}", "timestamp": "2026", "kind": "plugin"}
        if at:
            told["parent_node_id"] = f"n{at // 2}"
        rows.append((f"n{at}", json.dumps(told), int(at % 7 == 3)))
    with closing(sqlite3.connect(file.path)) as database, database:
        database.executemany(
            "INSERT INTO graph_nodes (node_id, node_json, tombstoned) VALUES (?, ?, ?)", rows
        )
    file.head("n1499")
    steps: list[Step] = []
    import_lash(store, file.path, progress=steps.append)
    assert {step.phase for step in steps} == {"read", "store", "copy", "verify"}
    session = store.session(SESSION)
    assert len(session.nodes("full")) == 1500 - len(range(3, 1500, 7))
    assert session.node("n1498") is not None
    assert session.commit(Commit(append=[NodeDraft("on", 1)])).revision == 6
    assert is_sound(store)


# --- what has no place ----------------------------------------------------------------------------


def test_rows_that_cannot_be_imported_are_counted(tmp_path: Path, store: Store) -> None:
    file = filled(tmp_path / "a.db", 3)
    file.insert(
        "runtime_turn_checkpoints", session_id=SESSION, turn_id="t", lease_fencing_token=12,
        updated_at_ms=1,
    )  # fmt: skip
    file.insert(
        "runtime_effect_journal", session_id=SESSION, turn_id="t", idempotency_key="k",
        envelope_hash="h", effect_kind="e", outcome_json="{}", created_at_ms=1,
    )  # fmt: skip
    file.run("ALTER TABLE graph_nodes ADD COLUMN colour TEXT")
    file.run("UPDATE graph_nodes SET colour = 'red' WHERE seq < 3")
    file.run("CREATE TABLE notes (x)")
    file.run("INSERT INTO notes VALUES (1)")
    file.batch("other", 90, [1], session_id="s2")
    file.turn("t9", 1, session_id="s2")
    file.attachment("cc", session_id="s2")
    file.insert("queued_work_items", batch_id="none", item_index=0, item_id="i", payload_json="1")
    file.blob(b"garbage")
    file.head("plugin:1", weather="fine", token_ledger=[{"source": "x"}])
    left = notes(import_lash(store, file.path))
    assert {what: found[0] for what, found in left.items()} == {
        "effects of turns (runtime_effect_journal), left out": 1,
        "unfinished turns (runtime_turn_checkpoints), left out": 1,
        "values of the unknown column colour of graph_nodes, left out": 2,
        "rows of the unknown table notes, left out": 1,
        "rows of queued_work_batches of other sessions, left out": 1,
        "rows of runtime_turn_commits of other sessions, left out": 1,
        "rows of attachment_manifest of other sessions, left out": 1,
        "queued items of no batch, left out": 1,
        "unknown key weather of the head, left out": 1,
        "usage in the head, which lash does not read, left out": 1,
        # The head was rewritten without a checkpoint, so nothing refers to its blobs.
        "unreferenced blobs, left out": 5,
    }
    lease = store.session(SESSION).claim_lease("me", 1000)
    assert lease is not None
    assert lease.fencing == 13


@pytest.mark.parametrize("version", [8, 11, 12])
def test_inputs_that_wait_for_a_turn_are_queued(tmp_path: Path, store: Store, version: int) -> None:
    file = filled(tmp_path / "a.db", version)
    ingress = {"scope": "active_turn", "turn_id": "t"}
    file.waiting("i1", source_key="k")
    file.waiting("i2", "pending_active", ingress_json=json.dumps(ingress))
    file.waiting("i3", "completed")
    file.waiting("i4", session_id="another")
    report = import_lash(store, file.path)
    session = store.session(SESSION)
    one, two = session.queue.batches()[3:]
    assert (one.id, one.seq, one.source_key, one.delivery, one.slot, one.enqueued_at_ms) == (
        "i1", 7, "input:k", "after_turn", "exclusive", 1_750_000_000_009,
    )  # fmt: skip
    assert (two.id, two.seq, two.delivery) == ("i2", 8, "earliest")
    assert two.items == (
        {
            "item_id": "i2",
            "payload": {"type": "turn_input", "ingress": ingress, "input": {"text": "i2"}},
        },
    )
    told = notes(report)
    assert told["inputs that wait for a turn, stored as batches after the others"] == (2, "i1")
    assert told["inputs of completed turns or other sessions, left out"] == (2,)
    assert session.queue.enqueue([1]).seq == 9


def test_attachment_owners_and_lease_generations_are_imported(tmp_path: Path, store: Store) -> None:
    file = filled(tmp_path / "a.db", 12)
    file.run("UPDATE attachment_manifest SET owner_kind = 'turn', owner_id = 't2'")
    file.run("UPDATE queued_work_batches SET claim_id = 'c', claim_session_lease_generation = 77")
    told = notes(import_lash(store, file.path))
    assert told["batches and inputs whose claim has expired, stored unclaimed"] == (3, "qwb:1")
    session = store.session(SESSION)
    assert {one.owner for one in session.attachments.list()} == {"turn:t2"}
    lease = session.claim_lease("me", 1000)
    assert lease is not None
    assert lease.fencing == 78


# --- who holds it ---------------------------------------------------------------------------------


def test_a_leased_session_or_claimed_batch_raises_busy_error(file: LashFile, store: Store) -> None:
    now = store.engine.now_ms()
    file.lease(41, owner="worker", expires_ms=now + 60_000)
    for dry_run in (True, False):
        with pytest.raises(BusyError, match="held by 'worker' for another"):
            import_lash(store, file.path, dry_run=dry_run)
    file.lease(41, owner="worker", expires_ms=now - 1)
    file.run(
        "UPDATE queued_work_batches SET claim_id = 'c', claim_owner_id = 'w', claim_expires_at_ms "
        "= ? WHERE batch_id = 'qwb:1'",
        (now + 60_000,),
    )
    with pytest.raises(BusyError, match=r"batch 'qwb:1' of session 's1'.*held by 'w'"):
        import_lash(store, file.path)
    assert not list(store.sessions())
    file.run("UPDATE queued_work_batches SET claim_expires_at_ms = 5")
    told = notes(import_lash(store, file.path))
    assert told["batches and inputs whose claim has expired, stored unclaimed"] == (1, "qwb:1")
    assert len(store.session(SESSION).queue.pending()) == 3


def test_a_claimed_input_raises_busy_error(tmp_path: Path, store: Store) -> None:
    file = filled(tmp_path / "a.db", 8)
    late = store.engine.now_ms() + 60_000
    file.waiting("i", claim_id="c", claim_owner_id="w", claim_expires_at_ms=late)
    with pytest.raises(BusyError, match=r"input 'i' of session 's1'.*held by 'w'"):
        import_lash(store, file.path)


def test_a_running_turn_raises_busy_error(tmp_path: Path, store: Store) -> None:
    file = filled(tmp_path / "a.db", 1)
    file.insert(
        "runtime_turn_checkpoints", session_id=SESSION, turn_id="t", lease_owner_id="w",
        lease_expires_at_ms=store.engine.now_ms() + 60_000, updated_at_ms=1,
    )  # fmt: skip
    with pytest.raises(BusyError, match="held by 'w'"):
        import_lash(store, file.path)


# --- blobs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"squeeze": True}, {"numbers": False}, {"bare": True}])
def test_blobs_in_every_envelope(tmp_path: Path, store: Store, how: dict[str, bool]) -> None:
    file = LashFile(tmp_path / "a.db")
    state = {"tools": ["a", 1, -5, 2.5, None, True, 1 << 63]}
    manifest = {"schema_version": 1, "turn_state": {}, "tool_state_ref": file.value(state, **how)}
    file.head(checkpoint_ref=file.value(manifest, **how))
    import_lash(store, file.path)
    assert store.session(SESSION).checkpoint(hydrate=True).tool_state == state


def broken(file: LashFile, kind: str) -> str:
    """A tool state that is damaged in some way; the name of its blob."""
    good = msgpack.packb({"a": 1})
    name = sha256(good).hexdigest()
    file.blob(good)
    envelope = {"descriptor": {"kind": "ToolState"}, "compression": "None", "content": list(good)}
    bomb = zlib.compress(bytes(3 << 20))
    stored: dict[str, Any] = {
        "flipped": msgpack.packb({**envelope, "content": [*good[:-1], good[-1] ^ 1]}),
        "cut": msgpack.packb(envelope)[:-3],
        "no envelope": b"plain",
        "other shape": msgpack.packb([1, 2]),
        "no bytes": msgpack.packb({**envelope, "content": ["x"]}),
        "no content": msgpack.packb({**envelope, "content": "text"}),
        "large numbers": msgpack.packb({**envelope, "content": [256]}),
        "unknown compression": msgpack.packb({**envelope, "compression": "Zstd"}),
        "no zlib": msgpack.packb({**envelope, "compression": "Zlib"}),
        "cut zlib": msgpack.packb(
            {**envelope, "compression": "Zlib", "content": zlib.compress(good)[:-2]}
        ),
        "bomb": msgpack.packb({**envelope, "compression": "Zlib", "content": bomb}),
        "too long": b"x" * (3 << 20),
        "text": "text",
    }
    if kind == "missing":
        file.run("DELETE FROM blobs WHERE hash = ?", (name,))
    elif kind == "not msgpack":
        name = file.blob(b"\xc1\xc1")
    elif kind == "deep":
        name = file.blob(b"\x91" * 3000 + b"\xc0")
    elif kind == "strange keys":
        name = file.blob(msgpack.packb({1: 2}))
    elif kind == "extension":
        name = file.blob(msgpack.packb(msgpack.ExtType(5, b"x")))
    else:
        file.run("UPDATE blobs SET content = ? WHERE hash = ?", (stored[kind], name))
    manifest = {"schema_version": 1, "turn_state": {"turn_index": 2}, "tool_state_ref": name}
    file.head(checkpoint_ref=file.value(manifest))
    return name


REASONS = {
    "flipped": "its content has the SHA-256",
    "cut": "has no envelope",
    "no envelope": "has no envelope",
    "other shape": "no content",
    "no bytes": "not an array of bytes",
    "no content": "not bytes",
    "large numbers": "not an array of bytes",
    "unknown compression": "compression 'Zstd' is unknown",
    "no zlib": "cannot be inflated",
    "cut zlib": "ends in the middle",
    "bomb": "inflates to more than 1048576 bytes",
    "too long": "more than 1048576",
    "text": "text, not a blob",
    "missing": "it is missing, and tool_state refers to it",
    "not msgpack": "is not valid MessagePack",
    "deep": "is not valid MessagePack",
    "strange keys": "is not valid MessagePack",
    "extension": "tool_state holds more than JSON and bytes",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_damaged_blob_is_named_or_left_out(tmp_path: Path, store: Store, kind: str) -> None:
    """Where lash takes it for a component that was never there, and goes on."""
    file = LashFile(tmp_path / "a.db")
    name = broken(file, kind)
    for dry_run in (True, False):
        with pytest.raises(DamagedSourceError, match=REASONS[kind]) as caught:
            import_lash(store, file.path, max_blob_bytes=1 << 20, dry_run=dry_run)
        assert caught.value.place == f"blob {name}"
    assert not list(store.sessions())
    report = import_lash(store, file.path, max_blob_bytes=1 << 20, leave_out_damaged=True)
    assert notes(report)["damaged blobs, left out"] == (1, name)
    checkpoint = store.session(SESSION).checkpoint(hydrate=True)
    assert (checkpoint.turn_state, checkpoint.tool_state) == ({"turn_index": 2}, None)


@pytest.mark.parametrize("what", ["checkpoint", "artifact"])
def test_a_missing_checkpoint_or_artifact_blob_is_reported_or_left_out(
    file: LashFile, store: Store, what: str
) -> None:
    if what == "checkpoint":
        file.head("plugin:1", checkpoint_ref="ab" * 32)
    else:
        file.insert("artifact_refs", artifact_ref="b", blob_ref="ab" * 32)
    with pytest.raises(DamagedSourceError, match=what):
        import_lash(store, file.path)
    told = import_lash(store, file.path, leave_out_damaged=True)
    assert notes(told)["damaged blobs, left out"] == (1, "ab" * 32)


def test_an_execution_state_referenced_only_by_a_frame_is_imported_if_it_exists(
    file: LashFile, store: Store
) -> None:
    """It may have been collected: lash's own collection does not follow frames."""
    kept = file.value([1, 2, 3])
    frames = [
        {"frame_id": "f1", "execution_state_ref": kept},
        {"frame_id": "f2", "execution_state_ref": "cd" * 32},
    ]
    file.head("plugin:1", agent_frames=frames)
    told = notes(import_lash(store, file.path))
    assert told["frames whose execution state is gone"] == (1, "f2")
    one, two = store.session(SESSION).checkpoint().frames
    assert one == {**frames[0], "execution_state_snapshot": b"\1\2\3"}
    assert two == frames[1]
    other = LashFile(file.path.with_name("b.db"), session="other")
    broken_ref = other.blob(b"\xc1")
    other.head(agent_frames=[{"frame_id": "f", "execution_state_ref": broken_ref}])
    with pytest.raises(DamagedSourceError, match="is not valid MessagePack"):
        import_lash(store, other.path)


# --- rows that cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "place"),
    [
        ("UPDATE graph_nodes SET node_json = '{' WHERE node_id = 'u2'", "node 'u2'"),
        ("UPDATE graph_nodes SET node_json = '[]' WHERE node_id = 'u2'", "node 'u2'"),
        ("UPDATE graph_nodes SET node_json = '{}' WHERE node_id = 'u2'", "node 'u2'"),
        ("UPDATE graph_nodes SET node_json = x'00' WHERE node_id = 'u2'", "node 'u2'"),
        (
            'UPDATE graph_nodes SET node_json = \'{"node_id":"u2","x":\' || '
            "replace(hex(zeroblob(60000)), '00', '[') || '}' WHERE node_id = 'u2'",
            "node 'u2'",
        ),
        (
            'UPDATE graph_nodes SET node_json = \'{"node_id":"u2","x":\' || '
            "replace(hex(zeroblob(3000)), '00', '99') || '}' WHERE node_id = 'u2'",
            "node 'u2'",
        ),
        (
            'UPDATE graph_nodes SET node_json = \'{"node_id":"u2","x":1e999}\' '
            "WHERE node_id = 'u2'",
            "node 'u2'",
        ),
        (
            'UPDATE graph_nodes SET node_json = \'{"node_id":"u2","timestamp":7}\' '
            "WHERE node_id = 'u2'",
            "node 'u2'",
        ),
        (
            'UPDATE graph_nodes SET node_json = \'{"node_id":"u2","parent_node_id":7}\' '
            "WHERE node_id = 'u2'",
            "node 'u2'",
        ),
    ],
)
def test_a_node_that_cannot_be_decoded_is_refused_by_name(
    file: LashFile, store: Store, statement: str, place: str
) -> None:
    """Where lash leaves it out without a word."""
    file.run(statement)
    with pytest.raises(DamagedSourceError) as caught:
        import_lash(store, file.path)
    assert caught.value.place == place
    report = import_lash(store, file.path, leave_out_damaged=True)
    assert notes(report)["damaged nodes, left out"] == (1, "u2")
    # Its child has no parent now.
    assert notes(report)["nodes whose parent is gone, stored as roots"] == (1, "plugin:1")
    assert parts(report)["nodes"] == (5, 4)


@pytest.mark.parametrize(
    ("statement", "place"),
    [
        ("UPDATE session_head SET head_json = 'x'", "the head"),
        ("UPDATE session_head SET head_revision = -1", "the head"),
        ("UPDATE session_head SET head_json = '{\"agent_frames\":1}'", "the head"),
        ("UPDATE session_head SET head_json = '{\"agent_frames\":[1]}'", "frame 1 of the head"),
        ("UPDATE session_head SET head_json = '{\"leaf_node_id\":1}'", "the head"),
        ("UPDATE session_head SET session_id = 'another'", "the head"),
        ("UPDATE session_meta SET relation_json = '1'", "the row of session_meta"),
        ("UPDATE session_meta SET relation_json = '{\"parent_session_id\":1}'", "the relation"),
        ("UPDATE session_meta SET model = x'00'", "the row of session_meta"),
        ("UPDATE usage_deltas SET input_tokens = -4 WHERE seq = 2", "row 2 of usage_deltas"),
        ("UPDATE usage_deltas SET input_tokens = 'many' WHERE seq = 2", "row 2 of usage_deltas"),
        ("UPDATE runtime_turn_commits SET result_json = '' WHERE turn_id = 't1'", "turn 't1'"),
        (
            "UPDATE runtime_turn_commits SET result_json = '{\"head_revision\":-1}' "
            "WHERE turn_id = 't1'",
            "turn 't1'",
        ),
        ("UPDATE queued_work_batches SET slot_policy = 'x' WHERE enqueue_seq = 5", "batch 'qwb:2'"),
        (
            "UPDATE queued_work_batches SET merge_key_json = '{}' WHERE enqueue_seq = 5",
            "batch 'qwb:2'",
        ),
        (
            "UPDATE queued_work_items SET payload_json = '' WHERE batch_id = 'qwb:2'",
            "batch 'qwb:2'",
        ),
        ("UPDATE attachment_manifest SET intent_at_ms = 'x'", f"attachment {'aa' * 32!r}"),
        (
            "UPDATE session_execution_leases SET lease_fencing_token = -1",
            "a lease in session_execution_leases",
        ),
    ],
)
def test_an_invalid_row_is_refused_by_name(
    file: LashFile, store: Store, statement: str, place: str
) -> None:
    file.run(statement)
    for leave_out in (False, True):
        with pytest.raises(DamagedSourceError) as caught:
            import_lash(store, file.path, leave_out_damaged=leave_out)
        assert caught.value.place == place
        assert str(file.path) in str(caught.value)
    assert not list(store.sessions())


def test_ids_that_cannot_be_are_refused(file: LashFile, store: Store) -> None:
    file.run("UPDATE queued_work_batches SET enqueue_seq = 0 WHERE enqueue_seq = 3")
    with pytest.raises(DamagedSourceError, match="needs a seq of at least 1") as caught:
        import_lash(store, file.path)
    assert caught.value.place == "session 's1'"
    other = LashFile(file.path.with_name("b.db"), session="other")
    other.node("x" * 20_000)
    other.head()
    with pytest.raises(DamagedSourceError, match="a node id must have 1 to 16384 bytes"):
        import_lash(store, other.path, dry_run=True)


def test_payloads_that_a_value_cannot_hold_are_stored_as_json_text(
    file: LashFile, store: Store
) -> None:
    """JSON nests deeper, and counts further, than a value of a store does."""
    deep: Any = 1
    for _ in range(90):
        deep = [deep]
    file.node("deep", "u1", kind="plugin", plugin_type="p", body=deep)
    file.node("far", "u1", kind="plugin", plugin_type="p", body=1 << 80)
    told = notes(import_lash(store, file.path))
    assert told["payloads stored as their JSON, in bytes"] == (2, "deep")
    for name, body in (("deep", deep), ("far", 1 << 80)):
        node = store.session(SESSION).node(name)
        assert node is not None
        assert json.loads(node.payload["json"])["body"] == body


def test_times_in_every_notation_are_read(tmp_path: Path, store: Store) -> None:
    for at, (text, wanted) in enumerate(
        [
            ("unix:12", 12_000),
            ("2026-06-01T10:00:00Z", 1_780_308_000_000),
            # None that can be read: that of the first node.
            ("yesterday", 1_780_308_000_000),
            ("unix:99999999999999999999", 1_780_308_000_000),
        ]
    ):
        file = LashFile(tmp_path / f"{at}.db", session=f"s{at}")
        file.meta(created_at=text, model="", cwd="", session_name="")
        file.node("n")
        file.head("n", revision=0)
        report = import_lash(store, file.path)
        meta = store.session(f"s{at}").meta()
        assert (meta.created_at_ms, meta.name, meta.model, meta.cwd) == (
            wanted,
            f"s{at}",
            None,
            None,
        )
        assert meta.extra["lash"]["created_at"] == text
        assert bool(notes(report)) == (at > 1)
        head = store.session(f"s{at}").head()
        assert head is not None
        assert head.revision == 1


# --- sessions that are there ----------------------------------------------------------------------


def test_a_second_import_does_nothing(file: LashFile, store: Store) -> None:
    first = import_lash(store, file.path)
    assert first.sessions[0].outcome == IMPORTED
    before = store.session(SESSION).head()
    for dry_run in (True, False):
        again = import_lash(store, file.path, dry_run=dry_run)
        assert again.sessions[0].outcome == UNCHANGED
        assert not any(moved for _, moved in parts(again).values())
    assert store.session(SESSION).head() == before
    assert len(store.session(SESSION).queue.batches()) == 3


def test_a_session_that_continued_here_is_still_recognised_as_the_imported_one(
    file: LashFile, store: Store
) -> None:
    import_lash(store, file.path)
    session = store.session(SESSION)
    session.commit(Commit(append=[NodeDraft("n", 1)]))
    session.rename("another name")
    session.tombstone(["a1"])
    assert session.queue.cancel("qwb:1") is not None
    assert import_lash(store, file.path).sessions[0].outcome == UNCHANGED
    assert len(session.queue.batches()) == 2


@pytest.mark.parametrize(
    "what",
    ["node", "batch", "done", "turn", "attachment", "usage", "lease", "name", "hidden", "artifact"],
)
def test_a_source_that_changed_after_the_import_is_refused(
    file: LashFile, store: Store, what: str
) -> None:
    import_lash(store, file.path)
    if what == "node":
        file.node("u3", "plugin:1")
        file.run("UPDATE session_head SET head_revision = 6")
    elif what == "batch":
        file.batch("qwb:9", 9)
    elif what == "done":
        file.run("DELETE FROM queued_work_batches WHERE batch_id = 'qwb:1'")
    elif what == "hidden":
        file.run("UPDATE graph_nodes SET tombstoned = 1 WHERE node_id = 'protocol:1'")
    elif what == "artifact":
        file.artifact("module:b", b"fn more() {}")
    elif what == "turn":
        file.turn("t3", 5)
    elif what == "attachment":
        file.attachment("bb" * 32, 1_750_000_000_900)
    elif what == "usage":
        file.usage("late", "m", 1, 1, 1, 1)
    elif what == "lease":
        file.lease(43)
    else:
        file.meta()
    for dry_run in (True, False):
        with pytest.raises(ConflictError, match=r"came from lash at revision 5.*at revision [56]"):
            import_lash(store, file.path, dry_run=dry_run)
    assert import_lash(store, file.path, name="s1 again").sessions[0].session == "s1 again"


def test_another_session_of_that_id_is_left_alone(file: LashFile, store: Store) -> None:
    store.session(SESSION).commit(Commit(append=[NodeDraft("n", 1)]))
    for dry_run in (True, False):
        with pytest.raises(SessionExistsError):
            import_lash(store, file.path, dry_run=dry_run)
    import_lash(store, file.path, name="moved")
    moved = store.session("moved")
    assert moved.meta().extra["lash"]["session_id"] == SESSION
    assert {one.session for one in moved.attachments.list()} == {"moved"}
    with pytest.raises(TurnConflictError):
        moved.commit(Commit(append=[NodeDraft("n", 1)], turn="t1"))
    store.delete_session("moved")
    with pytest.raises(SessionDeletedError):
        import_lash(store, file.path, name="moved")


@pytest.mark.parametrize("what", ["lease", "queue", "tag"])
def test_leftovers_of_another_session_are_a_conflict(
    file: LashFile, store: Store, what: str
) -> None:
    session = store.session(SESSION)
    if what == "lease":
        session.claim_lease("somebody", 1000)
    elif what == "queue":
        session.queue.enqueue([1])
    else:
        store.tag("lash/s1/module:a", store.put_blob(b"another"))
    with pytest.raises(ConflictError) as caught:
        import_lash(store, file.path)
    assert isinstance(caught.value, NameTakenError) == (what == "tag")
    assert session.head() is None


# --- stopped --------------------------------------------------------------------------------------


class Failing(MemoryEngine):
    """An engine whose writes fail from some number on."""

    left = 1 << 30

    def write(self, write: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise StorageError("no room")
        return super().write(write)


def test_an_import_that_fails_at_any_write_leaves_the_session_complete_or_absent(
    file: LashFile,
) -> None:
    for number in range(100):
        with Store(Failing()) as store:
            engine = store.engine
            assert isinstance(engine, Failing)
            engine.left = number
            try:
                import_lash(store, file.path)
            except StorageError:
                engine.left = 1 << 30
                assert store.session(SESSION).head() is None
                assert not list(store.sessions())
                assert not list(store.pins())
                assert not store.session(SESSION).queue.batches()
                assert import_lash(store, file.path).sessions[0].outcome == IMPORTED
                assert is_sound(store)
                continue
            break
    assert number >= 2


def test_an_import_stopped_at_any_step_continues(file: LashFile, store: Store) -> None:
    steps: list[Step] = []
    with Store(MemoryEngine()) as other:
        import_lash(other, file.path, progress=steps.append)

    for last in steps:

        def stop(step: Step, last: Step = last) -> None:
            if step == last:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            import_lash(store, file.path, progress=stop)
    assert import_lash(store, file.path).sessions[0].outcome == UNCHANGED
    assert is_sound(store)


def test_an_object_removed_by_a_collector_is_stored_again(file: LashFile, store: Store) -> None:
    taken: list[int] = []

    def take(step: Step) -> None:
        if step.phase == "store" and not taken:
            taken.append(collect(store, grace_ms=0).objects_swept)

    import_lash(store, file.path, progress=take)
    assert taken[0] > 0
    assert is_sound(store)


def test_a_concurrent_change_during_the_import_raises_conflict_error(
    file: LashFile, store: Store
) -> None:
    def change(step: Step) -> None:
        if step.phase == "copy":
            store.session(SESSION).rename("other")

    with pytest.raises(ConflictError, match="session 's1' differs from its source: its meta"):
        import_lash(store, file.path, progress=change)


def test_two_concurrent_imports_create_one_session(file: LashFile, store: Store) -> None:
    done: list[str] = []

    def other(step: Step) -> None:
        if step.phase == "store" and not done:
            done.append(import_lash(store, file.path).sessions[0].outcome)

    assert import_lash(store, file.path, progress=other).sessions[0].outcome == IMPORTED
    assert done == [IMPORTED]
    assert len(store.session(SESSION).queue.batches()) == 3


@pytest.mark.parametrize("what", ["commit", "create", "delete"])
def test_a_session_created_during_the_import_keeps_its_id(
    tmp_path: Path, store: Store, what: str
) -> None:
    file = LashFile(tmp_path / "a.db")
    file.node("n")
    file.head("n")

    def take(step: Step) -> None:
        if step.phase == "store":
            if what == "commit":
                store.session(SESSION).commit(Commit(append=[NodeDraft("x", 1)]))
            else:
                store.create_session(SESSION, name="mine")
            if what == "delete":
                store.delete_session(SESSION)

    wanted = SessionDeletedError if what == "delete" else SessionExistsError
    with pytest.raises(wanted):
        import_lash(store, file.path, progress=take)
    if what == "commit":
        assert [node.id for node in store.session(SESSION).nodes()] == ["x"]
    elif what == "create":
        assert store.session(SESSION).meta().name == "mine"
    assert is_sound(store)


def test_a_dry_run_writes_nothing(file: LashFile) -> None:
    with Store(Failing()) as store:
        assert isinstance(store.engine, Failing)
        store.engine.left = 0
        report = import_lash(store, file.path, dry_run=True)
    assert report.dry_run
    assert parts(report)["nodes"] == (5, 5)


# --- files ----------------------------------------------------------------------------------------


def test_every_session_in_a_directory_is_imported(tmp_path: Path, store: Store) -> None:
    for name in ("b", "a"):
        made = LashFile(tmp_path / f"{name}.db", session=name)
        made.meta()
    LashFile(tmp_path / "empty.db")
    with closing(sqlite3.connect(tmp_path / "processes.db")) as database, database:
        database.execute("CREATE TABLE processes (x)")
        database.execute("PRAGMA user_version = 6")
    (tmp_path / "notes.txt").write_text("none")
    report = import_lash(store, tmp_path)
    assert [(Path(one.source).name, one.session, one.outcome) for one in report.sessions] == [
        ("a.db", "a", IMPORTED), ("b.db", "b", IMPORTED),
    ]  # fmt: skip
    assert report.notes == (
        ImportNote(
            "databases that are not session databases of lash, left out",
            1,
            (str(tmp_path / "processes.db"),),
        ),
        ImportNote("databases without a session, left out", 1, (str(tmp_path / "empty.db"),)),
    )
    assert [info.head for info in store.sessions()] == [None, None]
    with pytest.raises(InvalidInputError, match=r"name 'x' is for one database, and .* holds 4"):
        import_lash(store, tmp_path, name="x")
    with pytest.raises(ForeignSourceError):
        import_lash(store, tmp_path / "processes.db")


def test_two_different_files_with_one_session_id_conflict(tmp_path: Path, store: Store) -> None:
    for name in ("a", "b"):
        made = LashFile(tmp_path / f"{name}.db", session="root")
        made.node(name)
        made.head(name)
    for dry_run in (True, False):
        with pytest.raises(ConflictError, match="'root'"):
            import_lash(store, tmp_path, dry_run=dry_run)
    import_lash(store, tmp_path / "b.db", name="root b")
    assert [info.meta.session for info in store.sessions()] == ["root", "root b"]


def test_two_copies_of_one_session_are_imported_once(file: LashFile, store: Store) -> None:
    shutil.copy(file.path, file.path.parent / "twin.db")
    for dry_run in (True, False):
        report = import_lash(store, file.path.parent, dry_run=dry_run)
        assert [one.outcome for one in report.sessions] == [IMPORTED, UNCHANGED]
        assert report.part("sessions") == ("sessions", 2, 1, 0)


def test_a_version_3_database_without_the_turn_tables_is_imported(
    tmp_path: Path, store: Store
) -> None:
    """Later databases of that version have two tables less."""
    file = filled(tmp_path / "a.db", 3)
    file.run("DROP TABLE runtime_turn_checkpoints")
    file.run("DROP TABLE runtime_effect_journal")
    assert import_lash(store, file.path).sessions[0].outcome == IMPORTED


@pytest.mark.parametrize("version", [0, 2, 5, 13, 99])
def test_other_versions_are_refused_by_name(tmp_path: Path, store: Store, version: int) -> None:
    file = filled(tmp_path / "a.db", 4)
    file.run(f"PRAGMA user_version = {version}")
    for place in (file.path, tmp_path):
        with pytest.raises(
            SourceVersionError, match=f"schema version {version}, .* 1, 3, 4"
        ) as caught:
            import_lash(store, place)
        assert (caught.value.found, caught.value.supported) == (version, VERSIONS)


def test_a_file_that_is_not_a_session_database_is_refused(tmp_path: Path, store: Store) -> None:
    with pytest.raises(SourceNotFoundError):
        import_lash(store, tmp_path / "nowhere.db")
    with pytest.raises(SourceNotFoundError):
        import_lash(store, tmp_path)
    (tmp_path / "text.db").write_bytes(b"not a database" * 99)
    with pytest.raises(ForeignSourceError):
        import_lash(store, tmp_path / "text.db")
    with pytest.raises(ForeignSourceError, match="no session database"):
        import_lash(store, tmp_path)
    file = filled(tmp_path / "a.db", 4)
    file.run("ALTER TABLE graph_nodes DROP COLUMN tombstoned")
    with pytest.raises(ForeignSourceError, match=r"graph_nodes of .* has no column tombstoned"):
        import_lash(store, file.path)
    other = filled(tmp_path / "b.db", 4)
    other.run("DROP TABLE session_execution_leases")
    with pytest.raises(ForeignSourceError, match="session_execution_leases"):
        import_lash(store, other.path)


def test_a_file_in_the_middle_of_a_write_is_refused(file: LashFile, store: Store) -> None:
    (file.path.parent / "s1.db-journal").write_bytes(
        bytes.fromhex("d9d505f920a163d7") + b"\0\0\0\1" + b"x" * 1500
    )
    with pytest.raises(StorageError):
        import_lash(store, file.path)
    assert not list(store.sessions())


def test_commits_in_the_wal_of_the_source_are_read(file: LashFile, store: Store) -> None:
    with closing(sqlite3.connect(file.path)) as writing:
        writing.execute("PRAGMA journal_mode = WAL")
        writing.execute("UPDATE session_meta SET session_name = 'in the log'")
        writing.commit()
        assert Path(f"{file.path}-wal").exists()
        import_lash(store, file.path)
    assert store.session(SESSION).meta().name == "in the log"


# --- care -----------------------------------------------------------------------------------------


def test_vacuum_retention_gc_and_export_work_on_an_imported_session(
    file: LashFile, store: Store, tmp_path: Path
) -> None:
    """Its first revision is not number 1, and what was hidden came over hidden."""
    file.run("UPDATE graph_nodes SET tombstoned = 1 WHERE node_id = 'a1'")
    import_lash(store, file.path)
    session = store.session(SESSION)
    shown = [node.id for node in session.nodes("full")]
    store.fork(SESSION, "a fork")
    session.commit(Commit(append=[NodeDraft("n", 1)]))
    session.rewind(5)
    assert vacuum(store).sessions
    assert [node.id for node in session.nodes("full")] == shown
    execute(store, plan(store, policy=Policy(last=1)))
    assert [entry.revision for entry in session.history()] == [7]
    collect(store, grace_ms=0)
    assert is_sound(store)
    for turn in ("t1", "t2"):
        with pytest.raises(TurnConflictError):
            session.commit(Commit(append=[NodeDraft("m", 1)], turn=turn))
    export_session(store, SESSION, tmp_path / "s1.bundle")
    with Store(MemoryEngine()) as other:
        import_session(other, tmp_path / "s1.bundle")
        assert [node.id for node in other.session(SESSION).nodes("full")] == shown
        assert is_sound(other)
    assert import_lash(store, file.path).sessions[0].outcome == UNCHANGED
