"""A message that was built before is copied: the same message, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install 'casstore[dev]'")

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from casstore.adapters.langgraph import StrictSerializer
from casstore.adapters.langgraph.moulds import Moulds

CALL: dict[str, Any] = {"name": "f", "args": {"a": [1, {"b": 2}]}, "id": "c", "type": "tool_call"}
USAGE: dict[str, Any] = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}

SIMPLE: list[BaseMessage] = [
    HumanMessage("hello"),
    HumanMessage("hello", id="1", name="me", additional_kwargs={"deep": [{"x": [1.5, None]}]}),
    HumanMessage([{"type": "text", "text": "look"}, {"type": "image", "source": {"url": "u"}}]),
    SystemMessage("be brief", response_metadata={"a": {"b": []}}),
    ChatMessage(content="hm", role="narrator"),
    AIMessage("done", tool_calls=[CALL], usage_metadata=USAGE, response_metadata={"m": "x"}),
    AIMessage("", invalid_tool_calls=[{"name": "f", "args": "{", "id": "1", "error": "bad"}]),
    AIMessageChunk(
        content="part", tool_call_chunks=[{"name": "f", "args": "{", "id": "1", "index": 0}]
    ),
    ToolMessage("4", tool_call_id="c", artifact={"rows": [1, 2]}, status="error"),
]  # fmt: skip


def loaded(serializer: JsonPlusSerializer, message: BaseMessage) -> BaseMessage:
    found: BaseMessage = serializer.loads_typed(serializer.dumps_typed(message))
    return found


def everything(message: BaseMessage) -> tuple[Any, ...]:
    """All that a message consists of, what pydantic keeps beside its fields included."""
    return (
        type(message),
        message.__dict__,
        message.model_fields_set,
        message.__pydantic_extra__,
        message.__pydantic_private__,
        message.model_dump(),
        repr(message),
    )


def containers(value: Any) -> Iterator[Any]:
    """Every list and dict in a value."""
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from containers(item)
    elif isinstance(value, list):
        yield value
        for item in value:
            yield from containers(item)


@pytest.mark.parametrize("message", SIMPLE, ids=lambda message: type(message).__name__)
def test_a_copy_is_what_building_gives(message: BaseMessage) -> None:
    serializer = StrictSerializer()
    first = loaded(serializer, message)
    assert serializer._moulds.size_bytes
    second, third = loaded(serializer, message), loaded(serializer, message)
    stock = loaded(JsonPlusSerializer(), message)
    for each in (first, second, third):
        assert everything(each) == everything(stock)
        assert serializer.dumps_typed(each) == serializer.dumps_typed(message)
    assert second.model_copy(update={"content": "other"}).content == "other"
    second.id = "changed"
    assert "id" in second.model_fields_set
    assert everything(loaded(serializer, message)) == everything(stock)


@pytest.mark.parametrize("message", SIMPLE, ids=lambda message: type(message).__name__)
def test_what_one_reader_changes_no_other_sees(message: BaseMessage) -> None:
    serializer = StrictSerializer()
    whole = everything(loaded(JsonPlusSerializer(), message))
    for _ in range(3):
        found = loaded(serializer, message)
        assert everything(found) == whole
        for container in list(containers(found.__dict__)):
            if isinstance(container, dict):
                container["new"] = "value"
            else:
                container.append("new")
        found.model_fields_set.add("more")
        if found.__pydantic_extra__ is not None:
            found.__pydantic_extra__["extra"] = 1


def test_what_is_not_simple_is_built_each_time() -> None:
    serializer = StrictSerializer()
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    extra = HumanMessage("x", unforeseen={"a": 1})
    for message in (extra, HumanMessage("x", additional_kwargs={"deep": deep})):
        for _ in range(2):
            stock = loaded(JsonPlusSerializer(), message)
            assert everything(loaded(serializer, message)) == everything(stock)
    assert not serializer._moulds.size_bytes


def test_only_so_many_bytes_are_kept() -> None:
    moulds = Moulds(100)
    made = HumanMessage("x")
    for number in range(50):
        moulds.keep(b"%030d" % number, made)
        assert moulds.size_bytes <= 100
        assert moulds.fill(b"%030d" % number) == made
    assert moulds.fill(b"%030d" % 0) is None
    moulds.keep(bytes(101), made)
    assert moulds.fill(bytes(101)) is None
