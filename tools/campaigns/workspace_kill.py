"""Kill agents while they take snapshots of files, commit them and restore them.

An agent changes files, commits them together with a node that says what they are, and now and then
restores an earlier revision. After each kill every new revision must restore to what its node
says: no revision has the conversation without its files. If the agent was restoring, each file
must be the old one or the new one, and restoring again without force must finish.

    workspace_kill.py work STORE FILES CACHE SEED     until killed
"""

from __future__ import annotations

import hashlib
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    # As a program its own folder is the import path; casstore and campaigns lie above.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns.tally import Progress, Report, Tally, silent
from casstore.maintenance.check import check
from casstore.session.data import NodeDraft
from casstore.session.session import Session
from casstore.workspace import Workspace, restore
from casstore.workspace.tree import PART

_SESSION = "agent"
_ROUNDS_PER_STORE = 10
_PATIENCE_S = 20.0
# The longest wait after a line: about as long as a commit or a restore takes.
_MOMENT_S = 0.02

#: What a path is: its kind, and a hash of mode and content or the target of the link.
State = dict[str, str]


def run(scratch: Path, *, count: int, seed: int, progress: Progress = silent) -> Report:
    """Kill ``count`` times; now and then begin a new store."""
    chance = random.Random(seed)
    tally = Tally("workspace", total=count, progress=progress)
    for number in range(count):
        place = scratch / f"round-{number // _ROUNDS_PER_STORE}"
        place.mkdir(exist_ok=True)
        try:
            doing = _kill_once(tally, place, chance, number)
            _examine(tally, place, doing)
        except Exception as exc:
            tally.broke(f"kill {number}", repr(exc)[:1000])
        tally.tried()
        if number % _ROUNDS_PER_STORE == _ROUNDS_PER_STORE - 1:
            shutil.rmtree(place)
    return tally.report()


def describe(root: Path) -> State:
    """Everything below a directory, but for what a killed restore leaves."""
    found: State = {}
    for place, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(place, name)
            status = os.lstat(path)
            if name.startswith(PART):
                continue
            if stat.S_ISDIR(status.st_mode):
                found[os.path.relpath(path, root)] = "directory"
            elif stat.S_ISLNK(status.st_mode):
                found[os.path.relpath(path, root)] = f"link {os.readlink(path)}"
            else:
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
                found[os.path.relpath(path, root)] = f"file {status.st_mode & 0o777:o} {content}"
    return found


# --- the parent -----------------------------------------------------------------------------------


def _kill_once(tally: Tally, place: Path, chance: random.Random, number: int) -> list[str]:
    """Let an agent work and kill it; the last thing that it began."""
    program = [
        sys.executable, str(Path(__file__)), "work",
        str(place / "store"), str(place / "files"), str(place / "cache"), str(number),
    ]  # fmt: skip
    strike_after = chance.randrange(1, 12)
    lines: list[bytes] = []
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stderr is not None
        rest = b""
        while len(lines) < strike_after:
            if not select.select([agent.stdout], [], [], _PATIENCE_S)[0]:
                break
            part = os.read(agent.stdout.fileno(), 1 << 16)
            if not part:
                break
            *more, rest = (rest + part).split(b"\n")
            lines += more
        # The moment itself is the experiment; nothing waits for anything here.
        select.select([], [], [], chance.uniform(0, _MOMENT_S))
        agent.send_signal(signal.SIGKILL)
        *more, _ = (rest + agent.stdout.read()).split(b"\n")
        lines += more
        words = agent.stderr.read().decode(errors="replace")
    if agent.returncode != -signal.SIGKILL:
        tally.broke(f"kill {number}", f"the agent ended by itself: {words[-2000:]}")
    last = lines[-1].decode().split() if lines else ["edit"]
    tally.count(f"kills during {last[0]}")
    committed = [int(line.split()[1]) for line in lines if line.startswith(b"committed ")]
    (place / "acknowledged").write_text(str(max(committed, default=0)))
    return last


def _examine(tally: Tally, place: Path, doing: list[str]) -> None:
    files, cache = place / "files", place / "cache"
    with casstore.open(place / "store", "relaxed") as store:
        session = store.session(_SESSION)
        head = session.head()
        newest = 0 if head is None else head.revision
        acknowledged = int((place / "acknowledged").read_text())
        if newest < acknowledged:
            raise AssertionError(f"revision {acknowledged} was acknowledged, {newest} is there")
        seen = place / "examined"
        for revision in range(int(seen.read_text()) + 1 if seen.exists() else 1, newest + 1):
            _require_whole(session, revision, place / "scratch")
            tally.count("revisions restored")
        seen.write_text(str(newest))
        ws = Workspace(files, cache=cache)
        if doing[0] == "restoring":
            _finish(tally, session, ws, files, int(doing[1]), int(doing[2]))
            # The next agent begins at the newest revision.
            ws.restore(session)
        elif newest:
            ws.restore(session, force=True)
            if describe(files) != _said(session, newest):
                raise AssertionError("a forced restore did not give the newest revision")
        report = check(store, level="connectivity")
        if not report.sound:
            raise AssertionError(str(report.findings))


def _finish(
    tally: Tally, session: Session, ws: Workspace, files: Path, before: int, after: int
) -> None:
    old, new, now = _said(session, before), _said(session, after), describe(files)
    for path in {*old, *new, *now}:
        states = (old.get(path), new.get(path))
        is_between = now.get(path) is None and "directory" in states
        # A directory must be empty before a file takes its place.
        inside = any(states_of == "directory" for states_of in states)
        if now.get(path) not in states and not is_between and not inside:
            raise AssertionError(f"{path} is {now.get(path)}, neither {states[0]} nor {states[1]}")
    done = sum(now.get(path) == new.get(path) != old.get(path) for path in {*old, *new})
    left = sum(now.get(path) != new.get(path) for path in {*old, *new})
    tally.count("restores cut in the middle", int(done > 0 and left > 0))
    ws.restore(session, after)
    if describe(files) != new or any(name.startswith(PART) for name in os.listdir(files)):
        raise AssertionError(f"restoring {after} again did not finish it")
    tally.count("restores finished by a second run")


def _said(session: Session, revision: int) -> State:
    node = session.node(f"n{revision}", at=revision)
    if node is None:
        raise AssertionError(f"revision {revision} has no node")
    found: State = node.payload
    return found


def _require_whole(session: Session, revision: int, scratch: Path) -> None:
    """A revision restores to what its node says."""
    shutil.rmtree(scratch, ignore_errors=True)
    restore(session, at=revision, into=scratch)
    if describe(scratch) != _said(session, revision):
        raise AssertionError(f"the files of revision {revision} are not those of its node")


# --- the agent ------------------------------------------------------------------------------------


def work(place: str, files: str, cache: str, seed: int) -> None:
    """Change, commit and restore until killed; one line before and after each of these."""
    chance = random.Random(seed)
    root = Path(files)
    root.mkdir(exist_ok=True)
    ws = Workspace(root, cache=cache)
    with casstore.open(place, "relaxed") as store:
        session = store.session(_SESSION)
        head = session.head()
        revision = here = 0 if head is None else head.revision
        while True:
            if revision > 1 and chance.random() < 0.5:
                target = chance.randrange(1, revision + 1)
                _say(f"restoring {here} {target}")
                ws.restore(session, target)
                here = target
            _say("editing")
            _edit(root, chance)
            _say("committing")
            node = NodeDraft(f"n{revision + 1}", describe(root))
            revision = here = ws.commit(session, append=[node]).revision
            _say(f"committed {revision}")


def _say(text: str) -> None:
    # One short write to a pipe is whole or absent.
    os.write(1, text.encode() + b"\n")


def _edit(root: Path, chance: random.Random) -> None:
    for _ in range(chance.randrange(3, 25)):
        path = root / chance.choice("abc") / chance.choice("defgh")
        if path.parent.is_symlink() or path.parent.is_file():
            path.parent.unlink()
        path.parent.mkdir(exist_ok=True)
        what = chance.randrange(8)
        if path.is_symlink() or path.is_file():
            path.unlink()
        if what < 5:
            path.write_bytes(chance.randbytes(chance.choice((0, 10, 3000, 90_000))))
            path.chmod(chance.choice((0o644, 0o755)))
        elif what == 5:
            path.symlink_to(chance.choice(("d", "../b", "/nowhere")))
        elif what == 6:
            shutil.rmtree(path.parent)
            path.parent.write_text("a file in place of a directory")


if __name__ == "__main__":
    work(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
