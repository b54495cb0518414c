"""A value that a few shared objects blow up is refused before it is built, on every way to it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from casstore import Append, Checkpoint, Commit, Digest, Link, NodeDraft, Set, Store
from casstore.engine.memory import MemoryEngine
from casstore.errors import ExpansionError, LimitError
from casstore.format.canonical import ROLE_PART, encode, link_bytes
from casstore.format.digest import Kind
from casstore.format.limits import MAX_REPEATED_BYTES
from casstore.format.tree import Child
from casstore.objects import pieces, values
from tests.objects.specimens import (
    CountingEngine,
    put_branch,
    put_list_bomb,
    put_object,
    put_shared_parts,
)

FEW_BYTES = 8 << 20


@contextmanager
def in_little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES
    finally:
        tracemalloc.stop()


def map_tree(engine: MemoryEngine) -> bytes:
    """A map whose 128 values are one value that repeats."""
    part = put_shared_parts(engine, 25)
    shared = put_object(engine, Kind.VALUE, b"\x91" + link_bytes(ROLE_PART, part), [part])
    leaf = {f"{number:03}": None for number in range(64)}
    data = encode(leaf).replace(b"\xc0", link_bytes(ROLE_PART, shared))
    child = put_object(engine, Kind.VALUE, data, [shared] * 64)
    said = Child(child, 64, len(data) - 3, "063")
    return put_branch(engine, Kind.MAP, 1, [said])


BOMBS: dict[str, Callable[[Any], bytes]] = {
    "lists": put_shared_parts,
    "maps": lambda engine: put_shared_parts(engine, mapped=True),
    "few levels of many places": lambda engine: put_shared_parts(engine, 6, places=15),
    "a long core": lambda engine: put_shared_parts(engine, 17, encode(["word"] * 200)),
    "a tree of one leaf": lambda engine: put_list_bomb(engine, levels=4),
    "a tree of texts": lambda engine: put_list_bomb(engine, ["word"] * 100, levels=3),
    "a map tree": map_tree,
}


@pytest.mark.parametrize("put_bomb", BOMBS.values(), ids=BOMBS)
def test_reading_a_value_that_expands_without_end_raises_in_little_memory(
    put_bomb: Callable[[Any], bytes],
) -> None:
    engine = CountingEngine()
    store = Store(engine)
    digest = put_bomb(engine)
    other = store.put_value(0)
    ways: list[Callable[[], object]] = [
        lambda: store.get_value(digest),
        lambda: store.get_many([other, digest]),
        lambda: store.view(digest).load(),
        lambda: next(store.diff(other, digest)).after,
        lambda: next(store.diff(digest, other)).before,
    ]
    for read in ways:
        engine.forget()
        with in_little_memory(), pytest.raises(ExpansionError) as caught:
            read()
        assert f"{MAX_REPEATED_BYTES:,}" in str(caught.value)
        assert "view()" in str(caught.value)
        assert engine.objects_read < 100


def test_parts_of_a_value_that_expands_without_end_are_viewed_and_edited() -> None:
    store = Store(MemoryEngine())
    digest = put_shared_parts(store.engine, mapped=True)
    view = store.view(digest)
    with in_little_memory():
        assert len(view["0"]["1"]["0"]) == 2
        edited = store.edit(digest, Set(["0", "1", "new"], "here"))
        assert store.view(edited).at(["0", "1", "new"]) == "here"
        assert "new" not in store.view(edited)["1"]


def test_a_higher_max_bytes_returns_a_value_that_the_default_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values, "MAX_REPEATED_BYTES", 1 << 20)
    store = Store(MemoryEngine())
    assert len(store.get_value(put_shared_parts(store.engine, 8))) == 2
    digest = put_shared_parts(store.engine, 10)
    with pytest.raises(ExpansionError, match="1,048,576"):
        store.get_value(digest)
    assert len(store.get_value(digest, max_bytes=4 << 30)) == 2


def test_comparing_two_values_that_expand_without_end_reports_containers_as_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They differ only in their innermost parts, which are reached on 2**30 ways."""
    monkeypatch.setattr(pieces, "REPEATED_BYTES", 1 << 18)
    store = Store(MemoryEngine())
    old, new = put_shared_parts(store.engine), put_shared_parts(store.engine, core=b"\x91\x01")
    with in_little_memory():
        found = [(change.op, change.path) for change in store.diff(old, new)]
    assert 30 < len(found) < 1_000
    assert found[0] == ("added", (0,) * 31)
    # What was not walked is covered by changes of containers: each place is in one of them.
    changed = {path for op, path in found if op == "changed"}
    assert {(1,), (0, 1), (0, 0, 1)} <= changed
    edited = store.edit(new, Set([0], "another"))
    assert [change.path for change in store.diff(new, edited)] == [(0,)]


def test_a_changed_shared_part_is_listed_at_every_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few parts repeat often enough to be measured, and those of sound values may."""
    monkeypatch.setattr(pieces, "REPEATED_BYTES", 1 << 14)
    store = Store(MemoryEngine())
    part = {f"line {at}": "a few words" for at in range(50)}
    old, new = (
        store.put_value([{"number": at, "part": {**part, "end": end}} for at in range(200)])
        for end in (1, 2)
    )
    found = [change.path for change in store.diff(old, new)]
    assert found == [(at, "part", "end") for at in range(200)]


def test_a_session_whose_state_expands_without_end_raises_where_that_is_read() -> None:
    store = Store(MemoryEngine())
    session = store.session("s")
    bomb = put_shared_parts(store.engine)
    state = Checkpoint(tool_state=Link(Digest(bomb)), config={"n": 1})
    session.commit(Commit(append=[NodeDraft("a", "x")], checkpoint=state))
    for read in (session.load, lambda: session.checkpoint(hydrate=True)):
        with in_little_memory(), pytest.raises(ExpansionError):
            read()
    loaded = session.load(hydrate=False)
    assert loaded is not None
    assert loaded.checkpoint.config == {"n": 1}
    assert [node.payload for node in loaded.nodes] == ["x"]


def test_putting_a_value_that_expands_without_end_stores_nothing() -> None:
    engine = CountingEngine()
    store = Store(engine)
    value: Any = ["x" * 100] * 6
    for _ in range(30):
        value = [value, value]
    old = store.put_value([1])
    session = store.session("s")
    ways: list[Callable[[], object]] = [
        lambda: store.put_value(value),
        lambda: store.put_many([b"blob", value]),
        lambda: store.edit(old, Append((), value)),
        lambda: session.commit(Commit(append=[NodeDraft("a", value)])),
        lambda: session.commit(Commit(checkpoint=Checkpoint(config=value))),
        lambda: session.commit(Commit(checkpoint=Checkpoint(tool_state=value))),
        lambda: session.queue.enqueue([value]),
    ]
    stored = len(list(engine.scan_objects(limit=1000)))
    for put in ways:
        with in_little_memory(), pytest.raises(ExpansionError, match="store a part that repeats"):
            put()
        assert len(list(engine.scan_objects(limit=1000))) == stored
    assert session.head() is None
    # What stands in a row is not shared, and has the length of a row.
    with pytest.raises(LimitError, match="16,777,216 bytes"):
        store.create_session("t", extra=value)


def test_a_long_text_at_many_places_is_read_once() -> None:
    engine = CountingEngine()
    store = Store(engine)
    text = "".join(chr(97 + number % 26) for number in range(200_000))
    digest = store.put_value([{"text": text, "number": number} for number in range(2_000)])
    engine.forget()
    found = store.get_value(digest)
    assert [len(item["text"]) for item in found] == [200_000] * 2_000
    assert len({id(item["text"]) for item in found}) == 1
    assert engine.bytes_read < 2_000_000


def test_max_bytes_limits_the_memory_of_decoded_lists_and_maps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No part repeats; but every byte of the encoding takes eighty of memory."""
    monkeypatch.setattr(values, "DEFAULT_MAX_BYTES", 4 << 20)
    store = Store(MemoryEngine())
    digest = store.put_value([[[] for _ in range(90)] + [number] for number in range(2_000)])
    with pytest.raises(LimitError, match="of memory"):
        store.get_value(digest, max_bytes=4 << 20)
    assert len(store.get_value(digest, max_bytes=64 << 20)) == 2_000


def test_nodes_that_share_a_large_part_are_iterated_one_by_one_where_a_page_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values, "MAX_REPEATED_BYTES", 1 << 20)
    store = Store(MemoryEngine())
    session = store.session("s")
    tools = [{"name": f"tool {number}", "text": "what it does " * 8} for number in range(300)]
    drafts = [NodeDraft(f"n{number}", {"tools": tools, "n": number}) for number in range(20)]
    session.commit(Commit(append=drafts))
    with pytest.raises(ExpansionError):
        next(session.nodes().pages())
    found = list(session.nodes())
    assert [node.payload["n"] for node in found] == list(range(20))
    assert all(node.payload["tools"] == tools for node in found)
    assert [node.id for node in session.nodes()[3:]] == [f"n{number}" for number in range(3, 20)]
