"""The part of the session suite about history: revisions, labels, rewinding, and waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from casstore.errors import HeadConflictError, RevisionNotFoundError, SessionBindingError
from casstore.session.data import Checkpoint, CommitResult, Entry, Head, Usage
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    THREADS,
    TIMEOUT_S,
    SessionFixtures,
    at_once,
    contents_of,
    full,
    ids,
    load,
    nothing_written,
    path,
    revision,
    start,
    step,
)

# The ways to refer to a revision that is labelled "mark".
WAYS: dict[str, Callable[[Session, int], int | str | Entry]] = {
    "revision": lambda _, number: number,
    "label": lambda _session, _number: "mark",
    "entry": lambda session, number: session.entry(number),
}


def _grow(session: Session, revisions: int) -> list[CommitResult]:
    """Commit a node, a checkpoint and some usage for each revision."""
    return [
        step(
            session,
            f"n{n}",
            checkpoint=Checkpoint(turn_state=n, tool_state={"n": n}),
            usage=[Usage("main", "large", 1)],
            turn=f"turn {n}",
        )
        for n in range(1, revisions + 1)
    ]


class HistoryConformance(SessionFixtures):
    """Every revision can be referred to, read and returned to."""

    def test_history_has_every_revision_newest_first(
        self, session: Session, clock: ManualClock
    ) -> None:
        begun_ms = clock.now_ms
        results = []
        for n in (1, 2, 3):
            results.append(step(session, f"n{n}", turn=f"turn {n}"))
            clock.now_ms += 10
        assert list(session.history()) == [
            Entry(
                session="alpha",
                revision=n,
                manifest=results[n - 1].manifest,
                operation="commit",
                committed_at_ms=begun_ms + 10 * (n - 1),
                turn=f"turn {n}",
                labels=(),
                rewound_to=None,
            )
            for n in (3, 2, 1)
        ]

    def test_history_is_read_in_parts(self, session: Session) -> None:
        _grow(session, 30)
        assert [entry.revision for entry in session.history()] == list(range(30, 0, -1))
        assert [entry.revision for entry in session.history(limit=3)] == [30, 29, 28]
        assert [entry.revision for entry in session.history(before=4)] == [3, 2, 1]
        assert [entry.revision for entry in session.history(before=28, limit=2)] == [27, 26]
        assert list(session.history(before=1)) == []
        assert list(session.history(limit=0)) == []

    def test_history_of_several_pages_ends_at_its_limit(self, session: Session) -> None:
        step(session, "a")
        for _ in range(300):
            session.rewind(1)
        assert [entry.revision for entry in session.history(limit=290)] == list(range(301, 11, -1))
        assert [entry.revision for entry in session.history(before=300)] == list(range(299, 0, -1))

    def test_history_gets_no_entry_for_a_replay_or_a_failed_commit(self, session: Session) -> None:
        step(session, "a", turn="t")
        step(session, "a", turn="t")
        with pytest.raises(HeadConflictError):
            step(session, "b", expected=7)
        assert len(list(session.history())) == 1

    @pytest.mark.parametrize("way", WAYS)
    def test_history_every_revision_can_be_loaded(self, session: Session, way: str) -> None:
        results = _grow(session, 5)
        session.label("mark", at=3)
        at = WAYS[way](session, 3)
        state = load(session, at)
        assert (state.head.revision, state.head.manifest) == (3, results[2].manifest)
        assert (state.head.turn, state.head.leaf, state.leaf) == ("turn 3", "n3", "n3")
        assert ids(state.nodes) == path(session, at=at) == ["n1", "n2", "n3"]
        assert state.checkpoint.tool_state == {"n": 3}
        assert session.checkpoint(at=at).turn_state == 3
        assert state.usage == session.usage(at=at) == (Usage("main", "large", 3),)
        assert session.entry(at).revision == 3
        assert ids(load(session, at, leaf="n1").nodes) == ["n1"]

    def test_history_entry_defaults_to_the_head(self, session: Session) -> None:
        _grow(session, 3)
        assert session.entry() == session.entry(3) == next(session.history())

    @pytest.mark.parametrize("at", [0, 4, -1, 10**12, "unknown"])
    def test_history_of_an_unknown_revision_or_label_raises_revision_not_found_error(
        self, session: Session, at: int | str
    ) -> None:
        _grow(session, 3)
        for read in (session.entry, session.load, session.usage, session.checkpoint):
            with pytest.raises(RevisionNotFoundError) as caught:
                read(at)
            assert (caught.value.session, caught.value.at) == ("alpha", at)

    def test_history_of_another_session_is_refused_everywhere(
        self, store: Store, session: Session, other: Session
    ) -> None:
        _grow(session, 3)
        _grow(other, 3)
        theirs = other.entry(2)
        with nothing_written(store):
            for attempt in (
                lambda: session.rewind(theirs),
                lambda: session.label("mark", at=theirs),
                lambda: session.protect(theirs, by="run"),
                lambda: store.fork("alpha", "forked", at=theirs),
                lambda: store.compare(("alpha", theirs), "alpha"),
                lambda: session.entry(theirs),
                lambda: session.load(theirs),
                lambda: session.nodes(at=theirs),
            ):
                with pytest.raises(SessionBindingError) as caught:
                    attempt()
                assert (caught.value.bound, caught.value.attempted) == ("alpha", "beta")
                assert "Entry(" not in str(caught.value)

    # --- labels -----------------------------------------------------------------------------

    def test_labels_are_given_with_the_commit_or_later(self, session: Session) -> None:
        step(session, "a", label="with the commit")
        step(session, "b")
        entry = session.label("now")
        assert (entry.revision, entry.labels) == (2, ("now",))
        assert session.entry("now") == entry
        later = session.label("later", at=1)
        assert (later.revision, later.labels) == (1, ("later",))
        assert set(session.entry(1).labels) == {"with the commit", "later"}
        assert [set(entry.labels) for entry in session.history()] == [
            {"now"},
            {"with the commit", "later"},
        ]

    def test_labels_name_one_revision_and_move(self, session: Session) -> None:
        step(session, "a", label="mark")
        step(session, "b")
        step(session, "c", label="mark")
        assert session.entry("mark").revision == 3
        assert session.entry(1).labels == ()
        session.label("mark", at=2)
        assert [entry.labels for entry in session.history()] == [(), ("mark",), ()]

    def test_labels_are_deleted(self, session: Session) -> None:
        step(session, "a", label="mark")
        assert session.unlabel("mark") is True
        assert session.unlabel("mark") is False
        assert session.entry(1).labels == ()
        with pytest.raises(RevisionNotFoundError):
            session.load("mark")

    def test_labels_that_look_like_numbers_are_labels(self, session: Session) -> None:
        step(session, "a")
        step(session, "b", label="1")
        assert (session.entry("1").revision, session.entry(1).revision) == (2, 1)

    @pytest.mark.parametrize("name", ["x" * 5000, "会话/é", "../weird", " "])
    def test_labels_may_be_long_or_unusual_text(self, session: Session, name: str) -> None:
        session.label(name + "2", at=step(session, "a").revision)
        step(session, "b", label=name)
        assert session.entry(name).labels == (name,)
        assert session.entry(name + "2").revision == 1

    def test_labels_are_of_one_session(self, session: Session, other: Session) -> None:
        step(session, "a", label="mark")
        step(other, "a")
        step(other, "b", label="mark")
        assert (session.entry("mark").revision, other.entry("mark").revision) == (1, 2)
        session.unlabel("mark")
        assert other.entry("mark").revision == 2

    def test_labels_of_a_missing_revision_are_refused(self, session: Session) -> None:
        step(session, "a")
        with pytest.raises(RevisionNotFoundError):
            session.label("mark", at=9)

    # --- rewind -----------------------------------------------------------------------------

    @pytest.mark.parametrize("way", WAYS)
    def test_rewind_makes_an_earlier_state_the_newest(
        self, session: Session, clock: ManualClock, way: str
    ) -> None:
        _grow(session, 5)
        session.label("mark", at=2)
        clock.now_ms += 10
        result = session.rewind(WAYS[way](session, 2), label="back")
        assert (result.revision, result.leaf, result.nodes) == (6, "n2", ())
        assert not result.replayed
        assert path(session) == full(session) == ["n1", "n2"]
        assert load(session).checkpoint.tool_state == {"n": 2}
        entry = session.entry()
        assert (entry.operation, entry.rewound_to, entry.labels) == ("rewind", 2, ("back",))
        assert (entry.revision, entry.committed_at_ms) == (6, clock.now_ms)
        assert entry.manifest == result.manifest

    def test_rewind_loses_nothing(self, session: Session) -> None:
        _grow(session, 5)
        session.rewind(2)
        assert path(session, at=5) == ["n1", "n2", "n3", "n4", "n5"]
        session.rewind(5)
        assert path(session) == ["n1", "n2", "n3", "n4", "n5"]
        assert [entry.rewound_to for entry in session.history(limit=3)] == [5, 2, None]

    def test_rewind_continues_from_there(self, session: Session) -> None:
        _grow(session, 3)
        session.rewind(1)
        assert step(session, "new").revision == 5
        # After the rewind n2 and n3 are not in the graph, so their ids may be used again.
        step(session, "n2")
        assert path(session) == ["n1", "new", "n2"]
        assert path(session, at=3) == ["n1", "n2", "n3"]

    def test_rewind_is_checked_like_a_commit(self, store: Store, session: Session) -> None:
        _grow(session, 3)
        with nothing_written(store):
            with pytest.raises(HeadConflictError) as caught:
                session.rewind(1, expected=2)
            with pytest.raises(RevisionNotFoundError):
                session.rewind(9)
            with pytest.raises(RevisionNotFoundError):
                session.rewind("unknown")
        assert (caught.value.expected, caught.value.actual) == (2, 3)
        assert session.rewind(1, expected=3).revision == 4

    def test_rewind_writes_no_objects(self, store: Store, session: Session) -> None:
        _grow(session, 3)
        before = contents_of(store)
        session.rewind(1)
        assert contents_of(store).objects == before.objects

    # --- waiting ----------------------------------------------------------------------------

    def test_wait_returns_an_existing_later_head_at_once(self, session: Session) -> None:
        _grow(session, 3)
        for after in (0, 2):
            assert session.wait(after, timeout_s=0) == session.head()

    def test_wait_gives_up_when_time_is_up(self, session: Session) -> None:
        assert session.wait(0, timeout_s=0.01) is None
        _grow(session, 1)
        assert session.wait(1, timeout_s=0.01) is None

    @pytest.mark.parametrize("grown", [0, 2])
    def test_wait_sees_a_commit_of_another_thread(
        self, store: Store, session: Session, grown: int
    ) -> None:
        _grow(session, grown)
        begun = threading.Event()

        def watch() -> Head | None:
            begun.set()
            return Store(store.engine).session("alpha").wait(grown, timeout_s=TIMEOUT_S)

        seen = start(watch)
        assert begun.wait(TIMEOUT_S)
        step(session, "new")
        head = seen.result(TIMEOUT_S)
        assert head == session.head()
        assert head is not None
        assert head.revision == grown + 1

    def test_wait_in_a_loop_sees_the_last_of_many_commits(
        self, store: Store, session: Session
    ) -> None:
        total = 20

        def work(handle: Store, number: int) -> list[int]:
            mine = handle.session("alpha")
            if number == 0:
                return [step(mine, f"n{n}").revision for n in range(total)]
            seen = [0]
            while seen[-1] < total:
                head = mine.wait(seen[-1], timeout_s=TIMEOUT_S)
                assert head is not None, f"nothing came after {seen}"
                seen.append(head.revision)
            return seen

        answers = at_once(store, work)
        assert len(answers) == THREADS
        for answer in answers:
            assert isinstance(answer, list), answer
            assert answer == sorted(set(answer))
            assert answer[-1] == total
        assert revision(session) == total
