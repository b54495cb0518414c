"""Opens a damaged data file, scans it, and gives access to the rows and objects found."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from casstore.engine.lmdb.creation import DICTIONARIES, SLABS
from casstore.engine.lmdb.directory import DATA_FILE
from casstore.engine.lmdb.log import LOG_FILE, surviving_records
from casstore.engine.lmdb.page_scan import reachable
from casstore.engine.lmdb.page_scan.found_rows import FoundRows
from casstore.engine.lmdb.page_scan.found_slabs import FoundSlabs
from casstore.engine.lmdb.page_scan.keyless import place_dictionaries, place_slabs
from casstore.engine.lmdb.page_scan.pages import PageFile
from casstore.engine.lmdb.page_scan.reachable import Marked
from casstore.engine.lmdb.page_scan.scan_pass import ScanPass, ScanProgress
from casstore.engine.lmdb.page_scan.trees import ANY_TABLE, NEWEST, Gaps, LostRows
from casstore.engine.protocol import NewObject, Row, StoredObject
from casstore.errors import StoreNotFoundError


def require_data_file(path: str) -> str:
    """The data file of the store at ``path``; StoreNotFoundError if it has none."""
    data_path = os.path.join(path, DATA_FILE)
    if not os.path.exists(data_path):
        raise StoreNotFoundError(f"no store at {path}")
    return data_path


class PageScan:
    """The valid rows and objects of a damaged store, and the key ranges that are missing.

    Never writes to the store. Use it as a context manager: ``close`` deletes the scratch file
    that holds the rows.
    """

    def __init__(self, path: str, progress: ScanProgress | None = None) -> None:
        self._file = PageFile(require_data_file(path))
        self._rows: FoundRows | None = None
        try:
            self._rows = FoundRows()
            self._slabs = FoundSlabs(self._file)
            self._gaps = Gaps()
            log = surviving_records(os.path.join(path, LOG_FILE))
            scan = ScanPass(self._file, self._rows, self._slabs, self._gaps, log, progress)
            runs = scan.run()
            self.stray_rows = scan.stray_rows
            self._has_other_rows = scan.has_other_rows
            self._lost_commits = scan.lost_commits
            if self._gaps.of(NEWEST, SLABS):
                place_slabs(self._file, self._slabs, runs)
            self._slabs.sort()
            if self._gaps.of(NEWEST, DICTIONARIES):
                place_dictionaries(self._file, self._slabs, runs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the data file and delete the scratch file."""
        self._file.close()
        if self._rows is not None:
            self._rows.close()

    def __enter__(self) -> PageScan:
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
        """The rows of a table in order, each with its rank."""
        assert self._rows is not None
        return self._rows.ranked(table, start, stop)

    def lost_rows(self) -> list[LostRows]:
        """The key ranges where rows may be missing; ``ANY_TABLE`` if the table is not known."""
        found = self._gaps.lost_rows()
        if self._has_other_rows:
            why = "the rows are not those last written: some are older or missing"
            found.append(LostRows(ANY_TABLE, b"", None, why))
        if self._lost_commits is not None:
            found.append(LostRows(ANY_TABLE, b"", None, self._lost_commits))
        return found

    # --- objects --------------------------------------------------------------------------

    def mark(self, roots: Iterable[bytes]) -> Marked:
        """Mark every id that the objects with the digests ``roots`` reach."""
        return reachable.mark(self._file, self._slabs, roots)

    def find(self, object_id: int) -> StoredObject | str:
        """An object that matches its digest, or the reason why it cannot be read."""
        return self._slabs.find(object_id)

    def digest_of(self, object_id: int) -> bytes:
        """The digest of an object: from a slab that holds it, else from an index row."""
        return self._slabs.digest_of(object_id)

    def children_of(self, object_id: int) -> tuple[int, ...]:
        """The ids that an object links to; empty if no slab holds the object."""
        return self._slabs.children_of(object_id)

    def sketch(self, object_id: int) -> StoredObject | None:
        """An unverified object with placeholders for the lost digests of its children."""
        return self._slabs.sketch(object_id)

    def stand_in(self, object_id: int) -> bytes:
        """The placeholder for the lost digest of an object in a sketch."""
        return self._slabs.stand_in(object_id)

    def arriving(self, object_id: int, item: StoredObject) -> NewObject:
        """A found object in the form that ``Write`` takes."""
        return self._slabs.arriving(object_id, item)

    @property
    def stray_slabs(self) -> int:
        """How many slabs were found on stray pages."""
        return self._slabs.stray_count

    def lost_dictionaries(self) -> list[int]:
        """The numbers of the missing dictionaries that slabs of the newest tree need."""
        return self._slabs.lost_dictionaries()
