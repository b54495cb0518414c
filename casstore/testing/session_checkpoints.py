"""The part of the session suite about checkpoints and the usage ledger."""

from __future__ import annotations

import random
from typing import Any

import pytest

from casstore.engine.protocol import NewObject, Write
from casstore.errors import ComponentNotFoundError, CorruptionError, InvalidInputError
from casstore.format.canonical import Link
from casstore.format.digest import Kind
from casstore.objects.edit import Set
from casstore.session.data import Checkpoint, Usage
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ABSENT, all_objects
from casstore.testing.session_fixtures import (
    SessionFixtures,
    bytes_written,
    load,
    nothing_written,
    path,
    step,
)

COMPONENTS = ["tool_state", "plugin_snapshot", "execution_state"]
BODIES: list[Any] = [
    {"tools": {"saw": {"uses": 3}}},
    {},
    [],
    [1, 2, 3],
    "text",
    b"\x00\x01\xff",
    0,
    False,
    {"long": list(range(20_000))},
    "x" * 100_000,
]


def _keep(session: Session, **fields: Any) -> Checkpoint:
    """Commit a checkpoint; returns it with its components as links."""
    step(session, checkpoint=Checkpoint(**fields))
    return session.checkpoint()


class CheckpointConformance(SessionFixtures):
    """A checkpoint is read as it was written; its components are stored once and shared."""

    def test_checkpoint_refs_every_component_round_trips(self, session: Session) -> None:
        full = Checkpoint(
            turn_state={"turn_index": 3, "options": [None, 1.5]},
            tool_state={"tools": ["saw"]},
            plugin_snapshot={"notes": "short"},
            plugin_revision=7,
            execution_state=b"\x00machine\xff",
            frames=[{"frame_id": "f1", "status": "active"}, {"frame_id": "f0"}],
            current_frame="f1",
            config={"model": "large"},
        )
        step(session, checkpoint=full)
        for found in (load(session).checkpoint, session.checkpoint(hydrate=True)):
            assert found._replace(frames=list(found.frames)) == full

    def test_checkpoint_refs_a_session_without_components_has_an_empty_checkpoint(
        self, session: Session
    ) -> None:
        step(session, "a")
        for found in (load(session).checkpoint, session.checkpoint()):
            assert found._replace(frames=()) == Checkpoint()
            assert list(found.frames) == []

    @pytest.mark.parametrize("component", COMPONENTS)
    @pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body)[:20])
    def test_checkpoint_refs_a_body_becomes_a_link(
        self, store: Store, session: Session, component: str, body: Any
    ) -> None:
        link = getattr(_keep(session, **{component: body}), component)
        assert isinstance(link, Link)
        assert store.get_value(link.digest) == body
        found = getattr(load(session).checkpoint, component)
        assert (found, type(found)) == (body, type(body))
        assert getattr(load(session, hydrate=False).checkpoint, component) == link

    @pytest.mark.parametrize("component", COMPONENTS)
    def test_checkpoint_refs_a_link_means_unchanged(self, session: Session, component: str) -> None:
        body = {"state": list(range(100))}
        first = _keep(session, turn_state=1, **{component: body})
        second = _keep(session, turn_state=2, **{component: getattr(first, component)})
        assert second == first._replace(turn_state=2, frames=second.frames)
        assert getattr(load(session).checkpoint, component) == body

    def test_checkpoint_refs_equal_bodies_are_one_object(
        self, store: Store, session: Session, other: Session
    ) -> None:
        body = {"state": list(range(5000))}
        first = _keep(session, tool_state=body)
        with bytes_written(store) as written:
            assert _keep(session, tool_state=dict(body)).tool_state == first.tool_state
            assert _keep(other, tool_state=dict(body)).tool_state == first.tool_state
            assert _keep(other, execution_state=body).execution_state == first.tool_state
        assert written.count < 4000
        assert first.tool_state is not None
        digests = [info.digest for info in all_objects(store.engine)]
        assert digests.count(first.tool_state.digest) == 1

    def test_checkpoint_refs_a_commit_without_a_checkpoint_keeps_the_existing_one(
        self, session: Session
    ) -> None:
        first = _keep(session, turn_state={"turn_index": 1}, tool_state=["saw"], config="c")
        step(session, "a")
        assert session.checkpoint() == first

    def test_checkpoint_refs_a_checkpoint_without_components_has_none(
        self, session: Session
    ) -> None:
        _keep(session, tool_state=["saw"], execution_state=b"machine")
        second = _keep(session, tool_state=["plane"])
        assert second.execution_state is None
        assert load(session).checkpoint.tool_state == ["plane"]

    def test_checkpoint_refs_a_stored_value_may_be_linked_as_component(
        self, store: Store, session: Session
    ) -> None:
        link = Link(store.put_value({"made": "elsewhere"}))
        assert _keep(session, tool_state=link).tool_state == link
        assert load(session).checkpoint.tool_state == {"made": "elsewhere"}

    def test_checkpoint_refs_each_revision_has_its_own(self, session: Session) -> None:
        for n in range(3):
            step(session, checkpoint=Checkpoint(turn_state=n, tool_state={"n": n}))
        for n in range(3):
            assert load(session, n + 1).checkpoint.tool_state == {"n": n}
            assert session.checkpoint(at=n + 1).turn_state == n

    # --- missing and damaged ----------------------------------------------------------------

    @pytest.mark.parametrize("component", COMPONENTS)
    def test_missing_component_is_refused_by_name_when_committed(
        self, store: Store, session: Session, component: str
    ) -> None:
        with nothing_written(store), pytest.raises(ComponentNotFoundError) as caught:
            _keep(session, **{component: Link(ABSENT)})
        assert (caught.value.component, caught.value.digest) == (component, ABSENT)

    @pytest.mark.parametrize("component", COMPONENTS)
    def test_missing_component_is_an_error_with_its_name_when_loaded(
        self, store: Store, session: Session, component: str
    ) -> None:
        link = getattr(_keep(session, **{component: ["body"]}), component)
        store.engine.write(Write(deletes=[link.digest]))
        for read in (session.load, lambda: session.checkpoint(hydrate=True)):
            with pytest.raises(ComponentNotFoundError) as caught:
                read()
            assert (caught.value.component, caught.value.digest) == (component, link.digest)

    def test_missing_component_does_not_stop_readers_of_other_components(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        link = _keep(session, tool_state=["body"]).tool_state
        store.engine.write(Write(deletes=[link.digest]))
        assert load(session, hydrate=False).checkpoint.tool_state == link
        assert path(session) == ["a"]

    def test_fault_06_damaged_content_is_never_returned(
        self, store: Store, session: Session
    ) -> None:
        link = _keep(session, tool_state=["body"]).tool_state
        store.engine.write(Write(deletes=[link.digest]))
        damaged = NewObject(link.digest, Kind.VALUE, b"\x91\xa4bodY", ())
        store.engine.write(Write(objects=[damaged]))
        with pytest.raises(CorruptionError):
            session.load()

    def test_fault_07_a_bytes_component_is_stored_in_about_its_length(
        self, store: Store, session: Session
    ) -> None:
        content = random.Random(7).randbytes(100_000)
        with bytes_written(store) as written:
            _keep(session, execution_state=content)
        assert written.count < 1.1 * len(content)
        assert load(session).checkpoint.execution_state == content

    def test_fault_13_one_changed_value_does_not_rewrite_a_large_component(
        self, store: Store, session: Session
    ) -> None:
        body = {f"key {n}": {"uses": n, "note": f"{n} " * 50} for n in range(2000)}
        with bytes_written(store) as whole:
            _keep(session, tool_state=body)
        with bytes_written(store) as part:
            _keep(session, tool_state={**body, "key 700": {"uses": 0}})
        assert part.count < whole.count / 10

    # --- usage ---------------------------------------------------------------------------

    def test_usage_is_added_up_for_each_source_and_model_in_order_of_first_use(
        self, session: Session
    ) -> None:
        step(session, usage=[Usage("main", "large", 10, 5, 4, 1), Usage("helper", "small", 1, 1)])
        step(session, usage=[Usage("main", "small", 2), Usage("main", "large", 1, 2, 3, 4)])
        step(session, "a")
        expected = (
            Usage("main", "large", 11, 7, 7, 5),
            Usage("helper", "small", 1, 1),
            Usage("main", "small", 2),
        )
        assert session.usage() == load(session).usage == expected
        assert [entry.total for entry in expected] == [23, 2, 2]

    def test_usage_of_one_commit_may_name_a_model_twice(self, session: Session) -> None:
        step(session, usage=[Usage("main", "large", 1), Usage("main", "large", 2)])
        assert session.usage() == (Usage("main", "large", 3),)

    def test_usage_of_zero_tokens_is_not_listed(self, session: Session) -> None:
        step(session, usage=[Usage("idle", "large"), Usage("main", "large", 1), Usage("x", "y")])
        assert session.usage() == load(session).usage == (Usage("main", "large", 1),)

    def test_usage_may_be_very_large(self, session: Session) -> None:
        for _ in range(2):
            step(session, usage=[Usage("main", "large", 2**40)])
        assert session.usage() == (Usage("main", "large", 2**41),)

    @pytest.mark.parametrize("field", ["input", "output", "cached_input", "reasoning"])
    def test_negative_usage_is_refused(self, store: Store, session: Session, field: str) -> None:
        amounts: dict[str, int] = {field: -1}
        step(session, usage=[Usage("main", "large", 9, 9, 9, 9)])
        with nothing_written(store), pytest.raises(InvalidInputError):
            step(session, usage=[Usage("main", "large", **amounts)])

    def test_usage_stays_when_the_checkpoint_is_replaced(self, session: Session) -> None:
        step(session, usage=[Usage("main", "large", 1)], checkpoint=Checkpoint(config={"a": 1}))
        step(session, checkpoint=Checkpoint(tool_state=[1]))
        step(session, checkpoint=Checkpoint(), usage=[Usage("main", "large", 2)])
        assert session.usage() == (Usage("main", "large", 3),)
        assert session.checkpoint() == Checkpoint()

    @pytest.mark.parametrize(
        "change",
        [
            {"components": {"usage": [1]}},
            {"components": {"usage": None}},
            {"edits": {"usage": [Set([], [1])]}},
            {"checkpoint": Checkpoint(others={"usage": [1]})},
        ],
        ids=["set", "deleted", "edited", "replaced"],
    )
    def test_usage_is_changed_by_adding_to_it_alone(
        self, store: Store, session: Session, change: dict[str, Any]
    ) -> None:
        step(session, usage=[Usage("main", "large", 1)])
        with nothing_written(store), pytest.raises(InvalidInputError, match="is the ledger"):
            step(session, **change)
        assert session.usage() == (Usage("main", "large", 1),)

    def test_usage_of_earlier_revisions_is_kept(self, session: Session) -> None:
        for _ in range(3):
            step(session, usage=[Usage("main", "large", 1)])
        for revision in (1, 2, 3):
            assert session.usage(at=revision) == (Usage("main", "large", revision),)
            assert load(session, revision).usage == (Usage("main", "large", revision),)
