"""What tests of casstore look at, or damage, that no public call shows or allows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from casstore.engine.lmdb import sharing
from casstore.engine.memory import MemoryEngine

if TYPE_CHECKING:
    from casstore.aio import AsyncStore


def open_places() -> list[str]:
    """The directories of the stores that ``casstore.open`` has opened and nothing has closed."""
    return list(sharing._shared)


def replace_object(engine: MemoryEngine, digest: bytes, data: bytes) -> bytes:
    """Damage an object: it has other content under the same digest. Returns the old content."""
    held = engine._objects[digest]
    engine._objects[digest] = held._replace(data=data)
    return held.data


def copy_contents(source: MemoryEngine, target: MemoryEngine) -> None:
    """Give ``target`` the objects, with their ids, and the rows of ``source``, and no others."""
    target._next_id = source._next_id
    target._objects = dict(source._objects)
    target._rows = {table: dict(rows) for table, rows in source._rows.items()}


class WaitingTasks(NamedTuple):
    """The tasks that wait for changes of a store on one event loop."""

    number: int
    #: True if all have looked at the store and only a change or a timeout wakes them.
    are_asleep: bool
    #: The descriptor of their watch; None while it is being opened.
    descriptor: int | None


def waiting_tasks(store: AsyncStore) -> WaitingTasks | None:
    """The tasks that wait on the running event loop; None if there are none."""
    changes = store._pool._changes
    own = None if changes is None else changes._by_loop.get(asyncio.get_running_loop())
    if own is None:
        return None
    are_asleep = all(bool(event._waiters) for event in own._waiting)
    return WaitingTasks(len(own._waiting), are_asleep, own._reading)


def has_waiting_tasks(store: AsyncStore) -> bool:
    """True if any task waits for changes of a store, on any event loop."""
    return store._pool._changes is not None and bool(store._pool._changes._by_loop)
