"""Offers the tools over the Model Context Protocol, on stdin and stdout.

The functions here are what an agent sees: their names, parameters and docstrings. The work is in
``reading`` and ``writing``. An error of casstore becomes the result of the call, marked as an
error, with the same message.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final, ParamSpec

from mcp.server import MCPServer
from mcp.types import CallToolResult, TextContent, ToolAnnotations

from casstore.errors import CasstoreError
from casstore.mcp import reading, writing
from casstore.mcp.reading import Document
from casstore.store import Store
from casstore.version import __version__

Given = ParamSpec("Given")
Path = list[str | int]

_READS: Final = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_WRITES: Final = ToolAnnotations(
    read_only_hint=False, destructive_hint=False, open_world_hint=False
)
_INSTRUCTIONS: Final = (
    "A store of agent sessions. A session is a path of nodes (messages and steps) with named "
    "components of state; each commit is a numbered revision, and may have labels. Answers are "
    "bounded: where a result has next_… set, pass it in the next call; where incomplete is true, "
    "read the part with read_node or read_state and a path."
)


def make_server(store: Store, *, write: bool = False) -> MCPServer[Any]:
    """The server of a store; the tools that change it are offered only with ``write``."""
    server: MCPServer[Any] = MCPServer(
        "casstore", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING"
    )
    _offer_reading(server, store)
    if write:
        _offer_writing(server, store)
    return server


def describe_tools(store: Store, *, write: bool = False) -> dict[str, str]:
    """The tools that a server offers, each with the first line of its description."""
    tools = asyncio.run(make_server(store, write=write).list_tools())
    return {tool.name: (tool.description or "").partition("\n")[0] for tool in tools}


def serve(store: Store, *, write: bool = False) -> None:
    """Answer calls on stdin and stdout until stdin ends."""
    make_server(store, write=write).run("stdio")


def _offer(
    server: MCPServer[Any], annotations: ToolAnnotations
) -> Callable[[Callable[Given, Document]], Callable[Given, Any]]:
    """Register a function as a tool that reports errors of casstore as results."""

    def register(function: Callable[Given, Document]) -> Callable[Given, Any]:
        @functools.wraps(function)
        def answer(*args: Given.args, **given: Given.kwargs) -> Any:
            try:
                return function(*args, **given)
            except CasstoreError as exc:
                said = TextContent(type="text", text=str(exc))
                return CallToolResult(content=[said], is_error=True)

        return server.tool(annotations=annotations)(answer)

    return register


def _offer_reading(server: MCPServer[Any], store: Store) -> None:
    @_offer(server, _READS)
    def list_sessions(prefix: str = "", after: str | None = None, limit: int = 20) -> Document:
        """List sessions in order of id: name, revision, first user message.

        prefix: only ids that begin with it. after: next_after of the previous page. limit: up to
        100.
        """
        return reading.list_sessions(store, prefix, after, limit)

    @_offer(server, _READS)
    def read_session(
        session: str,
        at: int | str | None = None,
        start: int = -20,
        limit: int = 20,
        characters: int = 2000,
    ) -> Document:
        """Read the nodes of a session, from the root to the leaf; by default the last 20.

        at: a revision number or a label; the newest revision if absent. start: the position of the
        first node; negative: counted from the end. characters: the most shown of each payload.
        """
        return reading.read_session(store, session, at, start, limit, characters)

    @_offer(server, _READS)
    def read_node(
        session: str,
        node: str,
        at: int | str | None = None,
        path: Path | None = None,
        offset: int = 0,
        characters: int = 20_000,
    ) -> Document:
        """Read the payload of one node, or a part of it.

        path: keys and indexes that lead to the part, such as ["content", 0, "text"]. offset: the
        first character of a text, or the first entry of a list or map.
        """
        return reading.read_node(store, session, node, at, path or (), offset, characters)

    @_offer(server, _READS)
    def read_state(
        session: str,
        at: int | str | None = None,
        component: str | None = None,
        path: Path | None = None,
        offset: int = 0,
        characters: int = 20_000,
    ) -> Document:
        """Read the state of a session: all components shortened, or one, or a part of one.

        at, path, offset: as for read_session and read_node.
        """
        return reading.read_state(store, session, at, component, path or (), offset, characters)

    @_offer(server, _READS)
    def list_revisions(session: str, before: int | None = None, limit: int = 20) -> Document:
        """List the revisions of a session, newest first, with their labels.

        before: next_before of the previous page.
        """
        return reading.list_revisions(store, session, before, limit)

    @_offer(server, _READS)
    def compare_sessions(
        old_session: str,
        new_session: str,
        old_at: int | str | None = None,
        new_at: int | str | None = None,
        start: int = 0,
        limit: int = 20,
        characters: int = 1000,
    ) -> Document:
        """Compare two sessions, or two revisions of one: nodes added and dropped, changed state.

        start: next_start of the previous page.
        """
        old, new = (old_session, old_at), (new_session, new_at)
        return reading.compare_sessions(store, old, new, start, limit, characters)

    @_offer(server, _READS)
    def search_sessions(words: str, sessions: list[str] | None = None, limit: int = 20) -> Document:
        """Find the texts in which all words occur, best first, in messages and state.

        words: "two words" in double quotes must follow each other; wor* finds words that begin so.
        sessions: only texts of these. Without --write the index is not updated: the newest texts
        may be missing until casstore search or a writer updates it.
        """
        return reading.search_sessions(store, words, sessions or (), limit)


def _offer_writing(server: MCPServer[Any], store: Store) -> None:
    @_offer(server, _WRITES)
    def fork_session(
        session: str, new_session: str, at: int | str | None = None, node: str | None = None
    ) -> Document:
        """Make a new session that continues another one, at its head or an earlier revision.

        at: a revision number or a label. node: the node that the fork ends in.
        """
        return writing.fork_session(store, session, new_session, at, node)

    @_offer(server, _WRITES)
    def label_revision(session: str, label: str, at: int | str | None = None) -> Document:
        """Name a revision of a session; a label that exists moves."""
        return writing.label_revision(store, session, label, at)

    @_offer(server, _WRITES)
    def append_nodes(
        session: str,
        payloads: list[Any],
        turn: str | None = None,
        expected_revision: int | None = None,
    ) -> Document:
        """Append a node for each payload to a session, as one commit; creates the session.

        payloads: any JSON, usually {"role": …, "content": …}. turn: a name for this step; a
        repeated call with the same name and payloads changes nothing. expected_revision: refuse if
        the session has another revision.
        """
        return writing.append_nodes(store, session, payloads, turn, expected_revision)
