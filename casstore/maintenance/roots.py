"""The root set of gc: the digests that rows name.

    heads, history    the manifest of every session and revision, and its hidden nodes
    pins              what tags and pins name, until their rows are removed
    queue             the items of queued work
    attachments       blobs that were announced or committed
    records           what other systems' rows link to

The root set does not depend on the clock. An expired pin keeps its object until its row is removed,
by a write with the condition that the pin has expired (``rows``). So the row is always
removed before the object, and a clock that is set back leaves no row that names a missing object.

A row that cannot be read raises CorruptionError: gc must not run with a part of the roots (P6).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import Engine, Roots, Row, RowKey
from casstore.maintenance.rows import decoded
from casstore.session import attachments, keys, pins, queue
from casstore.session.records import row_links, row_name
from casstore.session.scanning import scan
from casstore.session.state import decode_head

_SEQ_BYTES: Final = 8


def _of_head(row: Row) -> Iterator[bytes]:
    head = decode_head(row.value)
    yield head.manifest
    if head.hidden is not None:
        yield head.hidden


def _of_revision(row: Row) -> Iterator[bytes]:
    if not keys.is_label(row.key):
        yield from _of_head(row)


def _of_pin(row: Row) -> Iterator[bytes]:
    yield pins.decode_pin(row.value).digest


def _of_batch(row: Row) -> Iterator[bytes]:
    digest = queue.items_digest(row.key, row.value)
    if digest is not None:
        yield digest


def _of_attachment(row: Row) -> Iterator[bytes]:
    digest = attachments.decode("", row.value).digest
    if digest is not None:
        yield digest


def _of_record(row: Row) -> Iterator[bytes]:
    yield from row_links(row.value)


_NAMED: Final = {
    "heads": _of_head,
    "history": _of_revision,
    "pins": _of_pin,
    "queue": _of_batch,
    "attachments": _of_attachment,
    "records": _of_record,
}


def _named(table: str, row: Row) -> Iterator[bytes]:
    return _NAMED[table](row)


#: The roots of every store.
ROOTS: Final = Roots(tuple(_NAMED), _named)


def live_roots(now_ms: int) -> Roots:
    """The roots without expired pins: for dry runs, which remove no pins before marking."""

    def named(table: str, row: Row) -> Iterator[bytes]:
        if table != "pins" or pins.kept_digest(row.value, now_ms) is not None:
            yield from _named(table, row)

    return Roots(ROOTS.tables, named)


def digests_in(table: str, row: Row, roots: Roots = ROOTS) -> list[bytes]:
    """The digests that a row names; the error for a damaged row names it."""
    return decoded(RowKey(table, row.key), row, lambda row: list(roots.named(table, row)))


def scan_roots(engine: Engine, roots: Roots) -> Iterator[tuple[str, Row, bytes]]:
    """Every digest that a row names: the table, the row, the digest."""
    for table in roots.tables:
        for row in scan(engine, table, b"", None):
            for digest in digests_in(table, row, roots):
                yield table, row, digest


def kept_name(table: str, row: Row) -> str:
    """How reports name a row that keeps objects; a revision is named by its session instead."""
    if table == "pins":
        return pins.name_of(row.value)
    if table == "queue":
        return f"batch {int.from_bytes(row.key[-_SEQ_BYTES:], 'big')}"
    if table == "attachments":
        return f"attachment {attachments.decode('', row.value).id!r}"
    return row_name(row.key, row.value)
