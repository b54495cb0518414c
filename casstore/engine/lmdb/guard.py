"""Checks a file before LMDB maps it.

LMDB trusts its file. If the end of the file is missing, LMDB raises SIGBUS, which kills the
process where a store should raise an error. So the length that the newest meta page claims is
compared with the file first.

A short file is not always damaged: LMDB counts pages that it allocated and freed within one
transaction, and does not write them, so after about one commit in a hundred the file ends early
and is sound. The engine lengthens the file after each commit (``cover``). Where a killed writer
left it short, py-lmdb's offline verifier walks the file and decides.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import Final, NamedTuple

from casstore.engine.files import open_regular, storage_error
from casstore.errors import CorruptionError, FormatVersionError

META_MAGIC: Final = 0xBEEFC0DE
# The two formats differ in the length of a page header: LMDB 0.9 writes version 1
# after 16 bytes, LMDB 1.0 version 3 after 24.
META_VERSIONS: Final = {16: 1, 24: 3}
# magic, version, address, map size, then two database records of 48 bytes (the first
# starts with the page size, the second ends with the page that the tree of tables begins with),
# last page, transaction
_META: Final = Struct("=IIQQI44x40xQQQ")


class Extent(NamedTuple):
    """The file length that the newest commit claims, and whether that commit is the newest.

    Every commit writes the older of the two meta pages, so their transaction numbers are
    consecutive. If they are not, one is damaged, and LMDB may take an older state for the newest.
    """

    needed_bytes: int
    file_bytes: int
    transactions: tuple[int, int]
    #: LMDB's format of the file: 0 for that of 0.9, 1 for that of 1.0.
    lmdb_version: int
    #: The length of a page header in that format.
    header_bytes: int
    #: The map size that the file was last opened with.
    map_bytes: int

    @property
    def is_short(self) -> bool:
        """True if the file is shorter than its meta page claims."""
        return self.file_bytes < self.needed_bytes

    @property
    def is_in_order(self) -> bool:
        """True if the transaction numbers of the meta pages are consecutive."""
        first, second = self.transactions
        return abs(first - second) == 1 or first == second == 0


def read_extent(path: str) -> Extent:
    """Parse both meta pages and choose as LMDB does; raise if neither is valid."""
    try:
        with open(open_regular(path, follow=True), "rb") as source:
            # The meta page is read before the length: a commit in between can only make the file
            # longer than needed.
            head = source.read(2 << 16)
            file_bytes = os.fstat(source.fileno()).st_size
    except OSError as exc:
        raise storage_error(f"cannot read {path}", exc) from exc
    header_bytes = _find_header(head, path)
    page_bytes = _META.unpack_from(head, header_bytes)[4]
    if page_bytes not in (1 << shift for shift in range(9, 17)):
        raise CorruptionError(f"{path} claims pages of {page_bytes} bytes")
    transactions: list[int] = []
    last_pages: list[int] = []
    map_sizes: list[int] = []
    for start in (0, page_bytes):
        if len(head) < start + header_bytes + _META.size:
            raise CorruptionError(f"{path} has {file_bytes} bytes, too few for its meta pages")
        magic, version, _, map_bytes, _, _, page, transaction = _META.unpack_from(
            head, start + header_bytes
        )
        if magic != META_MAGIC or version != META_VERSIONS[header_bytes]:
            raise CorruptionError(f"{path} has a damaged meta page")
        transactions.append(transaction)
        last_pages.append(page)
        map_sizes.append(map_bytes)
    newest = 0 if transactions[0] > transactions[1] else 1
    if last_pages[newest] < last_pages[1 - newest]:
        # The file never shrinks, so the older state needs no more than the newer.
        raise CorruptionError(f"{path} has a damaged meta page: the older one is the longer")
    needed_bytes = (last_pages[newest] + 1) * page_bytes
    lmdb_version = list(META_VERSIONS).index(header_bytes)
    return Extent(
        needed_bytes, file_bytes, (transactions[0], transactions[1]), lmdb_version, header_bytes,
        map_sizes[newest],
    )  # fmt: skip


def _find_header(head: bytes, path: str) -> int:
    for header_bytes, version in META_VERSIONS.items():
        if len(head) < header_bytes + _META.size:
            break
        magic, found, *_ = _META.unpack_from(head, header_bytes)
        if magic == META_MAGIC:
            if found != version:
                raise FormatVersionError(f"{path} (LMDB's own file)", found, version)
            return header_bytes
    raise CorruptionError(f"{path} is not an LMDB file, or its first page is damaged")


def verify_structure(path: str) -> None:
    """Walk the whole file without LMDB; raise with the first findings if it is not sound.

    Reads everything; no process may write meanwhile.
    """
    # Imported only for damaged or suspect files.
    from lmdb import verify

    class Verifier(verify._Verifier):
        """Also checks the later pages of a long value, if the file ends before them.

        py-lmdb checks only the first; LMDB would read on and crash. (The verifier has no type
        hints, hence the ignored errors.)
        """

        def _mark_live(self, pgno: int, what: str) -> bool:
            if (pgno + 1) * self.psize > file_bytes:
                self.err(f"page {pgno} ({what}) lies beyond the end of the file")  # type: ignore[no-untyped-call]
            sound: bool = super()._mark_live(pgno, what)  # type: ignore[no-untyped-call]
            return sound

    try:
        with open(open_regular(path, follow=True), "rb") as source:
            file_bytes = os.fstat(source.fileno()).st_size
            problems: list[str] = Verifier(source, file_bytes).verify()  # type: ignore[no-untyped-call]
    except OSError as exc:
        raise storage_error(f"cannot read {path}", exc) from exc
    except verify.VerifyError as exc:
        raise CorruptionError(f"{path} cannot be read: {exc}") from exc
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CorruptionError(f"{path} is damaged: {problems[0]}{more}")


def cover(handle: int, needed_bytes: int) -> bool:
    """Lengthen the file to what its meta page says, without changing a byte; False if that fails.

    posix_fallocate only ever extends, so this is safe while another process writes.
    """
    if os.fstat(handle).st_size >= needed_bytes:
        return True
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(handle, needed_bytes - 1, 1)
    except OSError:
        # The commit before it is complete and durable, and must not look failed. A file that stays
        # short is sound; the next process that opens it has to run the verifier.
        return False
    return True
