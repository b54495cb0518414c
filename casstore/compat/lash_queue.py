"""Converts the queue of a lash session: its batches, then the inputs that wait for a turn.

Imported batches are unclaimed. A claim that is still valid raises BusyError, because its work
would be done twice. The fencing counter stays, so that an old claim cannot complete a batch.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.compat.importing import Notes
from casstore.compat.lash_database import BatchRow, InputRow, LashDatabase
from casstore.errors import BusyError
from casstore.session import queue
from casstore.session.data import Batch

_DELIVERIES: Final = {
    "earliest_safe_boundary": queue.EARLIEST,
    "after_current_turn_commit": queue.AFTER_TURN,
}
_SLOTS: Final = {"join": queue.JOIN, "exclusive": queue.EXCLUSIVE}

_FREED: Final = "batches and inputs whose claim has expired, stored unclaimed"
_INPUTS: Final = "inputs that wait for a turn, stored as batches after the others"


class QueueRead(NamedTuple):
    """A converted queue."""

    batches: list[Batch]
    #: The latest lease generation that claimed a batch; 0 before version 11.
    generation: int


class QueueReader:
    """The queue of one database."""

    def __init__(
        self, database: LashDatabase, notes: Notes, own: str, session: str, now_ms: int
    ) -> None:
        self._database = database
        self._notes = notes
        self._own = own
        self._session = session
        self._now_ms = now_ms

    def read(self) -> QueueRead:
        """The whole queue; BusyError if a claim is still valid."""
        database = self._database
        batches: list[Batch] = []
        latest = 0
        for row in database.batches(self._own):
            place = f"batch {row.id!r}"
            batches.append(self._batch(place, row))
            self._require_free(place, row)
            latest = max(latest, database.number(place, "its lease generation", row.generation))
        last = batches[-1].seq if batches else 0
        for number, waiting in enumerate(database.waiting_inputs(self._own), last + 1):
            place = f"input {waiting.id!r}"
            batches.append(self._input(place, number, waiting))
            self._require_free(place, waiting)
            self._notes.add(_INPUTS, batches[-1].id)
        return QueueRead(batches, latest)

    def _batch(self, place: str, row: BatchRow) -> Batch:
        database = self._database
        if row.delivery not in _DELIVERIES or row.slot not in _SLOTS:
            raise database.damaged(
                place, f"its policies {row.delivery!r:.40} and {row.slot!r:.40} are unknown"
            )
        if row.source_key is not None:
            database.text(place, "source_key", row.source_key)
        name = database.text(place, "batch_id", row.id)
        items = [
            {
                "item_id": database.text(place, "item_id", item),
                "payload": database.kept(place, database.json(place, payload)),
            }
            for item, payload in database.items(name)
        ]
        return Batch(
            id=name,
            session=self._session,
            seq=database.number(place, "enqueue_seq", row.seq),
            items=tuple(items),
            source_key=row.source_key,
            delivery=_DELIVERIES[row.delivery],
            slot=_SLOTS[row.slot],
            merge_key=self._merge_key(place, row.merge_key),
            available_at_ms=database.number(place, "available_at_ms", row.available_at_ms),
            enqueued_at_ms=database.number(place, "enqueued_at_ms", row.enqueued_at_ms),
            fence=database.number(place, "claim_fencing_token", row.fence),
            held_by=0,
        )

    def _require_free(self, place: str, row: BatchRow | InputRow) -> None:
        if row.claim is None:
            return
        until = self._database.number(place, "claim_expires_at_ms", row.expires_at_ms)
        if until > self._now_ms:
            what = f"{place} of session {self._own!r}"
            raise held(self._database, what, row.owner, until, self._now_ms)
        self._notes.add(_FREED, str(row.id))

    def _merge_key(self, place: str, text: Any) -> str | None:
        """The key that batches must share to be joined; None: the batch is never joined."""
        policy = self._database.json(place, text)
        if policy == "never":
            return None
        if policy == "payload_default":
            return "payload_default"
        if type(policy) is dict and list(policy) == ["group"] and type(policy["group"]) is str:
            return f"group:{policy['group']}"
        raise self._database.damaged(place, f"its merge key {text!r:.80} is unknown")

    def _input(self, place: str, seq: int, row: InputRow) -> Batch:
        """An input as a batch of one item, delivered during the turn it is for, or after it."""
        database = self._database
        scope = database.object(place, row.ingress)
        payload = {
            "type": "turn_input",
            "ingress": database.kept(place, scope),
            "input": database.kept(place, database.json(place, row.content)),
        }
        name, source_key = database.text(place, "input_id", row.id), row.source_key
        if source_key is not None:
            # With a prefix, because a batch may have the same source key.
            source_key = "input:" + database.text(place, "source_key", source_key)
        return Batch(
            id=name,
            session=self._session,
            seq=seq,
            items=({"item_id": name, "payload": payload},),
            source_key=source_key,
            delivery=queue.EARLIEST if scope.get("scope") == "active_turn" else queue.AFTER_TURN,
            slot=queue.EXCLUSIVE,
            merge_key=None,
            available_at_ms=0,
            enqueued_at_ms=database.number(place, "enqueued_at_ms", row.enqueued_at_ms),
            fence=0,
            held_by=0,
        )


def held(database: LashDatabase, what: str, owner: Any, until_ms: int, now_ms: int) -> BusyError:
    """The error for a lease or claim that is still valid."""
    left_s = (until_ms - now_ms + 999) // 1000
    return BusyError(
        f"{what} of {database.source.path} is held by {owner!r} for another {left_s} s; stop it, "
        "or wait, then import again"
    )
