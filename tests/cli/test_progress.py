"""How far long work has come: plain lines with rate and time left, a bar on a terminal."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
from rich.progress import Progress

from casstore.cli import progress
from casstore.cli.progress import LINE_INTERVAL_S, Meter, progress_line
from casstore.maintenance.progress import Step


def test_a_line_reports_amount_rate_and_time_left() -> None:
    assert progress_line(Step("mark", 500, 2000, "objects"), 10) == (
        "500 objects of 2,000 objects, 50 objects/s, about 30 s left"
    )
    assert progress_line(Step("copy", 3 << 20, None, "bytes"), 2) == "3.0 MiB, 1.5 MiB/s"
    assert progress_line(Step("copy", 0, 10, "bytes"), 0) == "0 B of 10 B"
    assert (
        progress_line(Step("sweep", 10, 10, "objects"), 1)
        == "10 objects of 10 objects, 10 objects/s"
    )


def test_no_rate_is_reported_for_a_short_time_or_for_earlier_work() -> None:
    assert progress_line(Step("expire", 28_078, None, "rows"), 0.000001) == "28,078 rows"
    assert (
        progress_line(Step("expire", 28_078, 30_000, "rows"), 0.9) == "28,078 rows of 30,000 rows"
    )
    assert progress_line(Step("mark", 1100, None, "objects"), 10, began_at=1000) == (
        "1,100 objects, 10 objects/s"
    )
    assert progress_line(Step("mark", 1000, 2000, "objects"), 10, began_at=1000) == (
        "1,000 objects of 2,000 objects"
    )


def test_a_phase_that_is_far_along_when_first_reported_has_no_absurd_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [100.0]

    def clock() -> float:
        now[0] += 0.000001
        return now[0]

    with Meter(silent=False, stoppable=False, clock=clock) as meter:
        now[0] += 2 * LINE_INTERVAL_S
        meter(Step("expire", 1_000_000, None, "rows"))
        now[0] += 2 * LINE_INTERVAL_S
        meter(Step("expire", 1_000_100, None, "rows"))
    assert capsys.readouterr().err == ("expire: 1,000,000 rows\nexpire: 1,000,100 rows, 9 rows/s\n")


def test_a_bar_shows_the_same_figures_as_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "is_terminal", lambda stream: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    update = Progress.update

    def update_and_show(bars: Progress, *given: Any, **named: Any) -> None:
        update(bars, *given, **named)
        bars.refresh()

    monkeypatch.setattr(Progress, "update", update_and_show)
    now = [100.0]
    with Meter(silent=False, stoppable=False, clock=lambda: now[0]) as meter:
        for done in (1_000_000, 2_000_000):
            meter(Step("expire", done, None, "rows"))
        now[0] += 10
        meter(Step("expire", 2_000_000, None, "rows"))
    shown = re.sub("\x1b[^a-zA-Z]*[a-zA-Z]", "", capsys.readouterr().err)
    assert "1,000,000 rows" in shown
    assert set(re.findall("([0-9,]+) rows/s", shown)) <= {"100,000"}


def test_progress_lines_are_rare_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    with Meter(silent=False, stoppable=False, clock=lambda: now[0]) as meter:
        for done in range(1, 101):
            now[0] += LINE_INTERVAL_S / 10
            meter(Step("mark", done, 100, "objects"))
    lines = capsys.readouterr().err.splitlines()
    assert 9 <= len(lines) <= 10
    assert lines[0].startswith("mark: ")


def test_a_silent_meter_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with Meter(silent=True, stoppable=False, clock=lambda: now[0]) as meter:
        now[0] += 100
        meter(Step("mark", 1, 2, "objects"))
    assert capsys.readouterr().err == ""


def test_the_first_ctrl_c_requests_a_stop_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Meter(silent=True, stoppable=True) as meter:
        assert not meter.stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert meter.stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
