"""User data: values, notes, holds, and what changes under whose hands."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import (
    InvalidInputError,
    RecordHeldError,
    RecordNotFoundError,
    RecordSealedError,
    SubjectSecretError,
)
from casstore.format.canonical import Link
from casstore.maintenance import check, gc
from casstore.records.lifecycles import Annotation, FileKeys, Hold, Lifecycles, Ref, Seal, removal
from casstore.records.lifecycles.user_data import NewValue
from casstore.store import Store
from casstore.testing.session_fixtures import interrupted, nothing_written
from tests.records.conftest import Clock

LONG = "long " * 500


@pytest.mark.parametrize(
    "value", [None, 0, 1.5, "", "text", LONG, b"bytes", b"b" * 3000, [], {"a": [LONG, {"b": None}]}]
)
def test_user_values_round_trip(either: Lifecycles, value: Any) -> None:
    either.users.put("anna", "x", value)
    assert either.users.get("anna", "x") == value
    assert type(either.users.get("anna", "x", 7)) is type(value)


def test_a_link_in_clear_data_keeps_what_it_links_to(tmp_path: Path) -> None:
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        life = Lifecycles(store)
        link, loose = Link(store.put_value([LONG])), store.put_value(["nobody", LONG * 2])
        life.users.put("anna", "link", link)
        life.users.put("anna", "inside", {"to": [link]})
        gc.collect(store, grace_ms=0)
        assert life.users.get("anna", "link") == link
        assert store.get_value(link.digest) == [LONG]
        assert store.missing([loose]) == [loose]
        life.users.erase("anna")
        gc.collect(store, grace_ms=0)
        assert store.missing([link.digest]) == [link.digest]
        assert check.check(store, level="full").findings == ()


def test_missing_is_distinguished_from_none(either: Lifecycles) -> None:
    either.users.put("anna", "none", None)
    assert either.users.get("anna", "none", "default") is None
    assert either.users.get("anna", "missing", "default") == "default"
    with pytest.raises(RecordNotFoundError, match="missing"):
        either.users.get("anna", "missing")
    assert not either.users.delete("anna", "missing")
    assert either.users.delete("anna", "none")
    assert either.users.get("anna", "none", "default") == "default"


def test_the_error_for_a_missing_value_uses_the_names_of_the_caller(either: Lifecycles) -> None:
    with pytest.raises(RecordNotFoundError, match=r"^no record 'city' of 'facts'$"):
        either.records.get("facts", "city")
    with pytest.raises(RecordNotFoundError, match=r"^no value 'city' of this user$"):
        either.find_note(either.users.ref("anna", "city"))
    about = Annotation(["process"], sources=[Ref("session", "nowhere")])
    with pytest.raises(RecordNotFoundError, match=r"^no session 'nowhere' in this store$"):
        either.records.put("facts", "f", 1, about)


def test_replacing_restarts_the_time_to_live(either: Lifecycles, clock: Clock) -> None:
    either.users.put("anna", "x", 1)
    first = either.users.written_at_ms("anna", "x")
    clock.move(5)
    either.users.put("anna", "x", 2)
    assert either.users.written_at_ms("anna", "x") == (first or 0) + 5 == clock()
    assert either.users.written_at_ms("anna", "y") is None


def test_values_of_users_are_separate_and_names_are_listed_in_order(either: Lifecycles) -> None:
    names = ["", "a", "a\0b", "b", "x" * 600, "ä"]
    either.users.put_many([NewValue("anna", name, name) for name in reversed(names)])
    either.users.put("ann", "a", "of ann")
    assert list(either.users.names("anna")) == names
    assert [either.users.get("anna", name) for name in names] == names
    assert either.users.erase("anna").deleted == len(names)
    assert either.users.get("ann", "a") == "of ann"


def test_a_batch_is_all_or_nothing(either: Lifecycles) -> None:
    life = either
    life.users.put("anna", "held", 1, Annotation(hold=Hold("law", 2**42)))
    batch = [NewValue("berta", "new", 1), NewValue("anna", "new", 1), NewValue("anna", "held", 2)]
    with nothing_written(life.store), pytest.raises(RecordHeldError):
        life.users.put_many(batch)
    with nothing_written(life.store), pytest.raises(InvalidInputError):
        life.users.put_many([NewValue("anna", "x", 1), NewValue("anna", "y", {1: 2})])
    assert list(life.users.names("anna")) == ["held"]
    assert life.users.put_many([]) == []


def test_user_names_are_stored_only_as_hashes(either: Lifecycles) -> None:
    life = either
    life.create_session("s", user="anna.schmidt@example.org").checkpoint("x")
    life.users.put("anna.schmidt@example.org", "x", 1)
    life.records.put("c", "r", 1, Annotation(["identity"], subjects=["anna.schmidt@example.org"]))
    for row in life.store.engine.scan_rows("records"):
        assert b"schmidt" not in row.key + row.value


def test_a_store_is_used_with_one_secret(store: Store) -> None:
    with_secret = Lifecycles(store, secret=b"s" * 32)
    with_secret.users.put("anna", "x", 1)
    for other in (Lifecycles(store), Lifecycles(store, secret=b"t" * 32)):
        assert other.subjects.hash("anna") != with_secret.subjects.hash("anna")
        for call in (
            lambda life: life.users.get("anna", "x"),
            lambda life: life.users.put("anna", "x", 1),
            lambda life: life.users.erase("anna"),
            lambda life: life.users.delete("anna", "x"),
            lambda life: list(life.users.names("anna")),
            lambda life: life.create_session("s", user="anna"),
            lambda life: list(life.sessions(user="anna")),
            lambda life: life.hold(life.users.ref("anna", "x"), Hold("b", 2**42)),
            lambda life: life.records.put("c", "n", 1, Annotation(["identity"], ["anna"])),
        ):
            with nothing_written(store), pytest.raises(SubjectSecretError, match="another secret"):
                call(other)
    assert Lifecycles(store, secret=b"s" * 32).users.get("anna", "x") == 1
    for bad in (b"short", "text" * 10, b""):
        with pytest.raises(InvalidInputError):
            Lifecycles(store, secret=bad)  # type: ignore[arg-type]


# --- holds and seals ------------------------------------------------------------------------


def test_held_values_are_neither_replaced_nor_deleted(either: Lifecycles, clock: Clock) -> None:
    life, until = either, clock() + 100
    ref = life.users.put("anna", "x", "kept")
    life.hold(ref, Hold("tax law", until))
    for call in (
        lambda: life.users.put("anna", "x", 2),
        lambda: life.users.put("anna", "x", 2, Annotation()),
        lambda: life.users.delete("anna", "x"),
    ):
        with nothing_written(life.store), pytest.raises(RecordHeldError) as raised:
            call()
        assert (raised.value.until_ms, raised.value.basis) == (until, "tax law")
    assert life.users.get("anna", "x") == "kept"
    clock.move(99)
    with pytest.raises(RecordHeldError):
        life.users.delete("anna", "x")
    clock.move(1)
    life.users.put("anna", "x", "free")
    assert life.users.get("anna", "x") == "free"
    assert life.users.delete("anna", "x")


def test_a_hold_can_be_extended_and_is_lifted_only_with_a_review(
    either: Lifecycles, clock: Clock
) -> None:
    life = either
    ref = life.users.put("anna", "x", 1)
    life.hold(ref, Hold("a", clock() + 100))
    life.hold(ref, Hold("b", clock() + 200))
    with nothing_written(life.store), pytest.raises(RecordHeldError):
        life.hold(ref, Hold("c", clock() + 150))
    with pytest.raises(InvalidInputError, match="review"):
        life.lift_hold(ref, review=" ")
    life.lift_hold(ref, review="ticket 9")
    assert life.users.delete("anna", "x")
    with pytest.raises(RecordNotFoundError):
        life.hold(ref, Hold("a", clock() + 100))
    assert life.users.get("anna", "x", None) is None


def test_a_seal_takes_precedence_over_a_hold_and_verifies_the_row(
    either: Lifecycles, clock: Clock
) -> None:
    life = either
    ref = life.users.put("anna", "consent", {"given": True, "text": LONG})
    with pytest.raises(InvalidInputError, match="not sealed"):
        life.verify_seal(ref)
    life.hold(ref, Hold("law", clock() + 100))
    life.seal(ref, Seal("consent-1", "proof of consent"))
    life.verify_seal(ref)
    with nothing_written(life.store), pytest.raises(RecordSealedError):
        life.users.put("anna", "consent", {"given": False})
    with nothing_written(life.store), pytest.raises(RecordSealedError):
        life.seal(ref, Seal("consent-2", "again"))
    clock.move(1000)
    report = life.users.erase("anna")
    assert [(stays.reason, stays.action) for stays in report.stayed] == [("sealed", "consent-1")]
    assert life.users.get("anna", "consent")["given"] is True
    life.verify_seal(ref)
    sealed_when_written = life.users.put("anna", "y", 1, Annotation(seal=Seal("a", "b")))
    life.verify_seal(sealed_when_written)


@pytest.mark.leaves_damage
def test_a_changed_row_breaks_its_seal(life: Lifecycles) -> None:
    from casstore.engine.protocol import PutRow, Write
    from casstore.errors import CorruptionError

    ref = life.records.put("c", "n", "right", Annotation(["process"], seal=Seal("a", "b")))
    table, key = life.tables.payload(ref)
    [row] = [row for row in life.store.engine.scan_rows("records") if b"right" in row.value]
    forged = PutRow("records", table.keys.key(key), row.value.replace(b"right", b"wrong"))
    life.store.engine.write(Write(rows=[forged]))
    assert life.records.get("c", "n") == "wrong"
    with pytest.raises(CorruptionError, match="has changed since it was sealed"):
        life.verify_seal(ref)


# --- annotations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "annotation",
    [
        Annotation(["unknown"]),
        Annotation("identity"),
        Annotation(["identity"]),
        Annotation(["learned_context"]),
        Annotation([]),
        Annotation(["process"], subjects="anna"),
        Annotation(["process"], subjects=[""]),
        Annotation(["process"], subjects=["x"] * 0 + [f"s{n}" for n in range(1025)]),
        Annotation(["process"], sources=["no ref"]),  # type: ignore[list-item]
        Annotation(["process"], sources=[Ref("strange", "a", "b")]),
        Annotation(["process"], hold=Hold("", 5)),
        Annotation(["process"], hold=Hold("x", 0)),
        Annotation(["process"], hold=Hold("x", 2**63)),
        Annotation(["process"], hold=Hold("x", 1.5)),  # type: ignore[arg-type]
        Annotation(["process"], seal=Seal("", "x")),
        Annotation(["process"], processors=["p" * 5000]),
    ],
)
def test_invalid_or_empty_annotations_are_refused(life: Lifecycles, annotation: Annotation) -> None:
    with nothing_written(life.store), pytest.raises(InvalidInputError):
        life.records.put("c", "n", 1, annotation)


def test_learned_context_needs_a_subject_its_own_or_its_sources(life: Lifecycles) -> None:
    nobody = life.records.put("c", "nobody", 1, Annotation(["process"]))
    with nothing_written(life.store), pytest.raises(InvalidInputError, match="needs subjects"):
        life.records.put("c", "n", 1, Annotation(["learned_context"], sources=[nobody]))
    hers = life.users.put("anna", "x", 1)
    found = life.records.put("c", "n", 1, Annotation(["learned_context"], sources=[hers, nobody]))
    note = life.find_note(found)
    assert note is not None
    assert note.subjects == (hers.owner,)
    with nothing_written(life.store), pytest.raises(RecordNotFoundError):
        life.records.put("c", "m", 1, Annotation(["process"], sources=[Ref("record", "c", "no")]))


def test_a_replaced_value_keeps_its_annotation_unless_a_new_one_is_given(
    either: Lifecycles,
) -> None:
    life = either
    ref = life.users.put("anna", "x", 1, Annotation(subjects=["berta"], processors=["crm"]))
    life.users.put("anna", "x", 2)
    note = life.find_note(ref)
    assert note is not None
    assert life.subjects.hash("berta") in note.subjects
    life.users.put("anna", "x", 3, Annotation(["process"]))
    note = life.find_note(ref)
    assert note is not None
    assert (note.subjects, note.classes) == ((ref.owner,), ("process",))
    assert list(life.tables.subjects.scan(life.subjects.hash("berta"))) == []


# --- beside others ----------------------------------------------------------------------------


def test_a_value_added_during_an_erasure_is_erased(
    either: Lifecycles, either_keys: FileKeys | None
) -> None:
    life = either
    life.users.put("anna", "old", 1)
    other = Lifecycles(
        interrupted(life.store, before=lambda: life.users.put("anna", "new", 2)),
        keys=either_keys,
    )
    assert other.users.erase("anna").deleted == 2
    assert list(life.users.names("anna")) == []
    life.users.put("anna", "next", 3)
    assert life.users.get("anna", "next") == 3


def test_a_value_that_replaces_another_during_an_erasure_is_erased(
    either: Lifecycles,
    either_keys: FileKeys | None,
) -> None:
    # The count of the user's values is then as it was.
    life = either
    life.users.put("anna", "a", 1)
    life.users.put("anna", "b", 1)

    def exchange() -> None:
        life.users.delete("anna", "b")
        life.users.put("anna", "c", 2)

    other = Lifecycles(interrupted(life.store, before=exchange), keys=either_keys)
    assert other.users.erase("anna").deleted == 2
    assert list(life.users.names("anna")) == []


def test_a_value_that_is_written_during_an_erasure_is_under_a_live_key(
    either: Lifecycles, either_keys: FileKeys | None
) -> None:
    life = either
    life.users.put("anna", "old", 1)
    other = Lifecycles(
        interrupted(life.store, before=lambda: life.users.erase("anna")), keys=either_keys
    )
    other.users.put("anna", "new", 2)
    assert life.users.get("anna", "new") == 2
    assert list(life.users.names("anna")) == ["new"]


def test_a_hold_set_during_an_erasure_keeps_the_value(
    either: Lifecycles, either_keys: FileKeys | None
) -> None:
    life = either
    ref = life.users.put("anna", "x", 1)
    other = Lifecycles(
        interrupted(life.store, before=lambda: life.hold(ref, Hold("law", 2**42))),
        keys=either_keys,
    )
    report = other.users.erase("anna")
    assert (report.deleted, [stays.reason for stays in report.stayed]) == (0, ["held"])
    assert life.users.get("anna", "x") == 1


def test_many_values_are_erased_in_batches(
    either: Lifecycles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "AT_ONCE", 3)
    life = either
    life.users.put("anna", "b", 1, Annotation(hold=Hold("law", 2**42), processors=["crm"]))
    for name in "acdefgh":
        life.users.put("anna", name, name, Annotation(processors=[f"p{name}"]))
    report = life.users.erase("anna")
    assert (report.deleted, len(report.stayed)) == (7, 1)
    assert report.processors == tuple(f"p{name}" for name in "acdefgh")
    assert list(life.users.names("anna")) == ["b"]
    assert life.users.get("anna", "b") == 1
    session = life.create_session("s")
    for _ in range(8):
        session.checkpoint("x")
    assert life.delete_session("s").deleted == 8
    assert list(life.sessions()) == []


def test_threads_that_share_an_agent_session_lose_no_write(either: Lifecycles) -> None:
    life = either
    session = life.create_session("s1", user="anna")

    def work(worker: int) -> None:
        for step in range(10):
            session.working.set(f"{worker}", step)
            session.checkpoint(f"worker {worker}", [f"{worker}"])
            life.users.put("anna", f"{worker} {step}", step)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [info.number for info in session.checkpoints()] == list(range(1, 41))
    for worker in range(4):
        found = session.find_checkpoint(f"worker {worker}")
        assert found is not None
        assert found.payload == {f"{worker}": 9}
    assert len(list(life.users.names("anna"))) == 40
    assert life.users.erase("anna").deleted == 40


@pytest.mark.parametrize(
    "source", [Ref("agent", "s1"), Ref("person", "anna"), Ref("session", "talk", "1")]
)
def test_a_source_that_is_a_session_user_or_message_ref_is_refused(
    life: Lifecycles, source: Ref
) -> None:
    life.create_session("s1", user="anna")
    life.store.create_session("talk")
    said = Annotation(["process"], sources=[source])
    with pytest.raises(InvalidInputError, match="a source must be"):
        life.records.put("facts", "f", 1, said)
    with pytest.raises(InvalidInputError, match="a source must be"):
        life.users.put("bert", "f", 1, said)
    with pytest.raises(InvalidInputError, match="a source must be"):
        life.restore("s1").checkpoint("f", [], said)
    assert list(life.records.list("facts")) == []


def test_records_are_listed_and_deleted_without_reading_what_they_hold(
    life: Lifecycles, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"draft": "x" * 10_000, "plan": [{"text": "y" * 10_000}]}
    with life.create_session("s1") as session:
        for name, value in held.items():
            session.working.set(name, value)
        info = session.checkpoint("begun")
    life.records.put("facts", "f", held, Annotation(["process"]))
    life.users.put("anna", "v", held)
    engine: Any = life.store.engine
    with monkeypatch.context() as patched:
        patched.setattr(engine, "get_many", None)
        assert list(life.restore("s1").checkpoints()) == [info]
        assert [record.ref.name for record in life.records.list("facts")] == ["f"]
        assert life.users.written_at_ms("anna", "v") == info.created_at_ms
        assert life.records.delete("facts", "f")
        assert life.delete_session("s1").deleted == 1
    assert life.users.get("anna", "v") == held


def test_long_names_that_begin_alike_are_listed_in_order(store: Store) -> None:
    life = Lifecycles(store)
    names = [f"{'n' * 300}{number:02}" for number in range(20)]
    for name in reversed(names):
        life.users.put("anna", name, 1)
        life.records.put("facts", name, 1, Annotation(["process"]))
    assert list(life.users.names("anna")) == names
    assert [record.ref.name for record in life.records.list("facts")] == names
