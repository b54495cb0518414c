"""No room left, once in each way; ``tools/torture.py diskfull`` does it more often."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns import diskfull
from campaigns.tally import Report


@pytest.fixture(scope="module")
def report(scratch: Path) -> Report:
    report = diskfull.run(scratch, count=2, seed=1)
    print(*report.notes, sep="\n")
    return report


def test_a_full_disk_raises_a_typed_error_and_the_store_recovers(report: Report) -> None:
    assert report.findings == ()
    assert report.kept()


@pytest.mark.parametrize("way", [diskfull.RLIMIT, diskfull.MAP, diskfull.GROUP, diskfull.CREATE])
def test_every_full_disk_method_that_needs_no_privileges_ran(report: Report, way: str) -> None:
    assert report.total(f"{way}: ") == 2


@pytest.mark.parametrize("kind", diskfull.FILE_SYSTEMS)
def test_every_file_system_was_tested_or_is_reported_as_skipped(report: Report, kind: str) -> None:
    ran = report.total(f"{kind}: ")
    assert ran == 2 or f"{kind}: not run, this user cannot mount one" in report.notes
