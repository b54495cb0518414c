"""Files cut short, sampled; ``tools/torture.py truncate`` cuts at every page."""

from __future__ import annotations

from pathlib import Path

import pytest

import casstore
from campaigns import specimen, truncate
from campaigns.examination import PLAIN, VERIFY
from campaigns.tally import Report
from casstore.engine.protocol import PutRow, Write
from casstore.errors import StorageError


@pytest.fixture(scope="module")
def report(scratch: Path) -> Report:
    return truncate.run(scratch, count=24, seed=1)


def test_a_truncated_file_is_refused_and_does_not_kill_the_process(report: Report) -> None:
    assert report.findings == ()
    assert report.kept()
    for engine in specimen.ENGINES:
        for mode in (PLAIN, VERIFY):
            assert report.total(f"engine {engine} {mode}: refused") >= 24


def test_a_file_that_lost_only_free_pages_opens_with_everything_in_it(report: Report) -> None:
    for engine in specimen.ENGINES:
        assert report.total(f"engine {engine} free end cut: right") > 0


def test_a_writer_killed_before_it_covered_the_file_leaves_a_store_that_opens(
    report: Report,
) -> None:
    assert report.total("writer killed before cover: opened, all there") == 2


def test_a_store_whose_disk_is_not_mounted_is_not_recreated(
    tmp_path: Path,
) -> None:
    place, disk = tmp_path / "store", tmp_path / "disk"
    with casstore.open(place) as store:
        digest = store.put_value({"a": 1})
    disk.mkdir()
    (place / "data.mdb").rename(disk / "data.mdb")
    (place / "data.mdb").symlink_to(disk / "data.mdb")
    with casstore.open(place) as store:
        assert store.get_value(digest) == {"a": 1}
    disk.rename(tmp_path / "unmounted")
    for readonly in (False, True):
        with pytest.raises(StorageError, match="which is not there"):
            casstore.open(place, readonly=readonly)
    (tmp_path / "unmounted").rename(disk)
    with casstore.open(place) as store:
        assert store.get_value(digest) == {"a": 1}


@pytest.mark.parametrize("engine", specimen.ENGINES)
def test_a_row_put_twice_in_one_write_leaves_a_file_that_verifies(
    engine: int, tmp_path: Path
) -> None:
    """Found by the short-file campaign.

    LMDB keeps the longer run of pages when a large value is replaced by a smaller one within
    one transaction. The offline verifier took that for damage and refused a sound store.
    """
    place = tmp_path / "store"
    with casstore.open(place, lmdb_version=engine) as store:
        rows = [PutRow("records", b"k", bytes(size)) for size in (9000, 3000)]
        store.engine.write(Write(rows=rows))
    with casstore.open(place, verify=True) as store:
        assert store.engine.scan_rows("records")[0].value == bytes(3000)
