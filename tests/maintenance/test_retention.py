"""Retention: what a policy keeps stays, the rest goes, and whoever comes in between wins."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    RevisionNotFoundError,
    SessionDeletedError,
    SessionNotFoundError,
    TurnConflictError,
)
from casstore.maintenance import (
    gc,
    retention,
    retention_planning,
    vacuum,
)
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.progress import Step
from casstore.maintenance.retention import Plan, Policy, SessionPlan
from casstore.session import attempts, catalogue, keys
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.session_fixtures import interrupted, nothing_written
from tests.maintenance.lifetimes import (
    DAY_MS,
    HOUR_MS,
    CrashError,
    crash_everywhere,
    crashing,
    grow,
    revisions,
    step,
)

LAST_2 = Policy(last=2)


def only(plan: Plan) -> SessionPlan:
    [session] = plan
    return session


def why(plan: Plan) -> dict[int, tuple[str, ...]]:
    """The revisions that stay, and why."""
    return {kept.revision: kept.reasons for part in plan for kept in part.kept}


def going(plan: Plan) -> list[int]:
    return [removed.revision for part in plan for removed in part.removed]


def saved(plan: Plan) -> Plan:
    """The plan as somebody else reads it."""
    return Plan.from_json(list(plan.to_json()))


def at(clock: ManualClock, text: str) -> None:
    clock.now_ms = int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def damage(store: Store, place: RowKey, value: bytes = b"\xc1") -> None:
    store.engine.write(Write(rows=[PutRow(*place, value)]))


# --- policies -------------------------------------------------------------------------------


def test_a_policy_is_set_found_and_taken_away(store: Store) -> None:
    step(store, "s", "a")
    assert retention.find_policy(store) is None
    default = Policy(last=3, daily=7, within_ms=DAY_MS, labelled=False, idle_ms=9 * DAY_MS)
    retention.set_policy(store, default)
    retention.set_policy(store, Policy(everything=True), "s")
    assert retention.find_policy(store) == default
    assert retention.find_policy(store, "s") == Policy(everything=True)
    assert retention.find_policy(store, "other") is None
    retention.set_policy(store, None, "s")
    assert retention.find_policy(store, "s") is None
    retention.set_policy(store, None)
    assert retention.find_policy(store) is None


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(labelled=True),
        Policy(idle_ms=5),
        Policy(last=-1, daily=1),
        Policy(last=True),
        Policy(last=1.5),  # type: ignore[arg-type]
        Policy(within_ms=0),
        Policy(within_ms=-1),
        Policy(last=1, idle_ms=0),
        Policy(last=1, labelled=1),  # type: ignore[arg-type]
        {"last": 1},
        None,
    ],
)
def test_a_policy_that_keeps_nothing_or_is_invalid_is_refused(store: Store, policy: Any) -> None:
    grow(store, "s", 3)
    with nothing_written(store):
        if policy is not None:
            with pytest.raises(InvalidInputError):
                retention.set_policy(store, policy)
            with pytest.raises(InvalidInputError):
                retention.plan(store, policy=policy)
        assert going(retention.plan(store)) == []


def test_a_policy_of_a_session_that_is_not_there_is_refused(store: Store) -> None:
    with nothing_written(store), pytest.raises(SessionNotFoundError):
        retention.set_policy(store, LAST_2, "s")
    step(store, "s", "a")
    late = interrupted(store, before=lambda: store.delete_session("s"))
    with pytest.raises(SessionDeletedError):
        retention.set_policy(late, LAST_2, "s")
    assert store.engine.get_rows([keys.policy(keys.session_key("s"))]) == [None]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (b"", FormatError),
        (b"\x02\x80", FormatError),
        (b"\x01\xc1", CorruptionError),
        (b"\x01\x81\xa4last\x00", CorruptionError),
        (b"\x01\x80", CorruptionError),
        (b"\x01\x82\xa4last\x01\xa5newly\x01", CorruptionError),
        (b"\x01\x90", CorruptionError),
    ],
)
def test_a_policy_that_cannot_be_decoded_is_not_treated_as_missing(
    store: Store, row: bytes, error: type[Exception]
) -> None:
    grow(store, "s", 3)
    grow(store, "t", 3)
    retention.set_policy(store, LAST_2)
    key = keys.session_key("s")
    damage(store, keys.policy(key), row)
    first, second = retention.plan(store)
    assert first.refused is not None
    assert keys.policy(key).key.hex() in first.refused
    assert (first.kept, first.removed) == ((), ())
    assert [one.revision for one in second.removed] == [1]
    report = retention.execute(store, retention.plan(store))
    assert (report.refused_count, report.refused[0].session) == (1, "s")
    assert (revisions(store, "s"), revisions(store, "t")) == ([3, 2, 1], [3, 2])
    damage(store, keys.policy(None), row)
    with pytest.raises(error):
        retention.plan(store)


def test_without_a_policy_everything_stays(store: Store) -> None:
    grow(store, "s", 3)
    plan = retention.plan(store)
    assert why(plan) == {3: ("head", "no policy"), 2: ("no policy",), 1: ("no policy",)}
    with nothing_written(store):
        assert retention.execute(store, plan).revisions_removed == 0


def test_the_policy_of_a_session_overrides_the_default(store: Store) -> None:
    for name in ("a", "b", "c"):
        grow(store, name, 3)
    retention.set_policy(store, Policy(last=1))
    retention.set_policy(store, Policy(last=2), "b")
    retention.set_policy(store, Policy(everything=True), "c")
    retention.execute(store, retention.plan(store))
    assert [revisions(store, name) for name in "abc"] == [[3], [3, 2], [3, 2, 1]]
    assert why(retention.plan(store, sessions=["c"]))[1] == ("everything",)


def test_a_given_policy_decides_in_place_of_the_stored_default(store: Store) -> None:
    grow(store, "s", 4)
    retention.set_policy(store, Policy(last=3))
    plan = saved(retention.plan(store, policy=LAST_2))
    assert going(plan) == [2, 1]
    report = retention.execute(store, plan)
    assert revisions(store, "s") == [4, 3]
    assert (report.own_policies, report.overridden) == (0, ())


def test_the_policy_stored_for_a_session_wins_over_a_given_one(store: Store) -> None:
    for name in ("plain", "precious"):
        grow(store, name, 4)
    retention.set_policy(store, Policy(everything=True), "precious")
    for plan in (retention.plan(store, policy=LAST_2), saved(retention.plan(store, policy=LAST_2))):
        assert [(part.session, part.given, part.own) for part in plan] == [
            ("plain", True, False),
            ("precious", False, True),
        ]
    named = retention.plan(store, sessions=["precious"], policy=LAST_2)
    assert why(named)[1] == ("everything",)
    report = retention.execute(store, retention.plan(store, policy=LAST_2))
    assert (report.own_policies, report.overridden) == (1, ())
    assert (revisions(store, "plain"), revisions(store, "precious")) == ([4, 3], [4, 3, 2, 1])


def test_overriding_stored_policies_must_be_asked_for_and_names_each_session(store: Store) -> None:
    for name in ("a", "b", "c"):
        grow(store, name, 4)
    retention.set_policy(store, Policy(everything=True), "b")
    retention.set_policy(store, Policy(last=1), "c")
    plan = saved(retention.plan(store, policy=LAST_2, override_policies=True))
    assert [(part.session, part.overridden) for part in plan] == [
        ("a", None),
        ("b", Policy(everything=True)),
        ("c", Policy(last=1)),
    ]
    report = retention.execute(store, plan)
    assert (report.overridden_count, report.own_policies) == (2, 0)
    assert [tuple(one) for one in report.overridden] == [
        ("b", Policy(everything=True)),
        ("c", Policy(last=1)),
    ]
    assert [revisions(store, name) for name in "abc"] == [[4, 3]] * 3
    for wrong in ({"override_policies": True}, {"policy": LAST_2, "override_policies": "no"}):
        with pytest.raises(InvalidInputError):
            retention.plan(store, **wrong)


def test_a_policy_stored_since_the_plan_was_made_keeps_the_session(store: Store) -> None:
    for name in ("late", "looser"):
        grow(store, name, 4)
    retention.set_policy(store, Policy(last=1), "looser")
    plan = saved(retention.plan(store, policy=LAST_2, override_policies=True))
    for name in ("late", "looser"):
        retention.set_policy(store, Policy(everything=True), name)
    report = retention.execute(store, plan)
    assert (report.revisions_removed, report.skipped_count) == (0, 4)
    assert "its own policy was changed" in report.skipped[0].why


def test_a_plan_that_does_not_say_what_it_overrides_overrides_nothing(store: Store) -> None:
    """Plans of earlier releases do not know stored policies that they override."""
    grow(store, "s", 4)
    lines = list(retention.plan(store, policy=LAST_2).to_json())
    old = json.loads(lines[1])
    del old["own"], old["overridden"]
    retention.set_policy(store, Policy(everything=True), "s")
    report = retention.execute(store, Plan.from_json([lines[0], json.dumps(old)]))
    assert (report.revisions_removed, report.skipped_count) == (0, 2)


# --- what stays -----------------------------------------------------------------------------


def test_the_last_revisions_stay(store: Store) -> None:
    grow(store, "s", 5)
    plan = retention.plan(store, policy=Policy(last=3))
    assert why(plan) == {5: ("head", "last"), 4: ("last",), 3: ("last",)}
    assert going(plan) == [2, 1]


TIMES = [
    "2023-12-30T10:10", "2023-12-31T23:59", "2024-01-01T00:00", "2024-01-01T00:59",
    "2024-01-01T01:00", "2024-01-07T23:59", "2024-01-08T00:00", "2024-02-29T12:00",
    "2024-02-29T12:30",
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        # Revisions 1 to 9 were committed at TIMES.
        (Policy(hourly=2), [9, 7]),
        (Policy(hourly=6), [9, 7, 6, 5, 4, 2]),
        (Policy(daily=2), [9, 7]),
        (Policy(daily=4), [9, 7, 6, 5]),
        # 2024-01-01 is a Monday: so is the 8th, and the 31st belongs to the week before.
        (Policy(weekly=3), [9, 7, 6]),
        (Policy(weekly=9), [9, 7, 6, 2]),
        (Policy(monthly=2), [9, 7]),
        (Policy(monthly=9), [9, 7, 2]),
        (Policy(yearly=1), [9]),
        (Policy(yearly=2), [9, 2]),
        (Policy(last=1, daily=2, yearly=2), [9, 7, 2]),
    ],
)
def test_the_newest_of_each_hour_day_week_month_and_year_stays(
    store: Store, clock: ManualClock, policy: Policy, kept: list[int]
) -> None:
    for number, time in enumerate(TIMES):
        at(clock, time)
        step(store, "s", f"n{number}")
    plan = retention.plan(store, policy=policy)
    assert sorted(why(plan), reverse=True) == kept
    assert sorted([*why(plan), *going(plan)]) == list(range(1, 10))


def test_newest_is_by_number_if_the_clock_went_back(store: Store, clock: ManualClock) -> None:
    for time in ("2024-01-02T10:00", "2024-01-02T11:00", "2024-01-01T09:00", "2024-01-02T08:00"):
        at(clock, time)
        grow(store, "s", 1)
    assert going(retention.plan(store, policy=Policy(daily=5))) == [2, 1]


def test_revisions_within_within_ms_stay(store: Store, clock: ManualClock) -> None:
    for _ in range(4):
        grow(store, "s", 1)
        clock.now_ms += HOUR_MS
    assert going(retention.plan(store, policy=Policy(within_ms=2 * HOUR_MS))) == [3, 2, 1]
    assert going(retention.plan(store, policy=Policy(within_ms=2 * HOUR_MS + 1))) == [2, 1]
    assert why(retention.plan(store, policy=Policy(within_ms=1))) == {4: ("head",)}


def test_labelled_revisions_stay_unless_the_policy_ignores_labels(store: Store) -> None:
    for number in range(4):
        step(store, "s", f"n{number}", label="first" if not number else None)
    store.session("s").label("also first", 1)
    assert why(retention.plan(store, policy=LAST_2))[1] == ("labelled also first", "labelled first")
    plan = retention.plan(store, policy=Policy(last=2, labelled=False))
    assert [(one.revision, one.labels) for one in only(plan).removed] == [
        (2, ()), (1, ("also first", "first")),
    ]  # fmt: skip
    report = retention.execute(store, plan)
    assert (report.revisions_removed, report.labels_removed) == (2, 2)
    with pytest.raises(RevisionNotFoundError):
        store.session("s").entry("first")
    rows = store.engine.scan_rows("history")
    assert [row.key for row in rows] == [keys.history(keys.session_key("s"), 3)]


def test_the_head_stays_whatever_its_age(store: Store, clock: ManualClock) -> None:
    grow(store, "s", 2)
    clock.now_ms += 1000 * DAY_MS
    plan = retention.plan(store, policy=Policy(within_ms=1))
    assert (why(plan), going(plan)) == ({2: ("head",)}, [1])
    retention.execute(store, plan)
    assert [node.id for node in store.session("s").nodes()] == ["n0", "n1"]


def test_a_protected_revision_stays_until_the_protection_expires(
    store: Store, clock: ManualClock
) -> None:
    grow(store, "s", 5)
    session = store.session("s")
    session.protect(1, by="run 1")
    session.protect(2, by="run 2", ttl_ms=HOUR_MS)
    session.protect(2, by="run 3")
    kept = why(retention.plan(store, policy=LAST_2))
    assert (kept[1], kept[2]) == (
        ("protected by run 1",),
        ("protected by run 2", "protected by run 3"),
    )
    clock.now_ms += HOUR_MS
    session.unprotect("run 3")
    retention.execute(store, retention.plan(store, policy=LAST_2))
    assert revisions(store, "s") == [5, 4, 1]


@pytest.mark.parametrize(
    "damaged", [b"", b"\0" * 16, b"\0" * 16 + b"\xc1", b"\0" * 16 + b"\x92\x01\xc0"]
)
def test_a_protection_that_cannot_be_read_keeps_everything(store: Store, damaged: bytes) -> None:
    grow(store, "s", 3)
    store.session("s").expire_in(0)
    place = keys.protection(keys.session_key("s"), 1, "run")
    damage(store, place, damaged)
    plan = retention.plan(store, policy=LAST_2)
    assert place.key.hex() in (only(plan).refused or "")
    assert (only(plan).deleted, only(plan).removed) == ((), ())
    retention.execute(store, plan)
    assert revisions(store, "s") == [3, 2, 1]


def test_the_revision_at_the_claim_of_a_lease_and_all_later_ones_stay(
    store: Store, clock: ManualClock
) -> None:
    for _ in range(4):
        grow(store, "s", 1)
        clock.now_ms += 10
    session = store.session("s")
    lease = session.claim_lease("worker", HOUR_MS)
    assert lease is not None
    for number in range(3):
        clock.now_ms += 10
        session.commit(Commit(append=[NodeDraft(f"m{number}", 1)], lease=lease))
    plan = retention.plan(store, policy=Policy(last=1))
    assert why(plan) == {
        7: ("head", "last", "lease"), 6: ("lease",), 5: ("lease",), 4: ("lease",),
    }  # fmt: skip
    clock.now_ms += HOUR_MS
    assert going(retention.plan(store, policy=Policy(last=1))) == [6, 5, 4, 3, 2, 1]


def test_revisions_committed_at_the_time_of_the_claim_and_the_one_before_stay(
    store: Store, clock: ManualClock
) -> None:
    grow(store, "s", 1)
    clock.now_ms += 1
    grow(store, "s", 2)
    assert store.session("s").claim_lease("worker", HOUR_MS)
    assert sorted(why(retention.plan(store, policy=Policy(last=1)))) == [1, 2, 3]


def test_a_pinned_revision_stays_until_the_pin_expires(store: Store, clock: ManualClock) -> None:
    grow(store, "s", 5)
    store.tag("release", store.session("s").entry(1).manifest)
    store.pin("resume", store.session("s").entry(2).manifest, ttl_ms=HOUR_MS)
    store.pin("gone", store.session("s").entry(3).manifest)
    store.unpin("gone")
    kept = why(retention.plan(store, policy=LAST_2))
    assert (kept[1], kept[2]) == (("pinned by release",), ("pinned by resume",))
    clock.now_ms += HOUR_MS
    assert going(retention.plan(store, policy=LAST_2)) == [3, 2]


def test_all_reasons_are_reported(store: Store, clock: ManualClock) -> None:
    step(store, "s", "a", label="mark")
    session = store.session("s")
    session.protect(by="run")
    store.tag("tag", session.entry().manifest)
    session.claim_lease("worker", HOUR_MS)
    policy = Policy(1, 1, 1, 1, 1, 1, within_ms=1, everything=True)
    assert why(retention.plan(store, policy=policy)) == {
        1: (
            "head", "everything", "last", "hourly", "daily", "weekly", "monthly", "yearly",
            "within", "labelled mark", "lease", "protected by run", "pinned by tag",
        )
    }  # fmt: skip


def test_the_plan_for_a_session_without_a_commit_removes_nothing(store: Store) -> None:
    store.create_session("s")
    plan = retention.plan(store, policy=LAST_2)
    assert only(plan) == SessionPlan("s", LAST_2, given=True, head_revision=0, head_manifest=None)
    with nothing_written(store):
        retention.execute(store, plan)


# --- what goes along ------------------------------------------------------------------------


def test_a_fork_outlives_the_revision_it_was_made_from(lmdb_store: Store) -> None:
    store = lmdb_store
    grow(store, "s", 5, text="long " * 500)
    store.fork("s", "fork", at=2)
    retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    expire_rows(store)
    gc.collect(store, grace_ms=0)
    fork = store.session("fork")
    assert [node.id for node in fork.nodes()] == ["n0", "n1"]
    head = fork.head()
    assert head is not None
    assert head.origin is not None
    assert (head.origin.session, head.origin.revision) == ("s", 2)
    with pytest.raises(RevisionNotFoundError):
        store.session("s").load(2)
    step(store, "fork", "mine")
    assert [node.id for node in fork.nodes()] == ["n0", "n1", "mine"]


def test_a_rewind_outlives_the_revision_it_went_back_to(lmdb_store: Store) -> None:
    store = lmdb_store
    grow(store, "s", 4)
    session = store.session("s")
    session.rewind(2)
    plan = retention.plan(store, policy=Policy(last=1))
    assert going(plan) == [4, 3, 2, 1]
    retention.execute(store, plan)
    expire_rows(store)
    gc.collect(store, grace_ms=0)
    assert [node.id for node in session.nodes()] == ["n0", "n1"]
    assert session.entry().rewound_to == 2
    step(store, "s", "again")
    assert [node.id for node in session.nodes()] == ["n0", "n1", "again"]


def test_a_turn_is_replayed_after_its_revision_was_removed(lmdb_store: Store) -> None:
    store = lmdb_store
    session = store.session("s")
    turns = [
        Commit(append=[NodeDraft(f"{n}.{m}", [n, m]) for m in range(3)], turn=f"{n}")
        for n in range(6)
    ]
    first = [session.commit(turn) for turn in turns[:4]]
    session.rewind(1)
    first += [session.commit(turn) for turn in turns[4:]]
    retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    expire_rows(store)
    gc.collect(store, grace_ms=0)
    again = Store(store.engine).session("s")
    # Nothing of the turns that the rewind left behind is stored any more.
    assert store.missing([first[2].manifest]) == [first[2].manifest]
    for turn, result in zip(turns, first, strict=True):
        assert again.commit(turn) == result._replace(replayed=True)
        with pytest.raises(TurnConflictError):
            again.commit(turn._replace(append=[NodeDraft("x", "other")]))
    assert revisions(store, "s") == [7]


def test_a_receipt_that_expires_while_its_revision_is_removed_is_not_written_again(
    store: Store,
) -> None:
    for number in range(2):
        draft = NodeDraft(f"n{number}", number)
        store.session("s").commit(Commit(append=[draft], turn=f"t{number}"))

    def forget() -> None:
        assert expire_rows(store, receipts_older_than_ms=0).receipts == 2

    late = interrupted(store, before=forget)
    report = retention.execute(late, retention.plan(store, policy=Policy(last=1)))
    assert report.revisions_removed == 1
    assert store.engine.scan_rows("receipts") == []


def test_a_damaged_receipt_keeps_its_revision(store: Store) -> None:
    for n in range(3):
        step(store, "s", f"n{n}", turn=f"t{n}")
    place = RowKey("receipts", keys.session_key("s") + b"t0")
    [row] = store.engine.get_rows([place])
    assert row is not None
    damage(store, place, row[:40])
    report = retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    assert (report.revisions_removed, report.skipped_count) == (1, 1)
    assert report.skipped[0].revision == 1
    assert revisions(store, "s") == [3, 1]


# --- sessions whose time is up --------------------------------------------------------------


def test_retention_deletes_an_expired_session(store: Store, clock: ManualClock) -> None:
    store.create_session("created", ttl_ms=HOUR_MS)
    for name in ("kept", "later", "gone"):
        grow(store, name, 2)
    store.session("gone").expire_in(HOUR_MS)
    store.session("later").expire_in(HOUR_MS + 1)
    assert [part.deleted for part in retention.plan(store)] == [(), (), (), ()]
    clock.now_ms += HOUR_MS
    plan = saved(retention.plan(store))
    gone = {part.session: part.deleted for part in plan if part.deleted}
    assert list(gone) == ["created", "gone"]
    assert gone["gone"] == ("expired at 2023-11-14T23:13:20+00:00",)
    report = retention.execute(store, plan)
    assert (report.sessions, report.sessions_deleted) == (4, 2)
    assert [info.meta.session for info in store.sessions()] == ["kept", "later"]
    with pytest.raises(SessionDeletedError):
        store.session("gone").head()


def test_an_expired_session_that_is_leased_or_protected_stays_and_says_why(
    store: Store, clock: ManualClock
) -> None:
    for name in ("leased", "protected"):
        grow(store, name, 3)
        store.session(name).expire_in(0)
    store.session("leased").claim_lease("worker", HOUR_MS)
    store.session("protected").protect(1, by="run", ttl_ms=HOUR_MS)
    plan = retention.plan(store, policy=LAST_2)
    assert [part.spared for part in plan] == [("lease held by worker",), ("protected by run",)]
    assert retention.execute(store, plan).sessions_deleted == 0
    # It is trimmed as any other: nothing was committed since the claim, and 1 is protected.
    assert [revisions(store, name) for name in ("leased", "protected")] == [[3, 2, 1], [3, 2, 1]]
    clock.now_ms += HOUR_MS
    assert retention.execute(store, retention.plan(store)).sessions_deleted == 2


def test_retention_deletes_an_idle_session_if_the_policy_has_idle_ms(
    store: Store, clock: ManualClock
) -> None:
    store.create_session("created")
    for name in ("busy", "idle", "labelled"):
        grow(store, name, 2)
    store.session("labelled").label("mark", 1)
    clock.now_ms += DAY_MS
    grow(store, "busy", 1)
    policy = Policy(last=9, idle_ms=DAY_MS)
    parts = {part.session: part for part in retention.plan(store, policy=policy)}
    assert parts["idle"].deleted == ("idle since 2023-11-14T22:13:20+00:00",)
    assert parts["labelled"].spared == ("labelled mark",)
    retention.execute(store, retention.plan(store, policy=policy))
    assert [info.meta.session for info in store.sessions()] == ["busy", "created", "labelled"]
    bare = policy._replace(labelled=False)
    assert retention.execute(store, retention.plan(store, policy=bare)).sessions_deleted == 1


def test_a_fork_outlives_its_expired_source(lmdb_store: Store) -> None:
    store = lmdb_store
    grow(store, "s", 40)
    store.fork("s", "fork", at=35)
    store.session("s").expire_in(0)
    assert retention.execute(store, retention.plan(store)).sessions_deleted == 1
    gc.collect(store, grace_ms=0)
    assert len(list(store.session("fork").nodes())) == 35
    step(store, "fork", "mine")
    assert store.session("fork").node("n3") is not None


# --- what is damaged ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        lambda key: RowKey("history", keys.history(key, 2)),
        lambda key: RowKey("history", keys.label(key, "mark")),
        lambda key: RowKey("heads", key),
        lambda key: RowKey("leases", key),
        keys.expiry,
    ],
)
def test_a_row_that_cannot_be_read_refuses_the_session_by_name(
    store: Store, place: Callable[[bytes], RowKey]
) -> None:
    for name in ("a", "s", "z"):
        grow(store, name, 4)
    row = place(keys.session_key("s"))
    damage(store, row)
    retention.set_policy(store, Policy(last=1))
    first, middle, last = retention.plan(store)
    assert middle.refused is not None
    assert f"row {row.key.hex()} of table {row.table}" in middle.refused
    assert (middle.deleted, middle.kept, middle.removed) == ((), (), ())
    assert (len(first.removed), len(last.removed)) == (3, 3)
    history = store.engine.scan_rows("history", start=b"s", stop=b"t")
    report = retention.execute(store, saved(retention.plan(store)))
    assert (report.refused_count, report.revisions_removed) == (1, 6)
    assert store.engine.scan_rows("history", start=b"s", stop=b"t") == history


def test_a_session_whose_id_only_a_damaged_row_has_is_refused_and_others_go_on(
    store: Store,
) -> None:
    for name in ("a", "b" * 500, "c"):
        grow(store, name, 3)
    key = keys.session_key("b" * 500)
    damage(store, RowKey("heads", key))
    first, middle, last = retention.plan(store, policy=Policy(last=1))
    assert (len(first.removed), len(last.removed)) == (2, 2)
    assert middle.session == key.hex()
    assert "heads" in (middle.refused or "")


def test_a_row_of_another_revision_is_not_believed(store: Store) -> None:
    grow(store, "s", 4)
    key = keys.session_key("s")
    [third] = store.engine.get_rows([RowKey("history", keys.history(key, 3))])
    assert third is not None
    damage(store, RowKey("history", keys.history(key, 1)), third)
    assert "of another revision" in (only(retention.plan(store, policy=LAST_2)).refused or "")


def test_a_long_history_is_planned_in_parts_and_damage_refuses_all_of_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_planning, "PART_REVISIONS", 4)
    monkeypatch.setattr(retention_planning, "_PAGE", 3)
    grow(store, "s", 20)
    policy = Policy(last=2, daily=1)
    parts = list(retention.plan(store, policy=policy))
    assert [part.part for part in parts] == list(range(len(parts)))
    assert len(parts) > 3
    assert all(len(part.kept) + len(part.removed) <= 6 for part in parts)
    assert [one.revision for part in parts for one in part.removed] == list(range(18, 0, -1))
    damaged = RowKey("history", keys.history(keys.session_key("s"), 1))
    [whole] = store.engine.get_rows([damaged])
    assert whole is not None
    damage(store, damaged)
    assert only(retention.plan(store, policy=policy)).removed == ()
    damage(store, damaged, whole)
    report = retention.execute(store, saved(retention.plan(store, policy=policy)))
    assert (report.sessions, report.revisions_removed) == (1, 18)
    assert revisions(store, "s") == [20, 19]


# --- plans ----------------------------------------------------------------------------------


def full_store(store: Store) -> None:
    for name in ("a", "é\n会话", "long " * 100):
        grow(store, name, 4)
        store.session(name).label("mark", 1)
        store.fork(name, f"fork of {name}", at=2)
    store.pin("pin", store.session("a").entry(3).manifest)
    store.unpin("pin")
    store.session("a").protect(2, by="run", ttl_ms=5)
    store.create_session("created", ttl_ms=0)
    retention.set_policy(store, Policy(last=1, labelled=False))


def test_a_plan_is_saved_and_read_as_it_was(store: Store) -> None:
    full_store(store)
    plan = retention.plan(store)
    lines = list(plan.to_json())
    assert json.loads(lines[0])["schema"] == "casstore.retention/1"
    read = Plan.from_json(lines)
    assert read.planned_at_ms == plan.planned_at_ms
    assert list(read) == list(plan) == list(read)
    assert list(read.to_json()) == lines
    # From an open file, in one go.
    running = Plan.from_json(iter(line + "\n" for line in lines))
    expected = len(going(plan))
    assert expected == retention.execute(store, running).revisions_removed > 5
    assert going(retention.plan(store)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [],
        lambda lines: lines[1:],
        lambda lines: ["{}", *lines[1:]],
        lambda lines: ['{"schema": "casstore.retention/2", "planned_at_ms": 1}'],
        lambda lines: ['{"schema": "casstore.retention/1"}'],
        lambda lines: [lines[0], "not json"],
        lambda lines: [lines[0], "[]"],
        lambda lines: [lines[0], "{}"],
        lambda lines: [lines[0], "[" * 100_000],
        lambda lines: [lines[0], lines[1].replace('"session"', '"name"')],
        lambda lines: [lines[0], lines[1].replace('"part": 0', '"part": "0"')],
        lambda lines: [lines[0], lines[1].replace('"revision": 4', '"revision": "4"')],
        lambda lines: [lines[0], lines[1].replace('"last": 1', '"last": 0')],
        lambda lines: [lines[0], lines[1].replace('"last": 1', '"newest": 1')],
        lambda lines: [lines[0], lines[1].replace('"labels": []', '"labels": [1]')],
        lambda lines: [lines[0], lines[1].replace('"revision": 3', '"revision": -3')],
        lambda lines: [lines[0], lines[1].replace('"manifest": "', '"manifest": "x')],
        lambda lines: [lines[0], lines[1].replace('"session": "s"', '"session": ""')],
        lambda lines: [lines[0], lines[1].replace('"last": 1', '"last": 1, "newest": 1')],
    ],
)
def test_an_invalid_plan_is_refused_and_removes_nothing(
    store: Store, change: Callable[[list[str]], list[str]]
) -> None:
    grow(store, "s", 4)
    lines = list(retention.plan(store, policy=Policy(last=1)).to_json())
    changed = change(lines)
    assert changed != lines
    with nothing_written(store), pytest.raises(InvalidInputError):
        retention.execute(store, Plan.from_json(changed))


def test_a_plan_reads_each_session_lazily(store: Store) -> None:
    for number in range(3):
        grow(store, f"s{number}", 3)
    running = iter(retention.plan(store, policy=Policy(last=1)))
    assert next(running).session == "s0"
    grow(store, "s1", 1)
    store.delete_session("s2")
    assert [part.head_revision for part in running] == [4]


def test_sessions_are_chosen_by_name_or_prefix(store: Store) -> None:
    # Of two ids too long for their keys, which begin alike for longer than a key tells.
    alike = "a" * 300 + "b" * 200
    for name in ("a", "ab", "b", "a" * 500, alike):
        grow(store, name, 1)

    def chosen(**which: Any) -> list[str]:
        return [part.session for part in retention.plan(store, policy=LAST_2, **which)]

    assert sorted(chosen()) == ["a", "a" * 500, alike, "ab", "b"]
    assert sorted(chosen(prefix="a")) == ["a", "a" * 500, alike, "ab"]
    assert chosen(prefix="a" * 400) == ["a" * 500]
    assert chosen(prefix="a" * 300 + "b") == [alike]
    assert chosen(sessions=["b", "a"]) == ["b", "a"]
    with pytest.raises(SessionNotFoundError):
        chosen(sessions=["nobody"])
    for bad in ({"sessions": "a"}, {"sessions": [""]}, {"prefix": 1}):
        with pytest.raises(InvalidInputError):
            chosen(**bad)


def test_an_old_plan_is_refused(store: Store, clock: ManualClock) -> None:
    grow(store, "s", 3)
    plan = saved(retention.plan(store, policy=Policy(last=1)))
    clock.now_ms += 7 * DAY_MS
    late = saved(plan)
    clock.now_ms += 1
    with pytest.raises(InvalidInputError, match="plan again"):
        retention.execute(store, plan)
    clock.now_ms -= 1
    assert retention.execute(store, late).revisions_removed == 2


def test_a_plan_is_refused_if_the_clock_was_set_back_since(
    store: Store, clock: ManualClock
) -> None:
    """By the new time marks would go while the plan still counts as young."""
    grow(store, "s", 4)
    plan = saved(retention.plan(store, policy=Policy(last=1)))
    clock.now_ms -= 20 * DAY_MS
    store.session("s").label("mark", 1)
    clock.now_ms += 9 * DAY_MS
    assert expire_rows(store).marks > 0
    with nothing_written(store), pytest.raises(InvalidInputError):
        retention.execute(store, plan)
    assert revisions(store, "s") == [4, 3, 2, 1]
    fresh = saved(retention.plan(store, policy=Policy(last=1)))
    clock.now_ms -= DAY_MS
    assert retention.execute(store, fresh).revisions_removed == 2


def test_progress_is_reported_and_may_stop_the_work(store: Store) -> None:
    for number in range(4):
        grow(store, f"s{number}", 3)
    told: list[Step] = []

    def stop(step: Step) -> None:
        told.append(step)
        if step.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retention.execute(store, retention.plan(store, policy=LAST_2), progress=stop)
    assert [(one.phase, one.unit) for one in told] == [("retain", "sessions")] * 2
    assert [len(revisions(store, f"s{number}")) for number in range(4)] == [2, 2, 3, 3]
    told.clear()
    report = retention.execute(store, retention.plan(store, policy=LAST_2, progress=told.append))
    assert (report.revisions_removed, [one.done for one in told]) == (2, [1, 2, 3, 4])


# --- who comes in between ---------------------------------------------------------------------


def label(store: Store) -> None:
    store.session("s").label("mark", 1)


def pin(store: Store) -> None:
    store.pin("pin", store.session("s").entry(1).manifest)


def fork(store: Store) -> None:
    store.fork("s", "fork", at=1)


def protect(store: Store) -> None:
    store.session("s").protect(1, by="run")


@pytest.mark.parametrize("when", ["after planning", "right before the write"])
@pytest.mark.parametrize(
    ("use", "why"),
    [
        (label, "it was labelled, protected or forked"),
        (pin, "it was pinned"),
        (fork, "it was labelled, protected or forked"),
        (protect, "it was labelled, protected or forked"),
    ],
)
def test_a_revision_labelled_pinned_forked_or_protected_after_the_plan_stays(
    store: Store, use: Callable[[Store], None], why: str, when: str
) -> None:
    grow(store, "s", 4)
    plan = saved(retention.plan(store, policy=Policy(last=1)))
    if when == "after planning":
        use(store)
        report = retention.execute(store, plan)
    else:
        report = retention.execute(interrupted(store, before=lambda: use(store)), plan)
    assert report.skipped == (retention.Skipped("s", 1, why),)
    assert (report.revisions_removed, revisions(store, "s")) == (2, [4, 1])


@pytest.mark.parametrize("use", [label, pin, fork, protect])
def test_a_use_that_ended_before_the_plan_does_not_keep_the_revision(
    store: Store, use: Callable[[Store], None]
) -> None:
    grow(store, "s", 4)
    use(store)
    store.session("s").unlabel("mark")
    store.unpin("pin")
    store.session("s").unprotect("run")
    policy = Policy(last=1)
    report = retention.execute(store, saved(retention.plan(store, sessions=["s"], policy=policy)))
    assert (report.skipped_count, revisions(store, "s")) == (0, [4])


def test_a_pin_made_while_a_plan_is_being_made_keeps_its_revision(
    store: Store, clock: ManualClock
) -> None:
    for name in ("a", "s"):
        grow(store, name, 3)
    running = iter(retention.plan(store, policy=Policy(last=1)))
    next(running)
    store.pin("pin", store.session("s").entry(1).manifest)
    assert [one.revision for one in next(running).removed] == [2]


def test_a_pin_made_while_a_plan_is_being_made_counts_also_if_the_clock_goes_back(
    store: Store, clock: ManualClock
) -> None:
    for name in ("a", "s"):
        grow(store, name, 3)
    running = iter(retention.plan(store, policy=Policy(last=1)))
    next(running)
    clock.now_ms -= HOUR_MS
    store.pin("pin", store.session("s").entry(1).manifest)
    assert [one.revision for one in next(running).removed] == [2]


@pytest.mark.parametrize("when", ["after planning", "right before the write"])
def test_commits_labels_and_leases_between_plan_and_execution_are_kept(
    store: Store, when: str
) -> None:
    grow(store, "s", 4)
    plan = saved(retention.plan(store, policy=Policy(last=1)))

    def come() -> None:
        step(store, "s", "new", label="new")
        assert store.session("s").claim_lease("worker", HOUR_MS)

    if when == "after planning":
        come()
    report = retention.execute(interrupted(store, before=come) if "before" in when else store, plan)
    assert (report.revisions_removed, revisions(store, "s")) == (3, [5, 4])
    assert store.session("s").entry("new").revision == 5


def test_a_label_that_moved_away_stays_with_the_other_revision(store: Store) -> None:
    grow(store, "s", 4)
    store.session("s").label("mark", 1)
    plan = saved(retention.plan(store, policy=Policy(last=1, labelled=False)))
    late = interrupted(store, before=lambda: store.session("s").label("mark"))
    report = retention.execute(late, plan)
    assert (report.revisions_removed, report.labels_removed) == (3, 0)
    assert store.session("s").entry("mark").revision == 4


def test_a_policy_changed_in_between_stops_the_removal(store: Store) -> None:
    grow(store, "s", 4)
    grow(store, "t", 4)
    retention.set_policy(store, Policy(last=1))
    plan = saved(retention.plan(store))
    retention.set_policy(store, Policy(everything=True), "s")
    report = retention.execute(store, plan)
    assert {one.why for one in report.skipped} == {"the policy was changed"}
    assert (revisions(store, "s"), revisions(store, "t")) == ([4, 3, 2, 1], [4])
    grow(store, "t", 4)
    late = interrupted(store, before=lambda: retention.set_policy(store, None))
    report = retention.execute(late, retention.plan(store, sessions=["t"]))
    assert revisions(store, "t") == [8, 7, 6, 5, 4]


def test_a_policy_of_its_own_set_right_before_the_write_stops_the_removal(store: Store) -> None:
    grow(store, "s", 4)
    retention.set_policy(store, Policy(last=1))
    keep_all = Policy(everything=True)
    late = interrupted(store, before=lambda: retention.set_policy(store, keep_all, "s"))
    report = retention.execute(late, retention.plan(store))
    assert {one.why for one in report.skipped} == {"the policy was changed"}
    assert revisions(store, "s") == [4, 3, 2, 1]


def test_a_revision_rewritten_right_before_the_write_is_not_the_one_that_was_planned(
    store: Store,
) -> None:
    grow(store, "s", 4)
    plan = saved(retention.plan(store, policy=Policy(last=1)))
    store.session("s").tombstone(["n0"])
    late = interrupted(store, before=lambda: vacuum.rewrite_hidden(store, "s"))
    report = retention.execute(late, plan)
    assert {one.why for one in report.skipped} == {"it is another one than was planned"}
    assert revisions(store, "s") == [4, 3, 2, 1]


@pytest.mark.parametrize("row", [b"\xff", b"\x01\xc1"], ids=["of a newer release", "damaged"])
@pytest.mark.parametrize("ending", ["trimmed", "idle"])
def test_a_policy_that_cannot_be_read_any_more_keeps_its_session_and_no_other(
    store: Store, clock: ManualClock, ending: str, row: bytes
) -> None:
    for name in ("s", "t"):
        grow(store, name, 2)
    retention.set_policy(store, Policy(last=1, idle_ms=DAY_MS if ending == "idle" else None))
    clock.now_ms += DAY_MS
    plan = saved(retention.plan(store))
    damage(store, keys.policy(keys.session_key("s")), row)
    report = retention.execute(store, plan)
    assert [one.session for one in report.skipped] == ["s"]
    assert revisions(store, "s") == [2, 1]
    assert (report.sessions_deleted, report.revisions_removed) == (
        (1, 0) if ending == "idle" else (0, 1)
    )


def test_a_revision_that_cannot_be_read_any_more_stays_and_no_other(store: Store) -> None:
    grow(store, "s", 4)
    plan = saved(retention.plan(store, policy=Policy(last=1)))
    damage(store, RowKey("history", keys.history(keys.session_key("s"), 2)))
    report = retention.execute(store, plan)
    assert [one.revision for one in report.skipped] == [2]
    assert report.revisions_removed == 2


def test_sessions_that_keep_changing_are_skipped_and_reported(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MAX_ATTEMPTS", 8)
    for name in ("going", "trimmed"):
        store.create_session(name)
        grow(store, name, 2)
    store.session("going").expire_in(0)
    retention.set_policy(store, Policy(last=1), "trimmed")
    retention.set_policy(store, Policy(last=1))
    plan = saved(retention.plan(store))

    class Restless:
        """Somebody changes what a write expects, each time before it comes."""

        writes = 0

        def write(self, write: Write) -> Any:
            self.writes += 1
            store.session("going").rename(f"name {self.writes}")
            # Says the same, and was written anew in between.
            retention.set_policy(store, None, "trimmed" if self.writes % 2 else None)
            retention.set_policy(store, Policy(last=1), None if self.writes % 2 else "trimmed")
            return store.engine.write(write)

        def __getattr__(self, name: str) -> Any:
            return getattr(store.engine, name)

    engine: Any = Restless()
    report = retention.execute(Store(engine, close=lambda: None), plan)
    reason = "kept changing during 8 attempts; try again when fewer writers change it"
    assert report.skipped == (
        retention.Skipped("going", None, f"session 'going' {reason}"),
        retention.Skipped("trimmed", 1, f"session 'trimmed' {reason}"),
    )
    assert [revisions(store, name) for name in ("going", "trimmed")] == [[2, 1]] * 2


def test_a_label_removed_after_the_plan_is_not_reported(store: Store) -> None:
    grow(store, "s", 2)
    store.session("s").label("mark", 1)
    plan = saved(retention.plan(store, policy=Policy(last=1, labelled=False)))
    store.session("s").unlabel("mark")
    report = retention.execute(store, plan)
    assert (report.revisions_removed, report.labels_removed) == (1, 0)


def test_a_plan_executed_twice_counts_the_revisions_already_gone(store: Store) -> None:
    grow(store, "s", 4)
    label(store)
    store.session("s").unlabel("mark")
    plan = saved(retention.plan(store, policy=Policy(last=1)))
    mark = keys.mark(keys.session_key("s"), 1)
    assert store.engine.get_rows([mark]) != [None]
    assert retention.execute(store, plan).already_gone == 0
    # What was noted of its use goes with a revision.
    assert store.engine.get_rows([mark]) == [None]
    assert retention.execute(store, plan).already_gone == 3


def test_a_report_lists_a_limited_number_and_counts_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LISTED", 2)
    for name in ("s", "t", "u", "v"):
        grow(store, name, 4)
    plan = saved(retention.plan(store, sessions=["s"], policy=Policy(last=1)))
    store.session("s").tombstone(["n0"])
    vacuum.rewrite_hidden(store, "s")
    report = retention.execute(store, plan)
    assert (report.skipped_count, len(report.skipped)) == (3, 2)
    for name in ("t", "u", "v"):
        damage(store, RowKey("history", keys.history(keys.session_key(name), 2)))
    report = retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    assert (report.refused_count, len(report.refused)) == (3, 2)


def extend(store: Store) -> None:
    store.session("s").expire_in(HOUR_MS)


def never(store: Store) -> None:
    store.session("s").expire_in(None)


def claim(store: Store) -> None:
    store.session("s").claim_lease("worker", HOUR_MS)


def commit(store: Store) -> None:
    step(store, "s", "new")


def label_head(store: Store) -> None:
    store.session("s").label("mark")


def attach(store: Store) -> None:
    store.session("s").attachments.intend("picture", uri="file:///picture")


@pytest.mark.parametrize("when", ["after planning", "right before the write"])
@pytest.mark.parametrize("ending", ["expired", "idle"])
@pytest.mark.parametrize(
    ("use", "why"),
    [
        (extend, "its time was extended"),
        (never, "its time was extended"),
        (claim, "its lease is live"),
        (commit, "something was committed"),
        (protect, "it was protected or labelled, or its attachments changed"),
        (label, "it was protected or labelled, or its attachments changed"),
        (label_head, "it was protected or labelled, or its attachments changed"),
        (attach, "it was protected or labelled, or its attachments changed"),
    ],
)
def test_a_session_used_after_the_plan_stays(
    store: Store, clock: ManualClock, use: Callable[[Store], None], why: str, when: str, ending: str
) -> None:
    grow(store, "s", 2)
    if ending == "expired":
        store.session("s").expire_in(0)
    else:
        retention.set_policy(store, Policy(last=1, idle_ms=DAY_MS))
        clock.now_ms += DAY_MS
        if use in (extend, never):
            return
    plan = saved(retention.plan(store))
    assert only(plan).deleted
    if when == "after planning":
        use(store)
        report = retention.execute(store, plan)
    else:
        report = retention.execute(interrupted(store, before=lambda: use(store)), plan)
    assert report.skipped == (retention.Skipped("s", None, why),)
    assert store.session("s").head() is not None


def test_an_idle_session_stays_if_the_policy_was_changed(store: Store, clock: ManualClock) -> None:
    grow(store, "s", 2)
    retention.set_policy(store, Policy(last=1, idle_ms=DAY_MS))
    clock.now_ms += DAY_MS
    plan = saved(retention.plan(store))
    retention.set_policy(store, Policy(last=1))
    report = retention.execute(store, plan)
    assert [one.why for one in report.skipped] == ["the policy was changed"]


def test_a_session_deleted_after_the_plan_counts_as_already_gone(store: Store) -> None:
    grow(store, "s", 3)
    grow(store, "t", 3)
    store.session("t").expire_in(0)
    plan = saved(retention.plan(store, policy=Policy(last=1)))
    store.delete_session("s")
    store.delete_session("t")
    with nothing_written(store):
        report = retention.execute(store, plan)
    assert (report.already_gone, report.revisions_removed, report.sessions_deleted) == (3, 0, 0)


def test_a_rewind_to_a_revision_that_goes_meanwhile_is_refused(lmdb_store: Store) -> None:
    store = lmdb_store
    grow(store, "s", 4, text="long " * 1000)
    step(store, "s", "other")

    def come() -> None:
        retention.execute(store, retention.plan(store, policy=Policy(last=1)))
        expire_rows(store)
        gc.collect(store, grace_ms=0)

    late = interrupted(store, before=come).session("s")
    with pytest.raises(RevisionNotFoundError):
        late.rewind(2)
    assert [node.id for node in store.session("s").nodes()] == ["n0", "n1", "n2", "n3", "other"]


def test_a_turn_repeated_while_its_revision_goes_is_answered(lmdb_store: Store) -> None:
    store = lmdb_store
    turn = Commit([NodeDraft("a", "long " * 1000)], turn="turn")
    first = store.session("s").commit(turn)
    store.session("s").commit(Commit(replace=[NodeDraft("b", 1)]))

    class Meanwhile:
        def get_many(self, digests: Any) -> Any:
            retention.execute(store, retention.plan(store, policy=Policy(last=1)))
            expire_rows(store)
            gc.collect(store, grace_ms=0)
            return store.engine.get_many(digests)

        def __getattr__(self, name: str) -> Any:
            return getattr(store.engine, name)

    late = Store(Meanwhile()).session("s")
    assert late.commit(turn) == first._replace(replayed=True)
    assert store.missing([first.manifest]) == [first.manifest]


def test_a_plan_for_another_store_removes_nothing(store: Store, clock: ManualClock) -> None:
    other = Store(MemoryEngine(clock=clock))
    step(other, "s", "a", text="other")
    grow(other, "s", 3)
    grow(store, "s", 3)
    plan = saved(retention.plan(other, policy=Policy(last=1)))
    with nothing_written(store):
        report = retention.execute(store, plan)
    assert report.revisions_removed == 0
    assert "another one than was planned" in report.skipped[0].why


def test_a_session_created_during_execution_is_not_mistaken_for_one_in_the_plan(
    store: Store, clock: ManualClock
) -> None:
    """A plan of another store names it, here it was not there, and then it is."""
    other = Store(MemoryEngine(clock=clock))
    grow(other, "s", 1)
    other.session("s").expire_in(0)
    plan = saved(retention.plan(other))

    class Appearing:
        """Stands before an engine; the session appears after it was first asked for."""

        def get_rows(self, places: Any) -> Any:
            found = store.engine.get_rows(places)
            if store.session("s").head() is None:
                grow(store, "s", 1)
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(store.engine, name)

    engine: Any = Appearing()
    report = retention.execute(Store(engine, close=lambda: None), plan)
    assert (report.already_gone, report.sessions_deleted) == (1, 0)
    assert revisions(store, "s") == [1]


# --- interrupted ------------------------------------------------------------------------------


def test_a_saved_plan_finishes_the_deletion_in_which_it_died(store: Store) -> None:
    step(store, "s", "a", turn="t", label="mark")
    store.session("s").expire_in(0)
    plan = saved(retention.plan(store))
    with pytest.raises(CrashError):
        retention.execute(crashing(store, 1), plan)
    assert store.engine.scan_rows("receipts") != []
    assert retention.execute(store, plan).already_gone == 1
    for table in ("history", "receipts"):
        assert store.engine.scan_rows(table) == []


def test_repeating_a_retention_run_that_crashed_at_any_write_finishes_it(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_DELETE_BATCH", 1)
    monkeypatch.setattr(retention, "_BATCH", 1)

    def make() -> Store:
        store = Store(MemoryEngine(clock=clock))
        for name in ("a", "b", "c"):
            grow(store, name, 4)
        store.create_session("d", ttl_ms=0, subjects=["anna"])
        step(store, "d", "x", turn="t", label="mark")
        store.session("d").attachments.intend("file", uri="s3://file")
        store.session("d").queue.enqueue([1])
        return store

    policy = Policy(last=2)

    def work(store: Store) -> None:
        retention.execute(store, retention.plan(store, policy=policy))

    count = 0
    for store in crash_everywhere(make, work):
        count += 1
        work(store)
        expire_rows(store)
        assert [revisions(store, name) for name in "abc"] == [[4, 3]] * 3
        assert list(store.sessions_about("anna")) == []
        left = {
            table: [row.key for row in store.engine.scan_rows(table, start=b"d", stop=b"e")]
            for table in ("heads", "history", "queue", "receipts", "sessions", "leases")
        }
        assert left == {table: [] for table in left}
        assert store.engine.scan_rows("retention", start=b"\x06", stop=b"\x07") == []
        assert len(store.engine.scan_rows("attachments")) == 1
    assert count > 12
