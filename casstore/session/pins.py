"""Names that keep objects alive: tags for good, pins until a time.

pin = expires_at (8, 0: never) ‖ created_at (8) ‖ digest (32) ‖ [name, note, is a tag]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import (
    MAX_STAMP_MS,
    Condition,
    DeleteRow,
    ObjectsExist,
    PutRow,
    RowIs,
    RowKey,
    Stamp,
    Write,
)
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    NameTakenError,
)
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import Digest
from casstore.session import keys, marks
from casstore.session.arguments import check_text
from casstore.session.attempts import Attempts
from casstore.session.data import Pin
from casstore.session.scanning import scan
from casstore.session.state import Runtime

EXPIRES_AT: Final = 0
_CREATED_AT: Final = 8
_DIGEST: Final = 16
_DETAILS: Final = 48


def put(
    runtime: Runtime,
    name: str,
    digest: bytes,
    *,
    ttl_ms: int | None,
    note: str | None,
    is_tag: bool,
    move: bool,
) -> Pin:
    """Let a name keep an object. A tag gives its name to another object only if ``move``.

    A pin takes no tag's name, not even for the same object.
    """
    if ttl_ms is not None and (type(ttl_ms) is not int or not 0 < ttl_ms <= MAX_STAMP_MS):
        raise InvalidInputError(f"a pin lasts 1 ms or more, not {ttl_ms!r}")
    if note is not None:
        keys.id_bytes(note, "a note")
    place = RowKey("pins", keys.part(name, "a name"))
    target = Digest(digest)
    value = bytes(_DIGEST) + target + pack_checked([name, note, is_tag])
    stamps = [Stamp(_CREATED_AT)]
    if ttl_ms is not None:
        stamps.append(Stamp(EXPIRES_AT, ttl_ms))
    attempts = Attempts(f"the pin {name!r}")
    while True:
        attempts.begin()
        row = runtime.engine.get_rows([place])[0]
        if row is not None and not move:
            known, known_is_tag = _decode(row)
            is_live = not _expired(known, runtime.engine.now_ms())
            # A pin of what a tag keeps for good would let it go when its time is up.
            if known_is_tag and not is_tag:
                raise NameTakenError(name, known.digest, is_tag=True)
            if is_tag and is_live and known.digest != target:
                raise NameTakenError(name, known.digest, is_tag=known_is_tag)
        conditions: list[Condition] = [RowIs(*place, row), ObjectsExist((target,))]
        try:
            done = runtime.engine.write(
                Write(
                    conditions=conditions,
                    rows=[PutRow(*place, value, stamps), marks.put_pin_mark(target)],
                )
            )
        except ConditionFailedError:
            continue
        expires = None if ttl_ms is None else done.now_ms + ttl_ms
        return Pin(name, target, done.now_ms, expires, note)


def put_tag(name: str, digest: bytes) -> PutRow:
    """The change that makes a name keep an object for good; see ``is_free``."""
    value = bytes(_DIGEST) + Digest(digest) + pack_checked([name, None, True])
    return PutRow("pins", keys.part(name, "a name"), value, [Stamp(_CREATED_AT)])


def is_free(runtime: Runtime, name: str, digest: bytes) -> RowIs:
    """The condition under which a tag may take a name; NameTakenError if another object has it."""
    place = RowKey("pins", keys.part(name, "a name"))
    row = runtime.engine.get_rows([place])[0]
    if row is not None:
        known, is_tag = _decode(row)
        if known.digest != digest and not _expired(known, runtime.engine.now_ms()):
            raise NameTakenError(name, known.digest, is_tag=is_tag)
    return RowIs(*place, row)


def remove(runtime: Runtime, name: str) -> bool:
    """Take a name away; False if there was none."""
    place = RowKey("pins", keys.part(name, "a name"))
    attempts = Attempts(f"the pin {name!r}")
    while True:
        attempts.begin()
        row = runtime.engine.get_rows([place])[0]
        if row is None:
            return False
        try:
            runtime.engine.write(Write(conditions=[RowIs(*place, row)], rows=[DeleteRow(*place)]))
        except ConditionFailedError:
            continue
        return True


def find(runtime: Runtime, name: str) -> Pin | None:
    """One pin; None if there is none, or its time is up."""
    row = runtime.engine.get_rows([RowKey("pins", keys.part(name, "a name"))])[0]
    if row is None:
        return None
    pin = _decode(row)[0]
    return None if _expired(pin, runtime.engine.now_ms()) else pin


def list_pins(runtime: Runtime, prefix: str, *, expired: bool) -> Iterator[Pin]:
    """Pins and tags by name; those whose time is up only if asked for."""
    check_text(prefix, "a prefix")
    return _listed(runtime, prefix, expired=expired)


def _listed(runtime: Runtime, prefix: str, *, expired: bool) -> Iterator[Pin]:
    for row in scan(runtime.engine, "pins", *keys.prefix_range(prefix)):
        pin = _decode(row.value)[0]
        gone = _expired(pin, runtime.engine.now_ms())
        if pin.name.startswith(prefix) and (expired or not gone):
            yield pin


def kept_digest(row: bytes, now_ms: int) -> bytes | None:
    """What a pin's row keeps; None if its time is up."""
    pin = _decode(row)[0]
    return None if _expired(pin, now_ms) else pin.digest


def name_of(row: bytes) -> str:
    """The name that a pin's row is about."""
    return _decode(row)[0].name


def decode_pin(row: bytes) -> Pin:
    """Read the row of a pin or tag."""
    return _decode(row)[0]


def _expired(pin: Pin, now_ms: int) -> bool:
    return pin.expires_at_ms is not None and pin.expires_at_ms <= now_ms


def _decode(row: bytes) -> tuple[Pin, bool]:
    """A pin, and whether it is a tag."""
    try:
        name, note, is_tag = unpack_checked(row[_DETAILS:])
        expires_at_ms = int.from_bytes(row[EXPIRES_AT:_CREATED_AT], "big")
        created_at_ms = int.from_bytes(row[_CREATED_AT:_DIGEST], "big")
        digest = Digest(row[_DIGEST:_DETAILS])
        return Pin(name, digest, created_at_ms, expires_at_ms or None, note), is_tag
    except (TypeError, ValueError) as exc:
        raise CorruptionError("a pin is damaged") from exc


def decode(row: bytes) -> Pin:
    """A pin as its row holds it, whether or not its time is up."""
    return _decode(row)[0]
