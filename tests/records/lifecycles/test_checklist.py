"""What a team that keeps state by three lifecycles relies on, row by row.

| relied on | test |
|---|---|
| ephemeral state is never on disk | test_ephemeral__… |
| promotion of named keys | test_promote__… |
| latest by label | test_latest_by_label__… |
| history | test_history__… |
| restore | test_restore__… |
| separate erasure | test_separate_erasure__… |
| subject link | test_subject_link__… |
| holds and seals | test_holds_and_seals__… |
| dedup-safe erasure | test_dedup_safe_erasure__… |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import (
    InvalidInputError,
    InvalidValueError,
    RecordHeldError,
    RecordSealedError,
    SessionExistsError,
    SessionNotFoundError,
)
from casstore.maintenance import erasure, gc
from casstore.records.lifecycles import Annotation, Hold, Lifecycles, Seal
from casstore.records.lifecycles.erasure import LifecycleErasure
from casstore.records.lifecycles.sweep import sweep
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.lifecycles.raw_bytes import everything, raw_files

DAY_MS = 86_400_000
BLOB = "a text that two people share " * 100


def test_ephemeral__working_state_is_never_on_disk_and_is_gone_after_close(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with Store(LmdbEngine(str(place), durability="full")) as store:
        life = Lifecycles(store)
        with life.create_session("s1", user="anna") as session:
            session.working.set("scratch", "CANARY-WORKING " + "w " * 400)
            session.working.set("plan", "CANARY-PROMOTED " + "p " * 400)
            session.checkpoint("planned", ["plan"])
            assert session.working.get("scratch").startswith("CANARY-WORKING")
            assert life.restore("s1").working.names() == []
        assert session.working.names() == []
        assert session.working.get("scratch", "gone") == "gone"
        found = everything(store)
        assert (b"CANARY-PROMOTED" in found, b"CANARY-WORKING" in found) == (True, False)
    found = raw_files(place)
    assert (b"CANARY-PROMOTED" in found, b"CANARY-WORKING" in found) == (True, False)


def test_promote__a_checkpoint_stores_the_named_keys_none_for_empty_and_all_for_none(
    life: Lifecycles,
) -> None:
    session = life.create_session("s1")
    for name in ("plan", "draft", "scratch"):
        session.working.set(name, name.upper())

    def promoted(names: Any) -> dict[str, Any]:
        return session.get_checkpoint(session.checkpoint("x", names).number).payload

    assert promoted(["plan", "draft"]) == {"plan": "PLAN", "draft": "DRAFT"}
    assert promoted([]) == {}
    assert promoted(None) == {"plan": "PLAN", "draft": "DRAFT", "scratch": "SCRATCH"}
    assert promoted(["missing", "plan"]) == {"plan": "PLAN"}
    assert promoted(["missing"]) == {}
    assert promoted(name for name in ("plan",)) == {"plan": "PLAN"}
    with pytest.raises(InvalidInputError, match="must be a list"):
        promoted("plan")
    # What was promoted is as it was then.
    mutable = ["first"]
    session.working.set("list", mutable)
    before = session.checkpoint("list", ["list"])
    mutable.append("second")
    assert session.get_checkpoint(before.number).payload == {"list": ["first"]}


def test_latest_by_label__by_sequence_with_a_frozen_clock(life: Lifecycles, clock: Clock) -> None:
    session = life.create_session("s1")
    for number in range(30):
        session.working.set("n", number)
        session.checkpoint("same", ["n"])
        session.checkpoint("other")
    newest = session.find_checkpoint("same")
    assert newest is not None
    assert (newest.payload, newest.info.number) == ({"n": 29}, 59)
    # Not even a clock that goes back changes it.
    clock.move(-DAY_MS)
    session.working.set("n", "later")
    session.checkpoint("same", ["n"])
    newest = session.find_checkpoint("same")
    assert newest is not None
    assert newest.payload == {"n": "later"}
    assert session.delete_checkpoint(61)
    newest = session.find_checkpoint("same")
    assert newest is not None
    assert newest.payload == {"n": 29}
    assert session.find_checkpoint("never") is None
    assert session.find_checkpoint("sam") is None
    # One that is deleted while it is looked for is passed over.
    late = Lifecycles(_Deleting(life.store, lambda: session.delete_checkpoint(59))).restore("s1")
    newest = late.find_checkpoint("same")
    assert newest is not None
    assert newest.payload == {"n": 28}
    for wrong in (0, -1, "1", 1.0):
        with pytest.raises(InvalidInputError):
            session.get_checkpoint(wrong)  # type: ignore[arg-type]


class _Deleting(Store):
    """A store of which something is deleted between a scan and what follows."""

    def __init__(self, store: Store, between: Callable[[], Any]) -> None:
        super().__init__(_DeletingEngine(store.engine, between))


class _DeletingEngine:
    def __init__(self, engine: Any, between: Callable[[], Any]) -> None:
        self._engine = engine
        self._between: Callable[[], Any] | None = between

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def scan_rows(self, *args: Any, **options: Any) -> Any:
        found = self._engine.scan_rows(*args, **options)
        between, self._between = self._between, None
        if between is not None:
            between()
        return found


def test_history__all_checkpoints_kept_in_order(life: Lifecycles, clock: Clock) -> None:
    session, other = life.create_session("s"), life.create_session("s1")
    for number in range(12):
        clock.move(-1 if number % 3 else 1)
        session.checkpoint(f"label {number % 4}")
        other.checkpoint("of another")
    listed = list(session.checkpoints())
    assert [info.number for info in listed] == list(range(1, 13))
    assert [info.label for info in listed] == [f"label {number % 4}" for number in range(12)]
    assert len({info.id for info in listed}) == 12
    session.close()
    assert list(life.restore("s").checkpoints()) == listed
    assert session.delete_checkpoint(3)
    assert not session.delete_checkpoint(3)
    assert session.checkpoint("new").number == 13, "numbers are not given again"
    assert [info.number for info in session.checkpoints()][:3] == [1, 2, 4]


def test_restore__an_unknown_session_is_not_found(life: Lifecycles) -> None:
    with pytest.raises(SessionNotFoundError, match="'bogus'"):
        life.restore("bogus")
    life.create_session("s1").checkpoint("a")
    assert life.restore("s1").find_checkpoint("a") is not None
    with pytest.raises(SessionExistsError):
        life.create_session("s1")
    session = life.restore("s1")
    assert life.delete_session("s1").deleted == 1
    with pytest.raises(SessionNotFoundError):
        life.restore("s1")
    with pytest.raises(SessionNotFoundError):
        life.delete_session("s1")
    with pytest.raises(SessionNotFoundError):
        session.checkpoint("too late")
    assert list(session.checkpoints()) == []
    with pytest.raises(InvalidInputError):
        life.create_session("")


def test_separate_erasure__counts_user_data_and_leaves_checkpoints(either: Lifecycles) -> None:
    life = either
    session = life.create_session("s1", user="anna")
    session.working.set("draft", "text")
    session.checkpoint("drafted")
    for name in ("language", "city", "bio"):
        life.users.put("anna", name, name * 300)
    life.users.put("berta", "language", "de")
    assert life.users.erase("anna").deleted == 3
    assert list(life.users.names("anna")) == []
    assert life.users.get("anna", "city", None) is None
    assert life.users.erase("anna").deleted == 0
    assert life.users.get("berta", "language") == "de"
    found = session.find_checkpoint("drafted")
    assert found is not None
    assert found.payload == {"draft": "text"}
    # Nor does the end of a session touch user data.
    life.delete_session("s1")
    assert life.users.get("berta", "language") == "de"
    life.users.put("anna", "city", "back again")
    assert life.users.get("anna", "city") == "back again"


def test_subject_link__erasure_finds_what_is_annotated_and_what_is_derived(
    life: Lifecycles,
) -> None:
    session = life.create_session("hers", user="anna")
    session.working.set("draft", "about anna")
    drafted = session.checkpoint("drafted")
    life.users.put("anna", "city", "Ulm")
    fact = life.records.put(
        "facts", "likes", "cats",
        Annotation(["learned_context"], sources=[drafted.ref, life.users.ref("anna", "city")]),
    )  # fmt: skip
    # Derived from what is derived, in somebody else's session, and nobody said anna.
    theirs = life.create_session("theirs", user="berta")
    digest = theirs.checkpoint("digest", annotation=Annotation(sources=[fact], processors=["crm"]))
    life.records.put("facts", "weather", "rain", Annotation(["process"]))
    theirs.checkpoint("own")
    assert list(life.sessions(user="anna")) == ["hers"]
    hashed = life.subjects.hash("anna")
    note = life.find_note(fact)
    assert note is not None
    assert (note.subjects, note.classes) == ((hashed,), ("learned_context",))
    assert b"anna" not in b"".join(row.key + row.value for row in _rows(life.store, "life.subj"))
    plan = erasure.plan(life.store, "anna", providers=[LifecycleErasure()])
    assert plan.recipients == ("crm",)
    report = erasure.execute(life.store, plan, providers=[LifecycleErasure()])
    assert (report.records_erased, report.stays) == (4, ())
    assert life.records.get("facts", "likes", None) is None
    assert [info.label for info in theirs.checkpoints()] == ["own"]
    assert digest.number == 1
    assert life.records.get("facts", "weather") == "rain"
    assert list(life.sessions()) == ["theirs"]
    assert LifecycleErasure().find(life.store, "anna") == []
    left = [row.key for row in _rows(life.store, "life.")]
    assert not [key for key in left if hashed.encode() in key], "no index row is left over"


def _rows(store: Store, start: str) -> list[Any]:
    return [row for row in store.engine.scan_rows("records") if row.key.startswith(start.encode())]


def test_holds_and_seals__erasure_keeps_live_holds_and_seals_and_removes_expired_holds(
    life: Lifecycles, clock: Clock
) -> None:
    now_ms = clock()
    compliance = ["compliance"]
    live = life.records.put(
        "invoices", "live", 1, Annotation(compliance, hold=Hold("tax law", now_ms + 9 * DAY_MS))
    )
    life.records.put(
        "invoices", "expired", 2,
        Annotation(compliance, hold=Hold("tax law", now_ms + DAY_MS, jurisdiction="DE")),
    )  # fmt: skip
    both = life.records.put(
        "invoices", "sealed", 3,
        Annotation(compliance, hold=Hold("tax law", now_ms + DAY_MS), seal=Seal("sign-7", "proof")),
    )  # fmt: skip
    life.records.put("invoices", "young class", 4, Annotation(["compliance", "process"]))
    clock.move(2 * DAY_MS)
    ages = {"compliance": DAY_MS, "process": 30 * DAY_MS}
    planned = sweep(life, ages, dry_run=True)
    assert (planned.swept, planned.sealed, planned.held) == (1, 1, 1)
    assert life.records.get("invoices", "expired") == 2
    report = sweep(life, ages)
    assert report == planned._replace(dry_run=False)
    assert {stays.ref: stays.reason for stays in report.stayed} == {live: "held", both: "sealed"}
    assert [record.ref.name for record in life.records.list("invoices")] == [
        "live", "sealed", "young class",
    ]  # fmt: skip
    clock.move(40 * DAY_MS)
    assert sweep(life, ages).swept == 2
    clock.move(4000 * DAY_MS)
    assert (sweep(life, ages).swept, sweep(life, ages).sealed) == (0, 1)
    life.verify_seal(both)
    with pytest.raises(RecordSealedError, match="sign-7"):
        life.records.delete("invoices", "sealed")
    life.lift_seal(both, review="case 12: proof no longer needed")
    note = life.find_note(both)
    assert note is not None
    assert note.reviews == ("case 12: proof no longer needed",)
    assert sweep(life, ages).swept == 1


def test_dedup_safe_erasure__a_shared_blob_dies_with_its_last_reference(
    tmp_path: Path,
) -> None:
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        life, provider = Lifecycles(store), LifecycleErasure()
        for user in ("anna", "berta"):
            life.users.put(user, "essay", BLOB)
        life.users.put("anna", "own", "OWN " * 400)
        plan = erasure.plan(store, "anna", providers=[provider])
        [shared] = [one for one in plan.sharing.largest if one.size_bytes == len(BLOB)]
        assert shared.names == (f"record life.users {life.subjects.hash('berta')} / essay",)
        report = erasure.execute(store, plan, providers=[provider])
        assert report.records_erased == 2
        assert report.sharing.shared_bytes >= len(BLOB)
        gc.collect(store, grace_ms=0)
        found = everything(store)
        assert (BLOB.encode() in found, b"OWN OWN" in found) == (True, False)
        assert life.users.get("berta", "essay") == BLOB
        plan = erasure.plan(store, "berta", providers=[provider])
        assert plan.sharing.shared_objects == 0
        erasure.execute(store, plan, providers=[provider])
        gc.collect(store, grace_ms=0)
        assert BLOB.encode() not in everything(store)


# --- faults of the original that are gone -----------------------------------------------------


def test_fault_gone__an_unstorable_value_is_refused_with_its_path_and_not_coerced(
    life: Lifecycles,
) -> None:
    session = life.create_session("s1")
    session.working.set("map", {"inner": {1: "one"}})
    with pytest.raises(InvalidValueError, match="inner"):
        session.checkpoint("x", ["map"])
    session.working.set("object", object())
    with pytest.raises(InvalidValueError, match=r"\$\.object"):
        session.checkpoint("x", ["object"])
    # Nothing was written, and what can be stored comes back as it was, bytes included.
    assert list(session.checkpoints()) == []
    value = {"b": b"\x00\xff", "f": 1.0, "i": 1, "none": None, "deep": [[{"x": True}]]}
    session.working.set("good", value)
    assert session.checkpoint("x", ["good"]).number == 1
    found = session.get_checkpoint(1).payload["good"]
    assert found == value
    assert type(found["f"]) is float


def test_fault_gone__checkpoints_can_be_erased_and_deleted(life: Lifecycles) -> None:
    session = life.create_session("s1", user="anna")
    session.working.set("draft_output", "dear anna")
    held = session.checkpoint("held", annotation=Annotation(hold=Hold("law", 2**42)))
    session.checkpoint("free")
    with pytest.raises(RecordHeldError) as raised:
        session.delete_checkpoint(held.number)
    assert raised.value.until_ms == 2**42
    end = life.delete_session("s1")
    assert (end.deleted, [stays.ref for stays in end.stayed]) == (1, [held.ref])
    assert [info.label for info in life.restore("s1").checkpoints()] == ["held"]
    life.lift_hold(held.ref, review="asked legal")
    assert life.delete_session("s1").deleted == 1
    with pytest.raises(SessionNotFoundError):
        life.restore("s1")
