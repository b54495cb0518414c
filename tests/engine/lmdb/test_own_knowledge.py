"""A writer's knowledge from its last transaction is valid until another process writes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import Commit, NodeDraft
from casstore.engine.lmdb import recent
from casstore.engine.lmdb.batches import Job, Ticket, WriteBatch
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import (
    MAX_OBJECT_BYTES,
    ObjectsExist,
    PutRow,
    RowKey,
    Write,
)
from casstore.errors import ForkedError, InvalidInputError, ObjectNotFoundError, StorageFullError
from casstore.maintenance import gc
from casstore.maintenance.roots import ROOTS
from casstore.store import Store
from casstore.testing.engine_fixtures import (
    all_objects,
    assert_reads_back,
    new_blob,
    put_objects,
)
from tests.faults.children import in_child

ROOT = Path(__file__).parents[3]
GONE = new_blob(b"taken away by somebody")
# Of a table that keeps nothing alive.
ROW = PutRow("leases", b"key", b"value")


@pytest.fixture(params=[0, 1], ids=["lmdb09", "lmdb10"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", lmdb_version=request.param)
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
        "from casstore.maintenance.roots import ROOTS\n"
        "from casstore.store import Store\n"
        "from casstore.testing.engine_fixtures import new_blob\n"
        "engine = LmdbEngine(sys.argv[1], durability='relaxed')\n"
        f"{work}\n"
        "engine.close()\n"
    )
    subprocess.run([sys.executable, "-c", program, engine.path], check=True, cwd=ROOT)


def learn(engine: LmdbEngine) -> None:
    """Have the engine find an object in the index, and go on from there."""
    engine.write(Write(objects=[GONE]))
    engine.apply_log()
    engine.write(Write(conditions=[ObjectsExist([GONE.digest])], rows=[ROW]))
    assert GONE.digest in engine._batches._proven.ids


def in_a_fork(engine: LmdbEngine, work: Callable[[LmdbEngine], object]) -> None:
    """Do something to the store in a forked child, which has a copy of all that is known here."""

    def do() -> str:
        with pytest.raises(ForkedError):
            delete(engine)
        own = LmdbEngine(engine.path, durability="relaxed")
        work(own)
        own.close()
        return "done"

    assert in_child(do) == "done"


def collect(engine: LmdbEngine) -> None:
    # Not closed: the engine is the test's.
    gc.collect(Store(engine), grace_ms=0)


def delete(engine: LmdbEngine) -> None:
    engine.write(Write(deletes=[GONE.digest]))


def delete_and_apply(engine: LmdbEngine) -> None:
    delete(engine)
    engine.apply_log()


def delete_directly(engine: LmdbEngine) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recent, "MAX_LOGGED_BYTES", 0)
        delete(engine)


def rebuild(engine: LmdbEngine) -> None:
    engine.rebuild_index(ROOTS)


def collect_elsewhere(engine: LmdbEngine) -> None:
    elsewhere(engine, "gc.collect(Store(engine), grace_ms=0)")


def delete_elsewhere(engine: LmdbEngine) -> None:
    elsewhere(engine, "engine.write(Write(deletes=[new_blob(b'taken away by somebody').digest]))")


def rebuild_elsewhere(engine: LmdbEngine) -> None:
    elsewhere(engine, "engine.rebuild_index(ROOTS)")


def collect_in_a_fork(engine: LmdbEngine) -> None:
    in_a_fork(engine, collect)


def delete_in_a_fork(engine: LmdbEngine) -> None:
    in_a_fork(engine, delete_and_apply)


def rebuild_in_a_fork(engine: LmdbEngine) -> None:
    in_a_fork(engine, rebuild)


@pytest.mark.parametrize(
    "take_away",
    [
        collect,
        delete,
        delete_and_apply,
        delete_directly,
        rebuild,
        collect_elsewhere,
        delete_elsewhere,
        rebuild_elsewhere,
        collect_in_a_fork,
        delete_in_a_fork,
        rebuild_in_a_fork,
    ],
)
def test_a_digest_found_earlier_is_looked_up_again_after_another_process_has_written(
    engine: LmdbEngine, take_away: Callable[[LmdbEngine], None]
) -> None:
    learn(engine)
    take_away(engine)
    with pytest.raises(ObjectNotFoundError):
        engine.write(Write(conditions=[ObjectsExist([GONE.digest])], rows=[ROW]))
    assert engine.write(Write(objects=[GONE], rows=[ROW])).new_objects == 1
    assert_reads_back(engine, GONE)


def test_a_refused_write_leaves_the_cached_digests_correct(engine: LmdbEngine) -> None:
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


def put_in_a_fork(engine: LmdbEngine) -> None:
    in_a_fork(engine, lambda own: put_objects(own, new_blob(b"theirs")))


def pack_in_a_fork(engine: LmdbEngine) -> None:
    in_a_fork(engine, pack)


def put_and_collect_elsewhere(engine: LmdbEngine) -> None:
    # The slab that was last stays, though nothing in it has a name any more.
    elsewhere(
        engine,
        "engine.write(Write(objects=[new_blob(b'theirs')]))\n"
        "gc.collect(Store(engine), grace_ms=0)\n"
        "engine.pack()",
    )


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        (put_elsewhere, [1, 2, 3, 4]),
        (put_in_a_fork, [1, 2, 3, 4]),
        (put_and_collect_elsewhere, [4]),
        (pack, [1, 2, 3]),
        (pack_in_a_fork, [1, 2, 3]),
        (collect, [3]),
    ],
)
def test_ids_continue_after_the_last_slab_of_any_process(
    engine: LmdbEngine, meanwhile: Callable[[LmdbEngine], None], expected: list[int]
) -> None:
    engine.write(Write(objects=[new_blob(b"one")]))
    engine.write(Write(objects=[new_blob(b"two")]))
    assert engine._env.recent.memtable.next_id == 3
    meanwhile(engine)
    engine.write(Write(objects=[new_blob(b"last")]))
    assert ids(engine) == expected


def test_ids_continue_after_objects_stored_and_deleted_in_one_commit(engine: LmdbEngine) -> None:
    first, brief = new_blob(b"first"), new_blob(b"brief")
    engine.write(Write(objects=[first]))
    writes = [Write(objects=[brief]), Write(deletes=[brief.digest])]
    batch = WriteBatch([Ticket(Job(write, durable=False)) for write in writes])
    engine._batches.commit(batch)
    # The slab is there, and nothing of it has a name.
    engine.write(Write(objects=[new_blob(b"last")]))
    assert ids(engine) == [1, 3]
    engine.apply_log()
    assert ids(engine) == [1, 3]


_WRITER = """
import random, sys, casstore
from casstore.errors import NotFoundError
me, seed = sys.argv[2], int(sys.argv[3])
random = random.Random(seed)
refused = 0
with casstore.open(sys.argv[1], "relaxed") as store:
    for number in range(250):
        # Eight that come and go, and are all the same to both writers.
        content = b"shared %d" % random.randrange(8)
        try:
            if random.random() < 0.5:
                digest = store.put_blob(content)
            else:
                digest = casstore.Digest.of_blob(content)
            store.pin(me, digest)
        except NotFoundError:
            refused += 1
            continue
        # From here on no collector may remove it.
        store.put_blob(b"%s %d" % (me.encode(), number))
        store.pin(me + " again", digest)
        assert store.get_blob(digest) == content
        store.unpin(me)
        store.unpin(me + " again")
print(refused)
"""

_CARE = """
import os, sys, casstore
from casstore.errors import BusyError
from casstore.maintenance import gc
from casstore.maintenance.roots import ROOTS
kind = sys.argv[2]
with casstore.open(sys.argv[1], "relaxed") as store:
    print("ready", flush=True)
    rounds = 0
    while rounds < 2 or not os.path.exists(sys.argv[3]):
        if kind == "collect":
            gc.collect(store, grace_ms=0)
        elif kind == "pack":
            store.pack(min_age_ms=0)
        else:
            try:
                store.engine.rebuild_index(ROOTS)
            except BusyError:
                continue
        rounds += 1
print(rounds)
"""


@pytest.mark.parametrize("kind", ["collect", "pack", "rebuild"])
def test_the_caches_of_two_writers_stay_correct_during_maintenance(
    tmp_path: Path, kind: str
) -> None:
    path, end = tmp_path / "s", tmp_path / "end"
    casstore.open(path, "relaxed").close()

    def begin(program: str, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(path), *map(str, arguments)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    carer = begin(_CARE, kind, end)
    assert carer.stdout is not None
    assert carer.stdout.readline() == "ready\n"
    writers = [begin(_WRITER, name, seed) for seed, name in enumerate(("a", "b"))]
    said = [writer.communicate(timeout=120)[0] for writer in writers]
    end.touch()
    rounds = int(carer.communicate(timeout=120)[0])
    assert [process.returncode for process in (*writers, carer)] == [0, 0, 0]
    assert rounds > 1
    # Else nothing was taken away while the writers were at it.
    assert kind == "pack" or sum(map(int, said)) > 0
    with casstore.open(path, "relaxed", verify=True) as store:
        assert isinstance(store.engine, LmdbEngine)
        assert store.engine.verify() == len(all_objects(store.engine))


def test_a_write_that_exceeds_the_map_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "small")
    with Store(LmdbEngine(path, durability="relaxed", map_bytes=1 << 20)) as store:
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
        session.commit(Commit(append=[NodeDraft("a", {})]))
        for late in ("b", "c"):
            long = NodeDraft(late, {}, time="x" * (MAX_OBJECT_BYTES + 1))
            with pytest.raises(InvalidInputError, match="an object of"):
                session.commit(Commit(append=[long]))
        assert [node.id for node in session.nodes()] == ["a"]


def test_a_reader_delayed_at_its_start_reads_the_newest_state(engine: LmdbEngine) -> None:
    """LMDB may give newer tables under an older number."""
    handle = engine._env.handle
    engine.write(Write(rows=[ROW]))

    class HeldUp:
        """Others commit twice while the first transaction begins."""

        def __init__(self) -> None:
            self.begun = 0

        def begin(self, **options: Any) -> Any:
            txn = handle.begin(**options)
            self.begun += 1
            if self.begun == 1:
                elsewhere(
                    engine,
                    "from casstore.engine.protocol import PutRow\n"
                    "engine.write(Write(rows=[PutRow('leases', b'key', b'one')]))\n"
                    "engine.write(Write(rows=[PutRow('leases', b'key', b'two')]))",
                )
            return txn

        def __getattr__(self, name: str) -> Any:
            return getattr(handle, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._env, "handle", HeldUp())
        assert engine.get_rows([RowKey("leases", b"key")]) == [b"two"]


def test_a_writer_continues_after_ids_of_another_process_that_it_has_only_read(
    tmp_path: Path,
) -> None:
    """Readers learn of a commit without learning which ids it has taken; writers must."""
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    first, theirs, ours = new_blob(b"first"), new_blob(b"theirs"), new_blob(b"ours")
    put_objects(engine, first)
    elsewhere(engine, "engine.write(Write(objects=[new_blob(b'theirs')]))")
    assert_reads_back(engine, first, theirs)
    put_objects(engine, ours)
    assert_reads_back(engine, first, theirs, ours)
    assert [info.id for info in all_objects(engine)] == [3, 2, 1]
    engine.close()
