"""Random steps on a store and on the model beside it, until they disagree.

Every step is run on one of two handles of the same store, so what one of them remembers is
often stale. Some steps are interrupted by another right before their first write: then
both must come out as if they had been taken one after the other, in some order.

``CASSTORE_MODEL_EXAMPLES`` gives the number of runs; then they are not the same every time.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Engine, Write, WriteResult
from casstore.errors import (
    CasstoreError,
    CycleError,
    LeaseLostError,
    NodeNotFoundError,
    SessionDeletedError,
    SessionNotFoundError,
)
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.maintenance import gc, retention
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.retention import Policy
from casstore.session.data import (
    LEAF,
    Batch,
    Checkpoint,
    Claim,
    Commit,
    CommitResult,
    Entry,
    Head,
    Lease,
    Node,
    NodeDraft,
    SessionInfo,
    Usage,
)
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing import ManualClock
from tests.session.session_model import (
    COMPONENTS,
    Model,
    ModelNode,
    Revision,
    SessionModel,
    encode_split,
    user_text,
)

EXAMPLES = int(os.environ.get("CASSTORE_MODEL_EXAMPLES", "0"))
STEPS = 30

# Prefixes of each other, other alphabets, and too long for a row key in bytes or characters.
SESSIONS = ("a", "ab", "a/b", "é", "日本", "a b", "z" * 300, "ü" * 150, "../x", "b")
ODD_NODES = ("n", "n1", "n\n1", "ñ", "木" * 120, "m" * 400, "m" * 401, "n 1", "N", "~")
LABELS = ("v1", "v", "état", "l" * 300)
OWNERS = ("ada", "bob")
SOURCE_KEYS = ("source", "source2")
PIN_NAMES = ("keep", "keep/all", "k", "ä" * 200)
ATTACHMENTS = ("file", "file2", "ÿ", "f" * 300)
LONG_TEXT = "All work and no play makes Jack a dull boy. " * 14
LONGER_TEXT = "".join(f"{number:05} lines, and another; " for number in range(120))

PAYLOADS: tuple[Any, ...] = (
    {"role": "user", "text": "hello"},
    {"role": "assistant", "text": "hi"},
    {"role": "user", "text": LONG_TEXT},
    {"role": "user", "text": LONGER_TEXT},
    {"role": "user", "id": "m1", "parts": [{"kind": "text", "text": "by parts"}]},
    {"role": "user", "parts": [{"kind": "tool_result", "content": LONG_TEXT}]},
    {
        "role": "assistant",
        "id": "m2",
        "parts": [{"kind": "text", "content": "x", "prune_state": None, "id": "p1"}],
    },
    {"message": {"role": "user", "text": "inside"}, "n": 1},
    {"message": {"role": 5}},
    {"nested": [[{"deep": {"er": [LONG_TEXT, {"a": None}]}}] * 3, True, 1.5, b"\x00\xff"]},
    [],
    {},
    None,
    "role",
    1,
    True,
    1.0,
    -(2**63),
    b"\x01" * 700,
    {f"key {number}": {"value": number} for number in range(120)},
)
CAUSES: tuple[Any, ...] = (None, None, {"call": 1}, {"call": LONG_TEXT})
BODIES: tuple[Any, ...] = (
    {"component": 1},
    {"component": LONG_TEXT, "more": [1, 2, {"x": LONGER_TEXT}]},
    {"component": {f"tool {number}": LONG_TEXT[: number * 20] for number in range(40)}},
    ["component", *range(300)],
)
VALUES: tuple[Any, ...] = (None, {}, {"turn": 1}, {"turn": LONG_TEXT}, [1, [2, [3]]], "text", 0)
FRAMES: tuple[Any, ...] = ((), ({"id": "f1", "created_at": 1},), ({"id": "f1"}, {"id": LONG_TEXT}))
BLOB = b"a component that is a blob"


def _names() -> dict[str, bytes]:
    """The digests of everything that a component may be."""
    with Store(MemoryEngine()) as store:
        names: dict[str, bytes] = {encode_split(body): store.put_value(body) for body in BODIES}
        names[encode_split(BLOB)] = store.put_blob(BLOB)
    return names


NAMES = _names()
ABSENT = Link(Digest.of_blob(b"nobody stored this"))


class Interruptible:
    """Stands before an engine and does one thing right before its next write."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.before: Callable[[], None] | None = None

    def write(self, write: Write) -> WriteResult:
        """Let the other step go first, then write."""
        before, self.before = self.before, None
        if before is not None:
            before()
        return self._engine.write(write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Op(NamedTuple):
    """One step: how to take it on a store, and on the model when the store has answered."""

    name: str
    session: str | None
    run: Callable[[Store], Any]
    model: Callable[[Model, Any], Any]


Choice = TypeVar("Choice")
SEEDS = st.integers(0, 2**64 - 1)
# How often each kind of step is taken.
WEIGHTS = {
    "commit": 12,
    "replay": 4,
    "rewind": 3,
    "fork": 4,
    "delete": 1,
    "tombstone": 3,
    "label": 2,
    "meta": 1,
    "tick": 2,
    "claim_lease": 3,
    "lease": 2,
    "enqueue": 4,
    "claim": 4,
    "work": 2,
    "attachment": 4,
    "pin": 2,
}


class Chooser:
    """The choices of one step, all made by one number."""

    def __init__(self, seed: int, step: int) -> None:
        # The same number is given more than once; it is to mean another choice each time.
        self._random = random.Random(f"{seed} {step}")

    def of(self, choices: Sequence[Choice]) -> Choice:
        """One of these."""
        return self._random.choice(choices)

    def rarely(self, times: int = 8) -> bool:
        """True once in so many times."""
        return self._random.randrange(times) == 0

    def often(self) -> bool:
        """True every other time."""
        return self._random.random() < 0.5


class SessionMachine(RuleBasedStateMachine):
    """A store, its model, and what callers of the store remember."""

    persistent = False

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.place = tempfile.TemporaryDirectory() if self.persistent else None
        self.engine = self.open()
        self.handles = self.hold()
        self.model = Model(self.clock.now_ms, NAMES)
        self.count = 0
        self.steps = 0
        self.agreed = True
        self.commits: dict[str, list[Commit]] = {}
        self.leases: dict[str, list[Lease]] = {}
        self.claims: dict[str, list[Claim]] = {}

    def open(self) -> Engine:
        if self.place is None:
            return MemoryEngine(clock=self.clock)
        path = str(Path(self.place.name) / "store")
        return LmdbEngine(path, durability="relaxed", clock=self.clock)

    def hold(self) -> list[tuple[Interruptible, Store]]:
        engines = [Interruptible(self.engine), Interruptible(self.engine)]
        return [(engine, Store(cast(Engine, engine), close=lambda: None)) for engine in engines]

    def teardown(self) -> None:
        try:
            # Where they disagree already, there is nothing more to be learned.
            for name in [*self.model.sessions, *self.model.deleted] if self.agreed else []:
                one = self.model.sessions.get(name)
                self.look(self.model, name, [*one.revisions] if one is not None else [])
        finally:
            self.engine.close()
            if self.place is not None:
                self.place.cleanup()

    # --- taking steps -------------------------------------------------------------------------

    def handle(self) -> tuple[Interruptible, Store]:
        self.count += 1
        return self.handles[self.count // 2 % 2]

    def attempt(self, op: Op, store: Store) -> Any:
        try:
            return op.run(store)
        except CasstoreError as error:
            return error

    def do(self, op: Op) -> None:
        """Take a step on the store and on the model, and compare."""
        note(f"{op.name} on {op.session!r:.40}")
        answer = self.attempt(op, self.handle()[1])
        self.agreed = False
        self.follow(self.model, [(op, answer)])
        self.agreed = True

    def follow(self, model: Model, steps: Sequence[tuple[Op, Any]]) -> None:
        """Take steps on the model that were taken on the store."""
        for op, answer in steps:
            try:
                expected = op.model(model, answer)
            except CasstoreError as error:
                expected = error
            same = _same(expected, answer)
            assert same, f"{op.name} on {op.session!r}: {answer!r}, not {expected!r}"
        touched = {op.session for op, _ in steps if op.session is not None}
        others = sorted({*model.sessions, *model.deleted} - touched)
        chance = random.Random(self.count)
        if chance.random() < 0.7:
            others = []
        for name in sorted(touched) + chance.sample(others, min(1, len(others))):
            one = model.sessions.get(name)
            revisions = [] if one is None else [*one.revisions]
            self.look(model, name, chance.sample(revisions, min(1, len(revisions))))
        self.look_at_store(model, chance)

    def interrupt(self, first: Op, second: Op) -> None:
        """Take ``second`` right before the first write of ``first``."""
        note(f"{first.name} on {first.session!r:.40}, before which it writes comes")
        note(f"    {second.name} on {second.session!r:.40}")
        engine, store = self.handle()
        other = next(other for _, other in self.handles if other is not store)
        answers: dict[str, Any] = {}

        def between() -> None:
            answers["second"] = self.attempt(second, other)

        engine.before = between
        answers["first"] = self.attempt(first, store)
        engine.before = None
        written = "second" in answers
        if not written:
            between()
        orders = [[(first, answers["first"]), (second, answers["second"])]]
        if written:
            # Mostly the one that wrote first came first, but what was read before may count.
            orders.insert(0, orders[0][::-1])
        self.agreed = False
        failures: list[AssertionError] = []
        for order in orders:
            model = self.model.copy()
            try:
                self.follow(model, order)
            except AssertionError as failure:
                failures.append(failure)
                continue
            self.model = model
            self.agreed = True
            return
        raise failures[0]

    # --- steps: commits -----------------------------------------------------------------------

    def known(self, name: str) -> SessionModel:
        """What the model has of a session; an empty one if it was deleted, or never made."""
        return self.model.sessions.get(name) or SessionModel()

    def any_session(self, choose: Chooser) -> str:
        """Mostly one that there is."""
        there = sorted(name for name, one in self.model.sessions.items() if one.revisions)
        if there and not choose.rarely(12):
            return choose.of(there)
        return choose.of(SESSIONS)

    def new_ids(self, choose: Chooser, one: SessionModel, count: int, *, anew: bool) -> list[str]:
        """Ids for new nodes, most of which are new indeed."""
        head = one.head or Revision()
        free = [node for node in ODD_NODES if node not in head.nodes]
        taken = list(head.nodes)
        found: list[str] = []
        for _ in range(count):
            if free and choose.rarely(3):
                found.append(free.pop(choose.of(range(len(free)))))
            elif taken and choose.rarely(25):
                found.append(choose.of(taken))
            else:
                self.count += 1
                found.append(f"n{self.count}")
        return found

    def drafts(self, choose: Chooser, one: SessionModel, *, anew: bool) -> list[NodeDraft]:
        head = one.head or Revision()
        there = [] if anew else [node.id for node in one.visible(head)]
        ids = self.new_ids(choose, one, choose.of((1, 2, 3, 4, 1, 1, 2, 40)), anew=anew)
        if len(ids) > 4:
            payload = choose.of(PAYLOADS[:2])
            return [NodeDraft(node, {**payload, "n": at}) for at, node in enumerate(ids)]
        drafts: list[NodeDraft] = []
        for node in ids:
            parent: Any = LEAF
            kind = choose.of(("leaf", "leaf", "leaf", "there", "there", "root", "commit", "odd"))
            if kind == "there" and there:
                parent = choose.of(there)
            elif kind == "root":
                parent = None
            elif kind == "commit":
                # Also those to come: they are put in order, and circles are refused.
                parent = choose.of([each for each in ids if each != node] or [None])
            elif kind == "odd" and choose.rarely(3):
                parent = choose.of([*ids, *head.nodes, "nobody"])
            drafts.append(
                NodeDraft(
                    node,
                    choose.of(PAYLOADS),
                    parent,
                    choose.of(CAUSES),
                    choose.of((None, "frame")),
                    choose.of((None, 5, 1.25, "2026-01-01T00:00:00Z")),
                )
            )
        return drafts

    def checkpoint(self, choose: Chooser) -> Checkpoint | None:
        if choose.often():
            return None
        links = [Link(Digest(digest)) for digest in self.model.stored]
        bodies: list[Any] = [None, *BODIES, *links]
        components = [choose.of(bodies) for _ in range(3)]
        if choose.rarely(20):
            components[0] = ABSENT
        tools, plugins, execution = components
        return Checkpoint(
            choose.of(VALUES),
            tools,
            plugins,
            choose.of((None, 0, 7)),
            execution,
            choose.of(FRAMES),
            choose.of((None, "frame")),
            choose.of(VALUES),
        )

    def lease(self, choose: Chooser, name: str) -> Any:
        """Mostly what lets a commit in."""
        live = self.model.live_lease(self.known(name))
        if choose.rarely(12):
            return choose.of([None, *self.leases.get(name, [])])
        return live

    def expected(self, choose: Chooser, name: str) -> int | None:
        head = self.known(name).head or Revision()
        kind = choose.of(("any",) * 4 + ("right",) * 4 + ("wrong",))
        if kind == "any":
            return None
        return head.number if kind == "right" else choose.of((0, head.number + 1))

    def label(self, choose: Chooser) -> str | None:
        return choose.of(LABELS) if choose.rarely(5) else None

    def at(self, choose: Chooser, name: str) -> int | str:
        """A revision, or a label; seldom one that is not there."""
        one = self.known(name)
        if one.labels and choose.rarely(3):
            return choose.of(sorted(one.labels))
        if choose.rarely(15):
            odd: list[int | str] = [0, 10**6, "no such label", ""]
            return choose.of(odd)
        return choose.of(sorted(one.revisions, reverse=True) or [1])

    def op_commit(self, choose: Chooser, name: str | None = None) -> Op:
        name = name or self.any_session(choose)
        busy = [
            each for each, one in sorted(self.model.sessions.items()) if one.queue and one.lease
        ]
        if busy and choose.rarely(5):
            name = choose.of(busy)
        one = self.known(name)
        kind = choose.of(("append",) * 6 + ("leaf", "leaf", "replace", "nothing"))
        change = Commit(
            checkpoint=self.checkpoint(choose),
            expected=self.expected(choose, name),
            lease=self.lease(choose, name),
            release=choose.rarely(6),
            label=self.label(choose),
        )
        if kind == "append":
            change = change._replace(append=self.drafts(choose, one, anew=False))
        if kind == "replace":
            change = change._replace(replace=self.drafts(choose, one, anew=True))
        if kind == "leaf" or choose.rarely(6):
            head = one.head or Revision()
            new = [draft.id for draft in (*change.append, *(change.replace or ()))]
            there = [] if kind == "replace" else [*head.nodes]
            change = change._replace(leaf=choose.of([*there, *new, None, "nobody"]))
        if choose.rarely(3):
            used = choose.of((1, 0, 5))
            usage = [Usage("main", choose.of(("large", "small")), used, 0, 3)]
            change = change._replace(usage=usage * choose.of((1, 2)))
        if choose.often():
            self.count += 1
            change = change._replace(turn=f"turn {self.count}")
        if self.claims.get(name) and choose.often():
            change = change._replace(completes=[choose.of(self.claims[name][-3:])])
        if one.attachments and choose.rarely(3):
            wanted = choose.of([*one.attachments, "never announced"])
            change = change._replace(attachments=[wanted])
        return self.commit(name, change)

    def commit(self, name: str, change: Commit) -> Op:
        def run(store: Store) -> Any:
            result = store.session(name).commit(change)
            if change.turn is not None:
                self.commits.setdefault(name, []).append(change)
            return result

        def follow(model: Model, answer: Any) -> Any:
            manifest = answer.manifest if isinstance(answer, CommitResult) else bytes(32)
            return model.commit(name, change, manifest)

        kinds = "replace" if change.replace is not None else "append" if change.append else "leaf"
        return Op(f"commit that does {kinds}", name, run, follow)

    def op_replay(self, choose: Chooser) -> Op:
        """A turn again: the same content with other ids and times, or other content."""
        names = sorted(self.commits)
        if not names:
            return self.op_commit(choose)
        name = choose.of(names)
        change = choose.of(self.commits[name][::-1])
        if not choose.rarely(4):
            change = self.retried(change)
        change = change._replace(
            expected=self.expected(choose, name) if choose.rarely(3) else None,
            lease=self.lease(choose, name),
            release=choose.rarely(6),
        )
        if choose.rarely(4):
            other = choose.of(("usage", "label", "payload", "checkpoint"))
            if other == "usage":
                change = change._replace(usage=[*change.usage, Usage("main", "large", 1)])
            elif other == "label":
                change = change._replace(label=f"other {self.count}")
            elif other == "checkpoint":
                change = change._replace(checkpoint=Checkpoint(config=self.count))
            elif change.append:
                odd = change.append[0]._replace(payload={"other": self.count})
                change = change._replace(append=[odd, *change.append[1:]])
        return self.commit(name, change)

    def retried(self, change: Commit) -> Commit:
        """What a runtime that starts anew would send: the same, under new ids."""
        drafts = change.append if change.replace is None else change.replace
        new: dict[Any, str] = {}
        for draft in drafts:
            self.count += 1
            new[draft.id] = f"r{self.count}"
        again = [
            draft._replace(
                id=new[draft.id],
                parent=cast(Any, new.get(draft.parent, cast(Any, draft.parent))),
                time=self.count,
            )
            for draft in drafts
        ]
        leaf: Any = new.get(change.leaf, change.leaf)
        change = change._replace(leaf=leaf)
        if change.replace is None:
            return change._replace(append=again)
        return change._replace(replace=again)

    def op_rewind(self, choose: Chooser) -> Op:
        name = self.any_session(choose)
        to, lease = self.at(choose, name), self.lease(choose, name)
        expected, label = self.expected(choose, name), self.label(choose)
        return Op(
            f"rewind to {to!r}",
            name,
            lambda store: store.session(name).rewind(
                to, lease=lease, expected=expected, label=label
            ),
            lambda model, _: model.rewind(name, to, lease, expected, label),
        )

    def op_fork(self, choose: Chooser) -> Op:
        source = self.any_session(choose)
        target = choose.of([one for one in SESSIONS if not self.known(one).exists] or SESSIONS)
        if choose.rarely(10):
            target = choose.of(SESSIONS)
        at = self.at(choose, source) if choose.often() else None
        node: str | None = None
        if choose.often():
            one = self.known(source)
            nodes = list((one.head or Revision()).nodes)
            node = choose.of([*nodes[::-1], "nobody"])

        def follow(model: Model, _: Any) -> Any:
            model.fork(source, target, at, node)
            return _head(model, target)

        return Op(
            f"fork of {source!r} at {at!r}, node {node!r}",
            target,
            lambda store: store.fork(source, target, at=at, node=node),
            follow,
        )

    def op_delete(self, choose: Chooser) -> Op:
        name = self.any_session(choose)
        return Op(
            "delete", name, lambda store: store.delete_session(name), lambda m, _: m.delete(name)
        )

    def op_tombstone(self, choose: Chooser) -> Op:
        name = self.any_session(choose)
        nodes = [*(self.known(name).head or Revision()).nodes][::-1]
        chosen = [choose.of([*nodes, "nobody"]) for _ in range(choose.of((1, 1, 2, 3)))]
        return Op(
            f"tombstone of {chosen!r}",
            name,
            lambda store: store.session(name).tombstone(chosen),
            lambda model, _: model.tombstone(name, chosen),
        )

    def op_label(self, choose: Chooser) -> Op:
        name, label = self.any_session(choose), choose.of(LABELS)
        if choose.rarely(3):
            return Op(
                f"unlabel {label!r}",
                name,
                lambda store: store.session(name).unlabel(label),
                lambda model, _: model.unlabel(name, label),
            )
        at = self.at(choose, name) if choose.often() else None
        return Op(
            f"label {label!r} at {at!r}",
            name,
            lambda store: store.session(name).label(label, at).revision,
            lambda model, _: model.label(name, label, at),
        )

    def op_meta(self, choose: Chooser) -> Op:
        name = self.any_session(choose)
        title = choose.of(("Title", "Títle", None))
        if choose.often():
            extra = choose.of(VALUES)
            return Op(
                "create",
                name,
                lambda store: store.create_session(name, name=title, extra=extra),
                lambda model, _: model.create(name, title, extra),
            )
        new = title or "new"
        return Op(
            "rename",
            name,
            lambda store: store.session(name).rename(new),
            lambda model, _: model.rename(name, new),
        )

    # --- steps: leases, queue -----------------------------------------------------------------

    def op_tick(self, choose: Chooser) -> Op:
        step_ms = choose.of((1, 999, 1000, 60_000))

        def run(_: Store) -> None:
            self.clock.now_ms += step_ms

        def follow(model: Model, _: Any) -> None:
            model.now_ms += step_ms

        return Op(f"{step_ms} ms pass", None, run, follow)

    def op_claim_lease(self, choose: Chooser, name: str | None = None) -> Op:
        name, owner = name or self.any_session(choose), choose.of(OWNERS)
        ttl_ms = choose.of((1000, 60_000, 1, 1000, 60_000, 1, 0))

        def run(store: Store) -> Any:
            lease = store.session(name).claim_lease(owner, ttl_ms)
            if lease is not None:
                self.leases.setdefault(name, []).append(lease)
            return lease

        def follow(model: Model, answer: Any) -> Any:
            token = answer.token if isinstance(answer, Lease) else b""
            return model.claim_lease(name, owner, ttl_ms, token)

        return Op("claim of the lease", name, run, follow)

    def op_lease(self, choose: Chooser) -> Op:
        """Renew or release a lease, in time or late."""
        names = sorted(self.leases)
        if not names:
            return self.op_claim_lease(choose)
        name = choose.of(names)
        lease = choose.of(self.leases[name][::-1])
        if choose.often():
            ttl_ms = choose.of((1000, 60_000, 1, 1000, 60_000, 1, 0))
            return Op(
                f"renewal of lease {lease.fencing}",
                name,
                lambda store: store.session(name).renew_lease(lease, ttl_ms),
                lambda model, _: model.renew_lease(name, lease, ttl_ms),
            )
        return Op(
            f"release of lease {lease.fencing}",
            name,
            lambda store: store.session(name).release_lease(lease),
            lambda model, _: model.release_lease(name, lease),
        )

    def op_enqueue(self, choose: Chooser) -> Op:
        name = self.any_session(choose)
        held = [each for each in sorted(self.leases) if self.model.live_lease(self.known(each))]
        if held and choose.often():
            name = choose.of(held)
        one = self.known(name)
        self.count += 1
        batch_id = f"batch {self.count}"
        if one.queue and choose.rarely(12):
            batch_id = choose.of(one.queue).id
        later_ms = choose.of((None, None, 1000, -1000))
        available = None if later_ms is None else self.clock.now_ms + later_ms
        wanted = Batch(
            batch_id,
            name,
            0,
            tuple(choose.of(PAYLOADS) for _ in range(choose.of((1, 2, 1, 2, 1, 0)))),
            choose.of((None, None, *SOURCE_KEYS)),
            choose.of(("after_turn", "earliest")),
            choose.of(("join", "exclusive")),
            choose.of(("merge", "merge", "other", None)),
            available or 0,
            0,
            0,
            0,
        )
        return Op(
            "enqueue",
            name,
            lambda store: store.session(name).queue.enqueue(
                wanted.items,
                source_key=wanted.source_key,
                delivery=wanted.delivery,
                slot=wanted.slot,
                merge_key=wanted.merge_key,
                available_at_ms=available,
                batch_id=batch_id,
            ),
            lambda model, _: model.enqueue(name, wanted),
        )

    def op_claim(self, choose: Chooser) -> Op:
        names = sorted(self.leases)
        if not names:
            return self.op_claim_lease(choose)
        held = [name for name in names if self.model.live_lease(self.known(name)) is not None]
        if not held and not choose.rarely(3):
            return self.op_claim_lease(choose)
        name = choose.of(held or names)
        lease = self.model.live_lease(self.known(name)) or choose.of(self.leases[name])
        boundary = choose.of(("idle", "checkpoint"))
        exactly: list[str] | None = None
        limit = choose.of((1, 2, 5, 0))
        if choose.rarely(4):
            exactly = [batch.id for batch in self.known(name).queue[: choose.of((1, 2, 0))]]
            limit = len(exactly)

        def run(store: Store) -> Any:
            queue = store.session(name).queue
            if exactly is None:
                claim = queue.claim(lease, boundary=boundary, limit=limit)
            else:
                claim = queue.claim_exactly(lease, exactly, boundary=boundary)
            if claim is not None:
                self.claims.setdefault(name, []).append(claim)
            return claim

        return Op(
            f"claim of work at {boundary} up to {limit}, {exactly!r}",
            name,
            run,
            lambda model, _: model.claim(name, lease, boundary, limit, exactly),
        )

    def op_work(self, choose: Chooser) -> Op:
        """Verify or abandon a claim, or cancel a batch."""
        names = sorted(name for name, one in self.model.sessions.items() if one.queue)
        kind = choose.of(("abandon", "cancel", "verify"))
        if kind == "cancel" and names:
            name = choose.of(names)
            batch = choose.of([*self.known(name).queue]).id
            return Op(
                f"cancel of {batch!r}",
                name,
                lambda store: store.session(name).queue.cancel(batch),
                lambda model, _: model.cancel(name, batch),
            )
        if not self.claims:
            return self.op_enqueue(choose)
        name = choose.of(sorted(self.claims))
        claim = choose.of(self.claims[name][::-1])
        if kind == "verify":
            return Op(
                f"verification of claim {claim.id}",
                name,
                lambda store: store.session(name).queue.verify(claim),
                lambda model, _: model.verify_claim(name, claim),
            )
        return Op(
            f"abandoning claim {claim.id}",
            name,
            lambda store: store.session(name).queue.abandon(claim),
            lambda model, _: model.abandon(name, claim),
        )

    # --- steps: attachments, pins ---------------------------------------------------------------

    def op_attachment(self, choose: Chooser) -> Op:
        name = self.any_session(choose)
        one = self.known(name)
        kind = choose.of(("intend", "put", "commit", "condemn", "forget"))
        attachment = choose.of([*one.attachments, *ATTACHMENTS])
        if kind == "intend":
            uri, owner = choose.of((None, "file:///x")), choose.of((None, "turn"))
            return Op(
                f"intent {attachment!r}",
                name,
                lambda store: store.session(name).attachments.intend(
                    attachment, uri=uri, owner=owner
                ),
                lambda model, _: model.intend(name, attachment, uri, owner),
            )
        if kind == "put":
            content = choose.of((b"bytes", LONGER_TEXT.encode()))
            return Op(
                "attachment of bytes",
                name,
                lambda store: store.session(name).attachments.put(content),
                lambda model, _: model.put_attachment(name, Digest.of_blob(content)),
            )
        if kind == "commit":
            both = [attachment, choose.of(ATTACHMENTS)][: choose.of((1, 2))]
            return Op(
                f"commit of attachments {both!r}",
                name,
                lambda store: store.session(name).attachments.commit(both),
                lambda model, _: model.commit_attachments(name, both),
            )
        if kind == "condemn":
            return Op(
                f"condemn {attachment!r}",
                name,
                lambda store: store.session(name).attachments.condemn(attachment),
                lambda model, _: model.condemn(name, attachment),
            )
        return Op(
            f"forget {attachment!r}",
            name,
            lambda store: store.session(name).attachments.forget(attachment),
            lambda model, _: model.forget(name, attachment),
        )

    def op_pin(self, choose: Chooser) -> Op:
        name = choose.of(PIN_NAMES)
        digest = Digest(choose.of([NAMES[encode_split(BLOB)], *self.model.stored]))
        kind = choose.of(("pin", "tag", "unpin"))
        if kind == "unpin":
            return Op("unpin", None, lambda s: s.unpin(name), lambda m, _: m.unpin(name))
        if kind == "tag":
            move = choose.often()
            return Op(
                f"tag {name!r}",
                None,
                lambda store: store.tag(name, digest, move=move),
                lambda model, _: model.pin(name, digest, None, tag=True, move=move),
            )
        ttl_ms = choose.of((1000, None, 60_000))
        return Op(
            f"pin {name!r}",
            None,
            lambda store: store.pin(name, digest, ttl_ms=ttl_ms),
            lambda model, _: model.pin(name, digest, ttl_ms, tag=False),
        )

    # --- rules --------------------------------------------------------------------------------

    def chooser(self, seed: int) -> Chooser:
        """The choices of the next step."""
        self.steps += 1
        return Chooser(seed, self.steps)

    def any_op(self, choose: Chooser, *, but: Sequence[str] = ()) -> Op:
        """Any step, commits first of all."""
        kinds = [kind for kind, weight in WEIGHTS.items() if kind not in but for _ in range(weight)]
        kind = choose.of(kinds)
        if kind == "delete" and not choose.rarely(3):
            kind = "commit"
        op: Op = getattr(self, f"op_{kind}")(choose)
        return op

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        choose = self.chooser(seed)
        self.handles[0][1].put_blob(BLOB)
        self.model.stored[NAMES[encode_split(BLOB)]] = BLOB
        for name in (choose.of(SESSIONS), choose.of(SESSIONS)):
            one = self.known(name)
            drafts = self.drafts(choose, one, anew=False)
            self.do(self.commit(name, Commit(append=drafts)))

    @rule(seed=SEEDS)
    def take_a_step(self, seed: int) -> None:
        self.do(self.any_op(self.chooser(seed)))

    @rule(seed=SEEDS)
    def take_steps(self, seed: int) -> None:
        choose = self.chooser(seed)
        for _ in range(3):
            self.do(self.any_op(choose))

    @rule(seed=SEEDS)
    def commit_under_a_lease(self, seed: int) -> None:
        """Several commits by both handles, neither of which reads the head when it knows one."""
        choose = self.chooser(seed)
        name = self.any_session(choose)
        if self.model.live_lease(self.known(name)) is None:
            self.do(self.op_claim_lease(choose, name))
        for _ in range(2):
            self.do(self.op_commit(choose, name))
        self.interrupt(self.op_commit(choose, name), self.op_commit(choose, name))

    @rule(seed=SEEDS)
    def hide_and_fork(self, seed: int) -> None:
        choose = self.chooser(seed)
        self.do(self.op_tombstone(choose))
        self.do(self.op_fork(choose))

    @rule(seed=SEEDS)
    def interrupt_a_step(self, seed: int) -> None:
        choose = self.chooser(seed)
        # What is claimable depends on the time at which it is looked for.
        first = self.any_op(choose, but=["tick", "claim", "pin"])
        self.interrupt(first, self.any_op(choose))

    @rule(seed=SEEDS)
    def interrupt_a_commit(self, seed: int) -> None:
        choose = self.chooser(seed)
        first = self.op_commit(choose)
        kind = choose.of(("tick", "commit", "lease", "replay"))
        if kind == "tick":
            second = self.op_tick(choose)
        elif kind == "commit":
            second = self.op_commit(choose, first.session)
        elif kind == "lease":
            second = self.op_claim_lease(choose, first.session)
        else:
            second = self.op_replay(choose)
        self.interrupt(first, second)

    @rule()
    def reopen(self) -> None:
        """Close and open again; what is not kept in files gets new handles only."""
        if self.persistent:
            self.engine.close()
            self.engine = self.open()
        self.handles = self.hold()

    @rule(seed=SEEDS)
    def forget_history(self, seed: int) -> None:
        """Let old revisions go, and with them rows that nothing needs any more."""
        choose = self.chooser(seed)
        store = self.handle()[1]
        name = self.any_session(choose)
        one = self.known(name)
        if one.exists:
            pinned = {pin.digest for pin in store.pins()}
            stays = {n for n in one.revisions if store.session(name).entry(n).manifest in pinned}
            last, labelled = choose.of((1, 2, 3)), choose.often()
            plan = retention.plan(
                store, sessions=[name], policy=Policy(last=last, labelled=labelled)
            )
            report = retention.execute(store, plan)
            gone = self.model.retain(name, last, labelled=labelled, pinned=stays)
            assert (report.revisions_removed, report.skipped, report.refused) == (gone, (), ())
        if choose.often():
            expire_rows(store)
            for pin in [*self.model.pins]:
                if not self.model.is_pinned(pin):
                    self.model.unpin(pin)

    @rule()
    def collect_and_pack(self) -> None:
        """Give back what nobody reaches: nothing that the model has may be missing then."""
        if not self.persistent:
            return
        store = Store(self.engine, close=lambda: None)
        gc.collect(store, grace_ms=0)
        store.put_blob(BLOB)
        kept = {pin.digest for pin in self.model.pins.values() if self.model.is_pinned(pin.name)}
        for one in self.model.sessions.values():
            for revision in one.revisions.values():
                bodies = [getattr(revision.checkpoint, name) for name in COMPONENTS]
                kept |= {Digest(NAMES[encode_split(body)]) for body in bodies if body is not None}
        assert store.missing(sorted(kept)) == []
        gone = set(store.missing(list(self.model.stored)))
        self.model.stored = {
            digest: body for digest, body in self.model.stored.items() if digest not in gone
        }

    # --- comparing ----------------------------------------------------------------------------

    def look_at_store(self, model: Model, chance: random.Random) -> None:
        """What is not of one session."""
        store = self.handle()[1]
        listed = [_info(model, name) for name in model.sessions if model.sessions[name].exists]
        listed.sort(key=lambda info: info.meta.session.encode())
        _compare([*store.sessions()], listed, model, "the listing")
        prefix = chance.choice(("", "a", "z" * 299, "ü"))
        behind = chance.choice(SESSIONS)
        some = [
            info
            for info in listed
            if info.meta.session.startswith(prefix) and info.meta.session.encode() > behind.encode()
        ]
        found = [*store.sessions(prefix=prefix, after=behind, limit=2)]
        _compare(found, some[:2], model, "a part of the listing")
        pins = sorted(model.pins.values(), key=lambda pin: pin.name.encode())
        assert [*store.pins(expired=True)] == pins
        assert [*store.pins()] == [pin for pin in pins if model.is_pinned(pin.name)]
        assert store.find_pin("keep") == (model.pins["keep"] if model.is_pinned("keep") else None)
        places = [
            (name, number)
            for name, one in sorted(model.sessions.items())
            for number in [None, *one.revisions]
            if one.revisions
        ]
        if places and chance.random() < 0.5:
            self.compare(model, store, chance.choice(places), chance.choice(places))

    def compare(
        self,
        model: Model,
        store: Store,
        old: tuple[str, int | None],
        new: tuple[str, int | None],
    ) -> None:
        before, after = model.at(*old), model.at(*new)
        about = f"compare {old!r} with {new!r}"
        found = store.compare(old, new)
        names = [{node.name: node for node in side.nodes.values()} for side in (before, after)]
        added = [names[1][name] for name in names[1].keys() - names[0].keys()]
        dropped = [names[0][name] for name in names[0].keys() - names[1].keys()]
        for what, refs, nodes in (
            ("added", found.added, added),
            ("dropped", found.dropped, dropped),
        ):
            assert len(refs) == len(nodes), f"{about}: {what} {refs!r}, not {nodes!r}"
            by_id = {node.id: node for node in nodes}
            assert [ref.seq for ref in refs] == sorted(ref.seq for ref in refs), about
            for ref in refs:
                node = by_id.get(ref.id)
                assert node is not None, f"{about}: {what} {ref!r}"
                assert ref[1:4] == (node.parent, node.seq, node.depth), f"{about}: {what} {ref!r}"
                assert model.matches(node.name, ref.digest), f"{about}: {what} {ref!r}"
        common = {node.name for node in before.path(before.leaf)}
        shared = [node.id for node in after.path(after.leaf) if node.name in common]
        ancestor = None if found.ancestor is None else found.ancestor.id
        assert ancestor == (shared[-1] if shared else None), about
        assert (found.old_leaf, found.new_leaf) == (before.leaf, after.leaf), about
        fields = before.fields(), after.fields()
        differ = {
            name
            for name in fields[0]
            if encode_split(fields[0][name]) != encode_split(fields[1][name])
        }
        assert {change.path[0] for change in found.changes} == differ, about
        assert found.equal == (before.name() == after.name()), about
        by_digest = store.compare(found.old, found.new)
        assert by_digest[:7] == found[:7], f"{about}: differs without the node table"
        assert {change.path[0] for change in by_digest.changes} == differ, about

    def look(self, model: Model, name: str, revisions: Iterable[int]) -> None:
        """Compare a session with the model of it, now and at earlier revisions."""
        session = self.handle()[1].session(name)
        if name in model.deleted:
            _look_at_deleted(session)
            return
        one = model.at_hand(name)
        assert session.queue.batches() == one.queue, f"queue of {name!r}"
        assert session.queue.pending() == model.pending(one), f"pending of {name!r}"
        attached = sorted(one.attachments.values(), key=lambda each: each.id.encode())
        assert session.attachments.list() == attached, f"attachments of {name!r}"
        orphans = [
            each
            for each in attached
            if each.state != "committed" and each.intent_at_ms <= model.now_ms - 1000
        ]
        orphans.sort(key=lambda each: each.intent_at_ms)
        found = session.attachments.uncommitted(older_than_ms=model.now_ms - 1000)
        assert found == orphans, f"orphans of {name!r}"
        if one.head is None:
            _look_at_empty(session)
            return
        _compare([session.head()], [_head(model, name)], model, f"head of {name!r}")
        _compare([session.info()], [_info(model, name)], model, f"info of {name!r}")
        assert session.meta() == model.meta(name)
        entries = [_entry(name, one, number) for number in sorted(one.revisions, reverse=True)]
        history = [*session.history()]
        _compare(history, entries, model, f"history of {name!r}")
        for entry, (number, revision) in zip(
            history[::-1], sorted(one.revisions.items()), strict=True
        ):
            assert model.matches(revision.name(), entry.manifest), f"manifest {number} of {name!r}"
        self.look_at_revision(model, session, one, None)
        for number in revisions:
            self.look_at_revision(model, session, one, number)
            _compare([session.entry(number)], [_entry(name, one, number)], model, "an entry")

    def look_at_revision(
        self, model: Model, session: Session, one: SessionModel, at: int | None
    ) -> None:
        revision = model.at(session.id, at)
        about = f"session {session.id!r} at {at}"
        leaf = one.leaf(revision)
        visible, path = one.visible(revision), one.path(revision, leaf)
        state = session.load(at)
        assert state is not None, about
        healed = one.is_hidden(revision, revision.leaf)
        assert (state.leaf, state.healed) == (leaf, healed), about
        assert state.head.revision == revision.number, about
        _compare_nodes(model, state.nodes, path, f"{about}: the path")
        _compare_nodes(model, session.nodes("full", at=at), visible, f"{about}: the full graph")
        assert encode_split(state.checkpoint) == encode_split(revision.checkpoint), about
        assert state.usage == session.usage(at) == revision.ledger(), about
        links = session.checkpoint(at)
        for component in ("tool_state", "plugin_snapshot", "execution_state"):
            body = getattr(revision.checkpoint, component)
            link = None if body is None else Link(Digest(NAMES[encode_split(body)]))
            assert getattr(links, component) == link, about
        chance = random.Random(self.count)
        for node in chance.sample(visible, min(2, len(visible))):
            trail = [each.id for each in one.path(revision, node.id)]
            found = session.nodes(leaf=node.id, at=at, payloads=False)
            assert [each.id for each in found] == trail, f"{about}: the path to {node.id!r}"
            single = session.node(node.id, at=at)
            assert single is not None, about
            _compare_nodes(model, [single], [node], f"{about}: node {node.id!r}")
        gone = sorted(node for node in revision.nodes if one.is_hidden(revision, node))
        for node_id in [*gone[:3], "nobody"]:
            assert session.node(node_id, at=at) is None, f"{about}: {node_id!r} is to be seen"
            refused = _refused(partial(session.nodes, leaf=node_id, at=at))
            assert refused is NodeNotFoundError, f"{about}: the path to {node_id!r}"


class PersistentSessionMachine(SessionMachine):
    """The same on files."""

    persistent = True


# --- what the model says, as the runtime puts it ------------------------------------------------

NO_DIGEST = Digest(bytes(32))


def _head(model: Model, name: str) -> Head:
    one = model.sessions[name]
    head = one.head
    assert head is not None
    return Head(
        name,
        head.number,
        NO_DIGEST,
        head.leaf,
        len(head.nodes),
        one.created_at_ms,
        head.committed_at_ms,
        head.turn,
        one.origin,
    )


def _entry(name: str, one: SessionModel, number: int) -> Entry:
    revision = one.revisions[number]
    return Entry(
        name,
        number,
        NO_DIGEST,
        revision.operation,
        revision.committed_at_ms,
        revision.turn,
        one.labels_at(number),
        revision.rewound_to,
    )


def _info(model: Model, name: str) -> SessionInfo:
    one = model.sessions[name]
    if one.head is None:
        return SessionInfo(model.meta(name), None, None, 0)
    path = one.path(one.head, one.leaf(one.head))
    texts = [text for node in path if (text := user_text(node.payload)) is not None]
    return SessionInfo(
        model.meta(name), _head(model, name), texts[0] if texts else None, len(texts)
    )


def _plain(answer: Any) -> Any:
    """Without the digests of manifests, which the model does not make."""
    if isinstance(answer, SessionInfo) and answer.head is not None:
        return answer._replace(head=answer.head._replace(manifest=NO_DIGEST))
    if isinstance(answer, Head | Entry | CommitResult):
        return answer._replace(manifest=NO_DIGEST)
    return answer


def _same(expected: Any, answer: Any) -> bool:
    if isinstance(expected, CasstoreError):
        if type(expected) is not type(answer):
            return False
        if isinstance(expected, LeaseLostError) and isinstance(answer, LeaseLostError):
            return expected.session == answer.session  # the model gives no reason
        # Which node of a circle is named does not matter.
        return isinstance(expected, CycleError) or vars(expected) == vars(answer)
    if isinstance(expected, CommitResult) and expected.replayed and expected != answer:
        return False
    return bool(_plain(expected) == _plain(answer))


def _compare(found: Sequence[Any], expected: Sequence[Any], model: Model, what: str) -> None:
    plain = [_plain(one) for one in found]
    assert plain == expected, f"{what}: {plain!r}, not {expected!r}"


def _compare_nodes(
    model: Model, found: Iterable[Node], expected: Sequence[ModelNode], what: str
) -> None:
    nodes = list(found)
    ids = [node.id for node in expected]
    assert [node.id for node in nodes] == ids, f"{what}: {[n.id for n in nodes]!r}, not {ids!r}"
    for node, wanted in zip(nodes, expected, strict=True):
        assert encode_split(node[:8]) == encode_split(wanted[:8]), (
            f"{what}: {node!r}, not {wanted!r}"
        )
        assert model.matches(wanted.name, node.digest), f"{what}: {node!r} has another digest"


def _refused(call: Callable[[], object]) -> type[CasstoreError] | None:
    try:
        call()
    except CasstoreError as error:
        return type(error)
    return None


def _look_at_deleted(session: Session) -> None:
    calls: list[Callable[[], object]] = [
        session.head,
        session.load,
        session.nodes,
        session.usage,
        session.meta,
        session.info,
        session.checkpoint,
        session.entry,
        session.queue.batches,
        session.queue.pending,
        session.attachments.list,
        lambda: session.node("n"),
        lambda: [*session.history()],
    ]
    for call in calls:
        assert _refused(call) is SessionDeletedError, f"{call!r} of deleted {session!r}"


def _look_at_empty(session: Session) -> None:
    assert session.head() is None
    assert session.load() is None
    assert [*session.nodes()] == [*session.nodes("full")] == [*session.history()] == []
    assert session.usage() == ()
    assert session.node("n") is None
    assert _refused(lambda: session.load(1)) is SessionNotFoundError
    assert _refused(session.checkpoint) is SessionNotFoundError


# --- running ------------------------------------------------------------------------------------


def _settings(examples: int) -> settings:
    return settings(
        max_examples=EXAMPLES or examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Making a failure smaller takes minutes; the steps are printed with it anyhow.
        phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
    )


def test_sessions_in_memory_agree_with_the_model() -> None:
    run_state_machine_as_test(SessionMachine, settings=_settings(8))


def test_sessions_in_files_agree_with_the_model() -> None:
    run_state_machine_as_test(PersistentSessionMachine, settings=_settings(5))
