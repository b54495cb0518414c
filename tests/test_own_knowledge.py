"""What a writer knows from its last transaction counts only while nobody else has written."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore import UNFENCED, Commit, NodeDraft
from casstore.engine.lmdb import journal
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.group import Ticket
from casstore.engine.lmdb.journal import settle_now
from casstore.engine.lmdb.transaction import Job
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import MAX_OBJECT_BYTES, ObjectsExist, PutRow, Write, WriteResult
from casstore.errors import InvalidInputError, ObjectNotFoundError, StorageFullError
from casstore.maintenance import gc
from casstore.maintenance.roots import ROOTS
from casstore.store import Store
from casstore.testing.engine_fixtures import all_objects, assert_reads_back, new_blob

ROOT = Path(__file__).parent.parent
GONE = new_blob(b"taken away by somebody")
# Of a table that keeps nothing alive.
ROW = PutRow("usage", b"key", b"value")


@pytest.fixture(params=[0, 1], ids=["lmdb09", "lmdb10"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(str(tmp_path / "s"), durability="process", lmdb_version=request.param)
    yield engine
    assert engine.verify() == len(all_objects(engine))
    engine.close()


def elsewhere(engine: LmdbEngine, work: str) -> None:
    """Do something to the store in another process."""
    program = (
        "import sys\n"
        "from casstore.engine.lmdb.engine import LmdbEngine\n"
        "from casstore.engine.protocol import Write\n"
        "from casstore.maintenance import gc\n"
        "from casstore.store import Store\n"
        "from casstore.testing.engine_fixtures import new_blob\n"
        "engine = LmdbEngine(sys.argv[1], durability='process')\n"
        f"{work}\n"
        "engine.close()\n"
    )
    subprocess.run([sys.executable, "-c", program, engine.path], check=True, cwd=ROOT)


def learn(engine: LmdbEngine) -> None:
    """Have the engine find an object in the index, and go on from there."""
    engine.write(Write(objects=[GONE]))
    settle_now(engine._env)
    engine.write(Write(conditions=[ObjectsExist([GONE.digest])], rows=[ROW]))
    assert GONE.digest in engine._journal._newest[1].own_ids


def collect(engine: LmdbEngine) -> None:
    # Not closed: the engine is the test's.
    gc.collect(Store(engine), grace_ms=0)


def delete(engine: LmdbEngine) -> None:
    engine.write(Write(deletes=[GONE.digest]))


def delete_and_settle(engine: LmdbEngine) -> None:
    delete(engine)
    settle_now(engine._env)


def delete_in_place(engine: LmdbEngine) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SETTLE_CHANGES", 0)
        delete(engine)


def rebuild(engine: LmdbEngine) -> None:
    engine.rebuild_index(ROOTS)


def collect_elsewhere(engine: LmdbEngine) -> None:
    elsewhere(engine, "gc.collect(Store(engine), grace_ms=0)")


def delete_elsewhere(engine: LmdbEngine) -> None:
    elsewhere(engine, "engine.write(Write(deletes=[new_blob(b'taken away by somebody').digest]))")


@pytest.mark.parametrize(
    "take_away",
    [
        collect,
        delete,
        delete_and_settle,
        delete_in_place,
        rebuild,
        collect_elsewhere,
        delete_elsewhere,
    ],
)
def test_a_name_that_was_found_is_looked_for_again_when_somebody_else_has_written(
    engine: LmdbEngine, take_away: Callable[[LmdbEngine], None]
) -> None:
    learn(engine)
    take_away(engine)
    with pytest.raises(ObjectNotFoundError):
        engine.write(Write(conditions=[ObjectsExist([GONE.digest])], rows=[ROW]))
    assert engine.write(Write(objects=[GONE], rows=[ROW])).new_objects == 1
    assert_reads_back(engine, GONE)


def test_a_refused_write_leaves_what_is_known_true(engine: LmdbEngine) -> None:
    learn(engine)
    missing = new_blob(b"never stored")
    with pytest.raises(ObjectNotFoundError):
        engine.write(
            Write(
                objects=[new_blob(b"refused")],
                conditions=[ObjectsExist([GONE.digest, missing.digest])],
                rows=[ROW],
            )
        )
    engine.write(Write(objects=[new_blob(b"after")], conditions=[ObjectsExist([GONE.digest])]))
    assert {info.digest for info in all_objects(engine)} == {
        GONE.digest,
        new_blob(b"after").digest,
    }


def ids(engine: LmdbEngine) -> list[int]:
    return sorted(info.id for info in all_objects(engine))


def pack(engine: LmdbEngine) -> None:
    engine.pack()


def put_elsewhere(engine: LmdbEngine) -> None:
    elsewhere(engine, "engine.write(Write(objects=[new_blob(b'theirs')]))")


@pytest.mark.parametrize(
    ("meanwhile", "expected"), [(put_elsewhere, [1, 2, 3, 4]), (pack, [1, 2, 3]), (collect, [3])]
)
def test_ids_go_on_behind_the_last_slab_whoever_stored_it(
    engine: LmdbEngine, meanwhile: Callable[[LmdbEngine], None], expected: list[int]
) -> None:
    engine.write(Write(objects=[new_blob(b"one")]))
    engine.write(Write(objects=[new_blob(b"two")]))
    assert engine._journal._newest[1].next_id == 3
    meanwhile(engine)
    engine.write(Write(objects=[new_blob(b"last")]))
    assert ids(engine) == expected


def test_ids_go_on_behind_what_was_named_and_unnamed_in_one_transaction(
    engine: LmdbEngine,
) -> None:
    first, brief = new_blob(b"first"), new_blob(b"brief")
    engine.write(Write(objects=[first]))
    jobs = [Job(Write(objects=[brief])), Job(Write(deletes=[brief.digest]))]
    engine._batches.prepare(jobs)
    tickets: list[Ticket[Job, WriteResult]] = [Ticket(job) for job in jobs]
    engine._batches.commit(tickets)
    assert [ticket.error for ticket in tickets] == [None, None]
    # The slab is there, and nothing of it has a name.
    engine.write(Write(objects=[new_blob(b"last")]))
    assert ids(engine) == [1, 3]


def test_a_write_for_which_the_map_is_too_small_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "small")
    with Store(LmdbEngine(path, durability="process", map_bytes=1 << 20)) as store:
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        learn(engine)
        long = [new_blob(random.Random(at).randbytes(1 << 16)) for at in range(40)]
        with pytest.raises(StorageFullError):
            engine.write(Write(objects=long))
        stored = len(all_objects(engine))
        engine.write(Write(conditions=[ObjectsExist([GONE.digest])], rows=[ROW]))
        assert engine.verify() == stored


@pytest.mark.parametrize("made", [MemoryEngine, LmdbEngine])
def test_a_node_that_is_too_long_for_an_object_is_refused(tmp_path: Path, made: Any) -> None:
    """A commit is not looked at again by an engine, but for what a user can make too long."""
    engine = MemoryEngine() if made is MemoryEngine else LmdbEngine(str(tmp_path / "s"))
    with Store(engine) as store:
        session = store.session("s")
        session.commit(Commit(append=[NodeDraft("a", {})], lease=UNFENCED))
        for late in ("b", "c"):
            long = NodeDraft(late, {}, time="x" * (MAX_OBJECT_BYTES + 1))
            with pytest.raises(InvalidInputError, match="an object of"):
                session.commit(Commit(append=[long], lease=UNFENCED))
        assert [node.id for node in session.nodes()] == ["a"]
