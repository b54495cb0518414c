"""What another store of LangGraph remembers into a store, checked, and the source only read.

Items that the store has already, and equal, are passed over, so an import that was stopped goes on
where it was, and a second one moves what came since (``compat.importing``). Every item keeps
its namespace, key, value and times, and when it ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from casstore.adapters.langgraph import encoding
from casstore.adapters.langgraph.item_records import (
    DOT,
    MS_US,
    ItemContent,
    StoredItem,
    items_table,
    lasting_us,
    stored_item,
    time_of,
)
from casstore.adapters.langgraph.raw import dump_raw, pack_form
from casstore.compat.importing import move
from casstore.errors import BadItemError, ConditionFailedError, ConflictError, ItemConflictError
from casstore.maintenance.progress import Progress
from casstore.records.json_values import loads
from casstore.session.arguments import check_flag
from casstore.session.records import Draft, Record
from casstore.store import Store

#: What the table of items has in every release.
ITEM_COLUMNS: Final = frozenset(("prefix", "key", "value", "created_at", "updated_at"))
# A page holds so much at the most, if it is not one item alone: it becomes one write.
_PAGE_ITEMS: Final = 200
_PAGE_BYTES: Final = 4 << 20


class ItemsReport(NamedTuple):
    """What an import did, or would do. Sizes in bytes; None if the engine does not tell."""

    dry_run: bool
    #: In the source.
    items: int
    #: Moved now, or that would be; the others were in the store already.
    imported: int
    #: Those of them that were in the store with other content.
    replaced: int
    #: Items whose time is up: moved as well, but CasstoreStore does not show them.
    expired: int
    #: Embeddings, which stay behind: there is no vector index.
    vectors: int
    source_bytes: int
    store_bytes_before: int | None
    store_bytes: int | None


class FoundItem(NamedTuple):
    """An item of the source, as a record will hold it."""

    #: The key of the record.
    place: tuple[str, str]
    content: ItemContent

    @property
    def namespace(self) -> str:
        """Its labels, joined by dots."""
        return self.place[0].removesuffix(DOT)

    @property
    def key(self) -> str:
        """Its key."""
        return self.place[1]


class ItemQueries(NamedTuple):
    """How a store's tables are asked, in the words of their database."""

    count: Any
    #: None if there is no table of them.
    count_vectors: Any
    #: Rows behind one, at most so many and about so many bytes, in order. They begin with what
    #: says where the next page starts.
    page: Any


class ItemSource(ABC):
    """What a store of LangGraph holds, to read from, as it was at one moment.

    ``start`` is what the first page is asked with.
    """

    def __init__(
        self,
        ask: Callable[[Any, Sequence[Any]], Iterator[tuple[Any, ...]]],
        queries: ItemQueries,
        start: tuple[Any, ...],
    ) -> None:
        self._ask = ask
        self._queries = queries
        self._start = start

    @abstractmethod
    def read(self, row: tuple[Any, ...]) -> FoundItem:
        """The item of a row; BadItemError if it cannot be moved."""

    @abstractmethod
    def require_unchanged(self) -> None:
        """ConflictError if somebody wrote to it meanwhile, and not all was read of one moment."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """How much it takes."""

    def count(self) -> int:
        """How many items there are."""
        return int(next(self._ask(self._queries.count, ()))[0])

    def count_vectors(self) -> int:
        """How many embeddings there are."""
        query = self._queries.count_vectors
        return 0 if query is None else int(next(self._ask(query, ()))[0])

    def pages(self) -> Iterator[list[FoundItem]]:
        """All items in order, as many at a time as one write should hold."""
        after = self._start
        while rows := list(self._ask(self._queries.page, (*after, _PAGE_ITEMS, _PAGE_BYTES))):
            yield [self.read(row) for row in rows]
            after = rows[-1][: len(self._start)]


@contextmanager
def naming(namespace: str, key: str) -> Iterator[None]:
    """Let what is wrong with an item be told with its name."""
    try:
        yield
    except RecursionError as exc:
        raise BadItemError(namespace, key, "its value is nested too deeply") from exc
    except ValueError as exc:
        raise BadItemError(namespace, key, str(exc)) from exc


def found_item(
    prefix: str,
    key: str,
    text: str,
    *,
    created_us: int,
    updated_us: int,
    ttl_minutes: float | None,
    expires_us: int | None,
) -> FoundItem:
    """An item from the columns of its row; ValueError if it cannot be kept as it is.

    Labels hold no dots, as all stores of LangGraph see to, so those of the prefix are between them.
    """
    value = loads(text)
    if type(value) is not dict:
        raise ValueError(f"its value is a {type(value).__name__}, not a map")
    for time_us in (created_us, updated_us, expires_us):
        if time_us is not None:
            _require_time(time_us)
    if ttl_minutes is not None:
        lasting_us(ttl_minutes)
        ttl_minutes = float(ttl_minutes)
    content = ItemContent(
        encoding.encode(value, dump_raw), created_us, updated_us, ttl_minutes, expires_us
    )
    return FoundItem((prefix + DOT if prefix else "", key), content)


def _require_time(time_us: int) -> None:
    try:
        time_of(time_us)
    except OverflowError as exc:
        raise ValueError(f"{time_us} microseconds since 1970 are no time of Python's") from exc


def move_items(
    source: ItemSource,
    store: Store,
    *,
    replace: bool,
    dry_run: bool,
    progress: Progress | None,
) -> ItemsReport:
    """Move all items over, and compare all of them.

    ItemConflictError if the store has one with other content, unless ``replace``.
    """
    check_flag(replace, "whether to replace")
    items = _Items(source, store, replace=replace)
    vectors = source.count_vectors()
    report = move(source, store, [items], dry_run=dry_run, progress=progress)
    [part] = report.parts
    return ItemsReport(
        dry_run,
        part.found,
        part.imported,
        items.replaced,
        items.expired,
        vectors,
        report.source_bytes,
        report.store_bytes_before,
        report.store_bytes,
    )


class _Items:
    """The items of a source (a ``compat.importing.Part``), and what became of them."""

    name = "items"

    def __init__(self, source: ItemSource, store: Store, *, replace: bool) -> None:
        self.replaced = 0
        self.expired = 0
        self._source = source
        self._store = store
        self._replace = replace
        self._table = items_table(store)
        # The records of the page that was looked at last.
        self._known: dict[tuple[str, ...], Record | None] = {}

    def count(self) -> int:
        """How many there are."""
        return self._source.count()

    def pages(self) -> Iterator[Sequence[FoundItem]]:
        """All of them in order."""
        self.expired = 0
        for page in self._source.pages():
            now_ms = self._store.engine.now_ms()
            self.expired += sum(not item.content.is_live(now_ms) for item in page)
            yield page

    def is_stored(self, page: Sequence[FoundItem]) -> Sequence[bool]:
        """Which of them the store has; ItemConflictError if with other content."""
        places: list[tuple[str, ...]] = []
        for item in page:
            with naming(item.namespace, item.key):
                # What is too long for a key is told here, with its name.
                self._table.place(*item.place)
            places.append(item.place)
        found = self._table.find_many(places)
        self._known = dict(zip(places, found, strict=True))
        return [
            record is not None and self._is_same(item, stored_item(record))
            for item, record in zip(page, found, strict=True)
        ]

    def _is_same(self, item: FoundItem, known: StoredItem) -> bool:
        """Has the store this item? If it has another, it is a conflict, or is to be replaced."""
        theirs, ours = item.content, known.content
        what = _difference(theirs, ours)
        if what is None:
            if theirs.expires_us == ours.expires_us:
                return True
            now_us = self._store.engine.now_ms() * MS_US
            later = _later(theirs, ours, now_us)
            if later is not None:
                return later is ours
            what = "end"
        if not self._replace:
            raise ItemConflictError(item.namespace, item.key, what)
        self.replaced += 1
        return False

    def store(self, rows: Sequence[FoundItem]) -> None:
        """Put them into the store, in one write, if nobody has changed what was looked at."""
        draft = Draft(self._store)
        for item in rows:
            draft.expect(self._table, item.place, self._known[item.place])
            draft.put(self._table, item.place, item.content.packed())
        try:
            draft.commit()
        except ConditionFailedError as exc:
            raise ConflictError(
                "items of the store were changed in the midst of it; import once more"
            ) from exc


def _difference(theirs: ItemContent, ours: ItemContent) -> str | None:
    """What of two items differs, leaving aside when they end; None if nothing."""
    if pack_form(theirs.value) != pack_form(ours.value):
        return "value"
    if theirs.created_us != ours.created_us:
        return "created_at"
    if theirs.updated_us != ours.updated_us:
        return "updated_at"
    return None if theirs.ttl_minutes == ours.ttl_minutes else "time to live"


def _later(theirs: ItemContent, ours: ItemContent, now_us: int) -> ItemContent | None:
    """Which of two items, else equal, was read later, there or here; None: reading explains it not.

    Reading lets the time of an item begin anew. That changes nothing that anybody has put, so it
    is no conflict, and the later end counts.
    """
    if theirs.ttl_minutes is None or theirs.expires_us is None or ours.expires_us is None:
        return None
    if theirs.expires_us > ours.expires_us:
        return theirs
    return ours if ours.expires_us <= now_us + lasting_us(theirs.ttl_minutes) else None
