"""Hostile slabs, dictionaries and index rows: all of them, with some of the cuts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from campaigns import frames
from campaigns.tally import Report

CUTS = 20


@pytest.fixture(scope="module")
def report(scratch: Path) -> Report:
    return frames.run(scratch, count=CUTS, seed=1)


def test_hostile_rows_give_typed_errors_in_little_memory(report: Report) -> None:
    assert report.findings == ()
    assert report.kept()


def test_every_hostile_case_ran_on_both_lmdb_versions(report: Report) -> None:
    drawn = list(frames.cases(CUTS, random.Random(1)))
    assert len(drawn) > 80
    assert len({case.name for case in drawn}) == len(drawn)
    assert report.trials == 2 * len(drawn)
    assert report.total("get CorruptionError, verify CorruptionError") > len(drawn)


def test_a_sound_slab_of_the_packed_layout_is_read(report: Report) -> None:
    """So that those which are refused are refused for what is wrong with them."""
    sound = [case for case in frames.cases(CUTS, random.Random(1)) if not case.verify_fails]
    assert "a sound slab of layout 2" in {case.name for case in sound}
    assert report.total("get fine, verify fine") >= 2 * 2
