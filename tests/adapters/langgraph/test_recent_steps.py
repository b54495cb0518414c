"""Recent checkpoints are cached: a step on the newest one reads nothing, and is never wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import empty_checkpoint

from casstore.adapters.langgraph import CasstoreSaver, lists, steps
from casstore.adapters.langgraph import saver as saver_module
from casstore.adapters.langgraph.threads import Threads
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import BranchedThreadError, ExpansionError, InvalidInputError
from casstore.format import splitting
from casstore.maintenance import gc
from casstore.store import Store
from tests.adapters.langgraph.graphs import on
from tests.adapters.langgraph.test_lists import before_next_write, put_list, read_list
from tests.adapters.langgraph.test_threads import put


@pytest.fixture
def saver(store: Store) -> CasstoreSaver:
    return CasstoreSaver(store)


def messages(count: int) -> list[Any]:
    """So few that the checkpoint holds the list of their links itself."""
    return [AIMessage(f"{at} " * 300, id=str(at)) for at in range(count)]


def write_task(saver: CasstoreSaver, checkpoint: str, value: Any, thread: str = "t") -> None:
    saver.put_writes(
        on(thread, checkpoint_ns="", checkpoint_id=checkpoint), [("messages", value)], "task"
    )


def pending(saver: CasstoreSaver, thread: str = "t") -> Any:
    found = saver.get_tuple(on(thread))
    assert found is not None
    return [value for _, _, value in found.pending_writes or ()]


def test_a_step_on_the_newest_checkpoint_reads_nothing(
    saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def watch(name: str) -> None:
        real = getattr(LmdbEngine, name)

        def read(self: LmdbEngine, *args: Any, **options: Any) -> Any:
            called.append(name)
            return real(self, *args, **options)

        monkeypatch.setattr(LmdbEngine, name, read)

    for name in ("get_many", "get_rows", "scan_rows"):
        watch(name)
    said = messages(5)
    parent: str | None = None
    for version in range(1, 6):
        parent = put_list(saver, said[:version], parent, version)
        write_task(saver, parent, said[version - 1])
    assert called == []
    # Only which checkpoint is the latest, its pending writes, and the message in them.
    assert read_list(saver) == said
    assert called == ["scan_rows", "scan_rows", "get_many"]


def test_appending_a_message_to_a_short_list_stores_only_that_message(
    store: Store, saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = messages(6)
    parent = put_list(saver, said[:4], None, 1)
    sent: list[int] = []
    real = LmdbEngine.write

    def write(engine: LmdbEngine, work: Write) -> WriteResult:
        sent.append(len(work.objects))
        return real(engine, work)

    monkeypatch.setattr(LmdbEngine, "write", write)
    for version in (5, 6):
        parent = put_list(saver, said[:version], parent, version)
    # The message and the checkpoint.
    assert sent == [2, 2]
    assert read_list(saver) == read_list(CasstoreSaver(store)) == said


def test_a_message_of_a_short_list_that_is_changed_in_place_is_stored_as_it_then_is(
    store: Store, saver: CasstoreSaver
) -> None:
    said = messages(4)
    first = put_list(saver, said, None, 1)
    old = said[1].content
    said[1].content = old[::-1]
    second = put_list(saver, [*said, *messages(1)], first, 2)
    for each in (saver, CasstoreSaver(store)):
        assert read_list(each, first)[1].content == old
        assert read_list(each, second) == [*said, *messages(1)]


def test_a_short_list_that_is_collected_while_it_is_built_upon_is_stored_again(
    store: Store, saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = messages(5)
    parent = put_list(saver, said[:4], None, 1)

    def vanish() -> None:
        CasstoreSaver(store).delete_thread("t")
        assert gc.collect(store, grace_ms=0).objects_swept > 4

    before_next_write(monkeypatch, vanish)
    put_list(saver, said, parent, 2)
    assert read_list(CasstoreSaver(store)) == said


def test_the_head_that_another_saver_has_moved_is_noticed(
    store: Store, saver: CasstoreSaver, caplog: pytest.LogCaptureFixture
) -> None:
    first = put(saver, {"a": 1})
    second = put(CasstoreSaver(store), {"a": 2}, first)
    with caplog.at_level(logging.WARNING, logger="casstore"):
        third = put(saver, {"a": 3}, first)
    assert second in caplog.text
    assert third in caplog.text
    strict = CasstoreSaver(store, on_branch="refuse")
    fourth = put(strict, {"a": 4}, third)
    put(saver, {"a": 5}, fourth)
    with pytest.raises(BranchedThreadError):
        put(strict, {"a": 6}, fourth)
    assert len(list(saver.list(on()))) == 5


def test_a_checkpoint_that_another_saver_has_replaced_is_read_as_it_now_is(
    store: Store, saver: CasstoreSaver
) -> None:
    checkpoint = empty_checkpoint()
    for each, value in ((saver, 1), (CasstoreSaver(store), 2)):
        checkpoint["channel_values"] = {"a": value}
        checkpoint["channel_versions"] = {"a": value}
        each.put(on("t", checkpoint_ns=""), checkpoint, {"step": value}, {"a": value})
    found = saver.get_tuple(on())
    assert found is not None
    assert found.checkpoint["channel_values"] == {"a": 2}
    assert found.metadata["step"] == 2


def test_changing_a_returned_checkpoint_does_not_change_the_cached_one(
    saver: CasstoreSaver,
) -> None:
    checkpoint: Any = empty_checkpoint()
    checkpoint["channel_values"] = {"a": {"b": [1]}, "text": "x" * 900}
    checkpoint["channel_versions"] = {"a": 1, "text": 1}
    checkpoint["versions_seen"] = {"node": {"a": 1}}
    checkpoint["updated_channels"] = ["a"]
    checkpoint["v"] = [4]
    metadata: Any = {"step": 1, "parents": {"": "x"}}
    saver.put(on("t", checkpoint_ns=""), checkpoint, metadata, {"a": 1, "text": 1})
    expected = repr(saver.get_tuple(on()))
    found: Any = saver.get_tuple(on())
    for scribble in (checkpoint, found.checkpoint):
        scribble["channel_values"]["a"]["b"].append(2)
        scribble["versions_seen"]["node"]["b"] = 1
        scribble["updated_channels"].append("b")
        scribble["v"].append(5)
        assert repr(saver.get_tuple(on())) == expected
    metadata["parents"]["x"] = "y"
    assert repr(saver.get_tuple(on())) == expected


@pytest.mark.parametrize("task_writes_first", [False, True])
def test_writes_that_were_copied_onto_a_cached_checkpoint_are_not_repeated(
    store: Store, saver: CasstoreSaver, task_writes_first: bool
) -> None:
    checkpoint = empty_checkpoint()
    for thread in ("source", "t"):
        saver.put(on(thread, checkpoint_ns=""), checkpoint, {"step": 1}, {})
    if task_writes_first:
        write_task(saver, checkpoint["id"], "first of all")
    write_task(saver, checkpoint["id"], "copied", "source")
    CasstoreSaver(store).copy_thread("source", "t")
    write_task(saver, checkpoint["id"], "repeated")
    assert pending(saver) == ["copied"]


def test_repeated_writes_of_a_task_are_ignored(store: Store, saver: CasstoreSaver) -> None:
    parent = put(saver, {"a": 1})
    for value in ("first", "second"):
        write_task(saver, parent, value)
    write_task(CasstoreSaver(store), parent, "third")
    assert pending(saver) == ["first"]


def put_as(saver: CasstoreSaver, checkpoint: str, parent: str | None, **values: Any) -> None:
    """Put a checkpoint with a chosen id, in which only the channel ``new`` is a new one."""
    made = empty_checkpoint()
    made["id"] = checkpoint
    made["channel_values"] = values
    made["channel_versions"] = dict.fromkeys(values, 1)
    config = on("t", checkpoint_ns="", checkpoint_id=parent)
    told: Any = (
        made["channel_versions"] if parent is None else dict.fromkeys(values.keys() & {"new"}, 1)
    )
    saver.put(config, made, {"source": "loop", "step": 0}, told)


@pytest.mark.parametrize("delete", [False, True], ids=["put again", "deleted and put"])
@pytest.mark.parametrize("other_step", [False, True], ids=["at once", "on rows"])
def test_unchanged_channels_are_those_of_the_parent_as_it_is_now(
    store: Store, saver: CasstoreSaver, delete: bool, other_step: bool
) -> None:
    put_as(saver, "1", None, kept="old")
    other = CasstoreSaver(store)
    if delete:
        other.delete_thread("t")
    put_as(other, "1", None, kept="now")
    if other_step:
        put_as(other, "2", "1", kept="now", new=0)
    put_as(saver, "3", "1", kept="now", new=1)
    for reader in (saver, CasstoreSaver(store)):
        found = reader.get_tuple(on("t", checkpoint_ns="", checkpoint_id="3"))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"kept": "now", "new": 1}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([b"equal"], [bytearray(b"equal"), 1]),
        ([bytearray(b"equal")], [b"equal", 1]),
        ([[b"equal"]], [[bytearray(b"equal")], 1]),
    ],
    ids=repr,
)
def test_a_list_that_grows_keeps_the_types_of_bytes(
    store: Store, saver: CasstoreSaver, first: list[Any], then: list[Any]
) -> None:
    """Both types are serialised to the same bytes, by which a grown list is recognised."""
    put_list(saver, then, put_list(saver, first, None, 1), 2)
    for reader in (saver, CasstoreSaver(store)):
        assert repr(read_list(reader)) == repr(then)


def test_a_list_that_grows_by_repeating_itself_is_refused_like_one_that_is_put_whole(
    saver: CasstoreSaver, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lists, splitting):
        monkeypatch.setattr(module, "MAX_REPEATED_BYTES", 4 << 20)
    item = {"k": [[f"{number % 10}" for number in range(100)] for _ in range(40)]}
    length = 2
    while length < 100:
        try:
            put_list(CasstoreSaver(store), [item] * length, None, 1, f"whole {length}")
        except ExpansionError:
            break
        length += 2
    assert 4 < length < 100
    parent = put_list(saver, [item] * (length - 2), None, 1)
    with pytest.raises(ExpansionError):
        put_list(saver, [item] * length, parent, 2)
    assert len(read_list(CasstoreSaver(store))) == length - 2


@pytest.mark.parametrize("version", [None, True, [1]], ids=repr)
def test_a_version_that_could_not_be_read_back_is_refused(
    saver: CasstoreSaver, version: Any
) -> None:
    with pytest.raises(InvalidInputError, match="the version of a channel"):
        put(saver, {"x": 1}, versions={"x": version})
    assert saver.get_tuple(on("t")) is None


def test_a_channel_version_in_digits_of_another_script_round_trips(
    store: Store, saver: CasstoreSaver
) -> None:
    version = "\u0661" * 32 + "." + "0" * 16
    put(saver, {"x": 1}, versions={"x": version})
    found = CasstoreSaver(store).get_tuple(on("t"))
    assert found is not None
    assert found.checkpoint["channel_versions"] == {"x": version}


def test_long_values_of_cached_checkpoints_take_bounded_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_MAX_KEPT_BYTES", 1 << 20)
    cache = steps.RecentCheckpoints()
    monkeypatch.setattr(saver_module, "RecentCheckpoints", lambda: cache)
    saver = CasstoreSaver(store)
    parent = None
    for number in range(30):
        parent = put(
            saver, {"text": f"{number} " + "x" * 100_000}, parent, versions={"text": number}
        )
    known = [cache.recall(row.place) is not None for row in Threads(store).rows("t", "")]
    # The newest come first.
    assert known == sorted(known, reverse=True)
    assert 5 <= sum(known) <= 11
