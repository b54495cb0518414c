"""Names that keep objects from gc: tags until they are removed, pins until a time.

pin = expires_at (8, 0: never) ‖ created_at (8) ‖ digest (32) ‖ [name, note, is a tag]

A pin of a session has one more item, the session's id: erasing the session removes the pin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from casstore.engine.protocol import (
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
    CorruptionError,
    NameTakenError,
)
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import Digest
from casstore.session import keys, marks
from casstore.session.arguments import check_ms, check_text
from casstore.session.attempts import transaction
from casstore.session.data import Pin
from casstore.session.scanning import scan
from casstore.session.state import Runtime

EXPIRES_AT: Final = 0
_CREATED_AT: Final = 8
_DIGEST: Final = 16
_DETAILS: Final = 48


@transaction("the pin {name!r}")
def put(
    runtime: Runtime,
    name: str,
    digest: bytes,
    *,
    ttl_ms: int | None,
    note: str | None,
    is_tag: bool,
    move: bool,
    session: str | None = None,
) -> Pin:
    """Make a name keep an object alive: as a tag, or as a pin that may expire after ``ttl_ms``.

    With ``session``, erasing that session removes the pin.
    NameTakenError if a tag would take a name that keeps another object, unless ``move``; and if a
    pin would take the name of a tag, even for the same object.
    """
    if ttl_ms is not None:
        check_ms(ttl_ms, "ttl_ms", least=1)
    if note is not None:
        keys.id_bytes(note, "note")
    row_key = RowKey("pins", keys.part(name, "a name"))
    target = Digest(digest)
    owner = [] if session is None else [session]
    value = bytes(_DIGEST) + target + pack_checked([name, note, is_tag, *owner])
    stamps = [Stamp(_CREATED_AT)]
    if ttl_ms is not None:
        stamps.append(Stamp(EXPIRES_AT, ttl_ms))
    row = runtime.engine.get_rows([row_key])[0]
    if row is not None and not move:
        known, known_is_tag = _decode(row)
        is_live = not _expired(known, runtime.engine.now_ms())
        # A pin in place of a tag would release the object when the pin expires.
        if known_is_tag and not is_tag:
            raise NameTakenError(name, known.digest, is_tag=True)
        if is_tag and is_live and known.digest != target:
            raise NameTakenError(name, known.digest, is_tag=known_is_tag)
    conditions: list[Condition] = [RowIs(*row_key, row), ObjectsExist((target,))]
    done = runtime.engine.write(
        Write(
            conditions=conditions,
            rows=[PutRow(*row_key, value, stamps), marks.put_pin_mark(target)],
        )
    )
    expires = None if ttl_ms is None else done.now_ms + ttl_ms
    return Pin(name, target, done.now_ms, expires, note, session)


def put_tag(name: str, digest: bytes) -> PutRow:
    """The change that makes a name a tag of an object, to be written if ``is_free`` holds."""
    value = bytes(_DIGEST) + Digest(digest) + pack_checked([name, None, True])
    return PutRow("pins", keys.part(name, "a name"), value, [Stamp(_CREATED_AT)])


def is_free(runtime: Runtime, name: str, digest: bytes) -> RowIs:
    """The condition for ``put_tag``: the row of the name is unchanged since it was read here.

    NameTakenError if the name keeps another object.
    """
    row_key = RowKey("pins", keys.part(name, "a name"))
    row = runtime.engine.get_rows([row_key])[0]
    if row is not None:
        known, is_tag = _decode(row)
        if known.digest != digest and not _expired(known, runtime.engine.now_ms()):
            raise NameTakenError(name, known.digest, is_tag=is_tag)
    return RowIs(*row_key, row)


@transaction("the pin {name!r}")
def remove(runtime: Runtime, name: str) -> bool:
    """Remove a tag or pin; False if there was none."""
    row_key = RowKey("pins", keys.part(name, "a name"))
    row = runtime.engine.get_rows([row_key])[0]
    if row is None:
        return False
    runtime.engine.write(Write(conditions=[RowIs(*row_key, row)], rows=[DeleteRow(*row_key)]))
    return True


def find(runtime: Runtime, name: str) -> Pin | None:
    """One tag or pin; None if it does not exist or has expired."""
    row = runtime.engine.get_rows([RowKey("pins", keys.part(name, "a name"))])[0]
    if row is None:
        return None
    pin = _decode(row)[0]
    return None if _expired(pin, runtime.engine.now_ms()) else pin


def list_pins(runtime: Runtime, prefix: str, *, expired: bool) -> Iterator[Pin]:
    """Pins and tags in order of name; expired pins only if ``expired``."""
    check_text(prefix, "prefix")
    return _listed(runtime, prefix, expired=expired)


def _listed(runtime: Runtime, prefix: str, *, expired: bool) -> Iterator[Pin]:
    for row in scan(runtime.engine, "pins", *keys.prefix_range(prefix)):
        pin = _decode(row.value)[0]
        gone = _expired(pin, runtime.engine.now_ms())
        if pin.name.startswith(prefix) and (expired or not gone):
            yield pin


def kept_digest(row: bytes, now_ms: int) -> bytes | None:
    """The digest that a pin's row keeps alive; None if the pin has expired."""
    pin = _decode(row)[0]
    return None if _expired(pin, now_ms) else pin.digest


def name_of(row: bytes) -> str:
    """The name in a pin's row."""
    return _decode(row)[0].name


def decode_pin(row: bytes) -> Pin:
    """Decode the row of a pin or tag, expired or not."""
    return _decode(row)[0]


def _expired(pin: Pin, now_ms: int) -> bool:
    return pin.expires_at_ms is not None and pin.expires_at_ms <= now_ms


def _decode(row: bytes) -> tuple[Pin, bool]:
    """A pin, and whether it is a tag."""
    try:
        name, note, is_tag, *owner = unpack_checked(row[_DETAILS:])
        [session] = owner or [None]
        expires_at_ms = int.from_bytes(row[EXPIRES_AT:_CREATED_AT], "big")
        created_at_ms = int.from_bytes(row[_CREATED_AT:_DIGEST], "big")
        digest = Digest(row[_DIGEST:_DETAILS])
        return Pin(name, digest, created_at_ms, expires_at_ms or None, note, session), is_tag
    except (TypeError, ValueError) as exc:
        raise CorruptionError("a pin is damaged") from exc
