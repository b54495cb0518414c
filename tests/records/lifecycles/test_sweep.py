"""Sweeping and erasing: what goes, what stays and why, beside others who change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.errors import InvalidInputError, RecordNotFoundError, SubjectSecretError
from casstore.maintenance import erasure
from casstore.maintenance.erasure import ErasurePlan
from casstore.maintenance.progress import Step
from casstore.records.lifecycles import Annotation, FileKeys, Hold, Lifecycles, Ref, Seal
from casstore.records.lifecycles.erasure import LifecycleErasure, explain, find_refs
from casstore.records.lifecycles.sweep import sweep
from casstore.store import Store
from casstore.testing.session_fixtures import interrupted, nothing_written
from tests.records.conftest import Clock

DAY_MS = 86_400_000
ALL = dict.fromkeys(("identity", "process", "compliance", "learned_context"), 0)


def erase(store: Store, subject: str, provider: LifecycleErasure | None = None) -> Any:
    providers = [provider or LifecycleErasure()]
    plan = ErasurePlan.from_json(erasure.plan(store, subject, providers=providers).to_json())
    return erasure.execute(store, plan, providers=providers)


# --- sweeping ---------------------------------------------------------------------------------


def test_a_sweep_deletes_only_records_of_classes_with_an_age(
    either: Lifecycles, clock: Clock
) -> None:
    life = either
    session = life.create_session("s")
    session.checkpoint("old")
    life.users.put("anna", "x", 1)
    life.records.put("c", "fact", 1, Annotation(["learned_context"], subjects=["anna"]))
    life.records.put("c", "both", 1, Annotation(["process", "compliance"]))
    clock.move(2 * DAY_MS)
    session.checkpoint("new")
    assert sweep(life, {}).swept == 0
    report = sweep(life, {"process": DAY_MS})
    assert (report.looked_at, report.swept) == (5, 1)
    assert [info.label for info in session.checkpoints()] == ["new"]
    assert sweep(life, {"process": DAY_MS, "compliance": 3 * DAY_MS}).swept == 0
    assert sweep(life, {"process": DAY_MS, "compliance": DAY_MS}).swept == 1
    assert sweep(life, {"identity": DAY_MS}).swept == 1
    assert list(life.users.names("anna")) == []
    assert sweep(life, {"learned_context": DAY_MS}).swept == 1
    # A swept value is counted out: erasing finds nothing more.
    assert life.users.erase("anna").deleted == 0
    with pytest.raises(InvalidInputError, match="a class in max_age_ms must be one of"):
        sweep(life, {"other": 1})
    with pytest.raises(InvalidInputError):
        sweep(life, {"process": -1})


@pytest.mark.parametrize(
    "between",
    [
        lambda life, ref: life.hold(ref, Hold("law", 2**42)),
        lambda life, ref: life.seal(ref, Seal("a", "b")),
        lambda life, ref: life.records.put("c", "n", "fresh", Annotation(["process"])),
    ],
    ids=["held", "sealed", "replaced"],
)
def test_a_record_held_sealed_or_replaced_during_the_sweep_stays(
    life: Lifecycles, clock: Clock, between: Callable[[Lifecycles, Ref], Any]
) -> None:
    ref = life.records.put("c", "n", "old", Annotation(["process"]))
    clock.move(DAY_MS)
    other = Lifecycles(interrupted(life.store, before=lambda: between(life, ref)))
    assert sweep(other, ALL).swept == 0
    assert life.records.get("c", "n") in ("old", "fresh")


def test_a_sweep_reports_progress_and_can_be_stopped(life: Lifecycles, clock: Clock) -> None:
    session = life.create_session("s")
    for _ in range(300):
        session.checkpoint("x")
    clock.move(DAY_MS)
    told: list[Step] = []

    def stop(step: Step) -> None:
        told.append(step)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(life, ALL, progress=stop)
    assert told == [Step("sweep", 256, None, "records")]
    assert sweep(life, ALL).swept == 44
    assert list(session.checkpoints()) == []
    assert session.checkpoint("next").number == 301


def test_a_sweep_report_lists_a_limited_number_and_counts_all(
    life: Lifecycles, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.records.lifecycles.sweep.LISTED", 2)
    for number in range(5):
        life.records.put("c", str(number), 1, Annotation(["process"], seal=Seal("a", "b")))
    clock.move(1)
    report = sweep(life, ALL)
    assert (report.sealed, len(report.stayed)) == (5, 2)


# --- erasing ----------------------------------------------------------------------------------


def test_records_that_stay_are_reported_with_the_reason(
    either: Lifecycles, either_keys: FileKeys | None, clock: Clock
) -> None:
    life = either
    life.users.put("anna", "free", 1)
    held = life.users.put("anna", "held", 1, Annotation(hold=Hold("tax law", clock() + DAY_MS)))
    sealed = life.records.put(
        "decisions", "d1", 1, Annotation(["compliance"], ["anna", "berta"], seal=Seal("act 7", "x"))
    )
    provider = LifecycleErasure(keys=either_keys)
    report = erase(life.store, "anna", provider)
    assert report.records_erased == 1
    assert {one.record: one.reason for one in report.stays} == {
        str(held): "held until 2023-11-15T22:13:20+00:00 (tax law)",
        str(sealed): "sealed by act 7 (x): needs a review",
    }
    clock.move(DAY_MS)
    life.lift_seal(sealed, review="reviewed")
    report = erase(life.store, "anna", provider)
    assert (report.records_erased, report.stays) == (2, ())
    assert provider.find(life.store, "anna") == []
    assert provider.find(life.store, "berta") == []


def test_derivation_is_followed_through_sealed_records_and_cycles(life: Lifecycles) -> None:
    first = life.records.put("c", "1", 1, Annotation(["process"], ["anna"], seal=Seal("a", "b")))
    second = life.records.put("c", "2", 2, Annotation(["process"], sources=[first]))
    third = life.records.put("c", "3", 3, Annotation(["process"], sources=[second]))
    life.records.put("c", "2", 2, Annotation(["process"], sources=[first, third]))
    assert set(find_refs(life, "anna")) == {first, second, third}
    report = erase(life.store, "anna")
    assert report.records_erased == 2
    assert [record.ref for record in life.records.list("c")] == [first]


def test_a_derived_record_is_found_though_its_source_got_the_subject_later(
    life: Lifecycles,
) -> None:
    source = life.records.put("c", "source", 1, Annotation(["process"]))
    derived = life.records.put("c", "derived", 1, Annotation(["process"], sources=[source]))
    life.records.put("c", "source", 1, Annotation(["process"], ["anna"]))
    assert find_refs(life, "anna") == [derived, source]


def test_what_was_derived_is_found_though_its_source_was_swept(
    life: Lifecycles, clock: Clock
) -> None:
    source = life.users.put("anna", "chat", "text")
    fact = life.records.put("c", "fact", 1, Annotation(["learned_context"], sources=[source]))
    again = life.records.put("c", "again", 1, Annotation(["process"], sources=[fact]))
    clock.move(1)
    assert sweep(life, {"identity": 0, "learned_context": 0}).swept == 2
    assert find_refs(life, "anna") == [again]


@pytest.mark.parametrize("session", ["s1", "s" * 300])
def test_records_derived_from_a_deleted_session_do_not_belong_to_its_successor(
    life: Lifecycles, session: str
) -> None:
    hers = life.create_session(session, user="anna")
    hers.checkpoint("begun")
    source = hers.checkpoint("planned").ref
    hers.checkpoint("done")
    life.records.put("facts", "f", "hers", Annotation(["learned_context"], sources=[source]))
    life.delete_session(session)
    his = life.create_session(session, user="bert").checkpoint("begun")
    assert his.number == 3
    assert life.restore(session).find_checkpoint("begun") is not None
    assert erase(life.store, "bert").records_erased == 1
    assert life.records.get("facts", "f") == "hers"
    assert erase(life.store, "anna").records_erased == 1
    # Nothing is left that a session could be mixed up with.
    assert life.create_session(session).checkpoint("begun").number == 1


def test_records_derived_from_an_erased_session_are_erased(life: Lifecycles) -> None:
    life.store.create_session("chat", subjects=["anna"])
    fact = life.records.put(
        "c", "fact", 1, Annotation(["process"], sources=[Ref("session", "chat")])
    )
    assert find_refs(life, "anna") == [fact]
    report = erase(life.store, "anna")
    assert (report.records_erased, report.sessions_deleted) == (1, 1)


def test_records_derived_from_a_session_are_found_after_its_deletion(
    life: Lifecycles,
) -> None:
    life.store.create_session("chat", subjects=["anna"])
    said = Annotation(["learned_context"], sources=[Ref("session", "chat")])
    fact = life.records.put("c", "fact", 1, said)
    value = life.users.put("berta", "value", 1, said)
    info = life.create_session("s").checkpoint("begun", annotation=said)
    life.store.delete_session("chat")
    assert find_refs(life, "anna") == [info.ref, fact, value]
    for derive in (
        lambda: life.records.put("c", "late", 1, said),
        lambda: life.users.put("berta", "late", 1, said),
        lambda: life.restore("s").checkpoint("late", annotation=said),
    ):
        with pytest.raises(RecordNotFoundError, match="chat"):
            derive()


def test_a_derived_record_gets_the_subjects_that_its_session_gains_concurrently(
    life: Lifecycles,
) -> None:
    life.store.create_session("chat", subjects=["anna"])
    said = Annotation(["process"], sources=[Ref("session", "chat")])

    def add() -> None:
        life.store.session("chat").add_subjects(["berta"])

    other = Lifecycles(interrupted(life.store, before=add))
    fact = other.records.put("c", "fact", 1, said)
    assert find_refs(life, "berta") == [fact]
    gone = interrupted(life.store, before=lambda: life.store.delete_session("chat"))
    with pytest.raises(RecordNotFoundError, match="chat"):
        Lifecycles(gone).records.put("c", "late", 1, said)


def test_a_record_whose_source_is_erased_concurrently_is_not_written(life: Lifecycles) -> None:
    source = life.users.put("anna", "chat", "text")
    other = Lifecycles(interrupted(life.store, before=lambda: erase(life.store, "anna")))
    with pytest.raises(LookupError):
        other.records.put("c", "fact", 1, Annotation(["learned_context"], sources=[source]))
    assert list(life.records.list("c")) == []


def test_a_record_reassigned_to_another_subject_after_the_plan_stays(life: Lifecycles) -> None:
    life.records.put("c", "n", "of anna", Annotation(["identity"], ["anna"]))
    provider = LifecycleErasure()
    plan = erasure.plan(life.store, "anna", providers=[provider])
    life.records.put("c", "n", "of berta", Annotation(["identity"], ["berta"]))
    assert erasure.execute(life.store, plan, providers=[provider]).records_erased == 0
    assert life.records.get("c", "n") == "of berta"


def test_erasure_may_rewrite_a_record_that_is_about_several_subjects(life: Lifecycles) -> None:
    anna, berta = (life.users.put(user, "chat", user) for user in ("anna", "berta"))
    both = life.records.put(
        "facts", "both", ["anna likes cats", "berta likes dogs"],
        Annotation(["learned_context"], sources=[anna, berta]),
    )  # fmt: skip
    alone = life.records.put("facts", "alone", ["anna"], Annotation(["process"], sources=[anna]))
    asked: list[Ref] = []

    def without_anna(ref: Ref, value: Any) -> Any:
        asked.append(ref)
        return [line for line in value if "anna" not in line]

    report = erase(life.store, "anna", LifecycleErasure(rewrite=without_anna))
    assert asked == [both]
    assert report.records_erased == 2
    assert [(one.record, "rewritten" in one.reason) for one in report.stays] == [(str(both), True)]
    assert life.records.get("facts", "both") == ["berta likes dogs"]
    assert life.records.get("facts", alone.name, None) is None
    note = life.find_note(both)
    assert note is not None
    assert (note.subjects, note.sources) == ((berta.owner,), (berta,))
    assert find_refs(life, "anna") == []
    # Who says nothing lets it go.
    report = erase(life.store, "berta", LifecycleErasure(rewrite=lambda ref, value: None))
    assert (report.records_erased, list(life.records.list("facts"))) == (2, [])


def test_a_record_that_changes_while_it_is_rewritten_is_rewritten_again(life: Lifecycles) -> None:
    said = Annotation(["process"], ["anna", "berta"])
    life.records.put("c", "n", ["old"], said)
    provider = LifecycleErasure(rewrite=lambda ref, value: [*value, "rewritten"])
    plan = erasure.plan(life.store, "anna", providers=[provider])
    other = interrupted(life.store, before=lambda: life.records.put("c", "n", ["new"], said))
    erasure.execute(other, plan, providers=[provider])
    assert life.records.get("c", "n") == ["new", "rewritten"]


def test_erasing_without_the_secret_of_the_store_is_refused(store: Store) -> None:
    """A plan made without it would find nothing, and report the subject as erased."""
    Lifecycles(store, secret=b"s" * 32).users.put("anna", "x", 1)
    store.create_session("s", subjects=["anna"])
    with pytest.raises(SubjectSecretError):
        erasure.plan(store, "anna")
    plan = erasure.plan(store, "anna", providers=[LifecycleErasure(secret=b"s" * 32)])
    with pytest.raises(SubjectSecretError):
        erasure.execute(store, plan)
    assert [info.meta.session for info in store.sessions()] == ["s"]
    assert len(plan.records["life"]) == 2


def test_planning_and_explaining_an_erasure_change_nothing(either: Lifecycles) -> None:
    life = either
    life.create_session("s", user="anna").checkpoint("x")
    life.users.put("anna", "x", 1, Annotation(subjects=["berta"]))
    with nothing_written(life.store):
        erasure.plan(life.store, "anna", providers=[LifecycleErasure()])
        found = list(explain(life, [life.users.ref("anna", "x")]))
    [about] = found
    assert about.note is not None
    assert life.subjects.hash("berta") in about.note.subjects
    # Whom a record is about as well does not keep it.
    assert erase(life.store, "berta").records_erased == 1
    assert list(life.users.names("anna")) == []


def test_an_invalid_plan_is_refused(store: Store) -> None:
    provider = LifecycleErasure()
    for found in ("", "[]", '["strange", "a", "b"]', '["user", 1, 2]', "[" * 5000, '"user"'):
        with pytest.raises(InvalidInputError):
            list(provider.roots(store, [found]))
