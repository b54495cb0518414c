"""Power loss, sampled; ``tools/torture.py replay`` draws thousands of crash images."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from campaigns import crash_workload
from campaigns.tally import Report

IMAGES = 60
# Without the checksum, too few of so few images show a torn record.
CONTROLS = (crash_workload.NO_FLUSH, crash_workload.NO_SYNC)

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")


@pytest.fixture(scope="module")
def report(scratch: Path) -> Report:
    return crash_workload.run(
        scratch, count=IMAGES, seed=1, commits=24, engines=(0,), controls=CONTROLS
    )


def test_power_loss_breaks_no_promise_of_any_durability(report: Report) -> None:
    assert report.findings == ()
    assert report.kept()
    assert report.trials == (len(crash_workload.DURABILITIES) + len(CONTROLS)) * IMAGES
    for durability in crash_workload.DURABILITIES:
        assert report.total(f"{durability}: sound") == IMAGES


@pytest.mark.parametrize("rule", CONTROLS)
def test_each_negative_control_shows_violations(report: Report, rule: str) -> None:
    assert report.total(f"without {rule}: violations (the negative control)") > 0
