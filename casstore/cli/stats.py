"""``stats``: size and growth of a store, savings by sharing and compression, size by session."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import click

from casstore.cli.command import App, command
from casstore.cli.fields import Field, Fields, Shape, nested
from casstore.cli.output import Printer, dim
from casstore.cli.quantities import count, moment
from casstore.engine.protocol import Engine, ObjectInfo, Row
from casstore.format import tree
from casstore.format.digest import Digest
from casstore.format.hashing import KIND_NAMES, Kind
from casstore.maintenance import space, systems
from casstore.maintenance.progress import Progress
from casstore.maintenance.roots import live_roots
from casstore.maintenance.sharing import newest_first
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.data import SessionInfo
from casstore.session.heads import decode_head
from casstore.session.scanning import scan
from casstore.store import Store

_SECTION: Final = "Maintenance"
_DAY_MS: Final = 86_400_000
_DAYS_SHOWN: Final = 14
# Of the sessions, those that text lists.
_SHOWN: Final = 20


def _ratio(one: float, other: float) -> float:
    return round(one / other, 2) if other else 0.0


SYSTEM_FIELDS: Final[Fields] = {
    "name": Field("its name: its tables are called NAME.table", "records"),
    "rows": Field("its rows", "rows", "row"),
    "size_bytes": Field("their keys and values, without objects that they link to", "size"),
    "version": "the version of its rows that is installed, null if none is",
    "missing": "why its code cannot be used, null if it can",
    "title": Field("what it stores, null if it is not installed", "title", gives=True),
}
_FILE: Final[Fields] = {
    "file_bytes": Field("the length of data.mdb", "file"),
    "allocated_bytes": "what it takes on the disk",
    "used_bytes": "pages in use",
    "free_bytes": Field("free pages, which later writes use", "free pages"),
    "content_bytes": "stored keys and values",
    "fragmentation": Field(
        "the part of the file that holds nothing, 0 to 1",
        of=lambda one: round(one.fragmentation, 4),
    ),
    "reclaimable_by_pack_bytes": Field(
        "at least this much is freed by pack", "pack frees at least", of="reclaimable_by_pack"
    ),
    "reclaimable_by_compact_bytes": Field(
        "freed by compact", "compact frees", of="reclaimable_by_compact"
    ),
    "log_bytes": Field("the length of the redo log next to it", "redo log"),
    "log_commits": "commits that only the redo log has",
}
_OBJECTS: Final[Fields] = {
    "objects": Field("stored objects", "objects", "object"),
    "size_bytes": Field("their size before compression", "uncompressed"),
    "stored_bytes": Field("their size in slabs, compressed", "compressed"),
    "slabs": Field("slabs", "slabs", "slab"),
    "dead_objects": "removed objects whose bytes are still in slabs",
    "reached_objects": Field(
        "objects that a session, tag, pin, queue or attachment reaches", "reachable", "object"
    ),
    "reached_bytes": "their size before compression",
}
_FACTORS: Final[Fields] = {
    "revisions": Field("revisions of all sessions", "revisions", "revision"),
    "whole_copies_bytes": Field(
        "the size of every revision written whole: its path and its state", "each written whole"
    ),
    "dedup": Field(
        "every revision written whole, divided by the reachable objects, before compression",
        "deduplication factor",
    ),
    "compression": Field("size before compression, divided by the size in slabs",
                         "compression factor"),
    "together": Field(
        "every revision written whole, divided by the size in slabs", "both factors together"
    ),
}  # fmt: skip
_KIND: Final = Field(
    "blob, value, node …",
    "kind",
    of=lambda one: KIND_NAMES.get(one.kind, str(one.kind)).replace("rope", "blob"),
)
_SHAPE: Final = Shape(
    "stats",
    {
        "last_check": nested(
            "the last check that could store its result, null if there was none",
            {
                "checked_at": Field("when it ended", "last check"),
                "level": Field("how thoroughly it looked", "check level"),
                "since_last": "true: only at what came since the check before",
                "sound": Field("true: it found no error", "sound"),
                "findings": Field("what it found, harmless notes included", "findings", "finding"),
            },
            "last check",
        ),
        "file": nested("the data file", _FILE, "file"),
        "objects": nested("what is stored", _OBJECTS, "objects"),
        "factors": nested("what sharing and compression save", _FACTORS, "factors"),
        "sessions": nested(
            "the space of each session, the largest own size first",
            {
                "id": Field("the session", "session", of="session"),
                "own_bytes": Field("what only this session reaches, uncompressed", "own size"),
                "shared_bytes": Field("what others reach as well, uncompressed", "shared size"),
                "size_bytes": "both together",
                "objects": Field("objects it reaches, from all its revisions", "objects", "object"),
            },
            "sessions",
        ),
        "sessions_left_out": "sessions that were not measured, because of --sessions",
        "systems": nested("record systems, by the rows of table records", SYSTEM_FIELDS, "systems"),
        "biggest": nested(
            "the largest objects",
            {
                "digest": Field("its digest", "largest objects"),
                "kind": _KIND,
                "size_bytes": Field("its size before compression", "size"),
            },
            "largest",
        ),
        "growth": nested(
            "what is stored, by the day of the first revision that has it",
            {
                "day": Field("the day, in UTC", "day"),
                "revisions": Field("revisions committed on it", "revisions", "revision"),
                "objects": Field("objects", "objects", "object"),
                "size_bytes": Field("their size before compression", "size"),
                "total_bytes": Field("the size with all days before", "total"),
            },
            "growth",
        ),
        "kinds": nested(
            "by kind of object",
            {"kind": "blob, value, node …", "objects": "objects", "size_bytes": "uncompressed"},
        ),
        "tables": nested(
            "by table of the file",
            {"name": "its name", "rows": "its rows", "content_bytes": "keys and values"},
        ),
    },
)


@command(_SECTION, _SHAPE, "casstore stats", "casstore stats --sessions 10 --biggest 5")
@click.option(
    "--sessions", "wanted", type=click.IntRange(0), default=62, show_default=True,
    help="Measure this many sessions, last changed first. Each 62 need a pass over all objects.",
)  # fmt: skip
@click.option(
    "--biggest", type=click.IntRange(0), default=10, show_default=True,
    help="List this many of the biggest objects.",
)  # fmt: skip
def stats(app: App, wanted: int, biggest: int) -> None:
    """Measure size, sharing, growth, and the space of sessions.

    The deduplication factor compares what is stored with every revision written whole: its path
    and its state.
    """
    # Not at the top: the list of sessions imports this module, and needs no check.
    from casstore.maintenance.check import last_check

    with app.open() as store, app.meter() as meter:
        measured = space.measure(store, progress=meter)
        contents = measure_contents(store, listed=biggest, progress=meter)
        known = 0
        newest: list[tuple[int, str]] = []
        for info in store.sessions():
            known += 1
            heapq.heappush(newest, (moved_at(info), info.meta.session))
            if len(newest) > wanted:
                heapq.heappop(newest)
        chosen = [session for _, session in newest]
        shares = measure_sessions(store, chosen, progress=meter)
        held = systems.measure(store)
        checked = last_check(store)
    shares.sort(key=lambda one: (-one.own_bytes, one.session))
    slabs, whole, total = measured.slabs, contents.whole_copies_bytes, 0
    growth: list[dict[str, Any]] = []
    for day in contents.days:
        total += day.size_bytes
        date = moment(day.day * _DAY_MS)[:10]
        growth.append({**day._asdict(), "day": date, "total_bytes": total})
    answer = _SHAPE.document(
        {
            "last_check": checked,
            "file": measured,
            "objects": {
                "objects": contents.objects,
                "size_bytes": contents.size_bytes,
                "stored_bytes": slabs.stored_bytes,
                "slabs": slabs.slabs,
                "dead_objects": slabs.dead_objects,
                "reached_objects": contents.reached_objects,
                "reached_bytes": contents.reached_bytes,
            },
            "factors": {
                "dedup": _ratio(whole, contents.reached_bytes),
                "compression": round(measured.compression, 2),
                "together": _ratio(whole, slabs.stored_bytes),
                "whole_copies_bytes": int(whole),
                "revisions": contents.revisions,
            },
            "kinds": [
                {"kind": KIND_NAMES.get(kind, str(kind)), "objects": one[0], "size_bytes": one[1]}
                for kind, one in contents.by_kind.items()
            ],
            "tables": measured.tables,
            "systems": held,
            "biggest": contents.biggest,
            "sessions": shares,
            "sessions_left_out": known - len(shares),
            "growth": growth,
        }
    )
    del answer["schema"]
    app.answer(answer, lambda to: _write(to, answer))


def _write(to: Printer, answer: dict[str, Any]) -> None:
    shown = {
        **answer,
        "sessions": answer["sessions"][:_SHOWN],
        "growth": answer["growth"][-_DAYS_SHOWN:],
        "systems": [
            {**one, "title": one["title"] or f"not installed: {one['missing']}"}
            for one in answer["systems"]
        ],
    }
    if answer["last_check"] is None:
        to.line(dim("no check has stored its result yet: casstore check"))
    to.report(_SHAPE.fields, shown)
    if len(answer["sessions"]) > _SHOWN:
        to.line(dim(f"{count(len(answer['sessions']) - _SHOWN, 'more session')}: --json"))
    if answer["sessions_left_out"]:
        to.line(dim(f"{count(answer['sessions_left_out'], 'session')} not measured: --sessions"))


def moved_at(info: SessionInfo) -> int:
    """When a session was last committed to, or created."""
    return info.meta.created_at_ms if info.head is None else info.head.committed_at_ms


# Sessions that one pass can measure: a bit for each, and one for all other rows.
AT_ONCE: Final = 62
_OTHERS: Final = 1 << 63
# Tables whose rows belong to a session, by the prefix of their keys.
_OF_SESSIONS: Final = frozenset(("heads", "history", "queue", "attachments"))
_REVISIONS: Final = frozenset(("heads", "history"))
_NEVER: Final = (1 << 32) - 1
# In place of a session's key: several sessions, or other rows, reach an object.
_SEVERAL: Final = b""


class Big(NamedTuple):
    """One of the biggest objects. A blob that is cut into chunks counts whole."""

    digest: Digest
    kind: int
    size_bytes: int


class Day(NamedTuple):
    """What came on one day, in UTC, and is still there.

    An object came with the first revision that reaches it; what no revision reaches, when it
    was stored.
    """

    #: Days since 1970.
    day: int
    revisions: int
    objects: int
    size_bytes: int


class Contents(NamedTuple):
    """What a store holds."""

    objects: int
    size_bytes: int
    reached_objects: int
    reached_bytes: int
    #: The size if each revision were written whole: its path and its components.
    whole_copies_bytes: float
    revisions: int
    by_kind: dict[int, tuple[int, int]]
    biggest: tuple[Big, ...]
    days: tuple[Day, ...]


class Share(NamedTuple):
    """The objects that one session reaches, and those that only it reaches."""

    session: str
    objects: int
    size_bytes: int
    own_bytes: int

    @property
    def shared_bytes(self) -> int:
        """The size of objects that other sessions, pins or other rows reach as well."""
        return self.size_bytes - self.own_bytes


def _roots(engine: Engine) -> Iterator[tuple[str, Row, bytes]]:
    """Every digest that a row names: the table, the row, the digest."""
    roots = live_roots(engine.now_ms())
    for table in roots.tables:
        for row in scan(engine, table, b"", None):
            for digest in roots.named(table, row):
                yield table, row, digest


def measure_contents(store: Store, *, listed: int, progress: Progress | None = None) -> Contents:
    """Count what a store holds; the ``listed`` biggest objects by name."""
    engine = store.engine
    counter = _Counter(store, listed)
    for table, row, digest in _roots(engine):
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
        # The day on which the first revision came that reaches an object.
        self._days_came: array[int] = array("L")
        # How often each object would be written if every revision were written whole. Nodes count
        # only along paths: a manifest also refers to the nodes of other branches.
        self._copies: array[float] = array("d")
        self._copies_if_no_node: array[float] = array("d")
        self._is_reached = bytearray()
        self._kinds: dict[int, list[int]] = {}
        self._days: dict[int, list[int]] = {}
        self._heap: list[tuple[int, bytes, int]] = []
        self._whole = 0.0
        self._reached = [0, 0]

    def name(self, digest: bytes, committed_at_ms: int | None) -> None:
        """A row names this object; a revision does so since its commit."""
        self._named[digest] += 1
        if committed_at_ms is not None:
            day = committed_at_ms // _DAY_MS
            self._revisions[day] += 1
            self._came[digest] = min(day, self._came.get(digest, _NEVER))

    def add(self, info: ObjectInfo) -> None:
        """Take the next object."""
        if not self._copies:
            # The first has the highest id, and children have lower ones.
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

    One pass for each ``AT_ONCE`` sessions, with eight bytes for each id.
    """
    shares: list[Share] = []
    for start in range(0, len(sessions), AT_ONCE):
        shares += _shares(store, sessions[start : start + AT_ONCE], progress)
    return shares


def measure_own(store: Store, *, max_objects: int | None = None) -> dict[bytes, int] | None:
    """The bytes that only one session reaches, by session key, for all sessions.

    One pass over all objects. None if there are more than ``max_objects``.
    """
    engine = store.engine
    owners: dict[bytes, bytes] = {}
    sizes: dict[bytes, int] = {}
    for table, row, digest in _roots(engine):
        owner = _SEVERAL
        if table in _OF_SESSIONS:
            owner = _session_key(row)
            sizes[owner] = 0
        owners[digest] = owner if owners.get(digest, owner) == owner else _SEVERAL
    # The owners of objects that were linked to and not scanned yet: children follow parents.
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


def _session_key(row: Row) -> bytes:
    return row.key[: len(row.key) - len(keys.after_session(row.key))]


def _shares(store: Store, sessions: Sequence[str], progress: Progress | None) -> list[Share]:
    engine = store.engine
    bits = {keys.session_key(session): 1 << at for at, session in enumerate(sessions)}
    named: dict[bytes, int] = {}
    for table, row, digest in _roots(engine):
        bit = _OTHERS
        if table in _OF_SESSIONS:
            bit = bits.get(_session_key(row), _OTHERS)
        named[digest] = named.get(digest, 0) | bit
    reached: array[int] | None = None
    counts: dict[int, list[int]] = {}
    for info in newest_first(engine, "sessions", progress):
        if reached is None:
            reached = array("Q", bytes(8 * (info.id + 1)))
        mask = reached[info.id] | named.get(info.digest, 0)
        if mask:
            for child in info.children:
                reached[child] |= mask
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
