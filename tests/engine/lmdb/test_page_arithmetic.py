"""The pages that a table needs are computed as LMDB lays them out."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import pytest

from casstore.engine.lmdb.page_arithmetic import when_full


@pytest.mark.parametrize(("version", "header"), [(0, 16), (1, 24)])
def test_the_arithmetic_of_pages_is_that_of_lmdb(tmp_path: Path, version: int, header: int) -> None:
    for seed in range(4):
        source = random.Random(seed)
        longest = (8, 100, 2_100, 20_000)[seed]
        rows = {
            source.randbytes(source.randrange(1, 60)): bytes(source.randrange(longest))
            for _ in range(2_000)
        }
        env = lmdb.open(str(tmp_path / str(seed)), map_size=1 << 28, max_dbs=1, lib_version=version)
        database = env.open_db(b"t")
        with env.begin(write=True) as txn:
            txn.cursor(db=database).putmulti(sorted(rows.items()), append=True)
            stat = txn.stat(database)
        env.close()
        lengths = [(len(key), len(value)) for key, value in sorted(rows.items())]
        counted = when_full(lengths, stat["psize"], header)
        assert counted.leaf == pytest.approx(stat["leaf_pages"], rel=0.01)
        assert counted.overflow == pytest.approx(stat["overflow_pages"], rel=0.01)
        assert counted.branch == pytest.approx(stat["branch_pages"], abs=1)
    assert when_full([], 4096, header) == (0, 0, 0)
