"""The worker that the ``sessions`` campaign kills: an agent runtime on a few shared sessions.

    session_workload.py STORE DURABILITY ENGINE JOURNALS WORKER LIFE SEED   until killed

First it resolves every call of its earlier lives whose outcome is unknown, as a runtime does: it
commits the turn again, queues the work again, forks again. Then it works: it claims leases and
queued work, commits turns, queues more, forks, rewinds, labels and packs. Sometimes it sleeps until
its lease has expired and commits nevertheless.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns.session_calls import Calls
from campaigns.session_journal import Call, Journal, path_of, read
from campaigns.session_turns import SHARED, Turn
from casstore.engine.protocol import Packing
from casstore.errors import ClaimLostError, LeaseLostError, SessionExistsError
from casstore.session.data import Claim, Head, Lease
from casstore.session.session import Session

# The longest time that the lease of a killed owner blocks others.
MAX_TTL_MS = 250
_TTLS_MS = (40, 100, MAX_TTL_MS)
_LATE_TTL_MS = 5


class Worker:
    """One life of a worker."""

    def __init__(
        self, store: casstore.Store, calls: Calls, name: str, life: int, rng: random.Random
    ) -> None:
        self._store = store
        self._calls = calls
        self._rng = rng
        self._forks: list[str] = []
        self._ids = (f"{name}-{life}-{number}" for number in range(sys.maxsize))

    def live(self, past: list[Call]) -> None:
        """Resolve the open calls of earlier lives, then work until killed."""
        self._forks += [call.asked["target"] for call in past if call.op == "fork" and call.done]
        for call in _open_ends(past):
            _SETTLE[call.op](self, call)
        steps = random.Random(self._rng.random())
        while True:
            step = steps.choices(list(_STEPS), list(_STEPS.values()))[0]
            try:
                step(self, self._pick())
            except (LeaseLostError, ClaimLostError):
                # Too slow: the work stays queued for another worker.
                continue

    def _pick(self) -> str:
        if self._forks and self._rng.random() < 0.2:
            return self._rng.choice(self._forks[-3:])
        return self._rng.choice(SHARED)

    # --- resolving unknown outcomes -----------------------------------------------------------

    def settle_turn(self, call: Call) -> None:
        """Commit a turn again: unchanged, and if it did not happen, with new leases and claims."""
        turn, attempt = Turn.from_journal(call.asked), call.asked["attempt"]
        session = self._store.session(turn.session)
        if session.find_turn(turn.id) is not None:
            self._calls.commit(turn, attempt + 1)
            return
        lease = self._lease(turn.session, patience_s=4 * MAX_TTL_MS / 1000)
        if lease is None:
            return
        claim = None
        try:
            if turn.batches:
                claim = self._calls.claim(lease, turn.batches)
            if claim is not None or not turn.batches:
                self._calls.commit(turn, attempt + 2, claim=claim, lease=lease, release=True)
        except (LeaseLostError, ClaimLostError):
            pass  # too slow again: the work stays queued for another worker
        session.release_lease(lease)

    def settle_enqueue(self, call: Call) -> None:
        """Queue work again; returns the queued batch if it exists."""
        asked = call.asked
        self._calls.enqueue(asked["session"], asked["source_key"], asked["attempt"] + 1)

    def settle_fork(self, call: Call) -> None:
        """Fork again; an existing fork is a valid result."""
        asked = call.asked
        try:
            self._fork(asked["source"], asked["target"], asked["revision"], asked["node"])
        except SessionExistsError:
            self._forks.append(asked["target"])

    # --- working ------------------------------------------------------------------------------

    def turns(self, name: str) -> None:
        """Hold a lease for a few turns."""
        rng, session = self._rng, self._store.session(name)
        lease = self._lease(name, patience_s=rng.choice((0.001, 2 * MAX_TTL_MS / 1000)))
        if lease is None:
            return
        for left in reversed(range(rng.choice((1, 1, 2, 5)))):
            claim = self._claim(session, lease)
            turn = self._turn(name, claim)
            parent = self._branch(session) if rng.random() < 0.1 else None
            release = left == 0 and rng.random() < 0.5
            self._calls.commit(turn, 1, parent=parent, claim=claim, lease=lease, release=release)
            if rng.random() < 0.1:
                # As if the answer had been lost.
                self._calls.commit(
                    turn, 2, claim=claim, lease=lease if rng.random() < 0.5 else None
                )
            if rng.random() < 0.6:
                self.enqueue(self._pick())
            if left and rng.random() < 0.3:
                lease = session.renew_lease(lease, rng.choice(_TTLS_MS))
        # A lease that is not released expires.
        if rng.random() < 0.9:
            session.release_lease(lease)

    def late(self, name: str) -> None:
        """Commit with an expired lease, whether or not another worker has claimed it."""
        lease = self._calls.lease(name, _LATE_TTL_MS, patience_s=0.001)
        if lease is not None:
            time.sleep(2 * _LATE_TTL_MS / 1000)
            self._calls.commit(self._turn(name, None), 1, lease=lease, late=True)

    def enqueue(self, name: str) -> None:
        """Queue work for any worker."""
        source_key = next(self._ids)
        self._calls.enqueue(name, source_key, 1)
        if self._rng.random() < 0.1:
            self._calls.enqueue(name, source_key, 2)

    def fork(self, name: str) -> None:
        """Fork a session at any revision, whole or up to a node."""
        rng, session = self._rng, self._store.session(name)
        head = session.head()
        if head is None:
            return
        revision = None if rng.random() < 0.5 else rng.randint(_first(head), head.revision)
        node = None
        if revision is not None and rng.random() < 0.5:
            node = rng.choice(session.nodes(at=revision, payloads=False)).id
        self._fork(name, next(self._ids), revision, node)

    def rewind(self, name: str) -> None:
        """Rewind a few revisions."""
        session = self._store.session(name)
        head = session.head()
        lease = None if head is None else self._lease(name, patience_s=0.001)
        if head is None or lease is None:
            return
        head = session.head() or head
        to = self._rng.randint(max(_first(head), head.revision - 8), head.revision)
        self._calls.rewind(lease, to, head.revision, f"rewound {next(self._ids)}")
        session.release_lease(lease)

    def label(self, name: str) -> None:
        """Move this worker's label."""
        head = self._store.session(name).head()
        if head is not None:
            self._calls.label(name, self._rng.randint(_first(head), head.revision))

    def pack(self, name: str) -> None:
        """Merge small slabs, concurrently with the other workers, if the engine has slabs."""
        if isinstance(self._store.engine, Packing):
            self._calls.pack()

    # --- what they are made of ----------------------------------------------------------------

    def _lease(self, name: str, *, patience_s: float) -> Lease | None:
        return self._calls.lease(name, self._rng.choice(_TTLS_MS), patience_s=patience_s)

    def _claim(self, session: Session, lease: Lease) -> Claim | None:
        claim = self._calls.claim(lease)
        if claim is not None and self._rng.random() < 0.05:
            session.queue.abandon(claim)
            return None
        return claim

    def _turn(self, name: str, claim: Claim | None) -> Turn:
        rng, turn = self._rng, next(self._ids)
        batches = () if claim is None else tuple([batch.id for batch in claim.batches])
        attachments: list[str] = []
        if rng.random() < 0.25:
            elsewhere = rng.random() < 0.3
            attachments.append(self._calls.attach(name, next(self._ids), elsewhere=elsewhere))
        label = f"after {turn}" if rng.random() < 0.2 else None
        return Turn(name, turn, batches, tuple(attachments), label)

    def _branch(self, session: Session) -> str | None:
        path = session.nodes(payloads=False)
        return self._rng.choice(path).id if len(path) else None

    def _fork(self, source: str, target: str, revision: int | None, node: str | None) -> None:
        self._calls.fork(source, target, revision, node)
        self._forks.append(target)


_STEPS: dict[Callable[[Worker, str], None], int] = {
    Worker.turns: 70,
    Worker.enqueue: 8,
    Worker.label: 6,
    Worker.fork: 5,
    Worker.rewind: 5,
    Worker.pack: 3,
    Worker.late: 3,
}
_SETTLE: dict[str, Callable[[Worker, Call], None]] = {
    "turn": Worker.settle_turn,
    "enqueue": Worker.settle_enqueue,
    "fork": Worker.settle_fork,
}
# The arguments that identify a call of each kind.
_NAMES = {"turn": "turn", "enqueue": "source_key", "fork": "target"}


def _open_ends(past: list[Call]) -> Iterator[Call]:
    """The last call on each thing that may be repeated, if its outcome is unknown."""
    last = {(call.op, call.asked[_NAMES[call.op]]): call for call in past if call.op in _NAMES}
    return (call for call in last.values() if call.unknown)


def _first(head: Head) -> int:
    """The first revision in the history of a session."""
    return 1 if head.origin is None else head.origin.revision


def main(argv: list[str]) -> None:
    """Work until killed."""
    path, durability, engine, journals, name, life, seed = argv
    past = read(Path(journals), name)
    journal = Journal(path_of(Path(journals), name, int(life)))
    store = journal.call(
        "open", {}, lambda: casstore.open(path, durability, lmdb_version=int(engine))
    )
    rng = random.Random(f"{seed} {name} {life}")
    Worker(store, Calls(store, journal, name), name, int(life), rng).live(past)


if __name__ == "__main__":
    main(sys.argv[1:])
