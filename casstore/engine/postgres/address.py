"""Parses the address of a store: a PostgreSQL URL, with parameters of casstore among its own.

    postgresql://user@host/database?schema=team&prepare=off&sslmode=verify-full

The parameters of casstore are ``schema``, ``pool``, ``prepare``, ``patience``, ``cache`` and
``cache_mib``; all others, for example those for TLS, are passed to libpq unchanged. The URL is
split as libpq does it, which differs from web URLs: a password may contain ``#`` and ``?``, and
``+`` is a plus sign.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from casstore.errors import InvalidInputError

PREFIXES: Final = ("postgresql://", "postgres://")
DEFAULT_SCHEMA: Final = "casstore"
DEFAULT_POOL: Final = 16
MAX_POOL: Final = 1000
DEFAULT_PATIENCE_S: Final = 30.0
DEFAULT_CACHE_MIB: Final = 256
MIN_CACHE_MIB: Final = 4
MAX_CACHE_MIB: Final = 1 << 20
_MAX_PORT: Final = 65_535

# The server truncates longer names, so two stores could share a schema.
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_YES: Final = {"on": True, "off": False}
# libpq ends the user part at an @ before the first /. The second group also ends at a later @: a
# password with an unescaped / is a mistake, but must not be shown in messages.
_PARTS: Final = re.compile(r"(\w+://)((?:[^/]*@)?(?:[^?]*@)?)([^?]*)(?:\?(.*))?", re.DOTALL)
_HALF_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")


class Address(NamedTuple):
    """The server, database and schema of a store, and the options for connecting."""

    #: The URL for libpq, without the parameters of casstore.
    conninfo: str
    schema: str = DEFAULT_SCHEMA
    #: The largest number of connections.
    pool: int = DEFAULT_POOL
    #: Whether statements are prepared; a pooler in transaction mode does not allow it.
    prepare: bool = True
    #: How long a call retries to reach an unavailable server.
    patience_s: float = DEFAULT_PATIENCE_S
    #: The local directory of the disk cache; None: no disk cache.
    cache: str | None = None
    #: The limit of the disk cache.
    cache_mib: int = DEFAULT_CACHE_MIB

    @property
    def place(self) -> str:
        """The address for messages, without the password."""
        return f"postgresql://{split(self.conninfo).location}?schema={self.schema}"

    def without_secrets(self, message: str) -> str:
        """The message of libpq about an invalid URL, without the passwords that it quotes."""
        parts = split(self.conninfo)
        secrets = [parts.userinfo.removesuffix("@").partition(":")[2]]
        for word in parts.parameters:
            name, _, value = word.partition("=")
            if name.endswith("password"):
                secrets.append(value)
        message = message.replace(self.conninfo, self.place)
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            message = message.replace(secret, "…")
        return message


class Parts(NamedTuple):
    """The parts of a URL, still percent-encoded."""

    scheme: str
    #: User, optional password, and the @ after them.
    userinfo: str
    #: Hosts and database.
    location: str
    parameters: list[str]


def split(url: str) -> Parts:
    """Split a URL as libpq does."""
    found = _PARTS.fullmatch(url)
    assert found is not None
    scheme, userinfo, location, parameters = found.groups()
    return Parts(
        scheme, userinfo, location, [each for each in (parameters or "").split("&") if each]
    )


def is_address(place: str) -> bool:
    """True if this is the URL of a database and not a directory."""
    return place.startswith(PREFIXES)


def parse(url: str) -> Address:
    """Parse a URL. InvalidInputError for an invalid parameter of casstore."""
    if not is_address(url):
        raise InvalidInputError(
            "the address of a PostgreSQL store must be a URL: postgresql://host/database"
        )
    if not url.isprintable() or _HALF_ESCAPE.search(url):
        # The character is not shown: it may belong to the password.
        raise InvalidInputError(
            "the store's URL has a character that must be written as %XX: a control character, "
            "or a % that does not begin such a code"
        )
    parts = split(url)
    _check_ports(parts)
    ours: dict[str, str] = {}
    rest: list[str] = []
    for each in parts.parameters:
        name, _, value = each.partition("=")
        if unquote(name) in _READ:
            ours[unquote(name)] = unquote(value, errors="surrogateescape")
        else:
            rest.append(each)
    query = "?" + "&".join(rest) if rest else ""
    address = Address(f"{parts.scheme}{parts.userinfo}{parts.location}{query}")
    for name, value in ours.items():
        field, read = _READ[name]
        try:
            address = address._replace(**{field: read(value)})
        except (KeyError, ValueError) as exc:
            raise InvalidInputError(
                f"{name}={value!r} in the store's URL is invalid; allowed: {_MEANT[name]}"
            ) from exc
    return address


def _check_ports(parts: Parts) -> None:
    """InvalidInputError for a port that is not a number; libpq reports it only when it connects."""
    ports: list[tuple[str, str]] = []
    for each in parts.location.partition("/")[0].split(","):
        # An IPv6 address in brackets contains colons.
        begin, bracket, rest = each.rpartition("]")
        host, _, port = rest.partition(":")
        ports.append((f"the port of host {begin + bracket + host!r}", port))
    for each in parts.parameters:
        name, _, value = each.partition("=")
        if unquote(name) == "port":
            ports += [("port=", port) for port in unquote(value).split(",")]
    for what, port in ports:
        digits = unquote(port)
        # Empty: libpq's default, or that of the environment.
        number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 6 else 0
        if digits and not 1 <= number <= _MAX_PORT:
            # The value is not shown: if the host is missing, the password is in its place.
            raise InvalidInputError(
                f"{what} in the store's URL is not a number from 1 to {_MAX_PORT}"
            )


def check_schema(name: str) -> str:
    """The name of a schema; ValueError if it is invalid."""
    if _SCHEMA.fullmatch(name) is None or name.startswith("pg_"):
        raise ValueError(name)
    return name


def _pool(value: str) -> int:
    number = int(value)
    if not 1 <= number <= MAX_POOL:
        raise ValueError(value)
    return number


def _patience(value: str) -> float:
    number = float(value)
    if not 0 <= number <= 86_400:
        raise ValueError(value)
    return number


def _directory(value: str) -> str:
    if not value or "\0" in value:
        raise ValueError(value)
    return value


def _mebibytes(value: str) -> int:
    number = int(value)
    if not MIN_CACHE_MIB <= number <= MAX_CACHE_MIB:
        raise ValueError(value)
    return number


_READ: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "schema": ("schema", check_schema),
    "pool": ("pool", _pool),
    "prepare": ("prepare", _YES.__getitem__),
    "patience": ("patience_s", _patience),
    "cache": ("cache", _directory),
    "cache_mib": ("cache_mib", _mebibytes),
}
_MEANT: Final = {
    "schema": "a name of up to 63 lower-case letters, digits and _",
    "pool": f"a number of connections, 1 to {MAX_POOL}",
    "prepare": "on or off",
    "patience": "seconds to retry, up to a day",
    "cache": "a local directory",
    "cache_mib": f"a number of MiB, {MIN_CACHE_MIB} to {MAX_CACHE_MIB}",
}
