"""Packages that are built on LangGraph's stores do on CasstoreStore what they do in memory.

langmem's tools remember and search; deepagents' ``StoreBackend`` keeps files.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")
pytest.importorskip("numpy", reason="needs the extra: pip install '.[dev]'")

from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore

from casstore.adapters.langgraph import CasstoreStore
from casstore.store import Store


def counted(texts: Sequence[str]) -> list[list[float]]:
    return [[float(text.count(letter)) for letter in "abcdefgh"] for text in texts]


INDEX: Any = {"dims": 8, "embed": counted, "fields": ["content"]}


def test_langmem_remembers_and_searches_as_in_memory(store: Store) -> None:
    langmem = pytest.importorskip("langmem", reason="needs the extra: pip install '.[dev]'")

    async def remember(memory: BaseStore) -> list[Any]:
        manage = langmem.create_manage_memory_tool(("memories", "ada"), store=memory)
        search = langmem.create_search_memory_tool(("memories", "ada"), store=memory)
        said: list[Any] = []

        async def tell(**given: Any) -> str:
            """The id of a memory that is new, or that was changed."""
            answer: str = await manage.ainvoke(given)
            said.append(answer.rpartition(" ")[0])
            return answer.rpartition(" ")[2]

        first = await tell(action="create", content="a cab")
        second = await tell(action="create", content="a deed")
        await tell(action="create", content="a hedge")
        await tell(action="update", content="a bag", id=first)
        await tell(action="delete", id=second)
        for query in ("bag", "hedge"):
            found = json.loads(await search.ainvoke({"query": query, "limit": 5}))
            said.append([(item["value"], item["score"]) for item in found])
        return said

    mine = asyncio.run(remember(CasstoreStore(store, index=INDEX)))
    assert mine == asyncio.run(remember(InMemoryStore(index=INDEX)))
    assert [value["content"] for value, _ in mine[-2]] == ["a bag", "a hedge"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_deepagents_keeps_its_files_as_in_memory(store: Store) -> None:
    backends = pytest.importorskip(
        "deepagents.backends", reason="needs the extra: pip install '.[dev]'"
    )

    def work(memory: BaseStore) -> list[str]:
        files = backends.StoreBackend(store=memory, namespace=lambda _: ("files", "ada"))

        async def later() -> list[Any]:
            return [
                await files.awrite("/notes/c.md", "the third"),
                await files.aedit("/notes/c.md", "third", "last"),
                await files.aread("/notes/c.md"),
                await files.als("/notes"),
            ]

        done = [
            files.write("/notes/a.md", "one\ntwo\nthree"),
            files.write("/notes/b.md", "two"),
            # It exists.
            files.write("/notes/b.md", "other"),
            files.edit("/notes/a.md", "two", "2"),
            files.edit("/notes/a.md", "nothing", "2"),
            files.read("/notes/a.md", offset=1, limit=1),
            files.read("/nowhere"),
            files.grep("two", path="/notes"),
            files.glob("*.md", path="/notes"),
            *asyncio.run(later()),
            files.upload_files([("/more/d.bin", b"four")]),
            files.download_files(["/more/d.bin", "/gone"]),
            files.delete("/notes/b.md"),
            files.ls("/"),
            sorted((item.key, item.value["content"]) for item in memory.search(("files", "ada"))),
        ]
        return [without_times(each) for each in done]

    mine = work(CasstoreStore(store))
    assert mine == work(InMemoryStore())
    assert "('/notes/c.md', 'the last')" in mine[-1]


def without_times(answer: Any) -> str:
    """An answer as text; times differ from run to run, and lists have the order of the store."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: plain(each) for key, each in value.items() if not key.endswith(("_at", "time"))
            }
        if isinstance(value, list):
            return sorted(map(plain, value), key=repr)
        return plain(vars(value)) if hasattr(value, "__dict__") else value

    return repr(plain(answer))
