"""Every operation is one transaction, and holds from several processes at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casstore import store as stores
from casstore.errors import CasstoreError, SessionExistsError
from casstore.records.lifecycles import Annotation, FileKeys, Hold, Lifecycles, Seal
from casstore.records.lifecycles.user_data import NewValue
from casstore.store import Store
from tests.records.one_transaction import assert_one_transaction

LONG = "long " * 300
NOTED = Annotation(
    ["learned_context"], subjects=["anna", "berta"], processors=["crm"], seal=Seal("a", "b")
)
HELD = Annotation(hold=Hold("law", 2**42))


def prepare(life: Lifecycles) -> Any:
    session = life.create_session("s", user="anna")
    session.working.set("text", LONG)
    for label in ("a", "b"):
        session.checkpoint(label, annotation=Annotation(subjects=["berta"], processors=["crm"]))
    life.users.put("anna", "x", LONG)
    life.users.put("anna", "y", 1, Annotation(subjects=["berta"]))
    life.records.put("c", "n", LONG, Annotation(["process"], sources=[life.users.ref("anna", "x")]))
    return session


OPERATIONS: dict[str, Callable[[Lifecycles, Any], Any]] = {
    "create a session": lambda life, session: life.create_session("t", user="berta"),
    "checkpoint": lambda life, session: session.checkpoint("c"),
    "checkpoint with a note": lambda life, session: session.checkpoint("c", annotation=NOTED),
    "delete a checkpoint": lambda life, session: session.delete_checkpoint(1),
    "delete a session": lambda life, session: life.delete_session("s"),
    "put a new value": lambda life, session: life.users.put("anna", "z", LONG),
    "put a value again": lambda life, session: life.users.put("anna", "x", 2),
    "put of a new user": lambda life, session: life.users.put("carla", "x", 2),
    "put with a note": lambda life, session: life.users.put("anna", "x", 2, NOTED),
    "put many": lambda life, session: life.users.put_many(
        [NewValue("anna", "z", LONG), NewValue("carla", "z", 1)]
    ),
    "delete a value": lambda life, session: life.users.delete("anna", "y"),
    "put a record": lambda life, session: life.records.put("c", "m", LONG, NOTED),
    "put a record again": lambda life, session: life.records.put("c", "n", 1, NOTED),
    "delete a record": lambda life, session: life.records.delete("c", "n"),
    "hold": lambda life, session: life.hold(life.users.ref("anna", "x"), Hold("law", 2**42)),
    "seal": lambda life, session: life.seal(life.users.ref("anna", "y"), Seal("a", "b")),
}


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_one_transaction(
    operation: str, encrypted: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    keys = request.getfixturevalue("keys") if encrypted else None

    def operate(store: Store, session: Any) -> Any:
        return OPERATIONS[operation](Lifecycles(store, keys=keys), session)

    assert_one_transaction(
        tmp_path / "s", lambda store: prepare(Lifecycles(store, keys=keys)), operate
    )


@pytest.mark.parametrize("encrypted", [False, True], ids=["clear", "encrypted"])
def test_erasing_a_user_removes_all_rows_in_one_write(
    encrypted: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    keys = request.getfixturevalue("keys") if encrypted else None

    def operate(store: Store, session: Any) -> Any:
        # Without the keys at hand the list of those to destroy stays: the rest is this write.
        return Lifecycles(store).users.erase("anna")

    assert_one_transaction(
        tmp_path / "s", lambda store: prepare(Lifecycles(store, keys=keys)), operate
    )


# --- processes --------------------------------------------------------------------------------

PROCESSES, STEPS = 3, 12


def run(place: str, folder: str, number: int, begin: Any, answers: Any) -> None:
    with stores.open(place, "relaxed") as store:
        life = Lifecycles(store, keys=FileKeys(folder))
        begin.wait()
        won = 0
        for step in range(STEPS):
            try:
                life.create_session(f"race {step}")
                won += 1
            except SessionExistsError:
                pass
            session = life.restore("shared")
            session.working.set("from", [number, step])
            session.checkpoint(f"of {number}", ["from"])
            life.users.put("anna", f"{number} {step}", f"value {number} {step}")
            life.users.put("anna", "same", number)
            if step % 4 == 3:
                life.users.put("erased", f"{number} {step}", LONG)
                life.users.erase("erased")
        answers.put((number, won))


def test_processes_lose_nothing_and_number_without_gaps(tmp_path: Path, keys: FileKeys) -> None:
    place, folder = str(tmp_path / "s"), str(tmp_path / "keys")
    with stores.open(place, "relaxed") as store:
        Lifecycles(store).create_session("shared", user="anna")
    spawn = multiprocessing.get_context("spawn")
    begin, answers = spawn.Barrier(PROCESSES, timeout=60), spawn.Queue()
    workers = [
        spawn.Process(target=run, args=(place, folder, number, begin, answers))
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    won = [answers.get(timeout=120)[1] for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sum(won) == STEPS, "each session was created by exactly one"
    with stores.open(place, "relaxed") as store:
        life = Lifecycles(store, keys=keys)
        session = life.restore("shared")
        listed = list(session.checkpoints())
        assert [info.number for info in listed] == list(range(1, PROCESSES * STEPS + 1))
        for number in range(PROCESSES):
            own = [info for info in listed if info.label == f"of {number}"]
            found = [session.get_checkpoint(info.number).payload["from"][1] for info in own]
            assert found == list(range(STEPS))
            for step in range(STEPS):
                assert life.users.get("anna", f"{number} {step}") == f"value {number} {step}"
        # Whatever is left of the user who was erased all the time can be read.
        for name in life.users.names("erased"):
            assert life.users.get("erased", name) == LONG
        assert life.users.erase("anna").deleted == PROCESSES * STEPS + 1
        life.users.erase("erased")
        assert [path for path in (tmp_path / "keys").iterdir() if path.suffix == ".key"] == []


def test_two_concurrent_erasures_count_each_value_once(store: Store) -> None:
    from casstore.testing.session_fixtures import at_once

    life = Lifecycles(store)
    for number in range(20):
        life.users.put("anna", f"{number}", number)
    found = at_once(store, lambda handle, _: Lifecycles(handle).users.erase("anna").deleted)
    assert not [each for each in found if isinstance(each, CasstoreError)]
    assert sorted(found, key=int)[-1] == sum(found) == 20  # type: ignore[arg-type]
