"""Vacuum: hidden nodes go from every revision, and no reader sees a difference."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Collecting, DeleteRow, Engine, Write, WriteResult
from casstore.errors import (
    ContendedError,
    CorruptionError,
    InvalidInputError,
    RevisionNotFoundError,
    SessionDeletedError,
    StorageError,
)
from casstore.format.canonical import Link
from casstore.maintenance import gc, keepers, vacuum
from casstore.maintenance.keepers import Keeper
from casstore.maintenance.progress import Step
from casstore.maintenance.vacuum import VacuumOutcome
from casstore.session import attempts, keys
from casstore.session.data import Checkpoint, Commit, NodeDraft
from casstore.session.session import Session
from casstore.session.turns import receipt_key
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.session_fixtures import (
    contents_of,
    full,
    hold,
    ids,
    load,
    message,
    path,
    start,
    step,
)
from tests.maintenance.views import all_bytes, check_graphs, exact, seen

ROOT = Path(__file__).parent.parent.parent
SECRET = "the secret word is CANARY"
LONG_SECRET = "CANARY in a long text " * 200


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("alpha")


def clean(store: Store, clock: ManualClock, **options: Any) -> vacuum.VacuumReport:
    clock.now_ms += 1
    return vacuum.vacuum(store, grace_ms=0, **options)


def grow(session: Session, nodes: int = 8) -> dict[str, Commit]:
    """One turn for each node; the turns, to be replayed."""
    turns = {}
    for n in range(nodes):
        draft = message(f"n{n}", f"text {n}" if n != 3 else SECRET)
        change = Commit(append=[draft], turn=f"t{n}", label=f"label {n}")
        session.commit(change)
        turns[f"t{n}"] = change
    return turns


# --- what it does ---------------------------------------------------------------------------


def test_vacuum_removes_the_bytes_of_hidden_nodes_and_changes_nothing_else(
    store: Store, session: Session, clock: ManualClock
) -> None:
    turns = grow(session)
    step(session, message("long", LONG_SECRET), message("end"), checkpoint=Checkpoint({"a": 1}))
    session.tombstone(["n3", "long"])
    before = seen(session, turns)
    assert b"CANARY" in all_bytes(store)
    report = clean(store, clock)
    assert report.outcome is VacuumOutcome.DONE
    assert report.sessions == (vacuum.SessionReport("alpha", VacuumOutcome.DONE, 2, 5, 6),)
    assert (report.objects_kept, report.keepers) == (0, ())
    assert seen(session, turns) == before
    assert seen(Store(store.engine, close=lambda: None).session("alpha"), turns) == before
    check_graphs(store, session)
    assert b"CANARY" not in all_bytes(store)
    assert session.node("n4").parent == "n2"  # type: ignore[union-attr]
    again = clean(store, clock)
    assert (again.outcome, again.sessions) == (VacuumOutcome.NOTHING, ())


def test_vacuum_changes_leaf_count_and_manifest_as_documented(
    store: Store, session: Session, clock: ManualClock
) -> None:
    step(session, "a", "b", "c")
    entry = session.entry()
    session.tombstone(["b", "c"])
    head = session.head()
    assert head is not None
    assert (head.leaf, head.node_count, load(session).healed) == ("c", 3, True)
    session.tombstone(["c"])
    clean(store, clock)
    after = session.head()
    assert after is not None
    # The leaf that readers saw is the stored one, hidden nodes do not count, the manifest is new.
    assert (after.leaf, after.node_count, load(session).healed) == ("a", 1, False)
    assert after.manifest != head.manifest
    assert (after.revision, after.committed_at_ms) == (head.revision, head.committed_at_ms)
    # An entry names a manifest, and that manifest is not there any more.
    with pytest.raises(RevisionNotFoundError):
        session.load(entry)
    # Ids are free again.
    step(session, "b", message("c", parent="a"))
    assert (path(session), full(session)) == (["a", "c"], ["a", "b", "c"])
    check_graphs(store, session)


def test_vacuum_does_not_rewrite_revisions_before_the_first_hidden_node(
    store: Store, session: Session, clock: ManualClock
) -> None:
    for n in range(100):
        step(session, f"n{n}")
    session.tombstone(["n90"])
    before = exact(session)
    [report] = clean(store, clock).sessions
    assert (report.nodes_rewritten, report.revisions_rewritten) == (9, 10)
    after = exact(session)
    assert after[1][10:] == before[1][10:]
    assert after[2][10:] == before[2][10:]
    assert ids(session.nodes()) == [f"n{n}" for n in range(100) if n != 90]


def test_nodes_are_rewritten_once_not_once_a_revision(
    store: Store, session: Session, clock: ManualClock
) -> None:
    for n in range(25):
        step(session, f"n{n}")
    session.rewind(15)
    step(session, "other")
    session.tombstone(["n0"])
    [report] = clean(store, clock).sessions
    # 24 of the first branch, and one more.
    assert (report.nodes_rewritten, report.revisions_rewritten) == (25, 27)
    check_graphs(store, session)


def test_sessions_without_hidden_nodes_are_not_touched(
    store: Store, session: Session, clock: ManualClock
) -> None:
    for name in ("one", "two"):
        grow(store.session(name))
    clean(store, clock)
    step(session, "a", "b")
    session.tombstone(["a"])
    before = {name: exact(store.session(name)) for name in ("one", "two")}
    assert list(vacuum.sessions_with_hidden(store)) == ["alpha"]
    report = clean(store, clock)
    assert [each.session for each in report.sessions] == ["alpha"]
    assert {name: exact(store.session(name)) for name in ("one", "two")} == before
    rows = contents_of(store).rows
    assert vacuum.rewrite_hidden(store, "one").outcome is VacuumOutcome.NOTHING
    assert vacuum.rewrite_hidden(store, "nobody").outcome is VacuumOutcome.NOTHING
    assert contents_of(store).rows == rows


def test_vacuum_rewrites_only_the_given_sessions(store: Store, clock: ManualClock) -> None:
    for name in ("one", "two"):
        step(store.session(name), "a", "b")
        store.session(name).tombstone(["a"])
    report = clean(store, clock, sessions=["two"])
    assert [each.session for each in report.sessions] == ["two"]
    assert list(vacuum.sessions_with_hidden(store)) == ["one"]
    for wrong in ("two", [1], [""]):
        with pytest.raises(InvalidInputError):
            vacuum.vacuum(store, sessions=cast(Any, wrong))


def test_a_session_with_a_long_id(store: Store, clock: ManualClock) -> None:
    session = store.session("long id " * 100)
    step(session, "a", "b")
    session.tombstone(["a"])
    [report] = clean(store, clock).sessions
    assert (report.session, report.outcome) == (session.id, VacuumOutcome.DONE)
    assert path(session) == ["b"]


def test_vacuum_rewrites_a_long_chain_of_rewinds_without_recursion(
    store: Store, session: Session
) -> None:
    # Each goes on from the one before, and there may be thousands: nothing may recurse.
    step(session, "root", "secret")
    for n in range(150):
        step(session, f"n{n}")
        session.rewind(session.entry().revision)
    session.tombstone(["secret"])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert vacuum.rewrite_hidden(store, "alpha").outcome is VacuumOutcome.DONE
    finally:
        sys.setrecursionlimit(limit)
    assert path(session) == ["root", *(f"n{n}" for n in range(150))]
    step(session, "more")
    assert path(session)[-1] == "more"


def test_vacuum_handles_a_session_in_which_every_node_is_hidden(
    store: Store, session: Session, clock: ManualClock
) -> None:
    step(session, "a", "b")
    session.tombstone(["a", "b"])
    before = seen(session)
    clean(store, clock)
    assert seen(session) == before
    assert (path(session), full(session), load(session).leaf) == ([], [], None)
    step(session, "a")
    assert path(session) == ["a"]
    check_graphs(store, session)


def test_vacuum_of_hidden_branch_tips_moves_the_tips_to_visible_nodes(
    store: Store, session: Session, clock: ManualClock
) -> None:
    # a → b → c, b → d, a → e: with c and d hidden the branch ends in b, with e hidden
    # there is one branch less.
    step(session, "a", "b", "c", message("d", parent="b"), message("e", parent="a"), leaf="c")
    for hide, ends in ((["c"], {"d", "e"}), (["d"], {"b", "e"}), (["e"], {"b"}), (["b"], {"a"})):
        session.tombstone(hide)
        before = seen(session)
        clean(store, clock)
        assert seen(session) == before
        check_graphs(store, session)
        parents = {node.parent for node in session.nodes("full")}
        assert set(full(session)) - parents == ends


def test_replays_give_the_same_result_after_several_rounds(
    store: Store, session: Session, clock: ManualClock
) -> None:
    drafts = [message(f"n{n}") for n in range(6)]
    change = Commit(append=drafts, leaf="n4", turn="t")
    first = session.commit(change)
    later = Commit(append=[message("m", parent="n5")], turn="u")
    second = session.commit(later)
    for hide in (["n4", "n1"], ["n0", "n5"], ["n2", "n3", "m"]):
        session.tombstone(hide)
        clean(store, clock)
        entry = session.entry(1)
        expected = first._replace(replayed=True, manifest=entry.manifest)
        assert session.commit(change) == expected
        expected = second._replace(replayed=True, manifest=session.entry(2).manifest)
        assert session.commit(later) == expected
    assert full(session) == []


# --- who else keeps it ----------------------------------------------------------------------


def test_a_fork_made_before_the_tombstone_keeps_the_node_and_is_reported(
    store: Store, session: Session, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However large the store is, few of its objects are looked at together.
    monkeypatch.setattr(keepers, "_WINDOW", 4)
    monkeypatch.setattr(keepers, "_PAGE", 3)
    grow(session)
    fork, short = store.session("fork"), store.session("short")
    store.fork("alpha", "fork")
    store.fork("alpha", "short", node="n2")
    step(fork, "mine")
    session.tombstone(["n3"])
    before = [exact(fork), exact(short)]
    report = clean(store, clock)
    assert report.objects_kept == 1
    assert report.keepers == (Keeper("session", "fork", 2),)
    assert [exact(fork), exact(short)] == before
    assert b"CANARY" in all_bytes(store)
    # The other session hides it as well: now nobody is left.
    fork.tombstone(["n3"])
    assert clean(store, clock).keepers == ()
    assert b"CANARY" not in all_bytes(store)
    assert path(fork) == ["n0", "n1", "n2", "n4", "n5", "n6", "n7", "mine"]
    check_graphs(store, fork)


def test_vacuum_rewrites_forks_made_after_the_tombstone(
    store: Store, session: Session, clock: ManualClock
) -> None:
    grow(session)
    session.tombstone(["n3"])
    store.fork("alpha", "whole", at=6)
    store.fork("alpha", "path", node="n5")
    before = {name: seen(store.session(name)) for name in ("alpha", "whole", "path")}
    report = clean(store, clock)
    assert [each.session for each in report.sessions] == ["alpha", "path", "whole"]
    assert {name: seen(store.session(name)) for name in before} == before
    assert b"CANARY" not in all_bytes(store)
    for name in before:
        check_graphs(store, store.session(name))
    assert session.node("n5").digest == store.session("path").node("n5").digest  # type: ignore[union-attr]


@pytest.mark.parametrize("hide", ["a", "c", "d", "ab", "bd", "abcd"])
def test_vacuum_rewrites_a_fork_of_a_node(
    store: Store, session: Session, clock: ManualClock, hide: str
) -> None:
    # a → b → c → d → e and a → x → y, in an order that leaves gaps on both paths.
    step(session, "a", "b", message("x", parent="a"), message("c", parent="b"))
    step(session, message("y", parent="x"), message("d", parent="c"), "e")
    fork = store.session("fork")
    store.fork("alpha", "fork", node="d")
    step(fork, "f", turn="t")
    fork.rewind(2)
    step(fork, message("g", parent="b"), message("h", parent="d"), "i")
    store.fork("fork", "again", node="h")
    again = store.session("again")
    step(again, "j", message("k", parent="a"))
    source = exact(session)
    for each in (fork, again):
        each.tombstone(list(hide))
        before = {one.id: seen(one) for one in (fork, again)}
        report = clean(store, clock, sessions=[each.id])
        assert report.sessions[0].outcome is VacuumOutcome.DONE
        # Only a path of the source is theirs: its other branches are nowhere written anew.
        assert report.sessions[0].nodes_rewritten <= 8
        assert {one.id: seen(one) for one in (fork, again)} == before
        check_graphs(store, each)
        step(each, "more", message("even more", parent="h"))
        check_graphs(store, each)
    assert exact(session) == source


def test_pins_and_tags_that_keep_a_hidden_node_are_reported(
    store: Store, session: Session, clock: ManualClock
) -> None:
    turns = grow(session)
    store.tag("release", session.entry(5).manifest)
    store.pin("resume", session.entry(8).manifest, ttl_ms=1000)
    store.pin("elsewhere", session.entry(2).manifest, ttl_ms=1000)
    session.tombstone(["n3"])
    before = seen(session, turns)
    report = clean(store, clock)
    assert report.keepers == (Keeper("pin", "release", 1), Keeper("pin", "resume", 1))
    assert seen(session, turns) == before
    # What is pinned can be read and compared as it was.
    pin = store.find_pin("release")
    assert pin is not None
    assert {node.id for node in store.compare(pin.digest, "alpha").dropped} == {"n3", "n4"}
    clock.now_ms += 1000
    assert clean(store, clock).expired_rows == 2
    store.unpin("release")
    clean(store, clock)
    assert b"CANARY" not in all_bytes(store)


def test_a_pin_renewed_during_vacuum_stays(store: Store, clock: ManualClock) -> None:
    digest = store.put_value("kept")
    store.pin("mine", digest, ttl_ms=10)
    clock.now_ms += 10

    def renew(number: int, write: Write) -> None:
        if number == 1:
            store.pin("mine", digest, ttl_ms=10)

    assert clean(also(store, renew), clock).expired_rows == 0
    assert [pin.name for pin in store.pins()] == ["mine"]


def test_sessions_and_attachments_with_the_same_content_are_reported(
    store: Store, session: Session, clock: ManualClock
) -> None:
    image = session.attachments.put(b"bytes of an image")
    shown = NodeDraft("shown", {"role": "user", "image": Link(cast(Any, image.digest))})
    step(session, "a", message("b", LONG_SECRET), shown, "c")
    step(store.session("other"), message("mine", LONG_SECRET))
    session.tombstone(["b", "shown"])
    report = clean(store, clock)
    assert report.keepers == (Keeper("attachment", "alpha", 1), Keeper("session", "other", 1))
    assert report.objects_kept == 2


def test_the_bytes_of_hidden_nodes_stay_within_the_grace_period(
    store: Store, session: Session, clock: ManualClock
) -> None:
    grow(session)
    session.tombstone(["n3"])
    report = vacuum.vacuum(store, grace_ms=1000)
    assert (report.objects_kept, report.keepers) == (1, ())
    clock.now_ms += 1001
    vacuum.vacuum(store, grace_ms=1000)
    assert b"CANARY" not in all_bytes(store)


# --- beside writers -------------------------------------------------------------------------


class Beside:
    """Stands before an engine; something else happens before each write, or one of them fails."""

    def __init__(self, engine: Engine, before: Callable[[int, Write], object]) -> None:
        assert isinstance(engine, Collecting)
        self._engine = engine
        self._before = before
        self.writes = 0
        # What an engine can do is asked of the object itself, not of its __getattr__.
        self.collection = engine.collection
        self.commits_since_collection = engine.commits_since_collection

    def write(self, write: Write) -> WriteResult:
        self.writes += 1
        self._before(self.writes, write)
        return self._engine.write(write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def also(store: Store, before: Callable[[int, Write], object]) -> Store:
    return Store(cast(Engine, Beside(store.engine, before)), close=lambda: None)


def branches(session: Session) -> dict[str, Commit]:
    """Several forks, branches and turns; ``n3`` holds the secret."""
    turns = grow(session)
    session.rewind(6)
    step(session, message("x", parent="n1"), "y")
    session.commit(Commit(leaf="n5"))
    step(session, "z")
    return turns


def count_writes(store: Store) -> int:
    found = 0

    def count(number: int, write: Write) -> None:
        nonlocal found
        found = number
        if any(change.table == "heads" for change in write.rows):
            raise StorageError("stop here")

    with pytest.raises(StorageError):
        vacuum.rewrite_hidden(also(store, count), "alpha")
    return found


STEPS: dict[str, Callable[[Session], object]] = {
    "commit": lambda session: step(session, "meanwhile", turn="meanwhile"),
    "branch": lambda session: step(session, message("meanwhile", parent="n4")),
    "move": lambda session: session.commit(Commit(leaf="n7")),
    "rewind": lambda session: session.rewind(5),
    "replace": lambda session: session.commit(Commit(replace=[message("r")])),
    "hide": lambda session: session.tombstone(["n4"]),
    "hide the end": lambda session: session.tombstone(["z", "y"]),
    "label": lambda session: session.label("meanwhile", 5),
    "unlabel": lambda session: session.unlabel("label 4"),
    "rename": lambda session: session.rename("another"),
    "enqueue": lambda session: session.queue.enqueue(["work"], batch_id="meanwhile"),
    "lease": lambda session: session.claim_lease("worker", 1000),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_concurrent_change_of_the_session_survives_vacuum(
    store: Store, session: Session, clock: ManualClock, what: str
) -> None:
    turns = branches(session)
    session.commit(Commit(leaf="n5"))
    session.tombstone(["n3"])
    after: dict[str, Any] = {}

    def interrupt(number: int, write: Write) -> None:
        if not after and any(change.table == "heads" for change in write.rows):
            try:
                STEPS[what](session)
            except casstore.errors.UnknownLeafError:
                step(session, "meanwhile")
            after.update(seen(session, turns))

    report = vacuum.rewrite_hidden(also(store, interrupt), "alpha")
    assert report.outcome is VacuumOutcome.DONE
    assert after
    assert seen(session, turns) == after
    check_graphs(store, session)
    clean(store, clock)
    assert seen(session, turns) == after
    assert b"CANARY" not in all_bytes(store)


def test_a_node_hidden_during_vacuum_is_hidden_in_every_revision_at_once(
    store: Store, session: Session
) -> None:
    # Were some revisions rewritten before others, a node hidden between would be hidden in
    # some of them only: it has another digest there.
    branches(session)
    session.tombstone(["n3"])
    for at in range(1, count_writes(store) + 1):
        victim = ["n0", "n4", "n5", "z", "x", "y"][at - 1]

        def interrupt(number: int, write: Write, at: int = at, victim: str = victim) -> None:
            if number == at:
                assert session.tombstone([victim]).hidden == (victim,)
                for entry in session.history():
                    assert victim not in full(session, entry.revision)

        vacuum.rewrite_hidden(also(store, interrupt), "alpha")
        for entry in session.history():
            assert victim not in full(session, entry.revision)
        check_graphs(store, session)
        session.tombstone([next(node for node in full(session) if node != "n5")])


def test_a_failure_at_any_write_leaves_all_as_it_was(
    store: Store, session: Session, clock: ManualClock
) -> None:
    turns = branches(session)
    session.tombstone(["n3"])
    before = seen(session, turns)
    rows = {table: contents_of(store).rows[table] for table in ("heads", "history", "receipts")}
    for at in range(1, count_writes(store) + 1):

        def fail(number: int, write: Write, at: int = at) -> None:
            if number == at:
                raise StorageError("no more room")

        with pytest.raises(StorageError):
            vacuum.rewrite_hidden(also(store, fail), "alpha")
        assert {table: contents_of(store).rows[table] for table in rows} == rows
        assert seen(session, turns) == before
    clean(store, clock)
    assert seen(session, turns) == before
    assert b"CANARY" not in all_bytes(store)


@pytest.mark.parametrize("table", ["history", "receipts"])
def test_rows_that_were_removed_meanwhile_stay_removed(
    store: Store, session: Session, table: str
) -> None:
    grow(session)
    session.tombstone(["n3"])
    key = keys.session_key("alpha")
    place = keys.history(key, 6) if table == "history" else receipt_key(key, "t5").key
    done: list[int] = []

    def interrupt(number: int, write: Write) -> None:
        if not done and any(change.table == "heads" for change in write.rows):
            done.append(number)
            store.engine.write(Write(rows=[DeleteRow(table, place)]))

    assert vacuum.rewrite_hidden(also(store, interrupt), "alpha").outcome is VacuumOutcome.DONE
    assert done
    assert place not in [row.key for row in store.engine.scan_rows(table, limit=10_000)]


def test_vacuum_tolerates_gc_of_the_objects_it_has_prepared(
    store: Store, session: Session, clock: ManualClock
) -> None:
    turns = branches(session)
    session.tombstone(["n3"])
    before = seen(session, turns)
    for at in range(2, count_writes(store) + 1):
        swept: list[int] = []

        def interrupt(number: int, write: Write, at: int = at, swept: list[int] = swept) -> None:
            if number == at:
                clock.now_ms += 1
                swept.append(gc.collect(store, grace_ms=0).objects_swept)

        twin = f"twin {at}"
        store.fork("alpha", twin)
        assert vacuum.rewrite_hidden(also(store, interrupt), twin).outcome is VacuumOutcome.DONE
        assert swept[0] > 0
        assert full(store.session(twin)) == full(session)
        check_graphs(store, store.session(twin))
        store.delete_session(twin)
    assert seen(session, turns) == before


def test_a_session_that_is_deleted_meanwhile_stays_deleted(
    store: Store, session: Session, clock: ManualClock
) -> None:
    grow(session)
    session.tombstone(["n3"])

    def interrupt(number: int, write: Write) -> None:
        if any(change.table == "heads" for change in write.rows):
            store.delete_session("alpha")
            clock.now_ms += 1
            gc.collect(store, grace_ms=0)

    assert vacuum.rewrite_hidden(also(store, interrupt), "alpha").outcome is VacuumOutcome.GONE
    with pytest.raises(SessionDeletedError):
        session.head()
    rows = contents_of(store).rows
    assert not rows["heads"]
    assert not rows["history"]
    assert not rows["receipts"]


def test_a_session_that_keeps_changing_is_reported_and_vacuum_continues_with_the_others(
    store: Store, session: Session, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MAX_ATTEMPTS", 8)
    other = store.session("beta")
    for each in (session, other):
        step(each, "a", "b")
        each.tombstone(["a"])

    def interrupt(number: int, write: Write) -> None:
        if any(change[:2] == ("heads", keys.session_key("alpha")) for change in write.rows):
            step(session, f"n{number}")

    report = clean(also(store, interrupt), clock)
    assert report.outcome is VacuumOutcome.BUSY
    busy, done = report.sessions
    assert (busy.session, busy.outcome) == ("alpha", VacuumOutcome.BUSY)
    assert isinstance(busy.problem, ContendedError)
    assert (done.session, done.outcome) == ("beta", VacuumOutcome.DONE)
    assert "a" not in full(session)
    assert clean(store, clock).sessions[0].outcome is VacuumOutcome.DONE
    check_graphs(store, session)


def test_an_agent_with_a_lease_can_commit_during_vacuum(
    store: Store, session: Session, clock: ManualClock
) -> None:
    lease = hold(session)
    for n in range(20):
        session.commit(Commit(append=[message(f"n{n}")], lease=lease, expected=n))
        if n % 4 == 2:
            session.tombstone([f"n{n - 1}"])
            clean(store, clock)
    assert path(session) == [f"n{n}" for n in range(20) if n % 4 != 1]
    assert full(session, 10) == [f"n{n}" for n in range(10) if n % 4 != 1]
    check_graphs(store, session)


def test_the_slower_of_two_concurrent_vacuums_finds_nothing_to_do(
    store: Store, session: Session, clock: ManualClock
) -> None:
    turns = branches(session)
    session.tombstone(["n3"])
    before = seen(session, turns)

    def interrupt(number: int, write: Write) -> None:
        if any(change.table == "heads" for change in write.rows):
            assert clean(store, clock).outcome is VacuumOutcome.DONE

    # The other was faster: nothing is left to do.
    assert vacuum.rewrite_hidden(also(store, interrupt), "alpha").outcome is VacuumOutcome.NOTHING
    assert seen(session, turns) == before


def test_vacuum_tolerates_another_vacuum_that_removes_what_it_reads(
    store: Store, session: Session, clock: ManualClock
) -> None:
    turns = branches(session)
    session.tombstone(["n3"])
    before = seen(session, turns)

    class Overtaken(Beside):
        def scan_rows(self, table: str, **limits: Any) -> Any:
            rows = store.engine.scan_rows(table, **limits)
            if table == "history":
                # Its rows are read, and everything that they name goes away.
                clean(store, clock)
            return rows

    engine = Overtaken(store.engine, lambda number, write: None)
    overtaken = Store(cast(Engine, engine), close=lambda: None)
    assert vacuum.rewrite_hidden(overtaken, "alpha").outcome is VacuumOutcome.NOTHING
    assert seen(session, turns) == before


def test_agents_commit_correctly_during_repeated_vacuums(store: Store) -> None:
    names = ("alpha", "beta")

    def work(name: str) -> list[str]:
        session = Store(store.engine, close=lambda: None).session(name)
        lease = hold(session)
        left: list[str] = []
        for n in range(30):
            change = Commit(append=[message(f"n{n}"), message(f"m{n}")], lease=lease, turn=f"t{n}")
            assert session.commit(change).revision == n + 1
            left += [f"n{n}", f"m{n}"]
            if n % 5 == 4:
                gone = [left.pop(n), left.pop(1)]
                assert session.tombstone(gone).hidden == tuple(gone)
            assert session.commit(change).replayed
            assert ids(session.nodes(payloads=False)) == left
        return left

    agents = {name: start(partial(work, name)) for name in names}
    while not all(agent.done() for agent in agents.values()):
        report = vacuum.vacuum(store, grace_ms=60_000)
        assert report.outcome in (
            VacuumOutcome.DONE,
            VacuumOutcome.NOTHING,
            VacuumOutcome.BUSY,
            VacuumOutcome.INCOMPLETE,
        )
    vacuum.vacuum(store, grace_ms=60_000)
    for name, agent in agents.items():
        assert path(store.session(name)) == agent.result()
        check_graphs(store, store.session(name))


# --- stopping, and damage -------------------------------------------------------------------


def test_vacuum_can_be_stopped_between_sessions(store: Store, clock: ManualClock) -> None:
    for name in ("one", "two"):
        step(store.session(name), "a", "b")
        store.session(name).tombstone(["a"])
    asked = iter([False, True])
    report = clean(store, clock, stop=lambda: next(asked))
    assert [each.session for each in report.sessions] == ["one"]
    assert (report.outcome, report.collected, report.packed) == (
        VacuumOutcome.INCOMPLETE,
        None,
        None,
    )

    steps: list[Step] = []

    def interrupt(step: Step) -> None:
        steps.append(step)
        if step.phase == "revise":
            raise KeyboardInterrupt

    before = seen(store.session("two"))
    with pytest.raises(KeyboardInterrupt):
        clean(store, clock, progress=interrupt)
    assert seen(store.session("two")) == before
    assert list(vacuum.sessions_with_hidden(store)) == ["two"]
    assert clean(store, clock, progress=steps.append).outcome is VacuumOutcome.DONE
    assert {"rewrite", "revise", "mark"} <= {each.phase for each in steps}


def test_vacuum_skips_a_damaged_session_and_continues_with_the_others(
    store: Store, session: Session, clock: ManualClock
) -> None:
    other = store.session("beta")
    for each in (session, other):
        step(each, "a", "b", message("c", f"of {each.id}"))
        each.tombstone(["a"])
    broken = session.node("c")
    assert broken is not None
    rows = store.engine.scan_rows("heads", stop=b"b")
    store.engine.write(Write(deletes=[broken.digest]))
    report = clean(store, clock)
    assert report.outcome is VacuumOutcome.FAILED
    bad, good = report.sessions
    assert (bad.outcome, type(bad.problem)) == (VacuumOutcome.FAILED, CorruptionError)
    assert good.outcome is VacuumOutcome.DONE
    assert store.engine.scan_rows("heads", stop=b"b") == rows


KILLED = """
import os, signal, sys
import casstore
from casstore.maintenance import vacuum
from casstore.store import Store

class Killed:
    def __init__(self, engine, at, early):
        self.engine, self.left, self.early = engine, at, early

    def write(self, write):
        self.left -= 1
        if not self.left and self.early:
            os.kill(os.getpid(), signal.SIGKILL)
        result = self.engine.write(write)
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def __getattr__(self, name):
        return getattr(self.engine, name)

with casstore.open(sys.argv[1], durability="relaxed") as store:
    killed = Killed(store.engine, int(sys.argv[2]), sys.argv[3] == "early")
    vacuum.rewrite_hidden(Store(killed), "alpha")
"""


def test_a_process_killed_during_vacuum_leaves_a_complete_session(tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    with casstore.open(place, durability="relaxed") as store:
        turns = branches(store.session("alpha"))
        store.session("alpha").tombstone(["n3"])
        before = seen(store.session("alpha"), turns)
        writes = count_writes(store)
    for at, when in [(at, when) for at in range(1, writes + 1) for when in ("early", "late")]:
        command = [sys.executable, "-c", KILLED, place, str(at), when]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
        with casstore.open(place, durability="relaxed") as store:
            assert isinstance(store.engine, LmdbEngine)
            store.engine.verify()
            session = store.session("alpha")
            assert seen(session, turns) == before
            last = (at, when) == (writes, "late")
            assert (list(vacuum.sessions_with_hidden(store)) == []) == last
    with casstore.open(place, durability="relaxed") as store:
        report = vacuum.vacuum(store, grace_ms=0)
        assert report.outcome is VacuumOutcome.DONE
        session = store.session("alpha")
        assert seen(session, turns) == before
        check_graphs(store, session)
        assert b"CANARY" not in all_bytes(store)
        assert isinstance(store.engine, LmdbEngine)
        store.engine.verify()
