"""Random trees of sessions agree with plain dicts; a chain of hundreds of forks costs no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import casstore
from campaigns.branching import Branches
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(5, 22))
def test_random_trees_of_sessions_agree_with_plain_dicts(
    tmp_path_factory: pytest.TempPathFactory, seed: int, steps: int
) -> None:
    """``tools/torture.py branching`` takes more and longer ones."""
    branches = Branches(tmp_path_factory.mktemp("branching") / "s", seed)
    try:
        for _ in range(steps):
            branches.step()
            branches.compare()
        branches.compare_all()
    finally:
        branches.close()


def chain(store: Store, depth: int) -> str:
    """A session at the end of so many forks, each with a node of its own."""
    name = "s0"
    store.session(name).commit(Commit(append=[NodeDraft("n0", 0)]))
    for at in range(1, depth + 1):
        store.fork(name, f"s{at}", append=[NodeDraft(f"n{at}", at)])
        name = f"s{at}"
    return name


def test_a_chain_of_500_forks_reads_and_commits_at_its_end(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        end = chain(store, 500)
        for at in range(0, 500, 3):
            store.delete_session(f"s{at}")
        session = store.session(end)
        assert [node.id for node in session.nodes()] == [f"n{at}" for at in range(501)]
        assert session.commit(Commit(append=[NodeDraft("more", 1)])).revision == 502
        assert session.node("n250") is not None
        store.session("s1").adopt(end)
        assert len(store.session("s1").nodes()) == 502
