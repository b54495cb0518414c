"""Work in progress: queues, leases, attachments, and commits as they happen."""

from __future__ import annotations

import json
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import casstore
from casstore import Commit, NodeDraft
from tests.cli.running import run
from tests.cli.test_endings import environment
from tests.faults.children import killed_at_the_end

TTL_MS = 3_600_000


@pytest.fixture
def busy(tmp_path: Path) -> str:
    """A store with queued, delayed and claimed work, a lease that is held and one released."""
    place = tmp_path / "store"
    with casstore.open(place, durability="relaxed") as store:
        agent = store.session("agent")
        agent.commit(Commit(append=[NodeDraft("n1", "hello")], turn="t1"))
        agent.queue.enqueue([{"task": "first"}], batch_id="b1", source_key="mail-1")
        agent.queue.enqueue(["second", "third"], batch_id="b2")
        agent.queue.enqueue(["later"], batch_id="b3", available_at_ms=4_000_000_000_000)
        store.session("never began").queue.enqueue(["start"], batch_id="c1")
        lease = agent.claim_lease("worker-7", ttl_ms=TTL_MS)
        assert lease is not None
        assert agent.queue.claim(lease) is not None
        other = store.session("other")
        other.commit(Commit(append=[NodeDraft("o1", "hi")]))
        given = other.claim_lease("worker-8", ttl_ms=TTL_MS)
        assert given is not None
        other.release_lease(given)
        agent.attachments.intend("video-1", uri="s3://bucket/video-1", owner="host-1")
        agent.attachments.intend("video-2", uri="s3://bucket/video-2")
        agent.attachments.commit(["video-2"])
    return str(place)


def test_queued_work_is_listed_with_state_owner_and_age(busy: str) -> None:
    told = run("queue", "--json", store=busy).json["batches"]
    assert [(one["id"], one["session"], one["state"]) for one in told] == [
        ("b1", "agent", "claimed"), ("b2", "agent", "queued"), ("b3", "agent", "delayed"),
        ("c1", "never began", "queued"),
    ]  # fmt: skip
    claimed = told[0]
    assert (claimed["owner"], claimed["claims"], claimed["items"]) == ("worker-7", 1, 1)
    assert claimed["expires_at"] is not None
    assert claimed["age_ms"] >= 0
    assert (told[1]["owner"], told[1]["content"]) == (None, None)
    text = run("queue", "agent", store=busy).out
    assert "worker-7" in text
    assert "c1" not in text
    one = run("queue", "agent", "b2", "--json", store=busy).json["batches"]
    assert [batch["content"] for batch in one] == [["second", "third"]]
    assert '"first"' in run("queue", "agent", "b1", store=busy).out


def test_work_is_cancelled_unless_it_is_claimed(busy: str) -> None:
    refused = run("queue", "agent", "--cancel", "b1", store=busy, ends=5).err
    assert "is claimed by 'worker-7' until " in refused
    assert "cancelled b2" in run("queue", "agent", "--cancel", "b2", store=busy).out
    left = run("queue", "agent", "--json", store=busy).json["batches"]
    assert [one["id"] for one in left] == ["b1", "b3"]
    run("queue", "agent", "--cancel", "b2", store=busy, ends=4)
    run("queue", "--cancel", "b3", store=busy, ends=2)
    run("queue", "nowhere", store=busy, ends=4)


def test_the_remedy_for_claimed_work_can_be_pasted_into_a_shell(busy: str) -> None:
    with casstore.open(busy) as store:
        agent = store.session("two words")
        agent.commit(Commit(append=[NodeDraft("n1", "hello")]))
        agent.queue.enqueue(["task"], batch_id="b1")
        lease = agent.claim_lease("worker-9", ttl_ms=TTL_MS)
        assert lease is not None
        assert agent.queue.claim(lease) is not None
    refused = run("queue", "two words", "--cancel", "b1", store=busy, ends=5).err
    assert "casstore leases --release 'two words'" in refused


def test_leases_are_listed_and_released(busy: str) -> None:
    [lease] = run("leases", "--json", store=busy).json["leases"]
    assert (lease["session"], lease["owner"], lease["state"]) == ("agent", "worker-7", "held")
    assert 0 < lease["left_ms"] <= TTL_MS
    every = run("leases", "--all", "--json", store=busy).json["leases"]
    assert [(one["session"], one["state"]) for one in every] == [
        ("agent", "held"), ("other", "released"),
    ]  # fmt: skip
    assert "worker-7" in run("leases", store=busy).out
    assert "--yes" in run("leases", "agent", "--release", store=busy, ends=2).err
    done = run("leases", "agent", "--release", "--yes", "--json", store=busy).json
    assert (done["changed"], done["leases"][0]["state"]) == ("released", "released")
    assert "no lease is held" in run("leases", store=busy).err
    # The claim ended with the lease.
    assert run("queue", "agent", "b1", "--json", store=busy).json["batches"][0]["owner"] is None
    again = run("leases", "agent", "--release", "--yes", store=busy, ends=4).err
    assert "session 'agent' has no lease that is held" in again
    run("leases", "--release", store=busy, ends=2)


def test_attachments_of_a_session_are_listed_and_given_up(busy: str) -> None:
    told = run("attachments", "--json", store=busy).json["attachments"]
    assert [(one["id"], one["owner"], one["state"]) for one in told] == [
        ("video-1", "host-1", "intent")
    ]
    every = run("attachments", "agent", "--all", "--json", store=busy).json["attachments"]
    assert [(one["id"], one["state"]) for one in every] == [
        ("video-1", "intent"), ("video-2", "committed"),
    ]  # fmt: skip
    assert "s3://bucket/video-1" in run("attachments", "agent", store=busy).out
    [video] = run("attachments", "agent", "video-2", "--json", store=busy).json["attachments"]
    assert (video["state"], video["committed_at"] is None) == ("committed", False)
    text = run("attachments", "agent", "video-1", store=busy).out
    assert re.search(r"^owner +host-1$", text, re.MULTILINE)
    assert re.search(r"^age +\d+ (ms|s|min)", text, re.MULTILINE)
    run("attachments", "agent", "nothing", store=busy, ends=4)
    run("attachments", "agent", "video-1", "--cancel", "video-1", store=busy, ends=2)
    run("attachments", "agent", "--cancel", "video-1", store=busy, ends=2)
    done = run("attachments", "agent", "--cancel", "video-1", "-y", "--json", store=busy).json
    assert (done["changed"], done["attachments"][0]["state"]) == ("cancelled", "condemned")
    assert "condemned" in run("attachments", "--older", "0", store=busy).out
    assert "released video-1" in run("attachments", "agent", "--release", "video-1", "--yes",
                                     store=busy).out  # fmt: skip
    assert "no attachments" in run("attachments", store=busy).err
    run("attachments", "agent", "--cancel", "video-1", "--yes", store=busy, ends=4)
    run("attachments", "agent", "--cancel", "video-2", "--yes", store=busy, ends=5)
    run("attachments", "--cancel", "video-2", store=busy, ends=2)


def test_watch_prints_commits_of_another_process_as_they_happen(busy: str) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "casstore", "watch", "--json", "--store", busy],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    with killed_at_the_end(watching) as worker, casstore.open(busy) as store:
        assert worker.stdout is not None
        other = store.session("other")
        # It prints what is committed from its start on: commit until it has started.
        number = 0
        while not select.select([worker.stdout], [], [], 0.2)[0]:
            number += 1
            node = NodeDraft(f"w{number}", "news")
            other.commit(Commit(append=[node], turn=f"w{number}"))
        told = json.loads(worker.stdout.readline())
        assert (told["schema"], told["session"]) == ("casstore.watch/1", "other")
        assert told["leaf"] == told["turn"]
        worker.send_signal(signal.SIGINT)
        _, err = worker.communicate(timeout=60)
    assert (worker.returncode, err) == (0, "")


def test_watch_begins_behind_a_revision_and_ends_after_a_number_of_commits(busy: str) -> None:
    shown = run("watch", "agent", "--since", "0", "--limit", "1", "--json", store=busy).json
    assert (shown["revision"], shown["turn"]) == (1, "t1")
    text = run("watch", "agent", "--since", "0", "--limit", "1", store=busy)
    assert "agent@1  commit  leaf n1  turn t1" in text.out
    assert text.err == "waiting for commits; Ctrl-C ends it\n"
    run("watch", "--since", "0", store=busy, ends=2)
