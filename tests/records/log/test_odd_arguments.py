"""Arguments that cannot be: refused with an error of the store, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from casstore.records.log import NewMessage, SessionLog
from casstore.store import Store
from tests.refusals import SURROGATE, CountingEngine, assert_refused

ODD: Any = 5
NONE: Any = None
NOTHING: Any = 0
USER = NewMessage("user", "hello")


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def log(engine: CountingEngine) -> Iterator[SessionLog]:
    with Store(engine) as store:
        log = SessionLog(store)
        log.create("s")
        log.create("below", parent="s")
        log.append("s", USER)
        log.append("s", NewMessage("assistant", tool_calls=[{"id": "c1"}, {"id": "c2"}]))
        log.create("folded")
        log.extend("folded", [USER, USER])
        log.fold("folded", [1], "a note")
        store.fork("s", "fork")
        yield log


def _numbered(log: SessionLog, number: int) -> list[dict[str, Any]]:
    """An export of a session whose last message has another number."""
    entries = list(log.export("folded"))
    at = max(at for at, entry in enumerate(entries) if "message" in entry)
    entries[at] = {"message": [number, *entries[at]["message"][1:]]}
    return entries


CALLS: dict[str, Callable[[SessionLog], object]] = {
    "a config that is a number": lambda log: log.create("new", config=ODD),
    "a config that is nothing": lambda log: log.create("new", config=NOTHING),
    "metadata that are pairs": lambda log: log.create("new", metadata=[("a", 1)]),  # type: ignore[arg-type]
    "metadata that are a text": lambda log: log.create("new", metadata="meta"),  # type: ignore[arg-type]
    "an adopted config": lambda log: log.adopt("fork", config=ODD),
    "adopted metadata": lambda log: log.adopt("fork", metadata=ODD),
    "a status that is none": lambda log: log.finish("below", ODD),
    "a status that cannot be spelled": lambda log: log.finish("below", SURROGATE),
    "a text that says not to cascade": lambda log: log.close("s", cascade="no"),  # type: ignore[arg-type]
    "messages that are a number": lambda log: log.extend("s", ODD),
    "tool calls that are a number": lambda log: log.append(
        "s", NewMessage("user", tool_calls=NOTHING)
    ),
    "tool calls that are a dict": lambda log: log.append(
        "s",
        NewMessage("user", tool_calls={}),  # type: ignore[arg-type]
    ),
    "a meta that is a number": lambda log: log.append("s", NewMessage("user", meta=NOTHING)),
    "a meta that is a list": lambda log: log.append(
        "s",
        NewMessage("user", meta=[]),  # type: ignore[arg-type]
    ),
    "messages to fold that are lists": lambda log: log.fold("s", [[]], "a note"),  # type: ignore[list-item]
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
    "renewing the fields of a lease": lambda log: log.renew_lease(("s", "owner"), 1000),  # type: ignore[arg-type]
    "releasing no lease": lambda log: log.release_lease(NONE),
    "an export that is none": lambda log: log.import_session(NONE, "new"),
    "an export that is a number": lambda log: log.import_session(ODD, "new"),
    "a message of a number that nobody counts to": lambda log: log.import_session(
        _numbered(log, 1 << 70), "new"
    ),
    "totals that are bytes": lambda log: log.import_session(
        [*list(log.export("s"))[:-2], {"totals": b"four"}, {"end": 4}], "new"
    ),
    "totals that lack some": lambda log: log.import_session(
        [*list(log.export("s"))[:-2], {"totals": [0]}, {"end": 4}], "new"
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_log_calls_refuse_invalid_arguments(
    engine: CountingEngine, log: SessionLog, call: str
) -> None:
    assert_refused(engine, lambda: CALLS[call](log))
    pending = log.pending("s")
    assert pending is not None
    assert [one["id"] for one in pending.calls] == ["c1", "c2"]


def test_set_pending_accepts_an_iterator_of_ids(log: SessionLog) -> None:
    log.set_pending("s", iter(["c2"]))
    pending = log.pending("s")
    assert pending is not None
    assert [one["id"] for one in pending.calls] == ["c2"]
