"""Finds when the nodes of a session were committed, from the rows of its history."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from casstore.engine.protocol import RowKey
from casstore.objects import graph
from casstore.session import keys
from casstore.session.state import COMMIT, REWIND, HeadRow, Runtime, decode_head

_PAGE: Final = 256


class Times(NamedTuple):
    """Commit times: ``times_ms[i]`` is that of the nodes from ``positions[i]`` to the next one."""

    positions: list[int]
    times_ms: list[int]

    def at(self, position: int) -> int:
        """When the node at a position was committed."""
        return self.times_ms[bisect_right(self.positions, position) - 1]


def commit_times(runtime: Runtime, key: bytes, head: HeadRow, nodes: int, start: int) -> Times:
    """When the nodes from ``start`` on were committed to a session with ``nodes`` nodes.

    If the revision that added a node was removed, the time is that of the next revision. Nodes
    that came with a fork or an adopted session have the time at which they came.
    """
    positions: list[int] = []
    times_ms: list[int] = []
    newer, count = head, nodes
    if count > start:
        for row in _earlier(runtime, key, head):
            before = min(count, graph.read_manifest(runtime.reader(), row.manifest).nodes)
            if before < count:
                positions.append(before)
                times_ms.append(newer.committed_at_ms)
            newer, count = row, before
            if count <= start:
                break
    return Times([0, *reversed(positions)], [newer.committed_at_ms, *reversed(times_ms)])


def _earlier(runtime: Runtime, key: bytes, head: HeadRow) -> Iterator[HeadRow]:
    """The revisions that ``head`` is based on, newest first.

    A revision made by a rewind is based on the one that it went back to.
    """
    row = head
    while True:
        if row.operation == REWIND and row.rewound_to is not None:
            place = RowKey("history", keys.history(key, row.rewound_to))
            [target] = runtime.engine.get_rows([place])
            if target is None:
                return
            row = decode_head(target)
            yield row
            continue
        if row.operation != COMMIT:
            return
        page = runtime.engine.scan_rows(
            "history",
            start=keys.history(key, 0),
            stop=keys.history(key, row.revision),
            limit=_PAGE,
            reverse=True,
        )
        if not page:
            return
        for one in page:
            row = decode_head(one.value)
            yield row
            if row.operation != COMMIT:
                break
