"""The queue of a session of lash into batches here, and inputs that wait for a turn behind them.

Nobody holds any of it after the move. What somebody works on right now would be done twice: that
is waited for. How often a batch was claimed stays, so that a claim from before cannot complete it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.compat.lash_database import BatchRow, InputRow, LashDatabase
from casstore.compat.lash_findings import Findings
from casstore.errors import BusyError
from casstore.session import queue
from casstore.session.data import Batch

_DELIVERIES: Final = {
    "earliest_safe_boundary": queue.EARLIEST,
    "after_current_turn_commit": queue.AFTER_TURN,
}
_SLOTS: Final = {"join": queue.JOIN, "exclusive": queue.EXCLUSIVE}

FREED: Final = "batches and inputs whose claim had run out, which are free now"
INPUTS: Final = "inputs that wait for a turn, which are batches behind the others now"


class QueueRead(NamedTuple):
    """A queue as it is to be."""

    batches: list[Batch]
    #: The latest lease that claimed any of it, where claims say so.
    generation: int


class QueueReader:
    """The queue of one database."""

    def __init__(
        self, database: LashDatabase, findings: Findings, own: str, session: str, now_ms: int
    ) -> None:
        self._database = database
        self._findings = findings
        self._own = own
        self._session = session
        self._now_ms = now_ms

    def read(self) -> QueueRead:
        """All of it; BusyError if somebody holds some."""
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
            self._findings.add(INPUTS, batches[-1].id)
        return QueueRead(batches, latest)

    def _batch(self, place: str, row: BatchRow) -> Batch:
        database = self._database
        if row.delivery not in _DELIVERIES or row.slot not in _SLOTS:
            raise database.damaged(place, f"no policy {row.delivery!r:.40} and {row.slot!r:.40}")
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
            name,
            self._session,
            database.number(place, "enqueue_seq", row.seq),
            tuple(items),
            row.source_key,
            _DELIVERIES[row.delivery],
            _SLOTS[row.slot],
            self._merge_key(place, row.merge_key),
            database.number(place, "available_at_ms", row.available_at_ms),
            database.number(place, "enqueued_at_ms", row.enqueued_at_ms),
            database.number(place, "claim_fencing_token", row.fence),
            0,
        )

    def _require_free(self, place: str, row: BatchRow | InputRow) -> None:
        if row.claim is None:
            return
        until = self._database.number(place, "claim_expires_at_ms", row.expires_at_ms)
        if until > self._now_ms:
            what = f"{place} of session {self._own!r}"
            raise held(self._database, what, row.owner, until, self._now_ms)
        self._findings.add(FREED, str(row.id))

    def _merge_key(self, place: str, text: Any) -> str | None:
        """What batches have in common that join; None: it joins none."""
        told = self._database.json(place, text)
        if told == "never":
            return None
        if told == "payload_default":
            return "payload_default"
        if type(told) is dict and list(told) == ["group"] and type(told["group"]) is str:
            return f"group:{told['group']}"
        raise self._database.damaged(place, f"no merge key {text!r:.80}")

    def _input(self, place: str, seq: int, row: InputRow) -> Batch:
        """An input as a batch of one item: at a checkpoint of the turn it is for, or after."""
        database = self._database
        scope = database.object(place, row.ingress)
        payload = {
            "type": "turn_input",
            "ingress": database.kept(place, scope),
            "input": database.kept(place, database.json(place, row.content)),
        }
        name, source_key = database.text(place, "input_id", row.id), row.source_key
        if source_key is not None:
            # Those of batches are others, and may be the same.
            source_key = "input:" + database.text(place, "source_key", source_key)
        return Batch(
            name,
            self._session,
            seq,
            ({"item_id": name, "payload": payload},),
            source_key,
            queue.EARLIEST if scope.get("scope") == "active_turn" else queue.AFTER_TURN,
            queue.EXCLUSIVE,
            None,
            0,
            database.number(place, "enqueued_at_ms", row.enqueued_at_ms),
            0,
            0,
        )


def held(database: LashDatabase, what: str, owner: Any, until_ms: int, now_ms: int) -> BusyError:
    """The error for what somebody works on."""
    left_s = (until_ms - now_ms + 999) // 1000
    return BusyError(
        f"{what} of {database.source.path} is held by {owner!r} for another {left_s} s: stop it, "
        "or wait, then import it"
    )
