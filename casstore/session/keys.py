"""Ids into row keys: unambiguous, in order of the id, never longer than a key may be.

An id is any non-empty text without NUL. Its UTF-8 ends in a zero byte, so that no id is
the prefix of another's rows. An id too long for a key is cut, and the hash of the whole
follows a byte that UTF-8 never holds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from casstore.engine.protocol import RowKey
from casstore.errors import InvalidInputError
from casstore.format.hashing import DIGEST_BYTES, plain_hash

_END: Final = b"\0"
_CUT: Final = b"\xff"
# Together with the marks they fit into a row key of 511 bytes.
_SESSION_BYTES: Final = 240
_PART_BYTES: Final = 240
# What an id may have at the most: it is stored in rows and nodes over and over.
MAX_ID_BYTES: Final = 16_384

_LABEL: Final = b"\xff"
_QUEUE_COUNTER: Final = b"\x00"
_QUEUE_BATCH: Final = b"\x01"
_QUEUE_SOURCE: Final = b"\x02"
_QUEUE_ID: Final = b"\x03"


def id_bytes(text: object, what: str) -> bytes:
    """The UTF-8 of an id; refused if it cannot be one."""
    if type(text) is not str:
        raise InvalidInputError(f"{what} is a str, not {type(text).__name__}")
    try:
        spelled = text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"{what} {text!r} holds a lone surrogate") from exc
    if not spelled or len(spelled) > MAX_ID_BYTES or b"\0" in spelled:
        raise InvalidInputError(
            f"{what} has 1 to {MAX_ID_BYTES} bytes and no NUL, unlike {text[:40]!r} "
            f"of {len(spelled)} bytes"
        )
    return spelled


def _fit(spelled: bytes, room: int) -> bytes:
    if len(spelled) <= room:
        return spelled
    return spelled[: room - len(_CUT) - DIGEST_BYTES] + _CUT + plain_hash(spelled)


def session_key(session: str) -> bytes:
    """The key of a session's own rows, and the start of all keys that belong to it."""
    # Only of a text it is known that equal ones have equal keys.
    return _known_session_key(session) if type(session) is str else _session_key(session)


def _session_key(session: str) -> bytes:
    return _fit(id_bytes(session, "a session id"), _SESSION_BYTES) + _END


# Every call to a session asks for its key, most of them for the same few.
_known_session_key: Final = lru_cache(maxsize=1024)(_session_key)


def session_of(key: bytes) -> str | None:
    """The id that a session's key was made of; None if it was too long to stand in it."""
    return None if _CUT in key else key[: key.index(_END)].decode()


def after_session(key: bytes) -> bytes:
    """What follows the session's own key in a key that belongs to it."""
    end, cut = key.find(_END), key.find(_CUT)
    if 0 <= cut < end or end < 0:
        # Cut, so of a known length; the hash may hold any byte.
        return key[_SESSION_BYTES + len(_END) :]
    return key[end + len(_END) :]


def session_part(key: bytes) -> bytes:
    """The session's own key, with which a key that belongs to it starts."""
    return key[: len(key) - len(after_session(key))]


def is_cut(session: str) -> bool:
    """Is this id too long to be read back from its key?"""
    # UTF-8 takes at most four bytes a character: most ids need no measuring.
    return len(session) * 4 > _SESSION_BYTES and len(session.encode()) > _SESSION_BYTES


def part(text: str, what: str) -> bytes:
    """The last part of a key: an id below a session."""
    # Most ids are short and plain, and need no closer look.
    if type(text) is str and text.isascii() and 0 < len(text) <= _PART_BYTES:
        spelled = text.encode()
        if b"\0" not in spelled:
            return spelled
    return _fit(id_bytes(text, what), _PART_BYTES)


def history(key: bytes, revision: int) -> bytes:
    """Where an earlier revision of a session stands; numbers sort below labels."""
    return key + revision.to_bytes(8, "big")


def labels(key: bytes) -> bytes:
    """Where the labels of a session start, and its revisions end."""
    return key + _LABEL


def is_label(history_key: bytes) -> bool:
    """Is this key of the history a label's, and not a revision's?"""
    return after_session(history_key)[:1] == _LABEL


def label(key: bytes, name: str) -> bytes:
    """Where a label stands."""
    return key + _LABEL + part(name, "a label")


def past(prefix: bytes) -> bytes:
    """The first key behind all that start with ``prefix``, which ends in a byte below 255."""
    return prefix[:-1] + bytes((prefix[-1] + 1,))


def prefix_range(prefix: str) -> tuple[bytes, bytes | None]:
    """From where to where names that start with ``prefix`` are found, among others.

    Long names are cut, so a long prefix finds more than it asks for.
    """
    spelled = b"" if prefix == "" else id_bytes(prefix, "the beginning of a name")
    start = spelled[: _PART_BYTES - len(_CUT) - DIGEST_BYTES]
    return start, past(start) if start else None


def queue_counter(key: bytes) -> RowKey:
    """The row that counts a session's batches."""
    return RowKey("queue", key + _QUEUE_COUNTER)


def queue_batch(key: bytes, seq: int) -> RowKey:
    """The row of a batch."""
    return RowKey("queue", key + _QUEUE_BATCH + seq.to_bytes(8, "big"))


def queue_range(key: bytes) -> tuple[bytes, bytes]:
    """From the first batch of a session to behind the last."""
    return key + _QUEUE_BATCH, key + _QUEUE_SOURCE


def is_queue_batch(queue_key: bytes) -> bool:
    """Is this key of the queue that of a batch?"""
    return after_session(queue_key)[:1] == _QUEUE_BATCH


def queue_source(key: bytes, source_key: str) -> RowKey:
    """The row that finds a batch by its source key."""
    return RowKey("queue", key + _QUEUE_SOURCE + part(source_key, "a source key"))


def queue_id(key: bytes, batch_id: str) -> RowKey:
    """The row that finds a batch by its id."""
    return RowKey("queue", key + _QUEUE_ID + part(batch_id, "a batch id"))


# --- how long things stay: the table "retention" --------------------------------------------

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
    """The row of a session's retention policy; None: of the default."""
    return RowKey("retention", _POLICY_DEFAULT if key is None else _POLICY + key)


def expiry(key: bytes) -> RowKey:
    """The row that says when a session expires."""
    return RowKey("retention", _EXPIRY + key)


def protections(key: bytes) -> bytes:
    """What the keys of a session's protections start with."""
    return _PROTECTION + key


def protection(key: bytes, revision: int, by: str) -> RowKey:
    """The row by which somebody protects a revision."""
    named = revision.to_bytes(_REVISION_BYTES, "big") + part(by, "a protector")
    return RowKey("retention", _PROTECTION + key + named)


def protected_revision(protection_key: bytes) -> int:
    """The revision that a protection is about, from its key."""
    named = after_session(protection_key[len(_PROTECTION) :])
    return int.from_bytes(named[:_REVISION_BYTES], "big")


def marks(key: bytes) -> bytes:
    """What the keys of a session's marks start with."""
    return _MARK + key


def mark(key: bytes, revision: int) -> RowKey:
    """The row that tells that a revision came to be used; revision 0: the session."""
    return RowKey("retention", _MARK + key + revision.to_bytes(_REVISION_BYTES, "big"))


def pin_mark(digest: bytes) -> RowKey:
    """The row that tells that an object was pinned."""
    return RowKey("retention", _PIN_MARK + digest)


def all_marks() -> tuple[bytes, bytes]:
    """From the first mark of any kind to behind the last."""
    return _MARK, _UNFINISHED


def all_pin_marks() -> tuple[bytes, bytes]:
    """From the first mark of an object to behind the last."""
    return _PIN_MARK, _UNFINISHED


def all_protections() -> tuple[bytes, bytes]:
    """From the first protection of any session to behind the last."""
    return _PROTECTION, _MARK


def unfinished(key: bytes) -> RowKey:
    """The row that stands while a deleted session still has rows."""
    return RowKey("retention", _UNFINISHED + key)


def all_unfinished() -> tuple[bytes, bytes]:
    """From the first unfinished deletion to behind the last."""
    return _UNFINISHED, _SIGN


def sign() -> RowKey:
    """The row by which two handles find out whether they are on one store."""
    return RowKey("retention", _SIGN)


def subjects(key: bytes) -> RowKey:
    """The row that says whom a session is about."""
    return RowKey("retention", _SUBJECTS + key)


def subject(about: str) -> bytes:
    """What the keys of all sessions about somebody start with."""
    return _SUBJECT + _fit(id_bytes(about, "a subject"), _SESSION_BYTES) + _END


def subject_session(about: str, key: bytes) -> RowKey:
    """The row that finds a session by whom it is about."""
    return RowKey("retention", subject(about) + key)


def subjects_index() -> tuple[bytes, bytes]:
    """From the first row that finds a session by a subject to behind the last."""
    return _SUBJECT, past(_SUBJECT)


def subject_of(index_key: bytes) -> str | None:
    """The subject by which a row of the index finds; None if it was too long to stand in it."""
    return session_of(session_part(index_key[len(_SUBJECT) :]))


# What belongs to one session, and starts with its key behind the first byte.
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
    """The key of the session that a retention row belongs to; None if it belongs to none.

    InvalidInputError if it is of a kind that this release does not know.
    """
    kind, rest = key[:1], key[1:]
    if kind in _OF_A_SESSION:
        return session_part(rest)
    if kind == _SUBJECT:
        return after_session(rest)
    if kind in _OF_THE_STORE:
        return None
    raise InvalidInputError(f"no row of table retention has a key like {key.hex()}")


def retention_rows(key: bytes) -> list[tuple[bytes, bytes]]:
    """From where to where a session's own rows stand, kind by kind; the subjects' index aside."""
    return [(kind + key, kind + past(key)) for kind in _OF_A_SESSION]


def owner_of(key: bytes) -> str | None:
    """The session that a row belongs to, from its key; None if the key does not hold the id."""
    rest = after_session(key)
    return session_of(key[: len(key) - len(rest)])
