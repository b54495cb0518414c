"""A map inside another object, changed key by key; stored inline while it is short.

The encoding depends on the content alone (P4). A long map is a tree, and a change reads and writes
only the pieces on the path (P8).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from casstore.format import canonical, splitting
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.format.splitting import Emit, Encoded
from casstore.objects import edit, splice
from casstore.objects.pieces import PieceReader
from casstore.objects.values import Assembly, Outline

# The whole map is rewritten if there are at least _MANY_STEPS changes, and at least one for each
# _WORTH_KEYS keys.
_MANY_STEPS: Final = 32
_WORTH_KEYS: Final = 32


def change_map(
    reader: PieceReader,
    encoded: Encoded,
    put: dict[str, Any],
    drop: Iterable[str],
    depth_left: int,
    emit: Emit,
) -> Encoded:
    """The map without the keys ``drop`` and with the entries ``put``; nil counts as an empty map.

    ``depth_left``: how many levels the map may nest. ``reader`` must also read the objects that
    ``emit`` received.
    """
    steps: list[edit.Edit] = [edit.Delete((key,)) for key in drop if key not in put]
    steps += [edit.Set((key,), value) for key, value in put.items()]
    while steps:
        if encoded.data[0] in canonical.CONTAINER_BYTES or not encoded.links:
            return _change_short(encoded, steps, depth_left, emit)
        if len(steps) >= _MANY_STEPS and len(steps) * _WORTH_KEYS >= _length(reader, encoded):
            [mapping] = Assembly(reader, DEFAULT_MAX_BYTES).load(
                [canonical.decode(encoded.data, Outline)]
            )
            return _encode_changed(mapping, steps, depth_left, emit)
        step = steps.pop(0)
        if isinstance(step, edit.Delete) and not has_key(reader, encoded, str(step.path[0])):
            continue
        encoded = edit.reencode(reader, encoded.links[0], step, emit)
    return encoded


def _change_short(encoded: Encoded, steps: list[edit.Edit], depth_left: int, emit: Emit) -> Encoded:
    return _encode_changed(canonical.decode(encoded.data, Outline) or {}, steps, depth_left, emit)


def _encode_changed(
    mapping: dict[str, Any], steps: list[edit.Edit], depth_left: int, emit: Emit
) -> Encoded:
    for step in steps:
        key = str(step.path[0])
        if isinstance(step, edit.Set):
            mapping[key] = step.value
        else:
            mapping.pop(key, None)
    return splitting.encode_split(mapping, depth_left, emit)


def _length(reader: PieceReader, encoded: Encoded) -> int:
    """The number of keys of a long map."""
    container = splice.open_container(reader, reader.follow(encoded.links[:1])[0])
    return 0 if container is None else splice.length(container)


def has_key(reader: PieceReader, encoded: Encoded, key: str) -> bool:
    """True if the map has ``key``; reads only the pieces on the path to it."""
    if encoded.data[0] in canonical.CONTAINER_BYTES:
        return key in canonical.decode(encoded.data, Outline)
    if not encoded.links:
        return False
    container = splice.open_container(reader, reader.follow(encoded.links[:1])[0])
    return container is not None and splice.find_key(reader, container, key)[1] is not None


def is_only_key(reader: PieceReader, encoded: Encoded, key: str) -> bool:
    """True if ``key`` is the only key of the map."""
    if encoded.data[0] in canonical.CONTAINER_BYTES:
        return list(canonical.decode(encoded.data, Outline)) == [key]
    if not encoded.links:
        return False
    container = splice.open_container(reader, reader.follow(encoded.links[:1])[0])
    return (
        container is not None
        and splice.length(container) == 1
        and splice.find_key(reader, container, key)[1] is not None
    )
