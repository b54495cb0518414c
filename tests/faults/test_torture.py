"""The command line of the campaigns: exit codes, streams, and that it runs from anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torture

from campaigns.tally import Finding, Progress, Report

PROGRAM = Path(torture.__file__)


def pretend(monkeypatch: pytest.MonkeyPatch, outcome: Report | BaseException) -> None:
    """Let every campaign end at once, in this way."""

    def run(scratch: Path, *, count: int, seed: int, progress: Progress) -> Report:
        progress(count, count)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    for entry in torture.CAMPAIGNS.values():
        monkeypatch.setattr(f"campaigns.{entry.module}.run", run)


KEPT = Report("kill", 3, {"sound": 3}, 0, (), ("a note",))
BROKEN = KEPT._replace(broken_count=1, findings=(Finding("kill 2", "it was gone"),))


def test_the_torture_program_runs_from_any_directory_and_prints_json(tmp_path: Path) -> None:
    argv = [sys.executable, str(PROGRAM), "frames", "--count", "1", "--seed", "3", "--json"]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    document = json.loads(ended.stdout)
    assert document["schema"] == "casstore.torture/1"
    assert document["seed"] == 3
    [report] = document["reports"]
    assert report["trials"] > 100
    assert ended.returncode == (1 if report["broken_count"] else 0)
    assert f"frames: {report['trials']} of {report['trials']}" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_campaign_without_violations_exits_0_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, KEPT)
    assert torture.main(["kill"]) == 0
    printed = capsys.readouterr()
    assert "kill: 3 trials, promises kept" in printed.out
    assert "note: a note" in printed.out
    assert "kill: 200 of 200" in printed.err


def test_a_broken_promise_exits_1_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, BROKEN)
    assert torture.main(["all"]) == 1
    assert "broken: kill 2: it was gone" in capsys.readouterr().out


def test_an_interruption_exits_130_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pretend(monkeypatch, KeyboardInterrupt())
    scratch = tmp_path / "scratch"
    assert torture.main(["kill", "--scratch", str(scratch), "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["interrupted"] is True
    assert not scratch.exists()


@pytest.mark.parametrize("argv", [[], ["nothing"], ["kill", "--count", "0"]])
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        torture.main(argv)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_help_names_every_campaign(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        torture.main(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in torture.CAMPAIGNS)
    assert "examples:" in printed
