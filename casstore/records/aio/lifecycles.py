"""The three lifecycles, awaited."""

from __future__ import annotations

from types import TracebackType

from casstore.aio.faces import Face, awaited, iterated, opened
from casstore.aio.store import AsyncStore
from casstore.records.lifecycles import AgentSession, KeyStore, Lifecycles, Ref
from casstore.records.lifecycles.kept_records import KeptRecords
from casstore.records.lifecycles.user_data import UserData
from casstore.records.lifecycles.working_state import WorkingState


class AsyncAgentSession(Face[AgentSession]):
    """An ``AgentSession`` whose operations are awaited; leaving ``async with`` closes it.

    Working state is in memory and needs no waiting. It is promoted in a thread: what a
    checkpoint is to hold must not be changed until that is done.

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
        """As ``AgentSession.close``: forgets the working state, and waits for nothing."""
        self.sync.close()

    async def __aenter__(self) -> AsyncAgentSession:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    checkpoint = awaited(AgentSession.checkpoint)
    find_checkpoint = awaited(AgentSession.find_checkpoint)
    get_checkpoint = awaited(AgentSession.get_checkpoint)
    checkpoints = iterated(AgentSession.checkpoints)
    delete_checkpoint = awaited(AgentSession.delete_checkpoint)


class AsyncUserData(Face[UserData]):
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
        """As ``UserData.ref``, at once."""
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


class AsyncKeptRecords(Face[KeptRecords]):
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


class AsyncLifecycles(Face[Lifecycles]):
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
        super().__init__(store.run, Lifecycles(store.sync, keys=keys, secret=secret))
        self.users = AsyncUserData(store.run, self.sync.users)
        self.records = AsyncKeptRecords(store.run, self.sync.records)

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
