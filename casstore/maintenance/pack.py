"""pack: rewrite small slabs into large ones with stronger compression; drop dead objects.

Readers and writers see the same content. Packing runs from the oldest slab to the newest, in short
steps. It can be interrupted between two steps; the next call continues with the remaining slabs.
Damaged slabs are reported and left unchanged.
"""

from __future__ import annotations

from casstore.engine.protocol import COLD_AGE_MS, Packing, PackReport
from casstore.errors import InvalidInputError
from casstore.maintenance.progress import Phase, Progress
from casstore.session.arguments import check_ms
from casstore.store import Store, check_store


def pack(
    store: Store, *, min_age_ms: int = COLD_AGE_MS, progress: Progress | None = None
) -> PackReport:
    """Pack objects that were stored more than ``min_age_ms`` ago.

    ``progress`` is called after each step with the number of slabs rewritten.

    >>> digests = [store.put_value({"step": step}) for step in range(100)]
    >>> report = pack(store, min_age_ms=0)
    >>> report.slabs_after < report.slabs_before
    True
    """
    check_store(store)
    engine = store.engine
    if not isinstance(engine, Packing):
        name = type(engine).__name__
        raise InvalidInputError(f"{name} does not pack: only a store on LMDB has slabs")
    check_ms(min_age_ms, "min_age_ms")
    rewritten = Phase(progress, "pack", "slabs")
    return engine.pack(lambda done: rewritten(done.slabs_before), min_age_ms=min_age_ms)
