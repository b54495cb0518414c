"""Deciding whether the conditions of a write hold: one rule for every engine.

An engine supplies two look-ups into its open transaction; what a condition means
is written here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from casstore.engine.protocol import (
    MAX_KIND,
    MAX_OBJECT_BYTES,
    MAX_ROW_KEY_BYTES,
    MAX_ROW_VALUE_BYTES,
    MAX_STAMP_MS,
    TABLES,
    TIME_BYTES,
    Condition,
    DeleteRow,
    ObjectsExist,
    PutRow,
    RowIs,
    RowLapsed,
    RowLive,
    RowStarts,
    Write,
)
from casstore.errors import ConditionFailedError, InvalidInputError, ObjectNotFoundError
from casstore.format.digest import DIGEST_BYTES

FindRow = Callable[[str, bytes], bytes | None]
HasObject = Callable[[bytes], bool]

_TABLES = frozenset(TABLES)
_TIMED = (RowLive, RowLapsed)


def require(
    conditions: Sequence[Condition], find_row: FindRow, has_object: HasObject, now_ms: int
) -> None:
    """Raise for the first condition that does not hold."""
    for index, condition in enumerate(conditions):
        if isinstance(condition, RowIs):
            table, key, value = condition
            actual = find_row(table, key)
            if actual != value:
                raise ConditionFailedError(index, condition, actual)
        elif isinstance(condition, ObjectsExist):
            for digest in condition.digests:
                if not has_object(digest):
                    raise ObjectNotFoundError(digest)
        else:
            actual = find_row(condition.table, condition.key)
            if actual is None or not _holds(condition, actual, now_ms):
                raise ConditionFailedError(index, condition, actual)


def _holds(condition: RowStarts | RowLive | RowLapsed, actual: bytes, now_ms: int) -> bool:
    if isinstance(condition, RowStarts):
        return actual.startswith(condition.prefix)
    if isinstance(condition, RowLive):
        return actual.startswith(condition.prefix) and _time_at(actual, condition.offset) > now_ms
    return actual == condition.value and _time_at(actual, condition.offset) <= now_ms


def _time_at(value: bytes, offset: int) -> int:
    # A row too short to hold the time reads as the beginning of all time: never live,
    # always lapsed, so that a damaged lease can be taken over.
    spelled = value[offset : offset + TIME_BYTES]
    return int.from_bytes(spelled, "big") if len(spelled) == TIME_BYTES else 0


def stamped(change: PutRow, now_ms: int) -> bytes:
    """The value of a row with the engine's time written into its stamps."""
    value = change.value
    for offset, add_ms in change.stamps:
        time = max(0, now_ms + add_ms).to_bytes(TIME_BYTES, "big")
        value = value[:offset] + time + value[offset + TIME_BYTES :]
    return value


def validate(write: Write) -> None:
    """Refuse a malformed write before any of it is tried."""
    objects, requirements, rows, deletes = write
    for digest, kind, data, children in objects:
        # Spelled out for the one digest that every object has.
        if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
            check_digests((digest,))
        if children:
            check_digests(children)
        if not 0 <= kind <= MAX_KIND:
            raise InvalidInputError(f"an object of kind {kind} (0 to {MAX_KIND})")
        if len(data) > MAX_OBJECT_BYTES:
            raise InvalidInputError(f"an object of {len(data)} bytes (at most {MAX_OBJECT_BYTES})")
    for condition in requirements:
        if isinstance(condition, ObjectsExist):
            check_digests(condition.digests)
            continue
        table, key = condition[0], condition[1]
        if table not in _TABLES or not 0 < len(key) <= MAX_ROW_KEY_BYTES:
            check_key(table, key)
        if isinstance(condition, _TIMED) and condition.offset < 0:
            raise InvalidInputError(f"a time at offset {condition.offset}")
    for change in rows:
        if isinstance(change, DeleteRow):
            check_key(*change)
            continue
        table, key, value, stamps = change
        if table not in _TABLES or not 0 < len(key) <= MAX_ROW_KEY_BYTES:
            check_key(table, key)
        size = len(value)
        if size > MAX_ROW_VALUE_BYTES:
            raise InvalidInputError(f"a row of {size} bytes (at most {MAX_ROW_VALUE_BYTES})")
        if stamps:
            for offset, add_ms in stamps:
                if not 0 <= offset <= size - TIME_BYTES:
                    raise InvalidInputError(f"a stamp at {offset} outside its row")
                if abs(add_ms) > MAX_STAMP_MS:
                    raise InvalidInputError(f"a stamp of {add_ms} ms from now")
    if deletes:
        check_digests(deletes)


def check_digests(digests: Sequence[bytes]) -> None:
    """Refuse what cannot be the name of an object."""
    for digest in digests:
        if not isinstance(digest, bytes):
            raise InvalidInputError(f"a digest is bytes, not {type(digest).__name__}")
        if len(digest) != DIGEST_BYTES:
            raise InvalidInputError(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")


def check_table(table: str) -> None:
    """Refuse a table that no engine has."""
    if table not in _TABLES:
        raise InvalidInputError(f"no table {table!r}; there are {', '.join(TABLES)}")


def check_key(table: str, key: bytes) -> None:
    """Refuse a row that no engine could hold."""
    if table not in _TABLES:
        check_table(table)
    if not 0 < len(key) <= MAX_ROW_KEY_BYTES:
        raise InvalidInputError(f"a row key of {len(key)} bytes (1 to {MAX_ROW_KEY_BYTES})")
