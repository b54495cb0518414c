"""Ids into row keys: unambiguous, in order of the id, never longer than a key may be.

An id is any non-empty text without NUL. Its UTF-8 ends in a zero byte, so that no id is
the prefix of another's rows. An id too long for a key is cut, and the hash of the whole
follows a byte that UTF-8 never holds.
"""

from __future__ import annotations

from typing import Final

from casstore.engine.protocol import RowKey
from casstore.errors import InvalidInputError
from casstore.format.digest import DIGEST_BYTES, plain_hash

_END: Final = b"\0"
_CUT: Final = b"\xff"
# Together with the marks they fit into a row key of 511 bytes.
_SESSION_BYTES: Final = 240
_PART_BYTES: Final = 240
# What an id may have at the most: it is stored in rows and nodes over and over.
MAX_ID_BYTES: Final = 16_384

_LABEL: Final = b"\xff"
# Behind the eight bytes of the lineage itself.
_LINEAGE_KIND_AT: Final = 8
_LINEAGE_ROW: Final = b"\x00"
_LINEAGE_PAGE: Final = b"\x01"
_LINEAGE_ID: Final = b"\x02"
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
    return _fit(id_bytes(session, "a session id"), _SESSION_BYTES) + _END


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


def is_cut(session: str) -> bool:
    """Is this id too long to be read back from its key?"""
    return len(session.encode()) > _SESSION_BYTES


def part(text: str, what: str) -> bytes:
    """The last part of a key: an id below a session."""
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
    start = prefix.encode()[: _PART_BYTES - len(_CUT) - DIGEST_BYTES]
    return start, past(start) if start else None


def lineage_row(lineage: bytes) -> bytes:
    """Where a lineage says what it goes on from."""
    return lineage + _LINEAGE_ROW


def lineage_page(lineage: bytes, page: int) -> bytes:
    """Where the nodes of a lineage are listed in insertion order."""
    return lineage + _LINEAGE_PAGE + page.to_bytes(6, "big")


def lineage_node(lineage: bytes, node_part: bytes) -> bytes:
    """Where a node of a lineage is found by its id."""
    return lineage + _LINEAGE_ID + node_part


def is_lineage_page(nodes_key: bytes) -> bool:
    """Is this key of the node table that of a page?"""
    return nodes_key[_LINEAGE_KIND_AT : _LINEAGE_KIND_AT + 1] == _LINEAGE_PAGE


def is_lineage_node(nodes_key: bytes) -> bool:
    """Is this key of the node table that of a node?"""
    return nodes_key[_LINEAGE_KIND_AT : _LINEAGE_KIND_AT + 1] == _LINEAGE_ID


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
