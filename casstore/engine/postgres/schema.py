"""Creates the tables of a store in a schema, recognises a store, and upgrades an older one.

``ready`` is the entry point. A store is created under an advisory lock of the whole database, so
several processes may open a new store at once. A schema that holds anything else is never changed.
The functions contain the name of their schema; after the schema was renamed they would use the old
name, so they are recreated. They also contain the number of their store: if a store is dropped and
recreated under the same name, the new functions refuse clients of the old store.

Logical replication, or a dump of the data alone, brings tables without their sequences. New objects
would then get lower ids than their children, but collection relies on higher ones. So the sequences
are advanced before the first write.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from casstore.engine.postgres import tables
from casstore.errors import (
    CorruptionError,
    ForeignStoreError,
    FormatVersionError,
    ReadOnlyError,
    StorageError,
    StoreNotFoundError,
)

FAMILY: Final = "casstore"
VERSION: Final = 4

#: The statements that upgrade a schema to the next version, by the version they start from.
#: Versions before 4 listed nodes in rows, and are refused.
UPGRADES: Final[dict[int, Sequence[str]]] = {}

# A store's number has 63 bits: in ``request``, a negative lock number means a shared lock.
_NUMBER_BITS: Final = 63

# Held while a schema is created or changed; an arbitrary constant.
_LOCK: Final = 0x6361_7373_746F_7265

_HOLDS_META: Final = sql.SQL("SELECT to_regclass({meta}) IS NOT NULL")
_SCHEMA_THERE: Final = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
_HOLDS_ANYTHING: Final = """
    SELECT EXISTS (SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE n.nspname = %(schema)s)
        OR EXISTS (SELECT 1 FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
                   WHERE n.nspname = %(schema)s)
        OR EXISTS (SELECT 1 FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
                   WHERE n.nspname = %(schema)s)
"""


_FUNCTIONS_OF: Final = """
    SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = %s AND p.proname = 'write'
            AND strpos(p.prosrc, %s) > 0 AND strpos(p.prosrc, %s) > 0
"""

_IS_BEHIND: Final = """
    SELECT (SELECT coalesce(max(id), 0) FROM {s}.objects) > (SELECT last_value FROM {s}.object_ids)
        OR (SELECT max(writes_collected) FROM {s}.state) > (SELECT last_value FROM {s}.writes)
"""
_CATCH_UP: Final = """
    SELECT setval('{s}.object_ids', greatest(
            (SELECT coalesce(max(id), 0) FROM {s}.objects), (SELECT last_value FROM {s}.object_ids)
        )),
        setval('{s}.writes', greatest(
            (SELECT max(writes_collected) FROM {s}.state), (SELECT last_value FROM {s}.writes)
        ))
"""


class Identity(NamedTuple):
    """The version and the number of a store."""

    version: int
    #: The store's number, used for its advisory locks.
    store: int


def ready(
    connection: psycopg.Connection[Any], place: str, schema: str, *, create: bool, readonly: bool
) -> Identity:
    """Return the identity of the store in a schema; create or upgrade it if necessary and allowed.

    StoreNotFoundError, ForeignStoreError, FormatVersionError, ReadOnlyError, StorageError or
    CorruptionError if that is not possible.
    """
    found = _find(connection, place, schema)
    if found is not None and found.version == VERSION:
        if _functions_are_its_own(connection, schema, found.store):
            if not readonly and _is_behind(connection, schema):
                _catch_up(connection, place, schema, found.store)
            return found
        if readonly:
            raise StorageError(
                f"the functions of {place} are of another schema or release: the schema was "
                "renamed, or the store is older; its owner must open it once"
            )
    elif found is not None and (found.version > VERSION or readonly):
        raise FormatVersionError(place, found.version, VERSION)
    if found is None and (readonly or not create):
        raise StoreNotFoundError(f"there is no store at {place}; open it once with create=True")
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        # Another process may have created it while this one waited for the lock.
        before = _find(connection, place, schema)
        if before is None:
            _create(connection, schema)
        elif before.version < VERSION:
            _upgrade(connection, place, schema, before)
        found = _find(connection, place, schema)
        assert found is not None
        is_older = before is not None and before.version < VERSION
        if is_older or not _functions_are_its_own(connection, schema, found.store):
            _recreate_functions(connection, schema, found.store)
    if _is_behind(connection, schema):
        _catch_up(connection, place, schema, found.store)
    return found


def _find(connection: psycopg.Connection[Any], place: str, schema: str) -> Identity | None:
    meta = sql.Identifier(schema, "meta")
    if connection.execute(_SCHEMA_THERE, (schema,)).fetchone() is None:
        return None
    holds = _HOLDS_META.format(meta=sql.Literal(meta.as_string(connection)))
    row = connection.execute(holds).fetchone()
    if row is None or not row[0]:
        other = connection.execute(_HOLDS_ANYTHING, {"schema": schema}).fetchone()
        if other is not None and other[0]:
            raise ForeignStoreError(f"{place} holds something else; choose another schema")
        return None
    try:
        query = sql.SQL("SELECT name, value FROM {meta}").format(meta=meta)
        said = dict(connection.execute(query).fetchall())
    except psycopg.errors.UndefinedColumn:
        raise ForeignStoreError(
            f"{place} has a table meta that casstore did not create; choose another schema"
        ) from None
    except psycopg.errors.InsufficientPrivilege as exc:
        raise ReadOnlyError(f"this role may not read {place}: {exc.diag.message_primary}") from exc
    if said.get("family") != FAMILY:
        raise ForeignStoreError(f"{place} was not created by casstore; choose another schema")
    try:
        found = Identity(int(said["version"]), int(said["store"]))
    except (KeyError, ValueError) as exc:
        raise CorruptionError(f"{place} has no valid version in its table meta") from exc
    if not 0 <= found.store < 1 << _NUMBER_BITS:
        raise CorruptionError(f"{place} has an invalid store number: {found.store}")
    return found


def _create(connection: psycopg.Connection[Any], schema: str) -> None:
    name = sql.Identifier(schema)
    if connection.execute(_SCHEMA_THERE, (schema,)).fetchone() is None:
        connection.execute(sql.SQL("CREATE SCHEMA {s}").format(s=name))
    store = _new_number()
    for text in tables.CREATION:
        connection.execute(encoded(text, schema, store))
    said = {"family": FAMILY, "version": str(VERSION), "store": str(store)}
    insert = sql.SQL("INSERT INTO {s}.meta (name, value) VALUES (%s, %s)").format(s=name)
    with connection.cursor() as cursor:
        cursor.executemany(insert, list(said.items()))


def _upgrade(connection: psycopg.Connection[Any], place: str, schema: str, found: Identity) -> None:
    version = found.version
    while version < VERSION:
        steps = UPGRADES.get(version)
        if steps is None:
            raise FormatVersionError(place, version, VERSION)
        for text in steps:
            connection.execute(encoded(text, schema, found.store))
        version += 1
        connection.execute(
            sql.SQL("UPDATE {s}.meta SET value = %s WHERE name = 'version'").format(
                s=sql.Identifier(schema)
            ),
            (str(version),),
        )


def _functions_are_its_own(connection: psycopg.Connection[Any], schema: str, store: int) -> bool:
    own = sql.Identifier(schema).as_string(connection) + ".rows"
    row = connection.execute(_FUNCTIONS_OF, (schema, own, str(store))).fetchone()
    return row is not None and row[0] > 0


def _recreate_functions(connection: psycopg.Connection[Any], schema: str, store: int) -> None:
    for text in tables.FUNCTIONS:
        again = text.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
        connection.execute(encoded(again, schema, store))


def _is_behind(connection: psycopg.Connection[Any], schema: str) -> bool:
    """True if a sequence is behind: the next object would get an id that is in use, or lower."""
    try:
        row = connection.execute(encoded(_IS_BEHIND, schema)).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        # A role that cannot read the sequences cannot write either.
        return False
    return row is not None and bool(row[0])


def _catch_up(connection: psycopg.Connection[Any], place: str, schema: str, store: int) -> None:
    try:
        with connection.transaction():
            # Keep writers out: they would take ids below the new value.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (store,))
            connection.execute(encoded(_CATCH_UP, schema))
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction) as exc:
        raise StorageError(
            f"the sequences of {place} are behind its tables, as after a copy without them; "
            "its owner must open it once before any client writes"
        ) from exc


def encoded(text: str, schema: str, store: int = 0) -> bytes:
    """A statement with the schema's name, as a quoted identifier, and a store's number filled in.

    ``text`` is a constant of this package: no user input becomes SQL.
    """
    made = sql.SQL(text).format(
        s=sql.Identifier(schema),
        touch=sql.Literal(tables.TOUCH_INTERVAL_MS),
        planned=sql.SQL(tables.PLANNED_SQL),
        flushing=sql.SQL(tables.FLUSHING_SQL),
        store=sql.Literal(store),
        # Encoded like a shared lock (see ``request``).
        inverted=sql.Literal(~store),
    )
    return made.as_bytes(None)


def _new_number() -> int:
    return secrets.randbits(_NUMBER_BITS)
