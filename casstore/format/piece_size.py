"""Refuses objects that hold longer lists and maps than splitting leaves in one piece.

An object of 16 MiB may be 16 million empty lists, which compress to a kilobyte and take more than
a gigabyte when they are decoded. Splitting makes no such object: lists and maps from
CONTAINER_OUTLINE_MIN_BYTES on are outlined, and a piece has at most PIECE_MAX_ENTRIES entries
unless it is short. ``check_piece_size`` checks that for long objects before they are decoded.
"""

from __future__ import annotations

from typing import Final

from casstore.errors import NotCanonicalError
from casstore.format.canonical import CONTAINER_BYTES, cut_some, is_map_piece
from casstore.format.digest import KIND_NAMES, Kind
from casstore.format.limits import (
    NODE_PAYLOAD_MAX_BYTES,
    OUTLINE_MIN_BYTES,
    PIECE_MAX_ENTRIES,
)

# The longest encoding of an entry that is neither a link nor outlined: a text with its header.
_MAX_ENTRY_BYTES: Final = OUTLINE_MIN_BYTES + 2
# No list that splitting leaves in one piece is longer, and no branch but one of a map.
MAX_LIST_BYTES: Final = PIECE_MAX_ENTRIES * _MAX_ENTRY_BYTES + 5
_LISTS: Final = (Kind.ROPE, Kind.CHUNKS, Kind.LIST)
_MAX_FIELDS: Final = 16


def check_piece_size(kind: int, data: bytes) -> None:
    """Raise NotCanonicalError if an object holds longer lists or maps than splitting makes."""
    if len(data) <= MAX_LIST_BYTES or kind == Kind.BLOB:
        return
    if kind in _LISTS or not _is_sound(kind, data):
        raise NotCanonicalError(
            f"a {KIND_NAMES.get(kind, kind)} of {len(data):,} bytes is not split into pieces"
        )


def _is_sound(kind: int, data: bytes) -> bool:
    if kind == Kind.VALUE:
        return is_map_piece(data) and _has_short_entries(cut_some(data, PIECE_MAX_ENTRIES))
    fields = cut_some(data, _MAX_FIELDS)
    if kind == Kind.MAP and fields:
        # Keys may be long, and the last column of a branch is a list of them.
        fields += cut_some(fields.pop(), PIECE_MAX_ENTRIES) or [data]
    return _has_short_entries(fields)


def _has_short_entries(entries: list[bytes] | None) -> bool:
    """True if lists and maps among these entries are as short as splitting leaves them."""
    return entries is not None and not any(
        len(entry) > NODE_PAYLOAD_MAX_BYTES and entry[0] in CONTAINER_BYTES for entry in entries
    )
