"""The story of a read that failed now and then, on LMDB's newer file format only.

LMDB takes the number of the newest transaction, then reads the meta page that belongs to it.
A reader that the system holds up in between, while others commit twice, finds newer roots
under its older number. The older format then reads the newer state, which is as good; the
newer one refuses every page of it, and a look-up in a sound store ended in MDB_BAD_TXN:
16 of 5.5 million beside two busy writers. A read now begins again if commits came in between.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import casstore

ROOT = Path(__file__).parent.parent.parent
READS = 60_000

_WRITER = """
import sys, casstore
from casstore.engine.protocol import PutRow, Write
with casstore.open(sys.argv[1], "relaxed", auto_train=False) as store:
    print("open", flush=True)
    for n in range(10**9):
        store.engine.write(Write(rows=[PutRow("records", b"k%d" % (n % 50), b"%d" % n)]))
"""

_READER = """
import sys, casstore
from casstore.engine.protocol import RowKey
with casstore.open(sys.argv[1], "relaxed", auto_train=False) as store:
    for n in range(int(sys.argv[2])):
        store.engine.get_rows([RowKey("records", b"k7")])
"""


@pytest.mark.parametrize("lmdb_version", [0, 1])
def test_reads_concurrent_with_busy_writers_of_other_processes_never_fail(
    tmp_path: Path, lmdb_version: int
) -> None:
    place = str(tmp_path / "s")
    casstore.open(place, "relaxed", lmdb_version=lmdb_version).close()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, place], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "open\n"
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", _READER, place, str(READS)],
                stderr=subprocess.PIPE, text=True, cwd=ROOT,
            )
            for _ in range(2)
        ]  # fmt: skip
        for reader in readers:
            _, complaint = reader.communicate()
            assert reader.returncode == 0, complaint
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
