"""The part of the session suite about comparing two states, and about tags and pins."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from casstore.errors import (
    NameTakenError,
    ObjectNotFoundError,
    RevisionNotFoundError,
    SessionNotFoundError,
)
from casstore.session.compare import NodeRef
from casstore.session.data import Checkpoint, Pin, Usage
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ABSENT, ManualClock, all_objects
from casstore.testing.session_fixtures import (
    SessionFixtures,
    full,
    grow_branches,
    grow_long,
    message,
    nothing_written,
    path,
    step,
)


def _ids(refs: Iterable[NodeRef]) -> list[str]:
    return [ref.id for ref in refs]


class CompareConformance(SessionFixtures):
    """A comparison lists the nodes and components in which two states differ."""

    def test_compare_a_session_with_its_past(self, store: Store, session: Session) -> None:
        first = step(session, "a", "b", checkpoint=Checkpoint(tool_state={"n": 1, "kept": True}))
        second = step(session, "c", checkpoint=Checkpoint(tool_state={"n": 2, "kept": True}))
        found = store.compare(("alpha", 1), session)
        assert (found.old, found.new) == (first.manifest, second.manifest)
        assert (_ids(found.added), _ids(found.dropped)) == (["c"], [])
        assert found.ancestor is not None
        assert found.ancestor.id == "b"
        [change] = [change for change in found.changes if change.path[0] == "tool_state"]
        assert tuple(change.path) == ("tool_state", "n")
        assert (change.op, change.before, change.after) == ("changed", 1, 2)

    def test_compare_returns_the_position_of_a_node(self, store: Store, session: Session) -> None:
        step(session, "a")
        step(session, "b")
        [ref] = store.compare(("alpha", 1), "alpha").added
        node = session.nodes()[1]
        assert (ref.id, ref.digest, ref.parent) == ("b", node.digest, "a")
        assert (ref.seq, ref.depth) == (node.seq, node.depth)

    def test_compare_two_forks(self, store: Store, session: Session, other: Session) -> None:
        step(session, "a", "b")
        store.fork("alpha", "beta")
        step(session, "c", "d")
        step(other, "e")
        found = store.compare(session, other)
        assert (_ids(found.added), _ids(found.dropped)) == (["e"], ["c", "d"])
        assert found.ancestor is not None
        assert found.ancestor.id == "b"
        back = store.compare(other, session)
        assert (_ids(back.added), _ids(back.dropped)) == (["c", "d"], ["e"])

    def test_compare_two_branches_of_one_graph(self, store: Store, session: Session) -> None:
        grow_branches(session)
        step(session, leaf="b")
        found = store.compare(("alpha", 1), ("alpha", 2))
        assert (_ids(found.added), _ids(found.dropped)) == ([], [])
        assert found.ancestor is not None
        assert found.ancestor.id == "a"
        assert (found.old_leaf, found.new_leaf) == ("d", "b")

    def test_compare_two_unrelated_sessions(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a", "b")
        step(other, message("a", "another a"), "c")
        found = store.compare("alpha", "beta")
        assert found.ancestor is None
        assert (_ids(found.added), _ids(found.dropped)) == (["a", "c"], ["a", "b"])

    def test_compare_of_a_session_and_its_fork_reports_equality(
        self, store: Store, session: Session, other: Session
    ) -> None:
        grow_branches(session)
        step(session, checkpoint=Checkpoint(tool_state={"n": 1}), usage=[Usage("m", "l", 1)])
        store.fork("alpha", "beta")
        found = store.compare(session, other)
        assert found.equal
        assert found.old == found.new
        assert (_ids(found.added), _ids(found.dropped)) == ([], [])
        assert list(found.changes) == []
        assert found.ancestor is not None
        assert found.ancestor.id == "d"

    def test_compare_names_the_component_that_changed(self, store: Store, session: Session) -> None:
        step(session, checkpoint=Checkpoint(turn_state={"n": 1}, tool_state=["x"], config="c"))
        step(
            session,
            usage=[Usage("main", "large", 1)],
            checkpoint=Checkpoint(turn_state={"n": 2}, execution_state=b"new", config="c"),
        )
        found = store.compare(("alpha", 1), ("alpha", 2))
        changed = {change.path[0] for change in found.changes}
        assert {"turn_state", "tool_state", "execution_state", "usage"} <= changed
        assert "config" not in changed

    def test_compare_accepts_handles_ids_revisions_labels_and_manifests(
        self, store: Store, session: Session
    ) -> None:
        results = [step(session, node, label=f"at {node}") for node in ("a", "b", "c")]
        for old in (("alpha", 1), ("alpha", "at a"), results[0].manifest):
            for new in (session, "alpha", ("alpha", None), results[2].manifest):
                found = store.compare(old, new)
                assert (found.old, found.new) == (results[0].manifest, results[2].manifest)
                assert _ids(found.added) == ["b", "c"]

    def test_compare_with_nothing_is_refused(self, store: Store, session: Session) -> None:
        step(session, "a")
        with pytest.raises(SessionNotFoundError):
            store.compare(session, "nobody")
        with pytest.raises(RevisionNotFoundError):
            store.compare(("alpha", 9), session)
        with pytest.raises(ObjectNotFoundError):
            store.compare(ABSENT, session)

    def test_compare_reads_few_pieces_of_two_similar_sessions(
        self, store: Store, session: Session, other: Session
    ) -> None:
        body = {f"key {n}": {"uses": n, "note": f"{n} " * 50} for n in range(2000)}
        grow_long(session)
        step(session, checkpoint=Checkpoint(tool_state=body))
        store.fork("alpha", "beta")
        body["key 700"] = {"uses": 0}
        step(other, "new", checkpoint=Checkpoint(tool_state=body))
        found = store.compare(session, other)
        assert _ids(found.added) == ["new"]
        assert {change.path[:2] for change in found.changes} == {("tool_state", "key 700")}
        assert 0 < found.pieces_read < len(all_objects(store.engine)) / 10


class PinConformance(SessionFixtures):
    """A tag or pin keeps its object alive until it is deleted or expires."""

    def test_tags_name_an_object(self, store: Store, session: Session, clock: ManualClock) -> None:
        manifest = step(session, "a").manifest
        tag = store.tag("release", manifest, note="the first")
        assert tag == Pin("release", manifest, clock.now_ms, None, "the first")
        assert store.find_pin("release") == tag
        assert list(store.pins()) == [tag]

    def test_tags_do_not_move_unless_requested(self, store: Store) -> None:
        one, two = store.put_many([b"one", b"two"])
        store.tag("name", one)
        with nothing_written(store), pytest.raises(NameTakenError) as caught:
            store.tag("name", two)
        assert (caught.value.name, caught.value.digest) == ("name", one)
        assert store.tag("name", one).digest == one
        assert store.tag("name", two, move=True).digest == two
        found = store.find_pin("name")
        assert found is not None
        assert found.digest == two

    def test_tags_and_pins_of_a_missing_object_are_refused(self, store: Store) -> None:
        with nothing_written(store):
            with pytest.raises(ObjectNotFoundError):
                store.tag("name", ABSENT)
            with pytest.raises(ObjectNotFoundError):
                store.pin("name", ABSENT, ttl_ms=10)

    def test_pins_end_when_their_time_is_up(self, store: Store, clock: ManualClock) -> None:
        blob = store.put_blob(b"kept")
        pin = store.pin("short", blob, ttl_ms=10, note="why")
        assert pin == Pin("short", blob, clock.now_ms, clock.now_ms + 10, "why")
        store.pin("long", blob)
        clock.now_ms += 9
        assert store.find_pin("short") == pin
        assert [found.name for found in store.pins()] == ["long", "short"]
        clock.now_ms += 1
        assert store.find_pin("short") is None
        assert [found.name for found in store.pins()] == ["long"]
        assert pin in list(store.pins(expired=True))
        clock.now_ms += 10**12
        assert store.find_pin("long") is not None

    def test_pins_are_replaced_by_pinning_again(self, store: Store, clock: ManualClock) -> None:
        one, two = store.put_many([b"one", b"two"])
        store.pin("name", one, ttl_ms=10)
        clock.now_ms += 5
        store.pin("name", two, ttl_ms=100)
        clock.now_ms += 50
        found = store.find_pin("name")
        assert found is not None
        assert found.digest == two
        clock.now_ms += 50
        assert store.pin("name", one).expires_at_ms is None
        assert store.find_pin("name") is not None

    def test_pins_do_not_take_the_name_of_a_tag(self, store: Store, clock: ManualClock) -> None:
        one, two = store.put_many([b"one", b"two"])
        tag = store.tag("name", one, note="for good")
        for digest in (one, two):
            for ttl_ms in (10, None):
                with nothing_written(store), pytest.raises(NameTakenError) as caught:
                    store.pin("name", digest, ttl_ms=ttl_ms)
                assert (caught.value.name, caught.value.digest) == ("name", one)
        clock.now_ms += 10**9
        assert store.find_pin("name") == tag

    def test_pins_become_tags_only_for_the_same_object_or_with_move(self, store: Store) -> None:
        one, two = store.put_many([b"one", b"two"])
        store.pin("name", one, ttl_ms=10)
        with nothing_written(store), pytest.raises(NameTakenError):
            store.tag("name", two)
        assert store.tag("name", one).expires_at_ms is None
        with pytest.raises(NameTakenError):
            store.pin("name", one, ttl_ms=10)
        store.pin("other", one, ttl_ms=10)
        assert store.tag("other", two, move=True).digest == two

    def test_pins_are_deleted(self, store: Store) -> None:
        store.tag("name", store.put_blob(b"kept"))
        assert store.unpin("name") is True
        assert store.unpin("name") is False
        assert store.find_pin("name") is None
        assert list(store.pins()) == []

    def test_pins_are_listed_by_name_and_prefix(self, store: Store) -> None:
        blob = store.put_blob(b"kept")
        names = ["a/1", "a/2", "ab", "b", "é", "x" * 600]
        for name in reversed(names):
            store.tag(name, blob)
        assert {pin.name for pin in store.pins()} == set(names)
        assert [pin.name for pin in store.pins(prefix="a")] == ["a/1", "a/2", "ab"]
        assert [pin.name for pin in store.pins(prefix="a/")] == ["a/1", "a/2"]
        assert [pin.name for pin in store.pins(prefix="x" * 599)] == ["x" * 600]
        assert list(store.pins(prefix="c")) == list(store.pins(prefix="x" * 601)) == []

    def test_pins_keep_a_manifest_after_its_session_was_deleted(
        self, store: Store, session: Session
    ) -> None:
        manifest = step(session, "a").manifest
        store.pin("anchor", manifest)
        store.delete_session("alpha")
        step(store.session("beta"), "b")
        assert _ids(store.compare("beta", manifest).added) == ["a"]

    def test_pins_and_sessions_have_separate_names(self, store: Store, session: Session) -> None:
        step(session, "a")
        store.tag("alpha", store.put_blob(b"kept"))
        assert path(session) == full(session) == ["a"]
        assert store.unpin("alpha") is True
        assert path(session) == ["a"]
