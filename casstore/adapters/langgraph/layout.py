"""Checkpoints as stored values: what a checkpoint, a channel and a pending write look like.

A checkpoint is a value:

    v, id, ts        as LangGraph gives them
    channels         [name, version, value?] each; a long value is a link to it
    seen             versions_seen, with versions spelled as in channels
    more             whatever other fields the checkpoint has
    meta             its metadata

A version that this saver gave is stored as its number, any other in a list of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError

# As in LangGraph's own savers, so that threads move between them; their random end, which tells
# blobs of equal versions apart, is zero here: blobs are found by content.
_VERSION: Final = re.compile(r"(\d{32})\.0{16}")
_ENDING: Final = "." + "0" * 16
_WRITE_TYPES: Final = (str, str, int, str)
_FIELDS: Final = ("v", "id", "ts", "channel_values", "channel_versions", "versions_seen")


class Place(NamedTuple):
    """Where a checkpoint is found."""

    thread: str
    namespace: str
    checkpoint: str


class Channel(NamedTuple):
    """A channel of a stored checkpoint: its version as stored, and its value or a link to it."""

    version: Any
    has_value: bool
    value: Any


class PendingRow(NamedTuple):
    """One pending write, its value in stored form."""

    task: str
    path: str
    slot: int
    channel: str
    value: Any


def version_text(number: int) -> str:
    """The version that this saver gives in the ``number``-th place."""
    return f"{number:032}{_ENDING}"


def pack_version(version: Any) -> Any:
    """A version as it is stored."""
    if type(version) is str and (found := _VERSION.fullmatch(version)):
        return int(found[1])
    return [version]


def unpack_version(stored: Any) -> Any:
    """The version of a stored one."""
    if type(stored) is int:
        return version_text(stored)
    if type(stored) is list and len(stored) == 1 and type(stored[0]) in (str, int, float):
        return stored[0]
    raise CorruptionError("a stored channel version is damaged")


def pack_seen(seen: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """``versions_seen`` as it is stored."""
    return [
        [node, [[name, pack_version(version)] for name, version in versions.items()]]
        for node, versions in seen.items()
    ]


def pack_checkpoint(
    checkpoint: Mapping[str, Any], channels: Mapping[str, Channel], more: Any, meta: Any
) -> dict[str, Any]:
    """A checkpoint as it is stored; ``more`` and ``meta`` in stored form already."""
    return {
        "v": checkpoint.get("v"),
        "id": checkpoint["id"],
        "ts": checkpoint.get("ts"),
        "channels": [
            [name, each.version, each.value] if each.has_value else [name, each.version]
            for name, each in channels.items()
        ],
        "seen": pack_seen(checkpoint.get("versions_seen") or {}),
        "more": more,
        "meta": meta,
    }


def other_fields(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checkpoint that have no place of their own."""
    return {name: value for name, value in checkpoint.items() if name not in _FIELDS}


def unpack_channels(stored: Any) -> dict[str, Channel]:
    """The channels of a stored checkpoint."""
    channels: dict[str, Channel] = {}
    try:
        for name, version, *value in stored["channels"]:
            channels[name] = Channel(version, bool(value), value[0] if value else None)
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptionError("a stored checkpoint is damaged") from exc
    return channels


def unpack_seen(stored: Any) -> dict[str, dict[str, Any]]:
    """``versions_seen`` of a stored checkpoint."""
    try:
        return {
            node: {name: unpack_version(version) for name, version in versions}
            for node, versions in stored["seen"]
        }
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptionError("a stored checkpoint is damaged") from exc


def pack_writes(writes: Iterable[PendingRow]) -> list[Any]:
    """Pending writes of several tasks as they are folded into a checkpoint's row."""
    return [list(each) for each in writes]


def unpack_writes(stored: Any) -> list[PendingRow]:
    """Pending writes that were folded into a checkpoint's row."""
    try:
        return [_checked(PendingRow(*each)) for each in stored]
    except TypeError as exc:
        raise CorruptionError("a stored pending write is damaged") from exc


def _checked(write: PendingRow) -> PendingRow:
    if (type(write.task), type(write.path), type(write.slot), type(write.channel)) != _WRITE_TYPES:
        raise TypeError(write)
    return write


def pack_task(writes: Iterable[PendingRow]) -> list[Any]:
    """The pending writes of one task as its row holds them."""
    return [list(each[1:]) for each in writes]


def unpack_task(task: str, stored: Any) -> list[PendingRow]:
    """The pending writes of one task's row."""
    try:
        return [_checked(PendingRow(task, *each)) for each in stored]
    except TypeError as exc:
        raise CorruptionError("a stored pending write is damaged") from exc
