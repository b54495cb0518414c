"""What is remembered of lists: it saves work, and it is never wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

import ormsgpack
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.serde.jsonplus import EXT_CONSTRUCTOR_SINGLE_ARG
from pydantic import BaseModel

from casstore.adapters.langgraph import CasstoreSaver, StrictSerializer
from casstore.adapters.langgraph import saver as saver_module
from casstore.adapters.langgraph.encoding import Codec
from casstore.adapters.langgraph.layout import (
    Channel,
    CheckpointKey,
    CheckpointRow,
    keep_checkpoint,
    pack_fields,
)
from casstore.adapters.langgraph.lists import KnownList, KnownLists
from casstore.adapters.langgraph.threads import Threads
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import UnsafePayloadError
from casstore.format.canonical import Link
from casstore.maintenance import gc
from casstore.session.records import Draft
from casstore.store import Store
from tests.adapters.langgraph.graphs import on
from tests.adapters.langgraph.test_threads import put

RAN: list[str] = []


class Mine(BaseModel):
    """A type of an application."""

    name: str


def run(argument: Any) -> Any:
    """What no checkpoint may call."""
    RAN.append("ran")
    return argument


@pytest.fixture
def saver(store: Store) -> CasstoreSaver:
    return CasstoreSaver(store)


def messages(count: int, seed: int = 0) -> list[Any]:
    """Short ones and long ones, as in a conversation."""
    source = random.Random(seed)
    kinds = (HumanMessage, AIMessage)
    return [
        kinds[at % 2](source.randbytes(source.choice((10, 600))).hex(), id=f"{seed}-{at}")
        for at in range(count)
    ]


def put_list(
    saver: CasstoreSaver, said: Sequence[Any], parent: str | None, version: int, thread: str = "t"
) -> str:
    return put(saver, {"messages": said}, parent, thread=thread, versions={"messages": version})


def read_list(saver: CasstoreSaver, checkpoint: str | None = None, thread: str = "t") -> Any:
    found = saver.get_tuple(on(thread, checkpoint_ns="", checkpoint_id=checkpoint))
    assert found is not None
    return found.checkpoint["channel_values"]["messages"]


def link_of(store: Store, checkpoint: str, thread: str = "t") -> Any:
    threads = Threads(store)
    row = threads.find(CheckpointKey(thread, "", checkpoint))
    assert row is not None
    return threads.read([row])[0].channels["messages"].value


def before_next_write(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], object]) -> None:
    """Let something happen between preparing the next write and its transaction."""
    real = LmdbEngine.write

    def write(engine: LmdbEngine, work: Write) -> WriteResult:
        monkeypatch.setattr(LmdbEngine, "write", real)
        happen()
        return real(engine, work)

    monkeypatch.setattr(LmdbEngine, "write", write)


# --- it saves work ------------------------------------------------------------------------


def test_appending_a_message_stores_only_the_message_and_the_end_of_the_list(
    store: Store, saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = messages(600)
    before = put_list(saver, said, None, 1)
    sent: list[int] = []
    real = LmdbEngine.write

    def write(engine: LmdbEngine, work: Write) -> WriteResult:
        sent.append(len(work.objects))
        return real(engine, work)

    monkeypatch.setattr(LmdbEngine, "write", write)
    after = put_list(saver, [*said, AIMessage("one more " * 90)], before, 2)
    assert len(sent) == 1
    # The checkpoint, the message, a leaf or two, a branch on each level.
    assert sent[0] <= 10
    assert len(read_list(CasstoreSaver(store), after)) == 601


# --- and is never wrong -------------------------------------------------------------------


def test_a_message_that_is_changed_in_place_is_stored_as_it_then_is(
    store: Store, saver: CasstoreSaver
) -> None:
    said = messages(50)
    first = put_list(saver, said, None, 1)
    old = said[20].content
    # As long as before, so that only a look at the bytes tells.
    said[20].content = old[::-1]
    second = put_list(saver, said, first, 2)
    said[30].content = said[30].content[::-1]
    more = [*said, AIMessage("and more", id="more")]
    third = put_list(saver, more, second, 3)
    for each in (saver, CasstoreSaver(store)):
        assert read_list(each, first)[20].content == old
        assert read_list(each, second)[:30] == said[:30]
        assert read_list(each, second)[30].content == said[30].content[::-1]
        assert read_list(each, third) == more


def test_changing_a_returned_list_does_not_change_later_reads(saver: CasstoreSaver) -> None:
    said = messages(50)
    put_list(saver, said, None, 1)
    for _ in range(2):
        found = read_list(saver)
        assert found == said
        found[3].content = "scribbled on"
        found[4].additional_kwargs["note"] = "also"
        found.clear()


def test_lists_of_another_saver_are_read_and_extended(store: Store) -> None:
    here, there = CasstoreSaver(store), CasstoreSaver(store)
    said = messages(40)
    parent = put_list(here, said, None, 1)
    for version in range(2, 8):
        here, there = there, here
        said = [*read_list(here), *messages(3, seed=version)]
        parent = put_list(here, said, parent, version)
        assert read_list(there) == said
    assert read_list(CasstoreSaver(store), parent) == said


def test_a_deleted_and_collected_thread_can_be_put_again(
    store: Store, saver: CasstoreSaver
) -> None:
    said = messages(200)
    put_list(saver, said, None, 1)
    saver.delete_thread("t")
    gc.collect(store, grace_ms=0)
    assert saver.get_tuple(on()) is None
    # The same again: known here, and gone from the store.
    parent = put_list(saver, said, None, 1)
    assert read_list(CasstoreSaver(store)) == said
    saver.delete_thread("t")
    gc.collect(store, grace_ms=0)
    # And more, on a checkpoint that is gone with all its messages.
    put_list(saver, [*said, *messages(1, seed=1)], parent, 2)
    assert read_list(CasstoreSaver(store)) == [*said, *messages(1, seed=1)]


@pytest.mark.parametrize("added", [0, 1])
@pytest.mark.parametrize("deleted", ["before", "meanwhile"])
def test_a_list_that_is_collected_while_it_is_built_upon_is_stored_again(
    store: Store, saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch, deleted: str, added: int
) -> None:
    said = messages(200)
    parent = put_list(saver, said, None, 1)
    if deleted == "before":
        # The rows are gone, the list is still there when the write is prepared.
        saver.delete_thread("t")

    def vanish() -> None:
        saver.delete_thread("t")
        assert gc.collect(store, grace_ms=0).objects_swept > 200

    before_next_write(monkeypatch, vanish)
    said = [*said, *messages(added, seed=1)]
    put_list(saver, said, parent, 2)
    assert read_list(CasstoreSaver(store)) == said


def test_pruned_and_copied_threads_can_continue(store: Store, saver: CasstoreSaver) -> None:
    said = messages(60)
    parent: str | None = None
    for version in range(1, 30):
        parent = put_list(saver, said[: 2 * version], parent, version)
    saver.prune(["t"])
    gc.collect(store, grace_ms=0)
    saver.copy_thread("t", "copy")
    for thread in ("t", "copy"):
        assert read_list(saver, thread=thread) == said[:58]
        more = [*said[:58], AIMessage(f"in {thread}", id="new")]
        put_list(saver, more, parent, 30, thread)
        assert read_list(saver, thread=thread) == more
        assert read_list(CasstoreSaver(store), thread=thread) == more
    saver.delete_thread("t")
    gc.collect(store, grace_ms=0)
    assert read_list(saver, thread="copy")[-1].content == "in copy"


# --- and lets nothing through -------------------------------------------------------------


def store_by_hand(store: Store, stored: list[Any]) -> None:
    """A checkpoint with this list, written by somebody who means no good."""
    threads, draft = Threads(store), Draft(store)
    codec = Codec(StrictSerializer())
    link = draft.keep_long(stored)
    assert type(link) is Link
    checkpoint = {"v": 1, "id": "c", "ts": "", "versions_seen": {}}
    channels = {"messages": Channel(1, True, link)}
    fields = pack_fields(checkpoint, codec.encode({}), codec.encode({}))
    place = CheckpointKey("t", "", "c")
    kept = keep_checkpoint(fields, channels, draft.emit)
    threads.checkpoints.put(draft, CheckpointRow(place, kept))
    draft.commit()


def test_bytes_after_an_element_are_never_decoded(store: Store, saver: CasstoreSaver) -> None:
    serde = StrictSerializer()
    said = [serde.dumps_typed(AIMessage("x" * 900, id=str(at)))[1] for at in range(30)]
    call = ormsgpack.packb((__name__, "run", "argument"))
    hidden = ormsgpack.packb(ormsgpack.Ext(EXT_CONSTRUCTOR_SINGLE_ARG, call))
    store_by_hand(store, [said[0] + hidden, *said[1:]])
    for _ in range(2):
        # Read by itself, each element ends where its object does.
        assert [each.id for each in read_list(saver)] == [str(at) for at in range(30)]
    assert RAN == []


def test_the_list_cache_does_not_bypass_the_allowlist_of_a_saver(store: Store) -> None:
    narrow = CasstoreSaver(store)
    wide: Any = narrow.with_allowlist([(__name__, "Mine")])
    mine = [Mine(name=f"{at} " * 300) for at in range(30)]
    first = put_list(wide, mine, None, 1)
    assert read_list(wide) == mine
    with pytest.raises(UnsafePayloadError):
        read_list(narrow)
    with pytest.raises(UnsafePayloadError):
        put_list(narrow, mine, first, 2)
    with pytest.raises(UnsafePayloadError):
        put_list(narrow, [*mine, AIMessage("hello")], first, 2)
    assert read_list(wide) == mine


# --- and is bounded -----------------------------------------------------------------------


def test_a_limited_number_of_bytes_is_remembered() -> None:
    known, serde = KnownLists(max_bytes=1000), StrictSerializer()
    keys = [bytes([at]) * 32 for at in range(8)]

    def is_known(key: bytes) -> bool:
        return known.find(key, serde) is not None

    for at, key in enumerate(keys[:5]):
        known.remember(key, KnownList(1, bytes(300), serde))
        assert known.size_bytes == min(at + 1, 3) * 300
    assert [*map(is_known, keys[:5])] == [False, False, True, True, True]
    # What is used stays; what something has grown from goes; too much is not kept at all.
    assert is_known(keys[2])
    known.remember(keys[5], KnownList(1, bytes(300), serde))
    assert [*map(is_known, keys[2:4])] == [True, False]
    known.remember(keys[6], KnownList(2, bytes(350), serde), instead_of=keys[2])
    assert not is_known(keys[2])
    assert known.size_bytes == 950
    known.remember(keys[7], KnownList(2, bytes(1001), serde))
    assert not is_known(keys[7])
    # Another serialiser may refuse what this one has passed.
    assert known.find(keys[6], StrictSerializer()) is None
    assert known.size_bytes == 950


def test_reads_stay_correct_with_a_tiny_list_cache(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KnownLists(max_bytes=10)
    monkeypatch.setattr(saver_module, "KnownLists", lambda: known)
    saver = CasstoreSaver(store)
    said = messages(30)
    parent: str | None = None
    for version in range(1, 15):
        parent = put_list(saver, said[: 2 * version], parent, version)
        assert read_list(saver) == said[: 2 * version]
    assert known.size_bytes == 0
