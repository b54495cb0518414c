"""Finds the attachments of all sessions that were announced and never committed, and removes them.

``session.attachments.uncommitted`` lists those of one session. But a host that announces bytes for
a session and dies before the first commit leaves an attachment of a session that never began, which
no list of sessions has. These functions scan the rows of all attachments, so they find it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from casstore.engine.protocol import DeleteRow, PutRow, Row, RowIs, RowKey, Write
from casstore.errors import InvalidInputError
from casstore.format.digest import Digest
from casstore.maintenance.rows import decoded
from casstore.session import attachments, catalogue, keys, marks
from casstore.session.arguments import check_count
from casstore.session.attempts import write_unchanged
from casstore.session.catalogue import KnownSession
from casstore.session.data import Attachment
from casstore.session.scanning import scan
from casstore.session.state import head_key, meta_key
from casstore.store import Store, check_store


class Uncommitted(NamedTuple):
    """An attachment that was announced and not committed."""

    #: None: the id is too long to be stored in the row's key, and the session never began.
    session: str | None
    attachment: str
    #: Where the bytes are; None: in this store, under ``digest``, or not known.
    uri: str | None
    digest: Digest | None
    owner: str | None
    #: ``intent`` or ``condemned``.
    state: str
    intent_at_ms: int
    #: The key of its row, for ``give_up``.
    key: bytes


def list_uncommitted(store: Store, *, older_than_ms: int) -> Iterator[Uncommitted]:
    """The attachments of all sessions announced at or before this time and not committed since.

    By session and id. Sessions that never began are included. Reads all rows of attachments.

    >>> video = store.session("never began").attachments.intend("video-1", uri="s3://b/video-1")
    >>> found = list_uncommitted(store, older_than_ms=video.intent_at_ms)
    >>> [(one.session, one.attachment, one.uri) for one in found]
    [('never began', 'video-1', 's3://b/video-1')]
    """
    check_store(store)
    check_count(older_than_ms, "older_than_ms")
    return (
        Uncommitted(
            _session(store, row.key),
            found.id,
            found.uri,
            found.digest,
            found.owner,
            found.state,
            found.intent_at_ms,
            row.key,
        )
        for row, found in _rows(store, older_than_ms)
    )


def _rows(store: Store, older_than_ms: int) -> Iterator[tuple[Row, Attachment]]:
    for row in scan(store.engine, "attachments", b"", None):
        found = _decode(row)
        if found.state != attachments.COMMITTED and found.intent_at_ms <= older_than_ms:
            yield row, found


def _decode(row: Row) -> Attachment:
    place = RowKey("attachments", row.key)
    return decoded(place, row.value, partial(attachments.decode, ""))


def _session(store: Store, key: bytes) -> str | None:
    own = keys.session_part(key)
    whole = keys.session_of(own)
    if whole is not None:
        return whole
    head, meta = store.engine.get_rows([head_key(own), meta_key(own)])
    if head is None and meta is None:
        return None
    return catalogue.name_of(KnownSession(own, head, meta))


class GivenUp(NamedTuple):
    """How many uncommitted attachments ``sweep_uncommitted`` gave up.

    Attributes:
        removed: attachments whose rows are gone; gc removes blobs that only they named
        condemned: attachments with bytes elsewhere, in ``list_condemned`` until those are deleted
    """

    removed: int
    condemned: int


def sweep_uncommitted(store: Store, *, older_than_ms: int) -> GivenUp:
    """Give up every attachment that ``list_uncommitted`` finds, unless it changes meanwhile.

    No commit may refer to one afterwards. One whose bytes are at a ``uri`` is condemned, and
    stays listed until the bytes are deleted; any other loses its row.

    >>> session = store.session("never began")
    >>> image = session.attachments.put(b"pixels")
    >>> video = session.attachments.intend("video-1", uri="s3://bucket/video-1")
    >>> sweep_uncommitted(store, older_than_ms=video.intent_at_ms)
    GivenUp(removed=1, condemned=1)
    >>> session.attachments.find("video-1").state
    'condemned'
    """
    check_store(store)
    check_count(older_than_ms, "older_than_ms")
    removed = condemned = 0
    changes = (_change(row) for row, _ in _rows(store, older_than_ms))
    wanted = (change for change in changes if change is not None)
    for change in write_unchanged(store.engine, wanted):
        is_removed = isinstance(change.rows[0], DeleteRow)
        removed += is_removed
        condemned += not is_removed
    return GivenUp(removed, condemned)


def _change(row: Row) -> Write | None:
    """The change that gives an attachment up; None if it is condemned already."""
    place = RowKey("attachments", row.key)
    left = attachments.condemned("", row.value)
    if left == row.value:
        return None
    change = DeleteRow(*place) if left is None else PutRow(*place, left)
    # The mark: deleting a session as a whole lists its attachments first, and must notice this.
    mark = marks.put_mark(keys.session_part(row.key), 0)
    return Write(conditions=[RowIs(*place, row.value)], rows=[change, mark])


def give_up(store: Store, one: Uncommitted) -> bool:
    """Condemn an attachment whose bytes are elsewhere, else remove its row.

    False, and nothing happens, if it was announced again, committed or removed since it was
    listed.

    >>> video = store.session("never began").attachments.intend("video-1")
    >>> [found] = list_uncommitted(store, older_than_ms=video.intent_at_ms)
    >>> give_up(store, found), give_up(store, found)
    (True, False)
    """
    check_store(store)
    if not isinstance(one, Uncommitted):
        raise InvalidInputError(
            f"give_up takes an Uncommitted from list_uncommitted, got {type(one).__name__}"
        )
    place = RowKey("attachments", one.key)
    row = store.engine.get_rows([place])[0]
    if row is None:
        return False
    found = _decode(Row(one.key, row))
    if (found.state, found.intent_at_ms) != (one.state, one.intent_at_ms):
        return False
    change = _change(Row(one.key, row))
    return change is None or bool(list(write_unchanged(store.engine, [change])))
