"""Threads as rows: what they cost, what copies share, what pruning and gc leave."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde import jsonplus
from langgraph.checkpoint.sqlite import SqliteSaver

import casstore
from casstore.adapters.langgraph import CasstoreSaver
from casstore.adapters.langgraph.layout import CheckpointKey
from casstore.adapters.langgraph.threads import Threads
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Write
from casstore.errors import (
    BranchedThreadError,
    CheckpointGoneError,
    ClosedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
)
from casstore.maintenance import gc
from casstore.session.records import Draft
from casstore.store import Store
from tests.adapters.langgraph import graphs
from tests.adapters.langgraph.graphs import on, say

DURABILITIES = ("sync", "async", "exit")


@pytest.fixture
def saver(store: Store) -> CasstoreSaver:
    return CasstoreSaver(store)


def records(store: Store) -> list[Any]:
    return store.engine.scan_rows("records", limit=1_000_000)


def objects(store: Store) -> int:
    return len(store.engine.scan_objects(limit=1_000_000))


def put(
    saver: BaseCheckpointSaver[Any],
    values: dict[str, Any],
    parent: str | None = None,
    *,
    thread: str = "t",
    namespace: str = "",
    versions: dict[str, Any] | None = None,
    new: dict[str, Any] | None = None,
    **metadata: Any,
) -> str:
    """Put a checkpoint by hand; its id."""
    checkpoint = empty_checkpoint()
    checkpoint["id"] = str(uuid6())
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = versions if versions is not None else dict.fromkeys(values, 1)
    config = on(thread, checkpoint_ns=namespace, checkpoint_id=parent)
    meta: Any = {"source": "loop", "step": 0, **metadata}
    told = checkpoint["channel_versions"] if new is None else new
    done: Any = saver.put(config, checkpoint, meta, told)
    return str(done["configurable"]["checkpoint_id"])


def everything(saver: BaseCheckpointSaver[Any], *threads: str) -> list[Any]:
    return [found for thread in threads for found in saver.list(on(thread))]


# --- costs what changed ---------------------------------------------------------------------


def messages(count: int) -> list[AIMessage]:
    source = random.Random(7)
    return [AIMessage(source.randbytes(400).hex(), id=f"m{n}") for n in range(count)]


def grow(
    saver: BaseCheckpointSaver[Any], said: list[AIMessage], marks: tuple[int, ...], size: Any
) -> list[int]:
    """Put a checkpoint after each message; the bytes taken at the marks."""
    sizes: list[int] = []
    parent = None
    for n in range(1, len(said) + 1):
        version = {"messages": n}
        parent = put(saver, {"messages": said[:n]}, parent, versions=version)
        if n in marks:
            sizes.append(size())
    return sizes


def test_storage_of_400_turns_grows_linearly_with_the_messages(
    store: Store, tmp_path: Path
) -> None:
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    said = messages(400)

    def applied_bytes() -> int:
        engine.apply_log()
        return engine.used_bytes()

    ours = grow(CasstoreSaver(store), said, (200, 400), applied_bytes)
    with SqliteSaver.from_conn_string(str(tmp_path / "c.sqlite")) as stock:

        def size() -> int:
            (pages,) = stock.conn.execute("PRAGMA page_count").fetchone()
            return int(pages) * 4096

        theirs = grow(stock, said, (200, 400), size)
    # Twice the turns: twice the bytes here, four times there.
    assert ours[1] < 2.3 * ours[0]
    assert theirs[1] > 3.5 * theirs[0]
    # 800 hexadecimal digits a message hold 400 bytes of chance: no store can take less.
    assert ours[1] < 5 * 400 * 400
    assert ours[1] * 100 < theirs[1]


def test_a_message_in_several_channels_threads_and_writes_is_stored_once(
    store: Store, saver: CasstoreSaver
) -> None:
    said = messages(40)
    parent = put(saver, {"messages": said})
    before = objects(store)
    # In another channel, another order, another thread, and as a pending write.
    put(saver, {"archive": said}, thread="other")
    assert objects(store) == before + 1  # the checkpoint itself
    saver.put_writes(on(checkpoint_id=parent, checkpoint_ns=""), [("messages", said)], "task")
    assert objects(store) == before + 1


def test_changing_one_entry_of_a_dictionary_stores_only_that_entry(
    store: Store, saver: CasstoreSaver
) -> None:
    source = random.Random(1)
    files = {f"src/file{n}.py": source.randbytes(300).hex() for n in range(300)}
    parent = put(saver, {"files": files})
    before = objects(store)
    files["src/file7.py"] = "changed " * 100
    latest = put(saver, {"files": files}, parent, versions={"files": 2})
    assert objects(store) - before <= 6
    found = saver.get_tuple(on())
    assert found is not None
    assert found.checkpoint["id"] == latest
    # In its own order, too, which a stored map would not keep.
    assert list(found.checkpoint["channel_values"]["files"].items()) == list(files.items())


def test_a_channel_that_did_not_change_is_not_serialised_again(
    saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = messages(20)
    parent = put(saver, {"messages": said, "n": 1})
    encoded: list[Any] = []
    encode = jsonplus._msgpack_enc

    def noted(value: Any) -> bytes:
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr(jsonplus, "_msgpack_enc", noted)
    versions = {"messages": 1, "n": 2}
    put(saver, {"messages": said, "n": 2}, parent, versions=versions, new={"n": 2})
    assert encoded == []
    found = saver.get_tuple(on())
    assert found is not None
    assert found.checkpoint["channel_values"] == {"messages": said, "n": 2}


def test_values_of_a_collected_parent_are_stored_again(store: Store, saver: CasstoreSaver) -> None:
    said = messages(20)
    parent = put(saver, {"messages": said})
    saver.delete_thread("t")
    gc.collect(store, grace_ms=0)
    assert objects(store) == 0
    # The saver still remembers what the parent linked to.
    put(saver, {"messages": said}, parent, new={})
    found = saver.get_tuple(on())
    assert found is not None
    assert found.checkpoint["channel_values"]["messages"] == said


# --- gc -------------------------------------------------------------------------------------


def test_gc_keeps_every_checkpoint_and_gives_a_deleted_thread_back(
    store: Store, saver: CasstoreSaver
) -> None:
    graph = graphs.asking(saver)
    graph.invoke({"log": ["x" * 3000], "answer": ""}, on("kept"))
    graphs.chat(saver).invoke(say("y" * 5000), on("gone"))
    before = everything(saver, "kept")
    both = objects(store)
    gc.collect(store, grace_ms=0)
    assert objects(store) == both
    assert everything(saver, "kept") == before
    saver.delete_thread("gone")
    report = gc.collect(store, grace_ms=0)
    assert report.bytes_swept > 5000
    assert everything(saver, "kept") == before
    saver.delete_thread("kept")
    gc.collect(store, grace_ms=0)
    assert (objects(store), records(store)) == (0, [])


# --- copying --------------------------------------------------------------------------------


def test_a_copy_takes_one_row_a_checkpoint_and_no_payload(
    store: Store, saver: CasstoreSaver
) -> None:
    graph = graphs.asking(saver)
    graph.invoke({"log": ["x" * 3000], "answer": ""}, on("source"))
    checkpoints = len(everything(saver, "source"))
    before, stored = len(records(store)), objects(store)
    saver.copy_thread("source", "copy")
    assert len(records(store)) - before == checkpoints
    # Rows with writes folded in may need an object to hold them; nothing else is new.
    assert objects(store) - stored <= checkpoints
    assert [each.checkpoint for each in everything(saver, "copy")] == [
        each.checkpoint for each in everything(saver, "source")
    ]
    assert [each.pending_writes for each in everything(saver, "copy")] == [
        each.pending_writes for each in everything(saver, "source")
    ]
    assert [each.metadata for each in everything(saver, "copy")] == [
        each.metadata for each in everything(saver, "source")
    ]


def test_a_copied_thread_and_its_source_are_independent(store: Store, saver: CasstoreSaver) -> None:
    from langgraph.types import Command

    graph = graphs.asking(saver)
    graph.invoke({"log": [], "answer": ""}, on("source"))
    graph.invoke(Command(resume="Ada"), on("source"))
    saver.copy_thread("source", "copy")
    before = everything(saver, "source")
    # The answer given before the copy was made counts in the copy, which folded it into a row.
    done = graph.invoke(Command(resume="red"), on("copy"))
    assert done["log"] == ["first", "asked Ada red", "last Ada"]
    assert everything(saver, "source") == before
    done = graph.invoke(Command(resume="blue"), on("source"))
    assert done["log"] == ["first", "asked Ada blue", "last Ada"]
    saver.delete_thread("source")
    gc.collect(store, grace_ms=0)
    assert graph.get_state(on("copy")).values["log"] == ["first", "asked Ada red", "last Ada"]


def test_writes_to_a_copied_checkpoint_keep_its_earlier_writes(saver: CasstoreSaver) -> None:
    at = put(saver, {"a": 1})
    saver.put_writes(on(checkpoint_ns="", checkpoint_id=at), [("x", 1), ("y", 2)], "task", "p")
    saver.copy_thread("t", "copy")
    copied = on("copy", checkpoint_ns="", checkpoint_id=at)
    saver.put_writes(copied, [("x", "late"), ("y", "late"), ("z", 3)], "task", "p")
    saver.put_writes(copied, [("w", 4)], "other", "q")
    found = saver.get_tuple(copied)
    assert found is not None
    assert found.pending_writes == [
        ("task", "x", 1), ("task", "y", 2), ("task", "z", 3), ("other", "w", 4),
    ]  # fmt: skip


def test_copying_over_a_thread_replaces_it_and_copying_a_missing_one_changes_nothing(
    saver: CasstoreSaver,
) -> None:
    at = put(saver, {"a": 1})
    saver.put_writes(on(checkpoint_ns="", checkpoint_id=at), [("x", 1)], "task")
    saver.copy_thread("t", "copy")
    saver.put_writes(on("copy", checkpoint_ns="", checkpoint_id=at), [("y", 1)], "mine")
    saver.copy_thread("t", "copy")
    saver.copy_thread("t", "t")
    saver.copy_thread("nobody", "copy")
    found = saver.get_tuple(on("copy"))
    assert found is not None
    assert found.pending_writes == [("task", "x", 1)]


# --- delta channels, prune and delete_for_runs together ---------------------------------------


def journal(saver: Any, turns: int, durability: str, thread: str = "t") -> Any:
    graph = graphs.delta(saver)
    for n in range(turns):
        config = {**on(thread), "metadata": {"run_id": f"run{n}"}}
        graph.invoke({"log": [f"in {n}"], "n": n}, config, durability=durability)
    return graph


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_pruned_thread_of_delta_channels_reads_and_goes_on_as_before(
    store: Store, saver: CasstoreSaver, durability: str
) -> None:
    memory = InMemorySaver()
    ours, theirs = journal(saver, 3, durability), journal(memory, 3, durability)
    for turn in range(3, 9):
        # Pruned at every distance from the last snapshot, which comes each fifth update.
        saver.prune(["t"])
        gc.collect(store, grace_ms=0)
        assert len(everything(saver, "t")) == 1
        assert ours.get_state(on()).values == theirs.get_state(on()).values
        for graph in (ours, theirs):
            graph.invoke({"log": [f"in {turn}"], "n": turn}, on(), durability=durability)
        assert ours.get_state(on()).values == theirs.get_state(on()).values
    assert len(ours.get_state(on()).values["log"]) == 9 * 4


def test_every_checkpoint_of_a_delta_thread_reads_as_in_memory_also_in_a_copy(
    saver: CasstoreSaver,
) -> None:
    memory = InMemorySaver()
    ours, theirs = journal(saver, 4, "sync"), journal(memory, 4, "sync")
    want = [each.values for each in theirs.get_state_history(on())]
    assert [each.values for each in ours.get_state_history(on())] == want
    saver.copy_thread("t", "copy")
    assert [each.values for each in ours.get_state_history(on("copy"))] == want
    saver.prune(["copy"])
    assert ours.get_state(on("copy")).values == want[0]
    assert [each.values for each in ours.get_state_history(on())] == want


def test_the_delta_channel_history_equals_that_of_the_base_class(saver: CasstoreSaver) -> None:
    journal(saver, 4, "sync")
    for found in everything(saver, "t"):
        plain = BaseCheckpointSaver.get_delta_channel_history(
            saver, config=found.config, channels=["log", "n", "nothing"]
        )
        ours = saver.get_delta_channel_history(
            config=found.config, channels=["log", "n", "nothing"]
        )
        assert ours == plain
    assert saver.get_delta_channel_history(config=on(), channels=[]) == {}
    assert saver.get_delta_channel_history(config=on("nobody"), channels=["log"]) == {
        "log": {"writes": []}
    }


@pytest.mark.parametrize("victims", [("run0",), ("run1", "run2"), ("run0", "run2")])
def test_checkpoints_read_as_before_after_the_runs_of_their_ancestors_are_deleted(
    store: Store, saver: CasstoreSaver, victims: tuple[str, ...]
) -> None:
    graph = journal(saver, 4, "sync")
    before = {
        found.config["configurable"]["checkpoint_id"]: graph.get_state(found.config).values
        for found in everything(saver, "t")
        if found.metadata["run_id"] not in victims
    }
    saver.delete_for_runs(victims)
    gc.collect(store, grace_ms=0)
    left = everything(saver, "t")
    assert {each.metadata["run_id"] for each in left} == {f"run{n}" for n in range(4)} - {*victims}
    for found in left:
        at = found.config["configurable"]["checkpoint_id"]
        assert graph.get_state(found.config).values == before.pop(at)
    assert before == {}
    saver.prune(["t"])
    want = graph.get_state(on()).values
    assert len(want["log"]) == 4 * 4
    # Whoever goes on after a deletion is not taken for a second writer.
    strict = CasstoreSaver(store, on_branch="refuse")
    done = graphs.delta(strict).invoke({"log": ["more"], "n": 7}, on())
    assert done["log"][:16] == want["log"]


def test_runs_are_found_in_rows_of_any_length(store: Store, saver: CasstoreSaver) -> None:
    long_thread, long_run = "thread " * 60, "run " * 200
    for thread, run in (("t", "a"), (long_thread, "a"), ("t2", long_run), (long_thread, "b")):
        at = put(saver, {"x": 1}, thread=thread, run_id=run)
        saver.put_writes(
            on(thread, checkpoint_ns="", checkpoint_id=at), [("x", "y" * 700)] * 9, "task"
        )
    saver.copy_thread(long_thread, "copy")
    saver.delete_for_runs(["a", long_run])
    left = [
        (each.config["configurable"]["thread_id"], each.metadata["run_id"])
        for each in saver.list(None)
    ]
    assert sorted(left) == [("copy", "b"), (long_thread, "b")]


def test_a_step_that_needs_a_pruned_checkpoint_is_refused(saver: CasstoreSaver) -> None:
    graph = journal(saver, 1, "sync")
    old = next(each for each in everything(saver, "t") if each.metadata["step"] == 0)
    saver.prune(["t"])
    at: Any = old.config
    counters: Any = {"counters_since_delta_snapshot": {"log": (1, 1)}}
    with pytest.raises(CheckpointGoneError, match="start again"):
        put(
            saver,
            {"n": 1},
            at["configurable"]["checkpoint_id"],
            versions={"n": 2, "log": 2},
            **counters,
        )
    # With a snapshot of its own it needs nobody.
    assert len(everything(saver, "t")) == 1
    assert graph.get_state(on()).values["log"]


def test_a_cyclic_chain_of_parents_terminates(saver: CasstoreSaver) -> None:
    first = put(saver, {}, versions={"log": 1})
    second = put(saver, {}, first, versions={"log": 1})
    checkpoint = empty_checkpoint()
    checkpoint["id"] = first
    saver.put(on(checkpoint_ns="", checkpoint_id=second), checkpoint, {"source": "update"}, {})
    found = saver.get_delta_channel_history(
        config=on(checkpoint_ns="", checkpoint_id=first), channels=["log"]
    )
    assert found == {"log": {"writes": []}}


# --- several writers ------------------------------------------------------------------------


def test_two_writers_on_one_thread_lose_no_checkpoint_and_the_branch_is_reported(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = CasstoreSaver(store), CasstoreSaver(store)
    start = put(one, {"n": 0})
    mine = put(one, {"n": 1}, start)
    with caplog.at_level(logging.WARNING, "casstore.adapters.langgraph"):
        theirs = put(other, {"n": 2}, start)
        put(one, {"n": 3}, mine)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["thread 't'"] * 2
    assert mine in caplog.records[0].getMessage()
    found = {
        each.checkpoint["id"]: each.checkpoint["channel_values"]["n"] for each in one.list(on())
    }
    assert found[mine] == 1
    assert found[theirs] == 2
    assert len(found) == 4


def test_a_second_writer_is_refused_if_that_is_wanted_and_nothing_is_written(store: Store) -> None:
    one = CasstoreSaver(store, on_branch="refuse")
    other = CasstoreSaver(store, on_branch="refuse")
    start = put(one, {"n": 0})
    mine = put(one, {"n": 1}, start)
    rows = records(store)
    with pytest.raises(BranchedThreadError, match="copy the thread") as caught:
        put(other, {"n": 2}, start)
    assert (caught.value.thread, caught.value.parent, caught.value.head) == ("t", start, mine)
    assert records(store) == rows
    # A branch on purpose, a graph inside a graph, and a thread of its own are none of that.
    put(other, {"n": 2}, start, source="fork")
    put(other, {"n": 2}, start, namespace="inside:1")
    put(other, {"n": 2}, start, namespace="inside:1")
    one.copy_thread("t", "mine")
    put(other, {"n": 2}, start, thread="mine")


def test_replaying_an_earlier_checkpoint_is_no_second_writer_but_new_input_to_it_is(
    store: Store,
) -> None:
    graph = graphs.chat(CasstoreSaver(store, on_branch="refuse"))
    for n in range(3):
        graph.invoke(say(f"{n}"), on())
    old = [each for each in graph.get_state_history(on()) if each.next == ("answer",)][-1]
    assert len(graph.invoke(None, old.config)["messages"]) == 2
    # LangGraph asks for this as it would for a second worker's step.
    with pytest.raises(BranchedThreadError):
        graph.invoke(say("again"), old.config, durability="sync")


def in_between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> None:
    """Let something happen after the next write was made ready and before it is written."""
    commit = Draft.commit

    def late(draft: Draft) -> None:
        monkeypatch.setattr(Draft, "commit", commit)
        act()
        commit(draft)

    monkeypatch.setattr(Draft, "commit", late)


def test_a_concurrent_step_on_the_same_checkpoint_is_reported_as_a_branch(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = CasstoreSaver(store, on_branch="refuse")
    start = put(one, {"n": 0})
    other: list[str] = []
    in_between(monkeypatch, lambda: other.append(put(CasstoreSaver(store), {"n": 1}, start)))
    with pytest.raises(BranchedThreadError) as caught:
        put(one, {"n": 2}, start)
    assert [caught.value.head] == other


def test_concurrent_writes_of_a_task_are_kept(
    saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on(checkpoint_ns="", checkpoint_id=put(saver, {"n": 0}))
    in_between(monkeypatch, lambda: saver.put_writes(config, [("__error__", "e")], "task"))
    saver.put_writes(config, [("x", 1), ("y", 2)], "task")
    found = saver.get_tuple(config)
    assert found is not None
    assert found.pending_writes == [("task", "__error__", "e"), ("task", "x", 1), ("task", "y", 2)]


def test_a_parent_that_is_pruned_between_looking_and_writing_is_noticed(
    saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal(saver, 1, "sync")
    old = next(each for each in everything(saver, "t") if each.metadata["step"] == 0)
    at: Any = old.config
    in_between(monkeypatch, lambda: saver.prune(["t"]))
    needs: Any = {"counters_since_delta_snapshot": {"log": (1, 1)}, "source": "fork"}
    with pytest.raises(CheckpointGoneError):
        put(saver, {}, at["configurable"]["checkpoint_id"], versions={"log": 2}, **needs)


def test_a_checkpoint_put_during_pruning_keeps_its_history(
    saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = journal(saver, 2, "sync")
    want = graph.get_state(on()).values["log"]
    in_between(
        monkeypatch, lambda: graph.invoke({"log": ["late"], "n": 5}, on(), durability="sync")
    )
    saver.prune(["t"])
    assert graph.get_state(on()).values["log"][: len(want) + 1] == [*want, "late"]


@pytest.mark.parametrize("namespace", ["", "inside:1"])
@pytest.mark.parametrize("remove", ["prune", "delete_for_runs"])
def test_a_branch_put_while_its_ancestors_are_removed_keeps_its_history(
    saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch, namespace: str, remove: str
) -> None:
    def config(at: str) -> Any:
        return on(checkpoint_ns=namespace, checkpoint_id=at)

    counters: Any = {"counters_since_delta_snapshot": {"log": (1, 1)}, "namespace": namespace}
    first = put(saver, {"log": ["seed"]}, namespace=namespace, run_id="old")
    saver.put_writes(config(first), [("log", ["one"])], "task")
    middle = put(saver, {}, first, versions={"log": 2}, run_id="old", **counters)
    saver.put_writes(config(middle), [("log", ["two"])], "task")
    put(saver, {}, middle, versions={"log": 3}, run_id="new", **counters)
    branch: list[str] = []

    def meanwhile() -> None:
        more: Any = {"source": "fork", "run_id": "new", **counters}
        branch.append(put(saver, {}, middle, versions={"log": 4}, **more))

    in_between(monkeypatch, meanwhile)
    if remove == "prune":
        saver.prune(["t"])
    else:
        saver.delete_for_runs(["old"])
    found = saver.get_delta_channel_history(config=config(branch[0]), channels=["log"])
    assert found == {
        "log": {"writes": [("task", "log", ["one"]), ("task", "log", ["two"])], "seed": ["seed"]}
    }


def test_a_checkpoint_put_again_while_others_are_pruned_is_the_new_one(
    saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(saver, {"n": 1})
    at = put(saver, {"n": 2}, first)
    checkpoint = empty_checkpoint()
    checkpoint["id"] = at
    checkpoint["channel_values"] = {"n": "new"}
    checkpoint["channel_versions"] = {"n": 3}
    config = on(checkpoint_ns="", checkpoint_id=first)
    in_between(monkeypatch, lambda: saver.put(config, checkpoint, {}, {"n": 3}))
    saver.prune(["t"])
    [found] = everything(saver, "t")
    assert found.checkpoint["channel_values"] == {"n": "new"}


def test_a_checkpoint_put_while_it_is_copied_keeps_the_writes_of_the_copy(
    saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = put(saver, {"n": 1})
    saver.put_writes(on(checkpoint_ns="", checkpoint_id=at), [("x", 1)], "task")
    checkpoint = empty_checkpoint()
    checkpoint["id"] = at
    in_between(monkeypatch, lambda: saver.copy_thread("t", "copy"))
    saver.put(on("copy", checkpoint_ns=""), checkpoint, {}, {})
    found = saver.get_tuple(on("copy"))
    assert found is not None
    assert found.pending_writes == [("task", "x", 1)]


def test_going_on_after_the_latest_run_was_deleted_is_no_second_writer(store: Store) -> None:
    saver = CasstoreSaver(store, on_branch="refuse")
    first = put(saver, {"n": 1}, run_id="a")
    put(saver, {"n": 2}, first, run_id="b")
    saver.delete_for_runs(["b"])
    put(saver, {"n": 3}, first, run_id="c")
    # Nor is going on in a thread that another was copied over.
    put(saver, {"n": 9}, thread="other")
    saver.copy_thread("t", "other")
    put(saver, {"n": 4}, first, thread="other")


def test_a_value_that_the_parent_lacks_is_stored_though_its_version_is_unchanged(
    saver: CasstoreSaver,
) -> None:
    parent = put(saver, {}, versions={"n": 1})
    put(saver, {"n": "late"}, parent, versions={"n": 1}, new={})
    found = saver.get_tuple(on())
    assert found is not None
    assert found.checkpoint["channel_values"] == {"n": "late"}


def test_copying_a_thread_that_is_deleted_concurrently_copies_all_or_nothing(
    store: Store, saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs.chat(saver).invoke(say("x" * 2000), on())

    def delete() -> None:
        saver.delete_thread("t")
        gc.collect(store, grace_ms=0)

    in_between(monkeypatch, delete)
    saver.copy_thread("t", "copy")
    assert everything(saver, "copy") == []
    assert records(store) == []


def test_a_checkpoint_put_again_keeps_its_writes_and_says_so(
    saver: CasstoreSaver, caplog: pytest.LogCaptureFixture
) -> None:
    at = put(saver, {"n": 1})
    saver.put_writes(on(checkpoint_ns="", checkpoint_id=at), [("x", 1)], "task")
    saver.copy_thread("t", "copy")
    checkpoint = empty_checkpoint()
    checkpoint["id"] = at
    saver.put(on("copy", checkpoint_ns=""), checkpoint, {}, {})
    found = saver.get_tuple(on("copy"))
    assert found is not None
    assert found.pending_writes == [("task", "x", 1)]
    assert "put again with other content" in caplog.text


def test_writers_at_the_same_moment_are_distinguished(store: Store) -> None:
    start = put(CasstoreSaver(store), {"n": 0})
    gate = threading.Barrier(6)
    done: list[str] = []
    refused: list[str] = []

    def write(n: int) -> None:
        saver = CasstoreSaver(store, on_branch="refuse")
        gate.wait()
        try:
            done.append(put(saver, {"n": n}, start))
        except BranchedThreadError as exc:
            refused.append(exc.head)

    workers = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(done) == 1
    assert refused == done * 5


def test_concurrent_writes_of_several_tasks_are_all_kept(saver: CasstoreSaver) -> None:
    at = put(saver, {"n": 0})
    config = on(checkpoint_ns="", checkpoint_id=at)
    gate = threading.Barrier(8)

    def write(n: int) -> None:
        gate.wait()
        # The same task from several threads, too, as when a run is torn down.
        saver.put_writes(config, [("x", n)], f"task{n % 4}", "p")
        saver.put_writes(config, [("__error__", n)], f"task{n % 4}", "p")

    workers = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = saver.get_tuple(config)
    assert found is not None
    assert found.pending_writes is not None
    assert [each[:2] for each in found.pending_writes] == [
        (f"task{n}", name) for n in range(4) for name in ("__error__", "x")
    ]


def test_writes_may_come_before_their_checkpoint(saver: CasstoreSaver) -> None:
    at = str(uuid6())
    saver.put_writes(on(checkpoint_ns="", checkpoint_id=at), [("x", 1)], "task")
    assert saver.get_tuple(on()) is None
    checkpoint = empty_checkpoint()
    checkpoint["id"] = at
    saver.put(on(checkpoint_ns=""), checkpoint, {}, {})
    found = saver.get_tuple(on())
    assert found is not None
    assert found.pending_writes == [("task", "x", 1)]


def test_the_next_prune_removes_writes_that_arrived_after_their_checkpoint_was_pruned(
    store: Store, saver: CasstoreSaver
) -> None:
    # Once they stayed as long as the thread, and so did all that they held.
    first = put(saver, {"n": 1})
    second = put(saver, {"n": 2}, first)
    saver.prune(["t"])
    for gone in (first, str(uuid6())):
        saver.put_writes(on(checkpoint_ns="", checkpoint_id=gone), [("x", "late" * 500)], "task")
    third = put(saver, {"n": 3}, second)
    for one in (third, str(uuid6())):  # of the latest, and of one that is yet to come
        saver.put_writes(on(checkpoint_ns="", checkpoint_id=one), [("x", 1)], "task")
    saver.put_writes(on("other", checkpoint_ns="", checkpoint_id=first), [("x", 1)], "task")
    saver.prune(["t"])
    writes = Threads(store).writes
    assert [record.key[2] for record in writes.scan("t")] == [third, one]
    assert len(list(writes.scan("other"))) == 1
    gc.collect(store, grace_ms=0)
    assert objects(store) == 1
    found = saver.get_tuple(on())
    assert found is not None
    assert found.pending_writes == [("task", "x", 1)]


# --- lists and odd input --------------------------------------------------------------------


def test_listing_everything_is_newest_first_over_all_threads(saver: CasstoreSaver) -> None:
    put_in_order = [
        put(
            saver,
            {"n": n},
            thread=f"t{n % 3}",
            namespace=("" if n % 2 else "inside"),
            source="fork",
        )
        for n in range(12)
    ]
    newest = put_in_order[::-1]
    assert [each.checkpoint["id"] for each in saver.list(None)] == newest
    assert [each.checkpoint["id"] for each in saver.list(None, limit=4)] == newest[:4]
    assert list(saver.list(None, limit=0)) == []
    before = on(checkpoint_id=put_in_order[5])
    assert [each.checkpoint["id"] for each in saver.list(None, before=before)] == newest[7:]
    in_thread = [each.checkpoint["id"] for each in saver.list(on("t1"))]
    assert in_thread == put_in_order[1::3][::-1]
    one = on("t1", checkpoint_id=put_in_order[4])
    assert [each.checkpoint["id"] for each in saver.list(one)] == [put_in_order[4]]


@pytest.mark.parametrize("thread", ["", "a\0b", "a\x01b", "ß" * 400, "x" * 5000, 7, "a/../b|:*"])
@pytest.mark.parametrize("namespace", ["", "n\0s", "node:1|" * 60])
def test_unusual_thread_and_namespace_names_are_kept_apart(
    saver: CasstoreSaver, thread: Any, namespace: str
) -> None:
    at = put(saver, {"n": 1}, thread=thread, namespace=namespace)
    put(saver, {"n": 2}, thread=f"{thread} ", namespace=namespace)
    put(saver, {"n": 3}, thread=thread, namespace=f"{namespace} ")
    saver.put_writes(on(thread, checkpoint_ns=namespace, checkpoint_id=at), [("x", 1)], "t" * 300)
    found = saver.get_tuple(on(thread, checkpoint_ns=namespace))
    assert found is not None
    assert found.checkpoint["channel_values"] == {"n": 1}
    assert found.pending_writes == [("t" * 300, "x", 1)]
    listed = [each.config["configurable"] for each in saver.list(None)]
    assert {(each["thread_id"], each["checkpoint_ns"]) for each in listed} == {
        (str(thread), namespace), (f"{thread} ", namespace), (str(thread), f"{namespace} "),
    }  # fmt: skip
    saver.copy_thread(str(thread), "copy")
    saver.delete_thread(str(thread))
    assert {each.config["configurable"]["thread_id"] for each in saver.list(None)} == {
        f"{thread} ", "copy",
    }  # fmt: skip


def test_invalid_configs_and_arguments_are_refused(store: Store, saver: CasstoreSaver) -> None:
    with pytest.raises(InvalidInputError, match="thread_id"):
        saver.get_tuple({"configurable": {}})
    with pytest.raises(InvalidInputError, match="writes belong to a checkpoint"):
        saver.put_writes(on(), [("x", 1)], "task")
    with pytest.raises(InvalidInputError, match="keep_latest"):
        saver.prune(["t"], strategy="some")
    with pytest.raises(InvalidInputError, match="lone surrogate"):
        saver.get_tuple(on("\ud800"))
    with pytest.raises(InvalidInputError, match="on_branch"):
        CasstoreSaver(store, on_branch="guess")  # type: ignore[arg-type]
    assert records(store) == []


def test_a_closed_saver_raises_closed_error_and_leaves_a_borrowed_store_open(
    store: Store, tmp_path: Path
) -> None:
    with CasstoreSaver(store) as saver:
        put(saver, {"n": 1})
    with pytest.raises(ClosedError):
        saver.get_tuple(on())
    assert len(records(store)) == 2
    own = CasstoreSaver.from_path(tmp_path / "own", "relaxed")
    put(own, {"n": 1})
    own.close()
    own.close()
    with casstore.open(tmp_path / "own", "relaxed") as again:
        assert CasstoreSaver(again).get_tuple(on()) is not None


@pytest.mark.parametrize(
    "content",
    [
        None, [], {}, {"c": 1}, {"c": "link", "p": 1}, {"c": "link", "r": 1}, {"c": "link", "w": 1},
        {"c": "link", "w": [[1, 2]]}, {"c": "link", "w": [["t", "p", "0", "c", 1]]},
        {"c": "link", "h": 1}, {"c": "other"},
    ],
)  # fmt: skip
def test_rows_that_are_no_checkpoints_are_reported(
    store: Store, saver: CasstoreSaver, content: Any
) -> None:
    threads = Threads(store)
    at = put(saver, {"n": 1})
    row = threads.find(CheckpointKey("t", "", at))
    assert row is not None
    draft = Draft(store)
    if isinstance(content, dict) and content.get("c") == "link":
        content = {**content, "c": row.link}
    elif content == {"c": "other"}:
        content = {"c": draft.keep(["no checkpoint"])}
    draft.put(threads.checkpoints, ("t", "", at), content)
    draft.commit()
    with pytest.raises(CorruptionError):
        saver.get_tuple(on())


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 1}, {"channels": [[1]]}, {"channels": [["a", 1, 2, 3], "x"]}, {"seen": 1},
        {"seen": [["a"]]}, {"more": 1}, {"meta": [1]}, {"channels": [["a", "1", 2]]},
        {"seen": [["a", [["b", None]]]]}, {"channels": [[["a"], 1]]},
    ],
)  # fmt: skip
def test_checkpoints_that_are_damaged_are_reported(
    store: Store, saver: CasstoreSaver, change: dict[str, Any]
) -> None:
    threads = Threads(store)
    at = put(saver, {"n": 1})
    row = threads.find(CheckpointKey("t", "", at))
    assert row is not None
    draft = Draft(store)
    link = draft.keep({**store.get_value(row.link.digest), **change})
    draft.put(threads.checkpoints, ("t", "", at), {"c": link})
    draft.commit()
    with pytest.raises(CorruptionError):
        saver.get_tuple(on())


def test_a_checkpoint_deleted_and_collected_while_it_is_listed_is_left_out(
    store: Store, saver: CasstoreSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = put(saver, {"messages": messages(3)}, thread="kept")
    gone = put(saver, {"messages": messages(3)})
    later = put(saver, {"messages": messages(4)}, gone)
    # A saver that has put none of them reads them from the store.
    reader = CasstoreSaver(store)
    get_many = Store.get_many

    def during(act: Callable[[], Any]) -> None:
        def late(self: Store, *args: Any, **options: Any) -> Any:
            monkeypatch.setattr(Store, "get_many", get_many)
            act()
            gc.collect(store, grace_ms=0)
            return get_many(self, *args, **options)

        monkeypatch.setattr(Store, "get_many", late)

    during(lambda: saver.delete_for_runs(["x"]))
    assert len(list(reader.list(None))) == 3
    # The latest went: the one before is the latest now.
    draft = Draft(store)
    Threads(store).delete_checkpoint(draft, CheckpointKey("t", "", later))
    during(draft.commit)
    found = reader.get_tuple(on())
    assert found is not None
    assert found.checkpoint["id"] == gone
    during(lambda: saver.delete_thread("t"))
    assert [each.checkpoint["id"] for each in reader.list(None)] == [kept]
    during(lambda: saver.delete_thread("kept"))
    assert reader.get_tuple(on("kept")) is None


def test_a_damaged_link_is_reported_and_not_left_out(store: Store, saver: CasstoreSaver) -> None:
    put(saver, {"messages": messages(3)})
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    everything = [info.digest for info in engine.scan_objects(limit=1_000_000)]
    engine.write(Write(deletes=everything))
    reader = CasstoreSaver(store)
    with pytest.raises(ObjectNotFoundError):
        reader.get_tuple(on())
    with pytest.raises(ObjectNotFoundError):
        list(reader.list(None))
