"""What a store holds: its objects by kind, day and size, and what each session reaches alone.

``measure_contents`` counts everything, ``measure_sessions`` the objects of some sessions, and
``measure_own`` the bytes that only one session reaches, for all sessions. Each passes over the
objects newest first, so that every object comes before those it links to.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Sequence
from operator import or_
from typing import Final, NamedTuple

from casstore.engine.protocol import ObjectInfo
from casstore.format import tree
from casstore.format.digest import Digest, Kind
from casstore.maintenance.progress import Progress
from casstore.maintenance.roots import live_roots, scan_roots
from casstore.maintenance.sharing import follow_links, newest_first
from casstore.maintenance.transfer.rows import OF_SESSIONS
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.data import SessionInfo
from casstore.session.state import decode_head
from casstore.store import Store, check_store

#: How many sessions one pass can measure: a bit for each, and one for all other rows.
AT_ONCE: Final = 62
_OTHERS: Final = 1 << 63
_REVISIONS: Final = frozenset(("heads", "history"))
_NEVER: Final = (1 << 32) - 1
# In place of a session's key: several sessions, or other rows, reach an object.
_SEVERAL: Final = b""
_DAY_MS: Final = 86_400_000


class Big(NamedTuple):
    """One of the biggest objects. A blob that is cut into chunks counts whole.

    Attributes:
        digest: its digest
        size_bytes: its size before compression
    """

    digest: Digest
    kind: int
    size_bytes: int


class Day(NamedTuple):
    """What was added on one day, in UTC, and is still stored.

    An object was added with the first revision that reaches it; if no revision does, when it was
    stored.

    Attributes:
        day: the day, in days since 1970 UTC
        revisions: revisions committed on it
        objects: objects added on it
        size_bytes: their size before compression
    """

    day: int
    revisions: int
    objects: int
    size_bytes: int


class Contents(NamedTuple):
    """What a store holds.

    Attributes:
        objects: stored objects
        size_bytes: their size before compression
        reached_objects: objects that a session, tag, pin, queue, attachment or record reaches
        reached_bytes: their size before compression
        whole_copies_bytes: the size of every revision written whole: its path and its state
        revisions: revisions of all sessions
        by_kind: the number of objects of each kind, and their size
        biggest: the largest objects
        days: what is stored, by the day of the first revision that has it
    """

    objects: int
    size_bytes: int
    reached_objects: int
    reached_bytes: int
    whole_copies_bytes: float
    revisions: int
    by_kind: dict[int, tuple[int, int]]
    biggest: tuple[Big, ...]
    days: tuple[Day, ...]


class Share(NamedTuple):
    """The objects that one session reaches, and those that only it reaches.

    Attributes:
        session: the session
        objects: objects it reaches, from all its revisions
        size_bytes: the size of these objects, uncompressed
        own_bytes: what only this session reaches, uncompressed
    """

    session: str
    objects: int
    size_bytes: int
    own_bytes: int

    @property
    def shared_bytes(self) -> int:
        """The size of objects that other sessions, pins or other rows reach as well."""
        return self.size_bytes - self.own_bytes


def measure_contents(store: Store, *, listed: int, progress: Progress | None = None) -> Contents:
    """Count what a store holds, and list its ``listed`` biggest objects.

    >>> contents = measure_contents(store, listed=1)
    >>> contents.revisions, len(contents.biggest)
    (2, 1)
    """
    check_store(store)
    engine = store.engine
    counter = _Counter(store, listed)
    for table, row, digest in scan_roots(engine, live_roots(engine.now_ms())):
        committed_at_ms: int | None = None
        if table in _REVISIONS:
            head = decode_head(row.value)
            if digest == head.manifest:
                committed_at_ms = head.committed_at_ms
        counter.name(digest, committed_at_ms)
    for info in newest_first(engine, "count", progress):
        counter.add(info)
    return counter.contents()


class _Counter:
    """Counts objects as they are scanned, newest first."""

    def __init__(self, store: Store, listed: int) -> None:
        self._reader = PieceReader(store.engine)
        self._named: Counter[bytes] = Counter()
        self._came: dict[bytes, int] = {}
        self._revisions: Counter[int] = Counter()
        self._listed = listed
        # By object id: the day of the first commit whose revision reaches the object.
        self._days_came: array[int] = array("L")
        # By object id: how many times the object would be written if every revision were written
        # whole. Nodes count only along paths: a manifest also refers to nodes of other branches.
        self._copies: array[float] = array("d")
        self._copies_if_no_node: array[float] = array("d")
        self._is_reached = bytearray()
        self._kinds: dict[int, list[int]] = {}
        self._days: dict[int, list[int]] = {}
        self._heap: list[tuple[int, bytes, int]] = []
        self._whole = 0.0
        self._reached = [0, 0]

    def name(self, digest: bytes, committed_at_ms: int | None) -> None:
        """Record that a row names this object; with a time, as the manifest of a revision."""
        self._named[digest] += 1
        if committed_at_ms is not None:
            day = committed_at_ms // _DAY_MS
            self._revisions[day] += 1
            self._came[digest] = min(day, self._came.get(digest, _NEVER))

    def add(self, info: ObjectInfo) -> None:
        """Count the next object."""
        if not self._copies:
            # The first object has the highest id of all, so it sets the length of the arrays.
            self._copies = array("d", bytes(8 * (info.id + 1)))
            self._copies_if_no_node = array("d", bytes(8 * (info.id + 1)))
            self._is_reached = bytearray(info.id + 1)
            self._days_came = array("L", [_NEVER]) * (info.id + 1)
        size = info.size_bytes
        named = self._named.get(info.digest, 0)
        copies = self._copies[info.id] + named
        if info.kind != Kind.NODE:
            copies += self._copies_if_no_node[info.id]
        day = min(self._days_came[info.id], self._came.get(info.digest, _NEVER))
        if named or self._is_reached[info.id]:
            for at, child in enumerate(info.children):
                is_path = info.kind in (Kind.NODE, Kind.MANIFEST) and not at
                (self._copies if is_path else self._copies_if_no_node)[child] += copies
                self._is_reached[child] = 1
                if day < self._days_came[child]:
                    self._days_came[child] = day
            self._reached[0] += 1
            self._reached[1] += size
            self._whole += copies * size
        if day == _NEVER:
            day = info.stored_at_ms // _DAY_MS
        for known, key in ((self._kinds, info.kind), (self._days, day)):
            counts = known.setdefault(key, [0, 0])
            counts[0] += 1
            counts[1] += size
        self._note(info)

    def _note(self, info: ObjectInfo) -> None:
        """Keep an object if it is among the biggest."""
        size = info.size_bytes
        if info.kind == Kind.CHUNKS:
            return
        if info.kind == Kind.ROPE:
            item = self._reader.find_many((info.digest,))[0]
            if item is None:
                return  # collected meanwhile
            size = sum(tree.decode_branch(Kind.CHUNKS, tree.open_rope(item.data)).sizes)
        elif self._heap and len(self._heap) == self._listed and size <= self._heap[0][0]:
            return
        heapq.heappush(self._heap, (size, info.digest, info.kind))
        if len(self._heap) > self._listed:
            heapq.heappop(self._heap)

    def contents(self) -> Contents:
        """The totals."""
        return Contents(
            sum(counts[0] for counts in self._kinds.values()),
            sum(counts[1] for counts in self._kinds.values()),
            self._reached[0],
            self._reached[1],
            self._whole,
            sum(self._revisions.values()),
            {kind: (counts[0], counts[1]) for kind, counts in sorted(self._kinds.items())},
            tuple(
                [Big(Digest(digest), kind, size) for size, digest, kind in sorted(self._heap)[::-1]]
            ),
            tuple(
                [
                    Day(day, self._revisions[day], *self._days.get(day, (0, 0)))
                    for day in sorted({*self._days, *self._revisions})
                ]
            ),
        )


def measure_sessions(
    store: Store, sessions: Sequence[str], *, progress: Progress | None = None
) -> list[Share]:
    """The objects that each of these sessions reaches, and those that only it reaches.

    One pass for each ``AT_ONCE`` sessions, with eight bytes of memory for each object.

    >>> [share] = measure_sessions(store, ["s"])
    >>> 0 < share.own_bytes <= share.size_bytes
    True
    """
    check_store(store)
    shares: list[Share] = []
    for start in range(0, len(sessions), AT_ONCE):
        shares += _shares(store, sessions[start : start + AT_ONCE], progress)
    return shares


def measure_own(store: Store, *, max_objects: int | None = None) -> dict[bytes, int] | None:
    """The bytes that only one session reaches, by session key, for all sessions.

    One pass over all objects. None if there are more than ``max_objects``.

    >>> len(measure_own(store)), measure_own(store, max_objects=1)
    (1, None)
    """
    check_store(store)
    engine = store.engine
    owners: dict[bytes, bytes] = {}
    sizes: dict[bytes, int] = {}
    for table, row, digest in scan_roots(engine, live_roots(engine.now_ms())):
        owner = _SEVERAL
        if table in OF_SESSIONS:
            owner = keys.session_part(row.key)
            sizes[owner] = 0
        owners[digest] = owner if owners.get(digest, owner) == owner else _SEVERAL
    # By id: the owner of each object that a scanned object links to and that is still to come.
    below: dict[int, bytes] = {}
    for seen, info in enumerate(newest_first(engine, "sessions", None)):
        if seen == max_objects:
            return None
        found = {below.pop(info.id, None), owners.get(info.digest)} - {None}
        if not found:
            continue
        owner = found.pop() or _SEVERAL if len(found) == 1 else _SEVERAL
        for child in info.children:
            below[child] = owner if below.get(child, owner) == owner else _SEVERAL
        if owner != _SEVERAL:
            sizes[owner] += info.size_bytes
    return sizes


def _shares(store: Store, sessions: Sequence[str], progress: Progress | None) -> list[Share]:
    engine = store.engine
    bits = {keys.session_key(session): 1 << at for at, session in enumerate(sessions)}
    named: dict[bytes, int] = {}
    for table, row, digest in scan_roots(engine, live_roots(engine.now_ms())):
        bit = _OTHERS
        if table in OF_SESSIONS:
            bit = bits.get(keys.session_part(row.key), _OTHERS)
        named[digest] = named.get(digest, 0) | bit
    counts: dict[int, list[int]] = {}
    newest = newest_first(engine, "sessions", progress)
    for info, mask in follow_links(newest, named, or_, "Q"):
        found = counts.setdefault(mask, [0, 0])
        found[0] += 1
        found[1] += info.size_bytes
    shares: list[Share] = []
    for at, session in enumerate(sessions):
        bit = 1 << at
        _, alone = counts.get(bit, (0, 0))
        mine = [found for mask, found in counts.items() if mask & bit]
        total = [sum(found[part] for found in mine) for part in (0, 1)]
        shares.append(Share(session, total[0], total[1], alone))
    return shares


def moved_at(info: SessionInfo) -> int:
    """When a session was last committed to, or created."""
    return info.meta.created_at_ms if info.head is None else info.head.committed_at_ms
