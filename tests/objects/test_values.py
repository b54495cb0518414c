"""Values go in and come out exactly; damage, bombs and wrong kinds end in typed errors."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import casstore
from casstore import Append, Delete, Digest, Insert, Link, Set, Store
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import NewObject, Write
from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    InvalidValueError,
    LimitError,
    NotCanonicalError,
    ObjectNotFoundError,
)
from casstore.format.canonical import (
    ROLE_PART,
    ROLE_TEXT,
    encode,
    item_link_bytes,
    link_bytes,
)
from casstore.format.digest import Kind
from casstore.format.tree import Child, encode_branch, seal_rope
from tests.objects.specimens import (
    CountingEngine,
    TamperingEngine,
    Values,
    all_infos,
    exact,
    put_branch,
    put_list_bomb,
    put_object,
    put_part_chain,
    put_rope,
    put_text_link,
    reachable,
)

PROFILE = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TARGETS = [b"target %d" % number for number in range(3)]
LINKS = [Link(Digest.of_blob(content)) for content in TARGETS]


@pytest.fixture(scope="module", params=["memory", "lmdb"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    if request.param == "memory":
        made = Store(MemoryEngine())
    else:
        made = casstore.open(tmp_path_factory.mktemp("values") / "store", "relaxed")
    with made:
        made.put_many(TARGETS)
        yield made


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, 0.0, -0.0, 1, 1.0, True, False, "", b"", 2**64 - 1, -(2**63)]),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.builds(lambda char, times: char * times, st.characters(codec="utf-8"), st.integers(0, 1200)),
    st.builds(
        lambda byte, times: byte * times, st.binary(min_size=1, max_size=1), st.integers(0, 1200)
    ),
    st.sampled_from(LINKS),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=12),
        st.dictionaries(st.text(max_size=12), inner, max_size=12),
        # The same part at many places, and enough of it for a tree.
        st.builds(lambda part, times: [part] * times, inner, st.integers(0, 60)),
        st.builds(
            lambda part, times: {str(n): part for n in range(times)}, inner, st.integers(0, 60)
        ),
        st.builds(lambda part, depth: nested(part, depth), inner, st.integers(1, 8)),
    ),
    max_leaves=25,
)


def nested(core: Any, depth: int) -> Any:
    """``core`` inside alternating lists and maps."""
    for level in range(depth):
        core = [core] if level % 2 else {"in": core}
    return core


def depth_of(value: Any) -> int:
    if type(value) is dict:
        return 1 + max(map(depth_of, value.values()), default=0)
    if type(value) is list:
        return 1 + max(map(depth_of, value), default=0)
    return 0


def scrambled(value: Any) -> Any:
    """The same value, its maps filled in another order."""
    if type(value) is dict:
        return {key: scrambled(value[key]) for key in reversed(list(value))}
    if type(value) is list:
        return [scrambled(item) for item in value]
    return value


# --- there and back ----------------------------------------------------------------------


@PROFILE
@example([])
@example({})
@example({"": []})
@example([[], {}, "", b"", None])
@example([1, 1.0, True, 0, 0.0, -0.0, False])
@example(list(range(5_000)))
@example({str(number): number for number in range(5_000)})
@example("x" * 511)
@example("x" * 512)
@example("é" * 256)
@example("x" * 200_000)
@example(bytes(200_000))
@example(LINKS[0])
@example(nested(1, 64))
@given(values.filter(lambda value: depth_of(value) <= 64))
def test_a_value_comes_back_exactly_as_it_was_put(store: Store, value: Any) -> None:
    digest = store.put_value(value)
    assert type(digest) is Digest
    assert exact(store.get_value(digest)) == exact(value)
    assert exact(store.get_many([digest])) == exact([value])


@PROFILE
@given(values.filter(lambda value: depth_of(value) <= 64))
def test_equal_values_have_one_digest(store: Store, value: Any) -> None:
    assert store.put_value(scrambled(value)) == store.put_value(value)


@pytest.mark.parametrize("seed", range(12))
def test_values_of_every_size_come_back_and_keep_their_digest(store: Store, seed: int) -> None:
    value = Values(seed).container()
    digest = store.put_value(value)
    assert exact(store.get_value(digest)) == exact(value)
    assert store.put_value(store.get_value(digest)) == digest


def test_values_that_python_considers_equal_have_different_digests(store: Store) -> None:
    different: list[Any] = [1, 1.0, True, 0, 0.0, -0.0, False, None, "", b"", [], {}, "1", b"1"]
    assert len({store.put_value(value) for value in different}) == len(different)
    assert len({store.put_value([value]) for value in different}) == len(different)
    assert len({store.put_value({"k": value}) for value in different}) == len(different)
    assert store.put_value("x" * 600) != store.put_value(b"x" * 600)


def test_a_blob_and_a_value_of_the_same_bytes_are_different_objects(store: Store) -> None:
    for content in (b"", b"short", b"x" * 600, b"x" * 100_000):
        assert store.put_blob(content) != store.put_value(content)


def test_a_tuple_comes_back_as_a_list(store: Store) -> None:
    assert store.put_value((1, (2,))) == store.put_value([1, [2]])
    assert exact(store.get_value(store.put_value((1, (2,))))) == exact([1, [2]])


def test_maps_come_back_in_key_order(store: Store) -> None:
    for count in (3, 3_000):
        digest = store.put_value({str(number): number for number in reversed(range(count))})
        assert list(store.get_value(digest)) == sorted(map(str, range(count)))


def test_64_levels_are_stored_and_65_refused_whether_or_not_they_are_cut(store: Store) -> None:
    for filling in ("", "x" * 600, "y" * 300):

        def wrapped(levels: int, filling: str = filling) -> Any:
            value: Any = 0
            for _ in range(levels):
                value = {"in": value, "filling": filling}
            return value

        assert exact(store.get_value(store.put_value(wrapped(64)))) == exact(wrapped(64))
        with pytest.raises(LimitError) as caught:
            store.put_value(wrapped(65))
        assert caught.value.path == ("in",) * 64


def test_an_invalid_value_stores_nothing(store: Store) -> None:
    before = len(all_infos(store.engine))
    with pytest.raises(InvalidValueError) as caught:
        store.put_value({"fine": "only here " * 100, "list": [1, {"deep": {2, 3}}]})
    assert caught.value.path == ("list", 1, "deep")
    assert len(all_infos(store.engine)) == before


def test_a_link_to_a_missing_object_is_refused_and_stores_nothing(store: Store) -> None:
    before = len(all_infos(store.engine))
    target = Digest.of_blob(b"nobody stored this")
    with pytest.raises(ObjectNotFoundError) as caught:
        store.put_value({"text": "some long text that nobody else has " * 50, "link": Link(target)})
    assert caught.value.digest == target
    assert len(all_infos(store.engine)) == before


# --- values that another thread changes meanwhile --------------------------------------------


def putting_while_changing(
    store: Store, value: Any, change: Callable[[Any], None], moment: int
) -> tuple[bool, Digest | None]:
    """Change ``value`` at one of the moments at which another thread might, while it is put.

    Was it put before that moment came? And its digest; None if it was refused.
    """
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_globals["__name__"].startswith("casstore.format."):
            lines += 1
            if lines == moment:
                change(value)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        digest = store.put_value(value)
    except InvalidValueError:
        return lines < moment, None
    finally:
        sys.settrace(before)
    return lines < moment, digest


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: {"a": 1, "b": 2, "c": 3}, id="a flat map"),
        pytest.param(lambda: {"a": 1.5, "b": [2], "c": 3}, id="a short map"),
        pytest.param(lambda: {f"key {n}": "v" * 50 for n in range(12)} | {"b": 2}, id="a piece"),
        pytest.param(lambda: [{"a": 1, "b": 2}, 2, 3.5], id="a short list"),
        pytest.param(lambda: ["v" * 50 for n in range(12)], id="a list in a piece"),
    ],
)
@pytest.mark.parametrize(
    ("into_map", "into_list"),
    [
        pytest.param({"b": {"z": 1, "a": 2}}, {"z": 1, "a": 2}, id="a map out of order"),
        pytest.param({"b": float("nan")}, float("nan"), id="not a number"),
        pytest.param({5: 1}, {5: 1}, id="a key that is no text"),
        pytest.param(None, None, id="something gone"),
    ],
)
def test_a_value_changed_during_put_is_stored_in_one_state_or_refused(
    make: Callable[[], Any], into_map: Any, into_list: Any
) -> None:
    def change(value: Any) -> None:
        if into_list is None:
            value.pop("b" if type(value) is dict else -1)
        elif type(value) is dict:
            value.update(into_map)
        else:
            value[1] = into_list
            value.append(into_list)

    store = Store(MemoryEngine())
    changed = make()
    change(changed)
    outcomes = [exact(make()), exact(changed)]
    moment, done = 1, False
    while not done:
        done, digest = putting_while_changing(store, make(), change, moment)
        # A refusal is for what the change has brought; nothing else may go wrong.
        assert (digest is not None) or into_list is not None
        assert digest is None or exact(store.get_value(digest)) in outcomes
        moment += 1


# --- what comes back belongs to the caller --------------------------------------------------


def containers(value: Any) -> Iterator[Any]:
    if type(value) in (list, dict):
        yield value
        for item in value.values() if type(value) is dict else value:
            yield from containers(item)


SHARED_PARTS = [
    pytest.param([1, 2], id="a short list"),
    pytest.param({"a": [1]}, id="a short map"),
    pytest.param(["word"] * 150, id="a list in a piece of its own"),
    pytest.param([{"text": "t" * 600}], id="a list that links"),
    pytest.param([{"n": n, "word": "w" * 90} for n in range(60)], id="a list tree"),
    pytest.param({f"key {n}": [n, "w" * 90] for n in range(60)}, id="a map tree"),
]


@pytest.mark.parametrize("part", SHARED_PARTS)
def test_a_value_read_back_shares_no_list_or_map_between_two_paths(store: Store, part: Any) -> None:
    value = {"first": part, "second": part, "many": [part] * 40}
    digest = store.put_value(value)
    view = store.view(digest)
    [change] = store.diff(store.put_value(0), digest)
    many = store.get_many([digest, digest])
    for got in (store.get_value(digest), view.load(), change.after, many):
        assert len({id(found) for found in containers(got)}) == len(list(containers(got)))
    for item in view["many"][0:40]:
        item.clear()
    assert exact(view["many"][0:2]) == exact([part, part])


@pytest.mark.parametrize("part", SHARED_PARTS)
def test_changing_a_returned_value_changes_no_other_returned_value(store: Store, part: Any) -> None:
    digest = store.put_value([part, part])
    one, other = store.get_many([digest, digest])
    for found in list(containers(one[0])):
        found.clear()
    one[0] = "gone"
    assert exact(one[1]) == exact(part)
    assert exact(other) == exact([part, part])
    assert exact(store.get_value(digest)) == exact([part, part])


# --- how much may come out -------------------------------------------------------------------


def least_bytes(read: Callable[[int], object], low: int, high: int) -> int:
    """The smallest budget that a read is satisfied with."""
    while low < high:
        middle = (low + high) // 2
        try:
            read(middle)
            high = middle
        except LimitError:
            low = middle + 1
    return low


def test_max_bytes_of_a_value_in_one_piece_is_the_length_of_its_encoding(store: Store) -> None:
    for value in (None, [1, 2, 3], {"key": "x" * 400}, list(range(600))):
        digest, size = store.put_value(value), len(encode(value))
        assert exact(store.get_value(digest, max_bytes=size)) == exact(value)
        with pytest.raises(LimitError):
            store.get_value(digest, max_bytes=size - 1)


@pytest.mark.parametrize("size", [512, 65_535, 65_536, 200_000])
def test_max_bytes_of_a_long_text_is_its_length_and_that_of_its_link(
    store: Store, size: int
) -> None:
    digest = store.put_value("x" * size)
    needed = size + len(link_bytes(ROLE_TEXT, digest))
    assert store.get_value(digest, max_bytes=needed) == "x" * size
    with pytest.raises(LimitError):
        store.get_value(digest, max_bytes=needed - 1)


@pytest.mark.parametrize("seed", range(6))
def test_max_bytes_of_a_value_without_repeated_pieces_is_the_sum_of_its_pieces(seed: int) -> None:
    store = Store(MemoryEngine())
    # Every part differs, so nothing is counted twice.
    value = [{"n": n, "text": f"{seed} {n} " * (20 * seed + 1)} for n in range(80)]
    digest = store.put_value(value)
    pieces = reachable(store.engine, digest).values()
    size = sum(info.size_bytes for info in pieces)
    assert least_bytes(lambda limit: store.get_value(digest, max_bytes=limit), 0, 2 * size) == size


def test_a_repeated_part_counts_against_max_bytes_at_each_occurrence() -> None:
    store = Store(MemoryEngine())
    part = ["word"] * 150
    once, often = store.put_value([part, 1]), store.put_value([part] * 50)
    store.get_value(once, max_bytes=2_000)
    with pytest.raises(LimitError):
        store.get_value(often, max_bytes=50 * len(encode(part)) - 1)
    assert len(store.get_value(often, max_bytes=51 * len(encode(part)) + 5_000)) == 50


def test_views_and_changes_obey_max_bytes(store: Store) -> None:
    digest = store.put_value({"text": "x" * 5_000, "list": list(range(5_000)), "small": 1})
    view = store.view(digest, max_bytes=3_000)
    assert view["small"] == 1
    for read in (view.load, lambda: view["text"], view["list"].load):
        with pytest.raises(LimitError):
            read()
    assert view["list"][10:12] == [10, 11]
    [change] = store.diff(store.put_value(None), digest, max_bytes=3_000)
    with pytest.raises(LimitError):
        _ = change.after


def test_a_slice_obeys_max_bytes_though_its_leaves_contain_no_links() -> None:
    store = Store(MemoryEngine())
    view = store.view(store.put_value(list(range(5_000))), max_bytes=3_000)
    with pytest.raises(LimitError):
        _ = view[0:4_000]
    bomb = store.view(put_list_bomb(store.engine, levels=3), max_bytes=3_000)
    with pytest.raises(LimitError):
        _ = bomb[0 : 128**2]


def test_a_read_over_max_bytes_stops_before_it_fetches_most_pieces() -> None:
    """All 3,000 texts lie on one level; most of them must stay unread (P7)."""
    engine = CountingEngine()
    store = Store(engine)
    digest = store.put_value([f"{number} " * 150 for number in range(3_000)])
    engine.forget()
    with pytest.raises(LimitError):
        store.get_value(digest, max_bytes=200_000)
    assert engine.objects_read <= 1_500


# --- bombs -------------------------------------------------------------------------------------


def test_a_tree_that_repeats_one_leaf_stops_at_the_budget() -> None:
    engine = CountingEngine()
    store = Store(engine)
    digest = put_list_bomb(engine)
    for read in (
        lambda: store.get_value(digest, max_bytes=10_000),
        lambda: store.get_many([digest], max_bytes=10_000),
        lambda: store.view(digest, max_bytes=10_000).load(),
        lambda: next(store.diff(store.put_value(0), digest, max_bytes=10_000)).after,
    ):
        engine.forget()
        with pytest.raises(LimitError):
            read()
        assert engine.objects_read < 50


def test_a_part_of_a_tree_that_repeats_one_leaf_can_still_be_read() -> None:
    engine = CountingEngine()
    store = Store(engine)
    view = store.view(put_list_bomb(engine), max_bytes=10_000)
    assert len(view) == 128**4
    assert view[-1] == 0
    assert view[128**3 : 128**3 + 3] == [0, 0, 0]
    assert view.pieces_read < 50


def test_a_tree_that_repeats_an_empty_leaf_stops_at_the_budget() -> None:
    engine = CountingEngine()
    leaf = Child(put_object(engine, Kind.VALUE, b"\x90"), 1, 1, "")
    for level in range(1, 5):
        name = put_branch(engine, Kind.LIST, level, [leaf] * 128)
        leaf = Child(name, 128 * leaf.entries, 128 * leaf.size, "")
    with pytest.raises((LimitError, CorruptionError)):
        Store(engine).get_value(leaf.digest, max_bytes=10_000)


@pytest.mark.parametrize("levels", [5, 9])
def test_a_list_with_an_impossible_length_is_refused_by_every_read(levels: int) -> None:
    engine = MemoryEngine()
    store = Store(engine)
    digest = put_list_bomb(engine, levels=levels)
    other = store.put_value([1])
    for call in (
        lambda: store.get_value(digest, max_bytes=10_000),
        lambda: len(store.view(digest)),
        lambda: store.view(digest)[-1],
        lambda: store.edit(digest, Append((), 1)),
        lambda: list(store.diff(other, digest, max_bytes=10_000)),
    ):
        with pytest.raises(NotCanonicalError):
            call()


def test_a_blob_that_claims_to_be_longer_than_any_file_is_refused() -> None:
    engine = MemoryEngine()
    store = Store(engine)
    chunk = put_object(engine, Kind.BLOB, b"x")
    body = encode_branch(Kind.CHUNKS, 1, [Child(chunk, 2**62, 2**62, "")] * 2)
    name = Digest.of_blob(b"the content is never reached")
    rope = NewObject(name, Kind.ROPE, seal_rope(body), [chunk, chunk])
    engine.write(Write(objects=[rope]))
    for call in (lambda: store.open_blob(name).seek(0, io.SEEK_END), lambda: store.get_blob(name)):
        with pytest.raises(NotCanonicalError):
            call()


def test_comparing_two_trees_that_repeat_their_leaves_reads_little_at_a_time() -> None:
    """Without care the rows of pieces grow by 128 a level, to 4 million at the fourth (P7)."""
    engine = CountingEngine()
    store = Store(engine)
    # Two levels are enough to tell, and end also without care.
    old, new = put_list_bomb(engine, [0], 2), put_list_bomb(engine, [1], 2)
    engine.forget()
    try:
        next(store.diff(old, new, max_bytes=10_000))
    except LimitError:
        pass
    assert engine.objects_read < 5_000


@pytest.mark.parametrize(("links", "nesting"), [(65, 1), (33, 2), (2, 40), (64, 64), (5_000, 1)])
def test_parts_nested_deeper_than_64_are_refused(links: int, nesting: int) -> None:
    store = Store(MemoryEngine())
    digest = put_part_chain(store.engine, links, nesting=nesting)
    with pytest.raises(LimitError):
        store.get_value(digest)
    with pytest.raises(LimitError):
        store.view(digest).load()


def test_63_parts_around_a_list_are_not_too_deep() -> None:
    store = Store(MemoryEngine())
    digest = put_part_chain(store.engine, 63)
    value = store.get_value(digest)
    assert depth_of(value) == 64


@pytest.mark.parametrize("nesting", [0, 1])
def test_no_operation_recurses_along_a_chain_of_parts_without_limit(nesting: int) -> None:
    store = Store(MemoryEngine())
    one = put_part_chain(store.engine, 2_000, nesting=nesting)
    other = put_part_chain(store.engine, 2_000, nesting=nesting, core=b"\x91\x01")
    path = [0] * 2_000 if nesting else []
    for work in (
        lambda: store.get_value(one),
        lambda: store.edit(one, Append(path, 1)),
        lambda: [change.after for change in store.diff(one, other)],
    ):
        with pytest.raises((LimitError, CorruptionError)):
            work()


@pytest.mark.parametrize("kind", [Kind.LIST, Kind.MAP])
@pytest.mark.parametrize("levels", [1, 10, 64])
def test_nested_trees_of_any_height_are_read_correctly(kind: int, levels: int) -> None:
    engine = MemoryEngine()
    store = Store(engine)
    key = "k" if kind == Kind.MAP else ""
    step: str | int = "k" if kind == Kind.MAP else 0

    def tall(core: bytes, links: list[bytes]) -> bytes:
        data = (b"\x81\xa1k" if kind == Kind.MAP else b"\x91") + core
        child = Child(put_object(engine, Kind.VALUE, data, links), 1, len(data) - 1, key)
        for level in range(1, levels + 1):
            child = child._replace(digest=put_branch(engine, kind, level, [child]))
        return child.digest

    roots: list[bytes] = []
    for number in (b"\x01", b"\x02"):
        digest = tall(number, [])
        for _ in range(63):
            digest = tall(link_bytes(ROLE_PART, digest), [digest])
        roots.append(digest)
    whole: Any = 1
    for _ in range(64):
        whole = {"k": whole} if kind == Kind.MAP else [whole]
    assert exact(store.get_value(roots[0])) == exact(whole)
    assert exact(store.view(roots[0]).load()) == exact(whole)
    [change] = store.diff(*roots)
    assert (change.path, change.before, change.after) == ((step,) * 64, 1, 2)


def called_from(frames: int, call: Callable[[], Any]) -> Any:
    """Make a call with this many stack frames above it."""
    return call() if not frames else called_from(frames - 1, call)


def test_a_read_with_a_nearly_exhausted_stack_raises_recursion_error_not_damage() -> None:
    store = Store(MemoryEngine())
    value: Any = 1
    for _ in range(64):
        value = {"many": ["word"] * 900, "one": value} if type(value) is list else [value, 2]
    digest = store.put_value(value)
    # As deep as agents and their frameworks go.
    assert called_from(sys.getrecursionlimit() // 2, lambda: store.get_value(digest)) == value
    for frames in range(sys.getrecursionlimit() // 2, sys.getrecursionlimit(), 7):
        try:
            assert called_from(frames, lambda: store.get_value(digest)) == value
        except RecursionError:
            continue


def test_a_chain_of_links_is_never_returned_as_a_value() -> None:
    """A view hands out plain values and views, whatever a store was filled with."""
    store = Store(MemoryEngine())
    chain = put_part_chain(store.engine, 3, nesting=0)
    outer = put_object(store.engine, Kind.VALUE, b"\x91" + link_bytes(ROLE_PART, chain), [chain])
    looks: list[Callable[[], object]] = [lambda: store.view(chain), lambda: store.view(outer)[0]]
    for look in looks:
        try:
            found = look()
        except (CorruptionError, LimitError):
            continue
        assert type(found) in (casstore.View, list)


def test_a_text_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    engine = CountingEngine()
    chunk = Child(put_object(engine, Kind.BLOB, b"x" * 1_000), 1_000, 1_000, "")
    for level in range(1, 5):
        name = put_branch(engine, Kind.CHUNKS, level, [chunk] * 128)
        chunk = Child(name, 128 * chunk.size, 128 * chunk.size, "")
    store = Store(engine)
    rope = Digest.of_blob(b"the content is never reached")
    put_rope(engine, rope, [b"a" * 60_000, b"b" * 60_000])
    digest = put_text_link(engine, rope)
    engine.forget()
    with pytest.raises(LimitError):
        store.get_value(digest, max_bytes=100_000)
    with pytest.raises(LimitError):
        store.view(digest, max_bytes=100_000)
    with pytest.raises(LimitError):
        store.get_blob(rope, max_bytes=100_000)
    assert engine.bytes_read < 2_000


def test_the_same_huge_text_many_times_stops_at_the_budget() -> None:
    engine = CountingEngine()
    store = Store(engine)
    digest = store.put_value(["x" * 300_000] * 200)
    engine.forget()
    with pytest.raises(LimitError):
        store.get_value(digest, max_bytes=1_000_000)
    assert engine.bytes_read < 2_000_000


# --- damage ------------------------------------------------------------------------------------

LONG_TEXT = "".join(chr(97 + number * number % 26) for number in range(70_000))
RICH_VALUE: dict[str, Any] = {
    "list": [{"n": n, "text": f"item {n} " * 90} for n in range(120)],
    "map": {f"key {n}": [n, "w" * 90] for n in range(120)},
    "rope": LONG_TEXT * 2,
    "bytes": bytes(range(256)) * 4,
    "small": [1, 2, 3],
}


class Damaged:
    """A rich value in an engine that can be made to lie about any of its pieces."""

    def __init__(self) -> None:
        self.engine = TamperingEngine()
        self.store = Store(self.engine)
        self.digest = self.store.put_value(RICH_VALUE)
        self.other = self.store.put_value({"list": [], "map": {}})
        self.pieces = reachable(self.engine, self.digest)

    def of_kind(self, kind: int) -> list[bytes]:
        """Some pieces of one kind."""
        found = sorted(name for name, info in self.pieces.items() if info.kind == kind)
        return found if len(found) < 4 else [found[0], found[len(found) // 2], found[-1]]


@pytest.fixture(scope="module")
def damaged() -> Damaged:
    return Damaged()


@pytest.fixture
def sound(damaged: Damaged) -> Iterator[Damaged]:
    yield damaged
    damaged.engine.flipped = damaged.engine.hidden = damaged.engine.other_kind = None


def read_everything(found: Any) -> None:
    if isinstance(found, casstore.View):
        for step in list(found.keys()) if found.is_map else range(len(found)):
            read_everything(found[step])


def read_all_changes(store: Store, old: bytes, new: bytes) -> None:
    for change in store.diff(old, new):
        _ = change.before, change.after


def edit_everywhere(store: Store, digest: bytes) -> None:
    for index in range(len(RICH_VALUE["list"])):
        store.edit(digest, Set(("list", index, "n"), -1))
    for key in RICH_VALUE["map"]:
        store.edit(digest, Set(("map", key, 0), -1))


WHOLE_READS: list[Callable[[Damaged], object]] = [
    lambda on: on.store.get_value(on.digest),
    lambda on: on.store.get_many([on.other, on.digest]),
    lambda on: on.store.view(on.digest).load(),
    lambda on: read_everything(on.store.view(on.digest)),
    lambda on: read_all_changes(on.store, on.other, on.digest),
    lambda on: read_all_changes(on.store, on.digest, on.other),
]


@pytest.mark.parametrize("kind", [Kind.BLOB, Kind.ROPE, Kind.VALUE, Kind.LIST, Kind.MAP])
@pytest.mark.parametrize("read", WHOLE_READS)
def test_a_flipped_bit_in_any_piece_is_found_on_every_way_to_read(
    sound: Damaged, read: Callable[[Damaged], object], kind: int
) -> None:
    read(sound)
    for piece in sound.of_kind(kind):
        sound.engine.flipped = piece
        with pytest.raises(CorruptionError, match=piece.hex()):
            read(sound)


@pytest.mark.parametrize("kind", [Kind.LIST, Kind.MAP])
def test_a_flipped_bit_in_any_branch_is_found_by_an_edit_that_passes_it(
    sound: Damaged, kind: int
) -> None:
    for piece in sound.of_kind(kind):
        sound.engine.flipped = piece
        with pytest.raises(CorruptionError, match=piece.hex()):
            edit_everywhere(sound.store, sound.digest)


def test_a_flipped_bit_is_found_by_every_kind_of_edit(sound: Damaged) -> None:
    sound.engine.flipped = sound.digest
    for change in (
        Set(("small", 0), 9),
        Delete(("small",)),
        Insert(("small", 0), 9),
        Append(("small",), 9),
        Set((), 9),
    ):
        with pytest.raises(CorruptionError, match=sound.digest.hex()):
            sound.store.edit(sound.digest, change)


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_flipped_bit_in_a_blob_is_found_on_every_way_to_read(size: int) -> None:
    engine = TamperingEngine()
    store = Store(engine)
    digest = store.put_blob(Values(size).random.randbytes(size))
    other = store.put_blob(b"another")
    for piece in reachable(engine, digest):
        for at in (0, 40, -1):
            engine.flipped, engine.flipped_at = piece, at
            for read in (
                lambda: store.get_blob(digest),
                lambda: store.get_many([digest]),
                lambda: read_all_changes(store, other, digest),
                lambda: store.open_blob(digest).read(),
            ):
                with pytest.raises(CorruptionError, match=piece.hex()):
                    read()


@pytest.mark.parametrize("read", WHOLE_READS)
def test_a_missing_piece_is_damage_and_the_message_names_it(
    sound: Damaged, read: Callable[[Damaged], object]
) -> None:
    for kind in (Kind.BLOB, Kind.VALUE, Kind.ROPE):
        for piece in sound.of_kind(kind):
            if piece != sound.digest:
                sound.engine.hidden = piece
                with pytest.raises(CorruptionError, match=piece.hex()):
                    read(sound)


def test_a_missing_chunk_is_damage_and_the_message_names_it() -> None:
    engine = TamperingEngine()
    store = Store(engine)
    digest = store.put_blob(Values(7).random.randbytes(200_000))
    for piece in set(reachable(engine, digest)) - {digest}:
        engine.hidden = piece
        with pytest.raises(CorruptionError, match=piece.hex()):
            store.get_blob(digest)
        with pytest.raises(CorruptionError, match=piece.hex()):
            store.open_blob(digest).read()


def test_a_missing_root_object_raises_object_not_found_error(store: Store) -> None:
    absent, there = Digest.of_blob(b"nobody put this"), store.put_value([1])
    for read in (
        lambda: store.get_blob(absent),
        lambda: store.get_value(absent),
        lambda: store.get_many([there, absent]),
        lambda: store.view(absent),
        lambda: store.open_blob(absent),
        lambda: store.edit(absent, Append((), 1)),
        lambda: store.edit(absent, Set((), 1)),
        lambda: store.diff(absent, there),
        lambda: store.diff(there, absent),
    ):
        with pytest.raises(ObjectNotFoundError) as caught:
            read()
        assert caught.value.digest == absent


def test_an_object_under_another_kind_is_damage(sound: Damaged) -> None:
    for kind in (Kind.BLOB, Kind.ROPE, Kind.MAP, Kind.LIST, Kind.CHUNKS, 99):
        sound.engine.other_kind = (sound.digest, kind)
        with pytest.raises(CorruptionError):
            sound.store.get_value(sound.digest)


def test_sound_pieces_linked_in_the_wrong_role_are_damage() -> None:
    engine = MemoryEngine()
    store = Store(engine)
    text, part = store.put_blob(b"\xff\xfe"), store.put_value([1])
    a_map = store.put_value({"a": 1})
    wrong = [
        put_text_link(engine, text),
        put_text_link(engine, part),
        put_object(engine, Kind.VALUE, link_bytes(ROLE_PART, text), [text]),
        put_branch(engine, Kind.LIST, 1, [Child(a_map, 1, 4, "")]),
        put_branch(engine, Kind.MAP, 1, [Child(part, 1, 2, "a")]),
        put_branch(engine, Kind.LIST, 2, [Child(part, 1, 2, "")]),
        put_branch(engine, Kind.LIST, 1, [Child(text, 1, 2, "")]),
    ]
    for digest in wrong:
        with pytest.raises((CorruptionError, InvalidInputError)) as caught:
            store.get_value(digest)
        assert isinstance(caught.value, CorruptionError), f"{caught.value!r} blames the caller"


def test_a_list_tree_whose_leaf_counts_are_wrong_is_damage() -> None:
    engine = MemoryEngine()
    store = Store(engine)
    leaf = store.put_value([1, 2, 3])
    digest = put_branch(engine, Kind.LIST, 1, [Child(leaf, 2, 4, ""), Child(leaf, 3, 4, "")])
    reads: list[Callable[[], object]] = [
        lambda: store.view(digest)[1],
        lambda: store.get_value(digest),
    ]
    for read in reads:
        with pytest.raises(CorruptionError):
            read()


def every_read(store: Store, digest: bytes, step: str | int) -> list[Callable[[], object]]:
    """Every way to read a list or map, or the part of it at ``step``."""
    is_map = type(step) is str
    empty = store.put_value({} if is_map else [])
    long = store.put_value({f"k{n}": n for n in range(900)} if is_map else list(range(900)))
    reads: list[Callable[[], object]] = [
        lambda: store.get_value(digest),
        lambda: store.view(digest).load(),
        lambda: list(store.view(digest)),
        lambda: store.view(digest)[step],
        lambda: read_all_changes(store, digest, empty),
        lambda: read_all_changes(store, empty, digest),
        lambda: read_all_changes(store, digest, long),
        lambda: read_all_changes(store, long, digest),
    ]
    if not is_map:
        reads.append(lambda: store.view(digest)[0:2])
    return reads


def every_edit(store: Store, digest: bytes, step: str | int) -> list[Callable[[], object]]:
    """Every way to change what stands at ``step``."""
    return [
        lambda: store.edit(digest, Set((step,), "other")),
        lambda: store.edit(digest, Delete((step,))),
    ]


@pytest.mark.parametrize("kind", [Kind.LIST, Kind.MAP])
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("lie", ["more", "fewer", "larger", "another key", "nothing"])
def test_the_counts_and_sizes_of_a_branch_are_verified(kind: int, levels: int, lie: str) -> None:
    engine = MemoryEngine()
    store = Store(engine)
    is_map = kind == Kind.MAP
    keys = ["key 1", "key 2", "key 3", "key 4"]
    leaf = encode(dict.fromkeys(keys, 1) if is_map else keys)
    child = Child(
        put_object(engine, Kind.VALUE, leaf), 4, len(leaf) - 1, keys[-1] if is_map else ""
    )
    for level in range(1, levels):
        child = child._replace(digest=put_branch(engine, kind, level, [child]))
    told = {
        "more": child._replace(entries=5),
        "fewer": child._replace(entries=3),
        "larger": child._replace(size=child.size + 4_000),
        "another key": child._replace(key="key 5" if is_map else ""),
        "nothing": child,
    }[lie]
    digest = put_branch(engine, kind, levels, [told])
    step: str | int = keys[0] if is_map else 0
    calls = every_edit(store, digest, step)
    if lie != "larger" or levels > 1:
        # Only an edit asks how long a leaf would be in one piece with others.
        calls += every_read(store, digest, step)
    for call in calls:
        if told == child:
            call()
        else:
            with pytest.raises(CorruptionError):
                call()


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(b"\x81", id="cut short"),
        pytest.param(b"\x81\xa1k", id="without its value"),
        pytest.param(b"\x81\xa1\xff\x01", id="with a key that is no UTF-8"),
        pytest.param(b"\x81\x01\x02", id="with a number for a key"),
        pytest.param(b"\x81\xc4\x01k\x02", id="with bytes for a key"),
        pytest.param(b"\x82\xa1k\x01\xa1a\x01", id="out of order"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="that claims to be huge"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80", id="without entries"),
        pytest.param(b"\x91\xa1k", id="that is a list"),
        pytest.param(b"\x81\xa1k\x01\x00", id="with something behind it"),
    ],
)
def test_an_invalid_leaf_of_a_map_makes_every_read_raise_a_typed_error(
    leaf: bytes,
) -> None:
    engine = MemoryEngine()
    store = Store(engine)
    child = Child(put_object(engine, Kind.VALUE, leaf), 1, 3, "k")
    digest = put_branch(engine, Kind.MAP, 1, [child])
    for call in every_read(store, digest, "k") + every_edit(store, digest, "k"):
        with pytest.raises((CorruptionError, NotCanonicalError)):
            call()


@pytest.mark.parametrize(("said", "sound"), [(-1, False), (0, True), (1, False)])
def test_the_length_in_an_item_link_is_verified(said: int, sound: bool) -> None:
    engine = MemoryEngine()
    store = Store(engine)
    item = encode(["x" * 100])
    name = put_object(engine, Kind.VALUE, item)
    leaf = b"\x92\x01" + item_link_bytes(len(item) + said, name)
    size = 1 + len(item) + said
    child = Child(put_object(engine, Kind.VALUE, leaf, [name]), 2, size, "")
    digest = put_branch(engine, Kind.LIST, 1, [child])
    if sound:
        assert store.edit(digest, Set((0,), 2)) == store.put_value([2, ["x" * 100]])
    else:
        with pytest.raises(CorruptionError):
            store.edit(digest, Set((0,), 2))


def test_leaves_of_a_map_whose_keys_do_not_ascend_are_damage() -> None:
    engine = MemoryEngine()
    store = Store(engine)
    children = [
        Child(put_object(engine, Kind.VALUE, encode(leaf)), 2, len(encode(leaf)) - 1, last)
        for leaf, last in (({"a": 1, "c": 2}, "c"), ({"b": 3, "d": 4}, "d"))
    ]
    view = store.view(put_branch(engine, Kind.MAP, 1, children))
    for read in (view.load, lambda: list(view.keys()), lambda: list(view.items())):
        with pytest.raises(CorruptionError):
            read()


@pytest.mark.parametrize("kind", [Kind.LIST, Kind.MAP])
def test_a_branch_in_place_of_a_leaf_is_damage_at_any_depth(kind: int) -> None:
    engine = MemoryEngine()
    store = Store(engine)
    leaf = encode({"k": 1} if kind == Kind.MAP else [1])
    key = "k" if kind == Kind.MAP else ""
    child = Child(put_object(engine, Kind.VALUE, leaf), 1, len(leaf) - 1, key)
    for _ in range(3_000):
        child = child._replace(digest=put_branch(engine, kind, 1, [child]))
    step: str | int = "k" if kind == Kind.MAP else 0
    for call in every_read(store, child.digest, step) + every_edit(store, child.digest, step):
        with pytest.raises(CorruptionError):
            call()


# --- the wrong question ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 200_000])
def test_reading_a_blob_as_a_value_raises_invalid_input_error(store: Store, size: int) -> None:
    blob = store.put_blob(bytes(size))
    for read in (
        lambda: store.get_value(blob),
        lambda: store.view(blob),
        lambda: store.edit(blob, Append((), 1)),
        lambda: store.edit(blob, Set(("a",), 1)),
    ):
        with pytest.raises(InvalidInputError, match=blob.hex()):
            read()


@pytest.mark.parametrize("value", [1, "x" * 600, b"x" * 600, [1] * 5_000, {"a": 1}])
def test_reading_a_value_as_a_blob_raises_invalid_input_error(store: Store, value: Any) -> None:
    digest = store.put_value(value)
    for read in (lambda: store.get_blob(digest), lambda: store.open_blob(digest)):
        with pytest.raises(InvalidInputError, match=digest.hex()):
            read()


@pytest.mark.parametrize("content", [bytearray(b"x"), memoryview(b"x"), "x", None, io.BytesIO(b"")])
def test_put_blob_accepts_only_bytes(store: Store, content: Any) -> None:
    with pytest.raises(InvalidInputError):
        store.put_blob(content)


def test_an_invalid_digest_is_refused(store: Store) -> None:
    reads: list[Callable[[bytes], object]] = [
        store.get_blob,
        store.get_value,
        store.view,
        lambda name: store.missing([name]),
    ]
    for name in (b"", b"short", bytes(33)):
        for read in reads:
            with pytest.raises(InvalidInputError):
                read(name)
