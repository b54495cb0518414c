"""Random operations on runs, compared with plain dictionaries after each of them."""

from __future__ import annotations

import tempfile
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.errors import (
    ApprovalResolvedError,
    DecisionNotAllowedError,
    RecordConflictError,
    RecordNotFoundError,
)
from casstore.maintenance import gc
from casstore.records.runs import TERMINAL, WAITING, Runs, SessionCheckpoint, steps
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store

THREADS = st.sampled_from(["t", "u"])
RUNS = st.sampled_from(["a", "b", "c"])
STATES = st.sampled_from(["running", WAITING, "completed", "cancelled"])
CHECKPOINTS = st.sampled_from(["one", None, SessionCheckpoint("s", 1), SessionCheckpoint("s", 2)])
VALUES = st.sampled_from([1, 1.0, "text", "long " * 300, {"a": [None]}])


class RunsMachine(RuleBasedStateMachine):
    """Runs, and what they should hold."""

    engine = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        engine: Any = MemoryEngine()
        if self.engine == "lmdb":
            self.folder = tempfile.TemporaryDirectory()
            engine = LmdbEngine(self.folder.name, durability="relaxed")
        self.store = Store(engine)
        self.session = self.store.session("s")
        for node in ("1", "2"):
            self.session.commit(Commit(append=[NodeDraft(node, node)]))
        self.runs = Runs(self.store)
        self.runs.create_thread("never deleted", "agent")
        # Thread → its runs in order of beginning; and those changed last, last.
        self.threads: dict[str, list[str]] = {}
        self.thread_order: list[str] = []
        self.run_order: list[str] = []
        self.states: dict[str, tuple[str, str | None, Any]] = {}
        self.events: dict[str, dict[int, Any]] = {}
        self.messages: dict[str, list[Any]] = {}
        self.approvals: dict[str, tuple[str, str]] = {}
        self.intents: dict[str, tuple[Any, int]] = {}
        self.artifacts: dict[str, dict[str, Any]] = {}

    def teardown(self) -> None:
        self.store.close()
        if self.folder is not None:
            self.folder.cleanup()

    def has(self, thread: str, run: str) -> bool:
        return run in self.threads.get(thread, ())

    def refused(self, thread: str, run: str, step: steps.Step) -> bool:
        """Is the step refused, because the thread has no such run?"""
        if self.has(thread, run):
            return False
        try:
            self.runs.apply(thread, step)
        except RecordNotFoundError:
            return True
        raise AssertionError("a step on a run that is not there")

    def moved(self, thread: str, run: str) -> None:
        self.thread_order = [name for name in self.thread_order if name != thread] + [thread]
        self.run_order = [name for name in self.run_order if name != run] + [run]

    @rule(thread=THREADS)
    def create_thread(self, thread: str) -> None:
        self.runs.create_thread(thread, "agent")
        if thread not in self.threads:
            self.threads[thread] = []
            self.messages[thread] = []
            self.thread_order.append(thread)

    @rule(thread=THREADS, run=RUNS)
    def create_run(self, thread: str, run: str) -> None:
        owner = [name for name, runs in self.threads.items() if run in runs]
        try:
            self.runs.create_run(thread, run, "agent", "graph")
        except RecordNotFoundError:
            assert thread not in self.threads
            return
        except RecordConflictError:
            assert owner
            assert owner != [thread]
            return
        if not owner:
            self.threads[thread].append(run)
            self.states[run] = ("running", None, None)
            self.events[run] = {}
            self.artifacts[run] = {}
            self.moved(thread, run)

    @rule(thread=THREADS, run=RUNS, state=STATES, checkpoint=CHECKPOINTS, keep=st.booleans())
    def set_state(self, thread: str, run: str, state: str, checkpoint: Any, keep: bool) -> None:
        step = steps.SetState(run, state) if keep else steps.SetState(run, state, checkpoint)
        if self.refused(thread, run, step):
            return
        self.runs.apply(thread, step)
        before, _, kept = self.states[run]
        self.states[run] = (state, before, kept if keep else checkpoint)
        self.moved(thread, run)

    @rule(thread=THREADS, run=RUNS, sequence=st.none() | st.integers(0, 4), event=VALUES)
    def append_event(self, thread: str, run: str, sequence: int | None, event: Any) -> None:
        step = steps.AppendEvent(run, event, sequence)
        if self.refused(thread, run, step):
            return
        there = self.events[run]
        number = sequence if sequence is not None else max(there, default=0) + 1
        try:
            assert self.runs.apply(thread, step)[0].sequence == number
        except RecordConflictError:
            assert repr(there[number]) != repr(event)
            return
        assert number not in there or repr(there[number]) == repr(event)
        there[number] = event

    @rule(thread=THREADS, run=RUNS, content=VALUES)
    def append_message(self, thread: str, run: str, content: Any) -> None:
        step = steps.AppendMessage("user", content, run)
        if not self.refused(thread, run, step):
            self.runs.apply(thread, step)
            self.messages[thread].append(content)

    @rule(thread=THREADS, run=RUNS)
    def request_approval(self, thread: str, run: str) -> None:
        step = steps.RequestApproval(run, f"of {run}", "shell", "one", ("approve", "reject"))
        if not self.refused(thread, run, step):
            self.runs.apply(thread, step)
            self.approvals.setdefault(f"of {run}", (run, "pending"))

    @rule(thread=THREADS, run=RUNS, decision=st.sampled_from(["approve", "reject", "edit"]))
    def resolve_approval(self, thread: str, run: str, decision: str) -> None:
        resolve = steps.ResolveApproval(run, f"of {run}", decision)
        if self.refused(thread, run, resolve):
            return
        there = self.approvals.get(f"of {run}")
        try:
            self.runs.apply(thread, resolve, steps.SaveIntent(run, decision))
        except RecordNotFoundError:
            assert there is None
        except ApprovalResolvedError:
            assert there is not None
            assert there[1] != "pending"
        except DecisionNotAllowedError:
            assert decision == "edit"
        else:
            assert there == (run, "pending")
            self.approvals[f"of {run}"] = (run, decision)
            self.intents[run] = (decision, 0)

    @rule(thread=THREADS, run=RUNS, clear=st.booleans())
    def go_on(self, thread: str, run: str, clear: bool) -> None:
        step: steps.Step = steps.ClearIntent(run) if clear else steps.BeginAttempt(run)
        if self.refused(thread, run, step):
            return
        there = self.intents.get(run)
        if clear:
            assert self.runs.apply(thread, step) == (there is not None,)
            self.intents.pop(run, None)
        elif there is not None:
            self.runs.apply(thread, step)
            self.intents[run] = (there[0], there[1] + 1)

    @rule(thread=THREADS, run=RUNS, path=st.sampled_from(["x", "y/z"]), content=VALUES)
    def put_artifact(self, thread: str, run: str, path: str, content: Any) -> None:
        step = steps.PutArtifact(run, path, content, "kind", replace=True)
        if not self.refused(thread, run, step):
            self.runs.apply(thread, step)
            self.artifacts[run][path] = content

    @rule(thread=THREADS)
    def delete_thread(self, thread: str) -> None:
        assert self.runs.delete_thread(thread) is (thread in self.threads)
        for run in self.threads.pop(thread, []):
            self.run_order.remove(run)
            for held in (self.states, self.events, self.artifacts, self.intents):
                held.pop(run, None)
            self.approvals.pop(f"of {run}", None)
        self.messages.pop(thread, None)
        if thread in self.thread_order:
            self.thread_order.remove(thread)

    @precondition(lambda self: self.threads)
    @rule()
    def collect(self) -> None:
        gc.collect(self.store, grace_ms=0)

    @invariant()
    def everything_is_as_it_should(self) -> None:
        runs = self.runs
        named = [thread.id for thread in runs.threads().items]
        assert named == [*reversed(self.thread_order), "never deleted"]
        assert [run.id for run in runs.runs().items] == self.run_order[::-1]
        protected = set()
        for name, members in self.threads.items():
            thread = runs.find_thread(name)
            assert thread is not None
            assert thread.latest_run == (members[-1] if members else None)
            assert thread.status == (self.states[members[-1]][0] if members else None)
            assert [run.id for run in runs.thread_runs(name).items] == members[::-1]
            said = [message.content for message in runs.messages(name, limit=1000)]
            assert repr(said) == repr(self.messages[name])
            assert (thread.runs, thread.messages) == (len(members), len(said))
            assert thread.events == sum(len(self.events[run]) for run in members)
            for run in members:
                found = runs.get_run(name, run)
                state, before, checkpoint = self.states[run]
                assert (found.state, found.previous_state) == (state, before)
                assert found.checkpoint == checkpoint
                if isinstance(checkpoint, SessionCheckpoint) and state not in TERMINAL:
                    protected.add((checkpoint.revision, f"run {run}"))
                events = runs.events(name, run).items
                expected = sorted(self.events[run].items())
                assert repr([(one.sequence, one.event) for one in events]) == repr(expected)
                made = {
                    one.path: runs.read_artifact(name, run, one.path)
                    for one in runs.artifacts(name, run).items
                }
                assert repr(made) == repr(self.artifacts[run])
        assert {(one.revision, one.by) for one in self.session.protections()} == protected
        intents = {one.run: (one.payload, one.attempts) for one in runs.intents().items}
        assert intents == self.intents
        decided = {one.id: (one.run, one.decision or one.status) for one in runs.approvals().items}
        assert decided == self.approvals
        pending = {one.id for one in runs.approvals(status="pending").items}
        assert pending == {name for name, (_, what) in decided.items() if what == "pending"}


class LmdbMachine(RunsMachine):
    """The same on LMDB."""

    engine = "lmdb"


TestOnMemory = RunsMachine.TestCase
TestOnMemory.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestOnLmdb = LmdbMachine.TestCase
TestOnLmdb.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
