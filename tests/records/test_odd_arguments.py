"""Invalid arguments of record systems are refused with InvalidInputError, before any write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from casstore import aio
from casstore.engine.protocol import Write
from casstore.errors import StorageError
from casstore.maintenance import copy
from casstore.records.lifecycles import Annotation, FileKeys, Hold, Lifecycles, Ref, Seal
from casstore.records.lifecycles.user_data import NewValue
from casstore.records.log import NewMessage, SessionLog
from casstore.records.runs import COMMITTED, Runs, steps
from casstore.records.scoped import (
    SCOPES,
    ActorErasure,
    Context,
    Quota,
    ScopedState,
    StatePolicy,
    binding_identity,
    scope_key,
)
from casstore.session.data import Commit, NodeDraft
from casstore.session.records import Draft, Table
from casstore.store import Store
from tests.refusals import (
    NAN,
    NONE,
    ODD,
    SURROGATE,
    UNHASHABLE,
    CountingEngine,
    assert_refused,
    odd,
)

Calls = dict[str, Callable[[Any], object]]


class System(NamedTuple):
    """A record system, with calls that it must refuse."""

    #: What the calls are made on, with something in it.
    prepare: Callable[[Store], Any]
    calls: Calls
    #: What is in it is there still, and nothing else.
    is_unchanged: Callable[[Any], bool]


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    with Store(engine) as store:
        yield store


# --- tables of rows -------------------------------------------------------------------------


def table_of(store: Store) -> Table:
    return Table(store, "some.table", 2)


def changed(store: Store, change: Callable[[Draft, Table], object]) -> None:
    draft = Draft(store)
    change(draft, table_of(store))
    draft.commit()


def store_with_a_row(store: Store) -> Store:
    changed(store, lambda draft, table: draft.put(table, ("a", "b"), 1))
    return store


ROWS: Calls = {
    "a name that is a number": lambda store: Table(store, ODD, 1),
    "a name beyond ASCII": lambda store: Table(store, "tablé", 1),
    "keys of no texts": lambda store: Table(store, "name", 0),
    "keys of none": lambda store: Table(store, "name", NONE),
    "keys of one and a half": lambda store: Table(store, "name", odd(1.5)),
    "keys to find": lambda store: table_of(store).find_many(ODD),
    "a key to find": lambda store: table_of(store).find_many([ODD]),
    "a part of a key to find": lambda store: table_of(store).find("a"),
    "an invalid page": lambda store: table_of(store).scan_starting("", page=NONE),
    "an order that is a text": lambda store: table_of(store).scan(reverse=odd("no")),
    "more groups than texts": lambda store: table_of(store).groups(1 << 70),
    "a table that is its name": lambda store: changed(
        store, lambda draft, table: draft.put(odd("some.table"), ("a", "c"), 1)
    ),
    "a part of a key": lambda store: changed(
        store, lambda draft, table: draft.put(table, ("a",), 1)
    ),
    "a key of nothing": lambda store: changed(store, lambda draft, table: draft.put(table, (), 1)),
    "a key that is a text": lambda store: changed(
        store, lambda draft, table: draft.put(table, odd("ab"), 1)
    ),
    "a key that is a number": lambda store: changed(
        store, lambda draft, table: draft.put(table, ODD, 1)
    ),
    "a part of a key to delete": lambda store: changed(
        store, lambda draft, table: draft.delete(table, ("a",))
    ),
    "a part of a key to expect": lambda store: changed(
        store, lambda draft, table: draft.expect(table, ("a",), None)
    ),
    "a record to expect": lambda store: changed(
        store, lambda draft, table: draft.expect(table, ("a", "b"), ODD)
    ),
    "a record to copy": lambda store: changed(
        store, lambda draft, table: draft.copy(table, NONE, ("a", "c"))
    ),
    "a list to extend": lambda store: changed(store, lambda draft, table: draft.extend(NONE, [1])),
    "items to extend by": lambda store: changed(
        store, lambda draft, table: draft.extend(draft.keep([1]), ODD)
    ),
    "how long is long": lambda store: changed(
        store, lambda draft, table: draft.keep_long([1], least_bytes=odd("9"))
    ),
    "what also happens": lambda store: changed(store, lambda draft, table: draft.also(NONE)),
}


# --- lifecycles -----------------------------------------------------------------------------

HOLD = Hold("a law", 4_000_000_000_000)
SEAL = Seal("a decision", "a law")
FACT = Annotation(("process",))


def some_lifecycles(store: Store) -> Lifecycles:
    life = Lifecycles(store)
    life.create_session("s", user="anna").checkpoint("first")
    life.users.put("anna", "language", "en")
    life.records.put("facts", "one", 1, FACT)
    return life


LIFECYCLES: Calls = {
    "a key store that is its path": lambda life: Lifecycles(life.store, keys=odd("keys")),
    "an annotation that is a number": lambda life: life.users.put("anna", "name", 1, ODD),
    "an annotation that is its classes": lambda life: life.users.put(
        "anna", "name", 1, ("identity",)
    ),
    "a record without an annotation": lambda life: life.records.put("facts", "two", 2, NONE),
    "an annotation of a checkpoint": lambda life: life.restore("s").checkpoint("next", None, ODD),
    "an annotation that holds by a number": lambda life: life.records.put(
        "facts", "two", 2, FACT._replace(hold=ODD)
    ),
    "an annotation that seals by a text": lambda life: life.records.put(
        "facts", "two", 2, FACT._replace(seal=odd("a decision"))
    ),
    "a name of a value that is a list": lambda life: life.users.put("anna", UNHASHABLE, 1),
    "the name of a ref": lambda life: life.users.ref("anna", ODD),
    "values that are a number": lambda life: life.users.put_many(ODD),
    "invalid values": lambda life: life.users.put_many(NONE),
    "values that are tuples": lambda life: life.users.put_many([("anna", "name", 1)]),
    "a value whose name is a list": lambda life: life.users.put_many(
        [NewValue("anna", UNHASHABLE, 1)]
    ),
    "places that are a number": lambda life: life.users.find_many(ODD),
    "places that are texts": lambda life: life.users.find_many(["anna"]),
    "places that are numbers": lambda life: life.users.find_many([ODD]),
    "names of working state that are lists": lambda life: life.restore("s").checkpoint(
        "next", [UNHASHABLE]
    ),
    "names of working state that are numbers": lambda life: life.restore("s").checkpoint(
        "next", [ODD]
    ),
    "a hold that is a number": lambda life: life.hold(life.users.ref("anna", "language"), ODD),
    "no hold": lambda life: life.hold(life.users.ref("anna", "language"), NONE),
    "no seal": lambda life: life.seal(life.users.ref("anna", "language"), NONE),
    "a row that is a text": lambda life: life.remove(Ref("record", "facts", "one"), only="row"),
    "an invalid text of a ref": lambda life: Ref.from_text(NONE),
    "a ref of bytes as text": lambda life: Ref("user", odd(b"anna")).to_text(),
    "keys at no path": lambda life: FileKeys(NONE),
    "keys at a number": lambda life: FileKeys(ODD),
    "keys at a path of bytes": lambda life: FileKeys(odd(b"keys")),
    "keys at a path with a NUL": lambda life: FileKeys("ke\0ys"),
    "keys at an empty path": lambda life: FileKeys(""),
}
REFS: dict[str, Any] = {
    "none": None,
    "a number": 5,
    "a text": "record",
    "a kind that is a list": Ref(UNHASHABLE, "facts", "one"),
}
ABOUT: dict[str, Callable[[Lifecycles, Ref], object]] = {
    "find_note": lambda life, ref: life.find_note(ref),
    "hold": lambda life, ref: life.hold(ref, HOLD),
    "seal": lambda life, ref: life.seal(ref, SEAL),
    "lift_hold": lambda life, ref: life.lift_hold(ref, review="done"),
    "lift_seal": lambda life, ref: life.lift_seal(ref, review="done"),
    "verify_seal": lambda life, ref: life.verify_seal(ref),
    "remove": lambda life, ref: life.remove(ref),
}


@pytest.mark.parametrize("call", ABOUT)
@pytest.mark.parametrize("ref", REFS)
def test_a_ref_that_is_not_a_record_is_refused(
    engine: CountingEngine, store: Store, ref: str, call: str
) -> None:
    life = some_lifecycles(store)
    assert_refused(engine, lambda: ABOUT[call](life, REFS[ref]))


def test_a_path_too_long_for_keys_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        FileKeys(tmp_path / ("x" * 5000))


def test_an_annotation_accepts_an_iterator(store: Store) -> None:
    life = some_lifecycles(store)
    ref = life.records.put("facts", "two", 2, Annotation(odd(iter(["process"]))))
    note = life.find_note(ref)
    assert note is not None
    assert note.classes == ("process",)


# --- the session log ------------------------------------------------------------------------

NOTHING: Any = 0
USER = NewMessage("user", "hello")


def some_log(store: Store) -> SessionLog:
    log = SessionLog(store)
    log.create("s")
    log.create("below", parent="s")
    log.append("s", USER)
    log.append("s", NewMessage("assistant", tool_calls=[{"id": "c1"}, {"id": "c2"}]))
    log.create("folded")
    log.extend("folded", [USER, USER])
    log.fold("folded", [1], "a note")
    store.fork("s", "fork")
    return log


def numbered(log: SessionLog, number: int) -> list[dict[str, Any]]:
    """An export of a session whose last message has another number."""
    entries = list(log.export("folded"))
    at = max(at for at, entry in enumerate(entries) if "message" in entry)
    entries[at] = {"message": [number, *entries[at]["message"][1:]]}
    return entries


def pending_ids(log: SessionLog) -> list[str]:
    pending = log.pending("s")
    assert pending is not None
    return [one["id"] for one in pending.calls]


LOG: Calls = {
    "a config that is a number": lambda log: log.create("new", config=ODD),
    "a config that is nothing": lambda log: log.create("new", config=NOTHING),
    "metadata that are pairs": lambda log: log.create("new", metadata=[("a", 1)]),
    "metadata that are a text": lambda log: log.create("new", metadata="meta"),
    "an adopted config": lambda log: log.adopt("fork", config=ODD),
    "adopted metadata": lambda log: log.adopt("fork", metadata=ODD),
    "an invalid status": lambda log: log.finish("below", ODD),
    "a status that cannot be encoded": lambda log: log.finish("below", SURROGATE),
    "a text that says not to cascade": lambda log: log.close("s", cascade="no"),
    "messages that are a number": lambda log: log.extend("s", ODD),
    "tool calls that are a number": lambda log: log.append(
        "s", NewMessage("user", tool_calls=NOTHING)
    ),
    "tool calls that are a dict": lambda log: log.append(
        "s", NewMessage("user", tool_calls=odd({}))
    ),
    "a meta that is a number": lambda log: log.append("s", NewMessage("user", meta=NOTHING)),
    "a meta that is a list": lambda log: log.append("s", NewMessage("user", meta=UNHASHABLE)),
    "messages to fold that are lists": lambda log: log.fold("s", [[]], "a note"),
    "the meta of a fold": lambda log: log.fold("s", [1], "a note", meta=ODD),
    "notes that are kept perhaps": lambda log: log.fold("s", [1], "a note", keep_notes=NONE),
    "an age below zero": lambda log: log.prune("folded", older_than_ms=-1),
    "a new send that is a number": lambda log: log.start_round("s", 1, new_send=ODD),
    "nothing that executes": lambda log: log.resume("s", NONE),
    "a number that executes": lambda log: log.resume("s", ODD),
    "one id that waits": lambda log: log.set_pending("s", "c1"),
    "ids that are numbers": lambda log: log.set_pending("s", [1]),
    "a number that waits": lambda log: log.set_pending("s", ODD),
    "renewing no lease": lambda log: log.renew_lease(NONE, 1000),
    "renewing the fields of a lease": lambda log: log.renew_lease(("s", "owner"), 1000),
    "releasing no lease": lambda log: log.release_lease(NONE),
    "an invalid export": lambda log: log.import_session(NONE, "new"),
    "an export that is a number": lambda log: log.import_session(ODD, "new"),
    "a message with a number above the limit": lambda log: log.import_session(
        numbered(log, 1 << 70), "new"
    ),
    "totals that are bytes": lambda log: log.import_session(
        [*list(log.export("s"))[:-2], {"totals": b"four"}, {"end": 4}], "new"
    ),
    "totals that lack some": lambda log: log.import_session(
        [*list(log.export("s"))[:-2], {"totals": [0]}, {"end": 4}], "new"
    ),
}


def test_set_pending_accepts_an_iterator_of_ids(store: Store) -> None:
    log = some_log(store)
    log.set_pending("s", iter(["c2"]))
    assert pending_ids(log) == ["c2"]


# --- runs -----------------------------------------------------------------------------------

STEP = steps.SetState("r", "running", COMMITTED)


def some_runs(store: Store) -> Runs:
    runs = Runs(store)
    runs.create_thread("t", "agent")
    runs.create_run("t", "r", "agent", "mode")
    runs.set_state("t", "r", "waiting_for_approval", checkpoint="there")
    runs.request_approval("t", "r", "a", "tool")
    runs.put_artifact("t", "r", "report", 1, "text")
    return runs


def a_commit(expected: Any) -> Commit:
    return Commit(append=[NodeDraft("n", 1)], expected=expected)


RUNS: Calls = {
    "no commit": lambda runs: runs.commit("s", NONE, "t", STEP),
    "a commit that is a dict": lambda runs: runs.commit("s", {}, "t", STEP),
    "an expected revision that is a text": lambda runs: runs.commit("s", a_commit("0"), "t", STEP),
    "an expected revision between two": lambda runs: runs.commit("s", a_commit(0.5), "t", STEP),
    "an intent that is a number": lambda runs: runs.resolve_approval(
        "t", "r", "a", "approve", intent=ODD
    ),
    "an intent that is its payload": lambda runs: runs.resolve_approval(
        "t", "r", "a", "approve", intent={"answer": 1}
    ),
    "decisions that are a number": lambda runs: runs.request_approval(
        "t", "r", "b", "tool", allowed=ODD
    ),
    "decisions in no order": lambda runs: runs.request_approval(
        "t", "r", "b", "tool", allowed={"yes", "no"}
    ),
    "decisions that can be read once": lambda runs: runs.request_approval(
        "t", "r", "b", "tool", allowed=iter(["yes"])
    ),
    "a text that says not to replace": lambda runs: runs.put_artifact(
        "t", "r", "report", 2, "text", replace="no"
    ),
    "a status of threads": lambda runs: runs.threads(status=ODD),
    "an agent of threads": lambda runs: runs.threads(agent=ODD),
    "a workspace of threads": lambda runs: runs.threads(workspace=ODD),
    "a state of runs": lambda runs: runs.runs(state=ODD),
    "an agent of runs": lambda runs: runs.runs(agent=ODD),
    "a state of a thread's runs": lambda runs: runs.thread_runs("t", state=ODD),
    "a status of approvals": lambda runs: runs.approvals(status=ODD),
}
BESIDE: dict[str, Write] = {
    "invalid rows": Write(rows=NONE),
    "a row that is a number": Write(rows=[ODD]),
    "conditions that are a text": Write(conditions="now"),  # type: ignore[arg-type]
    "a condition that is its fields": Write(conditions=[("records", b"key", None)]),  # type: ignore[list-item]
    "objects that are a number": Write(objects=ODD),
    "an object that is bytes": Write(objects=[b"object"]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("also", BESIDE)
def test_invalid_records_are_refused_with_their_commit(
    engine: CountingEngine, store: Store, also: str
) -> None:
    some_runs(store)
    change = Commit(append=[NodeDraft("n", 1)], also=BESIDE[also])
    assert_refused(engine, lambda: store.session("s").commit(change))


# --- scoped state ---------------------------------------------------------------------------

HERE = Context("runner", bot_id="bot", conversation_id="talk", actor_id="anna")
ALL = StatePolicy(scopes=SCOPES)


def some_states(store: Store) -> ScopedState:
    states = ScopedState(store)
    for scope in ("conversation", "actor"):
        states.scope(HERE, scope).put("key", "value")
    states.reset(workspace_id=None, bot_id="bot", conversation_id="talk")
    states.begin_run("run", HERE, caller="plugin")
    return states


SCOPED: Calls = {
    "no context": lambda states: states.snapshot(NONE),
    "a context that is its runner": lambda states: states.scope("runner", "actor"),
    "the fields of a context": lambda states: states.update(tuple(HERE), ALL, "actor", "key", 1),
    "a context of a run": lambda states: states.begin_run("new", NONE, caller="plugin"),
    "no policy": lambda states: states.update(HERE, NONE, "actor", "key", 1),
    "a policy for a scope": lambda states: states.scope(HERE, "actor", NONE),
    "a policy for a snapshot": lambda states: states.snapshot(HERE, NONE),
    "a policy of a run": lambda states: states.begin_run("new", HERE, NONE, caller="plugin"),
    "how much a snapshot takes": lambda states: states.snapshot(HERE, max_bytes=NONE),
    "a bound that bounds nothing": lambda states: states.snapshot(HERE, max_bytes=NAN),
    "how much a run's snapshot takes": lambda states: states.run("run", caller="plugin").snapshot(
        max_bytes=NONE
    ),
    "capabilities that are lists": lambda states: states.begin_run(
        "new", HERE, caller="plugin", capabilities=[[]]
    ),
    "progress while dropping": lambda states: states.drop_history(
        workspace_id=None, bot_id="bot", conversation_id="talk", progress=ODD
    ),
    "progress while erasing": lambda states: states.erase_actor("anna", progress=ODD),
    "an actor without a name": lambda states: states.erase_actor(""),
    "a workspace to erase in": lambda states: states.erase_actor("anna", workspace_id=ODD),
    "a bot to erase of": lambda states: states.erase_actor("anna", bot_id=SURROGATE),
    "the type of a binding": lambda states: binding_identity(scope_type=ODD, scope_id="id"),
    "the id of a binding": lambda states: binding_identity(ODD),
    "the key of no context": lambda states: scope_key(NONE, "actor"),
    "the key of an actor that is a number": lambda states: scope_key(
        HERE._replace(actor_id=ODD), "actor"
    ),
    "the key of an actor that cannot be encoded": lambda states: scope_key(
        HERE._replace(actor_id=SURROGATE), "actor"
    ),
}
POLICIES: dict[str, StatePolicy] = {
    "enabled by a text": StatePolicy(odd("no")),
    "enabled by a number": StatePolicy(odd(1)),
    "invalid scopes": StatePolicy(scopes=NONE),
    "one scope": StatePolicy(scopes=odd("actor")),
    "scopes that are lists": StatePolicy(scopes=("actor", UNHASHABLE)),
    "a scope that there is not": StatePolicy(scopes=("actor", "actors")),
    "scopes that can be read once": StatePolicy(scopes=odd(iter(["actor"]))),
    "invalid quotas": StatePolicy(quotas=NONE),
    "quotas that are a list": StatePolicy(quotas=odd([Quota()])),
    "a quota of a scope that there is not": StatePolicy(quotas={"actors": Quota(1)}),
    "a quota that is a number": StatePolicy(quotas={"actor": ODD}),
    "a quota that is two": StatePolicy(quotas={"actor": odd((1, 2))}),
    "a quota of a text": StatePolicy(quotas={"actor": Quota(odd("9"))}),
    "a quota below zero": StatePolicy(quotas={"actor": Quota(max_bytes=-1)}),
    "a quota that is no number": StatePolicy(quotas={"actor": Quota(max_bytes=NAN)}),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_call_that_takes_a_policy_refuses_an_invalid_one(
    engine: CountingEngine, store: Store, policy: str
) -> None:
    states, given = some_states(store), POLICIES[policy]
    assert_refused(engine, lambda: states.update(HERE, given, "actor", "new", 1))
    assert_refused(engine, lambda: states.scope(HERE, "actor", given))
    assert_refused(engine, lambda: states.snapshot(HERE, given))
    assert_refused(engine, lambda: states.begin_run("new", HERE, given, caller="plugin"))


def store_with_states(store: Store) -> Store:
    some_states(store)
    return store


def find_actors(store: Store, actor: Any) -> object:
    return ActorErasure(lambda subject: actor).find(store, "anna")


ERASURES: Calls = {
    "an invalid function that names actors": lambda store: ActorErasure(ODD),
    "a workspace": lambda store: ActorErasure(workspace_id=ODD),
    "a bot": lambda store: ActorErasure(bot_id=ODD),
    "an invalid result of find": lambda store: ActorErasure().erase(store, "anna", NONE),
    "what was found is a number": lambda store: ActorErasure().erase(store, "anna", [ODD]),
    "the roots of nothing": lambda store: ActorErasure().roots(store, NONE),
    "the rows of a number": lambda store: ActorErasure().rows(store, [ODD]),
    "an invalid actor": lambda store: ActorErasure(lambda subject: odd(None)).find(store, "anna"),
    "an actor who is nothing, which everybody begins with": lambda store: ActorErasure(
        lambda subject: odd("")
    ).find(store, "anna"),
    "an actor who is a type, which many have": lambda store: ActorErasure(
        lambda subject: odd(("user",))
    ).find(store, "anna"),
    "an actor who is one without a name": lambda store: ActorErasure(
        lambda subject: odd(("user", ""))
    ).find(store, "anna"),
}


# --- all of them ----------------------------------------------------------------------------

SYSTEMS: dict[str, System] = {
    "rows": System(
        store_with_a_row,
        ROWS,
        lambda store: [row.key for row in table_of(store).scan()] == [("a", "b")],
    ),
    "lifecycles": System(
        some_lifecycles,
        LIFECYCLES,
        lambda life: (
            life.records.get("facts", "one") == 1
            and [info.label for info in life.restore("s").checkpoints()] == ["first"]
        ),
    ),
    "log": System(some_log, LOG, lambda log: pending_ids(log) == ["c1", "c2"]),
    "runs": System(some_runs, RUNS, lambda runs: runs.read_artifact("t", "r", "report") == 1),
    "scoped": System(
        some_states, SCOPED, lambda states: states.snapshot(HERE)["actor"] == {"key": "value"}
    ),
    "erasure of scoped state": System(
        store_with_states,
        ERASURES,
        lambda store: ScopedState(store).snapshot(HERE)["actor"] == {"key": "value"},
    ),
}


@pytest.mark.parametrize(
    ("system", "call"), [(name, call) for name, system in SYSTEMS.items() for call in system.calls]
)
def test_record_systems_refuse_invalid_arguments(
    engine: CountingEngine, store: Store, system: str, call: str
) -> None:
    prepare, calls, is_unchanged = SYSTEMS[system]
    made = prepare(store)
    assert_refused(engine, lambda: calls[call](made))
    assert is_unchanged(made)


NO_STORES: dict[str, Any] = {
    "a path": "my-store",
    "nothing": None,
    "one that is awaited": aio.AsyncStore.__new__(aio.AsyncStore),
}
ON_STORES: dict[str, Callable[[Any], object]] = {
    "a log": SessionLog,
    "runs": Runs,
    "scoped state": ScopedState,
    "lifecycles": Lifecycles,
    "a draft": Draft,
}


@pytest.mark.parametrize("made", ON_STORES)
@pytest.mark.parametrize("given", NO_STORES)
def test_anything_but_a_store_is_refused(engine: CountingEngine, given: str, made: str) -> None:
    assert_refused(engine, lambda: ON_STORES[made](NO_STORES[given]))


def test_copy_refuses_paths_in_place_of_stores(engine: CountingEngine, store: Store) -> None:
    assert_refused(engine, lambda: copy.copy("a", "b"))  # type: ignore[arg-type]
    assert_refused(engine, lambda: copy.copy(store, "b"))  # type: ignore[arg-type]
