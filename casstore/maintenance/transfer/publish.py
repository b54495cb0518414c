"""Publishing: one write, under conditions, creates a session in the target or advances its head.

``plan`` compares a session's rows with those of the target and returns the write that is needed;
the caller stores the objects that it names, and then calls ``write``. ``settle`` repeats all of
this when another process changed the session, or gc removed an object, in between.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    Engine,
    ObjectsExist,
    PutRow,
    Row,
    RowChange,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    ObjectNotFoundError,
    SessionDeletedError,
)
from casstore.maintenance.roots import ROOTS
from casstore.maintenance.transfer.rows import label_revision
from casstore.session import keys, marks, queue, subjects
from casstore.session.attempts import Attempts
from casstore.session.state import (
    HeadRow,
    decode_head,
    encode_head,
    head_key,
    meta_key,
    tombstone_key,
)

Observed = TypeVar("Observed")
Result = TypeVar("Result")

# The remedy in a ContendedError: gc may keep removing objects before a row names them.
_REMEDY: Final = "try again, or collect with a longer grace period"
_PAGE: Final = 256
_SEQ_BYTES: Final = 8


def settle(
    what: str, observe: Callable[[], Observed], attempt: Callable[[Observed], Result]
) -> Result:
    """Repeat ``attempt`` until no other process interferes; ContendedError if that never happens.

    ``observe`` reads the rows that the attempt depends on. A missing object is damage only if these
    rows are still the same: a session that was deleted or vacuumed may have been collected. Not a
    ``transaction``: the same object may be missing in two attempts without being damaged.
    """
    attempts = Attempts(what, _REMEDY)
    while True:
        attempts.begin()
        observed = observe()
        try:
            return attempt(observed)
        except (ConditionFailedError, ObjectNotFoundError):
            continue
        except CorruptionError:
            if observe() == observed:
                raise


# --- sessions ---------------------------------------------------------------------------------


class Existing(NamedTuple):
    """The rows of the target's session of the same id; None: it has no such row."""

    head: bytes | None
    meta: bytes | None


def existing(target: Engine, key: bytes, session: str) -> Existing:
    """What the target has under a session's id; SessionDeletedError if it was deleted there."""
    places = [tombstone_key(key), head_key(key), meta_key(key)]
    deleted, head, meta = target.get_rows(places)
    if deleted is not None:
        raise SessionDeletedError(session)
    return Existing(head, meta)


class Arriving(NamedTuple):
    """The rows of a session that is to be created in a target, or advanced there."""

    key: bytes
    #: Ascending; the last one becomes the head. Empty: a session without a head stays so.
    revisions: Sequence[HeadRow]
    labels: Sequence[PutRow]
    #: Meta, attachments and receipts; salvage adds leases, queued work and retention.
    others: Sequence[PutRow]


class Publication(NamedTuple):
    """A write that publishes a session; no rows: the target has all of it."""

    rows: list[RowChange]
    conditions: list[Condition]
    #: The objects that the rows name, the oldest revision's first. They must be stored before.
    named: list[bytes]
    #: The number of rows that the target has with another value, and keeps.
    kept: int = 0


def plan(
    target: Engine,
    arriving: Arriving,
    there: bytes | None,
    *,
    keep_replaced: bool = True,
    keeps: Container[str] = ("attachments",),
) -> Publication:
    """The write that makes ``arriving`` the session of a target whose head row is ``there``.

    The caller has made sure that ``there`` is an earlier state. It becomes history if the arriving
    revisions lack it and it is to be kept. Rows of the tables ``keeps`` are only added: those that
    the target has stay as they are there.
    """
    key, known = arriving.key, None if there is None else decode_head(there)
    puts = [
        PutRow("history", keys.history(key, row.revision), encode_head(row))
        for row in arriving.revisions[:-1]
    ]
    coming = {row.revision for row in arriving.revisions[-1:]}
    if there is not None and known is not None:
        place = keys.history(key, known.revision)
        is_replaced = known.revision < max(coming, default=0)
        if is_replaced and keep_replaced and place not in {put.key for put in puts}:
            puts.append(PutRow("history", place, there))
        coming.add(known.revision)
    puts += [PutRow(*head_key(key), encode_head(row)) for row in arriving.revisions[-1:]]
    differing = list(changed(target, [*puts, *arriving.others]))
    puts = [put for put, row in differing if row is None or put.table not in keeps]
    coming.update([decode_head(put.value).revision for put in puts if put.table == "history"])
    moves = any(put.table == "heads" for put in puts)
    labels = _labels(target, arriving, coming, moves=moves)
    conditions: list[Condition] = [
        RowIs(*head_key(key), there),
        RowIs(*tombstone_key(key), None),
        *[RowIs(put.table, put.key, None) for put in puts if put.table in keeps],
        *labels.conditions,
    ]
    kept = len(differing) - len(puts)
    return Publication([*puts, *labels.rows], conditions, named_by(puts), kept)


def _labels(target: Engine, arriving: Arriving, coming: set[int], *, moves: bool) -> Publication:
    """The labels whose revisions are ``coming`` in the same write, or are in the target already.

    Other labels are left out: retention may have removed their revisions there, and a label must
    name a revision. A label for a revision that the target has sets the mark of that revision. If
    the write does not change the head, a label sets the mark of the session. So retention does not
    remove either by a plan that was made before.
    """
    key = arriving.key
    labels = [put for put, _ in changed(target, arriving.labels)]
    past = sorted({label_revision(label.value) for label in labels} - coming)
    places = {number: RowKey("history", keys.history(key, number)) for number in past}
    rows = target.get_rows(list(places.values())) if places else []
    there: dict[int, Condition] = {
        number: RowIs(*places[number], row)
        for number, row in zip(past, rows, strict=True)
        if row is not None
    }
    named = coming.union(there)
    taken = [label for label in labels if label_revision(label.value) in named]
    changes: list[RowChange] = [*taken, *[marks.put_mark(key, number) for number in there]]
    if taken and not moves:
        changes.append(marks.put_mark(key, 0))
    return Publication(changes, list(there.values()), [])


# --- rows -------------------------------------------------------------------------------------


def changed(target: Engine, puts: Sequence[PutRow]) -> Iterator[tuple[PutRow, bytes | None]]:
    """The rows that the target lacks or has with another value, each with the target's value."""
    for start in range(0, len(puts), _PAGE):
        page = puts[start : start + _PAGE]
        rows = target.get_rows([RowKey(put.table, put.key) for put in page])
        yield from [(put, row) for put, row in zip(page, rows, strict=True) if row != put.value]


def named_by(puts: Iterable[PutRow]) -> list[bytes]:
    """The objects that rows keep alive, in the order of the rows."""
    return [
        name
        for put in puts
        if put.table in ROOTS.tables
        for name in ROOTS.named(put.table, Row(put.key, put.value))
    ]


def write(
    target: Engine,
    rows: Sequence[RowChange],
    conditions: Sequence[Condition] = (),
    named: Iterable[bytes] = (),
) -> None:
    """Write rows on condition that the objects that they name are stored."""
    digests = sorted(set(named))
    exist = [ObjectsExist(digests)] if digests else []
    target.write(Write(conditions=[*conditions, *exist], rows=rows))


# --- rows that are displaced ------------------------------------------------------------------


def displaced(
    source: Engine, target: Engine, table: str, changes: Sequence[PutRow]
) -> list[DeleteRow]:
    """The target's rows to delete in the write that brings these rows of the source.

    A copy that is not a mirror keeps rows that the source lacks, but not these: they are batches
    whose id or source key another batch has now, or index rows of such batches or of a session's
    former subjects.
    """
    if table == "queue":
        return _displaced_work(source, target, changes)
    if table == "retention":
        return _former_subjects(target, changes)
    return []


def _displaced_work(source: Engine, target: Engine, changes: Sequence[PutRow]) -> list[DeleteRow]:
    """Batches whose id or source key belongs to another batch now, and the rows that find them."""
    coming = {RowKey(change.table, change.key): change.value for change in changes}
    known = dict(zip(coming, target.get_rows(list(coming)), strict=True))
    # A batch is replaced by another one of its number; or its id or source key finds another one
    # now, and the source has completed or cancelled it.
    replaced = {place for place in coming if keys.is_queue_batch(place.key)}
    left = {
        keys.queue_batch(keys.session_part(place.key), int.from_bytes(row, "big"))
        for place, row in known.items()
        if row is not None and len(row) == _SEQ_BYTES and not _is_counter(place.key)
    }
    asked = sorted(left - replaced)
    over = [
        place
        for place, row in zip(asked, source.get_rows(asked) if asked else [], strict=True)
        if row is None
    ]
    gone: list[DeleteRow] = []
    batches = [*over, *sorted(replaced)]
    for place, row in zip(batches, target.get_rows(batches) if batches else [], strict=True):
        if row is None:
            continue
        key = keys.session_part(place.key)
        names = [RowKey(name.table, name.key) for name in queue.put_names(key, place.key, row)]
        seq = place.key[-_SEQ_BYTES:]
        if place in replaced:
            kept = {name[:2] for name in queue.put_names(key, place.key, coming[place])}
            names = [name for name in names if name not in kept]
        else:
            gone.append(DeleteRow(*place))
        gone += [
            DeleteRow(*name)
            for name, finds in zip(names, target.get_rows(names) if names else [], strict=True)
            if finds == seq and name not in coming
        ]
    return gone


def _is_counter(key: bytes) -> bool:
    return key == keys.queue_counter(keys.session_part(key)).key


def _former_subjects(target: Engine, changes: Sequence[PutRow]) -> list[DeleteRow]:
    """The rows that find a session by a subject that it no longer has."""
    gone: list[DeleteRow] = []
    start = keys.subjects(b"").key
    for change in changes:
        if not change.key.startswith(start):
            continue
        key = change.key[len(start) :]
        [row] = target.get_rows([keys.subjects(key)])
        after = subjects.decode(change.value)
        gone += [
            DeleteRow(*keys.subject_session(about, key))
            for about in subjects.decode(row)
            if about not in after
        ]
    return gone
