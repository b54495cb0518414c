"""Writers that wait together share a transaction, and each gets its own answer."""

from __future__ import annotations

import _thread
import asyncio
import gc
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore import Commit, NodeDraft, aio
from casstore.engine.lmdb import batches, environment, log, memtable, recent
from casstore.engine.lmdb.batches import MAX_BATCH, CommitQueue, TicketBatch, WriteBatch
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, RowIs, RowKey, Write
from casstore.errors import CasstoreError, ConditionFailedError
from casstore.testing.engine_fixtures import all_objects, assert_reads_back, new_blob, new_parent
from tests.faults.interrupts import Interrupt

# Long enough for any machine, short enough that a deadlock ends as a failure.
TIMEOUT_S = 60.0

IntBatch = TicketBatch[int, int]


class Refused(CasstoreError):
    """An answer of a fake run."""


def works(batch: IntBatch) -> list[int]:
    return [ticket.work for ticket in batch.tickets]


def answer(batch: IntBatch) -> None:
    """Twice the work; odd thousands are refused."""
    batch.answers = [
        Refused(str(work)) if work % 1000 == 999 else 2 * work for work in works(batch)
    ]


class Threads:
    """Threads whose end is awaited, and whose failures are seen."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as exc:
                self.errors.append(exc)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a writer waits for ever"


def waiting(queue: CommitQueue[Any, Any]) -> int:
    with queue._lock:
        return len(queue._waiting)


def wait_until(happened: Callable[[], bool]) -> None:
    """Poll until it is true: nothing signals the moment at which a writer is queued."""
    for _ in range(100_000):
        if happened():
            return
        threading.Event().wait(0.0005)
    raise AssertionError("it never happened")


def wait_for_writers(queue: CommitQueue[Any, Any], number: int) -> None:
    """Wait until this number of writers is queued."""
    wait_until(lambda: waiting(queue) >= number)


class Held:
    """A run whose first batch is held until it is let go, so that others queue up behind it."""

    def __init__(
        self,
        first: Callable[[IntBatch], None] = answer,
        then: Callable[[IntBatch], None] = answer,
    ) -> None:
        self.batches: list[list[int]] = []
        self._then = then
        self.entered, self.go = threading.Event(), threading.Event()
        self._first: Callable[[IntBatch], None] | None = first

    def __call__(self, batch: IntBatch) -> None:
        self.batches.append(works(batch))
        if self._first is not None:
            first, self._first = self._first, None
            self.entered.set()
            assert self.go.wait(TIMEOUT_S)
            first(batch)
            return
        self._then(batch)


def try_every_step(attempt: Callable[[int], bool], *, stride: int = 1) -> int:
    """Try the steps 0, 1, 2, … until there is no such step; how many there were."""
    for step in range(0, 100_000, stride):
        if not attempt(step):
            return step
    raise AssertionError("it has no end")


def queue_up(queue: CommitQueue[int, int], held: Held, works: range, threads: Threads) -> list[Any]:
    """Start a leader that is held and followers behind it; the list that gets their answers."""
    answers: list[Any] = []

    def submit(work: int) -> None:
        try:
            answers.append((work, queue.submit(work)))
        except (Refused, KeyboardInterrupt) as exc:
            answers.append((work, type(exc)))

    threads.start(lambda: submit(works[0]))
    assert held.entered.wait(TIMEOUT_S)
    for number, work in enumerate(works[1:], 2):
        threads.start(lambda work=work: submit(work))  # type: ignore[misc]
        wait_for_writers(queue, number)
    return answers


# --- the queue alone ------------------------------------------------------------------------


def test_a_single_caller_runs_each_work_in_its_own_batch() -> None:
    seen: list[list[int]] = []

    def run(batch: IntBatch) -> None:
        seen.append(works(batch))
        answer(batch)

    queue: CommitQueue[int, int] = CommitQueue(run)
    assert [queue.submit(work) for work in range(3)] == [0, 2, 4]
    with pytest.raises(Refused, match="999"):
        queue.submit(999)
    assert queue.submit(5) == 10
    assert seen == [[0], [1], [2], [999], [5]]
    assert waiting(queue) == 0


def test_writers_that_wait_together_share_a_batch_and_get_their_own_results() -> None:
    held, threads = Held(), Threads()
    queue: CommitQueue[int, int] = CommitQueue(held)
    answers = queue_up(queue, held, range(990, 1010), threads)
    held.go.set()
    threads.join()
    assert held.batches == [[990], list(range(991, 1010))]
    assert sorted(answers, key=lambda pair: int(pair[0])) == [
        (work, Refused if work == 999 else 2 * work) for work in range(990, 1010)
    ]


def test_a_batch_holds_at_most_max_batch_writes() -> None:
    held, threads = Held(), Threads()
    queue: CommitQueue[int, int] = CommitQueue(held)
    answers = queue_up(queue, held, range(2 * MAX_BATCH + 10), threads)
    held.go.set()
    threads.join()
    assert [len(batch) for batch in held.batches] == [1, MAX_BATCH, MAX_BATCH, 9]
    assert len(answers) == 2 * MAX_BATCH + 10


class CountingLead:
    """A lead that counts the writers that had to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waited = 0

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waited += 1
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_only_the_next_leader_takes_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that blocks on the lead is answered by the batch before, and wakes a batch later."""
    monkeypatch.setattr(batches, "_RECHECK_S", TIMEOUT_S)

    def run(batch: IntBatch) -> None:
        # As a flush does, this lets the other threads run.
        time.sleep(0.0002)
        answer(batch)

    queue: CommitQueue[int, int] = CommitQueue(run)
    lead = CountingLead()
    queue._lead = lead  # type: ignore[assignment]
    threads = Threads()
    for first in range(0, 800, 100):

        def submit(first: int = first) -> None:
            for work in range(first, first + 100):
                assert queue.submit(work) == 2 * work

        threads.start(submit)
    threads.join()
    assert not threads.errors
    assert lead.waited == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, Refused])
def test_a_leader_whose_run_raises_leaves_the_others_alive_and_served(
    error: type[BaseException],
) -> None:
    def fail(batch: IntBatch) -> None:
        raise error

    held, threads = Held(fail), Threads()
    queue: CommitQueue[int, int] = CommitQueue(held)
    leader_error: list[type[BaseException]] = []

    def lead() -> None:
        try:
            queue.submit(0)
        except BaseException as exc:
            leader_error.append(type(exc))

    threads.start(lead)
    assert held.entered.wait(TIMEOUT_S)
    second = Held()
    second.entered.set()
    answers = queue_up(queue, second, range(1, 2), threads)
    wait_for_writers(queue, 2)
    held.go.set()
    threads.join()
    assert leader_error == [error]
    assert answers == [(1, 2)]
    assert queue.submit(7) == 14
    assert waiting(queue) == 0


def test_an_interrupted_leader_leaves_its_batch_queued_for_the_next_leader() -> None:
    """Its whole batch stays queued: the next leader runs it, once."""
    calls: list[list[int]] = []
    held = Held()

    def run(batch: IntBatch) -> None:
        calls.append(works(batch))
        if len(calls) == 1:
            held(batch)
        elif len(calls) == 2:
            raise KeyboardInterrupt
        else:
            answer(batch)

    queue: CommitQueue[int, int] = CommitQueue(run)
    threads = Threads()
    answers = queue_up(queue, held, range(6), threads)
    held.go.set()
    threads.join()
    assert calls == [[0], [1, 2, 3, 4, 5], [2, 3, 4, 5]]
    assert sorted(answers, key=lambda pair: int(pair[0])) == [
        (0, 0), (1, KeyboardInterrupt), *[(work, 2 * work) for work in range(2, 6)],
    ]  # fmt: skip


class Objects:
    """Stands for a write, which may hold megabytes."""


def test_the_work_of_a_batch_is_freed_without_a_cyclic_collection() -> None:
    """Each 4 MiB of a stream is a write: uncollected ones took 40 MiB more."""

    def answer_all(batch: TicketBatch[Objects, None]) -> None:
        batch.answers = [None] * len(batch.tickets)

    queue: CommitQueue[Objects, None] = CommitQueue(answer_all)
    work = Objects()
    held = weakref.ref(work)
    gc.disable()
    try:
        queue.submit(work)
        del work
        assert held() is None
    finally:
        gc.enable()


def interrupt_the_leader(step: int, followers: int) -> bool:
    """Interrupt a leader at a place of the queue's code; False if there is no such place."""
    ran: list[int] = []
    interrupt = Interrupt(step, batches)

    def run(batch: IntBatch) -> None:
        ran.extend(works(batch))
        answer(batch)

    def first(batch: IntBatch) -> None:
        interrupt.arm()
        run(batch)

    held, threads = Held(first, then=run), Threads()
    queue: CommitQueue[int, int] = CommitQueue(held)
    answers = queue_up(queue, held, range(1 + followers), threads)
    held.go.set()
    threads.join()
    assert queue.submit(7) == 14
    assert not threads.errors
    expected = [(work, 2 * work) for work in range(1, 1 + followers)]
    assert sorted(pair for pair in answers if pair[0]) == expected
    assert sorted(ran) == [*range(1 + followers), 7]
    assert waiting(queue) == 0
    assert not interrupt.came or (0, KeyboardInterrupt) in answers
    return bool(interrupt.came)


@pytest.mark.parametrize("followers", [0, 1, 3])
def test_a_leader_interrupted_anywhere_leaves_no_other_writer_waiting(followers: int) -> None:
    """Whether its batch was run or not: every other work runs once, and the queue goes on."""
    assert try_every_step(lambda step: interrupt_the_leader(step, followers)) > 4


def interrupt_a_follower(step: int) -> bool:
    interrupt = Interrupt(step, batches)
    held, threads = Held(), Threads()
    queue: CommitQueue[int, int] = CommitQueue(held)
    answers: dict[int, Any] = {}

    def submit(work: int) -> None:
        if work == 1:
            interrupt.arm()
        try:
            answers[work] = queue.submit(work)
        except KeyboardInterrupt:
            answers[work] = KeyboardInterrupt

    threads.start(lambda: submit(0))
    assert held.entered.wait(TIMEOUT_S)
    threads.start(lambda: submit(1))
    wait_until(lambda: waiting(queue) > 1 or 1 in answers)
    for work in range(2, 5):
        threads.start(lambda work=work: submit(work))  # type: ignore[misc]
    held.go.set()
    threads.join()
    assert not threads.errors
    assert answers == {0: 0, 1: KeyboardInterrupt if interrupt.came else 2, 2: 4, 3: 6, 4: 8}
    # Interrupted while it leaves, it may leave finished tickets to the next writer.
    assert queue.submit(7) == 14
    assert waiting(queue) == 0
    return bool(interrupt.came)


def test_a_follower_interrupted_anywhere_does_not_stall_the_queue() -> None:
    """A follower is interrupted as it queues up, asleep, woken, or as it becomes the leader."""
    assert try_every_step(interrupt_a_follower) > 4


def test_sixteen_threads_and_random_failures_never_hang_and_run_each_work_once() -> None:
    source, done = random.Random(1), Counter[int]()
    interrupts = 0

    def run(batch: IntBatch) -> None:
        nonlocal interrupts
        assert 1 <= len(batch.tickets) <= MAX_BATCH
        if source.random() < 0.05:
            interrupts += 1
            raise KeyboardInterrupt
        answers: list[int | CasstoreError] = []
        for ticket in batch.tickets:
            assert ticket.batch is batch
            if source.random() < 0.1:
                answers.append(Refused(str(ticket.work)))
            else:
                done[ticket.work] += 1
                answers.append(2 * ticket.work)
        batch.answers = answers

    queue: CommitQueue[int, int] = CommitQueue(run)
    outcomes: list[tuple[int, Any]] = []

    def work(thread: int) -> None:
        for n in range(200):
            number = 1 + thread * 200 + n
            try:
                outcomes.append((number, queue.submit(number)))
            except (Refused, KeyboardInterrupt) as exc:
                outcomes.append((number, type(exc)))

    threads = Threads()
    for thread in range(16):
        threads.start(lambda thread=thread: work(thread))  # type: ignore[misc]
    threads.join()
    assert threads.errors == []
    assert len(outcomes) == 3_200
    for number, outcome in outcomes:
        assert done[number] == (1 if outcome == 2 * number else 0)
    assert sum(outcome is KeyboardInterrupt for _, outcome in outcomes) == interrupts > 0
    assert waiting(queue) == 0


# --- on the engine --------------------------------------------------------------------------

COUNTER = RowKey("heads", b"counter")


def increment(engine: LmdbEngine) -> int:
    """Add one to the counter, whatever others do meanwhile; the value that it got."""
    while True:
        [old] = engine.get_rows([COUNTER])
        new = int(old or b"0") + 1
        try:
            engine.write(
                Write(
                    conditions=[RowIs(*COUNTER, old)],
                    rows=[PutRow(*COUNTER, b"%d" % new), PutRow("history", b"%08d" % new, b"x")],
                    objects=[new_blob(b"object %d" % new)],
                )
            )
            return new
        except ConditionFailedError:
            continue


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Others have callbacks in Python's collector, and an interrupt that hits one is swallowed."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_a_main_thread_interrupted_at_any_moment_loses_no_acknowledged_write(
    tmp_path: Path,
) -> None:
    """Ctrl-C hits the main thread asleep, leading, or in the middle of a commit.

    A write that was committed must be answered so, also to those who only shared the
    leader's batch: told that its condition failed, a writer would do its work twice.
    """
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    source = random.Random(1)
    engine = LmdbEngine(str(tmp_path / "s"), durability="full")
    acknowledged: list[int] = []
    interrupted = 0
    for _ in range(20):
        threads, stop = Threads(), threading.Event()

        def work(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                acknowledged.append(increment(engine))

        for _ in range(8):
            threads.start(work)
        moment = source.uniform(0, 0.02)
        timer = threading.Timer(moment, _thread.interrupt_main)
        try:
            timer.start()
            while True:
                acknowledged.append(increment(engine))
        except KeyboardInterrupt:
            interrupted += 1
        stop.set()
        timer.join()
        threads.join()
        assert threads.errors == []
    [row] = engine.get_rows([COUNTER])
    count = int(row or b"0")
    history = {int(key) for key, _ in engine.scan_rows("history", limit=1_000_000)}
    assert len(set(acknowledged)) == len(acknowledged), "one number given to two writers"
    assert set(acknowledged) <= history == set(range(1, count + 1))
    # Only the interrupted call of each round may have been committed unanswered.
    assert interrupted == 20
    assert len(acknowledged) <= count <= len(acknowledged) + interrupted
    assert_reads_back(engine, *[new_blob(b"object %d" % number) for number in acknowledged])
    engine.close()


def interrupt_a_commit(engine: LmdbEngine, step: int, again: int | None) -> bool:
    """Interrupt the leader of a batch of three inside the engine; False if it ends before.

    The condition of each write holds once: a write that ran twice fails the second time.
    """
    run = engine._batches.run
    entered, go = threading.Event(), threading.Event()
    interrupt = Interrupt(step, batches, recent, log, environment, memtable, again=again)
    applied: list[log.Position] = []

    def held(batch: Any) -> None:
        if not entered.is_set():
            entered.set()
            assert go.wait(TIMEOUT_S)
        elif len(batch.tickets) == 3 and not interrupt.came:
            if not applied:
                # The background thread has applied the commits so far, and drops them from the
                # memtable only after the batch.
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(engine._env.recent, "_forget", applied.append)
                    engine._env.recent.apply_concurrently()
            interrupt.arm()
        run(batch)

    engine._queue._run = held
    outcomes: dict[int, Any] = {}

    def write(number: int) -> None:
        key = b"%d of %d" % (number, step)
        objects = [new_blob(key), new_blob(b"shared in %d" % step)]
        objects.append(new_parent(*objects))
        rows = [PutRow("heads", key, objects[-1].digest)]
        try:
            engine.write(Write(objects, [RowIs("heads", key, None)], rows))
            outcomes[number] = "written"
        except (CasstoreError, KeyboardInterrupt) as exc:
            outcomes[number] = type(exc)

    threads = Threads()
    threads.start(lambda: write(0))
    assert entered.wait(TIMEOUT_S)
    for number in range(1, 4):
        threads.start(lambda number=number: write(number))  # type: ignore[misc]
        wait_for_writers(engine._queue, number + 1)
    go.set()
    threads.join()
    assert threads.errors == []
    for position in applied:
        engine._env.recent._forget(position)
    write(4)
    # Mostly the first of them leads; on a busy machine another one may find the lead free.
    interrupted = [number for number in (1, 2, 3) if outcomes[number] is KeyboardInterrupt]
    assert len(interrupted) == bool(interrupt.came)
    rest = [number for number in range(5) if number not in interrupted]
    assert [outcomes[number] for number in rest] == ["written"] * len(rest)
    there = engine.get_rows([RowKey("heads", b"%d of %d" % (number, step)) for number in rest])
    assert None not in there
    return bool(interrupt.came)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    yield engine
    assert engine.verify() == len(all_objects(engine))
    engine.close()


@pytest.mark.usefixtures("_no_collector")
def test_a_leader_interrupted_anywhere_in_the_engine_answers_its_batch_once(
    engine: LmdbEngine,
) -> None:
    """A commit takes most of the time, so that is when Ctrl-C comes.

    The signal is handled when the commit returns, before any writer is answered. The next
    leader ran the batch a second time, and acknowledged appends were stored twice.
    """
    assert try_every_step(lambda step: interrupt_a_commit(engine, step, None)) > 100


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("again", [0, 1, 2, 5])
def test_a_leader_interrupted_twice_answers_its_batch_once(engine: LmdbEngine, again: int) -> None:
    """The second interrupt hits what the first one left to do."""
    try_every_step(lambda step: interrupt_a_commit(engine, step, again), stride=7)


def interpose(engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch, meanwhile: Write) -> None:
    """Let another process write once, just before a batch of ours takes the log's lock."""
    commit = engine._batches.commit
    pending = [meanwhile]

    def committing(batch: WriteBatch) -> None:
        if pending:
            in_another_process(engine.path, pending.pop())
        commit(batch)

    monkeypatch.setattr(engine._batches, "commit", committing)


def in_another_process(path: str, write: Write) -> None:
    code = (
        "import sys; from casstore.engine.lmdb.engine import LmdbEngine\n"
        "from casstore.engine.protocol import NewObject, Write\n"
        f"engine = LmdbEngine({path!r}, durability='relaxed')\n"
        f"engine.write({write!r}); engine.close()"
    )
    root = str(Path(__file__).parents[3])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": root})


def test_an_object_collected_after_it_was_found_stored_is_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    child = new_blob(b"a child")
    parent = new_parent(child)
    engine.write(Write(objects=[child]))
    interpose(engine, monkeypatch, Write(deletes=[child.digest]))
    engine.write(Write(objects=[child]))
    assert_reads_back(engine, child)
    engine.write(Write(objects=[child, parent]))
    assert_reads_back(engine, child, parent)
    engine.close()


def test_an_object_that_another_process_stored_after_the_lookup_is_indexed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    child, other = new_blob(b"a child"), new_blob(b"another")
    theirs, ours = new_parent(child), new_parent(child, other)
    interpose(engine, monkeypatch, Write(objects=[child, theirs]))
    assert engine.write(Write(objects=[child, other, ours])).new_objects == 2
    assert_reads_back(engine, child, other, theirs, ours)
    infos = {info.digest: info for info in all_objects(engine)}
    assert len(infos) == len(all_objects(engine)) == 4
    # Both parents link to the one that counts, the first: a collector follows these ids.
    first = infos[child.digest].id
    assert first == 1
    assert infos[theirs.digest].children == (first,)
    assert infos[ours.digest].children == (first, infos[other.digest].id)
    assert engine.verify() == 4
    engine.close()


def test_puts_awaited_together_share_their_commits(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "full") as store:
            engine = store.sync.engine
            assert isinstance(engine, LmdbEngine)
            before = engine._env.handle.info()["last_txnid"]
            digests = await asyncio.gather(*[store.put_value({"n": n}) for n in range(400)])
            commits = engine._env.handle.info()["last_txnid"] - before
            assert len(set(digests)) == 400
            assert commits <= 200
            assert await store.get_many(digests) == [{"n": n} for n in range(400)]

    asyncio.run(main())


def test_commits_awaited_together_share_their_flushes(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "full") as store:
            engine = store.sync.engine
            assert isinstance(engine, LmdbEngine)
            queue, batches = engine._queue, list[int]()
            run_batch = queue._run
            deadline = time.monotonic() + TIMEOUT_S

            def hold_the_first(batch: WriteBatch) -> None:
                while not batches and len(queue._waiting) < 16:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
                batches.append(len(batch.tickets))
                run_batch(batch)

            queue._run = hold_the_first
            sessions = [store.session(f"s{n}") for n in range(16)]
            commit = Commit(append=[NodeDraft("a", "the only node")])
            results = await asyncio.gather(*[session.commit(commit) for session in sessions])
            assert [result.revision for result in results] == [1] * 16
            assert sum(batches) == 16
            assert len(batches) <= 2

    asyncio.run(main())
