"""``CasstoreStore``: the long-term memory of a LangGraph application, in the same store.

An item is a record under its namespace and key (``item_records``). With an index, the vectors of an
item are written with it (``item_records``) and searched with numpy (``vector_search``).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

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
from langgraph.store.base.batch import AsyncBatchedBaseStore

from casstore import store as stores
from casstore.adapters.langgraph import encoding, expiry
from casstore.adapters.langgraph.collecting import Collectors, collected
from casstore.adapters.langgraph.filters import matches
from casstore.adapters.langgraph.item_records import (
    INDEX_KEY,
    ITEMS,
    TICK_US,
    TIMES_TABLE,
    ItemRow,
    VectorTables,
    items_table,
    joined,
    labels,
    latest_keys,
    now_ticks,
    time_of,
)
from casstore.adapters.langgraph.serializer import AllowedType, StrictSerializer
from casstore.adapters.langgraph.vector_index import (
    Embedded,
    VectorIndex,
    fields_of,
    packed,
)
from casstore.aio.pool import StorePool
from casstore.aio.proxies import StoreClient, awaited
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    NoVectorIndexError,
)
from casstore.records.schema import RowTable
from casstore.records.unique_times import UniqueTimes
from casstore.session.arguments import check_count, check_flag
from casstore.session.attempts import Attempts
from casstore.session.records import Draft, Record
from casstore.store import Store

if TYPE_CHECKING:
    from casstore.adapters.langgraph.vector_search import SimilaritySearch

# The most rows read at once, and how many are read where the first is usually sufficient.
_PAGE: Final = 1000
_FEW: Final = 8
# How many items reindex embeds at once.
_EMBED_BATCH: Final = 100


class CasstoreStore(StoreClient, BaseStore):
    """A LangGraph store: namespaces, filters, semantic search, time to live. Sync and async in one.

    The puts of a batch are one write, all or nothing; its other operations run before that write.
    ``index`` configures semantic search as for LangGraph's stores, and needs numpy. Without it,
    ``search`` ignores its ``query``, and ``put`` its ``index``.

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
        """A LangGraph store on a store at ``path`` that it opens and closes.

        Use it in ``with`` or ``async with``, or call ``close``. Options as for ``casstore.open``.
        """
        made = cls.__new__(cls)
        opener = partial(stores.open, path, durability, **options)
        made._begin(StorePool(opener, on_demand=True), ttl, index, allowed)
        return made

    #: The name that LangGraph's own stores have for ``from_path``.
    from_conn_string = from_path

    def setup(self) -> None:
        """Open the store; with an index on PostgreSQL, add pgvector if the server has it.

        Nothing else is needed: LangGraph's own stores create their tables here.
        """
        self._pool.open_blocking()
        if self._similarity is not None:
            self._similarity.server(self._pool.store, install=True)

    asetup = awaited(setup)

    def close(self) -> None:
        """Stop the sweeper, and close the store after the calls under way."""
        self.stop_ttl_sweeper()
        super().close()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.astop_ttl_sweeper()
        await super().__aexit__(kind, exc, trace)

    def _begin(
        self,
        pool: StorePool,
        ttl: TTLConfig | None,
        index: IndexConfig | None,
        allowed: Collection[AllowedType],
    ) -> None:
        self._index: VectorIndex | None = None
        self._similarity: SimilaritySearch | None = None
        if index:
            # Needs numpy.
            from casstore.adapters.langgraph.vector_search import SimilaritySearch

            self._index = VectorIndex(index)
            self._similarity = SimilaritySearch(self._index)
        self.index_config = index
        self.embeddings = None if self._index is None else self._index.embeddings
        self.ttl_config = ttl
        self._pool = pool
        self._serde = StrictSerializer(allowed)
        self._times = UniqueTimes(TIMES_TABLE)
        self._collectors = Collectors(self.abatch, ttl)
        self._sweeper = expiry.Sweeper(self.sweep_ttl, ttl)

    # --- LangGraph's two methods; all others call them ------------------------------------

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Run operations: reads first, in order, then all writes at once."""
        work = _Work(ops, self._index)
        if self._index is not None:
            work.documents = self._index.embed(work.texts)
            work.queries = self._index.embed_queries(work.asked_queries)
        return self._run(work)

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As ``batch``; embeds with the asynchronous methods of the embedder."""
        work = _Work(ops, self._index)
        if self._index is not None:
            work.documents = await self._index.aembed(work.texts)
            work.queries = await self._index.aembed_queries(work.asked_queries)
        return await self._pool.run(self._run, work)

    # Calls on an event loop that are made in one tick of it become one batch.

    aget = collected(AsyncBatchedBaseStore.aget)
    asearch = collected(AsyncBatchedBaseStore.asearch)
    aput = collected(AsyncBatchedBaseStore.aput)
    adelete = collected(AsyncBatchedBaseStore.adelete)
    alist_namespaces = collected(AsyncBatchedBaseStore.alist_namespaces)

    def _run(self, work: _Work) -> list[Result]:
        got = iter(self._get_all([op for op in work.ops if isinstance(op, GetOp)]))
        results = [next(got) if isinstance(op, GetOp) else self._read(op, work) for op in work.ops]
        self._write(work)
        return results

    # --- time to live -------------------------------------------------------------------

    def sweep_ttl(self) -> int:
        """Remove expired items; returns how many."""
        return expiry.sweep(self._pool.store)

    asweep_ttl = awaited(sweep_ttl)

    def start_ttl_sweeper(self, sweep_interval_minutes: float | None = None) -> Future[None]:
        """Remove expired items at intervals, in a thread, until the returned future is cancelled.

        The interval is, unless given, that of ``ttl``, else 5 minutes. Does nothing without
        ``ttl``. ``close`` stops the sweeper.
        """
        return self._sweeper.start(sweep_interval_minutes)

    def stop_ttl_sweeper(self, timeout: float | None = None) -> bool:
        """Stop the sweeper; False if it still runs after ``timeout`` seconds."""
        return self._sweeper.stop(timeout)

    async def astart_ttl_sweeper(
        self, sweep_interval_minutes: float | None = None
    ) -> asyncio.Future[None]:
        """As ``start_ttl_sweeper``; the returned future belongs to the running event loop."""
        return asyncio.wrap_future(self.start_ttl_sweeper(sweep_interval_minutes))

    async def astop_ttl_sweeper(self, timeout: float | None = None) -> bool:
        """As ``stop_ttl_sweeper``; waits off the event loop."""
        return await asyncio.to_thread(self.stop_ttl_sweeper, timeout)

    def _is_shown(self, item: ItemRow, now_ms: int) -> bool:
        """True if reads return an item: it has not expired, or ``omit_expired`` is not set."""
        return item.is_live(now_ms) or not (self.ttl_config or {}).get("omit_expired")

    # --- reading ------------------------------------------------------------------------

    @property
    def _table(self) -> RowTable[ItemRow]:
        return items_table(self._pool.store)

    def _read(self, op: Op, work: _Work) -> Result:
        if isinstance(op, SearchOp):
            return self._search(op, work)
        if isinstance(op, ListNamespacesOp):
            return self._namespaces(op)
        if isinstance(op, PutOp):
            return None
        raise InvalidInputError(
            "an operation must be a GetOp, SearchOp, PutOp or ListNamespacesOp, got "
            f"{type(op).__name__}"
        )

    def _get_all(self, ops: Sequence[GetOp]) -> list[Item | None]:
        """The items of gets, in one call of the engine."""
        if not ops:
            return []
        now_ms = self._pool.store.engine.now_ms()
        records = self._table.find_many([(joined(op.namespace), op.key) for op in ops])
        found: list[Item | None] = []
        read: list[ItemRow] = []
        for op, record in zip(ops, records, strict=True):
            item = None if record is None else ITEMS.read(record)
            if item is None or not self._is_shown(item, now_ms):
                found.append(None)
                continue
            if op.refresh_ttl:
                read.append(item)
            found.append(
                Item(
                    value=self._value(item),
                    key=op.key,
                    namespace=op.namespace,
                    created_at=time_of(item.created_us),
                    updated_at=time_of(item.updated_us),
                )
            )
        expiry.refresh(self._pool.store, read)
        return found

    def _search(self, op: SearchOp, work: _Work) -> list[SearchItem]:
        check_count(op.limit, "limit")
        check_count(op.offset, "offset")
        if op.query and self._similarity is not None:
            found = self._similar(op, self._similarity, work.queries[op.query])
        else:
            latest = islice(self._latest(op), op.offset, op.offset + op.limit)
            found = [(None, item) for item in latest]
        if op.refresh_ttl:
            expiry.refresh(self._pool.store, [item for _, item in found])
        return [
            SearchItem(
                namespace=item.namespace,
                key=item.key,
                value=self._value(item),
                created_at=time_of(item.created_us),
                updated_at=time_of(item.updated_us),
                score=score,
            )
            for score, item in found
        ]

    def _latest(self, op: SearchOp) -> Iterator[ItemRow]:
        """The items of a search without a query, latest first, read as they are taken."""
        store, table = self._pool.store, self._table
        now_ms = store.engine.now_ms()
        size = min(max(op.offset + op.limit, _FEW), _PAGE)
        keys = latest_keys(store, joined(op.namespace_prefix), size)
        while page := list(islice(keys, size)):
            for record in table.find_many(page):
                # An item that was replaced meanwhile is returned as it is now.
                item = table.decode_found(record)
                if item is not None and self._is_wanted(item, op, now_ms):
                    yield item
            size = min(2 * size, _PAGE)

    def _matching(self, op: SearchOp) -> Iterator[ItemRow]:
        """The items below a search's namespace that match its filter."""
        now_ms = self._pool.store.engine.now_ms()
        for item in self._items(self._table.scan_starting(joined(op.namespace_prefix))):
            if self._is_wanted(item, op, now_ms):
                yield item

    def _is_wanted(self, item: ItemRow, op: SearchOp, now_ms: int) -> bool:
        return self._is_shown(item, now_ms) and (
            not op.filter or matches(self._value(item), op.filter)
        )

    def _similar(
        self, op: SearchOp, similarity: SimilaritySearch, query: Sequence[float]
    ) -> list[tuple[float | None, ItemRow]]:
        """The items most similar to a query, with their scores.

        As in ``InMemoryStore``, items without vectors follow, oldest first, if there are not
        enough others.
        """
        if not op.limit:
            return []
        end = op.offset + op.limit
        scored: list[tuple[float | None, ItemRow]] = []
        for each in self._scored(op, similarity, query, end):
            scored.append(each)
            if len(scored) == end:
                return scored[op.offset :]
        known = {item[:2] for _, item in scored}
        others = [item for item in self._matching(op) if item[:2] not in known]
        others.sort(key=lambda item: (item.created_us, item[:2]))
        found = scored[op.offset :]
        return [*found, *[(None, item) for item in others[: op.limit - len(found)]]]

    def _scored(
        self, op: SearchOp, similarity: SimilaritySearch, query: Sequence[float], first: int
    ) -> Iterator[tuple[float, ItemRow]]:
        """The items that have vectors and match, most similar first."""
        store, table = self._pool.store, self._table
        prefix = joined(op.namespace_prefix)
        ranked = similarity.ranked(store, self._times, prefix, query, first)
        now_ms = store.engine.now_ms()
        size = max(first, _FEW)
        while page := list(islice(ranked, size)):
            records = table.find_many([(each.prefix, each.key) for _, each in page])
            for (score, each), record in zip(page, records, strict=True):
                item = None if record is None else ITEMS.read(record)
                # The item may have been deleted or replaced since its vectors were cached.
                if (
                    item is not None
                    and item.updated_us == each.updated_us
                    and self._is_wanted(item, op, now_ms)
                ):
                    yield score, item
            size = min(2 * size, _PAGE)

    def _namespaces(self, op: ListNamespacesOp) -> list[tuple[str, ...]]:
        check_count(op.limit, "limit")
        check_count(op.offset, "offset")
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
        """Whether a namespace has an item that has not expired; usually the first has not."""
        items = self._items(self._table.scan(text, page=_FEW))
        return any(self._is_shown(item, now_ms) for item in items)

    def _items(self, records: Iterable[Record]) -> Iterator[ItemRow]:
        return map(ITEMS.read, records)

    def _value(self, item: ItemRow) -> dict[str, Any]:
        value = encoding.decode(item.value, self._serde.loads_typed)
        if type(value) is not dict:
            raise CorruptionError(f"item {item[:2]} is damaged")
        return value

    # --- writing ------------------------------------------------------------------------

    def _write(self, work: _Work) -> None:
        puts = work.puts
        if not puts:
            return
        store, table, index = self._pool.store, self._table, self._index
        vectors = VectorTables(store)
        keys = [(joined(namespace), key) for namespace, key in puts]
        values = [
            None if op.value is None else encoding.encode(dict(op.value), self._serde.dumps_typed)
            for op in puts.values()
        ]
        # Each item has a time of its own, in the order of the batch.
        ticks = -(-sum(value is not None for value in values) // TICK_US)
        attempts = Attempts("the items of a batch")
        while True:
            attempts.begin()
            draft, now_ms = Draft(store), store.engine.now_ms()
            moment = self._times.read(store, table, keys, [(vectors.index, (INDEX_KEY,))])
            described = vectors.index.decode_found(moment.records[-1])
            if index is not None:
                index.require(described)
                if described is None:
                    described = vectors.put_index(draft, None, index.description)
                else:
                    vectors.expect_index(draft, described)
            with self._times.reserve(draft, moment, now_ticks(now_ms), count=ticks) as first:
                rows = zip(keys, values, puts.values(), moment.records[:-1], strict=True)
                times_us = iter(range(first * TICK_US, (first + ticks) * TICK_US))
                contents: list[tuple[ItemRow, bytes]] = []
                for key, value, op, known in rows:
                    draft.expect(table, key, known)
                    before = table.decode_found(known)
                    if value is None:
                        if before is not None:
                            table.remove(draft, before)
                        if described is not None:
                            vectors.delete(draft, *key)
                        continue
                    updated_us = next(times_us)
                    if before is not None and before.is_live(now_ms):
                        created_us = before.created_us
                    else:
                        created_us = updated_us
                    item = ItemRow(
                        *key, value, created_us, updated_us, op.ttl, fields=fields_of(op)
                    )
                    table.put(draft, expiry.begun(item, now_ms), before)
                    contents.append((item, work.vectors(op)))
                if described is not None:
                    vectors.put(draft, described.generation, contents, first * TICK_US)
                try:
                    draft.commit()
                except ConditionFailedError:
                    continue
            return

    # --- the vector index ---------------------------------------------------------------

    def reindex(self, *, rebuild: bool = False, batch: int = _EMBED_BATCH) -> int:
        """Embed the items that have no vectors of this index; returns how many.

        Call it after a change of the embedder, its size or the fields, and for items that were
        stored without an index. A call after an interrupted one continues it. ``rebuild`` embeds
        all items, for an embedder that changed under the same name. ``batch`` items are embedded at
        once. While it runs, a search finds the items embedded so far by meaning.

        >>> CasstoreStore(store).put(("notes",), "1", {"text": "hello"})
        >>> lengths = lambda texts: [[len(text), 1] for text in texts]
        >>> memory = CasstoreStore(store, index={"dims": 2, "embed": lengths, "fields": ["text"]})
        >>> memory.reindex(), memory.reindex()
        (1, 0)
        """
        index, generation = self._begin_reindex(rebuild, batch)
        done = 0
        for page in self._unindexed(generation, batch):
            texts = [index.texts(self._value(item), item.fields) for item in page]
            vectors = index.embed([text for each in texts for text in each])
            done += self._put_vectors(generation, page, texts, vectors)
        return done

    async def areindex(self, *, rebuild: bool = False, batch: int = _EMBED_BATCH) -> int:
        """As ``reindex``; embeds with the asynchronous methods of the embedder."""
        run = self._pool.run
        index, generation = await run(self._begin_reindex, rebuild, batch)
        done = 0
        pages = await run(self._unindexed, generation, batch)
        while page := await run(next, pages, None):
            texts = [index.texts(self._value(item), item.fields) for item in page]
            vectors = await index.aembed([text for each in texts for text in each])
            done += await run(self._put_vectors, generation, page, texts, vectors)
        return done

    def _begin_reindex(self, rebuild: bool, batch: int) -> tuple[VectorIndex, str]:
        """Store the description of this index; returns the index and its generation."""
        check_flag(rebuild, "rebuild")
        check_count(batch, "batch", least=1)
        if self._index is None:
            raise NoVectorIndexError
        tables = VectorTables(self._pool.store)
        return self._index, tables.describe(self._index.description, rebuild=rebuild)

    def _unindexed(self, generation: str, batch: int) -> Iterator[list[ItemRow]]:
        """The items without vectors of a generation, in pages."""
        tables = VectorTables(self._pool.store)
        records = self._table.scan()
        while page := list(islice(records, _PAGE)):
            items = list(self._items(page))
            missing = [
                item
                for item, row in zip(items, tables.find_many(items), strict=True)
                # An item without texts has no row; one with index=False keeps none.
                if (item.fields != () if row is None else not row.counts_for(item, generation))
            ]
            for start in range(0, len(missing), batch):
                yield missing[start : start + batch]

    def _put_vectors(
        self,
        generation: str,
        items: Sequence[ItemRow],
        texts: Sequence[Sequence[str]],
        vectors: Embedded,
    ) -> int:
        contents = [packed([vectors[text] for text in each]) for each in texts]
        tables = VectorTables(self._pool.store)
        return tables.put_stored(self._times, generation, list(zip(items, contents, strict=True)))


class _Work:
    """The operations of a batch, and the vectors of their texts once they are embedded."""

    def __init__(self, ops: Iterable[Op], index: VectorIndex | None) -> None:
        self.ops = list(ops)
        for op in self.ops:
            validate_op_namespace(op)
        # Of two writes to one key in a batch, the last counts.
        self.puts = {(op.namespace, op.key): op for op in self.ops if isinstance(op, PutOp)}
        #: The vectors of documents, and of queries, by text.
        self.documents: Embedded = {}
        self.queries: Embedded = {}
        self._texts: dict[tuple[tuple[str, ...], str], list[str]] = {}
        self.asked_queries: list[str] = []
        if index is not None:
            self._texts = {
                place: index.texts(op.value, fields_of(op))
                for place, op in self.puts.items()
                if op.value is not None
            }
            self.asked_queries = [
                op.query for op in self.ops if isinstance(op, SearchOp) and op.query
            ]

    @property
    def texts(self) -> list[str]:
        """The texts to embed."""
        return [text for texts in self._texts.values() for text in texts]

    def vectors(self, op: PutOp) -> bytes:
        """The vectors of a put, packed; empty if it has none."""
        texts = self._texts.get((op.namespace, op.key), ())
        return packed([self.documents[text] for text in texts]) if texts else b""


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
            f"match_type must be prefix or suffix, got {condition.match_type!r}"
        )
    return all(want in ("*", label) for want, label in zip(path, part, strict=True))
