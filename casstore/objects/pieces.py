"""Reads and verifies objects by digest, and batches writes.

Object bytes from the engine reach higher layers only through ``PieceReader``, which compares them
with the digest that they were requested by (P1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from casstore.engine.protocol import Engine, NewObject, StoredObject, Write
from casstore.errors import (
    CorruptionError,
    ExpansionError,
    LimitError,
    ObjectNotFoundError,
)
from casstore.format import chunking
from casstore.format.digest import HASHERS, Kind, check_objects, digest_of, plain_hash
from casstore.format.expansion import part_cost
from casstore.format.limits import CHUNKED_BLOB_MIN_BYTES
from casstore.format.piece_size import MAX_LIST_BYTES, check_piece_size

_BATCH = 256
_PART_KINDS = (Kind.VALUE, Kind.LIST, Kind.MAP)
# How many objects a bounded reader remembers, so that its memory is bounded too.
_MAX_SEEN = 1 << 20
_UNLIMITED = 1 << 62
# How much a bounded reader rereads, by the cost of ``format.expansion``, before it has the whole
# walk measured. Few walks reach it; reading that much takes a fraction of a second.
REPEATED_BYTES = 4 << 20


class PieceReader:
    """Fetches objects and checks each against its digest."""

    __slots__ = ("engine", "pieces_read")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        #: How many objects were fetched, as a measure of the cost.
        self.pieces_read = 0

    def find_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects, verified; None for those that are not stored."""
        found = self.engine.get_many(digests)
        self.pieces_read += len(found)
        check_objects(digests, found)
        for item in found:
            if item is not None and len(item.data) > MAX_LIST_BYTES:
                check_piece_size(item.kind, item.data)
        return found

    def get(self, digest: bytes) -> StoredObject:
        """The object with a caller's digest; ObjectNotFoundError if it is not stored."""
        [item] = self.find_many((digest,))
        if item is None:
            raise ObjectNotFoundError(digest)
        return item

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject]:
        """The objects with a caller's digests; ObjectNotFoundError if one is not stored."""
        objects: list[StoredObject] = []
        for digest, item in zip(digests, self.find_many(digests), strict=True):
            if item is None:
                raise ObjectNotFoundError(digest)
            objects.append(item)
        return objects

    def follow(self, digests: Sequence[bytes]) -> list[StoredObject]:
        """Objects that another object links to; CorruptionError if one is missing (P3)."""
        objects = self.find_many(digests)
        if None in objects:
            missing = digests[objects.index(None)]
            raise CorruptionError(f"object {missing.hex()} is linked to but missing")
        return cast("list[StoredObject]", objects)


class BoundedReader(PieceReader):
    """Reads through another reader, up to a number of bytes.

    For walks whose length depends on untrusted input: repeated links let a small store describe a
    walk of any length (P7). After rereading parts of lists and maps that cost REPEATED_BYTES,
    find_many calls ``measure``, which raises ExpansionError if the walk is too long. In that case
    every later call raises it too; otherwise rereading is not limited from then on.
    """

    __slots__ = ("_again_left", "_left", "_limit", "_measure", "_reader", "_seen", "_too_long")

    def __init__(
        self, reader: PieceReader, measure: Callable[[], None], max_bytes: int | None = None
    ) -> None:
        super().__init__(reader.engine)
        self._reader = reader
        self._measure = measure
        self._limit = _UNLIMITED if max_bytes is None else max_bytes
        self._left = self._limit
        self._again_left = REPEATED_BYTES
        self._too_long: ExpansionError | None = None
        self._seen: set[bytes] = set()
        self.pieces_read = reader.pieces_read

    def find_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects, verified; LimitError once the limit is reached, and on every later call."""
        found: list[StoredObject | None] = []
        for start in range(0, len(digests), _BATCH):
            names = digests[start : start + _BATCH]
            batch = self._reader.find_many(names)
            for name, item in zip(names, batch, strict=True):
                if item is not None:
                    size = len(item.data)
                    self._left -= size
                    if item.kind in _PART_KINDS:
                        if name in self._seen:
                            self._again_left -= part_cost(size, 1)
                        elif len(self._seen) < _MAX_SEEN:
                            self._seen.add(name)
            if self._left < 0:
                raise LimitError(
                    f"reading this takes more than {self._limit:,} bytes: raise max_bytes, or read "
                    "parts with view()"
                )
            if self._again_left < 0:
                self._require_bounded()
            found.extend(batch)
        self.pieces_read = self._reader.pieces_read
        return found

    def _require_bounded(self) -> None:
        if self._too_long is not None:
            raise self._too_long
        try:
            self._measure()
        except ExpansionError as exc:
            self._too_long = exc
            raise
        self._again_left = _UNLIMITED


class PendingReader(PieceReader):
    """Reads the objects that a writer has collected as if they were stored."""

    __slots__ = ("_writer",)

    def __init__(self, engine: Engine, writer: PieceWriter) -> None:
        super().__init__(engine)
        self._writer = writer

    def find_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects, from the writer, else verified from the engine."""
        found = [self._writer.find(digest) for digest in digests]
        stored = iter(
            super().find_many(
                [digest for digest, item in zip(digests, found, strict=True) if item is None]
            )
        )
        return [next(stored) if item is None else item for item in found]


class PieceWriter:
    """Collects new objects, children first, and stores them in one write."""

    __slots__ = ("_seen", "objects", "size_bytes")

    def __init__(self) -> None:
        self.objects: list[NewObject] = []
        self.size_bytes = 0
        self._seen: dict[bytes, NewObject] = {}

    def emit(self, kind: int, data: bytes, children: list[bytes]) -> bytes:
        """Add an object or a blob of any length, a long one as a rope; returns its digest."""
        if kind == Kind.BLOB:
            digest = plain_hash(data)
        else:
            # Like ``digest_of``, inlined because every new object passes here.
            hasher = HASHERS[kind].copy()
            hasher.update(data)
            digest = hasher.digest()
        seen = self._seen
        if digest not in seen:
            size = len(data)
            if size >= CHUNKED_BLOB_MIN_BYTES and kind == Kind.BLOB:
                self._add_long_blob(digest, data)
            else:
                # Like ``add``, inlined.
                seen[digest] = item = NewObject(digest, kind, data, children)
                self.objects.append(item)
                self.size_bytes += size
        return digest

    def add(self, item: NewObject) -> None:
        """Add one object whose digest the caller has computed."""
        self._seen[item.digest] = item
        self.objects.append(item)
        self.size_bytes += len(item.data)

    def _add_long_blob(self, digest: bytes, content: bytes) -> None:
        rope = chunking.RopeBuilder(self.emit_whole)
        for chunk in chunking.cut(content):
            if len(chunk) == len(content):
                # A rope of one chunk would have to link to itself.
                self.add(NewObject(digest, Kind.BLOB, content, ()))
                return
            rope.add(chunk)
        self.add(NewObject(digest, Kind.ROPE, *rope.finish()))

    def emit_whole(self, kind: int, data: bytes, children: list[bytes]) -> bytes:
        """Add one object without splitting it, whatever its length."""
        digest = digest_of(kind, data)
        if digest not in self._seen:
            self.add(NewObject(digest, kind, data, children))
        return digest

    def find(self, digest: bytes) -> StoredObject | None:
        """An object that was added and not flushed yet; None for any other."""
        # A digest of another type may be unhashable; the engine then raises InvalidInputError.
        item = self._seen.get(digest) if isinstance(digest, bytes) else None
        return None if item is None else StoredObject(item.kind, item.data)

    def keep_reachable(self, *roots: bytes) -> None:
        """Drop objects that ``roots`` do not reach: intermediate results.

        Call this only right before the write: ``emit`` would not add a dropped object again.
        """
        needed: set[bytes] = set()
        ahead = list(roots)
        while ahead:
            item = self._seen.get(ahead.pop())
            if item is not None and item.digest not in needed:
                needed.add(item.digest)
                ahead.extend(item.children)
        self.objects = [item for item in self.objects if item.digest in needed]

    def flush(self, engine: Engine) -> None:
        """Store the collected objects; later ones may link to them."""
        if self.objects:
            engine.write(Write(objects=self.objects))
        self.objects = []
        self.size_bytes = 0
        self._seen.clear()
