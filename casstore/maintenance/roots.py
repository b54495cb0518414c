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

from collections.abc import Callable, Iterator

from casstore.engine.protocol import Row
from casstore.records.rows import row_links
from casstore.session import attachments, keys, pins, queue
from casstore.session.heads import decode_head


def find_roots(scan: Callable[[str], Iterator[Row]], now_ms: int) -> Iterator[bytes]:
    """Every digest that a row names; ``scan`` gives the rows of a table."""
    for table in ("heads", "history"):
        for row in scan(table):
            if table == "history" and keys.is_label(row.key):
                continue
            head = decode_head(row.value)
            yield head.manifest
            if head.hidden is not None:
                yield head.hidden
    for row in scan("pins"):
        digest = pins.kept_digest(row.value, now_ms)
        if digest is not None:
            yield digest
    for row in scan("queue"):
        digest = queue.items_digest(row.key, row.value)
        if digest is not None:
            yield digest
    for row in scan("attachments"):
        digest = attachments.decode("", row.value).digest
        if digest is not None:
            yield digest
    for row in scan("records"):
        yield from row_links(row.value)
