"""The calls that most programs need: append, edit, fork, diff, adopt, find_turn, hold, gc."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import LEAF, Append, Checkpoint, Commit, Delete, NodeDraft, Session, Set, Store
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.errors import (
    InvalidInputError,
    InvalidValueError,
    LeaseHeldError,
    LeaseLostError,
    PathNotFoundError,
    SessionDeletedError,
    TurnConflictError,
)
from casstore.session import waiting
from casstore.session.data import Claim
from casstore.session.graph import new_node_id
from casstore.testing import ManualClock
from casstore.testing.engine_fixtures import all_objects

MINUTE_MS = 60_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store(MemoryEngine(clock=clock)) as store:
        yield store


@pytest.fixture
def agent(store: Store) -> Session:
    return store.session("agent")


def payloads(session: Session) -> list[Any]:
    return [node.payload for node in session.nodes()]


# --- the example ----------------------------------------------------------------------------------


def test_the_example_runs_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reply = {"role": "assistant", "content": "hello to you"}
    state = {"cwd": "/repo", "files": {"a.py": "old", "b.py": "kept"}}
    body = "new"
    seen: list[Any] = []

    def answer(work: Claim) -> dict[str, Any]:
        seen.extend(work.batches[0].items)
        return {"role": "assistant", "content": "answered"}

    with casstore.open(tmp_path / "my-store", "relaxed") as store:
        agent = store.session("agent")
        agent.append({"role": "user", "content": "hello"})
        agent.append(reply, tool_state=state, turn="t1")
        agent.edit("tool_state", Set(["files", "a.py"], body))
        other = agent.fork("other", at=1)
        other.append("another way")
        print(agent.diff(other))
        agent.adopt(other)
        found = agent.find_turn("t1")
        agent.queue.enqueue(["a question"])
        with agent.hold("worker-1") as held:
            for work in held.work(wait_s=0):
                held.append(answer(work), completes=[work])
        store.gc()

        assert found is not None
        assert found.revision == 2
        assert seen == ["a question"]
        assert agent.queue.batches() == []
        assert payloads(agent)[1:] == ["another way", {"role": "assistant", "content": "answered"}]
        assert store.check(level="full").sound
    said = capsys.readouterr().out
    assert said.startswith("1 node added, 1 dropped, ")
    assert "'another way'" in said
    assert "hello to you" in said
    assert "- $.tool_state: " in said


# --- append ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload", ["text", {"role": "user"}, ["a"], 7, None, b"\xff", "ü\u2028🦉", 0.5]
)
def test_any_value_is_a_payload(agent: Session, payload: Any) -> None:
    result = agent.append(payload)
    assert payloads(agent) == [payload]
    assert result.nodes == (result.leaf,)


@pytest.mark.parametrize("payload", [float("nan"), object(), {1: 2}, "\ud800"])
def test_a_value_that_cannot_be_stored_is_refused_and_nothing_is_written(
    agent: Session, payload: Any
) -> None:
    with pytest.raises(InvalidValueError):
        agent.append("first", payload)
    assert agent.head() is None


def test_payloads_and_drafts_are_appended_in_the_order_given(agent: Session) -> None:
    result = agent.append("one", NodeDraft("two", 2, time=5), "three")
    assert payloads(agent) == ["one", 2, "three"]
    assert result.nodes[1] == "two"
    [node] = [node for node in agent.nodes() if node.id == "two"]
    assert (node.time, node.parent) == (5, result.nodes[0])


def test_the_first_payload_may_have_another_parent_than_the_leaf(agent: Session) -> None:
    agent.append(NodeDraft("a", 1), NodeDraft("b", 2))
    agent.append("after a", "and on", parent="a")
    assert payloads(agent) == [1, "after a", "and on"]
    agent.append(NodeDraft("root", 0), parent=None)
    assert payloads(agent) == [0]
    for wrong in ([], [NodeDraft("c", 1, parent="b")]):
        with pytest.raises(InvalidInputError, match="parent='a' needs a first node"):
            agent.append(*wrong, parent="a")


def test_generated_ids_sort_in_the_order_in_which_they_were_generated() -> None:
    ids = [new_node_id() for _ in range(2000)]
    assert ids == sorted(set(ids))
    assert {len(one) for one in ids} == {23}


def test_generated_ids_are_unique_across_forks_and_threads(store: Store, agent: Session) -> None:
    agent.append("root")
    forks = [agent.fork(f"fork-{n}") for n in range(4)]
    threads = [
        threading.Thread(target=lambda fork=fork: [fork.append(n) for n in range(25)])
        for fork in forks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [node.id for fork in forks for node in fork.nodes()[1:]]
    assert len(set(ids)) == len(ids) == 100


def test_a_forked_process_does_not_generate_the_ids_of_its_parent() -> None:
    new_node_id()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, " ".join(new_node_id() for _ in range(500)).encode())
        os._exit(0)
    os.close(writing)
    ours = {new_node_id() for _ in range(500)}
    with open(reading) as file:
        theirs = set(file.read().split())
    os.waitpid(child, 0)
    assert len(theirs) == 500
    assert not ours & theirs


def test_an_append_without_payloads_changes_components_alone(agent: Session) -> None:
    agent.append("one", tool_state={"cwd": "/"})
    assert agent.append(tool_state={"cwd": "/repo"}).nodes == ()
    assert payloads(agent) == ["one"]
    assert agent.checkpoint(hydrate=True).tool_state == {"cwd": "/repo"}


def test_an_append_changes_only_the_components_that_it_names(agent: Session) -> None:
    agent.append(
        "one", tool_state={"a": 1}, plugin_snapshot=[1], config={"k": "v"}, frames=["f"], notes="n"
    )
    agent.append("two", tool_state={"a": 2}, turn_state={"step": 1})
    agent.append("three", plugin_snapshot=None, frames=[])
    found = agent.checkpoint(hydrate=True)
    assert found == Checkpoint(
        turn_state={"step": 1}, tool_state={"a": 2}, config={"k": "v"}, others={"notes": "n"}
    )
    agent.append("four", notes=None)
    assert agent.checkpoint().others is None


def test_a_component_can_be_set_to_a_link_to_a_stored_value(store: Store, agent: Session) -> None:
    agent.append("one", tool_state={"a": 1})
    link = agent.checkpoint().tool_state
    other = store.session("other")
    other.append("one", tool_state=link, copy=link)
    found = other.checkpoint(hydrate=True)
    assert (found.tool_state, found.others) == ({"a": 1}, {"copy": {"a": 1}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"frames": "f"}, "frames must be a list, got 'f'"),
        ({"plugin_revision": -1}, "plugin_revision must be a whole number from 0 to "),
        ({"current_frame": 5}, "current_frame must be a str, got 5"),
        ({"tool_state": float("inf")}, "tool_state"),
        ({"others": {"a": 1}}, "others is not a component"),
        ({"turns": "t1"}, "append has no parameter 'turns'; did you mean 'turn'?"),
        ({"tool_states": {}}, "did you mean 'tool_state'?"),
        ({"a\0b": 1}, "name of a component"),
        ({"": 1}, "name of a component"),
        ({"expected": -1}, "expected"),
        ({"durability": "soon"}, "durability must be 'full' or 'relaxed', got 'soon'"),
        ({"completes": "claim"}, "completes must be a list or tuple, got 'claim'"),
        ({"lease": "mine"}, "lease"),
        ({"edits": {"tool_state": []}}, "must be a list of one edit or more"),
        ({"edits": {"tool_state": ["x"]}}, "must be a Set, Delete, Insert or Append, got 'x'"),
        ({"edits": ["x"]}, "edits"),
    ],
)
def test_invalid_arguments_are_named_and_nothing_is_written(
    agent: Session, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        agent.append("one", **given)
    assert said in str(caught.value)
    assert agent.head() is None


def test_a_component_whose_name_is_like_a_parameter_can_be_set_with_commit(agent: Session) -> None:
    agent.commit(components={"turns": 3})
    assert agent.checkpoint(hydrate=True).others == {"turns": 3}


def test_a_commit_is_given_as_a_commit_or_as_fields(agent: Session) -> None:
    assert agent.commit(append=["one"], label="first").revision == 1
    assert agent.commit(Commit(append=["two"])).revision == 2
    assert agent.entry("first").revision == 1
    with pytest.raises(InvalidInputError, match="a Commit or fields, got both: label"):
        agent.commit(Commit(), label="x")
    with pytest.raises(InvalidInputError, match="components or replaces the checkpoint"):
        agent.commit(checkpoint=Checkpoint(), components={"tool_state": 1})
    with pytest.raises(TypeError):
        agent.commit(appended=["one"])  # type: ignore[call-arg]
    assert payloads(agent) == ["one", "two"]


def test_replacing_the_graph_takes_payloads_too(agent: Session) -> None:
    agent.append("old")
    agent.commit(replace=["new", NodeDraft("n", "er", parent=LEAF)])
    assert payloads(agent) == ["new", "er"]


# --- turns ----------------------------------------------------------------------------------------


def test_a_repeated_turn_returns_the_first_result_whatever_ids_it_would_generate(
    agent: Session,
) -> None:
    first = agent.append("a", "b", tool_state={"n": 1}, turn="t1")
    again = agent.append("a", "b", tool_state={"n": 1}, turn="t1")
    assert again == first._replace(replayed=True)
    assert agent.append(NodeDraft("x", "a"), "b", tool_state={"n": 1}, turn="t1").replayed
    assert payloads(agent) == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        {"tool_state": {"n": 2}},
        {"tool_state": {"n": 1}, "notes": "x"},
        {"tool_state": None},
        {},
        {"tool_state": {"n": 1}, "edits": {"tool_state": [Set(["n"], 1)]}},
    ],
)
def test_a_repeated_turn_with_other_components_is_a_conflict(
    agent: Session, other: dict[str, Any]
) -> None:
    agent.append("a", tool_state={"n": 1}, turn="t1")
    with pytest.raises(TurnConflictError):
        agent.append("a", **other, turn="t1")


def test_repeating_a_turn_with_a_full_checkpoint_instead_of_components_is_a_conflict(
    agent: Session,
) -> None:
    agent.append("a", tool_state={"n": 1}, turn="t1")
    with pytest.raises(TurnConflictError):
        agent.commit(append=["a"], checkpoint=Checkpoint(tool_state={"n": 1}), turn="t1")


def test_a_repeated_edit_of_a_turn_is_applied_once(agent: Session) -> None:
    agent.append("a", tool_state={"log": []})
    edit = Append(["log"], "line")
    first = agent.edit("tool_state", edit, turn="t1")
    assert agent.edit("tool_state", edit, turn="t1") == first._replace(replayed=True)
    assert agent.checkpoint(hydrate=True).tool_state == {"log": ["line"]}
    for other in (Append(["log"], "other"), Set(["log"], "line"), Delete(["log"])):
        with pytest.raises(TurnConflictError):
            agent.edit("tool_state", other, turn="t1")


def test_a_turn_is_found_without_running_it_again(store: Store, agent: Session) -> None:
    assert agent.find_turn("t1") is None
    first = agent.append("a", turn="t1")
    agent.append("b", turn="t2")
    assert agent.find_turn("t1") == first._replace(replayed=True)
    assert agent.find_turn("t3") is None
    fork = agent.fork("fork")
    fork.append("c", turn="t3")
    assert fork.find_turn("t3") is not None
    agent.adopt(fork)
    assert agent.find_turn("t3") is not None
    store.delete_session("agent")
    with pytest.raises(SessionDeletedError):
        agent.find_turn("t1")


@pytest.mark.parametrize("turn", ["", "\ud800", None, 5])
def test_find_turn_refuses_an_invalid_turn(agent: Session, turn: Any) -> None:
    with pytest.raises(InvalidInputError, match="turn"):
        agent.find_turn(turn)


# --- edit -----------------------------------------------------------------------------------------


class CountingEngine(MemoryEngine):
    """Counts the objects that are read, and the requests for them."""

    reads = requests = 0

    def get_many(self, digests: Any) -> Any:
        self.reads += len(digests)
        self.requests += 1
        return super().get_many(digests)


def test_iterating_over_a_path_reads_the_node_index_ahead() -> None:
    engine = CountingEngine()
    Store(engine).session("long").append(*range(1000))
    engine.requests = 0
    # By a store that has seen nothing of the session yet.
    assert [node.payload for node in Store(engine).session("long").nodes()] == [*range(1000)]
    # Manifest and index: 5 requests; nodes: 4.
    assert engine.requests <= 9


def test_an_edit_of_a_large_component_reads_only_what_it_needs() -> None:
    engine = CountingEngine()
    with Store(engine) as store:
        agent = store.session("agent")
        state = {"files": {f"{n:05}.py": f"body {n} " * 20 for n in range(5000)}}
        agent.append("one", tool_state=state)
        pieces = len(all_objects(engine))
        engine.reads = 0
        agent.edit("tool_state", Set(["files", "02500.py"], "new"))
        assert pieces > 200
        assert engine.reads < 20
        state["files"]["02500.py"] = "new"
        assert agent.checkpoint(hydrate=True).tool_state == state
        # The digest is that of the whole value, and nothing but the changed pieces was added.
        assert agent.checkpoint().tool_state.digest == casstore.Digest(store.put_value(state))
        assert len(all_objects(engine)) < pieces + 20


def test_edits_are_applied_in_order_and_in_the_same_commit_as_nodes(agent: Session) -> None:
    agent.append("one", tool_state={"a": [1]}, notes=["x"])
    agent.append("two", edits={"tool_state": [Append(["a"], 2), Delete(["a", 0])]}, notes=["y"])
    found = agent.checkpoint(hydrate=True)
    assert (found.tool_state, found.others) == ({"a": [2]}, {"notes": ["y"]})
    # A component that is set and edited is set first.
    agent.append(tool_state={"b": []}, edits={"tool_state": [Append(["b"], 1)]})
    assert agent.checkpoint(hydrate=True).tool_state == {"b": [1]}


@pytest.mark.parametrize("component", ["turn_state", "config"])
def test_components_inside_the_manifest_are_edited_too(agent: Session, component: str) -> None:
    long = {"k": ["x" * 100] * 200}
    agent.commit(append=["one"], components={component: long})
    agent.edit(component, Set(["k", 0], "y"), Delete(["k", 1]))
    found = getattr(agent.checkpoint(hydrate=True), component)
    assert found == {"k": ["y", *["x" * 100] * 198]}
    agent.edit(component, Set([], None))
    assert getattr(agent.checkpoint(hydrate=True), component) is None


def test_an_edit_error_names_the_path_that_is_missing(agent: Session) -> None:
    with pytest.raises(PathNotFoundError, match=r"nothing at \$\.tool_state"):
        agent.edit("tool_state", Set(["a"], 1))
    agent.edit("tool_state", Set([], {"a": {}}))
    with pytest.raises(PathNotFoundError, match=r"nothing at \$\.tool_state\.b"):
        agent.edit("tool_state", Set(["b", "c"], 1))
    with pytest.raises(InvalidValueError, match=r"\$\.tool_state\.a\.b"):
        agent.edit("tool_state", Set(["a", "b"], float("nan")))
    with pytest.raises(InvalidInputError, match="one edit or more"):
        agent.edit("tool_state")
    assert agent.checkpoint(hydrate=True).tool_state == {"a": {}}
    head = agent.head()
    assert head is not None
    assert head.revision == 1


def test_an_edit_of_frames_or_plugin_revision_must_leave_a_valid_value(agent: Session) -> None:
    agent.append(frames=["a"], plugin_revision=3)
    agent.edit("frames", Append([], "b"))
    assert agent.checkpoint(hydrate=True).frames == ("a", "b")
    with pytest.raises(InvalidInputError, match="frames must be a list"):
        agent.edit("frames", Set([], "text"))
    with pytest.raises(InvalidInputError, match="plugin_revision"):
        agent.edit("plugin_revision", Set([], "text"))


def test_two_sessions_edit_one_component_at_once_and_no_edit_is_lost(agent: Session) -> None:
    agent.append("one", tool_state={"log": []})

    def work(name: str) -> None:
        for n in range(20):
            agent.edit("tool_state", Append(["log"], f"{name}{n}"))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = agent.checkpoint(hydrate=True).tool_state["log"]
    assert sorted(log) == sorted(f"{name}{n}" for name in "ab" for n in range(20))


def test_view_edit_and_diff_accept_a_link_in_place_of_a_digest(
    store: Store, agent: Session
) -> None:
    agent.append("one", tool_state={"a": 1})
    link = agent.checkpoint().tool_state
    assert store.view(link)["a"] == 1
    edited = store.edit(link, Set(["a"], 2))
    assert store.get_value(edited) == {"a": 2}
    [change] = store.diff(link, casstore.Link(edited))
    assert (change.before, change.after) == (1, 2)


# --- fork, diff, printing -------------------------------------------------------------------------


def test_a_fork_is_a_session_and_may_begin_with_payloads(agent: Session) -> None:
    agent.append("one")
    agent.append("two")
    other = agent.fork("other", at=1, append=["another"])
    assert (other.id, payloads(other)) == ("other", ["one", "another"])
    assert payloads(agent) == ["one", "two"]


def test_a_diff_reads_payloads_on_access_and_can_be_pickled(store: Store, agent: Session) -> None:
    agent.append("one", tool_state={"a": 1})
    other = agent.fork("other")
    other.append({"text": "two"}, tool_state={"a": 2})
    found = agent.diff(other)
    assert [node.payload for node in found.added] == [{"text": "two"}]
    assert [(change.path, change.after) for change in found.changes] == [(("tool_state", "a"), 2)]
    assert agent.diff("other")[:7] == store.compare("agent", "other")[:7] == found[:7]
    assert str(agent.diff(agent)) == "no differences"
    assert str(other.diff(other, at=1)).splitlines()[1] == (
        f"+ node {found.added[0].id!r}: {{'text': 'two'}}"
    )
    [node] = pickle.loads(pickle.dumps(found.added))
    assert node == found.added[0]


def test_the_payload_of_a_hidden_node_is_not_shown(agent: Session) -> None:
    agent.append("one")
    other = agent.fork("other")
    [secret] = other.append("secret").nodes
    other.tombstone([secret])
    found = agent.diff(other)
    assert [node.payload for node in found.added] == [None]
    assert "secret" not in str(found)
    assert f"+ node {secret!r} (hidden)" in str(found)


def test_a_long_diff_is_printed_truncated(agent: Session) -> None:
    agent.append("one")
    other = agent.fork("other")
    other.append(*[f"{n} " + "x" * 500 for n in range(50)])
    lines = str(agent.diff(other)).splitlines()
    assert lines[-1] == "+ … 30 more"
    assert max(map(len, lines)) < 150


# --- leases ---------------------------------------------------------------------------------------


def test_an_append_under_the_lease_of_another_names_owner_and_expiry(
    agent: Session, clock: ManualClock
) -> None:
    clock.now_ms = 1_795_010_602_000
    agent.claim_lease("worker-7 ü", MINUTE_MS)
    with pytest.raises(LeaseHeldError) as caught:
        agent.append("one")
    assert str(caught.value) == (
        "session 'agent' is leased by 'worker-7 ü' until 2026-11-18T14:04:22Z; "
        "wait, or pass its lease"
    )
    assert caught.value.owner == "worker-7 ü"
    clock.now_ms += MINUTE_MS
    assert agent.append("one").revision == 1


def test_claiming_a_held_lease_with_wait_s_waits_and_raises_lease_held_error(
    agent: Session, clock: ManualClock
) -> None:
    lease = agent.claim_lease("worker-1", MINUTE_MS)
    assert lease is not None
    assert agent.claim_lease("worker-2", MINUTE_MS) is None
    with pytest.raises(LeaseHeldError, match="'worker-1'"):
        agent.claim_lease("worker-2", MINUTE_MS, wait_s=0)
    with pytest.raises(LeaseHeldError):
        agent.claim_lease("worker-2", MINUTE_MS, wait_s=0.01)
    releasing = threading.Timer(0.02, agent.release_lease, [lease])
    releasing.start()
    taken = agent.claim_lease("worker-2", MINUTE_MS, wait_s=60)
    releasing.join()
    assert taken is not None
    assert taken.owner == "worker-2"


def test_a_waiting_claim_takes_a_lease_at_its_expiry_without_a_write(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        agent = store.session("agent")
        agent.claim_lease("killed", 50)
        lease = agent.claim_lease("worker", MINUTE_MS, wait_s=60)
        assert lease is not None
        assert lease.fencing == 2


@pytest.mark.parametrize("ttl_s", [0, -1, "1", None, float("nan"), float("inf"), 1e30, True])
def test_an_invalid_time_to_live_is_refused(agent: Session, ttl_s: Any) -> None:
    with pytest.raises(InvalidInputError, match="ttl_s must be a positive number, got "):
        agent.hold("worker", ttl_s=ttl_s)


@pytest.mark.parametrize("owner", ["", "\ud800", None, 5, b"worker"])
def test_an_invalid_owner_is_refused(agent: Session, owner: Any) -> None:
    with pytest.raises(InvalidInputError, match="owner"):
        agent.hold(owner)


@pytest.mark.parametrize("wait_s", ["1", None, float("nan")])
def test_an_invalid_time_to_wait_is_refused(agent: Session, wait_s: Any) -> None:
    with pytest.raises(InvalidInputError, match="wait_s"):
        agent.hold("worker", wait_s=wait_s)
    if wait_s is not None:
        with agent.hold("worker") as held, pytest.raises(InvalidInputError, match="wait_s"):
            held.work(wait_s=wait_s)


def test_a_held_session_writes_with_its_lease_and_releases_it(agent: Session) -> None:
    with agent.hold("worker-1") as held:
        with pytest.raises(LeaseHeldError, match="worker-1"):
            agent.append("outside")
        with pytest.raises(LeaseHeldError, match="worker-1"), agent.hold("worker-2"):
            pass
        held.append("one", tool_state={"a": 1})
        held.edit("tool_state", Set(["a"], 2))
        held.commit(Commit(append=["two"], label="two"))
        other = held.fork("other")
        other.append("three")
        held.adopt(other)
        held.rewind("two")
        assert payloads(held) == ["one", "two"]
    assert agent.append("outside").revision == 6
    with pytest.raises(LeaseLostError, match="its block has ended"):
        held.append("late")
    with pytest.raises(InvalidInputError, match="entered once"), held:
        pass


def test_a_block_that_raises_releases_the_lease(agent: Session) -> None:
    with pytest.raises(ZeroDivisionError), agent.hold("worker-1"):
        raise ZeroDivisionError
    assert agent.append("on").revision == 1


def test_a_call_under_a_lease_that_a_commit_released_raises_lease_lost_error(
    agent: Session,
) -> None:
    with agent.hold("worker-1") as held:
        held.append("one", release=True)
        with pytest.raises(LeaseLostError, match="released with a commit"):
            held.append("two")
        assert agent.append("free").revision == 2


def test_the_next_call_after_another_owner_took_the_lease_raises_lease_lost_error(
    agent: Session, clock: ManualClock
) -> None:
    with agent.hold("worker-1") as held:
        held.append("one")
        clock.now_ms += 10 * MINUTE_MS
        stolen = agent.claim_lease("worker-2", MINUTE_MS)
        assert stolen is not None
        with pytest.raises(LeaseLostError, match="'worker-2' has claimed the session since"):
            held.append("two")
        with pytest.raises(LeaseLostError):
            next(held.work(wait_s=60))
    # Leaving the block does not release the lease of the other.
    assert agent.append("three", lease=stolen).revision == 2


def renewal_threads() -> list[threading.Thread]:
    """The threads that renew leases, one a store."""
    return [thread for thread in threading.enumerate() if thread.name == "casstore-leases"]


def test_the_next_call_after_a_background_renewal_lost_the_lease_raises(
    agent: Session, clock: ManualClock
) -> None:
    with agent.hold("worker-1", ttl_s=0.03) as held:
        clock.now_ms += MINUTE_MS
        stolen = agent.claim_lease("worker-2", MINUTE_MS)
        assert stolen is not None
        for thread in renewal_threads():
            thread.join()  # it ends, because it has no lease to renew any more
        with pytest.raises(LeaseLostError, match="worker-2"):
            _ = held.lease
        with pytest.raises(LeaseLostError, match="worker-2"):
            held.append("two")


def test_a_held_lease_is_renewed_past_its_time(agent: Session, clock: ManualClock) -> None:
    with agent.hold("worker-1", ttl_s=0.3) as held:
        began = held.lease
        for _ in range(3):
            clock.now_ms += 200  # less than its time, so it is live until it is renewed
            while held.lease.expires_at_ms < clock.now_ms + 300:
                threading.Event().wait(0.005)
        assert clock.now_ms > began.expires_at_ms
        assert held.append("still held").revision == 1
        assert held.lease.fencing == began.fencing


def test_one_thread_renews_all_leases_of_a_store_and_ends_with_the_last(store: Store) -> None:
    for thread in renewal_threads():
        thread.join()  # those of earlier tests
    with store.session("a").hold("w"):
        [thread] = renewal_threads()
        with store.session("b").hold("w"), store.session("c").hold("w"):
            assert renewal_threads() == [thread]
        assert thread.is_alive()
    thread.join()
    with store.session("a").hold("w"):
        [another] = renewal_threads()
        assert another is not thread


def test_a_renewal_that_raises_busy_error_is_retried(store: Store, agent: Session) -> None:
    with agent.hold("worker-1", ttl_s=0.03) as held:
        engine = store.engine
        write, tried = engine.write, threading.Semaphore(0)

        def busy(*_: Any) -> Any:
            tried.release()
            raise casstore.errors.BusyError("the disk is busy")

        engine.write = busy  # type: ignore[method-assign,assignment]
        for _ in range(3):
            assert tried.acquire(timeout=60)
        engine.write = write  # type: ignore[method-assign]
        assert held.append("one").revision == 1


def test_a_closed_store_ends_the_renewal(clock: ManualClock) -> None:
    for thread in renewal_threads():
        thread.join()  # those of earlier tests
    store = Store(MemoryEngine(clock=clock))
    held = store.session("agent").hold("worker-1", ttl_s=0.03)
    held.__enter__()
    [thread] = renewal_threads()
    store.close()
    thread.join()
    with pytest.raises(LeaseLostError, match="this store is closed"):
        held.append("late")


# --- work -----------------------------------------------------------------------------------------


def test_work_is_claimed_in_order_until_there_is_none(agent: Session) -> None:
    for n in range(3):
        agent.queue.enqueue([n])
    with agent.hold("worker-1") as held:
        for work in held.work(wait_s=0):
            held.append(work.batches[0].items[0], completes=[work])
    assert payloads(agent) == [0, 1, 2]
    assert agent.queue.batches() == []


def test_work_waits_for_what_another_thread_queues(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        agent = store.session("agent")
        with agent.hold("worker-1") as held:
            found = held.work(wait_s=60)
            for n in range(3):
                queueing = threading.Timer(0.01, agent.queue.enqueue, [[n]])
                queueing.start()
                work = next(found)
                queueing.join()
                held.append(work.batches[0].items[0], completes=[work])
        assert payloads(agent) == [0, 1, 2]


def test_a_waiting_worker_takes_a_batch_when_it_becomes_available(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        agent = store.session("agent")
        with agent.hold("worker-1") as held:
            # Long enough for a busy machine to look once before the work is available.
            agent.queue.enqueue(["later"], available_at_ms=store.engine.now_ms() + 1500)
            assert list(held.work(wait_s=0)) == []
            work = next(held.work(wait_s=60))
            assert work.batches[0].items == ("later",)


def test_work_ends_when_the_time_to_wait_is_over(agent: Session) -> None:
    with agent.hold("worker-1") as held:
        assert list(held.work(wait_s=0.01)) == []


def test_work_that_was_not_completed_is_free_again_after_the_block(agent: Session) -> None:
    agent.queue.enqueue(["one"])
    with agent.hold("worker-1") as held:
        assert len(list(held.work(wait_s=0))) == 1
        assert list(held.work(wait_s=0)) == []
    with agent.hold("worker-2") as held:
        [work] = held.work(wait_s=0)
        held.append("done", completes=[work])
    assert agent.queue.batches() == []


def test_two_workers_share_one_queue_and_each_batch_is_done_once(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        agent = store.session("agent")
        for n in range(12):
            agent.queue.enqueue([n])
        failed: list[BaseException] = []

        def run(name: str) -> None:
            try:
                while agent.queue.batches():
                    with agent.hold(name, wait_s=60) as held:
                        # One batch for each hold, so that both get some.
                        for work in held.work(wait_s=0):
                            held.append([name, work.batches[0].items[0]], completes=[work])
                            break
            except BaseException as exc:
                failed.append(exc)

        workers = [threading.Thread(target=run, args=(name,)) for name in ("w1", "w2")]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert failed == []
        assert [payload[1] for payload in payloads(agent)] == list(range(12))


def test_ctrl_c_ends_the_wait_for_work_and_releases_the_lease(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        agent = store.session("agent")
        agent.queue.enqueue(["claimed before"])
        main = threading.main_thread().ident
        assert main is not None
        interrupting = threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT])

        def wait_for_ever() -> None:
            with agent.hold("worker-1") as held:
                for _ in held.work():
                    interrupting.start()

        # A shell that starts the tests in the background makes them ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                wait_for_ever()
        finally:
            signal.signal(signal.SIGINT, before)
        interrupting.join()
        assert agent.claim_lease("worker-2", MINUTE_MS) is not None
        assert len(agent.queue.pending()) == 1


def test_a_worker_that_was_killed_loses_the_session_and_its_work(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        agent = store.session("agent")
        agent.queue.enqueue(["one"])
        killed = agent.claim_lease("killed", 50)
        assert killed is not None
        assert agent.queue.claim(killed) is not None
        with agent.hold("worker-2", wait_s=60) as held:
            [work] = held.work(wait_s=0)
            held.append("done", completes=[work])
        assert payloads(agent) == ["done"]


# --- maintenance and names ------------------------------------------------------------------------


def test_the_store_forwards_to_maintenance(tmp_path: Path) -> None:
    from casstore.maintenance import check, gc, retention, vacuum

    with casstore.open(tmp_path / "store", "relaxed") as store:
        assert isinstance(store.engine, LmdbEngine)
        agent = store.session("agent")
        agent.append("one")
        [two] = agent.append("two").nodes
        store.put_blob(b"garbage")
        assert store.gc(dry_run=True, grace_ms=0).outcome is gc.Outcome.PLANNED
        swept = store.gc(grace_ms=0, batch=10)
        assert (swept.outcome, swept.objects_swept) == (gc.Outcome.SWEPT, 1)
        agent.tombstone([two])
        cleaned = store.vacuum(grace_ms=0, sessions=["agent"])
        assert isinstance(cleaned, vacuum.VacuumReport)
        assert cleaned.sessions[0].nodes_removed == 1
        pruned = store.prune(policy=retention.Policy(last=1))
        assert pruned.revisions_removed == 1
        assert isinstance(store.check(level="quick"), check.CheckReport)
        with pytest.raises(InvalidInputError):
            store.gc(grace_ms=-1)


def test_dir_lists_every_public_name() -> None:
    import casstore.maintenance

    packages = {"aio", "errors", "maintenance"}
    public = {name for name in dir(casstore) if not name.startswith("__")}
    assert public == {*casstore.__all__, *packages} - {"__version__"}
    assert set(casstore.maintenance.__all__) <= set(dir(casstore.maintenance))
    assert "TYPE_CHECKING" not in dir(casstore.maintenance)
    assert "UNFENCED" not in casstore.__all__
    for package in (casstore, casstore.maintenance):
        for name in package.__all__:
            assert getattr(package, name) is not None


def test_import_casstore_makes_its_subpackages_available() -> None:
    used = "casstore.aio.open, casstore.errors.LeaseHeldError, casstore.maintenance.gc.collect"
    script = f"import casstore; {used}"
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_reports_heads_and_history_entries_have_readable_str_forms(
    store: Store, tmp_path: Path
) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as files:
        agent = files.session("agent")
        made = agent.append("one", turn="t1", label="first")
        agent.append("two")
        assert str(made) == f"revision 1: 1 node appended, leaf {made.leaf!r}"
        assert str(agent.find_turn("t1")).endswith(", replayed")
        agent.fork("other", at=1)
        agent.adopt("other")
        agent.rewind(1)
        for entry, said in zip(
            agent.history(),
            ("rewind to revision 1 at 20", "adopt of 'other' at revision 1 at 20", "commit at 20"),
            strict=False,
        ):
            assert str(entry).startswith(f"revision {entry.revision} of 'agent': {said}")
        assert str(agent.entry("first")).endswith(", turn 't1', labelled 'first'")
        assert ", forked from 'agent' at revision 1" in str(files.session("other").head())
        assert str(agent.head()).startswith("'agent' at revision 4: 1 node, leaf ")
        files.put_blob(b"1234")
        assert str(files.gc(grace_ms=0)).startswith(
            "swept: 1 unreachable object (4 B), 1 removed (4 B); "
        )
        assert str(files.prune()).startswith("2 sessions: 0 deleted, 0 revisions and 0 labels")
        assert str(files.check()).startswith("sound: level connectivity, ")
        assert str(files.pack(min_age_ms=0)).startswith("packed ")
        assert agent.append("three").nodes
        agent.tombstone([made.nodes[0]])
        assert "session 'agent': done, 1 node removed" in str(files.vacuum(grace_ms=0))


def test_a_waiter_computes_when_the_next_batch_or_lease_becomes_available(
    agent: Session, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed_s: list[float | None] = []

    def stop(due_s: float | None, longest_s: float) -> float:
        computed_s.append(due_s)
        raise TimeoutError

    with agent.hold("worker-1", ttl_s=30) as held:
        agent.queue.enqueue(["later"], available_at_ms=clock.now_ms + 5000)
        monkeypatch.setattr(waiting, "pause_s", stop)
        with pytest.raises(TimeoutError):
            next(held.work(wait_s=60))
        with pytest.raises(TimeoutError), agent.hold("worker-2", wait_s=60):
            pass
    assert computed_s == [5, 30]


def test_append_looks_up_given_ids_in_the_graph_but_not_generated_ids() -> None:
    engine = CountingEngine()
    with Store(engine) as store:
        store.session("agent").append(*range(3001))

        def objects_read(payload: Any) -> int:
            # A new store has nothing in its caches.
            before = engine.reads
            Store(engine).session("agent").append(payload)
            return engine.reads - before

        # The manifest and the leaf.
        assert objects_read("generated") == 2
        assert objects_read(NodeDraft("given", "id")) > 4


def test_many_edits_of_one_commit_store_only_their_result() -> None:
    engine = MemoryEngine()
    with Store(engine) as store:
        agent = store.session("agent")
        agent.append(tool_state={f"{n:05}": "x" * 100 for n in range(2000)})
        before = len(all_objects(engine))
        agent.edit("tool_state", *[Set(["01000"], f"value {n}") for n in range(30)])
        assert len(all_objects(engine)) < before + 20
