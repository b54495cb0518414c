"""Everything that can still be proven in the data file of a damaged store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from casstore.engine.lmdb.creation import DICTIONARIES, SLABS
from casstore.engine.lmdb.directory import DATA_FILE
from casstore.engine.lmdb.excavation import reaching
from casstore.engine.lmdb.excavation.digging import Digging, DigProgress
from casstore.engine.lmdb.excavation.found_rows import FoundRows
from casstore.engine.lmdb.excavation.found_slabs import FoundSlabs
from casstore.engine.lmdb.excavation.gaps import ANY_TABLE, Gaps, LostRows
from casstore.engine.lmdb.excavation.keyless import place_dictionaries, place_slabs
from casstore.engine.lmdb.excavation.ranks import NEWEST
from casstore.engine.lmdb.excavation.reaching import Marked
from casstore.engine.lmdb.log import LOG_FILE, surviving_records
from casstore.engine.lmdb.pages import PageFile
from casstore.engine.protocol import NewObject, Row, StoredObject
from casstore.errors import StoreNotFoundError


def require_data_file(path: str) -> str:
    """The data file of the store at ``path``; StoreNotFoundError if it has none."""
    data_path = os.path.join(path, DATA_FILE)
    if not os.path.exists(data_path):
        raise StoreNotFoundError(f"no store at {path}")
    return data_path


class Excavation:
    """What was found in a damaged store: its rows, its objects, and where something is missing.

    Reads only. Use as a context manager: rows are kept in a scratch file until the end.
    """

    def __init__(self, path: str, progress: DigProgress | None = None) -> None:
        self._file = PageFile(require_data_file(path))
        self._rows: FoundRows | None = None
        try:
            self._rows = FoundRows()
            self._slabs = FoundSlabs(self._file)
            self._gaps = Gaps()
            log = surviving_records(os.path.join(path, LOG_FILE))
            digging = Digging(self._file, self._rows, self._slabs, self._gaps, log, progress)
            runs = digging.run()
            self.stray_rows = digging.stray_rows
            self._has_other_rows = digging.has_other_rows
            self._lost_commits = digging.lost_commits
            if self._gaps.of(NEWEST, SLABS):
                place_slabs(self._file, self._slabs, runs)
            self._slabs.sort()
            if self._gaps.of(NEWEST, DICTIONARIES):
                place_dictionaries(self._file, self._slabs, runs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file and drop the scratch file."""
        self._file.close()
        if self._rows is not None:
            self._rows.close()

    def __enter__(self) -> Excavation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- rows -----------------------------------------------------------------------------

    def rows(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[Row]:
        """The rows of a table in order."""
        for row, _ in self.ranked_rows(table, start, stop):
            yield row

    def ranked_rows(
        self, table: str, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[Row, int]]:
        """The rows of a table in order, each with where it was found."""
        assert self._rows is not None
        return self._rows.ranked(table, start, stop)

    def lost_rows(self) -> list[LostRows]:
        """Where rows may be missing, table by table; or that some are, nobody knows where."""
        found = self._gaps.lost_rows()
        if self._has_other_rows:
            why = "the rows are not those last written: some are older or missing"
            found.append(LostRows(ANY_TABLE, b"", None, why))
        if self._lost_commits is not None:
            found.append(LostRows(ANY_TABLE, b"", None, self._lost_commits))
        return found

    # --- objects --------------------------------------------------------------------------

    def mark(self, roots: Iterable[bytes]) -> Marked:
        """Find all ids that the objects of these names are made of."""
        return reaching.mark(self._file, self._slabs, roots)

    def find(self, object_id: int) -> StoredObject | str:
        """An object, proven by its digest; or why it cannot be had."""
        return self._slabs.find(object_id)

    def digest_of(self, object_id: int) -> bytes:
        """The name of an object, from a directory, or from what names it beside."""
        return self._slabs.digest_of(object_id)

    def children_of(self, object_id: int) -> tuple[int, ...]:
        """The ids that an object links to, whether or not its bytes are there."""
        return self._slabs.children_of(object_id)

    def sketch(self, object_id: int) -> StoredObject | None:
        """An object that cannot be proven because names of what it links to are lost."""
        return self._slabs.sketch(object_id)

    def stand_in(self, object_id: int) -> bytes:
        """What stands for the lost name of an object in a sketch."""
        return self._slabs.stand_in(object_id)

    def arriving(self, object_id: int, item: StoredObject) -> NewObject:
        """An object that was found, in the form in which a store takes it in."""
        return self._slabs.arriving(object_id, item)

    @property
    def stray_slabs(self) -> int:
        """How many slabs were found in pages to which no tree leads."""
        return self._slabs.stray_count

    def lost_dictionaries(self) -> list[int]:
        """Dictionaries that slabs name and that are gone."""
        return self._slabs.lost_dictionaries()
