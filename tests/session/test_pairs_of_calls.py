"""Two calls on a session, one in the midst of the other: as if one had come after the other.

The second happens wholly before the first call to the engine that the first makes, before its
second, and so on. What both say and what is left must be what one of the two orders gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count, product
from typing import Final, NamedTuple

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES
from casstore.errors import CasstoreError
from casstore.session import keys
from casstore.session.data import Claim, Commit, Lease
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import all_rows
from casstore.testing.session_fixtures import MINUTE_MS, enqueue, hold, step, take
from tests.session.test_interleaving import Interrupted

NOW_MS: Final = 1_760_000_000_000
KEY: Final = keys.session_key("s")

Call = Callable[[Session], object]

ATTACHMENTS: dict[str, Call] = {
    "intend": lambda session: session.attachments.intend("file", uri="file:///other"),
    "intend new": lambda session: session.attachments.intend("new", uri="file:///new"),
    "put": lambda session: session.attachments.put(b"bytes"),
    "commit": lambda session: session.attachments.commit(["file"]),
    "commit two": lambda session: session.attachments.commit(["file", "second"]),
    "condemn": lambda session: session.attachments.condemn("file"),
    "forget": lambda session: session.attachments.forget("file"),
    "forget second": lambda session: session.attachments.forget("second"),
    "commit a step": lambda session: (
        session.commit(Commit(expected=3, attachments=["file"])).revision
    ),
}
PROTECTIONS: dict[str, Call] = {
    "protect": lambda session: session.protect(1, by="run"),
    "protect for a while": lambda session: session.protect(1, by="run", ttl_ms=MINUTE_MS),
    "unprotect": lambda session: session.unprotect("run"),
    "unprotect one": lambda session: session.unprotect("run", 2),
}
NAMES: dict[str, Call] = {
    "label": lambda session: session.label("name", 1).revision,
    "label another": lambda session: session.label("name", 2).revision,
    "label the head": lambda session: session.label("name").revision,
    "commit with a label": lambda session: (
        session.commit(Commit(expected=3, label="name")).revision
    ),
    "unlabel": lambda session: session.unlabel("name"),
    "rename": lambda session: session.rename("one").name,
    "rename otherwise": lambda session: session.rename("two").name,
    "describe": lambda session: session.update_meta(model="small").model,
    "add a subject": lambda session: session.add_subjects(["anna"]),
    "add another subject": lambda session: session.add_subjects(["bert"]),
    "remove a subject": lambda session: session.remove_subjects(["carl"]),
}
QUEUE: dict[str, Call] = {
    "enqueue": lambda session: enqueue(session, batch_id="new"),
    "enqueue otherwise": lambda session: enqueue(session, batch_id="other", source_key="key"),
    "enqueue again": lambda session: enqueue(session, batch_id="third", source_key="key"),
    "cancel": lambda session: session.queue.cancel("batch"),
}


class AtWork(NamedTuple):
    """A store in which somebody works on a session, and with what."""

    engine: MemoryEngine
    lease: Lease
    claim: Claim


@cache
def at_work() -> AtWork:
    engine = MemoryEngine(clock=lambda: NOW_MS)
    session = Store(engine).session("s")
    step(session, "a")
    enqueue(session, batch_id="held", source_key="held")
    enqueue(session, batch_id="batch")
    lease = hold(session)
    return AtWork(engine, lease, take(session, lease))


# Under a lease that is held, with one batch claimed and one that waits.
WORK: dict[str, Call] = {
    "claim": lambda session: session.queue.claim(at_work().lease),
    "verify": lambda session: session.queue.verify(at_work().claim),
    "abandon": lambda session: session.queue.abandon(at_work().claim),
    "complete": lambda session: (
        session.commit(Commit(completes=[at_work().claim], lease=at_work().lease)).revision
    ),
    "complete and release": lambda session: (
        session.commit(
            Commit(completes=[at_work().claim], lease=at_work().lease, release=True)
        ).revision
    ),
    "pending": lambda session: session.queue.pending(),
    "cancel what is held": lambda session: session.queue.cancel("held"),
    "cancel": lambda session: session.queue.cancel("batch"),
    "enqueue again": lambda session: enqueue(session, batch_id="new", source_key="held"),
    "release": lambda session: session.release_lease(at_work().lease),
    "renew": lambda session: session.renew_lease(at_work().lease, 2 * MINUTE_MS).expires_at_ms,
    "lease": lambda session: session.claim_lease("another", MINUTE_MS) is not None,
}
GROUPS: Final = (ATTACHMENTS, PROTECTIONS, NAMES, QUEUE, WORK)
PAIRS: Final = [(group, *pair) for group in GROUPS for pair in product(group, group)]


class Outcome(NamedTuple):
    """What two calls said, and what they left."""

    first: str
    second: str
    rows: dict[tuple[str, bytes], bytes]


@pytest.fixture(scope="module")
def filled() -> MemoryEngine:
    engine = MemoryEngine(clock=lambda: NOW_MS)
    session = Store(engine).session("s")
    for name in ("a", "b", "c"):
        step(session, name)
    session.attachments.intend("file", uri="file:///file")
    session.attachments.intend("second", uri="file:///second")
    session.protect(1, by="run")
    session.protect(2, by="run")
    session.add_subjects(["carl"])
    session.label("name", 3)
    enqueue(session, batch_id="batch")
    return engine


def copy_of(engine: MemoryEngine) -> Interrupted:
    return Interrupted(engine, clock=lambda: NOW_MS)


def said(engine: MemoryEngine, call: Call) -> str:
    try:
        return repr(call(Store(engine).session("s")))
    except CasstoreError as exc:
        return type(exc).__name__


def left(engine: MemoryEngine) -> dict[tuple[str, bytes], bytes]:
    """All rows but those with something random in them, of which it counts that they are there."""
    random = {keys.sign().key, *[keys.mark(KEY, revision).key for revision in range(4)]}
    return {
        (table, row.key): b"" if table in ("heads", "leases") or row.key in random else row.value
        for table in TABLES
        for row in all_rows(engine, table)
    }


@pytest.mark.parametrize(
    ("group", "first", "second"), PAIRS, ids=[f"{one} and {other}" for _, one, other in PAIRS]
)
def test_two_interleaved_calls_have_the_result_of_one_of_the_serial_orders(
    filled: MemoryEngine, group: dict[str, Call], first: str, second: str
) -> None:
    before = at_work().engine if group is WORK else filled
    orders = []
    for is_turned in (False, True):
        engine = copy_of(before)
        names = (second, first) if is_turned else (first, second)
        one, then = [said(engine, group[name]) for name in names]
        told = (then, one) if is_turned else (one, then)
        orders.append(Outcome(*told, left(engine)))
    for at in count(1):
        engine = copy_of(before)
        other: list[str] = []

        def happens(engine: Interrupted = engine, other: list[str] = other) -> None:
            other.append(said(engine, group[second]))

        engine.happens, engine.calls_left = happens, at
        answer = said(engine, group[first])
        if not other:
            break
        engine.calls_left = -1
        assert Outcome(answer, other[0], left(engine)) in orders, f"before call {at}"
    assert at > 1
