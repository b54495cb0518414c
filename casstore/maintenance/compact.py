"""compact: give the file's free space back to the system.

The store is written anew, in order, beside itself; every digest and row of the copy is
verified; then the new file takes the place of the old one in one rename. Nobody may have the
store open meanwhile, and whoever opens it waits until it is done. How that is safe stands
in ``engine.lmdb.compaction``.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from casstore.engine.lmdb import compaction
from casstore.errors import InvalidInputError
from casstore.maintenance.directories import require_directory
from casstore.maintenance.progress import Progress, Step

_UNITS = {"copy": "ids", "compare": "tables", "verify": "objects"}


class CompactReport(NamedTuple):
    """What compacting did."""

    file_bytes_before: int
    file_bytes_after: int
    #: All keys and values in the new file, as they are stored.
    content_bytes: int
    slabs_before: int
    slabs_after: int
    objects: int
    #: Collected objects whose bytes were still there.
    objects_dropped: int
    #: Dictionaries that no slab needed any more.
    dictionaries_dropped: int

    @property
    def overhead(self) -> float:
        """The file's length against what is stored in it."""
        return self.file_bytes_after / self.content_bytes if self.content_bytes else 0.0


def compact(
    path: str | os.PathLike[str], *, wait_s: float = 0.0, progress: Progress | None = None
) -> CompactReport:
    """Write the store at ``path`` anew, without a gap, and put the new file in place.

    Needs room for the new file beside the old one. BusyError if the store is open anywhere and
    is not closed within ``wait_s``. After any error, and if ``progress`` raises, the store is
    what it was.

    >>> digests = [store.put_blob(b"%d" % number * 2000) for number in range(100)]
    >>> store.close()
    >>> report = compact(place / "store", wait_s=10)
    >>> report.file_bytes_after < report.file_bytes_before
    True
    """
    if not isinstance(wait_s, int | float) or not 0 <= wait_s < float("inf"):
        raise InvalidInputError(f"a time to wait of 0 seconds or more, not {wait_s!r}")

    def tell(phase: str, done: int, total: int) -> None:
        if progress is not None:
            progress(Step(phase, done, total, _UNITS.get(phase, "rows")))

    place = require_directory(
        path, "compact", "VACUUM FULL of the server gives its space back (docs/postgres.md)"
    )
    return CompactReport(*compaction.compact(place, wait_s=float(wait_s), tell=tell))
