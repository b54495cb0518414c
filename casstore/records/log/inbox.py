"""Messages that come from outside while a session is at work: each taken up once, for ever.

They wait in the session's queue. The holder of its lease delivers them: out of the queue, into
the log, and noted as delivered, in one commit. So an item was delivered exactly if its message is
there; a holder that dies leaves it in the queue.

    log.inbox   session, item → the number of its message
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Final

from casstore.errors import CasstoreError, InvalidInputError
from casstore.records.log.appending import placed
from casstore.records.log.data import NewMessage
from casstore.records.log.ground import At, Change, Ground
from casstore.records.log.messages import payload_of
from casstore.session.data import Claim, Lease
from casstore.session.queue import EARLIEST, JOIN, Queue
from casstore.session.records import Draft

_SOURCE: Final = "inbox:"
_MERGE: Final = "log inbox"


def put(ground: Ground, session: str, item: str, message: NewMessage) -> bool:
    """Let a message wait; False if the item waits already, or was ever delivered."""
    payload = payload_of(message)
    ground.at(session)
    if ground.inbox.find(session, item) is not None:
        return False
    name = secrets.token_hex(16)
    batch = Queue(ground.runtime, session).enqueue(
        [payload],
        source_key=_SOURCE + item,
        delivery=EARLIEST,
        slot=JOIN,
        merge_key=_MERGE,
        batch_id=name,
    )
    return batch.id == name


def deliver(ground: Ground, session: str, lease: Lease, limit: int) -> list[int]:
    """Put what waits at the end of the session, in order; the numbers of the messages."""
    if not isinstance(lease, Lease):
        raise InvalidInputError("the inbox is delivered by who holds the session's lease")
    queue = Queue(ground.runtime, session)
    claim = queue.claim(lease, limit=limit)
    if claim is None:
        return []
    if any(batch.merge_key != _MERGE for batch in claim.batches):
        # Work of another kind stands before it, for whoever does that.
        queue.abandon(claim)
        return []

    def decide(at: At) -> tuple[Change, list[int]]:
        return _delivered(ground, at, claim)

    try:
        return ground.change(session, decide, lease=lease)
    except BaseException:
        # Who tries again under this lease must find them. If they were delivered all the same there
        # is nothing to give back; if they cannot be given back, they are free when the lease ends.
        with suppress(CasstoreError):
            queue.abandon(claim)
        raise


def _delivered(ground: Ground, at: At, claim: Claim) -> tuple[Change, list[int]]:
    items = [str(batch.source_key).removeprefix(_SOURCE) for batch in claim.batches]
    known = ground.inbox.find_many([(at.session, item) for item in items])
    # One that was put again in the very moment of its delivery only leaves the queue.
    fresh = [
        (item, batch.items[0])
        for item, batch, row in zip(items, claim.batches, known, strict=True)
        if row is None
    ]
    change, numbers = placed(ground, at, [payload for _, payload in fresh])
    draft = Draft(ground.store)
    for (item, _), number in zip(fresh, numbers, strict=True):
        draft.expect(ground.inbox, (at.session, item), None)
        draft.put(ground.inbox, (at.session, item), number)
    return change._replace(beside=draft.as_write(), completes=[claim]), numbers
