"""Reads a data file without LMDB, and finds everything in a damaged one that is provably valid.

The scan parses the pages itself, because LMDB crashes on damaged ones. It reads the tree of the
newest meta page first, then the tree of the other meta page (the state one commit earlier), then
the stray pages, which neither tree refers to and which may be of any age.

Objects and slabs are valid whatever their age: an id is never reused and a digest identifies the
bytes. A row on a stray page passes its checksum but may be outdated. It counts only where the
newest tree has lost the keys around it.

``PageFile`` reads single pages and whole trees, for checks. ``PageScan`` finds what salvage can
use: ``scan_pass`` reads the pages, ``found_rows`` and ``found_slabs`` hold the result, ``trees``
records the key ranges that are missing, ``keyless`` assigns keys to slabs and dictionaries that
lost theirs, and ``reachable`` marks the objects that some roots need.
"""

from __future__ import annotations

from casstore.engine.lmdb.page_scan.pages import Lost, PageFile, read_record
from casstore.engine.lmdb.page_scan.reachable import Marked
from casstore.engine.lmdb.page_scan.scan import PageScan, require_data_file
from casstore.engine.lmdb.page_scan.trees import NEWEST, LostRows

__all__ = [
    "NEWEST",
    "Lost",
    "LostRows",
    "Marked",
    "PageFile",
    "PageScan",
    "read_record",
    "require_data_file",
]
