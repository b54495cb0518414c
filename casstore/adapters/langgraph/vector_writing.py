"""Writes vectors of items that are stored already: for ``reindex`` and for imports.

A put writes the vectors of its item in its own transaction (``items``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from casstore.adapters.langgraph.item_records import ITEMS, MS_US, ItemRow, items_table
from casstore.adapters.langgraph.vector_index import VectorIndex
from casstore.adapters.langgraph.vector_records import INDEX_KEY, VectorTables
from casstore.errors import ConditionFailedError, ConflictError
from casstore.records.unique_times import UniqueTimes
from casstore.session.attempts import Attempts, transact
from casstore.session.records import Draft
from casstore.store import Store

#: The length of a tick. A write reserves whole ticks of times for its items, so these run ahead of
#: the clock only above 100,000 writes a second.
TICK_US: Final = 10
_TICKS_A_MS: Final = MS_US // TICK_US


def now_ticks(now_ms: int) -> int:
    """The time in ticks, by the engine's clock; within a millisecond, by that of this process."""
    within = time.time_ns() // (1000 * TICK_US) % _TICKS_A_MS
    return now_ms * _TICKS_A_MS + within


def describe(store: Store, index: VectorIndex, *, rebuild: bool = False) -> str:
    """Store the description of ``index`` for the store's vectors; returns their generation.

    If another description is stored, or with ``rebuild``, the generation is a new one, so that no
    stored vector counts.
    """
    tables = VectorTables(store)

    def change() -> str:
        found = tables.find_index()
        if found is not None and found.is_like(index.description) and not rebuild:
            return found.generation
        draft, made = Draft(store), index.new_description()
        draft.expect(tables.index, (INDEX_KEY,), None if found is None else found.record)
        tables.index.put(draft, made)
        draft.commit()
        return made.generation

    return transact("the vector index", change)


def put_vectors(
    store: Store,
    times: UniqueTimes,
    generation: str,
    items: Sequence[ItemRow],
    contents: Sequence[bytes],
) -> int:
    """Write the packed vectors of items, except items changed since; returns for how many.

    Empty content deletes the vectors of its item. ConflictError if the store's vectors are of
    another generation.
    """
    tables, table = VectorTables(store), items_table(store)
    attempts = Attempts("the vectors of items")
    while True:
        attempts.begin()
        draft, now_ms = Draft(store), store.engine.now_ms()
        keys = [item[:2] for item in items]
        moment = times.read(store, table, keys, [(tables.index, (INDEX_KEY,))])
        described = tables.index.decode_found(moment.records[-1])
        if described is None or described.generation != generation:
            raise ConflictError(
                "another process began to reindex with another embedder; stop one of them"
            )
        draft.expect(tables.index, (INDEX_KEY,), described.record)
        done = 0
        with times.reserve(draft, moment, now_ticks(now_ms)) as first:
            changed: set[tuple[str, str]] = set()
            for item, known, content in zip(items, moment.records[:-1], contents, strict=True):
                # An item that was put meanwhile has its vectors from that write.
                if known is None or ITEMS.read(known).updated_us != item.updated_us:
                    continue
                draft.expect(table, item[:2], known)
                if content:
                    changed.add(tables.put(draft, item, generation, content))
                    done += 1
                else:
                    tables.delete(draft, *item[:2])
            for bucket in changed:
                tables.mark(draft, bucket, first * TICK_US)
            try:
                draft.commit()
            except ConditionFailedError:
                continue
        return done
