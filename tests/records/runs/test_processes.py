"""Several processes on the runs of one store: nothing lost, one winner, no gaps."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import casstore
from casstore.errors import ApprovalResolvedError, ConflictError, RecordConflictError
from casstore.records.runs import RUNNING, WAITING, Runs, SessionCheckpoint, steps
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store

_SPAWN = multiprocessing.get_context("spawn")
_PROCESSES = 3
_TIMES = 25

_ready: Any = None


class Crew(NamedTuple):
    """Processes that wait for work, so that not every test has to start its own."""

    pool: ProcessPoolExecutor

    def together(self, work: Callable[..., Any], path: Path, *given: Any) -> list[Any]:
        """What work gives in all of them, begun at the same moment."""
        begun = [
            self.pool.submit(_work, work, str(path), number, *given) for number in range(_PROCESSES)
        ]
        return [one.result(timeout=120) for one in begun]


def _join(ready: Any) -> None:
    global _ready
    _ready = ready


def _work(work: Callable[..., Any], path: str, number: int, *given: Any) -> Any:
    with casstore.open(path, "relaxed") as store:
        # Nobody goes on alone, so each of them has taken one piece of work.
        _ready.wait(60)
        return work(Runs(store), number, *given)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    ready = _SPAWN.Barrier(_PROCESSES)
    with ProcessPoolExecutor(
        _PROCESSES, mp_context=_SPAWN, initializer=_join, initargs=(ready,)
    ) as pool:
        yield Crew(pool)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def prepared(path: Path) -> None:
    with casstore.open(path, "relaxed") as store:
        runs = Runs(store)
        runs.create_thread("t", "agent")
        runs.create_run("t", "r", "agent", "graph")
        runs.set_state("t", "r", WAITING, checkpoint="one")
        runs.request_approval("t", "r", "a", "shell")


def _everything(runs: Runs, number: int) -> int:
    for time in range(_TIMES):
        runs.append_event("t", "r", [number, time])
        runs.append_message("t", "user", [number, time])
        runs.set_state("t", "r", f"state {number} {time}")
        runs.create_thread(f"own {number} {time}", "agent")
    return 0


def test_numbers_of_concurrent_processes_have_no_gaps_and_no_record_is_lost(
    crew: Crew, path: Path
) -> None:
    prepared(path)
    assert crew.together(_everything, path) == [0] * _PROCESSES
    with casstore.open(path, "relaxed") as store:
        runs = Runs(store)
        total = _PROCESSES * _TIMES
        events = runs.events("t", "r", limit=1000).items
        assert [event.sequence for event in events] == list(range(1, total + 1))
        messages = runs.messages("t", limit=1000)
        assert [message.number for message in messages] == list(range(1, total + 1))
        for number in range(_PROCESSES):
            mine = [[number, time] for time in range(_TIMES)]
            assert [event.event for event in events if event.event[0] == number] == mine
            assert [each.content for each in messages if each.content[0] == number] == mine
        assert len(runs.threads(limit=1000).items) == total + 1
        thread, run = runs.find_thread("t"), runs.get_run("t", "r")
        assert thread is not None
        assert (thread.events, thread.messages, thread.status) == (total, total, run.state)


def _begin(runs: Runs, number: int) -> bool:
    """The very first call on a store, and a run of one name in threads of several."""
    runs.create_thread("shared", "agent")
    runs.create_thread(f"t{number}", "agent")
    try:
        runs.create_run(f"t{number}", "the one", "agent", "graph")
    except RecordConflictError:
        return False
    return True


def test_all_first_calls_succeed_and_a_run_belongs_to_one_thread(crew: Crew, path: Path) -> None:
    casstore.open(path, "relaxed").close()
    won = crew.together(_begin, path)
    assert sorted(won) == [False] * (_PROCESSES - 1) + [True]
    with casstore.open(path, "relaxed") as store:
        run = Runs(store).find_run("the one")
        assert run is not None
        assert run.thread == f"t{won.index(True)}"


def _decide(runs: Runs, number: int) -> str:
    decision = ("approve", "reject", "edit")[number]
    intent = steps.SaveIntent("r", decision)
    try:
        return str(runs.resolve_approval("t", "r", "a", decision, intent=intent).decision)
    except ApprovalResolvedError as exc:
        return f"refused: {exc.status}"


def test_exactly_one_concurrent_decision_wins_together_with_its_intent(
    crew: Crew, path: Path
) -> None:
    prepared(path)
    answers = crew.together(_decide, path)
    (winner,) = [answer for answer in answers if not answer.startswith("refused")]
    with casstore.open(path, "relaxed") as store:
        runs = Runs(store)
        approval, intent = runs.find_approval("a"), runs.find_intent("t", "r")
        assert approval is not None
        assert intent is not None
        assert approval.decision == intent.payload == winner
        assert answers.count(f"refused: {approval.status}") == _PROCESSES - 1


def _same_event(runs: Runs, number: int, same: bool) -> int:
    won = 0
    for sequence in range(_TIMES):
        try:
            runs.append_event("t", "r", 0 if same else number, sequence=sequence)
            won += 1
        except RecordConflictError:
            pass
    return won


@pytest.mark.parametrize("same", [True, False])
def test_an_event_sent_by_several_processes_is_stored_once(
    crew: Crew, path: Path, same: bool
) -> None:
    prepared(path)
    won = crew.together(_same_event, path, same)
    assert sum(won) == (_PROCESSES * _TIMES if same else _TIMES)
    with casstore.open(path, "relaxed") as store:
        assert Runs(store).get_run("t", "r").events == _TIMES


def _delete_or_use(runs: Runs, number: int) -> int:
    """One deletes again and again; the others go on as if nothing were."""
    deleted = 0
    for time in range(_TIMES):
        if number == 0:
            deleted += runs.delete_thread("t")
            continue
        try:
            runs.create_thread("t", "agent")
            runs.create_run("t", "r", "agent", "graph")
            runs.append_event("t", "r", [number, time])
            runs.put_artifact("t", "r", f"{number} {time}", b"x", "bin")
        except LookupError:
            pass  # deleted between two of these
    return deleted


def test_concurrent_deletions_leave_nothing_half_deleted(crew: Crew, path: Path) -> None:
    prepared(path)
    deleted, *_ = crew.together(_delete_or_use, path)
    assert isinstance(deleted, int)
    with casstore.open(path, "relaxed") as store:
        runs = Runs(store)
        thread = runs.find_thread("t")
        if thread is not None:
            events = sum(run.events for run in runs.thread_runs("t").items)
            assert thread.events == events
            for run in runs.thread_runs("t").items:
                assert len(runs.events("t", run.id, limit=1000).items) == run.events
                assert len(runs.artifacts("t", run.id, limit=1000).items) == run.artifacts
            # It refuses if any row is missing or too many.
            assert runs.delete_thread("t")
        rows = store.engine.scan_rows("records", start=b"runs.", stop=b"runs/")
        assert [key for key, _ in rows] == [
            b"runs.counter\0next\0", b"runs.schema\0runs\0",
        ]  # fmt: skip


def _commit(runs: Runs, number: int, path: str) -> list[int]:
    with casstore.open(path, "relaxed") as store:
        return _commit_to(store, runs, number)


def _commit_to(store: Store, runs: Runs, number: int) -> list[int]:
    made: list[int] = []
    while len(made) < 8:
        head = store.session("s").head()
        expected = 0 if head is None else head.revision
        change = Commit(append=[NodeDraft(f"{number} {len(made)}", 1)], expected=expected)
        event = steps.AppendEvent("r", expected + 1, expected + 1)
        try:
            made.append(runs.commit("s", change, "t", event).result.revision)
        except ConflictError:
            continue
    return made


def test_each_commit_of_several_processes_is_stored_with_its_steps(crew: Crew, path: Path) -> None:
    prepared(path)
    made = crew.together(_commit, path, str(path))
    total = 8 * _PROCESSES
    assert sorted([revision for each in made for revision in each]) == list(range(1, total + 1))
    with casstore.open(path, "relaxed") as store:
        events = Runs(store).events("t", "r", limit=1000).items
        assert [event.sequence for event in events] == list(range(1, total + 1))


# --- killed between decision and resume --------------------------------------------------------


_KILLED = """
import os, signal, sys
import casstore
from casstore.records.runs import Runs, steps
from casstore.store import Store
store = casstore.open(sys.argv[1], "relaxed")
runs = Runs(store)
runs.resolve_approval("t", "r", "a", "approve", intent=steps.SaveIntent("r", {"resume": 1}))
runs.begin_attempt("t", "r")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_between_decision_and_resume_leaves_the_intent(path: Path) -> None:
    prepared(path)
    with casstore.open(path, "relaxed") as store:
        session = store.session("s")
        session.commit(Commit(append=[NodeDraft("n", 1)]))
        Runs(store).set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 1))
    killed = os.spawnve(
        os.P_WAIT,
        sys.executable,
        [sys.executable, "-c", _KILLED, str(path)],
        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert killed == -signal.SIGKILL
    with casstore.open(path, "relaxed") as store:
        runs = Runs(store)
        (intent,) = runs.intents().items
        assert (intent.thread, intent.run, intent.attempts) == ("t", "r", 1)
        assert intent.payload == {"resume": 1}
        assert intent.checkpoint == SessionCheckpoint("s", 1)
        assert [one.by for one in store.session("s").protections()] == ["run r"]
        assert runs.begin_attempt("t", "r").attempts == 2
        runs.apply(
            "t", steps.SetState("r", RUNNING), steps.ClearIntent("r"), steps.ClearRequest("r")
        )
        assert runs.intents().items == []
        runs.set_state("t", "r", "completed")
        assert store.session("s").protections() == []
