"""Sessions under many hands: processes that start together on one store, and one that is killed.

Every worker opens the store, says that it is ready and waits for the word; so they start
together, and what happens then is up to them. Nothing is timed: who hangs is found out by
a timeout far beyond what any machine needs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import TABLES
from casstore.errors import CasstoreError, LeaseHeldError, SessionDeletedError
from casstore.session.data import Batch, Commit, Lease, NodeDraft, Usage
from casstore.session.keys import session_key
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing import ManualClock

PATIENCE_S = 120.0
PROCESSES = 6
HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000
# One that does not fit into a row key, so that its rows are found by a hash.
NAME = "alpha/é" + "x" * 300

Task = Callable[[Store, int, Any], Any]


class Refused(NamedTuple):
    """The error that a worker ran into."""

    kind: str
    facts: dict[str, Any]


# --- workers ------------------------------------------------------------------------------


def _work(place: str, number: int, pipe: Connection) -> None:
    """Wait for tasks and do them; runs in a process of its own."""
    clock = ManualClock(START_MS)
    engine = LmdbEngine(place, durability="relaxed", clock=clock)
    with Store(engine) as store:
        pipe.send("ready")
        while True:
            try:
                task, now_ms, given = pipe.recv()
            except EOFError:
                return
            clock.now_ms = now_ms
            pipe.send("ready")
            pipe.recv()
            try:
                answer = task(store, number, given)
            except CasstoreError as error:
                answer = Refused(type(error).__name__, vars(error))
            pipe.send(answer)


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "a worker does not answer"
    return pipe.recv()


class Workers:
    """Processes that hold one store open and do the same at the same time."""

    def __init__(self, place: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(place, number, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            assert _receive(pipe) == "ready"

    def race(self, task: Task, given: Any = None, *, now_ms: int = START_MS) -> list[Any]:
        """Let all do this at once; their answers."""
        self.hand_out([task] * PROCESSES, given, now_ms)
        return self.go()

    def hand_out(self, tasks: list[Task], given: Any, now_ms: int = START_MS) -> None:
        """Give each its task; all wait for the word."""
        for pipe, task in zip(self.pipes, tasks, strict=True):
            pipe.send((task, now_ms, given))
        for pipe in self.pipes:
            assert _receive(pipe) == "ready"

    def go(self) -> list[Any]:
        """The word; then the answers."""
        for pipe in self.pipes:
            pipe.send("go")
        return [_receive(pipe) for pipe in self.pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("races") / "store")


@pytest.fixture(scope="module")
def workers(place: str) -> Iterator[Workers]:
    # The store is made first, by one.
    LmdbEngine(place, durability="relaxed").close()
    found = Workers(place)
    yield found
    found.close()


@pytest.fixture
def store(place: str) -> Iterator[Store]:
    engine = LmdbEngine(place, durability="relaxed", clock=ManualClock(START_MS))
    with Store(engine) as opened:
        yield opened


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A session of its own for each test."""
    return f"{NAME} {request.node.name}"


def winners(answers: list[Any]) -> list[Any]:
    return [answer for answer in answers if not isinstance(answer, Refused)]


def losers(answers: list[Any]) -> list[Refused]:
    return [answer for answer in answers if isinstance(answer, Refused)]


def ids(session: Session) -> list[str]:
    return [node.id for node in session.nodes("full")]


def rows_of(store: Store, session: str) -> set[str]:
    """The tables in which there is a row of a session."""
    key = session_key(session)
    found: set[str] = set()
    for table in TABLES:
        start = b""
        while page := store.engine.scan_rows(table, start=start, limit=500):
            if any(row.key.startswith(key) for row in page):
                found.add(table)
            start = page[-1].key + b"\0"
    return found


# --- tasks; they run in the workers ---------------------------------------------------------


def _commit_first(store: Store, number: int, name: str) -> int:
    change = Commit(append=[NodeDraft(f"n{number}", number)], expected=0)
    return store.session(name).commit(change).revision


def _claim_lease(store: Store, number: int, name: str) -> Lease | None:
    return store.session(name).claim_lease(f"worker {number}", HOUR_MS)


def _claim_both(store: Store, number: int, name: str) -> tuple[Lease | None, list[str]]:
    """Take the lease and, with it, work; give the lease back and try again for more."""
    session = store.session(name)
    lease = session.claim_lease(f"worker {number}", HOUR_MS)
    claim = None if lease is None else session.queue.claim(lease)
    return lease, [] if claim is None else [batch.id for batch in claim.batches]


def _work_through_queue(store: Store, number: int, name: str) -> list[str]:
    """Lease, claim, complete with a commit that gives the lease back, until nothing is left."""
    session = store.session(name)
    done: list[str] = []
    while session.queue.batches():
        lease = session.claim_lease(f"worker {number}", HOUR_MS)
        if lease is None:
            continue
        claim = session.queue.claim(lease)
        if claim is None:
            session.release_lease(lease)
            continue
        [batch] = claim.batches
        change = Commit(
            append=[NodeDraft(f"did {batch.id}", number)],
            lease=lease,
            completes=[claim],
            release=True,
        )
        session.commit(change)
        done.append(batch.id)
    return done


def _append_many(store: Store, number: int, given: tuple[str, int, Any]) -> list[int]:
    name, count, lease = given
    return [
        store.session(name)
        .commit(
            Commit(
                append=[NodeDraft(f"{number}.{at}", {"role": "user", "text": f"{at} " * 300})],
                lease=lease,
                usage=[Usage("main", "large", 1)],
                turn=f"turn {number}.{at}",
            )
        )
        .revision
        for at in range(count)
    ]


def _commit_turn(store: Store, number: int, name: str) -> tuple[int, bytes, tuple[str, ...], bool]:
    change = Commit(append=[NodeDraft(f"n{number}", "the same")], turn="turn")
    result = store.session(name).commit(change)
    return result.revision, bytes(result.manifest), result.nodes, result.replayed


def _enqueue(store: Store, number: int, name: str) -> Batch:
    return store.session(name).queue.enqueue([{"from": number}], source_key="key")


def _fork(store: Store, number: int, name: str) -> int:
    return store.fork(f"{name} source {number}", f"{name} target").revision


def _commit_until_deleted(store: Store, number: int, name: str) -> tuple[int, str]:
    """Do all that leaves rows, until it is refused."""
    session = store.session(name)
    at = 0
    while True:
        at += 1
        mark = f"{number}.{at}"
        try:
            session.queue.enqueue([mark], source_key=f"source {mark}")
            session.attachments.intend(f"file {mark}")
            session.commit(Commit(append=[NodeDraft(mark, mark)], turn=mark, label=mark))
            session.label(f"again {mark}", 1)
            lease = session.claim_lease("worker", 1)
            if lease is not None:
                session.release_lease(lease)
        except LeaseHeldError:
            continue  # another worker holds the lease just now
        except CasstoreError as error:
            return at, type(error).__name__


def _delete(store: Store, number: int, name: str) -> bool:
    session = store.session(name)
    # There must be something to take away, and others at work on it.
    head = session.wait(5, timeout_s=PATIENCE_S)
    assert head is not None
    return store.delete_session(name)


# --- the races ------------------------------------------------------------------------------


def test_of_first_commits_that_race_exactly_one_wins(
    workers: Workers, store: Store, name: str
) -> None:
    for round_number in range(30):
        session = store.session(f"{name} {round_number}")
        answers = workers.race(_commit_first, session.id)
        assert winners(answers) == [1]
        refused = Refused("HeadConflictError", {"session": session.id, "expected": 0, "actual": 1})
        assert losers(answers) == [refused] * (PROCESSES - 1)
        head = session.head()
        assert head is not None
        assert (head.revision, head.node_count) == (1, 1)
        assert ids(session) == [f"n{answers.index(1)}"]


def test_one_of_many_racing_processes_gets_the_lease_and_fencing_numbers_are_unique(
    workers: Workers, store: Store, name: str
) -> None:
    fencing: list[int] = []
    tokens: set[bytes] = set()
    now_ms = START_MS
    for round_number in range(12):
        answers = workers.race(_claim_lease, name, now_ms=now_ms)
        [lease] = [answer for answer in answers if answer is not None]
        assert lease.claimed_at_ms == now_ms
        fencing.append(lease.fencing)
        tokens.add(lease.token)
        # While it is held nobody else gets it, at the last moment neither.
        assert workers.race(_claim_lease, name, now_ms=lease.expires_at_ms - 1) == (
            [None] * PROCESSES
        )
        if round_number % 3 == 0:
            assert store.session(name).release_lease(lease)
        else:
            now_ms = lease.expires_at_ms
    assert fencing == list(range(1, 13))
    assert len(tokens) == 12


def test_of_processes_that_race_for_lease_and_work_one_gets_both(
    workers: Workers, store: Store, name: str
) -> None:
    session = store.session(name)
    batches = [session.queue.enqueue([at]).id for at in range(3)]
    for round_number in range(3):
        now_ms = START_MS + round_number * HOUR_MS
        answers = workers.race(_claim_both, name, now_ms=now_ms)
        [(lease, claimed)] = [answer for answer in answers if answer[0] is not None]
        # What was claimed under the lease before is free again, and first in line.
        assert (lease.fencing, claimed) == (round_number + 1, batches[:1])
        assert all(answer == (None, []) for answer in answers if answer[0] is None)
    [first, *others] = session.queue.batches()
    assert (first.fence, first.held_by) == (3, 3)
    assert all((batch.fence, batch.held_by) == (0, 0) for batch in others)


def test_work_that_many_processes_take_is_done_once_each_and_in_order(
    workers: Workers, store: Store, name: str
) -> None:
    session = store.session(name)
    batches = [session.queue.enqueue([at], batch_id=f"batch {at}").id for at in range(60)]
    answers = workers.race(_work_through_queue, name)
    assert losers(answers) == []
    assert sorted(done for answer in answers for done in answer) == sorted(batches)
    assert ids(session) == [f"did {batch}" for batch in batches]
    assert session.queue.batches() == []


def test_of_threads_that_claim_under_one_lease_each_gets_other_work(
    store: Store, name: str
) -> None:
    session = store.session(name)
    batches = [session.queue.enqueue([at], batch_id=f"batch {at:02}").id for at in range(40)]
    lease = session.claim_lease("holder", HOUR_MS)
    assert lease is not None
    start = threading.Barrier(4)

    def take_all(_: int) -> list[str]:
        taken: list[str] = []
        start.wait(PATIENCE_S)
        while (claim := session.queue.claim(lease)) is not None:
            session.queue.verify(claim)
            taken += [batch.id for batch in claim.batches]
        return taken

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(take_all, range(4)))
    assert sorted(batch for taken in answers for batch in taken) == batches
    assert session.queue.pending() == []
    assert {(batch.fence, batch.held_by) for batch in session.queue.batches()} == {(1, 1)}


@pytest.mark.parametrize("fenced", [False, True])
def test_commits_of_many_processes_without_an_expected_revision_all_succeed(
    workers: Workers, store: Store, name: str, fenced: bool
) -> None:
    count = 25
    # Under one lease they go on from what they saw last, without reading first.
    lease = store.session(name).claim_lease("all", HOUR_MS) if fenced else None
    answers = workers.race(_append_many, (name, count, lease))
    assert losers(answers) == []
    total = PROCESSES * count
    assert sorted(revision for answer in answers for revision in answer) == list(
        range(1, total + 1)
    )
    assert all(answer == sorted(answer) for answer in answers)
    session = store.session(name)
    by_revision = {
        revision: f"{number}.{at}"
        for number, answer in enumerate(answers)
        for at, revision in enumerate(answer)
    }
    # Each hung its node on what was the leaf when it got in.
    assert [node.id for node in session.nodes()] == [by_revision[n] for n in sorted(by_revision)]
    assert ids(session) == [node.id for node in session.nodes()]
    entries = list(session.history())
    assert [entry.revision for entry in entries] == list(range(total, 0, -1))
    assert [entry.turn for entry in entries] == [
        f"turn {by_revision[entry.revision]}" for entry in entries
    ]
    assert session.usage() == (Usage("main", "large", total),)
    for revision in (1, total // 2, total):
        assert len(session.nodes(at=revision)) == revision


def test_a_turn_that_many_processes_commit_is_applied_once(
    workers: Workers, store: Store, name: str
) -> None:
    for round_number in range(30):
        session = store.session(f"{name} {round_number}")
        answers = workers.race(_commit_turn, session.id)
        assert losers(answers) == []
        assert len({answer[:3] for answer in answers}) == 1
        assert [answer[3] for answer in answers].count(False) == 1
        assert answers[0][0] == 1
        assert ids(session) == list(answers[0][2])
        assert len(list(session.history())) == 1


def test_work_that_many_processes_queue_under_one_source_key_is_one_batch(
    workers: Workers, store: Store, name: str
) -> None:
    for round_number in range(30):
        session = store.session(f"{name} {round_number}")
        answers = workers.race(_enqueue, session.id)
        assert losers(answers) == []
        [batch] = session.queue.batches()
        assert answers == [batch] * PROCESSES
        assert batch.seq == 1


def test_of_forks_to_one_target_exactly_one_wins(workers: Workers, store: Store, name: str) -> None:
    for round_number in range(20):
        base = f"{name} {round_number}"
        for number in range(PROCESSES):
            draft = NodeDraft(f"of {number}", number)
            store.session(f"{base} source {number}").commit(Commit(append=[draft]))
        answers = workers.race(_fork, base)
        target = f"{base} target"
        assert winners(answers) == [1]
        assert losers(answers) == [Refused("SessionExistsError", {"session": target})] * (
            PROCESSES - 1
        )
        assert ids(store.session(target)) == [f"of {answers.index(1)}"]
        head = store.session(target).head()
        assert head is not None
        assert head.origin is not None
        assert head.origin.session == f"{base} source {answers.index(1)}"


def test_a_session_deleted_during_commits_of_other_processes_leaves_only_its_tombstone(
    workers: Workers, store: Store, name: str
) -> None:
    for round_number in range(10):
        session = store.session(f"{name} {round_number}")
        tasks: list[Task] = [_commit_until_deleted] * PROCESSES
        tasks[0] = _delete
        workers.hand_out(tasks, session.id)
        deleted, *others = workers.go()
        assert deleted is True
        assert {kind for _, kind in others} == {"SessionDeletedError"}
        assert rows_of(store, session.id) == {"tombstones"}
        for call in (session.head, session.load, session.queue.batches, session.attachments.list):
            with pytest.raises(SessionDeletedError):
                call()
        with pytest.raises(SessionDeletedError):
            session.commit(Commit(append=[NodeDraft("n", 1)]))
        assert session.id not in {info.meta.session for info in store.sessions()}


# --- a process that is killed -----------------------------------------------------------------

VICTIM = """
import itertools, sys
sys.path.append(sys.argv[1])
import casstore
from casstore.session.data import *
with casstore.open(sys.argv[2], "relaxed") as store:
    session = store.session("victim")
    lease = session.claim_lease("victim", 3_600_000)
    for at in itertools.count(1):
        nodes = [NodeDraft(f"{at}.{n}", {"role": "user", "text": f"{at} " * 400}) for n in "ab"]
        checkpoint = Checkpoint(turn_state={"turn": at}, tool_state={"tool": [at] * 200})
        done = session.commit(
            Commit(
                append=nodes, lease=lease, turn=f"turn {at}", checkpoint=checkpoint, expected=at - 1
            )
        )
        print(done.revision, flush=True)
"""


def kill_after(place: Path, commits: int) -> int:
    """Let a process commit, kill it when it has reported so many; how many it reported."""
    root = str(Path(casstore.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, root, str(place)], stdout=subprocess.PIPE, bufsize=0
    )
    try:
        assert process.stdout is not None
        heard = b""
        while heard.count(b"\n") < commits:
            more = process.stdout.read(4096)
            assert more, "it died by itself"
            heard += more
        os.kill(process.pid, signal.SIGKILL)
        while more := process.stdout.read(4096):
            heard += more
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()
    return heard.count(b"\n")


@pytest.mark.parametrize("commits", [1, 2, 7, 20, 40, 100])
def test_a_process_killed_between_commits_leaves_only_complete_commits(
    tmp_path: Path, commits: int
) -> None:
    place = tmp_path / "store"
    acknowledged = kill_after(place, commits)
    with casstore.open(place, "relaxed") as store:
        session = store.session("victim")
        state = session.load()
        assert state is not None
        last = state.head.revision
        assert acknowledged <= last <= acknowledged + 1
        expected = [f"{at}.{n}" for at in range(1, last + 1) for n in "ab"]
        assert [node.id for node in state.nodes] == ids(session) == expected
        assert [node.parent for node in state.nodes] == [None, *expected[:-1]]
        assert state.checkpoint.turn_state == {"turn": last}
        assert state.checkpoint.tool_state == {"tool": [last] * 200}
        assert [entry.revision for entry in session.history()] == list(range(last, 0, -1))
        # The dead process holds its lease until its time is up; what it did can be replayed.
        assert session.claim_lease("successor", HOUR_MS) is None
        again = Commit(
            append=[NodeDraft(n, {"role": "user", "text": f"{last} " * 400}) for n in "xy"],
            checkpoint=state.checkpoint._replace(frames=()),
            turn=f"turn {last}",
        )
        result = session.commit(again)
        assert (result.revision, result.replayed) == (last, True)
        assert result.nodes == tuple(expected[-2:])
        head = session.head()
        assert head is not None
        assert head.revision == last
