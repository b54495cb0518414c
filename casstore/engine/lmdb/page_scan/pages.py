"""LMDB's pages, read without LMDB: damage costs a page, not the process.

LMDB trusts its file and crashes on a damaged page. Checks and salvage read the pages with this
module. It maps nothing and trusts nothing: each page must have its own number, and everything
that it refers to must be inside it.

    page      header (16 bytes in format 0, of LMDB 0.9; 24 bytes in format 1, of LMDB 1.0: number
              … flags, and where the offsets end and the entries begin), then the offsets of the
              entries, free space, and the entries at the end of the page
    branch    entries: key → page;  the first key is left out
    leaf      entries: key → value, or → the page of a long value
    overflow  a run of pages with one header, which holds one long value
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from struct import Struct
from typing import Final, NamedTuple

from casstore.engine.files import open_regular, storage_error
from casstore.engine.lmdb.page_scan.meta import (
    META_BYTES,
    META_PAGES,
    META_VERSIONS,
    PAGE_SIZES,
    RECORD_BYTES,
    Meta,
    read_meta,
)
from casstore.errors import CorruptionError

BRANCH: Final = 0x01
LEAF: Final = 0x02
OVERFLOW: Final = 0x04
_META: Final = 0x08
# The flags of a page at rest are exactly one of these.
_KINDS: Final = frozenset((BRANCH, LEAF, OVERFLOW))

_LONG: Final = 0x01
_DATABASE: Final = 0x02

NO_PAGE: Final = (1 << 64) - 1
# The limit on the depth of a tree; LMDB has the same.
_MAX_DEPTH: Final = 32
_USUAL_PAGE_BYTES: Final = 4096
# About how many pages are read to find out the page size, if both meta pages are damaged.
_PROBES: Final = 256
# How many pages are read at once in a scan of the whole file.
_READ_AHEAD: Final = 256

_U16: Final = Struct("=H")
_U32: Final = Struct("=I")
_U64: Final = Struct("=Q")
_ENTRY: Final = Struct("=HHHH")


class LeafEntry(NamedTuple):
    """An entry of a leaf. A long value is stored in its own run of overflow pages."""

    key: bytes
    #: The value, or None if it is in overflow pages.
    value: bytes | None
    #: The length of the value.
    size: int
    #: The first of the overflow pages; 0 if the value is in the leaf.
    run: int
    #: True if the value is the record of a database.
    is_database: bool


class DecodedPage(NamedTuple):
    """A decoded page."""

    number: int
    kind: int
    #: The transaction that wrote it; 0 if the format does not record it.
    transaction: int
    entries: list[LeafEntry]
    #: Of a branch: the lowest key below each child, and the child.
    children: list[tuple[bytes, int]]
    #: Of an overflow page: how many pages its run has.
    run_pages: int


class Lost(NamedTuple):
    """A part of a tree that cannot be read: keys from ``low`` to below ``high``."""

    page: int
    low: bytes
    high: bytes | None
    why: str


class ReachedEntry(NamedTuple):
    """An entry found by walking a tree."""

    page: int
    entry: LeafEntry


class PageFile:
    """An LMDB data file as pages. Only reads; safe on any bytes, and while a writer works."""

    def __init__(self, path: str) -> None:
        try:
            self._handle = open_regular(path, follow=True)
            self.size_bytes = os.fstat(self._handle).st_size
        except OSError as exc:
            raise storage_error(f"cannot read {path}", exc) from exc
        self.path = path
        try:
            self.header_bytes, self.page_bytes = self._find_layout()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def page_count(self) -> int:
        """How many whole pages the file has."""
        return self.size_bytes // self.page_bytes

    # --- layout -------------------------------------------------------------------------

    def _find_layout(self) -> tuple[int, int]:
        """The length of a header and of a page: from a meta page, else by trial."""
        for start in (0, *PAGE_SIZES):
            for header_bytes in META_VERSIONS:
                data = self._read_at(start + header_bytes, META_BYTES)
                meta = read_meta(data, 0, header_bytes)
                if meta is not None and meta.page_bytes in PAGE_SIZES:
                    return header_bytes, meta.page_bytes
        # Both meta pages are damaged: pages that hold their own number show the layout.
        best = max(
            ((header, size) for size in PAGE_SIZES for header in META_VERSIONS),
            key=lambda layout: (self._count_sound(*layout), layout[1] == _USUAL_PAGE_BYTES),
        )
        if not self._count_sound(*best):
            raise CorruptionError(f"{self.path} has no page that LMDB could have written")
        return best

    def _count_sound(self, header_bytes: int, page_bytes: int) -> int:
        sound = 0
        total = self.size_bytes // page_bytes
        for number in range(META_PAGES, total, max(1, total // _PROBES)):
            head = self._read_at(number * page_bytes, header_bytes)
            if len(head) == header_bytes and _U64.unpack_from(head)[0] == number:
                sound += _U16.unpack_from(head, header_bytes - 6)[0] in _KINDS
        return sound

    def metas(self) -> list[Meta]:
        """The valid meta pages, newest first."""
        found: list[Meta] = []
        for number in range(META_PAGES):
            page = self._read_at(number * self.page_bytes, self.header_bytes + META_BYTES)
            meta = read_meta(page, self.header_bytes, self.header_bytes)
            if (
                meta is not None
                and _U64.unpack_from(page)[0] == number
                and _U16.unpack_from(page, self.header_bytes - 6)[0] == _META
                # A transaction writes the meta page with its own number modulo two.
                and (meta.transaction % META_PAGES == number or not meta.transaction)
            ):
                found.append(meta)
        return sorted(found, reverse=True)

    # --- pages --------------------------------------------------------------------------

    def _read_at(self, start: int, size: int) -> bytes:
        try:
            return os.pread(self._handle, size, start)
        except OSError as exc:
            # A bad sector is damage like any other: only its content is lost.
            if start == 0:
                raise storage_error(f"cannot read {self.path}", exc) from exc
            return b""

    def read(self, number: int, pages: int = 1) -> bytes | None:
        """The bytes of a run of pages; None if the file does not hold them all."""
        if number < 0 or pages < 1 or (number + pages) * self.page_bytes > self.size_bytes:
            return None
        size = pages * self.page_bytes
        data = self._read_at(number * self.page_bytes, size)
        return data if len(data) == size else None

    def page(self, number: int) -> DecodedPage | None:
        """The decoded page ``number``; None if LMDB could not have written these bytes there."""
        data = self.read(number)
        return None if data is None else self.parse(number, data)

    def pages(self) -> Iterator[DecodedPage]:
        """Every valid page, in order, whether or not a tree refers to it."""
        total, step = self.page_count, _READ_AHEAD
        for start in range(META_PAGES, total, step):
            count = min(step, total - start)
            block = self.read(start, count)
            for number in range(start, start + count):
                if block is None:
                    page = self.page(number)
                else:
                    at = (number - start) * self.page_bytes
                    page = self.parse(number, block[at : at + self.page_bytes])
                if page is not None:
                    yield page

    def parse(self, number: int, data: bytes) -> DecodedPage | None:
        """Decode the bytes of page ``number``; None if LMDB could not have written them there."""
        header = self.header_bytes
        kind = _U16.unpack_from(data, header - 6)[0]
        if kind not in _KINDS or _U64.unpack_from(data)[0] != number:
            return None
        transaction: int = _U64.unpack_from(data, 8)[0] if header > 16 else 0
        if kind == OVERFLOW:
            run_pages: int = _U32.unpack_from(data, header - 4)[0]
            if not 0 < run_pages <= self.page_count - number:
                return None
            return DecodedPage(number, kind, transaction, [], [], run_pages)
        # Format 1 counts offsets from the end of the header.
        base = 0 if header == 16 else header
        lower, upper = _U16.unpack_from(data, header - 4)[0], _U16.unpack_from(data, header - 2)[0]
        count = (lower - header + base) >> 1
        if lower < header - base or lower > upper or upper + base > len(data):
            return None
        entries: list[LeafEntry] = []
        children: list[tuple[bytes, int]] = []
        for at in range(count):
            offset = base + _U16.unpack_from(data, header + 2 * at)[0]
            if not upper + base <= offset <= len(data) - _ENTRY.size:
                return None
            low, high, flags, key_bytes = _ENTRY.unpack_from(data, offset)
            key_at = offset + _ENTRY.size
            value_at = key_at + key_bytes
            if value_at > len(data):
                return None
            key = data[key_at:value_at]
            if kind == BRANCH:
                children.append((key if at else b"", low | high << 16 | flags << 32))
                continue
            if base:
                value_at += key_bytes & 1
            entry = self._entry(data, key, value_at, low | high << 16, flags)
            if entry is None:
                return None
            entries.append(entry)
        if kind == BRANCH and not children:
            return None
        return DecodedPage(number, kind, transaction, entries, children, 0)

    def _entry(self, data: bytes, key: bytes, at: int, size: int, flags: int) -> LeafEntry | None:
        if flags & _LONG:
            if flags != _LONG or at + _U64.size > len(data):
                return None
            return LeafEntry(key, None, size, _U64.unpack_from(data, at)[0], is_database=False)
        if flags not in (0, _DATABASE) or at + size > len(data):
            return None
        if flags == _DATABASE and size != RECORD_BYTES:
            return None
        return LeafEntry(key, data[at : at + size], size, 0, is_database=flags == _DATABASE)

    def run_length(self, size: int) -> int:
        """How many pages a long value takes."""
        return (self.header_bytes - 1 + size) // self.page_bytes + 1

    def value(self, entry: LeafEntry) -> bytes | None:
        """The value of an entry; None if its overflow pages are missing or damaged."""
        if entry.value is not None:
            return entry.value
        pages = self.run_length(entry.size)
        data = self.read(entry.run, pages)
        if data is None:
            return None
        head = self.parse(entry.run, data[: self.page_bytes])
        if head is None or head.kind != OVERFLOW or head.run_pages != pages:
            return None
        return data[self.header_bytes : self.header_bytes + entry.size]

    def run_content(self, page: DecodedPage) -> bytes | None:
        """The content of a run of overflow pages; its value may be shorter."""
        data = self.read(page.number, page.run_pages)
        return None if data is None else data[self.header_bytes :]

    # --- trees --------------------------------------------------------------------------

    def walk(
        self,
        root: int,
        lost: Callable[[Lost], None],
        visit: Callable[[int, int], bool],
    ) -> Iterator[ReachedEntry]:
        """The entries of a tree in order, as far as it can be read.

        ``lost`` is called with each part that cannot be read. ``visit(page, 1)`` is called with
        each page of the tree, and returns False to report it as lost: it was visited before.
        """
        if root == NO_PAGE:
            return
        ahead: list[tuple[int, bytes, bytes | None, int]] = [(root, b"", None, 1)]
        while ahead:
            number, low, high, depth = ahead.pop()
            page = self.page(number) if depth <= _MAX_DEPTH else None
            if page is None or page.kind == OVERFLOW:
                lost(Lost(number, low, high, f"page {number} is damaged"))
                continue
            if not visit(number, 1):
                lost(Lost(number, low, high, f"page {number} is in the tree twice"))
                continue
            names = [key for key, _ in page.children[1:]] or [one.key for one in page.entries]
            if not _in_order(names, low, high):
                lost(Lost(number, low, high, f"the keys of page {number} are out of order"))
                continue
            if page.kind == LEAF:
                for entry in page.entries:
                    yield ReachedEntry(number, entry)
                continue
            bounds = [low, *names]
            above = [*names, high]
            for (_, child), start, stop in reversed(
                list(zip(page.children, bounds, above, strict=True))
            ):
                ahead.append((child, start, stop, depth + 1))


def _in_order(names: list[bytes], low: bytes, high: bytes | None) -> bool:
    ascending = all(one < two for one, two in pairwise(names))
    if not names:
        return True
    return ascending and names[0] >= low and (high is None or names[-1] < high)
