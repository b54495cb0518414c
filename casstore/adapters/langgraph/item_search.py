"""Reads items for LangGraph's operations: by key, and by namespace, filter and meaning."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from langgraph.store.base import (
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
)

from casstore.adapters.langgraph import encoding
from casstore.adapters.langgraph.expiry import refresh
from casstore.adapters.langgraph.item_records import (
    ITEMS,
    ItemRow,
    items_table,
    joined,
    labels,
    latest_keys,
    time_of,
)
from casstore.adapters.langgraph.serializer import StrictSerializer
from casstore.adapters.langgraph.vector_index import Embedded
from casstore.errors import CorruptionError, InvalidInputError
from casstore.records.unique_times import UniqueTimes
from casstore.session.arguments import check_choice, check_count
from casstore.store import Store

if TYPE_CHECKING:
    from casstore.adapters.langgraph.vector_search import SimilaritySearch

# The most rows read at once, and how many are read where the first is usually sufficient.
_PAGE: Final = 1000
_FEW: Final = 8
_ORDERED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
# The nesting limit of stored values; a deeper filter could match nothing and is refused.
_MAX_DEPTH: Final = 64


class ItemReader:
    """Reads the items of a store. ``similarity`` is None without an index."""

    def __init__(
        self,
        store: Store,
        serde: StrictSerializer,
        times: UniqueTimes,
        similarity: SimilaritySearch | None,
        *,
        omit_expired: bool,
    ) -> None:
        self._store = store
        self.table = items_table(store)
        self._serde = serde
        self._times = times
        self._similarity = similarity
        self._omit_expired = omit_expired

    def read_all(self, ops: Sequence[Op], queries: Embedded) -> list[Result]:
        """The results of operations, in order; ``queries`` are the vectors of those that search."""
        got = iter(self._get_all([op for op in ops if isinstance(op, GetOp)]))
        return [next(got) if isinstance(op, GetOp) else self._read(op, queries) for op in ops]

    def _read(self, op: Op, queries: Embedded) -> Result:
        if isinstance(op, SearchOp):
            return self._search(op, queries)
        if isinstance(op, ListNamespacesOp):
            return self._namespaces(op)
        if isinstance(op, PutOp):
            return None
        raise InvalidInputError(
            "an operation must be a GetOp, SearchOp, PutOp or ListNamespacesOp, got "
            f"{type(op).__name__}"
        )

    def _is_shown(self, item: ItemRow, now_ms: int) -> bool:
        """True if reads return an item: it has not expired, or expired ones are not omitted."""
        return not self._omit_expired or item.is_live(now_ms)

    def _get_all(self, ops: Sequence[GetOp]) -> list[Item | None]:
        """The items of gets, in one call of the engine."""
        if not ops:
            return []
        now_ms = self._store.engine.now_ms()
        records = self.table.find_many([(joined(op.namespace), op.key) for op in ops])
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
                    value=decoded(item, self._serde),
                    key=op.key,
                    namespace=op.namespace,
                    created_at=time_of(item.created_us),
                    updated_at=time_of(item.updated_us),
                )
            )
        refresh(self._store, read)
        return found

    def _search(self, op: SearchOp, queries: Embedded) -> list[SearchItem]:
        check_count(op.limit, "limit")
        check_count(op.offset, "offset")
        if op.query and self._similarity is not None:
            found = self._similar(op, self._similarity, queries[op.query])
        else:
            latest = islice(self._latest(op), op.offset, op.offset + op.limit)
            found = [(None, item) for item in latest]
        if op.refresh_ttl:
            refresh(self._store, [item for _, item in found])
        return [
            SearchItem(
                namespace=item.namespace,
                key=item.key,
                value=decoded(item, self._serde),
                created_at=time_of(item.created_us),
                updated_at=time_of(item.updated_us),
                score=score,
            )
            for score, item in found
        ]

    def _latest(self, op: SearchOp) -> Iterator[ItemRow]:
        """The items of a search without a query, latest first, read as they are taken."""
        table, now_ms = self.table, self._store.engine.now_ms()
        size = min(max(op.offset + op.limit, _FEW), _PAGE)
        keys = latest_keys(self._store, joined(op.namespace_prefix), size)
        while page := list(islice(keys, size)):
            for record in table.find_many(page):
                # An item that was replaced meanwhile is returned as it is now.
                item = table.decode_found(record)
                if item is not None and self._is_wanted(item, op, now_ms):
                    yield item
            size = min(2 * size, _PAGE)

    def _matching(self, op: SearchOp) -> Iterator[ItemRow]:
        """The items below a search's namespace that match its filter."""
        now_ms = self._store.engine.now_ms()
        for item in map(ITEMS.read, self.table.scan_starting(joined(op.namespace_prefix))):
            if self._is_wanted(item, op, now_ms):
                yield item

    def _is_wanted(self, item: ItemRow, op: SearchOp, now_ms: int) -> bool:
        return self._is_shown(item, now_ms) and (
            not op.filter or matches(decoded(item, self._serde), op.filter)
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
        ranked = self._scored(op, similarity, query, end)
        scored: list[tuple[float | None, ItemRow]] = list(islice(ranked, end))
        found = scored[op.offset :]
        if len(scored) == end:
            return found
        known = {item[:2] for _, item in scored}
        others = [item for item in self._matching(op) if item[:2] not in known]
        others.sort(key=lambda item: (item.created_us, item[:2]))
        return [*found, *[(None, item) for item in others[: op.limit - len(found)]]]

    def _scored(
        self, op: SearchOp, similarity: SimilaritySearch, query: Sequence[float], first: int
    ) -> Iterator[tuple[float, ItemRow]]:
        """The items that have vectors and match, most similar first."""
        store, table = self._store, self.table
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
        now_ms = self._store.engine.now_ms()
        for (text,) in self.table.groups(1):
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
        items = map(ITEMS.read, self.table.scan(text, page=_FEW))
        return any(self._is_shown(item, now_ms) for item in items)


def decoded(item: ItemRow, serde: StrictSerializer) -> dict[str, Any]:
    """The value of an item."""
    value = encoding.decode(item.value, serde.loads_typed)
    if type(value) is not dict:
        raise CorruptionError(f"item {item[:2]} is damaged")
    return value


def _is_match(condition: MatchCondition, labels: tuple[str, ...]) -> bool:
    path = tuple(condition.path)
    if len(labels) < len(path):
        return False
    check_choice(condition.match_type, "match_type", ("prefix", "suffix"))
    start = 0 if condition.match_type == "prefix" else len(labels) - len(path)
    part = labels[start : start + len(path)]
    return all(want in ("*", label) for want, label in zip(path, part, strict=True))


# --- filters --------------------------------------------------------------------------------------

# In LangGraph's syntax. The key of a filter is only looked up in the value; it is never part of a
# query.


def matches(value: Any, wanted: Mapping[str, Any]) -> bool:
    """Whether a value matches a filter."""
    return isinstance(value, dict) and all(
        _meets(_looked_up(value, key), want, _MAX_DEPTH) for key, want in wanted.items()
    )


def _looked_up(value: dict[str, Any], key: str) -> Any:
    """The field of a key; as in SqliteStore, ``user.name`` may be a field of a field."""
    if key in value or "." not in str(key):
        return value.get(key)
    found: Any = value
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _meets(value: Any, want: Any, room: int) -> bool:
    if not room:
        raise InvalidInputError("a filter is nested too deep")
    if isinstance(want, dict):
        if any(isinstance(key, str) and key.startswith("$") for key in want):
            return all(_compares(value, name, than) for name, than in want.items())
        return isinstance(value, dict) and all(
            _meets(value.get(key), each, room - 1) for key, each in want.items()
        )
    if isinstance(want, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(want)
            and all(
                _meets(mine, theirs, room - 1) for mine, theirs in zip(value, want, strict=True)
            )
        )
    return bool(value == want)


def _compares(value: Any, name: str, than: Any) -> bool:
    if name == "$eq":
        return bool(value == than)
    if name == "$ne":
        return bool(value != than)
    if name not in _ORDERED:
        raise InvalidInputError(
            f"a filter operator must be $eq, $ne, {', '.join(_ORDERED)}, got {name!r}"
        )
    compare = _ORDERED[name]
    try:
        # As LangGraph does: compare numbers, including numbers in text form.
        return compare(float(value), float(than))
    except (TypeError, ValueError):
        # As its stores in databases do: compare other texts, such as dates, by their characters.
        return type(value) is type(than) is str and compare(value, than)
