"""The calls of a worker of the ``sessions`` campaign, each between two lines of its journal."""

from __future__ import annotations

import random
import time
from typing import Any

import casstore
from campaigns import session_turns
from campaigns.session_journal import Journal
from campaigns.session_turns import Turn
from casstore.session.data import Claim, CommitResult, Lease


class Calls:
    """Everything that one process does to the store."""

    def __init__(self, store: casstore.Store, journal: Journal, worker: str) -> None:
        self._store = store
        self._journal = journal
        self._worker = worker

    def lease(self, name: str, ttl_ms: int, *, patience_s: float) -> Lease | None:
        """Claim the lease of a session, again and again as long as the patience lasts."""
        session = self._store.session(name)
        deadline = time.monotonic() + patience_s

        def claim() -> Lease | None:
            while (lease := session.claim_lease(self._worker, ttl_ms)) is None:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.002)
            return lease

        return self._journal.call("lease", {"session": name}, claim, _told_lease)

    def claim(self, lease: Lease, exactly: tuple[str, ...] = ()) -> Claim | None:
        """Claim queued work, or just these batches."""
        queue = self._store.session(lease.session).queue
        return self._journal.call(
            "claim",
            {"session": lease.session},
            lambda: queue.claim_exactly(lease, exactly) if exactly else queue.claim(lease, limit=3),
            _told_claim,
        )

    def attach(self, name: str, what: str, *, elsewhere: bool) -> str:
        """Announce an attachment and store its bytes, unless they are elsewhere; its id."""
        attachments = self._store.session(name).attachments
        return self._journal.call(
            "attach",
            {"session": name, "what": what},
            lambda: (
                attachments.intend(f"elsewhere {what}", uri=f"file:///{what}")
                if elsewhere
                else attachments.put(session_turns.attachment(what))
            ),
            lambda made: made.id,
        ).id

    def commit(
        self,
        turn: Turn,
        attempt: int,
        *,
        parent: str | None = None,
        claim: Claim | None = None,
        lease: Lease | None = None,
        release: bool = False,
        late: bool = False,
    ) -> CommitResult:
        """Commit a turn; ``late``: with a lease that is over."""
        asked = {
            "session": turn.session,
            "turn": turn.id,
            "attempt": attempt,
            "parent": parent,
            "batches": turn.batches,
            "attachments": turn.attachments,
            "label": turn.label,
            "late": late,
        }
        change = turn.commit(attempt, parent=parent, claim=claim, lease=lease, release=release)
        session = self._store.session(turn.session)
        return self._journal.call("turn", asked, lambda: session.commit(change), _told_result)

    def enqueue(self, name: str, source_key: str, attempt: int) -> None:
        """Queue work; each attempt under another id, all under one source key."""
        batch = f"{source_key}/{attempt}"
        join = random.Random(source_key).random() < 0.5
        queue = self._store.session(name).queue
        self._journal.call(
            "enqueue",
            {"session": name, "source_key": source_key, "attempt": attempt, "batch": batch},
            lambda: queue.enqueue(
                session_turns.items(source_key),
                source_key=source_key,
                slot="join" if join else "exclusive",
                merge_key="more" if join else None,
                batch_id=batch,
            ),
            lambda queued: queued.id,
        )

    def fork(self, source: str, target: str, revision: int | None, node: str | None) -> None:
        """Fork a session."""
        self._journal.call(
            "fork",
            {"source": source, "target": target, "revision": revision, "node": node},
            lambda: self._store.fork(source, target, at=revision, node=node),
            lambda head: [head.revision, str(head.manifest), head.leaf, head.node_count],
        )

    def rewind(self, lease: Lease, to: int, expected: int, label: str) -> None:
        """Make an earlier revision the head, under a label by which it is known again."""
        session = self._store.session(lease.session)
        self._journal.call(
            "rewind",
            {"session": lease.session, "to": to, "expected": expected, "label": label},
            lambda: session.rewind(to, lease=lease, expected=expected, label=label),
            _told_result,
        )

    def label(self, name: str, revision: int) -> None:
        """Move the worker's own label of a session."""
        session, label = self._store.session(name), f"mark of {self._worker}"
        self._journal.call(
            "label",
            {"session": name, "label": label, "revision": revision},
            lambda: session.label(label, revision),
        )

    def pack(self) -> None:
        """Join small slabs."""
        self._journal.call("pack", {}, lambda: self._store.pack(min_age_ms=0))


def _told_result(result: CommitResult) -> list[Any]:
    return [result.revision, str(result.manifest), result.leaf, result.nodes, result.replayed]


def _told_lease(lease: Lease | None) -> int | None:
    return None if lease is None else lease.fencing


def _told_claim(claim: Claim | None) -> Any:
    return claim and [[batch.id, batch.fence] for batch in claim.batches]
