"""The session log, row by row of what its users rely on.

| feature | tests |
|---|---|
| seq allocation | test_seq_allocation__…; across processes in test_processes.py |
| unknown session | test_unknown_session__… |
| active vs all | test_active_vs_all__… |
| compaction atomic | test_compaction_atomic__… |
| logical order | test_logical_order__…; random schedules in test_model.py |
| exact fold set | test_exact_fold_set__… |
| one note | test_one_note__… |
| recall | test_recall__… |
| pending | test_pending__… |
| abort | test_abort__… |
| depth | test_depth__… |
| lifecycles | test_lifecycles__… |
| cascade=False | test_cascade_false__… |
| close | test_close__… |
| archive | test_archive__… |
| usage | test_usage__… |
| structured content | test_structured_content__… |
| prune | test_prune__… |
| export/import | test_export_import__… |
| lease/inbox | test_lease_inbox__… |
| persistence | in test_processes.py |
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import TABLES
from casstore.errors import (
    FormatError,
    InvalidInputError,
    LeaseHeldError,
    LeaseLostError,
    NotALogError,
    PendingCallsError,
    SessionDeletedError,
    SessionExistsError,
    SessionNotFoundError,
    SpawnDepthError,
    StorageError,
)
from casstore.maintenance import check, gc, vacuum
from casstore.maintenance.condemned import list_condemned
from casstore.records.log import NewMessage, SessionLog, Tokens, UsageTotals
from casstore.session import tombstones
from casstore.session.data import Commit, Lease, NodeDraft
from casstore.store import Store
from tests.records.one_transaction import assert_one_transaction

CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}},
    {"id": "c2", "type": "function", "function": {"name": "write", "arguments": '{"b": 2}'}},
    {"id": "c3", "type": "function", "function": {"name": "bash", "arguments": "{}"}},
]


@pytest.fixture
def log(store: Store) -> SessionLog:
    return SessionLog(store)


def user(text: str) -> NewMessage:
    return NewMessage("user", text)


def fill(log: SessionLog, session: str, count: int) -> list[int]:
    return [log.append(session, user(f"m{at + 1}")) for at in range(count)]


def shown(log: SessionLog, session: str) -> list[int]:
    return [message.number for message in log.active(session)]


def rows_of(store: Store, session: str) -> list[tuple[str, bytes]]:
    """Every row of the store whose key or value speaks of a session, but its tombstone."""
    named = session.encode()
    return [
        (table, row.key)
        for table in TABLES
        for row in store.engine.scan_rows(table, limit=100_000)
        if table != "tombstones" and (named in row.key or named in row.value)
    ]


# --- numbers ------------------------------------------------------------------------------


def test_seq_allocation__numbers_count_up_from_1_without_a_gap(log: SessionLog) -> None:
    log.create("s")
    assert fill(log, "s", 5) == [1, 2, 3, 4, 5]
    assert log.extend("s", [user("a"), user("b")]) == [6, 7]
    assert [one.number for one in log.messages("s")] == list(range(1, 8))
    assert log.counters("s").next_number == 8


def test_seq_allocation__four_threads_of_twenty_get_1_to_80(log: SessionLog) -> None:
    log.create("s")
    got: list[int] = []
    start = threading.Barrier(4)

    def write(name: str) -> None:
        start.wait()
        for at in range(20):
            got.append(log.append("s", user(f"{name} {at}")))

    threads = [threading.Thread(target=write, args=(f"t{at}",)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 81))
    texts = [one.content for one in log.messages("s")]
    assert len(set(texts)) == 80
    for at in range(4):
        own = [text for text in texts if text.startswith(f"t{at} ")]
        assert own == [f"t{at} {number}" for number in range(20)]


def test_seq_allocation__numbers_continue_after_prune_and_vacuum(
    log: SessionLog,
) -> None:
    log.create("s")
    fill(log, "s", 6)
    log.fold("s", [1, 2, 3], "note")
    assert log.prune("s") == 3
    assert log.append("s", user("m8")) == 8
    vacuum.vacuum(log.store, grace_ms=0)
    assert log.append("s", user("m9")) == 9
    assert shown(log, "s") == [7, 4, 5, 6, 8, 9]
    assert [one.content for one in log.active("s")] == ["note", "m4", "m5", "m6", "m8", "m9"]
    assert log.message("s", 2) is None
    assert [one.number for one in log.messages("s", 3, 8)] == [4, 5, 6, 7, 8]


def test_seq_allocation__a_number_is_not_given_twice_though_a_vacuum_has_freed_its_node(
    log: SessionLog,
) -> None:
    # Another handle remembers where the session stood. Since then its number was given, folded,
    # pruned and vacuumed, so the node's id is free again.
    log.create("s")
    fill(log, "s", 2)
    stale = SessionLog(log.store)
    assert stale.append("s", user("m3")) == 3
    log.append("s", user("m4"))
    log.fold("s", [4], "note")
    log.prune("s")
    vacuum.vacuum(log.store, grace_ms=0)
    assert stale.append("s", user("m6")) == 6


def test_seq_allocation__appending_is_one_transaction(tmp_path: Path) -> None:
    def operate(store: Store, log: SessionLog) -> None:
        log.append("s", NewMessage("assistant", "hello", tool_calls=CALLS), tokens=Tokens(1, 2, 3))

    assert_one_transaction(tmp_path / "s", made("s"), operate)


def made(session: str, count: int = 0) -> Callable[[Store], SessionLog]:
    def prepare(store: Store) -> SessionLog:
        log = SessionLog(store)
        log.create(session)
        fill(log, session, count)
        return log

    return prepare


def test_unknown_session__every_call_on_it_raises(log: SessionLog) -> None:
    for call in (
        lambda: log.append("nowhere", user("hello")),
        lambda: log.fold("nowhere", [1], "note"),
        lambda: log.active("nowhere"),
        lambda: list(log.messages("nowhere")),
        lambda: log.message("nowhere", 1),
        lambda: log.folds("nowhere"),
        lambda: log.record_usage("nowhere", Tokens(1, 1, 2)),
        lambda: log.usage("nowhere"),
        lambda: log.totals("nowhere"),
        lambda: log.pending("nowhere"),
        lambda: log.abort("nowhere"),
        lambda: log.archive("nowhere"),
        lambda: log.prune("nowhere"),
        lambda: log.export("nowhere"),
        lambda: log.put_inbox("nowhere", "i", user("hello")),
        lambda: log.claim_lease("nowhere", "me", 1000),
        lambda: log.create(parent="nowhere"),
        lambda: log.finish("nowhere", "completed"),
        lambda: log.get("nowhere"),
    ):
        with pytest.raises(SessionNotFoundError):
            call()
    assert log.find("nowhere") is None
    assert log.close("nowhere") == 0
    assert list(log.sessions()) == []


def test_unknown_session__a_session_that_is_not_a_log_is_refused(
    log: SessionLog,
) -> None:
    other = log.store.session("other")
    other.commit(Commit(append=[NodeDraft("n1", "hello")]))
    with pytest.raises(NotALogError):
        log.append("other", user("hello"))
    with pytest.raises(SessionExistsError):
        log.create("other")
    assert [node.id for node in other.nodes()] == ["n1"]
    log.store.create_session("named")
    with pytest.raises(SessionExistsError):
        log.create("named")
    log.create("mine")
    with pytest.raises(SessionExistsError):
        log.create("mine")


# --- folding ------------------------------------------------------------------------------


def test_active_vs_all__folded_messages_are_only_among_all(log: SessionLog) -> None:
    log.create("s")
    fill(log, "s", 4)
    log.fold("s", [2, 3], "note")
    assert shown(log, "s") == [1, 5, 4]
    states = {one.number: one.state for one in log.messages("s")}
    assert states == {1: "active", 2: "compacted_out", 3: "compacted_out", 4: "active", 5: "active"}
    note = log.message("s", 5)
    assert note is not None
    assert (note.role, note.name, note.content) == ("system", "compact_note", "note")


def test_compaction_atomic__a_fold_is_one_transaction(tmp_path: Path) -> None:
    def operate(store: Store, log: SessionLog) -> None:
        log.fold("s", [2, 3, 4], "note", before_tokens=100, after_tokens=10, round=1)

    assert_one_transaction(tmp_path / "s", made("s", 6), operate)


def test_logical_order__the_note_takes_the_position_of_the_fold_also_after_a_reload(
    log: SessionLog,
) -> None:
    log.create("s")
    fill(log, "s", 10)
    log.fold("s", range(2, 7), "first")
    assert shown(log, "s") == [1, 11, 7, 8, 9, 10]
    log.append("s", user("m12"))
    again = SessionLog(log.store)
    assert shown(again, "s") == [1, 11, 7, 8, 9, 10, 12]
    again.fold("s", [11, 7, 8], "second")
    assert shown(log, "s") == [1, 13, 9, 10, 12]


def test_exact_fold_set__exactly_the_given_messages_are_folded(log: SessionLog) -> None:
    log.create("s")
    fill(log, "s", 8)
    fold = log.fold("s", [7, 2, 4, 5], "note", before_tokens=9, after_tokens=3, round=2)
    assert shown(log, "s") == [1, 9, 3, 6, 8]
    assert fold.runs == ((2, 2), (4, 5), (7, 7))
    assert (fold.first, fold.last, fold.messages) == (2, 7, [2, 4, 5, 7])
    second = log.fold("s", [9, 3, 6], "again")
    # The note has the highest number and stands first: by number, from is still at most to.
    assert second.first <= second.last
    assert (second.number, second.note, second.runs) == (2, 10, ((3, 3), (6, 6), (9, 9)))
    third = log.fold("s", [10, 8], "third")
    assert log.folds("s") == [fold, second, third]
    assert shown(log, "s") == [1, 11]


def test_exact_fold_set__inactive_messages_cannot_be_folded(log: SessionLog) -> None:
    log.create("s")
    fill(log, "s", 5)
    log.fold("s", [1, 2], "note")
    before = log.active("s")
    for wrong in ([], [1], [2, 3], [7], [0], [-1], ["3"], [3, 99]):
        with pytest.raises(InvalidInputError):
            log.fold("s", wrong, "again", keep_notes=True)  # type: ignore[arg-type]
    assert log.active("s") == before
    assert len(log.folds("s")) == 1


def test_one_note__folding_again_folds_the_old_note_as_well(log: SessionLog) -> None:
    log.create("s")
    fill(log, "s", 6)
    log.fold("s", [1, 2], "one")
    with pytest.raises(InvalidInputError, match="7 is a note"):
        log.fold("s", [4, 5], "two")
    log.fold("s", [7, 3], "one and two")
    notes = [one for one in log.active("s") if one.name == "compact_note"]
    assert [one.content for one in notes] == ["one and two"]
    assert shown(log, "s") == [8, 4, 5, 6]


def test_recall__originals_stay_readable_until_they_are_pruned(log: SessionLog) -> None:
    log.create("s")
    fill(log, "s", 6)
    log.fold("s", [2, 3, 4], "note")
    assert [one.content for one in log.messages("s", 2, 4)] == ["m2", "m3", "m4"]
    found = log.message("s", 3)
    assert found is not None
    assert (found.content, found.state) == ("m3", "compacted_out")
    gc.collect(log.store, grace_ms=0)
    assert [one.content for one in log.messages("s", 2, 4)] == ["m2", "m3", "m4"]
    log.prune("s")
    assert list(log.messages("s", 2, 4)) == []


# --- calls --------------------------------------------------------------------------------


def calling(log: SessionLog, session: str = "s") -> int:
    log.create(session)
    log.send(session, user("do it"))
    return log.append(session, NewMessage("assistant", "yes", tool_calls=CALLS, round=0))


def result(call: str) -> NewMessage:
    return NewMessage("tool", f"result of {call}", tool_call_id=call)


def test_pending__calls_without_a_result_are_listed_in_full(log: SessionLog) -> None:
    number = calling(log)
    for answered in range(3):
        # Whoever comes after a crash sees the calls that are left, with all they need.
        pending = SessionLog(log.store).pending("s")
        assert pending is not None
        assert (pending.number, pending.round) == (number, 0)
        assert list(pending.calls) == CALLS[answered:]
        log.append("s", result(f"c{answered + 1}"))
    assert log.pending("s") is None


def test_pending__resume_after_a_crash_executes_the_remaining_calls(log: SessionLog) -> None:
    calling(log)
    log.append("s", result("c2"))
    with pytest.raises(PendingCallsError) as refused:
        log.send("s", user("more"))
    assert list(refused.value.calls) == [CALLS[0], CALLS[2]]
    executed: list[Any] = []

    def execute(call: Any) -> str:
        executed.append(call)
        if call["id"] == "c3":
            raise RuntimeError("broken")
        return "done"

    numbers = SessionLog(log.store).resume("s", execute)
    assert executed == [CALLS[0], CALLS[2]]
    results = [(one.tool_call_id, one.name, one.content) for one in log.active("s")[-2:]]
    assert results == [("c1", "read", "done"), ("c3", "bash", "Error on resume: broken")]
    assert numbers == [4, 5]
    assert log.pending("s") is None
    assert log.resume("s", execute) == []
    assert log.send("s", user("more")) == 6


def test_pending__a_result_without_a_call_changes_nothing(log: SessionLog) -> None:
    calling(log)
    log.append("s", result("c9"))
    log.append("s", NewMessage("user", "c1", tool_call_id="c1"))
    pending = log.pending("s")
    assert pending is not None
    assert list(pending.calls) == CALLS


def test_pending__calls_with_the_same_id_need_one_result_each(log: SessionLog) -> None:
    log.create("s")
    twins = [{"id": "c", "name": "first"}, {"id": "c", "name": "second"}, {"name": "without id"}]
    log.append("s", NewMessage("assistant", tool_calls=twins))
    log.append("s", result("c"))
    pending = log.pending("s")
    assert pending is not None
    assert list(pending.calls) == [twins[1]]
    log.append("s", result("c"))
    assert log.pending("s") is None


def test_pending__the_message_that_makes_the_calls_is_not_folded(log: SessionLog) -> None:
    number = calling(log)
    with pytest.raises(InvalidInputError, match="waits for the results"):
        log.fold("s", [1, number], "note")
    log.abort("s")
    log.fold("s", [1, number], "note")
    assert shown(log, "s") == [6, 3, 4, 5]


def test_pending__a_fork_of_the_session_has_the_calls_too(log: SessionLog) -> None:
    calling(log)
    log.store.fork("s", "fork")
    forked = log.pending("fork")
    assert forked is not None
    assert list(forked.calls) == CALLS
    assert log.append("fork", result("c1")) == 3
    whole = log.pending("s")
    assert whole is not None
    assert list(whole.calls) == CALLS


def test_abort__each_pending_call_gets_an_aborted_result_and_the_count_is_returned(
    log: SessionLog,
) -> None:
    calling(log)
    log.append("s", result("c1"))
    assert log.abort("s", "no time") == 2
    assert [(one.tool_call_id, one.name, one.content) for one in log.active("s")[-2:]] == [
        ("c2", "write", "<aborted: no time>"),
        ("c3", "bash", "<aborted: no time>"),
    ]
    assert log.abort("s") == 0
    assert log.counters("s").next_number == 6


def test_abort__is_one_transaction(tmp_path: Path) -> None:
    def prepare(store: Store) -> SessionLog:
        log = SessionLog(store)
        calling(log)
        return log

    assert_one_transaction(tmp_path / "s", prepare, lambda store, log: log.abort("s"))


# --- the tree -----------------------------------------------------------------------------


def test_depth__a_child_below_the_depth_limit_is_refused(log: SessionLog) -> None:
    parent = log.create("d0")
    assert (parent.depth, parent.kind, parent.parent) == (0, "root", None)
    for depth in (1, 2, 3):
        child = log.create(f"d{depth}", parent=f"d{depth - 1}", spawn_call=f"call {depth}")
        assert (child.depth, child.kind, child.parent) == (depth, "subagent", f"d{depth - 1}")
        assert child.spawn_call == f"call {depth}"
    before = rows_of(log.store, "d3")
    with pytest.raises(SpawnDepthError) as refused:
        log.create("d4", parent="d3")
    assert (refused.value.depth, refused.value.limit) == (4, 3)
    assert rows_of(log.store, "d4") == []
    assert rows_of(log.store, "d3") == before
    assert log.find("d4") is None
    deeper = SessionLog(log.store, depth_limit=4)
    assert deeper.create("d4", parent="d3").depth == 4
    with pytest.raises(SpawnDepthError):
        SessionLog(log.store, depth_limit=0).create("x", parent="d0")


def test_depth__creating_below_another_is_one_transaction(tmp_path: Path) -> None:
    assert_one_transaction(
        tmp_path / "s",
        made("parent"),
        lambda store, log: log.create("child", parent="parent", config={"a": 1}),
    )


def test_depth__children_are_listed_in_the_order_in_which_they_were_made(
    log: SessionLog,
) -> None:
    log.create("p")
    names = ["z", "a", "m"]
    for name in names:
        log.create(name, parent="p")
    assert [one.id for one in log.children("p")] == names
    assert [one.id for one in log.sessions()] == ["a", "m", "p", "z"]
    assert [one.id for one in log.sessions(after="a", limit=2)] == ["m", "p"]


def test_depth__sessions_with_long_ids_that_begin_alike_are_listed_in_order_page_by_page(
    log: SessionLog,
) -> None:
    names = [f"{'x' * 600}{number:02}" for number in range(20)]
    for name in (*reversed(names), "w", "x" * 470, "y"):
        log.create(name)
    ordered = ["w", "x" * 470, *names, "y"]
    assert [session.id for session in log.sessions()] == ordered
    found: list[str] = []
    while page := [one.id for one in log.sessions(after=found[-1] if found else None, limit=3)]:
        found += page
    assert found == ordered


def test_depth__creating_a_child_of_a_deleted_parent_raises_session_not_found_error(
    log: SessionLog,
) -> None:
    log.create("p")
    engine: Any = log.store.engine
    write = engine.write

    def late(change: Any) -> Any:
        engine.write = write
        log.store.delete_session("p")
        return write(change)

    engine.write = late
    for _ in range(2):
        with pytest.raises(SessionNotFoundError):
            log.create("never made", parent="p")
    assert rows_of(log.store, "never made") == []


def test_a_log_whose_leaf_was_moved_back_is_refused_with_the_remedy(log: SessionLog) -> None:
    log.create("s")
    session = log.store.session("s")
    fill(log, "s", 3)
    at_three = next(iter(session.history()))
    fill(log, "s", 2)
    for leaf in ("3", None):
        session.commit(Commit(leaf=leaf))
        for again in (log, SessionLog(log.store)):
            with pytest.raises(NotALogError, match=r"moved back.*rewind"):
                again.append("s", user("four"))
        assert not check.check(log.store).sound
    session.rewind(at_three)
    assert log.append("s", user("four")) == 4
    assert check.check(log.store).sound
    assert [message.number for message in log.messages("s")] == [1, 2, 3, 4]


def test_a_fork_at_a_node_before_a_fold_or_a_call_is_no_log(log: SessionLog) -> None:
    """Messages that were folded later were not shown there, and one to come was taken for a note.

    Calls of a message that is not there waited for ever.
    """
    log.create("s")
    fill(log, "s", 3)
    at_three = next(iter(log.store.session("s").history()))
    fill(log, "s", 1)
    log.store.fork("s", "plain", node="3")
    assert log.append("plain", user("four")) == 4
    log.fold("s", [1, 2], "note")
    log.store.fork("s", "folded", node="3")
    log.create("t")
    log.append("t", user("look"))
    log.append("t", NewMessage("assistant", tool_calls=CALLS))
    log.store.fork("t", "called", node="1")
    for fork in ("folded", "called"):
        for call in (
            lambda fork=fork: log.active(fork),
            lambda fork=fork: log.append(fork, user("more")),
            lambda fork=fork: log.pending(fork),
            lambda fork=fork: log.adopt(fork),
        ):
            with pytest.raises(NotALogError, match="fork it at a revision"):
                call()
    log.store.fork("s", "at a revision", at=at_three)
    assert [message.number for message in log.active("at a revision")] == [1, 2, 3]
    assert log.append("at a revision", user("four")) == 4


def test_a_fork_is_adopted_with_its_messages(log: SessionLog) -> None:
    log.create("s")
    fill(log, "s", 4)
    log.fold("s", [1, 2], "note")
    log.store.fork("s", "fork")
    assert log.find("fork") is None
    assert log.close("fork") == 0
    adopted = log.adopt("fork", parent="s", lifecycle="linked", metadata={"k": 1})
    assert adopted == log.get("fork")
    assert (adopted.parent, adopted.depth, adopted.kind) == ("s", 1, "subagent")
    assert log.active("fork") == log.active("s")
    assert log.append("fork", user("only here")) == 6
    log.record_usage("fork", Tokens(1, 2, 3))
    with pytest.raises(SessionExistsError):
        log.adopt("fork")
    with pytest.raises(SessionNotFoundError):
        log.adopt("nowhere")
    log.store.session("other").commit(Commit(append=[NodeDraft("n", 1)]))
    with pytest.raises(NotALogError):
        log.adopt("other")
    assert log.close("s") == 2


ONE_TRANSACTION: dict[str, Callable[[SessionLog], Any]] = {
    "create": lambda log: log.create("new", parent="s"),
    "adopt": lambda log: log.adopt("fork", parent="s"),
    "update": lambda log: log.update("s", prompt="p", metadata={"long": "text " * 500}),
    "archive": lambda log: log.archive("s"),
    "finish": lambda log: log.finish("child", "completed"),
    "close": lambda log: log.close("s", cascade=False),
    "append": lambda log: log.append("s", user("long " * 2000)),
    "extend": lambda log: log.extend("s", [user("a"), user("b"), result("c1")]),
    "send": lambda log: log.send("settled", user("hello")),
    "start_round": lambda log: log.start_round("s", 3, new_send=True),
    "fold": lambda log: log.fold("s", [1, 3], "note " * 500),
    "set_pending": lambda log: log.set_pending("s", ["c2"]),
    "abort": lambda log: log.abort("s"),
    "record_usage": lambda log: log.record_usage("s", Tokens(1, 2, 3)),
    "prune_usage": lambda log: log.prune_usage("settled"),
    "put_inbox": lambda log: log.put_inbox("s", "another", user("hello")),
    "import": lambda log: log.import_session(list(log.export("s")), "copy"),
}


@pytest.mark.parametrize("operation", ONE_TRANSACTION)
def test_every_operation_is_one_transaction(operation: str, tmp_path: Path) -> None:
    def prepare(store: Store) -> SessionLog:
        log = SessionLog(store)
        calling(log)
        fill(log, "s", 2)
        log.put_inbox("s", "item", user("hello"))
        log.create("child", parent="s")
        log.create("settled")
        log.append("settled", user("hello"), tokens=Tokens(1, 2, 3))
        store.fork("s", "fork")
        return log

    assert_one_transaction(
        tmp_path / "s",
        prepare,
        lambda store, log: ONE_TRANSACTION[operation](log),
        clock=lambda: 1_700_000_000_000,
    )


def family(log: SessionLog) -> None:
    """A root with a child of each lifecycle, each with a child of its own."""
    log.create("root")
    for lifecycle in ("ephemeral", "linked", "detached"):
        log.create(lifecycle, parent="root", lifecycle=lifecycle)
        log.create(f"{lifecycle}/linked", parent=lifecycle, lifecycle="linked")
        log.create(f"{lifecycle}/deeper", parent=f"{lifecycle}/linked", lifecycle="linked")


def test_lifecycles__close_removes_all_descendants_except_detached_subtrees(
    log: SessionLog,
) -> None:
    family(log)
    assert log.close("root") == 7
    left = {one.id: (one.parent, one.depth) for one in log.sessions()}
    assert left == {
        "detached": (None, 0),
        "detached/linked": ("detached", 1),
        "detached/deeper": ("detached/linked", 2),
    }
    assert [one.id for one in log.children("detached")] == ["detached/linked"]
    # It stands less deep, so there is room below it again.
    assert log.create("new", parent="detached/deeper").depth == 3
    assert log.close("detached") == 4
    assert list(log.sessions()) == []


def test_lifecycles__finish_deletes_only_a_completed_ephemeral_session(
    log: SessionLog,
) -> None:
    log.create("root")
    for lifecycle in ("ephemeral", "linked", "detached"):
        log.create(lifecycle, parent="root", lifecycle=lifecycle)
    assert log.finish("ephemeral", "hit_round_limit") is False
    assert log.find("ephemeral") is not None
    assert log.finish("linked", "completed") is False
    assert log.finish("detached", "completed") is False
    assert log.finish("root", "completed") is False
    assert log.finish("ephemeral", "completed") is True
    assert [one.id for one in log.children("root")] == ["linked", "detached"]


def test_lifecycles__a_detached_child_in_the_middle_of_a_tree_stays(log: SessionLog) -> None:
    log.create("a")
    log.create("b", parent="a", lifecycle="linked")
    log.create("c", parent="b", lifecycle="detached")
    log.create("d", parent="c", lifecycle="ephemeral")
    assert log.close("a") == 2
    assert [(one.id, one.parent, one.depth) for one in log.sessions()] == [
        ("c", None, 0),
        ("d", "c", 1),
    ]


def test_cascade_false__children_become_roots_without_dangling_parents(log: SessionLog) -> None:
    family(log)
    assert log.close("root", cascade=False) == 1
    left = {one.id: (one.parent, one.depth) for one in log.sessions()}
    assert len(left) == 9
    for lifecycle in ("ephemeral", "linked", "detached"):
        assert left[lifecycle] == (None, 0)
        assert left[f"{lifecycle}/linked"] == (lifecycle, 1)
    assert all(parent is None or parent in left for parent, _ in left.values())
    assert log.children("root") == []


def test_close__leaves_no_row_of_the_session_in_any_table(log: SessionLog) -> None:
    log.create("keeper")
    before = {table: log.store.engine.scan_rows(table, limit=1000) for table in TABLES}
    log.create("goner")
    fill(log, "goner", 5)
    log.fold("goner", [1, 2], "note")
    log.append("goner", NewMessage("assistant", tool_calls=CALLS), tokens=Tokens(1, 2, 3, "m"))
    log.create("goner/child", parent="goner", lifecycle="linked")
    lease = log.claim_lease("goner", "me", 1000)
    assert lease is not None
    log.put_inbox("goner", "item", user("hello"))
    log.deliver_inbox("goner", lease)
    log.put_inbox("goner", "another", user("hello"))
    assert rows_of(log.store, "goner") != []
    assert log.close("goner") == 2
    assert rows_of(log.store, "goner") == []
    after = {table: log.store.engine.scan_rows(table, limit=1000) for table in TABLES}
    for table in set(TABLES) - {"tombstones", "retention", "nodes"}:
        assert after[table] == before[table], table
    assert log.close("goner") == 0
    assert log.find("goner") is None
    with pytest.raises(SessionDeletedError):
        log.append("goner", user("hello"))
    # Its id is not given twice: whoever still holds it is not led to another session.
    with pytest.raises(SessionDeletedError):
        log.create("goner")


def test_close__is_one_transaction_including_all_descendants(tmp_path: Path) -> None:
    def prepare(store: Store) -> SessionLog:
        log = SessionLog(store)
        family(log)
        fill(log, "linked", 3)
        log.fold("linked", [1, 2], "note")
        log.record_usage("ephemeral", Tokens(1, 2, 3))
        return log

    assert_one_transaction(tmp_path / "s", prepare, lambda store, log: log.close("root"))


def test_close__a_child_created_concurrently_is_closed_too(log: SessionLog) -> None:
    log.create("root")
    engine: Any = log.store.engine
    write = engine.write

    def late(change: Any) -> Any:
        engine.write = write
        SessionLog(log.store).create("late", parent="root", lifecycle="linked")
        return write(change)

    engine.write = late
    assert log.close("root") == 2
    assert list(log.sessions()) == []


@pytest.mark.parametrize(
    "late",
    [
        lambda store: SessionLog(store).put_inbox("goner", "item", user("hello")),
        lambda store: store.session("goner").attachments.put(b"kept here"),
        lambda store: store.session("goner").attachments.intend("old"),
        lambda store: store.session("goner").protect(by="me"),
        lambda store: store.session("goner").label("good"),
        lambda store: store.session("goner").add_subjects(["her"]),
    ],
    ids=["queued", "attached", "attached again", "protected", "labelled", "about somebody"],
)
def test_close__rows_written_concurrently_are_removed_too(
    log: SessionLog, monkeypatch: pytest.MonkeyPatch, late: Callable[[Store], object]
) -> None:
    """Nobody would find it, and an attachment would keep its bytes for ever."""
    log.create("goner")
    log.append("goner", user("hello"))
    log.store.session("goner").attachments.intend("old")
    engine: Any = log.store.engine
    write = engine.write

    def meanwhile(change: Any) -> Any:
        engine.write = write
        late(Store(engine))
        return write(change)

    engine.write = meanwhile
    # Whoever closes it dies right after: nobody tidies up.
    monkeypatch.setattr("casstore.session.catalogue.clear", lambda *_: None)
    assert log.close("goner") == 1
    assert rows_of(log.store, "goner") == []


def test_close__external_attachments_are_condemned_as_last_announced(
    log: SessionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One announced, moved or forgotten in that moment: the host is told of what there is."""
    log.create("goner")
    attachments = log.store.session("goner").attachments
    attachments.intend("moved")
    attachments.intend("forgotten", uri="file:///forgotten")
    engine: Any = log.store.engine
    write = engine.write
    happens: list[Callable[[], object]] = [
        lambda: attachments.intend("moved", uri="file:///moved"),
        lambda: attachments.forget("forgotten"),
        lambda: attachments.intend("new", uri="file:///new"),
    ]

    def meanwhile(change: Any) -> Any:
        engine.write = write
        happens.pop()()
        if happens:
            engine.write = meanwhile
        return write(change)

    engine.write = meanwhile
    monkeypatch.setattr("casstore.session.catalogue.clear", lambda *_: None)
    assert log.close("goner") == 1
    assert [one.uri for one in list_condemned(log.store)] == ["file:///moved", "file:///new"]


def test_close__a_write_that_a_concurrent_close_overtakes_raises_session_deleted_error(
    log: SessionLog,
) -> None:
    log.create("goner")
    engine: Any = log.store.engine
    write = engine.write

    def late(change: Any) -> Any:
        engine.write = write
        SessionLog(log.store).close("goner")
        return write(change)

    engine.write = late
    with pytest.raises(SessionDeletedError):
        log.record_usage("goner", Tokens(1, 2, 3))
    assert rows_of(log.store, "goner") == []


def test_close__removes_the_log_rows_of_a_session_that_was_deleted_through_the_store(
    log: SessionLog,
) -> None:
    log.create("goner")
    log.store.delete_session("goner")
    assert log.find("goner") is None
    assert list(log.sessions()) == []
    assert log.close("goner") == 1
    assert rows_of(log.store, "goner") == []


def test_archive__sets_the_status_and_keeps_the_data(log: SessionLog) -> None:
    log.create("s", prompt="be kind", model="m-1", config={"t": 0.5}, metadata={"k": [1]})
    fill(log, "s", 2)
    assert log.archive("s").status == "archived"
    found = log.get("s")
    assert (found.status, found.prompt, found.model) == ("archived", "be kind", "m-1")
    assert (found.config, found.metadata) == ({"t": 0.5}, {"k": [1]})
    assert len(log.active("s")) == 2
    assert log.append("s", user("still")) == 3
    assert log.update("s", prompt="be brief").prompt == "be brief"
    with pytest.raises(InvalidInputError):
        log.update("s", depth=0)
    assert log.get("s").prompt == "be brief"


def test_archive__updated_at_ms_is_the_time_of_the_last_change(log: SessionLog, clock: Any) -> None:
    created = log.create("s").created_at_ms
    clock.move(10)
    log.append("s", user("hello"))
    assert (log.get("s").created_at_ms, log.get("s").updated_at_ms) == (created, created + 10)
    clock.move(10)
    log.update("s", model="m")
    assert log.get("s").updated_at_ms == created + 20


def test_archive__an_imported_session_keeps_its_original_updated_at_ms(
    log: SessionLog, clock: Any
) -> None:
    log.create("s")
    clock.move(10)
    log.append("s", user("hello"))
    changed = log.get("s").updated_at_ms
    clock.move(10)
    copy = log.import_session(list(log.export("s")), "copy")
    assert copy.updated_at_ms == log.get("copy").updated_at_ms == changed
    clock.move(10)
    again = log.import_session(list(log.export("copy")), "again")
    assert again.updated_at_ms == changed
    log.append("copy", user("more"))
    assert log.get("copy").updated_at_ms == changed + 20
    log.create("below", parent="again")
    assert log.get("again").updated_at_ms == changed


# --- usage --------------------------------------------------------------------------------


def test_usage__each_round_of_each_send_has_one_row_and_totals_are_separate(
    log: SessionLog,
) -> None:
    log.create("s")
    for send in (1, 2):
        log.send("s", user(f"send {send}"))
        for number in (0, 1):
            answer = NewMessage("assistant", "answer", round=number)
            log.append("s", answer, tokens=Tokens(10 * send, number, 10 * send + number, "m"))
    rounds = [(one.send, one.round, one.tokens.prompt) for one in log.usage("s")]
    assert rounds == [(1, 0, 10), (1, 1, 10), (2, 0, 20), (2, 1, 20)]
    assert log.totals("s") == UsageTotals(4, 60, 2, 62)
    # Noted again, a round is corrected, and the totals with it.
    log.record_usage("s", Tokens(5, None, 5), send=1, round=0)
    assert log.usage("s")[0].tokens == Tokens(5, None, 5)
    assert log.totals("s") == UsageTotals(4, 55, 2, 57)
    assert log.prune_usage("s", keep_recent=1) == 3
    assert [(one.send, one.round) for one in log.usage("s")] == [(2, 1)]
    assert log.totals("s") == UsageTotals(4, 55, 2, 57)


def test_usage__a_message_and_its_tokens_are_there_together_or_not_at_all(
    log: SessionLog,
) -> None:
    log.create("s")
    with pytest.raises(InvalidInputError):
        log.append("s", user("hello"), tokens=Tokens(-1, 0, 0))
    assert (log.active("s"), log.usage("s")) == ([], [])


def test_usage__recording_is_one_transaction(tmp_path: Path) -> None:
    assert_one_transaction(
        tmp_path / "s", made("s"), lambda store, log: log.record_usage("s", Tokens(1, 2, 3))
    )


def test_usage__rounds_noted_concurrently_are_all_in_the_totals(log: SessionLog) -> None:
    log.create("s")

    def write(base: int) -> None:
        for at in range(10):
            log.record_usage("s", Tokens(1, 1, 2), send=base, round=at)

    threads = [threading.Thread(target=write, args=(base,)) for base in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.totals("s") == UsageTotals(30, 30, 30, 60)


# --- content ------------------------------------------------------------------------------


def test_structured_content__round_trips_as_structure(log: SessionLog) -> None:
    log.create("s")
    content = [{"type": "text", "text": "look"}, {"type": "image", "data": b"\0\1"}, 1, None, 2.5]
    log.append("s", NewMessage("user", content, name="ann", meta={"k": {"deep": [True]}}))
    log.append("s", NewMessage("user", '["a text", "that is no list"]'))
    log.append("s", NewMessage("assistant", "nul \0 inside", tool_calls=[]))
    first, second, third = log.active("s")
    assert (first.content, first.name) == (content, "ann")
    assert first.meta == {"k": {"deep": [True]}}
    assert second.content == '["a text", "that is no list"]'
    assert (third.content, third.tool_calls, third.meta) == ("nul \0 inside", None, {})


def test_structured_content__an_invalid_message_is_refused_and_nothing_written(
    log: SessionLog,
) -> None:
    log.create("s")
    wrong: list[Any] = [
        NewMessage(""),
        NewMessage(1),  # type: ignore[arg-type]
        NewMessage("user", float("nan")),
        NewMessage("user", {"a": object()}),
        NewMessage("user", name=1),  # type: ignore[arg-type]
        NewMessage("assistant", tool_calls=["call"]),  # type: ignore[list-item]
        NewMessage("user", round=-1),
        NewMessage("user", meta=[1]),  # type: ignore[arg-type]
        {"role": "user"},
    ]
    for message in wrong:
        with pytest.raises(InvalidInputError):
            log.append("s", message)
        with pytest.raises(InvalidInputError):
            log.extend("s", [user("fine"), message])
    assert log.active("s") == []
    for kind in ({"kind": "leaf"}, {"lifecycle": "eternal"}, {"config": {"a": object()}}):
        with pytest.raises(InvalidInputError):
            log.create("t", **kind)
    assert log.find("t") is None


def test_structured_content__messages_are_the_nodes_of_the_session_and_no_second_copy(
    log: SessionLog,
) -> None:
    long = "a long text " * 2000
    log.create("s")
    log.append("s", user(long))
    log.append("s", NewMessage("assistant", tool_calls=[{"id": "c", "arguments": long}]))
    nodes = log.store.session("s").nodes()
    assert [node.payload["role"] for node in nodes] == ["user", "assistant"]
    assert log.store.session("s").info().first_user_message == long
    blobs = [
        one for one in log.store.engine.scan_objects(limit=1000) if one.size_bytes >= len(long)
    ]
    assert len(blobs) == 1


def test_structured_content__a_fold_keeps_the_components_of_the_runtime(
    log: SessionLog,
) -> None:
    log.create("s")
    fill(log, "s", 3)
    session = log.store.session("s")
    own = session.checkpoint()._replace(
        tool_state={"cwd": "/repo"}, config={"k": 1}, frames=["f"], plugin_revision=3
    )
    session.commit(Commit(checkpoint=own))
    log.fold("s", [1, 2], "note")
    log.send("s", user("more"))
    found = session.checkpoint(hydrate=True)
    assert (found.tool_state, found.config) == ({"cwd": "/repo"}, {"k": 1})
    assert (found.frames, found.plugin_revision) == (("f",), 3)
    assert shown(log, "s") == [4, 3, 5]


def test_structured_content__a_rewind_also_reverts_folds_and_pending_calls(log: SessionLog) -> None:
    calling(log)
    session = log.store.session("s")
    head = session.head()
    assert head is not None
    before = log.active("s"), log.pending("s"), log.counters("s")
    log.abort("s")
    log.fold("s", [1, 2], "note")
    session.rewind(head.revision)
    assert (log.active("s"), log.pending("s"), log.counters("s")) == before
    assert log.folds("s") == []
    assert log.append("s", result("c1")) == 3


# --- prune, export, import ----------------------------------------------------------------


def test_prune__removes_only_folded_messages_except_the_most_recent(
    log: SessionLog, clock: Any
) -> None:
    log.create("s")
    fill(log, "s", 3)
    clock.move(1000)
    for number in range(4, 9):
        log.append("s", user(f"m{number}"))
    log.fold("s", range(1, 7), "note")
    active = log.active("s")
    assert log.prune("s", older_than_ms=2000) == 0
    assert log.prune("s", older_than_ms=500) == 3
    assert log.prune("s", keep_recent=2) == 1
    assert [one.number for one in log.messages("s")] == [5, 6, 7, 8, 9]
    assert log.prune("s") == 2
    assert log.prune("s") == 0
    assert log.active("s") == active
    assert [fold.messages for fold in log.folds("s")] == [[1, 2, 3, 4, 5, 6]]


def test_prune__does_not_hide_messages_whose_fold_a_concurrent_rewind_undoes(
    log: SessionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prune hid messages 1 and 2 for ever although a rewind had undone their fold."""
    log.create("s")
    fill(log, "s", 3)
    session = log.store.session("s")
    head = session.head()
    assert head is not None
    log.fold("s", [1, 2], "note")
    hide = tombstones.hide

    def rewind_and_hide(*arguments: Any) -> Any:
        monkeypatch.undo()
        session.rewind(head.revision)
        return hide(*arguments)

    monkeypatch.setattr(tombstones, "hide", rewind_and_hide)
    assert log.prune("s") == 0
    assert [message.number for message in log.active("s")] == [1, 2, 3]


def test_prune__is_irreversible_and_vacuum_gives_the_bytes_back(log: SessionLog) -> None:
    log.create("s")
    log.append("s", user("secret " * 1000))
    log.append("s", user("kept"))
    log.fold("s", [1], "note")
    log.prune("s")
    assert log.store.session("s").node("1", at=2) is None
    vacuum.vacuum(log.store, grace_ms=0)
    sizes = [one.size_bytes for one in log.store.engine.scan_objects(limit=1000)]
    assert max(sizes) < 7000
    assert [one.content for one in log.active("s")] == ["note", "kept"]


def test_prune__is_one_transaction(tmp_path: Path) -> None:
    def prepare(store: Store) -> SessionLog:
        log = made("s", 5)(store)
        log.fold("s", [1, 2, 3], "note")
        return log

    assert_one_transaction(tmp_path / "s", prepare, lambda store, log: log.prune("s"))


def full(log: SessionLog, session: str) -> None:
    """A session with something of everything."""
    log.create("above")
    log.create(
        session, parent="above", lifecycle="linked", prompt="p", model="m", metadata={"a": 1}
    )
    log.send(session, user("hello"))
    for number in range(3):
        log.append(
            session, NewMessage("assistant", f"a{number}", round=number), tokens=Tokens(1, 2, 3)
        )
    log.fold(session, [2, 3], "note", round=2)
    log.prune(session, keep_recent=1)
    log.start_round(session, 3)
    log.append(session, NewMessage("assistant", tool_calls=CALLS, round=3))
    log.append(session, result("c1"))


def everything(log: SessionLog, session: str) -> tuple[Any, ...]:
    return (
        log.active(session),
        list(log.messages(session)),
        log.folds(session),
        log.pending(session),
        log.usage(session),
        log.totals(session),
        log.counters(session),
    )


def test_export_import__an_imported_session_is_complete_and_an_independent_root(
    log: SessionLog,
) -> None:
    full(log, "s")
    entries = list(log.export("s"))
    copy = log.import_session(entries)
    assert copy.id != "s"
    assert (copy.parent, copy.kind, copy.depth) == (None, "root", 0)
    assert (copy.prompt, copy.model, copy.metadata) == ("p", "m", {"a": 1})
    assert everything(log, copy.id) == everything(log, "s")
    # It lives on its own.
    log.close("above")
    assert log.append(copy.id, result("c2")) == 8
    assert log.import_session(iter(entries), "again").id == "again"
    assert log.append("again", result("c2")) == 8


def test_export_import__refuses_newer_versions_existing_ids_and_damage(log: SessionLog) -> None:
    full(log, "s")
    entries = list(log.export("s"))
    first, rest = entries[0], entries[1:]
    rest_but_end, end = entries[:-1], {"end": len(entries)}
    before = everything(log, "s")
    with pytest.raises(FormatError):
        log.import_session([{**first, "log": 2}, *rest])
    for name in ("s", "above"):
        with pytest.raises(SessionExistsError):
            log.import_session(entries, name)
    damaged: list[Any] = [
        [],
        ["text"],
        rest,
        entries[:-1],
        entries[:3] + entries[4:],
        [*entries, entries[1]],
        [first, {"message": [0, {"role": "user"}, 1]}, *rest],
        [first, rest[1], rest[0], *rest[2:]],
        [first, {"message": [1, "text", 1]}, *rest[1:]],
        [first, {"message": [1, {"role": "user", "strange": 1}, 1]}, *rest[1:]],
        [first, {"message": [1, {"role": "user", "tool_calls": "x"}, 1]}, *rest[1:]],
        [first, {"strange": 1}, *rest],
        [{**first, "session": {}}, *rest],
        [{**first, "state": {"log": 1, "upto": 99}}, *rest],
        # Calls that no message makes, or not that one, or not so often: they would wait for ever.
        [{**first, "state": {"log": 1, "pending": [1, "c1"]}}, *rest],
        [{**first, "state": {**first["state"], "pending": [6, "c9"]}}, *rest],
        [{**first, "state": {**first["state"], "pending": [6, "c2", "c2"]}}, *rest],
        [{**first, "state": {**first["state"], "pending": [6]}}, *rest],
        [{**first, "session": {**first["session"], "status": "gone"}}, *rest],
        [{**first, "session": {**first["session"], "created_at_ms": "today"}}, *rest],
        [{**first, "state": {"log": 1, "round": "x"}}, *rest],
        [{**first, "state": {"log": 1, "view": [1, 1, 1, 1], "upto": 1}}, *rest],
        [{"end": len(entries)} if each is entries[1] else each for each in entries],
        [*rest_but_end, {"fold": ["x", 2, [1, 1], None, None, None, 1]}, end],
        [*rest_but_end, {"usage": {"a": 1}}, end],
        [*rest_but_end, {"usage": [0, "x", 1, 1, 1, None, 1]}, end],
        [*rest_but_end, {"usage": [0, 7, "x", 1, 1, None, 1]}, end],
        [*rest_but_end, {"usage": [0, 7, 99, 99, 99, None, 1]}, end],
        [*rest_but_end, {"totals": [0, 0, 0, -1]}, end],
    ]
    for number, each in enumerate(damaged):
        with pytest.raises(InvalidInputError):
            log.import_session(each, f"damaged {number}")
        assert log.find(f"damaged {number}") is None
    assert everything(log, "s") == before
    assert [one.id for one in log.sessions()] == ["above", "s"]


def test_export_import__a_session_whose_import_another_process_finished_accepts_messages(
    log: SessionLog,
) -> None:
    log.create("s")
    log.extend("s", [user(f"m{at}") for at in range(1100)])
    entries = list(log.export("s"))

    def cut() -> Any:
        yield from entries[:1090]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log.import_session(cut(), "t")
    # As another process would, which tells this one nothing.
    SessionLog(Store(log.store.engine)).import_session(entries, "t")
    assert log.append("t", user("hello")) == 1101


def test_export_import__a_fold_that_comes_meanwhile_is_not_part_of_it(log: SessionLog) -> None:
    log.create("s")
    log.extend("s", [user(f"m{at}") for at in range(4)])
    entries = log.export("s")
    started = [next(entries)]
    log.fold("s", [1, 2], "a note")
    log.import_session([*started, *entries], "t")
    assert log.folds("t") == []
    assert log.fold("t", [3], "its own").number == 1


def test_export_import__an_interrupted_import_is_invisible_and_can_continue(
    log: SessionLog,
) -> None:
    log.create("s")
    log.extend("s", [user(f"m{at}") for at in range(2500)])
    entries = list(log.export("s"))

    def cut() -> Any:
        yield from entries[:2300]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log.import_session(cut(), "t")
    assert log.find("t") is None
    assert [one.id for one in log.sessions()] == ["s"]
    with pytest.raises(NotALogError, match="not finished"):
        log.append("t", user("hello"))
    other = [*entries[:5], {"message": [5, {"role": "user", "content": "other"}, 0]}, *entries[6:]]
    with pytest.raises(SessionExistsError):
        log.import_session(other, "t")
    with pytest.raises(SessionExistsError):
        log.import_session([*entries[:101], {"totals": [0, 0, 0, 0]}, {"end": 102}], "t")
    revision = log.store.session("t").head()
    assert revision is not None
    log.import_session(entries, "t")
    assert everything(log, "t") == everything(log, "s")
    finished = log.store.session("t").head()
    assert finished is not None
    assert finished.revision == revision.revision + 1


# --- leases and inbox ---------------------------------------------------------------------


def claimed(log: SessionLog, session: str, owner: str, ttl_ms: int = 1000) -> Lease:
    lease = log.claim_lease(session, owner, ttl_ms)
    assert lease is not None
    return lease


def test_lease_inbox__a_lease_is_taken_over_only_when_it_has_expired(
    log: SessionLog, clock: Any
) -> None:
    log.create("s")
    first = claimed(log, "s", "one")
    assert log.claim_lease("s", "two", 1000) is None
    assert log.append("s", user("with it"), lease=first) == 1
    with pytest.raises(LeaseHeldError):
        log.append("s", user("without it"))
    clock.move(1000)
    second = claimed(log, "s", "two")
    assert second.fencing == first.fencing + 1
    with pytest.raises(LeaseLostError):
        log.append("s", user("too late"), lease=first)
    second = log.renew_lease(second, 5000)
    assert log.release_lease(second) is True
    # The counter goes on from where it was.
    assert claimed(log, "s", "three").fencing == 3
    assert [one.content for one in log.active("s")] == ["with it"]


def test_lease_inbox__an_item_id_is_accepted_only_once(log: SessionLog) -> None:
    log.create("s")
    assert log.put_inbox("s", "i1", user("one")) is True
    assert log.put_inbox("s", "i1", user("one, again")) is False
    assert log.put_inbox("s", "i2", user("two")) is True
    lease = claimed(log, "s", "me")
    assert log.deliver_inbox("s", lease) == [1, 2]
    assert log.deliver_inbox("s", lease) == []
    assert log.put_inbox("s", "i1", user("one, much later")) is False
    assert log.deliver_inbox("s", lease) == []
    assert [one.content for one in log.active("s")] == ["one", "two"]
    # Items of another session are others.
    log.create("t")
    assert log.put_inbox("t", "i1", user("one")) is True


def test_lease_inbox__the_item_of_a_dead_worker_goes_to_the_next(
    log: SessionLog, clock: Any
) -> None:
    log.create("s")
    log.put_inbox("s", "i1", user("one"))
    dying = claimed(log, "s", "dying")
    claim = log.store.session("s").queue.claim(dying)
    assert claim is not None
    clock.move(1000)
    lease = claimed(log, "s", "next")
    assert log.deliver_inbox("s", lease) == [1]
    with pytest.raises(LeaseLostError):
        log.deliver_inbox("s", dying)
    assert [one.content for one in log.active("s")] == ["one"]


def test_lease_inbox__a_delivery_moves_items_to_the_transcript_in_one_transaction(
    tmp_path: Path,
) -> None:
    def prepare(store: Store) -> tuple[SessionLog, Lease]:
        log = made("s")(store)
        log.put_inbox("s", "i1", user("one"))
        log.put_inbox("s", "i2", user("two"))
        return log, claimed(log, "s", "me", 1_000_000)

    # Claiming is a step of its own; whoever holds the claim and dies has delivered nothing.
    store = Store(LmdbEngine(str(tmp_path / "a"), durability="relaxed"))
    with store:
        log, lease = prepare(store)
        engine: Any = store.engine
        write = engine.write
        writes: list[Any] = []

        def failing(change: Any) -> Any:
            writes.append(change)
            if len(writes) == 2:
                raise KeyboardInterrupt
            return write(change)

        engine.write = failing
        with pytest.raises(KeyboardInterrupt):
            log.deliver_inbox("s", lease)
        engine.write = write
        assert log.active("s") == []
        assert len(store.session("s").queue.batches()) == 2
        log.release_lease(lease)
        assert log.deliver_inbox("s", claimed(log, "s", "next")) == [1, 2]
        assert store.session("s").queue.batches() == []


@pytest.mark.parametrize("is_written", [False, True])
def test_lease_inbox__a_delivery_that_failed_is_tried_again_under_the_same_lease(
    log: SessionLog, is_written: bool
) -> None:
    log.create("s")
    for item in ("i1", "i2"):
        log.put_inbox("s", item, user(item))
    lease = claimed(log, "s", "me")
    engine: Any = log.store.engine
    write, writes = engine.write, []

    def failing(change: Any) -> Any:
        writes.append(change)
        if len(writes) != 2:
            return write(change)
        if is_written:
            write(change)
        raise StorageError("the answer is lost" if is_written else "the disk is full")

    engine.write = failing
    with pytest.raises(StorageError):
        log.deliver_inbox("s", lease)
    engine.write = write
    assert log.deliver_inbox("s", lease) == ([] if is_written else [1, 2])
    assert [one.content for one in log.active("s")] == ["i1", "i2"]
    assert log.store.session("s").queue.batches() == []


def test_lease_inbox__an_item_put_again_in_the_moment_of_its_delivery_is_not_delivered_twice(
    log: SessionLog,
) -> None:
    log.create("s")
    log.put_inbox("s", "i1", user("one"))
    lease = claimed(log, "s", "me")
    # Somebody has looked and not found it delivered; then it is; then they queue it.
    queue = log.store.session("s").queue
    assert log.deliver_inbox("s", lease) == [1]
    queue.enqueue(
        [{"role": "user", "content": "one"}],
        source_key="inbox:i1", slot="join", merge_key="log inbox", delivery="earliest",
    )  # fmt: skip
    assert log.deliver_inbox("s", lease) == []
    assert queue.batches() == []
    assert [one.content for one in log.active("s")] == ["one"]


def test_lease_inbox__queued_work_that_is_not_an_inbox_item_is_left_alone(log: SessionLog) -> None:
    log.create("s")
    queue = log.store.session("s").queue
    queue.enqueue(["other work"])
    log.put_inbox("s", "i1", user("one"))
    lease = claimed(log, "s", "me")
    assert log.deliver_inbox("s", lease) == []
    assert len(queue.pending()) == 2


# --- all of it ----------------------------------------------------------------------------


def test_check_finds_nothing_after_gc_of_a_log_with_every_feature(log: SessionLog) -> None:
    full(log, "s")
    log.update("s", metadata={"long": "text " * 5000})
    gc.collect(log.store, grace_ms=0)
    assert log.get("s").metadata == {"long": "text " * 5000}
    assert len(log.active("s")) == 5
    assert check.check(log.store).findings == ()
