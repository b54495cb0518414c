"""A data file that is shorter than its pages claim opens all the same if only free pages lack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import casstore
from casstore.engine.lmdb import environment
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.page_scan import read_extent

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
    root = str(Path(__file__).parents[3])
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
