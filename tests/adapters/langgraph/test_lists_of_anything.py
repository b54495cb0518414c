"""Lists of plain data, of objects, and of both: remembered, and never wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

from langchain_core.messages import AIMessage

import casstore
from casstore.adapters.langgraph import CasstoreSaver, StrictSerializer
from casstore.adapters.langgraph import encoding as stored_forms
from casstore.adapters.langgraph.encoding import Codec
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import StoredObject, Write, WriteResult
from casstore.errors import UnsafePayloadError
from casstore.maintenance import gc
from casstore.session.records import Draft
from casstore.store import Store
from tests.adapters.langgraph.test_lists import (
    Mine,
    before_next_write,
    link_of,
    messages,
    put_list,
    read_list,
)

Make = Callable[[int, int], list[Any]]


class Role(Enum):
    """What a map may hold where another has a text."""

    USER = "user"


@pytest.fixture
def saver(store: Store) -> CasstoreSaver:
    return CasstoreSaver(store)


def maps(count: int, seed: int = 0) -> list[Any]:
    """Messages without a class, short ones and long ones."""
    source = random.Random(seed)
    return [
        {
            "role": ("user", "assistant")[at % 2],
            "content": source.randbytes(source.choice((10, 600))).hex(),
            "meta": {"at": at, "cost": at / 8, "seen": None, "tags": [seed, "x", True]},
        }
        for at in range(count)
    ]


def texts(count: int, seed: int = 0) -> list[Any]:
    """Plain texts, with a number now and then."""
    return [f"{seed} {at} " * 40 if at % 5 else at for at in range(count)]


def mixtures(count: int, seed: int = 0) -> list[Any]:
    """Maps with objects in them, and objects beside them."""
    made: list[Any] = maps(count, seed)
    for at in range(0, count, 3):
        made[at]["when"] = datetime(2026, 1, 1, tzinfo=UTC)
    for at in range(1, count, 3):
        made[at] = AIMessage(made[at]["content"], id=f"{seed}-{at}")
    return made


def each_of(*makes: Make) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", makes, ids=lambda make: make.__name__)


ALL = each_of(maps, texts, mixtures)


def taken_apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements are taken apart, each time."""
    counts: list[int] = []
    real = stored_forms.encode_items

    def encode_items(items: Sequence[Any], dump: stored_forms.Dump) -> list[Any]:
        counts.append(len(items))
        return real(items, dump)

    monkeypatch.setattr(stored_forms, "encode_items", encode_items)
    return counts


# --- it saves work ------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("known_from", ["putting", "reading"])
def test_appending_an_element_serialises_and_stores_only_that_element(
    store: Store,
    saver: CasstoreSaver,
    monkeypatch: pytest.MonkeyPatch,
    make: Make,
    known_from: str,
) -> None:
    said = make(600, 0)
    before = put_list(saver, said, None, 1)
    if known_from == "reading":
        saver = CasstoreSaver(store)
        assert read_list(saver) == said
    counts, sent = taken_apart(monkeypatch), []
    real = LmdbEngine.write

    def write(engine: LmdbEngine, work: Write) -> WriteResult:
        sent.append(len(work.objects))
        return real(engine, work)

    monkeypatch.setattr(LmdbEngine, "write", write)
    after = put_list(saver, [*said, {"role": "user", "content": "one more " * 90}], before, 2)
    assert counts == [1]
    assert len(sent) == 1
    # The checkpoint, the text, a leaf or two, a branch on each level.
    assert sent[0] <= 10
    assert len(read_list(CasstoreSaver(store), after)) == 601
    # The same list once more.
    put_list(saver, [*said, {"role": "user", "content": "one more " * 90}], after, 3)
    assert counts == [1]


@each_of(maps, texts, messages)
@pytest.mark.parametrize("known_from", ["putting", "reading"])
def test_cached_elements_are_not_fetched_again(
    store: Store,
    saver: CasstoreSaver,
    monkeypatch: pytest.MonkeyPatch,
    make: Make,
    known_from: str,
) -> None:
    said = make(300, 0)
    put_list(saver, said, None, 1)
    if known_from == "reading":
        saver = CasstoreSaver(store)
        assert read_list(saver) == said
    fetched: list[int] = []
    real = LmdbEngine.get_many

    def get_many(engine: LmdbEngine, digests: Sequence[bytes]) -> list[StoredObject | None]:
        fetched.append(len(digests))
        return real(engine, digests)

    monkeypatch.setattr(LmdbEngine, "get_many", get_many)
    assert read_list(saver) == said
    assert sum(fetched) <= 3


# --- and is never wrong -------------------------------------------------------------------


@each_of(maps, mixtures, messages)
def test_changing_lists_are_stored_identically_with_and_without_the_cache(
    store: Store, saver: CasstoreSaver, tmp_path: Path, make: Make
) -> None:
    source = random.Random(7)
    said: list[Any] = []
    parent: str | None = None
    with casstore.open(tmp_path / "other", "relaxed") as other:
        for version in range(1, 60):
            choice = source.random()
            if choice < 0.6 or len(said) < 3:
                said = [*said, *make(source.choice((1, 1, 1, 2, 40)), version)]
            elif choice < 0.7:
                said = said[: -source.randrange(1, 3)]
            elif choice < 0.8:
                at = source.randrange(len(said))
                said = [*said[:at], {"changed": version}, *said[at + 1 :]]
            elif choice < 0.9:
                # From one form to another and back.
                said = [*said, AIMessage("an object", id=str(version))]
            else:
                said = [*said, said[0]]
            parent = put_list(saver, said, parent, version)
            assert read_list(saver, parent) == said
            whole = put_list(CasstoreSaver(other), said, None, version)
            assert link_of(store, parent) == link_of(other, whole)
        assert read_list(CasstoreSaver(store)) == said


def test_an_element_that_is_changed_in_place_is_stored_as_it_then_is(
    store: Store, saver: CasstoreSaver
) -> None:
    said = maps(50)
    first = put_list(saver, said, None, 1)
    old = said[20]["content"]
    # As long as before, so that only a look at the bytes tells.
    said[20]["content"] = old[::-1]
    second = put_list(saver, said, first, 2)
    said[30]["meta"]["tags"][0] = 9
    more = [*said, {"and": "more"}]
    third = put_list(saver, more, second, 3)
    for each in (saver, CasstoreSaver(store)):
        assert read_list(each, first)[20]["content"] == old
        assert read_list(each, second)[20]["content"] == old[::-1]
        assert read_list(each, second)[30]["meta"]["tags"][0] == 0
        assert read_list(each, third) == more


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (0, None),
        ("1", 1),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ("user", Role.USER),
        ([], {}),
        ("", None),
        ([[1], 2], [[1, 2]]),
        ([1, 2], {"1": 2}),
        ({"a": float("inf")}, {"a": float("-inf")}),
    ],
    ids=repr,
)
def test_elements_that_python_considers_equal_but_differ_are_stored_again(
    store: Store, old: Any, new: Any
) -> None:
    saver = CasstoreSaver(store, allowed=[Role])
    rest = maps(40)
    first = put_list(saver, [*rest, {"it": old}], None, 1)
    second = put_list(saver, [*rest, {"it": new}, "more"], first, 2)
    for each in (saver, CasstoreSaver(store, allowed=[Role])):
        assert repr(read_list(each, first)) == repr([*rest, {"it": old}])
        assert repr(read_list(each, second)) == repr([*rest, {"it": new}, "more"])


@pytest.mark.parametrize(
    "odd",
    [
        float("nan"),
        float("inf"),
        1 << 70,
        "a lone \ud800",
        b"bytes",
        bytearray(b"an array"),
        ("a", "tuple"),
        {1: "a key that is no text"},
        {"deep": [[[[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]]]]},
        {1, 2},
        Role.USER,
        datetime(2026, 1, 1, tzinfo=UTC),
        AIMessage("hello", id="1"),
        None,
    ],
    ids=lambda odd: type(odd).__name__,
)
def test_unusual_elements_read_back_alike_with_and_without_the_cache(
    store: Store, odd: Any
) -> None:
    """Known or not, at once or one after the other, alone or in a map: it is the same list."""
    saver = CasstoreSaver(store, allowed=[Role])

    def strange() -> CasstoreSaver:
        return CasstoreSaver(store, allowed=[Role])

    rest = maps(30)
    lists = [
        rest,
        [*rest, odd],
        [*rest, odd, {"in": odd}],
        [*rest, odd, {"in": odd}, "end"],
        [*rest, {"in": odd}, "end"],
        [odd, *rest],
    ]
    parent: str | None = None
    for version, said in enumerate(lists, 1):
        try:
            whole = put_list(strange(), said, None, version, thread="whole")
        except casstore.CasstoreError as exc:
            with pytest.raises(type(exc)):
                put_list(saver, said, parent, version)
            continue
        parent = put_list(saver, said, parent, version)
        assert link_of(store, parent) == link_of(store, whole, "whole")
        assert repr(read_list(saver, parent)) == repr(read_list(strange(), whole, "whole"))


def test_appended_elements_are_stored_like_those_of_a_whole_list(
    store: Store, saver: CasstoreSaver
) -> None:
    """However deep they are: what is nested too deeply for a value goes to the serialiser."""
    deep: Any = "deep"
    for _ in range(24):
        deep = [deep]
    said = [*maps(40), deep, {"it": deep}]
    first = put_list(saver, said[:40], None, 1)
    second = put_list(saver, said, first, 2)
    draft = Draft(store)
    assert link_of(store, second) == draft.keep_long(Codec(StrictSerializer()).encode(said))
    assert read_list(saver, second) == said


@ALL
def test_objects_and_plain_data_can_be_appended_to_one_list(
    store: Store, saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    counts = taken_apart(monkeypatch)
    said: list[Any] = messages(40)
    parent: str | None = None
    for version, more in enumerate((make(3, 1), messages(2, 2), make(2, 3)), 1):
        parent = put_list(saver, said, parent, version)
        said = [*said, *more]
    last = put_list(saver, said, parent, 9)
    for each in (saver, CasstoreSaver(store)):
        assert read_list(each, last) == said
    # Never all of them.
    assert counts == [3, 2, 2]


@ALL
def test_changing_a_returned_list_does_not_change_later_reads(
    saver: CasstoreSaver, make: Make
) -> None:
    said = make(50, 0)
    put_list(saver, said, None, 1)
    for _ in range(2):
        found = read_list(saver)
        assert found == said
        if type(found[3]) is dict:
            found[3]["content"] = "scribbled on"
            found[3]["meta"]["tags"].append("also")
        found.clear()


def test_a_list_that_is_collected_while_it_is_built_upon_is_stored_again(
    store: Store, saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = maps(100)
    first = put_list(saver, said, None, 1)

    def collect() -> None:
        CasstoreSaver(store).delete_thread("t")
        gc.collect(store, grace_ms=0)

    before_next_write(monkeypatch, collect)
    after = put_list(saver, [*said, {"one": "more"}], first, 2)
    assert read_list(CasstoreSaver(store), after) == [*said, {"one": "more"}]


def test_the_list_cache_does_not_bypass_the_allowlist_of_a_saver(store: Store) -> None:
    narrow = CasstoreSaver(store)
    wide: Any = narrow.with_allowlist([(Mine.__module__, "Mine")])
    mine = [{"it": Mine(name=f"{at} " * 300)} for at in range(30)]
    first = put_list(wide, mine, None, 1)
    assert read_list(wide) == mine
    with pytest.raises(UnsafePayloadError):
        read_list(narrow)
    with pytest.raises(UnsafePayloadError):
        put_list(narrow, mine, first, 2)
    with pytest.raises(UnsafePayloadError):
        put_list(narrow, [*mine, "hello"], first, 2)
    assert read_list(wide) == mine
