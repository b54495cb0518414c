"""Bytes of any length: put, stream in, get, stream out.

A blob is identified by its content alone. Whether it is one object or chunks under a rope is hidden
by this module.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, Final

from casstore.engine.protocol import Engine, NewObject, StoredObject
from casstore.errors import CorruptionError, InvalidInputError, LimitError
from casstore.format import chunking, tree
from casstore.format.digest import BlobHasher, Digest, Kind, plain_hash
from casstore.format.limits import CHUNKED_BLOB_MIN_BYTES
from casstore.objects.pieces import PieceReader, PieceWriter

# How much of a stream is buffered before it is written: large enough that flushes are cheap, small
# enough that a few copies of it fit in memory.
_STREAM_BATCH_BYTES: Final = 8 << 20

# How many chunks a sequential reader fetches together.
_READ_AHEAD_CHUNKS: Final = 32


def put_stream(
    engine: Engine, source: BinaryIO, *, batch_bytes: int = _STREAM_BATCH_BYTES
) -> Digest:
    """Store everything that ``source`` yields, in constant memory.

    Chunks are written in batches of ``batch_bytes``; memory holds a few times that. The blob exists
    once the last byte is stored. If the source fails, the chunks written so far are unreachable,
    and gc removes them.
    """
    head = _read_up_to(source, CHUNKED_BLOB_MIN_BYTES)
    writer = PieceWriter()
    if len(head) < CHUNKED_BLOB_MIN_BYTES:
        digest = Digest(writer.emit(Kind.BLOB, head, []))
        writer.flush(engine)
        return digest
    hasher = BlobHasher()
    rope = chunking.RopeBuilder(writer.emit_whole)
    chunks = 0
    for chunk in chunking.cut_stream(io.BufferedReader(_Rejoined(head, source))):
        hasher.update(chunk)
        rope.add(chunk)
        chunks += 1
        if writer.size_bytes >= batch_bytes:
            writer.flush(engine)
    digest = hasher.digest()
    if chunks > 1:
        writer.add(NewObject(digest, Kind.ROPE, *rope.finish()))
    writer.flush(engine)
    return digest


def _read_up_to(source: BinaryIO, size: int) -> bytes:
    parts: list[bytes] = []
    missing = size
    while missing:
        part = _read(source, missing)
        if not part:
            break
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _read(source: BinaryIO, size: int) -> bytes:
    read = getattr(source, "read", None)
    part = read(size) if callable(read) else None
    if not isinstance(part, bytes):
        raise InvalidInputError(
            f"source must be a file in binary and blocking mode, got {type(source).__name__}"
        )
    if len(part) > size:
        # Accepting more than the requested bytes would let the stream control the use of memory.
        raise InvalidInputError(f"source.read({size}) returned {len(part)} bytes")
    return part


class _Rejoined(io.RawIOBase):
    """The beginning of a stream, which was read to measure it, followed by the rest."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    # BufferedReader, the only caller, always passes a memoryview.
    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        part = self._head[: len(buffer)] if self._head else _read(self._rest, len(buffer))
        self._head = self._head[len(part) :]
        buffer[: len(part)] = part
        return len(part)


def read_blob(reader: PieceReader, digest: bytes, item: StoredObject, *, max_bytes: int) -> bytes:
    """The content of the blob whose root object is ``item``; LimitError above ``max_bytes``."""
    if item.kind == Kind.BLOB:
        if len(item.data) > max_bytes:
            raise _too_long(len(item.data), max_bytes)
        return item.data
    if item.kind != Kind.ROPE:
        raise InvalidInputError(f"{digest.hex()} is not a blob")
    branch = tree.decode_branch(Kind.CHUNKS, tree.open_rope(item.data))
    size = sum(branch.sizes)
    if size > max_bytes:
        raise _too_long(size, max_bytes)
    content = b"".join(_chunks(reader, branch))
    if plain_hash(content) != digest:
        raise CorruptionError(f"blob {digest.hex()} does not match its digest")
    return content


def blob_size(digest: bytes, item: StoredObject) -> int:
    """The length of the blob whose root object is ``item``."""
    if item.kind == Kind.BLOB:
        return len(item.data)
    if item.kind != Kind.ROPE:
        raise InvalidInputError(f"{digest.hex()} is not a blob")
    return sum(tree.decode_branch(Kind.CHUNKS, tree.open_rope(item.data)).sizes)


def _too_long(size: int, max_bytes: int) -> LimitError:
    return LimitError(
        f"the blob has {size} bytes, more than max_bytes={max_bytes}; read it with open_blob"
    )


def _chunks(reader: PieceReader, branch: tree.TreeBranch) -> Iterator[bytes]:
    """All chunks below a branch, in order, fetched in batches."""
    for start in range(0, len(branch.digests), _READ_AHEAD_CHUNKS):
        digests = branch.digests[start : start + _READ_AHEAD_CHUNKS]
        sizes = branch.sizes[start : start + _READ_AHEAD_CHUNKS]
        for size, item in zip(sizes, reader.follow(digests), strict=True):
            if branch.level == 1:
                yield _require_chunk(item, size)
            else:
                yield from _chunks(reader, _require_branch(item, branch.level - 1, size))


def _require_chunk(item: StoredObject, size: int) -> bytes:
    if item.kind != Kind.BLOB or len(item.data) != size:
        raise CorruptionError("a rope links to something that is not its chunk")
    return item.data


def _require_branch(item: StoredObject, level: int, size: int) -> tree.TreeBranch:
    if item.kind != Kind.CHUNKS:
        raise CorruptionError("a rope links to something that is not its branch")
    branch = tree.decode_branch(Kind.CHUNKS, item.data)
    if branch.level != level or sum(branch.sizes) != size:
        raise CorruptionError("a rope's branch differs from what its parent says of it")
    return branch


class BlobReader(io.RawIOBase):
    """A blob as a seekable, read-only file. Each chunk is verified before it is returned.

    If the blob is read from start to end, the digest of the whole is verified too; on a mismatch
    the last read raises CorruptionError.
    """

    def __init__(self, reader: PieceReader, digest: bytes, item: StoredObject) -> None:
        super().__init__()
        self._reader = reader
        self._digest = digest
        self._position = 0
        self._hasher = BlobHasher()
        self._hashed = 0
        self._is_false = False
        # The chunks that were loaded last: the offset of the first, and their content joined.
        self._window_start = 0
        self._window = b""
        self._root: tree.TreeBranch | None = None
        if item.kind == Kind.BLOB:
            self._window = item.data
            self.size_bytes = len(item.data)
        elif item.kind == Kind.ROPE:
            self._root = tree.decode_branch(Kind.CHUNKS, tree.open_rope(item.data))
            self.size_bytes = sum(self._root.sizes)
        else:
            raise InvalidInputError(f"{digest.hex()} is not a blob")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset; reading past the end returns nothing."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}
        if whence not in base or base[whence] + offset < 0:
            raise InvalidInputError(f"cannot seek to {offset} from {whence}")
        self._position = base[whence] + offset
        return self._position

    # BufferedReader, the only caller, always passes a memoryview.
    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into ``buffer``, no further than the loaded chunks; returns the number of bytes."""
        if self._position >= self.size_bytes:
            return 0
        if not self._window_start <= self._position < self._window_start + len(self._window):
            self._load_window()
        start = self._position - self._window_start
        part = self._window[start : start + len(buffer)]
        self._verify_whole(part)
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _verify_whole(self, part: bytes) -> None:
        if self._position == self._hashed:
            self._hasher.update(part)
            self._hashed += len(part)
            at_end = self._hashed == self.size_bytes
            self._is_false = at_end and self._hasher.digest() != self._digest
        # The error is permanent: a retry must not return what the first read refused.
        if self._is_false:
            raise CorruptionError(f"blob {self._digest.hex()} does not match its digest")

    def _load_window(self) -> None:
        """Fetch several chunks, beginning with the one at the current position."""
        assert self._root is not None
        branch, start = self._root, 0
        while True:
            at = 0
            while start + branch.sizes[at] <= self._position:
                start += branch.sizes[at]
                at += 1
            if branch.level == 1:
                break
            item = self._reader.follow((branch.digests[at],))[0]
            branch = _require_branch(item, branch.level - 1, branch.sizes[at])
        stop = at + _READ_AHEAD_CHUNKS
        chunks = [
            _require_chunk(item, size)
            for size, item in zip(
                branch.sizes[at:stop], self._reader.follow(branch.digests[at:stop]), strict=True
            )
        ]
        self._window_start = start
        self._window = b"".join(chunks)
