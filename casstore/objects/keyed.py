"""A map inside another object, changed key by key: spelled in place while it is short.

Whatever way it came to its content, it is spelled as that content is (P4); a long one is
a tree, and changing it reads and writes only the pieces on the way (P8).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from casstore.format import canonical, splitting
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.format.splitting import Emit, Spelled
from casstore.objects import edit, splice
from casstore.objects.pieces import PieceReader
from casstore.objects.values import Assembly, Outline

# So many changes at once, each worth so many keys, are made by spelling the map anew.
_MANY_STEPS: Final = 32
_WORTH_KEYS: Final = 32


def change_map(
    reader: PieceReader,
    spelled: Spelled,
    put: dict[str, Any],
    drop: Iterable[str],
    room: int,
    emit: Emit,
) -> Spelled:
    """Spell the map with ``drop`` taken out and ``put`` put in; nil counts as an empty map.

    ``reader`` must see what ``emit`` took.
    """
    steps: list[edit.Edit] = [edit.Delete((key,)) for key in drop if key not in put]
    steps += [edit.Set((key,), value) for key, value in put.items()]
    while steps:
        if spelled.data[0] in canonical.CONTAINER_BYTES or not spelled.links:
            return _change_short(spelled, steps, room, emit)
        if len(steps) >= _MANY_STEPS and len(steps) * _WORTH_KEYS >= _length(reader, spelled):
            [mapping] = Assembly(reader, DEFAULT_MAX_BYTES).load(
                [canonical.decode(spelled.data, Outline)]
            )
            return _spell_changed(mapping, steps, room, emit)
        step = steps.pop(0)
        if isinstance(step, edit.Delete) and not has_key(reader, spelled, str(step.path[0])):
            continue
        spelled = edit.respell(reader, spelled.links[0], step, emit)
    return spelled


def _change_short(spelled: Spelled, steps: list[edit.Edit], room: int, emit: Emit) -> Spelled:
    return _spell_changed(canonical.decode(spelled.data, Outline) or {}, steps, room, emit)


def _spell_changed(
    mapping: dict[str, Any], steps: list[edit.Edit], room: int, emit: Emit
) -> Spelled:
    for step in steps:
        key = str(step.path[0])
        if isinstance(step, edit.Set):
            mapping[key] = step.value
        else:
            mapping.pop(key, None)
    return splitting.spell(mapping, room, emit)


def _length(reader: PieceReader, spelled: Spelled) -> int:
    """How many keys a long map has."""
    container = splice.open_container(reader, reader.follow(spelled.links[:1])[0])
    return 0 if container is None else splice.length(container)


def has_key(reader: PieceReader, spelled: Spelled, key: str) -> bool:
    """Is ``key`` in the map? Reads only the pieces on the way to it."""
    if spelled.data[0] in canonical.CONTAINER_BYTES:
        return key in canonical.decode(spelled.data, Outline)
    if not spelled.links:
        return False
    container = splice.open_container(reader, reader.follow(spelled.links[:1])[0])
    return container is not None and splice.find_key(reader, container, key)[1] is not None


def is_only_key(reader: PieceReader, spelled: Spelled, key: str) -> bool:
    """Does the map hold ``key`` and nothing else?"""
    if spelled.data[0] in canonical.CONTAINER_BYTES:
        return list(canonical.decode(spelled.data, Outline)) == [key]
    if not spelled.links:
        return False
    container = splice.open_container(reader, reader.follow(spelled.links[:1])[0])
    return (
        container is not None
        and splice.length(container) == 1
        and splice.find_key(reader, container, key)[1] is not None
    )
