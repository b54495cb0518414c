"""Rows of the node table that no revision of any session needs any more.

Forks and rewinds go on from each other's lineages, so a lineage is needed as long as any head
or revision, of any session, reaches it. Finding out takes several readings; what makes the
answer good when the rows are removed: new rows only ever reach lineages that some row
reached before, so a lineage that none reached, with no head and no revision gone meanwhile,
is reached by none for ever. That none went is a condition of each removal
(``session.marks``); if one did, it is found out again. Lineages that are written before a row
reaches them (``session.prepared``) are the exception: the row that comes to reach one counts
like one that went, and finds out whether the lineage is still whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from casstore.engine.protocol import DeleteRow, Engine, Row, RowIs, RowKey, Write
from casstore.errors import ConditionFailedError, CorruptionError
from casstore.maintenance.progress import Progress, Step
from casstore.session import keys, prepared
from casstore.session.heads import LINEAGE_BYTES, decode_head
from casstore.session.lineage import decode_base
from casstore.session.scanning import scan

DELETE_BATCH: Final = 4096
_READ_BATCH: Final = 1024
_MAX_ATTEMPTS: Final = 4


class SweptLineages(NamedTuple):
    """What was removed of the node table."""

    lineages: int
    rows: int
    #: False: sessions were deleted again and again meanwhile, and something may be left.
    complete: bool


class UnneededLineages(NamedTuple):
    """What could be removed of the node table."""

    names: tuple[bytes, ...]
    rows: int


def find_unneeded(engine: Engine, progress: Progress | None = None) -> UnneededLineages:
    """Find out which lineages nobody needs; changes nothing."""
    names = tuple(sorted(_unneeded(engine, progress)))
    return UnneededLineages(names, sum(1 for one in names for _ in _rows_of(engine, one)))


def sweep_lineages(
    engine: Engine,
    progress: Progress | None = None,
    *,
    only: Collection[bytes] | None = None,
    batch: int | None = None,
    rest: Callable[[float], object] | None = None,
    stop: Callable[[], bool] | None = None,
) -> SweptLineages:
    """Remove the lineages that nobody needs. Holds a few dozen bytes for each lineage.

    ``only`` bounds which; a transaction removes ``batch`` rows at the most, ``rest`` is told how
    many seconds it took, and ``stop`` is asked before each. CorruptionError, and nothing is
    removed, if a row that may reach a lineage cannot be read.
    """
    lineages = rows = 0
    for _ in range(_MAX_ATTEMPTS):
        removals = engine.get_rows([keys.removals()])[0]
        unneeded = _unneeded(engine, progress)
        if only is not None:
            unneeded &= set(only)
        try:
            for ended, dead in _batches(engine, sorted(unneeded), batch or DELETE_BATCH):
                if stop is not None and stop():
                    return SweptLineages(lineages, rows, complete=False)
                held_s = _delete(engine, dead, removals)
                lineages += ended
                rows += len(dead)
                if progress is not None:
                    progress(Step("lineages", lineages, None, "lineages"))
                if rest is not None:
                    rest(held_s)
        except ConditionFailedError:
            continue
        return SweptLineages(lineages, rows, complete=True)
    return SweptLineages(lineages, rows, complete=False)


def _unneeded(engine: Engine, progress: Progress | None) -> set[bytes]:
    # In this order: what is stored later belongs to rows that nobody has counted.
    stored = _stored(engine)
    return stored - _reached(engine, progress)


def _stored(engine: Engine) -> set[bytes]:
    """Every lineage that has rows: one look-up each."""
    found: set[bytes] = set()
    start = b""
    while True:
        page = engine.scan_rows("nodes", start=start, limit=1)
        if not page:
            return found
        one = page[0].key[:LINEAGE_BYTES]
        found.add(one)
        start = keys.past_lineage(one)


def _reached(engine: Engine, progress: Progress | None) -> set[bytes]:
    """Every lineage that a head or a revision reaches.

    The heads come first: a head that moves on meanwhile is found in the history then.
    """
    reached: set[bytes] = set()
    seen = 0
    for table in ("heads", "history"):
        for row in scan(engine, table, b"", None):
            seen += 1
            if progress is not None and not seen % _READ_BATCH:
                progress(Step("lineages", seen, None, "rows"))
            if table == "history" and keys.is_label(row.key):
                continue
            try:
                head = decode_head(row.value)
            except CorruptionError as exc:
                raise CorruptionError(
                    f"row {row.key.hex()} of table {table} cannot be read: {exc}"
                ) from exc
            reached.add(head.lineage)
            if head.base is not None:
                reached.add(head.base.lineage)
    fresh: Iterable[bytes] = reached
    while fresh:
        fresh = _bases(engine, list(fresh)) - reached
        reached |= fresh
    return reached


def _bases(engine: Engine, lineages: list[bytes]) -> set[bytes]:
    """The lineages that these go on from."""
    found: set[bytes] = set()
    for start in range(0, len(lineages), _READ_BATCH):
        batch = lineages[start : start + _READ_BATCH]
        places = [RowKey("nodes", keys.lineage_row(one)) for one in batch]
        found.update(decode_base(row).lineage for row in engine.get_rows(places) if row is not None)
    return found


def _batches(engine: Engine, lineages: list[bytes], size: int) -> Iterator[tuple[int, list[Row]]]:
    """The rows of these, ``size`` at a time, each with how many lineages end in it."""
    rows: list[Row] = []
    ended = 0
    for one in lineages:
        for row in _rows_of(engine, one):
            rows.append(row)
            if len(rows) >= size:
                yield ended, rows
                rows, ended = [], 0
        ended += 1
    if rows or ended:
        yield ended, rows


def _rows_of(engine: Engine, lineage: bytes) -> Iterator[Row]:
    return scan(engine, "nodes", lineage, keys.past_lineage(lineage))


def _delete(engine: Engine, rows: list[Row], removals: bytes | None) -> float:
    work = Write(
        conditions=[
            RowIs(*keys.removals(), removals),
            *prepared.still_gone([row.key for row in rows]),
        ],
        rows=[DeleteRow("nodes", row.key) for row in rows],
    )
    begun = time.monotonic()
    engine.write(work)
    return time.monotonic() - begun
