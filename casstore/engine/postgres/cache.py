"""Objects kept in memory up to a number of bytes, the least recently used going first.

An object never changes, so what is kept is always true. It may be gone from the store: whoever
removes objects through this engine removes them here, and a collection by anybody else empties
the cache when this engine next hears of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from casstore.engine.forks import Lock
from casstore.engine.protocol import StoredObject

# What an entry takes beside its bytes: a key, a tuple, their places in the map.
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
        """Those of ``digests`` that are kept."""
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
        """Changes whenever something was removed; ask before reading, and tell ``put``."""
        return self._epoch

    def put(self, items: Iterable[tuple[bytes, StoredObject]], generation: int) -> None:
        """Keep objects that were read since ``generation``, unless something was removed since."""
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
        """Forget objects that are gone."""
        with self._lock:
            self._epoch += 1
            for digest in digests:
                item = self._objects.pop(digest, None)
                if item is not None:
                    self._used_bytes -= len(item.data) + _ENTRY_BYTES

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._epoch += 1
            self._objects.clear()
            self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """How much is kept."""
        return self._used_bytes


class SpareObjects(Protocol):
    """Objects kept somewhere nearer than the server, proven when they are read; none is needed."""

    def begin(self, store: int, epoch: int) -> None:
        """Use what is kept of a store since the collection of this number began."""
        ...

    @property
    def generation(self) -> int:
        """Changes whenever objects may have gone; ask before reading, and tell ``put``."""
        ...

    def find(self, digests: Sequence[bytes]) -> dict[bytes, StoredObject]:
        """Those of ``digests`` that are kept."""
        ...

    def put(self, items: Iterable[tuple[bytes, StoredObject]], generation: int) -> None:
        """Keep objects that were read since ``generation``, unless some have gone since."""
        ...

    def pass_on_to(self, epoch: int) -> None:
        """Throw away what was kept before the collection of this number began."""
        ...

    def clear(self) -> None:
        """Throw everything away."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
