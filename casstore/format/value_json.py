"""Converts values to JSON and back.

JSON has no bytes and no links. They are written as ``{"$bytes": "<base64>"}`` and ``{"$link":
"<digest>"}``. A map key that begins with ``$`` gets a second ``$``, so that the conversion is
reversible.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, Final

from casstore.errors import InvalidInputError
from casstore.format.canonical import Link
from casstore.format.digest import Digest

BYTES_KEY: Final = "$bytes"
LINK_KEY: Final = "$link"


def plain(value: Any) -> Any:
    """A value as JSON data."""
    if isinstance(value, bytes | bytearray):
        return {BYTES_KEY: base64.b64encode(value).decode()}
    if isinstance(value, Link):
        return {LINK_KEY: bytes(value.digest).hex()}
    if isinstance(value, dict):
        return {plain_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def plain_key(key: str) -> str:
    """A map key as a JSON key."""
    return f"${key}" if key.startswith("$") else key


def unplain(value: Any) -> Any:
    """The inverse of ``plain``; InvalidInputError if the value is not a result of it."""
    if isinstance(value, list):
        return [unplain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, item),) = value.items()
        if key == BYTES_KEY and isinstance(item, str):
            try:
                return base64.b64decode(item, validate=True)
            except binascii.Error as exc:
                raise InvalidInputError(f"{BYTES_KEY} takes base64: {exc}") from exc
        if key == LINK_KEY and isinstance(item, str):
            return Link(Digest.from_hex(item))
    return {_unplain_key(key): unplain(item) for key, item in value.items()}


def _unplain_key(key: str) -> str:
    if key.startswith("$$"):
        return key[1:]
    if key.startswith("$"):
        raise InvalidInputError(f"{key!r} is not a known marker; for a key {key!r} write ${key}")
    return key


def parse_json(data: bytes, where: str) -> Any:
    """Decode a value from JSON text; InvalidInputError names ``where`` if the text is invalid."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise InvalidInputError(f"{where} has the same key twice in one map")
        return found

    def refuse(name: str) -> Any:
        raise InvalidInputError(f"{where} holds {name}, which is not JSON and cannot be stored")

    try:
        return unplain(json.loads(data, object_pairs_hook=unique, parse_constant=refuse))
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as exc:
        reason = "it nests too deeply" if isinstance(exc, RecursionError) else exc
        raise InvalidInputError(f"{where} is not JSON: {reason}") from exc
