"""A serialiser of the application's own sees every value, and no plaintext reaches the disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install 'casstore[dev]'")

from langchain_core.messages import HumanMessage
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command

import casstore
from casstore.adapters.langgraph import CasstoreSaver, StrictSerializer, import_checkpoints
from casstore.adapters.langgraph.encoding import encodes_as_langgraph
from casstore.errors import InvalidInputError
from casstore.store import Store
from tests.adapters.langgraph import graphs
from tests.adapters.langgraph.graphs import on, say
from tests.adapters.langgraph.test_threads import put, records

CANARY = "canary-7f3a9c"


def scramble(data: bytes, key: int = 0x5A) -> bytes:
    """A cipher for tests: its own inverse, and its result holds none of the input's text."""
    return bytes(byte ^ key for byte in data)


class Sealed(JsonPlusSerializer):
    """Encrypts, as a subclass of LangGraph's serialiser that keeps its tags."""

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        tag, payload = super().dumps_typed(obj)
        return tag, scramble(payload)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return super().loads_typed((data[0], scramble(data[1])))


class SealedStrict(StrictSerializer):
    """Encrypts, as a subclass of casstore's serialiser."""

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        tag, payload = super().dumps_typed(obj)
        return f"{tag}+sealed", scramble(payload)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        return super().loads_typed((data[0].removesuffix("+sealed"), scramble(data[1])))


class Cipher:
    """A cipher for LangGraph's ``EncryptedSerializer``."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "scrambled", scramble(plaintext, 0x33)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return scramble(ciphertext, 0x33)


def patched() -> StrictSerializer:
    """A serialiser whose methods were replaced on the instance."""
    serde, sealed = StrictSerializer(), Sealed(allowed_msgpack_modules=None)
    serde.dumps_typed = sealed.dumps_typed  # type: ignore[method-assign]
    serde.loads_typed = sealed.loads_typed  # type: ignore[method-assign]
    return serde


SERIALISERS: dict[str, Callable[[], Any]] = {
    "a subclass of LangGraph's": lambda: Sealed(allowed_msgpack_modules=None),
    "a subclass of casstore's": SealedStrict,
    "LangGraph's wrapper": lambda: EncryptedSerializer(Cipher()),
    "LangGraph's wrapper of a subclass": lambda: EncryptedSerializer(Cipher(), Sealed()),
    "replaced methods": patched,
}


@pytest.fixture(params=SERIALISERS)
def serde(request: pytest.FixtureRequest) -> Any:
    return SERIALISERS[request.param]()


def fill(saver: Any) -> list[Any]:
    """Put the canary everywhere that state can be; what a reader gets back."""
    for turn in range(3):
        config: Any = {**on("chat"), "metadata": {"note": CANARY, "tags": [CANARY]}}
        graphs.chat(saver).invoke(say(f"{CANARY} {turn}"), config)
    asking = graphs.asking(saver)
    asking.invoke({"log": [CANARY], "answer": CANARY}, on("asking"))
    asking.invoke(Command(resume=CANARY), on("asking"))
    for turn in range(7):
        graphs.delta(saver).invoke({"log": [f"{CANARY} {turn}"], "n": turn}, on("delta"))
    values = {
        "text": CANARY,
        "long text": CANARY * 500,
        "list": [CANARY, [CANARY]],
        "dict": {CANARY: {"k": CANARY}},
        "bytes": CANARY.encode(),
        "message": HumanMessage(CANARY, id="1"),
        "messages": [HumanMessage(CANARY, id=str(n)) for n in range(40)],
    }
    at = put(saver, values, thread="by hand", note=CANARY)
    config = on("by hand", checkpoint_ns="", checkpoint_id=at)
    saver.put_writes(config, [("text", CANARY), ("list", [CANARY])], "task")
    return [*saver.list(None)]


def is_on_disk(store: Store, path: Path) -> bool:
    """Whether the canary is in an object, in a row or in a file of the store."""
    engine = store.engine
    digests = [info.digest for info in engine.scan_objects(limit=1_000_000)]
    found = [item.data for item in engine.get_many(digests) if item]
    found += [part for row in records(store) for part in row if type(part) is bytes]
    found += [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    assert len(found) > 20
    return any(CANARY.encode() in data for data in found)


def test_no_plaintext_of_a_checkpoint_reaches_the_disk(tmp_path: Path, serde: Any) -> None:
    path = tmp_path / "store"
    with casstore.open(path, "relaxed") as store:
        saver = CasstoreSaver(store, serde=serde)
        told = fill(saver)
        assert told[0].pending_writes == [("task", "text", CANARY), ("task", "list", [CANARY])]
        assert len(list(saver.list(None, filter={"note": CANARY}))) > 3
        saver.copy_thread("delta", "copy")
        saver.prune(["copy", "chat"])
        assert graphs.delta(saver).get_state(on("copy")).values["log"][0] == f"{CANARY} 0"
        assert not is_on_disk(store, path)
        # The search would find it: casstore's own serialiser does not encrypt.
        put(CasstoreSaver(store), {"text": CANARY}, thread="plain")
        assert is_on_disk(store, path)


def test_no_plaintext_of_an_imported_checkpoint_reaches_the_disk(
    tmp_path: Path, serde: Any
) -> None:
    database = tmp_path / "source.sqlite"
    with closing(sqlite3.connect(database, check_same_thread=False)) as connection:
        told = fill(SqliteSaver(connection, serde=serde))
    path = tmp_path / "store"
    with casstore.open(path, "relaxed") as store:
        assert import_checkpoints(store, database, serde=serde).part("checkpoints").imported == len(
            told
        )
        assert import_checkpoints(store, database, serde=serde).part("checkpoints").imported == 0
        found = [*CasstoreSaver(store, serde=serde).list(None)]
        assert [each.metadata for each in found] == [each.metadata for each in told]
        assert [each.checkpoint["channel_values"] for each in found] == [
            each.checkpoint["channel_values"] for each in told
        ]
        assert not is_on_disk(store, path)


class Renamed(JsonPlusSerializer):
    """Overrides neither method."""


def test_only_a_serialiser_that_overrides_neither_method_is_given_parts_of_values(
    serde: Any,
) -> None:
    class Reading(JsonPlusSerializer):
        """Overrides one of the two."""

        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            return super().loads_typed(data)

    class Writing(JsonPlusSerializer):
        """Overrides the other."""

        def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
            return super().dumps_typed(obj)

    for own in (JsonPlusSerializer(), StrictSerializer(), Renamed()):
        assert encodes_as_langgraph(own)
    for other in (Reading(), Writing(), serde):
        assert not encodes_as_langgraph(other)


def test_metadata_that_an_earlier_release_stored_without_the_serialiser_is_still_read(
    store: Store,
) -> None:
    put(CasstoreSaver(store), {"n": 1}, note="before")
    found = CasstoreSaver(store, serde=Sealed()).get_tuple(on())
    assert found is not None
    assert found.metadata.get("note") == "before"


def test_a_wrapped_serialiser_that_falls_back_to_pickle_is_refused(store: Store) -> None:
    serde = EncryptedSerializer(Cipher(), JsonPlusSerializer(pickle_fallback=True))
    with pytest.raises(InvalidInputError, match="pickle"):
        CasstoreSaver(store, serde=serde)
