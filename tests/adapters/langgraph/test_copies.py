"""Copies of messages: independent of each other, and the same only if written the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from casstore.adapters.langgraph import CasstoreSaver, StrictSerializer
from casstore.adapters.langgraph.copies import begins_with, originals
from casstore.store import Store
from tests.adapters.langgraph.test_lists import put_list, read_list

keys = st.text(max_size=3)
atoms = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | keys
plain = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
contents = st.text(max_size=8) | st.lists(st.dictionaries(keys, plain, max_size=3), max_size=3)
said = st.builds(
    lambda kind, content, more, own: kind(content, additional_kwargs=more, id="i", **own),
    st.sampled_from([HumanMessage, AIMessage]),
    contents,
    st.dictionaries(keys, plain, max_size=3),
    st.dictionaries(st.sampled_from(["mine", "other"]), plain, max_size=2),
)


def loaded(*objects: Any) -> list[Any]:
    serde = StrictSerializer()
    body = serde.dump_objects(objects)
    assert body is not None
    return serde.load_objects(len(objects), body)


def copied(*objects: Any) -> list[Any] | None:
    kept = originals(objects)
    return None if kept is None else [original.copy() for original in kept]


def same(objects: Any, kept: Any) -> bool:
    made = originals(kept)
    assert made is not None
    return begins_with(objects, made)


def dumped(*objects: Any) -> bytes | None:
    return StrictSerializer().dump_objects(objects)


@settings(max_examples=100, deadline=None)
@given(said)
def test_a_copied_message_equals_a_loaded_one(message: Any) -> None:
    (first,) = loaded(message)
    made = copied(first)
    assert made is not None
    (second,) = made
    assert second is not first
    assert second == first
    assert dumped(second) == dumped(first)
    assert second.model_fields_set == first.model_fields_set
    assert list(second.__dict__) == list(first.__dict__)
    assert same([second], [first])
    assert not same([], [first])


@settings(max_examples=150, deadline=None)
@given(said, said)
def test_two_messages_are_the_same_if_they_are_serialised_the_same(one: Any, other: Any) -> None:
    (first,), (second,) = loaded(one), loaded(other)
    assert same([first], [second]) == (dumped(first) == dumped(second))


def nested() -> list[Any]:
    call = {"name": "read", "args": {"path": "/a", "lines": [1, 2.0, True]}, "id": "c"}
    return loaded(
        AIMessage([{"type": "text", "text": "x"}], tool_calls=[call], additional_kwargs={"n": 0.0}),
        ToolMessage("out", tool_call_id="c", artifact={"deep": [{"k": [1]}]}),
    )


CHANGES: list[Callable[[list[Any]], Any]] = [
    lambda all_: all_[0].tool_calls[0]["args"]["lines"].append(3),
    lambda all_: all_[0].tool_calls[0]["args"].update(path="/b"),
    lambda all_: all_[0].content[0].update(text="y"),
    lambda all_: all_[1].artifact["deep"][0]["k"].clear(),
    lambda all_: setattr(all_[1], "content", "changed"),
    lambda all_: all_[0].additional_kwargs.update(more=1),
    # Equal to what was there, and yet written otherwise.
    lambda all_: all_[0].tool_calls[0]["args"].update(lines=[True, 2.0, True]),
    lambda all_: all_[0].tool_calls[0]["args"].update(lines=[1, 2, True]),
    lambda all_: all_[0].additional_kwargs.update(n=-0.0),
    lambda all_: all_[0].tool_calls[0].update(id=all_[0].tool_calls[0].pop("id")) or
    all_[0].tool_calls[0].update(name=all_[0].tool_calls[0].pop("name")),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changing_a_copy_changes_nothing_else(change: Callable[[list[Any]], Any]) -> None:
    kept = nested()
    before = dumped(*kept)
    handed_out = copied(*kept)
    assert handed_out is not None
    change(handed_out)
    assert dumped(*kept) == before
    assert dumped(*handed_out) != before
    assert not same(handed_out, kept)
    assert same(copied(*kept), kept)


@pytest.mark.parametrize("change", CHANGES)
def test_a_message_changed_in_place_is_stored_and_earlier_checkpoints_are_unchanged(
    store: Store, change: Callable[[list[Any]], Any]
) -> None:
    saver = CasstoreSaver(store)
    first = put_list(saver, nested(), None, 1)
    state = read_list(saver)
    before = dumped(*state)
    change(state)
    # Loading may put keys of a tool call in order.
    changed = dumped(*loaded(*state))
    assert dumped(*read_list(saver)) == before
    second = put_list(saver, [*state, HumanMessage("and", id="h")], first, 2)
    cold = CasstoreSaver(store)
    for reader in (saver, cold):
        assert dumped(*read_list(reader, first)) == before
        assert dumped(*read_list(reader, second)[:-1]) == changed


def test_only_plain_messages_are_copied() -> None:
    class Sub(HumanMessage):
        """A class of an application."""

    assert copied(HumanMessage("x")) == [HumanMessage("x")]
    odd: list[Any] = [
        Sub(content="x"),
        "text",
        {"a": 1},
        HumanMessage("x", additional_kwargs={"s": {1}}),
    ]
    for one in odd:
        assert copied(HumanMessage("y"), one) is None
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    assert copied(HumanMessage("x", additional_kwargs={"deep": deep})) is None


class Unclear:
    """What comparing arrays gives: neither the same nor not."""

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


class Vector:
    """An object of an application that is compared element by element, as arrays are."""

    def __init__(self, x: int) -> None:
        self.x = x

    def _asdict(self) -> dict[str, int]:
        return {"x": self.x}

    def __eq__(self, other: object) -> Any:
        return Unclear()

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("wrapped", [lambda one: one, lambda one: [one]])
def test_a_message_with_an_artifact_that_cannot_be_compared_is_stored(
    store: Store, wrapped: Callable[[Any], Any]
) -> None:
    """Comparing it with the message of before raised, and the step was lost."""
    saver = CasstoreSaver(store, allowed=[Vector])

    def messages(artifact: Any) -> list[Any]:
        more = {"tool_call_id": "c", "artifact": artifact}
        return [ToolMessage(f"found {n}", id=f"m{n}", **more) for n in range(12)]

    first = put_list(saver, messages(wrapped(None)), None, 1)
    put_list(saver, messages(wrapped(Vector(7))), first, 2)
    for message in read_list(saver):
        found = message.artifact
        assert (found[0] if type(found) is list else found).x == 7


def test_each_read_returns_its_own_message_objects(store: Store) -> None:
    saver = CasstoreSaver(store)
    put_list(saver, nested(), None, 1)
    one, other = read_list(saver), read_list(saver)
    assert one == other
    for mine, theirs in zip(one, other, strict=True):
        assert isinstance(mine, BaseMessage)
        assert mine is not theirs
    one[0].tool_calls[0]["args"]["lines"].clear()
    assert read_list(saver) == other
