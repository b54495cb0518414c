"""Signs for a plan that is carried out later: this came to be used.

    mark = marked_at (8) ‖ random (8)

A retention plan says which revisions go, and is carried out minutes or days later. A write
has conditions on rows it can name, and nobody can name the label, fork, protection or pin
that somebody makes in between. So whoever makes one for an earlier revision also writes
the mark of that revision (or of the object, for a pin) in the same write, and a removal
stands under the condition that the mark is as it was planned. The head needs no marks: it
is never in a plan.
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
    """The change that tells that somebody uses a revision (0: the session) from now on."""
    return _put(keys.mark(key, revision))


def put_pin_mark(digest: bytes) -> PutRow:
    """The change that tells that somebody pins an object from now on."""
    return _put(keys.pin_mark(digest))


def _put(place: RowKey) -> PutRow:
    value = bytes(_TIME_BYTES) + secrets.token_bytes(_RANDOM_BYTES)
    return PutRow(*place, value, (Stamp(0),))


def marked_at_ms(row: bytes) -> int:
    """When a mark was made."""
    if len(row) != _TIME_BYTES + _RANDOM_BYTES:
        raise CorruptionError("a mark is damaged")
    return int.from_bytes(row[:_TIME_BYTES], "big")
