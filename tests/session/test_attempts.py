"""Retries of transactions end: with the result, or with an error that names what kept changing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from casstore import Commit, NodeDraft
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import PutRow, RowIs, RowKey, StoredObject, Write, WriteResult
from casstore.errors import (
    BusyError,
    ConditionFailedError,
    ContendedError,
    CorruptionError,
    InvalidInputError,
)
from casstore.session.attempts import (
    MAX_ATTEMPTS,
    Attempts,
    ChangedMeanwhile,
    read_again,
    transact,
    transaction,
    write_unchanged,
)
from casstore.store import Store

FAILED = ConditionFailedError(0, RowIs("records", b"k", None), b"x")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses in seconds, none of which is waited."""
    asked: list[float] = []
    monkeypatch.setattr(time, "sleep", asked.append)
    return asked


class Failing:
    """A function that fails with these errors, one a call, and then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


# --- writing ----------------------------------------------------------------------------------


def test_a_transaction_is_retried_until_no_other_writer_conflicts(pauses: list[float]) -> None:
    attempt = Failing(*[FAILED] * 10)
    assert transact("it", attempt) == "done"
    assert attempt.calls == 11
    assert len(pauses) == 7
    assert all(0 <= pause <= 0.02 for pause in pauses)


def test_the_first_attempt_of_a_transaction_does_not_pause(pauses: list[float]) -> None:
    assert transact("it", Failing()) == "done"
    assert pauses == []


def test_a_transaction_raises_contended_error_after_the_maximum_of_attempts(
    pauses: list[float],
) -> None:
    attempt = Failing(*[FAILED] * (MAX_ATTEMPTS + 1))
    with pytest.raises(ContendedError, match="thread 't' kept changing during 256 attempts") as got:
        transact("thread 't'", attempt)
    assert attempt.calls == MAX_ATTEMPTS
    assert (got.value.what, got.value.attempts) == ("thread 't'", MAX_ATTEMPTS)
    assert isinstance(got.value, BusyError)


def test_a_transaction_that_succeeds_at_its_last_attempt_returns_the_result(
    pauses: list[float],
) -> None:
    assert transact("it", Failing(*[FAILED] * (MAX_ATTEMPTS - 1))) == "done"


def test_the_error_names_the_remedy(pauses: list[float]) -> None:
    attempts = Attempts("session 's'", "collect with a longer grace period")
    for _ in range(MAX_ATTEMPTS):
        attempts.begin()
    with pytest.raises(ContendedError, match="; collect with a longer grace period"):
        attempts.begin()


def test_any_other_error_ends_a_transaction_at_once(pauses: list[float]) -> None:
    attempt = Failing(InvalidInputError("no"))
    with pytest.raises(InvalidInputError):
        transact("it", attempt)
    assert attempt.calls == 1
    assert pauses == []


def test_an_attempt_can_notice_that_another_writer_was_first(pauses: list[float]) -> None:
    attempt = Failing(ChangedMeanwhile(), FAILED)
    assert transact("it", attempt) == "done"
    assert attempt.calls == 3


class Row:
    """Its method fails with these errors, one a call."""

    def __init__(self, name: str, *errors: Exception) -> None:
        self.name = name
        self.attempt = Failing(*errors)

    @transaction("row {self.name!r} of {table}")
    def change(self, table: str, *, to: int = 1) -> tuple[str, int]:
        """Change the row."""
        return self.attempt(), to


def test_every_call_of_a_decorated_function_is_a_transaction(pauses: list[float]) -> None:
    row = Row("r", FAILED, CorruptionError("collected"), FAILED)
    assert row.change("t", to=2) == ("done", 2)
    assert row.attempt.calls == 4
    assert row.change("t") == ("done", 1)
    assert Row.change.__doc__ == "Change the row."


def test_the_error_of_a_decorated_function_names_its_arguments(pauses: list[float]) -> None:
    row = Row("r", *[FAILED] * MAX_ATTEMPTS)
    with pytest.raises(ContendedError, match="row 'r' of t kept changing during 256 attempts"):
        row.change(table="t")


def test_a_transaction_cannot_name_an_unknown_parameter() -> None:
    with pytest.raises(AssertionError, match="no parameter"):

        @transaction("session {sesion!r}")
        def change(session: str) -> None: ...


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_ends_a_transaction_between_two_attempts(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    row = Row("r", *[FAILED] * 10)

    def interrupted(pause_s: float) -> None:
        raise error

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(error):
        row.change("t")
    assert row.attempt.calls == 4


# --- reading ----------------------------------------------------------------------------------


def test_a_read_is_retried_while_each_attempt_misses_another_object(pauses: list[float]) -> None:
    assert read_again(Failing(CorruptionError("a"), CorruptionError("b"))) == "done"


def test_a_read_that_misses_the_same_twice_raises(pauses: list[float]) -> None:
    read = Failing(CorruptionError("a"), CorruptionError("b"), CorruptionError("b"))
    with pytest.raises(CorruptionError, match="b"):
        read_again(read)
    assert read.calls == 3


class Collected(MemoryEngine):
    """Misses a manifest in the first reads, and counts how often history is read."""

    def __init__(self) -> None:
        super().__init__()
        self.manifest: bytes | None = None
        self.misses = 0
        self.history_reads = 0

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        self.history_reads += any(key.table == "history" for key in keys)
        return super().get_rows(keys)

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        found = super().get_many(digests)
        if self.manifest is not None and self.manifest in digests and self.misses:
            self.misses -= 1
            found[list(digests).index(self.manifest)] = None
        return found


@pytest.fixture
def engine() -> Collected:
    """A session ``s`` whose first revision can be missed."""
    engine = Collected()
    session = Store(engine).session("s")
    done = session.commit(Commit(append=[NodeDraft("a", 1)]))
    session.commit(Commit(append=[NodeDraft("b", 2)]))
    engine.manifest = done.manifest
    return engine


def test_a_fork_of_a_damaged_revision_reads_it_twice(engine: Collected) -> None:
    """Four nested retries read it eight times."""
    engine.misses = 10**6
    with pytest.raises(CorruptionError):
        Store(engine).fork("s", "t", at=1)
    assert engine.history_reads == 2


def test_a_retried_fork_keeps_the_subjects_given_by_an_iterator(engine: Collected) -> None:
    engine.misses = 1
    store = Store(engine)
    store.fork("s", "t", at=1, subjects=(name for name in ["anna"]))  # type: ignore[arg-type]
    assert engine.misses == 0
    assert store.session("t").subjects() == ("anna",)


# --- many changes ---------------------------------------------------------------------------------


def test_changes_whose_rows_have_changed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has two conditions, so the index of a failed one is not the position of its change."""
    monkeypatch.setattr("casstore.session.attempts._WRITTEN_AT_ONCE", 3)
    engine = MemoryEngine()
    places = [RowKey("records", bytes([number])) for number in range(8)]
    engine.write(Write(rows=[PutRow(*place, b"old") for place in places]))
    changes = [
        Write(
            conditions=[RowIs("pins", place.key, None), RowIs(*place, b"old")],
            rows=[PutRow(*place, b"new")],
        )
        for place in places
    ]
    engine.write(Write(rows=[PutRow(*places[at], b"of another") for at in (0, 2, 7)]))
    engine.write(Write(rows=[PutRow("pins", places[4].key, b"pin")]))
    written = list(write_unchanged(engine, changes))
    assert written == [changes[at] for at in (1, 3, 5, 6)]
    rows = engine.get_rows(places)
    assert [at for at, row in enumerate(rows) if row == b"new"] == [1, 3, 5, 6]


def test_an_interrupt_between_two_batches_of_changes_keeps_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("casstore.session.attempts._WRITTEN_AT_ONCE", 1)
    engine = MemoryEngine()
    place = RowKey("records", b"k")

    def changes() -> Iterator[Write]:
        yield Write(rows=[PutRow(*place, b"new")])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(write_unchanged(engine, changes()))
    assert engine.get_rows([place]) == [b"new"]


# --- arguments that can be read once --------------------------------------------------------------


def test_a_repeated_call_uses_the_items_of_an_iterator_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first write of each call fails, because another writer was first."""
    engine = MemoryEngine()
    session = Store(engine).session("s")
    session.append("one")
    write = engine.write

    def once_failing() -> None:
        def fail(change: Write) -> WriteResult:
            monkeypatch.setattr(engine, "write", write)
            raise ConditionFailedError(9, FAILED.condition, b"x")

        monkeypatch.setattr(engine, "write", fail)

    once_failing()
    assert session.add_subjects(iter(["anna", "ben"])) == ("anna", "ben")  # type: ignore[arg-type]
    once_failing()
    assert session.remove_subjects(iter(["ben"])) == ("anna",)  # type: ignore[arg-type]
    once_failing()
    assert session.queue.enqueue(iter(["work"])).items == ("work",)  # type: ignore[arg-type]
    image = session.attachments.put(b"pixels")
    once_failing()
    [committed] = session.attachments.commit(iter([image.id]))  # type: ignore[arg-type]
    assert committed.state == "committed"
    once_failing()
    session.fork("t", subjects=iter(["cleo"]))  # type: ignore[arg-type]
    assert Store(engine).session("t").subjects() == ("cleo",)
    once_failing()
    Store(engine).create_session("u", subjects=iter(["dora"]))  # type: ignore[arg-type]
    assert Store(engine).session("u").subjects() == ("dora",)
    [node] = session.nodes()
    once_failing()
    assert session.tombstone(iter([node.id])).hidden == (node.id,)  # type: ignore[arg-type]


def test_the_error_of_a_contended_transaction_names_parameters_left_at_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("casstore.session.attempts.MAX_ATTEMPTS", 2)

    @transaction("the row {name!r} of {table}")
    def change(name: str, *, table: str = "heads") -> None:
        raise ChangedMeanwhile

    with pytest.raises(ContendedError, match="the row 'a' of heads"):
        change("a")
