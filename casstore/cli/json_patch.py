"""Changes as a JSON Patch (RFC 6902): operations that, one after the other, make the new value.

A ``Change`` tells places in the old value and in the new one; an operation tells the place
in the value as the operations before it have left it. In a list, changes come in order, so
what stands before a place is new already, and only what was removed has to be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from casstore.cli.spelling import plain_key
from casstore.errors import PathStep
from casstore.objects.diff import ADDED, REMOVED, Change

Path = tuple[PathStep, ...]


def pointer(path: Path) -> str:
    """A JSON Pointer (RFC 6901)."""
    return "".join(["/" + _token(step) for step in path])


def _token(step: PathStep) -> str:
    """One step, spelled as the key is that it leads to."""
    if isinstance(step, int):
        return str(step)
    return plain_key(step).replace("~", "~0").replace("/", "~1")


def operations(changes: Iterable[Change]) -> Iterator[dict[str, Any]]:
    """The operations that make the new value of the old one."""
    shifts: dict[Path, int] = {}
    for change in changes:
        if change.op == REMOVED:
            at = _current(change.path, shifts)
            _shift(shifts, at, -1)
            yield {"op": "remove", "path": pointer(at)}
        elif change.op == ADDED:
            _shift(shifts, change.path, 1)
            yield {"op": "add", "path": pointer(change.path), "value": change.stored_after()}
        else:
            yield {"op": "replace", "path": pointer(change.path), "value": change.stored_after()}


def _current(old: Path, shifts: dict[Path, int]) -> Path:
    """Where something of the old value is by now."""
    at: Path = ()
    for step in old:
        at = (*at, step + shifts.get(at, 0) if isinstance(step, int) else step)
    return at


def _shift(shifts: dict[Path, int], at: Path, by: int) -> None:
    """Everything behind this place of a list moves."""
    if at and isinstance(at[-1], int):
        shifts[at[:-1]] = shifts.get(at[:-1], 0) + by
