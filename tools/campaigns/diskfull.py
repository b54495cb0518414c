"""Runs out of space in every way: a typed error, no partial write, and recovery.

The ways are a limit on file size (``RLIMIT_FSIZE``), a map that is too small, and small file
systems that are really full (tmpfs, and ext4 on a loop device; both need the right to mount). After
each failure everything stored before must be readable, nothing of the failed write visible, and
once there is space again, writing must work and the store verify.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns import specimen
from campaigns.tally import Progress, Report, Tally, silent
from casstore.engine.protocol import NewObject, PutRow, RowKey, Write
from casstore.errors import CasstoreError, StorageError, StorageFullError
from casstore.format.digest import Kind, digest_of

RLIMIT, MAP, GROUP, CREATE = "rlimit", "map", "group", "create"
TMPFS, EXT4 = "tmpfs", "ext4"
FILE_SYSTEMS = (TMPFS, EXT4)
DURABILITIES = ("full", "relaxed")

_SMALL_FILE_SYSTEM_BYTES = 4 << 20
_SHORT_WRITE = ("Input/output error", "MDB_SHORT_WRITE")
# Large enough for the small writes, however long a reader keeps pages from being reused.
_GROUP_MAP_BYTES = 16 << 20
_LARGE_WRITES = 4
_UNLIMITED = resource.RLIM_INFINITY
_TRIAL_LIMIT_S = 120


class Broken(Exception):
    """A guarantee was broken."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


class _Ledger:
    """The expected content of a store, and the writes that fill it: objects and a row for them."""

    def __init__(self, store: casstore.Store, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self._number = 0
        self._held: dict[RowKey, list[bytes]] = {}
        self.short_writes = 0

    def on(self, store: casstore.Store) -> _Ledger:
        """The same ledger for the reopened store."""
        other = _Ledger(store, self._rng)
        other._held, other._number = self._held, self._number
        return other

    def a_digest(self) -> bytes:
        """The digest of a stored object."""
        return digest_of(Kind.BLOB, next(iter(self._held.values()))[0])

    def write(self, size_bytes: int) -> None:
        """One atomic write of a row and two blobs of about this total size."""
        self._number += 1
        contents = [self._rng.randbytes(max(1, size_bytes // 2)) for _ in range(2)]
        objects = [NewObject(digest_of(Kind.BLOB, it), Kind.BLOB, it, ()) for it in contents]
        place = RowKey("records", b"%d" % self._number)
        names = b"".join(item.digest for item in objects)
        try:
            self._store.engine.write(Write(objects=objects, rows=[PutRow(*place, names)]))
        except CasstoreError:
            _require(
                self._store.engine.get_rows([place])[0] is None, "the row of a failed write is seen"
            )
            digests = [item.digest for item in objects]
            _require(self._store.missing(digests) == digests, "an object of a failed write is seen")
            raise
        self._held[place] = contents

    def check(self, store: casstore.Store | None = None) -> None:
        """Everything acknowledged is readable, and the engine finds no fault."""
        store = store or self._store
        rows = store.engine.get_rows(list(self._held))
        for (place, contents), names in zip(self._held.items(), rows, strict=True):
            _require(names is not None, f"row {place} is gone")
            digests = [digest_of(Kind.BLOB, content) for content in contents]
            _require(names == b"".join(digests), f"row {place} changed")
            _require(store.get_many(digests) == contents, f"objects of {place} changed")
        stored = len(store.engine.scan_rows("records", limit=100_000))
        _require(stored == len(self._held), f"{stored} rows where {len(self._held)} were written")
        specimen.verify(store)

    def fill(self, rng: random.Random, *, largest_bytes: int, tries: int = 10_000) -> int:
        """Write until it fails with the right error; returns the number of successful writes."""
        for done in range(tries):
            try:
                self.write(rng.randrange(1, largest_bytes))
            except StorageError as exc:
                # If the system wrote a part before it ran out of space, LMDB sees a short write;
                # the 0.9 engine reports an input/output error.
                _require(
                    isinstance(exc, StorageFullError)
                    or any(words in str(exc) for words in _SHORT_WRITE),
                    f"{type(exc).__name__} ({exc}) where StorageFullError is meant",
                )
                self.short_writes += not isinstance(exc, StorageFullError)
                return done
        raise Broken("it never became full")


class _Trial(NamedTuple):
    """The parameters of one trial."""

    directory: Path
    rng: random.Random
    durability: str
    engine: int

    def open(self, **options: Any) -> casstore.Store:
        return casstore.open(
            self.directory / "store", self.durability, lmdb_version=self.engine, **options
        )


# --- the ways to run out of space -------------------------------------------------------


def _limit_file_size(size_bytes: int) -> None:
    # Only the soft limit, so that it can be raised again.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, _UNLIMITED))


def _run_rlimit(trial: _Trial) -> str:
    with trial.open() as store:
        ledger = _Ledger(store, trial.rng)
        for _ in range(4):
            size = (trial.directory / "store" / "data.mdb").stat().st_size
            _limit_file_size(size + trial.rng.randrange(1, 200_000))
            ledger.fill(trial.rng, largest_bytes=trial.rng.choice((500, 20_000, 300_000)))
            ledger.check()
            _limit_file_size(_UNLIMITED)
            ledger.write(50_000)
        ledger.check()
    with trial.open(verify=True) as store:
        ledger.check(store)
    return f"survived{', short writes among them' if ledger.short_writes else ''}"


def _run_create(trial: _Trial) -> str:
    """Creating a store without enough space fails, and succeeds later."""
    for limit in (0, 100, 4096, 8192, 20_000, 60_000, 100_000):
        _limit_file_size(limit)
        try:
            trial.open().close()
        except StorageError as exc:
            _require(isinstance(exc, StorageFullError), f"at {limit}: {type(exc).__name__}: {exc}")
        finally:
            _limit_file_size(_UNLIMITED)
    with trial.open() as store:
        ledger = _Ledger(store, trial.rng)
        ledger.write(1000)
        ledger.check()
    return "created at last"


def _run_map(trial: _Trial) -> str:
    small = 1 << 20
    with trial.open(map_bytes=small) as store:
        ledger = _Ledger(store, trial.rng)
        ledger.fill(trial.rng, largest_bytes=30_000)
        ledger.check()
        # Only large writes fail; every write is refused or done.
        for _ in range(20):
            try:
                ledger.write(100)
            except StorageFullError:
                continue
        ledger.check()
    with trial.open(map_bytes=small * 4) as store:
        ledger.check(store)
    with trial.open(map_bytes=small * 4) as store:
        wider = ledger.on(store)
        wider.write(200_000)
        wider.check()
    with trial.open(map_bytes=small * 4, verify=True) as store:
        wider.check(store)
    return "full, and wider again"


def _run_group(trial: _Trial) -> str:
    """Eight threads write small objects while one writes objects larger than the map."""
    with trial.open(map_bytes=_GROUP_MAP_BYTES) as store:
        start = threading.Barrier(9)
        failures: list[str] = []

        def write_small(name: int) -> None:
            start.wait()
            for number in range(25):
                value = {"by": name, "number": number}
                try:
                    digest = store.put_value(value)
                    if store.get_value(digest) != value:
                        failures.append(f"{value} reads back otherwise")
                except CasstoreError as exc:
                    failures.append(f"{value}: {type(exc).__name__}: {exc}")

        refused: list[str] = []

        def write_large() -> None:
            start.wait()
            for number in range(_LARGE_WRITES):
                content = random.Random(number).randbytes(_GROUP_MAP_BYTES + 1)
                try:
                    store.put_blob(content)
                    failures.append("what is larger than the map was stored")
                except StorageFullError as exc:
                    refused.append(str(exc))

        threads = [threading.Thread(target=write_small, args=(name,)) for name in range(8)]
        threads.append(threading.Thread(target=write_large))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _require(not failures, f"{len(failures)} small writes failed, first {failures[:1]}")
        _require(
            len(refused) == _LARGE_WRITES,
            f"{len(refused)} of {_LARGE_WRITES} large writes were refused",
        )
        specimen.verify(store)
        _require(len(store.engine.scan_objects(limit=10_000)) == 200, "there are not 200 objects")
    return "only the large failed"


def _run_file_system(trial: _Trial) -> str:
    filler = trial.directory / "filler"
    filler.write_bytes(b"")
    with trial.open() as store:
        ledger = _Ledger(store, trial.rng)
        ledger.write(10_000)
        for _ in range(2):
            _fill(filler)
            ledger.fill(trial.rng, largest_bytes=trial.rng.choice((500, 40_000)))
            ledger.check()
            filler.write_bytes(b"")
            ledger.write(100_000)
        _fill(filler)
        ledger.check()
    _look_in_another_process(trial, ledger, filler)
    filler.write_bytes(b"")
    with trial.open(verify=True) as store:
        ledger.check(store)
    return "full, and free again"


def _fill(filler: Path) -> None:
    """Fill the remaining space with this file."""
    with filler.open("ab", buffering=0) as file:
        for size in (65_536, 4096, 512, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                # Full for blocks of this size; smaller ones fill the rest.
                continue


def _look_in_another_process(trial: _Trial, ledger: _Ledger, filler: Path) -> None:
    """Without a free byte, opening succeeds or raises, also in the first process that opens.

    LMDB maps its lock file. If that file is sparse and the disk is full, the first access raises
    SIGBUS.
    """
    store = trial.directory / "store"
    digest = ledger.a_digest().hex()
    for readonly in ("1", "0"):
        for lock_is_there in (True, False):
            if not lock_is_there:
                (store / "lock.mdb").unlink(missing_ok=True)
                _fill(filler)
            how = f"readonly={readonly}, lock file {'there' if lock_is_there else 'absent'}"
            _ask(["read", str(store), readonly, trial.durability, digest], how)
    new = trial.directory / "new"
    _ask(["read", str(new), "new", trial.durability, digest], "a new store")
    shutil.rmtree(new, ignore_errors=True)


def _ask(words: list[str], how: str) -> None:
    argv = [sys.executable, __file__, *words]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        raise Broken(f"opening on a full disk died of {name} ({how})")
    said = ended.stdout.strip()
    _require(
        said in ("right", "StorageFullError", "StorageError"),
        f"opening on a full disk: {said or ended.stderr[-300:]} ({how})",
    )


def _read(path: str, how: str, durability: str, digest: bytes) -> str:
    """Open on a full disk, to read ("1") or write ("0"), or a store that does not exist ("new")."""
    answers: list[str] = []

    def read(store: casstore.Store) -> None:
        try:
            held = store.get_blob(digest)
            answers.append("right" if digest_of(Kind.BLOB, held) == digest else "wrong")
        except CasstoreError as exc:
            answers.append(type(exc).__name__)

    try:
        with casstore.open(path, durability, how == "1", create=how == "new") as store:
            threads = [threading.Thread(target=read, args=(store,)) for _ in range(128)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    except CasstoreError as exc:
        return type(exc).__name__
    return ",".join(sorted(set(answers)))


# --- mounting ---------------------------------------------------------------------------


@contextmanager
def mounted(kind: str, scratch: Path) -> Iterator[Path | None]:
    """A small file system of this kind, or None if this user cannot mount one."""
    place = scratch / f"mount-{kind}"
    place.mkdir(parents=True)
    if kind == TMPFS:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_FILE_SYSTEM_BYTES}", "none"]
    else:
        image = scratch / "ext4.img"
        with image.open("wb") as file:
            file.truncate(2 * _SMALL_FILE_SYSTEM_BYTES)
        if not _succeeds(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)]):
            yield None
            return
        command = ["mount", "-o", "loop", str(image)]
    if not _succeeds([*command, str(place)]):
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def _succeeds(argv: Sequence[str]) -> bool:
    if shutil.which(argv[0]) is None:
        return False
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


# --- the campaign ------------------------------------------------------------------------

_WAYS: dict[str, Callable[[_Trial], str]] = {
    RLIMIT: _run_rlimit,
    CREATE: _run_create,
    MAP: _run_map,
    GROUP: _run_group,
    TMPFS: _run_file_system,
    EXT4: _run_file_system,
}


def run(scratch: Path, *, count: int, seed: int, progress: Progress = silent) -> Report:
    """Run out of space ``count`` times in every way that this system and user allow."""
    rng = random.Random(seed)
    tally = Tally("diskfull", total=count * len(_WAYS), progress=progress)
    possible = list(_WAYS)
    for kind in FILE_SYSTEMS:
        with mounted(kind, scratch / f"probe-{kind}") as place:
            if place is None:
                possible.remove(kind)
                tally.note(f"{kind}: not run, this user cannot mount one")
            else:
                tally.note(f"{kind}: run")
    for number in range(count):
        for way in possible:
            words = [
                DURABILITIES[number % 2],
                specimen.ENGINES[number // 2 % 2],
                rng.randrange(1 << 30),
            ]
            place = scratch / f"{way}-{number}"
            if way in FILE_SYSTEMS:
                with mounted(way, place) as disk:
                    assert disk is not None, f"{way} could be mounted a moment ago"
                    _try(tally, way, disk, [str(word) for word in words])
            else:
                place.mkdir()
                _try(tally, way, place, [str(word) for word in words])
            shutil.rmtree(place)
            tally.tried()
    return tally.report()


def _try(tally: Tally, way: str, place: Path, words: list[str]) -> None:
    argv = [sys.executable, str(Path(__file__).resolve()), way, str(place), *words]
    trial = f"{way} {' '.join(words)}"
    try:
        ended = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=_TRIAL_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        tally.broke(trial, f"no end after {_TRIAL_LIMIT_S} s")
        return
    if ended.returncode == 0:
        tally.count(f"{way}: {json.loads(ended.stdout)}")
        return
    tally.count(f"{way}: broken")
    if ended.returncode < 0:
        tally.broke(trial, f"died of {signal.Signals(-ended.returncode).name}")
    else:
        tally.broke(trial, ended.stderr.strip()[-500:])


if __name__ == "__main__":
    if sys.argv[1] == "read":
        _, _, where, access, how, named = sys.argv
        print(_read(where, access, how, bytes.fromhex(named)))
        sys.exit()
    _, name, where, how, version, drawn = sys.argv
    print(
        json.dumps(_WAYS[name](_Trial(Path(where), random.Random(int(drawn)), how, int(version))))
    )
    # Threads of the engine must not keep the process alive.
    sys.stdout.flush()
    os._exit(0)
