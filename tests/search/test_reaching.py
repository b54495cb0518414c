"""A text is found through the sessions that have it now: forks share it, and hiding removes it."""

from __future__ import annotations

import os
from pathlib import Path

import casstore
from casstore import NodeDraft
from casstore.maintenance.backup import backup
from casstore.maintenance.compact import compact
from casstore.maintenance.copy import copy
from casstore.search import update
from casstore.store import Store


def found(store: Store, words: str = "needle") -> dict[str | None, tuple[str, ...]]:
    return {hit.node: hit.sessions for hit in store.search(words)}


def index_bytes(place: Path) -> bytes:
    return b"".join([path.read_bytes() for path in sorted(place.glob("search.sqlite*"))])


def test_forks_share_a_text_and_it_is_found_once_with_all_of_them(any_store: Store) -> None:
    session = any_store.session("s")
    session.append(NodeDraft("n", "needle"))
    forks = [session.fork(f"fork-{number}") for number in range(5)]
    forks[0].append(NodeDraft("own", "needle"))
    everyone = ("s", *[fork.id for fork in forks])
    assert found(any_store) == {"n": everyone, "own": ("fork-0",)}
    [hit] = any_store.search("needle", max_sessions=2, sessions=["s", "fork-1", "fork-2"])
    assert (hit.session, hit.sessions, hit.session_count) == ("s", ("s", "fork-1"), 3)


def test_a_thousand_forks_add_a_row_each_and_no_text(store: Store) -> None:
    session = store.session("s")
    session.append(*[f"message {number} about {number % 97}" for number in range(2000)])
    before = update(store)
    for number in range(1000):
        session.fork(f"fork-{number}")
    after = update(store)
    assert (after.texts_added, after.texts, after.sessions) == (0, before.texts, 1001)
    assert after.size_bytes - before.size_bytes < 1000 * 80
    [hit] = store.search('"message 1234"')
    assert (hit.session, hit.session_count) == ("s", 1001)


def test_a_fork_at_an_earlier_node_has_only_the_texts_up_to_it(any_store: Store) -> None:
    session = any_store.session("s")
    session.append(*[NodeDraft(f"n{number}", f"needle {number}") for number in range(6)])
    other = session.fork("other", node="n2")
    other.append(NodeDraft("own", "needle own"))
    session.append(NodeDraft("n6", "needle 6"))
    both = found(any_store)
    assert {node for node, sessions in both.items() if "other" in sessions} == {
        "n0", "n1", "n2", "own"
    }  # fmt: skip
    assert {node for node, sessions in both.items() if "s" in sessions} == {
        f"n{number}" for number in range(7)
    }


def test_a_fork_of_one_branch_is_found_once_although_its_positions_differ(store: Store) -> None:
    session = store.session("s")
    session.append(NodeDraft("root", "start"), NodeDraft("left", "other", parent="root"))
    session.append(NodeDraft("right", "needle", parent="root"))
    session.fork("path", node="right")
    assert [hit.node for hit in store.search("needle")] == ["right"]


def test_a_session_of_many_branches_off_branches_is_searched_alone(store: Store) -> None:
    session = store.session("s0")
    session.append(NodeDraft("n0", "needle 0"))
    for number in range(1, 30):
        source, session = session, session.fork(f"s{number}")
        session.append(NodeDraft(f"n{number}", f"needle {number}"))
        update(store)
        source.append(NodeDraft(f"other{number}", "straw"))
        update(store)
    assert len(session.search("needle", limit=100)) == 30
    assert len(store.session("s9").search("needle", limit=100)) == 10
    every = [f"s{number}" for number in range(30)]
    assert len(store.search("needle", sessions=every, limit=100)) == 30


def test_a_hidden_node_is_not_found_from_that_moment_on(any_store: Store) -> None:
    session = any_store.session("s")
    session.append(NodeDraft("n", "needle"), NodeDraft("m", "needle too"))
    fork = session.fork("fork")
    assert len(found(any_store)) == 2
    session.tombstone(["n"])
    # Also without an update of the index.
    hits = {hit.node: hit.sessions for hit in any_store.search("needle", fresh=False)}
    assert hits == {"n": ("fork",), "m": ("s", "fork")}
    assert found(any_store) == {"n": ("fork",), "m": ("s", "fork")}
    assert [hit.node for hit in session.search("needle")] == ["m"]
    fork.tombstone(["n"])
    assert list(found(any_store)) == ["m"]


def test_a_deleted_session_is_not_found_from_that_moment_on(any_store: Store) -> None:
    session = any_store.session("s")
    session.append(NodeDraft("n", "needle"), tool_state="needle")
    session.fork("fork")
    assert len(any_store.search("needle")) == 2
    any_store.delete_session("s")
    assert [hit.sessions for hit in any_store.search("needle", fresh=False)] == [("fork",)] * 2
    any_store.delete_session("fork")
    assert any_store.search("needle", fresh=False) == []
    assert any_store.search("needle") == []


def test_a_rewound_session_is_searched_at_its_head(store: Store) -> None:
    session = store.session("s")
    session.append(NodeDraft("a", "needle"))
    session.append(NodeDraft("b", "needle"))
    assert set(found(store)) == {"a", "b"}
    session.rewind(1)
    assert {hit.node for hit in store.search("needle", fresh=False)} == {"a"}
    assert set(found(store)) == {"a"}
    session.append(NodeDraft("c", "needle"))
    assert set(found(store)) == {"a", "c"}


def test_an_adopted_fork_is_found_in_both_sessions(store: Store) -> None:
    session = store.session("s")
    session.append(NodeDraft("a", "needle"))
    fork = session.fork("fork")
    fork.append(NodeDraft("b", "needle"))
    assert found(store) == {"a": ("s", "fork"), "b": ("fork",)}
    session.adopt(fork)
    assert found(store) == {"a": ("s", "fork"), "b": ("s", "fork")}


def test_a_vacuumed_node_is_gone_and_the_rewritten_ones_after_it_are_found_once(
    store: Store,
) -> None:
    session = store.session("s")
    session.append(*[NodeDraft(f"n{number}", f"needle {number}") for number in range(5)])
    assert len(found(store)) == 5
    session.tombstone(["n1"])
    store.vacuum(grace_ms=0)
    assert set(found(store)) == {"n0", "n2", "n3", "n4"}
    session.append(NodeDraft("n5", "needle 5"))
    assert set(found(store)) == {"n0", "n2", "n3", "n4", "n5"}


def test_erased_words_are_gone_from_the_bytes_of_the_index_after_compact(place: Path) -> None:
    secret = "xylophonesecret"
    with casstore.open(place) as store:
        session = store.session("s")
        session.append(NodeDraft("n", secret), NodeDraft("m", "harmless"))
        assert len(store.search(secret)) == 1
        assert secret.encode() in index_bytes(place)
        session.tombstone(["n"])
        store.vacuum(grace_ms=0)
        assert store.search(secret) == []
    compact(place)
    assert secret.encode() not in index_bytes(place)
    with casstore.open(place) as store:
        assert store.search(secret) == []
        assert len(store.search("harmless")) == 1
    assert secret.encode() not in index_bytes(place)


def test_a_compacted_store_is_searched_as_before(place: Path) -> None:
    with casstore.open(place) as store:
        store.session("s").append(NodeDraft("n", "needle"))
        assert len(store.search("needle")) == 1
    compact(place)
    assert not (place / "search.sqlite").exists()
    with casstore.open(place, readonly=False) as store:
        assert [hit.node for hit in store.search("needle")] == ["n"]


def test_a_backup_and_a_copy_do_not_carry_the_index_and_make_their_own(
    store: Store, tmp_path: Path
) -> None:
    store.session("s").append(NodeDraft("n", "needle"))
    store.search("needle")
    backup(store, tmp_path / "saved")
    assert "search.sqlite" not in os.listdir(tmp_path / "saved")
    with casstore.open(tmp_path / "saved") as saved:
        assert [hit.node for hit in saved.search("needle")] == ["n"]
    with casstore.open(tmp_path / "copied") as target:
        copy(store, target)
        assert "search.sqlite" not in os.listdir(tmp_path / "copied")
        assert [hit.node for hit in target.search("needle")] == ["n"]


def test_a_backup_that_replaces_a_store_leaves_no_index_of_the_old_one(
    store: Store, tmp_path: Path
) -> None:
    target = tmp_path / "saved"
    with casstore.open(target) as other:
        other.session("old").append("oldsecretword")
        assert len(other.search("oldsecretword")) == 1
    store.session("s").append(NodeDraft("n", "needle"))
    backup(store, target, replace=True)
    assert b"oldsecretword" not in index_bytes(target)
    with casstore.open(target) as other:
        assert other.search("oldsecretword") == []
        assert [hit.node for hit in other.search("needle")] == ["n"]


def test_a_search_after_gc_returns_no_text_of_a_deleted_session(store: Store) -> None:
    for number in range(4):
        store.session(f"s{number}").append(NodeDraft("n", f"needle {number}"))
    assert len(store.search("needle")) == 4
    for number in range(3):
        store.delete_session(f"s{number}")
    store.gc(grace_ms=0)
    assert [hit.session for hit in store.search("needle", fresh=False)] == ["s3"]
    assert update(store).texts == 1
