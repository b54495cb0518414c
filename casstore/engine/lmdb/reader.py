"""Reads objects by id: finds the slab of an object, decodes it once, and restores the links.

A *slab* is several objects with consecutive ids, stored as one value (see ``slab``); decoding it
inflates all of them. ``SlabReader`` reads within one transaction, ``SlabCache`` keeps decoded slabs
for all readers of an engine, bounded in bytes. Ids are never reused, so a cached slab can never be
wrong. But packing may have joined the stored slab with its neighbours since, and then the cached
one lacks their objects.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.lookup import index_key
from casstore.engine.lmdb.memtable import MemtableView
from casstore.engine.lmdb.slab import Slab
from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES


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
        """Cache a slab under its last id, unless it alone exceeds the limit."""
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
        """The approximate memory that the cached slabs take."""
        return self._used_bytes

    def clear(self) -> None:
        """Drop all slabs."""
        with self._lock:
            self._slabs.clear()
            self._used_bytes = 0


# A slab up to this length is copied to bytes before it is decoded: slicing bytes is faster than
# slicing a memoryview, and the copy is short.
_SHORT_BYTES: Final = 16 << 10
_new_tuple: Final = tuple.__new__


class SlabReader:
    """Reads objects within one transaction. Objects read in turn from one slab decode it once."""

    __slots__ = (
        "_behind",
        "_cache",
        "_compressor",
        "_cursor",
        "_near_first",
        "_near_key",
        "_near_last",
        "_near_value",
        "_slab",
        "_slab_before",
        "_view",
    )

    def __init__(
        self,
        cursor: lmdb.Cursor[memoryview],
        cache: SlabCache,
        compressor: Compressor,
        view: MemtableView | None = None,
    ) -> None:
        """``view``: commits whose slabs are not in the tables yet; None: read the tables alone."""
        self._view = view
        self._cursor = cursor
        self._cache = cache
        self._compressor = compressor
        # The last two slabs that objects were read from. The next object, and the children whose
        # digests it needs, are often in one of them.
        self._slab: Slab | None = None
        self._slab_before: Slab | None = None
        # Where the digests of the objects after the last one read begin, in ``_slab.digests``.
        self._behind = 0
        # The slab that was found last, as stored: its first and last id, key and value.
        self._near_first, self._near_last = 1, 0
        self._near_key = self._near_value = memoryview(b"")

    def object(self, object_id: int) -> StoredObject:
        """The object with this id."""
        slab = self._slab
        if slab is None or not slab.first_id <= object_id <= slab.last_id:
            slab = self.slab(object_id)
        position = object_id - slab.first_id
        self._behind = (position + 1) * DIGEST_BYTES
        kind = slab.kinds[position] & ~slabs.KEEPS_LINKS
        # The same as StoredObject(…), in half the time.
        return _new_tuple(StoredObject, (kind, slab.data(position, self.digest)))

    def next(self, digest: bytes, has_row: Callable[[bytes], bool]) -> StoredObject | None:
        """The object with this digest, if the slab read last lists it after the object read last.

        It needs no look-up by digest, and finds objects that are read in the order in which they
        were stored. ``has_row`` checks whether the index still names the object (a slab may list
        deleted ones). None: look the digest up in the index.
        """
        slab = self._slab
        if slab is None:
            return None
        at = slab.digests.find(digest, self._behind)
        # Bytes of two neighbouring digests may match, by chance or on purpose.
        if at < 0 or at % DIGEST_BYTES:
            return None
        position = at // DIGEST_BYTES
        if not has_row(index_key(digest, slab.first_id + position)):
            return None
        self._behind = at + DIGEST_BYTES
        # As ``object`` does.
        kind = slab.kinds[position] & ~slabs.KEEPS_LINKS
        return _new_tuple(StoredObject, (kind, slab.data(position, self.digest)))

    def slab(self, object_id: int) -> Slab:
        """The decoded slab that holds this id."""
        last_id = self._seek(object_id)
        slab = self._cache.find(last_id, object_id)
        if slab is None:
            slab = self._decode(self._near_key, self._near_value)
            self._cache.put(last_id, slab)
        self._slab_before, self._slab = self._slab, slab
        return slab

    def decode_at(self, object_id: int) -> Slab:
        """The slab that holds this id, decoded again from the file, its checksum compared."""
        self._seek(object_id)
        self._slab = self._decode(self._near_key, self._near_value, check=True)
        return self._slab

    def _decode(self, key: memoryview, value: bytes | memoryview, *, check: bool = False) -> Slab:
        """Decode a stored slab; ``check``: compare the checksum over its key and directory."""
        if len(value) <= _SHORT_BYTES:
            value = bytes(value)
        directory = slabs.read_directory(key, value, check=check)
        payload = bytes(value[directory.payload_at :])
        return Slab(
            directory,
            lambda raw_bytes: self._compressor.inflate(
                directory.codec, directory.dictionary, payload, raw_bytes
            ),
        )

    def sample(self, size_bytes: int, max_object_bytes: int) -> list[bytes]:
        """Training data: the bytes of the newest objects, about ``size_bytes`` in all.

        Links are cut out of the bytes, as slabs store them. Objects longer than
        ``max_object_bytes`` are left out.
        """
        samples: list[bytes] = []
        more = self._cursor.last()
        while more and size_bytes > 0:
            slab = self._decode(*self._cursor.item())
            for position in range(slab.directory.objects):
                data = slab.stripped(position)
                if 0 < len(data) <= max_object_bytes:
                    samples.append(data)
                    size_bytes -= len(data)
            more = self._cursor.prev()
        return samples

    def digest(self, object_id: int) -> bytes:
        """The digest of an object, from its slab's directory alone."""
        slab = self._slab
        if slab is not None and slab.first_id <= object_id <= slab.last_id:
            return slab.directory.digest(object_id - slab.first_id)
        slab = self._slab_before
        if slab is not None and slab.first_id <= object_id <= slab.last_id:
            return slab.directory.digest(object_id - slab.first_id)
        if not self._near_first <= object_id <= self._near_last:
            self._seek(object_id)
        return slabs.digest_at(self._near_value, object_id - self._near_first)

    def _seek(self, object_id: int) -> int:
        """Set ``_near_…`` to the slab that holds this id; returns the slab's last id."""
        if self._near_first <= object_id <= self._near_last:
            return self._near_last
        recent = None if self._view is None else self._view.slab_of(object_id)
        if recent is not None:
            last_id = int.from_bytes(recent[0], "big")
            self._near_first = last_id - slabs.count_of(recent[1]) + 1
            self._near_last = last_id
            self._near_key, self._near_value = memoryview(recent[0]), memoryview(recent[1])
            return last_id
        # The id comes from an index row or a slab's directory, which may be damaged.
        if 0 < object_id <= slabs.MAX_ID and self._cursor.set_range(slabs.slab_key(object_id)):
            key, value = self._cursor.item()
            last_id = int.from_bytes(key, "big")
            first_id = last_id - slabs.count_of(value) + 1
            if first_id <= object_id:
                self._near_first, self._near_last = first_id, last_id
                self._near_key, self._near_value = key, value
                return last_id
        raise CorruptionError(f"no slab holds id {object_id}")
