"""What may be loaded, and what a hostile checkpoint gets: a typed error, and nothing has run."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import pickle
import re
import sys
import uuid
import zoneinfo
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

import ormsgpack
from langchain_core.agents import AgentAction, AgentActionMessageLog, AgentFinish
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.outputs import ChatGeneration
from langchain_core.prompt_values import StringPromptValue
from langgraph._internal._serde import build_serde_allowlist
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Interrupt, Send, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from casstore.adapters.langgraph import CasstoreSaver, StrictSerializer
from casstore.adapters.langgraph.encoding import decode, encode
from casstore.errors import CorruptionError, InvalidInputError, UnsafePayloadError
from casstore.store import Store
from tests.adapters.langgraph.graphs import on
from tests.adapters.langgraph.test_threads import put, records

RAN: list[str] = []


def run(*args: Any, **options: Any) -> str:
    """What no checkpoint may call."""
    RAN.append("ran")
    return "ran"


class Mine(BaseModel):
    """A type of an application."""

    name: str


@dataclasses.dataclass
class Point:
    """Another one."""

    x: int


class Colour(enum.Enum):
    """And another."""

    RED = "red"


HERE = __name__


@pytest.fixture(autouse=True)
def nothing_has_run() -> Iterator[None]:
    RAN.clear()
    yield
    assert RAN == []


def ext(code: int, *content: Any) -> bytes:
    return ormsgpack.packb(ormsgpack.Ext(code, ormsgpack.packb(list(content))))


HOSTILE = {
    "a call with one argument": ext(0, HERE, "run", "x"),
    "a call with arguments": ext(1, HERE, "run", ["x"]),
    "a call with named arguments": ext(2, HERE, "run", {"x": 1}),
    "a method": ext(3, HERE, "run", "x", "__call__"),
    "a method of a safe type": ext(3, "datetime", "datetime", 0, "fromtimestamp"),
    "a model of the first kind": ext(4, HERE, "run", {}),
    "a model of the second kind": ext(5, HERE, "run", {}, "model_validate_json"),
    "a command": ext(0, "os", "system", "true"),
    "code": ext(0, "builtins", "eval", f"__import__({HERE!r}).run()"),
    "a module that runs when imported": ext(0, "antigravity", "x", 1),
    "inside a message": ormsgpack.packb(
        ormsgpack.Ext(
            5,
            ormsgpack.packb(
                [
                    "langchain_core.messages.human",
                    "HumanMessage",
                    {"content": "x", "id": ormsgpack.Ext(0, ormsgpack.packb([HERE, "run", "x"]))},
                    "model_validate_json",
                ]
            ),
        )
    ),
    "inside a snapshot": ormsgpack.packb(ormsgpack.Ext(7, ext(0, HERE, "run", "x"))),
    "inside a set": ext(
        0, "builtins", "set", [ormsgpack.Ext(1, ormsgpack.packb([HERE, "run", []]))]
    ),
    "in a list": ormsgpack.packb([1, ormsgpack.Ext(0, ormsgpack.packb([HERE, "run", "x"]))]),
    "as a key's value": ormsgpack.packb(
        {"a": ormsgpack.Ext(0, ormsgpack.packb([HERE, "run", "x"]))}
    ),
    "an unknown extension": ormsgpack.packb(ormsgpack.Ext(99, b"\xc0")),
    "no name": ext(0),
    "a name that is no text": ext(0, ["os"], {"a": 1}, "x"),
    "a map for a name": ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb({"0": 1}))),
}


def nest(depth: int) -> bytes:
    payload = b"\xc0"
    for _ in range(depth):
        payload = ormsgpack.packb(ormsgpack.Ext(7, payload))
    return payload


HOSTILE["nested without end"] = nest(5000)


@pytest.mark.parametrize("what", HOSTILE)
def test_bytes_that_name_a_type_outside_the_allowlist_are_refused(what: str) -> None:
    """CVE-2026-28277: bytes rebuilt any importable object."""
    before = set(sys.modules)
    with pytest.raises(UnsafePayloadError):
        StrictSerializer().loads_typed(("msgpack", HOSTILE[what]))
    assert set(sys.modules) == before
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("what", ["a command", "inside a message", "inside a set"])
def test_a_hostile_checkpoint_is_refused_wherever_it_is_read(store: Store, what: str) -> None:
    """CVE-2026-28277, through every door of the saver."""

    class Careless(JsonPlusSerializer):
        """Writes what an attacker with access to the files would."""

        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            return ("msgpack", HOSTILE[what]) if "{1}" in repr(obj) else super().dumps_typed(obj)

    attacker = CasstoreSaver(store, serde=Careless())
    at = put(attacker, {"messages": [{1}]})
    put(attacker, {"fine": 1}, thread="written")
    config = on(
        "written",
        checkpoint_ns="",
        checkpoint_id=put(attacker, {}, thread="written", source="fork"),
    )
    attacker.put_writes(config, [("x", {1})], "task")
    put(attacker, {"fine": 1}, thread="meta", extra={1})
    saver = CasstoreSaver(store)
    for read in (
        lambda: saver.get_tuple(on()),
        lambda: saver.get_tuple(on(checkpoint_ns="", checkpoint_id=at)),
        lambda: list(saver.list(on())),
        lambda: saver.get_tuple(config),
        lambda: saver.get_tuple(on("meta")),
        lambda: list(saver.list(None, filter={"extra": 1})),
    ):
        with pytest.raises(UnsafePayloadError):
            read()
    # Copying, pruning and deleting look at no payload.
    saver.copy_thread("t", "copy")
    saver.prune(["copy", "written"])
    saver.delete_for_runs(["x"])
    for thread in ("t", "copy", "written", "meta"):
        saver.delete_thread(thread)
    assert records(store) == []


@pytest.mark.parametrize("tag", ["json", "pickle", "msgpack+aes", "", "MSGPACK"])
def test_only_serialisation_tags_that_are_still_written_are_read(tag: str) -> None:
    """CVE-2025-64439 (json called constructors) and CVE-2026-27794 (a fallback to pickle)."""
    bomb = {
        "json": json.dumps(
            {"lc": 2, "type": "constructor", "id": [HERE, "run"], "kwargs": {"x": 1}}
        ).encode(),
        "pickle": pickle.dumps(Bomb()),
    }.get(tag, b"\xc0")
    with pytest.raises(UnsafePayloadError, match="codec must not be loaded"):
        StrictSerializer().loads_typed((tag, bomb))


class Bomb:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return run, ()


def test_text_with_lone_surrogates_is_still_serialised_as_msgpack(store: Store) -> None:
    """CVE-2025-64439: lone surrogates made the serialiser fall back to one that ran code."""
    saver = CasstoreSaver(store)
    assert StrictSerializer().dumps_typed("\ud800")[0] == "msgpack"
    put(saver, {"text": "a\ud800b", "nested": {"k": ["\ud800"]}})
    found = saver.get_tuple(on())
    assert found is not None
    stock = JsonPlusSerializer()
    want = stock.loads_typed(stock.dumps_typed("a\ud800b"))
    assert found.checkpoint["channel_values"]["text"] == want


@pytest.mark.parametrize(
    "key",
    [
        "source') = 'x' OR 1=1 --",
        "a.b",
        "$.x",
        '"',
        "'; DROP TABLE checkpoints; --",
        "",
        "@x:{*}",
        "\0",
    ],
)
def test_a_metadata_filter_is_compared_as_data_and_never_interpreted(
    store: Store, key: str
) -> None:
    """CVE-2025-67644 and CVE-2026-27022: keys and values of filters ended up in queries."""
    saver = CasstoreSaver(store)
    put(saver, {"n": 1})
    told: Any = {key: "yes"}
    put(saver, {"n": 2}, thread="u", **told)
    assert [
        each.checkpoint["channel_values"] for each in saver.list(None, filter={key: "yes"})
    ] == [{"n": 2}]
    assert list(saver.list(None, filter={key: "' OR '1'='1"})) == []
    # As in the stock savers, what is not there is None.
    assert len(list(saver.list(None, filter={key: None}))) == 1
    assert len(list(saver.list(None, filter={}))) == 2


def test_a_serialiser_that_falls_back_to_pickle_is_refused(store: Store) -> None:
    """CVE-2026-27794."""
    with pytest.raises(InvalidInputError, match="pickle"):
        CasstoreSaver(store, serde=JsonPlusSerializer(pickle_fallback=True))
    with pytest.raises(InvalidInputError, match="pass allowed or serde"):
        CasstoreSaver(store, serde=JsonPlusSerializer(), allowed=[Mine])


@pytest.mark.parametrize(
    "value", [Mine(name="x"), Point(1), Colour.RED, [Mine(name="x")], {"a": {"b": Point(1)}}]
)
def test_a_value_of_a_type_outside_the_allowlist_is_not_saved(store: Store, value: Any) -> None:
    saver = CasstoreSaver(store)
    with pytest.raises(UnsafePayloadError, match="allowed="):
        put(saver, {"value": value})
    at = on(checkpoint_ns="", checkpoint_id="x")
    with pytest.raises(UnsafePayloadError, match="allowed="):
        saver.put_writes(at, [("value", value)], "task")
    assert records(store) == []
    types: list[Any] = [Mine, Point, (HERE, "Colour")]
    for allowing in (
        CasstoreSaver(store, allowed=types),
        saver.with_allowlist([(HERE, each) for each in ("Mine", "Point", "Colour")]),
    ):
        put(allowing, {"value": value}, source="fork")
        found = allowing.get_tuple(on())
        assert found is not None
        assert found.checkpoint["channel_values"]["value"] == value
    # And the first one still does not load it.
    with pytest.raises(UnsafePayloadError):
        saver.get_tuple(on())


def test_langchain_data_that_langgraph_lets_langchain_load_may_be_loaded(store: Store) -> None:
    saver = CasstoreSaver(store)
    action = AgentAction(tool="search", tool_input={"q": "weather"}, log="thinking")
    step = AgentActionMessageLog(
        tool="search", tool_input="x", log="", message_log=[AIMessage("calling", id="1")]
    )
    values = {
        "action": action,
        "steps": [(action, "sunny")],
        "mixed": [step, AgentFinish({"output": "done"}, "log")],
        "outputs": [ChatGeneration(message=AIMessage("x", id="2"))],
        "prompt": StringPromptValue(text="hello"),
    }
    put(saver, values)
    stock = JsonPlusSerializer(allowed_msgpack_modules=True)
    for reader in (saver, CasstoreSaver(store)):
        found = reader.get_tuple(on())
        assert found is not None
        got = found.checkpoint["channel_values"]
        assert got == stock.loads_typed(stock.dumps_typed(values))
        assert got["steps"] == [[action, "sunny"]]
        assert [type(each) for each in got["mixed"]] == [AgentActionMessageLog, AgentFinish]


@pytest.mark.parametrize(
    "name",
    [
        ("langchain_core.prompts.prompt", "PromptTemplate"),
        ("langchain_core.runnables.base", "RunnableSequence"),
        ("langchain_core.output_parsers.string", "StrOutputParser"),
    ],
)
def test_langchain_classes_that_configure_what_runs_are_refused(name: tuple[str, str]) -> None:
    with pytest.raises(UnsafePayloadError):
        StrictSerializer().loads_typed(("msgpack", ext(5, *name, {}, "model_validate_json")))


class Answer(TypedDict):
    """State whose schema does not name the type of its value."""

    answer: Any


@pytest.mark.parametrize("schema", [Mine, Point])
def test_an_answer_of_a_response_schema_is_saved_in_langgraphs_strict_mode(
    store: Store, schema: type
) -> None:
    """Loaded again it is plain data, as with LangGraph's own savers: no list names its type."""
    fields = {"name": "Ada"} if schema is Mine else {"x": 1}

    def ask(state: Answer) -> Any:
        return {"answer": interrupt("who?", response_schema=schema)}

    builder = StateGraph(Answer)
    builder.add_node("ask", ask)
    builder.add_edge(START, "ask")
    # What ``compile`` does if LANGGRAPH_STRICT_MSGPACK was set when LangGraph was imported.
    declared = build_serde_allowlist(schemas=[Answer])
    stock = InMemorySaver(serde=JsonPlusSerializer(allowed_msgpack_modules=None))
    for saver in (stock, CasstoreSaver(store)):
        graph = builder.compile(checkpointer=saver.with_allowlist(declared))
        graph.invoke({"answer": None}, on())
        assert graph.invoke(Command(resume=fields), on()) == {"answer": schema(**fields)}
        assert graph.get_state(on()).values == {"answer": fields}
    # Outside of that mode it is refused, and read as it was once its type is allowed.
    with pytest.raises(UnsafePayloadError):
        CasstoreSaver(store).get_tuple(on())
    found = CasstoreSaver(store, allowed=[schema]).get_tuple(on())
    assert found is not None
    assert found.checkpoint["channel_values"]["answer"] == schema(**fields)


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_that_bytes_name_runs_in_langgraphs_strict_mode(what: str) -> None:
    serde = StrictSerializer().with_msgpack_allowlist([(HERE, "Mine")])
    before = set(sys.modules)
    with suppress(UnsafePayloadError):
        serde.loads_typed(("msgpack", HOSTILE[what]))
    assert set(sys.modules) == before


def test_langgraphs_strict_mode_asks_for_the_same_types_twice_and_gets_one_serialiser() -> None:
    declared = build_serde_allowlist(schemas=[Answer])
    once = StrictSerializer().with_msgpack_allowlist(declared)
    assert once.with_msgpack_allowlist(declared) is once
    allowing = StrictSerializer(allowed=[Mine])
    assert allowing.with_msgpack_allowlist([Mine]) is not allowing


def test_a_value_that_cannot_be_serialised_raises_invalid_input_error(store: Store) -> None:
    saver = CasstoreSaver(store)
    for value in (object(), 1 << 70, lambda: None):
        with pytest.raises(InvalidInputError, match="cannot be serialised"):
            put(saver, {"value": value})
    assert records(store) == []


SAFE: list[Any] = [
    None, True, False, 0, -1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.0, -0.0, 1.5,
    float("inf"), "", "text", "ß€𝄞", "long " * 400, b"", b"bytes", b"long" * 400,
    bytearray(b"x"), bytearray(b"x" * 600), [], {}, [[]], [{}], {"": {}}, {"d": 1}, {"s": 1},
    {"t": "x", "b": b"y"}, {"t": "msgpack", "b": b"\xc0"}, {1: 2}, {(1, 2): 3},
    {"b": 1, "a": 2}, [1, [2, [3, {"k": [None]}]]],
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC), datetime.date(2026, 1, 2),
    datetime.timedelta(1, 2, 3), datetime.time(1, 2), zoneinfo.ZoneInfo("UTC"),
    uuid.UUID(int=5), decimal.Decimal("1.50"), {1, 2}, frozenset({3}), deque([1, 2]),
    pathlib.Path("a/b"), re.compile("a+", re.I), ipaddress.ip_address("::1"),
    HumanMessage("hi", id="1"), ToolMessage("r", tool_call_id="c"),
    AIMessage("x" * 2000, id="2", tool_calls=[ToolCall(name="f", args={"a": 1}, id="c")]),
    Document("page", metadata={"a": 1}), Send("node", {"a": [1]}),
    Interrupt(value={"q": 1}, id="i"), _DeltaSnapshot([HumanMessage("a"), 1]),
    _DeltaSnapshot({"a": b"x"}), [HumanMessage(f"{n}", id=str(n)) for n in range(300)],
]  # fmt: skip


@pytest.mark.parametrize(
    "value", SAFE, ids=lambda value: f"{type(value).__name__} {str(value)[:20]}"
)
def test_a_value_comes_back_as_with_the_stock_serialiser(store: Store, value: Any) -> None:
    stock = JsonPlusSerializer(allowed_msgpack_modules=None)
    want = stock.loads_typed(stock.dumps_typed(value))
    saver = CasstoreSaver(store)
    put(saver, {"value": value, "again": [value]})
    found = saver.get_tuple(on())
    assert found is not None
    got = found.checkpoint["channel_values"]["value"]
    assert got == want
    assert type(got) is type(want)
    assert repr(got) == repr(want)  # the order of keys, the sign of zero
    inside = stock.loads_typed(stock.dumps_typed([value]))
    if type(value) is not bytearray:  # which comes back as bytes from inside a list there
        assert found.checkpoint["channel_values"]["again"] == inside


def test_lists_nested_deeper_than_a_value_may_be_go_through_the_serialiser(store: Store) -> None:
    deep: Any = "bottom"
    for n in range(200):
        deep = [deep] if n % 2 else {"k": deep}
    saver = CasstoreSaver(store)
    put(saver, {"deep": deep})
    found = saver.get_tuple(on())
    assert found is not None
    assert found.checkpoint["channel_values"]["deep"] == deep


@pytest.mark.parametrize(
    "stored",
    [
        {}, {"x": 1}, {"t": "msgpack"}, {"t": 1, "b": b""}, {"t": "msgpack", "b": "text"},
        {"d": 1}, {"d": ["odd"]}, {"d": [1, 2]}, {"d": [], "s": 1}, b"\x91" * 600,
        {"t": "msgpack", "b": b"", "d": []}, {"t": "msgpack", "b": b"\xc1"},
    ],
)  # fmt: skip
def test_invalid_forms_are_damage(stored: Any) -> None:
    with pytest.raises(CorruptionError):
        decode(stored, StrictSerializer().loads_typed)


def test_a_custom_serialiser_gets_whole_values_and_its_bytes_stay_opaque(
    store: Store,
) -> None:
    class Sealing:
        """Stands for encryption: neither LangGraph's own nor a kind of it."""

        def __init__(self) -> None:
            self.seen: list[Any] = []
            self.inner = JsonPlusSerializer(allowed_msgpack_modules=None)

        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            self.seen.append(obj)
            tag, payload = self.inner.dumps_typed(obj)
            return f"{tag}+sealed", payload[::-1]

        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            return self.inner.loads_typed((data[0].removesuffix("+sealed"), data[1][::-1]))

    serde = Sealing()
    saver = CasstoreSaver(store, serde=serde)
    said = [HumanMessage("secret " * 200, id="1"), "plain"]
    put(saver, {"messages": said})
    assert said in serde.seen
    found = saver.get_tuple(on())
    assert found is not None
    assert found.checkpoint["channel_values"] == {"messages": said}
    content = b"".join(
        item.data
        for item in store.engine.get_many([info.digest for info in store.engine.scan_objects()])
        if item
    )
    assert b"secret" not in content
    assert b"plain" not in content


def test_encoding_and_decoding_are_inverse_for_every_plain_value() -> None:
    strict = StrictSerializer()
    from hypothesis import given, settings
    from hypothesis import strategies as st

    plain = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(max_size=600),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )

    @settings(max_examples=60, deadline=None)
    @given(plain)
    def check(value: Any) -> None:
        assert decode(encode(value, strict.dumps_typed), strict.loads_typed) == value

    check()
