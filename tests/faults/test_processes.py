"""Many processes, one store: forks, races to create it, killed readers, rights, and strangers."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, RowIs, RowKey, Write
from casstore.errors import (
    BusyError,
    CasstoreError,
    ConditionFailedError,
    CorruptionError,
    ForeignStoreError,
    ForkedError,
    FormatVersionError,
    InvalidInputError,
    ReadOnlyError,
    StorageError,
    StoreNotFoundError,
)
from tests.faults.children import in_child

ROOT = Path(__file__).parents[2]
COUNTER = RowKey("records", b"counter")
PATIENCE_S = 60


def python(script: str, *args: object) -> subprocess.Popen[str]:
    """Start another process on the same casstore."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def finish(process: subprocess.Popen[str], said: str | None = None) -> str:
    """Let a process end by itself, without an error."""
    out, err = process.communicate(said, timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return out.strip()


def first_line(process: subprocess.Popen[str]) -> str:
    """Wait until a process says something."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[casstore.Store]:
    with casstore.open(place, "relaxed") as opened:
        yield opened


class TestFork:
    def test_a_store_opened_before_a_fork_is_refused_in_the_child(
        self, store: casstore.Store
    ) -> None:
        digest = store.put_value({"before": "the fork"})

        def use() -> str:
            for call in (
                lambda: store.get_value(digest),
                lambda: store.put_value(1),
                lambda: store.missing([digest]),
                lambda: store.engine.scan_rows("records"),
                store.flush,
            ):
                try:
                    call()
                except ForkedError:
                    continue
                return f"{call} went through"
            store.close()
            return "refused"

        assert in_child(use) == "refused"
        assert store.get_value(digest) == {"before": "the fork"}

    def test_a_child_reopens_the_store_and_both_continue(
        self, store: casstore.Store, place: Path
    ) -> None:
        before = store.put_value({"before": "the fork"})

        def use() -> str:
            with casstore.open(place, "relaxed") as own:
                assert own.get_value(before) == {"before": "the fork"}
                return str(own.put_value({"by": "the child"}))

        answer = in_child(use)
        assert store.get_value(bytes.fromhex(answer)) == {"by": "the child"}
        after = store.put_value({"by": "the parent"})
        assert store.get_value(after) == {"by": "the parent"}

    def test_twenty_forks_during_reads_and_writes_disturb_no_thread(
        self, store: casstore.Store, place: Path
    ) -> None:
        digests = store.put_many([{"number": number} for number in range(50)])
        stop = threading.Event()
        troubles: list[BaseException] = []
        rounds = [0] * 4

        def work(me: int) -> None:
            while not stop.is_set():
                try:
                    if me % 2:
                        assert store.get_many(digests)[-1] == {"number": 49}
                    else:
                        own = {"by": me, "round": rounds[me]}
                        assert store.get_value(store.put_value(own)) == own
                    rounds[me] += 1
                except BaseException as exc:
                    troubles.append(exc)
                    return

        def use() -> str:
            try:
                store.get_value(digests[0])
                return "the inherited store was not refused"
            except ForkedError:
                pass
            with casstore.open(place, "relaxed") as own:
                assert own.get_many(digests)[7] == {"number": 7}
                own.put_value({"pid": os.getpid()})
            return "fine"

        threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
        for thread in threads:
            thread.start()
        try:
            answers = {in_child(use) for _ in range(20)}
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        assert answers == {"fine"}
        assert troubles == []
        assert all(rounds)
        assert isinstance(store.engine, LmdbEngine)
        assert store.engine.verify() >= 50 + 20 + rounds[0] + rounds[2]


OPEN_AND_PUT = """
import sys, casstore
print("ready", flush=True)
sys.stdin.readline()
with casstore.open(sys.argv[1]) as store:
    print(store.put_value({"by": int(sys.argv[2])}), flush=True)
"""

COUNT = """
import sys, casstore
from casstore.engine.protocol import PutRow, RowIs, RowKey, Write
from casstore.errors import ConditionFailedError
place = RowKey("records", b"counter")
with casstore.open(sys.argv[1], "relaxed") as store:
    raised = 0
    while raised < int(sys.argv[3]):
        found = store.engine.get_rows([place])[0]
        value = b"%d" % (int(found or b"0") + 1)
        try:
            store.engine.write(
                Write(conditions=[RowIs(*place, found)], rows=[PutRow(*place, value)]))
        except ConditionFailedError:
            continue
        raised += 1
        print(store.put_value({"by": sys.argv[2], "number": raised}))
"""


class TestTogether:
    def test_sixteen_processes_that_create_a_store_at_once_make_one(self, place: Path) -> None:
        racers = [python(OPEN_AND_PUT, place, number) for number in range(16)]
        for racer in racers:
            assert first_line(racer) == "ready"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        digests = [bytes.fromhex(finish(racer)) for racer in racers]
        with casstore.open(place) as store:
            assert store.get_many(digests) == [{"by": number} for number in range(16)]
        assert not (place / "data.mdb.new").exists()

    def test_two_processes_lose_no_increment_of_a_counter(self, place: Path) -> None:
        casstore.open(place).close()
        counters = [python(COUNT, place, name, 150) for name in ("a", "b")]
        digests = [bytes.fromhex(line) for counter in counters for line in finish(counter).split()]
        with casstore.open(place) as store:
            assert store.engine.get_rows([COUNTER]) == [b"300"]
            assert len(digests) == 300
            assert store.missing(digests) == []
            assert store.get_many(digests)[150] == {"by": "b", "number": 1}

    def test_processes_with_different_durability_share_a_store(self, place: Path) -> None:
        casstore.open(place).close()
        counters = [
            python(COUNT.replace('"relaxed"', f'"{kind}"'),
                   place, kind, 100)
            for kind in ("full", "relaxed")
        ]  # fmt: skip
        digests = [bytes.fromhex(line) for counter in counters for line in finish(counter).split()]
        with casstore.open(place) as store:
            assert store.engine.get_rows([COUNTER]) == [b"200"]
            assert store.missing(digests) == []

    def test_opening_twice_in_one_process_shares_one_store(self, place: Path) -> None:
        with casstore.open(place) as first:
            second = casstore.open(place)
            link = place.parent / "link"
            link.symlink_to(place)
            third = casstore.open(link)
            digest = first.put_value([1])
            assert second.get_value(digest) == third.get_value(digest) == [1]
            second.close()
            third.close()
            assert first.get_value(digest) == [1]
            with pytest.raises(BusyError):
                casstore.open(place, verify=True)

    def test_a_verifying_open_raises_busy_error_while_another_process_has_the_store_open(
        self, place: Path
    ) -> None:
        other = python(OPEN_AND_PUT + "    sys.stdin.readline()\n", place, 1)
        assert other.stdin is not None
        assert first_line(other) == "ready"
        other.stdin.write("go\n")
        other.stdin.flush()
        assert len(first_line(other)) == 64
        with pytest.raises(BusyError):
            casstore.open(place, verify=True)
        finish(other, "done\n")
        casstore.open(place, verify=True).close()

    def test_the_slot_of_a_killed_reader_does_not_stop_pages_from_being_reused(
        self, place: Path
    ) -> None:
        reader = """
import sys, casstore
store = casstore.open(sys.argv[1], readonly=True)
with store.engine._env.reading() as txn:
    print("inside", flush=True)
    sys.stdin.readline()
"""
        with casstore.open(place, "relaxed") as store:
            churn(store, 5)
        other = python(reader, place)
        assert first_line(other) == "inside"
        with casstore.open(place, "relaxed") as store:
            before = (place / "data.mdb").stat().st_size
            churn(store, 40)
            held = (place / "data.mdb").stat().st_size
            assert held > before + 40 * 10_000, "a live reader keeps its pages"
            other.send_signal(signal.SIGKILL)
            other.communicate()
        with casstore.open(place, "relaxed") as store:
            # Opening cleared the slot; from here on the file has all the room it needs.
            churn(store, 5)
            settled = (place / "data.mdb").stat().st_size
            churn(store, 120)
            assert (place / "data.mdb").stat().st_size <= settled + 200_000


def churn(store: casstore.Store, commits: int) -> None:
    """Replace one large row again and again, in the tables."""
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    for number in range(commits):
        value = number.to_bytes(4, "big") * 5000
        engine.write(Write(rows=[PutRow("records", b"large", value)]))
        engine.apply_log()


class TestRights:
    def test_only_the_owner_can_access_the_files_of_a_store(self, place: Path) -> None:
        old = os.umask(0)
        try:
            with casstore.open(place, "relaxed") as store:
                store.put_value(1)
                for path in (place, *place.rglob("*")):
                    mode = 0o700 if path.is_dir() else 0o600
                    assert path.stat().st_mode & 0o777 == mode, path
        finally:
            os.umask(old)

    def test_a_read_only_store_refuses_writes_and_creates_nothing(self, place: Path) -> None:
        with pytest.raises(StoreNotFoundError):
            casstore.open(place, readonly=True)
        assert not place.exists()
        with casstore.open(place) as store:
            digest = store.put_value({"a": 1})
        before = contents_of(place)
        with casstore.open(place, readonly=True) as store:
            assert store.get_value(digest) == {"a": 1}
            with pytest.raises(ReadOnlyError):
                store.put_value({"b": 2})
            with pytest.raises(ReadOnlyError):
                store.engine.write(Write(rows=[PutRow("records", b"k", b"v")]))
        assert contents_of(place) == before

    def test_a_reader_works_concurrently_with_a_writer_and_sees_its_commits(
        self, place: Path
    ) -> None:
        script = """
import sys, casstore
with casstore.open(sys.argv[1], readonly=True) as store:
    for line in sys.stdin:
        print(store.get_value(bytes.fromhex(line.strip()))["number"], flush=True)
"""
        with casstore.open(place) as store:
            reader = python(script, place)
            assert reader.stdin is not None
            for number in range(20):
                reader.stdin.write(f"{store.put_value({'number': number})}\n")
                reader.stdin.flush()
                assert first_line(reader) == str(number)
            finish(reader)

    def test_a_store_on_a_read_only_file_system_can_be_read(self, place: Path) -> None:
        with casstore.open(place) as store:
            digest = store.put_value({"a": 1})
        shutil.rmtree(place / "locks")
        mount = place.parent / "mounted"
        mount.mkdir()
        if not bind_read_only(place, mount):
            pytest.skip("this user cannot mount; the next test covers rights")
        try:
            with casstore.open(mount, readonly=True) as store:
                assert store.get_value(digest) == {"a": 1}
            with pytest.raises(StorageError):
                casstore.open(mount)
        finally:
            subprocess.run(["umount", str(mount)], check=True)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_a_store_of_another_user_raises_a_permission_error(self, tmp_path: Path) -> None:
        # Below a directory that others may enter, unlike pytest's.
        place = Path("/var/tmp") / f"casstore-{os.getpid()}" / "store"
        place.parent.mkdir(mode=0o755)
        script = """
import os, sys, casstore, lmdb.verify
# Everything is imported while this user may still read it.
from casstore.engine.lmdb import sharing
from casstore.errors import CasstoreError
os.setgid(65534); os.setuid(65534)
for readonly in (True, False):
    try:
        with casstore.open(sys.argv[1], readonly=readonly) as store:
            print(store.get_value(bytes.fromhex(sys.argv[2])))
    except CasstoreError as exc:
        print(type(exc).__name__)
"""
        try:
            with casstore.open(place) as store:
                digest = store.put_value({"a": 1})
            assert finish(python(script, place, digest)).split("\n") == ["StorageError"] * 2
            for path in (place, *place.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            # The data may be read now, but a reader must also write to LMDB's lock table.
            assert finish(python(script, place, digest)).split("\n") == ["StorageError"] * 2
        finally:
            shutil.rmtree(place.parent)


def bind_read_only(source: Path, target: Path) -> bool:
    """Show ``source`` at ``target``, read-only, if this user may."""
    if shutil.which("mount") is None:
        return False
    bound = subprocess.run(["mount", "--bind", source, target], capture_output=True, check=False)
    if bound.returncode:
        return False
    subprocess.run(["mount", "-o", "remount,ro,bind", target], check=True)
    return True


def contents_of(place: Path) -> dict[str, str]:
    """Every file but LMDB's lock table, by a hash of its bytes."""
    return {
        path.relative_to(place).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name != "lock.mdb" and "locks" not in path.parts
    }


class TestStrangers:
    def refused(self, place: Path, error: type[CasstoreError]) -> None:
        """Every way to open raises ``error`` and changes no byte."""
        before = contents_of(place)
        for options in ({}, {"readonly": True}, {"create": False}, {"verify": True}):
            with pytest.raises(error) as caught:
                casstore.open(place, **options)  # type: ignore[arg-type]
            assert type(caught.value) is error, options
        assert contents_of(place) == before

    @pytest.mark.parametrize("version", [0, 1])
    def test_a_foreign_lmdb_environment_is_refused_and_untouched(
        self, place: Path, version: int
    ) -> None:
        with lmdb.open(str(place), map_size=1 << 24, max_dbs=4, lib_version=version) as env:
            mine = env.open_db(b"mine")
            with env.begin(write=True) as txn:
                txn.put(b"key", b"value", db=mine)
        self.refused(place, ForeignStoreError)
        with lmdb.open(str(place), map_size=1 << 24, max_dbs=4) as env:
            mine = env.open_db(b"mine", create=False)
            with env.begin() as txn:
                assert txn.get(b"key", db=mine) == b"value"

    def test_an_lmdb_environment_without_tables_is_refused(self, place: Path) -> None:
        lmdb.open(str(place), map_size=1 << 24).close()
        self.refused(place, ForeignStoreError)

    @pytest.mark.parametrize("content", [b"", b"not LMDB at all\n", bytes(8192)])
    def test_a_file_that_is_not_an_lmdb_environment_is_refused(
        self, place: Path, content: bytes
    ) -> None:
        place.mkdir()
        (place / "data.mdb").write_bytes(content)
        self.refused(place, CorruptionError)

    def test_a_directory_with_other_files_is_left_alone(self, place: Path) -> None:
        place.mkdir()
        (place / "thesis.txt").write_text("my only copy")
        for options in ({}, {"create": False}, {"readonly": True}):
            with pytest.raises(ForeignStoreError):
                casstore.open(place, **options)  # type: ignore[arg-type]
        assert [path.name for path in place.iterdir()] == ["thesis.txt"]

    def test_a_file_where_a_directory_should_be_is_refused(self, place: Path) -> None:
        place.write_text("a file")
        with pytest.raises(InvalidInputError):
            casstore.open(place)
        assert place.read_text() == "a file"

    def test_a_newer_format_is_refused_and_the_error_has_its_number(self, place: Path) -> None:
        casstore.open(place).close()
        self.patch_meta(place, b"format", b"99")
        self.refused(place, FormatVersionError)
        with pytest.raises(FormatVersionError, match="upgrade") as caught:
            casstore.open(place)
        assert caught.value.found == 99

    @pytest.mark.parametrize(
        ("key", "value", "error"),
        [
            (b"family", b"somebody else", ForeignStoreError),
            (b"family", None, CorruptionError),
            (b"format", None, CorruptionError),
            (b"format", b"", CorruptionError),
            (b"format", b"one", CorruptionError),
            (b"format", b"\xb2", CorruptionError),
            (b"format", b"9" * 5000, CorruptionError),
        ],
    )
    def test_a_damaged_header_is_refused(
        self, place: Path, key: bytes, value: bytes | None, error: type[CasstoreError]
    ) -> None:
        casstore.open(place).close()
        self.patch_meta(place, key, value)
        self.refused(place, error)

    def patch_meta(self, place: Path, key: bytes, value: bytes | None) -> None:
        with lmdb.open(str(place), map_size=1 << 24, max_dbs=32) as env:
            meta = env.open_db(b"meta", create=False)
            with env.begin(write=True) as txn:
                if value is None:
                    txn.delete(key, db=meta)
                else:
                    txn.put(key, value, db=meta)


def test_threads_lose_no_increment_of_a_counter(store: casstore.Store) -> None:
    def count() -> None:
        raised = 0
        while raised < 50:
            found = store.engine.get_rows([COUNTER])[0]
            value = b"%d" % (int(found or b"0") + 1)
            try:
                store.engine.write(
                    Write(conditions=[RowIs(*COUNTER, found)], rows=[PutRow(*COUNTER, value)])
                )
            except ConditionFailedError:
                continue
            raised += 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.engine.get_rows([COUNTER]) == [b"200"]


@pytest.mark.parametrize("is_new", [True, False])
def test_without_address_space_for_the_map_the_error_names_the_limit_to_raise(
    tmp_path: Path, is_new: bool
) -> None:
    """A terabyte of addresses is nothing to most systems, and too much where ulimit -v is set."""
    if not is_new:
        casstore.open(tmp_path / "s").close()
    script = (
        "import resource, sys\n"
        "import casstore, casstore.engine.lmdb.sharing\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))\n"
        "try:\n"
        "    casstore.open(sys.argv[1])\n"
        "except casstore.errors.AddressSpaceError as exc:\n"
        "    print(exc)\n"
        "with casstore.open(sys.argv[1], map_bytes=1 << 30) as store:\n"
        "    print(store.get_blob(store.put_blob(b'it fits')).decode())\n"
    )
    told, fits = finish(python(script, tmp_path / "s")).splitlines()
    assert "ulimit -v" in told
    assert "map_bytes" in told
    assert fits == "it fits"
