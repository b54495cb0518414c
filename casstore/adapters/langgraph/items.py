"""``CasstoreStore``: the long-term memory of a LangGraph application, in the same store.

An item is a record under its namespace and key (``item_records``), read by ``item_search``. With an
index, the vectors of an item are written with it, and searched by ``vector_search``.
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
    IndexConfig,
    Op,
    PutOp,
    Result,
    SearchOp,
    TTLConfig,
    validate_op_namespace,
)
from langgraph.store.base.batch import AsyncBatchedBaseStore

from casstore import store as stores
from casstore.adapters.langgraph import encoding, expiry
from casstore.adapters.langgraph.collecting import Collectors, collected
from casstore.adapters.langgraph.item_records import (
    INDEX_KEY,
    ITEMS,
    TICK_US,
    TIMES_TABLE,
    ItemRow,
    VectorTables,
    items_table,
    joined,
    now_ticks,
)
from casstore.adapters.langgraph.item_search import ItemReader, decoded
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
    NoVectorIndexError,
)
from casstore.records.schema import RowTable
from casstore.records.unique_times import UniqueTimes
from casstore.session.arguments import check_count, check_flag
from casstore.session.attempts import transaction
from casstore.session.records import Draft
from casstore.store import Store

if TYPE_CHECKING:
    from casstore.adapters.langgraph.vector_search import SimilaritySearch

# How many items reindex reads at once.
_PAGE: Final = 1000
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
        work = _BatchOperations(ops, self._index)
        if self._index is not None:
            work.documents = self._index.embed(work.texts)
            work.queries = self._index.embed_queries(work.asked_queries)
        return self._run(work)

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """As ``batch``; embeds with the asynchronous methods of the embedder."""
        work = _BatchOperations(ops, self._index)
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

    def _run(self, work: _BatchOperations) -> list[Result]:
        reader = self._reader
        results = reader.read_all(work.ops, work.queries)
        self._write(work, reader.table)
        return results

    @property
    def _reader(self) -> ItemReader:
        omit_expired = bool((self.ttl_config or {}).get("omit_expired"))
        return ItemReader(
            self._pool.store, self._serde, self._times, self._similarity, omit_expired=omit_expired
        )

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

    # --- writing ------------------------------------------------------------------------

    @transaction("the items of a batch")
    def _write(self, work: _BatchOperations, table: RowTable[ItemRow]) -> None:
        puts = work.puts
        if not puts:
            return
        store, index = self._pool.store, self._index
        vectors = VectorTables(store)
        keys = [(joined(namespace), key) for namespace, key in puts]
        values = [
            None if op.value is None else encoding.encode(dict(op.value), self._serde.dumps_typed)
            for op in puts.values()
        ]
        # Each item has a time of its own, in the order of the batch.
        ticks = -(-sum(value is not None for value in values) // TICK_US)
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
                item = ItemRow(*key, value, created_us, updated_us, op.ttl, fields=fields_of(op))
                table.put(draft, expiry.begun(item, now_ms), before)
                contents.append((item, work.vectors(op)))
            if described is not None:
                vectors.put(draft, described.generation, contents, first * TICK_US)
            draft.commit()

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
            texts = self._texts(index, page)
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
            texts = self._texts(index, page)
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
        stored = map(ITEMS.read, items_table(tables.store).scan())
        while items := list(islice(stored, _PAGE)):
            missing = [
                item
                for item, row in zip(items, tables.find_many(items), strict=True)
                # An item without texts has no row; one with index=False keeps none.
                if (item.fields != () if row is None else not row.counts_for(item, generation))
            ]
            for start in range(0, len(missing), batch):
                yield missing[start : start + batch]

    def _texts(self, index: VectorIndex, items: Sequence[ItemRow]) -> list[list[str]]:
        """The texts of each item to embed."""
        return [index.texts(decoded(item, self._serde), item.fields) for item in items]

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


class _BatchOperations:
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
