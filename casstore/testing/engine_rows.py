"""The part of the engine contract about rows: tables, keys, values, ordered pages."""

from __future__ import annotations

import random

import pytest

from casstore.engine.protocol import (
    MAX_ROW_KEY_BYTES,
    MAX_ROW_VALUE_BYTES,
    TABLES,
    DeleteRow,
    Engine,
    PutRow,
    Row,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import InvalidInputError
from casstore.testing.engine_fixtures import (
    EngineFixtures,
    all_rows,
    find_row,
    put_row,
)

# Prefixes of each other and both ends of the byte range; text would sort differently.
KEYS = sorted(
    [
        b"\x00",
        b"\x00\x00",
        b"\x00\x01",
        b"\x00\xff",
        b"\x01",
        b"A",
        b"a",
        b"a\x00",
        b"a\x00b",
        b"aa",
        b"ab",
        b"b",
        b"\x7f",
        b"\x80",
        b"\xc3\xa9",
        b"\xfe\xff",
        b"\xff",
        b"\xff\x00",
        b"\xff\xff",
        b"\xff" * MAX_ROW_KEY_BYTES,
    ]
)


def _fill(engine: Engine, table: str = "records") -> list[Row]:
    """Store a row for each of KEYS, in another order."""
    rows = [Row(key, b"value of " + key) for key in KEYS]
    shuffled = random.Random(5).sample(rows, len(rows))
    engine.write(Write(rows=[PutRow(table, row.key, row.value) for row in shuffled]))
    return rows


class RowContract(EngineFixtures):
    """Rows are found by table and key, and scanned in the byte order of keys."""

    # --- one row ----------------------------------------------------------------

    def test_a_row_reads_back_until_it_is_replaced_or_deleted(self, engine: Engine) -> None:
        assert find_row(engine, "heads", b"key") is None
        put_row(engine, "heads", b"key", b"one")
        assert find_row(engine, "heads", b"key") == b"one"
        put_row(engine, "heads", b"key", b"a longer value")
        assert find_row(engine, "heads", b"key") == b"a longer value"
        put_row(engine, "heads", b"key", b"2")
        assert find_row(engine, "heads", b"key") == b"2"
        engine.write(Write(rows=[DeleteRow("heads", b"key")]))
        assert find_row(engine, "heads", b"key") is None
        assert engine.scan_rows("heads") == []

    def test_deleting_a_missing_row_is_not_an_error(self, engine: Engine) -> None:
        put_row(engine, "heads", b"other", b"stays")
        engine.write(Write(rows=[DeleteRow("heads", b"key"), DeleteRow("heads", b"key")]))
        assert all_rows(engine, "heads") == [Row(b"other", b"stays")]

    @pytest.mark.parametrize("size_bytes", [0, 1, 8, 2000, 4096, 65536, 1 << 20])
    def test_a_value_of_any_size_reads_back(self, engine: Engine, size_bytes: int) -> None:
        value = random.Random(size_bytes).randbytes(size_bytes)
        put_row(engine, "records", b"key", value)
        found = find_row(engine, "records", b"key")
        same = found == value
        assert same, "the bytes read differ from the bytes written"
        assert type(found) is bytes
        [row] = engine.scan_rows("records")
        assert row.key == b"key"
        same = row.value == value
        assert same, "the bytes scanned differ from the bytes written"

    def test_an_empty_value_is_not_an_absent_row(self, engine: Engine) -> None:
        put_row(engine, "pins", b"key", b"")
        assert engine.get_rows([RowKey("pins", b"key"), RowKey("pins", b"no")]) == [b"", None]
        assert engine.scan_rows("pins") == [Row(b"key", b"")]

    def test_a_value_over_the_limit_is_refused(self, engine: Engine) -> None:
        put_row(engine, "records", b"key", b"stays")
        with pytest.raises(InvalidInputError):
            put_row(engine, "records", b"key", bytes(MAX_ROW_VALUE_BYTES + 1))
        assert find_row(engine, "records", b"key") == b"stays"

    # --- tables -----------------------------------------------------------------

    def test_every_table_is_there_and_empty(self, engine: Engine) -> None:
        for table in TABLES:
            assert engine.scan_rows(table) == []
            assert find_row(engine, table, b"key") is None

    def test_the_same_key_in_two_tables_is_two_rows(self, engine: Engine) -> None:
        for table in TABLES:
            put_row(engine, table, b"key", table.encode())
        asked = [RowKey(table, b"key") for table in reversed(TABLES)]
        assert engine.get_rows(asked) == [table.encode() for table in reversed(TABLES)]
        engine.write(Write(rows=[DeleteRow("heads", b"key")]))
        for table in TABLES:
            left = [] if table == "heads" else [Row(b"key", table.encode())]
            assert engine.scan_rows(table) == left
            assert engine.scan_rows(table, reverse=True) == left

    @pytest.mark.parametrize(
        "table", ["nothing", "", "Heads", "heads\x00", "slabs", "index", "meta"]
    )
    def test_an_unknown_table_is_refused(self, engine: Engine, table: str) -> None:
        # Also the names of an engine's internal tables: callers cannot use those.
        with pytest.raises(InvalidInputError):
            engine.get_rows([RowKey(table, b"key")])
        with pytest.raises(InvalidInputError):
            engine.scan_rows(table)
        for write in (
            Write(rows=[PutRow(table, b"key", b"value")]),
            Write(rows=[DeleteRow(table, b"key")]),
            Write(conditions=[RowIs(table, b"key", None)]),
        ):
            with pytest.raises(InvalidInputError):
                engine.write(write)

    # --- keys -------------------------------------------------------------------

    @pytest.mark.parametrize("size_bytes", [1, 2, 510, 511])
    def test_a_key_of_1_to_511_bytes_is_kept_whole(self, engine: Engine, size_bytes: int) -> None:
        key, sibling = b"k" * size_bytes, b"k" * (size_bytes - 1) + b"l"
        put_row(engine, "records", sibling, b"sibling")
        put_row(engine, "records", key, b"value")
        asked = [RowKey("records", key), RowKey("records", sibling)]
        assert engine.get_rows(asked) == [b"value", b"sibling"]
        rows = engine.scan_rows("records")
        assert rows == [Row(key, b"value"), Row(sibling, b"sibling")]
        assert type(rows[0].key) is bytes
        engine.write(Write(rows=[DeleteRow("records", key)]))
        assert engine.scan_rows("records") == [Row(sibling, b"sibling")]

    @pytest.mark.parametrize("size_bytes", [0, 512, 5000])
    def test_a_key_of_any_other_length_is_refused(self, engine: Engine, size_bytes: int) -> None:
        key = b"k" * size_bytes
        with pytest.raises(InvalidInputError):
            engine.get_rows([RowKey("records", key)])
        for write in (
            Write(rows=[PutRow("records", b"fine", b""), PutRow("records", key, b"value")]),
            Write(rows=[PutRow("records", b"fine", b""), DeleteRow("records", key)]),
            Write(rows=[PutRow("records", b"fine", b"")], conditions=[RowIs("records", key, None)]),
        ):
            with pytest.raises(InvalidInputError):
                engine.write(write)
        assert engine.scan_rows("records") == []

    def test_get_rows_keeps_the_order_asked_with_none_for_absent_rows(self, engine: Engine) -> None:
        put_row(engine, "heads", b"a", b"1")
        put_row(engine, "pins", b"a", b"2")
        put_row(engine, "heads", b"b", b"3")
        asked = [("heads", b"b"), ("pins", b"b"), ("pins", b"a"), ("heads", b"b"), ("heads", b"a")]
        assert engine.get_rows([RowKey(*key) for key in asked]) == [b"3", None, b"2", b"3", b"1"]
        assert engine.get_rows([]) == []

    def test_one_invalid_key_refuses_the_whole_get_rows_call(self, engine: Engine) -> None:
        put_row(engine, "heads", b"a", b"1")
        with pytest.raises(InvalidInputError):
            engine.get_rows([RowKey("heads", b"a"), RowKey("nothing", b"a")])

    # --- scans ------------------------------------------------------------------

    def test_rows_come_in_the_order_of_their_keys_bytes(self, engine: Engine) -> None:
        rows = _fill(engine)
        assert engine.scan_rows("records") == rows
        assert engine.scan_rows("records", reverse=True) == rows[::-1]

    @pytest.mark.parametrize("reverse", [False, True])
    def test_a_scan_takes_its_start_in_and_leaves_its_stop_out(
        self, engine: Engine, *, reverse: bool
    ) -> None:
        rows = _fill(engine)
        # Bounds that are keys, bounds between keys, and bounds outside all keys.
        bounds = [*KEYS, b"", b"\x00\x00\x00", b"a\x00a", b"abc", b"\x80\x00", b"\xff" * 600]
        for start in bounds:
            for stop in [*bounds, None]:
                expected = [
                    row for row in rows if start <= row.key and (stop is None or row.key < stop)
                ]
                if reverse:
                    expected.reverse()
                found = engine.scan_rows("records", start=start, stop=stop, reverse=reverse)
                assert found == expected, (start, stop)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_a_scan_of_an_empty_range_returns_no_rows(
        self, engine: Engine, *, reverse: bool
    ) -> None:
        _fill(engine)
        for start, stop in [(b"a", b"a"), (b"b", b"a"), (b"", b""), (b"ac", b"ad"), (b"c", b"d")]:
            assert engine.scan_rows("records", start=start, stop=stop, reverse=reverse) == []
        assert engine.scan_rows("pins", start=b"a", stop=b"b", reverse=reverse) == []

    @pytest.mark.parametrize("limit", [1, 2, 3, 19, 20, 21, 10**9])
    def test_a_scan_gives_the_first_rows_up_to_its_limit(self, engine: Engine, limit: int) -> None:
        rows = _fill(engine)
        assert engine.scan_rows("records", limit=limit) == rows[:limit]
        assert engine.scan_rows("records", limit=limit, reverse=True) == rows[::-1][:limit]
        within = engine.scan_rows("records", start=KEYS[3], stop=KEYS[9], limit=limit)
        assert within == rows[3:9][:limit]
        within = engine.scan_rows("records", start=KEYS[3], stop=KEYS[9], limit=limit, reverse=True)
        assert within == rows[3:9][::-1][:limit]

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_scan_with_a_limit_below_1_is_refused(self, engine: Engine, limit: int) -> None:
        with pytest.raises(InvalidInputError):
            engine.scan_rows("records", limit=limit)

    @pytest.mark.parametrize("limit", [1, 2, 7, 100])
    def test_paging_forward_covers_each_row_exactly_once(self, engine: Engine, limit: int) -> None:
        # The longest key is among them: the start of the page after it is longer than any key.
        assert all_rows(engine, "records", limit=limit) == []
        rows = _fill(engine)
        assert all_rows(engine, "records", limit=limit) == rows

    @pytest.mark.parametrize("limit", [1, 2, 7, 100])
    def test_paging_backward_covers_each_row_exactly_once(self, engine: Engine, limit: int) -> None:
        rows = _fill(engine)
        found: list[Row] = []
        stop: bytes | None = None
        while page := engine.scan_rows("records", stop=stop, limit=limit, reverse=True):
            found += page
            assert stop is None or page[-1].key < stop, "the scan does not advance"
            stop = page[-1].key
        assert found == rows[::-1]

    def test_a_scan_without_a_limit_gives_a_thousand_rows(self, engine: Engine) -> None:
        keys = [n.to_bytes(4, "big") for n in range(2500)]
        engine.write(Write(rows=[PutRow("history", key, key) for key in keys]))
        assert [row.key for row in engine.scan_rows("history")] == keys[:1000]
        assert [row.key for row in all_rows(engine, "history")] == keys

    def test_rows_that_were_read_do_not_change_with_later_writes(self, engine: Engine) -> None:
        rows = _fill(engine)
        scanned = engine.scan_rows("records")
        again = engine.scan_rows("records")
        again.clear()
        engine.write(Write(rows=[PutRow("records", key, b"changed") for key in KEYS]))
        engine.write(Write(rows=[DeleteRow("records", key) for key in KEYS[::2]]))
        assert scanned == rows
        assert [row.key for row in engine.scan_rows("records")] == KEYS[1::2]
