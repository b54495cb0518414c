"""Checkpoints as stored values: what a checkpoint, a channel and a pending write look like.

A checkpoint is a value:

    v, id, ts        as LangGraph gives them
    channels         [name, version, value?] each; a long value is a link to it
    seen             versions_seen, with versions encoded as in channels
    more             whatever other fields the checkpoint has
    meta             its metadata

A version issued by this saver is stored as its number, any other in a list of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import get_checkpoint_id

from casstore.errors import CorruptionError, InvalidInputError, InvalidValueError
from casstore.format.canonical import ROLE_LINK, ROLE_PART, Link, key_bytes, link_bytes
from casstore.format.digest import Digest
from casstore.format.limits import MAX_DEPTH
from casstore.format.splitting import (
    Emit,
    Encoded,
    EncodedEntry,
    ExpansionGuard,
    encode_split,
    list_entry,
    pack_list,
    pack_map,
    root_object,
)
from casstore.records.schema import Schema
from casstore.session.records import Record

# The same format as LangGraph's own savers, so that threads can move between them. Their random
# suffix, which distinguishes blobs of equal versions, is zero here: blobs are content-addressed.
_VERSION: Final = re.compile(r"([0-9]{32})\.0{16}")
_VERSION_TYPES: Final = (str, int, float)
_ENDING: Final = "." + "0" * 16
_FIELDS: Final = ("v", "id", "ts", "channel_values", "channel_versions", "versions_seen")
# The fields of the stored value in canonical order.
_KEYS: Final = {
    name: key_bytes(name) for name in ("channels", "id", "meta", "more", "seen", "ts", "v")
}
_PART: Final = link_bytes(ROLE_PART, b"")
# A channel is a list in a list in the map of its checkpoint.
_CHANNEL_DEPTH: Final = MAX_DEPTH - 2


class CheckpointKey(NamedTuple):
    """The key of a checkpoint."""

    thread: str
    namespace: str
    checkpoint: str


class Channel(NamedTuple):
    """A channel of a stored checkpoint: its version as stored, and its value or a link to it."""

    version: Any
    has_value: bool
    value: Any
    #: The digest of a long value, the encoding of a short one: equal keys are equal values. None if
    #: there is no value, or a short one was read.
    key: bytes | None = None
    #: The channel as its checkpoint holds it; None if it must be encoded with the checkpoint.
    encoded: Encoded | None = None


class PendingRow(NamedTuple):
    """One pending write, its value in stored form."""

    task: str
    path: str
    slot: int
    channel: str
    value: Any


# --- configs --------------------------------------------------------------------------------------


def config_parts(config: RunnableConfig) -> tuple[str, str, str | None]:
    """Thread, namespace and checkpoint id that a config names."""
    names = config.get("configurable") or {}
    if names.get("thread_id") is None:
        raise InvalidInputError('the config names no thread: {"configurable": {"thread_id": …}}')
    checkpoint = get_checkpoint_id(config)
    namespace = names.get("checkpoint_ns")
    return (
        str(names["thread_id"]),
        "" if namespace is None else str(namespace),
        str(checkpoint) if checkpoint else None,
    )


def config_of(place: CheckpointKey) -> RunnableConfig:
    """The config that names a checkpoint."""
    return {
        "configurable": {
            "thread_id": place.thread,
            "checkpoint_ns": place.namespace,
            "checkpoint_id": place.checkpoint,
        }
    }


# --- values ---------------------------------------------------------------------------------------


def version_text(number: int) -> str:
    """The ``number``-th version that this saver issues."""
    return f"{number:032}{_ENDING}"


def pack_version(version: Any) -> Any:
    """A version as it is stored; InvalidInputError if it could not be read back."""
    if type(version) not in _VERSION_TYPES:
        raise InvalidInputError(
            f"the version of a channel must be a str, int or float, got {version!r:.60}"
        )
    number = _version_number(version) if type(version) is str else None
    return [version] if number is None else number


@lru_cache(maxsize=1024)
def _version_number(version: str) -> int | None:
    """The number of a version that this saver has issued."""
    found = _VERSION.fullmatch(version)
    return None if found is None else int(found[1])


def unpack_version(stored: Any) -> Any:
    """The version that ``pack_version`` has encoded."""
    if type(stored) is int:
        return version_text(stored)
    if type(stored) is list and len(stored) == 1 and type(stored[0]) in (str, int, float):
        return stored[0]
    raise CorruptionError("a stored channel version is damaged")


def pack_channel(
    name: str, version: Any, emit: Emit, value: tuple[Any, Encoded] | None = None
) -> Channel:
    """A channel to be stored: its version in stored form, and the stored form of its value."""
    entries = [list_entry(encode_split(each, _CHANNEL_DEPTH - 1, emit)) for each in (name, version)]
    if value is None:
        return Channel(version, False, None, None, pack_list(entries, emit))
    form, encoded = value
    key = encoded.data
    if encoded.outlined is not None:
        key = encoded.outlined
        form = Link(Digest(key))
        encoded = Encoded(link_bytes(ROLE_LINK, key), [key])
    elif _PART in key:
        # The value has parts that other channels may repeat. So it is encoded with the whole
        # checkpoint, where the memory that repeated parts take is measured.
        return Channel(version, True, form, key)
    return Channel(version, True, form, key, pack_list([*entries, list_entry(encoded)], emit))


def pack_fields(checkpoint: Mapping[str, Any], more: Any, meta: Any) -> dict[str, Any]:
    """A checkpoint as it is stored, without channels; ``more`` and ``meta`` in stored form."""
    return {
        "v": checkpoint.get("v"),
        "id": checkpoint["id"],
        "ts": checkpoint.get("ts"),
        "seen": [
            [node, [[name, pack_version(version)] for name, version in versions.items()]]
            for node, versions in (checkpoint.get("versions_seen") or {}).items()
        ],
        "more": more,
        "meta": meta,
    }


def keep_checkpoint(fields: Mapping[str, Any], channels: Mapping[str, Channel], emit: Emit) -> Link:
    """Store a checkpoint with ``emit``; returns a link to it."""
    guard = ExpansionGuard(emit)
    links: list[bytes] = []
    packed: list[EncodedEntry] = []
    for name, each in channels.items():
        encoded = each.encoded
        if encoded is None:
            triple = [name, each.version, each.value] if each.has_value else [name, each.version]
            encoded = encode_split(triple, _CHANNEL_DEPTH, guard.emit, {})
            links += encoded.links
        packed.append(list_entry(encoded))
    entries: list[EncodedEntry] = []
    for name, key in _KEYS.items():
        if name == "channels":
            encoded = pack_list(packed, emit)
        else:
            try:
                encoded = encode_split(fields[name], MAX_DEPTH - 1, guard.emit, {})
            except InvalidValueError as exc:
                raise exc.within(name) from exc.__cause__
            links += encoded.links
        data = key + encoded.data
        entries.append(EncodedEntry(data, encoded.links, len(data), name))
    digest = root_object(pack_map(entries, emit), emit)
    guard.require_bounded(links)
    return Link(Digest(digest))


def other_fields(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checkpoint without a field of their own in the stored form."""
    return {name: value for name, value in checkpoint.items() if name not in _FIELDS}


def unpack_channels(stored: Any) -> dict[str, Channel]:
    """The channels of a stored checkpoint."""
    channels: dict[str, Channel] = {}
    try:
        for name, version, *value in stored["channels"]:
            [found] = value or [None]
            key = bytes(found.digest) if type(found) is Link else None
            channels[name] = Channel(version, bool(value), found, key)
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptionError("a stored checkpoint is damaged") from exc
    return channels


def unpack_versions(channels: Mapping[str, Channel]) -> dict[str, Any]:
    """The versions of the channels that have one."""
    return {
        name: unpack_version(each.version)
        for name, each in channels.items()
        if each.version is not None
    }


def unpack_seen(stored: Any) -> dict[str, dict[str, Any]]:
    """``versions_seen`` of a stored checkpoint."""
    try:
        return {
            node: {name: unpack_version(version) for name, version in versions}
            for node, versions in stored["seen"]
        }
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptionError("a stored checkpoint is damaged") from exc


# --- rows -----------------------------------------------------------------------------------------


class CheckpointRow(NamedTuple):
    """The row of a checkpoint."""

    place: CheckpointKey
    link: Link
    parent: str | None = None
    run: str | None = None
    #: Writes of tasks that have no row of their own: those of a copied checkpoint.
    folded_writes: tuple[PendingRow, ...] = ()
    #: What delta channels need of deleted ancestors (``threads``), by channel: [writes, seed?].
    folded_history: Mapping[str, list[Any]] = MappingProxyType({})
    record: Record | None = None


class TaskWrite(NamedTuple):
    """One pending write of a task, its value in stored form."""

    path: str
    slot: int
    channel: str
    value: Any


class TaskRow(NamedTuple):
    """The pending writes of a task."""

    thread: str
    namespace: str
    checkpoint: str
    task: str
    writes: tuple[TaskWrite, ...]

    @staticmethod
    def of(place: CheckpointKey, task: str, writes: Iterable[PendingRow]) -> TaskRow:
        """The row of a task."""
        return TaskRow(*place, task, tuple([TaskWrite(*each[1:]) for each in writes]))

    def pending(self) -> list[PendingRow]:
        """The writes, each with its task."""
        return [PendingRow(self.task, *each) for each in self.writes]


class HeadRow(NamedTuple):
    """The checkpoint that was put last in a namespace."""

    thread: str
    namespace: str
    checkpoint: str


CHECKPOINTS: Final = Schema("lg.checkpoints", CheckpointRow, 3)
TASKS: Final = Schema("lg.writes", TaskRow, 4)
HEADS: Final = Schema("lg.heads", HeadRow, 2)
