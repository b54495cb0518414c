"""Lineages that are written before any row reaches them, and how a row comes to reach them.

Vacuum, imports and copies write the nodes of a lineage first, in steps, and then let a head
or a revision name it. In between nobody reaches it, and whoever removes lineages that nobody
needs may take it, or have decided to. So the write that names it

* stands under the condition that its first row is there, which goes before all others;
* changes the removals row: what was decided before must be decided again.

The first row is that which says what the lineage goes on from; if it goes on from nothing,
its first page. It is written before the others, or with them.
"""

from __future__ import annotations

from collections.abc import Iterable

from casstore.engine.protocol import RowIs, RowStarts
from casstore.errors import ConditionFailedError
from casstore.session import keys
from casstore.session.heads import LINEAGE_BYTES


def first_row(lineage: bytes, *, has_base: bool) -> bytes:
    """The key of the row of a lineage that goes before all others of it."""
    return keys.lineage_row(lineage) if has_base else keys.lineage_page(lineage, 0)


def is_there(first: bytes) -> RowStarts:
    """That nobody has removed the lineage whose first row this is."""
    return RowStarts("nodes", first, b"")


def has_gone(failed: ConditionFailedError) -> bool:
    """Did a write fail because a lineage that was prepared for it was removed?"""
    condition = failed.condition
    return isinstance(condition, RowStarts) and condition.table == "nodes"


def still_gone(nodes_keys: Iterable[bytes]) -> list[RowIs]:
    """That lineages of which only the rest is removed here have no first row again.

    Somebody may have written them anew meanwhile, and would miss the rest.
    """
    of: dict[bytes, set[bytes]] = {}
    for key in nodes_keys:
        of.setdefault(key[:LINEAGE_BYTES], set()).add(key)
    conditions: list[RowIs] = []
    for lineage, own in of.items():
        for first in (first_row(lineage, has_base=True), first_row(lineage, has_base=False)):
            if first in own:
                break
            conditions.append(RowIs("nodes", first, None))
    return conditions
