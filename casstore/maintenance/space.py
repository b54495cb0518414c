"""space: how the space of a store's file is used, and how much ``pack`` and ``compact`` reclaim.

    file  =  used pages  +  free pages                    free pages: ``compact``
    used pages  =  content  +  what pages leave empty     empty parts: ``compact``
    content  =  slabs, index, rows, dictionaries          small slabs, dead objects: ``pack``

How much ``gc`` would collect is known only after marking: its dry run reports it. How much space
deduplication has saved is not known: objects do not record how often they were put.
"""

from __future__ import annotations

from casstore.engine.protocol import EngineSpace, Measuring
from casstore.errors import InvalidInputError
from casstore.maintenance.progress import Phase, Progress
from casstore.store import Store, check_store


class SpaceReport(EngineSpace):
    """How much space a store takes, for what, and how much of it can be reclaimed.

    Attributes:
        file_bytes: the length of data.mdb
        allocated_bytes: what it takes on the disk
        used_bytes: pages in use
        log_bytes: the length of the redo log next to it
        log_commits: commits that only the redo log has
    """

    __slots__ = ()

    @property
    def free_bytes(self) -> int:
        """Pages of the file that later writes will use."""
        return self.file_bytes - self.used_bytes

    @property
    def content_bytes(self) -> int:
        """All keys and values, as they are stored."""
        return sum(table.content_bytes for table in self.tables)

    @property
    def live_bytes(self) -> int:
        """The same without the share of dead objects."""
        return self.content_bytes - self.slabs.dead_stored_bytes

    @property
    def fragmentation(self) -> float:
        """The fraction of the file that is empty: free pages, and the empty parts of used pages."""
        return 1 - self.content_bytes / self.file_bytes if self.file_bytes else 0.0

    @property
    def compression(self) -> float:
        """The ratio of the objects' length to their compressed length in slabs."""
        stored = self.slabs.stored_bytes
        return self.slabs.logical_bytes / stored if stored else 0.0

    @property
    def reclaimable_by_pack(self) -> int:
        """The bytes of dead objects in slabs: a lower bound.

        Merging small slabs saves more; how much is known only afterwards.
        """
        return self.slabs.dead_stored_bytes

    @property
    def reclaimable_by_compact(self) -> int:
        """How much shorter the file becomes if its content is rewritten without changes.

        Compacting packs as well, so it may save more.
        """
        return max(0, self.file_bytes - self.tidy_file_bytes)


def measure(store: Store, *, progress: Progress | None = None) -> SpaceReport:
    """Count what the store's file is used for; reads everything but the contents of objects.

    >>> report = measure(store)
    >>> report.file_bytes == report.used_bytes + report.free_bytes
    True
    """
    check_store(store)
    engine = store.engine
    if not isinstance(engine, Measuring):
        raise InvalidInputError("the engine of this store has no file to measure")
    return SpaceReport(*engine.measure_space(Phase(progress, "measure", "rows")))
