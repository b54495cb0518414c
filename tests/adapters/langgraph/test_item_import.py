"""What SqliteStore and PostgresStore remember moves over whole, is compared, and stays there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

for needed in ("psycopg", "langgraph.store.postgres", "langgraph.store.sqlite"):
    pytest.importorskip(needed, reason="needs the extra: pip install '.[dev]'")

import psycopg
from langgraph.store.base import PutOp

from casstore.adapters.langgraph import CasstoreStore
from casstore.adapters.langgraph.item_import import EXPIRED
from casstore.adapters.langgraph.item_records import ItemRow, items_table
from casstore.errors import BadItemError, ConflictError, ItemConflictError
from casstore.maintenance.progress import Step
from casstore.session.records import Draft
from casstore.store import Store
from servers.postgres import Server
from tests.adapters.langgraph.memories import Memory, PostgresMemory, SqliteMemory
from tests.adapters.langgraph.test_checkpoint_import import Stopped
from tests.adapters.langgraph.test_threads import in_between, objects, records

# How SqliteStore itself writes times, on Python 3.12 and newer.
pytestmark = pytest.mark.filterwarnings("ignore:The default datetime adapter:DeprecationWarning")

_numbers = count(1)

VALUES: list[dict[str, Any]] = [
    {},
    {"text": "ä\n\U0001f600", "none": None, "yes": True, "no": False},
    {"n": 1, "whole": 1.0, "real": 0.1, "small": 5e-324, "far": 2**64 - 1, "least": -(2**63)},
    {"z": 1, "a": {"list": [1, [2.5, {"deep": [[]]}], "x"], "": "empty"}},
    {"long": "word " * 40_000},
    {"many": [{"n": n} for n in range(3_000)]},
    {"down": [[[[[[[[[[[[[[[[[[[[["here"]]]]]]]]]]]]]]]]]]]]]},
]
NAMESPACES = [("users",), ("users", "ada"), ("users", "ada", "notes"), ("ß", "a_b%", "x" * 600)]


@pytest.fixture(params=["SqliteStore", "PostgresStore"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Memory:
    if request.param == "SqliteStore":
        return SqliteMemory(tmp_path / "memory.sqlite")
    server: Server = request.getfixturevalue("postgres_server")
    schema = f"memory_{next(_numbers)}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}".encode())
    return PostgresMemory(f"{server.url()}&options=-csearch_path%3D{schema}")


def fill(memory: Memory) -> list[tuple[tuple[str, ...], str]]:
    """Items of all kinds; where they are."""
    with memory.open() as theirs:
        for namespace in NAMESPACES:
            for n, value in enumerate(VALUES):
                theirs.put(namespace, f"k{n}", value, ttl=None if n % 3 else 60)
        theirs.put(("users",), "", {"empty": "key"})
        theirs.put(("users",), "l" * 700, {"long": "key"}, ttl=1.5)
    places = [(namespace, f"k{n}") for namespace in NAMESPACES for n in range(len(VALUES))]
    return [*places, (("users",), ""), (("users",), "l" * 700)]


def told(item: Any) -> Any:
    """An item as text, for 1 and 1.0 are equal; without a zone SQLite's times are UTC."""
    times = [
        each if each.tzinfo else each.replace(tzinfo=UTC)
        for each in (item.created_at, item.updated_at)
    ]
    return (item.namespace, item.key, repr(item.value), *times)


def contents(store: Store) -> dict[tuple[str, ...], ItemRow]:
    table = items_table(store)
    return {record.key: table.decode(record)._replace(record=None) for record in table.scan()}


def put_content(store: Store, place: tuple[str, ...], content: ItemRow | None) -> None:
    """Make an item in the store something else, or nothing."""
    draft = Draft(store)
    if content is None:
        draft.delete(items_table(store), place)
    else:
        items_table(store).put(draft, content)
    draft.commit()


def test_everything_is_imported_and_the_source_is_unchanged(memory: Memory, store: Store) -> None:
    places = fill(memory)
    before = memory.fingerprint()
    steps: list[Step] = []
    report = memory.move(store, progress=steps.append)
    assert memory.fingerprint() == before
    ours = CasstoreStore(store)
    with memory.open() as theirs:
        for namespace, key in places:
            want = theirs.get(namespace, key, refresh_ttl=False)
            assert told(ours.get(namespace, key, refresh_ttl=False)) == told(want)
        found = ours.search((), limit=1000, refresh_ttl=False)
        assert {(item.namespace, item.key) for item in found} == set(places)
        assert ours.list_namespaces() == sorted(theirs.list_namespaces())
    assert report.part("items")[1:] == (len(places), len(places), 0)
    assert (report.dry_run, report.notes) == (False, ())
    assert report.store_bytes is not None
    assert report.store_bytes_before is not None
    assert report.store_bytes_before < report.store_bytes
    assert report.source_bytes > 0
    assert {step.phase: step.done for step in steps} == dict.fromkeys(
        ("copy", "verify"), len(places)
    )


def test_imported_items_keep_their_expiry_time(memory: Memory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "ends", {"n": 1}, ttl=90)
        theirs.put(("a",), "stays", {"n": 2})
    [[text]] = memory.execute("SELECT CAST(expires_at AS text) FROM store WHERE key = 'ends'")
    want = datetime.fromisoformat(text)
    memory.move(store)
    ends, stays = contents(store)[("a.", "ends")], contents(store)[("a.", "stays")]
    assert ends.ttl_minutes == 90.0
    assert ends.expires_us is not None
    assert datetime.fromtimestamp(0, UTC) + timedelta(microseconds=ends.expires_us) == want
    assert (stays.ttl_minutes, stays.expires_us) == (None, None)


def test_an_end_without_a_time_to_live_and_the_reverse_are_kept(
    memory: Memory, store: Store
) -> None:
    """Nobody puts that, but SQLite has no date for very many minutes, and refreshes to none."""
    with memory.open() as theirs:
        for key in ("end", "ttl"):
            theirs.put(("a",), key, {"n": 1}, ttl=90)
    memory.execute("UPDATE store SET ttl_minutes = NULL WHERE key = 'end'")
    memory.execute("UPDATE store SET expires_at = NULL WHERE key = 'ttl'")
    memory.move(store)
    found = contents(store)
    assert found[("a.", "end")].ttl_minutes is None
    assert found[("a.", "end")].expires_us is not None
    assert found[("a.", "ttl")][5:7] == (90.0, None)
    assert memory.move(store).imported == 0
    ours = CasstoreStore(store)
    for key in ("end", "ttl"):
        found_item = ours.get(("a",), key)
        assert found_item is not None
        assert found_item.value == {"n": 1}
    # Reading has begun the time of the one that has minutes to live, as it would have there.
    assert contents(store)[("a.", "ttl")].expires_us is not None


def test_a_dry_run_reports_the_same_and_changes_nothing(memory: Memory, store: Store) -> None:
    places = fill(memory)
    steps: list[Step] = []
    before = memory.fingerprint()
    told_first = memory.move(store, dry_run=True, progress=steps.append)
    assert records(store) == []
    assert objects(store) == 0
    assert memory.fingerprint() == before
    assert (told_first.dry_run, told_first.part("items").found, told_first.imported) == (
        (True, len(places), len(places))
    )
    assert {step.phase for step in steps} == {"look"}
    done = memory.move(store)
    assert (done.part("items").found, done.imported) == (
        told_first.part("items").found,
        told_first.imported,
    )
    kept = [(row.key, row.value) for row in records(store)]
    memory.execute("UPDATE store SET updated_at = '2020-01-01 00:00:00+00:00' WHERE key = 'k1'")
    with pytest.raises(ItemConflictError):
        memory.move(store, dry_run=True)
    would = memory.move(store, dry_run=True, replace=True)
    assert would.part("items")[2:] == (0, len(NAMESPACES))
    assert [(row.key, row.value) for row in records(store)] == kept


def test_a_stopped_import_can_continue(
    memory: Memory, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 4)
    places = fill(memory)
    steps: list[Step] = []

    def stop(step: Step) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        memory.move(store, progress=stop)
    assert len(contents(store)) == 12
    report = memory.move(store)
    assert (report.part("items").found, report.imported) == (len(places), len(places) - 12)
    again = memory.move(store)
    assert (again.part("items").found, again.imported) == (len(places), 0)


def test_pages_are_bounded_by_bytes_and_lose_nothing(
    memory: Memory, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = fill(memory)
    monkeypatch.setattr("casstore.compat.importing.PAGE_BYTES", 100)
    steps: list[Step] = []
    report = memory.move(store, progress=steps.append)
    assert len(steps) > 20
    assert report.part("items").found == report.imported == len(contents(store)) == len(places)


def test_a_second_import_imports_only_new_items(memory: Memory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "old", {"n": 1})
        memory.move(store)
        theirs.put(("a",), "new", {"n": 2})
    report = memory.move(store)
    assert report.part("items")[1:] == (2, 1, 0)


def test_an_item_changed_in_the_source_is_replaced_only_on_request(
    memory: Memory, store: Store
) -> None:
    with memory.open() as theirs:
        theirs.put(("a", "b"), "k", {"n": 1})
        theirs.put(("a", "b"), "same", {"n": 1})
        memory.move(store)
        theirs.put(("a", "b"), "k", {"n": 2})
    with pytest.raises(ItemConflictError, match=r"'k' of namespace 'a\.b'.* value") as refused:
        memory.move(store)
    assert (refused.value.namespace, refused.value.key, refused.value.what) == ("a.b", "k", "value")
    ours = CasstoreStore(store)
    found = ours.get(("a", "b"), "k")
    assert found is not None
    assert found.value == {"n": 1}
    report = memory.move(store, replace=True)
    assert report.part("items")[1:] == (2, 0, 1)
    with memory.open() as theirs:
        assert told(ours.get(("a", "b"), "k")) == told(theirs.get(("a", "b"), "k"))
    assert memory.move(store).imported == 0


def test_an_item_changed_in_the_store_is_not_overwritten(memory: Memory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})
    memory.move(store)
    ours = CasstoreStore(store)
    # Equal to what is there, for Python; and the time is another.
    ours.put(("a",), "k", {"n": True})
    for dry_run in (True, False):
        with pytest.raises(ItemConflictError):
            memory.move(store, dry_run=dry_run)
    found = ours.get(("a",), "k")
    assert found is not None
    assert found.value["n"] is True


@pytest.mark.parametrize("replace", [False, True])
def test_an_item_that_is_put_while_it_is_moved_is_not_overwritten(
    memory: Memory, store: Store, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})
    ours = CasstoreStore(store)
    in_between(monkeypatch, lambda: ours.put(("a",), "k", {"mine": 1}))
    with pytest.raises(ConflictError, match="once more"):
        memory.move(store, replace=replace)
    found = ours.get(("a",), "k")
    assert found is not None
    assert found.value == {"mine": 1}


def test_an_expiry_extended_by_reading_is_no_conflict_and_the_later_one_is_kept(
    memory: Memory, store: Store
) -> None:
    """Reading begins the time of an item anew, there and here."""
    place = ("a.", "k")
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1}, ttl=60)
    memory.move(store)
    first = contents(store)[place]
    CasstoreStore(store).get(("a",), "k")
    read = contents(store)[place]
    assert first.expires_us is not None
    assert read.expires_us is not None
    assert read.expires_us > first.expires_us
    assert memory.move(store).imported == 0
    assert contents(store)[place] == read
    later = datetime.now(UTC) + timedelta(minutes=70)
    memory.execute("UPDATE store SET expires_at = ?", later.isoformat(" "))
    report = memory.move(store)
    assert report.part("items")[2:] == (0, 1)
    now = contents(store)[place]
    assert now.expires_us == (later - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
    # An end that no reading explains is another one.
    put_content(store, place, now._replace(expires_us=now.expires_us + 10**12))
    with pytest.raises(ItemConflictError, match="another expiry"):
        memory.move(store)


def test_expired_items_are_reported_and_omitted_if_asked_for(memory: Memory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "late", {"n": 1}, ttl=5)
        theirs.put(("a",), "live", {"n": 2}, ttl=5)
        memory.execute(
            "UPDATE store SET expires_at = '2020-01-01 00:00:00+00:00' WHERE key = 'late'"
        )
        # LangGraph's stores return expired items until they are swept.
        assert theirs.get(("a",), "late", refresh_ttl=False) is not None
    assert memory.move(store, dry_run=True).note(EXPIRED).number == 1
    report = memory.move(store)
    assert (report.imported, report.note(EXPIRED).number) == (2, 1)
    # The note must not say that they are hidden: CasstoreStore returns them, too.
    assert CasstoreStore(store).get(("a",), "late", refresh_ttl=False) is not None
    assert "not show" not in EXPIRED
    assert CasstoreStore(store).get(("a",), "late", refresh_ttl=False) is not None
    ours = CasstoreStore(store, ttl={"omit_expired": True})
    assert ours.get(("a",), "late") is None
    assert ours.get(("a",), "live") is not None
    assert ours.sweep_ttl() == 1


CHANGES: dict[str, Callable[[ItemRow], ItemRow | None]] = {
    "value": lambda item: item._replace(value={"d": ["n", 1.0]}),
    "created_at": lambda item: item._replace(created_us=item.created_us + 1),
    "updated_at": lambda item: item._replace(updated_us=item.updated_us - 1),
    "time to live": lambda item: item._replace(ttl_minutes=61.0),
    "expiry": lambda item: item._replace(expires_us=None),
    "deleted": lambda item: None,
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("replace", [False, True])
def test_all_of_an_item_is_compared_after_it_was_moved(
    memory: Memory, store: Store, what: str, replace: bool
) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1}, ttl=60)

    def spoil(step: Step) -> None:
        if step.phase == "copy":
            place = ("a.", "k")
            put_content(store, place, CHANGES[what](contents(store)[place]))

    with pytest.raises(ConflictError, match="during the import" if replace else what):
        memory.move(store, progress=spoil, replace=replace)


def test_namespaces_are_split_into_labels_at_dots(memory: Memory, store: Store) -> None:
    """As their own stores read them. Older ones let a label with a dot in, by ``batch``."""
    with memory.open() as theirs:
        theirs.put(("a", "b"), "k", {"n": 1})
        theirs.batch([PutOp((), "nowhere", {"n": 2})])
        places = ("old.label", "a..b", ".", "x.")
        for prefix in places:
            memory.execute(
                "INSERT INTO store (prefix, key, value) VALUES (?, 'k', ?)", prefix, '{"n": 3}'
            )
        memory.move(store)
        ours = CasstoreStore(store)
        for prefix in places:
            assert (*prefix.split("."),) in ours.list_namespaces()
        assert ours.get(("old", "label"), "k") is not None
        got = [each.batch([_get((), "nowhere")])[0] for each in (ours, theirs)]
        assert [told(each)[:3] for each in got] == [((), "nowhere", "{'n': 2}")] * 2
        assert {item.namespace for item in ours.search((), limit=100)} == {
            (), ("a", "b"), ("old", "label"), ("a", "", "b"), ("", ""), ("x", "")
        }  # fmt: skip
    assert memory.move(store).imported == 0


def _get(namespace: tuple[str, ...], key: str) -> Any:
    from langgraph.store.base import GetOp

    return GetOp(namespace, key, refresh_ttl=False)


# What is written behind the back of a store, into the column, and what is said of it.
ODD: dict[str, tuple[str, str, str]] = {
    "a list": ("value", "[1]", "a list, not a map"),
    "a large number": ("value", f'{{"n": {2**64}}}', "64-bit"),
    "a very large number": ("value", '{"n": 1' + "0" * 5000 + "}", "4300 digits"),
    "deep nesting": ("value", '{"n":' + "[" * 500 + "]" * 500 + "}", "Recursion limit"),
    # Whether the reader of JSON or the serialiser gives up first depends on the version of Python.
    "deeper nesting": (
        "value",
        '{"n":' + "[" * 3000 + "]" * 3000 + "}",
        "nested too deeply|Recursion limit",
    ),
    "a long key": ("key", "k" * 20_000, "at most 16384 bytes"),
    "a time to live below 0": ("ttl_minutes", "-5", "from 0 minutes"),
    "a time to live for ever": ("ttl_minutes", "2000000000", "1,000 years"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dry_run", [True, False])
def test_an_item_that_cannot_be_stored_is_reported_by_name(
    memory: Memory, store: Store, odd: str, dry_run: bool
) -> None:
    column, content, reason = ODD[odd]
    refuse_odd(memory, store, column, content, reason, dry_run=dry_run)


def refuse_odd(
    memory: Memory, store: Store, column: str, content: Any, reason: str, *, dry_run: bool
) -> BadItemError:
    """Put a sound item and one that is not, and see that nothing is moved but an error told."""
    with memory.open() as theirs:
        theirs.put(("a", "b"), "odd", {"n": 1}, ttl=60)
    memory.execute(f"UPDATE store SET {column} = ?", content)
    with pytest.raises(BadItemError, match=reason) as refused:
        memory.move(store, dry_run=dry_run)
    assert "item '" in str(refused.value)
    if column not in ("prefix", "key"):
        assert (refused.value.namespace, refused.value.key) == ("a.b", "odd")
    assert records(store) == []
    return refused.value


def test_tables_from_before_time_to_live_are_read(memory: Memory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})
    memory.execute("DROP INDEX idx_store_expires_at")
    for column in ("ttl_minutes", "expires_at"):
        memory.execute(f"ALTER TABLE store DROP COLUMN {column}")
    assert memory.move(store).imported == 1
    assert contents(store)[("a.", "k")][5:7] == (None, None)


def test_a_store_without_items_moves_too(memory: Memory, store: Store) -> None:
    report = memory.move(store)
    assert (report.imported, report.notes) == (0, ())
