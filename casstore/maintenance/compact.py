"""compact: return the free space of the data file to the file system.

The store is rewritten, in order, into a new file next to the old one. Every digest and row of the
copy is verified; then a rename replaces the old file. No process may have the store open meanwhile;
a process that opens it waits. ``engine.lmdb.compaction`` explains why this is safe.
"""

from __future__ import annotations

import os

from casstore.engine.lmdb import compaction
from casstore.errors import InvalidInputError
from casstore.format.printing import count, size
from casstore.maintenance.files import require_directory
from casstore.maintenance.progress import Phase, Progress

_UNITS = {"copy": "ids", "compare": "tables", "verify": "objects"}


class CompactReport(compaction.Compacted):
    """What compacting did.

    Attributes:
        file_bytes_before: the length of the file before
        file_bytes_after: its length now
        content_bytes: stored keys and values
        slabs_before: slabs before
        slabs_after: slabs now
        objects: objects in the file, each verified
        objects_dropped: removed objects whose bytes were dropped
        dictionaries_dropped: compression dictionaries that no slab needed
    """

    __slots__ = ()

    def __str__(self) -> str:
        return (
            f"compacted {size(self.file_bytes_before)} to {size(self.file_bytes_after)}: "
            f"{count(self.objects, 'object')} in {count(self.slabs_after, 'slab')}, "
            f"{count(self.objects_dropped, 'dead object')} dropped"
        )

    @property
    def overhead(self) -> float:
        """The ratio of the file's length to the bytes stored in it."""
        return self.file_bytes_after / self.content_bytes if self.content_bytes else 0.0


def compact(
    path: str | os.PathLike[str], *, wait_s: float = 0.0, progress: Progress | None = None
) -> CompactReport:
    """Rewrite the store at ``path`` without free space, and replace the old file.

    Needs disk space for both files. BusyError if the store is still open, in any process, after
    ``wait_s``. After any error, also one that ``progress`` raises, the store is unchanged.

    >>> digests = [store.put_blob(b"%d" % number * 2000) for number in range(100)]
    >>> store.close()
    >>> report = compact(place / "store", wait_s=10)
    >>> report.file_bytes_after < report.file_bytes_before
    True
    """
    if not isinstance(wait_s, int | float) or not 0 <= wait_s < float("inf"):
        raise InvalidInputError(f"wait_s must be a number of at least 0, got {wait_s!r:.60}")

    def tell(phase: str, done: int, total: int) -> None:
        Phase(progress, phase, _UNITS.get(phase, "rows"))(done, total)

    place = require_directory(
        path, "compact", "run VACUUM FULL on the server (docs/guides/postgres.md)"
    )
    return CompactReport(*compaction.compact(place, wait_s=float(wait_s), tell=tell))
