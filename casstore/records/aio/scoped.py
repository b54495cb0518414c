"""Scoped state, awaited."""

from __future__ import annotations

from casstore.aio.faces import Face, awaited, iterated, made, opened
from casstore.aio.store import AsyncStore
from casstore.records.scoped import RunState, Scope, ScopedState


class AsyncScope(Face[Scope]):
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


class AsyncRunState(Face[RunState]):
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


class AsyncScopedState(Face[ScopedState]):
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
        super().__init__(store.run, ScopedState(store.sync))

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
