"""Marks: rows that change when something new keeps a revision, a session or an object.

    mark = marked_at (8) ‖ random (8)

A retention plan lists revisions to remove, and may be executed days later. A label, fork,
protection or pin created in between has a key that the plan cannot know, so the removal cannot have
a condition on it. Instead, each operation that creates one for an earlier revision writes the mark
of that revision (for a pin, of the object) in the same write. The removal requires that the mark
has not changed since the plan was made. The head needs no mark: no plan removes it.
"""

from __future__ import annotations

import secrets
from typing import Final

from casstore.engine.protocol import PutRow, RowKey, Stamp
from casstore.errors import CorruptionError
from casstore.session import keys

_TIME_BYTES: Final = 8
_RANDOM_BYTES: Final = 8


def put_mark(key: bytes, revision: int) -> PutRow:
    """The change that writes a new mark of a revision (0: of the session)."""
    return _put(keys.mark(key, revision))


def put_pin_mark(digest: bytes) -> PutRow:
    """The change that writes a new mark of a pinned object."""
    return _put(keys.pin_mark(digest))


def _put(row_key: RowKey) -> PutRow:
    value = bytes(_TIME_BYTES) + secrets.token_bytes(_RANDOM_BYTES)
    return PutRow(*row_key, value, (Stamp(0),))


def marked_at_ms(row: bytes) -> int:
    """When a mark was written, from its row."""
    if len(row) != _TIME_BYTES + _RANDOM_BYTES:
        raise CorruptionError("a mark is damaged")
    return int.from_bytes(row[:_TIME_BYTES], "big")
