"""A cache of objects in memory: bounded in bytes, least recently used objects are evicted.

Objects never change, so a cached object is always right, but the store may have deleted it.
Deletions through this engine also remove it here; a collection by another process clears the cache
as soon as this engine notices it.
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
        """Changes when objects were removed; get it before reading, pass it to ``put``."""
        return self._epoch

    def put(self, items: Iterable[tuple[bytes, StoredObject]], generation: int) -> None:
        """Cache objects that were read since ``generation``, unless objects were removed since."""
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
        """Remove deleted objects."""
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
        """The bytes of all entries."""
        return self._used_bytes


class SpareObjects(Protocol):
    """A second-level cache, nearer than the server. It verifies the objects it returns."""

    def begin(self, store: int, epoch: int) -> None:
        """Use the objects cached since the collection of this number began."""
        ...

    @property
    def generation(self) -> int:
        """Changes when objects may have been deleted; get it before reading, pass it to ``put``."""
        ...

    def find(self, digests: Sequence[bytes]) -> dict[bytes, StoredObject]:
        """Those of ``digests`` that are cached."""
        ...

    def put(self, items: Iterable[tuple[bytes, StoredObject]], generation: int) -> None:
        """Cache objects that were read since ``generation``, unless some were deleted since."""
        ...

    def pass_on_to(self, epoch: int) -> None:
        """Delete the objects cached before the collection of this number began."""
        ...

    def clear(self) -> None:
        """Delete everything."""
        ...

    def close(self) -> None:
        """Close the cache."""
        ...
