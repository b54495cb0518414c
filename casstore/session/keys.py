"""Encodes ids as row keys: unambiguous, in order of the ids, within the size limit of keys.

An id is any non-empty text without NUL. In a key, a zero byte follows its UTF-8, so that the key of
one session is never a prefix of another's. An id too long for a key is truncated, followed by a
byte that does not occur in UTF-8 and the hash of the whole id.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from casstore.engine.protocol import RowKey
from casstore.errors import InvalidInputError
from casstore.format.digest import DIGEST_BYTES, plain_hash

_END: Final = b"\0"
_CUT: Final = b"\xff"
# The space for a session id and for the id after it: both fit into a row key of 511 bytes, together
# with the other bytes of the key.
_SESSION_BYTES: Final = 240
_PART_BYTES: Final = 240
# The maximum size of an id. Rows and nodes repeat it, so it is limited.
MAX_ID_BYTES: Final = 16_384

_LABEL: Final = b"\xff"
_QUEUE_COUNTER: Final = b"\x00"
_QUEUE_BATCH: Final = b"\x01"
_QUEUE_SOURCE: Final = b"\x02"
_QUEUE_ID: Final = b"\x03"


def id_bytes(text: object, what: str) -> bytes:
    """The UTF-8 of an id; InvalidInputError if it is not valid."""
    if type(text) is not str:
        raise InvalidInputError(f"{what} must be a str, got {text!r:.60}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidInputError(
            f"{what} must be a str without lone surrogates, got {text!r:.60}"
        ) from exc
    if not encoded or len(encoded) > MAX_ID_BYTES or b"\0" in encoded:
        raise InvalidInputError(
            f"{what} must have 1 to {MAX_ID_BYTES} bytes of UTF-8 and no NUL, got {text!r:.60} "
            f"of {len(encoded)} bytes"
        )
    return encoded


def _fit(encoded: bytes, room: int) -> bytes:
    if len(encoded) <= room:
        return encoded
    return encoded[: room - len(_CUT) - DIGEST_BYTES] + _CUT + plain_hash(encoded)


def session_key(session: str) -> bytes:
    """The key of a session's head, lease and meta rows; the keys of its other rows contain it."""
    # The cache compares arguments with ==, so only a str may be looked up in it.
    return _known_session_key(session) if type(session) is str else _session_key(session)


def _session_key(session: str) -> bytes:
    return _fit(id_bytes(session, "a session id"), _SESSION_BYTES) + _END


# Every call on a session needs its key, and most calls are on a few sessions.
_known_session_key: Final = lru_cache(maxsize=1024)(_session_key)


def session_of(key: bytes) -> str | None:
    """The session id in a key; None if the id was truncated."""
    return None if _CUT in key else key[: key.index(_END)].decode()


def name_of(key: bytes, long_id: str | None) -> str:
    """The session id: from its key, or ``long_id``, which a row stores if the key truncates it."""
    return long_id or session_of(key) or ""


def after_session(key: bytes) -> bytes:
    """The part of a row key that follows the session's key."""
    end, cut = key.find(_END), key.find(_CUT)
    if 0 <= cut < end or end < 0:
        # A truncated id has a fixed length; its hash may contain any byte.
        return key[_SESSION_BYTES + len(_END) :]
    return key[end + len(_END) :]


def session_part(key: bytes) -> bytes:
    """The session's key, with which a row key begins."""
    return key[: len(key) - len(after_session(key))]


def is_cut(session: str) -> bool:
    """True if this id is too long for a key, so that it cannot be read back from the key."""
    # UTF-8 takes at most four bytes a character, so short ids need not be encoded.
    return len(session) * 4 > _SESSION_BYTES and len(session.encode()) > _SESSION_BYTES


def part(text: str, what: str) -> bytes:
    """Encode an id for the last part of a key, after the session; ``what`` is for errors."""
    # Fast path: most ids are short ASCII.
    if type(text) is str and text.isascii() and 0 < len(text) <= _PART_BYTES:
        encoded = text.encode()
        if b"\0" not in encoded:
            return encoded
    return _fit(id_bytes(text, what), _PART_BYTES)


def history(key: bytes, revision: int) -> bytes:
    """The key of an earlier revision; revisions sort before labels."""
    return key + revision.to_bytes(8, "big")


def labels(key: bytes) -> bytes:
    """The key prefix of a session's labels; its revisions come before."""
    return key + _LABEL


def is_label(history_key: bytes) -> bool:
    """True if this key of the table ``history`` is that of a label; False: of a revision."""
    return after_session(history_key)[:1] == _LABEL


def label(key: bytes, name: str) -> bytes:
    """The key of a label."""
    return key + _LABEL + part(name, "a label")


def past(prefix: bytes) -> bytes:
    """The first key after all keys with ``prefix``, whose last byte must be below 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def prefix_range(prefix: str) -> tuple[bytes, bytes | None]:
    """The key range that contains all names starting with ``prefix``.

    Long names are truncated, so the range of a long prefix may contain other names.
    """
    encoded = b"" if prefix == "" else id_bytes(prefix, "prefix")
    start = encoded[: _PART_BYTES - len(_CUT) - DIGEST_BYTES]
    return start, past(start) if start else None


def queue_counter(key: bytes) -> RowKey:
    """The row with the number of the last batch queued for a session."""
    return RowKey("queue", key + _QUEUE_COUNTER)


def queue_batch(key: bytes, seq: int) -> RowKey:
    """The row of a batch."""
    return RowKey("queue", key + _QUEUE_BATCH + seq.to_bytes(8, "big"))


def queue_range(key: bytes) -> tuple[bytes, bytes]:
    """The key range of a session's batches."""
    return key + _QUEUE_BATCH, key + _QUEUE_SOURCE


def is_queue_batch(queue_key: bytes) -> bool:
    """True if this key of the table ``queue`` is that of a batch."""
    return after_session(queue_key)[:1] == _QUEUE_BATCH


def queue_source(key: bytes, source_key: str) -> RowKey:
    """The row that leads from a batch's source key, which makes ``enqueue`` repeatable, to it."""
    return RowKey("queue", key + _QUEUE_SOURCE + part(source_key, "a source key"))


def queue_id(key: bytes, batch_id: str) -> RowKey:
    """The row that leads from a batch's id to the batch."""
    return RowKey("queue", key + _QUEUE_ID + part(batch_id, "a batch id"))


# --- the table "retention" ------------------------------------------------------------------

_POLICY_DEFAULT: Final = b"\x00"
_POLICY: Final = b"\x01"
_EXPIRY: Final = b"\x02"
_PROTECTION: Final = b"\x03"
_MARK: Final = b"\x04"
_PIN_MARK: Final = b"\x05"
_UNFINISHED: Final = b"\x06"
_SIGN: Final = b"\x07"
_SUBJECTS: Final = b"\x08"
_SUBJECT: Final = b"\x09"
_REVISION_BYTES: Final = 8


def policy(key: bytes | None) -> RowKey:
    """The row of a session's retention policy; None: of the default policy."""
    return RowKey("retention", _POLICY_DEFAULT if key is None else _POLICY + key)


def expiry(key: bytes) -> RowKey:
    """The row that says when a session expires."""
    return RowKey("retention", _EXPIRY + key)


def protections(key: bytes) -> bytes:
    """The key prefix of a session's protections."""
    return _PROTECTION + key


def protection(key: bytes, revision: int, by: str) -> RowKey:
    """The row by which ``by`` protects a revision."""
    named = revision.to_bytes(_REVISION_BYTES, "big") + part(by, "a protector")
    return RowKey("retention", _PROTECTION + key + named)


def protected_revision(protection_key: bytes) -> int:
    """The revision that a protection is about, from its key."""
    named = after_session(protection_key[len(_PROTECTION) :])
    return int.from_bytes(named[:_REVISION_BYTES], "big")


def marks(key: bytes) -> bytes:
    """The key prefix of a session's marks."""
    return _MARK + key


def mark(key: bytes, revision: int) -> RowKey:
    """The mark of a revision; revision 0: of the session as a whole."""
    return RowKey("retention", _MARK + key + revision.to_bytes(_REVISION_BYTES, "big"))


def pin_mark(digest: bytes) -> RowKey:
    """The mark of a pinned object."""
    return RowKey("retention", _PIN_MARK + digest)


def all_marks() -> tuple[bytes, bytes]:
    """The key range of all marks."""
    return _MARK, _UNFINISHED


def all_pin_marks() -> tuple[bytes, bytes]:
    """The key range of the marks of pinned objects."""
    return _PIN_MARK, _UNFINISHED


def all_protections() -> tuple[bytes, bytes]:
    """The key range of the protections of all sessions."""
    return _PROTECTION, _MARK


def unfinished(key: bytes) -> RowKey:
    """The row that marks a deletion as unfinished: the deleted session still has rows."""
    return RowKey("retention", _UNFINISHED + key)


def all_unfinished() -> tuple[bytes, bytes]:
    """The key range of unfinished deletions."""
    return _UNFINISHED, _SIGN


def sign() -> RowKey:
    """The row by which a copy finds out whether source and target are the same store."""
    return RowKey("retention", _SIGN)


def subjects(key: bytes) -> RowKey:
    """The row of a session's subjects."""
    return RowKey("retention", _SUBJECTS + key)


def subject(about: str) -> bytes:
    """The key prefix of the index rows of a subject."""
    return _SUBJECT + _fit(id_bytes(about, "a subject"), _SESSION_BYTES) + _END


def subject_session(about: str, key: bytes) -> RowKey:
    """The index row that leads from a subject to a session."""
    return RowKey("retention", subject(about) + key)


def subjects_index() -> tuple[bytes, bytes]:
    """The key range of the index of subjects."""
    return _SUBJECT, past(_SUBJECT)


def subject_of(index_key: bytes) -> str | None:
    """The subject in the key of an index row; None if it was truncated."""
    return session_of(session_part(index_key[len(_SUBJECT) :]))


# The kinds of rows that belong to one session: in their keys, the session's key follows the kind.
_OF_A_SESSION: Final = (
    _POLICY,
    _EXPIRY,
    _PROTECTION,
    _MARK,
    _UNFINISHED,
    _SUBJECTS,
)
_OF_THE_STORE: Final = (_POLICY_DEFAULT, _PIN_MARK, _SIGN)


def retention_session(key: bytes) -> bytes | None:
    """The key of the session that a row of the table ``retention`` belongs to; None: to none.

    InvalidInputError if this release does not know the kind of row.
    """
    kind, rest = key[:1], key[1:]
    if kind in _OF_A_SESSION:
        return session_part(rest)
    if kind == _SUBJECT:
        return after_session(rest)
    if kind in _OF_THE_STORE:
        return None
    raise InvalidInputError(f"key {key.hex()} of table retention is of an unknown kind")


def retention_rows(key: bytes) -> list[tuple[bytes, bytes]]:
    """The key ranges of a session's rows in ``retention``, except those of the subject index."""
    return [(kind + key, kind + past(key)) for kind in _OF_A_SESSION]


def owner_of(key: bytes) -> str | None:
    """The id of the session that a row belongs to, from the row's key; None if it was truncated."""
    rest = after_session(key)
    return session_of(key[: len(key) - len(rest)])
