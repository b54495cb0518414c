"""A cache of objects in memory, bounded in bytes: the least recently used objects are evicted.

Objects never change, so a cached object is always right, but the store may have deleted it. A
deletion through this engine also removes the object from the cache. A collection by another process
begins a new epoch (see ``collection``), and this engine clears the cache at the first answer of the
server with another epoch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from casstore.engine.forks import Lock
from casstore.engine.protocol import StoredObject

# The memory of an entry in addition to the object's bytes: key, tuple, dict slot.
_ENTRY_BYTES: Final = 400


class ObjectCache:
    """A byte-bounded map from digests to objects."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._objects: OrderedDict[bytes, StoredObject] = OrderedDict()
        self._lock = Lock()
        self._epoch = 0

    def find(self, digests: Sequence[bytes]) -> dict[bytes, StoredObject]:
        """Those of ``digests`` that are cached."""
        with self._lock:
            found = {}
            for digest in digests:
                item = self._objects.get(digest)
                if item is not None:
                    self._objects.move_to_end(digest)
                    found[digest] = item
            return found

    @property
    def generation(self) -> int:
        """A number that changes when deleted objects are removed.

        Get it before reading objects from the server, and pass it to ``put``.
        """
        return self._epoch

    def put(self, items: Iterable[tuple[bytes, StoredObject]], generation: int) -> None:
        """Cache objects, unless the cache's generation is not ``generation`` any more.

        The objects may be among those that were deleted since they were read.
        """
        with self._lock:
            if generation != self._epoch:
                return
            for digest, item in items:
                size_bytes = len(item.data) + _ENTRY_BYTES
                if size_bytes > self._limit_bytes or digest in self._objects:
                    continue
                self._objects[digest] = item
                self._used_bytes += size_bytes
            while self._used_bytes > self._limit_bytes:
                _, evicted = self._objects.popitem(last=False)
                self._used_bytes -= len(evicted.data) + _ENTRY_BYTES

    def remove(self, digests: Iterable[bytes]) -> None:
        """Remove objects that the store has deleted."""
        with self._lock:
            self._epoch += 1
            for digest in digests:
                item = self._objects.pop(digest, None)
                if item is not None:
                    self._used_bytes -= len(item.data) + _ENTRY_BYTES

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._epoch += 1
            self._objects.clear()
            self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """The approximate memory that the cached objects take."""
        return self._used_bytes


class SpareObjects(Protocol):
    """A second-level cache (``disk_cache``). It verifies the objects that it returns."""

    def begin(self, store: int, epoch: int) -> None:
        """Open the cache of the store with this number.

        Only objects are used that were cached in the epoch ``epoch`` (see ``collection``).
        """
        ...

    @property
    def generation(self) -> int:
        """A number that changes when the store may have deleted objects.

        Get it before reading objects from the server, and pass it to ``put``.
        """
        ...

    def find(self, digests: Sequence[bytes]) -> dict[bytes, StoredObject]:
        """Those of ``digests`` that are cached."""
        ...

    def put(self, items: Iterable[tuple[bytes, StoredObject]], generation: int) -> None:
        """Cache objects, unless the cache's generation is not ``generation`` any more."""
        ...

    def pass_on_to(self, epoch: int) -> None:
        """Delete the objects that were cached before the epoch ``epoch``."""
        ...

    def clear(self) -> None:
        """Delete everything."""
        ...

    def close(self) -> None:
        """Close the cache."""
        ...
