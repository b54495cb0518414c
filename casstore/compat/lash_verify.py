"""A session that came from lash, read back and compared with what was read there, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, Final

from casstore.compat.lash_session import Gathered
from casstore.errors import ConflictError, NotFoundError
from casstore.format.canonical import encode
from casstore.format.digest import Digest
from casstore.maintenance.progress import Progress, Step
from casstore.session import keys, leases
from casstore.session.arriving import Arrival
from casstore.session.commit import receipt_key
from casstore.session.data import NodeDraft, Usage
from casstore.session.receipts import encode_receipt
from casstore.store import Store

_PAGE: Final = 500


def verify(store: Store, gathered: Gathered, *, fresh: bool, progress: Progress | None) -> None:
    """Raise ConflictError unless the store has what was read.

    ``fresh``: it came just now, and everything must be the same. Else only what a session never
    changes is compared, its revision; if that was removed since, nothing is.
    """
    arrival = gathered.arrival
    session = arrival.meta.session
    if arrival.revision:
        try:
            _verify_revision(store, arrival, progress, fresh=fresh)
        except NotFoundError:
            if fresh:
                raise ConflictError(f"session {session!r} went while it was compared") from None
            return
    if fresh:
        _verify_rows(store, arrival)


def _verify_revision(
    store: Store, arrival: Arrival, progress: Progress | None, *, fresh: bool
) -> None:
    session, at = store.session(arrival.meta.session), arrival.revision
    done = 0
    wanted = {draft.id: draft for draft in arrival.nodes}
    for page in session.nodes("full", at=at).pages(_PAGE):
        for node in page:
            found = NodeDraft(*node[:6])
            draft = wanted.pop(node.id, None)
            if draft is not None and not fresh:
                # Vacuum gives a node whose parent was hidden the next visible one.
                found = found._replace(parent=draft.parent)
            if draft is None or not _same(found, draft):
                raise _differs(arrival, f"node {node.id!r}")
        done += len(page)
        if progress is not None:
            progress(Step("verify", done, len(arrival.nodes), "nodes"))
    # What is not shown was hidden there. Since then more may have been hidden here.
    if fresh and wanted.keys() != set(arrival.hidden):
        raise _differs(arrival, f"node {min(wanted.keys() ^ set(arrival.hidden))!r}")
    checkpoint = session.checkpoint(at, hydrate=True)
    given = arrival.checkpoint._replace(frames=tuple(arrival.checkpoint.frames))
    for name in given._fields:
        if not _same(getattr(checkpoint, name), getattr(given, name)):
            raise _differs(arrival, f"its {name}")
    if list(session.usage(at)) != _ledger(arrival.usage):
        raise _differs(arrival, "its usage")


def _ledger(entries: Iterable[Usage]) -> list[Usage]:
    """Usage by source and model, in the order of first use, without what counts nothing."""
    merged: dict[tuple[str, str], Usage] = {}
    for entry in entries:
        known = merged.get((entry.source, entry.model), Usage(entry.source, entry.model))
        sums = [a + b for a, b in zip(known[2:], entry[2:], strict=True)]
        merged[entry.source, entry.model] = Usage(entry.source, entry.model, *sums)
    return [entry for entry in merged.values() if entry.total]


def _verify_rows(store: Store, arrival: Arrival) -> None:
    """What a session has beside its revisions."""
    name = arrival.meta.session
    session, key = store.session(name), keys.session_key(name)
    head = session.head()
    if arrival.revision and (
        head is None
        or (head.revision, head.leaf, head.turn, head.node_count)
        != (arrival.revision, arrival.leaf, arrival.turn, len(arrival.nodes))
    ):
        raise _differs(arrival, "its head")
    if session.meta()._replace(extra=None) != arrival.meta._replace(extra=None):
        raise _differs(arrival, "its meta")
    for found, batch in zip_longest(session.queue.batches(), arrival.batches):
        if found is None or batch is None or not _same(found, batch):
            raise _differs(arrival, "its queue")
    by_id = {one.id: one for one in session.attachments.list()}
    if by_id != {one.id: one for one in arrival.attachments}:
        raise _differs(arrival, "its attachments")
    places = [receipt_key(key, turn) for turn in arrival.receipts]
    rows = store.engine.get_rows([*places, leases.lease_key(key)])
    if rows[:-1] != [encode_receipt(one) for one in arrival.receipts.values()]:
        raise _differs(arrival, "its turns")
    fencing = 0 if rows[-1] is None else leases.decode_lease(name, rows[-1]).fencing
    if fencing < arrival.fencing:
        raise _differs(arrival, "its lease")
    for tag, body in arrival.tagged.items():
        pin = store.find_pin(tag)
        if pin is None or pin.digest != Digest.of_blob(body):
            raise _differs(arrival, f"tag {tag!r}")


def _same(found: Any, wanted: Any) -> bool:
    """Are two the same value? 1, 1.0 and true are equal to Python."""
    return encode(_plain(found)) == encode(_plain(wanted))


def _plain(value: Any) -> Any:
    return [list(value)] if isinstance(value, tuple) else value


def _differs(arrival: Arrival, what: str) -> ConflictError:
    return ConflictError(
        f"{what} of session {arrival.meta.session!r} is not what was read: it was changed in the "
        "midst of it"
    )
