"""Search over packed vectors, with numpy: by cosine, inner product or distance. Always exact.

``SimilaritySearch.ranked`` yields items, most similar first. ``VectorCache.find`` returns the
vectors below a namespace as one matrix, and re-reads only the buckets that changed since the last
call, in this or any other process. ``Snapshot.ranked`` multiplies it with the query in float32, and
scores the leading rows in float64, one by one, so that equal vectors have equal scores.

Where the engine can compare vectors (pgvector on PostgreSQL), ``ServerRanking.ranked`` brings the
copies of the vectors on the server up to date, bucket by bucket, lets it choose candidates, and
scores those as above: the ranks and scores are the same. The stamp of a bucket's copy is its time
in ``lgm.changes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import sqrt
from typing import Any, Final, NamedTuple

try:
    import numpy as np
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "index= needs numpy: pip install '.[vectors]' in the clone of casstore", name=exc.name
    ) from exc
from numpy.typing import NDArray

from casstore.adapters.langgraph.item_records import (
    CHANGES,
    FLOAT_BYTES,
    INDEX_KEY,
    VECTORS,
    VectorsRow,
    VectorTables,
)
from casstore.adapters.langgraph.vector_index import Distance, VectorIndex
from casstore.engine.forks import Lock
from casstore.engine.protocol import (
    VectorChange,
    VectorCopy,
    VectorPart,
    VectorSearch,
    VectorSearching,
)
from casstore.errors import BusyError, CorruptionError
from casstore.records.unique_times import UniqueTimes
from casstore.session.records import Record
from casstore.store import Store

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]
Bucket = tuple[str, ...]

# The bytes of matrices that a cache keeps; the one used last always stays.
_CACHE_BYTES: Final = 1 << 30
# More than the error of a product in float32, of vectors of length 1.
_UNIT_ERROR: Final = 1e-4
# The first number of vectors to score exactly, and the factor to the next number.
_FIRST_VECTORS: Final = 64
_GROWTH: Final = 4
# Rows that are scored in float64 at once.
_CHUNK_ROWS: Final = 4096
# The rows of deleted and replaced vectors stay until they are more than this part of the matrix.
_MAX_UNUSED: Final = 0.25
# Rows of vectors read at once.
_PAGE: Final = 1024
_COPY_ATTEMPTS: Final = 5


# --- reading --------------------------------------------------------------------------------------


class VectorItem(NamedTuple):
    """An item that has vectors."""

    prefix: str
    bucket: str
    key: str
    created_us: int
    updated_us: int


class _VectorMatrix(NamedTuple):
    """Vectors as they were read: the rows of a matrix, and their items."""

    items: list[VectorItem]
    #: When each item was created.
    created: Whole
    #: The position in ``items`` of each row.
    item_of: Whole
    matrix: Floats
    #: The length of each row.
    norms: Floats
    #: The most vectors of an item.
    most: int

    def followed_by(self, other: _VectorMatrix) -> _VectorMatrix:
        """The rows of both."""
        return _VectorMatrix(
            items=[*self.items, *other.items],
            created=np.concatenate([self.created, other.created]),
            item_of=np.concatenate([self.item_of, other.item_of + len(self.items)]),
            matrix=np.concatenate([self.matrix, other.matrix]),
            norms=np.concatenate([self.norms, other.norms]),
            most=max(self.most, other.most),
        )


class VectorRange(NamedTuple):
    """The vectors of a generation in the namespaces that start with a prefix."""

    tables: VectorTables
    prefix: str
    generation: str
    dims: int
    #: Read from the store by the caller; different after each put of a vector.
    times: Any

    def stamps(self) -> dict[Bucket, int]:
        """The time of the latest change of each bucket."""
        records = self.tables.changes.scan_starting(self.prefix)
        return {record.key: CHANGES.read(record).changed_us for record in records}

    def changed(self, known: Mapping[Bucket, int]) -> tuple[dict[Bucket, int], list[Bucket]]:
        """The times of the buckets, and the buckets whose times are not the ``known`` ones."""
        stamps = self.stamps()
        return stamps, [each for each in {**known, **stamps} if stamps.get(each) != known.get(each)]

    def read(self, records: Iterable[Record]) -> _VectorMatrix:
        """The vectors of records, of this generation."""
        items: list[VectorItem] = []
        counts: list[int] = []
        parts: list[Floats] = [np.zeros((0, self.dims), dtype=np.float32)]
        numbered = groupby(enumerate(records), lambda each: each[0] // _PAGE)
        for _, page in numbered:
            packed: list[bytes] = []
            for _, record in page:
                row = VECTORS.read(record)
                if row.generation == self.generation:
                    counts.append(self._count(row))
                    items.append(VectorItem(*row[:3], row.created_us, row.updated_us))
                    packed.append(row.vectors)
            parts.append(np.frombuffer(b"".join(packed), dtype="<f4").reshape(-1, self.dims))
        matrix = np.concatenate(parts)
        squares = np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64)
        return _VectorMatrix(
            items=items,
            created=np.array([item.created_us for item in items], dtype=np.int64),
            item_of=np.repeat(np.arange(len(items)), counts),
            matrix=matrix,
            norms=np.sqrt(squares).astype(np.float32),
            most=max(counts, default=1),
        )

    def _count(self, row: VectorsRow) -> int:
        count, rest = divmod(len(row.vectors), self.dims * FLOAT_BYTES)
        if rest:
            raise CorruptionError(
                f"the vectors of item {row.key!r:.80} do not have {self.dims} dims; call "
                "reindex(), and check the store"
            )
        return count


# --- in this process ------------------------------------------------------------------------------


class Snapshot:
    """The vectors below a namespace at one time. Immutable: ``changed`` returns another one."""

    def __init__(
        self, rows: _VectorMatrix, used: Flags, stamps: dict[Bucket, int], generation: str
    ) -> None:
        self.generation = generation
        self.stamps = stamps
        self._rows = rows
        #: False for the rows of deleted and replaced vectors.
        self._used = used
        self._most_norm = float(rows.norms.max(initial=0.0))

    @property
    def size_bytes(self) -> int:
        """The size of the matrix."""
        return int(self._rows.matrix.nbytes)

    def changed(
        self, rows: _VectorMatrix, gone: Iterable[Bucket], stamps: dict[Bucket, int]
    ) -> Snapshot | None:
        """A snapshot with ``rows`` in place of the vectors of the buckets ``gone``.

        None if too many rows of the matrix would be unused.
        """
        replaced = set(gone)
        lost = [at for at, item in enumerate(self._rows.items) if item[:2] in replaced]
        used = self._used & ~np.isin(self._rows.item_of, lost)
        if len(used) - int(used.sum()) > len(used) * _MAX_UNUSED:
            return None
        used = np.concatenate([used, _all_used(rows)])
        return Snapshot(self._rows.followed_by(rows), used, stamps, self.generation)

    def ranked(
        self, query: Sequence[float], first: int, distance: str = Distance.COSINE
    ) -> Iterator[tuple[float, VectorItem]]:
        """Items with the score of their best vector, best first; equal ones by creation.

        ``first`` is about how many the caller needs.
        """
        items, created, item_of, matrix, norms, most = self._rows
        rows = len(matrix)
        if not rows:
            return
        compare = _COMPARISONS[distance](np.asarray(query, dtype=np.float64), self._most_norm)
        scores = compare.scores(matrix, norms)
        if not self._used.all():
            scores[~self._used] = -np.inf
        error = compare.error
        done: set[int] = set()
        count = max(first * most, _FIRST_VECTORS)
        while True:
            least = -np.inf
            if count < rows:
                least = float(np.partition(scores, rows - count)[rows - count])
            # The exact score of a row that is not chosen is below ``least`` - error.
            chosen = np.flatnonzero((scores >= least - 2 * error) & self._used)
            exact = self._exact(chosen, compare)
            for at in np.lexsort((created[item_of[chosen]], -exact)):
                if exact[at] < least - error:
                    break
                item = int(item_of[chosen[at]])
                if item not in done:
                    done.add(item)
                    yield compare.shown(float(exact[at])), items[item]
            if count >= rows:
                return
            count *= _GROWTH

    def _exact(self, chosen: Whole, compare: _Cosine) -> Doubles:
        found = np.zeros(len(chosen))
        for start in range(0, len(chosen), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            found[part] = compare.exact(self._rows.matrix[chosen[part]].astype(np.float64))
        return found


class _Cosine:
    """Compares a query with rows by the angle between them.

    ``scores`` are in float32 and may be wrong by ``error``, ``exact`` ones in float64. A larger
    score is a better one; ``shown`` makes it what a search returns.
    """

    def __init__(self, query: Doubles, most_norm: float) -> None:
        self.query = query
        self.length = float(np.sqrt(np.einsum("i,i->", query, query)))
        self.error = self._error(most_norm)

    def _error(self, most_norm: float) -> float:
        return _UNIT_ERROR

    def scores(self, matrix: Floats, norms: Floats) -> Floats:
        scores: Floats = matrix @ (self.query / (self.length or 1.0)).astype(np.float32)
        # A vector of zeros has the product 0, which is its score.
        np.divide(scores, norms, out=scores, where=norms != 0)
        return scores

    def exact(self, rows: Doubles) -> Doubles:
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows)) * self.length
        # Row by row: a product with the matrix may round equal rows differently.
        found: Doubles = np.einsum("ij,j->i", rows, self.query)
        # Likewise with a vector of zeros, or a query of zeros.
        np.divide(found, lengths, out=found, where=lengths != 0)
        return found

    def shown(self, score: float) -> float:
        return score


class _InnerProduct(_Cosine):
    """Compares a query with rows by their product."""

    def _error(self, most_norm: float) -> float:
        return _UNIT_ERROR * self.length * most_norm

    def scores(self, matrix: Floats, norms: Floats) -> Floats:
        found: Floats = matrix @ self.query.astype(np.float32)
        return found

    def exact(self, rows: Doubles) -> Doubles:
        found: Doubles = np.einsum("ij,j->i", rows, self.query)
        return found


class _L2(_Cosine):
    """Compares a query with rows by their distance; the scores are negative squares."""

    def _error(self, most_norm: float) -> float:
        return _UNIT_ERROR * (self.length + most_norm) ** 2

    def scores(self, matrix: Floats, norms: Floats) -> Floats:
        product = matrix @ self.query.astype(np.float32)
        found: Floats = 2 * product - norms * norms - np.float32(self.length**2)
        return found

    def exact(self, rows: Doubles) -> Doubles:
        away = rows - self.query
        found: Doubles = -np.einsum("ij,ij->i", away, away)
        return found

    def shown(self, score: float) -> float:
        return -sqrt(-score)


_COMPARISONS: Final[dict[str, type[_Cosine]]] = {
    Distance.COSINE: _Cosine,
    Distance.INNER_PRODUCT: _InnerProduct,
    Distance.L2: _L2,
}


class VectorCache:
    """Matrices of the namespaces that were searched last. Safe for threads."""

    def __init__(self, size_bytes: int = _CACHE_BYTES) -> None:
        self._size_bytes = size_bytes
        self._lock = Lock()
        #: By namespace, the one used last at the end: a snapshot, and the times it was read at.
        self._known: dict[str, tuple[Any, Snapshot]] = {}

    def find(self, below: VectorRange) -> Snapshot:
        """The vectors of a range."""
        with self._lock:
            known = self._known.pop(below.prefix, None)
            snapshot = None
            if known is not None and known[1].generation == below.generation:
                snapshot = known[1]
                if known[0] != below.times:
                    snapshot = _refreshed(below, snapshot)
            if snapshot is None:
                snapshot = _loaded(below)
            self._known[below.prefix] = below.times, snapshot
            while len(self._known) > 1 and self._total_bytes() > self._size_bytes:
                del self._known[next(iter(self._known))]
            return snapshot

    def _total_bytes(self) -> int:
        return sum([snapshot.size_bytes for _, snapshot in self._known.values()])


def _loaded(below: VectorRange) -> Snapshot:
    # The times first: a change after they are read is noticed by the next call.
    stamps = below.stamps()
    rows = below.read(below.tables.vectors.scan_starting(below.prefix, page=_PAGE))
    return Snapshot(rows, _all_used(rows), stamps, below.generation)


def _refreshed(below: VectorRange, known: Snapshot) -> Snapshot | None:
    """``known`` with the changed buckets read again; None if so many changed that all must be."""
    stamps, changed = below.changed(known.stamps)
    if not changed:
        return known
    if len(changed) > len(stamps) * _MAX_UNUSED:
        return None
    scan = below.tables.vectors.scan
    records = (record for bucket in changed for record in scan(*bucket, page=_PAGE))
    return known.changed(below.read(records), changed, stamps)


def _all_used(rows: _VectorMatrix) -> Flags:
    return np.ones(len(rows.matrix), dtype=np.bool_)


# --- on the server --------------------------------------------------------------------------------


class ServerRanking:
    """Ranks items on the server. Safe for threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        #: By namespace, the generation and ``times`` at which the copies were last up to date.
        self._known: dict[str, tuple[str, Any]] = {}

    def ranked(
        self, search: VectorSearch, below: VectorRange, query: Sequence[float], first: int
    ) -> Iterator[tuple[float, VectorItem]]:
        """As ``Snapshot.ranked``, by cosine."""
        with self._lock:
            if self._known.get(below.prefix) != (below.generation, below.times):
                _copy_changed(search, below)
                self._known[below.prefix] = below.generation, below.times
        done: set[VectorItem] = set()
        count = max(first, _FIRST_VECTORS)
        while True:
            near = search.nearest(below.generation, *_span(below.prefix), query, count)
            is_all = len(near) < count
            least = float("-inf") if is_all else near[-1].score
            # An item may have several vectors among them.
            keys = dict.fromkeys([(each.path, each.part, each.name) for each in near])
            texts = [(path.decode(), part.decode(), name.decode()) for path, part, name in keys]
            found = below.tables.vectors.find_many(texts)
            rows = below.read([record for record in found if record is not None])
            scored = Snapshot(rows, _all_used(rows), {}, below.generation)
            for score, item in scored.ranked(query, len(rows.items)):
                # An item that is not among the candidates may have a higher score.
                if score < least + _UNIT_ERROR and not is_all:
                    break
                if item not in done:
                    done.add(item)
                    yield score, item
            if is_all:
                return
            count *= _GROWTH


def _copy_changed(search: VectorSearch, below: VectorRange) -> None:
    """Copy the buckets that have changed to the server."""
    generation = below.generation
    for _ in range(_COPY_ATTEMPTS):
        theirs: dict[Bucket, int] = {
            (part.path.decode(), part.part.decode()): stamp
            for part, stamp in search.parts(generation, *_span(below.prefix)).items()
        }
        if not theirs:
            search.keep_only(generation)
        # The times first: a change after they are read is noticed by the next call.
        ours, changed = below.changed(theirs)
        if not changed:
            return
        changes = (_change(below, bucket, ours.get(bucket, 0)) for bucket in changed)
        if search.replace(generation, changes):
            return
    raise BusyError("items change faster than their vectors can be copied; search once more")


def _change(below: VectorRange, bucket: Bucket, stamp: int) -> VectorChange:
    prefix, part = bucket
    table = below.tables.vectors
    copies: list[VectorCopy] = []
    for record in table.scan(*bucket):
        row = VECTORS.read(record)
        if row.generation == below.generation:
            place, name = table.place(*record.key), row.key.encode()
            copies.append(
                VectorCopy(
                    row=place,
                    name=name,
                    created=row.created_us,
                    version=row.updated_us,
                    dims=below.dims,
                    vectors=row.vectors,
                )
            )
    return VectorChange(VectorPart(prefix.encode(), part.encode()), stamp, copies)


def _span(prefix: str) -> tuple[bytes, bytes]:
    """The bytes of all texts that start with a prefix."""
    # No UTF-8 begins with 0xff, and a namespace ends with a dot.
    return prefix.encode(), prefix.encode() + b"\xff"


# --- either ---------------------------------------------------------------------------------------


class SimilaritySearch:
    """Searches the vectors of an index: on the server if the engine can, else in this process."""

    def __init__(self, index: VectorIndex) -> None:
        self._index = index
        self._cache = VectorCache()
        self._ranking = ServerRanking()

    def server(self, store: Store, *, install: bool = False) -> VectorSearch | None:
        """The engine's own vector search; None if it has none, or none for the index's distance."""
        engine, index = store.engine, self._index
        if index.distance != Distance.COSINE or not isinstance(engine, VectorSearching):
            return None
        return engine.vector_search(index.dims, install=install)

    def ranked(
        self, store: Store, times: UniqueTimes, prefix: str, query: Sequence[float], first: int
    ) -> Iterator[tuple[float, VectorItem]]:
        """The items below a namespace that have vectors, with their scores, most similar first.

        An item may have been deleted or replaced since its vectors were read. ``first`` is about
        how many the caller needs. VectorIndexChangedError if the store's vectors are of another
        index.
        """
        tables, index = VectorTables(store), self._index
        moment = times.read(store, tables.index, [(INDEX_KEY,)])
        described = tables.index.decode_found(moment.records[0])
        if described is None:
            return iter(())
        index.require(described)
        below = VectorRange(tables, prefix, described.generation, index.dims, moment.slots)
        server = self.server(store)
        if server is not None:
            return self._ranking.ranked(server, below, query, first)
        return self._cache.find(below).ranked(query, first, index.distance)
