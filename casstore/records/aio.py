"""Record systems for asyncio: the same operations, awaited, on an ``AsyncStore`` that is open.

    async with casstore.aio.open("store") as store:
        log = AsyncSessionLog(store)
        await log.append("session", NewMessage("user", "hello"))
        async for message in log.messages("session"):
            ...

Each call runs in a thread of the store. If it is cancelled after a thread has begun it, it runs to
its end. The docstring of a method, with its example, is that of the synchronous method.
"""

from __future__ import annotations

from casstore.aio.proxies import Proxy, awaited, iterated, made, opened
from casstore.aio.store import AsyncStore
from casstore.records.lifecycles import AgentSession, KeyStore, Lifecycles, Ref
from casstore.records.lifecycles.kept_records import KeptRecords
from casstore.records.lifecycles.user_data import UserData
from casstore.records.lifecycles.working_state import WorkingState
from casstore.records.log import SessionLog
from casstore.records.log.data import DEPTH_LIMIT
from casstore.records.runs import Runs
from casstore.records.scoped import RunState, Scope, ScopedState

__all__ = [
    "AsyncAgentSession",
    "AsyncKeptRecords",
    "AsyncLifecycles",
    "AsyncRunState",
    "AsyncRuns",
    "AsyncScope",
    "AsyncScopedState",
    "AsyncSessionLog",
    "AsyncUserData",
]


class AsyncSessionLog(Proxy[SessionLog]):
    """A ``SessionLog`` whose operations are awaited.

    A thread runs the callback of ``resume``, and iterates over the entries of ``import_session``.

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
        super().__init__(store._pool, SessionLog(store.sync, depth_limit=depth_limit))

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


class AsyncRuns(Proxy[Runs]):
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
        super().__init__(store._pool, Runs(store.sync))

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


class AsyncScope(Proxy[Scope]):
    """A ``Scope`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         scope = AsyncScopedState(store).scope(context, "actor")
    ...         await scope.put("language", "de")
    ...         return (await scope.find("language")).value
    >>> asyncio.run(main())
    'de'
    """

    @property
    def key(self) -> str:
        """As ``Scope.key``."""
        return self.sync.key

    find = awaited(Scope.find)
    origin = awaited(Scope.origin)
    list_keys = awaited(Scope.list_keys)
    usage = awaited(Scope.usage)
    put = awaited(Scope.put)
    swap = awaited(Scope.swap)
    prepare_put = awaited(Scope.prepare_put)
    delete = awaited(Scope.delete)


class AsyncRunState(Proxy[RunState]):
    """A ``RunState`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         state = AsyncScopedState(store)
    ...         await state.begin_run("run-1", context, caller="me/agent")
    ...         reached = await state.run("run-1", caller="me/agent")
    ...         return (await reached.put("actor", "language", "de")).value
    >>> asyncio.run(main())
    'de'
    """

    scope = made(RunState.scope, AsyncScope)
    snapshot = awaited(RunState.snapshot)
    find = awaited(RunState.find)
    put = awaited(RunState.put)
    swap = awaited(RunState.swap)
    delete = awaited(RunState.delete)
    list_keys = awaited(RunState.list_keys)


class AsyncScopedState(Proxy[ScopedState]):
    """``ScopedState`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         state = AsyncScopedState(store)
    ...         await state.scope(context, "actor").put("language", "de")
    ...         return (await state.snapshot(context))["actor"]
    >>> asyncio.run(main())
    {'language': 'de'}
    """

    def __init__(self, store: AsyncStore) -> None:
        super().__init__(store._pool, ScopedState(store.sync))

    scope = made(ScopedState.scope, AsyncScope)
    update = awaited(ScopedState.update)
    snapshot = awaited(ScopedState.snapshot)
    begin_run = awaited(ScopedState.begin_run)
    find_run = awaited(ScopedState.find_run)
    renew_run = awaited(ScopedState.renew_run)
    end_run = awaited(ScopedState.end_run)
    run = opened(ScopedState.run, AsyncRunState)
    reset = awaited(ScopedState.reset)
    prepare_reset = awaited(ScopedState.prepare_reset)
    generation = awaited(ScopedState.generation)
    generations = awaited(ScopedState.generations)
    drop_history = awaited(ScopedState.drop_history)
    erase_actor = awaited(ScopedState.erase_actor)
    list_state = iterated(ScopedState.list_state)
    delete_state = awaited(ScopedState.delete_state)


class AsyncAgentSession(Proxy[AgentSession]):
    """An ``AgentSession`` whose operations are awaited; leaving ``async with`` closes it.

    Working state is in memory and is not awaited. ``checkpoint`` reads it in a thread: do not
    change it before that call returns.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         async with await AsyncLifecycles(store).create_session("s1") as work:
    ...             work.working.set("draft", "a text")
    ...             return (await work.checkpoint("first")).number
    >>> asyncio.run(main())
    1
    """

    @property
    def id(self) -> str:
        """As ``AgentSession.id``."""
        return self.sync.id

    @property
    def working(self) -> WorkingState:
        """As ``AgentSession.working``."""
        return self.sync.working

    def close(self) -> None:
        """As ``AgentSession.close``: it drops the working state, and reads nothing."""
        self.sync.close()

    async def __aenter__(self) -> AsyncAgentSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    checkpoint = awaited(AgentSession.checkpoint)
    find_checkpoint = awaited(AgentSession.find_checkpoint)
    get_checkpoint = awaited(AgentSession.get_checkpoint)
    checkpoints = iterated(AgentSession.checkpoints)
    delete_checkpoint = awaited(AgentSession.delete_checkpoint)


class AsyncUserData(Proxy[UserData]):
    """``UserData`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         life = AsyncLifecycles(store)
    ...         await life.users.put("anna", "language", "en")
    ...         return await life.users.get("anna", "language")
    >>> asyncio.run(main())
    'en'
    """

    def ref(self, user: str, name: str) -> Ref:
        """As ``UserData.ref``, which reads nothing."""
        return self.sync.ref(user, name)

    get = awaited(UserData.get)
    find_many = awaited(UserData.find_many)
    names = iterated(UserData.names)
    written_at_ms = awaited(UserData.written_at_ms)
    put = awaited(UserData.put)
    put_many = awaited(UserData.put_many)
    delete = awaited(UserData.delete)
    erase = awaited(UserData.erase)
    erase_hashed = awaited(UserData.erase_hashed)
    destroy_keys = awaited(UserData.destroy_keys)


class AsyncKeptRecords(Proxy[KeptRecords]):
    """``KeptRecords`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> from casstore.records.lifecycles import Annotation
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         life = AsyncLifecycles(store)
    ...         about = Annotation(["learned_context"], subjects=["anna"])
    ...         await life.records.put("facts", "city", "Ulm", about)
    ...         return [record.ref.name async for record in life.records.list("facts")]
    >>> asyncio.run(main())
    ['city']
    """

    put = awaited(KeptRecords.put)
    get = awaited(KeptRecords.get)
    list = iterated(KeptRecords.list)
    delete = awaited(KeptRecords.delete)


class AsyncLifecycles(Proxy[Lifecycles]):
    """``Lifecycles`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         life = AsyncLifecycles(store)
    ...         await life.create_session("s1", user="anna")
    ...         return [name async for name in life.sessions(user="anna")]
    >>> asyncio.run(main())
    ['s1']
    """

    def __init__(
        self, store: AsyncStore, *, keys: KeyStore | None = None, secret: bytes | None = None
    ) -> None:
        super().__init__(store._pool, Lifecycles(store.sync, keys=keys, secret=secret))
        self.users = AsyncUserData(store._pool, self.sync.users)
        self.records = AsyncKeptRecords(store._pool, self.sync.records)

    create_session = opened(Lifecycles.create_session, AsyncAgentSession)
    open_session = opened(Lifecycles.open_session, AsyncAgentSession)
    restore = opened(Lifecycles.restore, AsyncAgentSession)
    sessions = iterated(Lifecycles.sessions)
    is_for = awaited(Lifecycles.is_for)
    delete_session = awaited(Lifecycles.delete_session)
    find_note = awaited(Lifecycles.find_note)
    hold = awaited(Lifecycles.hold)
    seal = awaited(Lifecycles.seal)
    lift_hold = awaited(Lifecycles.lift_hold)
    lift_seal = awaited(Lifecycles.lift_seal)
    verify_seal = awaited(Lifecycles.verify_seal)
    remove = awaited(Lifecycles.remove)
