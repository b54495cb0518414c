"""Values under a key: AES-256-GCM-SIV, bound to whose they are and what they are called.

    sealed    = 01 ‖ nonce (12) ‖ ciphertext with its tag
    plaintext = length of the value (4) ‖ canonical value ‖ zeros up to a multiple of 64

A value and its place are authenticated together, so a row that is moved to another user or
name does not open. The nonce is random: equal values, of the same user or of others, give
different bytes, and share nothing; the padding lets short values look alike.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, InvalidValueError
from casstore.format import canonical
from casstore.format.canonical import links_in, pack_checked
from casstore.records.lifecycles.keys import KeyStore

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "encrypting user data needs the package cryptography: "
        "pip install '.[sealing]' in the clone of casstore",
        name=missing.name,
    ) from missing

_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12
_LENGTH_BYTES: Final = 4
_BLOCK_BYTES: Final = 64
_CONTEXT: Final = "casstore user data v1"
#: What an encrypted value may have, spelled: it is encrypted, and read, in one piece.
MAX_VALUE_BYTES: Final = 64 << 20


class Place(NamedTuple):
    """What a value is bound to: the key, the user's hash and the name."""

    key: str
    user: str
    name: str


def seal(keys: KeyStore, place: Place, value: Any) -> bytes:
    """Encrypt a value for one place."""
    spelled = canonical.encode(value, max_bytes=MAX_VALUE_BYTES)
    if links_in(spelled):
        raise InvalidValueError("an encrypted value cannot link to objects, for gc must see links")
    plain = len(spelled).to_bytes(_LENGTH_BYTES, "big") + spelled
    plain += bytes(-len(plain) % _BLOCK_BYTES)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    cipher = AESGCMSIV(keys.get(place.key))
    return _VERSION + nonce + cipher.encrypt(nonce, plain, _bound(place))


def open_sealed(keys: KeyStore, place: Place, sealed: Any) -> Any:
    """The value again; CorruptionError if it is not of this place, or damaged."""
    if type(sealed) is not bytes or sealed[:1] != _VERSION:
        raise CorruptionError("encrypted user data is damaged, or of a newer kind")
    cipher = AESGCMSIV(keys.get(place.key))
    start = len(_VERSION) + _NONCE_BYTES
    try:
        plain = cipher.decrypt(sealed[len(_VERSION) : start], sealed[start:], _bound(place))
    except (InvalidTag, ValueError) as exc:
        raise CorruptionError(
            f"user data {place.name!r} does not open with key {place.key}: it was moved from "
            "elsewhere, or is damaged"
        ) from exc
    length = int.from_bytes(plain[:_LENGTH_BYTES], "big")
    return canonical.decode(plain[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _bound(place: Place) -> bytes:
    return pack_checked([_CONTEXT, *place])
