"""Leases, claims and commits as JSON: they come back as they were, or are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore import LAST, LEAF, Checkpoint, Commit, Digest, Link, NodeDraft, Usage
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write
from casstore.errors import InvalidInputError, LeaseLostError
from casstore.objects.edit import Append, Delete, Insert, Set
from casstore.session.as_json import from_json, to_json
from casstore.session.data import Batch, Claim, Lease
from casstore.store import Store

LEASE = Lease("s", "worker ä", bytes(range(16)), 7, 1_700_000_000_000, 1_700_000_030_000)
BATCH = Batch("b", "s", 3, ("do", b"it"), "key", "earliest", "join", None, 5, 6, 1, 7)
CLAIM = Claim("c", "s", 7, (BATCH,))
DIGEST = Digest(bytes(range(32)))

COMMITS = {
    "nothing": Commit(),
    "nodes": Commit(
        append=[
            NodeDraft("a", {"role": "user", "n": [1, 2.5, None, True]}, None),
            NodeDraft("b", b"\xff\x00", LEAF, {"turn": 1}, "frame", "2026-01-01T00:00:00Z"),
            NodeDraft("c", None, "a", time=1.5),
        ],
        leaf="b",
        lease=LEASE,
        release=True,
    ),
    "a new graph": Commit(replace=[NodeDraft("a", "text")], leaf=LAST),
    "no graph": Commit(replace=[], leaf=None, lease=None),
    "a checkpoint": Commit(
        checkpoint=Checkpoint(
            {"turn": 2},
            Link(DIGEST),
            {"$bytes": "x", "$$": {"$link": 1}},
            4,
            b"state",
            [{}],
            "f",
            [],
        ),
        expected=0,
        turn="t1",
        label="green",
        session="s",
    ),
    "an empty checkpoint": Commit(checkpoint=Checkpoint()),
    "everything else": Commit(
        usage=[Usage("agent", "model", 1, 2, 3, 4), Usage("agent", "model")],
        completes=[CLAIM, Claim("d", "s", 7, ())],
        attachments=["image", "ü"],
        durability="relaxed",
    ),
    "components and edits": Commit(
        components={"tool_state": {"cwd": "/"}, "notes": Link(DIGEST), "config": None},
        edits={
            "tool_state": [Set(["a", 0], b"x"), Delete(["b"])],
            "notes": [Insert([0], None), Append([], {"$set": 1})],
        },
    ),
}


@pytest.mark.parametrize("what", COMMITS)
def test_a_commit_round_trips_through_json(what: str) -> None:
    commit = COMMITS[what]
    text = to_json(commit)
    assert from_json(Commit, text) == commit
    assert from_json(Commit, text.encode()) == commit
    assert text.isascii()
    assert json.loads(text)["schema"] == "casstore.commit/1"


def test_leases_and_claims_round_trip_through_json() -> None:
    assert from_json(Lease, to_json(LEASE)) == LEASE
    assert from_json(Claim, to_json(CLAIM)) == CLAIM
    assert json.loads(to_json(LEASE)) == {
        "schema": "casstore.lease/1",
        "session": "s",
        "owner": "worker ä",
        "token": "000102030405060708090a0b0c0d0e0f",
        "fencing": 7,
        "claimed_at_ms": 1_700_000_000_000,
        "expires_at_ms": 1_700_000_030_000,
    }


def test_a_lease_document_needs_only_the_four_identifying_fields() -> None:
    document = json.loads(to_json(LEASE))
    del document["claimed_at_ms"], document["expires_at_ms"]
    assert from_json(Lease, json.dumps(document)) == Lease(*LEASE[:4])


def test_a_commit_with_lease_and_claim_from_json_is_accepted() -> None:
    with Store(MemoryEngine()) as store:
        session = store.session("s")
        session.queue.enqueue(["work"], batch_id="b")
        lease = session.claim_lease("worker", 60_000)
        assert lease is not None
        claim = session.queue.claim(from_json(Lease, to_json(lease)))
        assert claim is not None
        turn = Commit(
            append=[NodeDraft("a", {"text": "done", "raw": b"\x00"})],
            checkpoint=Checkpoint({"turn": 1}, {"cwd": "/"}),
            usage=[Usage("agent", "model", 5)],
            completes=[from_json(Claim, to_json(claim))],
            lease=lease,
            turn="t1",
        )
        handed = from_json(Commit, to_json(turn))
        assert session.commit(handed).revision == 1
        # It means the same.
        assert session.commit(turn).replayed
        assert session.queue.pending() == []
        assert session.renew_lease(from_json(Lease, to_json(lease)), 60_000).token == lease.token
        assert session.release_lease(from_json(Lease, to_json(lease)))
        with pytest.raises(LeaseLostError):
            session.renew_lease(lease, 60_000)


def test_a_node_that_was_read_is_written_with_its_parent() -> None:
    with Store(MemoryEngine()) as store:
        session = store.session("s")
        session.commit(Commit(append=[NodeDraft("a", 1), NodeDraft("b", 2)]))
        again = from_json(Commit, to_json(Commit(replace=list(session.nodes()))))
        assert again.replace == [NodeDraft("a", 1, None), NodeDraft("b", 2, "a")]
        assert session.commit(again).leaf == "b"


def lease_with(**changes: Any) -> str:
    document = json.loads(to_json(LEASE))
    return json.dumps({**document, **changes})


def commit_with(**fields: Any) -> str:
    return json.dumps({"schema": "casstore.commit/1", **fields})


NODE = {"id": "a", "payload": 1}
BAD_LEASES = {
    "not JSON": ("{", "not JSON"),
    "nothing": ("", "not JSON"),
    "a list": ("[]", "must be an object"),
    "no schema": (json.dumps({"session": "s"}), "schema"),
    "a commit": (to_json(Commit()), "casstore.lease/1"),
    "a later schema": (lease_with(schema="casstore.lease/2"), "casstore.lease/1"),
    "another field": (lease_with(more=1), "'more'"),
    "a session that is no text": (lease_with(session=1), "lease.session must be a text"),
    "a token that is no bytes": (lease_with(token="xyz"), "lease.token must be hexadecimal"),
    "a token that is a list": (lease_with(token=[1]), "lease.token must be a text"),
    "a counter that is a text": (lease_with(fencing="7"), "lease.fencing must be a whole number"),
    "a counter that is true": (lease_with(fencing=True), "lease.fencing"),
    "a time that is null": (lease_with(claimed_at_ms=None), "lease.claimed_at_ms"),
    "a field twice": ('{"schema": "casstore.lease/1", "schema": "casstore.lease/1"}', "twice"),
    "nested for ever": ("[" * 100_000, "not JSON"),
}
BAD_COMMITS = {
    "a lease": (to_json(LEASE), "casstore.commit/1"),
    "rows beside": (commit_with(also={}), "'also'"),
    "nodes that are none": (commit_with(append={}), "commit.append must be a list"),
    "a node that is a text": (commit_with(append=["a"]), r"commit.append\[0\] must be an object"),
    "a node without an id": (commit_with(append=[{"payload": 1}]), "lacks the field 'id'"),
    "a node without payload": (commit_with(append=[{"id": "a"}]), "lacks the field 'payload'"),
    "a node with a seq": (commit_with(append=[{**NODE, "seq": 1}]), "'seq'"),
    "an odd parent": (commit_with(append=[{**NODE, "parent": 5}]), r"append\[0\].parent"),
    "an odd time": (commit_with(append=[{**NODE, "time": [1]}]), r"append\[0\].time"),
    "an odd leaf": (commit_with(leaf=1), "commit.leaf"),
    "an odd lease": (commit_with(lease="fenced"), "commit.lease must be an object"),
    "a lease that lacks a field": (
        commit_with(lease={"schema": "casstore.lease/1", "session": "s"}),
        "commit.lease lacks",
    ),
    "a flag that is a text": (commit_with(release="yes"), "commit.release"),
    "an odd checkpoint": (commit_with(checkpoint=[]), "commit.checkpoint"),
    "odd frames": (commit_with(checkpoint={"frames": {}}), "commit.checkpoint.frames"),
    "odd usage": (commit_with(usage=[{"source": "a"}]), r"commit.usage\[0\] lacks"),
    "odd claims": (commit_with(completes=[{}]), r"completes\[0\]"),
    "a claim without batches": (
        commit_with(
            completes=[{"schema": "casstore.claim/1", "id": "c", "session": "s", "fencing": 1}]
        ),
        "lacks the field 'batches'",
    ),
    "bytes that are none": (
        commit_with(append=[{"id": "a", "payload": {"$bytes": "!"}}]),
        "base64",
    ),
    "a link that is none": (
        commit_with(append=[{"id": "a", "payload": {"$link": "ab"}}]),
        "digest",
    ),
    "an unknown mark": (commit_with(append=[{"id": "a", "payload": {"$date": "x"}}]), r"\$date"),
    "both graphs": (commit_with(append=[NODE], replace=[NODE]), "appends nodes or replaces"),
    "a revision below zero": (
        commit_with(expected=-1),
        "expected must be a whole number of at least 0, got -1",
    ),
}


@pytest.mark.parametrize("what", BAD_LEASES)
def test_an_invalid_lease_is_refused_by_name(what: str) -> None:
    text, words = BAD_LEASES[what]
    with pytest.raises(InvalidInputError, match=words):
        from_json(Lease, text)


@pytest.mark.parametrize("what", BAD_COMMITS)
def test_an_invalid_commit_is_refused_by_name(what: str) -> None:
    text, words = BAD_COMMITS[what]
    with pytest.raises(InvalidInputError, match=words):
        from_json(Commit, text)


@pytest.mark.parametrize(
    "value",
    [
        Commit(append=[NodeDraft("a", object())]),
        Commit(append=[NodeDraft("a", float("nan"))]),
        Commit(append=[NodeDraft("a", {1: 2})]),
        Commit(append=[object()]),
        Commit(edits={"tool_state": ["a"]}),  # type: ignore[list-item]
        Commit(edits={"tool_state": [Set(["a"], object())]}),
        Commit(components={"tool_state": object()}),
        Commit(also=Write()),
        Commit(append="nodes"),
        Commit(usage=[1]),  # type: ignore[list-item]
        LEASE._replace(token="text"),  # type: ignore[arg-type]
        CLAIM._replace(batches=5),  # type: ignore[arg-type]
        "a text",
        None,
    ],
)
def test_a_value_without_a_json_encoding_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError):
        to_json(value)


@pytest.mark.parametrize("kind", [dict, Usage, None, "Lease"])
def test_from_json_accepts_only_leases_claims_and_commits(kind: Any) -> None:
    with pytest.raises(InvalidInputError, match="Lease, Claim or Commit"):
        from_json(kind, "{}")
    with pytest.raises(InvalidInputError, match="str or bytes"):
        from_json(Lease, {"schema": "casstore.lease/1"})  # type: ignore[arg-type]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text() | st.binary(max_size=20)
    | st.binary(min_size=32, max_size=32).map(lambda raw: Link(Digest(raw))),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text() | st.sampled_from(("$", "$bytes", "$$link")), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip
# An id holds no zero byte.
TEXTS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8
)
NODES = st.builds(
    NodeDraft, TEXTS, VALUES, TEXTS | st.none() | st.just(LEAF), VALUES, TEXTS | st.none(),
    st.none() | st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
)  # fmt: skip
MADE = st.builds(
    lambda **fields: Commit(**fields),
    append=st.lists(NODES, max_size=3),
    leaf=TEXTS | st.none() | st.just(LAST),
    checkpoint=st.none() | st.tuples(VALUES, VALUES, VALUES).map(lambda parts: Checkpoint(*parts)),
    expected=st.none() | st.integers(0, 9),
    lease=st.none() | st.just(None) | st.just(LEASE),
    release=st.booleans(),
    turn=st.none() | TEXTS,
    attachments=st.lists(TEXTS, max_size=2),
)


@settings(max_examples=100, deadline=None)
@given(MADE)
def test_every_commit_of_storable_values_round_trips_through_json(commit: Commit) -> None:
    assert from_json(Commit, to_json(commit)) == commit
