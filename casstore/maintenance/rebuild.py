"""Rebuilding the index of objects from the slabs."""

from __future__ import annotations

from typing import NamedTuple

from casstore.engine.protocol import Rebuilding
from casstore.errors import InvalidInputError
from casstore.maintenance.gc import DEFAULT_GRACE_MS, check_grace
from casstore.maintenance.lapsed_rows import remove_pins
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.roots import ROOTS
from casstore.store import Store, check_store


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


def rebuild(
    store: Store, *, grace_ms: int = DEFAULT_GRACE_MS, progress: Progress | None = None
) -> RebuildReport:
    """Rebuild the index of objects from the slabs.

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
    engine.sum_rows()
    return RebuildReport(*index)
