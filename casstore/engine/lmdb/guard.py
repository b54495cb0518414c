"""Checks a data file before LMDB maps it.

LMDB trusts its file. If the end of the file is missing, reading there raises SIGBUS, which kills
the process, where casstore should raise an error. So the file's length is first compared with the
one that its newest meta page claims. (An LMDB file begins with two meta pages. Each describes one
committed state, and each commit overwrites the older of the two.)

A short file is not always damaged: the claimed length includes pages that LMDB allocated and freed
within one transaction and never wrote, so after about one commit in a hundred the file is shorter
and sound. The engine lengthens the file after each commit (``cover``). If a killed writer left it
short, ``verify_structure`` reads the whole file and decides.
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
    """What the meta pages of a file claim, and its length.

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
            # Read the meta pages before the length: a commit in between only lengthens the file, so
            # the file does not look short.
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
        # An LMDB file never shrinks, so the older state cannot have more pages than the newer.
        raise CorruptionError(
            f"{path} has a damaged meta page: the older of its two states claims more pages"
        )
    needed_bytes = (last_pages[newest] + 1) * page_bytes
    lmdb_version = list(META_VERSIONS).index(header_bytes)
    return Extent(
        needed_bytes, file_bytes, (transactions[0], transactions[1]), lmdb_version, header_bytes,
        map_sizes[newest],
    )  # fmt: skip


def _find_header(head: bytes, path: str) -> int:
    """The length of a page header, by the first meta page; raise if LMDB did not write that."""
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
    """Read the whole file without LMDB; CorruptionError with the first finding if it is damaged.

    No process may write to the file meanwhile.
    """
    # Imported only for damaged or suspect files.
    from lmdb import verify

    class Verifier(verify._Verifier):
        """py-lmdb's verifier, which also reports a long value that reaches beyond the file's end.

        py-lmdb checks only the first page of such a value; reading the value through LMDB would
        kill the process. (The verifier has no type hints, hence the ignored errors.)
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
        raise CorruptionError(f"{path} is too damaged to be checked: {exc}") from exc
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CorruptionError(f"{path} is damaged: {problems[0]}{more}")


def cover(handle: int, needed_bytes: int) -> bool:
    """Lengthen the file to ``needed_bytes``, what its meta page claims; False if that fails.

    posix_fallocate changes no byte that exists, so this is safe while another process writes.
    """
    if os.fstat(handle).st_size >= needed_bytes:
        return True
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(handle, needed_bytes - 1, 1)
    except OSError:
        # The caller's commit is complete and flushed, so it must not get an error. A file that
        # stays short is sound, but the next process that opens it must verify all of it.
        return False
    return True
