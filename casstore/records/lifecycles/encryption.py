"""Encrypted values: AES-256-GCM-SIV, bound to the user and the name of the value.

    sealed    = 01 ‖ nonce (12) ‖ ciphertext with its tag
    plaintext = length of the value (4) ‖ canonical value ‖ zeros up to a multiple of 64

The user and the name are authenticated together with the value, so a row that is moved to another
user or name does not decrypt. The nonce is random: equal values give different bytes and are not
deduplicated. The padding hides the length of short values.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, InvalidValueError
from casstore.format import canonical
from casstore.format.canonical import links_in, pack_checked
from casstore.records.lifecycles.key_files import KeyStore

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
#: The limit of a value's encoded size: it is encrypted and decrypted in one piece.
MAX_VALUE_BYTES: Final = 64 << 20


class BoundTo(NamedTuple):
    """What a value is bound to: the name of the key, the user's hash and the name of the value."""

    key: str
    user: str
    name: str


def seal(keys: KeyStore, place: BoundTo, value: Any) -> bytes:
    """Encrypt a value, bound to ``place``."""
    encoded = canonical.encode(value, max_bytes=MAX_VALUE_BYTES)
    if links_in(encoded):
        raise InvalidValueError(
            "an encrypted value must not contain links: gc could not see them in it"
        )
    plain = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded
    plain += bytes(-len(plain) % _BLOCK_BYTES)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    cipher = AESGCMSIV(keys.get(place.key))
    return _VERSION + nonce + cipher.encrypt(nonce, plain, _bound(place))


def open_sealed(keys: KeyStore, place: BoundTo, sealed: Any) -> Any:
    """Decrypt a value; CorruptionError if it is damaged, or bound to another user, name or key."""
    if type(sealed) is not bytes or sealed[:1] != _VERSION:
        raise CorruptionError(
            f"encrypted user data {place.name!r} is damaged, or a newer version wrote it"
        )
    cipher = AESGCMSIV(keys.get(place.key))
    start = len(_VERSION) + _NONCE_BYTES
    try:
        plain = cipher.decrypt(sealed[len(_VERSION) : start], sealed[start:], _bound(place))
    except (InvalidTag, ValueError) as exc:
        raise CorruptionError(
            f"user data {place.name!r} cannot be decrypted with key {place.key}: it is damaged, or "
            "was moved here from another user or name"
        ) from exc
    length = int.from_bytes(plain[:_LENGTH_BYTES], "big")
    return canonical.decode(plain[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _bound(place: BoundTo) -> bytes:
    return pack_checked([_CONTEXT, *place])
