"""Reads another program's tables on a PostgreSQL server, in one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from casstore.errors import (
    CasstoreError,
    InvalidInputError,
    StorageError,
    StorageUnavailableError,
)

try:
    import psycopg
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "a database on PostgreSQL needs psycopg: "
        "pip install '.[postgres]' in the clone of casstore",
        name=exc.name,
    ) from exc

from casstore.engine.postgres.address import PREFIXES, Address, is_address, split
from casstore.engine.postgres.connections import is_away


def shown(url: str) -> str:
    """A server's URL without user and password, for messages."""
    if not is_address(url):
        raise InvalidInputError(
            f"{url!r:.80} is not the URL of a PostgreSQL database, such as {PREFIXES[0]}…"
        )
    return f"{PREFIXES[0]}{split(url).location}"


class PostgresSource:
    """A connection with one read-only transaction; a context manager.

    ``url`` is a libpq URL; ``options=-csearch_path%3DNAME`` in it selects another schema than the
    role's own. ``tables``: their total size is the size of the source. StorageUnavailableError if
    the server cannot be reached. While the transaction is open the server keeps old row versions,
    so a long import makes the tables grow.
    """

    def __init__(self, url: str, tables: Sequence[str]) -> None:
        self.name = shown(url)
        self._tables = tables
        try:
            # No prepared statements: a pooler may be in between.
            self._connection = psycopg.connect(
                url, client_encoding="utf8", prepare_threshold=None, application_name="casstore"
            )
        except (psycopg.ProgrammingError, UnicodeError) as exc:
            reason = Address(url).without_secrets(str(exc).strip())
            # From None, because the message of exc may hold the password.
            raise InvalidInputError(f"{self.name}: {reason}") from None
        except psycopg.Error as exc:
            raise self._refusal(exc) from exc
        self._connection.read_only = True
        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ

    def __enter__(self) -> PostgresSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, query: bytes, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, as they are read. StorageError if they cannot be."""
        try:
            with self._connection.cursor(binary=True) as cursor:
                yield from cursor.execute(query, values)
        except psycopg.Error as exc:
            raise self._refusal(exc) from exc

    def columns(self, table: str) -> frozenset[str]:
        """The columns of a table; none if the connection's search path has no such table."""
        query = (
            b"SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass(%s) "
            b"AND attnum > 0 AND NOT attisdropped"
        )
        return frozenset(name for (name,) in self.ask(query, (table,)))

    @property
    def size_bytes(self) -> int:
        """The size of the tables, with their indexes."""
        query = (
            b"SELECT coalesce(sum(pg_total_relation_size(to_regclass(t))), 0)::bigint "
            b"FROM unnest(%s::text[]) AS t"
        )
        return int(next(self.ask(query, (list(self._tables),)))[0])

    def require_unchanged(self) -> None:
        """Do nothing: all was read in one transaction."""

    def _refusal(self, exc: psycopg.Error) -> CasstoreError:
        said = f"{self.name} cannot be read: {str(exc).strip()}"
        return StorageUnavailableError(said) if is_away(exc) else StorageError(said)
