"""The changes between two values turn the one into the other, and cost what they are worth."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from casstore import Append, Change, Delete, Insert, Set, Store
from casstore.engine.memory import MemoryEngine
from casstore.objects.diff import ADDED, CHANGED, REMOVED
from tests.objects.specimens import CountingEngine, Values, exact

PROFILE = settings(deadline=None, max_examples=150, derandomize=True, database=None)


# --- putting the changes to work ------------------------------------------------------------


class Node:
    """A list or map on its way from the older value to the newer.

    Holding the old items apart from the places they end up in is what makes ``old_path``
    and ``path`` of a list checkable: an item that no change names must keep its order.
    """

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.old: Any = {key: build(item) for key, item in entries(value)}
        self.removed: set[Any] = set()
        self.moved: dict[Any, Any] = {}
        self.added: dict[Any, Any] = {}

    def finish(self) -> Any:
        if self.kind is dict:
            kept = {key: item for key, item in self.old.items() if key not in self.removed}
            return {key: finish(item) for key, item in {**kept, **self.added}.items()}
        size = len(self.old) - len(self.removed) + len(self.added)
        placed: dict[int, Any] = dict(self.added)
        assert not set(placed) & set(self.moved.values()), "two items at one place"
        for was, now in self.moved.items():
            placed[now] = self.old[was]
        free = [at for at in range(size) if at not in placed]
        still = [was for was in self.old if was not in self.removed and was not in self.moved]
        assert len(free) == len(still), "changes that leave holes in a list"
        for at, was in zip(free, still, strict=True):
            placed[at] = self.old[was]
        return [finish(placed[at]) for at in range(size)]


def entries(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items() if type(value) is dict else enumerate(value))


def build(value: Any) -> Any:
    return Node(value) if type(value) in (list, dict) else value


def finish(node: Any) -> Any:
    return node.finish() if isinstance(node, Node) else node


def patched(old: Any, changes: list[Change]) -> Any:
    """The older value with all changes applied."""
    root = build(copy.deepcopy(old))
    for change in changes:
        assert change.op in (ADDED, REMOVED, CHANGED)
        if change.path == () and change.op == CHANGED:
            assert len(changes) == 1
            return change.after
        if change.op == ADDED:
            assert change.old_path is None
            assert change.before is None
            # The container that gets it is found by its place in the newer value.
            container = find_new(root, change.path[:-1])
            assert change.path[-1] not in container.added
            container.added[change.path[-1]] = change.after
            continue
        assert change.old_path is not None
        container = find_old(root, change.old_path[:-1])
        last = change.old_path[-1]
        assert exact(finish(container.old[last])) == exact(change.before)
        if change.op == REMOVED:
            assert change.path == change.old_path
            assert change.after is None
            container.removed.add(last)
            continue
        note_moves(root, change.old_path, change.path)
        container.old[last] = change.after
    return finish(root)


def find_old(root: Any, path: tuple[Any, ...]) -> Node:
    for step in path:
        root = root.old[step]
    assert isinstance(root, Node)
    return root


def find_new(root: Any, path: tuple[Any, ...]) -> Node:
    """A container by its place in the newer value: through the moves noted, else by key."""
    for step in path:
        if root.kind is list:
            was = {now: was for was, now in root.moved.items()}
            root = root.old[was[step]] if step in was else Placed(root, step).find()
        else:
            root = root.old[step]
    assert isinstance(root, Node)
    return root


class Placed:
    """An unchanged list item that changes below it name by its new place alone."""

    def __init__(self, node: Node, step: int) -> None:
        self.node = node
        self.step = step

    def find(self) -> Any:
        # Changes come in order, so everything before this place is known already: the
        # item is the one that as many kept items precede.
        before = sum(1 for at in self.node.added if at < self.step)
        gone = 0
        for was in self.node.old:
            if was in self.node.removed:
                gone += 1
            elif was - gone + before == self.step:
                self.node.moved[was] = self.step
                return self.node.old[was]
        raise AssertionError(f"no item for {self.step}")


def note_moves(root: Any, old_path: tuple[Any, ...], new_path: tuple[Any, ...]) -> None:
    assert len(old_path) == len(new_path)
    for was, now in zip(old_path, new_path, strict=True):
        if root.kind is list:
            assert root.moved.get(was, now) == now, "one item at two places"
            root.moved[was] = now
        else:
            assert was == now
        root = root.old[was]


def check(old: Any, new: Any, store: Store | None = None) -> list[Change]:
    """The changes between two values, after seeing that they are right."""
    store = store or Store(MemoryEngine())
    changes = list(store.diff(store.put_value(old), store.put_value(new)))
    assert exact(patched(old, changes)) == exact(new)
    assert (changes == []) == (exact(old) == exact(new))
    return changes


def encoded(changes: list[Change]) -> list[tuple[Any, ...]]:
    return [
        (change.op, change.old_path, change.path, change.before, change.after) for change in changes
    ]


# --- the changes turn the one into the other ---------------------------------------------------

scalars = st.sampled_from([0, 1, 1.0, True, None, "", "a", b"a", "x" * 600, b"x" * 600, -0.0, 0.0])
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.sampled_from("abcd"), inner, max_size=4)
    ),
    max_leaves=12,
)


@PROFILE
@given(trees, trees)
@example([[[1], 2]], [[[1, 2]]])
@example([[{"a": 1}, 2]], [[{"a": 1, "b": 2}]])
@example([[], [[]]], [[[]], []])
@example([[0, [1]], [2]], [[0], [[1], 2]])
@example({"a": [[[1], 2]]}, {"a": [[[1, 2]]]})
def test_the_changes_between_any_two_small_values_turn_one_into_the_other(
    old: Any, new: Any
) -> None:
    check(old, new)
    check(new, old)


@pytest.mark.parametrize("seed", range(20))
def test_the_changes_between_any_two_values_turn_one_into_the_other(seed: int) -> None:
    values = Values(seed)
    check(values.container(), values.container())


def altered(value: Any, source: random.Random, times: int) -> Any:
    """``value`` after some random edits."""
    value = copy.deepcopy(value)
    for _ in range(times):
        here = value
        while here and source.randrange(3):
            step = source.choice(list(here) if type(here) is dict else range(len(here)))
            if type(here[step]) not in (list, dict):
                break
            here = here[step]
        new = Values(source.randrange(1 << 30)).value(source.randrange(3))
        if type(here) is dict:
            if here and source.randrange(2):
                del here[source.choice(list(here))]
            else:
                here[Values(source.randrange(1 << 30)).key()] = new
        elif here and source.randrange(3) == 0:
            del here[source.randrange(len(here))]
        elif here and source.randrange(2):
            here[source.randrange(len(here))] = new
        else:
            here.insert(source.randrange(len(here) + 1), new)
    return value


@pytest.mark.parametrize("seed", range(24))
def test_the_changes_of_an_edited_value_turn_one_into_the_other(seed: int) -> None:
    old = Values(300 + seed).container()
    check(old, altered(old, random.Random(seed), 1 + seed % 12))


@pytest.mark.parametrize("seed", range(6))
def test_the_changes_of_an_edited_long_list_turn_one_into_the_other(seed: int) -> None:
    source = random.Random(seed)
    old: list[Any] = [{"n": n, "text": "t" * source.randrange(150)} for n in range(700)]
    new = altered(old, source, 10)
    check(old, new)
    block = new[100:200]
    check(old, [*new[:100], *new[200:400], *block, *new[400:]])


# --- what counts as a change ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [(1, True), (1, 1.0), (True, 1.0), (0, False), (0.0, -0.0), ("x" * 600, b"x" * 600),
     ("a", b"a"),
     (None, 0), ([], {}), ("", None), ([1], {"0": 1}), ("x" * 600, "x" * 100)],
)  # fmt: skip
def test_values_of_different_types_differ_though_python_considers_them_equal(
    old: Any, new: Any
) -> None:
    for path, place in (((), None), (("k",), "map"), ((0,), "list"), (("k500",), "large map")):
        first, second = old, new
        if place == "map":
            first, second = {"k": old}, {"k": new}
        elif place == "list":
            first, second = [old], [new]
        elif place == "large map":
            rest = {f"k{n}": n for n in range(1_000)}
            first, second = {**rest, "k500": old}, {**rest, "k500": new}
        [change] = check(first, second)
        assert (change.op, change.path, change.old_path) == (CHANGED, path, path)
        assert exact([change.before, change.after]) == exact([old, new])


def test_none_is_not_the_same_as_missing() -> None:
    [change] = check({"a": None}, {})
    assert encoded([change]) == [(REMOVED, ("a",), ("a",), None, None)]
    [change] = check({}, {"a": None})
    assert encoded([change]) == [(ADDED, None, ("a",), None, None)]
    [change] = check([None], [])
    assert encoded([change]) == [(REMOVED, (0,), (0,), None, None)]


def test_replacing_a_map_by_a_list_is_one_change() -> None:
    for size in (1, 2_000):
        old = {"x": {str(n): n for n in range(size)}}
        new = {"x": list(range(size))}
        for first, second in ((old, new), (new, old)):
            [change] = check(first, second)
            assert (change.op, change.path) == (CHANGED, ("x",))


def test_comparing_a_value_with_itself_finds_nothing_and_reads_at_most_two_objects() -> None:
    engine = CountingEngine()
    store = Store(engine)
    for value in (1, "x" * 600, list(range(20_000)), {str(n): n for n in range(20_000)}):
        digest = store.put_value(value)
        engine.forget()
        assert list(store.diff(digest, digest)) == []
        assert engine.objects_read <= 2


def test_blobs_and_long_texts_are_compared_by_their_content() -> None:
    store = Store(MemoryEngine())
    contents = [b"", b"short", b"s" * 600, bytes(200_000), bytes(200_001)]
    for old in contents:
        for new in contents:
            changes = list(store.diff(store.put_blob(old), store.put_blob(new)))
            if old == new:
                assert changes == []
            else:
                [change] = changes
                assert (change.op, change.path) == (CHANGED, ())
                assert (change.before, change.after) == (old, new)
    [change] = check({"text": "a" * 200_000}, {"text": "a" * 200_000 + "b"})
    assert change.path == ("text",)


@pytest.mark.parametrize("content", [b"short", b"x" * 600, bytes(200_000)])
def test_a_blob_and_a_value_of_the_same_bytes_differ(content: bytes) -> None:
    """They have different digests, and what one may be used for the other may not."""
    store = Store(MemoryEngine())
    [change] = store.diff(store.put_blob(content), store.put_value(content))
    assert (change.op, change.path) == (CHANGED, ())


def test_an_insertion_at_the_front_of_a_long_list_is_one_change() -> None:
    for items in (list(range(2_000)), [{"n": n, "text": "t" * 100} for n in range(2_000)]):
        [change] = check(items, ["new", *items])
        assert (change.op, change.path, change.after) == (ADDED, (0,), "new")
        [change] = check(["new", *items], items)
        assert (change.op, change.path, change.before) == (REMOVED, (0,), "new")


def test_a_change_inside_a_moved_item_names_its_old_and_new_path() -> None:
    items: list[Any] = [{"n": n, "inner": {"deep": n}} for n in range(1_000)]
    new = copy.deepcopy(items)
    new[500]["inner"]["deep"] = "changed"
    new.insert(0, "front")
    first, second = check(items, new)
    assert (first.op, first.path) == (ADDED, (0,))
    assert (second.op, second.old_path, second.path) == (
        CHANGED, (500, "inner", "deep"), (501, "inner", "deep"),
    )  # fmt: skip
    assert (second.before, second.after) == (500, "changed")


def test_a_moved_block_is_reported_in_few_changes() -> None:
    items = [{"n": n, "text": f"text {n} " * 15} for n in range(1_000)]
    moved = [*items[:200], *items[230:700], *items[200:230], *items[700:]]
    changes = check(items, moved)
    assert len(changes) <= 2 * 30 + 40


def test_a_list_grows_from_one_piece_into_a_tree_and_back() -> None:
    for item in (lambda n: n, lambda n: {"n": n, "text": "t" * 120}, lambda n: "t" * 600 + str(n)):
        short, long = [item(n) for n in range(8)], [item(n) for n in range(900)]
        changes = check(short, long)
        assert [change.path for change in changes] == [(at,) for at in range(8, 900)]
        assert {change.op for change in check(long, short)} == {REMOVED}
        assert {change.op for change in check([], long)} == {ADDED}


def test_a_map_grows_from_one_piece_into_a_tree_and_back() -> None:
    small, large = {"k1": 1, "k2": True}, {f"k{n}": n for n in range(900)}
    assert {change.op for change in check(small, large)} == {ADDED, CHANGED}
    assert {change.op for change in check(large, small)} == {REMOVED, CHANGED}
    assert len(check({}, large)) == 900


# --- the cost ----------------------------------------------------------------------------------


def test_before_and_after_of_a_change_are_read_on_access() -> None:
    engine = CountingEngine()
    store = Store(engine)
    old = store.put_value({"a": "x" * 600, "list": list(range(5_000))})
    new = store.put_value({"a": "y" * 600, "list": {"now": "a map"}})
    changes = list(store.diff(old, new))
    counted = engine.objects_read
    assert [change.path for change in changes] == [("a",), ("list",)]
    assert engine.objects_read == counted
    assert changes[0].before == "x" * 600
    assert engine.objects_read == counted + 1
    assert changes[1].before == list(range(5_000))
    assert engine.objects_read > counted + 10
    assert changes[0].pieces_read == engine.objects_read


def test_diff_yields_the_first_change_before_it_reads_the_rest() -> None:
    engine = CountingEngine()
    store = Store(engine)
    old = store.put_value({f"key {n:05}": n for n in range(20_000)})
    new = store.put_value({f"key {n:05}": -n - 1 for n in range(20_000)})
    engine.forget()
    assert next(store.diff(old, new)).path == ("key 00000",)
    assert engine.objects_read <= 16


def test_one_changed_key_of_20_000_reads_at_most_16_pieces() -> None:
    engine = CountingEngine()
    store = Store(engine)
    value = {f"key {n}": n for n in range(20_000)}
    old = store.put_value(value)
    for edit in (
        Set(("key 77",), "changed"), Delete(("key 77",)), Set(("new key",), 1), Set(("a",), 1),
        Set(("z",), 1),
    ):  # fmt: skip
        new = store.edit(old, edit)
        for first, second in ((old, new), (new, old)):
            engine.forget()
            [change] = store.diff(first, second)
            assert change.path == tuple(edit.path)
            assert engine.objects_read <= 16, edit


@pytest.mark.parametrize("seed", range(4))
def test_ten_scattered_changes_of_20_000_keys_read_at_most_16_pieces_each(seed: int) -> None:
    engine, source = CountingEngine(), random.Random(seed)
    store = Store(engine)
    old = store.put_value({f"key {n}": n for n in range(20_000)})
    keys = source.sample(range(20_000), 10)
    new = store.edit(old, *[Set((f"key {key}",), "changed") for key in keys])
    engine.forget()
    assert {change.path for change in store.diff(old, new)} == {(f"key {key}",) for key in keys}
    assert engine.objects_read <= 16 * 10


@pytest.mark.parametrize(
    "edit", [Set((4_321,), "x"), Delete((4_321,)), Insert((4_321,), "x"), Append((), "x")]
)
def test_one_changed_item_of_10_000_reads_few_pieces(edit: Any) -> None:
    engine = CountingEngine()
    store = Store(engine)
    old = store.put_value(list(range(10_000)))
    new = store.edit(old, edit)
    engine.forget()
    assert len(list(store.diff(old, new))) == 1
    assert engine.objects_read <= 40


def test_two_long_lists_without_a_common_item_cost_no_more_than_reading_both() -> None:
    engine, source = CountingEngine(), random.Random(1)
    store = Store(engine)
    old = store.put_value([source.randrange(1 << 60) for _ in range(20_000)])
    new = store.put_value([source.randrange(1 << 60) for _ in range(20_000)])
    pieces = len(engine.scan_objects(limit=100_000))
    engine.forget()
    changes = list(store.diff(old, new))
    assert len(changes) == 20_000
    assert engine.objects_read <= pieces + 2


@pytest.mark.parametrize("names", [1, 2, 50])
def test_two_long_lists_of_few_different_items_cost_no_more_than_reading_both(names: int) -> None:
    engine, source = CountingEngine(), random.Random(names)
    store = Store(engine)
    first = [source.randrange(names) for _ in range(8_000)]
    second = [source.randrange(names) for _ in range(9_000)]
    old, new = store.put_value(first), store.put_value(second)
    engine.forget()
    changes = list(store.diff(old, new))
    assert len(changes) <= 17_000
    # Each item at least once, if no two pieces were shared; a piece holds two at least.
    assert engine.objects_read <= 17_000
    assert exact(patched(first, changes)) == exact(second)
