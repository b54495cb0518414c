"""Power loss, sampled; ``tools/torture.py replay`` draws thousands of crash images."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from campaigns import crash_workload
from campaigns.tally import Report

IMAGES = 60

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")


@pytest.fixture(scope="module")
def report(scratch: Path) -> Report:
    return crash_workload.run(scratch, count=IMAGES, seed=1, commits=8, engines=(0,))


def test_power_loss_breaks_no_promise_of_any_durability(report: Report) -> None:
    assert report.findings == ()
    assert report.kept()
    assert report.trials == 5 * IMAGES


def test_full_durability_loses_no_acknowledged_commit(report: Report) -> None:
    assert report.total("full, same boot: sound") == IMAGES
    assert report.total("full, same boot: sound, commits lost") == 0


def test_without_a_flush_the_next_boot_finds_a_sound_store_or_refuses(report: Report) -> None:
    label = "process, other boot"
    assert report.total(f"{label}: sound") + report.total(f"{label}: refused") == IMAGES
    assert report.total(f"{label}: refused") > 0


def test_behind_a_kept_state_commits_may_be_lost_and_nothing_else(report: Report) -> None:
    label = "relaxed, other boot"
    lost = report.total(f"{label}: sound, commits lost")
    assert report.total(f"{label}: sound") == IMAGES
    assert lost > 0


@pytest.mark.parametrize("durability", ["relaxed", "process"])
def test_the_negative_controls_are_violated(report: Report, durability: str) -> None:
    assert report.total(f"{durability}, same boot: violations (the negative control)") > 0
