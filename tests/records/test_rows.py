"""Records: rows by key in order, each keeping alive what it links to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import MAX_ROW_KEY_BYTES, PutRow, RowIs, RowKey, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    ExpansionError,
    HeadConflictError,
    InvalidInputError,
    ObjectNotFoundError,
)
from casstore.format.canonical import Link
from casstore.format.digest import Digest, Kind
from casstore.format.splitting import ListTail, root_object
from casstore.maintenance import gc
from casstore.session.data import Commit, NodeDraft
from casstore.session.record_keys import CUT, KeySpace, past
from casstore.session.records import Draft, Table, find_records, row_links
from casstore.store import Store

LONG = ["long " * 300, {"more": "text " * 200}, *range(300)]


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine: Any = MemoryEngine()
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with Store(engine) as store:
        yield store


def put(store: Store, table: Table, *key: str, value: Any = 1) -> None:
    draft = Draft(store)
    draft.put(table, key, value)
    draft.commit()


texts = st.text(max_size=12) | st.text("a\0\x01\x02ÿ", max_size=400)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(texts, texts, texts), max_size=20))
def test_record_keys_are_short_and_unique_and_sort_like_their_texts(
    keys: list[tuple[str, ...]],
) -> None:
    space = KeySpace("table", 3)
    encoded = {key: space.key(key) for key in keys}
    assert len(set(encoded.values())) == len(encoded)
    for key, data in encoded.items():
        assert len(data) <= MAX_ROW_KEY_BYTES
        for depth in range(4):
            group = space.group(data, depth)
            assert group == space.key(key[:depth])
            assert group <= data < past(group)
        assert space.row(key) == data
        if CUT not in data:
            assert space.texts(data) == key
    whole = [key for key, data in encoded.items() if CUT not in data]
    assert sorted(whole) == sorted(whole, key=encoded.__getitem__)


def test_find_records_reads_several_tables_in_one_call(store: Store) -> None:
    table, other = Table(store, "t", 2), Table(store, "o", 1)
    put(store, table, "a", "b", value=1)
    put(store, other, "a", value=2)
    asked: list[tuple[Table, tuple[str, ...]]] = [
        (other, ("a",)), (table, ("a", "c")), (table, ("a", "b"))
    ]  # fmt: skip
    second, none, first = find_records(store, asked)
    assert none is None
    assert first is not None
    assert second is not None
    assert (first.key, first.value, second.key, second.value) == (("a", "b"), 1, ("a",), 2)


def test_long_texts_that_begin_alike_are_distinguished() -> None:
    space = KeySpace("t", 2)
    keys = {space.key(("x" * 900 + end, "k")) for end in ("", "a", "b", "a" * 50)}
    assert len(keys) == 4
    assert len({space.key(("x" * 900, "y" * 400 + end)) for end in ("", "a")}) == 2


def test_names_and_keys_that_do_not_fit_are_refused() -> None:
    for name, parts in (("", 1), ("x" * 40, 1), ("a\0b", 1), ("t", 0), ("t", 9)):
        with pytest.raises((InvalidInputError, ZeroDivisionError)):
            KeySpace(name, parts)
    space = KeySpace("t", 2)
    for key in (("a", "b", "c"), ("a", 1), ("\ud800",), ("x" * 20_000,)):
        with pytest.raises(InvalidInputError):
            space.key(key)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [None, 0, "text", b"bytes", [], {"a": [1, {"b": None}]}, LONG, "x" * 100_000]
)
def test_values_of_any_length_come_back(store: Store, value: Any) -> None:
    table = Table(store, "t", 2)
    put(store, table, "a", "k", value=value)
    found = table.find("a", "k")
    assert found is not None
    assert found.value == value
    assert found.key == ("a", "k")
    assert len(found.row) < 600
    assert table.find("a", "other") is None


def test_scans_follow_the_order_of_the_texts_in_pages(store: Store) -> None:
    table, other = Table(store, "t", 3), Table(store, "t2", 3)
    keys = [(a, b, f"{n:03}") for a in ("", "a", "a" * 400) for b in ("x", "xy") for n in range(9)]
    for key in keys:
        put(store, table, *key)
        put(store, other, *key)
    assert [each.key for each in table.scan(page=4)] == keys
    assert [each.key for each in table.scan(reverse=True, page=4)] == keys[::-1]
    assert [each.key for each in table.scan("a", "x")] == keys[18:27]
    assert [each.key[2] for each in table.scan("a", "x", before="004", reverse=True, page=2)] == [
        "003", "002", "001", "000",
    ]  # fmt: skip
    assert list(table.groups(1)) == [("",), ("a",), ("a" * 400,)]
    assert list(table.groups(2, "a")) == [("a", "x"), ("a", "xy")]
    assert [each.key for each in table.scan_starting("x", "a")] == keys[18:36]
    assert [each.key for each in table.scan_starting("xy", "a")] == keys[27:36]
    assert [each.key[0] for each in table.scan_starting("a" * 300)] == ["a" * 400] * 18
    assert list(table.scan_starting("b")) == []
    assert [each.key for each in table.scan_starting("x", "a", after="x", page=4)] == keys[27:36]
    assert [each.key for each in table.scan_starting("x", "a", after="")] == keys[18:36]
    assert list(table.scan_starting("x", "a", after="y")) == []
    long = "a" * 400
    assert [each.key[0] for each in table.scan_starting("a", after="a" * 399)] == [long] * 18
    assert list(table.scan_starting("a", after=long)) == []
    assert list(table.scan("no")) == []


def test_a_draft_is_committed_completely_or_not_at_all(store: Store) -> None:
    table = Table(store, "t", 1)
    put(store, table, "a", value="old")
    seen = table.find("a")
    put(store, table, "a", value="new")
    draft = Draft(store)
    draft.put(table, ("b",), draft.keep(LONG))
    draft.delete(table, ("a",))
    draft.expect(table, ("a",), seen)
    with pytest.raises(ConditionFailedError):
        draft.commit()
    assert table.find("b") is None
    found = table.find("a")
    assert found is not None
    assert found.value == "new"
    assert store.engine.scan_objects() == []
    # None: there must be none.
    draft = Draft(store)
    draft.put(table, ("a",), 1)
    draft.expect(table, ("a",), None)
    with pytest.raises(ConditionFailedError):
        draft.commit()
    Draft(store).commit()


def test_a_link_to_something_that_is_not_there_is_refused(store: Store) -> None:
    table = Table(store, "t", 1)
    for inside in (True, False):
        draft, link = Draft(store), Link(Digest(bytes(32)))
        draft.put(table, ("a",), {"to": draft.keep([link]) if inside else link})
        with pytest.raises(ObjectNotFoundError):
            draft.commit()
        assert table.find("a") is None
    stored = Link(store.put_value(LONG))
    draft = Draft(store)
    draft.put(table, ("a",), {"to": stored})
    draft.commit()
    found = table.find("a")
    assert found is not None
    assert found.value == {"to": stored}


def test_copying_a_record_requires_an_unchanged_source(store: Store) -> None:
    table = Table(store, "t", 1)
    put(store, table, "a" * 600, value=LONG)
    source = table.find("a" * 600)
    assert source is not None
    for name in ("short", "b" * 600):
        draft = Draft(store)
        draft.copy(table, source, (name,))
        draft.commit()
        found = table.find(name)
        assert found is not None
        assert found.value == LONG
        assert [each.key for each in table.scan()].count((name,)) == 1
    put(store, table, "a" * 600, value=1)
    draft = Draft(store)
    draft.copy(table, source, ("late",))
    with pytest.raises(ConditionFailedError):
        draft.commit()


@pytest.mark.parametrize("key", ["k", "k" * 600])
def test_gc_keeps_what_records_link_to_and_nothing_else(tmp_path: Path, key: str) -> None:
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        table = Table(store, "t", 1)
        draft = Draft(store)
        # Through a link, through a part that left the row, and through one inside the other.
        draft.put(table, (key,), {"kept": draft.keep("kept " * 300), "long": LONG})
        draft.commit()
        loose = store.put_value("loose " * 300)
        before = len(store.engine.scan_objects())
        gc.collect(store, grace_ms=0)
        assert store.missing([loose]) == [loose]
        assert len(store.engine.scan_objects()) == before - 2  # the text and the value of it
        found = table.find(key)
        assert found is not None
        assert found.value["long"] == LONG
        assert store.get_value(found.value["kept"].digest) == "kept " * 300
        draft = Draft(store)
        draft.delete(table, (key,))
        draft.commit()
        gc.collect(store, grace_ms=0)
        assert store.engine.scan_objects() == []


@pytest.mark.parametrize("row", [b"", b"\x02abc", b"\x00\xc7", b"\x01\x00\x00\x00\x00\xc7\x01"])
def test_a_damaged_record_stops_gc_and_is_reported(tmp_path: Path, row: bytes) -> None:
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        loose = store.put_blob(b"loose")
        table = Table(store, "t", 1)
        store.engine.write(Write(rows=[PutRow("records", table.keys.key(("k",)), row)]))
        with pytest.raises(CorruptionError):
            row_links(row)
        report = gc.collect(store, grace_ms=0)
        assert report.outcome is gc.Outcome.REFUSED
        assert isinstance(report.problem, CorruptionError)
        assert store.missing([loose]) == []


@pytest.mark.parametrize(
    "row", [b"\x01\xff\xff\xff\xff", b"\x01\0\0\0\x01\xc0", b"\x01\0\0\0\x02\x91\x01"]
)
def test_an_invalid_key_in_a_row_is_reported(store: Store, row: bytes) -> None:
    table = Table(store, "t", 1)
    store.engine.write(Write(rows=[PutRow("records", table.keys.key(("k",)), row)]))
    with pytest.raises(CorruptionError):
        list(table.scan())


@pytest.mark.parametrize("start", [0, 1, 30, 400])
@pytest.mark.parametrize("added", [0, 1, 3, 200])
def test_an_extended_list_is_the_one_stored_whole(store: Store, start: int, added: int) -> None:
    items = [{"text": f"{at} " * (at % 400), "list": [at]} for at in range(start + added)]
    draft = Draft(store)
    first = draft.keep(items[:start])
    draft.commit()
    draft = Draft(store)
    longer = draft.extend(first, items[start:])
    assert longer == Draft(store).keep(items)
    draft.put(Table(store, "t", 1), ("k",), longer)
    draft.commit()
    assert store.get_value(longer.digest) == items


def test_only_a_list_that_is_there_is_extended(store: Store) -> None:
    draft = Draft(store)
    for value in ({"a": 1}, "text"):
        with pytest.raises(InvalidInputError, match="list"):
            draft.extend(draft.keep(value), [1])
    with pytest.raises(ObjectNotFoundError):
        draft.extend(Link(Digest(bytes(32))), [1])


def test_records_change_in_the_transaction_of_a_commit_or_not_at_all(store: Store) -> None:
    table = Table(store, "also", 1)
    session = store.session("s")

    def step(node: str, count: int, was: Any) -> None:
        draft = Draft(store)
        draft.expect(table, ("count",), was)
        draft.put(table, ("count",), [count, LONG])
        lease = session.claim_lease("me", 60_000)
        session.commit(
            Commit(
                append=[NodeDraft(node, LONG)],
                lease=lease,
                release=True,
                also=draft.as_write(),
            )
        )

    step("a", 1, None)
    first = table.find("count")
    assert first is not None
    step("b", 2, first)
    second = table.find("count")
    assert second is not None
    assert second.value == [2, LONG]
    # The head is as expected, the record is not: neither moves.
    with pytest.raises(ConditionFailedError):
        step("c", 3, first)
    kept = table.find("count")
    assert kept is not None
    assert kept.row == second.row
    head = session.head()
    assert head is not None
    assert (head.revision, head.leaf) == (2, "b")


def test_a_refused_commit_leaves_the_records_of_its_transaction_unwritten(store: Store) -> None:
    table = Table(store, "also", 1)
    session = store.session("s")
    draft = Draft(store)
    draft.put(table, ("k",), 1)
    with pytest.raises(HeadConflictError):
        session.commit(Commit(append=[NodeDraft("a", 1)], expected=7, also=draft.as_write()))
    assert table.find("k") is None
    # Replayed, a turn writes nothing again.
    turn = Commit(append=[NodeDraft("a", 1)], turn="t")
    session.commit(turn._replace(also=draft.as_write()))
    later = Draft(store)
    later.put(table, ("k",), 2)
    assert session.commit(turn._replace(also=later.as_write())).replayed
    found = table.find("k")
    assert found is not None
    assert found.value == 1


def test_a_commit_with_a_record_that_links_to_a_missing_object_is_refused(store: Store) -> None:
    table = Table(store, "also", 1)
    draft = Draft(store)
    draft.put(table, ("k",), Link(Digest(b"\7" * 32)))
    session = store.session("s")
    with pytest.raises(ObjectNotFoundError):
        session.commit(Commit(append=[NodeDraft("a", 1)], also=draft.as_write()))
    assert session.head() is None
    for wrong in ("rows", Write(deletes=[b"\7" * 32])):
        with pytest.raises(InvalidInputError):
            session.commit(Commit(also=wrong))  # type: ignore[arg-type]


def test_find_records_keeps_the_order_asked_with_none_for_absent_records(store: Store) -> None:
    one, two = Table(store, "one", 1), Table(store, "two", 2)
    put(store, one, "a", value=1)
    put(store, two, "a", "b", value=2)
    found = find_records(store, [(two, ("a", "b")), (one, ("a",)), (one, ("b",))])
    assert [None if each is None else each.value for each in found] == [2, 1, None]
    assert [None if each is None else each.key for each in found] == [("a", "b"), ("a",), None]


def test_rows_of_other_tables_change_along_with_records_or_not_at_all(store: Store) -> None:
    table = Table(store, "t", 1)
    for value, expected in ((b"x", None), (b"y", b"z"), (b"y", b"x")):
        draft = Draft(store)
        draft.put(table, ("k",), value)
        draft.also(
            Write(
                conditions=[RowIs("retention", b"k", expected)],
                rows=[PutRow("retention", b"k", value)],
            )
        )
        if expected == b"z":
            with pytest.raises(ConditionFailedError):
                draft.commit()
        else:
            draft.commit()
            found = table.find("k")
            assert found is not None
            assert found.value == value
            assert store.engine.get_rows([RowKey("retention", b"k")]) == [value]
    with pytest.raises(InvalidInputError):
        Draft(store).also(Write(deletes=[bytes(32)]))


def test_blobs_are_kept_by_the_record_that_links_to_them(store: Store) -> None:
    table = Table(store, "t", 1)
    draft = Draft(store)
    link = draft.keep_blob(b"short")
    draft.put(table, ("k",), [link])
    draft.commit()
    assert link.digest == Digest.of_blob(b"short")
    gc.collect(store, grace_ms=0)
    assert store.get_blob(link.digest) == b"short"
    with pytest.raises(InvalidInputError):
        Draft(store).keep_blob("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 3, 150])
def test_a_list_appended_in_steps_equals_the_list_stored_whole(store: Store, step: int) -> None:
    items = [{"text": f"{at} " * (at % 300), "list": [at]} for at in range(600)]
    tail = ListTail()
    for at in range(0, len(items), step):
        draft = Draft(store)
        encoded, tail = draft.append(tail, items[at : at + step])
        # Only the last leaf and the branches above it are stored again.
        assert sum(item.kind == Kind.LIST for item in draft.as_write().objects) <= 3
        assert root_object(encoded, draft.emit) == Draft(store).keep(items[: at + step]).digest
        draft.commit()
        if at % 7 == 0:
            # The end as it is read is the end as it was made.
            tail = Draft(store).open_list(Link(Digest(root_object(encoded, draft.emit))))


def test_a_list_that_repeats_a_part_too_often_is_refused(store: Store) -> None:
    part: Any = ["x" * 100] * 8
    for _ in range(4):
        part = [part] * 16
    Draft(store).append(ListTail(), [part])
    with pytest.raises(ExpansionError):
        Draft(store).append(ListTail(), [part] * 4)
