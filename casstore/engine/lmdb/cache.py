"""An LRU cache of decoded slabs, bounded in bytes.

An id always means the same object, so a cached slab can never be stale; it can only
be shorter than the stored one, when neighbours were merged into it since.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from casstore.engine.lmdb.slab import Slab


class SlabCache:
    """A byte-bounded LRU map from a slab's last id to the decoded slab."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._slabs: OrderedDict[int, Slab] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, last_id: int, object_id: int) -> Slab | None:
        """The cached slab that ends in ``last_id``, if it covers ``object_id``."""
        with self._lock:
            slab = self._slabs.get(last_id)
            if slab is None or object_id < slab.first_id:
                return None
            self._slabs.move_to_end(last_id)
            return slab

    def put(self, last_id: int, slab: Slab) -> None:
        """Cache a slab, unless it alone exceeds the limit."""
        size_bytes = slab.size_bytes
        if size_bytes > self._limit_bytes:
            return
        with self._lock:
            old = self._slabs.pop(last_id, None)
            if old is not None:
                self._used_bytes -= old.size_bytes
            self._slabs[last_id] = slab
            self._used_bytes += size_bytes
            while self._used_bytes > self._limit_bytes:
                _, evicted = self._slabs.popitem(last=False)
                self._used_bytes -= evicted.size_bytes

    @property
    def used_bytes(self) -> int:
        """How much the cached slabs take."""
        return self._used_bytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._slabs.clear()
            self._used_bytes = 0
