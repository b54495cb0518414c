"""pack: rewrite small slabs into large ones, compressed harder; drop what lost its name.

For readers and writers nothing changes but size and speed. The work goes from the oldest
slab to the newest in short steps; stopping between two of them loses nothing, and the next
call goes on with what is left to do. What is damaged is reported and left exactly as it is.
"""

from __future__ import annotations

from casstore.engine.protocol import COLD_AGE_MS, MAX_STAMP_MS, Packing, PackReport
from casstore.errors import InvalidInputError
from casstore.maintenance.progress import Progress, Step
from casstore.store import Store, check_store


def pack(
    store: Store, *, min_age_ms: int = COLD_AGE_MS, progress: Progress | None = None
) -> PackReport:
    """Pack what was stored more than ``min_age_ms`` ago.

    ``progress`` is told after each step how many slabs have been rewritten.

    >>> digests = [store.put_value({"step": step}) for step in range(100)]
    >>> report = pack(store, min_age_ms=0)
    >>> report.slabs_after < report.slabs_before
    True
    """
    check_store(store)
    engine = store.engine
    if not isinstance(engine, Packing):
        raise InvalidInputError("the engine of this store has nothing to pack")
    if type(min_age_ms) is not int or not 0 <= min_age_ms <= MAX_STAMP_MS:
        raise InvalidInputError(f"an age of 0 ms or more, not {min_age_ms!r}")
    if progress is None:
        return engine.pack(min_age_ms=min_age_ms)

    def tell(report: PackReport) -> None:
        progress(Step("pack", report.slabs_before, None, "slabs"))

    return engine.pack(tell, min_age_ms=min_age_ms)
