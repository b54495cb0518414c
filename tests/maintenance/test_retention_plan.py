"""Plans of retention against a model of their own, for any history, policy and use."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from casstore.engine.memory import MemoryEngine
from casstore.maintenance import retention
from casstore.maintenance.retention import Plan, Policy
from casstore.session.data import Commit
from casstore.store import Store
from casstore.testing import ManualClock
from tests.maintenance.lifetimes import DAY_MS, HOUR_MS, revisions

START_MS = 1_703_900_000_000  # two days before the end of a year


class Given(NamedTuple):
    """A history, and what is done with it before it is planned for."""

    #: How much later each revision was committed; the clock may go back.
    gaps_ms: list[int]
    #: Which revision has which label, who protects which for how long, which are pinned.
    labels: dict[str, int]
    protections: list[tuple[int, str, int | None]]
    pins: list[tuple[int, int | None]]
    #: The lease: claimed before this revision is committed, and its time.
    lease: tuple[int, int] | None
    later_ms: int
    policy: Policy


gaps = st.one_of(
    st.integers(0, 3),
    st.integers(0, 3 * HOUR_MS),
    st.integers(-2 * DAY_MS, 40 * DAY_MS),
    st.sampled_from([HOUR_MS, DAY_MS, 7 * DAY_MS]),
)
numbers = st.integers(1, 12)
times = st.one_of(st.none(), st.integers(1, 40 * DAY_MS))
counts = st.one_of(st.just(0), st.integers(0, 4))


@st.composite
def histories(draw: st.DrawFn) -> Given:
    policy = Policy(
        draw(counts), draw(counts), draw(counts), draw(counts), draw(counts), draw(counts),
        draw(st.one_of(st.none(), st.integers(1, 30 * DAY_MS))),
        draw(st.booleans()),
        draw(st.sampled_from([False, False, False, False, True])),
    )  # fmt: skip
    if not any(policy[:6]) and policy.within_ms is None and not policy.everything:
        policy = policy._replace(last=1)
    return Given(
        draw(st.lists(gaps, min_size=1, max_size=12)),
        draw(st.dictionaries(st.sampled_from("abc"), numbers, max_size=3)),
        draw(st.lists(st.tuples(numbers, st.sampled_from(["r1", "r2"]), times), max_size=3)),
        draw(st.lists(st.tuples(numbers, times), max_size=2)),
        draw(st.one_of(st.none(), st.tuples(numbers, st.integers(1, 5 * DAY_MS)))),
        draw(gaps.filter(lambda gap: gap >= 0)),
        policy,
    )


class Made(NamedTuple):
    """What came of it: the store, and what the model needs to know."""

    store: Store
    now_ms: int
    committed: dict[int, int]
    labels: dict[int, set[str]]
    protections: dict[tuple[int, str], int | None]
    pins: dict[int, int | None]
    lease: tuple[int, int] | None


def make(case: Given) -> Made:
    clock = ManualClock()
    clock.now_ms = START_MS
    store = Store(MemoryEngine(clock=clock))
    session = store.session("s")
    committed: dict[int, int] = {}
    held: Any = None
    lease = None
    for number, gap in enumerate(case.gaps_ms, 1):
        clock.now_ms += gap
        if case.lease is not None and case.lease[0] == number and number > 1:
            found = session.claim_lease("worker", case.lease[1] + 400 * DAY_MS)
            assert found is not None
            held = found
            lease = (found.claimed_at_ms, found.expires_at_ms)
        session.commit(Commit(lease=held))
        committed[number] = clock.now_ms
    labels: dict[int, set[str]] = {}
    for label, number in case.labels.items():
        if number in committed:
            session.label(label, number)
            labels.setdefault(number, set()).add(label)
    protections = {}
    for number, by, ttl in case.protections:
        if number in committed:
            protections[number, by] = session.protect(number, by=by, ttl_ms=ttl).until_ms
    pins = {}
    for number, ttl in case.pins:
        if number in committed:
            pin = store.pin(f"pin {number}", session.entry(number).manifest, ttl_ms=ttl)
            pins[number] = pin.expires_at_ms
    clock.now_ms += case.later_ms
    return Made(store, clock.now_ms, committed, labels, protections, pins, lease)


def bucket(kind: str, time_ms: int) -> str:
    when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    if kind == "weekly":
        year, week, _ = when.isocalendar()
        return f"{year} week {week}"
    return when.strftime(
        {"hourly": "%Y%m%d%H", "daily": "%Y%m%d", "monthly": "%Y%m", "yearly": "%Y"}[kind]
    )


def expected(made: Made, policy: Policy) -> dict[int, set[str]]:
    """Why each revision stays, found out one reason after the other."""
    newest_first = sorted(made.committed, reverse=True)
    why: dict[int, set[str]] = {number: set() for number in newest_first}
    why[newest_first[0]].add("head")
    for number in newest_first[: policy.last]:
        why[number].add("last")
    for kind in ("hourly", "daily", "weekly", "monthly", "yearly"):
        in_order = list(dict.fromkeys(bucket(kind, made.committed[n]) for n in newest_first))
        for wanted in in_order[: getattr(policy, kind)]:
            members = [n for n in newest_first if bucket(kind, made.committed[n]) == wanted]
            why[max(members)].add(kind)
    for number, time_ms in made.committed.items():
        if policy.everything:
            why[number].add("everything")
        if policy.within_ms is not None and made.now_ms - time_ms < policy.within_ms:
            why[number].add("within")
        if policy.labelled:
            why[number] |= {f"labelled {label}" for label in made.labels.get(number, ())}
    for (number, by), until_ms in made.protections.items():
        if until_ms is None or made.now_ms < until_ms:
            why[number].add(f"protected by {by}")
    # The manifests of commits that change nothing are one and the same.
    for number, until_ms in made.pins.items():
        if until_ms is None or made.now_ms < until_ms:
            manifest = made.store.session("s").entry(number).manifest
            for other in newest_first:
                if made.store.session("s").entry(other).manifest == manifest:
                    why[other].add("pinned")
    if made.lease is not None and made.now_ms < made.lease[1]:
        earlier = [n for n in newest_first if made.committed[n] < made.lease[0]]
        for number in newest_first:
            if not earlier or number >= max(earlier):
                why[number].add("lease")
    return why


def told(plan: Plan) -> tuple[dict[int, set[str]], list[int]]:
    [session] = plan
    kept = {
        one.revision: {"pinned" if why.startswith("pinned by") else why for why in one.reasons}
        for one in session.kept
    }
    return kept, [one.revision for one in session.removed]


@settings(max_examples=120, deadline=None)
@given(histories())
@example(Given([0, 0, 0], {}, [], [], None, 0, Policy(hourly=1)))
@example(Given([0, 1, 1], {}, [], [], (2, 1), 0, Policy(last=1)))
def test_a_plan_keeps_what_the_model_keeps_and_for_the_same_reasons(case: Given) -> None:
    made = make(case)
    retention.set_policy(made.store, case.policy)
    plan = Plan.from_json(list(retention.plan(made.store).to_json()))
    kept, removed = told(plan)
    why = expected(made, case.policy)
    assert kept == {number: reasons for number, reasons in why.items() if reasons}
    assert max(made.committed) in kept
    assert sorted([*kept, *removed]) == sorted(made.committed)
    report = retention.execute(made.store, plan)
    assert (report.revisions_removed, report.skipped_count) == (len(removed), 0)
    assert set(revisions(made.store, "s")) == set(kept)
    # At the same time nothing more goes.
    again, more = told(retention.plan(made.store))
    assert (set(again), more) == (set(kept), [])
    labels = {label for number in kept for label in made.labels.get(number, ())}
    session = made.store.session("s")
    assert labels == {label for entry in session.history() for label in entry.labels}
