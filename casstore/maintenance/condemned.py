"""Condemned attachments: bytes outside the store that can be deleted.

The store knows the URI of such bytes but cannot delete them. Deleting a session, or condemning an
attachment, leaves a row that names them. The host deletes the bytes and then calls
``forget_condemned``, which removes the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from casstore.engine.protocol import DeleteRow, RowIs, RowKey, Write
from casstore.maintenance.rows import decoded
from casstore.session import attachments, keys
from casstore.session.arguments import check_kind
from casstore.session.attempts import write_unchanged
from casstore.session.scanning import scan
from casstore.store import Store, check_store


class Condemned(NamedTuple):
    """An attachment with bytes outside the store that no commit may refer to any more."""

    #: The session they belonged to; None if its id was too long for the row's key.
    session: str | None
    attachment: str
    uri: str
    owner: str | None
    #: The key of the row, for ``forget_condemned``.
    key: bytes


def list_condemned(store: Store, *, session: str | None = None) -> Iterator[Condemned]:
    """Attachments whose bytes are outside the store and may be deleted; of all sessions, or of one.

    Deleted sessions are included. Reads all rows of attachments.

    >>> video = session.attachments.intend("video-1", uri="s3://bucket/video-1")
    >>> deleted = store.delete_session("s")
    >>> [one.uri for one in list_condemned(store)]
    ['s3://bucket/video-1']
    """
    check_store(store)
    start = b"" if session is None else keys.session_key(session)
    stop = None if session is None else keys.past(start)
    return _listed(store, start, stop)


def _listed(store: Store, start: bytes, stop: bytes | None) -> Iterator[Condemned]:
    for row in scan(store.engine, "attachments", start, stop):
        place = RowKey("attachments", row.key)
        found = decoded(place, row.value, partial(attachments.decode, ""))
        if found.state == attachments.CONDEMNED and found.uri is not None:
            yield Condemned(keys.owner_of(row.key), found.id, found.uri, found.owner, row.key)


def forget_condemned(store: Store, condemned: Condemned) -> bool:
    """Remove the row of an attachment whose bytes were deleted; False if it was removed already.

    >>> video = session.attachments.intend("video-1", uri="s3://bucket/video-1")
    >>> deleted = store.delete_session("s")
    >>> for one in list_condemned(store):  # delete the bytes at one.uri, and then
    ...     forget_condemned(store, one)
    True
    """
    check_store(store)
    check_kind(condemned, "condemned", Condemned)
    place = RowKey("attachments", condemned.key)
    row = store.engine.get_rows([place])[0]
    if row is None:
        return False
    found = attachments.decode("", row)
    if (found.state, found.uri) != (attachments.CONDEMNED, condemned.uri):
        return False
    change = Write(conditions=[RowIs(*place, row)], rows=[DeleteRow(*place)])
    return bool(list(write_unchanged(store.engine, [change])))
