"""The session runtime keeps its promises on every engine, and between processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Engine
from casstore.session.data import Commit, NodeDraft
from casstore.testing import EngineFactory, ManualClock, Reopen
from casstore.testing.session_conformance import PersistentSessionConformance, SessionConformance
from casstore.testing.session_fixtures import start

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 120.0
MINUTE_MS = 60_000


class TestMemorySessions(SessionConformance):
    @pytest.fixture
    def make_engine(self) -> Iterator[EngineFactory]:
        made: list[MemoryEngine] = []

        def make(*, clock: Callable[[], int] | None = None) -> MemoryEngine:
            made.append(MemoryEngine(clock=clock))
            return made[-1]

        yield make
        for engine in made:
            engine.close()


class TestLmdbSessions(PersistentSessionConformance):
    options: ClassVar[dict[str, Any]] = {"durability": "relaxed"}

    @pytest.fixture
    def make_engine(self, tmp_path: Path) -> Iterator[EngineFactory]:
        made: list[LmdbEngine] = []
        names = count()

        def make(*, clock: Callable[[], int] | None = None) -> Engine:
            engine = LmdbEngine(str(tmp_path / str(next(names))), clock=clock, **self.options)
            made.append(engine)
            return engine

        yield make
        for engine in made:
            engine.close()

    @pytest.fixture
    def reopen(self, clock: ManualClock) -> Iterator[Reopen]:
        made: list[LmdbEngine] = []

        def again(engine: Engine) -> Engine:
            assert isinstance(engine, LmdbEngine)
            engine.close()
            made.append(LmdbEngine(engine.path, clock=clock, **self.options))
            return made[-1]

        yield again
        for engine in made:
            engine.close()


# --- between processes ----------------------------------------------------------------------

PREAMBLE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import casstore
from casstore.errors import *
from casstore.session.data import *
me = int(sys.argv[3])
with casstore.open(sys.argv[2], "relaxed") as store:
    session = store.session("alpha")
    print("ready", flush=True)
    sys.stdin.readline()
"""


def in_processes(place: Path, work: str, processes: int = 4) -> list[Any]:
    """Run lines of Python in processes that start together; what they printed."""
    script = PREAMBLE + "".join(f"    {line}\n" for line in work.strip().splitlines())
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(ROOT), str(place), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return [json.loads(answer) for answer in answers]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[casstore.Store]:
    with casstore.open(place, "relaxed") as opened:
        yield opened


def test_head_cas_exactly_one_of_four_racing_processes_commits_revision_1(
    store: casstore.Store, place: Path
) -> None:
    answers = in_processes(
        place,
        """
try:
    done = session.commit(Commit(append=[NodeDraft(f"n{me}", me)], expected=0))
    print(json.dumps(done.revision))
except HeadConflictError as error:
    print(json.dumps([error.expected, error.actual]))
""",
    )
    assert sorted(answers, key=str) == [1, [0, 1], [0, 1], [0, 1]]
    head = store.session("alpha").head()
    assert head is not None
    assert (head.revision, head.node_count) == (1, 1)


def test_no_expectation_commits_of_many_processes_all_get_in(
    store: casstore.Store, place: Path
) -> None:
    answers = in_processes(
        place,
        """
done = [
    session.commit(Commit(append=[NodeDraft(f"{me}.{n}", n)])).revision
    for n in range(10)
]
print(json.dumps(done))
""",
    )
    assert sorted(number for done in answers for number in done) == list(range(1, 41))
    assert len(store.session("alpha").nodes()) == 40


def test_lease_exclusivity_one_of_many_processes_gets_it(
    store: casstore.Store, place: Path
) -> None:
    answers = in_processes(
        place,
        """
lease = session.claim_lease(f"worker {me}", 600_000)
print(json.dumps(lease and lease.fencing))
""",
    )
    assert sorted(answers, key=str) == [1, None, None, None]
    assert store.session("alpha").claim_lease("successor", MINUTE_MS) is None


def test_enqueue_idempotency_many_processes_with_one_key_make_one_batch(
    store: casstore.Store, place: Path
) -> None:
    answers = in_processes(
        place,
        """
print(json.dumps(session.queue.enqueue([me], source_key="key").id))
""",
    )
    [batch] = store.session("alpha").queue.batches()
    assert set(answers) == {batch.id}


def test_wait_returns_on_commits_of_another_process_in_both_directions(
    store: casstore.Store, place: Path
) -> None:
    session = store.session("alpha")

    def follow() -> None:
        assert session.wait(0, timeout_s=PATIENCE_S) is not None
        session.commit(Commit(append=[NodeDraft("b", 2)], expected=1))

    followed = start(follow)
    [revision] = in_processes(
        place,
        """
session.commit(Commit(append=[NodeDraft("a", 1)], expected=0))
print(json.dumps(session.wait(1, timeout_s=120).revision))
""",
        processes=1,
    )
    followed.result(PATIENCE_S)
    assert revision == 2


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_durability_tier_of_an_open_store_is_the_requested_one(
    place: Path, durability: str
) -> None:
    with casstore.open(place, durability) as opened:
        assert isinstance(opened.engine, LmdbEngine)
        assert opened.engine.durability == durability
