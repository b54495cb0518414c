"""Bytes that belong to a session: announced before they are written, committed with a turn.

    attachment = state (1) ‖ intent_at (8) ‖ committed_at (8) ‖ details

An attachment starts as an *intent*: a row that is written before the bytes, or with them. So bytes
that were never committed (orphans) can be found. To remove an orphan without a race: ``condemn``
it, after which no commit may refer to it; delete the bytes; ``forget`` it. The bytes may be a blob
of this store (the row keeps it alive) or be stored elsewhere, at a URI.

``intend`` and ``forget`` write the session's mark (``session.marks``). The write that deletes a
session with all its rows lists the attachments first, and fails if the mark has changed since.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any, Final

from casstore.engine.conditions import stamped
from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    NewObject,
    ObjectsExist,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    Stamp,
    Write,
    WriteResult,
)
from casstore.errors import (
    AttachmentNotFoundError,
    AttachmentStateError,
    CorruptionError,
    InvalidInputError,
)
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import Digest, Kind
from casstore.objects.pieces import PieceWriter
from casstore.session import keys, marks
from casstore.session.arguments import check_count, list_of
from casstore.session.attempts import transaction
from casstore.session.data import Attachment
from casstore.session.scanning import scan
from casstore.session.state import Runtime

INTENT: Final = "intent"
COMMITTED: Final = "committed"
CONDEMNED: Final = "condemned"
_STATES: Final = (INTENT, COMMITTED, CONDEMNED)
_INTENT_AT: Final = 1
_COMMITTED_AT: Final = 9
_DETAILS: Final = 17


def attachment_key(key: bytes, attachment: str) -> RowKey:
    """The key of an attachment's row."""
    return RowKey("attachments", key + keys.part(attachment, "an attachment id"))


class Attachments:
    """The attachments of one session.

    The examples use ``session``, which has none yet.

    >>> image = session.attachments.put(b"pixels")
    >>> shown = NodeDraft("shown", {"role": "user", "image": Link(image.digest)})
    >>> result = session.append(shown, attachments=[image.id])
    >>> [(one.id == image.id, one.state) for one in session.attachments.list()]
    [(True, 'committed')]
    """

    def __init__(self, runtime: Runtime, session: str) -> None:
        self._runtime = runtime
        self._session = session
        self._key = keys.session_key(session)

    def intend(
        self,
        attachment_id: str,
        *,
        uri: str | None = None,
        digest: bytes | None = None,
        owner: str | None = None,
    ) -> Attachment:
        """Record that bytes are about to be written, at ``uri`` or as a blob of this store.

        Repeating the call sets the time of the intent to now; a committed attachment does not
        change. AttachmentStateError if the attachment is condemned.

        >>> video = session.attachments.intend("video-1", uri="s3://bucket/video-1")
        >>> video.state  # now write the bytes there, and then commit
        'intent'
        """
        exists = [] if digest is None else [ObjectsExist((digest,))]
        return self._announce(attachment_id, _details(attachment_id, uri, digest, owner), exists)

    @transaction("attachments of session {self._session!r}")
    def _announce(
        self,
        attachment_id: str,
        details: list[Any],
        conditions: Sequence[Condition] = (),
        objects: Sequence[NewObject] = (),
    ) -> Attachment:
        """Record an intent, under these conditions, and store these objects in the same write."""
        row_key = attachment_key(self._key, attachment_id)
        row = self._runtime.rows(self._session, [row_key])[1]
        if row is not None:
            known = decode(self._session, row)
            if known.state == CONDEMNED:
                raise AttachmentStateError(self._session, attachment_id, CONDEMNED)
            if known.state == COMMITTED:
                return known
        put = PutRow(*row_key, _encode(INTENT, details), (Stamp(_INTENT_AT),))
        changes = [put, marks.put_mark(self._key, 0)]
        done = self._write([RowIs(*row_key, row), *conditions], changes, objects)
        # Made from what was written: by now another process may have changed the row.
        return decode(self._session, stamped(put, done.now_ms))

    def put(self, content: bytes, *, owner: str | None = None) -> Attachment:
        """Store bytes as a blob of this store, together with the intent; the id is their digest.

        Both are one write, so the bytes never exist without an intent, nor the intent without the
        bytes, even if the call is repeated or interrupted.

        >>> image = session.attachments.put(b"pixels")
        >>> image.id == str(Digest.of_blob(b"pixels")), store.get_blob(image.digest)
        (True, b'pixels')
        """
        if type(content) is not bytes:
            raise InvalidInputError(f"content must be bytes, got {type(content).__name__}")
        digest = Digest.of_blob(content)
        attachment_id = digest.hex()
        details = _details(attachment_id, None, digest, owner)
        writer = PieceWriter()
        writer.emit(Kind.BLOB, content, [])
        found = self._announce(attachment_id, details, objects=writer.objects)
        if found.digest is None:
            # An attachment without a blob is committed under this id, and stays: store the bytes.
            writer.flush(self._runtime.engine)
        return found

    def commit(self, attachment_ids: Sequence[str]) -> tuple[Attachment, ...]:
        """Mark attachments as committed without a commit of the session; repeating has no effect.

        >>> image = session.attachments.put(b"pixels")
        >>> [one.state for one in session.attachments.commit([image.id])]
        ['committed']
        """
        return self._commit(list_of(attachment_ids, "attachment_ids"))

    @transaction("attachments of session {self._session!r}")
    def _commit(self, wanted: Sequence[str]) -> tuple[Attachment, ...]:
        row_keys = [attachment_key(self._key, name) for name in wanted]
        rows = self._runtime.rows(self._session, row_keys)[1:]
        conditions, changes = commit_rows(self._session, wanted, row_keys, rows)
        done = self._write(conditions, changes)
        committed = {RowKey(put.table, put.key): put for put in changes}
        return tuple(
            [
                decode(
                    self._session,
                    stamped(committed[row_key], done.now_ms) if row_key in committed else row,
                )
                for row_key, row in zip(row_keys, rows, strict=True)
                if row is not None
            ]
        )

    def find(self, attachment_id: str) -> Attachment | None:
        """One attachment; None if no intent was recorded.

        >>> video = session.attachments.intend("video-1", uri="s3://bucket/video-1")
        >>> session.attachments.find("video-1").uri
        's3://bucket/video-1'
        """
        row = self._runtime.rows(self._session, [attachment_key(self._key, attachment_id)])[1]
        return None if row is None else decode(self._session, row)

    def list(self, *, state: str | None = None) -> builtins.list[Attachment]:
        """All attachments, or those in one state, by id.

        >>> for name in ("video-1", "video-2"):
        ...     video = session.attachments.intend(name, uri=f"s3://bucket/{name}")
        >>> done = session.attachments.commit(["video-1"])
        >>> [one.id for one in session.attachments.list(state="intent")]
        ['video-2']
        """
        if state is not None and state not in _STATES:
            raise InvalidInputError(f"state must be one of {', '.join(_STATES)}, got {state!r}")
        found = [decode(self._session, row) for row in self._scan()]
        return [one for one in found if state is None or one.state == state]

    def uncommitted(self, *, older_than_ms: int) -> builtins.list[Attachment]:
        """Orphans: attachments with an intent at or before this time and no commit, oldest first.

        >>> video = session.attachments.intend("video-1", uri="s3://bucket/video-1")
        >>> hour_ms = 3_600_000
        >>> session.attachments.uncommitted(older_than_ms=video.intent_at_ms - hour_ms)
        []
        >>> [one.id for one in session.attachments.uncommitted(older_than_ms=video.intent_at_ms)]
        ['video-1']
        """
        check_count(older_than_ms, "older_than_ms")
        found = [
            one
            for one in self.list()
            if one.state != COMMITTED and one.intent_at_ms <= older_than_ms
        ]
        return sorted(found, key=lambda one: one.intent_at_ms)

    @transaction("attachments of session {self._session!r}")
    def condemn(self, attachment_id: str) -> Attachment:
        """Forbid commits to refer to the attachment, so that its bytes can be deleted.

        >>> video = session.attachments.intend("video-1", uri="s3://bucket/video-1")
        >>> session.attachments.condemn("video-1").state  # now its bytes can be deleted
        'condemned'
        """
        row_key = attachment_key(self._key, attachment_id)
        row = self._runtime.rows(self._session, [row_key])[1]
        if row is None:
            raise AttachmentNotFoundError(self._session, attachment_id)
        known = decode(self._session, row)
        if known.state == COMMITTED:
            raise AttachmentStateError(self._session, attachment_id, COMMITTED)
        condemned = bytes((_STATES.index(CONDEMNED),)) + row[1:]
        self._write([RowIs(*row_key, row)], [PutRow(*row_key, condemned)])
        return known._replace(state=CONDEMNED)

    @transaction("attachments of session {self._session!r}")
    def forget(self, attachment_id: str) -> bool:
        """Remove an attachment that is not committed; False if there is none.

        Its bytes are not deleted. AttachmentStateError if it is committed.

        >>> video = session.attachments.intend("video-1", uri="s3://bucket/video-1")
        >>> session.attachments.forget("video-1"), session.attachments.find("video-1")
        (True, None)
        """
        row_key = attachment_key(self._key, attachment_id)
        row = self._runtime.rows(self._session, [row_key])[1]
        if row is None:
            return False
        if decode(self._session, row).state == COMMITTED:
            raise AttachmentStateError(self._session, attachment_id, COMMITTED)
        changes: list[RowChange] = [DeleteRow(*row_key), marks.put_mark(self._key, 0)]
        self._write([RowIs(*row_key, row)], changes)
        return True

    def _write(
        self,
        conditions: Sequence[Condition],
        rows: Sequence[RowChange],
        objects: Sequence[NewObject] = (),
    ) -> WriteResult:
        """Write, on condition that the session was not deleted."""
        alive = RowIs("tombstones", self._key, None)
        return self._runtime.engine.write(Write(objects, [alive, *conditions], rows))

    def _scan(self) -> builtins.list[bytes]:
        rows = list(scan(self._runtime.engine, "attachments", self._key, keys.past(self._key)))
        # Checked after the scan: a deletion writes the tombstone before it removes rows.
        self._runtime.rows(self._session)
        return [row.value for row in rows]


def commit_rows(
    session: str,
    attachment_ids: Sequence[str],
    row_keys: Sequence[RowKey],
    rows: Sequence[bytes | None],
) -> tuple[list[Condition], list[PutRow]]:
    """The conditions and changes that commit attachments; committed ones do not change."""
    conditions: list[Condition] = []
    changes: list[PutRow] = []
    for name, row_key, row in zip(attachment_ids, row_keys, rows, strict=True):
        if row is None:
            raise AttachmentNotFoundError(session, name)
        state = decode(session, row).state
        if state == CONDEMNED:
            raise AttachmentStateError(session, name, CONDEMNED)
        conditions.append(RowIs(*row_key, row))
        if state == INTENT:
            committed = bytes((_STATES.index(COMMITTED),)) + row[1:]
            changes.append(PutRow(*row_key, committed, (Stamp(_COMMITTED_AT),)))
    return conditions, changes


def condemned(session: str, row: bytes) -> bytes | None:
    """The row that replaces an attachment's row when its session is deleted; None: it is removed.

    gc removes a blob of this store without a row. For bytes at a URI the row stays, condemned,
    until the application has deleted the bytes and calls ``forget``.
    """
    if decode(session, row).uri is None:
        return None
    return bytes((_STATES.index(CONDEMNED),)) + row[1:]


def _details(
    attachment_id: str, uri: str | None, digest: bytes | None, owner: str | None
) -> list[Any]:
    for text, what in ((uri, "a uri"), (owner, "an owner")):
        if text is not None:
            keys.id_bytes(text, what)
    return [attachment_id, uri, None if digest is None else bytes(Digest(digest)), owner]


def _encode(state: str, details: list[Any]) -> bytes:
    return bytes((_STATES.index(state),)) + bytes(16) + pack_checked(details)


def put_as_is(attachment: Attachment) -> PutRow:
    """The change that writes an attachment's row with the given state and times."""
    details = _details(attachment.id, attachment.uri, attachment.digest, attachment.owner)
    times = (attachment.intent_at_ms, attachment.committed_at_ms or 0)
    value = b"".join(
        (
            bytes((_STATES.index(attachment.state),)),
            *[time.to_bytes(8, "big") for time in times],
            pack_checked(details),
        )
    )
    row_key = attachment_key(keys.session_key(attachment.session), attachment.id)
    return PutRow(*row_key, value)


def decode(session: str, row: bytes) -> Attachment:
    """Decode an attachment's row; CorruptionError if it is damaged."""
    try:
        name, uri, digest, owner = unpack_checked(row[_DETAILS:])
        committed_at_ms = int.from_bytes(row[_COMMITTED_AT:_DETAILS], "big")
        return Attachment(
            name,
            session,
            uri,
            None if digest is None else Digest(digest),
            owner,
            _STATES[row[0]],
            int.from_bytes(row[_INTENT_AT:_COMMITTED_AT], "big"),
            committed_at_ms or None,
        )
    except (TypeError, ValueError, IndexError) as exc:
        raise CorruptionError(f"an attachment of session {session!r} is damaged") from exc
