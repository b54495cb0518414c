"""What the benchmarks count and compare: flushes in a trace, and ratios with their spread."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.durable import count_flushes, flushes
from benchmarks.measuring import repeated, side_by_side
from benchmarks.sessions import make_turns
from benchmarks.sqlite_turns import SqliteTurns, create
from campaigns.strace_log import calls

TRACE = """\
7  openat(AT_FDCWD, ""..., O_RDWR|O_CLOEXEC|O_DSYNC) = 5
7  openat(AT_FDCWD, ""..., O_RDWR|O_CLOEXEC) = 6
7  fdatasync(6) = 0
7  chdir(""...) = 0
7  pwrite64(5, ""..., 120, 0) = 120
7  pwrite64(6, ""..., 120, 0) = 120
7  pwritev2(6, [...], 4, 4096, RWF_DSYNC) = 4480
7  pwritev2(6, [...], 4, 4096, 0) = 4480
8  fsync(6 <unfinished ...>
7  write(1, ""..., 5) = 5
8  <... fsync resumed>) = 0
7  close(5) = 0
7  pwrite64(5, ""..., 120, 0) = 120
"""


def test_flushes_are_counted_for_every_system_call_that_requests_one() -> None:
    assert count_flushes(calls(TRACE.splitlines())) == {
        "pwrite64 with O_DSYNC": 1, "pwritev2 with RWF_DSYNC": 1, "fsync": 1,
    }  # fmt: skip


def test_counting_flushes_is_skipped_by_name_without_strace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert flushes(True) == []
    assert capsys.readouterr().err == "flushes is skipped: strace is not installed\n"


def test_a_ratio_is_the_middle_of_the_runs_and_comes_with_the_lowest_and_the_highest() -> None:
    ours, theirs = iter([1.0, 2.0, 6.0]), iter([2.0, 2.0, 2.0])
    pair = side_by_side(lambda: next(ours), lambda: next(theirs), 3)
    assert (pair.ratio, pair.spread) == (1.0, "runs gave 0.50 to 3.00")
    assert pair.inverse_spread == "runs gave 0.33 to 2.00"
    ratios = iter([3.0, 1.0, 2.0])
    assert repeated(lambda: next(ratios), 3) == (2.0, "runs gave 1.00 to 3.00")


def test_the_sqlite_baseline_stores_the_turns_and_heads_of_each_session(tmp_path: Path) -> None:
    path = str(tmp_path / "db")
    create(path)
    turns = make_turns(4)
    for session in ("a", "b"):
        database = SqliteTurns(path, session)
        for turn in turns:
            database.commit(turn)
        database.close()
    database_file = sqlite3.connect(path)
    assert database_file.execute("pragma journal_mode").fetchone() == ("wal",)
    assert database_file.execute("select count(*) from messages").fetchone() == (16,)
    heads = database_file.execute("select * from heads order by session").fetchall()
    assert heads == [("a", 3, turns[-1][-1]["id"]), ("b", 3, turns[-1][-1]["id"])]
    database_file.close()


@pytest.mark.parametrize("kind", ["casstore", "sqlite"])
def test_a_benchmark_client_waits_for_the_start_signal(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "it")
    if kind == "sqlite":
        create(path)
    client = Path(__file__).parent.parent.parent / "tools" / "benchmarks" / "turn_client.py"
    ran = subprocess.run(
        [sys.executable, str(client), kind, path, "1", "5"],
        input="go\n", capture_output=True, text=True, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ready\ndone\n", "")
