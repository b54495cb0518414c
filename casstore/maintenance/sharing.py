"""Finds the objects that a group of roots shares with other roots, and the owners of the others.

Children have lower ids than their parents, so one pass over the objects, in order of descending
ids, follows all links. The first pass marks the objects that the group reaches, with one bit for
each id. Further passes follow a limited number of other roots each, with four bytes for each id,
and record the objects that both reach.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from casstore.engine.id_set import IdSet
from casstore.engine.protocol import Engine, ObjectInfo
from casstore.format.digest import Digest
from casstore.maintenance.progress import Phase, Progress

#: How many other owners are recorded for an object; further owners are not counted.
NAMES_KEPT: Final = 8
# How many other roots one pass follows; each takes a few hundred bytes of memory.
_ROOTS_AT_ONCE: Final = 200_000
_PAGE: Final = 1000


class Root(NamedTuple):
    """A digest that a row names, and the owner of the row."""

    owner: str
    digest: bytes


class Shared(NamedTuple):
    """An object that the group and others reach: some of its owners, and whether there are more."""

    digest: Digest
    kind: int
    size_bytes: int
    names: tuple[str, ...]
    more: bool


class Sharer(NamedTuple):
    """Another owner that reaches objects of the group. The counts are lower bounds."""

    name: str
    objects: int
    bytes: int


class Sharing(NamedTuple):
    """The objects that a group of roots reaches, and those that others reach, too.

    Attributes:
        objects: objects that the sessions reach
        bytes: their size, uncompressed
        shared_objects: of those, objects that others reach too
        shared_bytes: their size, uncompressed
        largest: the largest of the shared objects, largest first
        sharers: the others: sessions, tags and so on, those that share most first
    """

    objects: int
    bytes: int
    shared_objects: int
    shared_bytes: int
    largest: tuple[Shared, ...]
    sharers: tuple[Sharer, ...]


NOTHING: Final = Sharing(0, 0, 0, 0, (), ())


def newest_first(engine: Engine, phase: str, progress: Progress | None) -> Iterator[ObjectInfo]:
    """Every object, parents before children; ``progress`` is called for each page."""
    report = Phase(progress, phase, "objects")
    before: int | None = None
    seen = 0
    while page := engine.scan_objects(before=before, limit=_PAGE):
        yield from page
        seen += len(page)
        before = page[-1].id
        report(seen)


def follow_links(
    newest: Iterable[ObjectInfo],
    named: Mapping[bytes, int],
    joined: Callable[[int, int], int],
    width: str,
) -> Iterator[tuple[ObjectInfo, int]]:
    """The objects that named digests reach, each with a number that says which of them do.

    ``named`` has a number above 0 for each digest, and ``joined`` combines the numbers of all that
    reach an object. ``newest`` are all objects, newest first. In memory is an array of the type
    ``width`` with a number for each id.
    """
    reached: array[int] | None = None
    for info in newest:
        if reached is None:
            # The first object has the highest id of all, so it sets the length of the array.
            reached = array(width, [0]) * (info.id + 1)
        found = joined(reached[info.id], named.get(info.digest, 0))
        if found:
            for child in info.children:
                reached[child] = joined(reached[child], found)
            yield info, found


def survey(
    engine: Engine,
    group: Iterable[bytes],
    others: Iterable[Root],
    *,
    listed: int,
    progress: Progress | None = None,
) -> Sharing:
    """What ``group`` reaches, and what of it ``others`` reach; ``listed``: the most list items."""
    mine = _ReachedObjects(engine, set(group), progress)
    if not mine.objects:
        return NOTHING
    meetings = _Meetings(listed)
    remaining = iter(others)
    while roots := list(islice(remaining, _ROOTS_AT_ONCE)):
        meetings.begin_pass()
        for info, owners in _owned(engine, roots, progress):
            if info.id in mine.ids:
                meetings.add(info, owners)
    return Sharing(
        mine.objects,
        mine.size_bytes,
        meetings.objects,
        meetings.size_bytes,
        meetings.largest(),
        meetings.sharers(),
    )


class _ReachedObjects:
    """The objects that roots reach."""

    def __init__(self, engine: Engine, roots: set[bytes], progress: Progress | None) -> None:
        self.ids = IdSet()
        self.objects = self.size_bytes = 0
        for info in newest_first(engine, "survey", progress) if roots else ():
            if info.digest in roots or info.id in self.ids:
                self.ids.add(info.id)
                self.objects += 1
                self.size_bytes += info.size_bytes
                for child in info.children:
                    self.ids.add(child)


class _Owners(NamedTuple):
    """The owners that reach an object, and whether there are more than are recorded."""

    names: tuple[str, ...]
    more: bool


def _union(one: _Owners, other: _Owners) -> _Owners:
    if one == other:
        return one
    names = sorted({*one.names, *other.names})
    return _Owners(tuple(names[:NAMES_KEPT]), one.more or other.more or len(names) > NAMES_KEPT)


def _owned(
    engine: Engine, roots: list[Root], progress: Progress | None
) -> Iterator[tuple[ObjectInfo, _Owners]]:
    """Every object that one of these roots reaches, and the owners of the roots that reach it."""
    # Sets of owners by number; 0 is the empty set.
    groups = [_Owners((), more=False)]
    numbers = {groups[0]: 0}

    def joined(one: int, other: int) -> int:
        if one == other or not one or not other:
            return one or other
        owners = _union(groups[one], groups[other])
        number = numbers.setdefault(owners, len(groups))
        if number == len(groups):
            groups.append(owners)
        return number

    named: dict[bytes, int] = {}
    for root in roots:
        owners = _Owners((root.owner,), more=False)
        number = numbers.setdefault(owners, len(groups))
        if number == len(groups):
            groups.append(owners)
        named[root.digest] = joined(named.get(root.digest, 0), number)
    for info, number in follow_links(newest_first(engine, "survey", progress), named, joined, "I"):
        yield info, groups[number]


class _Meetings:
    """Collects the objects that both the group and other roots reach."""

    def __init__(self, listed: int) -> None:
        self._listed = listed
        self._seen = IdSet()
        self._heap: list[tuple[int, bytes, int]] = []
        self._owners: dict[bytes, _Owners] = {}
        # By owner: the count of this pass, and the largest of the earlier passes. An owner with
        # roots in several passes may reach the same objects in each, so counts are not added up.
        self._by_name: dict[str, tuple[int, int]] = {}
        self._most: dict[str, tuple[int, int]] = {}
        self.objects = self.size_bytes = 0

    def begin_pass(self) -> None:
        """Begin the next pass: keep the larger counts, and reset the current ones."""
        for name, counts in self._by_name.items():
            before = self._most.get(name, (0, 0))
            self._most[name] = (max(counts[0], before[0]), max(counts[1], before[1]))
        self._by_name = {}

    def add(self, info: ObjectInfo, owners: _Owners) -> None:
        """Record that these owners reach the object."""
        for name in owners.names:
            objects, size_bytes = self._by_name.get(name, (0, 0))
            self._by_name[name] = (objects + 1, size_bytes + info.size_bytes)
        if info.id in self._seen:
            # Met in an earlier pass, through other roots.
            if info.digest in self._owners:
                self._owners[info.digest] = _union(self._owners[info.digest], owners)
            return
        self._seen.add(info.id)
        self.objects += 1
        self.size_bytes += info.size_bytes
        heapq.heappush(self._heap, (info.size_bytes, info.digest, info.kind))
        self._owners[info.digest] = owners
        if len(self._heap) > self._listed:
            del self._owners[heapq.heappop(self._heap)[1]]

    def largest(self) -> tuple[Shared, ...]:
        """The largest objects that were added, largest first."""
        return tuple(
            [
                Shared(Digest(digest), kind, size_bytes, *self._owners[digest])
                for size_bytes, digest, kind in sorted(self._heap, reverse=True)
            ]
        )

    def sharers(self) -> tuple[Sharer, ...]:
        """The owners that share the most bytes, those with the most first."""
        self.begin_pass()
        found = [Sharer(name, *counts) for name, counts in self._most.items()]
        return tuple(sorted(found, key=lambda one: (-one.bytes, one.name))[: self._listed])
