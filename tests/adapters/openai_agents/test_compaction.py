"""The SDK's compaction and encryption work over ``CasstoreSession`` as over its own sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs the extra: pip install 'casstore[openai-agents]'")

from agents import Agent, RunConfig, Runner, SQLiteSession
from agents.extensions.memory import EncryptedSession
from agents.memory import OpenAIResponsesCompactionSession

from casstore.adapters.openai_agents import CasstoreSession
from casstore.errors import BranchNotFoundError
from casstore.store import Store
from tests.adapters.openai_agents.scripted_model import ScriptedModel
from tests.adapters.openai_agents.test_session import reply, say, shown, talk, texts

SUMMARY: Any = {"type": "compaction", "id": "cmp", "encrypted_content": "in short"}
SECRET = "a secret of thirty-two characters"


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


class Compactor:
    """Stands for the OpenAI client: what it was asked to compact, and a summary for all of it."""

    def __init__(self, *output: Any) -> None:
        self.asked: list[Any] = []
        self.output = list(output or (SUMMARY,))
        self.responses = self

    async def compact(self, *, model: str, input: Any) -> Any:
        self.asked.append([*input])
        return SimpleNamespace(output=self.output)


def compacting(session: Any, client: Any) -> Any:
    return OpenAIResponsesCompactionSession(
        "talk",
        session,
        client=client,
        compaction_mode="input",
        should_trigger_compaction=lambda _: True,
    )


def encrypted(session: Any) -> Any:
    return EncryptedSession("talk", session, SECRET, ttl=60)


async def ask(session: Any, *questions: str, limit: int | None = None) -> None:
    agent = Agent(name="a", model=ScriptedModel(*[f"{each}!" for each in questions]))
    config = RunConfig(tracing_disabled=True, session_settings={"limit": limit} if limit else None)
    for question in questions:
        await Runner.run(agent, question, session=session, run_config=config)


@pytest.fixture
def session(store: Store) -> CasstoreSession:
    return CasstoreSession(store, "talk")


@pytest.mark.parametrize("limit", [None, 1, 3])
@pytest.mark.parametrize("layers", ["plain", "encrypted outside", "encrypted inside"])
def test_a_run_compacts_the_same_items_as_with_the_session_of_the_sdk(
    session: CasstoreSession, tmp_path: Path, layers: str, limit: int | None
) -> None:
    def wrapped(backend: Any, client: Compactor) -> Any:
        if layers == "plain":
            return compacting(backend, client)
        if layers == "encrypted outside":
            return encrypted(compacting(backend, client))
        return compacting(encrypted(backend), client)

    async def told(backend: Any) -> tuple[Any, ...]:
        client = Compactor()
        outer = wrapped(backend, client)
        reader = backend if layers == "plain" else encrypted(backend)
        before = [say("old"), reply("answer"), say("older"), reply("answered")]
        await reader.add_items(before)
        await ask(outer, "one", "two", limit=limit)
        return client.asked, await reader.get_items(), await outer.get_items()

    stock = SQLiteSession("talk", tmp_path / "stock.db")
    want = run(told(stock))
    stock.close()
    assert run(told(session)) == want
    asked, items, _ = want
    assert items[-1] == SUMMARY
    # What the model was not shown is not compacted.
    assert (say("old") in asked[0]) == (limit is None)


def test_compacting_a_branch_by_hand_leaves_the_others_and_is_one_revision(
    store: Store, session: CasstoreSession
) -> None:
    talk(session, "one", "two")
    run(session.branch(2, "left"))
    talk(session, "left")
    before = len(list(store.session("talk").history()))
    client = Compactor()
    run(compacting(session, client).run_compaction({"force": True}))
    assert texts(client.asked[0]) == ["one", "one!", "left", "left!"]
    assert run(session.get_items()) == [SUMMARY]
    assert session.current_branch == "left"
    assert shown(session, "main") == ["one", "one!", "two", "two!"]
    assert len(list(store.session("talk").history())) == before + 1
    talk(session, "more")
    assert run(session.get_items()) == [SUMMARY, say("more"), reply("more!")]
    assert [(each.name, each.items, each.turns) for each in run(session.branches())] == [
        ("main", 4, 2),
        ("left", 3, 1),
    ]


@pytest.mark.parametrize("change", ["add", "pop", "clear", "delete the branch"])
def test_a_compaction_changes_nothing_if_its_branch_changed_meanwhile(
    store: Store, session: CasstoreSession, change: str
) -> None:
    talk(session, "one", "two")
    run(session.branch(None, "side"))

    async def converse() -> None:
        snapshot = await session._get_compaction_snapshot(3)
        assert snapshot is not None
        assert texts(snapshot.items) == ["one!", "two", "two!"]
        assert not snapshot.complete
        other = CasstoreSession(store, "talk", branch="side")
        if change == "add":
            await other.add_items([say("newer")])
        elif change == "pop":
            await other.pop_item()
        elif change == "clear":
            await other.clear_session()
            await other.add_items([say("newer"), say("newer"), say("newer")])
        else:
            await other.switch("main")
            await other.delete_branch("side")
        before = [await other.get_items(branch_id=each.name) for each in await other.branches()]
        if change == "delete the branch":
            with pytest.raises(BranchNotFoundError):
                await snapshot.replace_suffix(1, [SUMMARY])
        else:
            assert not await snapshot.replace_suffix(1, [SUMMARY])
        after = [await other.get_items(branch_id=each.name) for each in await other.branches()]
        assert after == before

    run(converse())


def test_a_subclass_that_changes_items_is_asked_for_them(store: Store) -> None:
    """Otherwise a subclass that encrypts what it adds would store summaries as plaintext."""

    class Shouting(CasstoreSession):
        async def add_items(self, items: list[Any]) -> None:
            loud: list[Any] = [{**item, "loud": True} for item in items]
            await super().add_items(loud)

    session = Shouting(store, "talk")
    talk(session, "one")
    run(compacting(session, Compactor()).run_compaction({"force": True}))
    assert run(session.get_items()) == [{**SUMMARY, "loud": True}]
    run(ask(compacting(session, Compactor()), "two"))
    assert all(item.get("loud") for item in run(session.get_items()))


def used(tokens: int) -> Any:
    usage = SimpleNamespace(
        requests=1, input_tokens=tokens, output_tokens=0, total_tokens=tokens,
        input_tokens_details=None, output_tokens_details=None,
    )  # fmt: skip
    return SimpleNamespace(
        context_wrapper=SimpleNamespace(usage=usage), last_agent=SimpleNamespace(model="m")
    )


def test_usage_stays_with_the_turns_that_stay(store: Store, session: CasstoreSession) -> None:
    async def converse() -> Any:
        for turn in range(1, 5):
            await session.add_items([say(f"turn {turn}"), reply("answer")])
            await session.store_run_usage(used(turn))

        def is_expired(item: Any) -> bool:
            return item["content"] in ("turn 1", "answer")

        snapshot = await session._get_compaction_snapshot(4, prune_prefix=is_expired)
        assert snapshot is not None
        assert await snapshot.replace_suffix(2, [say("turn 4, in short"), SUMMARY])
        return await session.get_turn_usage()

    rows = run(converse())
    # Turn 1 was dropped, turn 4 was replaced; 2 and 3 have moved up.
    assert [(row["user_turn_number"], row["total_tokens"]) for row in rows] == [(1, 2), (2, 3)]
    turns = run(session.turns())
    assert [(turn.number, turn.items[0]["content"]) for turn in turns] == [
        (1, "turn 2"),
        (2, "turn 3"),
        (3, "turn 4, in short"),
    ]
    # The ledger keeps what was spent.
    assert sum(row.total for row in store.session("talk").usage()) == 10
    run(session.branch(3, "again"))
    assert shown(session) == ["turn 2", "answer", "turn 3", "answer"]
    assert run(session.prune()) > 0
    assert run(session.get_items(branch_id="main"))[-2:] == [say("turn 4, in short"), SUMMARY]


def test_a_summary_of_nothing_empties_the_branch(session: CasstoreSession) -> None:
    talk(session, "one")
    client = Compactor()
    client.output = []
    run(compacting(session, client).run_compaction({"force": True}))
    assert run(session.get_items()) == []
    talk(session, "two")
    assert shown(session) == ["two", "two!"]


def test_expired_items_before_the_summary_are_removed(
    session: CasstoreSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000]
    monkeypatch.setattr("cryptography.fernet.time.time", lambda: clock[0])
    monkeypatch.setattr("agents.extensions.memory.encrypt_session.time.time", lambda: clock[0])

    async def told(backend: Any) -> tuple[Any, ...]:
        clock[0] = 1000
        client = Compactor()
        outer = encrypted(compacting(backend, client))
        await outer.add_items([say("expired"), reply("expired")])
        clock[0] += 120
        await outer.add_items([say("live"), reply("live")])
        await ask(outer, "one", limit=2)
        return client.asked, len(await backend.get_items()), await outer.get_items()

    stock = SQLiteSession("talk", tmp_path / "stock.db")
    want = run(told(stock))
    stock.close()
    assert run(told(session)) == want
    assert want[2][-1] == SUMMARY
