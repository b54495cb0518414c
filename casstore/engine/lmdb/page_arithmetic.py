"""How many pages rows take when they are written in key order, computed as LMDB fills pages.

A leaf page holds a header, two bytes for each row, and the rows: eight bytes, the key and the
value, together padded to an even number (LMDB 1.0 also pads the key). A value too long for half a
page is stored in overflow pages, with one header. Rows written in key order fill each page before
the next one is begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

_ROW_BYTES: Final = 8
_POINTER_BYTES: Final = 2
# The length of the reference to overflow pages in a row, by the length of a page header; LMDB 1.0
# has the longer ones.
_HEADER_BYTES_1_0: Final = 24
_REFERENCE_BYTES: Final = {16: 8, _HEADER_BYTES_1_0: 24}
# A page must have space for two rows.
_MIN_ROWS: Final = 2


class PageCount(NamedTuple):
    """The numbers of a table's pages, by kind."""

    branch: int
    leaf: int
    overflow: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.branch + self.leaf + self.overflow


def when_full(rows: Iterable[tuple[int, int]], page_bytes: int, header_bytes: int) -> PageCount:
    """The pages for rows with keys and values of these lengths, written in order."""
    space = page_bytes - header_bytes
    longest = (space // _MIN_ROWS & -2) - _POINTER_BYTES
    reference = _REFERENCE_BYTES[header_bytes]
    evens_keys = header_bytes == _HEADER_BYTES_1_0
    leaf = overflow = used = count = key_bytes = 0
    for key, value in rows:
        if evens_keys:
            key += key & 1
        size = _ROW_BYTES + key + value
        if size > longest:
            overflow += (header_bytes - 1 + value) // page_bytes + 1
            size = _ROW_BYTES + key + reference
        size += (size & 1) + _POINTER_BYTES
        if not leaf or used + size > space:
            leaf += 1
            used = 0
        used += size
        count += 1
        key_bytes += key
    branch = 0
    level = leaf
    while level > 1:
        # A branch page has an entry for each page below it, with a key of average length.
        size = _ROW_BYTES + key_bytes // count + 1 + _POINTER_BYTES
        level = -(-level * size // space)
        branch += level
    return PageCount(branch, leaf, overflow)
