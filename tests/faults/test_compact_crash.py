"""A compaction that is interrupted leaves the old store or the new one, whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from campaigns import compact_workload
from campaigns.tally import Report

IMAGES = 80

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")


@pytest.fixture(scope="module")
def report(scratch: Path) -> Report:
    return compact_workload.run(scratch, count=IMAGES, seed=3, engines=(0,), every=3)


def test_a_crash_during_compact_loses_nothing_and_leaves_no_file_behind(report: Report) -> None:
    assert report.findings == ()
    assert report.kept()


@pytest.mark.parametrize("how", ["killed", "power loss"])
def test_crashes_during_compact_leave_the_old_store_or_the_new_one_and_both_occur(
    report: Report, how: str
) -> None:
    assert report.total(f"{how}: sound, old") > 0
    assert report.total(f"{how}: sound, new") > 0
    assert report.total("acknowledged: sound, new") == 1
    if how == "power loss":
        assert report.total(f"{how}: sound, ") == IMAGES
