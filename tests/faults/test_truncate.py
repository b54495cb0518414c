"""Files cut short, sampled; ``tools/torture.py truncate`` cuts at every page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import casstore
from campaigns import specimen, truncate
from campaigns.examination import PLAIN, VERIFY
from campaigns.tally import Report
from casstore.engine.lmdb import environment
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.page_scan import read_extent
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


OPEN = """
import sys
sys.path.insert(0, sys.argv[2])
import casstore
with casstore.open(sys.argv[1], **({"readonly": True} if sys.argv[3] == "reads" else {})):
    print("open", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("first", ["reads", "writes"])
@pytest.mark.parametrize("second", ["reads", "writes"])
def test_a_short_file_of_a_killed_writer_can_be_opened_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    """It cannot be verified while a writer works, and its first user may not commit for long."""
    place = tmp_path / "store"
    data = str(place / "data.mdb")
    with monkeypatch.context() as patch:
        patch.setattr(environment, "lengthen", lambda handle, needed_bytes: False)
        with casstore.open(place) as store:
            digest = store.put_value({"a": 1})
            assert isinstance(store.engine, LmdbEngine)
            env = store.engine._env
            while not read_extent(data).is_short:
                # Taken and given back in one transaction, pages are counted and never written.
                with env.handle.begin(write=True) as txn:
                    for key in range(20):
                        txn.put(b"%d" % key, bytes(9_000), db=env.tables["records"])
                    for key in range(20):
                        txn.delete(b"%d" % key, db=env.tables["records"])
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", OPEN, str(place), root, first],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with casstore.open(place, readonly=second == "reads") as store:
            assert store.get_value(digest) == {"a": 1}
        other.communicate("\n")
    assert read_extent(data).is_short == (first == second == "reads")
