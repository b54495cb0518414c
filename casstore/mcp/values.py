"""Stored values as JSON data of bounded size, in pages.

A value within the limit is returned whole. Of a longer one the beginning is returned, marked as
incomplete; ``page`` reads on in a text, a list or a map. Bytes are ``{"$bytes": base64}``, or
``{"$size_bytes": n}`` if they are long, and links ``{"$link": digest}``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.format.canonical import Link
from casstore.objects import stored
from casstore.objects.stored import BytesBeginning, Stored

#: About how many characters an answer may have at most.
MAX_CHARACTERS: Final = 50_000
# The JSON around a value: quotes or brackets, and a comma.
_AROUND: Final = 3
_SHORT_BYTES: Final = 256


class Bounded(NamedTuple):
    """The beginning of a value, or a page of it."""

    value: Any
    #: True: the value, or an entry in it, continues.
    is_cut: bool
    characters: int
    #: Where the next page begins; None if this is the last.
    next_offset: int | None = None


def begin(value: Stored | None, characters: int) -> Bounded:
    """A value, shortened to about ``characters`` characters of JSON."""
    if value is None:
        return Bounded(None, False, _AROUND)
    builder = _PlainBuilder(characters)
    built = builder.build(value)
    return Bounded(built, builder.is_cut, characters - builder.left)


def page(value: Stored | None, offset: int, characters: int) -> Bounded:
    """The part of a value that begins at ``offset``: a character of a text, or an entry of a list
    or map.
    """
    if value is None:
        return Bounded(None, False, _AROUND)
    entry_count = value.entry_count()
    if entry_count is None:
        return _page_of_text(value, offset, characters)
    is_map = value.is_map()
    built: Any = {} if is_map else []
    left, at, is_cut = characters, offset, False
    for step, entry in islice(value.entries(), offset, None):
        if left <= 0 and at > offset:
            break
        begun = begin(entry, max(left, _AROUND))
        # An entry that would be cut begins the next page, unless it is the first of this one.
        if begun.is_cut and at > offset:
            break
        is_cut = is_cut or begun.is_cut
        left -= begun.characters + (len(str(step)) if is_map else 0)
        if is_map:
            built[step] = begun.value
        else:
            built.append(begun.value)
        at += 1
    more = at < entry_count
    return Bounded(built, is_cut or more, characters - left, at if more else None)


def _page_of_text(value: Stored, offset: int, characters: int) -> Bounded:
    events = value.events()
    first = next(events)
    parts: Iterator[str]
    if first.kind == stored.TEXT:
        parts = (event.value for event in events if event.kind == stored.PART)
    elif type(first.value) is str:
        parts = iter((first.value,))
    else:
        return begin(value, characters)
    found, skipped, is_cut = "", 0, False
    for part in parts:
        start = max(0, offset - skipped)
        skipped += len(part)
        found += part[start : start + characters + 1 - len(found)]
        if len(found) > characters:
            found, is_cut = found[:characters], True
            break
    return Bounded(found, is_cut, len(found) + _AROUND, offset + len(found) if is_cut else None)


class _PlainBuilder:
    """Builds a plain value from a stored one, until ``characters`` are used up."""

    def __init__(self, characters: int) -> None:
        self.left = characters
        self.is_cut = False

    def build(self, value: Stored) -> Any:
        self.left -= _AROUND
        if value.entry_count() is None:
            return self._scalar(value.beginning(max(self.left, 0) + 1))
        is_map = value.is_map()
        made: Any = {} if is_map else []
        for step, entry in value.entries():
            if self.left <= 0:
                self.is_cut = True
                break
            if is_map:
                self.left -= len(str(step))
                made[step] = self.build(entry)
            else:
                made.append(self.build(entry))
        return made

    def _scalar(self, value: Any) -> Any:
        if type(value) is str:
            cut = value[: max(self.left, 0)]
            self.is_cut = self.is_cut or len(cut) < len(value)
            self.left -= len(cut)
            return cut
        if isinstance(value, bytes):
            size_bytes = value.size_bytes if isinstance(value, BytesBeginning) else len(value)
            if size_bytes > len(value) or size_bytes > _SHORT_BYTES:
                return {"$size_bytes": size_bytes}
            self.left -= size_bytes
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Link):
            self.left -= 2 * len(value.digest)
            return {"$link": value.digest.hex()}
        return value
