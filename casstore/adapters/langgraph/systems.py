"""LangGraph's threads and its long-term memory as record systems."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from casstore.adapters.langgraph.item_records import DOT, MS_US, items_table, labels, stored_item
from casstore.adapters.langgraph.items import CasstoreStore
from casstore.adapters.langgraph.threads import Threads, checkpoint_row
from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_keys
from casstore.session.records import Record
from casstore.store import Store


class ThreadsSystem(RecordSystem):
    """Threads of LangGraph: checkpoints and pending writes."""

    name = "lg"
    version = 1
    title = "LangGraph threads"
    tables = ("lg.checkpoints", "lg.heads", "lg.writes")

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Threads, by id; each changed when its newest checkpoint was made."""
        threads = Threads(store)
        found: list[SystemEntry] = []
        for (thread,) in entry_keys(threads.checkpoints, 1, after=after, limit=limit):
            size_bytes = sum(
                [
                    table.size_bytes(thread)
                    for table in (threads.checkpoints, threads.writes, threads.heads)
                ]
            )
            newest = [
                row
                for namespace in threads.namespaces(thread)
                if (row := threads.find_latest(thread, namespace)) is not None
            ]
            times = [_made_at_ms(one.value) for one in threads.read(newest)]
            changed_at_ms = max([one for one in times if one is not None], default=None)
            title = f"{len(newest)} namespaces" if len(newest) > 1 else "one namespace"
            found.append(SystemEntry(thread, title, changed_at_ms, size_bytes))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Decode the row of each checkpoint."""
        return {Threads(store).checkpoints: _check_checkpoint}


def _check_checkpoint(record: Record) -> None:
    checkpoint_row(record)


def _made_at_ms(checkpoint: Any) -> int | None:
    """When a checkpoint was made, if LangGraph's text for it is a time."""
    try:
        return int(datetime.fromisoformat(checkpoint["ts"]).timestamp() * 1000)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


class MemorySystem(RecordSystem):
    """Items of LangGraph's long-term memory."""

    name = "lgm"
    version = 1
    title = "LangGraph memory"
    tables = ("lgm.items", "lgm.times")

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Namespaces that have items, each with the time of its latest update."""
        table = items_table(store)
        found: list[SystemEntry] = []
        for (namespace,) in entry_keys(table, 1, after=after, limit=limit):
            times = [
                *table.read_each(
                    table.scan(namespace), lambda item: stored_item(item).content.updated_us
                )
            ]
            title = f"{len(times)} items in {DOT.join(labels(namespace))}"
            changed_at_ms = max(times) // MS_US if times else None
            found.append(SystemEntry(namespace, title, changed_at_ms, table.size_bytes(namespace)))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Decode each item's record."""
        return {items_table(store): _check_item}

    def expire(self, store: Store, pulse: Callable[[int], None]) -> int:
        """Remove items that have expired."""
        return CasstoreStore(store).sweep_ttl()


def _check_item(record: Record) -> None:
    stored_item(record)


THREADS: Final = ThreadsSystem()
MEMORY: Final = MemorySystem()
