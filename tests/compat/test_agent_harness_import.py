"""Runtime databases of agent-harness moved over: row by row the same, and nothing from outside."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from casstore.compat.agent_harness_import import import_agent_harness
from casstore.compat.importing import ImportNote, ImportReport
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import (
    ConflictError,
    CorruptionError,
    ForeignStoreError,
    NotFoundError,
    RecordsSchemaError,
    StoreNotFoundError,
)
from casstore.maintenance.progress import Step
from casstore.records.runs import WAITING, Runs
from casstore.store import Store
from tests.records.one_transaction import contents

TABLES = """
CREATE TABLE threads (thread_id TEXT PRIMARY KEY, workspace_id TEXT NOT NULL,
    entry_agent_id TEXT NOT NULL, status TEXT NOT NULL, latest_run_id TEXT,
    created_at TEXT NOT NULL, updated_at TEXT NOT NULL);
CREATE TABLE runs (run_id TEXT PRIMARY KEY, thread_id TEXT NOT NULL REFERENCES threads,
    agent_id TEXT NOT NULL, execution_mode TEXT NOT NULL, adapter_kind TEXT,
    created_at TEXT NOT NULL, updated_at TEXT NOT NULL, state TEXT NOT NULL, previous_state TEXT,
    state_entered_at TEXT NOT NULL, last_transition_at TEXT NOT NULL,
    resumable INTEGER NOT NULL, checkpoint_ref TEXT);
CREATE TABLE thread_messages (id INTEGER PRIMARY KEY AUTOINCREMENT,
    thread_id TEXT NOT NULL REFERENCES threads, role TEXT NOT NULL, content_json TEXT NOT NULL,
    run_id TEXT NOT NULL, created_at TEXT NOT NULL);
CREATE TABLE events (thread_id TEXT NOT NULL, run_id TEXT NOT NULL REFERENCES runs,
    sequence INTEGER NOT NULL, event_json TEXT NOT NULL, created_at TEXT NOT NULL,
    PRIMARY KEY (thread_id, run_id, sequence));
CREATE TABLE approvals (approval_id TEXT PRIMARY KEY, pending_action_id TEXT NOT NULL,
    thread_id TEXT NOT NULL, run_id TEXT NOT NULL REFERENCES runs, tool_call_id TEXT NOT NULL,
    tool_name TEXT NOT NULL, status TEXT NOT NULL, requested_at TEXT NOT NULL, resolved_at TEXT,
    allowed_decisions_json TEXT NOT NULL, input_preview_json TEXT NOT NULL,
    checkpoint_ref TEXT NOT NULL, event_refs_json TEXT NOT NULL);
CREATE TABLE run_requests (thread_id TEXT NOT NULL, run_id TEXT PRIMARY KEY REFERENCES runs,
    request_json TEXT NOT NULL);
CREATE TABLE recovery_intents (thread_id TEXT NOT NULL, run_id TEXT PRIMARY KEY REFERENCES runs,
    intent_json TEXT NOT NULL);
CREATE TABLE artifacts (artifact_id TEXT PRIMARY KEY, thread_id TEXT NOT NULL,
    run_id TEXT NOT NULL REFERENCES runs, kind TEXT NOT NULL, path TEXT NOT NULL,
    created_at TEXT NOT NULL);
CREATE TABLE runtime_metadata (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO runtime_metadata VALUES
    ('schema_family', 'agent-harness-runtime'), ('schema_version', '1');
"""
THREADS = 5


def time(second: int) -> str:
    return f"2026-03-01T10:{second // 60:02}:{second % 60:02}.{second % 1000:03}Z"


def time_ms(second: int) -> int:
    return 1_772_359_200_000 + second * 1000 + second % 1000


class Source:
    """A database as agent-harness writes it, and its artifact files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "runtime.sqlite"

    def fill(self) -> None:
        """Make something of everything."""
        self.folder.mkdir()
        with closing(sqlite3.connect(self.file)) as database, database:
            database.executescript(TABLES)
        for number in range(THREADS):
            self._thread(f"t{number}", number)

    def put(self, table: str, *values: Any) -> None:
        marks = ", ".join("?" * len(values))
        self.change(f"INSERT INTO {table} VALUES ({marks})", *values)

    def change(self, statement: str, *values: Any) -> None:
        with closing(sqlite3.connect(self.file)) as database, database:
            database.execute("PRAGMA synchronous = OFF")
            database.execute(statement, values)

    def artifact(self, name: str, thread: str, run: str, path: str, content: bytes) -> None:
        self.put("artifacts", name, thread, run, "json", path, time(5))
        file = self.folder / "threads" / thread / "runs" / run / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def _thread(self, thread: str, number: int) -> None:
        # Those made first have changed last.
        updated = time(900 - number)
        self.put("threads", thread, "default", "agent", WAITING, f"{thread}-b", time(1), updated)
        for place, (run, state) in enumerate(((f"{thread}-b", WAITING), (f"{thread}-a", "failed"))):
            self.put(
                "runs", run, thread, "agent", "langgraph", "deep" if place else None,
                time(20 - place), time(800 - 2 * number - place), state,
                "running" if place else None, time(30), time(31), int(state == WAITING),
                f"checkpoints/{run}" if state == WAITING else None,
            )  # fmt: skip
            for sequence in (1, 2, 7):
                event = json.dumps({"type": "step", "n": sequence, "text": "é" * 700})
                self.put("events", thread, run, sequence, event, time(40 + sequence))
            self.artifact(
                f"{run}-x", thread, run, "out/report.json", json.dumps({"by": run}).encode()
            )
            self.artifact(f"{run}-y", thread, run, "raw.bin", b"\xff\x00" * 300)
        for text in ("one", "two", "three"):
            self.put(
                "thread_messages", None, thread, "user", json.dumps({"text": text}),
                f"{thread}-a", time(50),
            )  # fmt: skip
        self.put(
            "approvals", f"{thread}-open", "action", thread, f"{thread}-b", "call", "shell",
            "pending", time(60 - number), None, '["approve", "reject"]', '{"cmd": "ls"}',
            f"checkpoints/{thread}-b", '["1", "2"]',
        )  # fmt: skip
        self.put(
            "approvals", f"{thread}-done", "action", thread, f"{thread}-a", "", "shell",
            "approved", time(55), time(56), '["approve"]', "null", "checkpoints/x", "[]",
        )  # fmt: skip
        request = {"input": ["hello"], "invocation": {"context": {}}, "savedAt": time(70)}
        self.put("run_requests", thread, f"{thread}-b", json.dumps(request))
        intent = {
            "kind": "approval-decision", "savedAt": time(71), "checkpointRef": "checkpoints/z",
            "resumePayload": {"decision": "approve"}, "attempts": 2,
        }  # fmt: skip
        self.put("recovery_intents", thread, f"{thread}-b", json.dumps(intent))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "data"
    Source(folder).fill()
    return folder


@pytest.fixture
def source(tmp_path: Path, made: Path) -> Source:
    """A source of one's own, to be spoiled."""
    return Source(Path(shutil.copytree(made, tmp_path / "data")))


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine: Any = MemoryEngine()
    if getattr(request, "param", "memory") == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with Store(engine) as store:
        yield store


on_each_engine = pytest.mark.parametrize("store", ["memory", "lmdb"], indirect=True)


def counts(report: ImportReport) -> dict[str, tuple[int, int]]:
    return {part.name: (part.found, part.imported) for part in report.parts}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_empty_checkpoint_reference_is_none_and_an_approval_may_have_expired(
    store: Store, source: Source
) -> None:
    source.change("UPDATE runs SET checkpoint_ref = '' WHERE run_id = 't0-b'")
    source.change("UPDATE approvals SET checkpoint_ref = '' WHERE approval_id = 't0-open'")
    source.change(
        "UPDATE approvals SET status = 'expired', resolved_at = ? WHERE approval_id = 't1-open'",
        time(90),
    )
    import_agent_harness(store, source.file)
    assert import_agent_harness(store, source.file).imported == 0
    runs = Runs(store)
    assert runs.get_run("t0", "t0-b").checkpoint is None
    found, ended = runs.find_approval("t0-open"), runs.find_approval("t1-open")
    assert found is not None
    assert found.checkpoint is None
    assert ended is not None
    assert (ended.status, ended.decision, ended.resolved_at_ms) == ("expired", None, time_ms(90))
    assert runs.expire_approval("t0", "t0-b", "t0-open").status == "expired"


EVERYTHING = {
    "threads": THREADS,
    "runs": 2 * THREADS,
    "messages": 3 * THREADS,
    "events": 6 * THREADS,
    "approvals": 2 * THREADS,
    "run requests": THREADS,
    "recovery intents": THREADS,
    "artifacts": 4 * THREADS,
}


@on_each_engine
def test_every_row_is_moved_with_its_times_and_orders(store: Store, source: Source) -> None:
    before = snapshot(source.folder)
    report = import_agent_harness(store, source.file)
    assert counts(report) == {name: (number, number) for name, number in EVERYTHING.items()}
    assert snapshot(source.folder) == before
    runs = Runs(store)
    names = [thread.id for thread in runs.threads().items]
    assert names == ["t0", "t1", "t2", "t3", "t4"]
    thread = runs.threads().items[2]
    assert (thread.agent, thread.workspace, thread.status) == ("agent", "default", WAITING)
    assert thread.latest_run == "t2-b"
    assert (thread.created_at_ms, thread.updated_at_ms) == (time_ms(1), time_ms(898))
    assert (thread.runs, thread.messages, thread.events) == (2, 3, 6)
    assert (thread.artifacts, thread.approvals) == (4, 2)
    assert [run.id for run in runs.runs(limit=3).items] == ["t0-b", "t0-a", "t1-b"]
    first, second = runs.thread_runs("t2").items
    assert (first.id, first.number, second.id, second.number) == ("t2-b", 2, "t2-a", 1)
    assert (first.mode, first.adapter, second.adapter) == ("langgraph", "langgraph", "deep")
    assert (first.state, first.previous_state, first.resumable) == (WAITING, None, True)
    assert (second.state, second.previous_state) == ("failed", "running")
    assert (first.checkpoint, second.checkpoint) == ("checkpoints/t2-b", None)
    assert first.state_entered_at_ms == time_ms(30)
    assert first.last_transition_at_ms == time_ms(31)
    events = runs.events("t2", "t2-a").items
    assert [event.sequence for event in events] == [1, 2, 7]
    assert events[2].event == {"type": "step", "n": 7, "text": "é" * 700}
    assert events[2].created_at_ms == time_ms(47)
    messages = runs.messages("t2")
    assert [message.content["text"] for message in messages] == ["one", "two", "three"]
    assert {message.run for message in messages} == {"t2-a"}
    asked = [approval.id for approval in runs.approvals(status="pending").items]
    assert asked == ["t4-open", "t3-open", "t2-open", "t1-open", "t0-open"]
    approval = runs.find_approval("t2-open")
    assert approval is not None
    assert (approval.allowed, approval.preview) == (("approve", "reject"), {"cmd": "ls"})
    assert (approval.action, approval.tool_call, approval.events) == ("action", "call", ("1", "2"))
    done = runs.find_approval("t2-done")
    assert done is not None
    assert (done.status, done.decision, done.resolved_at_ms) == (
        "approved", "approve", time_ms(56),
    )  # fmt: skip
    request = runs.find_request("t2", "t2-b")
    assert request is not None
    assert (request.input, request.invocation) == (["hello"], {"context": {}})
    assert request.saved_at_ms == time_ms(70)
    intent = runs.find_intent("t2", "t2-b")
    assert intent is not None
    assert (intent.attempts, intent.checkpoint) == (2, "checkpoints/z")
    assert intent.payload == {"decision": "approve"}
    assert runs.read_artifact("t2", "t2-a", "out/report.json") == {"by": "t2-a"}
    assert runs.read_artifact("t2", "t2-a", "raw.bin") == b"\xff\x00" * 300
    assert [one.id for one in runs.artifacts("t2", "t2-a").items] == ["t2-a-x", "t2-a-y"]
    assert runs.protected_threads() == set(names)


@on_each_engine
def test_an_imported_session_continues_like_a_native_one(store: Store, source: Source) -> None:
    import_agent_harness(store, source.file)
    runs = Runs(store)
    runs.set_state("t1", "t1-a", "cancelled")
    thread = runs.find_thread("t1")
    assert thread is not None
    assert (thread.latest_run, thread.status) == ("t1-b", WAITING)
    runs.resolve_approval("t1", "t1-b", "t1-open", "approve")
    assert runs.begin_attempt("t1", "t1-b").attempts == 3
    runs.set_state("t1", "t1-b", "completed")
    assert runs.threads().items[0].id == "t1"
    assert runs.append_event("t1", "t1-b", "more").sequence == 8
    assert runs.append_message("t1", "user", "more").number == 4
    assert runs.create_run("t1", "t1-c", "agent", "langgraph").number == 3
    runs.set_state("t1", "t1-a", "failed")
    thread = runs.find_thread("t1")
    assert thread is not None
    assert thread.latest_run == "t1-c"
    for number in range(THREADS):
        assert runs.delete_thread(f"t{number}")
    assert runs.runs().items == []
    assert len(store.engine.scan_rows("records", start=b"runs.", stop=b"runs/")) == 2


@on_each_engine
def test_a_dry_run_looks_at_everything_and_writes_nothing(store: Store, source: Source) -> None:
    before = contents(store)
    report = import_agent_harness(store, source.file, dry_run=True)
    assert report.dry_run
    assert counts(report) == {name: (number, number) for name, number in EVERYTHING.items()}
    assert contents(store) == before
    import_agent_harness(store, source.file)
    again = import_agent_harness(store, source.file, dry_run=True)
    assert again.imported == 0


@on_each_engine
def test_a_stopped_import_continues_and_a_repeated_import_changes_nothing(
    store: Store, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 4)

    class Stopped(Exception):
        pass

    stops = 0
    while True:
        seen: list[Step] = []

        def progress(step: Step, after: int = stops + 1, seen: list[Step] = seen) -> None:
            seen.append(step)
            if len([one for one in seen if one.phase == "copy"]) == after:
                raise Stopped

        try:
            import_agent_harness(store, source.file, progress=progress)
            break
        except Stopped:
            stops += 1
    assert stops > 15
    phases = {(step.phase, step.unit) for step in seen}
    assert phases == {(phase, name) for phase in ("copy", "verify") for name in EVERYTHING}
    before = contents(store)
    assert import_agent_harness(store, source.file).imported == 0
    assert contents(store) == before
    runs = Runs(store)
    assert [thread.id for thread in runs.threads().items] == ["t0", "t1", "t2", "t3", "t4"]
    assert [run.id for run in runs.runs(limit=3).items] == ["t0-b", "t0-a", "t1-b"]
    assert runs.delete_thread("t3")


@on_each_engine
def test_other_writers_can_work_during_an_import(store: Store, source: Source) -> None:
    runs = Runs(store)
    engine: Any = store.engine
    whole = engine.write
    added = tried = 0

    def write(change: Any) -> Any:
        nonlocal added, tried
        engine.write = whole
        tried += 1
        try:
            # Every second attempt comes too late.
            if tried % 2 and runs.find_run("t0-a") is not None:
                runs.append_event("t0", "t0-a", "meanwhile", sequence=100 + added)
                runs.create_thread(f"own {added}", "agent")
                added += 1
            return whole(change)
        finally:
            engine.write = write

    engine.write = write
    report = import_agent_harness(store, source.file)
    engine.write = whole
    assert report.imported == sum(EVERYTHING.values())
    assert added > 4
    thread = runs.find_thread("t0")
    assert thread is not None
    assert (thread.events, thread.messages, thread.artifacts) == (6 + added, 3, 4)
    assert runs.get_run("t0", "t0-a").events == 3 + added
    assert len(runs.threads().items) == THREADS + added
    # It would refuse if anything were miscounted.
    assert runs.delete_thread("t0")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE threads SET status = 'other' WHERE thread_id = 't3'",
        "UPDATE threads SET created_at = '2020-01-01T00:00:00.000Z' WHERE thread_id = 't3'",
        "UPDATE runs SET checkpoint_ref = 'other' WHERE run_id = 't3-b'",
        "UPDATE runs SET state = 'cancelled' WHERE run_id = 't3-a'",
        "UPDATE thread_messages SET content_json = '1' WHERE thread_id = 't3'",
        "UPDATE events SET event_json = '{\"n\": 1}' WHERE run_id = 't3-a' AND sequence = 2",
        "UPDATE approvals SET status = 'rejected' WHERE approval_id = 't3-done'",
        "UPDATE approvals SET allowed_decisions_json = '[]' WHERE approval_id = 't3-open'",
        "UPDATE run_requests SET request_json = replace(request_json, 'hello', 'bye')",
        "UPDATE recovery_intents SET intent_json = replace(intent_json, 'approve\"', 'reject\"')",
        "UPDATE artifacts SET kind = 'other' WHERE artifact_id = 't3-a-x'",
    ],
)
def test_a_changed_source_row_ends_the_repeated_import(
    store: Store, source: Source, change: str
) -> None:
    import_agent_harness(store, source.file)
    source.change(change)
    before = contents(store)
    for dry_run in (True, False):
        with pytest.raises(ConflictError, match="other content"):
            import_agent_harness(store, source.file, dry_run=dry_run)
    assert contents(store) == before


def test_a_changed_source_artifact_ends_the_repeated_import(store: Store, source: Source) -> None:
    import_agent_harness(store, source.file)
    (source.folder / "threads/t3/runs/t3-a/raw.bin").write_bytes(b"\xffother")
    with pytest.raises(ConflictError, match=r"raw\.bin"):
        import_agent_harness(store, source.file)


@pytest.mark.parametrize(
    ("family", "version"),
    [("other", "1"), ("agent-harness-runtime", "2"), (None, "1"), ("agent-harness-runtime", None)],
)
def test_another_family_or_version_is_refused(
    store: Store, source: Source, family: str | None, version: str | None
) -> None:
    for name, value in (("schema_family", family), ("schema_version", version)):
        if value is None:
            source.change("DELETE FROM runtime_metadata WHERE key = ?", name)
        else:
            source.change("UPDATE runtime_metadata SET value = ? WHERE key = ?", value, name)
    before = contents(store)
    with pytest.raises(RecordsSchemaError) as refused:
        import_agent_harness(store, source.file)
    said = str(refused.value)
    assert f"family {family!r}, version {version!r}" in said
    assert str(source.file) in said
    assert contents(store) == before


def test_a_foreign_database_is_refused(store: Store, source: Source, tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        import_agent_harness(store, tmp_path / "none")
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as database, database:
        database.execute("CREATE TABLE threads (thread_id TEXT)")
    with pytest.raises(ForeignStoreError):
        import_agent_harness(store, other)
    (tmp_path / "text").write_text("no database " * 1000)
    with pytest.raises(ForeignStoreError):
        import_agent_harness(store, tmp_path / "text")
    source.change("ALTER TABLE runs DROP COLUMN state")
    with pytest.raises(ForeignStoreError, match="state"):
        import_agent_harness(store, source.file)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE threads SET updated_at = 'yesterday' WHERE thread_id = 't3'",
        "UPDATE threads SET entry_agent_id = '' WHERE thread_id = 't3'",
        "UPDATE threads SET status = x'ff' WHERE thread_id = 't3'",
        "UPDATE runs SET checkpoint_ref = x'ff' WHERE run_id = 't3-b'",
        "UPDATE runs SET resumable = 0 WHERE run_id = 't3-b'",
        "UPDATE runs SET thread_id = 'none' WHERE run_id = 't3-b'",
        "UPDATE events SET run_id = 'none' WHERE run_id = 't3-b'",
        "UPDATE events SET thread_id = 't1' WHERE run_id = 't3-b'",
        "UPDATE events SET event_json = '{' WHERE run_id = 't3-b' AND sequence = 1",
        "UPDATE events SET event_json = 'NaN' WHERE run_id = 't3-b' AND sequence = 1",
        "UPDATE events SET sequence = -1 WHERE run_id = 't3-b' AND sequence = 1",
        "UPDATE approvals SET allowed_decisions_json = '{}' WHERE approval_id = 't3-open'",
        "UPDATE approvals SET resolved_at = requested_at WHERE approval_id = 't3-open'",
        "UPDATE run_requests SET request_json = '{\"input\": 1}'",
        "UPDATE run_requests SET request_json = replace(request_json, '{\"in', '{\"x\": 1, \"in')",
        "UPDATE recovery_intents SET intent_json = replace(intent_json, '2}', '\"2\"}')",
        f"UPDATE recovery_intents SET intent_json = replace(intent_json, '2}}', '{1 << 64}}}')",
        "UPDATE recovery_intents SET intent_json = json_set(intent_json, "
        "'$.checkpointRef', json('\"\\ud800\"'))",
    ],
)
def test_a_row_that_cannot_be_kept_whole_is_refused_by_name(
    store: Store, source: Source, change: str
) -> None:
    source.change(change)
    before = contents(store)
    with pytest.raises(CorruptionError, match=r"t3|t0|t1|none"):
        import_agent_harness(store, source.file, dry_run=True)
    assert contents(store) == before
    with pytest.raises(CorruptionError):
        import_agent_harness(store, source.file)


# --- artifacts stay where they belong ---------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["../../../../../secret.json", "/etc/hostname", "a/../../x", "", "a\\b"]
)
def test_no_artifact_is_read_from_outside(store: Store, source: Source, path: str) -> None:
    (source.folder.parent / "secret.json").write_text('"secret"')
    source.put("artifacts", "evil", "t1", "t1-a", "json", path, time(5))
    with pytest.raises(CorruptionError, match="has a path outside its directory"):
        import_agent_harness(store, source.file)
    assert Runs(store).artifacts("t1", "t1-a").items == []


@pytest.mark.parametrize("name", ["..", "a/../..", "."])
def test_no_name_of_a_thread_or_run_leads_outside(store: Store, source: Source, name: str) -> None:
    source.put("threads", name, "default", "agent", "running", None, time(1), time(2))
    source.put(
        "runs", "evil", name, "agent", "x", None, time(1), time(2), "running", None, time(1),
        time(1), 0, None,
    )  # fmt: skip
    source.put("artifacts", "evil", name, "evil", "json", "x.json", time(5))
    with pytest.raises(CorruptionError, match="has a path outside its directory"):
        import_agent_harness(store, source.file)


def test_no_link_leads_outside(store: Store, source: Source) -> None:
    secret = source.folder.parent / "secret.json"
    secret.write_text('"secret"')
    file = source.folder / "threads/t1/runs/t1-a/out/report.json"
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(CorruptionError, match="not a file in its directory"):
        import_agent_harness(store, source.file)
    file.unlink()
    file.parent.rmdir()
    file.parent.symlink_to(source.folder.parent)
    with pytest.raises(NotFoundError):
        import_agent_harness(store, source.file)
    (source.folder.parent / "report.json").write_text('"secret"')
    with pytest.raises(CorruptionError, match="not a file in its directory"):
        import_agent_harness(store, source.file)


def test_a_pipe_in_place_of_a_file_does_not_block(store: Store, source: Source) -> None:
    file = source.folder / "threads/t1/runs/t1-a/raw.bin"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CorruptionError, match="not a file in its directory"):
        import_agent_harness(store, source.file)
    file.unlink()
    with pytest.raises(NotFoundError, match=r"raw\.bin"):
        import_agent_harness(store, source.file)


def test_artifacts_can_be_in_another_directory_and_share_a_path(
    store: Store, source: Source
) -> None:
    source.put("artifacts", "again", "t1", "t1-a", "text", "raw.bin", time(6))
    (source.folder / "threads").rename(source.folder.parent / "threads")
    with pytest.raises(NotFoundError):
        import_agent_harness(store, source.file)
    import_agent_harness(store, source.file, artifacts=source.folder.parent)
    runs = Runs(store)
    made = runs.artifacts("t1", "t1-a").items
    assert [(one.id, one.path) for one in made][1:] == [("t1-a-y", "raw.bin"), ("again", "raw.bin")]
    assert made[1].digest == made[2].digest
    assert runs.delete_thread("t1")


def test_values_that_are_only_json_are_kept_as_their_text(store: Store, source: Source) -> None:
    big = "[" + "9" * 40 + "]"
    deep = "[" * 5000 + "]" * 5000
    source.put("events", "t1", "t1-a", 8, big, time(5))
    source.put("events", "t1", "t1-a", 9, deep, time(5))
    source.put("events", "t1", "t1-a", 10, '"\\ud800"', time(5))
    import_agent_harness(store, source.file)
    events = Runs(store).events("t1", "t1-a", after=7).items
    assert [event.event["json"] for event in events] == [
        big.encode(), deep.encode(), b'"\\ud800"',
    ]  # fmt: skip
    assert import_agent_harness(store, source.file).imported == 0


def test_renamed_columns_of_other_releases_are_read(store: Store, source: Source) -> None:
    for table, old, new in (
        ("events", "event_json", "event"),
        ("thread_messages", "content_json", "content"),
        ("approvals", "event_refs_json", "event_refs"),
        ("run_requests", "request_json", "request"),
        ("recovery_intents", "intent_json", "intent"),
        ("artifacts", "path", "relative_path"),
    ):
        source.change(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
    assert import_agent_harness(store, source.file).imported == sum(EVERYTHING.values())


class Between(MemoryEngine):
    """Does something else just before a write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_left = 0
        self.other: Callable[[], object] | None = None

    def write(self, write: Write) -> WriteResult:
        self.writes_left -= 1
        if self.other is not None and self.writes_left < 0:
            other, self.other = self.other, None
            other()
        return super().write(write)


@pytest.mark.parametrize("writes", range(8))
def test_two_concurrent_imports_have_the_result_of_one(source: Source, writes: int) -> None:
    with Store(MemoryEngine()) as one:
        import_agent_harness(one, source.file)
        expected = everything(one)
    engine = Between()
    with Store(engine) as store:
        engine.writes_left = writes
        engine.other = lambda: import_agent_harness(store, source.file)
        import_agent_harness(store, source.file)
        assert engine.other is None
        assert everything(store) == expected
        assert import_agent_harness(store, source.file).imported == 0


def everything(store: Store) -> Any:
    """What runs tell, with what is counted."""
    runs = Runs(store)
    threads = runs.threads().items
    return (
        threads,
        runs.runs().items,
        runs.approvals().items,
        [runs.messages(thread.id, limit=100) for thread in threads],
        [runs.events(run.thread, run.id).items for run in runs.runs().items],
        [runs.artifacts(run.thread, run.id).items for run in runs.runs().items],
    )


def test_values_in_columns_of_later_releases_are_counted(store: Store, source: Source) -> None:
    source.change('ALTER TABLE runs ADD COLUMN "worker ""id" TEXT')
    source.change("ALTER TABLE events ADD COLUMN unused TEXT")
    source.change("""UPDATE runs SET "worker ""id" = 'w' WHERE thread_id = 't1'""")
    for dry_run in (True, False):
        report = import_agent_harness(store, source.file, dry_run=dry_run)
        assert report.notes == (
            ImportNote('values of the unknown column worker "id of runs, left out', 2),
        )
        assert all(part.imported == part.found for part in report.parts)
    assert import_agent_harness(store, source.file).imported == 0
