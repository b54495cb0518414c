"""The head row of a session, its only mutable row: the current revision and its manifest.

    head    = revision (8) ‖ created_at (8) ‖ committed_at (8) ‖ manifest (32) ‖ details
    details = [operation, turn, hidden, rewound_to, origin, adopted, long id],
              without the nils at its end

Numbers are big-endian; the engine stamps the times. When a commit moves the head, the
row as it was becomes the history row of its revision, byte for byte.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import PutRow, RowKey, Stamp
from casstore.errors import CorruptionError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import Digest
from casstore.format.hashing import DIGEST_BYTES
from casstore.session.data import Entry, Head, Origin

_FIXED: Final = Struct(">QQQ32s")
_CREATED_AT: Final = 8
_COMMITTED_AT: Final = 16
_STAMPS: Final = (Stamp(_COMMITTED_AT),)
_NEW_STAMPS: Final = (*_STAMPS, Stamp(_CREATED_AT))

COMMIT: Final = "commit"
REWIND: Final = "rewind"
FORK: Final = "fork"
ADOPT: Final = "adopt"
OPERATIONS: Final = (COMMIT, REWIND, FORK, ADOPT)
_DETAILS: Final = 7
_NOTHING_MORE: Final = (None,) * 5


class HeadRow(NamedTuple):
    """The decoded row of a head or an earlier revision."""

    revision: int
    created_at_ms: int
    committed_at_ms: int
    manifest: bytes
    #: The hidden nodes, as a stored map from digest to id; None: no node is hidden.
    hidden: bytes | None
    operation: str
    turn: str | None
    rewound_to: int | None
    origin: Origin | None
    #: The session and revision whose head became this revision.
    adopted: Origin | None
    #: The session's id if its key does not hold it.
    long_id: str | None


def head_key(key: bytes) -> RowKey:
    """The key of a session's head row."""
    return RowKey("heads", key)


def encode_head(row: HeadRow) -> bytes:
    """Encode a head row."""
    _, _, _, _, hidden, operation, turn, rewound_to, origin, adopted, long_id = row
    details: list[Any] = [OPERATIONS.index(operation), turn]
    more = (hidden, rewound_to, origin, adopted, long_id)
    if more != _NOTHING_MORE:
        details += more
    while details[-1] is None:
        details.pop()
    return _FIXED.pack(*row[:4]) + pack_checked(details)


def decode_head(data: bytes) -> HeadRow:
    """Decode a head row; CorruptionError if it is damaged."""
    try:
        revision, created_at_ms, committed_at_ms, manifest = _FIXED.unpack_from(data)
        details = unpack_checked(data[_FIXED.size :])
        details += [None] * (_DETAILS - len(details))
        operation, turn, hidden, rewound_to, origin, adopted, long_id = details
        return HeadRow(
            revision,
            created_at_ms,
            committed_at_ms,
            manifest,
            hidden,
            OPERATIONS[operation],
            turn,
            rewound_to,
            None if origin is None else Origin(*origin),
            None if adopted is None else Origin(*adopted),
            long_id,
        )
    except (ValueError, TypeError, IndexError, struct.error) as exc:
        raise CorruptionError("a head row is damaged") from exc


def manifest_in(data: bytes) -> bytes:
    """The manifest that a head row names, without decoding the rest of the row."""
    return data[_FIXED.size - DIGEST_BYTES : _FIXED.size]


def put_head(key: bytes, row: HeadRow, *, new: bool) -> PutRow:
    """The change that makes ``row`` a session's head, at the engine's time."""
    return PutRow("heads", key, encode_head(row), _NEW_STAMPS if new else _STAMPS)


def written_at(head: HeadRow, put: PutRow, now_ms: int) -> tuple[bytes, HeadRow]:
    """The row of a head that the engine stamped with ``now_ms``, encoded and decoded."""
    value = put.value
    # Engines stamp times before 1970 as 0.
    now_ms = max(0, now_ms)
    time = now_ms.to_bytes(8, "big")
    created_at_ms = head.created_at_ms
    if put.stamps is _NEW_STAMPS:
        created_at_ms = now_ms
        value = value[:_CREATED_AT] + time + value[_COMMITTED_AT:]
    row = value[:_COMMITTED_AT] + time + value[_COMMITTED_AT + 8 :]
    return row, HeadRow(head.revision, created_at_ms, now_ms, *head[3:])


def public_entry(session: str, row: HeadRow, labels: tuple[str, ...]) -> Entry:
    """A revision as callers see it."""
    return Entry(
        session,
        row.revision,
        Digest(row.manifest),
        row.operation,
        row.committed_at_ms,
        row.turn,
        labels,
        row.rewound_to,
        row.adopted,
    )


def public_head(session: str, row: HeadRow, leaf: str | None, node_count: int) -> Head:
    """A head as callers see it."""
    return Head(
        session,
        row.revision,
        Digest(row.manifest),
        leaf,
        node_count,
        row.created_at_ms,
        row.committed_at_ms,
        row.turn,
        row.origin,
    )
