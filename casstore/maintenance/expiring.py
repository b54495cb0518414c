"""Expired rows: ``expire_rows`` removes rows that no operation needs any more.

    pins            those that have expired
    protections     those that have expired
    marks           those of ``session.marks`` that are older than any valid retention plan
    receipts        of turns, older than the caller says; else they stay as long as their session
    deletions       rows of sessions whose deletion was interrupted
    records         what record systems have that expired, or that a deletion has left
    attachments     announced longer ago than the caller says and never committed, of all
                    sessions, also of those that never began; those whose bytes are elsewhere
                    are condemned, and stay listed until the bytes are deleted

Two kinds stay on purpose. The lease row of a session counts how many times it was leased, and that
number must never go back, so the row stays as long as the session. The tombstone of a session
records for good that its id was used.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

from casstore.engine.protocol import (
    Condition,
    Row,
    RowIs,
    RowKey,
    RowLapsed,
)
from casstore.maintenance import systems
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.retention import MAX_CLOCK_BACK_MS, MAX_PLAN_AGE_MS
from casstore.maintenance.rows import decoded, remove_pins, remove_rows
from casstore.maintenance.uncommitted import GivenUp, sweep_uncommitted
from casstore.session import catalogue, keys, marks, protection
from casstore.session.arguments import check_ms
from casstore.session.scanning import scan
from casstore.session.state import Runtime, decode_head, head_key, runtime_of
from casstore.session.turns import SettledReceipt, decode_receipt
from casstore.store import Store, check_store

_MARK_AGE_MS: Final = MAX_PLAN_AGE_MS + MAX_CLOCK_BACK_MS


class ExpiredRows(NamedTuple):
    """How many rows of each kind ``expire_rows`` removed.

    Attributes:
        pins: expired pins
        protections: expired protections
        marks: rows that kept older plans from removing a revision that came into use
        receipts: receipts of turns that were committed longer ago than asked for
        deletions: deletions of sessions that had been interrupted, completed now
        records: expired records of all systems, and rows that a deletion had left
        attachments: attachments that were not committed in the time asked for
        condemned: such attachments with bytes elsewhere: listed until you delete those
        missing_systems: record systems in the store that are not installed, and why: nothing of
            them expired
    """

    pins: int
    protections: int
    marks: int
    receipts: int
    deletions: int
    records: int = 0
    attachments: int = 0
    condemned: int = 0
    missing_systems: tuple[tuple[str, str], ...] = ()

    @property
    def removed(self) -> int:
        """All rows that are gone."""
        by_kind = (self.pins, self.protections, self.marks, self.receipts, self.deletions)
        return sum(by_kind) + self.records + self.attachments


def expire_rows(
    store: Store,
    *,
    receipts_older_than_ms: int | None = None,
    attachments_older_than_ms: int | None = None,
    progress: Progress | None = None,
) -> ExpiredRows:
    """Remove expired rows, each on condition that it has not changed since it was read.

    ``receipts_older_than_ms`` is the age after which no turn is repeated any more: a turn
    that is repeated later is committed a second time. Attachments that were announced at least
    ``attachments_older_than_ms`` ago and never committed are given up
    (``maintenance.uncommitted``). CorruptionError if a row cannot be read.

    >>> import time
    >>> pin = store.pin("worker-1/plan", store.put_blob(b"a plan"), ttl_ms=1)
    >>> time.sleep(0.01)
    >>> expire_rows(store).pins
    1
    """
    check_store(store)
    if receipts_older_than_ms is not None:
        check_ms(receipts_older_than_ms, "receipts_older_than_ms")
    if attachments_older_than_ms is not None:
        check_ms(attachments_older_than_ms, "attachments_older_than_ms")
    runtime = runtime_of(store)
    expiring = _Expiring(runtime)
    finished = _finish_deletions(runtime)
    removed_pins = remove_pins(runtime.engine, progress)
    remove = partial(remove_rows, runtime.engine, progress=progress)
    removed_protections = remove("retention", keys.all_protections(), expiring.protection)
    removed_marks = remove("retention", keys.all_marks(), expiring.mark)
    receipts = 0
    if receipts_older_than_ms is not None:
        oldest_ms = expiring.now_ms - receipts_older_than_ms
        receipts = remove("receipts", (b"", None), lambda row: expiring.receipt(row, oldest_ms))
    given_up = GivenUp(0, 0)
    if attachments_older_than_ms is not None:
        announced_ms = max(0, expiring.now_ms - attachments_older_than_ms)
        given_up = sweep_uncommitted(store, older_than_ms=announced_ms)
    held = systems.held_by(store)
    records = 0
    for one in held.systems:
        records += one.expire(store, Phase(progress, "expire", one.title).now_and_then)
    return ExpiredRows(
        removed_pins,
        removed_protections,
        removed_marks,
        receipts,
        finished,
        records,
        *given_up,
        tuple(held.missing.items()),
    )


def _finish_deletions(runtime: Runtime) -> int:
    finished = 0
    for row in scan(runtime.engine, "retention", *keys.all_unfinished()):
        finished += catalogue.finish(runtime, row.value.decode())
    return finished


class _Expiring:
    """Finds expired rows, with the conditions under which they are removed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.now_ms = runtime.engine.now_ms()

    def protection(self, row: Row) -> Condition | None:
        """The condition for removing a protection; None if it has not expired."""
        if not protection.is_lapsed(protection.decode("", row.key, row.value), self.now_ms):
            return None
        return RowLapsed("retention", row.key, row.value, protection.UNTIL)

    def mark(self, row: Row) -> Condition | None:
        """The condition for removing a mark; None if a retention plan may still rely on it."""
        if marks.marked_at_ms(row.value) > self.now_ms - _MARK_AGE_MS:
            return None
        return RowIs("retention", row.key, row.value)

    def receipt(self, row: Row, oldest_ms: int) -> Condition | None:
        """The condition for removing a receipt; None if its turn may still be retried."""
        decoded = decode_receipt(row.value)
        if isinstance(decoded, SettledReceipt):
            committed_at_ms: int | None = decoded.committed_at_ms
        else:
            committed_at_ms = self._committed_at_ms(row, decoded.revision)
        if committed_at_ms is None or committed_at_ms > oldest_ms:
            return None
        return RowIs("receipts", row.key, row.value)

    def _committed_at_ms(self, row: Row, revision: int) -> int | None:
        """When the revision of a receipt was committed; None if that is not known."""
        key = keys.session_part(row.key)
        places = [RowKey("history", keys.history(key, revision)), head_key(key)]
        for place, found in zip(places, self._runtime.engine.get_rows(places), strict=True):
            if found is None:
                continue
            head = decoded(place, found, decode_head)
            if head.revision == revision:
                return head.committed_at_ms
        return None
