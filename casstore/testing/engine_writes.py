"""The part of the engine contract about writes: conditions, order, atomicity."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from casstore.engine.protocol import (
    MAX_KIND,
    Condition,
    DeleteRow,
    Engine,
    NewObject,
    ObjectsExist,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    RowLapsed,
    RowLive,
    RowStarts,
    Stamp,
    Write,
)
from casstore.errors import (
    ClosedError,
    ConditionFailedError,
    InvalidInputError,
    ObjectNotFoundError,
)
from casstore.testing.engine_fixtures import (
    ABSENT,
    EngineFixtures,
    ManualClock,
    all_rows,
    assert_reads_back,
    find_row,
    new_blob,
    new_object,
    put_objects,
    put_row,
    time_bytes,
)

CALLS: dict[str, Callable[[Engine], object]] = {
    "missing": lambda engine: engine.missing([ABSENT]),
    "missing nothing": lambda engine: engine.missing([]),
    "get_many": lambda engine: engine.get_many([ABSENT]),
    "get_many nothing": lambda engine: engine.get_many([]),
    "write": lambda engine: engine.write(Write(rows=[PutRow("heads", b"key", b"value")])),
    "write nothing": lambda engine: engine.write(Write()),
    "get_rows": lambda engine: engine.get_rows([RowKey("heads", b"key")]),
    "get_rows nothing": lambda engine: engine.get_rows([]),
    "scan_rows": lambda engine: engine.scan_rows("heads"),
    "scan_objects": lambda engine: engine.scan_objects(),
    "watch": lambda engine: engine.watch().close(),
    "now_ms": lambda engine: engine.now_ms(),
    "flush": lambda engine: engine.flush(),
}


def _holds(engine: Engine, condition: Condition) -> bool:
    """True if a write with this condition alone succeeds; a failed one must change nothing."""
    marker = PutRow("retention", b"the condition held", b"")
    engine.write(Write(rows=[DeleteRow(marker.table, marker.key)]))
    try:
        engine.write(Write(conditions=[condition], rows=[marker]))
    except (ConditionFailedError, ObjectNotFoundError):
        assert find_row(engine, marker.table, marker.key) is None
        return False
    assert find_row(engine, marker.table, marker.key) == b""
    return True


class WriteContract(EngineFixtures):
    """A write checks the state before it, then happens completely or not at all (P5)."""

    # --- conditions -------------------------------------------------------------

    def test_row_is_holds_for_exactly_the_value(self, engine: Engine) -> None:
        put_row(engine, "heads", b"key", b"value")
        assert _holds(engine, RowIs("heads", b"key", b"value"))
        for other in (b"valu", b"value ", b"", b"VALUE", None):
            assert not _holds(engine, RowIs("heads", b"key", other)), other
        assert not _holds(engine, RowIs("heads", b"other", b"value"))
        assert not _holds(engine, RowIs("pins", b"key", b"value"))

    def test_row_is_none_holds_only_where_there_is_no_row(self, engine: Engine) -> None:
        assert _holds(engine, RowIs("heads", b"key", None))
        assert not _holds(engine, RowIs("heads", b"key", b""))
        put_row(engine, "heads", b"key", b"")
        assert not _holds(engine, RowIs("heads", b"key", None))
        assert _holds(engine, RowIs("heads", b"key", b""))
        engine.write(Write(rows=[DeleteRow("heads", b"key")]))
        assert _holds(engine, RowIs("heads", b"key", None))

    def test_row_starts_holds_for_every_prefix_of_a_row_that_is_there(self, engine: Engine) -> None:
        assert not _holds(engine, RowStarts("heads", b"key", b""))
        put_row(engine, "heads", b"key", b"value")
        for prefix in (b"", b"v", b"valu", b"value"):
            assert _holds(engine, RowStarts("heads", b"key", prefix)), prefix
        for prefix in (b"value ", b"a", b"alue", b"V"):
            assert not _holds(engine, RowStarts("heads", b"key", prefix)), prefix

    @pytest.mark.parametrize("offset", [0, 5, 12])
    def test_a_row_is_live_until_its_time_and_lapsed_from_then_on(
        self, clocked: Engine, clock: ManualClock, offset: int
    ) -> None:
        # At exactly its time a row has lapsed.
        value = b"o" * offset + time_bytes(clock.now_ms) + b"tail"
        put_row(clocked, "leases", b"key", value)
        live = RowLive("leases", b"key", b"o" * offset, offset)
        lapsed = RowLapsed("leases", b"key", value, offset)
        expiry_ms = clock.now_ms
        for now_ms in (0, expiry_ms - 1000, expiry_ms - 1):
            clock.now_ms = now_ms
            assert (_holds(clocked, live), _holds(clocked, lapsed)) == (True, False), now_ms
        for now_ms in (expiry_ms, expiry_ms + 1, expiry_ms + 10**9):
            clock.now_ms = now_ms
            assert (_holds(clocked, live), _holds(clocked, lapsed)) == (False, True), now_ms

    def test_a_row_is_live_only_under_its_prefix(self, clocked: Engine, clock: ManualClock) -> None:
        put_row(clocked, "leases", b"key", b"owner" + time_bytes(clock.now_ms + 1))
        assert _holds(clocked, RowLive("leases", b"key", b"", 5))
        assert _holds(clocked, RowLive("leases", b"key", b"owner", 5))
        assert not _holds(clocked, RowLive("leases", b"key", b"other", 5))
        assert not _holds(clocked, RowLive("leases", b"absent", b"", 5))
        assert not _holds(clocked, RowLive("leases", b"absent", b"", 0))

    def test_a_row_has_lapsed_only_with_its_whole_value(
        self, clocked: Engine, clock: ManualClock
    ) -> None:
        value = b"owner" + time_bytes(clock.now_ms - 1)
        put_row(clocked, "leases", b"key", value)
        assert _holds(clocked, RowLapsed("leases", b"key", value, 5))
        assert not _holds(clocked, RowLapsed("leases", b"key", value[:-1], 5))
        assert not _holds(clocked, RowLapsed("leases", b"key", value + b" ", 5))
        assert not _holds(clocked, RowLapsed("leases", b"absent", value, 5))
        assert not _holds(clocked, RowLapsed("leases", b"absent", b"", 0))

    def test_the_time_in_a_row_is_unsigned(self, clocked: Engine) -> None:
        value = time_bytes(2**64 - 1)
        put_row(clocked, "leases", b"key", value)
        assert _holds(clocked, RowLive("leases", b"key", b"", 0))
        assert not _holds(clocked, RowLapsed("leases", b"key", value, 0))

    def test_a_row_shorter_than_the_offset_of_its_time_has_lapsed(self, clocked: Engine) -> None:
        for value in (b"", b"owner"):
            put_row(clocked, "leases", b"key", value)
            for offset in (5, 6, 1000):
                assert not _holds(clocked, RowLive("leases", b"key", b"", offset))
                assert _holds(clocked, RowLapsed("leases", b"key", value, offset))

    @pytest.mark.parametrize("size_bytes", range(1, 8))
    def test_a_row_that_ends_within_its_time_has_lapsed(
        self, clocked: Engine, size_bytes: int
    ) -> None:
        # Read as a number, these six bytes would be a time thousands of years from now.
        value = b"owner" + b"\xff" * size_bytes
        put_row(clocked, "leases", b"key", value)
        assert not _holds(clocked, RowLive("leases", b"key", b"owner", 5))
        assert _holds(clocked, RowLapsed("leases", b"key", value, 5))

    def test_objects_exist_holds_only_if_all_of_them_do(self, engine: Engine) -> None:
        a, b = new_blob(b"a"), new_blob(b"b")
        put_objects(engine, a, b)
        assert _holds(engine, ObjectsExist([]))
        assert _holds(engine, ObjectsExist([a.digest, b.digest, a.digest]))
        assert not _holds(engine, ObjectsExist([a.digest, ABSENT, b.digest]))
        engine.write(Write(deletes=[b.digest]))
        assert not _holds(engine, ObjectsExist([a.digest, b.digest]))

    def test_the_first_object_that_does_not_exist_is_named(self, engine: Engine) -> None:
        a, b = new_blob(b"a"), new_blob(b"b")
        put_objects(engine, a)
        with pytest.raises(ObjectNotFoundError) as caught:
            engine.write(Write(conditions=[ObjectsExist([a.digest, b.digest, ABSENT])]))
        assert caught.value.digest == b.digest

    def test_the_first_failing_condition_is_reported_with_the_row_found(
        self, engine: Engine
    ) -> None:
        put_row(engine, "heads", b"key", b"found")
        conditions: list[Condition] = [
            RowIs("heads", b"key", b"found"),
            RowStarts("heads", b"key", b"f"),
            RowIs("heads", b"key", b"expected"),
            RowIs("heads", b"key", None),
        ]
        with pytest.raises(ConditionFailedError) as caught:
            engine.write(Write(conditions=conditions))
        assert caught.value.index == 2
        assert caught.value.condition == conditions[2]
        assert caught.value.actual == b"found"

    @pytest.mark.parametrize(
        "condition",
        [
            RowIs("heads", b"absent", b"value"),
            RowStarts("heads", b"absent", b""),
            RowLive("heads", b"absent", b"", 0),
            RowLapsed("heads", b"absent", b"", 0),
        ],
    )
    def test_a_condition_on_an_absent_row_reports_none(
        self, engine: Engine, condition: Condition
    ) -> None:
        with pytest.raises(ConditionFailedError) as caught:
            engine.write(Write(conditions=[condition]))
        assert (caught.value.index, caught.value.actual) == (0, None)

    # --- all or nothing ---------------------------------------------------------

    def test_a_failed_condition_changes_nothing(self, engine: Engine) -> None:
        old, new = new_blob(b"old"), new_blob(b"new")
        put_objects(engine, old)
        put_row(engine, "heads", b"kept", b"1")
        put_row(engine, "heads", b"same", b"1")
        infos, rows = engine.scan_objects(), engine.scan_rows("heads")
        failing: list[Condition] = [RowIs("heads", b"kept", b"2"), ObjectsExist([ABSENT])]
        for condition in failing:
            write = Write(
                objects=[new],
                # The failing part comes after a condition that holds.
                conditions=[RowIs("heads", b"kept", b"1"), condition],
                rows=[
                    PutRow("heads", b"new", b"2"),
                    PutRow("heads", b"same", b"2"),
                    DeleteRow("heads", b"kept"),
                ],
                deletes=[old.digest],
            )
            with pytest.raises((ConditionFailedError, ObjectNotFoundError)):
                engine.write(write)
            assert engine.scan_objects() == infos
            assert engine.scan_rows("heads") == rows
            assert engine.missing([old.digest, new.digest]) == [new.digest]

    def test_a_failed_write_leaves_the_engine_ready_for_the_next(self, engine: Engine) -> None:
        blob = new_blob(b"blob")
        for write in (
            Write(objects=[blob], conditions=[RowIs("heads", b"key", b"no")]),
            Write(objects=[blob, new_object(b"orphan", [ABSENT])]),
            Write(objects=[blob], rows=[PutRow("heads", b"", b"no")]),
        ):
            with pytest.raises((ConditionFailedError, ObjectNotFoundError, InvalidInputError)):
                engine.write(write)
            assert engine.missing([blob.digest]) == [blob.digest]
        assert put_objects(engine, blob) == 1
        assert_reads_back(engine, blob)

    @pytest.mark.parametrize(
        "flaw",
        [
            Write(objects=[NewObject(b"short", 0, b"", ())]),
            Write(objects=[NewObject(bytes(32), MAX_KIND + 1, b"", ())]),
            Write(rows=[PutRow("nothing", b"key", b"")]),
            Write(rows=[PutRow("heads", b"", b"")]),
            Write(rows=[PutRow("heads", b"key", b"1234567", [Stamp(0)])]),
            Write(conditions=[RowStarts("heads", b"k" * 512, b"")]),
        ],
    )
    def test_a_malformed_write_changes_nothing(self, engine: Engine, flaw: Write) -> None:
        old, new = new_blob(b"old"), new_blob(b"new")
        put_objects(engine, old)
        write = Write(
            objects=[new, *flaw.objects],
            conditions=[RowIs("heads", b"new", None), *flaw.conditions],
            rows=[PutRow("heads", b"new", b""), *flaw.rows],
            deletes=[old.digest],
        )
        with pytest.raises(InvalidInputError):
            engine.write(write)
        assert engine.missing([old.digest, new.digest]) == [new.digest]
        assert engine.scan_rows("heads") == []

    def test_a_malformed_write_is_refused_before_its_conditions_are_tried(
        self, engine: Engine
    ) -> None:
        with pytest.raises(InvalidInputError):
            engine.write(
                Write(
                    conditions=[RowIs("heads", b"key", b"no")],
                    rows=[PutRow("nothing", b"key", b"")],
                )
            )

    def test_conditions_are_tried_before_children_are_looked_for(self, engine: Engine) -> None:
        with pytest.raises(ConditionFailedError):
            engine.write(
                Write(
                    objects=[new_object(b"orphan", [ABSENT])],
                    conditions=[RowIs("heads", b"key", b"no")],
                )
            )

    # --- order within a write ---------------------------------------------------

    def test_conditions_see_the_rows_from_before_the_write(self, engine: Engine) -> None:
        put_row(engine, "heads", b"key", b"1")
        engine.write(
            Write(
                conditions=[RowIs("heads", b"key", b"1"), RowIs("heads", b"new", None)],
                rows=[PutRow("heads", b"key", b"2"), PutRow("heads", b"new", b"2")],
            )
        )
        assert [row.value for row in all_rows(engine, "heads")] == [b"2", b"2"]
        with pytest.raises(ConditionFailedError) as caught:
            engine.write(
                Write(
                    conditions=[RowIs("heads", b"key", b"3")],
                    rows=[PutRow("heads", b"key", b"3")],
                )
            )
        assert caught.value.actual == b"2"

    def test_conditions_see_the_objects_from_before_the_write(self, engine: Engine) -> None:
        new, old = new_blob(b"new"), new_blob(b"old")
        with pytest.raises(ObjectNotFoundError):
            engine.write(Write(objects=[new], conditions=[ObjectsExist([new.digest])]))
        assert engine.missing([new.digest]) == [new.digest]
        put_objects(engine, old)
        engine.write(Write(conditions=[ObjectsExist([old.digest])], deletes=[old.digest]))
        assert engine.missing([old.digest]) == [old.digest]

    def test_rows_change_in_the_order_given(self, engine: Engine) -> None:
        put, delete = PutRow("heads", b"key", b"1"), DeleteRow("heads", b"key")
        again = PutRow("heads", b"key", b"2")
        cases: list[tuple[list[RowChange], bytes | None]] = [
            ([put, again], b"2"),
            ([again, put], b"1"),
            ([put, delete], None),
            ([delete, put], b"1"),
            ([put, delete, again], b"2"),
            ([delete, put, again, delete], None),
        ]
        for changes, expected in cases:
            for before in (None, b"0"):
                engine.write(Write(rows=[delete]))
                if before is not None:
                    put_row(engine, "heads", b"key", before)
                engine.write(Write(rows=changes))
                assert find_row(engine, "heads", b"key") == expected, changes
                assert len(engine.scan_rows("heads")) == (expected is not None)

    def test_one_write_changes_many_tables(self, engine: Engine) -> None:
        blob = new_blob(b"manifest")
        engine.write(
            Write(
                objects=[blob],
                conditions=[RowIs("heads", b"s", None)],
                rows=[
                    PutRow("history", b"s\x00\x01", blob.digest),
                    PutRow("heads", b"s", b"\x01" + blob.digest),
                    PutRow("receipts", b"turn", b"done"),
                ],
            )
        )
        asked = [
            RowKey("receipts", b"turn"),
            RowKey("heads", b"s"),
            RowKey("history", b"s\x00\x01"),
        ]
        assert engine.get_rows(asked) == [b"done", b"\x01" + blob.digest, blob.digest]
        assert_reads_back(engine, blob)

    def test_thousands_of_rows_change_in_one_write(self, engine: Engine) -> None:
        keys = [n.to_bytes(4, "little") for n in range(5000)]
        engine.write(Write(rows=[PutRow("records", key, key) for key in keys]))
        engine.write(Write(rows=[DeleteRow("records", key) for key in keys[::2]]))
        assert [row.key for row in all_rows(engine, "records")] == sorted(keys[1::2])

    # --- the engine's clock -----------------------------------------------------

    def test_stamps_are_written_by_the_engines_clock(
        self, clocked: Engine, clock: ManualClock
    ) -> None:
        blank = b"from" + bytes(8) + b"to" + bytes(8) + b"end"
        for _ in range(3):
            now_ms = clock.now_ms
            stamps = [Stamp(4), Stamp(14, 30_000)]
            result = clocked.write(Write(rows=[PutRow("leases", b"key", blank, stamps)]))
            assert result.now_ms == now_ms
            stamped = b"from" + time_bytes(now_ms) + b"to" + time_bytes(now_ms + 30_000) + b"end"
            assert find_row(clocked, "leases", b"key") == stamped
            clock.now_ms += 12_345

    def test_a_stamp_may_lie_in_the_past_but_not_before_1970(
        self, clocked: Engine, clock: ManualClock
    ) -> None:
        rows = [
            PutRow("leases", b"past", bytes(8), [Stamp(0, -1000)]),
            PutRow("leases", b"never", bytes(8), [Stamp(0, -clock.now_ms - 1)]),
        ]
        clocked.write(Write(rows=rows))
        asked = [RowKey("leases", b"past"), RowKey("leases", b"never")]
        assert clocked.get_rows(asked) == [time_bytes(clock.now_ms - 1000), bytes(8)]

    @pytest.mark.parametrize("offset", [-8, -1, 1, 9])
    def test_a_stamp_outside_its_row_is_refused(self, engine: Engine, offset: int) -> None:
        with pytest.raises(InvalidInputError):
            engine.write(Write(rows=[PutRow("leases", b"key", bytes(8), [Stamp(offset)])]))
        assert find_row(engine, "leases", b"key") is None

    def test_a_stamped_lease_lapses_by_the_clock_of_the_engine(
        self, clocked: Engine, clock: ManualClock
    ) -> None:
        lease = PutRow("leases", b"key", b"me" + bytes(8), [Stamp(2, 1000)])
        clocked.write(Write(conditions=[RowIs("leases", b"key", None)], rows=[lease]))
        held = find_row(clocked, "leases", b"key")
        assert held is not None
        clock.now_ms += 999
        assert _holds(clocked, RowLive("leases", b"key", b"me", 2))
        clock.now_ms += 1
        assert not _holds(clocked, RowLive("leases", b"key", b"me", 2))
        taken = PutRow("leases", b"key", b"it" + bytes(8), [Stamp(2, 1000)])
        clocked.write(Write(conditions=[RowLapsed("leases", b"key", held, 2)], rows=[taken]))
        assert _holds(clocked, RowLive("leases", b"key", b"it", 2))

    def test_the_engine_returns_its_time(self, clocked: Engine, clock: ManualClock) -> None:
        assert clocked.now_ms() == clock.now_ms
        clock.now_ms += 1
        assert clocked.now_ms() == clock.now_ms
        assert clocked.write(Write()).now_ms == clock.now_ms

    def test_an_engine_without_a_clock_given_counts_milliseconds_since_1970(
        self, engine: Engine
    ) -> None:
        # A day apart at most: the engine may be on a machine with another clock.
        day_ms = 24 * 3600 * 1000
        assert abs(engine.now_ms() - time.time_ns() // 1_000_000) < day_ms
        result = engine.write(Write(rows=[PutRow("leases", b"key", bytes(8), [Stamp(0)])]))
        assert find_row(engine, "leases", b"key") == time_bytes(result.now_ms)
        assert abs(result.now_ms - time.time_ns() // 1_000_000) < day_ms

    # --- the end ----------------------------------------------------------------

    def test_flush_may_be_called_at_any_time(self, engine: Engine) -> None:
        engine.flush()
        put_row(engine, "heads", b"key", b"value")
        engine.flush()
        engine.flush()
        assert find_row(engine, "heads", b"key") == b"value"

    def test_closing_twice_is_allowed(self, engine: Engine) -> None:
        engine.close()
        engine.close()

    @pytest.mark.parametrize("call", CALLS)
    def test_every_call_after_close_raises_closed_error(self, engine: Engine, call: str) -> None:
        put_row(engine, "heads", b"key", b"value")
        CALLS[call](engine)
        engine.close()
        with pytest.raises(ClosedError):
            CALLS[call](engine)
        engine.close()
        with pytest.raises(ClosedError):
            CALLS[call](engine)
