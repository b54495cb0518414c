"""Schemas: rows come back as they were put, damage is named, and indexes follow their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.errors import CorruptionError
from casstore.format.digest import Digest
from casstore.records.schema import Index, RowTable, Schema, number_text, tables_of, text_number
from casstore.session.records import Draft, Record
from casstore.store import Store


class Size(NamedTuple):
    width: int
    height: int | None = None


class Page(NamedTuple):
    person: str
    number: int
    title: str
    tags: tuple[str, ...] = ()
    size: Size | None = None
    sizes: Mapping[str, Size] = {}
    content: Digest | None = None
    extra: Any = None
    record: Record | None = None


class Counter(NamedTuple):
    name: str
    next: int


class Address(NamedTuple):
    person: str
    city: str


class AddressRow(NamedTuple):
    address: Address
    revision: int


PAGES = Schema(
    "notes.pages",
    Page,
    2,
    indexes=[
        Index("notes.titles", 2, lambda page: [(page.person, page.title)]),
        Index(
            "notes.tags",
            3,
            lambda page: [(tag, page.person, page.number) for tag in page.tags],
            ends_with_key=True,
        ),
    ],
)
PLAIN = Page("anna", 1, "hello")


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        yield store


def put(store: Store, table: RowTable[Any], row: Any, before: Any = None) -> None:
    draft = Draft(store)
    table.put(draft, row, before)
    draft.commit()


@pytest.mark.parametrize(
    "row",
    [
        PLAIN,
        Page("anna", 10, "", ("a", "b"), Size(1), {"x": Size(2, 3)}, None, {"k": [1, None]}),
        Page("anna", 2**63 - 1, "t" * 2000, (), None, {}, None, 0),
    ],
)
def test_a_row_round_trips(store: Store, row: Page) -> None:
    table = RowTable(store, PAGES)
    put(store, table, row)
    found = table.get(row.person, row.number)
    assert found is not None
    assert found.record is not None
    assert found._replace(record=None) == row


def test_a_digest_is_stored_as_a_link_that_keeps_its_object(store: Store) -> None:
    table, draft = RowTable(store, PAGES), Draft(store)
    link = draft.keep("a long text")
    table.put(draft, PLAIN._replace(content=link.digest))
    draft.commit()
    found = table.get("anna", 1)
    assert found is not None
    assert store.get_value(Digest(found.content or b"")) == "a long text"
    assert link in PAGES.encode(found)


def test_trailing_defaults_are_not_stored_and_a_single_field_is_stored_bare() -> None:
    assert PAGES.encode(PLAIN) == ["hello"]
    assert PAGES.encode(PLAIN._replace(tags=("a",))) == ["hello", ["a"]]
    assert Schema("notes.counter", Counter, 1).encode(Counter("next", 7)) == 7


def test_a_named_tuple_as_first_field_is_flattened_into_the_row(store: Store) -> None:
    schema = Schema("notes.addresses", AddressRow, 1)
    row = AddressRow(Address("anna", "Ulm"), 3)
    assert (schema.key(row), schema.encode(row)) == (("anna",), ["Ulm", 3])
    table = RowTable(store, schema)
    put(store, table, row)
    assert table.get("anna") == row


@pytest.mark.parametrize(
    ("stored", "what"),
    [
        (5, "does not hold 6 fields"),
        ([], "does not hold 6 fields"),
        (["t"] * 7, "does not hold 6 fields"),
        ([5], "title is of type int, not str"),
        ([True], "title is of type bool, not str"),
        (["t", ["a", 5]], "an item that is not str"),
        (["t", [], [1, 2, 3]], "a list has 3 items, not 2"),
        (["t", [], ["1"]], "an item is str, not int"),
        (["t", [], None, {"x": 1}], "an entry is int, not list"),
        (["t", [], None, {}, "no link"], "content is of type str, not Link or NoneType"),
    ],
)
def test_a_damaged_row_is_refused_with_table_key_and_field(
    store: Store, stored: Any, what: str
) -> None:
    table, draft = RowTable(store, PAGES), Draft(store)
    draft.put(table, ("anna", "a1"), stored)
    draft.commit()
    for _ in range(2):
        with pytest.raises(CorruptionError, match=what) as refused:
            table.get("anna", 1)
        assert "'anna / a1' of table notes.pages" in str(refused.value)


def test_a_key_that_is_not_a_number_is_refused(store: Store) -> None:
    table, draft = RowTable(store, PAGES), Draft(store)
    draft.put(table, ("anna", "b1"), ["t"])
    draft.commit()
    with pytest.raises(CorruptionError, match="not a number in a key"):
        table.decode(next(table.scan()))


def test_index_rows_are_updated_with_their_row(store: Store) -> None:
    table = RowTable(store, PAGES)
    titles, tags = table.indexes

    def keys() -> list[tuple[str, ...]]:
        return [record.key for index in (titles, tags) for record in index.scan()]

    first = PLAIN._replace(tags=("a", "b"))
    put(store, table, first)
    assert keys() == [("anna", "hello"), ("a", "anna", "a1"), ("b", "anna", "a1")]
    assert titles.leads_to(next(titles.scan())) == ("anna", "a1")
    assert tags.leads_to(next(tags.scan())) == ("anna", "a1")
    second = first._replace(title="bye", tags=("b", "c"))
    put(store, table, second, first)
    assert keys() == [("anna", "bye"), ("b", "anna", "a1"), ("c", "anna", "a1")]
    draft = Draft(store)
    table.remove(draft, second)
    draft.commit()
    assert keys() == []
    assert table.get("anna", 1) is None


def test_an_index_row_without_a_key_is_refused(store: Store) -> None:
    titles, draft = RowTable(store, PAGES).indexes[0], Draft(store)
    draft.put(titles, ("anna", "hello"), 5)
    draft.commit()
    with pytest.raises(CorruptionError, match=r"notes\.titles holds no key"):
        titles.leads_to(next(titles.scan()))


def test_numbers_are_encoded_in_keys_so_that_they_sort() -> None:
    numbers = [0, 1, 9, 10, 99, 100, 10**9, 2**63 - 1]
    texts = [number_text(number) for number in numbers]
    assert sorted(texts) == texts
    assert [text_number(text) for text in texts] == numbers
    for wrong in ("", "a", "5", "a10", "b1", "b01", "a-1", "x5"):
        with pytest.raises(ValueError, match=r"number in a key|invalid literal"):
            text_number(wrong)


def test_a_field_that_cannot_be_stored_is_refused_when_it_is_declared() -> None:
    class Odd(NamedTuple):
        name: str
        odd: set[str]

    with pytest.raises(TypeError, match="cannot be of type"):
        Schema("notes.odd", Odd, 1)


def test_the_tables_of_schemas_are_listed_with_their_indexes() -> None:
    assert tables_of(PAGES) == ("notes.pages", "notes.tags", "notes.titles")
