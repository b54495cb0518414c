"""Entries of the journal in pages of a damaged store, and the rows that they amount to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from casstore.engine.lmdb.excavation.ranks import SAVED_TABLES
from casstore.engine.lmdb.journal import Entry as JournalEntry
from casstore.engine.lmdb.journal import open_entry
from casstore.engine.lmdb.pages import Entry, PageFile
from casstore.errors import CorruptionError

_KEY_BYTES: Final = 8
_SAVED: Final = frozenset(SAVED_TABLES)


def find_entry(file: PageFile, entry: Entry) -> tuple[JournalEntry, bytes] | None:
    """What an entry of a page holds, and its hash, if it is one of a journal and is proven."""
    stored = file.value(entry)
    if stored is None or len(entry.key) != _KEY_BYTES:
        return None
    try:
        opened, _, hashed = open_entry(entry.key, stored)
    except CorruptionError:
        return None
    return opened, hashed


def fold(entries: Mapping[bytes, JournalEntry]) -> dict[tuple[str, bytes], bytes | None]:
    """The rows that entries of a journal amount to, in the tables that are worth saving."""
    rows: dict[tuple[str, bytes], bytes | None] = {}
    for _, entry in sorted(entries.items()):
        rows.update({place: value for place, value in entry.rows.items() if place[0] in _SAVED})
    return rows
