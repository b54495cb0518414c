"""Finds which nodes of a graph are indexed already, and in which segments.

A segment is a run of nodes at consecutive positions, which continues a parent segment. Graphs with
equal first nodes share the segments of these nodes.

A binary search compares the graph with the index at a few positions: each node has its number in
it and links to its parent, so if the nodes at one position are equal, those before them are equal
too. This fails only for graphs that differ in an earlier branch alone: the texts of that branch are
then missing from the index. A search never shows the other graph's texts in their place, because it
compares the digests of its hits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from casstore.objects.node_index import NodeIndex
from casstore.search.tables import SHORT, Database, Span, next_id


class Segment(NamedTuple):
    """A row of ``segments``."""

    id: int
    parent: int
    start: int
    stop: int
    #: Its end was removed, so nodes are never added to it again.
    closed: bool


#: The parent of a segment that has none.
NO_SEGMENT = Segment(0, 0, 0, 0, True)
_COLUMNS = "id, parent, start, stop, closed"


def doc_id(segment: int, position: int) -> int:
    """The id of the doc of the node at ``position``, which is in ``segment``."""
    return segment << 32 | position


def doc_place(doc: int) -> tuple[int, int]:
    """The segment and position of a node's doc."""
    return doc >> 32, doc & 0xFFFFFFFF


def find_segment(db: Database, segment: int) -> Segment | None:
    """A segment by its id."""
    rows = db.rows(f"SELECT {_COLUMNS} FROM {{s}}segments WHERE id = ?", (segment,))
    return Segment(*rows[0]) if rows else None


def ancestry(db: Database, segment: int) -> list[Segment]:
    """A segment and its ancestors, the segments that it continues; the oldest first."""
    found: list[Segment] = []
    while segment and (one := find_segment(db, segment)) is not None:
        found.append(one)
        segment = one.parent
    return found[::-1]


def spans(db: Database, segment: int, nodes: int) -> Iterator[Span]:
    """Ranges of ids: the docs of the first ``nodes`` nodes of a graph that ends in ``segment``."""
    stop = nodes
    for one in reversed(ancestry(db, segment)):
        if stop > one.start:
            yield doc_id(one.id, one.start), doc_id(one.id, stop - 1)
        stop = min(stop, one.start)


class IndexedGraph(NamedTuple):
    """How many nodes of a graph are indexed, and the segment in which the last of them is."""

    segment: Segment
    nodes: int


def locate(db: Database, index: NodeIndex, near: int | None) -> IndexedGraph:
    """How much of a graph is indexed; ``near`` is the segment where its session's graph ended."""
    chain = [] if near is None else ancestry(db, near)
    nodes = _common(db, index, chain)
    while chain and chain[-1].start >= nodes:
        chain.pop()
    segment = chain[-1] if chain else NO_SEGMENT
    while nodes < index.count and (child := _continued(db, index, segment, nodes)) is not None:
        common = _common(db, index, [child])
        if common == nodes:
            # The docs of ``child`` are missing, because the file was damaged: the caller indexes
            # these nodes again.
            break
        segment, nodes = child, common
    return IndexedGraph(segment, nodes)


def _continued(db: Database, index: NodeIndex, segment: Segment, nodes: int) -> Segment | None:
    """A child of ``segment`` that begins, at position ``nodes``, with the graph's node there."""
    rows = db.rows(
        f"SELECT {_COLUMNS} FROM {{s}}segments "
        "WHERE parent = ? AND start = ? AND first = ? ORDER BY id LIMIT 1",
        (segment.id, nodes, index.place(nodes).digest[:SHORT]),
    )
    return Segment(*rows[0]) if rows else None


def _common(db: Database, index: NodeIndex, chain: list[Segment]) -> int:
    """How many of a graph's first nodes are indexed, in these segments.

    The nodes before the first segment must be known to be equal.
    """
    if not chain:
        return 0
    low, high = chain[0].start, min(chain[-1].stop, index.count)
    # Most graphs were only appended to, so the end is compared first.
    probe = high - 1
    while low < high:
        segment = next(one for one in reversed(chain) if one.start <= probe)
        rows = db.rows("SELECT digest FROM {s}docs WHERE id = ?", (doc_id(segment.id, probe),))
        if rows and bytes(rows[0][0]) == index.place(probe).digest[:SHORT]:
            low = probe + 1
        else:
            high = probe
        probe = (low + high) // 2
    return low


def extended(db: Database, located: IndexedGraph, first: bytes) -> Segment:
    """The segment for the nodes after ``located``: the same one, or a new one that continues it.

    ``first`` is the digest of the first of these nodes.
    """
    segment, nodes = located
    if not segment.closed and nodes == segment.stop:
        return segment
    made = Segment(next_id(db, "segments"), segment.id, nodes, nodes, False)
    db.run(
        "INSERT INTO {s}segments (id, parent, start, stop, closed, first) "
        "VALUES (?, ?, ?, ?, 0, ?)",
        (*made[:4], first[:SHORT]),
    )
    return made


def trim(db: Database, loose: set[int]) -> int:
    """Remove the docs of nodes that no state needs from the segments ``loose``; returns how many.

    Parents of segments that this empties are trimmed, too.
    """
    removed = 0
    while loose:
        segment = find_segment(db, loose.pop())
        if segment is None:
            continue
        [[needed]] = db.rows(
            "SELECT max(stop) FROM ("
            "SELECT max(nodes) AS stop FROM {s}states WHERE segment = ? "
            "UNION ALL SELECT max(start) FROM {s}segments WHERE parent = ?) AS needed",
            (segment.id, segment.id),
        )
        stop = max(needed or 0, segment.start)
        if stop < segment.stop:
            removed += db.run(
                "DELETE FROM {s}docs WHERE id BETWEEN ? AND ?",
                (doc_id(segment.id, stop), doc_id(segment.id, segment.stop - 1)),
            )
        if needed is None:
            db.run("DELETE FROM {s}segments WHERE id = ?", (segment.id,))
            if segment.parent:
                loose.add(segment.parent)
        elif stop < segment.stop:
            # The words of the removed docs stay in ``texts`` until the index is rebuilt, so their
            # ids must not be used again: the segment is closed.
            db.run("UPDATE {s}segments SET stop = ?, closed = 1 WHERE id = ?", (stop, segment.id))
    return removed
