"""Vacuum over random graphs: branches, rewinds, replaced graphs, forks, several rounds of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.maintenance import gc, vacuum
from casstore.session.data import LAST, LEAF, Checkpoint, Commit, NodeDraft
from casstore.session.session import Session
from casstore.session.state import runtime_of
from casstore.store import Store
from casstore.testing import ManualClock
from tests.maintenance.views import all_bytes, check_graphs, exact, seen

CANARY = re.compile(rb"canary-\d+\.")
ROLES = ("user", "assistant", None, "user")


class Program:
    """Takes numbers for steps: any list of them is a valid program."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.names = ["s0"]
        self.counter = 0
        self.turns: dict[str, dict[str, Commit]] = {}
        self.rounds = 0
        self._append(self.session, 0, 1)

    def run(self, steps: list[tuple[int, int, int]]) -> None:
        for kind, a, b in steps:
            self.clock.now_ms += 1
            session = self.store.session(self.names[a % len(self.names)])
            (
                self._append, self._append, self._branch, self._move, self._replace, self._rewind,
                self._fork, self._fork_node, self._hide, self._hide, self._vacuum, self._fork_node,
                self._hide_end, self._collect,
            )[kind](session, a, b)  # fmt: skip

    @property
    def session(self) -> Session:
        return self.store.session(self.names[0])

    def _draft(self, parent: Any = LEAF, *, name: str | None = None, b: int = 0) -> NodeDraft:
        self.counter += 1
        role = ROLES[b % len(ROLES)]
        text = f"canary-{self.counter}." + "long " * (500 if b % 5 == 0 else 0)
        payload: Any = {"role": role, "text": text} if role else [text]
        return NodeDraft(
            name or f"n{self.counter}", payload, parent, cause=f"c{self.counter}", time=self.counter
        )

    def _commit(self, session: Session, change: Commit, b: int) -> None:
        self.counter += 1
        turn = f"t{self.counter}" if b % 2 else None
        change = change._replace(turn=turn)
        if b % 3 == 0:
            change = change._replace(checkpoint=Checkpoint(turn_state={"at": self.counter}))
        if b % 7 == 0:
            change = change._replace(label=f"label-{b}")
        session.commit(change)
        if turn is not None:
            self.turns.setdefault(session.id, {})[turn] = change

    def _ids(self, session: Session) -> list[str]:
        return [node.id for node in session.nodes("full", payloads=False)]

    def _pick(self, session: Session, number: int) -> str | None:
        found = self._ids(session)
        return found[number % len(found)] if found else None

    # --- steps --------------------------------------------------------------------------

    def _append(self, session: Session, a: int, b: int) -> None:
        drafts = [self._draft(b=b + at) for at in range(1 + b % 3)]
        self._commit(session, Commit(append=drafts), b)

    def _branch(self, session: Session, a: int, b: int) -> None:
        parent = None if b % 6 == 0 else self._pick(session, b)
        drafts = [self._draft(parent, b=b), self._draft(b=b + 1), self._draft(parent, b=b + 2)]
        leaf: Any = drafts[1].id if b % 4 == 0 else LAST
        self._commit(session, Commit(append=drafts, leaf=leaf), b)

    def _move(self, session: Session, a: int, b: int) -> None:
        leaf = None if b % 5 == 0 else self._pick(session, b)
        self._commit(session, Commit(leaf=leaf), b)

    def _replace(self, session: Session, a: int, b: int) -> None:
        kept = [
            NodeDraft(node.id, node.payload, LEAF, node.cause, node.frame, node.time)
            for node in list(session.nodes())[: b % 4]
        ]
        self._commit(session, Commit(replace=[*kept, self._draft(b=b)]), b)

    def _rewind(self, session: Session, a: int, b: int) -> None:
        history = list(session.history())
        session.rewind(history[b % len(history)].revision)

    def _fork(self, session: Session, a: int, b: int) -> None:
        if len(self.names) < 4:
            history = list(session.history())
            target = f"s{len(self.names)}"
            self.store.fork(session.id, target, at=history[b % len(history)])
            self.names.append(target)

    def _fork_node(self, session: Session, a: int, b: int) -> None:
        node = self._pick(session, b)
        if len(self.names) < 4 and node is not None:
            target = f"s{len(self.names)}"
            self.store.fork(session.id, target, node=node)
            self.names.append(target)

    def _hide(self, session: Session, a: int, b: int) -> None:
        found = self._ids(session)
        session.tombstone(found[b % 5 :: 1 + b % 4])

    def _hide_end(self, session: Session, a: int, b: int) -> None:
        session.tombstone(self._ids(session)[-1 - b % 3 :])

    def _collect(self, session: Session, a: int, b: int) -> None:
        self.clock.now_ms += 1
        assert gc.collect(self.store, grace_ms=0).problem is None

    def _vacuum(self, session: Session, a: int, b: int) -> None:
        self.rounds += 1
        sessions = [self.store.session(name) for name in self.names]
        before = {each.id: seen(each, self.turns.get(each.id)) for each in sessions}
        others = {each.id: exact(each) for each in sessions if each.id != session.id}
        hidden = self._hidden_ids(session)
        report = vacuum.rewrite_hidden(self.store, session.id)
        assert report.outcome in (vacuum.VacuumOutcome.DONE, vacuum.VacuumOutcome.NOTHING), report
        self._same(sessions, before)
        assert {name: exact(self.store.session(name)) for name in others} == others
        check_graphs(self.store, session)
        self.clock.now_ms += 1
        assert gc.collect(self.store, grace_ms=0).problem is None
        self._same(sessions, before)
        for node in hidden - set(self._ids(session)):
            # Its id is free again.
            change = Commit(append=[self._draft(name=node)])
            session.commit(change)
        check_graphs(self.store, session)

    def _hidden_ids(self, session: Session) -> set[str]:
        runtime = runtime_of(self.store)
        return set(runtime.hidden(runtime.get(session.id).head).values())

    def _same(self, sessions: list[Session], before: dict[str, Any]) -> None:
        for each in sessions:
            # Read twice: by who has read before, and by who knows nothing.
            assert seen(each, self.turns.get(each.id)) == before[each.id]
            fresh = Store(self.store.engine, close=lambda: None)
            assert seen(fresh.session(each.id), self.turns.get(each.id)) == before[each.id]

    def finish(self) -> None:
        """Vacuum everything: what no session shows at any revision is in no object."""
        for name in list(self.names):
            self._vacuum(self.store.session(name), 0, 0)
        self.clock.now_ms += 1
        report = vacuum.vacuum(self.store, grace_ms=0)
        assert report.outcome in (vacuum.VacuumOutcome.DONE, vacuum.VacuumOutcome.NOTHING), report
        assert not report.objects_kept
        shown: set[bytes] = set()
        for name in self.names:
            session = self.store.session(name)
            for entry in session.history():
                for node in session.nodes("full", at=entry):
                    shown.update(CANARY.findall(repr(node.payload).encode()))
        assert set(CANARY.findall(all_bytes(self.store))) == shown


STEPS = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 3), st.integers(0, 41)), max_size=20)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_vacuum_changes_nothing_that_a_reader_sees(steps: list[tuple[int, int, int]]) -> None:
    clock = ManualClock()
    with Store(MemoryEngine(clock=clock)) as store:
        program = Program(store, clock)
        program.run(steps)
        program.finish()


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_vacuum_changes_nothing_that_a_reader_of_a_store_on_disk_sees(
    tmp_path_factory: Any, steps: list[tuple[int, int, int]]
) -> None:
    clock = ManualClock()
    place: Path = tmp_path_factory.mktemp("store")
    with Store(LmdbEngine(str(place / "s"), durability="relaxed", clock=clock)) as store:
        program = Program(store, clock)
        program.run(steps)
        program.finish()
        assert isinstance(store.engine, LmdbEngine)
        store.engine.verify()
