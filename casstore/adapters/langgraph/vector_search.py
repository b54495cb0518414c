"""Exact search over packed vectors, with numpy: by cosine, inner product or distance.

``VectorCache.find`` returns the vectors below a namespace as one matrix, and re-reads only the
buckets that changed since the last call, in this or any other process. ``Snapshot.ranked`` yields
items, most similar first. The product with the whole matrix is in float32. The leading rows are
scored in float64, one by one, so that equal vectors have equal scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import sqrt
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from casstore.adapters.langgraph.item_records import (
    CHANGES,
    FLOAT_BYTES,
    VECTORS,
    VectorsRow,
    VectorTables,
)
from casstore.adapters.langgraph.vector_index import Distance
from casstore.engine.forks import Lock
from casstore.errors import CorruptionError
from casstore.session.records import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Doubles = NDArray[np.float64]
    Whole = NDArray[np.int64]
    Flags = NDArray[np.bool_]

#: The bytes of matrices that a cache keeps; the one used last always stays.
CACHE_BYTES: Final = 1 << 30
#: More than the error of a product in float32, of vectors of length 1.
UNIT_ERROR: Final = 1e-4
_FIRST_ROWS: Final = 64
_GROWTH: Final = 4
# Rows that are scored in float64 at once.
_CHUNK_ROWS: Final = 4096
# The rows of deleted and replaced vectors stay until they are more than this part of the matrix.
_MAX_UNUSED: Final = 0.25
# Rows of vectors read at once.
_PAGE: Final = 1024

Bucket = tuple[str, ...]


class VectorItem(NamedTuple):
    """An item that has vectors."""

    prefix: str
    bucket: str
    key: str
    created_us: int
    updated_us: int


class _Rows(NamedTuple):
    """Vectors as they were read: the rows of a matrix, and the item of each."""

    items: list[VectorItem]
    #: How many vectors each item has.
    counts: list[int]
    matrix: Floats


class Snapshot:
    """The vectors below a namespace at one time. Immutable: ``changed`` returns another one."""

    def __init__(self, rows: _Rows, stamps: dict[Bucket, int], generation: str) -> None:
        import numpy as np

        self.generation = generation
        self.stamps = stamps
        self._items = rows.items
        self._matrix = rows.matrix
        self._item_of = np.repeat(np.arange(len(rows.items)), rows.counts)
        self._created = np.array([item.created_us for item in rows.items], dtype=np.int64)
        self._norms = _norms(rows.matrix)
        self._most_norm = float(self._norms.max(initial=0.0))
        self._used = np.ones(len(rows.matrix), dtype=np.bool_)
        self._most = max(rows.counts, default=1)

    @property
    def size_bytes(self) -> int:
        """The size of the matrix."""
        return int(self._matrix.nbytes)

    def changed(
        self, rows: _Rows, gone: Iterable[Bucket], stamps: dict[Bucket, int]
    ) -> Snapshot | None:
        """A snapshot with ``rows`` in place of the vectors of the buckets ``gone``.

        None if too many rows of the matrix would be unused.
        """
        import numpy as np

        replaced = set(gone)
        lost = [at for at, item in enumerate(self._items) if item[:2] in replaced]
        used = self._used & ~np.isin(self._item_of, lost)
        if len(used) - int(used.sum()) > len(used) * _MAX_UNUSED:
            return None
        made = Snapshot.__new__(Snapshot)
        made.generation, made.stamps = self.generation, stamps
        made._items = [*self._items, *rows.items]
        made._matrix = np.concatenate([self._matrix, rows.matrix])
        added = np.repeat(np.arange(len(rows.items)) + len(self._items), rows.counts)
        made._item_of = np.concatenate([self._item_of, added])
        created = np.array([item.created_us for item in rows.items], dtype=np.int64)
        made._created = np.concatenate([self._created, created])
        made._norms = np.concatenate([self._norms, _norms(rows.matrix)])
        made._most_norm = float(made._norms.max(initial=0.0))
        made._used = np.concatenate([used, np.ones(len(rows.matrix), dtype=np.bool_)])
        made._most = max(self._most, max(rows.counts, default=1))
        return made

    def ranked(
        self, query: Sequence[float], first: int, distance: str = Distance.COSINE
    ) -> Iterator[tuple[float, VectorItem]]:
        """Items with the score of their best vector, best first; equal ones by creation.

        ``first`` is about how many the caller needs.
        """
        import numpy as np

        rows = len(self._matrix)
        if not rows:
            return
        compare = _COMPARISONS[distance](np.asarray(query, dtype=np.float64), self._most_norm)
        scores = compare.scores(self._matrix, self._norms)
        if not self._used.all():
            scores[~self._used] = -np.inf
        error = compare.error
        done: set[int] = set()
        count = max(first * self._most, _FIRST_ROWS)
        while True:
            least = -np.inf
            if count < rows:
                least = float(np.partition(scores, rows - count)[rows - count])
            # The exact score of a row that is not chosen is below ``least`` - error.
            chosen = np.flatnonzero((scores >= least - 2 * error) & self._used)
            exact = self._exact(chosen, compare)
            for at in np.lexsort((self._created[self._item_of[chosen]], -exact)):
                if exact[at] < least - error:
                    break
                item = int(self._item_of[chosen[at]])
                if item not in done:
                    done.add(item)
                    yield compare.shown(float(exact[at])), self._items[item]
            if count >= rows:
                return
            count *= _GROWTH

    def _exact(self, chosen: Whole, compare: _Cosine) -> Doubles:
        import numpy as np

        found = np.zeros(len(chosen))
        for start in range(0, len(chosen), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            found[part] = compare.exact(self._matrix[chosen[part]].astype(np.float64))
        return found


class _Cosine:
    """Compares a query with rows by the angle between them.

    ``scores`` are in float32 and may be wrong by ``error``, ``exact`` ones in float64. A larger
    score is a better one; ``shown`` makes it what a search returns.
    """

    def __init__(self, query: Doubles, most_norm: float) -> None:
        import numpy as np

        self.query = query
        self.length = float(np.sqrt(np.einsum("i,i->", query, query)))
        self.error = self._error(most_norm)

    def _error(self, most_norm: float) -> float:
        return UNIT_ERROR

    def scores(self, matrix: Floats, norms: Floats) -> Floats:
        import numpy as np

        scores: Floats = matrix @ (self.query / (self.length or 1.0)).astype(np.float32)
        # A vector of zeros has the product 0, which is its score.
        np.divide(scores, norms, out=scores, where=norms != 0)
        return scores

    def exact(self, rows: Doubles) -> Doubles:
        import numpy as np

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
        return UNIT_ERROR * self.length * most_norm

    def scores(self, matrix: Floats, norms: Floats) -> Floats:
        import numpy as np

        found: Floats = matrix @ self.query.astype(np.float32)
        return found

    def exact(self, rows: Doubles) -> Doubles:
        import numpy as np

        found: Doubles = np.einsum("ij,j->i", rows, self.query)
        return found


class _L2(_Cosine):
    """Compares a query with rows by their distance; the scores are negative squares."""

    def _error(self, most_norm: float) -> float:
        return UNIT_ERROR * (self.length + most_norm) ** 2

    def scores(self, matrix: Floats, norms: Floats) -> Floats:
        import numpy as np

        product = matrix @ self.query.astype(np.float32)
        found: Floats = 2 * product - norms * norms - np.float32(self.length**2)
        return found

    def exact(self, rows: Doubles) -> Doubles:
        import numpy as np

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

    def __init__(self, size_bytes: int = CACHE_BYTES) -> None:
        self._size_bytes = size_bytes
        self._lock = Lock()
        #: By namespace, the one used last at the end: a snapshot, and the times it was read at.
        self._known: dict[str, tuple[Any, Snapshot]] = {}

    def find(
        self, tables: VectorTables, prefix: str, generation: str, dims: int, times: Any
    ) -> Snapshot:
        """The vectors below a namespace.

        ``times``, which the caller has read from the store, differs after each put of a vector.
        """
        with self._lock:
            known = self._known.pop(prefix, None)
            snapshot = None
            if known is not None and known[1].generation == generation:
                snapshot = known[1]
                if known[0] != times:
                    snapshot = _refreshed(tables, prefix, dims, snapshot)
            if snapshot is None:
                snapshot = _loaded(tables, prefix, generation, dims)
            self._known[prefix] = times, snapshot
            while len(self._known) > 1 and self._total_bytes() > self._size_bytes:
                del self._known[next(iter(self._known))]
            return snapshot

    def _total_bytes(self) -> int:
        return sum([snapshot.size_bytes for _, snapshot in self._known.values()])


def require_numpy() -> None:
    """Raise ModuleNotFoundError, with what to install, if there is no numpy."""
    try:
        import numpy as _  # noqa: F401
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            "index= needs numpy: pip install '.[vectors]' in the clone of casstore", name=exc.name
        ) from exc


def _stamps(tables: VectorTables, prefix: str) -> dict[Bucket, int]:
    return {
        record.key: CHANGES.read(record).changed_us
        for record in tables.changes.scan_starting(prefix)
    }


def _loaded(tables: VectorTables, prefix: str, generation: str, dims: int) -> Snapshot:
    # The times first: a change after they are read is noticed by the next call.
    stamps = _stamps(tables, prefix)
    records = tables.vectors.scan_starting(prefix, page=_PAGE)
    return Snapshot(_read(records, generation, dims), stamps, generation)


def changed_buckets(
    tables: VectorTables, prefix: str, known: Mapping[Bucket, int]
) -> tuple[dict[Bucket, int], list[Bucket]]:
    """The times of the buckets below a namespace, and the buckets at other times than ``known``."""
    stamps = _stamps(tables, prefix)
    changed = [each for each in {**known, **stamps} if stamps.get(each) != known.get(each)]
    return stamps, changed


def ranked_records(
    records: Iterable[Record], generation: str, dims: int, query: Sequence[float]
) -> Iterator[tuple[float, VectorItem]]:
    """The items of some records by cosine, as ``Snapshot.ranked``."""
    rows = _read(records, generation, dims)
    return Snapshot(rows, {}, generation).ranked(query, len(rows.items))


def _refreshed(tables: VectorTables, prefix: str, dims: int, known: Snapshot) -> Snapshot | None:
    """``known`` with the changed buckets read again; None if so many changed that all must be."""
    stamps, changed = changed_buckets(tables, prefix, known.stamps)
    if not changed:
        return known
    if len(changed) > len(stamps) * _MAX_UNUSED:
        return None
    records = (record for bucket in changed for record in tables.vectors.scan(*bucket, page=_PAGE))
    return known.changed(_read(records, known.generation, dims), changed, stamps)


def _read(records: Iterable[Record], generation: str, dims: int) -> _Rows:
    import numpy as np

    items: list[VectorItem] = []
    counts: list[int] = []
    parts: list[Floats] = [np.zeros((0, dims), dtype=np.float32)]
    numbered = groupby(enumerate(records), lambda each: each[0] // _PAGE)
    for _, page in numbered:
        packed: list[bytes] = []
        for _, record in page:
            row = VECTORS.read(record)
            if row.generation == generation:
                counts.append(_count(row, dims))
                items.append(VectorItem(*row[:3], row.created_us, row.updated_us))
                packed.append(row.vectors)
        parts.append(np.frombuffer(b"".join(packed), dtype="<f4").reshape(-1, dims))
    return _Rows(items, counts, np.concatenate(parts))


def _count(row: VectorsRow, dims: int) -> int:
    count, rest = divmod(len(row.vectors), dims * FLOAT_BYTES)
    if rest:
        raise CorruptionError(
            f"the vectors of item {row.key!r:.80} do not have {dims} dims; call reindex(), and "
            "check the store"
        )
    return count


def _norms(matrix: Floats) -> Floats:
    import numpy as np

    norms: Floats = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64)).astype(
        np.float32
    )
    return norms
