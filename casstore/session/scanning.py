"""Rows of a table in order of their keys, fetched a page at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import Engine, Row

_PAGE: Final = 256


def scan(engine: Engine, table: str, start: bytes, stop: bytes | None) -> Iterator[Row]:
    """The rows with ``start <= key < stop`` (None: to the end). Each page is its own snapshot."""
    while True:
        page = engine.scan_rows(table, start=start, stop=stop, limit=_PAGE)
        yield from page
        if len(page) < _PAGE:
            return
        start = page[-1].key + b"\0"
