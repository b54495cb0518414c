"""A JSON Patch made of changes turns the old value into the new one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.cli.differences import operations, pointer
from casstore.cli.text import json_line, plain, unplain
from casstore.engine.memory import MemoryEngine
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.store import Store


def step(container: Any, token: str) -> Any:
    name = token.replace("~1", "/").replace("~0", "~")
    return int(name) if isinstance(container, list) else name


def written(patch: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operations as a program reads them."""
    return [json.loads(json_line(operation)) for operation in patch]


def apply(document: Any, patch: list[dict[str, Any]]) -> Any:
    """Apply a JSON Patch as RFC 6902 says: one operation after the other."""
    document = copy.deepcopy(document)
    for operation in patch:
        tokens = operation["path"].split("/")[1:]
        if not tokens:
            document = operation["value"]
            continue
        here = document
        for token in tokens[:-1]:
            here = here[step(here, token)]
        last = step(here, tokens[-1])
        if operation["op"] == "remove":
            del here[last]
        elif operation["op"] == "add" and isinstance(here, list):
            assert 0 <= last <= len(here)
            here.insert(last, operation["value"])
        else:
            assert operation["op"] == "add" or (
                last < len(here) if isinstance(here, list) else last in here
            )
            here[last] = operation["value"]
    return document


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text("ab/~$\0é", max_size=3)
    | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text("ab/~$", max_size=2), inner, max_size=4)
    ),
    max_leaves=20,
)


@st.composite
def pairs(draws: st.DrawFn) -> tuple[Any, Any]:
    """A value and a changed one; lists of lists with items put in and taken out."""
    flags: Any = st.booleans()
    if draws(flags):
        return draws(VALUES), draws(VALUES)
    old: list[list[Any]] = draws(st.lists(st.lists(VALUES, max_size=4), max_size=6))
    new: list[Any] = copy.deepcopy(old)
    for _ in range(draws(st.integers(0, 4))):
        target: list[Any] = new
        if new and draws(flags):
            target = new[draws(st.integers(0, len(new) - 1))]
        if target and draws(flags):
            del target[draws(st.integers(0, len(target) - 1))]
        else:
            item: Any = draws(VALUES) if target is not new else [draws(VALUES)]
            target.insert(draws(st.integers(0, len(target))), item)
    return {"list": old}, {"list": new}


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_a_patch_makes_the_new_value_of_the_old_one(pair: tuple[Any, Any]) -> None:
    with Store(MemoryEngine()) as store:
        old, new = store.put_value(pair[0]), store.put_value(pair[1])
        patch = written(operations(store.diff(old, new)))
    assert apply(plain(pair[0]), patch) == plain(pair[1])


def test_a_patch_of_long_lists_has_few_operations() -> None:
    old: list[dict[str, Any]] = [{"at": at, "text": "x" * 80} for at in range(2000)]
    new = [*old[5:700], {"new": 1}, *old[701:1500], *old[1510:], {"end": 2}]
    new[100] = {**new[100], "text": "y"}
    with Store(MemoryEngine()) as store:
        patch = written(operations(store.diff(store.put_value(old), store.put_value(new))))
    assert apply(old, patch) == new
    assert len(patch) < 40


def test_a_json_pointer_escapes_slash_and_tilde() -> None:
    assert pointer(("a/b", "m~n", 3)) == "/a~1b/m~0n/3"
    assert pointer(()) == ""


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_a_value_comes_back_from_its_json_encoding(value: Any) -> None:
    assert unplain(plain(value)) == value


def test_links_and_bytes_are_distinguished_from_maps_that_look_like_them() -> None:
    link = Link(Digest.of_blob(b"x"))
    values: list[Any] = [
        link,
        b"\xff",
        {"$link": "no"},
        {"$bytes": 1},
        {"$$": {}},
        {"$a": 1, "b": 2},
    ]
    for value in values:
        assert unplain(plain(value)) == value
    assert plain(link) == {"$link": Digest.of_blob(b"x").hex()}
