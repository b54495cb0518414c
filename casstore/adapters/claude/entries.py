"""Entries of a transcript in stored form: who it is, apart from what it says.

A fork of a session gives every entry a new id, a new parent and the new session, and leaves the
rest. So an entry is kept as a short **head**, which holds all that forking changes, and a
**body**, which is stored once however many forks there are:

    head    {one letter: value} of the fields in ``_HEAD_FIELDS``, absent ones left out
    body    all other fields

Ids that are UUIDs stand as their 16 bytes. In a head, true stands for what is known from
elsewhere: as parent, the entry before; as session, the transcript's own; as the session that was
forked from, that of the entry before.
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

# What the SDK writes anew, or takes away, when it forks.
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
# Shorter bodies than this cost less where they stand than a link to them.
_BODY_LEAST_BYTES: Final = 96
# Heads, and short bodies, stand in two lists of a map: the row.
_MAX_DEPTH: Final = MAX_DEPTH - 2


class Packed(NamedTuple):
    """Entries as a row holds them."""

    heads: list[Any]
    bodies: list[Any]


def entry_id(entry: dict[str, Any]) -> Any:
    """The id by which an entry is told apart, as it is stored; None if it has none."""
    found = entry.get(_UUID)
    if type(found) is not str:
        return None
    try:
        found.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair cannot be stored as text.
        return found.encode("utf-8", "surrogatepass")
    return _short_id(found)


def head_id(head: Any) -> Any:
    """The same, of a stored head."""
    found = head.get("u") if type(head) is dict else None
    # In a list: a field of that name which is no text, and tells nothing apart.
    return found if type(found) in (str, bytes) else None


def pack(draft: Draft, session: str, entries: Iterable[dict[str, Any]]) -> Packed:
    """Store the bodies of entries; their heads, and links to the bodies."""
    packed = Packed([], [])
    before: dict[str, Any] = {}
    for entry in entries:
        head, body = _split(entry, session, before)
        try:
            kept = draft.keep_long(body, least_bytes=_BODY_LEAST_BYTES, max_depth=_MAX_DEPTH)
            draft.keep_long(head, max_depth=_MAX_DEPTH)
        except ExpansionError:
            # Its text would be as large.
            raise
        except InvalidValueError:
            # The whole entry as its text; of the head only what finds it again.
            own = entry_id(entry)
            head = {} if own is None else {"u": own}
            kept = draft.keep_long(as_text(entry), least_bytes=_BODY_LEAST_BYTES)
        packed.heads.append(head)
        packed.bodies.append(kept)
        before = entry
    return packed


def unpack(session: str, heads: Sequence[Any], bodies: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The entries again; ``bodies`` are the values themselves, no links."""
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
    """The entries, if they are such."""
    if type(entries) is not list or not all(type(entry) is dict for entry in entries):
        raise InvalidInputError("entries of a transcript are a list of dict")
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
            raise CorruptionError("an entry of a transcript has a field of a newer kind")
        if name == _FORKED:
            entry[name] = _join_origin(value, before.get(_FORKED))
        elif value is True:
            entry[name] = before.get(_UUID) if name == _PARENT else session
        else:
            entry[name] = value[0] if type(value) is list else _long_id(value)
    return entry


def _split_origin(value: Any, before: Any) -> Any:
    """A pair of session and message, or in a list of one whatever else it is."""
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
    """A UUID in its usual spelling as bytes, any other text as it is."""
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
