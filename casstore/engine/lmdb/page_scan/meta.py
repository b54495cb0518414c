"""The meta pages of an LMDB file, and the check of a file before LMDB maps it.

LMDB trusts its file. If the end of the file is missing, reading there raises SIGBUS, which kills
the process, where casstore should raise an error. So the file's length is first compared with the
one that its newest meta page claims. (An LMDB file begins with two meta pages. Each describes one
committed state, and each commit overwrites the older of the two.)

A short file is not always damaged: the claimed length includes pages that LMDB allocated and freed
within one transaction and never wrote, so after about one commit in a hundred the file is shorter
and sound. The engine lengthens the file after each commit (``Environment.cover``). If a killed
writer left it short, ``verify_structure`` reads the whole file and decides.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import Final, NamedTuple

from casstore.engine.files import open_regular, storage_error
from casstore.errors import CorruptionError, FormatVersionError

_MAGIC: Final = 0xBEEFC0DE
#: LMDB's format by the length of a page header: LMDB 0.9 writes version 1 after 16 bytes, LMDB 1.0
#: version 3 after 24.
META_VERSIONS: Final = {16: 1, 24: 3}
META_PAGES: Final = 2
PAGE_SIZES: Final = tuple(1 << shift for shift in range(9, 17))

_SIGNATURE: Final = Struct("=II")
# magic, version, address, map size, the records of the two databases (that of the free pages
# begins with the page size; that of the tree of tables), last page, transaction
_META: Final = Struct("=IIQQI44x48sQQ")
META_BYTES: Final = _META.size
# page size, flags, depth, branch pages, leaf pages, overflow pages, entries, root
_RECORD: Final = Struct("=IHHQQQQQ")
RECORD_BYTES: Final = _RECORD.size


class DatabaseRecord(NamedTuple):
    """LMDB's record of a database: the root of its tree, and its number of entries."""

    depth: int
    entries: int
    root: int


class Meta(NamedTuple):
    """A meta page: one committed state."""

    transaction: int
    last_page: int
    page_bytes: int
    map_bytes: int
    main: DatabaseRecord


def read_record(data: bytes) -> DatabaseRecord:
    """The record of a database."""
    _, _, depth, _, _, _, entries, root = _RECORD.unpack(data)
    return DatabaseRecord(depth, entries, root)


def read_meta(data: bytes, at: int, header_bytes: int) -> Meta | None:
    """The META_BYTES of a meta page after its header; None if LMDB did not write them."""
    if len(data) < at + META_BYTES:
        return None
    magic, version, _, map_bytes, page_bytes, main, page, transaction = _META.unpack_from(data, at)
    if magic != _MAGIC or version != META_VERSIONS[header_bytes]:
        return None
    return Meta(transaction, page, page_bytes, map_bytes, read_record(main))


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
    """Parse both meta pages and choose as LMDB does; raise if one is damaged."""
    try:
        with open(open_regular(path, follow=True), "rb") as source:
            # Read the meta pages before the length: a commit in between only lengthens the file, so
            # the file does not look short.
            head = source.read(META_PAGES * PAGE_SIZES[-1])
            file_bytes = os.fstat(source.fileno()).st_size
    except OSError as exc:
        raise storage_error(f"cannot read {path}", exc) from exc
    header_bytes, first = _first_meta(head, path)
    page_bytes = first.page_bytes
    if page_bytes not in PAGE_SIZES:
        raise CorruptionError(f"{path} claims pages of {page_bytes} bytes")
    if len(head) < page_bytes + header_bytes + META_BYTES:
        raise CorruptionError(f"{path} has {file_bytes} bytes, too few for its meta pages")
    second = read_meta(head, page_bytes + header_bytes, header_bytes)
    if second is None:
        raise CorruptionError(f"{path} has a damaged meta page")
    newest, older = (first, second) if first.transaction > second.transaction else (second, first)
    if newest.last_page < older.last_page:
        # An LMDB file never shrinks, so the older state cannot have more pages than the newer.
        raise CorruptionError(
            f"{path} has a damaged meta page: the older of its two states claims more pages"
        )
    return Extent(
        needed_bytes=(newest.last_page + 1) * page_bytes,
        file_bytes=file_bytes,
        transactions=(first.transaction, second.transaction),
        lmdb_version=list(META_VERSIONS).index(header_bytes),
        header_bytes=header_bytes,
        map_bytes=newest.map_bytes,
    )


def _first_meta(head: bytes, path: str) -> tuple[int, Meta]:
    """The length of a page header, and the first meta page; raise if LMDB did not write that."""
    for header_bytes, version in META_VERSIONS.items():
        meta = read_meta(head, header_bytes, header_bytes)
        if meta is not None:
            return header_bytes, meta
        if len(head) >= header_bytes + META_BYTES:
            magic, found = _SIGNATURE.unpack_from(head, header_bytes)
            if magic == _MAGIC:
                raise FormatVersionError(f"{path} (LMDB's own file)", found, version)
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
