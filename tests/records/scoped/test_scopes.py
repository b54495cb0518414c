"""One scope: compare and swap, time to live, quotas, listings of long keys; beside a commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, PutRow, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    LimitError,
    StateConflictError,
    StateRefusedError,
)
from casstore.maintenance import gc, progress
from casstore.maintenance.expiring import expire_rows
from casstore.records.scoped import (
    Quota,
    Reason,
    Scope,
    ScopedState,
    StateEntry,
    StatePolicy,
    changes,
)
from casstore.session.data import Commit, NodeDraft
from casstore.session.records import Record, Table
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.one_transaction import contents
from tests.records.scoped.contexts import ALL, HERE


def actor_scope(store: Store, quota: Quota | None = None) -> Scope:
    policy = StatePolicy() if quota is None else StatePolicy(quotas={"actor": quota})
    return ScopedState(store).scope(HERE, "actor", policy)


def found(scope: Scope, key: str) -> StateEntry:
    entry = scope.find(key)
    assert entry is not None
    return entry


def meanwhile(store: Store, act: Callable[[], Any]) -> None:
    """Let something happen just before the next write of the store."""
    engine: Any = store.engine
    whole = engine.write

    def write(change: Write) -> Any:
        engine.write = whole
        act()
        return whole(change)

    engine.write = write


# --- compare and swap -------------------------------------------------------------------------


def test_swap_and_delete_require_the_expected_version(store: Store) -> None:
    scope = actor_scope(store)
    first = scope.swap("k", 1, expected=None)
    second = scope.swap("k", 2, expected=first.version)
    for stale in (first.version, None, "", "nonsense"):
        with pytest.raises(StateConflictError) as conflict:
            scope.swap("k", 3, expected=stale)
        assert (conflict.value.expected, conflict.value.actual) == (stale, second.version)
    with pytest.raises(StateConflictError):
        scope.delete("k", expected=first.version)
    assert scope.find("k") == second
    assert scope.delete("k", expected=second.version)
    with pytest.raises(StateConflictError) as conflict:
        scope.swap("k", 3, expected=second.version)
    assert conflict.value.actual is None
    with pytest.raises(StateConflictError):
        scope.delete("k", expected=second.version)


def test_a_version_is_never_reused(store: Store) -> None:
    scope = actor_scope(store)
    versions = []
    for _ in range(3):
        versions += [scope.put("k", 1).version, scope.put("k", 1).version]
        scope.delete("k")
        assert scope.usage() == (0, 0)
    assert len(set(versions)) == 6


def test_a_change_between_reading_and_writing_is_noticed(store: Store) -> None:
    scope = actor_scope(store)
    version = scope.put("k", 1).version
    meanwhile(store, lambda: scope.put("k", 2))
    with pytest.raises(StateConflictError):
        scope.swap("k", 3, expected=version)
    assert found(scope, "k").value == 2
    # The last one wins if nothing was expected.
    meanwhile(store, lambda: scope.put("k", 4))
    scope.put("k", 5)
    assert found(scope, "k").value == 5
    meanwhile(store, lambda: scope.delete("k"))
    assert not scope.delete("k")
    assert scope.usage() == (0, 0)


def test_a_counter_loses_nothing_however_many_count(store: Store) -> None:
    scope = actor_scope(store)
    scope.put("n", 0)

    def count(_: int) -> None:
        for _ in range(5):
            while True:
                entry = found(scope, "n")
                try:
                    scope.swap("n", entry.value + 1, expected=entry.version)
                except StateConflictError:
                    continue
                break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert found(scope, "n").value == 20


# --- time to live -----------------------------------------------------------------------------


def test_an_expired_value_is_invisible_immediately(store: Store, clock: Clock) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "actor")
    entry = scope.put("k", 1, ttl_ms=1000)
    scope.put("other", 2)
    assert entry.expires_ms == clock.now_ms + 1000
    clock.move(999)
    assert scope.find("k") == entry
    clock.move(1)
    assert scope.find("k") is None
    assert scope.origin("k") is None
    assert scope.list_keys().keys == ["other"]
    assert states.snapshot(HERE)["actor"] == {"other": 2}
    assert not scope.delete("k")
    with pytest.raises(StateConflictError):
        scope.swap("k", 2, expected=entry.version)
    again = scope.swap("k", 2, expected=None)
    assert (again.created_ms, again.expires_ms) == (clock.now_ms, None)
    assert scope.usage().keys == 2


def test_putting_again_restarts_the_time_to_live_or_removes_it(store: Store, clock: Clock) -> None:
    scope = actor_scope(store)
    scope.put("k", 1, ttl_ms=1000)
    scope.put("stays", 1, ttl_ms=1000)
    clock.move(900)
    scope.put("k", 2, ttl_ms=1000)
    scope.put("stays", 2)
    clock.move(900)
    assert scope.list_keys().keys == ["k", "stays"]
    clock.move(100)
    assert scope.list_keys().keys == ["stays"]


@pytest.mark.parametrize("ttl_ms", [0, -1, 1.5, "1", True, 10**18])
def test_a_time_to_live_is_a_whole_number_of_milliseconds(store: Store, ttl_ms: Any) -> None:
    with pytest.raises(InvalidInputError):
        actor_scope(store).put("k", 1, ttl_ms=ttl_ms)


def test_expire_rows_removes_only_expired_values(store: Store, clock: Clock) -> None:
    states = ScopedState(store)
    long = {"text": "x" * 5000}
    states.scope(HERE, "actor").put("stays", long)
    kept = contents(store)[0]
    for scope in ("actor", "subject", "runner"):
        for n in range(3):
            states.scope(HERE, scope, ALL).put(f"{scope}{n}", [scope, n, long], ttl_ms=1000 + n)
    assert expire_rows(store).records == 0
    clock.move(1001)
    report = expire_rows(store)
    # Six values, and what led to those of the subject from the subject.
    assert report.records == 8
    assert states.scope(HERE, "actor").usage().keys == 2
    clock.move(1000)
    assert expire_rows(store).records == 4
    assert expire_rows(store).records == 0
    assert states.snapshot(HERE, ALL)["actor"] == {"stays": long}
    assert contents(store)[0] == kept
    usage = states.scope(HERE, "actor").usage()
    assert usage == (1, len("stays") + len('{"text": ""}') + 5000)


def test_a_value_rewritten_while_expired_values_are_removed_stays(
    store: Store, clock: Clock
) -> None:
    scope = actor_scope(store)
    scope.put("a", 1, ttl_ms=10)
    scope.put("b", 1, ttl_ms=10)
    clock.move(10)
    meanwhile(store, lambda: scope.put("a", 2))
    # Found again as its new self, whose time is not up.
    assert expire_rows(store).records == 1
    assert found(scope, "a").value == 2
    assert scope.usage().keys == 1


def test_expiry_can_be_stopped_and_goes_on(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REPORT_EVERY", 40)
    monkeypatch.setattr(changes, "REMOVED_AT_ONCE", 16)
    scope = actor_scope(store)
    for n in range(60):
        scope.put(f"{n:04}", n, ttl_ms=10)
    clock.move(10)

    class Stop(Exception):
        pass

    def stop(_: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        expire_rows(store, progress=stop)
    assert scope.list_keys().keys == []
    left = scope.usage().keys
    assert 0 < left <= 60
    engine: Any = store.engine
    whole = engine.write
    removed: list[int] = []

    def write(change: Write) -> Any:
        # Of each value its row and what leads to it, and the row of the scope.
        removed.append(len(change.rows) // 2)
        return whole(change)

    engine.write = write
    assert expire_rows(store).records == left
    engine.write = whole
    # A few at a time, so that no writer waits long.
    assert max(removed) <= 16 < sum(removed)
    assert scope.usage() == (0, 0)
    assert not any(rows for name, rows in contents(store)[:-1] if name == "records")


# --- quotas -----------------------------------------------------------------------------------


def test_a_quota_of_keys_and_bytes_is_exact(store: Store) -> None:
    scope = actor_scope(store, Quota(max_keys=3, max_bytes=30))
    for key in "abc":
        scope.put(key, 1)
    with pytest.raises(StateRefusedError) as refused:
        scope.put("d", 1)
    assert refused.value.reason == Reason.TOO_MANY_KEYS
    assert scope.usage() == (3, 6)
    # One key, two quotes and the letters: 30 in all.
    scope.put("a", "x" * 23)
    assert scope.usage() == (3, 30)
    with pytest.raises(StateRefusedError) as refused:
        scope.put("a", "x" * 24)
    assert refused.value.reason == Reason.TOO_MANY_BYTES
    assert "30" in str(refused.value)
    assert found(scope, "a").value == "x" * 23
    scope.delete("b")
    with pytest.raises(StateRefusedError):
        scope.put("ä", 1)
    scope.put("d", 1)
    assert scope.list_keys().keys == ["a", "c", "d"]


def test_a_scope_above_a_lowered_quota_can_shrink_but_not_grow(store: Store) -> None:
    for key in ("a", "b", "c"):
        actor_scope(store).put(key, "xxxx")
    scope = actor_scope(store, Quota(max_keys=1, max_bytes=5))
    scope.put("a", "xxx")
    with pytest.raises(StateRefusedError):
        scope.put("a", "x" * 9)
    with pytest.raises(StateRefusedError):
        scope.put("d", "")
    assert scope.delete("b")


def test_a_quota_counts_each_scope_for_itself(store: Store) -> None:
    states = ScopedState(store)
    policy = ALL._replace(quotas={"actor": Quota(max_keys=1)})
    for actor in ("ann", "bob"):
        context = HERE._replace(actor_id=actor)
        assert states.update(context, policy, "actor", "a", 1).ok
        assert states.update(context, policy, "actor", "b", 1).reason == Reason.TOO_MANY_KEYS
        assert states.update(context, policy, "runner", actor, 1).ok


def test_expired_values_do_not_count_against_the_quota(store: Store, clock: Clock) -> None:
    scope = actor_scope(store, Quota(max_keys=3))
    scope.put("a", 1, ttl_ms=10)
    scope.put("b", 1, ttl_ms=20)
    scope.put("c", 1)
    clock.move(10)
    scope.put("d", 1)
    assert scope.list_keys().keys == ["b", "c", "d"]
    assert scope.usage().keys == 3
    with pytest.raises(StateRefusedError):
        scope.put("e", 1)
    clock.move(10)
    scope.put("b", 2)
    assert scope.list_keys().keys == ["b", "c", "d"]


def test_any_number_of_expired_values_stops_counting_against_the_quota_at_once(
    store: Store, clock: Clock
) -> None:
    quota = Quota(max_bytes=10_000)
    actor = ScopedState(store).scope(HERE, "actor", StatePolicy(quotas={"actor": quota}))
    for number in range(changes.REMOVED_AT_ONCE + 100):
        actor.put(f"k{number:03}", 1234567, ttl_ms=10)
    actor.put("stays", 1)
    clock.move(10)
    actor.put("large", "x" * 9_900)
    assert actor.list_keys().keys == ["large", "stays"]
    assert tuple(actor.usage()) == (2, len("largestays") + 9_902 + 1)


def test_replacing_an_expired_value_frees_its_size_once(store: Store, clock: Clock) -> None:
    scope = actor_scope(store, Quota(max_bytes=30))
    for key in ("a", "b"):
        scope.put(key, "x" * 10, ttl_ms=10)
    clock.move(10)
    scope.put("a", "x" * 25)
    assert scope.usage() == (1, 28)
    assert scope.list_keys().keys == ["a"]


@pytest.mark.parametrize("quota", [Quota(max_keys=5), Quota(max_bytes=5 * len("k00") + 5)])
def test_a_quota_holds_with_many_writers(store: Store, quota: Quota) -> None:
    barrier = threading.Barrier(6)

    def write(number: int) -> list[bool]:
        scope = actor_scope(store, quota)
        barrier.wait(60)
        done = []
        for n in range(4):
            try:
                scope.put(f"k{number}{n}", 1)
            except StateRefusedError:
                done.append(False)
            else:
                done.append(True)
        return done

    with ThreadPoolExecutor(6) as pool:
        outcomes = [one for done in pool.map(write, range(6)) for one in done]
    assert outcomes.count(True) == 5 == len(actor_scope(store).list_keys().keys)
    assert actor_scope(store).usage() == (5, 20)


@pytest.mark.parametrize(
    "policy",
    [
        StatePolicy(quotas={"galaxy": Quota()}), StatePolicy(quotas={"actor": Quota(-1)}),
        StatePolicy(quotas={"actor": Quota(1.5)}), StatePolicy(scopes=("galaxy",)),  # type: ignore[arg-type]
        StatePolicy(enabled=1), StatePolicy(scopes="actor"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_invalid_policy_is_refused_when_it_is_frozen(store: Store, policy: StatePolicy) -> None:
    with pytest.raises(InvalidInputError):
        ScopedState(store).begin_run("r", HERE, policy, caller="me")


# --- keys and listings ------------------------------------------------------------------------

keys = st.text("ab\0\x01é", min_size=1, max_size=6) | st.builds(
    lambda start, end: start * 45 + end,
    st.sampled_from(["xxx", "x\0x", "漢"]),
    st.text("ab", max_size=60),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "delete"]), keys), max_size=25),
    st.integers(1, 4),
    st.text("abx漢", max_size=3),
)
def test_listings_are_those_of_a_sorted_dict(
    steps: list[tuple[str, str]], limit: int, prefix: str
) -> None:
    with Store(MemoryEngine()) as store:
        scope = actor_scope(store)
        model: dict[str, int] = {}
        for number, (step, key) in enumerate(steps):
            if step == "put":
                scope.put(key, number)
                model[key] = number
            else:
                assert scope.delete(key) == (model.pop(key, None) is not None)
        assert ScopedState(store).snapshot(HERE)["actor"] == model
        assert scope.usage().keys == len(model)
        wanted = sorted([key for key in model if key.startswith(prefix)])
        listed: list[str] = []
        cursor = None
        for _ in range(len(wanted) + 1):
            page = scope.list_keys(prefix, limit=limit, after=cursor)
            listed += page.keys
            assert page.has_more == (page.cursor is not None) == (len(listed) < len(wanted))
            cursor = page.cursor
            if cursor is None:
                break
        assert listed == wanted


def test_long_keys_that_begin_alike_are_listed_in_order(store: Store) -> None:
    scope = actor_scope(store)
    names = [f"{'x' * 140}{n * 7919 % 30:02}{'y' * (n % 2 * 90)}" for n in range(30)]
    for name in names:
        scope.put(name, 1)
    listed: list[str] = []
    for _ in range(8):
        listed += scope.list_keys("x", limit=4, after=listed[-1] if listed else None).keys
    assert listed == sorted(names)
    assert scope.list_keys("x" * 140 + "1").keys == [n for n in listed if n[140] == "1"]


# --- snapshots at one moment --------------------------------------------------------------------


def test_a_snapshot_is_of_one_moment(store: Store) -> None:
    """A writer moves a token from scope to scope and key to key: there is always one of it."""
    states = ScopedState(store)
    actor, runner = states.scope(HERE, "actor", ALL), states.scope(HERE, "runner", ALL)
    for n in range(3):
        actor.put(f"k{n}", 0)
        runner.put(f"k{n}", 0)
    engine: Any = store.engine
    whole = engine.get_rows
    moves = iter(range(50))

    def get_rows(asked: Any) -> Any:
        # Between any two reads of the snapshot something comes and something goes.
        engine.get_rows = whole
        n = next(moves)
        if n < 6:
            actor.put(f"new{n}", n)
            actor.delete(f"new{n - 1}")
            runner.put("k0", n)
        engine.get_rows = get_rows
        return whole(asked)

    engine.get_rows = get_rows
    told = states.snapshot(HERE, ALL)
    engine.get_rows = whole
    # The last move came before the last read: the snapshot is what it left.
    assert told == states.snapshot(HERE, ALL)
    new = [key for key in told["actor"] if key.startswith("new")]
    assert new == [f"new{told['runner']['k0']}"]


def test_a_snapshot_above_max_bytes_is_refused(store: Store) -> None:
    states = ScopedState(store)
    for n in range(20):
        states.scope(HERE, "actor").put(f"k{n}", "x" * 1000)
    states.snapshot(HERE, max_bytes=30_000)
    with pytest.raises(LimitError):
        states.snapshot(HERE, max_bytes=20_000)
    with pytest.raises(LimitError):
        states.snapshot(HERE, max_bytes=1000)
    assert len(states.snapshot(HERE, prefix="k1", max_bytes=20_000)["actor"]) == 11
    # The keys take room as well, wanted or not.
    with pytest.raises(LimitError):
        states.snapshot(HERE, prefix="none", max_bytes=1000)


# --- what rows link to ----------------------------------------------------------------------------


def test_long_values_are_kept_by_gc_and_go_with_their_row(store: Store) -> None:
    scope = actor_scope(store)
    long = [{"text": "word " * 300, "n": n} for n in range(50)]
    scope.put("k", long)
    gc.collect(store, grace_ms=0)
    assert found(scope, "k").value == long
    scope.put("k", 1)
    gc.collect(store, grace_ms=0)
    assert found(scope, "k").value == 1
    assert contents(store)[-1] in ((), contents(store)[-1][:1])


def test_a_value_replaced_and_collected_while_it_is_read_is_read_again(store: Store) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "actor")
    reads: list[Callable[[], Any]] = [
        lambda: found(scope, "k").value,
        lambda: states.snapshot(HERE)["actor"]["k"],
    ]
    for read in reads:
        scope.put("k", ["old", "x" * 3000])
        engine: Any = store.engine
        whole = engine.get_many

        def get_many(
            asked: Any, engine: Any = engine, whole: Any = whole, scope: Scope = scope
        ) -> Any:
            engine.get_many = whole
            scope.put("k", ["new", "y" * 3000])
            gc.collect(store, grace_ms=0)
            return whole(asked)

        engine.get_many = get_many
        assert read()[0] == "new"


@pytest.mark.leaves_damage
def test_a_value_that_is_lost_is_damage_and_not_missing(store: Store) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "actor")
    scope.put("k", ["x" * 3000])
    digests = contents(store)[-1]
    store.engine.write(Write(deletes=list(digests)))
    with pytest.raises(CorruptionError):
        scope.find("k")
    with pytest.raises(CorruptionError):
        states.snapshot(HERE)


@pytest.mark.leaves_damage
@pytest.mark.parametrize("table", ["scoped.values", "scoped.scopes"])
def test_a_row_that_cannot_be_read_is_reported_and_never_skipped(store: Store, table: str) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "actor")
    scope.put("k", 1)
    rows = [row for row in store.engine.scan_rows("records") if row.key.startswith(table.encode())]
    store.engine.write(Write(rows=[PutRow("records", rows[0].key, b"\0\x93\1\2\3")]))
    for call in (
        lambda: scope.find("k"), lambda: scope.put("k", 2), lambda: scope.delete("k"),
        lambda: states.snapshot(HERE), lambda: scope.put("k", 2),
    ):  # fmt: skip
        with pytest.raises(CorruptionError):
            call()


@pytest.mark.leaves_damage
def test_values_without_the_row_of_their_scope_are_damage(store: Store) -> None:
    scope = actor_scope(store)
    scope.put("k", 1)
    rows = [row for row in store.engine.scan_rows("records") if b"scoped.scopes" in row.key]
    store.engine.write(Write(rows=[DeleteRow("records", rows[0].key)]))
    with pytest.raises(CorruptionError):
        scope.delete("k")


# --- beside the commit of a session ---------------------------------------------------------------


def test_a_value_may_change_with_a_turn_or_not_at_all(store: Store) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "conversation")
    session = store.session("s")
    session.commit(
        Commit(
            append=[NodeDraft("a", "hello")],
            also=scope.prepare_put("covers_until", "a"),
        )
    )
    assert found(scope, "covers_until").value == "a"
    late = scope.prepare_put("covers_until", "b")
    scope.put("covers_until", "c")
    before = contents(store)
    with pytest.raises(ConditionFailedError):
        session.commit(Commit(append=[NodeDraft("b", 1)], also=late))
    assert contents(store) == before


def test_value_rows_stay_below_512_bytes_whatever_they_hold(store: Store) -> None:
    """A row longer than a page of its table would cost a page of its own at every change."""
    states = ScopedState(store)
    context = HERE._replace(runner_id="r" * 255, bot_id="b" * 255, conversation_id="c" * 255)
    for n, value in enumerate(["x" * 400, "y" * 100_000, [1.5] * 90, {"k": ["z" * 200] * 3}]):
        states.scope(context, "conversation").put(f"k{n}", value)
    table = Table(store, "scoped.values", 3)
    rows: list[Record] = list(table.scan())
    assert len(rows) == 4
    assert max(len(row.row) for row in rows) < 512
    assert all(row.is_inline for row in rows)
