"""Killed writers, sampled; ``tools/torture.py kill`` kills by the hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns import kill, kill_workload
from campaigns.replay import Violation


def test_killed_writers_lose_no_acknowledged_write_and_leave_no_partial_write(
    scratch: Path,
) -> None:
    report = kill.run(scratch, count=14, seed=5, rounds_per_store=4)
    assert report.findings == ()
    assert report.kept()
    assert report.trials == 14
    assert report.total("sound") == 14
    assert report.total("acknowledged") > 50
    assert report.total("killed while opening") > 0
    assert report.total("killed while writing") > 0
    for durability in kill.DURABILITIES:
        assert report.total(f"{durability}: stores") > 0


def test_the_checker_reports_a_lost_acknowledged_write(tmp_path: Path) -> None:
    log = tmp_path / "acks"
    log.write_text('{"kind": "counter", "name": "0-0-0", "share": 1}\n')
    with pytest.raises(Violation, match="acknowledged"):
        kill_workload.check(tmp_path / "store", [str(log), "full"])
