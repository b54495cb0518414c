"""Serialised state taken apart without rebuilding any object in it.

LangGraph's bytes name types inside msgpack extensions. Read like this, an extension stays what
it is, a number and bytes; so state moves from one saver to another although nobody
here has its types, and nothing that it names is imported.
"""

from __future__ import annotations

from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.jsonplus import EXT_DELTA_SNAPSHOT
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from casstore.errors import CorruptionError, InvalidInputError, UnsafePayloadError

_OPTION = ormsgpack.OPT_NON_STR_KEYS


class Raw:
    """An object as it is spelled."""

    __slots__ = ("code", "data")

    def __init__(self, code: int, data: bytes) -> None:
        self.code = code
        self.data = data


def load_raw(data: tuple[str, bytes]) -> Any:
    """The value of tag and bytes, its objects left as they are spelled."""
    tag, payload = data
    if tag == "null":
        return None
    if tag in ("bytes", "bytearray"):
        return bytes(payload) if tag == "bytes" else bytearray(payload)
    if tag != "msgpack":
        raise UnsafePayloadError(repr(tag), "state in this codec cannot be read without running it")
    try:
        return ormsgpack.unpackb(payload, ext_hook=Raw, option=_OPTION)
    except ormsgpack.MsgpackDecodeError as exc:
        raise CorruptionError(f"serialised state is damaged: {exc}") from exc


def dump_raw(value: Any) -> tuple[str, bytes]:
    """Tag and bytes of such a value: those that LangGraph's serialiser gives for the real one."""
    if value is None:
        return "null", b""
    if type(value) is bytes:
        return "bytes", value
    if type(value) is bytearray:
        return "bytearray", bytes(value)
    return "msgpack", pack_raw(value)


def pack_raw(value: Any) -> bytes:
    """The bytes of such a value; equal values have equal bytes, not-a-number included.

    InvalidInputError if it has none: a number beyond 64 bits, which JSON can hold.
    """
    try:
        return ormsgpack.packb(value, default=_spell, option=_OPTION)
    except ormsgpack.MsgpackEncodeError as exc:
        raise InvalidInputError(f"state that LangGraph's serialiser cannot spell: {exc}") from exc


def pack_form(form: Any) -> bytes:
    """The bytes of a stored form (``encoding``), however its keys are ordered; equal if they are.

    More is equal to Python: 1, 1.0 and True.
    """
    return ormsgpack.packb(form, option=ormsgpack.OPT_SORT_KEYS)


def open_snapshot(value: Any) -> Any:
    """A delta snapshot that is a channel's whole value, opened; anything else as it is."""
    if type(value) is Raw and value.code == EXT_DELTA_SNAPSHOT:
        return _DeltaSnapshot(load_raw(("msgpack", value.data)))
    return value


def _spell(value: Any) -> Any:
    if type(value) is Raw:
        return ormsgpack.Ext(value.code, value.data)
    if type(value) is _DeltaSnapshot:
        return ormsgpack.Ext(EXT_DELTA_SNAPSHOT, pack_raw(value.value))
    raise TypeError(f"{type(value).__name__} has no spelling")
