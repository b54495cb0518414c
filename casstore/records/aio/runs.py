"""Threads and runs, awaited."""

from __future__ import annotations

from casstore.aio.faces import Face, awaited, iterated
from casstore.aio.store import AsyncStore
from casstore.records.runs import Runs


class AsyncRuns(Face[Runs]):
    """``Runs`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         runs = AsyncRuns(store)
    ...         await runs.create_thread("t", "helper")
    ...         return (await runs.create_run("t", "r", "helper", "stream")).state
    >>> asyncio.run(main())
    'running'
    """

    def __init__(self, store: AsyncStore) -> None:
        super().__init__(store.run, Runs(store.sync))

    apply = awaited(Runs.apply)
    commit = awaited(Runs.commit)
    create_thread = awaited(Runs.create_thread)
    find_thread = awaited(Runs.find_thread)
    threads = awaited(Runs.threads)
    delete_thread = awaited(Runs.delete_thread)
    finish_deletions = awaited(Runs.finish_deletions)
    create_run = awaited(Runs.create_run)
    set_state = awaited(Runs.set_state)
    find_run = awaited(Runs.find_run)
    get_run = awaited(Runs.get_run)
    runs = awaited(Runs.runs)
    thread_runs = awaited(Runs.thread_runs)
    protected_runs = iterated(Runs.protected_runs)
    protected_threads = awaited(Runs.protected_threads)
    renew_protections = awaited(Runs.renew_protections)
    append_event = awaited(Runs.append_event)
    find_event = awaited(Runs.find_event)
    events = awaited(Runs.events)
    append_message = awaited(Runs.append_message)
    messages = awaited(Runs.messages)
    request_approval = awaited(Runs.request_approval)
    resolve_approval = awaited(Runs.resolve_approval)
    expire_approval = awaited(Runs.expire_approval)
    find_approval = awaited(Runs.find_approval)
    approvals = awaited(Runs.approvals)
    save_request = awaited(Runs.save_request)
    find_request = awaited(Runs.find_request)
    requests = awaited(Runs.requests)
    clear_request = awaited(Runs.clear_request)
    save_intent = awaited(Runs.save_intent)
    find_intent = awaited(Runs.find_intent)
    intents = awaited(Runs.intents)
    begin_attempt = awaited(Runs.begin_attempt)
    clear_intent = awaited(Runs.clear_intent)
    put_artifact = awaited(Runs.put_artifact)
    find_artifact = awaited(Runs.find_artifact)
    read_artifact = awaited(Runs.read_artifact)
    artifacts = awaited(Runs.artifacts)
