"""The queue of a session: batches of work, claimed in order by the holder of the session's lease.

    batch = fence (8) ‖ held_by (8) ‖ available_at (8) ‖ enqueued_at (8) ‖ items (32) ‖ details

A claim belongs to one generation of the lease (``Lease.fencing``) and ends with that lease, so it
needs no renewal of its own. Each claim increments the fence of its batches, which distinguishes it
from an earlier, lost claim. A batch is removed only by the commit that completes it or by
``cancel``. The items are a stored value; the row keeps it alive.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from struct import Struct
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    NewObject,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    Stamp,
    Write,
)
from casstore.errors import (
    ClaimLostError,
    CorruptionError,
    InvalidInputError,
    SessionBindingError,
)
from casstore.format import splitting
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.objects import values
from casstore.objects.pieces import PieceWriter
from casstore.session import keys, leases
from casstore.session.arguments import check_choice, check_count, check_kind, list_of
from casstore.session.attempts import ChangedMeanwhile, read_again, transaction
from casstore.session.data import Batch, Claim, Lease
from casstore.session.scanning import scan
from casstore.session.state import Runtime

AFTER_TURN: Final = "after_turn"
EARLIEST: Final = "earliest"
EXCLUSIVE: Final = "exclusive"
JOIN: Final = "join"
IDLE: Final = "idle"
CHECKPOINT: Final = "checkpoint"

_FIXED: Final = Struct(">QQQQ32s")
_ENQUEUED_AT: Final = 24
_MAX_TIME_MS: Final = (1 << 63) - 1
_MAX_SEQ: Final = (1 << 64) - 1


class _Queued(NamedTuple):
    """The decoded row of a batch."""

    key: RowKey
    row: bytes
    seq: int
    fence: int
    held_by: int
    available_at_ms: int
    enqueued_at_ms: int
    items: bytes
    id: str
    source_key: str | None
    delivery: str
    slot: str
    merge_key: str | None


class Queue:
    """The queue of one session.

    The examples use ``session``, whose queue is empty.

    >>> batch = session.queue.enqueue(["fix the test"])
    >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
    >>> claim = session.queue.claim(lease)
    >>> result = session.commit(Commit(completes=[claim], lease=lease, release=True))
    >>> session.queue.batches()
    []
    """

    def __init__(self, runtime: Runtime, session: str) -> None:
        self._runtime = runtime
        self._session = session
        self._key = keys.session_key(session)

    # --- enqueueing ---------------------------------------------------------------------

    def enqueue(
        self,
        items: Sequence[Any],
        *,
        source_key: str | None = None,
        delivery: str = AFTER_TURN,
        slot: str = EXCLUSIVE,
        merge_key: str | None = None,
        available_at_ms: int | None = None,
        batch_id: str | None = None,
    ) -> Batch:
        """Queue items as one batch.

        While a batch with the same ``source_key`` is queued, claimed or not, that batch is
        returned unchanged and nothing is added. With ``delivery="earliest"`` a running turn may
        claim the batch at a checkpoint; ``after_turn`` waits for an idle session. With
        ``slot="join"`` adjacent batches with the same ``merge_key`` can be claimed together.

        >>> batch = session.queue.enqueue(["fix the test"], source_key="message-7")
        >>> again = session.queue.enqueue(["fix the test"], source_key="message-7")  # a retry
        >>> again.id == batch.id, len(session.queue.batches())
        (True, 1)
        """
        check_choice(delivery, "delivery", (AFTER_TURN, EARLIEST))
        check_choice(slot, "slot", (EXCLUSIVE, JOIN))
        if merge_key is not None:
            keys.id_bytes(merge_key, "merge_key")
        ready_ms = 0 if available_at_ms is None else available_at_ms
        check_count(ready_ms, "available_at_ms", most=_MAX_TIME_MS)
        queued = list_of(items, "items")
        if not queued:
            raise InvalidInputError("items must be a list of one item or more, got []")
        name = batch_id if batch_id is not None else secrets.token_hex(16)
        batch = Batch(
            id=name,
            session=self._session,
            seq=0,
            items=tuple(queued),
            source_key=source_key,
            delivery=delivery,
            slot=slot,
            merge_key=merge_key,
            available_at_ms=ready_ms,
            enqueued_at_ms=0,
            fence=0,
            held_by=0,
        )
        writer = PieceWriter()
        return self._enqueue(batch, splitting.split(queued, writer.emit), writer.objects)

    @transaction("the queue of session {self._session!r}")
    def _enqueue(self, batch: Batch, items: bytes, objects: Sequence[NewObject]) -> Batch:
        """Store a batch with the next number, unless a batch with its ``source_key`` is queued."""
        known, counter = self._before_enqueuing(batch)
        if known is not None:
            return self._public([known])[0]
        seq = 1 if counter is None else int.from_bytes(counter, "big") + 1
        details = [batch.id, batch.source_key, batch.delivery, batch.slot, batch.merge_key]
        rows: list[RowChange] = [
            PutRow(*keys.queue_counter(self._key), seq.to_bytes(8, "big")),
            PutRow(
                *keys.queue_batch(self._key, seq),
                _encode(0, 0, batch.available_at_ms, items, details),
                (Stamp(_ENQUEUED_AT),),
            ),
            PutRow(*keys.queue_id(self._key, batch.id), seq.to_bytes(8, "big")),
        ]
        conditions: list[Condition] = [
            RowIs("tombstones", self._key, None),
            RowIs(*keys.queue_counter(self._key), counter),
            RowIs(*keys.queue_id(self._key, batch.id), None),
        ]
        if batch.source_key is not None:
            source = keys.queue_source(self._key, batch.source_key)
            rows.append(PutRow(*source, seq.to_bytes(8, "big")))
            conditions.append(RowIs(*source, None))
        done = self._runtime.engine.write(Write(objects, conditions, rows))
        # Made from what was written: by now another process may have completed the batch.
        return batch._replace(seq=seq, enqueued_at_ms=done.now_ms)

    def _before_enqueuing(self, batch: Batch) -> tuple[_Queued | None, bytes | None]:
        """The queued batch with the same ``source_key``, if any, and the row of the counter."""
        wanted = [keys.queue_counter(self._key), keys.queue_id(self._key, batch.id)]
        if batch.source_key is not None:
            wanted.append(keys.queue_source(self._key, batch.source_key))
        _, counter, taken, *source = self._runtime.rows(self._session, wanted)
        if source and source[0] is not None:
            return self._find(int.from_bytes(source[0], "big")), counter
        if taken is not None:
            raise InvalidInputError(f"a batch {batch.id!r} is queued already")
        return None, counter

    # --- claiming -----------------------------------------------------------------------

    def claim(self, lease: Lease, *, boundary: str = IDLE, limit: int = 1) -> Claim | None:
        """Claim the next batch, or up to ``limit`` that join, for the holder of ``lease``.

        The boundary ``checkpoint`` is for a running turn: nothing is claimed unless the delivery of
        the first batch is ``earliest``. None if there is nothing to claim.

        >>> for text in ("fix the test", "and the docs"):
        ...     batch = session.queue.enqueue([text], slot="join", merge_key="user")
        >>> claim = session.queue.claim(session.claim_lease("worker-1", ttl_ms=30_000), limit=10)
        >>> [batch.items for batch in claim.batches]
        [('fix the test',), ('and the docs',)]
        """
        check_count(limit, "limit")
        return self._claim(lease, boundary, limit, None)

    def claim_exactly(
        self, lease: Lease, batch_ids: Sequence[str], *, boundary: str = IDLE
    ) -> Claim | None:
        """Claim these batches if ``claim`` would now return them all, in this order; else None.

        >>> first, second = [session.queue.enqueue([text]) for text in ("one", "two")]
        >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
        >>> session.queue.claim_exactly(lease, [second.id]) is None  # it is not its turn
        True
        >>> session.queue.claim_exactly(lease, [first.id]).batches[0].items
        ('one',)
        """
        wanted = list_of(batch_ids, "batch_ids")
        return self._claim(lease, boundary, len(wanted), wanted)

    def _claim(
        self, lease: Lease, boundary: str, limit: int, exactly: list[str] | None
    ) -> Claim | None:
        check_choice(boundary, "boundary", (IDLE, CHECKPOINT))
        leases.bind(self._session, lease)
        taken = self._take(lease, boundary, limit, exactly)
        if not taken:
            return None
        try:
            batches = self._public(taken)
        except CorruptionError:
            # gc may have removed the items if another process completed or cancelled the batches.
            _, *rows = self._runtime.rows(self._session, [one.key for one in taken])
            if rows == [one.row for one in taken]:
                raise
            raise ClaimLostError(self._session, taken[0].id) from None
        claim_id = f"{taken[0].seq}:{taken[0].fence}"
        return Claim(claim_id, self._session, lease.fencing, tuple(batches))

    @transaction("the queue of session {self._session!r}")
    def _take(
        self, lease: Lease, boundary: str, limit: int, exactly: list[str] | None
    ) -> list[_Queued]:
        """Mark the next batches as held by the lease; returns them, or [] if none is to be had."""
        row = self._runtime.rows(self._session, [leases.lease_key(self._key)])[1]
        now_ms = self._runtime.engine.now_ms()
        if not leases.is_live(row, lease, now_ms):
            raise leases.lost(self._session, row, lease)
        if not limit:
            return []
        group = self._next_group(lease.fencing, now_ms, boundary, limit)
        if not group or (exactly is not None and [one.id for one in group] != exactly):
            return []
        taken = [
            one._replace(fence=one.fence + 1, held_by=lease.fencing, row=_held(one, lease.fencing))
            for one in group
        ]
        self._runtime.engine.write(
            Write(
                conditions=[
                    leases.live(self._key, lease),
                    *[RowIs(*one.key, one.row) for one in group],
                ],
                rows=[PutRow(*one.key, one.row) for one in taken],
            )
        )
        return taken

    def _next_group(self, generation: int, now_ms: int, boundary: str, limit: int) -> list[_Queued]:
        group: list[_Queued] = []
        for one in self._scan():
            if one.available_at_ms > now_ms or one.held_by == generation:
                # Not available yet, or held by this lease. A batch that a lease of another
                # generation held is free: only the caller's lease is live.
                continue
            if not group:
                if boundary == CHECKPOINT and one.delivery != EARLIEST:
                    return []
                group.append(one)
                if one.slot == EXCLUSIVE or one.merge_key is None:
                    return group
            elif (one.slot, one.delivery, one.merge_key) == (
                JOIN, group[0].delivery, group[0].merge_key,
            ):  # fmt: skip
                group.append(one)
            else:
                return group
            if len(group) == limit:
                return group
        return group

    def _due_s(self, generation: int) -> float | None:
        """Seconds until the next batch becomes available; None if no batch has such a time."""
        now_ms = self._runtime.engine.now_ms()
        times = [
            one.available_at_ms
            for one in self._scan()
            if one.available_at_ms > now_ms and one.held_by != generation
        ]
        return (min(times) - now_ms) / 1000 if times else None

    def verify(self, claim: Claim) -> None:
        """Raise ClaimLostError unless every batch is still held by this claim.

        >>> batch = session.queue.enqueue(["fix the test"], batch_id="b1")
        >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
        >>> claim = session.queue.claim(lease)
        >>> session.queue.verify(claim)
        >>> released = session.release_lease(lease)
        >>> session.queue.verify(claim)
        Traceback (most recent call last):
        casstore.errors.ClaimLostError: batch 'b1' of session 's' is not held by this claim
        """
        self._bind(claim)
        lease_row = self._runtime.rows(self._session, [leases.lease_key(self._key)])[1]
        now_ms = self._runtime.engine.now_ms()
        live = leases.live_generation(lease_row, now_ms)
        for batch in claim.batches:
            one = self._find(batch.seq)
            if live != claim.fencing or one is None or not _holds(claim, batch, one):
                raise ClaimLostError(self._session, batch.id)

    @transaction("the queue of session {self._session!r}")
    def abandon(self, claim: Claim) -> int:
        """Release the batches that a claim still holds; returns their number.

        >>> batch = session.queue.enqueue(["fix the test"])
        >>> claim = session.queue.claim(session.claim_lease("worker-1", ttl_ms=30_000))
        >>> len(session.queue.pending()), session.queue.abandon(claim), len(session.queue.pending())
        (0, 1, 1)
        """
        self._bind(claim)
        self._runtime.rows(self._session)
        found = [(batch, self._find(batch.seq)) for batch in claim.batches]
        held = [one for batch, one in found if one is not None and _holds(claim, batch, one)]
        if not held:
            return 0
        self._runtime.engine.write(
            Write(
                conditions=[RowIs(*one.key, one.row) for one in held],
                rows=[PutRow(*one.key, _released(one)) for one in held],
            )
        )
        return len(held)

    @transaction("the queue of session {self._session!r}")
    def cancel(self, batch_id: str) -> Batch | None:
        """Remove a batch that is not claimed, and return it; None if it is claimed or not queued.

        >>> batch = session.queue.enqueue(["fix the test"])
        >>> session.queue.cancel(batch.id).items
        ('fix the test',)
        >>> session.queue.batches()
        []
        """
        name = keys.queue_id(self._key, batch_id)
        _, lease_row, at = self._runtime.rows(self._session, [leases.lease_key(self._key), name])
        if at is None:
            return None
        one = self._find(int.from_bytes(at, "big"))
        if one is None:
            raise ChangedMeanwhile  # another process has completed it since the index row was read
        if _is_held(one, leases.live_generation(lease_row, self._runtime.engine.now_ms())):
            return None
        [public] = self._public([one])
        lease_is = RowIs(*leases.lease_key(self._key), lease_row)
        self._runtime.engine.write(
            Write(
                conditions=[RowIs(*one.key, one.row), lease_is],
                rows=_removal(self._key, one),
            )
        )
        return public

    # --- looking ------------------------------------------------------------------------

    def batches(self, *, limit: int | None = None) -> list[Batch]:
        """Everything queued, claimed or not, in order; at most the first ``limit`` batches.

        >>> for text in ("one", "two"):
        ...     batch = session.queue.enqueue([text])
        >>> claim = session.queue.claim(session.claim_lease("worker-1", ttl_ms=30_000))
        >>> [batch.items for batch in session.queue.batches()]
        [('one',), ('two',)]
        """
        if limit is not None:
            check_count(limit, "limit")
        return read_again(lambda: self._batches(limit))

    def _batches(self, limit: int | None) -> list[Batch]:
        queued = list(islice(self._scan(), limit))
        # Checked after the scan: a deletion writes the tombstone before it removes rows.
        self._runtime.rows(self._session)
        return self._public(queued)

    @transaction("the queue of session {self._session!r}")
    def pending(self) -> list[Batch]:
        """The batches that are not claimed, in order.

        >>> for text in ("one", "two"):
        ...     batch = session.queue.enqueue([text])
        >>> claim = session.queue.claim(session.claim_lease("worker-1", ttl_ms=30_000))
        >>> [batch.items for batch in session.queue.pending()]
        [('two',)]
        """
        before = self._live_generation()
        queued = list(self._scan())
        live = self._live_generation()
        if live != before:
            raise ChangedMeanwhile  # another lease: the batches read may be claimed or free
        return self._public([one for one in queued if not _is_held(one, live)])

    def _live_generation(self) -> int:
        lease_row = self._runtime.rows(self._session, [leases.lease_key(self._key)])[1]
        return leases.live_generation(lease_row, self._runtime.engine.now_ms())

    def _scan(self) -> Iterator[_Queued]:
        """All batches in order, read lazily."""
        for row in scan(self._runtime.engine, "queue", *keys.queue_range(self._key)):
            yield _decode(RowKey("queue", row.key), row.value)

    def _find(self, seq: int) -> _Queued | None:
        key = keys.queue_batch(self._key, seq)
        row = self._runtime.engine.get_rows([key])[0]
        return None if row is None else _decode(key, row)

    def _public(self, queued: Sequence[_Queued]) -> list[Batch]:
        """The batches with their items."""
        reader = self._runtime.reader()
        stored = reader.follow([one.items for one in queued])
        return [
            Batch(
                id=one.id,
                session=self._session,
                seq=one.seq,
                items=tuple(
                    values.read_value(reader, one.items, item, max_bytes=DEFAULT_MAX_BYTES)
                ),
                source_key=one.source_key,
                delivery=one.delivery,
                slot=one.slot,
                merge_key=one.merge_key,
                available_at_ms=one.available_at_ms,
                enqueued_at_ms=one.enqueued_at_ms,
                fence=one.fence,
                held_by=one.held_by,
            )
            for one, item in zip(queued, stored, strict=True)
        ]

    def _bind(self, claim: Claim) -> None:
        bind(self._session, claim)


class Taking:
    """Claims the next batches once there are some: a ``Look``. ``lease`` returns the lease."""

    def __init__(self, queue: Queue, lease: Callable[[], Lease], boundary: str, limit: int) -> None:
        check_count(limit, "limit", least=1)
        check_choice(boundary, "boundary", (IDLE, CHECKPOINT))
        self._queue = queue
        self._lease = lease
        self._boundary = boundary
        self._limit = limit
        self.due_s: float | None = None

    def __call__(self) -> Claim | None:
        """The next claim; None if there is nothing to claim."""
        lease = self._lease()
        claim = self._queue.claim(lease, boundary=self._boundary, limit=self._limit)
        if claim is None:
            self.due_s = self._queue._due_s(lease.fencing)
        return claim


def items_digest(key: bytes, row: bytes) -> bytes | None:
    """The digest of the items that a queue row keeps alive; None if the row is not a batch."""
    return _decode(RowKey("queue", key), row).items if keys.is_queue_batch(key) else None


def put_names(key: bytes, batch_key: bytes, row: bytes) -> list[PutRow]:
    """The rows that lead to a batch: from its id, and from its source key if it has one."""
    one = _decode(RowKey("queue", batch_key), row)
    seq = one.seq.to_bytes(8, "big")
    puts = [PutRow(*keys.queue_id(key, one.id), seq)]
    if one.source_key is not None:
        puts.append(PutRow(*keys.queue_source(key, one.source_key), seq))
    return puts


def put_as_is(key: bytes, batch: Batch, items: bytes) -> list[PutRow]:
    """The rows of a batch as it was in another store, its number and times included."""
    if batch.delivery not in (AFTER_TURN, EARLIEST) or batch.slot not in (EXCLUSIVE, JOIN):
        raise InvalidInputError(
            f"batch {batch.id!r} has an invalid delivery {batch.delivery!r:.40} or slot "
            f"{batch.slot!r:.40}"
        )
    for number in (batch.available_at_ms, batch.enqueued_at_ms, batch.fence):
        if type(number) is not int or not 0 <= number <= _MAX_TIME_MS:
            raise InvalidInputError(
                f"batch {batch.id!r} has an invalid time or fence {number!r:.40}"
            )
    if type(batch.seq) is not int or not 1 <= batch.seq <= _MAX_TIME_MS:
        raise InvalidInputError(
            f"batch {batch.id!r} needs a seq of at least 1, got {batch.seq!r:.40}"
        )
    if batch.merge_key is not None:
        keys.id_bytes(batch.merge_key, "a merge key")
    details = [batch.id, batch.source_key, batch.delivery, batch.slot, batch.merge_key]
    fixed = (batch.fence, 0, batch.available_at_ms, batch.enqueued_at_ms, items)
    row_key = keys.queue_batch(key, batch.seq)
    row = _FIXED.pack(*fixed) + pack_checked(details)
    return [PutRow(*row_key, row), *put_names(key, row_key.key, row)]


# --- for commits --------------------------------------------------------------------------


def check_claim(claim: Claim) -> None:
    """Raise InvalidInputError unless this is a Claim with valid batches."""
    check_kind(claim, "claim", Claim)
    if not isinstance(claim.batches, tuple | list) or not all(
        isinstance(batch, Batch) and type(batch.seq) is int and 0 <= batch.seq <= _MAX_SEQ
        for batch in claim.batches
    ):
        raise InvalidInputError("the batches of a claim must be those that claim() returned")
    for batch in claim.batches:
        keys.id_bytes(batch.id, "a batch id")


def bind(session: str, claim: Claim) -> None:
    """SessionBindingError if the claim is on another session's queue."""
    check_claim(claim)
    if claim.session != session:
        raise SessionBindingError(session, claim.session)


def claimed_rows(key: bytes, claims: Sequence[Claim]) -> list[RowKey]:
    """The keys of the rows of claimed batches."""
    return [keys.queue_batch(key, batch.seq) for claim in claims for batch in claim.batches]


def complete(
    session: str,
    key: bytes,
    claims: Sequence[Claim],
    rows: Sequence[bytes | None],
    generation: int,
) -> tuple[list[Condition], list[RowChange]]:
    """The conditions and changes with which a commit completes claims.

    ``rows`` are the current rows of the batches, ``generation`` that of the live lease (0: none).
    ClaimLostError if a batch is not held by its claim.
    """
    conditions: list[Condition] = []
    changes: list[RowChange] = []
    found = iter(rows)
    for claim in claims:
        for batch in claim.batches:
            row = next(found)
            one = None if row is None else _decode(keys.queue_batch(key, batch.seq), row)
            if one is None or claim.fencing != generation or not _holds(claim, batch, one):
                raise ClaimLostError(session, batch.id)
            conditions.append(RowIs(*one.key, one.row))
            changes.extend(_removal(key, one))
    return conditions, changes


def _holds(claim: Claim, batch: Batch, one: _Queued) -> bool:
    return (one.id, one.fence, one.held_by) == (batch.id, batch.fence, claim.fencing)


def _is_held(one: _Queued, generation: int) -> bool:
    """True if the live lease, of this generation (0: no lease is live), holds the batch."""
    return one.held_by != 0 and one.held_by == generation


def _removal(key: bytes, one: _Queued) -> list[RowChange]:
    changes: list[RowChange] = [DeleteRow(*one.key), DeleteRow(*keys.queue_id(key, one.id))]
    if one.source_key is not None:
        changes.append(DeleteRow(*keys.queue_source(key, one.source_key)))
    return changes


def _encode(fence: int, held_by: int, ready_ms: int, items: bytes, details: list[Any]) -> bytes:
    return _FIXED.pack(fence, held_by, ready_ms, 0, items) + pack_checked(details)


def _held(one: _Queued, generation: int) -> bytes:
    """The row of a batch after a claim by this generation: the fence is incremented."""
    return (one.fence + 1).to_bytes(8, "big") + generation.to_bytes(8, "big") + one.row[16:]


def _released(one: _Queued) -> bytes:
    """The row of a released batch; the fence stays."""
    return one.row[:8] + bytes(8) + one.row[16:]


def _decode(key: RowKey, row: bytes) -> _Queued:
    try:
        fence, held_by, ready_ms, enqueued_ms, items = _FIXED.unpack_from(row)
        details = unpack_checked(row[_FIXED.size :])
        seq = int.from_bytes(key.key[-8:], "big")
        return _Queued(key, row, seq, fence, held_by, ready_ms, enqueued_ms, items, *details)
    except (TypeError, ValueError, struct.error) as exc:
        raise CorruptionError("a row of the queue is damaged") from exc
