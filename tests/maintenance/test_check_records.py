"""Records that say a thing twice: each way in which the two can differ is found, and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, PutRow, RowKey, Write
from casstore.maintenance import findings as codes
from casstore.maintenance.check import CheckReport, check
from casstore.maintenance.policy import Policy, set_policy
from casstore.records.lifecycles import Annotation, Lifecycles, Seal
from casstore.records.lifecycles import system as lifecycles_check
from casstore.records.lifecycles.tables import LifecycleTables
from casstore.records.log import NewMessage, SessionLog, Tokens
from casstore.records.log import system as log_check
from casstore.records.log.tables import LogTables
from casstore.records.runs import Runs, SessionCheckpoint
from casstore.records.runs import system as runs_check
from casstore.records.runs.tables import RunTables
from casstore.records.schema import RowTable, number_text
from casstore.records.scoped import SCOPES, Context, ScopedState, StatePolicy
from casstore.records.scoped.tables import ScopedTables
from casstore.session import keys
from casstore.session.data import Checkpoint, Commit, NodeDraft
from casstore.session.records import Draft, Table
from casstore.store import Store
from casstore.testing.engine_fixtures import all_rows
from tests.maintenance.wounds import step

LONG = "long " * 300
HERE = Context("runner", "b", "bot", "ws", "talk", actor_id="ann")


def fill(store: Store) -> None:
    """A little of each system of records."""
    log = SessionLog(store)
    log.create("root")
    log.create("child", parent="root", lifecycle="linked")
    log.create("other", parent="root", lifecycle="linked")
    log.extend("root", [NewMessage("user", f"{number} {LONG}") for number in range(6)])
    log.fold("root", [2, 3], "a note")
    log.send("root", NewMessage("user", "well?"))
    log.append("root", NewMessage("assistant", "so", round=0), tokens=Tokens(5, 6, 11))
    runs = Runs(store)
    step(store, "s", "a")
    step(store, "s", "b")
    for thread in ("t", "u"):
        runs.create_thread(thread, agent="a", workspace="w")
        runs.create_run(thread, f"{thread}1", agent="a", mode="m")
        runs.create_run(thread, f"{thread}2", agent="a", mode="m")
        runs.append_event(thread, f"{thread}2", {"e": LONG})
        runs.append_event(thread, f"{thread}2", {"e": 2})
        runs.append_message(thread, "user", "hello")
        runs.put_artifact(thread, f"{thread}2", "dir/file", LONG, kind="text")
        runs.save_request(thread, f"{thread}2", 1, invocation=2)
        runs.set_state(thread, f"{thread}2", "waiting", checkpoint=SessionCheckpoint("s", 1))
        runs.request_approval(thread, f"{thread}2", f"{thread} may I", "tool")
        runs.save_intent(thread, f"{thread}2", 1)
    states = ScopedState(store)
    policy = StatePolicy(scopes=SCOPES)
    for scope in ("conversation", "actor", "runner"):
        states.update(HERE, policy, scope, "k", {"v": 1})
        states.update(HERE, policy, scope, "long", LONG)
    for _ in range(3):
        states.reset(workspace_id="ws", bot_id="bot", conversation_id="talk")
    states.begin_run("run", HERE, policy, caller="plugin")
    lives = Lifecycles(store)
    session = lives.create_session("agent", user="ann")
    session.working.set("x", LONG)
    made = session.checkpoint("first", annotation=Annotation(classes=["process"]))
    session.checkpoint("second")
    lives.users.put("ann", "name", "Ann")
    lives.users.put("ann", "town", LONG)
    ref = lives.records.put("facts", "one", LONG, Annotation(
        classes=["learned_context"], subjects=["ann"], sources=[made.ref]))  # fmt: skip
    lives.records.put("facts", "two", "sealed", Annotation(
        classes=["compliance"], sources=[ref], seal=Seal("a", "b")))  # fmt: skip
    set_policy(store, Policy(last=3))
    store.session("s").add_subjects(["ann"])
    store.session("s").expire_in(60_000)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        fill(store)
        yield store


@pytest.fixture(params=["memory", "lmdb"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine: Any = MemoryEngine()
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with Store(engine) as store:
        fill(store)
        yield store


def found(store: Store, level: str = "connectivity") -> CheckReport:
    return check(store, level=level)


def test_record_systems_in_normal_use_have_no_findings(any_store: Store) -> None:
    for level in ("connectivity", "sample", "full"):
        assert found(any_store, level).counts == {}


# --- rows that are lost -----------------------------------------------------------------------

# Of these nothing else says that they must be there: each says by itself what it says.
_STANDS_ALONE = {"log.folds", "log.usage", "runs.intents", "runs.requests"}


def test_check_notices_the_loss_of_every_record_that_another_one_refers_to(store: Store) -> None:
    """Whatever row is taken away, another speaks of it, but for those that stand alone."""
    overlooked: set[str] = set()
    for row in all_rows(store.engine, "records"):
        store.engine.write(Write(rows=[DeleteRow("records", row.key)]))
        if not found(store).counts:
            overlooked.add(row.key.partition(b"\0")[0].decode())
        store.engine.write(Write(rows=[PutRow("records", *row)]))
    assert overlooked == _STANDS_ALONE
    assert found(store).counts == {}


# --- rows that say something else ----------------------------------------------------------------


class Wound:
    """Changes records of a store as nobody may."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.log = LogTables(store)
        self.runs = RunTables(store)
        self.scoped = ScopedTables(store)
        self.life = LifecycleTables(store)

    def put(self, table: Table, key: tuple[str, ...], value: Any) -> None:
        """Put a record, whatever others say."""
        draft = Draft(self.store)
        draft.put(table, key, value)
        draft.commit()

    def edit(self, table: Table, *prefix: str, **fields: Any) -> None:
        """Change fields of the first row there is, and none of its indexes.

        Of a table without a schema: of a list by position, as ``at0=``.
        """
        record = next(iter(table.scan(*prefix)))
        if isinstance(table, RowTable):
            row = table.decode(record)
            if not set(fields) <= set(row._fields):
                row = row._replace(**{row._fields[0]: row[0]._replace(**fields)})
            else:
                row = row._replace(**fields)
            self.put(table, record.key, table.schema.encode(row))
            return
        value = record.value
        for name, field in fields.items():
            value[int(name[2:]) if type(value) is list else name] = field
        self.put(table, record.key, value)

    def edit_note(self, **fields: Any) -> None:
        """Change fields of the note of the first record."""
        table = self.life.notes
        row = table.decode(next(iter(table.scan("record"))))
        self.edit(table, "record", note=row.note._replace(**fields))

    def delete(self, place: RowKey) -> None:
        """Take any row away."""
        self.store.engine.write(Write(rows=[DeleteRow(*place)]))

    def entry(self, table: Table, value: Any, *prefix: str) -> None:
        """Let the first record hold something else."""
        self.put(table, next(iter(table.scan(*prefix))).key, value)


def _unprotect(wound: Wound) -> None:
    wound.delete(keys.protection(keys.session_key("s"), 1, "run t2"))


def _protect_nothing(wound: Wound) -> None:
    session = keys.session_key("s")
    row = wound.store.engine.get_rows([keys.protection(session, 1, "run t2")])[0]
    assert row is not None
    place = keys.protection(session, 77, "run t2")
    wound.store.engine.write(Write(rows=[PutRow(*place, row)]))


def _lose_revision(wound: Wound) -> None:
    wound.delete(RowKey("history", keys.history(keys.session_key("s"), 1)))


def _unindex_subject(wound: Wound) -> None:
    wound.delete(keys.subject_session("ann", keys.session_key("s")))


def _index_nobody(wound: Wound) -> None:
    place = keys.subject_session("bob", keys.session_key("s"))
    wound.store.engine.write(Write(rows=[PutRow(*place, b"s")]))


def _other_policy(wound: Wound) -> None:
    wound.store.engine.write(Write(rows=[PutRow(*keys.policy(None), b"\x09")]))


def _log_state(**fields: Any) -> Callable[[Wound], None]:
    """The state of a log as it cannot be, in a commit like any other."""

    def commit(wound: Wound) -> None:
        state = {"log": 1, **fields}
        change = Commit(checkpoint=Checkpoint(turn_state=state))
        wound.store.session("root").commit(change)

    return commit


def _foreign_node(wound: Wound) -> None:
    step(wound.store, "root", "nine")


def _backwards(wound: Wound) -> None:
    SessionLog(wound.store).create("backwards")
    step(wound.store, "backwards", "5", "1")


def _break_scope_version(wound: Wound) -> None:
    wound.edit(wound.scoped.values, version="abcdef012345-1")


def _reset_behind(wound: Wound) -> None:
    latest = next(iter(wound.scoped.resets.scan()))
    conversation, _ = latest.key
    number, *rest = latest.value
    wound.put(wound.scoped.resets, (conversation, number_text(number + 1)), [number + 1, *rest])


def _expire_early(wound: Wound) -> None:
    wound.edit(wound.scoped.values, expires_ms=1)


WOUNDS: list[tuple[str, str, Callable[[Wound], None]]] = [
    # the log
    (log_check.LOG_TREE_WRONG, "depth", lambda w: w.edit(w.log.sessions, "child", depth=2)),
    (codes.RECORD_INDEX_WRONG, "place", lambda w: w.edit(w.log.sessions, "child", place=2)),
    (log_check.LOG_TREE_WRONG, "parent", lambda w: w.edit(w.log.sessions, "child", parent="other")),
    (codes.RECORD_INDEX_WRONG, "child", lambda w: w.entry(w.log.children, "other", "root")),
    (log_check.LOG_TREE_WRONG, "count", lambda w: w.edit(w.log.sessions, "root", children=1)),
    (codes.ROW_MALFORMED, "kind", lambda w: w.edit(w.log.sessions, "root", status="none")),
    (codes.RECORD_COUNT_WRONG, "totals", lambda w: w.entry(w.log.totals, [1, 5, 5, 11])),
    (codes.RECORD_COUNT_WRONG, "rounds", lambda w: w.entry(w.log.totals, [0, 5, 6, 11])),
    (log_check.LOG_NUMBERS_WRONG, "behind", _log_state(view=[1, 99], upto=7)),
    (log_check.LOG_NUMBERS_WRONG, "twice", _log_state(view=[1, 3, 2, 4], upto=7)),
    (log_check.LOG_NUMBERS_WRONG, "calls", _log_state(pending=[99, "c"])),
    (log_check.LOG_NUMBERS_WRONG, "note", _log_state(view=[1, 1], upto=7, notes=[5])),
    (log_check.LOG_NUMBERS_WRONG, "no log", lambda w: w.store.session("root").commit(
        Commit(checkpoint=Checkpoint(turn_state="other"))) and None),
    (log_check.LOG_NUMBERS_WRONG, "node", _foreign_node),
    (log_check.LOG_NUMBERS_WRONG, "leaf", lambda w: w.store.session("root").commit(
        Commit(leaf="8")) and None),
    (log_check.LOG_NUMBERS_WRONG, "leaf before a fold", lambda w: w.store.session("root").commit(
        Commit(leaf="5")) and None),
    (log_check.LOG_NUMBERS_WRONG, "more than numbers", _backwards),
    (log_check.LOG_NUMBERS_WRONG, "fold", lambda w: w.edit(w.log.folds, note=99)),
    # runs
    (runs_check.RUN_MIRROR_WRONG, "status", lambda w: w.edit(w.runs.threads, "t", status="done")),
    (runs_check.RUN_MIRROR_WRONG, "latest", lambda w: w.edit(w.runs.threads, "t", latest_run="t1")),
    *[(codes.RECORD_COUNT_WRONG, f"thread's {what}",
       lambda w, what=what: w.edit(w.runs.threads, "t", **{what: 9}))
      for what in ("runs", "messages", "events", "artifacts", "approvals")],
    (codes.RECORD_COUNT_WRONG, "events", lambda w: w.edit(w.runs.runs, "t2", events=1)),
    (codes.RECORD_COUNT_WRONG, "last", lambda w: w.edit(w.runs.runs, "t2", last_sequence=1)),
    (codes.RECORD_COUNT_WRONG, "artifacts", lambda w: w.edit(w.runs.runs, "t2", artifacts=2)),
    (codes.RECORD_INDEX_WRONG, "order", lambda w: w.edit(w.runs.threads, "t", order=1)),
    (codes.RECORD_INDEX_WRONG, "run order", lambda w: w.edit(w.runs.runs, "t2", order=1)),
    (codes.RECORD_ORPHANED, "counter", lambda w: w.edit(w.runs.counter, next=3)),
    (codes.RECORD_INDEX_WRONG, "listed", lambda w: w.entry(w.runs.thread_runs, "u1")),
    (codes.RECORD_INDEX_WRONG, "path", lambda w: w.entry(w.runs.artifact_paths, ["a1", "a7"])),
    (codes.RECORD_INDEX_WRONG, "resolved",
     lambda w: w.edit(w.runs.approvals, "t may I", status="approved")),
    (codes.RECORD_INDEX_WRONG, "nothing ordered",
     lambda w: w.put(w.runs.run_order, ("a1",), "nothing")),
    (codes.RECORD_INDEX_WRONG, "ordered twice",
     lambda w: w.put(w.runs.run_order, ("a1",), "t2")),
    (codes.RECORD_ORPHANED, "no run", lambda w: w.edit(w.runs.approvals, run="nothing")),
    (codes.RECORD_INDEX_WRONG, "latest", lambda w: w.edit(w.runs.threads, "t", latest=9)),
    (codes.RECORD_ORPHANED, "the log's session",
     lambda w: w.delete(RowKey("heads", keys.session_key("child")))),
    (codes.RECORD_ORPHANED, "thread", lambda w: w.edit(w.runs.runs, "t1", thread="gone")),
    (codes.RECORD_ORPHANED, "request", lambda w: w.edit(w.runs.requests, "t2", thread="u")),
    (codes.RECORD_ORPHANED, "intent", lambda w: w.edit(w.runs.intents, "t2", thread="u")),
    (runs_check.PROTECTION_MISSING, "protection", _unprotect),
    (runs_check.PROTECTION_MISSING, "revision", _lose_revision),
    # scoped state
    (codes.RECORD_COUNT_WRONG, "keys", lambda w: w.edit(w.scoped.scopes, keys=5)),
    (codes.RECORD_COUNT_WRONG, "bytes", lambda w: w.edit(w.scoped.scopes, size_bytes=5)),
    (codes.RECORD_COUNT_WRONG, "version", _break_scope_version),
    (codes.RECORD_COUNT_WRONG, "changes", lambda w: w.edit(w.scoped.scopes, changes=1)),
    (codes.RECORD_COUNT_WRONG, "expiry", _expire_early),
    (codes.RECORD_COUNT_WRONG, "latest reset", lambda w: w.edit(w.scoped.resets, number=2)),
    (codes.RECORD_INDEX_WRONG, "writer", lambda w: w.edit(w.scoped.people, origin="other-1")),
    (codes.RECORD_INDEX_WRONG, "conversation",
     lambda w: w.put(w.scoped.conversations, ("c", "scope", "a0"), None)),
    (codes.RECORD_COUNT_WRONG, "reset's number",
     lambda w: w.put(w.scoped.resets, ("c", "a5"), [1, "id", 1, None])),
    (codes.RECORD_COUNT_WRONG, "reset behind the latest", _reset_behind),
    (codes.ROW_MALFORMED, "scope", lambda w: w.entry(w.scoped.scopes, "nothing")),
    # lifecycles
    (codes.RECORD_COUNT_WRONG, "values", lambda w: w.edit(w.life.people, values=1)),
    (codes.RECORD_ORPHANED, "made", lambda w: w.edit(w.life.sessions, made=1)),
    (codes.RECORD_INDEX_WRONG, "label", lambda w: w.edit(w.life.checkpoints, label="other")),
    (codes.RECORD_INDEX_WRONG, "user", lambda w: w.edit(w.life.sessions, user="other")),
    (codes.RECORD_INDEX_WRONG, "subjects", lambda w: w.edit_note(subjects=("x",))),
    (codes.RECORD_INDEX_WRONG, "sources", lambda w: w.edit_note(sources=())),
    (lifecycles_check.SEAL_BROKEN, "seal",
     lambda w: w.edit(w.life.records, "facts", "two", content=[2])),
    # retention
    (codes.PROTECTION_DANGLING, "nothing", _protect_nothing),
    (codes.SUBJECTS_WRONG, "not found", _unindex_subject),
    (codes.SUBJECTS_WRONG, "found", _index_nobody),
    (codes.ROW_MALFORMED, "policy", _other_policy),
]  # fmt: skip
#: The codes that tests here provoke.
FOUND_IN_RECORDS = {code for code, _, _ in WOUNDS} | {log_check.LOG_GAP, codes.RECORDS_UNCHECKED}
#: The codes of the core, then those of record systems.
ALL_CODES = {**codes.CODES, **log_check.CODES, **runs_check.CODES, **lifecycles_check.CODES}


@pytest.mark.parametrize(
    ("code", "wound"), [(code, wound) for code, _, wound in WOUNDS],
    ids=[f"{code}-{name}" for code, name, _ in WOUNDS],
)  # fmt: skip
def test_check_finds_each_inconsistency_between_records(
    store: Store, code: str, wound: Callable[[Wound], None]
) -> None:
    wound(Wound(store))
    report = found(store)
    assert code in report.counts, report.findings
    told = [one.what for one in report.findings if one.code == code]
    assert len(told) == len(set(told)) == report.counts[code]
    assert all(one.remedy for one in report.findings)
    assert report.sound is (ALL_CODES[code].severity != codes.ERROR and len(report.counts) == 1)


def test_check_reports_a_missing_object_that_only_a_record_links_to() -> None:
    with Store(MemoryEngine()) as store:
        draft = Draft(store)
        link = draft.keep(LONG)
        draft.put(Table(store, "anybodys", 1), ("a",), [1, link])
        draft.commit()
        assert found(store).counts == {codes.RECORDS_UNCHECKED: 1}
        store.engine.write(Write(deletes=[link.digest]))
        assert found(store).counts.keys() == {codes.ROOT_MISSING, codes.RECORDS_UNCHECKED}


def test_only_a_full_check_reads_every_message(store: Store) -> None:
    """Numbers in the middle that are wrong: as many as there should be, and the last is right."""
    log = SessionLog(store)
    log.create("strange")
    drafts = [NodeDraft(name, {"role": "user"}) for name in ("1", "7", "3")]
    store.session("strange").commit(Commit(append=drafts))
    assert found(store).sound
    report = found(store, "full")
    assert report.counts.keys() == {log_check.LOG_NUMBERS_WRONG}
    assert report.findings[0].where.session == "strange"


def test_a_hidden_message_of_a_log_is_not_an_error(store: Store) -> None:
    store.session("root").tombstone(["1"])
    for level in ("connectivity", "full"):
        report = found(store, level)
        assert report.counts.keys() == {log_check.LOG_GAP}
        assert report.sound


# --- remedies -----------------------------------------------------------------------------------


def test_the_remedies_for_record_findings_remove_them(store: Store) -> None:
    wound, session = Wound(store), store.session("s")
    _unindex_subject(wound)
    _index_nobody(wound)
    _protect_nothing(wound)
    _unprotect(wound)
    wound.edit(wound.runs.threads, "t", status="done")
    assert len(found(store).counts) == 4
    session.remove_subjects(["ann"])
    session.add_subjects(["ann"])
    session.add_subjects(["bob"])
    session.remove_subjects(["bob"])
    assert Runs(store).renew_protections() == []
    assert session.unprotect("run t2", 77) == 1
    Runs(store).set_state("t", "t2", "waiting")
    assert found(store).counts == {}


# --- beside writers ---------------------------------------------------------------------------


def test_records_changed_during_a_check_are_not_reported(any_store: Store) -> None:
    """Between any two readings of the check everything moves on."""
    store = any_store
    log, runs, states = SessionLog(store), Runs(store), ScopedState(store)
    policy = StatePolicy(scopes=SCOPES)
    count = 0

    def move(number: int) -> None:
        log.append("root", NewMessage("user", number), tokens=Tokens(1, 1, 2))
        runs.append_event("t", "t2", number)
        runs.set_state("u", "u2", f"state {number}")
        runs.create_run("t", f"new {number}", "a", "m")
        states.update(HERE, policy, "actor", f"k{number}", number)

    engine: Any = store.engine
    read = engine.get_rows

    def moving(places: Any) -> Any:
        nonlocal count
        if count < 60 and not moving_now:
            moving_now.append(True)
            count += 1
            move(count)
            moving_now.clear()
        return read(places)

    moving_now: list[bool] = []
    engine.get_rows = moving
    assert found(store).counts == {}
    assert count == 60
    engine.get_rows = read
    assert found(store).counts == {}
