"""Decodes serialised state without rebuilding any object in it.

LangGraph's bytes name types inside msgpack extensions. Here an extension stays a number and bytes.
So state can move from one saver to another where its types are not installed, and nothing that it
names is imported.
"""

from __future__ import annotations

from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.jsonplus import EXT_DELTA_SNAPSHOT
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from casstore.errors import CorruptionError, InvalidInputError, UnsafePayloadError

_OPTION = ormsgpack.OPT_NON_STR_KEYS


class Raw:
    """An object in its serialised form."""

    __slots__ = ("code", "data")

    def __init__(self, code: int, data: bytes) -> None:
        self.code = code
        self.data = data


def load_raw(data: tuple[str, bytes]) -> Any:
    """Decode tag and bytes; objects stay in their serialised form."""
    tag, payload = data
    if tag == "null":
        return None
    if tag in ("bytes", "bytearray"):
        return bytes(payload) if tag == "bytes" else bytearray(payload)
    if tag != "msgpack":
        raise UnsafePayloadError(repr(tag), "state in this codec is read only by running its code")
    try:
        return ormsgpack.unpackb(payload, ext_hook=Raw, option=_OPTION)
    except ormsgpack.MsgpackDecodeError as exc:
        raise CorruptionError(f"serialised state is damaged: {exc}") from exc


def dump_raw(value: Any) -> tuple[str, bytes]:
    """Encode what ``load_raw`` returned, to the bytes of LangGraph's serialiser for the value."""
    if value is None:
        return "null", b""
    if type(value) is bytes:
        return "bytes", value
    if type(value) is bytearray:
        return "bytearray", bytes(value)
    return "msgpack", pack_raw(value)


def pack_raw(value: Any) -> bytes:
    """The msgpack of what ``load_raw`` returned; equal values have equal bytes, also with NaN.

    InvalidInputError if it cannot be encoded: JSON may hold numbers beyond 64 bits.
    """
    try:
        return ormsgpack.packb(value, default=_encode, option=_OPTION)
    except ormsgpack.MsgpackEncodeError as exc:
        raise InvalidInputError(f"LangGraph's serialiser cannot encode this state: {exc}") from exc


def pack_form(form: Any) -> bytes:
    """The bytes of a stored form (``encoding``) with sorted keys, to compare it with another.

    Unlike ==, this distinguishes 1, 1.0 and True.
    """
    return ormsgpack.packb(form, option=ormsgpack.OPT_SORT_KEYS)


def open_snapshot(value: Any) -> Any:
    """Decode a delta snapshot that is a channel's whole value; any other value is unchanged."""
    if type(value) is Raw and value.code == EXT_DELTA_SNAPSHOT:
        return _DeltaSnapshot(load_raw(("msgpack", value.data)))
    return value


def _encode(value: Any) -> Any:
    if type(value) is Raw:
        return ormsgpack.Ext(value.code, value.data)
    if type(value) is _DeltaSnapshot:
        return ormsgpack.Ext(EXT_DELTA_SNAPSHOT, pack_raw(value.value))
    raise TypeError(f"{type(value).__name__} cannot be encoded")
