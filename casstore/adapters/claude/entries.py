"""The stored form of transcript entries: a head that forks change, and a shared body.

A fork of a session gives every entry a new id, a new parent and the new session, and changes
nothing else. So an entry is stored as a short **head**, with the fields that a fork changes, and a
**body**, which all forks share:

    head    {one letter: value} of the fields in ``_HEAD_FIELDS``, without absent ones
    body    all other fields

Ids that are UUIDs are stored as 16 bytes. In a head, true is a default: as the parent, the previous
entry; as the session, that of the transcript; as the session forked from, that of the previous
entry.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import (
    CorruptionError,
    ExpansionError,
    InvalidInputError,
    InvalidValueError,
)
from casstore.format.limits import MAX_DEPTH
from casstore.records.json_values import as_text, restored
from casstore.session.records import Draft

_UUID: Final = "uuid"
_PARENT: Final = "parentUuid"
_SESSION: Final = "sessionId"
_FORKED: Final = "forkedFrom"
_FORKED_FIELDS: Final = ("sessionId", "messageUuid")

# Fields that the SDK rewrites or removes when it forks.
_HEAD_FIELDS: Final = {
    _UUID: "u",
    _PARENT: "p",
    _SESSION: "s",
    _FORKED: "f",
    "logicalParentUuid": "l",
    "isSidechain": "c",
    "teamName": "t",
    "agentName": "a",
    "slug": "g",
    "sourceToolAssistantUUID": "o",
}
_FIELD_OF: Final = {letter: name for name, letter in _HEAD_FIELDS.items()}
# Inlining a body shorter than this costs less than a link to it.
_BODY_LEAST_BYTES: Final = 96
# Heads and short bodies are stored in the row, in lists in a map, which are two levels.
_MAX_DEPTH: Final = MAX_DEPTH - 2


class Packed(NamedTuple):
    """The stored form of entries in a row."""

    heads: list[Any]
    bodies: list[Any]


def entry_id(entry: dict[str, Any]) -> Any:
    """The id of an entry in stored form; None if it has no id."""
    found = entry.get(_UUID)
    if type(found) is not str:
        return None
    try:
        found.encode()
    except UnicodeEncodeError:
        # A lone surrogate cannot be stored as text.
        return found.encode("utf-8", "surrogatepass")
    return _short_id(found)


def head_id(head: Any) -> Any:
    """As ``entry_id``, for a stored head."""
    found = head.get("u") if type(head) is dict else None
    # A list wraps a field of this name that is not a str, so it cannot identify the entry.
    return found if type(found) in (str, bytes) else None


def pack(draft: Draft, session: str, entries: Iterable[dict[str, Any]]) -> Packed:
    """Add the bodies of entries to a write; returns the heads, and the bodies or links to them."""
    packed = Packed([], [])
    before: dict[str, Any] = {}
    for entry in entries:
        head, body = _split(entry, session, before)
        try:
            kept = draft.keep_long(body, least_bytes=_BODY_LEAST_BYTES, max_depth=_MAX_DEPTH)
            draft.keep_long(head, max_depth=_MAX_DEPTH)
        except ExpansionError:
            # The text form would be just as large.
            raise
        except InvalidValueError:
            # Store the whole entry as its text; the head only has the id.
            own = entry_id(entry)
            head = {} if own is None else {"u": own}
            kept = draft.keep_long(as_text(entry), least_bytes=_BODY_LEAST_BYTES)
        packed.heads.append(head)
        packed.bodies.append(kept)
        before = entry
    return packed


def unpack(session: str, heads: Sequence[Any], bodies: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Decode entries; ``bodies`` are the values themselves, not links."""
    before: dict[str, Any] = {}
    for head, body in zip(heads, bodies, strict=True):
        if type(head) is not dict or type(body) is not dict:
            raise CorruptionError("an entry of a transcript is damaged")
        entry = restored(body)
        if entry is body:
            entry = {**_join(head, session, before), **body}
        yield entry
        before = entry


def check_entries(entries: Any) -> list[dict[str, Any]]:
    """Return the entries; InvalidInputError unless they are a list of dicts."""
    if type(entries) is not list or not all(type(entry) is dict for entry in entries):
        raise InvalidInputError("entries must be a list of dicts")
    return entries


def _split(
    entry: dict[str, Any], session: str, before: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    head: dict[str, Any] = {}
    body: dict[str, Any] = {}
    known = {_PARENT: before.get(_UUID), _SESSION: session}
    for name, value in entry.items():
        letter = _HEAD_FIELDS.get(name)
        if letter is None:
            body[name] = value
        elif type(value) is str and value == known.get(name):
            head[letter] = True
        elif name == _FORKED:
            head[letter] = _split_origin(value, before.get(_FORKED))
        else:
            head[letter] = _short_id(value) if type(value) is str else [value]
    return head, body


def _join(head: dict[str, Any], session: str, before: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for letter, value in head.items():
        name = _FIELD_OF.get(letter)
        if name is None:
            raise CorruptionError(
                f"an entry of a transcript has the field {letter!r:.20}, unknown to this release"
            )
        if name == _FORKED:
            entry[name] = _join_origin(value, before.get(_FORKED))
        elif value is True:
            entry[name] = before.get(_UUID) if name == _PARENT else session
        else:
            entry[name] = value[0] if type(value) is list else _long_id(value)
    return entry


def _split_origin(value: Any, before: Any) -> Any:
    """The stored form of ``forkedFrom``: session and message; any other value in a list of one."""
    if type(value) is not dict or set(value) != set(_FORKED_FIELDS):
        return [value]
    session, message = (value[name] for name in _FORKED_FIELDS)
    if type(session) is not str or type(message) is not str:
        return [value]
    known = type(before) is dict and before.get("sessionId") == session
    return [True if known else _short_id(session), _short_id(message)]


def _join_origin(value: list[Any], before: Any) -> Any:
    if len(value) == 1:
        return value[0]
    session, message = value
    found = before["sessionId"] if session is True else _long_id(session)
    return dict(zip(_FORKED_FIELDS, (found, _long_id(message)), strict=True))


def _short_id(text: str) -> str | bytes:
    """A UUID in canonical form as bytes; any other text unchanged."""
    if len(text) == 36:
        try:
            found = uuid.UUID(text)
        except ValueError:
            return text
        if str(found) == text:
            return found.bytes
    return text


def _long_id(value: Any) -> str:
    if type(value) is bytes and len(value) == 16:
        return str(uuid.UUID(bytes=value))
    if type(value) is str:
        return value
    raise CorruptionError("an id in a transcript is damaged")
