"""Where a store is: a PostgreSQL URL, with a few words of our own among its parameters.

    postgresql://user@host/database?schema=team&prepare=off&sslmode=verify-full

Ours are ``schema``, ``pool``, ``prepare``, ``patience``, ``cache`` and ``cache_mib``; all others,
TLS among them, are handed to libpq as they stand. So the URL is taken apart as libpq does it, which
is not as URLs of the web are: a password may hold ``#`` and ``?``, and ``+`` is a plus.
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

# Longer names are cut by the server, and two stores would become one.
_SCHEMA: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_YES: Final = {"on": True, "off": False}
# To libpq, who connects ends at an @ before the first /. A password with a / in it, which is a
# mistake, is not to be shown either.
_PARTS: Final = re.compile(r"(\w+://)((?:[^/]*@)?(?:[^?]*@)?)([^?]*)(?:\?(.*))?", re.DOTALL)
_HALF_ESCAPE: Final = re.compile("%(?![0-9A-Fa-f]{2})")


class Address(NamedTuple):
    """A place to connect to, and how to behave there."""

    #: What libpq is told: everything but the parameters that are ours.
    conninfo: str
    schema: str = DEFAULT_SCHEMA
    #: How many connections at the most.
    pool: int = DEFAULT_POOL
    #: Statements are prepared once a connection; a pooler in transaction mode forbids that.
    prepare: bool = True
    #: How long a call goes on trying to reach a server that is away.
    patience_s: float = DEFAULT_PATIENCE_S
    #: A directory of this machine in which objects are kept that were read; None: nowhere.
    cache: str | None = None
    #: How much may be kept there.
    cache_mib: int = DEFAULT_CACHE_MIB

    @property
    def place(self) -> str:
        """The store's place as messages name it: without a password."""
        return f"postgresql://{split(self.conninfo).where}?schema={self.schema}"

    def without_secrets(self, message: str) -> str:
        """What libpq says of a URL that it cannot read, which it repeats, passwords and all."""
        parts = split(self.conninfo)
        secrets = [parts.who.removesuffix("@").partition(":")[2]]
        for word in parts.parameters:
            name, _, value = word.partition("=")
            if name.endswith("password"):
                secrets.append(value)
        message = message.replace(self.conninfo, self.place)
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            message = message.replace(secret, "…")
        return message


class Parts(NamedTuple):
    """A URL in pieces, none of them decoded."""

    kind: str
    #: A user, maybe with a password, and the @ behind them.
    who: str
    #: Hosts and a database.
    where: str
    parameters: list[str]


def split(url: str) -> Parts:
    """Take a URL apart as libpq does."""
    found = _PARTS.fullmatch(url)
    assert found is not None
    kind, who, where, parameters = found.groups()
    return Parts(kind, who, where, [each for each in (parameters or "").split("&") if each])


def is_address(place: str) -> bool:
    """Does this name a database, and not a directory?"""
    return place.startswith(PREFIXES)


def parse(url: str) -> Address:
    """Read a URL. InvalidInputError for a parameter of ours that makes no sense."""
    if not is_address(url):
        raise InvalidInputError("a PostgreSQL store is named by a URL: postgresql://host/database")
    if not url.isprintable() or _HALF_ESCAPE.search(url):
        # It may be in the password, and is not told.
        raise InvalidInputError(
            "a store's URL has a character in it that must be spelled %XX: a control character, "
            "or a % that stands for nothing"
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
    address = Address(f"{parts.kind}{parts.who}{parts.where}{query}")
    for name, value in ours.items():
        field, read = _READ[name]
        try:
            address = address._replace(**{field: read(value)})
        except (KeyError, ValueError) as exc:
            raise InvalidInputError(f"{name}={value!r} in the store's URL: {_MEANT[name]}") from exc
    return address


def _check_ports(parts: Parts) -> None:
    """InvalidInputError for a port that is no number; libpq says so only when it connects."""
    ports: list[tuple[str, str]] = []
    for each in parts.where.partition("/")[0].split(","):
        # An address in brackets has colons of its own.
        begin, bracket, rest = each.rpartition("]")
        host, _, port = rest.partition(":")
        ports.append((f"the port of host {begin + bracket + host!r}", port))
    for each in parts.parameters:
        name, _, value = each.partition("=")
        if unquote(name) == "port":
            ports += [("port=", port) for port in unquote(value).split(",")]
    for what, port in ports:
        told = unquote(port)
        # None is libpq's own, or that of the environment.
        number = int(told) if told.isascii() and told.isdigit() and len(told) < 6 else 0
        if told and not 1 <= number <= _MAX_PORT:
            # It is not shown: where the host was forgotten, the password stands in its place.
            raise InvalidInputError(
                f"{what} in the store's URL is not a number from 1 to {_MAX_PORT}"
            )


def check_schema(name: str) -> str:
    """A name for a schema, or ValueError."""
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
    "schema": "a name of up to 63 small letters, digits and _",
    "pool": f"a number of connections, 1 to {MAX_POOL}",
    "prepare": "on or off",
    "patience": "seconds to go on trying, up to a day",
    "cache": "a directory of this machine",
    "cache_mib": f"so many MiB on the disk, {MIN_CACHE_MIB} to {MAX_CACHE_MIB}",
}
