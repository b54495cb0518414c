"""The slots of readers in LMDB's lock file stay theirs while their process opens more stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import BusyError
from tests.faults.test_processes import finish, python

OTHERS_READERS = """
import sys
import casstore
with casstore.open(sys.argv[1], "relaxed") as store:
    store.engine._env.handle.reader_check()
    print(store.engine._env.handle.readers().replace("\\n", ";"))
"""


@pytest.mark.parametrize("again", ["under another name", "next to what shares it"])
def test_opening_a_store_twice_keeps_the_reader_slots_of_the_first_open(
    tmp_path: Path, again: str
) -> None:
    """LMDB's locks on its lock file go when this process closes any descriptor of it.

    Another process then took the readers here for dead, and the whole table for its own.
    """
    place = tmp_path / "store"
    with casstore.open(place, "relaxed") as store:
        if again == "under another name":
            place = place.rename(place.with_name("elsewhere"))
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        with engine._env.reading() as txn:
            with pytest.raises(BusyError, match="already open in this process"):
                LmdbEngine(str(place), durability="relaxed")
            readers = finish(python(OTHERS_READERS, place))
            assert any(
                line.split()[0] == str(os.getpid()) and line.split()[-1] == str(txn.id())
                for line in readers.split(";")[1:]
                if line.strip()
            )
