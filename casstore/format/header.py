"""The store header: family and format version.

Both are in the store from its first transaction on. An LMDB environment without them belongs to
another program and is never changed; a store of another version, older or newer, is refused with
an error that names the version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casstore.errors import CorruptionError, ForeignStoreError, FormatVersionError

FAMILY: Final = b"casstore"
STORE_FORMAT: Final = 6

_VERSION_DIGITS: Final = 9
FAMILY_KEY: Final = b"family"
FORMAT_KEY: Final = b"format"
CREATED_KEY: Final = b"created_at_ms"


def header_rows(created_at_ms: int) -> dict[bytes, bytes]:
    """The rows that a new store starts with."""
    return {
        FAMILY_KEY: FAMILY,
        FORMAT_KEY: str(STORE_FORMAT).encode(),
        CREATED_KEY: str(created_at_ms).encode(),
    }


def require_header(find: Callable[[bytes], bytes | None], place: str) -> None:
    """Raise unless the rows that ``find`` returns are those of a store this release reads."""
    family, version = find(FAMILY_KEY), find(FORMAT_KEY)
    if family is None and version is None:
        raise ForeignStoreError(f"{place} is an LMDB environment, but not a casstore store")
    if family is None or version is None:
        missing = "family" if family is None else "format version"
        raise CorruptionError(f"{place} is damaged: its header has no {missing}")
    if family != FAMILY:
        raise ForeignStoreError(f"{place} belongs to {family!r}, not to casstore")
    if not version.isdigit() or len(version) > _VERSION_DIGITS:
        raise CorruptionError(f"{place} has an unreadable format version {version[:40]!r}")
    if int(version) != STORE_FORMAT:
        raise FormatVersionError(place, int(version), STORE_FORMAT)
