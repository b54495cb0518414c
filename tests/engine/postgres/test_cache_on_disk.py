"""A cache on disk before a real server: fewer round trips, and never an answer that is not so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg

import casstore
from casstore.engine.postgres.address import parse
from casstore.engine.postgres.engine import PostgresEngine
from casstore.errors import StorageUnavailableError
from casstore.maintenance import gc
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store
from servers.delay_proxy import DelayProxy
from servers.postgres import Server

TEXTS = {f"n{number}": f"{number} " * 400 for number in range(30)}


def url(server: Server, schema: str, cache: Path, **words: Any) -> str:
    return server.url(schema=schema, cache=str(cache), **words)


def fill(store: Store) -> None:
    drafts = [NodeDraft(name, text) for name, text in TEXTS.items()]
    store.session("s").commit(Commit(append=drafts))


def read(store: Store) -> dict[str, object]:
    return {node.id: node.payload for node in store.session("s").nodes()}


def kept_files(cache: Path) -> list[Path]:
    return list(cache.rglob("data.mdb"))


@contextmanager
def link(server: Server) -> Iterator[DelayProxy]:
    with DelayProxy(str(server.place / f".s.PGSQL.{server.port}"), delay_s=0) as proxy:
        yield proxy


def test_a_cached_object_is_read_without_a_round_trip(
    postgres_server: Server, schema: str, tmp_path: Path
) -> None:
    with casstore.open(postgres_server.url(schema=schema)) as store:
        fill(store)
    trips = []
    with link(postgres_server) as proxy:
        for _ in range(2):
            # One connection: a second one that the pool makes meanwhile has trips of its own.
            where = url(postgres_server, schema, tmp_path, port=proxy.port, pool="1")
            with casstore.open(where) as store:
                digests = [info.digest for info in store.engine.scan_objects()]
                before = proxy.traffic()
                found = store.engine.get_many(digests)
                assert None not in found
                trips.append(proxy.traffic().since(before).round_trips)
                assert read(store) == TEXTS
    assert trips == [1, 0]


def test_a_store_recreated_under_the_same_url_does_not_use_the_old_cache(
    postgres_server: Server, schema: str, tmp_path: Path
) -> None:
    where = url(postgres_server, schema, tmp_path)
    with casstore.open(where) as store:
        digest = store.put_blob(b"of the old one" * 100)
    with casstore.open(where) as store:
        assert store.get_blob(digest)
    assert kept_files(tmp_path)
    with psycopg.connect(postgres_server.url(), autocommit=True) as owner:
        owner.execute(f"DROP SCHEMA {schema} CASCADE".encode())
    with casstore.open(where) as store:
        assert store.engine.get_many([digest]) == [None]


def test_a_collector_deletes_removed_objects_from_its_disk_cache(
    postgres_server: Server, schema: str, tmp_path: Path
) -> None:
    where = url(postgres_server, schema, tmp_path)
    with casstore.open(where) as store:
        fill(store)
    with casstore.open(where) as store, casstore.open(where) as other:
        assert read(store) == read(other) == TEXTS
        digests = [info.digest for info in store.engine.scan_objects()]
        assert kept_files(tmp_path)
        store.delete_session("s")
        assert gc.collect(store, grace_ms=0).objects_swept == len(digests)
        assert kept_files(tmp_path) == []
        assert store.engine.get_many(digests) == [None] * len(digests)
    with casstore.open(where) as store:
        assert store.engine.get_many(digests) == [None] * len(digests)


# A cursor of psycopg whose connection was cut cannot be closed, and says so.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*ServerCursor")
def test_a_collector_clears_its_cache_whichever_answer_is_lost(
    postgres_server: Server, schema: str, tmp_path: Path
) -> None:
    with link(postgres_server) as proxy:
        where = url(postgres_server, schema, tmp_path, port=proxy.port, pool="1")
        lost_any = False
        for number in range(50):
            with casstore.open(postgres_server.url(schema=schema)) as store:
                digest = store.put_blob(b"%d" % number * 1000)
            with casstore.open(where) as store:
                assert store.get_blob(digest)
                assert kept_files(tmp_path)
                lost = proxy.lose_next_answer(after=number)
                with suppress(StorageUnavailableError):
                    # Marking has its own connection and is not retried.
                    gc.collect(store, grace_ms=0)
                is_lost = lost.is_set()
                proxy.lose_nothing()
                if store.missing([digest]):
                    assert store.engine.get_many([digest]) == [None]
                    assert kept_files(tmp_path) == []
            if not is_lost:
                break
            lost_any = True
        assert lost_any
        assert not is_lost


def test_a_process_that_notices_a_collection_drops_objects_cached_before_it(
    postgres_server: Server, schema: str, tmp_path: Path
) -> None:
    where = url(postgres_server, schema, tmp_path)
    with casstore.open(where) as store:
        fill(store)
    with casstore.open(where) as store, casstore.open(postgres_server.url(schema=schema)) as far:
        assert read(store) == TEXTS
        digests = [info.digest for info in store.engine.scan_objects()]
        far.delete_session("s")
        gc.collect(far, grace_ms=0)
        # Any write reveals the new epoch; so does opening.
        store.put_blob(b"anything")
        assert kept_files(tmp_path) == []
        assert store.engine.get_many(digests) == [None] * len(digests)


def test_a_process_that_opens_the_cache_after_a_collection_uses_nothing_older(
    postgres_server: Server, schema: str, tmp_path: Path
) -> None:
    where = url(postgres_server, schema, tmp_path)
    with casstore.open(where) as store:
        fill(store)
    with casstore.open(where) as store:
        assert read(store) == TEXTS
        digests = [info.digest for info in store.engine.scan_objects()]
    with casstore.open(postgres_server.url(schema=schema)) as far:
        far.delete_session("s")
        gc.collect(far, grace_ms=0)
    with casstore.open(where, readonly=True) as store:
        assert store.engine.get_many(digests) == [None] * len(digests)


def test_a_store_works_with_a_warning_if_its_cache_directory_is_unusable(
    postgres_server: Server, schema: str, tmp_path: Path
) -> None:
    place = tmp_path / "file"
    place.write_text("")
    with pytest.warns(RuntimeWarning, match="the server is asked instead"):
        store = casstore.open(url(postgres_server, schema, place))
    with store:
        fill(store)
        assert read(store) == TEXTS


def test_there_is_no_disk_cache_by_default(postgres_url: str) -> None:
    assert parse(postgres_url).cache is None
    with casstore.open(postgres_url) as store:
        engine = store.engine
        assert isinstance(engine, PostgresEngine)
        assert engine._spare is None
