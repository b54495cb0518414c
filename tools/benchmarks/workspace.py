"""Workspaces: snapshots and restores of source trees and transcripts, against git and restic.

git and restic run as commands, casstore as a library in this process, which is how each is used;
the first snapshots are compared as commands. Every tool reads the same files from a warm page
cache. git is given ``add -A`` (its objects loose, its index flushed as it does by default), restic
an empty repository with its default compression, casstore an empty store with durability ``full``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import casstore
from benchmarks.measuring import Goal, at_most, messages, seconds, side_by_side
from benchmarks.store import used_bytes
from casstore.workspace import Workspace

_ROOT = str(Path(__file__).parent.parent.parent)
_FILES_PER_DIRECTORY = 50
_CHANGES = 20

_FIRST = """
import sys
sys.path.insert(0, sys.argv[1])
import casstore
from casstore.workspace import Workspace
with casstore.open(sys.argv[2]) as store:
    Workspace(sys.argv[3], cache=sys.argv[4]).commit(store.session("agent"))
"""

_MEMORY = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import casstore
from casstore.workspace import Workspace

def private_kib():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])

with casstore.open(sys.argv[2], "relaxed") as store:
    Workspace(sys.argv[4]).commit(store.session("first"))  # whatever is loaded once is loaded
    peak, done = 0, threading.Event()
    start = private_kib()
    def watch():
        global peak
        while not done.wait(0.02):
            peak = max(peak, private_kib())
    watcher = threading.Thread(target=watch)
    watcher.start()
    Workspace(sys.argv[3], max_file_bytes=None).commit(store.session("agent"))
    done.set()
    watcher.join()
    print((peak - start) / 1024)
"""


def make_source(root: Path, files: int, total_bytes: int, seed: int = 1) -> None:
    """Made-up source: lines of identifiers, most of which repeat, in directories of 50 files."""
    chance = random.Random(seed)
    words = [
        f"{word}_{number}"
        for number in range(40)
        for word in "def return import class self value index path error result node state".split()
    ]
    lines = [" ".join(chance.choices(words, k=12)) for _ in range(20_000)]
    for number in range(files):
        directory = number // _FILES_PER_DIRECTORY
        place = root / f"package{directory % 40}" / f"module{directory // 40}"
        if number % _FILES_PER_DIRECTORY == 0:
            place.mkdir(parents=True, exist_ok=True)
        size = max(50.0, chance.expovariate(files / total_bytes))
        text, length = [], 0
        while length < size:
            text.append(f"    {chance.choice(lines)}  # {chance.getrandbits(40):x}")
            length += len(text[-1]) + 1
        (place / f"file{number}.py").write_text("\n".join(text))


def source(quick: bool) -> Iterator[Goal]:
    """Snapshots and restores of a tree of source, against git and restic."""
    files, size = (5_000, 50_000_000) if quick else (100_000, 1_000_000_000)
    with tempfile.TemporaryDirectory(prefix="casstore-bench-") as scratch:
        place = Path(scratch)
        tree = place / "tree"
        tree.mkdir()
        make_source(tree, files, size)
        # A cache must not trust very new files, so they would be read twice.
        os.sync()
        time.sleep(3)
        yield from _first(place, tree, files)
        yield from _again(place, tree, files, 3 if quick else 7)


def _first(place: Path, tree: Path, files: int) -> list[Goal]:
    git = ["git", "-C", str(tree), "-c", "gc.auto=0"]
    subprocess.run(["git", "init", "--quiet", str(tree)], check=True)
    environment = os.environ | {"RESTIC_PASSWORD": "x", "RESTIC_CACHE_DIR": str(place / "rc")}
    repository = str(place / "restic")
    restic = ["restic", "--quiet", "--repo", repository]
    has_restic = shutil.which("restic") is not None
    timed: dict[str, list[float]] = {"ours": [], "git": [], "restic": []}

    def ours() -> None:
        program = [sys.executable, "-c", _FIRST, _ROOT, str(place / "store"), str(tree)]
        subprocess.run([*program, str(place / "cache")], check=True)

    timed["ours"].append(seconds(ours))
    timed["git"].append(seconds(lambda: subprocess.run([*git, "add", "-A"], check=True)))
    if has_restic:
        subprocess.run([*restic, "init"], check=True, env=environment)
        backup = [*restic, "backup", "--exclude", ".git", str(tree)]
        timed["restic"].append(seconds(lambda: subprocess.run(backup, check=True, env=environment)))
    ours_s, git_s = median(timed["ours"]), median(timed["git"])
    detail = f"{ours_s:.1f} s, git {git_s:.1f} s"
    goals = [
        at_most(f"first snapshot of {files:,} files, against git add", ours_s / git_s, 1.0,
                detail=detail)
    ]  # fmt: skip
    if has_restic:
        restic_s = median(timed["restic"])
        goals.append(
            at_most("the same against restic backup", ours_s / restic_s, 2.0,
                    detail=f"restic {restic_s:.1f} s")
        )  # fmt: skip
    commit = ["-c", "user.name=a", "-c", "user.email=a@a", "commit", "--quiet", "-m", "x"]
    subprocess.run([*git, *commit], check=True)
    return goals


def _again(place: Path, tree: Path, files: int, repeats: int) -> Iterator[Goal]:
    status = ["git", "-C", str(tree), "status", "--porcelain"]
    with casstore.open(place / "store") as store:
        session = store.session("agent")

        def workspace() -> Workspace:
            return Workspace(tree, cache=place / "cache")

        def unchanged() -> float:
            return seconds(lambda: workspace().snapshot(store))

        def git_status() -> float:
            return seconds(lambda: subprocess.run(status, check=True, capture_output=True))

        unchanged(), git_status()  # what was written last is trusted from here on
        same = side_by_side(unchanged, git_status, repeats)
        goals = [
            at_most(f"snapshot of the unchanged tree of {files:,} files, against git status",
                    same.ratio, 4.0,
                    detail=f"{same.ours_s * 1e3:.0f} ms, git {same.theirs_s * 1e3:.0f} ms; "
                    + same.spread)
        ]  # fmt: skip
        yield from goals
        yield _one_change(tree, store, session, workspace)
        yield _restore_one(tree, session, workspace, unchanged, repeats)


def _changed_file(tree: Path, number: int) -> Path:
    directory = number // _FILES_PER_DIRECTORY
    return tree / f"package{directory % 40}" / f"module{directory // 40}" / f"file{number}.py"


def _one_change(
    tree: Path,
    store: casstore.Store,
    session: casstore.Session,
    workspace: Callable[[], Workspace],
) -> Goal:
    ws = workspace()
    ws.commit(session)
    before = used_bytes(store)
    for at in range(_CHANGES):
        path = _changed_file(tree, at * 131)
        path.write_text(path.read_text() + f"\n# change {at}\n")
        ws.commit(session)
    added = (used_bytes(store) - before) / _CHANGES
    return at_most(
        "one changed file, committed: bytes added", added, 16_384, "bytes",
        detail=f"mean of {_CHANGES} commits, used pages before packing",
    )  # fmt: skip


def _restore_one(
    tree: Path,
    session: casstore.Session,
    workspace: Callable[[], Workspace],
    unchanged: Callable[[], float],
    repeats: int,
) -> Goal:
    path = _changed_file(tree, 777)
    first = workspace().commit(session).revision
    path.write_text(path.read_text() + "\n# another\n")
    second = workspace().commit(session).revision
    turn = [first, second]

    def restore() -> float:
        turn.reverse()
        return seconds(lambda: workspace().restore(session, turn[1]))

    def settled() -> float:
        unchanged()  # reads the file that was just restored
        return unchanged()

    pair = side_by_side(restore, settled, repeats)
    return at_most(
        "restore of one changed file, against the unchanged snapshot", pair.ratio, 1.5,
        detail=f"{pair.ours_s * 1e3:.0f} ms, snapshot {pair.theirs_s * 1e3:.0f} ms; {pair.spread}",
    )  # fmt: skip


def transcripts(quick: bool) -> list[Goal]:
    """The space of a directory of transcripts that grow, snapshot by snapshot."""
    count, steps, grown = (10, 8, 12) if quick else (40, 30, 20)
    lines = [json.dumps(message) + "\n" for message in messages(count * steps * grown)]
    with tempfile.TemporaryDirectory(prefix="casstore-bench-") as scratch:
        place = Path(scratch)
        tree = place / "transcripts"
        tree.mkdir()
        environment = os.environ | {"RESTIC_PASSWORD": "x", "RESTIC_CACHE_DIR": str(place / "rc")}
        repository = place / "restic"
        restic = ["restic", "--quiet", "--repo", str(repository)]
        if shutil.which("restic") is None:
            return []
        subprocess.run([*restic, "init", "--repository-version", "2"], check=True, env=environment)
        with casstore.open(place / "store", "relaxed") as store:
            ws = Workspace(tree, defaults=False)
            for step in range(steps):
                for number in range(count):
                    start = (number * steps + step) * grown
                    with (tree / f"{number}.jsonl").open("a") as file:
                        file.writelines(lines[start : start + grown])
                ws.commit(store.session("archive"))
                subprocess.run([*restic, "backup", str(tree)], check=True, env=environment)
            store.pack(min_age_ms=0)
            ours = used_bytes(store)
        theirs = sum(file.stat().st_size for file in repository.rglob("*") if file.is_file())
        raw = sum(file.stat().st_size for file in tree.iterdir())
    return [
        at_most(
            f"{count} transcripts in {steps} snapshots, packed, against restic's repository",
            ours / theirs, 0.8,
            detail=f"{ours / 1e6:.1f} MB, restic {theirs / 1e6:.1f} MB, "
            f"the files at the end {raw / 1e6:.1f} MB",
        )
    ]  # fmt: skip


def memory(quick: bool) -> list[Goal]:
    """Private memory while a snapshot takes in one long file."""
    size_bytes = (1 << 28) if quick else (1 << 32)
    with tempfile.TemporaryDirectory(prefix="casstore-bench-") as scratch:
        place = Path(scratch)
        for name in ("long", "short"):
            (place / name).mkdir()
        (place / "short" / "a").write_bytes(bytes(200_000))
        with (place / "long" / "file").open("wb") as file:
            for _ in range(size_bytes >> 20):
                file.write(os.urandom(1 << 20))
        program = [sys.executable, "-c", _MEMORY, _ROOT, str(place / "store"), str(place / "long")]
        answer = subprocess.run(
            [*program, str(place / "short")], capture_output=True, text=True, check=True
        )
    taken = float(answer.stdout)
    return [
        at_most(f"memory of a snapshot of one file of {size_bytes >> 20} MiB", taken, 100, "MiB")
    ]


def workspace(quick: bool) -> Iterator[Goal]:
    """All measurements, each reported when it is done."""
    yield from source(quick)
    yield from transcripts(quick)
    yield from memory(quick)


ALL: dict[str, Callable[[bool], Iterable[Goal]]] = {"workspace": workspace}
