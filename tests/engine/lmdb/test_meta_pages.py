"""LMDB keeps two meta pages and takes the one with the higher transaction for the newest.

A flipped bit in that number makes it take the older one: a sound state, only not the
last. No digest and no checksum can tell, because nothing in an older state is wrong; but
commits alternate between the two pages, so their transactions must follow each other.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import casstore
from casstore.engine.lmdb.page_scan import read_extent
from casstore.engine.protocol import PutRow, Write
from casstore.errors import CorruptionError
from tests.maintenance.wounds import engine_of

# Where the number stands: after the page header, 136 bytes of meta page end with it.
TRANSACTION_AT = {0: 16 + 128, 1: 24 + 128}
PAGE_BYTES = 4096


@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize("page", [0, 1])
def test_a_flipped_bit_in_the_number_of_a_transaction_is_found(
    tmp_path: Path, engine: int, page: int
) -> None:
    sound = tmp_path / "sound"
    with casstore.open(sound, "relaxed", lmdb_version=engine) as store:
        for number in range(9):
            store.engine.write(Write(rows=[PutRow("heads", b"head", b"%d" % number)]))
            engine_of(store).apply_log()
    before = read_extent(str(sound / "data.mdb")).transactions
    found = 0
    for bit in range(64):
        place = tmp_path / f"bit {bit}"
        shutil.copytree(sound, place)
        data = bytearray((place / "data.mdb").read_bytes())
        data[page * PAGE_BYTES + TRANSACTION_AT[engine] + bit // 8] ^= 1 << bit % 8
        (place / "data.mdb").write_bytes(data)
        extent = read_extent(str(place / "data.mdb"))
        assert extent.transactions[page] == before[page] ^ 1 << bit
        assert extent.transactions[1 - page] == before[1 - page]
        if extent.is_in_order:
            # N and N-1 may become N-2 and N-1: the one flip that no rule can see.
            continue
        with pytest.raises(CorruptionError, match="follow each other"):
            casstore.open(place)
        found += 1
        shutil.rmtree(place)
    assert found >= 63


def test_the_meta_pages_of_a_store_in_use_are_in_order_after_every_commit(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        for number in range(50):
            store.put_value({"number": number})
            assert read_extent(str(tmp_path / "s" / "data.mdb")).is_in_order
