"""The session log, awaited."""

from __future__ import annotations

from casstore.aio.faces import Face, awaited, iterated
from casstore.aio.store import AsyncStore
from casstore.records.log import SessionLog
from casstore.records.log.data import DEPTH_LIMIT


class AsyncSessionLog(Face[SessionLog]):
    """A ``SessionLog`` whose operations are awaited.

    What ``resume`` is given to run the calls with is called in a thread; what ``import_session``
    is given is read in one.

    >>> import asyncio, casstore.aio
    >>> from casstore.records.log import NewMessage
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         log = AsyncSessionLog(store)
    ...         await log.create("chat")
    ...         await log.append("chat", NewMessage("user", "hello"))
    ...         return [message.content async for message in log.messages("chat")]
    >>> asyncio.run(main())
    ['hello']
    """

    def __init__(self, store: AsyncStore, *, depth_limit: int = DEPTH_LIMIT) -> None:
        super().__init__(store.run, SessionLog(store.sync, depth_limit=depth_limit))

    create = awaited(SessionLog.create)
    adopt = awaited(SessionLog.adopt)
    find = awaited(SessionLog.find)
    get = awaited(SessionLog.get)
    sessions = iterated(SessionLog.sessions)
    children = awaited(SessionLog.children)
    update = awaited(SessionLog.update)
    archive = awaited(SessionLog.archive)
    finish = awaited(SessionLog.finish)
    close = awaited(SessionLog.close)
    append = awaited(SessionLog.append)
    extend = awaited(SessionLog.extend)
    active = awaited(SessionLog.active)
    messages = iterated(SessionLog.messages)
    message = awaited(SessionLog.message)
    fold = awaited(SessionLog.fold)
    folds = awaited(SessionLog.folds)
    prune = awaited(SessionLog.prune)
    send = awaited(SessionLog.send)
    start_round = awaited(SessionLog.start_round)
    counters = awaited(SessionLog.counters)
    pending = awaited(SessionLog.pending)
    set_pending = awaited(SessionLog.set_pending)
    given_pending = awaited(SessionLog.given_pending)
    resume = awaited(SessionLog.resume)
    abort = awaited(SessionLog.abort)
    record_usage = awaited(SessionLog.record_usage)
    usage = awaited(SessionLog.usage)
    totals = awaited(SessionLog.totals)
    prune_usage = awaited(SessionLog.prune_usage)
    claim_lease = awaited(SessionLog.claim_lease)
    renew_lease = awaited(SessionLog.renew_lease)
    release_lease = awaited(SessionLog.release_lease)
    put_inbox = awaited(SessionLog.put_inbox)
    deliver_inbox = awaited(SessionLog.deliver_inbox)
    export = iterated(SessionLog.export)
    import_session = awaited(SessionLog.import_session)
