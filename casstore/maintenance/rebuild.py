"""Making anew what can be derived: the index from the slabs, the node table from manifests."""

from __future__ import annotations

from typing import Final, NamedTuple

from casstore.engine.protocol import Condition, PutRow, Rebuilding, RowIs, Write
from casstore.errors import BusyError, ConditionFailedError, CorruptionError, InvalidInputError
from casstore.maintenance.gc import DEFAULT_GRACE_MS, check_grace
from casstore.maintenance.lapsed_rows import remove_pins
from casstore.maintenance.lineages import Lineages, Table, differences
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.roots import ROOTS
from casstore.store import Store, check_store

_BATCH_ROWS: Final = 2000
_MAX_ATTEMPTS: Final = 16


class RebuildReport(NamedTuple):
    """What was made anew."""

    #: Objects that the index names now, and how many of them it did not name before.
    objects_named: int
    objects_found: int
    #: Names that went: nothing reaches these objects and they are older than the grace, or
    #: their bytes are gone.
    objects_dropped: int
    #: Objects that rows or other objects need and that no slab holds.
    objects_missing: int
    #: Damaged rows of the node table that were taken away, and rows written.
    rows_dropped: int
    rows_written: int
    #: Graphs that cannot be read; ``check`` says why.
    graphs_unreadable: int


def rebuild(
    store: Store, *, grace_ms: int = DEFAULT_GRACE_MS, progress: Progress | None = None
) -> RebuildReport:
    """Make the index anew from the slabs, and the node table from the manifests.

    The index alone knows which objects were collected while their bytes still lie in slabs.
    Without it, what counts is what rows reach and what is younger than ``grace_ms``: as after
    a collection. CorruptionError, and nothing happens, if a row that names objects or the
    directory of a slab is damaged; then ``salvage`` helps.

    >>> report = rebuild(store)
    >>> report.objects_missing, session.head().leaf
    (0, 'left')
    """
    check_store(store)
    engine = store.engine
    if not isinstance(engine, Rebuilding):
        raise InvalidInputError("the engine of this store has nothing to be rebuilt")
    check_grace(grace_ms)
    if progress is not None:
        progress(Step("index", 0, None, "objects"))
    # The index names what rows reach. An expired pin must not keep an object, nor stay behind
    # without it.
    remove_pins(engine, progress)
    index = engine.rebuild_index(ROOTS, grace_ms=grace_ms)
    dropped = engine.drop_damaged_rows("nodes")
    written, unreadable = rebuild_nodes(store, progress=progress)
    return RebuildReport(*index, dropped, written, unreadable)


def rebuild_nodes(store: Store, *, progress: Progress | None = None) -> tuple[int, int]:
    """Write what the node table lacks; the number of rows, and of graphs that are unreadable.

    Safe beside writers: rows of a lineage are written only if the session on it has not moved.

    >>> rebuild_nodes(store)  # it lacks nothing
    (0, 0)
    """
    check_store(store)
    lineages = Lineages(store.engine)
    lineages.survey()
    written = unreadable = 0
    names = lineages.names()
    for done, name in enumerate(names):
        try:
            written += _write_lineage(store, lineages, name)
        except CorruptionError:
            unreadable += 1
        if progress is not None:
            progress(Step("nodes", done + 1, len(names), "lineages"))
    for table in lineages.shared_tables():
        written += _write_table(store, table, [])
    return written, unreadable


def _write_lineage(store: Store, lineages: Lineages, name: bytes) -> int:
    for _ in range(_MAX_ATTEMPTS):
        table = lineages.table(name)
        standing = lineages.standing(name)
        conditions: list[Condition] = []
        if standing.is_head:
            conditions.append(RowIs("heads", standing.session_key, standing.row))
        try:
            return _write_table(store, table, conditions)
        except ConditionFailedError:
            # It went on, or it is gone; in both cases look again.
            lineages = Lineages(store.engine)
            lineages.survey()
            if name not in lineages.names():
                return 0
    raise BusyError(f"a session kept moving while the nodes of lineage {name.hex()} were listed")


def _write_table(store: Store, table: Table, conditions: list[Condition]) -> int:
    wrong = differences(store.engine, table)
    for start in range(0, len(wrong), _BATCH_ROWS):
        puts = [PutRow("nodes", *row) for row in wrong[start : start + _BATCH_ROWS]]
        store.engine.write(Write(conditions=conditions, rows=puts))
    return len(wrong)
