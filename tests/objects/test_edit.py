"""An edit ends at the digest that storing the changed value whole would give."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import casstore
from casstore import Append, Delete, Digest, Insert, Set, Store
from casstore.engine.memory import MemoryEngine
from casstore.errors import (
    InvalidInputError,
    InvalidValueError,
    LimitError,
    ObjectNotFoundError,
    PathNotFoundError,
)
from casstore.format.limits import (
    LIST_ITEM_OUTLINE_MIN_BYTES,
    OUTLINE_MIN_BYTES,
    SINGLE_PIECE_MAX_BYTES,
)
from tests.objects.specimens import CountingEngine, Values, all_digests, exact, reachable

Edit = Set | Delete | Insert | Append

PROFILE = settings(deadline=None, max_examples=40, derandomize=True, database=None)


@pytest.fixture(params=["memory", "lmdb"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    if request.param == "memory":
        made = Store(MemoryEngine())
    else:
        made = casstore.open(tmp_path_factory.mktemp("edit") / "store", "relaxed")
    with made:
        yield made


def changed(value: Any, edit: Edit) -> Any:
    """The reference: what an edit means, on a plain value."""
    value = copy.deepcopy(value)
    if not edit.path and isinstance(edit, Set):
        return edit.value
    if isinstance(edit, Append):
        here = value
        for step in edit.path:
            here = here[step]
        here.append(edit.value)
        return value
    here = value
    for step in edit.path[:-1]:
        here = here[step]
    last: Any = edit.path[-1]
    if isinstance(edit, Set):
        here[last] = edit.value
    elif isinstance(edit, Delete):
        del here[last]
    else:
        here.insert(last, edit.value)
    return value


class Editor:
    """Random edits that are allowed for a value."""

    def __init__(self, seed: int) -> None:
        self.values = Values(seed)
        self.random = self.values.random

    def edit(self, value: Any) -> Edit:
        """Some edit of some container inside ``value``."""
        path: tuple[Any, ...] = ()
        here = value
        while self.random.randrange(3) and here:
            step = self.random.choice(list(here) if type(here) is dict else range(len(here)))
            if type(here[step]) not in (list, dict):
                break
            path, here = (*path, step), here[step]
        new = self.values.value(self.random.randrange(3))
        if type(here) is dict:
            if here and self.random.randrange(2):
                key = self.random.choice(list(here))
                return Delete((*path, key)) if self.random.randrange(2) else Set((*path, key), new)
            return Set((*path, self.values.key()), new)
        pick = self.random.randrange(4)
        if pick == 0 or not here:
            return Append(path, new)
        at = self.random.randrange(-len(here), len(here))
        if pick == 1:
            return Insert((*path, self.random.randrange(len(here) + 1)), new)
        return Delete((*path, at)) if pick == 2 else Set((*path, at), new)


# --- the same digest ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_any_edits_of_any_value_give_the_digest_of_the_changed_value(seed: int) -> None:
    store, editor = Store(MemoryEngine()), Editor(seed)
    value = editor.values.container()
    digest = store.put_value(value)
    for _ in range(15):
        edit = editor.edit(value)
        value = changed(value, edit)
        digest = store.edit(digest, edit)
        assert digest == store.put_value(value), edit
    assert exact(store.get_value(digest)) == exact(value)


@pytest.mark.parametrize("seed", range(3))
def test_edits_on_a_store_on_disk_give_the_digest_of_the_changed_value(
    store: Store, seed: int
) -> None:
    editor = Editor(1_000 + seed)
    value = editor.values.container()
    digest = store.put_value(value)
    for _ in range(8):
        edit = editor.edit(value)
        value = changed(value, edit)
        digest = store.edit(digest, edit)
        assert exact(store.get_value(digest)) == exact(value)
        assert digest == store.put_value(value)


@pytest.mark.parametrize("seed", range(15))
def test_several_edits_at_once_equal_the_same_one_by_one(seed: int) -> None:
    store, editor = Store(MemoryEngine()), Editor(100 + seed)
    value = editor.values.container()
    start = digest = store.put_value(value)
    edits = []
    for _ in range(8):
        edits.append(editor.edit(value))
        value = changed(value, edits[-1])
        digest = store.edit(digest, edits[-1])
    assert store.edit(start, *edits) == digest == store.put_value(value)


small_values = st.recursive(
    st.one_of(
        st.none(),
        st.integers(0, 3),
        st.sampled_from(["", "a", "b" * 90, "c" * 300, "d" * 511, "e" * 512, b"f" * 600]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8),
        st.dictionaries(st.sampled_from("abcdefgh"), inner, max_size=8),
    ),
    max_leaves=12,
)


@PROFILE
@given(
    value=st.one_of(
        st.lists(small_values, max_size=10),
        st.dictionaries(st.text(max_size=3), small_values, max_size=10),
    ),
    seed=st.integers(0, 10_000),
)
def test_edits_of_small_values_give_the_digest_of_the_changed_value(value: Any, seed: int) -> None:
    store, editor = Store(MemoryEngine()), Editor(seed)
    digest = store.put_value(value)
    for _ in range(6):
        edit = editor.edit(value)
        value = changed(value, edit)
        digest = store.edit(digest, edit)
        assert digest == store.put_value(value)


# --- across every threshold -----------------------------------------------------------------


def thresholds() -> list[int]:
    limits = (LIST_ITEM_OUTLINE_MIN_BYTES, OUTLINE_MIN_BYTES, SINGLE_PIECE_MAX_BYTES)
    return [limit + off for limit in limits for off in (-4, -3, -2, -1, 0, 1)]


@pytest.mark.parametrize("around", ["list", "map", "long list", "long map"])
def test_an_edit_across_every_size_threshold_gives_the_digest_of_the_changed_value(
    around: str,
) -> None:
    store = Store(MemoryEngine())
    filler: Any = {"list": [0], "map": {"a": 0}, "long list": list(range(1_000, 1_750))}.get(around)
    if filler is None:
        filler = {f"key {n}": n for n in range(250)}
    step: Any = 0 if type(filler) is list else "a" if around == "map" else "key 125"
    for inner in ([0], {"a": 0}):
        for size in thresholds():
            for text in ("x" * size, "é" * (size // 2)):
                item: Any = [text] if type(inner) is list else {"a": text}
                for before, after in ((0, item), (item, 0), (0, text), (text, item)):
                    digest = store.put_value(changed(filler, Set((step,), before)))
                    goal = store.put_value(changed(filler, Set((step,), after)))
                    assert store.edit(digest, Set((step,), after)) == goal, (before, after)


def test_appending_a_text_takes_a_list_over_each_size_threshold_and_deleting_it_back() -> None:
    store = Store(MemoryEngine())
    for total in thresholds():
        short = ["x" * (total // 2)]
        grown = [*short, "y" * (total // 2)]
        one, two = store.put_value(short), store.put_value(grown)
        assert store.edit(one, Append((), grown[1])) == two
        assert store.edit(two, Delete((1,))) == one


def test_a_list_is_emptied_from_its_end_and_filled_again() -> None:
    store, source = Store(MemoryEngine()), random.Random(0)
    value = [source.randrange(1 << 40) for _ in range(700)]
    digests = [store.put_value(value[:count]) for count in range(len(value) + 1)]
    for count in range(len(value), 0, -1):
        assert store.edit(digests[count], Delete((-1,))) == digests[count - 1], count
    for count in range(len(value)):
        assert store.edit(digests[count], Append((), value[count])) == digests[count + 1], count


@pytest.mark.parametrize("where", ["front", "anywhere"])
def test_a_list_emptied_at_other_positions_and_refilled_keeps_its_canonical_digest(
    where: str,
) -> None:
    store, source = Store(MemoryEngine()), random.Random(where)
    value: list[Any] = [source.randrange(1 << 40) for _ in range(400)]
    digest = store.put_value(value)
    while value:
        at = 0 if where == "front" else source.randrange(len(value))
        del value[at]
        digest = store.edit(digest, Delete((at,)))
        assert digest == store.put_value(value), len(value)
    while len(value) < 400:
        at = 0 if where == "front" else source.randrange(len(value) + 1)
        value.insert(at, source.randrange(1 << 40))
        digest = store.edit(digest, Insert((at,), value[at]))
        assert digest == store.put_value(value), len(value)


@pytest.mark.parametrize("order", ["first", "last", "any"])
def test_a_map_is_emptied_and_filled_again(order: str) -> None:
    store, source = Store(MemoryEngine()), random.Random(order)
    value = {f"key {source.randrange(1 << 30)}": n for n in range(500)}
    digest = store.put_value(value)
    removed = []
    while value:
        keys = sorted(value)
        key = {"first": keys[0], "last": keys[-1], "any": source.choice(keys)}[order]
        removed.append((key, value.pop(key)))
        digest = store.edit(digest, Delete((key,)))
        assert digest == store.put_value(value), len(value)
    for key, item in reversed(removed):
        value[key] = item
        digest = store.edit(digest, Set((key,), item))
        assert digest == store.put_value(value), len(value)


def test_a_list_of_equal_items_is_emptied_and_filled_again() -> None:
    """No item ends a piece by itself, or all do: the cap and the floor decide alone."""
    for item in (0, 1, 5, "x" * 100):
        store = Store(MemoryEngine())
        count = 900 if type(item) is int else 300
        digests = [store.put_value([item] * size) for size in range(count + 1)]
        assert len(set(digests)) == count + 1
        for size in range(count, 0, -3):
            assert store.edit(digests[size], Delete((size // 2,))) == digests[size - 1], size
            assert store.edit(digests[size], Delete((-1,))) == digests[size - 1], size
            assert store.edit(digests[size - 1], Insert((0,), item)) == digests[size], size


def test_a_list_of_messages_edited_one_by_one_keeps_its_canonical_digest() -> None:
    store = Store(MemoryEngine())
    value: list[Any] = []
    digest = store.put_value(value)
    for number in range(150):
        message = {"role": "user", "n": number, "text": f"message {number} " * (number % 70)}
        value.append(message)
        digest = store.edit(digest, Append((), message))
        assert digest == store.put_value(value)
    while value:
        value.pop()
        digest = store.edit(digest, Delete((-1,)))
        assert digest == store.put_value(value), len(value)


# --- the cost --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_only_the_pieces_of_the_final_value_are_stored(seed: int) -> None:
    engine, editor = MemoryEngine(), Editor(200 + seed)
    store = Store(engine)
    value = editor.values.container()
    start = store.put_value(value)
    before = all_digests(engine)
    edits = []
    for _ in range(8):
        edits.append(editor.edit(value))
        value = changed(value, edits[-1])
    digest = store.edit(start, *edits)
    new = all_digests(engine) - before
    assert new <= set(reachable(engine, digest))


def test_pieces_superseded_by_a_later_edit_are_not_stored() -> None:
    engine = MemoryEngine()
    store = Store(engine)
    start = store.put_value({"a": 1})
    before = all_digests(engine)
    assert store.edit(start, Set(("b",), "x" * 5_000), Set(("c",), [0] * 5_000),
                      Delete(("b",)), Delete(("c",))) == start  # fmt: skip
    assert all_digests(engine) == before
    assert store.edit(start, Set((), "gone " * 500), Set((), 1)) == store.put_value(1)


def test_an_edit_applies_to_the_result_of_the_previous_edit() -> None:
    store = Store(MemoryEngine())
    start = store.put_value({})
    digest = store.edit(
        start,
        Set(("list",), [{"n": n, "text": "t" * 100} for n in range(500)]),
        Append(("list",), {"n": 500}),
        Set(("list", 250, "n"), "changed"),
        Delete(("list", 0)),
    )
    value = store.get_value(digest)
    assert len(value["list"]) == 500
    assert value["list"][249]["n"] == "changed"
    assert digest == store.put_value(value)


def test_an_edit_of_a_large_value_reads_and_writes_few_pieces() -> None:
    engine = CountingEngine()
    store = Store(engine)
    a_list = store.put_value([{"n": n, "text": f"text {n} " * 20} for n in range(5_000)])
    a_map = store.put_value({f"key {n}": {"n": n} for n in range(20_000)})
    source = random.Random(1)
    for _ in range(20):
        at = source.randrange(5_000)
        for digest, edit in (
            (a_list, Set((at, "n"), -1)),
            (a_list, Insert((at,), "new")),
            (a_list, Delete((at,))),
            (a_list, Append((), at)),
            (a_map, Set((f"key {at}", "n"), -1)),
            (a_map, Set((f"new key {at}",), -1)),
            (a_map, Delete((f"key {at}",))),
        ):
            before = len(all_digests(engine))
            engine.forget()
            store.edit(digest, edit)
            assert engine.objects_read <= 30, edit
            assert len(all_digests(engine)) - before <= 12, edit


def test_an_edit_that_changes_nothing_gives_the_same_digest_and_stores_nothing(
    store: Store,
) -> None:
    value = {
        "list": list(range(3_000)),
        "map": {f"{n}": n for n in range(1_000)},
        "text": "x" * 900,
    }
    digest = store.put_value(value)
    before = all_digests(store.engine)
    same = store.edit(
        digest, Set(("list", 5), 5), Set(("map", "5"), 5), Set(("text",), "x" * 900), Set((), value)
    )
    assert type(same) is Digest
    assert same == digest == store.edit(digest)
    assert all_digests(store.engine) == before


# --- refusals ----------------------------------------------------------------------------------

SMALL = {"list": [1, {"in": [2]}], "map": {"a": 1}, "scalar": 5, "text": "x" * 600}
LARGE = {
    "list": [1, {"in": [2]}, *range(3_000)],
    "map": {"a": 1, **{f"{n}": n for n in range(1_000)}},
    "scalar": 5,
    "text": "x" * 600,
}
VALUES = [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large")]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("edit", "fails_at"),
    [
        (Delete(("absent",)), ("absent",)),
        (Delete(("map", "absent")), ("map", "absent")),
        (Delete(("map", "zzz")), ("map", "zzz")),
        (Set(("absent", "a"), 1), ("absent",)),
        (Set(("list", 99_999), 1), ("list", 99_999)),
        (Set(("list", -99_999), 1), ("list", -99_999)),
        (Delete(("list", 99_999)), ("list", 99_999)),
        (Insert(("list", 99_999), 1), ("list", 99_999)),
        (Insert(("list", -99_999), 1), ("list", -99_999)),
        (Append(("absent",), 1), ("absent",)),
        (Append(("list", 99_999), 1), ("list", 99_999)),
        (Set(("scalar", "a"), 1), ("scalar", "a")),
        (Set(("scalar", "a", "b"), 1), ("scalar", "a")),
        (Set(("text", 0), 1), ("text", 0)),
        (Delete(("list", 0, "a")), ("list", 0, "a")),
        (Set(("list", 1, "in", 0, "a"), 1), ("list", 1, "in", 0, "a")),
    ],
)
def test_path_not_found_error_names_the_failing_step(
    value: Any, edit: Edit, fails_at: tuple[Any, ...]
) -> None:
    store = Store(MemoryEngine())
    digest = store.put_value(value)
    before = all_digests(store.engine)
    with pytest.raises(PathNotFoundError) as caught:
        store.edit(digest, edit)
    assert caught.value.path == fails_at
    assert all_digests(store.engine) == before


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "edit",
    [
        Set((0,), 1),
        Set(("map", 0), 1),
        Set(("map", b"a"), 1),  # type: ignore[arg-type]
        Set(("list", "0"), 1),
        Set(("list", True), 1),
        Set(("list", 1.0), 1),  # type: ignore[arg-type]
        Set(("list", "0", "x"), 1),
        Delete(("list", "0")),
        Delete(("map", 0)),
        Insert(("list", "0"), 1),
        Insert(("map", "new"), 1),
        Insert(("map", "a"), 1),
        Insert(("new",), 1),
        Append((), 1),
        Append(("map",), 1),
        Delete(()),
        Insert((), 1),
    ],
)
def test_an_edit_that_does_not_fit_its_target_raises_invalid_input_error(
    value: Any, edit: Edit
) -> None:
    store = Store(MemoryEngine())
    digest = store.put_value(value)
    with pytest.raises(InvalidInputError):
        store.edit(digest, edit)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", ["scalar", "text"])
def test_a_scalar_cannot_be_appended_to(value: Any, place: str) -> None:
    store = Store(MemoryEngine())
    with pytest.raises((InvalidInputError, PathNotFoundError)):
        store.edit(store.put_value(value), Append((place,), 1))


@pytest.mark.parametrize("size", [0, 1, 5, 3_000])
def test_an_edit_beyond_the_end_of_a_list_is_refused(size: int) -> None:
    store = Store(MemoryEngine())
    digest = store.put_value({"list": list(range(size))})
    beyond: list[Edit] = [
        Set(("list", size), 1),
        Set(("list", -size - 1), 1),
        Delete(("list", size)),
        Delete(("list", -size - 1)),
        Insert(("list", size + 1), 1),
        Insert(("list", -size - 1), 1),
        Set(("list", size, "deeper"), 1),
        Append(("list", size), 1),
    ]
    for edit in beyond:
        with pytest.raises(PathNotFoundError) as caught:
            store.edit(digest, edit)
        assert caught.value.path == tuple(edit.path[:2])
    at_the_end = store.edit(digest, Insert(("list", size), 1))
    assert at_the_end == store.put_value({"list": [*range(size), 1]})


def test_an_edit_at_a_path_inside_a_scalar_root_raises_path_not_found_error() -> None:
    store = Store(MemoryEngine())
    for value in (5, "x" * 600, None):
        digest = store.put_value(value)
        for edit in (Set(("a",), 1), Set((0,), 1), Delete((0,)), Insert((0,), 1)):
            with pytest.raises(PathNotFoundError):
                store.edit(digest, edit)
        assert store.edit(digest, Set((), [1])) == store.put_value([1])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "edit",
    [
        Set(("map", "a"), {"x": [0, float("nan")]}),
        Set(("list", 1, "in", 0), {1, 2}),
        Insert(("list", 1), {"x": 2**70}),
        Set((), {"x": object()}),
        Set(("new",), {3: 4}),
        Set(("map", "\ud800"), 1),
        Set(("k" * 65_537,), 1),
    ],
    ids=lambda edit: type(edit).__name__,
)
def test_an_invalid_value_is_refused_with_the_path_that_storing_it_whole_would_name(
    value: Any, edit: Edit
) -> None:
    store = Store(MemoryEngine())
    digest = store.put_value(value)
    before = all_digests(store.engine)
    with pytest.raises(InvalidValueError) as whole:
        store.put_value(changed(value, edit))
    with pytest.raises(InvalidValueError) as caught:
        store.edit(digest, edit)
    assert caught.value.path == whole.value.path
    assert caught.value.reason == whole.value.reason
    assert all_digests(store.engine) == before


@pytest.mark.parametrize("value", VALUES)
def test_an_invalid_value_at_the_end_of_a_list_is_named_by_its_index(value: Any) -> None:
    store = Store(MemoryEngine())
    with pytest.raises(InvalidValueError) as caught:
        store.edit(store.put_value(value), Append(("list",), {"x": float("nan")}))
    assert caught.value.path == ("list", len(value["list"]), "x")


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("around", [0, 1, 2, 30, 63])
def test_an_edit_may_not_nest_the_whole_value_deeper_than_64(around: int) -> None:
    store = Store(MemoryEngine())
    digest = store.put_value(nested(around + 1))
    path = (0,) * (around + 1)
    room = 64 - around - 1
    for edit in (
        Set(path, nested(room)),
        Insert(path, nested(room)),
        Append(path[:-1], nested(room)),
    ):
        value = changed(nested(around + 1), edit)
        assert store.edit(digest, edit) == store.put_value(value)
    for edit in (
        Set(path, nested(room + 1)),
        Insert(path, nested(room + 1)),
        Append(path[:-1], nested(room + 1)),
    ):
        with pytest.raises(LimitError):
            store.edit(digest, edit)


def test_a_failing_edit_among_several_stores_nothing(store: Store) -> None:
    digest = store.put_value({"a": [1]})
    before = all_digests(store.engine)
    with pytest.raises(PathNotFoundError):
        store.edit(digest, Set(("b",), "x" * 5_000), Append(("a",), 2), Delete(("absent",)))
    assert all_digests(store.engine) == before


def test_an_edit_may_add_a_link_only_to_what_is_stored(store: Store) -> None:
    digest = store.put_value({})
    target = Digest.of_blob(b"not there yet")
    with pytest.raises(ObjectNotFoundError):
        store.edit(digest, Set(("link",), casstore.Link(target)))
    store.put_blob(b"not there yet")
    linked = store.edit(digest, Set(("link",), casstore.Link(target)))
    assert store.get_value(linked) == {"link": casstore.Link(target)}
