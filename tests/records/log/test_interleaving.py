"""The session log while other writers interleave with each call."""

from __future__ import annotations

from itertools import count

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.maintenance import retention, vacuum
from casstore.maintenance.policy import Policy
from casstore.records.log import NewMessage, SessionLog, Tokens
from casstore.store import Store
from tests.records.interleaving import LONG, OTHER, Operation, assert_unharmed

_names = count(1)
#: So long that a row of usage links to it.
MODEL = "model" + "m" * 900


@pytest.fixture(scope="module")
def filled() -> MemoryEngine:
    """A session with calls that wait, usage and a child. Nobody may change it."""
    engine = MemoryEngine()
    log = SessionLog(Store(engine))
    log.create("s", prompt=LONG, metadata={"text": LONG})
    for number in range(1, 7):
        log.append("s", NewMessage("user", f"{number} {LONG}"))
    log.append("s", NewMessage("assistant", tool_calls=[{"id": "c", "name": LONG}]))
    log.record_usage("s", Tokens(1, 2, 3, MODEL))
    log.create("child", parent="s", prompt=LONG)
    return engine


def replace(store: Store) -> None:
    """Everything changes, and of what was before nothing is left."""
    log = SessionLog(store)
    if log.find("child") is not None:
        log.update("child", prompt=OTHER)
    if log.find("s") is None:
        return  # it was being closed, and is
    log.update("s", prompt=OTHER, metadata={"text": OTHER})
    log.record_usage("s", Tokens(4, 5, 6, "another" + MODEL))
    log.append("s", NewMessage("user", "more"))
    log.fold("s", [5, 6], "in short")
    log.prune("s")
    retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    vacuum.vacuum(store, grace_ms=0)


def close(store: Store) -> None:
    SessionLog(store).close("s")


def another() -> str:
    return f"new {next(_names)}"


OPERATIONS: dict[str, Operation] = {
    "find": lambda store: SessionLog(store).find("s"),
    "sessions": lambda store: list(SessionLog(store).sessions()),
    "children": lambda store: SessionLog(store).children("s"),
    "update": lambda store: SessionLog(store).update("s", model="x"),
    "create": lambda store: SessionLog(store).create(another(), parent="s"),
    "close": close,
    "close one": lambda store: SessionLog(store).close("s", cascade=False),
    "finish": lambda store: SessionLog(store).finish("child", "completed"),
    "append": lambda store: SessionLog(store).append(
        "s", NewMessage("user", "hello"), tokens=Tokens(7, 8, 9)
    ),
    "active": lambda store: SessionLog(store).active("s"),
    "messages": lambda store: list(SessionLog(store).messages("s")),
    "message": lambda store: SessionLog(store).message("s", 2),
    "fold": lambda store: SessionLog(store).fold("s", [1, 2], "well", keep_notes=True),
    "folds": lambda store: SessionLog(store).folds("s"),
    "prune": lambda store: SessionLog(store).prune("s"),
    "pending": lambda store: SessionLog(store).pending("s"),
    "resume": lambda store: SessionLog(store).resume("s", lambda call: "done"),
    "abort": lambda store: SessionLog(store).abort("s"),
    "usage": lambda store: SessionLog(store).usage("s"),
    "record usage": lambda store: SessionLog(store).record_usage("s", Tokens(7, 8, 9)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_during_replacement_and_gc_sees_the_current_log(
    filled: MemoryEngine, operation: str
) -> None:
    assert_unharmed(filled, OPERATIONS[operation], replace, allowed=())


@pytest.mark.parametrize("operation", [*OPERATIONS, "export"])
def test_a_call_during_close_and_gc_reports_a_missing_log_and_not_damage(
    filled: MemoryEngine, operation: str
) -> None:
    todo = {"export": lambda store: list(SessionLog(store).export("s")), **OPERATIONS}
    assert_unharmed(filled, todo[operation], close)


def test_an_export_holds_rounds_and_totals_of_one_moment() -> None:
    log = SessionLog(Store(MemoryEngine()))
    log.create("s")
    log.send("s", NewMessage("user", "hello"))
    for number in range(3):
        log.record_usage("s", Tokens(100, 100, 200), round=number)
    entries = log.export("s")
    seen = []
    for entry in entries:
        seen.append(entry)
        if "usage" in entry:
            # Corrected, while somebody reads on.
            log.record_usage("s", Tokens(1, 1, 2), round=0)
            log.record_usage("s", Tokens(1, 1, 2), round=2)
    copy = log.import_session(seen)
    assert log.totals(copy.id).total == sum(used.tokens.total or 0 for used in log.usage(copy.id))
