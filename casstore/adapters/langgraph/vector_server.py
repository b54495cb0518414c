"""Search by meaning on the server, where the engine can (pgvector on PostgreSQL).

``ServerRanking.ranked`` brings the copies of the vectors on the server up to date, bucket by
bucket, lets it choose candidates, and scores those as the search in this process does: the ranks
and scores are the same. The stamp of a bucket's copy is its time in ``lgm.changes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from casstore.adapters.langgraph.item_records import VECTORS, VectorTables
from casstore.adapters.langgraph.vector_search import (
    UNIT_ERROR,
    Bucket,
    VectorItem,
    changed_buckets,
    ranked_records,
)
from casstore.engine.forks import Lock
from casstore.engine.protocol import VectorChange, VectorCopy, VectorPart, VectorSearch
from casstore.errors import BusyError

_FIRST_VECTORS: Final = 64
_GROWTH: Final = 4
_ATTEMPTS: Final = 5


class ServerRanking:
    """Ranks items on the server. Safe for threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        #: By namespace, the generation and ``times`` at which the copies were last up to date.
        self._known: dict[str, tuple[str, Any]] = {}

    def ranked(
        self,
        search: VectorSearch,
        tables: VectorTables,
        prefix: str,
        generation: str,
        dims: int,
        times: Any,
        query: Sequence[float],
        first: int,
    ) -> Iterator[tuple[float, VectorItem]]:
        """As ``Snapshot.ranked``, by cosine; ``times`` as for ``VectorCache.find``."""
        with self._lock:
            if self._known.get(prefix) != (generation, times):
                _update(search, tables, prefix, generation, dims)
                self._known[prefix] = generation, times
        start, stop = _span(prefix)
        done: set[VectorItem] = set()
        count = max(first, _FIRST_VECTORS)
        while True:
            near = search.nearest(generation, start, stop, query, count)
            is_all = len(near) < count
            least = float("-inf") if is_all else near[-1].score
            # An item may have several vectors among them.
            keys = dict.fromkeys([(each.path, each.part, each.name) for each in near])
            texts = [(path.decode(), part.decode(), name.decode()) for path, part, name in keys]
            found = [record for record in tables.vectors.find_many(texts) if record is not None]
            for score, item in ranked_records(found, generation, dims, query):
                # An item that is not among the candidates may have a higher score.
                if score < least + UNIT_ERROR and not is_all:
                    break
                if item not in done:
                    done.add(item)
                    yield score, item
            if is_all:
                return
            count *= _GROWTH


def _update(
    search: VectorSearch, tables: VectorTables, prefix: str, generation: str, dims: int
) -> None:
    """Copy the buckets below a namespace that have changed."""
    for _ in range(_ATTEMPTS):
        start, stop = _span(prefix)
        theirs: dict[Bucket, int] = {
            (part.path.decode(), part.part.decode()): stamp
            for part, stamp in search.parts(generation, start, stop).items()
        }
        if not theirs:
            search.keep_only(generation)
        # The times first: a change after they are read is noticed by the next call.
        ours, changed = changed_buckets(tables, prefix, theirs)
        if not changed:
            return
        if search.replace(
            generation,
            (_change(tables, bucket, ours.get(bucket, 0), generation, dims) for bucket in changed),
        ):
            return
    raise BusyError("items change faster than their vectors can be copied; search once more")


def _change(
    tables: VectorTables, bucket: Bucket, stamp: int, generation: str, dims: int
) -> VectorChange:
    prefix, part = bucket
    copies: list[VectorCopy] = []
    for record in tables.vectors.scan(*bucket):
        row = VECTORS.read(record)
        if row.generation == generation:
            place = tables.vectors.place(*record.key)
            name = row.key.encode()
            copies.append(
                VectorCopy(place, name, row.created_us, row.updated_us, dims, row.vectors)
            )
    return VectorChange(VectorPart(prefix.encode(), part.encode()), stamp, copies)


def _span(prefix: str) -> tuple[bytes, bytes]:
    """The bytes of all texts that start with a prefix."""
    # No UTF-8 begins with 0xff, and a namespace ends with a dot.
    return prefix.encode(), prefix.encode() + b"\xff"
