"""Making a store of a schema, recognising one, and bringing an older one up to date.

Who finds no store makes one under a lock of the whole database, so any number may open it for the
first time at once. A schema that holds anything else is never taken over. Functions name their
schema in full; where it was renamed, they would read and write what has the old name now, so they
are made anew. They also have their store's number in them: whoever has opened one that was dropped
since, and made anew under the same name, is refused by the new one.

Tables that came without their sequences, as logical replication and a dump of the data alone bring
them, would number new objects below those that they link to, and collection relies on the opposite.
So the numbers are set before anybody writes.
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

#: What turns a schema of one version into the next: statements, by the version they start from.
#: Versions before 4 listed nodes in rows, and are refused.
UPGRADES: Final[dict[int, Sequence[str]]] = {}

# Among locks, the other half stands for those that are shared.
_NUMBER_BITS: Final = 63

# Held while a schema is made or changed. Any number that everybody uses will do.
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
    """What a store says of itself."""

    version: int
    #: Its number among the locks of the database.
    store: int


def ready(
    connection: psycopg.Connection[Any], place: str, schema: str, *, create: bool, readonly: bool
) -> Identity:
    """The store in a schema, made or upgraded if need be and if that is allowed.

    StoreNotFoundError, ForeignStoreError or FormatVersionError if there is none to be had.
    """
    found = _find(connection, place, schema)
    if found is not None and found.version == VERSION:
        if _functions_are_its_own(connection, schema, found.store):
            if not readonly and _is_behind(connection, schema):
                _catch_up(connection, place, schema, found.store)
            return found
        if readonly:
            raise StorageError(
                f"the functions of {place} are those of another schema or release; it was renamed "
                "or is older, and its owner must open it once"
            )
    elif found is not None and (found.version > VERSION or readonly):
        raise FormatVersionError(place, found.version, VERSION)
    if found is None and (readonly or not create):
        raise StoreNotFoundError(f"no store at {place}; open it once with create=True")
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        # Others may have been at it while we waited.
        before = _find(connection, place, schema)
        if before is None:
            _create(connection, schema)
        elif before.version < VERSION:
            _upgrade(connection, place, schema, before)
        found = _find(connection, place, schema)
        assert found is not None
        is_older = before is not None and before.version < VERSION
        if is_older or not _functions_are_its_own(connection, schema, found.store):
            _make_functions_anew(connection, schema, found.store)
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
            raise ForeignStoreError(
                f"{place} holds something else, and is left untouched; choose another schema"
            )
        return None
    try:
        query = sql.SQL("SELECT name, value FROM {meta}").format(meta=meta)
        said = dict(connection.execute(query).fetchall())
    except psycopg.errors.UndefinedColumn:
        raise ForeignStoreError(
            f"{place} has a table meta that is not ours; choose another schema"
        ) from None
    except psycopg.errors.InsufficientPrivilege as exc:
        raise ReadOnlyError(f"this role may not read {place}: {exc.diag.message_primary}") from exc
    if said.get("family") != FAMILY:
        raise ForeignStoreError(f"{place} was made by something else; choose another schema")
    try:
        found = Identity(int(said["version"]), int(said["store"]))
    except (KeyError, ValueError) as exc:
        raise CorruptionError(f"{place} does not say which version it has") from exc
    if not 0 <= found.store < 1 << _NUMBER_BITS:
        raise CorruptionError(f"{place} has the number {found.store}, which no store has")
    return found


def _create(connection: psycopg.Connection[Any], schema: str) -> None:
    name = sql.Identifier(schema)
    if connection.execute(_SCHEMA_THERE, (schema,)).fetchone() is None:
        connection.execute(sql.SQL("CREATE SCHEMA {s}").format(s=name))
    store = _new_number()
    for text in tables.CREATION:
        connection.execute(spelled(text, schema, store))
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
            connection.execute(spelled(text, schema, found.store))
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


def _make_functions_anew(connection: psycopg.Connection[Any], schema: str, store: int) -> None:
    for text in tables.FUNCTIONS:
        again = text.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION")
        connection.execute(spelled(again, schema, store))


def _is_behind(connection: psycopg.Connection[Any], schema: str) -> bool:
    """Would the next objects get numbers that were given already?"""
    try:
        row = connection.execute(spelled(_IS_BEHIND, schema)).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        # Who may not even look does not write.
        return False
    return row is not None and bool(row[0])


def _catch_up(connection: psycopg.Connection[Any], place: str, schema: str, store: int) -> None:
    try:
        with connection.transaction():
            # Nobody writes meanwhile: numbers would be given below the new ones.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (store,))
            connection.execute(spelled(_CATCH_UP, schema))
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction) as exc:
        raise StorageError(
            f"the sequences of {place} are behind its tables, as if it had been copied without "
            "them; its owner must open it once, before anybody writes"
        ) from exc


def spelled(text: str, schema: str, store: int = 0) -> bytes:
    """A statement of ours with the schema's name in it, as an identifier, and a store's number.

    ``text`` is a constant of this package: nothing that was given by anybody becomes SQL.
    """
    made = sql.SQL(text).format(
        s=sql.Identifier(schema),
        touch=sql.Literal(tables.TOUCH_INTERVAL_MS),
        planned=sql.SQL(tables.PLANNED_SQL),
        flushing=sql.SQL(tables.FLUSHING_SQL),
        store=sql.Literal(store),
        # As a lock that is shared comes (``request``).
        inverted=sql.Literal(~store),
    )
    return made.as_bytes(None)


def _new_number() -> int:
    return secrets.randbits(_NUMBER_BITS)
