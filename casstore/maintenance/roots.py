"""What rows keep alive: the digests from which everything that counts is reached.

    heads, history    the manifest of every session and revision, and its hidden nodes
    pins              what tags and pins name, until their time is up
    queue             the items of queued work
    attachments       blobs that were announced or committed
    records           what other systems' rows link to

A row that cannot be read stops the search: a root set that is not known is never taken for
an empty one (P6).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import Roots, Row
from casstore.records.rows import row_links
from casstore.session import attachments, keys, pins, queue
from casstore.session.heads import decode_head


def _of_head(row: Row, now_ms: int) -> Iterator[bytes]:
    head = decode_head(row.value)
    yield head.manifest
    if head.hidden is not None:
        yield head.hidden


def _of_revision(row: Row, now_ms: int) -> Iterator[bytes]:
    if not keys.is_label(row.key):
        yield from _of_head(row, now_ms)


def _of_pin(row: Row, now_ms: int) -> Iterator[bytes]:
    digest = pins.kept_digest(row.value, now_ms)
    if digest is not None:
        yield digest


def _of_batch(row: Row, now_ms: int) -> Iterator[bytes]:
    digest = queue.items_digest(row.key, row.value)
    if digest is not None:
        yield digest


def _of_attachment(row: Row, now_ms: int) -> Iterator[bytes]:
    digest = attachments.decode("", row.value).digest
    if digest is not None:
        yield digest


def _of_record(row: Row, now_ms: int) -> Iterator[bytes]:
    yield from row_links(row.value)


_NAMED: Final = {
    "heads": _of_head,
    "history": _of_revision,
    "pins": _of_pin,
    "queue": _of_batch,
    "attachments": _of_attachment,
    "records": _of_record,
}


def _named(table: str, row: Row, now_ms: int) -> Iterator[bytes]:
    return _NAMED[table](row, now_ms)


#: The roots of every store.
ROOTS: Final = Roots(tuple(_NAMED), _named)
