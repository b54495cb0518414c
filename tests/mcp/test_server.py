"""The MCP server, by the SDK's own client: over stdio, and for details in the same process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra: pip install '.[dev]'")

from mcp import Client, StdioServerParameters
from mcp.types import TextContent

import casstore
from casstore import NodeDraft
from casstore.errors import ReadOnlyError
from casstore.mcp.reading import MAX_ROWS
from casstore.mcp.server import make_server
from casstore.mcp.values import MAX_CHARACTERS
from casstore.store import Store

READS = {
    "list_sessions",
    "read_session",
    "read_node",
    "read_state",
    "list_revisions",
    "compare_sessions",
    "search_sessions",
}
WRITES = {"fork_session", "label_revision", "append_nodes"}
Calls = Callable[[Client], Awaitable[None]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with a session of three nodes, one of them hidden, and a fork of it."""
    path = tmp_path / "s"
    with casstore.open(path, durability="relaxed") as store:
        session = store.session("agent")
        session.append(NodeDraft("ask", {"role": "user", "content": "which way?"}), label="start")
        session.append(
            NodeDraft("secret", {"role": "assistant", "content": "the password is 1234"}),
            NodeDraft("left", {"role": "assistant", "content": "left"}),
            tool_state={"cwd": "/repo", "log": ["x" * 3000] * 30},
        )
        session.tombstone(["secret"])
        other = session.fork("other", at="start")
        other.append(NodeDraft("right", {"role": "assistant", "content": "right"}))
    return path


def over_stdio(calls: Calls, *words: str) -> None:
    """Start ``casstore mcp`` and talk to it."""
    env = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "casstore", "mcp", *words], env=env
    )

    async def talk() -> None:
        async with Client(server, read_timeout_seconds=60) as client:
            await calls(client)

    asyncio.run(talk())


def in_process(store: Store, calls: Calls, *, write: bool = False) -> None:
    async def talk() -> None:
        async with Client(make_server(store, write=write)) as client:
            await calls(client)

    asyncio.run(talk())


async def call(client: Client, tool: str, **given: Any) -> Any:
    result: Any = await client.call_tool(tool, given)
    assert not result.is_error, result.content
    # Clients without structured results get the same document as text.
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


async def refused(client: Client, tool: str, **given: Any) -> str:
    result: Any = await client.call_tool(tool, given)
    assert result.is_error
    [said] = result.content
    assert isinstance(said, TextContent)
    return said.text


async def tools(client: Client) -> set[str]:
    return {tool.name for tool in (await client.list_tools()).tools}


def test_an_agent_reads_and_compares_sessions_over_stdio(place: Path) -> None:
    async def calls(client: Client) -> None:
        assert await tools(client) == READS
        listed = await call(client, "list_sessions")
        assert [(one["session"], one["revision"]) for one in listed["sessions"]] == [
            ("agent", 2),
            ("other", 2),
        ]
        read = await call(client, "read_session", session="agent")
        assert [node["node"] for node in read["nodes"]] == ["ask", "left"]
        assert read["nodes"][1]["payload"]["content"] == "left"
        compared = await call(client, "compare_sessions", old_session="agent", new_session="other")
        assert [node["node"] for node in compared["added"]] == ["right"]
        assert [node["node"] for node in compared["dropped"]] == ["left"]
        assert compared["last_common_node"] == "ask"
        assert compared["changes_total"] == 1
        # A tool that writes is not there, so nothing is written.
        assert "fork_session" in await refused(
            client, "fork_session", session="agent", new_session="third"
        )

    over_stdio(calls, str(place))
    with casstore.open(place) as store:
        assert [info.meta.session for info in store.sessions()] == ["agent", "other"]


def test_an_agent_searches_what_was_said_and_finds_nothing_hidden(place: Path) -> None:
    async def without_index(client: Client) -> None:
        assert "casstore search --rebuild" in await refused(client, "search_sessions", words="way")

    async def calls(client: Client) -> None:
        [hit] = (await call(client, "search_sessions", words="which way"))["hits"]
        assert (hit["kind"], hit["session"], hit["node"]) == ("node", "agent", "ask")
        assert hit["sessions"] == ["agent", "other"]
        assert (await call(client, "search_sessions", words="password"))["hits"] == []
        given = {"words": "right", "sessions": ["agent"]}
        assert (await call(client, "search_sessions", **given))["hits"] == []
        assert "words" in await refused(client, "search_sessions", words="  ")
        assert "limit" in await refused(client, "search_sessions", words="way", limit=101)

    with casstore.open(place, readonly=True) as store:
        in_process(store, without_index)
    with casstore.open(place) as store:
        in_process(store, calls)
    with casstore.open(place, readonly=True) as store:
        in_process(store, calls)


def test_an_agent_forks_labels_and_appends_over_stdio_with_write(place: Path) -> None:
    async def calls(client: Client) -> None:
        assert await tools(client) == READS | WRITES
        forked = await call(
            client, "fork_session", session="agent", new_session="third", at="start"
        )
        assert forked == {"session": "third", "revision": 1, "leaf": "ask"}
        given = {"session": "third", "payloads": [{"role": "user", "content": "go"}], "turn": "t"}
        first = await call(client, "append_nodes", expected_revision=1, **given)
        again = await call(client, "append_nodes", **given)
        assert again == first | {"replayed": True}
        assert await call(client, "label_revision", session="third", label="went") == {
            "session": "third",
            "revision": 2,
            "label": "went",
        }
        listed = await call(client, "list_revisions", session="third", limit=1)
        assert listed["revisions"][0]["labels"] == ["went"]
        assert listed["next_before"] == 2

    over_stdio(calls, "--write", str(place))
    with casstore.open(place) as store:
        found = store.session("third").nodes(at="went")
        assert [node.payload["content"] for node in found] == ["which way?", "go"]


def test_a_server_without_write_opens_the_store_read_only(place: Path) -> None:
    with casstore.open(place, readonly=True) as store:
        server = make_server(store, write=True)

        async def calls() -> None:
            async with Client(server) as client:
                said = await refused(client, "append_nodes", session="agent", payloads=["x"])
                with pytest.raises(ReadOnlyError) as raised:
                    store.session("agent").append("x")
                assert said == str(raised.value)

        asyncio.run(calls())


def test_hidden_nodes_stay_hidden_in_every_tool(place: Path) -> None:
    with casstore.open(place) as store:
        session = store.session("agent")
        session.append(NodeDraft("right", {"content": "right"}))
        hidden_leaf = session.fork("hidden leaf")
        hidden_leaf.tombstone(["right"])

        async def calls(client: Client) -> None:
            asked: list[tuple[str, dict[str, Any]]] = [
                ("list_sessions", {}),
                ("list_revisions", {"session": "agent"}),
                ("read_state", {"session": "agent"}),
            ]
            for at in (None, 2, 3):
                asked.append(("read_session", {"session": "agent", "at": at, "start": 0}))
                for one, other in (("agent", "other"), ("other", "agent")):
                    asked.append(
                        ("compare_sessions",
                         {"old_session": one, "new_session": other, "new_at": None})
                    )  # fmt: skip
            for tool, given in asked:
                answer = await call(client, tool, **given)
                assert "1234" not in json.dumps(answer), tool
                assert '"secret"' not in json.dumps([n["node"] for n in answer.get("nodes", ())])
            said = await refused(client, "read_node", session="agent", node="secret")
            assert said == "session 'agent' has no node 'secret'"
            compared = await call(
                client, "compare_sessions", old_session="agent", new_session="hidden leaf"
            )
            assert [node["node"] for node in compared["dropped"]] == []

        in_process(store, calls)


def test_answers_are_bounded_and_their_pages_are_the_whole(tmp_path: Path) -> None:
    text = "".join(f"{n:06} " for n in range(40_000))
    entries = {f"k{n:04}": "y" * 50 for n in range(3000)}
    with casstore.open(tmp_path / "s", durability="relaxed") as store:
        session = store.session("long")
        session.append(
            *[NodeDraft(f"n{n}", {"n": n, "content": "z" * 5000}) for n in range(150)],
            entries=entries,
            picture=bytes(300_000),
            label="first",
        )
        parts_of = session.fork("parts", at="first")
        parts_of.commit(components={f"c{n:03}": {"n": n} for n in range(130)})
        session.append(NodeDraft("text", {"content": [{"text": text}]}))
        for n in range(150):
            store.create_session(f"s{n:03}")
        store.session("s000").append("x")

        async def calls(client: Client) -> None:
            async def pages(tool: str, mark: str, asked: str, **given: Any) -> list[Any]:
                found: list[Any] = []
                following: dict[str, Any] = {}
                while True:
                    answer = await call(client, tool, **given, **following)
                    assert len(json.dumps(answer)) < 2 * MAX_CHARACTERS
                    found.append(answer)
                    if answer[mark] is None:
                        return found
                    following = {asked: answer[mark]}

            listed = await pages("list_sessions", "next_after", "after", limit=60)
            assert [len(each["sessions"]) for each in listed] == [60, 60, 32]
            read = await pages(
                "read_session", "next_start", "start", session="long", limit=100, characters=4000
            )
            # The default starts at the end; from the first node on, all are there in order.
            assert [node["node"] for each in read for node in each["nodes"]][-1] == "text"
            assert all(node["incomplete"] for each in read for node in each["nodes"])
            given = {"session": "long", "start": 0, "limit": 100, "characters": 4000}
            seen = []
            while True:
                answer = await call(client, "read_session", **given)
                seen += [node["node"] for node in answer["nodes"]]
                if answer["next_start"] is None:
                    break
                given["start"] = answer["next_start"]
            assert seen == [f"n{n}" for n in range(150)] + ["text"]
            parts = await pages(
                "read_node", "next_offset", "offset",
                session="long", node="text", path=["content", 0, "text"], characters=50_000,
            )  # fmt: skip
            assert "".join(each["value"] for each in parts) == text
            parts = await pages(
                "read_state", "next_offset", "offset", session="long", component="entries"
            )
            assert {key: value for each in parts for key, value in each["value"].items()} == entries
            parts = await pages("read_state", "next_offset", "offset", session="parts")
            assert [len(each["components"]) for each in parts] == [100, 32]
            compared = await pages(
                "compare_sessions", "next_start", "start",
                old_session="s000", new_session="long", limit=60, characters=3000,
            )  # fmt: skip
            found = [node["node"] for each in compared for node in each["added"]]
            assert found == seen
            assert sum(len(each["changes"]) for each in compared) == compared[0]["changes_total"]
            state = await call(client, "read_state", session="long")
            assert state["incomplete"] == ["entries"]
            assert state["components"]["picture"] == {"$size_bytes": 300_000}

        in_process(store, calls)


def test_errors_have_the_messages_of_the_store(place: Path) -> None:
    with casstore.open(place) as store:

        async def calls(client: Client) -> None:
            wrong: list[tuple[str, dict[str, Any], str]] = [
                ("read_session", {"session": "missing"}, "no session 'missing' in this store"),
                ("read_session", {"session": "agent", "at": 9}, "session 'agent' has nothing at 9"),
                ("read_node", {"session": "agent", "node": "left", "path": ["x"]},
                 "nothing at $.x"),
                ("read_state", {"session": "agent", "component": "x"},
                 "session 'agent' has no component 'x' at revision 2; it has tool_state"),
                ("list_sessions", {"limit": MAX_ROWS + 1}, "limit must be from 1 to 100, got 101"),
                ("read_session", {"session": "agent", "characters": 1}, "characters must be from"),
                ("read_node", {"session": "agent", "node": "left", "offset": -1},
                 "offset must be 0 or more"),
                ("fork_session", {"session": "agent", "new_session": "other"}, "'other'"),
                ("append_nodes", {"session": "agent", "payloads": ["x"], "expected_revision": 7},
                 "7"),
                ("append_nodes", {"session": "new", "payloads": []}, "payloads must have"),
            ]  # fmt: skip
            for tool, given, said in wrong:
                message = await refused(client, tool, **given)
                assert said in message
                assert "Error executing" not in message
            # Arguments of the wrong type are refused by the SDK.
            assert "session" in await refused(client, "read_session", session=5)
            assert [info.meta.session for info in store.sessions()] == ["agent", "other"]

        in_process(store, calls, write=True)
