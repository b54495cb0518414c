"""Going through the pages of a damaged file: the two newest trees, then what nothing leads to.

The commits of the log that the newest tree does not hold lie over its tables, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from casstore.engine.id_set import IdSet
from casstore.engine.lmdb.applying import LOG_KEY, LogState, decode_log_state
from casstore.engine.lmdb.creation import DICTIONARIES, SLABS
from casstore.engine.lmdb.excavation.found_rows import FoundRows
from casstore.engine.lmdb.excavation.found_slabs import FoundSlabs
from casstore.engine.lmdb.excavation.gaps import Gaps
from casstore.engine.lmdb.excavation.ranks import BEFORE, NEWEST, SAVED_TABLES, STRAY
from casstore.engine.lmdb.log import Survivor
from casstore.engine.lmdb.memtable import decode_entry
from casstore.engine.lmdb.pages import (
    LEAF,
    OVERFLOW,
    Entry,
    Lost,
    Meta,
    Page,
    PageFile,
    read_record,
)
from casstore.engine.lmdb.rows import CHECKSUM_BYTES, SUM_KEY, RowSum, prove_row
from casstore.engine.protocol import TABLES
from casstore.errors import CorruptionError

# Tables whose rows tell, by a number that only grows or by being there at all, that they are
# newer than what is known.
_TELLING: Final = ("heads", "history", "leases", "receipts", "sessions", "tombstones")
_LONGEST_RUN_PAGES: Final = 8192

DigProgress = Callable[[int, int], None]


class Digging:
    """One pass over a file, which fills what is given with what it finds."""

    def __init__(
        self,
        file: PageFile,
        rows: FoundRows,
        slabs: FoundSlabs,
        gaps: Gaps,
        log: Sequence[Survivor] | None,
        progress: DigProgress | None,
    ) -> None:
        self._file = file
        self._rows = rows
        self._slabs = slabs
        self._gaps = gaps
        self._progress = progress
        self._log = log
        #: What the newest tree says of the log; None if that cannot be read.
        self._log_state: LogState | None = None
        #: Why commits that were in the log may be lost; None if none is missing.
        self.lost_commits: str | None = None
        #: Rows that are known to be gone.
        self._gone: set[tuple[str, bytes]] = set()
        self._visited = IdSet()
        #: The sum over the rows of the newest tree, and what it was when they were written; None
        #: if that, or a row, cannot be read.
        self._sum = RowSum()
        self._written_sum: bytes | None = None
        self.stray_rows = 0

    @property
    def has_other_rows(self) -> bool:
        """Has the newest tree, as far as can be told, other rows than were last written?

        Each of its pages and rows is in order, but a page may be one from before.
        """
        return self._written_sum not in (None, self._sum.encode())

    def run(self) -> list[Page]:
        """Take what the trees lead to and what lies about; runs of pages that nobody claims."""
        metas = self._file.metas()
        for rank in (NEWEST, BEFORE):
            self._dig_tree(metas[rank] if rank < len(metas) else None, rank)
        self._lay_log()
        if len(metas) == 1:
            # The one that is left may be the older. Then the last commit is to be found in
            # pages that nothing leads to: by rows that say that they are newer.
            why = "a meta page is lost, and with it perhaps the way to the last commit"
            for table in (*_TELLING, SLABS, DICTIONARIES):
                self._gaps.of(NEWEST, table).append(Lost(0, b"", None, why))
            self._gone.clear()
        self._rows.keep()
        runs = self._dig_strays()
        self._rows.keep()
        return runs

    # --- the two newest trees ---------------------------------------------------------------

    def _dig_tree(self, meta: Meta | None, rank: int) -> None:
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
                    self._log_state = decode_log_state(entry.value or b"")
        for name in (SLABS, DICTIONARIES, *SAVED_TABLES):
            gaps = self._gaps.begin(rank, name)
            if name not in roots:
                why = broken[0].why if broken else "no meta page leads to it"
                gaps.append(Lost(0, b"", None, why))
                continue
            if name == SLABS:
                self._dig_slabs(roots[name], rank)
            elif name == DICTIONARIES:
                self._dig_dictionaries(roots[name], rank)
            else:
                self._dig_rows(name, roots[name], rank)
        unread: list[Lost] = []
        # Only so that their pages are known to belong to somebody, and for the sum.
        for name in sorted(roots.keys() - self._gaps.known(rank)):
            for page, entry in self._file.walk(roots[name], unread.append, self._visit):
                self._visit_run(entry)
                if name in TABLES and rank == NEWEST and self._prove(name, entry, rank) is None:
                    unread.append(Lost(page, entry.key, None, "a row is damaged"))
        if rank == NEWEST and (unread or self._gaps.any_rows(rank)):
            self._written_sum = None

    def _visit(self, page: int, pages: int) -> bool:
        # The tree before shares most pages with the newest.
        self._visited.add(page)
        return True

    def _visit_run(self, entry: Entry) -> None:
        if entry.value is None:
            length = min(self._file.run_length(entry.size), _LONGEST_RUN_PAGES)
            for page in range(entry.run, entry.run + length):
                self._visited.add(page)

    def _dig_slabs(self, root: int, rank: int) -> None:
        gaps = self._gaps.of(rank, SLABS)
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            if not self._slabs.take(page, entry, rank):
                why = f"the slab under key {entry.key.hex()} is damaged"
                gaps.append(Lost(page, entry.key, entry.key + b"\0", why))

    def _dig_dictionaries(self, root: int, rank: int) -> None:
        gaps = self._gaps.of(rank, DICTIONARIES)
        for page, entry in self._file.walk(root, gaps.append, self._visit):
            self._visit_run(entry)
            if not self._slabs.take_dictionary(entry):
                why = f"dictionary {int.from_bytes(entry.key, 'big')} is damaged"
                gaps.append(Lost(page, entry.key, entry.key + b"\0", why))

    def _dig_rows(self, table: str, root: int, rank: int) -> None:
        gaps = self._gaps.of(rank, table)
        # A damaged row may have lost its key, too: its place is anywhere between the rows
        # on both sides.
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
                self._rows.take(table, entry.key, rank, value)
        if damaged:
            gaps.append(Lost(0, below, None, "a row is damaged"))

    def _prove(self, table: str, entry: Entry, rank: int) -> bytes | None:
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

    def _lay_log(self) -> None:
        """Change the rows of the newest tree as the log says, and take its objects."""
        for record in self._unapplied():
            entry = decode_entry(record.position.lsn, record.body)
            for table, key, value in entry.rows:
                if table not in SAVED_TABLES:
                    continue
                self._rows.lay(table, key, NEWEST, value)
                if value is None:
                    self._gone.add((table, key))
                else:
                    self._gone.discard((table, key))
            slab = entry.slab()
            if slab is not None:
                self._slabs.take_logged(*slab)
        self._rows.keep()

    def _unapplied(self) -> list[Survivor]:
        """The records of the log that the newest tree does not hold, as far as can be told."""
        state, log = self._log_state, self._log or []
        if state is None:
            # Nothing says what was applied: the records of the newest log.
            self.lost_commits = "nothing says which commits of the log the tables hold"
            return [record for record in log if record.log_id == log[-1].log_id]
        if not state.in_use:
            return []
        found = [
            record
            for record in log
            if record.log_id == state.log_id and record.position.lsn > state.applied.lsn
        ]
        numbers = [record.position.lsn for record in found]
        last = max([state.applied.lsn, *numbers, *(record.flushed_lsn for record in found)])
        if self._log is None:
            self.lost_commits = "the log is missing, and with it perhaps the last commits"
        elif numbers != list(range(state.applied.lsn + 1, last + 1)):
            self.lost_commits = "records of the log are damaged: the commits in them are lost"
        return found

    # --- what nothing leads to ----------------------------------------------------------------

    def _dig_strays(self) -> list[Page]:
        """Take what lies in pages that no tree leads to; give runs of pages that nobody claims."""
        runs: list[Page] = []
        wounded = self._gaps.wounded()
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
                    self._take_stray(page.number, entry, wounded)
        taken = self._slabs.runs()
        return [page for page in runs if page.number not in taken]

    def _take_stray(self, page: int, entry: Entry, wounded: list[str]) -> None:
        if self._slabs.take(page, entry, STRAY) or self._slabs.take_dictionary(entry):
            return
        for table in wounded:
            if self._may_be_stray(table, entry.key):
                value = self._prove(table, entry, STRAY)
                if value is not None:
                    self._rows.take(table, entry.key, STRAY, value)
                    self.stray_rows += 1
                    return

    def _may_be_stray(self, table: str, key: bytes) -> bool:
        """Can a row be lost here, so that one of an old page counts?"""
        # Work that was done must not come back while it is known to be done.
        ranks = (NEWEST, BEFORE) if table == "queue" else (NEWEST,)
        return (table, key) not in self._gone and all(
            self._gaps.has(table, key, rank) for rank in ranks
        )
