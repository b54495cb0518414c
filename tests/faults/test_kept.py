"""Durability ``relaxed``: what a power loss leads back to is whole, whatever came later."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

import casstore
from casstore.engine.lmdb import directory, environment, guard, verification
from casstore.engine.lmdb import engine as lmdb_engine
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.keeping import Keeper
from casstore.engine.lmdb.kept import KeptFile, KeptState, read_kept
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import (
    BusyError,
    CasstoreError,
    CorruptionError,
    StorageError,
    StorageFullError,
)
from tests.faults.children import in_child

PAGE = 4096
LONG_AGO = 3600.0


def engine_of(store: casstore.Store) -> LmdbEngine:
    assert isinstance(store.engine, LmdbEngine)
    return store.engine


def keeper_of(store: casstore.Store) -> Keeper:
    keeper = engine_of(store)._env.keeper
    assert keeper is not None
    return keeper


def standing(store: casstore.Store) -> list[int]:
    return keeper_of(store).standing


def put(store: casstore.Store, name: str, size: int = 3000) -> casstore.Digest:
    """Commit a blob and a row; the row of the same name is replaced again and again."""
    digest = store.put_blob(random.Random(name).randbytes(size))
    store.engine.write(Write(rows=[PutRow("heads", b"latest", name.encode())]))
    return digest


def latest(store: casstore.Store) -> bytes | None:
    return store.engine.get_rows([RowKey("heads", b"latest")])[0]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps a state unless told to."""
    monkeypatch.setattr(lmdb_engine, "_GATHER_S", LONG_AGO)


@pytest.fixture
def other_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "boot_id", lambda: "another boot")


WRITE = """
import sys
sys.path.insert(0, sys.argv[2])
import casstore
from pathlib import Path
from casstore.engine.lmdb import engine
from tests.faults.test_kept import put
place = Path(sys.argv[1])
engine._GATHER_S = 3600
store = casstore.open(place, "relaxed", lmdb_version=int(sys.argv[3]), auto_train=False)
for number in range(30):
    put(store, f"before {number}")
store.flush()
(place.parent / "kept image").write_bytes((place / "data.mdb").read_bytes())
for number in range(60):
    put(store, f"after {number}")
print("written", flush=True)
sys.stdin.readline()
"""


def written_and_killed(place: Path, lmdb_version: int) -> bytes:
    """The file as it was when its state was kept; much was committed after that."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(place), str(root), str(lmdb_version)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return (place.parent / "kept image").read_bytes()


@pytest.mark.parametrize("lmdb_version", [0, 1])
def test_whatever_pages_arrived_later_the_kept_state_is_whole(
    place: Path, lmdb_version: int, other_boot: None
) -> None:
    before = written_and_killed(place, lmdb_version)
    data = place / "data.mdb"
    after = data.read_bytes()
    assert after != before
    files = {name: (place / name).read_bytes() for name in ("kept", "unsynced")}
    for image in mixtures(before, after, 12):
        data.write_bytes(image)
        for name, content in files.items():
            (place / name).write_bytes(content)
        with casstore.open(place, verify=True) as store:
            assert latest(store) == b"before 29"
            assert sorted(os.listdir(place)) == ["data.mdb", "lock.mdb", "locks", "reserve"]
            digest = put(store, "and on it goes")
            assert digest in store
        casstore.open(place, verify=True).close()


FIRST = """
import sys
sys.path.insert(0, sys.argv[2])
import casstore
from casstore.engine.lmdb import engine
from tests.faults.test_kept import put
engine._GATHER_S = 3600
store = casstore.open(sys.argv[1], "relaxed", auto_train=False)
for number in range(20):
    put(store, f"first {number}")
print("written", flush=True)
sys.stdin.readline()
"""
SECOND = """
import sys
sys.path.insert(0, sys.argv[2])
import casstore
from pathlib import Path
from casstore.engine.lmdb import engine
from tests.faults.test_kept import put
place = Path(sys.argv[1])
engine._GATHER_S = 3600
store = casstore.open(place, "relaxed", auto_train=False)
(place.parent / "kept image").write_bytes((place / "data.mdb").read_bytes())
print("open", flush=True)
sys.stdin.readline()
store.engine._env.handle.reader_check()
for number in range(60):
    put(store, f"second {number}")
print("written", flush=True)
sys.stdin.readline()
"""


def test_a_writer_that_dies_takes_nobody_elses_state_away(place: Path, other_boot: None) -> None:
    writers = []
    for script, word in ((FIRST, b"written\n"), (SECOND, b"open\n")):
        writer = subprocess.Popen(
            [sys.executable, "-c", script, str(place), str(Path(__file__).parents[2])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert writer.stdout is not None
        assert writer.stdout.readline() == word
        writers.append(writer)
    first, second = writers
    first.kill()
    first.communicate()
    assert second.stdin is not None
    assert second.stdout is not None
    second.stdin.write(b"go\n")
    second.stdin.flush()
    assert second.stdout.readline() == b"written\n"
    second.kill()
    second.communicate()
    before = (place.parent / "kept image").read_bytes()
    after = (place / "data.mdb").read_bytes()
    for image in mixtures(before, after, 6):
        (place / "data.mdb").write_bytes(image)
        marks = {name: (place / name).read_bytes() for name in ("kept", "unsynced")}
        with casstore.open(place, verify=True) as store:
            assert latest(store) == b"first 19"
        for name, content in marks.items():
            (place / name).write_bytes(content)


def mixtures(before: bytes, after: bytes, count: int) -> Iterator[bytes]:
    """A page that was not flushed is on the disk as it was before, or as it became."""
    rng = random.Random(7)
    for _ in range(count):
        yield b"".join(
            (after if rng.random() < 0.5 else before)[at : at + PAGE].ljust(PAGE, b"\0")
            for at in range(0, len(after), PAGE)
        )


@pytest.mark.parametrize("durability", ["full", "relaxed", "process", "any"])
def test_under_the_same_boot_nothing_is_undone(place: Path, durability: str) -> None:
    written_and_killed(place, 0)
    with casstore.open(place, durability) as store:
        assert latest(store) == b"after 59"
    with casstore.open(place, verify=True) as store:
        assert latest(store) == b"after 59"


def test_who_may_only_read_does_not_undo(place: Path, other_boot: None) -> None:
    written_and_killed(place, 0)
    for _ in range(2):
        with pytest.raises(StorageError, match="open it once for writing"):
            casstore.open(place, readonly=True)
    casstore.open(place).close()
    with casstore.open(place, readonly=True) as store:
        assert latest(store) == b"before 29"


def test_a_torn_place_is_told_from_a_whole_one_and_the_file_proves_itself(
    place: Path, other_boot: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_and_killed(place, 0)
    kept = bytearray((place / "kept").read_bytes())
    half = len(kept) // 2
    # The place of the older state: the newer one counts, but what tore the one may have hurt more.
    boot = (place / "unsynced").read_text()
    newest = read_kept(str(place / "kept"), boot).newest
    assert newest is not None
    older = 0 if kept[half:].find(newest.pages) >= 0 else half
    kept[older + 300] ^= 1
    (place / "kept").write_bytes(kept)
    data = (place / "data.mdb").read_bytes()
    torn = data[: 2 * PAGE] + bytes(len(data) - 2 * PAGE)
    for _ in range(2):
        # Who is refused is refused again.
        (place / "data.mdb").write_bytes(torn)
        with pytest.raises(CorruptionError):
            casstore.open(place)
    (place / "data.mdb").write_bytes(data)
    proven = []
    prove = verification.verify_content

    def verify_content(env: environment.Environment) -> int:
        proven.append(env.path)
        return prove(env)

    monkeypatch.setattr(lmdb_engine, "verify_content", verify_content)
    with casstore.open(place) as store:
        assert latest(store) == b"before 29"
    assert len(proven) == 1


def test_without_a_kept_state_the_file_proves_itself_or_is_refused(
    place: Path, other_boot: None
) -> None:
    before = written_and_killed(place, 0)
    (place / "kept").unlink()
    data = place / "data.mdb"
    after = data.read_bytes()
    data.write_bytes(after[: 2 * PAGE] + before[2 * PAGE :].ljust(len(after) - 2 * PAGE, b"\0"))
    with pytest.raises(CorruptionError):
        casstore.open(place)


@pytest.mark.parametrize("commits", [1, 200])
def test_a_kept_state_of_another_file_is_not_returned_to(
    place: Path, other_boot: None, commits: int
) -> None:
    """As when a backup is put in the place of the file, which has come less far, or further."""
    written_and_killed(place, 0)
    with casstore.open(place.parent / "backup", "process", lmdb_version=0) as store:
        for number in range(commits):
            put(store, f"backup {number}")
    (place / "data.mdb").write_bytes((place.parent / "backup" / "data.mdb").read_bytes())
    with casstore.open(place, verify=True) as store:
        assert latest(store) == f"backup {commits - 1}".encode()


@pytest.mark.parametrize("damage", ["cut", "no pages", "foreign", "of another LMDB"])
def test_kept_pages_that_cannot_be_are_no_state_to_return_to(
    place: Path, other_boot: None, damage: str
) -> None:
    """Their hash is right, and yet they were an error without a type, or kept the store shut."""
    written_and_killed(place, 0)
    kept, boot = str(place / "kept"), (place / "unsynced").read_text()
    state = read_kept(kept, boot).newest
    assert state is not None
    pages = {
        "cut": state.pages[:300],
        "no pages": b"",
        "foreign": bytes(2 * PAGE),
        # The version of the format, behind the header of the page and the magic number.
        "of another LMDB": state.pages[:20] + b"\x09" + state.pages[21:],
    }[damage]
    (place / "kept").unlink()
    file = KeptFile(kept, boot, 0o600)
    file.keep(state._replace(pages=pages))
    file.close()
    with casstore.open(place) as store:
        assert latest(store) == b"after 59"


def test_a_copied_store_returns_to_what_was_kept_and_proves_itself(
    place: Path, other_boot: None
) -> None:
    """Who copies a directory in use gets a file and a kept state of different moments."""
    before = written_and_killed(place, 0)
    copy = place.parent / "copy"
    shutil.copytree(place, copy)
    data = copy / "data.mdb"
    content = data.read_bytes()
    found = read_kept(str(copy / "kept"), (copy / "unsynced").read_text()).newest
    assert found is not None
    with data.open("rb") as source:
        root = content.index(guard.read_root(source.fileno(), found.pages))
    torn = content[: 2 * PAGE].ljust(root, b"\0") + content[root : root + PAGE]
    data.write_bytes(torn.ljust(len(content), b"\0"))
    with pytest.raises(CorruptionError):
        casstore.open(copy)
    # And it is left as it was, for whoever can make more of it.
    assert data.read_bytes() == torn.ljust(len(content), b"\0")
    data.write_bytes(content[: 2 * PAGE] + before[2 * PAGE :].ljust(len(content), b"\0"))
    with casstore.open(copy) as store:
        assert latest(store) == b"before 29"


def test_a_backup_written_over_the_file_is_kept_from_the_first_commit_on(
    place: Path, unhurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the same by its inode, and what a killed writer had kept of it came later."""
    with casstore.open(place) as store:
        put(store, "backup")
    data = place / "data.mdb"
    backup = data.read_bytes()
    written_and_killed(place, 0)
    data.write_bytes(backup)
    store = casstore.open(place, "relaxed", auto_train=False)
    put(store, "one")
    store.flush()
    before = data.read_bytes()
    for number in range(20):
        put(store, f"later {number}")
    after = data.read_bytes()
    marks = {name: (place / name).read_bytes() for name in ("kept", "unsynced")}
    store.close()
    monkeypatch.setattr(directory, "boot_id", lambda: "another boot")
    for image in mixtures(before, after, 6):
        data.write_bytes(image)
        for name, content in marks.items():
            (place / name).write_bytes(content)
        with casstore.open(place, verify=True) as store:
            assert latest(store) == b"one"


@pytest.mark.parametrize("durability", ["relaxed", "any", "full", None])
def test_while_somebody_writes_no_boot_has_ended_whatever_its_name(
    place: Path, unhurried: None, durability: str | None
) -> None:
    """Containers may be given names of their own for the boot of the machine they share."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import casstore\n"
        "from casstore.engine.lmdb import directory\n"
        "from casstore.errors import BusyError\n"
        "from tests.faults.test_kept import latest, put\n"
        "directory.boot_id = lambda: 'a container'\n"
        "try:\n"
        "    store = casstore.open(sys.argv[1], sys.argv[3]) if len(sys.argv) > 3 else (\n"
        "        casstore.open(sys.argv[1], readonly=True))\n"
        "except BusyError:\n"
        "    print('busy')\n"
        "else:\n"
        "    with store:\n"
        "        print(latest(store).decode())\n"
        "        if not store.engine.readonly:\n"
        "            put(store, 'from the container')\n"
    )
    with casstore.open(place, "relaxed") as store:
        put(store, "one")
        store.flush()
        put(store, "two")
        marker = (place / "unsynced").read_text()
        arguments = [str(place), str(Path(__file__).parents[2])]
        arguments += [] if durability is None else [durability]
        answer = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
        )
        assert answer.stdout == ("busy\n" if durability == "full" else "two\n")
        # Both keep their states under one name, or neither could rely on what the other kept.
        assert (place / "unsynced").read_text() == marker
        newest = read_kept(str(place / "kept"), marker).newest
        assert newest is not None
        assert newest.transaction >= standing(store)[0]
        assert latest(store) == (b"two" if durability in ("full", None) else b"from the container")
    casstore.open(place, verify=True).close()


def test_where_the_system_has_no_fdatasync_a_state_is_kept_as_well(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS: then all that is known about the file is flushed as well."""
    monkeypatch.delattr(os, "fdatasync")
    flushed: list[str] = []
    fsync = os.fsync

    def flush(handle: int) -> None:
        flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", flush)
    with casstore.open(place, "relaxed") as store:
        put(store, "one")
        flushed.clear()
        store.flush()
        assert "kept" in flushed
        assert standing(store) == [engine_of(store)._env.handle.info()["last_txnid"]]
    assert sorted(os.listdir(place)) == ["data.mdb", "lock.mdb", "locks", "reserve"]


@pytest.fixture
def steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of names in the store's directory, and when the disk learns of it."""
    taken: list[str] = []
    unlink, sync = os.unlink, directory.sync_directory

    def remove(path: str) -> None:
        unlink(path)
        taken.append(f"remove {os.path.basename(path)}")

    def sync_directory(path: str) -> None:
        sync(path)
        if path == str(place):
            taken.append("sync")

    monkeypatch.setattr(os, "unlink", remove)
    monkeypatch.setattr(directory, "sync_directory", sync_directory)
    return taken


def test_the_marker_is_gone_for_good_before_what_was_kept_goes(
    place: Path, steps: list[str]
) -> None:
    """Else a power loss could bring both back, and undo what was flushed meanwhile."""
    with casstore.open(place, "relaxed") as store:
        put(store, "one")
        steps.clear()
    assert steps == ["remove unsynced", "sync", "remove kept"]
    # One was killed after the first step. Nobody can see that but by what it left behind.
    (place / "kept").touch()
    steps.clear()
    with casstore.open(place):
        assert steps == ["sync", "remove kept"]
        assert not (place / "kept").exists()


def test_who_writes_over_a_kept_state_knows_that_it_is_gone_for_good(
    place: Path, steps: list[str]
) -> None:
    """Also if another has removed it, who may have been killed before the disk knew."""
    written_and_killed(place, 0)
    (place / "kept").unlink()
    steps.clear()
    with casstore.open(place, "process"):
        assert steps == ["sync"]


def test_a_marker_that_cannot_be_written_is_not_left_empty(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next to open would verify the whole store for nothing."""
    casstore.open(place).close()

    def write_at(handle: int, content: bytes, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directory, "write_at", write_at)
    for durability in ("relaxed", "process"):
        with pytest.raises(StorageFullError):
            casstore.open(place, durability)
        assert not (place / "unsynced").exists()


def test_a_boot_that_has_no_name_is_a_typed_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_BOOT_ID", str(place.parent))
    with casstore.open(place) as store:
        put(store, "one")
    for durability in ("relaxed", "process"):
        with pytest.raises(StorageError, match="boot id"):
            casstore.open(place, durability)
    with casstore.open(place) as store:
        assert latest(store) == b"one"


def test_flushing_and_closing_keep_and_a_clean_end_leaves_nothing(
    place: Path, unhurried: None
) -> None:
    with casstore.open(place, "relaxed") as store:
        [first] = standing(store)
        put(store, "one")
        assert standing(store) == [first]
        store.flush()
        [second] = standing(store)
        assert second > first
        store.flush()
        assert standing(store) == [second]
        boot = (place / "unsynced").read_text()
        newest = read_kept(str(place / "kept"), boot).newest
        assert newest is not None
        assert newest.transaction == second
        put(store, "two")
    assert sorted(os.listdir(place)) == ["data.mdb", "lock.mdb", "locks", "reserve"]


def test_a_kept_state_goes_by_its_transaction_and_is_kept_once(
    place: Path, unhurried: None
) -> None:
    with casstore.open(place, "relaxed") as store:
        boot = (place / "unsynced").read_text()
        for name in ("one", "two"):
            put(store, name)
            newest = engine_of(store)._env.handle.info()["last_txnid"]
            store.flush()
            found = read_kept(str(place / "kept"), boot).newest
            assert found is not None
            assert found.transaction == newest
            assert standing(store) == [newest]
            content = (place / "kept").read_bytes()
            (place / "kept").write_bytes(bytes(len(content)))
            # Nothing was committed since, so there is nothing to keep.
            store.flush()
            assert not any((place / "kept").read_bytes())
            (place / "kept").write_bytes(content)


def test_a_marker_that_others_rely_on_is_not_written_anew(place: Path) -> None:
    """It would be empty for a moment, and a power loss then leads nowhere."""
    written_and_killed(place, 0)
    before = (place / "unsynced").stat()
    with casstore.open(place, "relaxed"):
        after = (place / "unsynced").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_who_closes_while_others_stay_leaves_its_commits_kept(place: Path, unhurried: None) -> None:
    casstore.open(place).close()
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import casstore\n"
        "store = casstore.open(sys.argv[1], 'relaxed')\n"
        "print('open', flush=True); sys.stdin.readline()"
    )
    root = Path(__file__).parents[2]
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(place), str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with casstore.open(place, "relaxed") as store:
            put(store, "mine")
            newest = engine_of(store)._env.handle.info()["last_txnid"]
        found = read_kept(str(place / "kept"), (place / "unsynced").read_text())
        assert found.newest is not None
        assert found.newest.transaction >= newest
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize("durability", ["relaxed", "process"])
def test_who_closes_last_flushes_what_one_left_who_was_killed_meanwhile(
    place: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """Its own flush came before the other's commits, and nobody is left to tell of them."""
    store = casstore.open(place, durability)
    env = engine_of(store)._env
    data = (place / "data.mdb").stat().st_ino
    done: list[str] = []
    let_go, fdatasync, unlink = env._let_go, os.fdatasync, os.unlink

    def let_go_and_meet_another() -> None:
        let_go()
        root = str(Path(__file__).parents[2])
        script = (
            "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
            "import casstore\n"
            "from tests.faults.test_kept import put\n"
            "put(casstore.open(sys.argv[1], sys.argv[3]), 'theirs')\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        subprocess.run([sys.executable, "-c", script, str(place), root, durability], check=False)
        done.append("killed")

    def flush(handle: int) -> None:
        fdatasync(handle)
        if os.fstat(handle).st_ino == data:
            done.append("flushed")

    def remove(path: str) -> None:
        unlink(path)
        done.append(os.path.basename(path))

    monkeypatch.setattr(env, "_let_go", let_go_and_meet_another)
    monkeypatch.setattr(os, "fdatasync", flush)
    monkeypatch.setattr(os, "unlink", remove)
    store.close()
    assert done[:3] == ["killed", "flushed", "unsynced"]
    monkeypatch.undo()
    with casstore.open(place) as store:
        assert latest(store) == b"theirs"


@pytest.mark.parametrize("durability", ["relaxed", "process"])
def test_a_store_moved_while_open_is_closed_where_it_is(place: Path, durability: str) -> None:
    with casstore.open(place, durability) as store:
        put(store, "one")
        moved = place.rename(place.parent / "moved")
        put(store, "two")
    assert not place.exists()
    with casstore.open(moved) as store:
        assert latest(store) == b"two"
    assert sorted(os.listdir(moved)) == ["data.mdb", "lock.mdb", "locks", "reserve"]


def test_behind_a_commit_a_state_is_kept_without_anybody_asking(place: Path) -> None:
    with casstore.open(place, "relaxed") as store:
        put(store, "one")
        newest = engine_of(store)._env.handle.info()["last_txnid"]
        while standing(store) != [newest]:
            time.sleep(0.001)


def test_an_idle_writer_does_not_keep_pages_from_others(place: Path) -> None:
    """It stands on a state that others have long left, until it looks again."""
    casstore.open(place).close()
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import casstore\n"
        "from tests.faults.test_kept import put\n"
        "with casstore.open(sys.argv[1], 'relaxed') as store:\n"
        "    put(store, 'theirs')\n"
        "    print(store.engine._env.handle.info()['last_txnid'])\n"
    )
    root = Path(__file__).parents[2]
    with casstore.open(place, "relaxed") as store:
        answer = subprocess.run(
            [sys.executable, "-c", script, str(place), str(root)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        while standing(store)[-1] < int(answer.stdout):
            time.sleep(0.01)


def test_one_who_was_killed_stands_there_no_longer_than_others_need_to_see_it(
    place: Path,
) -> None:
    """However few commits there are: it keeps pages from being used again."""
    casstore.open(place).close()
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "import casstore\n"
        "store = casstore.open(sys.argv[1], 'relaxed')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).parents[2])
    with casstore.open(place, "relaxed") as store:
        put(store, "one")
        subprocess.run([sys.executable, "-c", script, str(place), root], check=False)
        readers = engine_of(store)._env.handle.readers
        while any(line.split()[0] != str(os.getpid()) for line in readers().splitlines()[1:]):
            put(store, "and another")
            time.sleep(0.1)


def test_a_forked_child_takes_nothing_from_what_its_parent_stands_on(
    place: Path, unhurried: None
) -> None:
    with casstore.open(place, "relaxed") as store:
        put(store, "one")
        store.flush()

        def use_and_close() -> str:
            store.close()
            with casstore.open(place, "relaxed") as again:
                return str(put(again, "by the child"))

        assert bytes.fromhex(in_child(use_and_close)) in store
        [stood] = standing(store)
        readers = engine_of(store)._env.handle.readers()
        assert f"{os.getpid()} " in readers
        assert any(
            line.split()[0] == str(os.getpid()) and line.split()[-1] == str(stood)
            for line in readers.splitlines()[1:]
        )


class Failing:
    """An environment of LMDB whose disk fails."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> object:
        return getattr(self._handle, name)

    def sync(self, force: bool) -> None:
        error = lmdb.DiskError("mdb_env_sync: Input/output error")
        error.code = errno.EIO  # type: ignore[misc]
        raise error


def test_a_flush_that_failed_is_not_made_good_by_a_later_one(
    place: Path, unhurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system forgets pages that it could not write; a later flush knows nothing of them."""
    with casstore.open(place) as store:
        put(store, "zero")
    store = casstore.open(place, "relaxed")
    boot = (place / "unsynced").read_text()
    put(store, "one")
    env = engine_of(store)._env
    stood = standing(store)
    with monkeypatch.context() as patch:
        patch.setattr(env, "handle", Failing(env.handle))
        with pytest.raises(StorageError, match="may be lost"):
            store.flush()
    assert standing(store) == stood
    # Whoever joins now would believe the next flush.
    for durability in ("relaxed", "any"):
        script = (
            "import sys; sys.path.insert(0, sys.argv[2])\n"
            "import casstore\n"
            "from casstore.errors import StorageError\n"
            "try:\n"
            "    casstore.open(sys.argv[1], sys.argv[3])\n"
            "except StorageError as exc:\n"
            "    print(exc)\n"
        )
        root = str(Path(__file__).parents[2])
        answer = subprocess.run(
            [sys.executable, "-c", script, str(place), root, durability],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "has failed" in answer.stdout
    with pytest.raises(StorageError, match="may be lost"):
        store.flush()
    with pytest.raises(StorageError, match="may be lost"):
        put(store, "two")
    with pytest.raises(StorageError, match="may be lost"):
        store.close()
    # Neither the marker nor the state before has gone.
    assert (place / "unsynced").exists()
    found = read_kept(str(place / "kept"), boot)
    assert found.newest is not None
    assert found.newest.transaction == stood[0]
    # The cache holds the rest, but the disk may not: whoever opens it next has what both have.
    with pytest.raises(StorageError, match="once for writing"):
        casstore.open(place, readonly=True)
    with casstore.open(place, verify=True) as store:
        assert latest(store) == b"zero"
        assert sorted(os.listdir(place)) == ["data.mdb", "lock.mdb", "locks", "reserve"]


READ = """
import sys
sys.path.insert(0, sys.argv[2])
import casstore
from tests.faults.test_kept import latest
with casstore.open(sys.argv[1], readonly=True) as store:
    for _ in range(2):
        print(latest(store).decode(), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("more", [1, 2])
def test_nothing_is_undone_under_somebody_who_still_reads_it(
    place: Path, unhurried: None, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """LMDB goes on counting while the file is open: a writer would go on from either of two states.

    Which one, the parity of the last transaction decides; and it would write over what is read.
    """
    store = casstore.open(place, "relaxed", auto_train=False)
    put(store, "kept")
    store.flush()
    for number in range(more):
        store.engine.write(Write(rows=[PutRow("heads", b"latest", b"later %d" % number)]))
    reader = subprocess.Popen(
        [sys.executable, "-c", READ, str(place), str(Path(__file__).parents[2])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert reader.stdin is not None
    assert reader.stdout is not None
    seen = reader.stdout.readline()
    assert seen == f"later {more - 1}\n"
    env = engine_of(store)._env
    with monkeypatch.context() as patch:
        patch.setattr(env, "handle", Failing(env.handle))
        with pytest.raises(StorageError, match="may be lost"):
            store.flush()
    with pytest.raises(StorageError, match="may be lost"):
        store.close()
    for durability in ("full", "relaxed", "process", "any"):
        with pytest.raises(BusyError, match="still reads"):
            casstore.open(place, durability)
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == seen
    reader.communicate("\n")
    with casstore.open(place, verify=True) as store:
        assert latest(store) == b"kept"


def test_after_a_flush_that_failed_a_store_that_keeps_nothing_proves_itself(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = casstore.open(place, "process")
    put(store, "one")
    env = engine_of(store)._env
    with monkeypatch.context() as patch:
        patch.setattr(env, "handle", Failing(env.handle))
        with pytest.raises(StorageError):
            store.flush()
    put(store, "two")
    store.flush()
    store.close()
    assert (place / "unsynced").exists()
    proven = []
    prove = verification.verify_content

    def verify_content(env: environment.Environment) -> int:
        proven.append(env.path)
        return prove(env)

    monkeypatch.setattr(lmdb_engine, "verify_content", verify_content)
    with casstore.open(place, "process") as store:
        assert latest(store) == b"two"
    assert len(proven) == 1
    assert sorted(os.listdir(place)) == ["data.mdb", "lock.mdb", "locks", "reserve"]


@pytest.mark.parametrize("sound", [True, False])
def test_an_environment_opened_anew_stands_again_before_it_writes(
    place: Path, unhurried: None, monkeypatch: pytest.MonkeyPatch, sound: bool
) -> None:
    with casstore.open(place, "relaxed") as store:
        put(store, "one")
        env = engine_of(store)._env
        [before] = standing(store)
        if sound:
            with env.write_lock:
                env.reopen()
            [after] = standing(store)
            assert after > before
            put(store, "two")
            return
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", _refuse)
            with env.write_lock, pytest.raises(StorageError, match="open it again"):
                env.reopen()
        with pytest.raises(StorageError, match="open it again"):
            put(store, "two")
        with pytest.raises(StorageError, match="open it again"):
            store.close()
    with casstore.open(place) as store:
        assert latest(store) == b"one"


@pytest.mark.parametrize("where", ["_open", "stand_again", "keep"])
def test_an_environment_whose_opening_anew_was_interrupted_takes_no_more_writes(
    place: Path, unhurried: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nobody stands on the kept state any more: the next commits would write over its pages."""

    def interrupted(*_: object) -> None:
        if where == "_open":
            opened()
        raise KeyboardInterrupt

    store = casstore.open(place, "relaxed")
    put(store, "one")
    env = engine_of(store)._env
    opened = env._open
    owner = {"_open": env, "stand_again": keeper_of(store), "keep": keeper_of(store)._file}
    with monkeypatch.context() as patch:
        patch.setattr(owner[where], where, interrupted)
        with env.write_lock, pytest.raises(KeyboardInterrupt):
            env.reopen()
    with pytest.raises(StorageError, match="open it again"):
        put(store, "two")
    with pytest.raises(StorageError, match="open it again"):
        store.close()
    with casstore.open(place, verify=True) as store:
        assert latest(store) == b"one"


def test_what_could_not_be_opened_anew_fails_in_words(
    place: Path, unhurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody need know LMDB's own errors, and the thread that keeps must not die of one."""
    store = casstore.open(place, "relaxed")
    put(store, "one")
    env = engine_of(store)._env
    with monkeypatch.context() as patch:
        patch.setattr(env, "_open", lambda: _refuse(0))
        with env.write_lock, pytest.raises(OSError, match="Input/output"):
            env.reopen()
    uses: list[Callable[[], object]] = [
        store.flush, lambda: put(store, "two"), lambda: latest(store), store.close,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(CasstoreError):
            use()
    with casstore.open(place, verify=True) as store:
        assert latest(store) == b"one"


def _refuse(handle: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


# --- the file itself ------------------------------------------------------------------------


def state(transaction: int, inode: int = 5) -> KeptState:
    return KeptState(transaction, bytes([transaction]) * 2 * PAGE, inode, bytes(32))


def of_inode(inode: int) -> Callable[[KeptState], bool]:
    return lambda state: state.inode == inode


@pytest.fixture
def kept(tmp_path: Path) -> KeptFile:
    file = KeptFile(str(tmp_path / "kept"), "a boot", 0o600)
    file.prepare(PAGE, of_inode(5), fresh=True)
    return file


def test_the_newest_state_of_the_right_boot_is_found(kept: KeptFile, tmp_path: Path) -> None:
    path = str(tmp_path / "kept")
    assert read_kept(path, "a boot") == (None, False)
    for transaction in (1, 4, 9):
        kept.keep(state(transaction))
        assert read_kept(path, "a boot") == (state(transaction), False)
    assert read_kept(path, "another").newest is None
    assert read_kept(str(tmp_path / "none"), "a boot") == (None, False)
    # Somebody else was quicker.
    kept.keep(state(3))
    assert read_kept(path, "a boot").newest == state(9)


def test_a_later_state_is_flushed_by_whoever_relies_on_it(
    kept: KeptFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wrote it may have been killed before."""
    KeptFile(str(tmp_path / "kept"), "a boot", 0o600).keep(state(2))
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    kept.keep(state(1))
    assert len(flushed) == 1


def test_who_keeps_holds_nobody_up_while_the_disk_works(
    kept: KeptFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be stopped just then, for hours; others could neither flush nor close."""
    other = KeptFile(str(tmp_path / "kept"), "a boot", 0o600)
    fdatasync = os.fdatasync
    later = iter(range(2, 9))

    def meanwhile(handle: int) -> None:
        fdatasync(handle)
        # Waits for ever if the first one holds the lock.
        number = next(later)
        monkeypatch.setattr(os, "fdatasync", fdatasync)
        other.keep(state(number))
        monkeypatch.setattr(os, "fdatasync", meanwhile)

    monkeypatch.setattr(os, "fdatasync", meanwhile)
    kept.keep(state(1))
    assert read_kept(str(tmp_path / "kept"), "a boot").newest == state(2)
    kept.keep(state(5))
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert read_kept(str(tmp_path / "kept"), "a boot").newest in (state(5), state(6))


def test_no_place_is_written_before_the_other_is_on_the_disk(
    kept: KeptFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who was killed, or whose flush failed, leaves a place that only the cache has.

    Such a place is written again: what the system could not write it takes for written.
    """
    kept.keep(state(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", _refuse)
        with pytest.raises(StorageError):
            kept.keep(state(2))
    path = tmp_path / "kept"
    half = path.stat().st_size // 2
    before = path.read_bytes()
    done: list[object] = []
    pwrite, fdatasync = os.pwrite, os.fdatasync

    def write(handle: int, content: bytes, at: int) -> int:
        done.append(at // half)
        return pwrite(handle, content, at)

    def flush(handle: int) -> None:
        done.append("flushed")
        fdatasync(handle)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "fdatasync", flush)
    for file in (kept, KeptFile(str(path), "a boot", 0o600)):
        path.write_bytes(before)
        done.clear()
        file.keep(state(3))
        assert done == [1, "flushed", 0, "flushed"]
        assert read_kept(str(path), "a boot").newest == state(3)


def test_a_write_that_is_cut_short_is_no_write(
    kept: KeptFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that has room for some of it."""
    kept.keep(state(1))
    pwrite = os.pwrite
    room = PAGE

    def write(handle: int, content: bytes, at: int) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = pwrite(handle, content[:room], at)
        room -= written
        return written

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(StorageFullError):
        kept.keep(state(2))
    assert read_kept(str(tmp_path / "kept"), "a boot").newest == state(1)
    room = PAGE
    with pytest.raises(StorageFullError):
        kept.prepare(PAGE, of_inode(5), fresh=True)


def test_a_file_that_was_cut_off_is_made_whole_and_one_that_is_gone_is_missed(
    kept: KeptFile, tmp_path: Path
) -> None:
    path = tmp_path / "kept"
    for transaction, length in ((1, 0), (2, 100), (3, 9000), (4, 40_000)):
        os.truncate(path, length)
        kept.keep(state(transaction))
        assert read_kept(str(path), "a boot").newest == state(transaction)
    path.unlink()
    with pytest.raises(StorageError, match="removed"):
        kept.keep(state(5))


def test_while_one_place_is_written_the_other_counts(kept: KeptFile, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    kept.keep(state(1))
    kept.keep(state(2))
    two = path.read_bytes()
    kept.keep(state(3))
    three = path.read_bytes()
    for cut in range(0, len(two) + 1, 512):
        # Some sectors have arrived and others not.
        for mixed in (three[:cut] + two[cut:], two[:cut] + three[cut:]):
            path.write_bytes(mixed)
            found = read_kept(str(path), "a boot")
            assert found.newest in (state(2), state(3))


def test_a_place_that_a_killed_writer_left_half_written_is_written_next(
    kept: KeptFile, tmp_path: Path
) -> None:
    path = tmp_path / "kept"
    kept.keep(state(1))
    kept.keep(state(2))
    content = bytearray(path.read_bytes())
    # The newer one: it claims to be the newest, and is not whole.
    content[-1] ^= 1
    path.write_bytes(content)
    kept.keep(state(3))
    assert read_kept(str(path), "a boot") == (state(3), False)


def test_states_of_a_file_that_was_replaced_are_forgotten(kept: KeptFile, tmp_path: Path) -> None:
    path = str(tmp_path / "kept")
    kept.keep(state(7))
    kept.prepare(PAGE, of_inode(5), fresh=False)
    assert read_kept(path, "a boot").newest == state(7)
    kept.prepare(PAGE, of_inode(6), fresh=False)
    assert read_kept(path, "a boot").newest is None
    kept.keep(state(2, inode=6))
    kept.prepare(PAGE, of_inode(6), fresh=True)
    assert read_kept(path, "a boot").newest is None


def test_ctrl_c_as_the_lock_is_taken_leaves_nobody_waiting(
    kept: KeptFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def interrupted(handle: int, operation: int) -> None:
        lock(handle, operation)
        if operation == fcntl.LOCK_EX:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept.keep(state(1))
    with open(tmp_path / "kept") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("durability", ["full", "relaxed"])
@pytest.mark.parametrize("name", ["kept", "unsynced"])
def test_a_file_that_was_made_endless_is_not_read_to_its_end(
    place: Path, name: str, durability: str
) -> None:
    with casstore.open(place) as store:
        put(store, "one")
    (place / "unsynced").write_text("a boot long ago")
    with (place / name).open("ab") as file:
        # More than any machine has memory.
        file.truncate(1 << 42)
    with casstore.open(place, durability) as store:
        assert latest(store) == b"one"
    assert sorted(os.listdir(place)) == ["data.mdb", "lock.mdb", "locks", "reserve"]
