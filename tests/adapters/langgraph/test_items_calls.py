"""Long-term memory: collected calls, the sweeper, setup, expired items, filters, order by time."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

from langgraph.store.base import Op, PutOp, Result, TTLConfig

from casstore.adapters.langgraph import CasstoreStore, expiry
from casstore.adapters.langgraph.item_records import items_table
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import ClosedError, InvalidInputError
from casstore.maintenance.check import check
from casstore.maintenance.copy import copy
from casstore.store import Store
from casstore.testing import ManualClock

_TTL: TTLConfig = {"default_ttl": 5}


class Counting(CasstoreStore):
    """Records the operations of each batch."""

    batches: list[list[Op]]

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        asked = list(ops)
        self.batches.append(asked)
        return await super().abatch(asked)


@pytest.fixture
def counting(store: Store) -> Counting:
    made = Counting(store)
    made.batches = []
    return made


# --- collected calls ----------------------------------------------------------------------


def test_the_calls_of_a_tick_are_one_batch_without_duplicates(counting: Counting) -> None:
    async def main() -> None:
        await asyncio.gather(*[counting.aput(("a",), f"k{n % 3}", {"n": n}) for n in range(9)])
        assert [len(each) for each in counting.batches] == [3]
        counting.batches.clear()
        found: list[Any] = await asyncio.gather(
            *[counting.aget(("a",), f"k{n % 3}") for n in range(9)],
            counting.asearch(("a",)),
            counting.asearch(("a",)),
            counting.alist_namespaces(),
            counting.adelete(("a",), "k0"),
        )
        assert [len(each) for each in counting.batches] == [6]
        # Of the puts to a key, the last counts.
        assert [item.value["n"] for item in found[:9]] == [6, 7, 8] * 3
        assert [item.key for item in found[9]] == ["k2", "k1", "k0"]
        assert found[11] == [("a",)]
        assert await counting.aget(("a",), "k0") is None

    asyncio.run(main())


def test_a_refused_call_does_not_fail_the_calls_collected_with_it(counting: Counting) -> None:
    async def main() -> None:
        good, bad, also = await asyncio.gather(
            counting.aput(("a",), "good", {"n": 1}),
            counting.asearch(("a",), limit=-1),
            counting.aput(("a",), "also", {"n": 2}),
            return_exceptions=True,
        )
        assert good is also is None
        assert isinstance(bad, InvalidInputError)
        assert {item.key for item in await counting.asearch(("a",))} == {"good", "also"}

    asyncio.run(main())


def test_event_loops_in_turn_and_at_the_same_time_share_a_store(counting: Counting) -> None:
    loops: list[weakref.ref[Any]] = []

    async def put(n: int) -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(*[counting.aput(("a",), f"{n}-{each}", {}) for each in range(20)])

    for n in range(2):
        asyncio.run(put(n))
    threads = [threading.Thread(target=lambda n=n: asyncio.run(put(n))) for n in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counting.search(("a",), limit=100)) == 80
    # The collectors of closed loops are not kept, which would keep the loops.
    asyncio.run(put(4))
    gc.collect()
    assert [loop() is None for loop in loops[:-1]] == [True] * 4


def test_a_closed_store_refuses_collected_calls(tmp_path: Path) -> None:
    async def main() -> None:
        memory = CasstoreStore.from_conn_string(tmp_path / "s", "relaxed")
        await memory.aput(("a",), "k", {})
        memory.close()
        with pytest.raises(ClosedError):
            await memory.aget(("a",), "k")

    asyncio.run(main())


# --- setup, the sweeper and expired items ---------------------------------------------------


def test_setup_opens_the_store(tmp_path: Path) -> None:
    with CasstoreStore.from_conn_string(tmp_path / "s", "relaxed") as memory:
        memory.setup()
        memory.setup()
    memory = CasstoreStore.from_path(tmp_path / "t", "relaxed")
    assert not (tmp_path / "t").exists()
    asyncio.run(memory.asetup())
    assert (tmp_path / "t").exists()
    memory.close()
    with pytest.raises(ClosedError):
        memory.setup()


def _wait_until_swept(store: Store) -> None:
    end = time.monotonic() + 30
    while list(items_table(store).scan()):
        assert time.monotonic() < end, "the sweeper removed nothing"
        time.sleep(0.01)


def test_the_sweeper_removes_expired_items_until_it_is_stopped(store: Store) -> None:
    with CasstoreStore(store, ttl=_TTL) as memory:
        memory.put(("a",), "k", {}, ttl=0.0001)
        future = memory.start_ttl_sweeper(0.0001)
        assert memory.start_ttl_sweeper() is future
        _wait_until_swept(store)
        assert memory.stop_ttl_sweeper(10)
        assert future.result(10) is None
        assert memory.stop_ttl_sweeper()
        # It can be started again; cancelling its future stops it, too.
        again = memory.start_ttl_sweeper(0.0001)
        assert again is not future
        [thread] = [each for each in threading.enumerate() if each.name == "casstore-ttl-sweeper"]
        assert again.cancel()
        thread.join(10)
        assert not thread.is_alive()
        last = memory.start_ttl_sweeper(60)
    assert last.done()


def test_the_awaited_sweeper_removes_expired_items_and_can_be_stopped(store: Store) -> None:
    async def main() -> None:
        async with CasstoreStore(store, ttl=_TTL) as memory:
            await memory.aput(("a",), "k", {}, ttl=0.0001)
            future = await memory.astart_ttl_sweeper(0.0001)
            await asyncio.to_thread(_wait_until_swept, store)
            assert await memory.astop_ttl_sweeper(10)
            await asyncio.wait_for(future, 10)
            other = await memory.astart_ttl_sweeper(60)
        await asyncio.wait_for(other, 10)

    asyncio.run(main())


def test_the_sweeper_continues_after_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with CasstoreStore(store, ttl=_TTL) as memory:
        memory.put(("a",), "k", {}, ttl=0.0001)
        sweep = expiry.sweep
        errors = iter([OSError("disk"), OSError("disk")])

        def failing(swept: Store) -> int:
            for error in errors:
                raise error
            return sweep(swept)

        monkeypatch.setattr(expiry, "sweep", failing)
        memory.start_ttl_sweeper(0.0001)
        _wait_until_swept(store)
    assert sum("could not be removed" in each.message for each in caplog.records) == 2


def test_the_sweeper_needs_a_time_to_live_and_a_possible_interval(store: Store) -> None:
    assert CasstoreStore(store).start_ttl_sweeper().result(0) is None
    for interval in (-1, float("nan"), float("inf"), "soon"):
        odd: Any = interval
        with pytest.raises(InvalidInputError):
            CasstoreStore(store, ttl=_TTL).start_ttl_sweeper(odd)


@pytest.mark.parametrize("given", [{"omit_expired": True}, {"omit_expired": False}, {}])
def test_expired_items_are_read_until_they_are_swept_unless_they_are_to_be_omitted(
    tmp_path: Path, given: Any
) -> None:
    """As LangGraph documents it: the default is False."""
    omit = bool(given.get("omit_expired"))
    clock = ManualClock()
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=clock)
    with Store(engine) as store:
        ttl: Any = {"default_ttl": 1, **given}
        memory = CasstoreStore(store, ttl=ttl)
        memory.put(("a",), "k", {})
        clock.now_ms += 61_000
        found = memory.get(("a",), "k", refresh_ttl=False)
        assert (found is None) is omit
        assert len(memory.search(("a",), refresh_ttl=False)) == (not omit)
        assert memory.list_namespaces() == ([] if omit else [("a",)])
        assert memory.sweep_ttl() == 1
        assert memory.get(("a",), "k") is None


# --- filters and order ----------------------------------------------------------------------


def test_filters_compare_texts_by_their_characters_and_numbers_by_value(store: Store) -> None:
    memory = CasstoreStore(store)
    values: list[Any] = ["2024-01-31", "2024-12-01", "9", "10", 10, 9.5, None, ["a"], "ü", ""]
    for n, value in enumerate(values):
        memory.put(("a",), str(n), {"x": value})

    def found(wanted: dict[str, Any]) -> list[Any]:
        items = memory.search(("a",), filter={"x": wanted}, limit=100)
        return [values[n] for n in sorted(int(item.key) for item in items)]

    assert found({"$gt": "2024-06-01"}) == ["2024-12-01", "9", "ü"]
    assert found({"$gte": "2024-01-31", "$lt": "2024-12-01"}) == ["2024-01-31"]
    assert found({"$lte": ""}) == [""]
    # Two numbers, also as texts, compare by value, as LangGraph does.
    for than in (9.75, "9.75"):
        assert [each for each in found({"$gt": than}) if each in ("10", 10)] == ["10", 10]
        assert not {"9", 9.5} & {*found({"$gt": than})}


def test_filters_look_up_a_dotted_key_whole_and_then_as_a_path(store: Store) -> None:
    memory = CasstoreStore(store)
    memory.put(("a",), "path", {"user": {"access-level": "x"}})
    memory.put(("a",), "whole", {"user.access-level": "x", "user": {"access-level": "y"}})
    memory.put(("a",), "flat", {"user": "x"})
    found = memory.search(("a",), filter={"user.access-level": "x"})
    assert {item.key for item in found} == {"path", "whole"}


def test_a_search_reads_what_it_returns_and_not_its_prefix(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = CasstoreStore(store)
    memory.batch([PutOp(("docs", f"u{n % 3}"), f"d{n}", {"n": n}) for n in range(3000)])
    read = 0
    scan, get = store.engine.scan_rows, store.engine.get_rows

    def scan_rows(*args: Any, **options: Any) -> Any:
        nonlocal read
        rows = scan(*args, **options)
        read += len(rows)
        return rows

    def get_rows(places: Any) -> Any:
        nonlocal read
        read += len(places)
        return get(places)

    monkeypatch.setattr(store.engine, "scan_rows", scan_rows)
    monkeypatch.setattr(store.engine, "get_rows", get_rows)
    found = memory.search(("docs",), limit=10, offset=5)
    assert [item.value["n"] for item in found] == list(range(2994, 2984, -1))
    assert read < 100


def test_order_by_time_follows_updates_deletions_and_namespaces(store: Store) -> None:
    memory = CasstoreStore(store)
    long = "x" * 600
    for namespace in (("a",), ("a", "b"), ("ab",), ("a", long), ("a", long + "y")):
        for key in ("1", "2", long):
            memory.put(namespace, key, {})
    memory.put(("a",), "1", {"again": True})
    memory.delete(("a", "b"), "2")
    found = [(item.namespace, item.key) for item in memory.search(("a",), limit=100)]
    other = [(("a", long + "y"), key) for key in (long, "2", "1")]
    last = [(("a", long), key) for key in (long, "2", "1")]
    assert found == [
        *[(("a",), "1"), *other, *last],
        *[(("a", "b"), long), (("a", "b"), "1"), (("a",), long), (("a",), "2")],
    ]
    assert found[1:4] == [(i.namespace, i.key) for i in memory.search(("a", long + "y"))]
    assert check(store, level="full").counts == {}


def test_copying_into_a_store_replaces_the_order_rows_of_its_items(
    store: Store, tmp_path: Path
) -> None:
    engine = LmdbEngine(str(tmp_path / "target"), durability="relaxed")
    with Store(engine) as target:
        CasstoreStore(target).put(("a",), "k", {"n": 1})
        CasstoreStore(store).put(("a",), "k", {"n": 2})
        copy(store, target)
        [found] = CasstoreStore(target).search(("a",))
        assert found.value == {"n": 2}
        assert check(target, level="full").counts == {}
