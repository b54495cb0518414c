"""A cache on disk of what a server holds: right or silent, whatever happens to its files."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from casstore.engine import forks
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.postgres.disk_cache import MIN_LIMIT_BYTES, DiskCache
from casstore.engine.protocol import StoredObject, Write
from casstore.errors import StorageError
from casstore.format.digest import Kind
from casstore.testing.engine_fixtures import new_blob, new_object

STORE, EPOCH = 7, 1
SMALL = [new_blob(b"%d " % n * 300) for n in range(40)]


def opened(path: Path, *, limit_bytes: int = 64 << 20, epoch: int = EPOCH) -> DiskCache:
    cache = DiskCache(str(path), limit_bytes)
    cache.begin(STORE, epoch)
    return cache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    made = opened(tmp_path)
    yield made
    made.close()


def fill(cache: DiskCache) -> None:
    cache.put(
        [(item.digest, StoredObject(item.kind, item.data)) for item in SMALL], cache.generation
    )


def found(cache: DiskCache) -> int:
    """How many are kept; each is what it should be."""
    kept = cache.find([item.digest for item in SMALL])
    for item in SMALL:
        assert kept.get(item.digest) in (None, StoredObject(item.kind, item.data))
    return len(kept)


def shelves(path: Path) -> list[Path]:
    return sorted(path.glob("objects-1/*/*-*"))


def size_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("data.mdb"))


def test_cached_objects_are_found_by_the_next_process(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert found(first) == 0
    fill(first)
    assert found(first) == len(SMALL)
    first.close()
    assert found(first) == 0
    second = opened(tmp_path)
    assert found(second) == len(SMALL)
    second.close()


def test_an_object_that_does_not_match_its_digest_is_not_cached(cache: DiskCache) -> None:
    # A rope has the digest of its content; an object of an unknown kind cannot be hashed.
    odd = [new_object(b"x" * 100, kind=Kind.ROPE), new_object(b"y" * 100, kind=99)]
    cache.put([(item.digest, StoredObject(item.kind, item.data)) for item in odd], 0)
    assert cache.find([item.digest for item in odd]) == {}


def test_cached_content_that_does_not_match_its_digest_is_rejected(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    fill(cache)
    cache.close()
    [shelf] = shelves(tmp_path)
    engine = LmdbEngine(str(shelf), durability="relaxed", auto_train=False)
    wrong = new_blob(b"wanted")
    engine.write(Write(objects=[wrong._replace(data=b"another")]))
    engine.close()
    cache = opened(tmp_path)
    with pytest.warns(RuntimeWarning, match="does not match its digest"):
        assert cache.find([wrong.digest]) == {}
    # It is recreated.
    fill(cache)
    assert found(cache) == len(SMALL)
    cache.close()


# --- bounds --------------------------------------------------------------------------------------


def test_the_cache_stays_within_its_limit_and_keeps_recently_read_objects(tmp_path: Path) -> None:
    cache = opened(tmp_path, limit_bytes=MIN_LIMIT_BYTES)
    source = random.Random(1)
    favourite = new_blob(source.randbytes(5000))
    cache.put([(favourite.digest, StoredObject(favourite.kind, favourite.data))], 0)
    rounds = 4 * MIN_LIMIT_BYTES // 200_000
    for _ in range(rounds):
        items = [new_blob(source.randbytes(20_000)) for _ in range(10)]
        cache.put([(item.digest, StoredObject(item.kind, item.data)) for item in items], 0)
        # One write more than half of it, and what is only in the log, on each of two shelves.
        assert size_bytes(tmp_path) <= MIN_LIMIT_BYTES + (2 << 20)
        assert favourite.digest in cache.find([favourite.digest])
    assert len(shelves(tmp_path)) == 2
    huge = new_blob(bytes(MIN_LIMIT_BYTES))
    cache.put([(huge.digest, StoredObject(huge.kind, huge.data))], 0)
    assert cache.find([huge.digest]) == {}
    cache.close()


def test_more_objects_than_one_batch_are_all_cached(cache: DiskCache) -> None:
    source = random.Random(5)
    items = [new_blob(source.randbytes(300_000)) for _ in range(11)]
    stored = {item.digest: StoredObject(item.kind, item.data) for item in items}
    cache.put(stored.items(), cache.generation)
    assert cache.find(list(stored)) == stored


def test_the_cache_stops_using_its_files_after_repeated_failures(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are recreated twice; a third failure would repeat for every object."""
    tried = 0

    def fail(engine: LmdbEngine, write: Write) -> None:
        nonlocal tried
        tried += 1
        raise StorageError("the disk is worn out")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbEngine, "write", fail)
        with pytest.warns(RuntimeWarning, match="worn out"):
            fill(cache)
        # Told of once: warnings are errors here.
        for _ in range(4):
            fill(cache)
    assert tried == 3
    fill(cache)
    assert found(cache) == 0


# --- what is gone --------------------------------------------------------------------------------


def test_clearing_the_cache_leaves_no_file_on_the_disk(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    fill(one)
    before = other.generation
    fill(other)
    one.clear()
    assert shelves(tmp_path) == []
    assert not list(tmp_path.rglob("data.mdb"))
    # The other one notices before it says anything.
    assert found(other) == 0
    # What was read before may be among what went.
    one.put([(SMALL[0].digest, StoredObject(SMALL[0].kind, SMALL[0].data))], before)
    assert found(one) == 0
    fill(one)
    assert found(one) == len(SMALL)
    one.close()
    other.close()


def blob(number: int) -> tuple[bytes, StoredObject]:
    item = SMALL[number]
    return item.digest, StoredObject(item.kind, item.data)


@pytest.mark.parametrize("went", [DiskCache.clear, lambda cache: cache.pass_on_to(EPOCH + 1)])
def test_an_object_read_before_another_process_cleared_the_cache_is_not_cached(
    tmp_path: Path, went: Callable[[DiskCache], None]
) -> None:
    """Erased bytes would come back into a file, though there was none to be seen going."""
    one, other = opened(tmp_path), opened(tmp_path)
    before = other.generation
    # The server is asked here, and answers with what is removed next.
    went(one)
    other.put([blob(0)], before)
    assert other.find([blob(0)[0]]) == {}
    # What is read from now on is kept.
    other.put([blob(1)], other.generation)
    assert list(other.find([blob(0)[0], blob(1)[0]])) == [blob(1)[0]]
    one.close()
    other.close()


def test_an_object_removed_while_it_is_read_is_not_copied_to_the_newer_shelf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(tmp_path, limit_bytes=MIN_LIMIT_BYTES)
    cache.put([blob(0)], cache.generation)
    source = random.Random(2)
    while len(shelves(tmp_path)) < 2:
        item = new_blob(source.randbytes(200_000))
        cache.put([(item.digest, StoredObject(item.kind, item.data))], cache.generation)
    read = LmdbEngine.get_many

    def read_and_removed(engine: LmdbEngine, digests: Sequence[bytes]) -> list[StoredObject | None]:
        found = read(engine, digests)
        if any(found):
            cache.clear()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(LmdbEngine, "get_many", read_and_removed)
        assert cache.find([blob(0)[0]])
    assert cache.find([blob(0)[0]]) == {}
    cache.close()


def test_ctrl_c_while_the_lock_is_taken_leaves_no_thread_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(tmp_path)
    fill(cache)
    lock = fcntl.flock

    def interrupted(handle: forks.Descriptor, operation: int) -> None:
        lock(handle, operation)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.clear()
    [place] = tmp_path.glob("objects-1/*/lock")
    with open(place) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert found(cache) == len(SMALL)
    cache.close()


def test_a_collection_invalidates_objects_cached_before_it(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    fill(one)
    assert found(one) == len(SMALL)
    one.pass_on_to(EPOCH + 1)
    assert found(one) == 0
    assert shelves(tmp_path) == []
    fill(one)
    # Who has not heard of it learns of it here, and keeps nothing that it read before.
    before = other.generation
    other.put([(b"\1" * 32, StoredObject(0, b"read before"))], before)
    assert other.generation != before
    assert other.find([b"\1" * 32]) == {}
    assert found(other) == len(SMALL)
    one.close()
    other.close()


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_objects_cached_in_another_epoch_than_the_servers_are_not_used(
    tmp_path: Path, epoch: int
) -> None:
    cache = opened(tmp_path)
    fill(cache)
    cache.close()
    # Earlier: the server was set back to a backup, and what came after it never was.
    cache = opened(tmp_path, epoch=epoch)
    assert found(cache) == 0
    cache.close()


def test_stores_do_not_share_their_caches(tmp_path: Path, cache: DiskCache) -> None:
    fill(cache)
    other = DiskCache(str(tmp_path), 64 << 20)
    other.begin(STORE + 1, EPOCH)
    assert found(other) == 0
    other.close()


# --- damage --------------------------------------------------------------------------------------

FLIPS = """
    import random, shutil, sys, warnings
    from pathlib import Path
    from tests.engine.postgres.test_disk_cache import SMALL, fill, found, opened, shelves
    warnings.simplefilter("ignore")
    scratch, count = Path(sys.argv[1]), int(sys.argv[2])
    sound = scratch / "sound"
    cache = opened(sound)
    fill(cache)
    cache.close()
    [shelf] = shelves(sound)
    data = (shelf / "data.mdb").read_bytes()
    source = random.Random(4)
    headers = [page + at for page in range(0, len(data), 4096) for at in range(24)]
    # Where pages say where their entries are: LMDB follows it out of the file, and dies.
    deadly = [page + at for page in range(0, len(data), 4096) for at in (27, 31)]
    kept = 0
    for number in range(count + len(deadly)):
        place = scratch / f"flipped-{number}"
        shutil.copytree(sound, place)
        damaged = bytearray(data)
        at = source.choice(headers) if number % 2 else source.randrange(len(data))
        bit = source.randrange(8)
        if number >= count:
            at, bit = deadly[number - count], 7
        damaged[at] ^= 1 << bit
        if number < count and number % 7 == 6:
            damaged = damaged[: source.randrange(len(data))]
        [shelf] = shelves(place)
        (shelf / "data.mdb").write_bytes(damaged)
        print(number, at, flush=True)
        cache = opened(place)
        kept += found(cache)
        fill(cache)
        assert found(cache) == len(SMALL), "it was not recreated"
        cache.close()
        shutil.rmtree(place)
    # Most bits are of no page that is read, or make the whole file suspect.
    print("kept", kept, flush=True)
"""


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip


def test_a_bit_flip_or_truncation_of_the_cache_neither_raises_nor_kills_the_process(
    tmp_path: Path,
) -> None:
    ended = run(FLIPS, tmp_path, 40)
    assert ended.returncode == 0, ended.stdout[-200:] + ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1].startswith("kept ")


def test_an_unwritable_directory_is_reported_once_and_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("no directory")
    with pytest.warns(RuntimeWarning, match="cache"):
        cache = opened(place)
    # Each further warning would be an error.
    for _ in range(5):
        fill(cache)
        assert found(cache) == 0
    cache.clear()
    cache.close()
    assert place.read_text() == "no directory"


def test_a_cache_shelf_with_an_unreadable_file_is_recreated(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    fill(cache)
    cache.close()
    [shelf] = shelves(tmp_path)
    (shelf / "data.mdb").write_bytes(b"something else altogether" * 1000)
    with pytest.warns(RuntimeWarning):
        cache = opened(tmp_path)
    fill(cache)
    assert found(cache) == len(SMALL)
    cache.close()


# --- several processes ---------------------------------------------------------------------------

WORKER = """
    import random, sys
    from pathlib import Path
    from casstore.engine.protocol import StoredObject
    from casstore.testing.engine_fixtures import new_blob
    from tests.engine.postgres.test_disk_cache import MIN_LIMIT_BYTES, SMALL, fill, found, opened
    place, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    source = random.Random(seed)
    cache = opened(place, limit_bytes=MIN_LIMIT_BYTES)
    print("ready", flush=True)
    for number in range(rounds):
        found(cache)
        fill(cache)
        items = [new_blob(source.randbytes(20_000)) for _ in range(5)]
        cache.put([(i.digest, StoredObject(i.kind, i.data)) for i in items], cache.generation)
        if not number % 40 and seed:
            cache.clear()
        print(number, flush=True)
    cache.close()
    print("done", flush=True)
"""


def started(place: Path, seed: int, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(WORKER), str(place), str(seed),
         str(rounds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip


def test_several_processes_share_the_cache_while_they_clear_it(tmp_path: Path) -> None:
    workers = [started(tmp_path, seed, 120) for seed in range(3)]
    for worker in workers:
        said, complaints = worker.communicate(timeout=60)
        # No warning either: what another throws away is no trouble.
        assert said.endswith("done\n"), complaints
    assert len(shelves(tmp_path)) <= 2
    assert size_bytes(tmp_path) <= MIN_LIMIT_BYTES + (2 << 20)


def test_a_killed_writer_leaves_the_cache_sound(tmp_path: Path) -> None:
    for seed in range(4):
        worker = started(tmp_path, 0, 100_000)
        assert worker.stdout is not None
        for _ in range(5 + 9 * seed):
            worker.stdout.readline()
        os.kill(worker.pid, signal.SIGKILL)
        worker.communicate()
        # Warnings are errors here: nothing is amiss.
        cache = opened(tmp_path, limit_bytes=MIN_LIMIT_BYTES)
        assert found(cache) in (0, len(SMALL))
        fill(cache)
        assert found(cache) == len(SMALL)
        cache.close()
