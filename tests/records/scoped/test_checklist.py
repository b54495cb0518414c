"""The behaviour that hosts of scoped state rely on, row by row.

scope key              all dimensions, hashed, versioned: nothing is ambiguous
missing identity       the scope cannot be used; it is not shared
isolation              another binding or runner sees nothing
policy order           six refusals, the first that applies is told
size limit             262,144 bytes of UTF-8, inclusive
JSON only              no objects, no NaN
snapshot               four dicts always; the conversation's id told without being written
upsert                 the last one wins, the first time stays, eight at once all succeed
null and missing       are two things
list                   a literal prefix, in order, beyond a hundred
delete                 true, then false
alias                  one value by both names
frozen authorisation   see test_runs
caller identity        see test_runs
reset                  see test_resets
erasure by actor       see test_erasure
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from casstore.errors import InvalidInputError, StateRefusedError
from casstore.records.scoped import (
    MAX_VALUE_BYTES,
    SCOPES,
    Context,
    Quota,
    Reason,
    ScopedState,
    StatePolicy,
    UpdateOutcome,
    binding_identity,
    scope_key,
)
from casstore.records.scoped.scope_keys import scope_keys
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.one_transaction import contents
from tests.records.scoped.contexts import ALL, HERE, RUNNER

EMPTY: dict[str, dict[str, Any]] = {scope: {} for scope in SCOPES}


# --- scope key ------------------------------------------------------------------------------


def test_scope_key__hash_of_canonical_json_with_all_dimensions_and_a_version() -> None:
    encoded = (
        '{"actor_id":"ann","actor_type":"user","binding_identity":"binding-1","bot_id":"bot-1",'
        '"runner_id":"plugin:me/agent/default","scope":"actor","version":2,'
        '"workspace_id":"space-1"}'
    )
    assert scope_key(HERE, "actor") == f"actor:v2:{hashlib.sha256(encoded.encode()).hexdigest()}"
    for scope in SCOPES:
        key = scope_key(HERE, scope)
        assert key is not None
        assert key.startswith(f"{scope}:v2:")


def test_scope_key__ids_whose_concatenations_are_equal_have_different_keys() -> None:
    one = Context("r", "b:c", conversation_id="d")
    other = Context("r", "b", conversation_id="c:d")
    assert scope_key(one, "conversation") != scope_key(other, "conversation")
    assert scope_key(Context("r:b", "c"), "runner") != scope_key(Context("r", "b:c"), "runner")


@pytest.mark.parametrize("scope", SCOPES)
def test_scope_key__every_dimension_of_a_scope_makes_another_key(scope: str) -> None:
    own = {
        "conversation": ("conversation_id", "thread_id"),
        "actor": ("actor_type", "actor_id"),
        "subject": ("subject_type", "subject_id"),
        "runner": (),
    }
    shared = ("runner_id", "binding_identity", "bot_id", "workspace_id")
    for name in Context._fields:
        changed = scope_key(HERE._replace(**{name: "another"}), scope)
        assert (changed != scope_key(HERE, scope)) == (name in shared + own[scope]), name


def test_scope_key__the_external_conversation_id_is_not_part_of_it(
    store: Store,
) -> None:
    scope = ScopedState(store).scope(HERE, "conversation")
    scope.put("external.conversation_id", "their-1")
    scope.put("topic", "cheese")
    scope.put("external.conversation_id", "their-2")
    found = scope.find("topic")
    assert found is not None
    assert found.value == "cheese"


def test_binding_identity__is_the_binding_id_or_the_bound_scope_or_unknown() -> None:
    assert binding_identity("b1", scope_type="bot", scope_id="x") == "b1"
    assert binding_identity(None, scope_type="bot", scope_id="x:y") == "bot:x:y"
    assert binding_identity("", scope_type="bot") == "unknown_binding"
    assert binding_identity() == "unknown_binding" == Context("r").binding_identity
    with pytest.raises(InvalidInputError):
        binding_identity(scope_type="bot:x", scope_id="y")


# --- missing identity -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "lack"),
    [("conversation", "conversation_id"), ("actor", "actor_id"), ("subject", "subject_id")],
)
@pytest.mark.parametrize("none", [None, ""])
def test_missing_identity__the_scope_cannot_be_used(
    store: Store, scope: str, lack: str, none: str | None
) -> None:
    states = ScopedState(store)
    states.scope(HERE, scope, ALL).put("k", 1)
    changes: dict[str, Any] = {lack: none}
    lacking = HERE._replace(**changes)
    assert scope_key(lacking, scope) is None
    assert scope not in scope_keys(lacking)
    with pytest.raises(StateRefusedError) as refused:
        states.scope(lacking, scope, ALL)
    assert refused.value.reason == Reason.MISSING_IDENTITY
    assert states.snapshot(lacking, ALL)[scope] == {}


def test_missing_identity__the_runner_scope_always_has_one() -> None:
    assert list(scope_keys(Context("r"))) == ["runner"]


@pytest.mark.parametrize(
    "wrong",
    [
        Context(""), Context("r", ""), Context("r", bot_id=7),  # type: ignore[arg-type]
        Context(None), Context("r", actor_id="\ud800"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_missing_identity__an_invalid_id_is_refused(store: Store, wrong: Context) -> None:
    with pytest.raises(InvalidInputError):
        ScopedState(store).snapshot(wrong)


# --- isolation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["runner_id", "binding_identity", "bot_id", "workspace_id"])
def test_isolation__another_binding_runner_or_tenant_sees_nothing(store: Store, other: str) -> None:
    states = ScopedState(store)
    for scope in SCOPES:
        states.scope(HERE, scope, ALL).put("k", scope)
    there = HERE._replace(**{other: "another"})
    seen = states.snapshot(there, ALL)
    assert seen == {**EMPTY, "conversation": {"external.conversation_id": "talk-1"}}
    for scope in SCOPES:
        assert states.scope(there, scope, ALL).find("k") is None
        assert not states.scope(there, scope, ALL).delete("k")
        states.scope(there, scope, ALL).put("k", "theirs")
        mine = states.scope(HERE, scope, ALL).find("k")
        assert mine is not None
        assert mine.value == scope


# --- policy order -------------------------------------------------------------------------------

NOBODY = Context(RUNNER, "binding-1")
WRONGS: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.DISABLED, {"policy": {"enabled": False}}),
    (Reason.UNKNOWN_SCOPE, {"scope": "galaxy"}),
    (Reason.SCOPE_NOT_ENABLED, {"scope": "actor", "policy": {"scopes": ("runner",)}}),
    (Reason.MISSING_IDENTITY, {"context": NOBODY}),
    (Reason.NOT_JSON, {"value": object()}),
    (Reason.TOO_LARGE, {"value": "x" * MAX_VALUE_BYTES}),
    (Reason.BAD_KEY, {"key": ""}),
    (Reason.TOO_MANY_KEYS, {"policy": {"quotas": {"actor": Quota(max_keys=0)}}}),
]


def update(states: ScopedState, wrongs: list[dict[str, Any]]) -> UpdateOutcome:
    call: dict[str, Any] = {"context": HERE, "scope": "actor", "key": "k", "value": 1}
    policy: dict[str, Any] = {}
    # The first reason that applies decides: let it have the last word.
    for wrong in reversed(wrongs):
        policy |= wrong.get("policy", {})
        call |= {name: told for name, told in wrong.items() if name != "policy"}
    return states.update(policy=StatePolicy(**policy), **call)


@pytest.mark.parametrize(("reason", "wrong"), WRONGS, ids=[str(one) for one, _ in WRONGS])
def test_policy_order__each_refusal_has_its_reason_and_changes_nothing(
    store: Store, reason: Reason, wrong: dict[str, Any]
) -> None:
    before = contents(store)
    outcome = update(ScopedState(store), [wrong])
    assert (outcome.ok, outcome.reason, outcome.version) == (False, reason, None)
    assert outcome.message
    assert contents(store) == before


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pair
        for pair in itertools.combinations(range(len(WRONGS)), 2)
        # One value cannot be both of these.
        if {WRONGS[one][0] for one in pair} != {Reason.NOT_JSON, Reason.TOO_LARGE}
    ],
)
def test_policy_order__of_two_reasons_the_first_is_reported(first: int, second: int) -> None:
    import casstore.engine.memory

    with Store(casstore.engine.memory.MemoryEngine()) as store:
        outcome = update(ScopedState(store), [WRONGS[first][1], WRONGS[second][1]])
    assert outcome.reason == WRONGS[first][0]


def test_policy_order__a_policy_allows_conversation_and_actor_by_default(store: Store) -> None:
    states = ScopedState(store)
    allowed = {scope: states.update(HERE, StatePolicy(), scope, "k", 1).ok for scope in SCOPES}
    assert allowed == {"conversation": True, "actor": True, "subject": False, "runner": False}


def test_policy_order__what_is_allowed_is_reported_with_its_version(store: Store) -> None:
    states = ScopedState(store)
    ok, message, reason, version = states.update(HERE, ALL, "runner", "k", [1])
    found = states.scope(HERE, "runner", ALL).find("k")
    assert found is not None
    assert (ok, message, reason, version) == (True, None, None, found.version)


# --- size limit, JSON only ------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["x", "é", "漢", "😀"])
def test_size_limit__bytes_of_utf8_not_characters_and_the_limit_itself_passes(
    store: Store, letter: str
) -> None:
    scope = ScopedState(store).scope(HERE, "actor")
    width = len(letter.encode())
    fits = letter * ((MAX_VALUE_BYTES - 2) // width) + "x" * ((MAX_VALUE_BYTES - 2) % width)
    assert scope.put("k", fits).size_bytes == MAX_VALUE_BYTES == 262_144
    found = scope.find("k")
    assert found is not None
    assert found.value == fits
    with pytest.raises(StateRefusedError) as refused:
        scope.put("k", fits + "x")
    assert refused.value.reason == Reason.TOO_LARGE
    found = scope.find("k")
    assert found is not None
    assert found.value == fits


def test_size_limit__counts_the_json_text_including_spaces(store: Store) -> None:
    scope = ScopedState(store).scope(HERE, "actor")
    value = {"a": [1, 2], "b": "é"}
    assert scope.put("k", value).size_bytes == len('{"a": [1, 2], "b": "é"}'.encode())


looped: list[Any] = []
looped.append(looped)
deep: Any = []
for _ in range(100_000):
    deep = [deep]


@pytest.mark.parametrize(
    "value",
    [
        object(), {"a": {1, 2}}, b"bytes", float("nan"), [float("inf")], {"x": -float("inf")},
        {(1, 2): 3}, "\ud800", {"\udfff": 1}, looped, deep, {float("nan"): 1},
    ],
    ids=range(12),
)  # fmt: skip
def test_json_only__a_value_that_json_cannot_encode_is_refused(store: Store, value: Any) -> None:
    states = ScopedState(store)
    outcome = states.update(HERE, ALL, "actor", "k", value)
    assert (outcome.ok, outcome.reason) == (False, Reason.NOT_JSON)
    assert states.scope(HERE, "actor").find("k") is None


nested: Any = "end"
for _ in range(200):
    nested = {"in": [nested]}


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 1.0, -0.0, 1e300, "", "text", [], {}, [[]], 10**400, 2**64, nested,
        {"json": "x"}, {"a": None}, "x" * 600, {str(n): n for n in range(2000)},
        list(range(5000)), ["y" * 600] * 50, {"k": "z" * 300}, [1.5] * 50,
    ],
    ids=range(23),
)  # fmt: skip
def test_json_only__every_json_value_round_trips(store: Store, value: Any) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "runner", ALL)
    assert scope.put("k", value).value == value
    found = scope.find("k")
    assert found is not None
    assert json.dumps(found.value, sort_keys=True) == json.dumps(value, sort_keys=True)
    assert states.snapshot(HERE, ALL)["runner"] == {"k": value}


def test_json_only__tuples_and_keys_are_read_back_in_their_json_form(store: Store) -> None:
    scope = ScopedState(store).scope(HERE, "actor")
    entry = scope.put("k", {"t": (1, 2), 3: "three", True: "yes"})
    assert entry.value == {"t": [1, 2], "3": "three", "true": "yes"}
    assert scope.find("k") == entry


# --- snapshot -------------------------------------------------------------------------------------


def test_snapshot__four_dicts_always(store: Store) -> None:
    states = ScopedState(store)
    assert states.snapshot(NOBODY, ALL) == EMPTY
    assert states.snapshot(HERE, StatePolicy(enabled=False)) == EMPTY
    assert states.snapshot(HERE, StatePolicy(scopes=("actor",))) == EMPTY


def test_snapshot__has_the_conversations_id_and_does_not_write_it(store: Store) -> None:
    states = ScopedState(store)
    before = contents(store)
    seeded = {"external.conversation_id": "talk-1"}
    assert states.snapshot(HERE)["conversation"] == seeded
    assert states.snapshot(HERE, StatePolicy(scopes=("actor",)))["conversation"] == {}
    assert contents(store) == before
    scope = states.scope(HERE, "conversation")
    assert scope.find("external.conversation_id") is None
    scope.put("conversation_id", None)
    # Stored null is stored.
    assert states.snapshot(HERE)["conversation"] == {"external.conversation_id": None}


def test_snapshot__has_every_value_that_the_policy_allows(store: Store) -> None:
    states = ScopedState(store)
    put = {
        scope: {f"{scope}.{n}": [n, "x" * (n * 100)] for n in range(20)} for scope in SCOPES
    }  # fmt: skip
    for scope, values in put.items():
        for key, value in values.items():
            states.scope(HERE, scope, ALL).put(key, value)
    told = states.snapshot(HERE, ALL)
    assert told["conversation"].pop("external.conversation_id") == "talk-1"
    assert told == put
    assert states.snapshot(HERE)["subject"] == {}
    some = states.snapshot(HERE, ALL, prefix="actor.1")
    assert set(some["actor"]) == {"actor.1", *[f"actor.1{n}" for n in range(10)]}
    assert some["conversation"] == {}


# --- upsert ---------------------------------------------------------------------------------------


def test_upsert__last_write_wins_and_creation_stays(store: Store, clock: Clock) -> None:
    states = ScopedState(store)
    first = states.scope(HERE, "conversation").put("k", 1)
    clock.move(1000)
    other = HERE._replace(actor_id="bob", actor_type="admin")
    scope = states.scope(other, "conversation")
    second = scope.put("k", 2)
    assert (second.created_ms, second.updated_ms) == (first.created_ms, clock.now_ms)
    assert second.version != first.version
    assert second.written_by == ("admin", "bob")
    assert scope.find("k") == second
    # Where it was put first is kept, too.
    assert scope.origin("k") == HERE
    assert scope.delete("k")
    assert scope.origin("k") is None
    assert scope.put("k", 3).created_ms == clock.now_ms
    assert scope.origin("k") == other


def test_upsert__long_contexts_are_kept_as_well(store: Store) -> None:
    context = HERE._replace(bot_id="b" * 400, workspace_id="w" * 900, actor_id="é" * 255)
    scope = ScopedState(store).scope(context, "conversation")
    scope.put("k", 1)
    assert scope.origin("k") == context
    scope.put("k", 2)
    assert scope.origin("k") == context


def test_upsert__eight_first_writes_at_once_all_succeed(store: Store) -> None:
    states = ScopedState(store)
    barrier = threading.Barrier(8)

    def write(number: int) -> Any:
        barrier.wait(60)
        return states.update(HERE, ALL, "actor", "k", number)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(write, range(8)))
    assert all(outcome.ok for outcome in outcomes)
    assert len({outcome.version for outcome in outcomes}) == 8
    found = states.scope(HERE, "actor").find("k")
    assert found is not None
    # The last to be written is the one that is read.
    assert outcomes[found.value].version == found.version
    assert states.scope(HERE, "actor").usage().keys == 1


# --- null and missing, delete, alias ------------------------------------------------------------


def test_null_vs_missing__are_distinguished(store: Store) -> None:
    scope = ScopedState(store).scope(HERE, "actor")
    assert scope.find("k") is None
    scope.put("k", None)
    found = scope.find("k")
    assert found is not None
    assert found.value is None
    assert scope.list_keys().keys == ["k"]
    assert ScopedState(store).snapshot(HERE)["actor"] == {"k": None}


def test_delete__true_then_false(store: Store) -> None:
    scope = ScopedState(store).scope(HERE, "actor")
    assert not scope.delete("k")
    scope.put("k", 1)
    assert scope.delete("k")
    assert not scope.delete("k")
    assert scope.find("k") is None


def test_delete__of_everything_leaves_nothing_behind(store: Store) -> None:
    before = contents(store)
    states = ScopedState(store)
    for scope in SCOPES:
        for key in ("a", "b"):
            states.scope(HERE, scope, ALL).put(key, key)
    for scope in SCOPES:
        for key in ("a", "b"):
            assert states.scope(HERE, scope, ALL).delete(key)
    assert contents(store) == before


def test_alias__both_names_refer_to_one_value(store: Store) -> None:
    scope = ScopedState(store).scope(HERE, "conversation")
    put = scope.put("conversation_id", "c")
    assert put.key == "external.conversation_id"
    assert scope.find("external.conversation_id") == scope.find("conversation_id") == put
    assert scope.list_keys("conversation_id").keys == ["external.conversation_id"]
    swapped = scope.swap("external.conversation_id", "d", expected=put.version)
    assert scope.find("conversation_id") == swapped
    assert ScopedState(store).snapshot(HERE)["conversation"] == {"external.conversation_id": "d"}
    assert scope.delete("conversation_id")
    assert not scope.delete("external.conversation_id")


# --- list -----------------------------------------------------------------------------------------


def test_list__the_prefix_is_literal(store: Store) -> None:
    scope = ScopedState(store).scope(HERE, "runner", ALL)
    for key in ("a_b", "axb", "a%", "a", "b", "A_", "a\\_", "ä"):
        scope.put(key, 1)
    assert scope.list_keys("a_").keys == ["a_b"]
    assert scope.list_keys("%").keys == []
    assert scope.list_keys("a%").keys == ["a%"]
    assert scope.list_keys("a").keys == ["a", "a%", "a\\_", "a_b", "axb"]
    assert scope.list_keys().keys == ["A_", "a", "a%", "a\\_", "a_b", "axb", "b", "ä"]
    assert scope.list_keys("no") == ([], False, None)


def test_list__returns_at_most_a_hundred_keys_and_continues_after_a_key(store: Store) -> None:
    scope = ScopedState(store).scope(HERE, "runner", ALL)
    keys = [f"k{n:03}" for n in range(120)]
    for key in reversed(keys):
        scope.put(key, 1)
    assert scope.list_keys("k", limit=1000) == (keys[:100], True, "k099")
    assert scope.list_keys("k", after="k099") == (keys[100:], False, None)
    assert scope.list_keys("k", limit=20, after="k099") == (keys[100:], False, None)
    seen: list[str] = []
    cursor = None
    for _ in range(20):
        page = scope.list_keys(limit=7, after=cursor)
        seen += page.keys
        cursor = page.cursor
        if not page.has_more:
            break
    assert seen == keys
    # What the cursor names need not be there any more.
    scope.delete("k050")
    assert scope.list_keys(after="k050", limit=1).keys == ["k051"]
    wrongs: list[dict[str, Any]] = [{"limit": 0}, {"limit": "7"}, {"prefix": 1}, {"after": 1}]
    for wrong in wrongs:
        with pytest.raises(InvalidInputError):
            scope.list_keys(**wrong)


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "k" * 256, 7, None, b"k", "\ud800", "a\udc00b"])
def test_keys__an_invalid_key_is_refused_by_every_call(store: Store, key: Any) -> None:
    scope = ScopedState(store).scope(HERE, "actor")
    for call in (scope.find, scope.delete, scope.origin, lambda one: scope.put(one, 1)):
        with pytest.raises(StateRefusedError) as refused:
            call(key)
        assert refused.value.reason == Reason.BAD_KEY
    assert scope.usage() == (0, 0)


@pytest.mark.parametrize(
    "key", ["k" * 255, "漢" * 255, "\0", "a\0b\x01", " ", "../x", "\U0010ffff"]
)
def test_keys__any_other_text_is_accepted(store: Store, key: str) -> None:
    scope = ScopedState(store).scope(HERE, "actor")
    entry = scope.put(key, 1)
    assert scope.find(key) == entry
    assert scope.list_keys().keys == [key]
    assert scope.list_keys(key[:3]).keys == [key]
    assert scope.delete(key)
