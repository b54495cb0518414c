"""What a search finds, in which order, and what it refuses."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

import casstore.aio
from casstore import NodeDraft
from casstore.errors import InvalidInputError, SessionDeletedError
from casstore.store import Store
from casstore.testing import ManualClock


def nodes(store: Store, words: str, **options: object) -> list[str | None]:
    return [hit.node for hit in store.search(words, **options)]  # type: ignore[arg-type]


def test_all_words_must_occur_and_case_and_accents_do_not_matter(any_store: Store) -> None:
    session = any_store.session("s")
    session.append(NodeDraft("a", "The train to Zürich is late"), NodeDraft("b", "the bus is late"))
    assert nodes(any_store, "LATE zurich") == ["a"]
    assert sorted(filter(None, nodes(any_store, "late"))) == ["a", "b"]
    assert nodes(any_store, "zurich bus") == []


def test_quoted_words_must_follow_each_other_and_a_star_completes_a_word(store: Store) -> None:
    session = store.session("s")
    session.append(NodeDraft("a", "no red car"), NodeDraft("b", "a car, red and new"))
    assert nodes(store, '"red car"') == ["a"]
    assert nodes(store, '"red car') == ["a"]
    assert sorted(filter(None, nodes(store, "red ca*"))) == ["a", "b"]
    assert nodes(store, "ca") == []


@pytest.mark.parametrize("words", ["AND", "a OR b", "NEAR(a b)", "text:a", 'a"b', "-a", "^a", "a)"])
def test_no_query_word_is_interpreted_as_an_operator(any_store: Store, words: str) -> None:
    any_store.session("s").append("something else")
    assert any_store.search(words) == []


@pytest.mark.parametrize("words", ["", "  ", "?!", '""', "*", "a" * 5000, "a " * 100])
def test_a_query_without_words_is_refused_with_the_remedy(store: Store, words: str) -> None:
    with pytest.raises(InvalidInputError, match="words must"):
        store.search(words)


def test_the_better_match_comes_first_and_the_newer_one_among_equals(store: Store) -> None:
    session = store.session("s")
    long = "needle " + "straw " * 200
    session.append(NodeDraft("long", long), NodeDraft("short", "a needle"))
    session.append(NodeDraft("newer", "a needle"))
    assert nodes(store, "needle") == ["newer", "short", "long"]
    assert nodes(store, "needle", limit=1) == ["newer"]


def test_the_snippet_is_one_line_around_the_words(store: Store) -> None:
    text = "begin " * 100 + "\n\n the needle\there\x02 " + "end " * 100
    store.session("s").append({"text": text})
    [hit] = store.search("needle")
    assert "\n" not in hit.snippet
    assert len(hit.snippet) < 300
    assert [hit.snippet[start:stop] for start, stop in hit.matches] == ["needle"]


def test_all_texts_of_a_payload_are_found_but_not_its_keys_and_roles(store: Store) -> None:
    content = [{"type": "text", "text": "hello"}, {"type": "tool_use", "input": {"path": "x.py"}}]
    store.session("s").append(NodeDraft("n", {"role": "user", "content": content}))
    assert nodes(store, "hello") == nodes(store, "x.py") == ["n"]
    assert nodes(store, "user") == nodes(store, "content") == nodes(store, "tool_use") == []


def test_long_payloads_in_other_objects_are_found_to_their_end(store: Store) -> None:
    store.session("s").append(NodeDraft("n", {"text": "straw " * 50_000 + "needle"}))
    assert nodes(store, "needle") == ["n"]


def test_components_are_found_with_their_names(store: Store) -> None:
    session = store.session("s")
    session.append("x", tool_state={"cwd": "/repo/needle"}, notes="a needle as a value")
    found = [(hit.kind, hit.component, hit.node) for hit in store.search("needle")]
    assert sorted(found) == [("component", "notes", None), ("component", "tool_state", None)]
    session.append("y", tool_state={"cwd": "/other"})
    assert [hit.component for hit in store.search("needle")] == ["notes"]
    assert nodes(store, "needle", kinds=["node"]) == []


def test_a_search_can_be_restricted_to_kinds_sessions_and_a_time(
    any_store: Store, clock: ManualClock
) -> None:
    first, second = any_store.session("first"), any_store.session("second")
    first.append(NodeDraft("a", "needle"), tool_state={"text": "needle"})
    clock.now_ms += 10_000
    at_ms = any_store.engine.now_ms()
    first.append(NodeDraft("b", "needle"))
    second.append(NodeDraft("c", "needle"))
    assert sorted(filter(None, nodes(any_store, "needle", kinds=["node"]))) == ["a", "b", "c"]
    assert nodes(any_store, "needle", sessions=["second"]) == ["c"]
    assert sorted(filter(None, nodes(any_store, "needle", since=at_ms))) == ["b", "c"]
    moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    assert nodes(any_store, "needle", since=moment, kinds=["node"], sessions=["first"]) == ["b"]
    assert [hit.node for hit in first.search("needle", kinds=["node"], since=at_ms)] == ["b"]
    assert any_store.search("needle", sessions=["nobody"]) == []


def test_the_time_of_a_node_is_that_of_its_commit_also_after_a_rewind(
    store: Store, clock: ManualClock, tmp_path: Path
) -> None:
    from casstore.engine.lmdb.engine import LmdbEngine

    with Store(LmdbEngine(str(tmp_path / "timed"), clock=clock)) as timed:
        session = timed.session("s")
        times = []
        for number in range(5):
            clock.now_ms += 1000
            times.append(clock())
            session.append(NodeDraft(f"n{number}", f"needle {number}"))
        clock.now_ms += 1000
        session.rewind(3)
        clock.now_ms += 1000
        session.append(NodeDraft("last", "needle last"))
        found = {hit.node: hit.committed_at_ms for hit in timed.search("needle")}
        expected = {f"n{number}": times[number] for number in range(3)}
        assert found == {**expected, "last": clock()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": "node"}, "kinds must be a list"),
        ({"kinds": ["nodes"]}, "kinds may name node, component; got 'nodes'"),
        ({"sessions": "s"}, "sessions must be a list"),
        ({"sessions": [""]}, "a session id must"),
        ({"since": "yesterday"}, "since must be a whole number"),
        ({"limit": 0}, "limit must be a whole number from 1"),
        ({"max_sessions": 0}, "max_sessions must be a whole number"),
        ({"fresh": "no"}, "fresh must be a bool"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    store: Store, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        store.search("needle", **options)  # type: ignore[arg-type]


def test_a_deleted_session_cannot_be_searched(store: Store) -> None:
    session = store.session("s")
    session.append("needle")
    store.delete_session("s")
    with pytest.raises(SessionDeletedError):
        session.search("needle")


def test_a_session_with_an_id_too_long_for_its_key_is_found_by_its_id(store: Store) -> None:
    name = "long" * 200
    store.session(name).append("needle")
    assert store.search("needle")[0].session == name


def test_searches_are_awaited_through_the_same_proxies(tmp_path: Path) -> None:
    async def main() -> None:
        async with casstore.aio.open(tmp_path / "s") as store:
            session = store.session("s")
            await session.append(NodeDraft("n", "needle"))
            assert [hit.node for hit in await store.search("needle")] == ["n"]
            assert [hit.node for hit in await session.search("needle")] == ["n"]

    asyncio.run(main())
