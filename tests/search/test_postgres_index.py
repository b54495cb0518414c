"""The index of a store on a PostgreSQL server: tables in its schema, and the rights they need."""

from __future__ import annotations

import pytest

psycopg = pytest.importorskip("psycopg")

import casstore
from casstore import NodeDraft
from casstore.errors import ReadOnlyError
from casstore.search import rebuild, update
from casstore.search.postgres import fold
from servers.postgres import Server


def test_words_are_split_and_folded_as_in_sqlite_and_offsets_stay() -> None:
    text = "Crème, brûlée/x.py_1\n"
    assert fold(text) == "Creme  brulee x py 1 "


def test_a_store_on_a_server_is_searched_with_snippets_and_prefixes(postgres_url: str) -> None:
    with casstore.open(postgres_url) as store:
        text = "straw " * 300 + "the Crème brûlée in /repo/dessert.py is done " + "straw " * 300
        session = store.session("s")
        session.append(NodeDraft("a", {"text": text}), NodeDraft("b", "it's 'quoted' & (odd)"))
        [hit] = store.search('brulee "in repo"')
        assert "brûlée in /repo/dessert.py" in hit.snippet
        assert [hit.snippet[start:stop] for start, stop in hit.matches] == ["brûlée", "in", "repo"]
        assert len(hit.snippet) < 300
        assert [hit.node for hit in store.search("dess*")] == ["a"]
        assert [hit.node for hit in store.search("repo/dess*")] == ["a"]
        assert [hit.node for hit in store.search("it's quot*")] == ["b"]
        assert [hit.node for hit in store.search("dessert.py")] == ["a"]
        before = update(store)
        assert (before.texts_added, before.texts) == (0, 2)
        assert rebuild(store)._replace(size_bytes=0) == before._replace(texts_added=2, size_bytes=0)


def test_removed_texts_leave_no_words_in_the_tables(
    postgres_server: Server, postgres_url: str, schema: str
) -> None:
    with casstore.open(postgres_url) as store:
        session = store.session("s")
        session.append(NodeDraft("a", "xylophonesecret"), NodeDraft("b", "harmless"))
        assert len(store.search("xylophonesecret")) == 1
        session.tombstone(["a"])
        assert store.search("xylophonesecret", fresh=False) == []
        store.vacuum(grace_ms=0)
        assert len(store.search("harmless")) == 1
    with psycopg.connect(postgres_server.url()) as connection:
        words = connection.execute(f"SELECT words::text FROM {schema}.search_texts").fetchall()
    assert "xylophonesecret" not in str(words)
    assert "harmless" in str(words)


def test_a_role_without_the_right_gets_an_error_that_names_it(
    postgres_server: Server, postgres_url: str, schema: str
) -> None:
    with casstore.open(postgres_url) as store:
        store.session("s").append(NodeDraft("a", "needle"))
    with psycopg.connect(postgres_server.url(), autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {schema}_writer LOGIN")
        owner.execute(f"GRANT USAGE ON SCHEMA {schema} TO {schema}_writer")
        owner.execute(
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} "
            f"TO {schema}_writer"
        )
        owner.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {schema}_writer")
        url = postgres_server.url(user=f"{schema}_writer", schema=schema)
        with casstore.open(url) as store:
            with pytest.raises(ReadOnlyError, match=f"needs CREATE on schema {schema}"):
                store.search("needle")
            # The store itself works on.
            store.session("s").append("more")
        with (
            casstore.open(postgres_url, readonly=True) as reader,
            pytest.raises(ReadOnlyError, match="no search index"),
        ):
            reader.search("needle")
        with casstore.open(postgres_url) as store:
            assert len(store.search("needle")) == 1
        with (
            casstore.open(url) as store,
            pytest.raises(ReadOnlyError, match=r"INSERT, UPDATE and DELETE on its tables"),
        ):
            store.search("needle")
        with casstore.open(postgres_url, readonly=True) as reader:
            assert [hit.node for hit in reader.search("needle")] == ["a"]
