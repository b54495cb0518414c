"""Arguments that cannot be: refused with an error of the store, before anything is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.adapters import jsonl, langgraph, openai_agents
from casstore.compat import (
    agent_harness_import,
    agent_state_import,
    bundle_import,
    langbot_import,
    lash_import,
    power_loop_import,
)
from casstore.errors import InvalidInputError, SourceNotFoundError
from casstore.store import Store
from tests.refusals import NONE, ODD, SURROGATE, UNHASHABLE, CountingEngine, assert_refused

HUGE: Any = 1 << 70
TEXT: Any = "module"
BYTES: Any = b"file"


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    with Store(engine) as store:
        yield store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sdk.db"
    database = sqlite3.connect(path)
    database.executescript(
        """
        CREATE TABLE agent_sessions (
            session_id TEXT PRIMARY KEY,
            created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
            updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP
        );
        CREATE TABLE agent_messages (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            session_id TEXT NOT NULL,
            message_data TEXT NOT NULL,
            created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP
        );
        """
    )
    database.close()
    return path


CALLS: dict[str, Callable[[Store, Path], object]] = {
    "no file": lambda store, _: langgraph.import_checkpoints(store, NONE),
    "a file that is bytes": lambda store, _: langgraph.import_checkpoints(store, BYTES),
    "no file of items": lambda store, _: langgraph.import_items(store, NONE),
    "no file of the SDK": lambda store, _: openai_agents.import_sessions(store, NONE),
    "a file that is a number": lambda store, _: power_loop_import.import_power_loop(store, ODD),
    "no lines": lambda store, _: jsonl.import_jsonl(store, NONE),
    "lines that are a number": lambda store, _: jsonl.import_jsonl(store, ODD),
    "sessions that are a number": lambda store, file: openai_agents.import_sessions(
        store, file, sessions=ODD
    ),
    "sessions that are numbers": lambda store, file: openai_agents.import_sessions(
        store, file, sessions=[HUGE]
    ),
    "a table that is a number": lambda store, file: openai_agents.import_sessions(
        store, file, sessions_table=HUGE
    ),
    "a table that cannot be encoded": lambda store, file: openai_agents.import_sessions(
        store, file, messages_table=SURROGATE
    ),
    "a dry run perhaps": lambda store, file: openai_agents.import_sessions(
        store, file, dry_run=NONE
    ),
    "invalid types": lambda store, _: langgraph.CasstoreSaver(store, allowed=NONE),
    "types that are lists": lambda store, _: langgraph.CasstoreSaver(store, allowed=[UNHASHABLE]),
    "one name of a type": lambda store, _: langgraph.CasstoreStore(store, allowed=TEXT),
    "types that are numbers": lambda store, _: langgraph.StrictSerializer([ODD]),
}


@pytest.mark.parametrize("call", CALLS)
def test_adapter_calls_refuse_invalid_arguments(
    engine: CountingEngine, store: Store, file: Path, call: str
) -> None:
    assert_refused(engine, lambda: CALLS[call](store, file))


def test_a_file_name_that_is_too_long_raises_source_not_found_error(store: Store) -> None:
    for bring_in in (langgraph.import_checkpoints, openai_agents.import_sessions):
        with pytest.raises(SourceNotFoundError):
            bring_in(store, "x" * 5000)
    with pytest.raises(SourceNotFoundError):
        jsonl.import_jsonl(store, "x" * 5000)


IMPORTS: list[Callable[..., object]] = [
    agent_harness_import.import_agent_harness,
    agent_state_import.import_morrow,
    bundle_import.import_bundle,
    jsonl.import_jsonl,
    langbot_import.import_langbot,
    langgraph.import_checkpoints,
    langgraph.import_items,
    lash_import.import_lash,
    openai_agents.import_sessions,
    power_loop_import.import_power_loop,
]


@pytest.mark.parametrize("bring_in", IMPORTS, ids=lambda one: f"{one.__module__}.{one.__name__}")
def test_every_import_function_requires_an_open_store_as_first_argument(
    store: Store, file: Path, bring_in: Callable[..., object]
) -> None:
    """One order for all of them, and who turns it round is told."""
    for other in (file, str(file), None):
        with pytest.raises(InvalidInputError, match="store must be an open Store"):
            bring_in(other, store)
