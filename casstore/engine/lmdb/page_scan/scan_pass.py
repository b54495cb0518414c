"""One pass over the pages of a damaged file: the trees of both meta pages, then stray pages.

The redo log is applied to the rows of the newest tree, from the first commit that the tree does
not contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from casstore.engine.id_set import IdSet
from casstore.engine.lmdb.applying import LOG_KEY
from casstore.engine.lmdb.creation import DICTIONARIES, SLABS
from casstore.engine.lmdb.log import RecoveryPoint, Survivor, decode_recovery_point
from casstore.engine.lmdb.lookup import CHECKSUM_BYTES, SUM_KEY, RowSum, prove_row
from casstore.engine.lmdb.memtable import decode_entry
from casstore.engine.lmdb.page_scan.found_rows import FoundRows
from casstore.engine.lmdb.page_scan.found_slabs import FoundSlabs
from casstore.engine.lmdb.page_scan.meta import Meta, read_record
from casstore.engine.lmdb.page_scan.pages import (
    LEAF,
    OVERFLOW,
    DecodedPage,
    LeafEntry,
    Lost,
    PageFile,
)
from casstore.engine.lmdb.page_scan.trees import BEFORE, NEWEST, SAVED_TABLES, STRAY, Gaps
from casstore.engine.protocol import TABLES
from casstore.errors import CorruptionError

# A row of these tables proves that it is newer than the known state: by a number that only grows,
# or by its mere existence.
_ORDERED: Final = ("heads", "history", "leases", "receipts", "sessions", "tombstones")
_LONGEST_RUN_PAGES: Final = 8192

ScanProgress = Callable[[int, int], None]


class ScanPass:
    """One pass over a file. ``run`` fills ``rows``, ``slabs`` and ``gaps``."""

    def __init__(
        self,
        file: PageFile,
        rows: FoundRows,
        slabs: FoundSlabs,
        gaps: Gaps,
        log: Sequence[Survivor] | None,
        progress: ScanProgress | None,
    ) -> None:
        self._file = file
        self._rows = rows
        self._slabs = slabs
        self._gaps = gaps
        self._progress = progress
        self._log = log
        #: The log position that the newest tree records; None if it cannot be read.
        self._recovery_point: RecoveryPoint | None = None
        #: Why commits of the log may be lost; None if the log is complete.
        self.lost_commits: str | None = None
        #: Rows that a commit of the log deleted.
        self._deleted: set[tuple[str, bytes]] = set()
        self._visited = IdSet()
        #: The checksum over all rows that were read from the newest tree, and the one that the
        #: tree records. The second is None if it, or any row, cannot be read.
        self._sum = RowSum()
        self._written_sum: bytes | None = None
        self.stray_rows = 0

    @property
    def has_other_rows(self) -> bool:
        """True if the rows of the newest tree do not add up to the checksum over all rows.

        Then every page and row is valid by itself, but a page is an outdated version: the disk
        lost a write.
        """
        return self._written_sum not in (None, self._sum.encode())

    def run(self) -> list[DecodedPage]:
        """Scan the file; returns the runs of overflow pages that belong to no known entry."""
        metas = self._file.metas()
        for rank in (NEWEST, BEFORE):
            self._scan_tree(metas[rank] if rank < len(metas) else None, rank)
        self._apply_log()
        if len(metas) == 1:
            # The remaining meta page may be the older one. Then the rows of the last commit are
            # on stray pages, so mark all keys of these tables as lost and let newer rows win.
            why = "a meta page is lost: the last commit may be missing"
            for table in (*_ORDERED, SLABS, DICTIONARIES):
                self._gaps.of(NEWEST, table).append(Lost(0, b"", None, why))
            self._deleted.clear()
        self._rows.flush()
        runs = self._scan_strays()
        self._rows.flush()
        return runs

    # --- the trees of both meta pages -------------------------------------------------------

    def _scan_tree(self, meta: Meta | None, rank: int) -> None:
        roots: dict[str, int] = {}
        broken: list[Lost] = []
        if meta is not None:
            for _, entry in self._file.walk(meta.main.root, broken.append, self._visit):
                # Format 1 ends names in a zero byte.
                name = entry.key.rstrip(b"\0").decode(errors="replace")
                if entry.is_database and entry.value is not None:
                    roots[name] = read_record(entry.value).root
                elif name == SUM_KEY.decode() and rank == NEWEST:
                    self._written_sum = entry.value
                elif name == LOG_KEY.decode() and rank == NEWEST:
                    self._recovery_point = decode_recovery_point(entry.value or b"")
        for name in (SLABS, DICTIONARIES, *SAVED_TABLES):
            gaps = self._gaps.begin(rank, name)
            if name not in roots:
                why = broken[0].why if broken else "no meta page refers to it"
                gaps.append(Lost(0, b"", None, why))
                continue
            if name == SLABS:
                self._scan_slabs(roots[name], rank)
            elif name == DICTIONARIES:
                self._scan_dictionaries(roots[name], rank)
            else:
                self._scan_rows(name, roots[name], rank)
        unread: list[Lost] = []
        # The other tables are only walked: their pages are not strays, and their rows are part of
        # the checksum over all rows.
        for name in sorted(roots.keys() - self._gaps.known(rank)):
            for page, entry in self._file.walk(roots[name], unread.append, self._visit):
                self._visit_run(entry)
                if name in TABLES and rank == NEWEST and self._prove(name, entry, rank) is None:
                    unread.append(Lost(page, entry.key, None, "a row is damaged"))
        if rank == NEWEST and (unread or self._gaps.any_rows(rank)):
            self._written_sum = None

    def _visit(self, page: int, pages: int) -> bool:
        # Always True: the older tree shares most pages with the newest.
        self._visited.add(page)
        return True

    def _visit_run(self, entry: LeafEntry) -> None:
        if entry.value is None:
            length = min(self._file.run_length(entry.size), _LONGEST_RUN_PAGES)
            for page in range(entry.run, entry.run + length):
                self._visited.add(page)

    def _scan_slabs(self, root: int, rank: int) -> None:
        gaps = self._gaps.of(rank, SLABS)
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            if not self._slabs.add_entry(page, entry, rank):
                why = f"the slab under key {entry.key.hex()} is damaged"
                gaps.append(Lost(page, entry.key, entry.key + b"\0", why))

    def _scan_dictionaries(self, root: int, rank: int) -> None:
        gaps = self._gaps.of(rank, DICTIONARIES)
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            if not self._slabs.add_dictionary(entry):
                why = f"dictionary {int.from_bytes(entry.key, 'big')} is damaged"
                gaps.append(Lost(page, entry.key, entry.key + b"\0", why))

    def _scan_rows(self, table: str, root: int, rank: int) -> None:
        gaps = self._gaps.of(rank, table)
        # The key of a damaged row may be damaged too: the gap reaches from the valid row before
        # it to the valid row after it.
        below, damaged = b"", False
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            value = self._prove(table, entry, rank)
            if value is None:
                damaged = True
                continue
            if damaged:
                gaps.append(Lost(page, below, entry.key, "a row is damaged"))
                damaged = False
            below = entry.key + b"\0"
            if rank == NEWEST or self._gaps.has(table, entry.key, NEWEST):
                self._rows.add(table, entry.key, rank, value)
        if damaged:
            gaps.append(Lost(0, below, None, "a row is damaged"))

    def _prove(self, table: str, entry: LeafEntry, rank: int) -> bytes | None:
        stored = self._file.value(entry)
        if stored is None or len(stored) < CHECKSUM_BYTES or not 0 < len(entry.key) < 512:
            return None
        try:
            value, hashed = prove_row(table, entry.key, stored)
        except CorruptionError:
            return None
        if rank == NEWEST:
            self._sum.add(hashed)
        return value

    def _apply_log(self) -> None:
        """Apply the unapplied records of the log to the rows, and add their slabs."""
        for record in self._unapplied():
            entry = decode_entry(record.lsn, record.body)
            for table, key, value in entry.rows:
                if table not in SAVED_TABLES:
                    continue
                self._rows.overwrite(table, key, NEWEST, value)
                if value is None:
                    self._deleted.add((table, key))
                else:
                    self._deleted.discard((table, key))
            slab = entry.slab()
            if slab is not None:
                self._slabs.add_logged(*slab)
        self._rows.flush()

    def _unapplied(self) -> list[Survivor]:
        """The surviving records of the log that the newest tree does not contain."""
        recovery_point, log = self._recovery_point, self._log or []
        if recovery_point is None:
            # The position up to which the log was applied is lost: apply every record of the
            # newest log.
            self.lost_commits = "it is not known which commits of the log the tables contain"
            return [record for record in log if record.log_id == log[-1].log_id]
        if not recovery_point.in_use:
            return []
        found = [
            record
            for record in log
            if record.log_id == recovery_point.log_id and record.lsn > recovery_point.applied.lsn
        ]
        numbers = [record.lsn for record in found]
        last = max(
            [recovery_point.applied.lsn, *numbers, *(record.flushed_lsn for record in found)]
        )
        if self._log is None:
            self.lost_commits = "the log is missing: the last commits may be lost"
        elif numbers != list(range(recovery_point.applied.lsn + 1, last + 1)):
            self.lost_commits = "records of the log are damaged: the commits in them are lost"
        return found

    # --- stray pages --------------------------------------------------------------------------

    def _scan_strays(self) -> list[DecodedPage]:
        """Scan the stray pages; returns the runs of overflow pages that no known entry owns."""
        runs: list[DecodedPage] = []
        damaged_tables = self._gaps.damaged_tables()
        total = self._file.page_count
        for page in self._file.pages():
            if self._progress is not None and not page.number % 4096:
                self._progress(page.number, total)
            if page.number in self._visited:
                continue
            if page.kind == OVERFLOW:
                runs.append(page)
            elif page.kind == LEAF:
                for entry in page.entries:
                    self._add_stray(page.number, entry, damaged_tables)
        known = self._slabs.runs()
        return [page for page in runs if page.number not in known]

    def _add_stray(self, page: int, entry: LeafEntry, damaged_tables: list[str]) -> None:
        if self._slabs.add_entry(page, entry, STRAY) or self._slabs.add_dictionary(entry):
            return
        for table in damaged_tables:
            if self._may_be_stray(table, entry.key):
                value = self._prove(table, entry, STRAY)
                if value is not None:
                    self._rows.add(table, entry.key, STRAY, value)
                    self.stray_rows += 1
                    return

    def _may_be_stray(self, table: str, key: bytes) -> bool:
        """True if the newest row of this key may be lost, so that one of a stray page counts."""
        # A batch that was completed must not be queued again: if either tree can be read at this
        # key and lacks the batch, it was completed.
        ranks = (NEWEST, BEFORE) if table == "queue" else (NEWEST,)
        return (table, key) not in self._deleted and all(
            self._gaps.has(table, key, rank) for rank in ranks
        )
