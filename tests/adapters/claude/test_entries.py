"""Every JSON entry comes back as it was appended; anything else is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("claude_agent_sdk", reason="needs the extra: pip install '.[claude]'")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from casstore.errors import (
    InvalidInputError,
    InvalidValueError,
)
from tests.adapters.claude.test_session_store import KEY, SESSION, run
from tests.adapters.transcripts import new_id

ODD: list[dict[str, Any]] = [
    {"type": "x", "text": "half a pair \ud800"},
    {"type": "x", "uuid": "\udfff half in the id"},
    {"type": "x", "number": 10**40, "uuid": new_id(random.Random(1))},
    {"type": "x", "float": 1e300, "zero": -0.0, "none": None, "yes": True},
    {"type": "x", "uuid": None, "parentUuid": None, "sessionId": None, "forkedFrom": None},
    {"type": "x", "uuid": 5, "isSidechain": True, "slug": ["a"], "teamName": {"a": 1}},
    {"type": "x", "uuid": new_id(random.Random(2)).upper()},
    {"type": "x", "forkedFrom": {"sessionId": "a", "messageUuid": 1}},
    {"type": "x", "forkedFrom": {"sessionId": "a", "messageUuid": "b", "more": "c"}},
    {"type": "x", "forkedFrom": {"sessionId": "a", "messageUuid": "b"}},
    {"type": "x", "forkedFrom": {"sessionId": "a", "messageUuid": "c"}},
    {"type": "x", "sessionId": SESSION, "json": "not bytes"},
    {"json": "alone"},
    {"type": "x", "": {"": [[], {}]}},
]


def deep(levels: int) -> dict[str, Any]:
    value: Any = "bottom"
    for _ in range(levels):
        value = [value]
    return {"type": "x", "value": value, "uuid": new_id(random.Random(levels))}


@pytest.mark.parametrize("entry", [*ODD, deep(50), deep(60), deep(200)], ids=str)
def test_every_json_entry_round_trips(sessions: Any, entry: dict[str, Any]) -> None:
    entry = json.loads(json.dumps(entry))
    plain = {"type": "x", "uuid": "before"}
    run(sessions.append(KEY, [plain, entry, {"type": "x", "parentUuid": entry.get("uuid")}]))
    loaded = run(sessions.load(KEY))
    assert loaded[:2] == [plain, entry]
    assert loaded[2]["parentUuid"] == entry.get("uuid")


@pytest.mark.parametrize("field", ["value", "slug"])
def test_an_entry_of_any_depth_is_accepted(sessions: Any, field: str) -> None:
    """Between what a value may have and what the row has room for, the append failed."""
    entries = []
    for levels in range(55, 70):
        entry = deep(levels)
        entry[field] = entry.pop("value")
        entries.append(entry)
        run(sessions.append(KEY, [entry]))
    assert run(sessions.load(KEY)) == entries


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
IDS = st.sampled_from([None, "a", SESSION, new_id(random.Random(3)), 7])
ORIGIN = st.none() | st.fixed_dictionaries({"sessionId": IDS, "messageUuid": IDS})
ENTRIES = st.fixed_dictionaries(
    {"type": st.just("x")},
    optional={
        "uuid": IDS, "parentUuid": IDS, "sessionId": IDS, "logicalParentUuid": IDS,
        "forkedFrom": ORIGIN, "isSidechain": st.booleans(), "slug": JSON, "message": JSON,
    },
)  # fmt: skip


@given(st.lists(st.lists(ENTRIES, max_size=4), max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_transcripts_come_back_as_they_were_appended(
    sessions: Any, batches: list[list[dict[str, Any]]]
) -> None:
    expected: list[dict[str, Any]] = []

    async def append_all() -> list[Any]:
        await sessions.delete(KEY)
        for batch in batches:
            await sessions.append(KEY, batch)
            for entry in batch:
                own = entry.get("uuid")
                if type(own) is not str or own not in [each.get("uuid") for each in expected]:
                    expected.append(entry)
        return await sessions.load(KEY) or []

    assert run(append_all()) == expected


def test_an_entry_that_is_not_json_is_refused_and_nothing_is_written(sessions: Any) -> None:
    fine = {"type": "x", "uuid": "a"}
    for bad in ({"type": "x", "value": object()}, {"type": "x", "value": float("nan")}):
        with pytest.raises(InvalidValueError):
            run(sessions.append(KEY, [fine, bad]))
    with pytest.raises(InvalidInputError):
        run(sessions.append(KEY, ["no entry"]))
    with pytest.raises(InvalidInputError):
        run(sessions.append({**KEY, "subpath": ""}, [fine]))
    assert run(sessions.load(KEY)) is None
