"""The coordinates of a picture of a session's branches and forks: each is a *lane*.

A lane is a horizontal line for one path, from left to right by depth: the active path, branches
inside the graph, paths that rewinds and adoptions left, forks, and the session that this one was
forked from. Only depths at which a lane begins or ends get a coordinate of their own; the nodes
between two of them are one line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from casstore.errors import CasstoreError
from casstore.objects import graph
from casstore.objects.node_index import NodeIndex, common_prefix
from casstore.session.attempts import read_again
from casstore.session.data import Origin
from casstore.session.state import State
from casstore.ui.views.catalogue import forks_of
from casstore.ui.views.viewed import Viewed, ViewedPlace

MAX_LANES: Final = 40
# Of a graph with more nodes, only this many, the newest, are searched for branches.
_MAX_NODES: Final = 20_000
# How many of the newest revisions are searched for rewinds.
_MAX_ENTRIES: Final = 256
_MAX_LEFT: Final = 8
_LEVELS: Final = 6

# The picture, in pixels.
_LEFT: Final = 14
_TOP: Final = 16
_ROW: Final = 24
_LEAST_GAP: Final = 16
_WIDEST: Final = 860
_LABEL: Final = 7.2
_LABEL_CHARACTERS: Final = 34

ACTIVE: Final = "active"
BRANCH: Final = "branch"
LEFT_BEHIND: Final = "left"
FORK: Final = "fork"
SOURCE: Final = "source"


class Lane(NamedTuple):
    """A path from where it leaves its parent lane to its end, by depth."""

    kind: str
    label: str
    #: The depth of the last node that it shares with its parent (0: none), and of its last node.
    start: int
    end: int
    #: The number of the lane that it leaves; None for the first.
    parent: int | None
    session: str
    #: The revision and the leaf at which the session's page shows this path.
    at: int | None = None
    leaf: str | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes that it does not share with its parent lane."""
        return max(0, self.end - self.start)


class DrawnLane(NamedTuple):
    """A lane with its coordinates."""

    lane: Lane
    y: int
    parent_y: int | None
    x1: int
    x2: int
    #: The x coordinates at which other lanes leave it.
    joints: tuple[int, ...]


class Picture(NamedTuple):
    """All lanes, drawn."""

    lanes: tuple[DrawnLane, ...]
    width: int
    height: int
    #: Lanes that are not drawn.
    omitted: int


def lanes(viewed: Viewed, place: ViewedPlace) -> Picture:
    """Draw the branches and forks of a session, at the revision that is viewed, as lanes."""
    return read_again(lambda: draw(*_found(viewed, place)))


def _found(viewed: Viewed, place: ViewedPlace) -> tuple[list[Lane], int]:
    label = place.session if place.is_head else f"{place.session}@{place.revision}"
    found = [Lane(ACTIVE, label, 0, len(place.path), None, place.session)]
    omitted = 0
    for lane in _others(viewed, place, found):
        if len(found) < MAX_LANES:
            found.append(lane)
        else:
            omitted += 1
    return found, omitted


def _others(viewed: Viewed, place: ViewedPlace, found: list[Lane]) -> Iterator[Lane]:
    """All lanes but the active one; the caller adds each to ``found`` before it takes the next."""
    yield from _branches(viewed, place, len(found))
    yield from _left_behind(viewed, place)
    origin = place.head.head.origin
    if origin is not None:
        source = _forked(viewed, SOURCE, origin.session, origin, 0)
        if source is not None:
            yield source._replace(start=min(source.start, len(place.path)))
    level = [(place.session, 0)]
    for _ in range(_LEVELS):
        following: list[tuple[str, int]] = []
        for session, parent in level:
            for fork in forks_of(viewed, session):
                assert fork.origin is not None
                if session == place.session and fork.origin.revision > place.revision:
                    # It was forked later than the revision that is shown.
                    continue
                lane = _forked(viewed, FORK, fork.id, fork.origin, parent)
                if lane is None:
                    continue
                yield lane._replace(start=min(lane.start, found[parent].end))
                if len(found) < MAX_LANES:
                    following.append((fork.id, len(found) - 1))
        level = following


def _branches(viewed: Viewed, place: ViewedPlace, first: int) -> Iterator[Lane]:
    """A lane for each path of the graph that ends outside the active path."""
    index = place.nodes
    if len(place.path) == index.count:
        return
    start = max(0, index.count - _MAX_NODES)
    covered: dict[int, int] = dict.fromkeys(place.path, 0)
    depths: dict[int, int] = {position: at + 1 for at, position in enumerate(place.path)}
    parents: dict[int, int | None] = {}
    inner: set[int] = set()
    for position in range(start, index.count):
        above = index.parent(position)
        parents[position] = above
        if above is not None:
            inner.add(above)
        depths.setdefault(position, 1 + (depths.get(above, 0) if above is not None else 0))
    tips = [one for one in parents if one not in inner and one not in covered][::-1]
    headers = graph.read_headers(viewed.reader(), index.digests(tips[:MAX_LANES]))
    for number, tip in enumerate(tips):
        step: int | None = tip
        while step is not None and step not in covered:
            covered[step] = first + number
            step = parents.get(step)
        parent = 0 if step is None else covered[step]
        begin = 0 if step is None else depths[step]
        name = headers[number].id if number < len(headers) else ""
        yield Lane(
            BRANCH, name, begin, depths[tip], parent, place.session,
            None if place.is_head else place.revision, name,
        )  # fmt: skip


def _left_behind(viewed: Viewed, place: ViewedPlace) -> Iterator[Lane]:
    """Lanes of the paths that were active until a rewind or adoption, the newest first."""
    handle = viewed.store.session(place.session)
    left = _MAX_LEFT
    seen: set[bytes] = set()
    for entry in handle.history(before=place.revision + 1, limit=_MAX_ENTRIES):
        if entry.operation not in ("rewind", "adopt") or not left:
            continue
        try:
            state = viewed.runtime.at(place.session, entry.revision - 1)
            lane = _left_lane(viewed, place, state)
        except CasstoreError:
            continue
        if lane is not None and state.manifest.leaf not in seen:
            assert state.manifest.leaf is not None
            seen.add(state.manifest.leaf)
            left -= 1
            yield lane


def _left_lane(viewed: Viewed, place: ViewedPlace, state: State) -> Lane | None:
    manifest = state.manifest
    if manifest.leaf is None or manifest.leaf_id is None:
        return None
    index: NodeIndex = viewed.runtime.index(manifest)
    shared = common_prefix(place.nodes, index)
    position = index.position_of(manifest.leaf_id, manifest.leaf)
    if position < shared or position - shared > _MAX_NODES:
        return None
    [header] = graph.read_headers(viewed.reader(), [manifest.leaf])
    own = 0
    for step in index.up(position):
        if step < shared:
            break
        own += 1
    start = min(header.depth - own, len(place.path))
    return Lane(
        LEFT_BEHIND, f"revision {state.head.revision}", start, header.depth, 0, place.session,
        state.head.revision,
    )  # fmt: skip


def _forked(viewed: Viewed, kind: str, session: str, origin: Origin, parent: int) -> Lane | None:
    """The lane of a fork, or of the session that it was forked from; None if it is gone."""
    try:
        state = viewed.runtime.find(session)
        if state is None:
            return None
        end = _depth(viewed, state.manifest.leaf)
    except CasstoreError:
        return None
    try:
        manifest = viewed.runtime.at(origin.session, origin.revision).manifest
        digest = manifest.leaf
        if origin.node is not None:
            [found] = viewed.runtime.index(manifest).find([origin.node])
            digest = None if found is None else found.digest
        start = min(_depth(viewed, digest), end)
    except CasstoreError:
        # The revision was removed, or the session was deleted.
        if kind == SOURCE:
            return None
        start = end
    return Lane(kind, session, start, end, parent, session)


def _depth(viewed: Viewed, digest: bytes | None) -> int:
    return 0 if digest is None else graph.read_headers(viewed.reader(), [digest])[0].depth


# --- drawing ------------------------------------------------------------------------------


def draw(found: Sequence[Lane], omitted: int = 0) -> Picture:
    """Assign each lane a row and end positions such that no lines cross."""
    below: dict[int, list[int]] = {}
    for number, lane in enumerate(found):
        if lane.parent is not None:
            below.setdefault(lane.parent, []).append(number)
    order: list[int] = []
    ready = [0]
    while ready:
        number = ready.pop()
        order.append(number)
        # Draw a lane that leaves later above one that leaves earlier, so that no lines cross.
        ready += sorted(below.get(number, ()), key=lambda one: (found[one].start, -one))
    rows = {number: row for row, number in enumerate(order)}
    places = _axis(sorted({0, *[lane.start for lane in found], *[lane.end for lane in found]}))
    drawn: list[DrawnLane] = []
    widest = 0.0
    for number in order:
        lane = found[number]
        x1, x2 = places[lane.start], places[max(lane.end, lane.start)]
        if x2 - x1 < _LEAST_GAP and lane.parent is not None:
            x2 = x1 + _LEAST_GAP
        joints = sorted({places[found[one].start] for one in below.get(number, ())})
        parent_y = None if lane.parent is None else _TOP + _ROW * rows[lane.parent]
        drawn.append(DrawnLane(lane, _TOP + _ROW * rows[number], parent_y, x1, x2, tuple(joints)))
        label = min(len(lane.label), _LABEL_CHARACTERS) + 12
        widest = max(widest, x2 + 16 + _LABEL * label)
    return Picture(tuple(drawn), math.ceil(widest), 2 * _TOP + _ROW * (len(order) - 1), omitted)


def _axis(depths: Sequence[int]) -> dict[int, int]:
    """The x coordinate of each depth; a gap grows with the logarithm of the depths in it."""
    gaps = [_LEAST_GAP + 14 * math.log2(1 + after - before) for before, after in pairwise(depths)]
    scale = min(1.0, _WIDEST / sum(gaps)) if gaps else 1.0
    places = {depths[0]: _LEFT}
    x = float(_LEFT)
    for depth, gap in zip(depths[1:], gaps, strict=True):
        x += max(6.0, gap * scale)
        places[depth] = round(x)
    return places
