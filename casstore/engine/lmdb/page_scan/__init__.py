"""LMDB's pages, read without LMDB, which crashes on damaged ones.

Before LMDB maps a file, ``read_extent`` compares its length with what its meta pages claim, and
``verify_structure`` checks every page. ``PageFile`` reads single pages and whole trees, for checks.
``PageScan`` finds everything in a damaged file that is provably valid, for salvage.

The scan reads the tree of the newest meta page first, then the tree of the other meta page (the
state one commit earlier), then the stray pages, which neither tree refers to and which may be of
any age. Objects and slabs are valid whatever their age: an id is never reused and a digest
identifies the bytes. A row on a stray page passes its checksum but may be outdated. It counts only
where the newest tree has lost the keys around it.

``meta`` reads the meta pages and ``pages`` all others. For a scan, ``scan_pass`` reads the pages,
``found_rows`` and ``found_slabs`` hold the result, ``trees`` records the key ranges that are
missing, ``keyless`` assigns keys to slabs and dictionaries that lost theirs, and ``reachable``
marks the objects that some roots need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from casstore.engine.lmdb.page_scan.meta import (
    Extent,
    read_extent,
    read_record,
    verify_structure,
)

if TYPE_CHECKING:
    from casstore.engine.lmdb.page_scan.pages import Lost, PageFile
    from casstore.engine.lmdb.page_scan.reachable import Marked
    from casstore.engine.lmdb.page_scan.scan import PageScan, require_data_file
    from casstore.engine.lmdb.page_scan.trees import NEWEST, LostRows

__all__ = [
    "NEWEST",
    "Extent",
    "Lost",
    "LostRows",
    "Marked",
    "PageFile",
    "PageScan",
    "read_extent",
    "read_record",
    "require_data_file",
    "verify_structure",
]

# Loaded when first used: opening a store needs the meta pages alone.
_LOADED_WHEN_USED = {
    "Lost": "pages",
    "PageFile": "pages",
    "Marked": "reachable",
    "PageScan": "scan",
    "require_data_file": "scan",
    "NEWEST": "trees",
    "LostRows": "trees",
}


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_USED:
        module = __import__(f"{__name__}.{_LOADED_WHEN_USED[name]}", fromlist=(name,))
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
