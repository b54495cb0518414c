"""LangGraph's serialiser, strict: each type that bytes name is checked before it is imported.

LangGraph rebuilds objects by importing the type that the bytes name and calling it. These types
may be loaded:

- LangGraph's own list of safe types;
- LangChain's data classes (messages, documents, agent actions and the like), of those that
  LangGraph lets LangChain load;
- the types that the application passes as ``allowed``;
- the types in a graph's schemas, which LangGraph passes in its own strict mode.

By default any other type is refused, on saving as well as on loading: a value that could not be
read back is refused while the application can still change it. In LangGraph's own strict mode
(``LANGGRAPH_STRICT_MSGPACK=true``) it is treated as LangGraph treats it: the object is saved, and
is loaded as its plain fields, without importing its type.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import ormsgpack
from langgraph.checkpoint.serde._msgpack import SAFE_MSGPACK_METHODS, SAFE_MSGPACK_TYPES
from langgraph.checkpoint.serde.jsonplus import (
    EXT_CONSTRUCTOR_KW_ARGS,
    EXT_CONSTRUCTOR_POS_ARGS,
    EXT_CONSTRUCTOR_SINGLE_ARG,
    EXT_DELTA_SNAPSHOT,
    EXT_METHOD_SINGLE_ARG,
    EXT_NUMPY_ARRAY,
    EXT_PYDANTIC_V1,
    EXT_PYDANTIC_V2,
    LC_REVIVER,
    JsonPlusSerializer,
)

from casstore.errors import CorruptionError, InvalidInputError, UnsafePayloadError
from casstore.session.arguments import list_of

AllowedType = type | tuple[str, str]
_Refuse = Callable[[str, str], None]

# The tags that LangGraph writes today. Its older tags call constructors ("json") or run code
# ("pickle").
_TAGS: Final = ("null", "bytes", "bytearray", "msgpack")
_CONSTRUCTORS: Final = (
    EXT_CONSTRUCTOR_SINGLE_ARG,
    EXT_CONSTRUCTOR_POS_ARGS,
    EXT_CONSTRUCTOR_KW_ARGS,
    EXT_PYDANTIC_V1,
    EXT_PYDANTIC_V2,
)
# Packages of LangChain whose classes only hold data. Its others (prompts, runnables, parsers)
# configure what an application runs.
_DATA_PACKAGES: Final = ("agents", "documents", "messages", "outputs", "prompt_values")
_LANGCHAIN_DATA: Final = frozenset(
    (".".join(path[:-1]), path[-1])
    for path in LC_REVIVER.allowed_class_paths or ()
    if path[0] == "langchain_core" and path[1] in _DATA_PACKAGES
)
# Msgpack's codes of extensions and lists.
_FIXED_BYTES: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_LENGTH_BYTES: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_OPTION: Final = ormsgpack.OPT_NON_STR_KEYS
_ARRAY_16: Final = 0xDC
_ARRAY_32: Final = 0xDD
# The limit of objects inside objects; each level is a recursive call.
_MAX_NESTING: Final = 64
# The size of the cache of checked bytes: at each step most messages are the same.
_MAX_PASSED_BYTES: Final = 8 << 20


def _checked_types(allowed: Collection[AllowedType]) -> tuple[AllowedType, ...]:
    types = list_of(allowed, "allowed")
    for one in types:
        is_pair = isinstance(one, tuple) and all(type(part) is str for part in one)
        if not is_pair and not isinstance(one, type):
            raise InvalidInputError(
                f"an allowed type must be a class or (module, name), got {one!r:.80}"
            )
    return tuple(types)


class StrictSerializer(JsonPlusSerializer):
    """Saves and loads only types known to be safe, and those in ``allowed``.

    ``allowed`` are classes, or pairs of module and name.

    >>> loose = StrictSerializer(allowed=[casstore.Usage])
    >>> loose.loads_typed(loose.dumps_typed(casstore.Usage("agent", "model-1"))).model
    'model-1'
    >>> try:
    ...     StrictSerializer().dumps_typed(casstore.Usage("agent", "model-1"))
    ... except casstore.errors.UnsafePayloadError:
    ...     print("refused")
    refused
    """

    def __init__(self, allowed: Collection[AllowedType] = ()) -> None:
        super().__init__(
            pickle_fallback=False,
            allowed_json_modules=None,
            allowed_msgpack_modules=(*_LANGCHAIN_DATA, *_checked_types(allowed)),
        )
        self._passed = _CheckedBytes()
        self._loads_others_as_data = False

    def with_msgpack_allowlist(
        self, extra_allowlist: Iterable[tuple[str, ...] | type]
    ) -> StrictSerializer:
        """A serialiser that also loads these types, and any other object as its plain fields.

        LangGraph calls this in its own strict mode, with the types of a graph's schemas.
        """
        wider = super().with_msgpack_allowlist(extra_allowlist)
        if wider is self:
            if self._loads_others_as_data:
                return self
            wider = copy.copy(self)
        assert isinstance(wider, StrictSerializer)
        wider._loads_others_as_data = True
        # The new serialiser accepts bytes that this one refuses: they share no cache.
        wider._passed = _CheckedBytes()
        return wider

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        """Tag and bytes of a value; UnsafePayloadError if loading would refuse them."""
        try:
            tag, payload = super().dumps_typed(obj)
        except ormsgpack.MsgpackEncodeError as exc:
            raise InvalidInputError(f"this state cannot be serialised: {exc}") from exc
        if tag == "msgpack":
            self.check(payload)
        return tag, bytes(payload)

    def dump_objects(self, objects: Sequence[Any]) -> bytes | None:
        """The joined bytes of these objects, unchecked; None if they cannot be encoded."""
        try:
            _, payload = super().dumps_typed([*objects])
        except ormsgpack.MsgpackEncodeError:
            return None
        head = payload[0]
        return bytes(payload[3 if head == _ARRAY_16 else 5 if head == _ARRAY_32 else 1 :])

    def load_objects(self, count: int, body: bytes) -> list[Any]:
        """Load objects from the joined bytes of exactly ``count``, which the caller has checked."""
        objects = self._unpack(bytes((_ARRAY_32,)) + count.to_bytes(4, "big") + body)
        if type(objects) is not list:
            raise CorruptionError("the stored elements of a list cannot be decoded as a list")
        return objects

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """The value of tag and bytes; UnsafePayloadError if they name anything forbidden."""
        tag, payload = data[0], bytes(data[1])
        if tag not in _TAGS:
            raise UnsafePayloadError(repr(tag), "this codec must not be loaded")
        if tag == "msgpack":
            self.check(payload)
            return self._unpack(payload)
        return super().loads_typed((tag, payload))

    def _unpack(self, payload: bytes) -> Any:
        try:
            return ormsgpack.unpackb(payload, ext_hook=self._build, option=_OPTION)
        except ormsgpack.MsgpackDecodeError as exc:
            raise CorruptionError(f"a stored element cannot be decoded: {exc}") from exc

    def _build(self, code: int, data: bytes) -> Any:
        """Load an object of a state; messages, the most frequent, have a fast path."""
        if code == EXT_PYDANTIC_V2:
            try:
                module, name, fields, _ = ormsgpack.unpackb(
                    data, ext_hook=self._build, option=_OPTION
                )
                if (module, name) in SAFE_MSGPACK_TYPES:
                    return getattr(sys.modules[module], name)(**fields)
            except Exception:
                # The class is not imported yet, or construction fails: LangGraph handles both.
                return self._unpack_ext_hook(code, data)
        return self._unpack_ext_hook(code, data)

    def check(self, payload: bytes) -> None:
        """Refuse bytes that name a forbidden type. Imports nothing and calls nothing."""
        if payload in self._passed.payloads:
            return
        self._look(payload)
        self._passed.add(payload)

    def _look(self, payload: bytes) -> None:
        refused: list[UnsafePayloadError] = []
        depth = 0

        def refuse(name: str, reason: str) -> None:
            refused.append(UnsafePayloadError(name, reason))

        def look(code: int, data: bytes) -> None:
            # The decoder would wrap an exception raised here, so record the first refusal.
            nonlocal depth
            if refused:
                return
            if depth == _MAX_NESTING:
                refuse("nesting", f"objects within objects more than {_MAX_NESTING} deep")
                return
            depth += 1
            inner = ormsgpack.unpackb(data, ext_hook=look, option=_OPTION)
            depth -= 1
            if code in _CONSTRUCTORS:
                self._check_name(inner, refuse)
            elif code == EXT_METHOD_SINGLE_ARG:
                _check_method(inner, refuse)
            elif code not in (EXT_NUMPY_ARRAY, EXT_DELTA_SNAPSHOT):
                refuse(f"extension {code}", "unknown to this release")

        try:
            ormsgpack.unpackb(payload, ext_hook=look, option=_OPTION)
        except ormsgpack.MsgpackDecodeError as exc:
            if not refused:
                raise CorruptionError(f"a stored element cannot be decoded: {exc}") from exc
        if refused:
            raise refused[0]

    def _check_name(self, inner: Any, refuse: _Refuse) -> None:
        try:
            name = (inner[0], inner[1])
            if len(inner) > 2 and (
                name in SAFE_MSGPACK_TYPES
                or name in self._own_types()
                or (self._loads_others_as_data and all(type(part) is str for part in name))
            ):
                return
        except (IndexError, KeyError, TypeError):
            name = ("?", "?")
        refuse(
            f"{name[0]}.{name[1]}",
            "not among the types that may be loaded; if it is yours, allow it with "
            f"CasstoreSaver(..., allowed=[{name!r}])",
        )

    def _own_types(self) -> Collection[tuple[str, ...]]:
        allowed = self._allowed_msgpack_modules
        return allowed if isinstance(allowed, set) else ()


def cut_objects(body: bytes, start: int = 0) -> list[bytes] | None:
    """Split joined msgpack extensions into one each; None if the bytes hold anything else.

    A decoder stops at the end of an element. Elements may only be joined if each one ends where its
    bytes end: bytes hidden after it would become an unchecked element.
    """
    parts: list[bytes] = []
    while start < len(body):
        head = body[start]
        if head in _LENGTH_BYTES:
            at = start + 1 + _LENGTH_BYTES[head]
            end = at + 1 + int.from_bytes(body[start + 1 : at], "big")
        elif head in _FIXED_BYTES:
            end = start + 2 + _FIXED_BYTES[head]
        else:
            return None
        if end > len(body):
            return None
        parts.append(body[start:end])
        start = end
    return parts


class _CheckedBytes:
    """A bounded set of bytes that were checked and may be loaded."""

    __slots__ = ("payloads", "size_bytes")

    def __init__(self) -> None:
        self.payloads: set[bytes] = set()
        self.size_bytes = 0

    def add(self, payload: bytes) -> None:
        """Add these; if they do not fit, clear the set first."""
        # Threads may race here, which only changes how much is cached.
        if self.size_bytes + len(payload) > _MAX_PASSED_BYTES:
            self.payloads, self.size_bytes = set(), 0
        if len(payload) <= _MAX_PASSED_BYTES:
            self.payloads.add(payload)
            self.size_bytes += len(payload)


def _check_method(inner: Any, refuse: _Refuse) -> None:
    try:
        name = (inner[0], inner[1], inner[3])
        if name in SAFE_MSGPACK_METHODS:
            return
    except (IndexError, KeyError, TypeError):
        name = ("?", "?", "?")
    refuse(f"{name[0]}.{name[1]}.{name[2]}()", "not among the calls that may be made on loading")
