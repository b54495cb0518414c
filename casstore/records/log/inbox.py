"""The inbox: messages that arrive while an agent works on a session, each delivered once.

They wait in the session's queue. The holder of the session's lease delivers them: one commit
removes the item from the queue, appends the message and records the delivery. An item is delivered
exactly if its message exists; if the holder dies, the item stays in the queue.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import partial
from typing import Final

from casstore.errors import CasstoreError, InvalidInputError
from casstore.records.log.data import NewMessage
from casstore.records.log.messages import payload_of, placed
from casstore.records.log.tables import At, InboxRow, LogChange, LogTables
from casstore.session.data import Claim, Lease
from casstore.session.queue import EARLIEST, JOIN, Queue
from casstore.session.records import Draft

_SOURCE: Final = "inbox:"
_MERGE: Final = "log inbox"


def put(tables: LogTables, session: str, item: str, message: NewMessage) -> bool:
    """Queue a message; False if the item is queued already, or was delivered before."""
    payload = payload_of(message)
    tables.at(session)
    if tables.inbox.find(session, item) is not None:
        return False
    name = secrets.token_hex(16)
    batch = Queue(tables.runtime, session).enqueue(
        [payload],
        source_key=_SOURCE + item,
        delivery=EARLIEST,
        slot=JOIN,
        merge_key=_MERGE,
        batch_id=name,
    )
    return batch.id == name


def deliver(tables: LogTables, session: str, lease: Lease, limit: int) -> list[int]:
    """Append the queued messages to the session, in order; returns their numbers."""
    if not isinstance(lease, Lease):
        raise InvalidInputError(
            "lease must be the session's Lease: only its holder delivers the inbox"
        )
    queue = Queue(tables.runtime, session)
    claim = queue.claim(lease, limit=limit)
    if claim is None:
        return []
    if any(batch.merge_key != _MERGE for batch in claim.batches):
        # The first item in the queue is not of an inbox: release it for its own consumer.
        queue.abandon(claim)
        return []

    try:
        return tables.change(session, partial(_delivered, tables, claim), lease=lease)
    except BaseException:
        # Release the claim, so that a retry under this lease finds the items. If they were
        # delivered after all, there is nothing to release; if the release fails, they are free when
        # the lease ends.
        with suppress(CasstoreError):
            queue.abandon(claim)
        raise


def _delivered(tables: LogTables, claim: Claim, at: At) -> tuple[LogChange, list[int]]:
    items = [str(batch.source_key).removeprefix(_SOURCE) for batch in claim.batches]
    known = tables.inbox.find_many([(at.session, item) for item in items])
    # An item that was queued again during its delivery has a row, and is only dequeued.
    fresh = [
        (item, batch.items[0])
        for item, batch, row in zip(items, claim.batches, known, strict=True)
        if row is None
    ]
    change, numbers = placed(tables, at, [payload for _, payload in fresh])
    draft = Draft(tables.store)
    for (item, _), number in zip(fresh, numbers, strict=True):
        draft.expect(tables.inbox, (at.session, item), None)
        tables.inbox.put(draft, InboxRow(at.session, item, number))
    return change._replace(also=draft.as_write(), completes=[claim]), numbers
