"""How far long work has come: plain lines with rate and time left, a bar on a terminal."""

from __future__ import annotations

import os
import signal

import pytest

from casstore.cli.progress import LINE_INTERVAL_S, Meter, told
from casstore.maintenance.progress import Step


def test_a_line_tells_amount_rate_and_time_left() -> None:
    assert told(Step("mark", 500, 2000, "objects"), 10) == (
        "mark: 500 objects of 2,000 objects, 50 objects/s, about 30 s left"
    )
    assert told(Step("copy", 3 << 20, None, "bytes"), 2) == "copy: 3.0 MiB, 1.5 MiB/s"
    assert told(Step("copy", 0, 10, "bytes"), 0) == "copy: 0 B of 10 B"
    assert (
        told(Step("sweep", 10, 10, "objects"), 1) == "sweep: 10 objects of 10 objects, 10 objects/s"
    )


def test_where_nobody_watches_a_line_comes_rarely(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_first_ctrl_c_asks_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Meter(silent=True, stoppable=True) as meter:
        assert not meter.stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert meter.stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
