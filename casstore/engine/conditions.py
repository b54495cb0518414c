"""Validates a write and evaluates its conditions, with the same meaning for every engine.

An engine supplies two look-ups into its open transaction: a row, and whether an object is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from casstore.engine.protocol import (
    MAX_KIND,
    MAX_OBJECT_BYTES,
    MAX_ROW_KEY_BYTES,
    MAX_ROW_VALUE_BYTES,
    MAX_STAMP_MS,
    TABLES,
    TIME_BYTES,
    CheckedWrite,
    Condition,
    DeleteRow,
    ObjectsExist,
    PutRow,
    RowChange,
    RowIs,
    RowLapsed,
    RowLive,
    RowStarts,
    Write,
)
from casstore.errors import ConditionFailedError, InvalidInputError, ObjectNotFoundError
from casstore.format.digest import DIGEST_BYTES, Digest

#: The value of a row, by table and key; None if it does not exist.
FindRow = Callable[[str, bytes], bytes | None]
#: True if the object with this digest is stored.
HasObject = Callable[[bytes], bool]

_TABLES = frozenset(TABLES)
_TIMED = (RowLive, RowLapsed)
_NAME_TYPES = frozenset((bytes, Digest))
_NAME_LENGTHS = frozenset((DIGEST_BYTES,))


def require(
    conditions: Sequence[Condition], find_row: FindRow, has_object: HasObject, now_ms: int
) -> None:
    """Raise ConditionFailedError, or ObjectNotFoundError, for the first condition that fails."""
    for condition in conditions:
        if isinstance(condition, RowIs):
            table, key, value = condition
            actual = find_row(table, key)
            if actual == value:
                continue
        elif isinstance(condition, ObjectsExist):
            for digest in condition.digests:
                if not has_object(digest):
                    raise ObjectNotFoundError(digest)
            continue
        else:
            actual = find_row(condition.table, condition.key)
            if actual is not None and _holds(condition, actual, now_ms):
                continue
        index = next(at for at, each in enumerate(conditions) if each is condition)
        raise ConditionFailedError(index, condition, actual)


def _holds(condition: RowStarts | RowLive | RowLapsed, actual: bytes, now_ms: int) -> bool:
    if isinstance(condition, RowStarts):
        return actual.startswith(condition.prefix)
    if isinstance(condition, RowLive):
        return actual.startswith(condition.prefix) and _time_at(actual, condition.offset) > now_ms
    return actual == condition.value and _time_at(actual, condition.offset) <= now_ms


def _time_at(value: bytes, offset: int) -> int:
    # A row too short to hold the time counts as time 0: never live, always lapsed. So a damaged
    # lease can be taken over.
    encoded = value[offset : offset + TIME_BYTES]
    return int.from_bytes(encoded, "big") if len(encoded) == TIME_BYTES else 0


def stamped(change: PutRow, now_ms: int) -> bytes:
    """The value of a row with the engine's time in its stamps."""
    value = change.value
    for offset, add_ms in change.stamps:
        time = now_ms + add_ms if now_ms + add_ms > 0 else 0
        value = value[:offset] + time.to_bytes(TIME_BYTES, "big") + value[offset + TIME_BYTES :]
    return value


def validate(write: Write) -> None:
    """Raise InvalidInputError for a malformed write."""
    objects, requirements, rows, deletes, _ = write
    if type(write) is CheckedWrite:
        sizes = [len(item[2]) for item in objects]
        if sizes and max(sizes) > MAX_OBJECT_BYTES:
            raise _too_long(max(sizes))
        return
    if objects:
        names: list[bytes] = []
        for digest, kind, data, children in objects:
            names.append(digest)
            if children:
                names += children
            if type(data) is not bytes:
                _check_bytes((data,), "the data of an object")
            size = len(data)
            if not 0 <= kind <= MAX_KIND:
                raise InvalidInputError(
                    f"the kind of an object must be 0 to {MAX_KIND}, got {kind}"
                )
            if size > MAX_OBJECT_BYTES:
                raise _too_long(size)
        check_digests(names)
    if requirements:
        _check_conditions(requirements)
    if rows:
        _check_rows(rows)
    if deletes:
        check_digests(deletes)


def _too_long(size: int) -> InvalidInputError:
    return InvalidInputError(
        f"an object of {size} bytes is too long; the limit is {MAX_OBJECT_BYTES}"
    )


def _check_conditions(conditions: Sequence[Condition]) -> None:
    if ObjectsExist in map(type, conditions):
        rest: list[Condition] = []
        for condition in conditions:
            if isinstance(condition, ObjectsExist):
                check_digests(condition.digests)
            else:
                rest.append(condition)
        if not rest:
            return
        conditions = rest
    # Checked column by column in C functions: nearly all writes are valid.
    tables, keys, values, *_ = zip(*conditions, strict=False)
    _check_places(tables, keys)
    _check_bytes([value for value in values if value is not None], "the value of a condition")
    for condition in conditions:
        if isinstance(condition, _TIMED) and condition.offset < 0:
            raise InvalidInputError(
                f"the offset of a time must not be negative, got {condition.offset}"
            )


def _check_rows(rows: Sequence[RowChange]) -> None:
    puts: Sequence[Any] = rows
    if DeleteRow in map(type, rows):
        _check_bytes([change[1] for change in rows], "the key of a row")
        for change in rows:
            check_key(change[0], change[1])
        puts = [change for change in rows if isinstance(change, PutRow)]
        if not puts:
            return
    tables, keys, values, stamps = zip(*puts, strict=True)
    _check_places(tables, keys)
    _check_bytes(values, "the value of a row")
    longest = max(map(len, values))
    if longest > MAX_ROW_VALUE_BYTES:
        raise InvalidInputError(
            f"a row of {longest} bytes is too long; the limit is {MAX_ROW_VALUE_BYTES}"
        )
    if any(stamps):
        for change in puts:
            if change.stamps:
                _check_stamps(change)


def _check_bytes(values: Sequence[bytes], what: str) -> None:
    """InvalidInputError if a value is not bytes: a bytearray or memoryview could change later."""
    if _NAME_TYPES.issuperset(map(type, values)):
        return
    for value in values:
        if not isinstance(value, bytes):
            raise InvalidInputError(f"{what} must be bytes, got {type(value).__name__}")


def _check_places(tables: Sequence[str], keys: Sequence[bytes]) -> None:
    _check_bytes(keys, "the key of a row")
    if (
        not _TABLES.issuperset(tables)
        or max(map(len, keys)) > MAX_ROW_KEY_BYTES
        or not min(map(len, keys))
    ):
        for table, key in zip(tables, keys, strict=True):
            check_key(table, key)


def _check_stamps(change: PutRow) -> None:
    last = len(change.value) - TIME_BYTES
    for offset, add_ms in change.stamps:
        if not 0 <= offset <= last:
            raise InvalidInputError(
                f"a stamp at offset {offset} does not fit into a row value of "
                f"{len(change.value)} bytes"
            )
        if not -MAX_STAMP_MS <= add_ms <= MAX_STAMP_MS:
            raise InvalidInputError(
                f"add_ms of a stamp must be -{MAX_STAMP_MS} to {MAX_STAMP_MS}, got {add_ms}"
            )


def check_digests(digests: Sequence[bytes]) -> None:
    """InvalidInputError if a digest is not bytes of the right length."""
    # Checked in C functions: nearly all digests are valid.
    if _NAME_TYPES.issuperset(map(type, digests)) and _NAME_LENGTHS.issuperset(map(len, digests)):
        return
    for digest in digests:
        if not isinstance(digest, bytes):
            raise InvalidInputError(f"a digest must be bytes, got {type(digest).__name__}")
        if len(digest) != DIGEST_BYTES:
            raise InvalidInputError(f"a digest must have {DIGEST_BYTES} bytes, got {len(digest)}")


def check_table(table: str) -> None:
    """InvalidInputError if no engine has this table."""
    if table not in _TABLES:
        raise InvalidInputError(f"unknown table {table!r}; the tables are {', '.join(TABLES)}")


def check_key(table: str, key: bytes) -> None:
    """InvalidInputError if the table or the key is invalid."""
    if table not in _TABLES:
        check_table(table)
    if not 0 < len(key) <= MAX_ROW_KEY_BYTES:
        raise InvalidInputError(
            f"a row key must have 1 to {MAX_ROW_KEY_BYTES} bytes, got {len(key)}"
        )


def wall_clock_ms() -> int:
    """Milliseconds since 1970 by this machine's clock: the default clock of a local engine."""
    return time.time_ns() // 1_000_000
