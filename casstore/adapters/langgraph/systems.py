"""LangGraph's threads and its long-term memory as record systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any, Final

from langgraph.checkpoint.serde.types import _DeltaSnapshot

from casstore.adapters.langgraph.encoding import Raw, decode, load_raw
from casstore.adapters.langgraph.expiry import sweep
from casstore.adapters.langgraph.item_records import (
    CHANGES,
    DOT,
    INDEX,
    ITEMS,
    MS_US,
    TIMES_TABLE,
    VECTORS,
    VectorTables,
    delete_stale,
    items_table,
    labels,
)
from casstore.adapters.langgraph.layout import CHECKPOINTS, HEADS, TASKS, Channel, CheckpointRow
from casstore.adapters.langgraph.threads import Threads
from casstore.errors import CorruptionError
from casstore.format.printing import count
from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import (
    EntryStep,
    EntryText,
    RecordSystem,
    SystemEntry,
    content_texts,
    entry_keys,
)
from casstore.records.schema import tables_of
from casstore.records.schema_check import judges
from casstore.store import Store


class ThreadsSystem(RecordSystem):
    """Threads of LangGraph: checkpoints and pending writes."""

    name = "lg"
    version = 1
    title = "LangGraph threads"
    prefix = "langgraph"
    tables = tables_of(CHECKPOINTS, HEADS, TASKS)

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Threads, by id; each changed when its newest checkpoint was made."""
        threads = Threads(store)
        return [
            _thread_entry(threads, thread)
            for (thread,) in entry_keys(threads.checkpoints, 1, after=after, limit=limit)
        ]

    def find_entry(self, store: Store, entry: str) -> SystemEntry | None:
        """One thread; None if it has no checkpoint."""
        threads = Threads(store)
        return _thread_entry(threads, entry) if threads.namespaces(entry) else None

    def steps(self, store: Store, entry: str, *, limit: int = 100) -> Iterator[EntryStep]:
        """The checkpoints of a thread, newest first, with step, source and changed channels."""
        threads = Threads(store)
        for row in islice(threads.merged_rows(entry), limit):
            yield _step(threads, row)

    def content(self, store: Store, entry: str) -> dict[str, Any]:
        """The channels of the newest checkpoint, by namespace. Imports no class that they name."""
        threads = Threads(store)
        return {
            namespace: _channel_values(threads, row)
            for namespace in threads.namespaces(entry)
            if (row := threads.find_latest(entry, namespace)) is not None
        }

    def texts(self, store: Store, entry: str) -> Iterator[EntryText]:
        """The items of channels that are lists, and other channels, without names of classes."""
        return content_texts(_fields_alone(self.content(store, entry)))

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Decode each row."""
        threads = Threads(store)
        return judges(store, facts, [threads.checkpoints, threads.writes, threads.heads])


def _thread_entry(threads: Threads, thread: str) -> SystemEntry:
    tables = (threads.checkpoints, threads.writes, threads.heads)
    newest = [
        row
        for namespace in threads.namespaces(thread)
        if (row := threads.find_latest(thread, namespace)) is not None
    ]
    stored = threads.read(newest)
    times = [_made_at_ms(one.value) for one in stored]
    changed_at_ms = max([one for one in times if one is not None], default=None)
    step, _ = _step_and_source(stored[0].value) if stored else (None, None)
    # LangGraph's own channels, __start__ and branch:to:NODE, say nothing about the thread.
    own = ("__", "branch:")
    channels = sorted({name for one in stored for name in one.channels if not name.startswith(own)})
    title = "; ".join(
        [
            *([] if step is None else [f"step {step}"]),
            f"channels {', '.join(channels)}" if channels else "no channels",
            *([f"{len(newest)} namespaces"] if len(newest) > 1 else []),
        ]
    )
    size_bytes = sum([table.size_bytes(thread) for table in tables])
    return SystemEntry(thread, title, changed_at_ms, size_bytes)


def _step_and_source(value: Any) -> tuple[Any, Any]:
    """The step of a checkpoint, and what made it: input, loop or update."""
    meta = decode(value.get("meta"), load_raw)
    return (meta.get("step"), meta.get("source")) if isinstance(meta, dict) else (None, None)


def _step(threads: Threads, row: CheckpointRow) -> EntryStep:
    [stored] = threads.read([row])
    step, source = _step_and_source(stored.value)
    before: dict[str, Channel] = {}
    if row.parent is not None:
        parent = threads.find(row.place._replace(checkpoint=row.parent))
        if parent is not None:
            before = threads.read([parent])[0].channels
    unset = Channel(None, False, None)
    channels = stored.channels
    changed = sorted(
        [name for name, one in channels.items() if one.version != before.get(name, unset).version]
    )
    words = [f"step {step}", str(source), f"changed {', '.join(changed) or 'no channel'}"]
    if row.place.namespace:
        words.insert(0, f"namespace {row.place.namespace}")
    details = {
        "namespace": row.place.namespace,
        "parent": row.parent,
        "step": step,
        "source": source,
        "changed_channels": changed,
    }
    return EntryStep(row.place.checkpoint, _made_at_ms(stored.value), "; ".join(words), details)


def _channel_values(threads: Threads, row: CheckpointRow) -> dict[str, Any]:
    values = threads.values(threads.read([row])[0])
    return {name: _readable(decode(value, load_raw)) for name, value in values.items()}


def _readable(value: Any) -> Any:
    """State as plain values: an object becomes a map with its class and its fields."""
    if isinstance(value, Raw):
        try:
            found = load_raw(("msgpack", value.data))
        except CorruptionError:
            found = None
        if isinstance(found, list) and len(found) >= 3 and isinstance(found[1], str):
            return {"class": f"{found[0]}.{found[1]}", "fields": _readable(found[2])}
        return value.data if found is None else _readable(found)
    if isinstance(value, _DeltaSnapshot):
        return _readable(value.value)
    if isinstance(value, dict):
        return {str(key): _readable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(one) for one in value]
    return bytes(value) if isinstance(value, bytearray) else value


def _fields_alone(value: Any) -> Any:
    """What ``_readable`` returns, with the fields of objects in place of the objects."""
    if isinstance(value, dict):
        if value.keys() == {"class", "fields"}:
            return _fields_alone(value["fields"])
        return {key: _fields_alone(one) for key, one in value.items()}
    return [_fields_alone(one) for one in value] if isinstance(value, list) else value


def _made_at_ms(checkpoint: Any) -> int | None:
    """When a checkpoint was made, if LangGraph's text for it is a time."""
    try:
        return int(datetime.fromisoformat(checkpoint["ts"]).timestamp() * 1000)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


class MemorySystem(RecordSystem):
    """Items of LangGraph's long-term memory."""

    name = "lgm"
    version = 2
    title = "LangGraph memory"
    prefix = "langgraph-memory"
    tables = (*tables_of(ITEMS, VECTORS, CHANGES, INDEX), TIMES_TABLE)

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Namespaces that have items, each with the time of its latest update."""
        table, vectors = items_table(store), VectorTables(store).vectors
        found: list[SystemEntry] = []
        for (namespace,) in entry_keys(table, 1, after=after, limit=limit):
            times = [
                *table.read_each(table.scan(namespace), lambda item: table.decode(item).updated_us)
            ]
            title = f"{count(len(times), 'item')} in {DOT.join(labels(namespace))}"
            changed_at_ms = max(times) // MS_US if times else None
            size_bytes = table.size_bytes(namespace) + vectors.size_bytes(namespace)
            found.append(SystemEntry(namespace, title, changed_at_ms, size_bytes))
        return found

    def content(self, store: Store, entry: str) -> dict[str, Any]:
        """The items of a namespace, by key. Imports no class that they name."""
        table = items_table(store)
        items = table.read_each(table.scan(entry), table.decode)
        return {item.key: _readable(decode(item.value, load_raw)) for item in items}

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Decode each row; each row of vectors must have its item."""
        tables = VectorTables(store)
        return judges(
            store, facts, [items_table(store), tables.vectors, tables.changes, tables.index]
        )

    def expire(self, store: Store, progress: Callable[[int], None]) -> int:
        """Remove items that have expired."""
        return sweep(store)

    def after_copy(self, source: Store, target: Store) -> int:
        """Remove vectors and index rows of items that the copy has replaced."""
        return delete_stale(target)


THREADS: Final = ThreadsSystem()
MEMORY: Final = MemorySystem()
