"""A view answers as the plain value would, reading only the pieces on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import casstore
from casstore import Append, Delete, Insert, Set, Store, View
from casstore.engine.memory import MemoryEngine
from casstore.errors import InvalidInputError, PathNotFoundError
from tests.objects.specimens import CountingEngine, Values, exact

SEEDS = range(8)


@pytest.fixture(params=["memory", "lmdb"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    if request.param == "memory":
        made = Store(MemoryEngine())
    else:
        made = casstore.open(tmp_path_factory.mktemp("view") / "store", "relaxed")
    with made:
        yield made


def plain(found: Any) -> Any:
    """What a view stands for; anything else as it is."""
    return found.load() if isinstance(found, View) else found


def assert_same(found: Any, expected: Any) -> None:
    """The same value, and a view exactly where a list or map is expected."""
    assert isinstance(found, View) == (type(expected) in (list, dict))
    assert exact(plain(found)) == exact(expected)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every path inside a value, and what stands there."""
    yield path, value
    if type(value) is dict:
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif type(value) is list:
        for at, item in enumerate(value):
            yield from places(item, (*path, at))


def some_places(value: Any, seed: int, count: int) -> list[tuple[tuple[Any, ...], Any]]:
    everything = list(places(value))
    return random.Random(seed).sample(everything, min(count, len(everything)))


# --- as on the plain value ------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_view_has_the_same_value_as_the_plain_value_at_every_path(
    store: Store, seed: int
) -> None:
    value = Values(seed).container()
    view = store.view(store.put_value(value))
    for path, expected in some_places(value, seed, 40):
        assert_same(view.at(path), expected)
        here = view
        for step in path:
            assert exact(plain(here.get(step))) == exact(plain(here[step]))
            here = here[step]
        assert_same(here, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_load_returns_the_plain_value_of_any_part(store: Store, seed: int) -> None:
    value = Values(seed).container()
    view = store.view(store.put_value(value))
    assert exact(view.load()) == exact(value)
    for path, expected in some_places(value, seed, 20):
        if type(expected) in (list, dict):
            assert exact(view.at(path).load()) == exact(expected)
            assert len(view.at(path)) == len(expected)
            assert view.at(path).is_map == (type(expected) is dict)


@pytest.mark.parametrize("seed", SEEDS)
def test_iterating_a_view_yields_the_same_as_the_plain_value(store: Store, seed: int) -> None:
    value = Values(seed).container()
    view = store.view(store.put_value(value))
    for path, expected in some_places(value, seed, 20):
        if type(expected) is dict:
            inner = view.at(path)
            assert list(inner) == list(inner.keys()) == sorted(expected)
            found = {key: plain(item) for key, item in inner.items()}
            assert exact(found) == exact(expected)
            assert all(key in inner for key in expected)
            assert "no such key" not in inner
            assert 1 not in inner
        elif type(expected) is list:
            assert exact([plain(item) for item in view.at(path)]) == exact(expected)


LIST_SIZES = (0, 1, 2, 100, 3_000)


@pytest.mark.parametrize("size", LIST_SIZES)
def test_items_are_counted_from_both_ends(store: Store, size: int) -> None:
    value = [{"n": n} if n % 3 else n for n in range(size)]
    view = store.view(store.put_value(value))
    for at in {0, 1, size // 2, size - 1} & set(range(size)):
        assert_same(view[at], value[at])
        assert_same(view[at - size], value[at - size])
    for at in (size, size + 1, -size - 1, 10**9, -(10**9)):
        with pytest.raises(PathNotFoundError) as caught:
            _ = view[at]
        assert caught.value.path == (at,)
        assert view.get(at, "none") == "none"


@pytest.mark.parametrize("size", LIST_SIZES)
def test_slices_are_those_of_the_plain_list(store: Store, size: int) -> None:
    value = [{"n": n, "text": str(n) * 150} if n % 3 else n for n in range(size)]
    view = store.view(store.put_value(value))
    source = random.Random(size)
    ends = [None, 0, 1, -1, size, -size, size + 5, -size - 5]
    wanted = [slice(a, b) for a in ends for b in ends]
    wanted += [slice(source.randint(-size, size), source.randint(-size, size)) for _ in range(10)]
    for part in source.sample(wanted, 25):
        assert exact(view[part]) == exact(value[part])
    assert exact(view[0:3:1]) == exact(value[0:3])


def test_in_looks_for_an_item_as_in_the_plain_list(store: Store) -> None:
    value = [0, 2, "text", "long " * 200, None, b"bytes", *range(100, 1_500)]
    view = store.view(store.put_value(value))
    for item in (0, 2, "text", "long " * 200, None, b"bytes", 1_499, False, 2.0):
        assert item in view
    for item in (1, "tex", b"text", -1):
        assert item not in view


@pytest.mark.parametrize("item", [[1, 2], {"a": 1}, [], {}, ["long " * 200], {"a": [1] * 2_000}])
def test_in_finds_a_list_or_map_as_in_the_plain_list(store: Store, item: Any) -> None:
    view = store.view(store.put_value([1, item, 2]))
    assert item in view
    assert [1, 2, 3] not in view


@pytest.mark.parametrize("value", [None, 1, 1.0, True, "", "short", "x" * 600, b"x" * 600, -0.0])
def test_view_returns_a_scalar_itself(store: Store, value: Any) -> None:
    assert exact(store.view(store.put_value(value))) == exact(value)


@pytest.mark.parametrize("value", [[], {}])
def test_an_empty_container_has_nothing_in_it(store: Store, value: Any) -> None:
    view = store.view(store.put_value(value))
    assert (len(view), list(view), view.load()) == (0, [], value)
    assert "a" not in view


def test_the_repr_of_a_view_names_its_kind_and_length(store: Store) -> None:
    assert repr(store.view(store.put_value([1, 2]))) == "<View of a list with 2 entries>"
    assert repr(store.view(store.put_value({"a": 1}))) == "<View of a map with 1 entries>"


# --- reading little -----------------------------------------------------------------------


def test_one_key_of_20_000_reads_a_piece_a_level() -> None:
    engine = CountingEngine()
    store = Store(engine)
    digest = store.put_value({f"key {n}": {"n": n} for n in range(20_000)})
    source = random.Random(1)
    for _ in range(20):
        number = source.randrange(20_000)
        engine.forget()
        view = store.view(digest)
        assert view[f"key {number}"]["n"] == number
        assert view.pieces_read == engine.objects_read <= 8
        assert "no such key" not in view
        assert view.get("zzz") is None
        assert engine.objects_read <= 16


def test_one_slice_of_10_000_items_reads_the_pieces_it_lies_in() -> None:
    engine = CountingEngine()
    store = Store(engine)
    digest = store.put_value(list(range(10_000)))
    for start in (0, 17, 5_000, 9_990):
        view = store.view(digest)
        assert view[start : start + 10] == list(range(10_000))[start : start + 10]
        # A piece a level, and as many leaves as ten items may lie in.
        assert view.pieces_read <= 16


def test_len_of_a_view_reads_only_the_root() -> None:
    store = Store(MemoryEngine())
    view = store.view(store.put_value(list(range(10_000))))
    assert len(view) == 10_000
    assert view.pieces_read == 1


def test_keys_of_a_map_are_read_lazily() -> None:
    store = Store(MemoryEngine())
    view = store.view(store.put_value({f"{n:05}": "t" * 600 for n in range(10_000)}))
    keys = view.keys()
    assert [next(keys) for _ in range(3)] == ["00000", "00001", "00002"]
    assert view.pieces_read <= 8


# --- refusals ------------------------------------------------------------------------------

NESTED = {"list": [{"deep": {"a": 1}}], "scalar": 5, "text": "x" * 600}


@pytest.mark.parametrize(
    ("path", "fails_at"),
    [
        (("absent",), ("absent",)),
        (("list", 1), ("list", 1)),
        (("list", -2), ("list", -2)),
        (("list", 0, "deep", "b"), ("list", 0, "deep", "b")),
        (("list", 0, "absent", "a", "b"), ("list", 0, "absent")),
        (("scalar", "a"), ("scalar", "a")),
        (("scalar", "a", "b", "c"), ("scalar", "a")),
        (("text", 0), ("text", 0)),
        (("list", 0, "deep", "a", 3, 4), ("list", 0, "deep", "a", 3)),
    ],
)
def test_path_not_found_error_names_the_failing_step(
    store: Store, path: tuple[Any, ...], fails_at: tuple[Any, ...]
) -> None:
    view = store.view(store.put_value(NESTED))
    with pytest.raises(PathNotFoundError) as caught:
        view.at(path)
    assert caught.value.path == fails_at


@pytest.mark.parametrize(
    "path",
    [
        ("scalar", None),
        ("scalar", 1.5),
        ("list", slice(0, 1), 0),
        ("absent", b"a"),
        5,
        None,
        "text",
    ],
    ids=repr,
)
def test_an_invalid_path_raises_invalid_input_error_for_every_value(
    store: Store, path: Any
) -> None:
    digest = store.put_value(NESTED)
    with pytest.raises(InvalidInputError):
        store.view(digest).at(path)
    for edit in (Set(path, 1), Delete(path), Insert(path, 1), Append(path, 1)):
        with pytest.raises(InvalidInputError):
            store.edit(digest, edit)


def test_an_error_in_an_inner_view_names_the_path_from_the_root(store: Store) -> None:
    view = store.view(store.put_value(NESTED))
    inner = view["list"][0]
    with pytest.raises(PathNotFoundError) as caught:
        _ = inner["absent"]
    assert caught.value.path == ("list", 0, "absent")
    with pytest.raises(PathNotFoundError) as caught:
        inner.at(("deep", "absent"))
    assert caught.value.path == ("list", 0, "deep", "absent")
    with pytest.raises(PathNotFoundError) as caught:
        inner.at(("deep", "a", "b"))
    assert caught.value.path == ("list", 0, "deep", "a", "b")


@pytest.mark.parametrize("size", [3, 3_000])
def test_a_step_of_the_wrong_type_raises_invalid_input_error(store: Store, size: int) -> None:
    a_map = store.view(store.put_value({str(n): n for n in range(size)}))
    a_list = store.view(store.put_value(list(range(size))))
    steps: list[Any] = [0, None, b"0", 1.0, ("0",)]
    for step in steps:
        with pytest.raises(InvalidInputError, match="key of a map must be a str"):
            _ = a_map[step]
        with pytest.raises(InvalidInputError, match="key of a map must be a str"):
            a_map.get(step)
    steps = ["0", None, b"0", 1.0, True]
    for step in steps:
        with pytest.raises(InvalidInputError, match="index of a list must be an int"):
            _ = a_list[step]
    with pytest.raises(InvalidInputError):
        _ = a_map[0:1]
    for step in (2, -1, 0, "1"):
        with pytest.raises(InvalidInputError):
            _ = a_list[::step]
    with pytest.raises(InvalidInputError):
        _ = a_list["a":"b"]
    with pytest.raises(InvalidInputError):
        list(a_list.keys())
    with pytest.raises(InvalidInputError):
        list(a_list.items())
