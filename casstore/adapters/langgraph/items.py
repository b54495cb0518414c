"""``CasstoreStore``: the long-term memory of a LangGraph application, in the same store.

An item is a record under its namespace and key (``item_records``).
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    validate_op_namespace,
)

from casstore import store as stores
from casstore.adapters.langgraph import encoding
from casstore.adapters.langgraph.filters import matches
from casstore.adapters.langgraph.item_records import (
    MS_US,
    TIMES_TABLE,
    ItemContent,
    StoredItem,
    items_table,
    joined,
    labels,
    lasting_us,
    stored_item,
    time_of,
)
from casstore.adapters.langgraph.serializer import AllowedType, StrictSerializer
from casstore.aio.pool import StorePool
from casstore.aio.proxies import StoreClient, awaited
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    NoVectorIndexError,
)
from casstore.records.unique_times import UniqueTimes
from casstore.session.arguments import check_count
from casstore.session.attempts import Attempts
from casstore.session.records import Draft, Record, Table
from casstore.store import Store

_SWEEP_BATCH: Final = 1000
# A write reserves whole ticks: a hundred thousand writes a second before times run ahead.
_TICK_US: Final = 10
_TICKS_A_MS: Final = MS_US // _TICK_US
# Rows that are read at once where the first will mostly do.
_FEW: Final = 8

Changed = TypeVar("Changed")


class CasstoreStore(StoreClient, BaseStore):
    """A LangGraph store: namespaces, filters, time to live. Sync and async in one.

    A batch is one write, all or nothing; what it reads is from before it. There is no vector
    index: the constructor's ``index``, or searching by ``query``, raises NoVectorIndexError. The
    ``index`` of ``put`` has no effect, as LangGraph specifies for a store without an index.

    >>> memory = CasstoreStore(store)
    >>> memory.put(("users", "ada"), "colour", {"likes": "blue"})
    >>> memory.get(("users", "ada"), "colour").value
    {'likes': 'blue'}
    """

    supports_ttl = True

    def __init__(
        self,
        store: Store,
        *,
        ttl: TTLConfig | None = None,
        index: IndexConfig | None = None,
        allowed: Collection[AllowedType] = (),
    ) -> None:
        self._begin(StorePool.borrowing(store), ttl, index, allowed)

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        durability: str = "full",
        *,
        ttl: TTLConfig | None = None,
        index: IndexConfig | None = None,
        allowed: Collection[AllowedType] = (),
        **options: Any,
    ) -> CasstoreStore:
        """A LangGraph store on the store at ``path``, which it opens and closes itself.

        Use it in ``with`` or ``async with``, or call ``close``. Options as for ``casstore.open``.
        """
        made = cls.__new__(cls)
        opener = partial(stores.open, path, durability, **options)
        made._begin(StorePool(opener, on_demand=True), ttl, index, allowed)
        return made

    def _begin(
        self,
        pool: StorePool,
        ttl: TTLConfig | None,
        index: IndexConfig | None,
        allowed: Collection[AllowedType],
    ) -> None:
        if index is not None:
            raise NoVectorIndexError("an index was asked for")
        self.ttl_config = ttl
        self._pool = pool
        self._serde = StrictSerializer(allowed)
        self._times = UniqueTimes(TIMES_TABLE)

    # --- LangGraph's two methods; all others call them ------------------------------------

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Run operations: reads first, in order, then all writes at once."""
        asked = list(ops)
        for op in asked:
            validate_op_namespace(op)
        results = [self._read(op) for op in asked]
        # Told twice in one batch, the last counts.
        self._write({(op.namespace, op.key): op for op in asked if isinstance(op, PutOp)})
        return results

    abatch = awaited(batch)

    # --- time to live -------------------------------------------------------------------

    def sweep_ttl(self) -> int:
        """Remove items whose time is up, which nobody sees any more; how many."""
        table, store = self._table, self._pool.store
        swept = 0
        late: list[Record] = []
        for item in self._items(table.scan()):
            if not item.is_live(store.engine.now_ms()):
                late.append(item.record)
            if len(late) == _SWEEP_BATCH:
                swept += self._remove(late)
                late = []
        return swept + self._remove(late)

    asweep_ttl = awaited(sweep_ttl)

    def _remove(self, records: list[Record]) -> int:
        """Remove records that are still as they were; how many."""
        table = self._table

        def change(draft: Draft, record: Record) -> None:
            draft.expect(table, record.key, record)
            draft.delete(table, record.key)

        return self._change_unchanged(records, change)

    def _change_unchanged(
        self, items: Sequence[Changed], change: Callable[[Draft, Changed], None]
    ) -> int:
        """Change those that nobody else has changed, in one write if possible; how many.

        Who is left out was put or read again meanwhile, and its time began anew then.
        """
        draft = Draft(self._pool.store)
        for item in items:
            change(draft, item)
        try:
            draft.commit()
        except ConditionFailedError:
            if len(items) == 1:
                return 0
            return sum([self._change_unchanged([item], change) for item in items])
        return len(items)

    # --- reading ------------------------------------------------------------------------

    @property
    def _table(self) -> Table:
        return items_table(self._pool.store)

    def _read(self, op: Op) -> Result:
        if isinstance(op, GetOp):
            return self._get(op)
        if isinstance(op, SearchOp):
            return self._search(op)
        if isinstance(op, ListNamespacesOp):
            return self._namespaces(op)
        if isinstance(op, PutOp):
            return None
        raise InvalidInputError(f"no operation of a store: {type(op).__name__}")

    def _get(self, op: GetOp) -> Item | None:
        record = self._table.find(joined(op.namespace), op.key)
        if record is None:
            return None
        item = stored_item(record)
        if not item.is_live(self._pool.store.engine.now_ms()):
            return None
        if op.refresh_ttl:
            self._refresh([item])
        return Item(
            value=self._value(item),
            key=op.key,
            namespace=op.namespace,
            created_at=time_of(item.content.created_us),
            updated_at=time_of(item.content.updated_us),
        )

    def _search(self, op: SearchOp) -> list[SearchItem]:
        if op.query:
            raise NoVectorIndexError("a search by meaning was asked for")
        check_count(op.limit, "a limit")
        check_count(op.offset, "an offset")
        now_ms = self._pool.store.engine.now_ms()
        found = (
            item
            for item in self._items(self._table.scan_starting(joined(op.namespace_prefix)))
            if item.is_live(now_ms) and (not op.filter or matches(self._value(item), op.filter))
        )
        # The latest first; only as many are kept as are asked for.
        wanted = heapq.nsmallest(op.offset + op.limit, found, key=_latest_first)[op.offset :]
        if op.refresh_ttl:
            self._refresh(wanted)
        return [
            SearchItem(
                namespace=item.namespace,
                key=item.record.key[1],
                value=self._value(item),
                created_at=time_of(item.content.created_us),
                updated_at=time_of(item.content.updated_us),
            )
            for item in wanted
        ]

    def _namespaces(self, op: ListNamespacesOp) -> list[tuple[str, ...]]:
        check_count(op.limit, "a limit")
        check_count(op.offset, "an offset")
        found: set[tuple[str, ...]] = set()
        now_ms = self._pool.store.engine.now_ms()
        for (text,) in self._table.groups(1):
            namespace = labels(text)
            shown = namespace if op.max_depth is None else namespace[: op.max_depth]
            if (
                shown not in found
                and all(_is_match(each, namespace) for each in op.match_conditions or ())
                and self._is_inhabited(text, now_ms)
            ):
                found.add(shown)
        return sorted(found)[op.offset : op.offset + op.limit]

    def _is_inhabited(self, text: str, now_ms: int) -> bool:
        """Has a namespace an item that is still seen? Mostly the first one is."""
        items = self._items(self._table.scan(text, page=_FEW))
        return any(item.is_live(now_ms) for item in items)

    def _items(self, records: Iterable[Record]) -> Iterator[StoredItem]:
        return map(stored_item, records)

    def _value(self, item: StoredItem) -> dict[str, Any]:
        value = encoding.decode(item.content.value, self._serde.loads_typed)
        if type(value) is not dict:
            raise CorruptionError(f"item {item.record.key} is damaged")
        return value

    # --- writing ------------------------------------------------------------------------

    def _write(self, puts: Mapping[tuple[tuple[str, ...], str], PutOp]) -> None:
        if not puts:
            return
        store, table = self._pool.store, self._table
        keys = [(joined(namespace), key) for namespace, key in puts]
        values = [
            None if op.value is None else encoding.encode(dict(op.value), self._serde.dumps_typed)
            for op in puts.values()
        ]
        # Each item has a time of its own, in the order of the batch.
        ticks = -(-sum(value is not None for value in values) // _TICK_US)
        attempts = Attempts("the items of a batch")
        while True:
            attempts.begin()
            draft, now_ms = Draft(store), store.engine.now_ms()
            moment = self._times.read(store, table, keys)
            with self._times.reserve(draft, moment, _now_ticks(now_ms), count=ticks) as first:
                rows = zip(keys, values, puts.values(), moment.records, strict=True)
                times_us = iter(range(first * _TICK_US, (first + ticks) * _TICK_US))
                for key, value, op, known in rows:
                    draft.expect(table, key, known)
                    if value is None:
                        draft.delete(table, key)
                        continue
                    updated_us = next(times_us)
                    before = None if known is None else stored_item(known)
                    if before is not None and before.is_live(now_ms):
                        created_us = before.content.created_us
                    else:
                        created_us = updated_us
                    content = ItemContent(value, created_us, updated_us, op.ttl)
                    draft.put(table, key, _begun(content, now_ms * MS_US).packed())
                try:
                    draft.commit()
                except ConditionFailedError:
                    continue
            return

    def _refresh(self, items: Collection[StoredItem]) -> None:
        """Let the time of items that were read begin anew."""
        table, now_us = self._table, self._pool.store.engine.now_ms() * MS_US

        def change(draft: Draft, item: StoredItem) -> None:
            draft.expect(table, item.record.key, item.record)
            draft.put(table, item.record.key, _begun(item.content, now_us).packed())

        timed = [item for item in items if item.content.ttl_minutes is not None]
        self._change_unchanged(timed, change)


def _now_ticks(now_ms: int) -> int:
    """Now, by the engine's clock and, within its millisecond, by the clock of this process."""
    within = time.time_ns() // (1000 * _TICK_US) % _TICKS_A_MS
    return now_ms * _TICKS_A_MS + within


def _latest_first(item: StoredItem) -> tuple[int, tuple[str, ...]]:
    return -item.content.updated_us, item.record.key


def _begun(content: ItemContent, now_us: int) -> ItemContent:
    """An item whose time to live, if it has one, begins now."""
    ttl = content.ttl_minutes
    if ttl is None:
        return content
    expires_us = now_us + lasting_us(ttl)
    return content._replace(ttl_minutes=float(ttl), expires_us=expires_us)


def _is_match(condition: MatchCondition, labels: tuple[str, ...]) -> bool:
    path = tuple(condition.path)
    if len(labels) < len(path):
        return False
    if condition.match_type == "prefix":
        part = labels[: len(path)]
    elif condition.match_type == "suffix":
        part = labels[len(labels) - len(path) :]
    else:
        raise InvalidInputError(
            f"namespaces match by prefix or suffix, not {condition.match_type!r}"
        )
    return all(want in ("*", label) for want, label in zip(path, part, strict=True))
