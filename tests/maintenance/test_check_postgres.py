"""``check`` on a store on a server: damage done behind casstore's back is found and named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import zstandard

psycopg = pytest.importorskip("psycopg")

import casstore
from casstore import Commit, NodeDraft, Store
from casstore.engine.faults import Checking
from casstore.engine.protocol import MAX_OBJECT_BYTES, Collecting
from casstore.errors import CorruptionError
from casstore.maintenance import check, gc
from casstore.maintenance.check import CheckReport
from casstore.testing.engine_fixtures import all_objects
from servers.postgres import Server

TURNS = 6


class Wounded(NamedTuple):
    """A store, and a way to it that casstore knows nothing of."""

    store: Store
    connection: Any
    schema: str

    def wound(self, statement: str) -> None:
        done = self.connection.execute(statement.format(s=self.schema))
        assert done.rowcount > 0, "the wound hit nothing"


@pytest.fixture
def wounded(postgres_server: Server, postgres_url: str, schema: str) -> Iterator[Wounded]:
    with (
        casstore.open(postgres_url) as store,
        psycopg.connect(postgres_server.url(), autocommit=True) as connection,
    ):
        for turn in range(TURNS):
            for name in ("s", "whole"):
                draft = NodeDraft(f"n{turn}", {"text": f"{name} says {turn} " * 60})
                store.session(name).commit(Commit(append=[draft]))
        store.tag("long", store.put_value({str(n): "x" * 600 for n in range(300)}))
        yield Wounded(store, connection, schema)


def codes(report: CheckReport) -> set[str]:
    return {finding.code for finding in report.findings}


# The newest manifest of "s"; what it says is found by nobody else.
HEAD = """(SELECT o.id FROM {s}.objects o JOIN {s}.rows r ON r.kind = 2
    AND r.key = 's' || '\\x00'::bytea AND position(o.digest IN r.value) > 0 LIMIT 1)"""


def test_a_sound_store_is_sound_at_every_level(wounded: Wounded) -> None:
    assert isinstance(wounded.store.engine, Checking)
    for level in check.LEVELS:
        report = check.check(wounded.store, level=level)
        assert report.sound
        assert report.findings == ()
    assert report.contents_checked == report.objects_checked > 2 * TURNS


def test_only_objects_stored_since_the_last_check_are_checked(wounded: Wounded) -> None:
    store = wounded.store
    assert check.check(store, level="full").sound
    assert check.check(store, level="full", since_last=True).objects_checked == 0
    store.put_blob(b"new")
    assert check.check(store, level="full", since_last=True).objects_checked == 1


def test_changed_content_is_reported_with_the_object_that_needs_it(wounded: Wounded) -> None:
    wounded.wound(
        "UPDATE {s}.objects SET content = set_byte(content, octet_length(content) - 1, "
        "get_byte(content, octet_length(content) - 1) # 1) WHERE id = " + HEAD
    )
    assert check.check(wounded.store, level="connectivity").sound
    report = check.check(wounded.store, level="full")
    assert not report.sound
    assert codes(report) <= {"object_damaged", "object_malformed", "node_table_wrong"}
    assert "object_damaged" in codes(report)
    assert [one.session for one in report.affected] == ["s"]


def test_check_does_not_decompress_content_that_claims_an_excessive_size(wounded: Wounded) -> None:
    """Row and frame agree on more than any object has, and the frame is a few kilobytes long."""
    claimed = 4 * MAX_OBJECT_BYTES
    frame = zstandard.compress(bytes(claimed))
    wounded.wound(
        f"UPDATE {{s}}.objects SET codec = 1, size_bytes = {claimed}, "
        f"content = '\\x{frame.hex()}' WHERE id = " + HEAD
    )
    report = check.check(wounded.store, level="full")
    assert [one.session for one in report.affected] == ["s"]
    assert any(f"says that it has {claimed} bytes" in finding.what for finding in report.findings)


def test_a_missing_object_is_reported_with_the_object_that_needs_it(wounded: Wounded) -> None:
    wounded.wound("DELETE FROM {s}.objects WHERE id = " + HEAD)
    report = check.check(wounded.store, level="connectivity")
    assert "root_missing" in codes(report)
    assert [one.session for one in report.affected] == ["s"]


def test_a_missing_child_is_found(wounded: Wounded) -> None:
    wounded.wound(
        "DELETE FROM {s}.objects WHERE id = (SELECT children[1] FROM {s}.objects "
        "WHERE cardinality(children) > 20 ORDER BY id DESC LIMIT 1)"
    )
    report = check.check(wounded.store, level="connectivity")
    assert "object_missing" in codes(report)
    assert report.affected_pins == ("long",)


def test_check_finds_stored_links_that_differ_from_the_object(wounded: Wounded) -> None:
    wounded.wound(
        "UPDATE {s}.objects SET children = children[2:] WHERE id = (SELECT id FROM {s}.objects "
        "WHERE cardinality(children) > 20 ORDER BY id DESC LIMIT 1)"
    )
    assert check.check(wounded.store, level="connectivity").sound
    assert codes(check.check(wounded.store, level="full")) == {"links_differ"}


def test_check_finds_an_object_with_a_lower_id_than_its_child(wounded: Wounded) -> None:
    wounded.wound(
        "UPDATE {s}.objects o SET children = array_append(children, o.id + 1) WHERE id = " + HEAD
    )
    assert "link_order" in codes(check.check(wounded.store, level="connectivity"))


def test_a_sequence_that_would_reuse_ids_is_found(wounded: Wounded) -> None:
    wounded.connection.execute(f"SELECT setval('{wounded.schema}.object_ids', 3)")
    report = check.check(wounded.store, level="quick")
    assert codes(report) == {"header_damaged"}
    assert "the highest object id is" in report.findings[0].what


def test_a_row_of_no_table_is_found(wounded: Wounded) -> None:
    wounded.wound("INSERT INTO {s}.rows VALUES (9999, 'a', 'b')")
    assert codes(check.check(wounded.store, level="connectivity")) == {"row_damaged"}


def test_check_finds_a_malformed_row(wounded: Wounded) -> None:
    wounded.wound("UPDATE {s}.rows SET value = '\\xdeadbeef' WHERE key = 's' || '\\x00'::bytea")
    report = check.check(wounded.store, level="connectivity")
    assert not report.sound
    assert "row_malformed" in codes(report)


@pytest.mark.parametrize(
    "wound",
    [
        "SET digest = 'short'",
        "SET children = ARRAY[NULL]::bigint[]",
        "SET children = '{{{{1,2}},{{3,4}}}}'::bigint[]",
        "SET id = -7",
    ],
)
def test_a_malformed_object_is_reported_and_nothing_is_collected(
    wounded: Wounded, wound: str
) -> None:
    wounded.store.delete_session("whole")
    stored = len(all_objects(wounded.store.engine))
    wounded.wound("UPDATE {s}.objects " + wound + " WHERE id = " + HEAD)
    for level in ("connectivity", "full"):
        assert codes(check.check(wounded.store, level=level)) & {"object_damaged", "header_damaged"}
    assert gc.collect(wounded.store, grace_ms=0).outcome is gc.Outcome.REFUSED
    row = wounded.connection.execute(f"SELECT count(*) FROM {wounded.schema}.objects").fetchone()
    assert row == (stored,)


def test_a_store_without_its_collection_state_is_damaged(
    wounded: Wounded, postgres_url: str
) -> None:
    wounded.wound("DELETE FROM {s}.state")
    engine = wounded.store.engine
    assert isinstance(engine, Collecting)
    with pytest.raises(CorruptionError):
        engine.commits_since_collection()
    with casstore.open(postgres_url) as again:
        assert codes(check.check(again, level="quick")) == {"header_damaged"}


@pytest.mark.parametrize("number", ["-1", str(1 << 63), "x"])
def test_an_invalid_store_number_is_damage(
    wounded: Wounded, postgres_url: str, number: str
) -> None:
    wounded.wound(f"UPDATE {{s}}.meta SET value = '{number}' WHERE name = 'store'")
    with pytest.raises(CorruptionError):
        casstore.open(postgres_url)
