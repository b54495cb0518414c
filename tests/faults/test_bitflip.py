"""Flipped bits, sampled; ``tools/torture.py bitflip`` does every byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns import bitflip, specimen
from campaigns.examination import PLAIN, RIGHT, VERIFY, Examiner
from campaigns.tally import Report
from casstore.engine.lmdb import slab as slabs
from tests.maintenance.wounds import wounding

SAMPLE = 80
SEED = 1


@pytest.fixture(scope="module")
def report(scratch: Path) -> Report:
    return bitflip.run(scratch, count=SAMPLE, seed=SEED)


def test_a_flipped_bit_gives_the_right_bytes_or_a_typed_error(report: Report) -> None:
    assert report.findings == ()
    assert report.kept()


def test_a_flipped_bit_never_yields_a_wrong_object(report: Report) -> None:
    assert report.total("wrong object") == 0


def test_a_flipped_bit_never_yields_a_wrong_row(report: Report) -> None:
    rows = [f"{PLAIN}: wrong row", f"{VERIFY}: wrong row", "wrong absence", "wrong scan"]
    assert [report.total(label) for label in rows] == [0] * 4


def test_a_verifying_open_of_a_file_with_a_flipped_bit_never_crashes_or_hangs(
    report: Report,
) -> None:
    assert report.total(f"{VERIFY}: died") == report.total(f"{VERIFY}: hung") == 0


def test_the_sample_covers_both_lmdb_versions_with_and_without_verification(report: Report) -> None:
    assert report.trials == SAMPLE
    for engine in specimen.ENGINES:
        for mode in (PLAIN, VERIFY):
            assert report.total(f"engine {engine} {mode}: ") == SAMPLE // 2
            assert report.total(f"engine {engine} {mode}: refused") > 0
            assert report.total(f"engine {engine} {mode}: right") > 0


def test_the_specimen_has_slabs_of_both_layouts(tmp_path: Path) -> None:
    specimen.build(tmp_path / "specimen", SEED, lmdb_version=0)
    with wounding(tmp_path / "specimen") as stored:
        layouts = {value[0] for _, value in stored.rows("slabs")}
    assert layouts == {slabs.LAYOUT, slabs.PACKED_LAYOUT}


@pytest.mark.parametrize("engine", specimen.ENGINES)
def test_an_undamaged_specimen_is_right_with_and_without_verification(
    engine: int, tmp_path: Path
) -> None:
    data = specimen.build(tmp_path / "specimen", SEED, lmdb_version=engine)
    examiner = Examiner(tmp_path / "worker", SEED)
    try:
        assert [examiner.examine(data, mode).word for mode in (PLAIN, VERIFY)] == [RIGHT, RIGHT]
    finally:
        examiner.close()


def test_the_examiner_sees_a_store_with_other_content(tmp_path: Path) -> None:
    other = specimen.build(tmp_path / "specimen", SEED + 1, lmdb_version=0)
    examiner = Examiner(tmp_path / "worker", SEED)
    try:
        assert examiner.examine(other, PLAIN).label() == "refused ObjectNotFoundError"
    finally:
        examiner.close()
