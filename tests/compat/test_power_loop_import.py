"""Databases of power-loop moved over: row by row the same, in whatever state it had left them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("power_loop", reason="power-loop is not installed")

from power_loop.agent.sink import SQLiteSink
from power_loop.runtime.session_store import SessionStore as Original
from power_loop.runtime.session_store import SubagentLifecycle

from casstore.compat.importing import ImportNote, ImportReport
from casstore.compat.power_loop import SessionStore
from casstore.compat.power_loop_import import import_power_loop
from casstore.engine.memory import MemoryEngine
from casstore.errors import (
    ConflictError,
    ForeignStoreError,
    InvalidInputError,
    NotALogError,
    StoreNotFoundError,
)
from casstore.maintenance.progress import Step
from casstore.records.log import SessionLog
from casstore.records.log.intake import Arrived, Intake
from casstore.records.log.tables import LogTables
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store

CALLS = [{"id": f"c{at}", "function": {"name": "t", "arguments": "{}"}} for at in range(3)]


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        yield store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with something of everything, also of what power-loop gets wrong."""
    path = tmp_path / "power.db"
    with Original.open(path) as source:
        source.create_session(session_id="empty")
        source.create_session(
            session_id="long", system_prompt="p", model="m", config={"t": 0.5}, metadata={"a": [1]}
        )
        for at in range(520):
            source.append_message("long", role="user", content=f"m{at}", meta={"at": at})
        source.record_usage(
            "long", round_index=0, prompt_tokens=1, completion_tokens=None, total_tokens=1
        )
        source.record_usage(
            "long", round_index=1, prompt_tokens=2, completion_tokens=3, total_tokens=5, model="m"
        )
        source.archive_session("long")
        folded(source)
        waiting(source)
        source.create_session(
            session_id="a child", parent_session_id="long", spawn_tool_call_id="c",
            lifecycle=SubagentLifecycle.LINKED,
        )  # fmt: skip
        source.create_session(session_id="a grandchild", parent_session_id="a child")
        source.create_session(session_id="gone", parent_session_id="long")
        source.create_session(session_id="dangling", parent_session_id="gone")
        source.close_session("gone", cascade=False)
        source.record_usage(
            "nowhere", round_index=0, prompt_tokens=1, completion_tokens=1, total_tokens=2
        )
    return path


def folded(source: Any) -> None:
    """Two folds in one run: there the second is upside down, and both notes reload last."""
    source.create_session(session_id="folded")
    sink = SQLiteSink(source, "folded")
    for at in range(8):
        sink.on_message_appended({"role": "user", "content": f"m{at + 1}"}, round_index=0)
    for start, end in ((1, 4), (1, 2)):
        sink.on_compaction(
            fold_start_idx=start, fold_end_idx=end, summary_text="note", before_tokens=9,
            after_tokens=1, round_index=1,
        )  # fmt: skip
    sink.on_message_appended({"role": "user", "content": "after"}, round_index=1)


def waiting(source: Any) -> None:
    """Three calls, one result: there the others have lost their data."""
    source.create_session(session_id="waiting")
    sink = SQLiteSink(source, "waiting")
    sink.on_message_appended({"role": "assistant", "tool_calls": CALLS}, round_index=2)
    sink.on_assistant_tool_calls(assistant_seq=9, tool_calls=CALLS, round_index=2)
    sink.on_message_appended({"role": "tool", "tool_call_id": "c1", "content": "x"}, round_index=2)
    source.set_round_index("waiting", 2)
    source.create_session(session_id="own form")
    source.set_pending("own form", {"tool_call_ids": ["z"], "mine": 1})


def test_every_row_is_imported_unchanged(file: Path, store: Store) -> None:
    before = file.read_bytes()
    report = import_power_loop(store, file)
    assert [(part.name, part.found, part.imported) for part in report.parts] == [
        ("messages", 533, 533),
        ("sessions", 8, 8),
    ]
    assert report.notes == (ImportNote("usage_rounds of no session, left out", 1),)
    assert file.read_bytes() == before
    mine = SessionStore(store)
    with Original.open(file) as source:
        rows = source._conn.execute("SELECT session_id FROM sessions").fetchall()
        for (session,) in rows:
            theirs = vars(source.get_session(session))
            found = vars(mine.get_session(session))
            for name in ("spawn_depth", "parent_session_id", "kind"):
                theirs.pop(name), found.pop(name)
            assert found == theirs
            assert [vars(one) for one in mine.load_all_messages(session)] == [
                vars(one) for one in source.load_all_messages(session)
            ]
            state, wanted = mine.get_state(session), source.get_state(session)
            assert state is not None
            assert (state.next_seq, state.round_index, state.last_compact_seq) == (
                wanted.next_seq, wanted.round_index, wanted.last_compact_seq,
            )  # fmt: skip
            assert sorted(one.seq for one in mine.load_active_messages(session)) == [
                one.seq for one in source.load_active_messages(session)
            ]
    log = mine.log
    assert [(one.send, one.round, one.tokens.total) for one in log.usage("long")] == [
        (0, 0, 1),
        (0, 1, 5),
    ]
    assert log.totals("long") == (2, 3, 3, 6)
    assert mine.append_message("long", role="user", content="more") == 521


def test_rows_without_a_session_are_omitted_and_counted(file: Path, store: Store) -> None:
    # As a close leaves it that dies in the midst: its statements commit one by one.
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("DELETE FROM sessions WHERE session_id = 'folded'")
    for dry_run in (True, False):
        report = import_power_loop(store, file, dry_run=dry_run)
        assert report.notes == (
            ImportNote("messages of no session, left out", 11),
            ImportNote("compactions of no session, left out", 2),
            ImportNote("usage_rounds of no session, left out", 1),
            ImportNote("session_state of no session, left out", 1),
        )
    assert import_power_loop(store, file).imported == 0


def test_values_that_only_pythons_json_allows_are_imported(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "odd.db"
    odd: dict[str, Any] = {"big": 1 << 90, "endless": float("inf"), "json": {"json": [1 << 70]}}
    with Original.open(path) as source:
        source.create_session(session_id="s", config=odd, metadata=odd)
        calls = [{"id": "c1", "name": "t", "arguments": odd}]
        source.append_message("s", role="user", content="x", meta=odd)
        source.append_message("s", role="assistant", tool_calls=calls, meta={"json": 1 << 70})
        source.set_pending("s", {"tool_call_ids": ["c1"], "tool_calls": calls})
        theirs = [vars(one) for one in source.load_all_messages("s")]
    assert import_power_loop(store, path, dry_run=True).imported == 3
    assert import_power_loop(store, path).imported == 3
    mine = SessionStore(store)
    assert [vars(one) for one in mine.load_all_messages("s")] == theirs
    session, state = mine.get_session("s"), mine.get_state("s")
    assert session is not None
    assert (session.config, session.metadata) == (odd, odd)
    assert state is not None
    assert state.pending is not None
    assert state.pending["tool_calls"] == calls


def test_long_messages_move_a_few_at_a_time(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_BYTES", 1000)
    with Original.open(tmp_path / "long.db") as source:
        source.create_session(session_id="s")
        for _ in range(5):
            source.append_message("s", role="user", content="x" * 600)
    told: list[Step] = []
    import_power_loop(store, tmp_path / "long.db", progress=told.append)
    copied = [step.done for step in told if (step.phase, step.unit) == ("copy", "messages")]
    assert copied == [2, 4, 5]


def test_imported_notes_take_the_position_of_their_folds(file: Path, store: Store) -> None:
    import_power_loop(store, file)
    mine = SessionStore(store)
    # 2 to 5 went into note 9; then 9 and 6 were to go into note 10, and stayed.
    assert [one.seq for one in mine.load_active_messages("folded")] == [1, 9, 10, 6, 7, 8, 11]
    folds = [(one.note_seq, one.from_seq, one.to_seq) for one in mine.list_compactions("folded")]
    assert folds == [(9, 2, 5), (10, 6, 9)]
    assert mine.log.fold("folded", [9, 10, 6], "all of it").number == 3
    assert [one.number for one in mine.log.active("folded")] == [1, 12, 7, 8, 11]


def test_imported_pending_calls_have_all_their_data(file: Path, store: Store) -> None:
    import_power_loop(store, file)
    mine = SessionStore(store)
    state = mine.get_state("waiting")
    assert state is not None
    assert state.pending == {
        "assistant_seq": 1,
        "round_index": 2,
        "tool_call_ids": ["c0", "c2"],
        "tool_calls": [CALLS[0], CALLS[2]],
    }
    own = mine.get_state("own form")
    assert own is not None
    assert own.pending == {"tool_call_ids": ["z"], "mine": 1}


def test_the_tree_is_stored_without_dangling_links(file: Path, store: Store) -> None:
    import_power_loop(store, file)
    log = SessionLog(store)
    tree = {one.id: (one.parent, one.depth) for one in log.sessions()}
    assert tree["a child"] == ("long", 1)
    assert tree["a grandchild"] == ("a child", 2)
    assert tree["dangling"] == (None, 0)
    assert [one.id for one in log.children("long")] == ["a child"]
    assert log.close("long") == 3


class Stopped(BaseException):
    pass


def test_an_import_stopped_anywhere_continues_and_a_repeated_one_does_nothing(file: Path) -> None:
    steps: list[Step] = []
    whole = Store(MemoryEngine())
    import_power_loop(whole, file, progress=steps.append)
    assert {step.phase for step in steps} == {"copy", "verify"}
    for stop in range(0, len(steps), 4):
        store = Store(MemoryEngine())
        seen: list[Step] = []

        def note(step: Step, at: int = stop, seen: list[Step] = seen) -> None:
            seen.append(step)
            if len(seen) > at:
                raise Stopped

        with pytest.raises(Stopped):
            import_power_loop(store, file, progress=note)
        assert all(
            len(list(SessionLog(store).messages(one.id))) == count(file, one.id)
            for one in SessionLog(store).sessions()
        )
        import_power_loop(store, file)
        assert contents(store) == contents(whole)
        assert import_power_loop(store, file).imported == 0


def test_an_imported_session_keeps_its_original_time_until_it_changes(
    file: Path, store: Store
) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE sessions SET updated_at = 1700000000123")
    import_power_loop(store, file)
    mine = SessionStore(store)
    before = {row.session_id: row.updated_at for row in mine.list_sessions()}
    assert set(before.values()) == {1_700_000_000_123}
    mine.append_message("long", role="user", content="more")
    mine.archive_session("waiting")
    mine.create_session(session_id="child", parent_session_id="own form")
    changed = {
        row.session_id for row in mine.list_sessions() if row.updated_at != 1_700_000_000_123
    }
    assert changed == {"long", "waiting", "child"}
    # Another import finds it unchanged or, where it went on here, says so.
    with pytest.raises(ConflictError):
        import_power_loop(store, file)


def count(file: Path, session: str) -> int:
    with closing(sqlite3.connect(file)) as database:
        [found] = database.execute(
            "SELECT count(*) FROM messages WHERE session_id = ?", (session,)
        ).fetchone()
        return int(found)


def contents(store: Store) -> list[Any]:
    log = SessionLog(store)
    return [
        (one, log.active(one.id), log.folds(one.id), log.counters(one.id)) for one in log.sessions()
    ]


def test_a_dry_run_reports_the_same_and_writes_nothing(file: Path, store: Store) -> None:
    dry = import_power_loop(store, file, dry_run=True)
    assert list(SessionLog(store).sessions()) == []
    assert list(store.sessions()) == []
    wet: ImportReport = import_power_loop(store, file)
    assert dry.parts == wet.parts


def test_content_in_the_store_that_differs_ends_the_import(file: Path, store: Store) -> None:
    import_power_loop(store, file)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE messages SET content = 'other' WHERE seq = 510")
    with pytest.raises(ConflictError, match="message 510 of session 'long'"):
        import_power_loop(store, file)
    fresh = Store(MemoryEngine())
    import_power_loop(fresh, file)
    SessionLog(fresh).update("long", model="other")
    with pytest.raises(ConflictError, match="'long'"):
        import_power_loop(fresh, file)
    taken = Store(MemoryEngine())
    taken.session("long").commit(Commit(append=[NodeDraft("1", "mine")]))
    with pytest.raises(NotALogError):
        import_power_loop(taken, file)
    assert len(taken.session("long").nodes()) == 1


def of_somebody_else(store: Store) -> None:
    store.session("a child").commit(Commit(label="mine"))


def closed(store: Store) -> None:
    SessionLog(store).create("a child")
    SessionLog(store).close("a child")


def further(store: Store) -> None:
    """As an import leaves it that was stopped, of a database that had more."""
    message = Arrived(1, {"role": "user", "content": "x"}, 5)
    Intake(LogTables(store), "a child").add([message])


@pytest.mark.parametrize("make", [of_somebody_else, closed, further])
def test_a_dry_run_reports_a_conflict_of_a_session_without_messages(
    file: Path, store: Store, make: Callable[[Store], None]
) -> None:
    make(store)
    with pytest.raises((ConflictError, NotALogError)) as dry:
        import_power_loop(store, file, dry_run=True)
    with pytest.raises((ConflictError, NotALogError)) as wet:
        import_power_loop(store, file)
    assert str(dry.value) == str(wet.value)


def test_other_files_are_refused(tmp_path: Path, store: Store, file: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        import_power_loop(store, tmp_path / "nowhere")
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as database, database:
        database.execute("CREATE TABLE sessions (session_id TEXT)")
    with pytest.raises(ForeignStoreError, match=r"power-loop 0\.2\.0"):
        import_power_loop(store, other)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("ALTER TABLE messages ADD COLUMN content_encoding TEXT")
    with pytest.raises(ForeignStoreError, match="content_encoding"):
        import_power_loop(store, file)


def test_a_damaged_row_is_refused_by_name_and_its_session_stays_invisible(
    file: Path, store: Store
) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(
            "UPDATE messages SET meta_json = '{' WHERE session_id = 'long' AND seq = 9"
        )
    with pytest.raises(InvalidInputError, match="message 9 of session 'long'"):
        import_power_loop(store, file)
    assert SessionLog(store).find("long") is None
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(
            "UPDATE messages SET meta_json = NULL WHERE session_id = 'long' AND seq = 9"
        )
        database.execute(
            "UPDATE sessions SET parent_session_id = 'a grandchild' WHERE session_id = 'long'"
        )
    with pytest.raises(InvalidInputError, match="its own ancestor"):
        import_power_loop(store, file)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE sessions SET status = 'lost' WHERE session_id = 'long'",
        "UPDATE sessions SET created_at = -1 WHERE session_id = 'long'",
        "UPDATE sessions SET config_json = '[1]' WHERE session_id = 'long'",
        "UPDATE messages SET seq = 'x' WHERE session_id = 'long' AND seq = 1",
        "UPDATE messages SET created_at = x'00' WHERE session_id = 'long' AND seq = 1",
        "UPDATE usage_rounds SET round_index = 'x' WHERE round_index = 1",
        "UPDATE usage_rounds SET total_tokens = 'many' WHERE round_index = 1",
        "UPDATE session_state SET last_compact_seq = 'x' WHERE session_id = 'long'",
        "UPDATE compactions SET from_seq = 'x' WHERE compact_seq = 1",
        "UPDATE compactions SET note_seq = 99 WHERE compact_seq = 1",
    ],
)
def test_a_dry_run_names_the_rows_that_cannot_be_imported(
    file: Path, store: Store, change: str
) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        assert database.execute(change).rowcount == 1
    for dry_run in (True, False):
        with pytest.raises(InvalidInputError, match=r"session '(long|folded)'"):
            import_power_loop(store, file, dry_run=dry_run)
    # What has come in before that is nothing that anybody sees.
    assert SessionLog(store).find("long") is None or "compactions" in change
