"""Encodes the state of a graph as stored values, element by element, and decodes it.

None, bool, int, float and str are stored unchanged if a store can hold them, and lists as lists.
Everything else has one of four forms:

    {"d": [key, value, key, value …]}   a dict with text keys, in its own order
    {"s": value}                        a delta snapshot
    {"t": tag, "b": bytes}              any other object, as encoded by the serialiser
    bytes                               the same, if the tag is "msgpack" and the bytes are long

Most messages have the last form: bytes alone are one object, not a map and its content.

Equal messages therefore have equal bytes and are stored once. Decoding runs only the code of the
serialiser, on the bytes of one element at a time.

LangGraph's bytes name types inside msgpack extensions. With ``load_raw`` and ``dump_raw`` in place
of a serialiser an extension stays a number and bytes (``Raw``). So state can be shown, and moved
from one saver to another, where its types are not installed, and nothing that it names is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, Final

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import EXT_DELTA_SNAPSHOT, JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from casstore.adapters.langgraph.serializer import StrictSerializer
from casstore.errors import CorruptionError, InvalidInputError, UnsafePayloadError
from casstore.format.limits import OUTLINE_MIN_BYTES

Dump = Callable[[Any], tuple[str, bytes]]
Load = Callable[[tuple[str, bytes]], Any]

_DICT: Final = "d"
_SNAPSHOT: Final = "s"
_TAG: Final = "t"
_BYTES: Final = "b"
_MSGPACK: Final = "msgpack"
_OPTION: Final = ormsgpack.OPT_NON_STR_KEYS

# Deeper nested lists and dicts go to the serialiser as they are. A dict takes two levels of
# the 64 that a stored value has.
_MAX_DEPTH: Final = 16
_MIN_INT: Final = -(1 << 63)
_MAX_INT: Final = (1 << 64) - 1

_OWN_DUMPS: Final = (JsonPlusSerializer.dumps_typed, StrictSerializer.dumps_typed)
_OWN_LOADS: Final = (JsonPlusSerializer.loads_typed, StrictSerializer.loads_typed)

#: Types that are split into parts, or that the serialiser does not encode as an extension.
PLAIN_TYPES: Final = frozenset(
    (type(None), bool, str, int, float, list, tuple, dict, bytes, bytearray, _DeltaSnapshot)
)


def encode(value: Any, dump: Dump, room: int = _MAX_DEPTH) -> Any:
    """The stored form of a value; lists and dicts are split, up to ``room`` levels deep."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if value.isascii() or _is_plain_text(value) else opaque(value, dump)
    if kind is int:
        return value if _MIN_INT <= value <= _MAX_INT else opaque(value, dump)
    if kind is float:
        return value if isfinite(value) else opaque(value, dump)
    if room:
        # As with the serialiser, a tuple is read back as a list.
        if kind is list or kind is tuple:
            return [encode(item, dump, room - 1) for item in value]
        if kind is dict and all(
            type(key) is str and (key.isascii() or _is_plain_text(key)) for key in value
        ):
            flat: list[Any] = []
            for key, item in value.items():
                flat += (key, encode(item, dump, room - 1))
            return {_DICT: flat}
        if kind is _DeltaSnapshot:
            return {_SNAPSHOT: encode(value.value, dump, room - 1)}
    return opaque(value, dump)


def encode_items(items: Iterable[Any], dump: Dump) -> list[Any]:
    """The stored forms of the elements of a list that is not nested in another value."""
    return [encode(item, dump, _MAX_DEPTH - 1) for item in items]


def opaque(value: Any, dump: Dump) -> Any:
    """The stored form of a value that the serialiser encodes as a whole."""
    tag, payload = dump(value)
    return stored_object(payload) if tag == _MSGPACK else {_TAG: tag, _BYTES: bytes(payload)}


def stored_object(payload: bytes) -> Any:
    """The stored form of the serialiser's msgpack."""
    if len(payload) >= OUTLINE_MIN_BYTES:
        return bytes(payload)
    return {_TAG: _MSGPACK, _BYTES: bytes(payload)}


def object_payload(stored: Any) -> bytes | None:
    """The serialiser's bytes of a stored form, if they are those of a msgpack object."""
    if type(stored) is bytes:
        return stored
    if type(stored) is dict and len(stored) == 2 and stored.get(_TAG) == _MSGPACK:
        payload = stored.get(_BYTES)
        return payload if type(payload) is bytes else None
    return None


def decode(stored: Any, load: Load) -> Any:
    """The value of a stored form."""
    kind = type(stored)
    if kind is list:
        return [decode(item, load) for item in stored]
    if kind is bytes:
        return load((_MSGPACK, stored))
    if kind is not dict:
        return stored
    if len(stored) == 2 and type(stored.get(_BYTES)) is bytes and type(stored.get(_TAG)) is str:
        return load((stored[_TAG], stored[_BYTES]))
    if len(stored) == 1 and _SNAPSHOT in stored:
        return _DeltaSnapshot(decode(stored[_SNAPSHOT], load))
    flat = stored.get(_DICT)
    if len(stored) != 1 or type(flat) is not list or len(flat) % 2:
        raise CorruptionError("a stored value of LangGraph's state has an unknown form")
    built: dict[str, Any] = {}
    for at in range(0, len(flat), 2):
        if type(flat[at]) is not str:
            raise CorruptionError("a stored dict has a key that is not a str")
        built[flat[at]] = decode(flat[at + 1], load)
    return built


def encodes_as_langgraph(serde: SerializerProtocol) -> bool:
    """True if every value that ``serde`` takes or returns passes through LangGraph's own methods.

    Only then may a value be split and its plain parts stored without the serialiser. A subclass
    that overrides either method, to encrypt for example, must see every value whole.
    """
    return (
        getattr(serde.dumps_typed, "__func__", None) in _OWN_DUMPS
        and getattr(serde.loads_typed, "__func__", None) in _OWN_LOADS
    )


class Codec:
    """State into stored values and back, through one serialiser."""

    __slots__ = ("_serde", "_splits")

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        self._splits = encodes_as_langgraph(serde)

    def encode(self, value: Any) -> Any:
        """The stored form of state: split into parts if the serialiser is LangGraph's own."""
        return (encode if self._splits else opaque)(value, self._serde.dumps_typed)

    def decode(self, stored: Any) -> Any:
        """The value of a stored form."""
        return decode(stored, self._serde.loads_typed)


def _is_plain_text(text: str) -> bool:
    """Whether a text can be stored; lone surrogates cannot, and the serialiser replaces them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- state without its objects --------------------------------------------------------------------


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
        return ormsgpack.packb(value, default=_extension, option=_OPTION)
    except ormsgpack.MsgpackEncodeError as exc:
        raise InvalidInputError(f"LangGraph's serialiser cannot encode this state: {exc}") from exc


def pack_form(form: Any) -> bytes:
    """The bytes of a stored form with sorted keys, to compare it with another.

    Unlike ==, this distinguishes 1, 1.0 and True.
    """
    return ormsgpack.packb(form, option=ormsgpack.OPT_SORT_KEYS)


def open_snapshot(value: Any) -> Any:
    """Decode a delta snapshot that is a channel's whole value; any other value is unchanged."""
    if type(value) is Raw and value.code == EXT_DELTA_SNAPSHOT:
        return _DeltaSnapshot(load_raw(("msgpack", value.data)))
    return value


def _extension(value: Any) -> Any:
    if type(value) is Raw:
        return ormsgpack.Ext(value.code, value.data)
    if type(value) is _DeltaSnapshot:
        return ormsgpack.Ext(EXT_DELTA_SNAPSHOT, pack_raw(value.value))
    raise TypeError(f"{type(value).__name__} cannot be encoded")
