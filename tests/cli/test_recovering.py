"""``recover``: a store whose process was killed, with its log and without it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import casstore
from casstore.cli import command
from casstore.errors import CorruptionError, InvalidInputError
from casstore.maintenance.recover import recover
from tests.cli.running import run

ROOT = Path(__file__).parent.parent.parent
COMMITS = 8
# The first two commits of a process go straight into the tables.
LOGGED = COMMITS - 2

KILLED = """
import os, signal, sys
import casstore
from casstore import Commit, NodeDraft

path, commits, extra_bytes, apply_before = sys.argv[1], *map(int, sys.argv[2:])
store = casstore.open(path)
session = store.session("agent")
for number in range(commits):
    if number == apply_before:
        store.engine.apply_log()
    message = {"role": "user", "text": f"turn {number}", "extra": os.urandom(extra_bytes)}
    session.commit(Commit(append=[NodeDraft(f"n{number}", message)]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill(place: Path, *, extra_bytes: int = 0, apply_before: int = -1) -> Path:
    """Make a store, and kill the process that commits to it."""
    words = [str(word) for word in (place, COMMITS, extra_bytes, apply_before)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", KILLED, *words], env=env, check=False)
    assert ended.returncode == -signal.SIGKILL
    return place


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a process that was killed has left. No test may change it."""
    return kill(tmp_path_factory.mktemp("left") / "store")


@pytest.fixture
def killed(left: Path, tmp_path: Path) -> str:
    """A copy of it that the test may change."""
    return str(shutil.copytree(left, tmp_path / "killed"))


def nodes(place: str) -> int:
    return len(run("log", "agent", "--json", store=place).json["nodes"])


def remove(log: Path) -> None:
    log.unlink()


def take_that_of_another_store(log: Path) -> None:
    shutil.copy(kill(log.parent.parent / "other") / "redo.log", log)


def damage_the_header(log: Path) -> None:
    content = bytearray(log.read_bytes())
    content[10] ^= 1
    log.write_bytes(content)


def damage_the_second_record(log: Path) -> None:
    content = bytearray(log.read_bytes())
    second = content.index(b"rec1", content.index(b"rec1") + 1)
    content[second + 100] ^= 1
    log.write_bytes(content)


#: Ways to lose a log, and how many of its commits can be read nevertheless.
LOSSES: dict[Callable[[Path], None], int] = {
    remove: 0,
    take_that_of_another_store: 0,
    damage_the_header: LOGGED,
    damage_the_second_record: LOGGED - 1,
}


@pytest.mark.parametrize(
    "arguments", [("log", "agent"), ("show", "agent"), ("check", "--level", "full"), ("sessions",)]
)
def test_commands_that_only_read_see_the_commits_in_the_log(
    killed: str, arguments: tuple[str, ...]
) -> None:
    before = Path(killed, "data.mdb").read_bytes()
    told = run(*arguments, store=killed).out
    assert arguments[0] not in ("log", "show") or f"turn {COMMITS - 1}" in told
    assert nodes(killed) == COMMITS
    # Reading has applied nothing.
    assert Path(killed, "data.mdb").read_bytes() == before


def test_check_stores_its_result_once_the_store_is_closed(killed: str) -> None:
    assert "the result was not stored: the store was not closed" in run("check", store=killed).err
    assert run("stats", "--json", store=killed).json["last_check"] is None
    run("recover", store=killed)
    assert run("check", store=killed).err == ""
    assert run("stats", "--json", store=killed).json["last_check"]["sound"] is True


def test_recover_applies_the_log_and_says_how_many_commits_it_held(killed: str) -> None:
    told = run("recover", "--json", store=killed).json
    assert (told["needed_log"], told["commits_recovered"], told["commits_discarded"]) == (
        True, LOGGED, None,
    )  # fmt: skip
    # The file says all now.
    Path(killed, "redo.log").unlink()
    assert nodes(killed) == COMMITS
    run("check", "--level", "full", store=killed)


def test_recover_prints_what_was_done(killed: str) -> None:
    told = run("recover", killed).out
    assert told == f"recovered  {LOGGED} commits of the log; the store needs no log now\n"
    assert run("recover", killed).out == "nothing to recover: the store was closed\n"


@pytest.mark.parametrize("arguments", [(), ("--discard-log",)])
def test_there_is_nothing_to_recover_in_a_store_that_was_closed(
    own: str, arguments: tuple[str, ...]
) -> None:
    before = Path(own, "data.mdb").read_bytes()
    told = run("recover", *arguments, "--json", store=own).json
    assert (told["needed_log"], told["commits_recovered"], told["commits_discarded"]) == (
        False, 0, None,
    )  # fmt: skip
    assert Path(own, "data.mdb").read_bytes() == before


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_a_store_without_its_log_says_what_to_do_and_opens_after_that_was_done(
    killed: str, lose: Callable[[Path], None]
) -> None:
    lose(Path(killed, "redo.log"))
    for arguments in (("sessions",), ("check",), ("label", "agent", "x"), ("recover",)):
        refused = run(*arguments, store=killed, ends=8)
        assert "casstore recover --discard-log" in refused.err.partition("try: ")[0]
        assert "casstore recover --discard-log" in refused.err.partition("try: ")[2]
    told = run("recover", "--discard-log", "--yes", "--json", store=killed).json
    assert (told["needed_log"], told["commits_recovered"], told["commits_discarded"]) == (
        True, 0, LOSSES[lose],
    )  # fmt: skip
    assert nodes(killed) == COMMITS - LOGGED
    run("check", "--level", "full", store=killed)
    run("label", "agent", "after", store=killed)
    assert "nothing to recover" in run("recover", "--discard-log", store=killed).out


def test_a_log_is_not_discarded_before_the_user_has_agreed(
    killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run("recover", "--discard-log", store=killed, ends=2)
    assert "--yes" in refused.err
    asked: list[str] = []

    def ask(*, yes: bool, question: str) -> None:
        asked.append(question)
        command.require_yes(yes=yes, question=question)

    monkeypatch.setattr("casstore.cli.check.require_yes", ask)
    run("recover", "--discard-log", store=killed, ends=2)
    # Without the option nothing would be lost, and whoever is asked must know.
    assert asked == [
        f"Discard the log of {killed} for good, with {LOGGED} commits that can still be read?"
    ]
    assert nodes(killed) == COMMITS
    told = run("recover", "--discard-log", "-y", store=killed).out
    assert told == (
        f"discarded  the log, and {LOGGED} commits that could still be read; the store needs no "
        "log now\n"
    )
    assert nodes(killed) == COMMITS - LOGGED


def test_commits_that_were_applied_before_the_kill_are_not_among_those_discarded(
    tmp_path: Path,
) -> None:
    place = str(kill(tmp_path / "store", apply_before=COMMITS - 2))
    told = run("recover", "--discard-log", "--yes", "--json", store=place).json
    assert told["commits_discarded"] == 2
    assert nodes(place) == COMMITS - 2


def test_recover_fails_if_the_log_cannot_be_applied_and_loses_nothing(tmp_path: Path) -> None:
    place = kill(tmp_path / "store", extra_bytes=20_000)
    # The file may not become longer, as on a full disk.
    limit = (place / "data.mdb").stat().st_size // 1024
    line = f"ulimit -f {limit}; {sys.executable} -m casstore recover {place}"
    ran = subprocess.run(
        ["bash", "-c", line], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (10, ""), ran
    assert run("recover", "--json", store=str(place)).json["commits_recovered"] == LOGGED
    assert nodes(str(place)) == COMMITS


@pytest.mark.parametrize("arguments", [(), ("--discard-log", "--yes")])
@pytest.mark.parametrize("readonly", [True, False])
def test_recover_refuses_a_store_that_is_open(
    killed: str, arguments: tuple[str, ...], *, readonly: bool
) -> None:
    with casstore.open(killed, readonly=readonly):
        refused = run("recover", *arguments, store=killed, ends=7)
        assert "is open, in this process or another" in refused.err
    assert nodes(killed) == COMMITS


def test_recover_refuses_a_directory_that_is_not_a_store(tmp_path: Path) -> None:
    run("recover", str(tmp_path / "nowhere"), ends=4)
    run("recover", "", ends=2)
    assert "on a server" in run("recover", "postgresql://u:secret@host/db", ends=3).err


def test_the_recover_function_refuses_what_the_command_refuses(killed: str) -> None:
    with pytest.raises(InvalidInputError, match="discard_log must be a bool, got 'yes'"):
        recover(killed, discard_log="yes")  # type: ignore[arg-type]
    Path(killed, "data.mdb").write_bytes(b"")
    for discard_log in (False, True):
        with pytest.raises(CorruptionError):
            recover(killed, discard_log=discard_log)
