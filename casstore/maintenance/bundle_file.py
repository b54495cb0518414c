"""``BundleWriter`` and ``BundleReader``: the file of a bundle, which holds one exported session.

The container alone: which rows a bundle has is decided in ``transfer/rows.py``. The file is written
under another name and renamed when it is complete. The reader trusts nothing: it compares sizes
with limits before it allocates memory, each block with its checksum before it inflates it, and the
whole file with the trailer. Errors name the offset.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, NamedTuple, Self

from casstore.engine.compression import CODEC_RAW, CODEC_ZSTD, NO_DICTIONARY, Compressor
from casstore.engine.files import PartFile, source_error, storage_error
from casstore.errors import (
    BundleError,
    BundleLimitError,
    CorruptionError,
    ForeignBundleError,
    InvalidInputError,
    StorageError,
    TargetExistsError,
)
from casstore.format import bundle as layout
from casstore.format import canonical
from casstore.format.bundle import BundleHeader, PackedObject, Totals
from casstore.format.digest import BlobHasher

_KEPT_BLOCKS: Final = 16
_KEPT_BYTES: Final = 32 << 20


def _no_dictionary(number: int) -> bytes:
    raise CorruptionError(f"a bundle has no dictionary {number}")


class ObjectPlace(NamedTuple):
    """The offset of an object's block, and the object's own within the inflated block."""

    offset: int
    at: int


class BundleBlock(NamedTuple):
    """One block, checked and inflated."""

    offset: int
    type: int
    entries: int
    raw: bytes


# --- writing ----------------------------------------------------------------------------------


class BundleWriter:
    """Writes a bundle; a context manager. The file exists once its block ends without an error.

    A writer that is killed leaves a file with a name that ``engine.files.leftovers`` describes.
    """

    def __init__(
        self, path: str, header: BundleHeader, *, replace: bool = False, compress: bool = True
    ) -> None:
        self._path = path
        self._replace = replace
        self._header = header
        self._compressor = Compressor(_no_dictionary) if compress else None
        self._hasher = BlobHasher()
        self._objects: list[bytes] = []
        self._rows: list[bytes] = []
        self._gathered = 0
        self.objects = 0
        self.object_bytes = 0
        self.rows = 0
        self.size_bytes = 0

    def __enter__(self) -> Self:
        if not self._replace and os.path.lexists(self._path):
            raise TargetExistsError(self._path)
        try:
            self._part = PartFile(self._path)
        except OSError as exc:
            raise storage_error(f"cannot write {self._path}", exc) from exc
        try:
            self._put(layout.MAGIC)
            self._block(layout.HEADER, 1, layout.encode_header(self._header), plain=True)
        except BaseException:
            self._part.discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            self._part.discard()
            return
        try:
            self._finish()
        except BaseException:
            self._part.discard()
            raise

    def add_object(self, kind: int, digest: bytes, data: bytes) -> None:
        """Add an object, after all objects that it links to and that are not left out."""
        size = layout.packed_bytes(kind, len(data))
        if self._gathered and self._gathered + size > layout.BLOCK_TARGET_BYTES:
            self._close_block()
        self._objects.append(layout.encode_object(kind, digest, data))
        self._gathered += size
        self.objects += 1
        self.object_bytes += len(data)

    def add_row(self, row: list[Any]) -> None:
        """Add a row; no object may follow."""
        if self._objects:
            self._close_block()
        encoded = canonical.encode(row)
        if self._gathered and self._gathered + len(encoded) > layout.BLOCK_TARGET_BYTES:
            self._close_block()
        self._rows.append(encoded)
        self._gathered += len(encoded)
        self.rows += 1

    def _close_block(self) -> None:
        if self._objects:
            self._block(layout.OBJECTS, len(self._objects), b"".join(self._objects))
        elif self._rows:
            self._block(layout.ROWS, len(self._rows), layout.encode_rows(self._rows))
        self._objects, self._rows, self._gathered = [], [], 0

    def _block(self, type_: int, count: int, raw: bytes, *, plain: bool = False) -> None:
        if len(raw) > layout.MAX_BLOCK_BYTES:
            raise InvalidInputError(f"a row of {len(raw)} bytes is too long for a bundle")
        codec, payload = CODEC_RAW, raw
        if self._compressor is not None and not plain:
            codec, _, payload = self._compressor.compress(raw)
        self._put(layout.encode_block(self.size_bytes, type_, codec, count, len(raw), payload))

    def _put(self, data: bytes) -> None:
        try:
            self._part.file.write(data)
        except OSError as exc:
            raise storage_error(f"cannot write {self._path}", exc) from exc
        self._hasher.update(data)
        self.size_bytes += len(data)

    def _finish(self) -> None:
        self._close_block()
        digest = bytes(self._hasher.digest())
        totals = Totals(self.objects, self.object_bytes, self.rows, digest)
        self._block(layout.TRAILER, 1, layout.encode_totals(totals), plain=True)
        try:
            self._part.publish(replace=self._replace)
        except FileExistsError as exc:
            raise TargetExistsError(self._path) from exc
        except OSError as exc:
            raise storage_error(f"cannot write {self._path}", exc) from exc


# --- reading ----------------------------------------------------------------------------------


class BundleReader:
    """A bundle that is open for reading; a context manager. ``blocks`` may be read repeatedly."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._inflate = Compressor(_no_dictionary).inflate
        self._kept: OrderedDict[int, BundleBlock] = OrderedDict()
        self._kept_bytes = 0
        self._work_left: int | None = None
        #: The header, once it was read.
        self.header: BundleHeader | None = None
        self.totals: Totals | None = None
        try:
            # Not blocking: the path may be that of a pipe without a writer.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._file: BinaryIO = os.fdopen(handle, "rb")
            except BaseException:
                # ``os.open`` opens a directory as well; ``os.fdopen`` refuses it.
                os.close(handle)
                raise
        except OSError as exc:
            raise source_error(str(path), exc) from exc
        self.size_bytes = os.fstat(handle).st_size
        if not self._file.seekable():
            self._file.close()
            raise InvalidInputError(
                f"{path} is a pipe, and a bundle is read more than once: save it to a file first"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def fail(self, offset: int, reason: object) -> BundleError:
        """The error for a fault at an offset."""
        return BundleError(self.path, offset, str(reason))

    def blocks(self) -> Iterator[BundleBlock]:
        """All blocks of objects and rows, in order; BundleError if the file is not as written."""
        self._file.seek(0)
        hasher = BlobHasher()
        if self._read(len(layout.MAGIC)) != layout.MAGIC:
            raise ForeignBundleError(f"{self.path} is not a bundle")
        hasher.update(layout.MAGIC)
        offset = len(layout.MAGIC)
        last = 0
        while True:
            head, payload, block = self._next(offset)
            if (block.type == layout.HEADER) != (last == 0) or block.type < last:
                raise self.fail(offset, f"a block of type {block.type} after one of type {last}")
            last = block.type
            following = offset + len(head) + len(payload)
            if block.type == layout.TRAILER:
                self._end(block, bytes(hasher.digest()), following)
                return
            hasher.update(head)
            hasher.update(payload)
            if block.type == layout.HEADER:
                self.header = self._open(block)
            else:
                yield block
            offset = following

    def _next(self, offset: int) -> tuple[bytes, bytes, BundleBlock]:
        head = self._read(layout.BLOCK_HEADER_BYTES)
        if len(head) < layout.BLOCK_HEADER_BYTES:
            raise self.fail(offset + len(head), "the file ends before its trailer")
        try:
            fields = layout.decode_block_header(head)
        except ValueError as exc:
            raise self.fail(offset, exc) from exc
        edge = fields.type in (layout.HEADER, layout.TRAILER)
        if edge and (fields.raw_bytes > layout.MAX_EDGE_BYTES or fields.entries != 1):
            raise self.fail(offset, "an invalid header or trailer")
        payload = self._read(fields.stored_bytes)
        if len(payload) < fields.stored_bytes:
            raise self.fail(offset + len(head) + len(payload), "the file ends within a block")
        if not layout.is_proven(offset, head, payload):
            raise self.fail(offset, "a block does not match its checksum")
        if fields.codec not in (CODEC_RAW, CODEC_ZSTD):
            raise self.fail(offset, f"a block of codec {fields.codec}")
        try:
            raw = self._inflate(fields.codec, NO_DICTIONARY, payload, fields.raw_bytes)
        except CorruptionError as exc:
            raise self.fail(offset, exc) from exc
        return head, payload, BundleBlock(offset, fields.type, fields.entries, raw)

    def _open(self, block: BundleBlock) -> BundleHeader:
        try:
            header = layout.decode_header(block.raw)
        except ValueError as exc:
            raise self.fail(block.offset, exc) from exc
        if header.version != layout.VERSION:
            raise ForeignBundleError(
                f"{self.path} is a bundle of version {header.version}, this release reads "
                f"{layout.VERSION}: upgrade casstore"
            )
        return header

    def _end(self, block: BundleBlock, digest: bytes, end: int) -> None:
        try:
            self.totals = layout.decode_totals(block.raw)
        except ValueError as exc:
            raise self.fail(block.offset, exc) from exc
        if self.totals.digest != digest:
            raise self.fail(block.offset, "the file does not match the checksum in its trailer")
        if self._read(1):
            raise self.fail(end, "something follows the trailer")

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as exc:
            raise storage_error(f"cannot read {self.path}", exc) from exc

    def objects(self, block: BundleBlock) -> Iterator[PackedObject]:
        """The objects of a block."""
        try:
            yield from layout.iter_objects(block.raw, block.entries)
        except (ValueError, struct.error) as exc:
            raise self.fail(block.offset, exc) from exc

    def rows(self, block: BundleBlock) -> list[list[Any]]:
        """The rows of a block."""
        try:
            return layout.decode_rows(block.raw, block.entries)
        except ValueError as exc:
            raise self.fail(block.offset, exc) from exc

    # --- random access -----------------------------------------------------------------------

    def allow(self, work_bytes: int) -> None:
        """Limit the bytes that ``fetch`` inflates: links may ask for any number (P7)."""
        self._work_left = work_bytes

    def fetch(self, place: ObjectPlace) -> bytes:
        """The inflated block that contains an object."""
        block = self._kept.get(place.offset)
        if block is not None:
            self._kept.move_to_end(place.offset)
            return block.raw
        position = self._file.tell()
        try:
            self._file.seek(place.offset)
            block = self._next(place.offset)[2]
        except OSError as exc:
            raise StorageError(f"cannot read {self.path}: {exc.strerror}") from exc
        finally:
            self._file.seek(position)
        self.charge(len(block.raw))
        self._kept[place.offset] = block
        self._kept_bytes += len(block.raw)
        while self._kept_bytes > _KEPT_BYTES or len(self._kept) > _KEPT_BLOCKS:
            self._kept_bytes -= len(self._kept.popitem(last=False)[1].raw)
        return block.raw

    def charge(self, size_bytes: int) -> None:
        """Count bytes that were read again; BundleLimitError above the limit of ``allow``."""
        if self._work_left is None:
            return
        self._work_left -= size_bytes
        if self._work_left < 0:
            raise BundleLimitError(
                f"checking {self.path} takes more reading than allowed; raise max_work_bytes"
            )
