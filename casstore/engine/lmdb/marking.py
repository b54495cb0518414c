"""Marking: finds the reachable objects, by their ids alone.

A child's id is always lower than its parent's, so one pass over the slabs from the newest to the
oldest marks everything, without a stack: when the pass comes to an object, all objects that
could link to it have been visited. Each id has a byte with two bits: the object is reached, and the
index names it (has its digest under this id). The pass reads the directories of slabs, never the
objects themselves.

The pass needs no single snapshot. Objects never change, ids are never reused, and objects stored
while the pass runs have higher ids than any it visits. ``catch_up`` later marks the children of
those, and what rows refer to that were written meanwhile (``notes``). Only the tables are read: the
log is applied before anything is removed, and objects in it then count as new.
"""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Callable, Iterable, Iterator
from itertools import compress, islice
from typing import Final, NamedTuple
from zlib import compressobj, decompressobj

from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.applying import next_free_id
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.lookup import PREFIX_BYTES, find_id, is_named, likely_row, open_row
from casstore.engine.lmdb.memtable import MemtableView, Unchanged
from casstore.engine.lmdb.notes import Txn
from casstore.engine.lmdb.slab import SlabDirectory
from casstore.engine.protocol import MarkReport, Roots, Row
from casstore.errors import CorruptionError

# How many index rows (_INDEX_BATCHES times _INDEX_BATCH), or slabs, one read transaction reads at
# most: it takes some tens of milliseconds.
_INDEX_BATCH: Final = 4096
_INDEX_BATCHES: Final = 32
_SLAB_BATCH: Final = 512
# How many ids ``unreached`` and ``restrict`` process at a time, to bound their memory.
_CHUNK_IDS: Final = 1 << 20

# The state of an id, one byte each.
_REACHED: Final = 1
_NAMED: Final = 2
# An object that is reached and has no name: the store is damaged.
_STRAY: Final = bytes([_REACHED])
_REACHED_STATES: Final = (_STRAY, bytes([_REACHED | _NAMED]))
# Tables for ``bytes.translate``, from a state to 1 if the object is reached, if it is named, if it
# is named and not reached; else to 0.
_IS_REACHED: Final = bytes([state & _REACHED for state in range(256)])
_IS_NAMED: Final = bytes([state >> 1 & 1 for state in range(256)])
_IS_LEFT: Final = bytes([state == _NAMED for state in range(256)])
# Translates states so that every named id is reached, too.
_ALL_REACHED: Final = bytes([state | state >> 1 & _REACHED for state in range(256)])

# Translates stored kinds to the state "named", except those of dead objects.
_NAMES: Final = bytes([_NAMED * (kind & ~slabs.KEEPS_LINKS != slabs.DEAD) for kind in range(256)])
_HAS_NAME: Final = bytes([_NAMED])

# Called with the number of ids visited so far.
Progress = Callable[[int], None]


class Candidates(NamedTuple):
    """Some unreached objects, by descending id."""

    ids: list[int]
    digests: list[bytes]
    sizes_bytes: list[int]
    #: Lower ids were not looked at: continue below this one.
    down_to: int


class Marks:
    """Which ids are named and which are reached, up to ``last_id``."""

    def __init__(
        self,
        env: Environment,
        roots: Roots,
        grace_from_ms: int,
        view: MemtableView | None = None,
    ) -> None:
        """``view``: the log's commits, for a dry run that cannot apply them; else None."""
        self._view = view
        self._env = env
        self._roots = roots
        #: After marking: True if every object in the slabs has a name.
        self.is_clean = False
        self._grace_from_ms = grace_from_ms
        with env.reading() as txn:
            self.last_id = next_free_id(txn, env) - 1
            # How many names there are. It stays exact: only a collection deletes names, and no
            # other collection is running.
            self._names = txn.stat(env.index)["entries"]
        self._begin()

    def _begin(self) -> None:
        # The state of each id. In a mapping, memory that is never written takes no space: long
        # ranges of ids without objects cost nothing.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._states = mmap.mmap(-1, self.last_id + 1, flags=private)
        # ``catch_up`` has seen new objects up to this id, and notes up to these numbers.
        self._scanned_id = self.last_id
        self._changes_seen = 0
        self._touches_seen = 0
        # A heap of negated ids: objects reached after the pass whose children are not marked yet.
        self._open: list[int] = []

    def close(self) -> None:
        """Release the memory."""
        self._states.close()

    # --- the pass -------------------------------------------------------------------------

    def mark(self, progress: Progress | None) -> MarkReport:
        """Mark all objects that rows, young objects or touched objects (``notes``) reach.

        CorruptionError with the name of a missing object. If slabs hold no collected objects, the
        index need not be read: every object in the slabs is named. That is tried first, unless a
        flag says that names were deleted (``notes.has_leftovers``), and verified by comparing the
        number of objects with the number of names.
        """
        if not notes.has_leftovers(self._env):
            report = self._pass(progress, trusting=True)
            if report is not None:
                return report
            self.close()
            self._begin()
        self._read_index_rows()
        report = self._pass(progress, trusting=False)
        assert report is not None
        return report

    def _pass(self, progress: Progress | None, *, trusting: bool) -> MarkReport | None:
        """Mark in one pass over the slabs.

        ``trusting``: assume that every object in the slabs is named; None if that was wrong.
        """
        roots = self._mark_roots()
        kept = kept_bytes = names = names_bytes = held = 0
        below = self.last_id + 1
        while below > 1:
            with self._env.reading() as txn:
                for directory, stop in self._directories(txn, below):
                    first = directory.first_id
                    self._require_nothing_between(stop, below)
                    below = first
                    count = stop - first
                    may_have_names = directory.kinds[:count].translate(_NAMES)
                    self._spread(directory, first, count, may_have_names if trusting else None)
                    states = self._states[first:stop]
                    reached, named = states.translate(_IS_REACHED), states.translate(_IS_NAMED)
                    kept += reached.count(1)
                    kept_bytes += _size_of(directory, reached)
                    names += named.count(1)
                    held += may_have_names.count(_HAS_NAME)
                    names_bytes += _size_of(directory, named)
                if below > 1 and not self._more(txn, below):
                    self._require_nothing_between(1, below)
                    below = 1
            if progress is not None:
                progress(self.last_id + 1 - below)
        if trusting and names != self._names:
            # Some objects have no name, and what they link to was marked without need.
            return None
        self.is_clean = held == names
        return MarkReport(roots, kept, names - kept, kept_bytes, names_bytes - kept_bytes)

    def _add(self, first: int, states: bytes) -> None:
        """Set these states from this id on, in addition to those already set."""
        count = len(states)
        both = int.from_bytes(self._states[first : first + count], "big")
        both |= int.from_bytes(states, "big")
        self._states[first : first + count] = both.to_bytes(count, "big")

    def _read_index_rows(self) -> None:
        """Set the state of every id in the index to "named"; no id is reached yet."""
        states, last_id, from_bytes = self._states, self.last_id, int.from_bytes
        at = b""
        while True:
            with self._env.reading_bytes() as txn:
                cursor = txn.cursor(db=self._env.index)
                if not (cursor.set_range(at) if at else cursor.first()):
                    return
                keys = cursor.iternext(values=False)
                for _ in range(_INDEX_BATCHES):
                    rows = list(islice(keys, _INDEX_BATCH))
                    # As ``read_key`` does, for many keys at once.
                    ids = [from_bytes(key[PREFIX_BYTES:], "big") for key in rows]
                    if rows and not min(ids):
                        raise CorruptionError(f"{self._env.path} has a damaged row in its index")
                    if rows and max(ids) > last_id:
                        ids = [object_id for object_id in ids if object_id <= last_id]
                    for object_id in ids:
                        states[object_id] = _NAMED
                    if len(rows) < _INDEX_BATCH:
                        return
                # The cursor is on the next row, or past the last.
                at = cursor.key()
                if not at:
                    return

    def _mark_roots(self) -> int:
        """Mark the objects that rows and touches refer to; returns how many digests rows have."""
        digests: set[bytes] = set()
        # In one transaction: a digest that a commit moves from one table to another (a head, to the
        # history) meanwhile must not be missed.
        with self._env.reading() as txn:
            for table in self._roots.tables:
                for row in self._rows(txn, table):
                    for digest in self._roots.named(table, row):
                        if digest not in digests:
                            digests.add(digest)
                            self._reach_root(txn, table, row.key, digest)
            for number, touch in notes.touches_after(self._env, txn, 0):
                self._touches_seen = number
                self._reach_touched(txn, touch)
            if self._view is not None:
                self._reach_recent(txn, self._view)
        # The pass marks the children of all objects reached so far.
        self._open.clear()
        return len(digests)

    def _rows(self, txn: Txn, table: str) -> Iterator[Row]:
        """All rows of a table."""
        for key, value in txn.cursor(db=self._env.tables[table]):
            yield Row(bytes(key), open_row(table, bytes(key), value))

    def _reach_root(self, txn: Txn, table: str, key: bytes, digest: bytes) -> None:
        object_id = find_id(self._env, txn, digest)
        if object_id is None:
            raise CorruptionError(
                f"row {key.hex()} of table {table} in {self._env.path} names object "
                f"{digest.hex()}, which is not stored"
            )
        self._reach(object_id)

    def _reach_touched(self, txn: Txn, touch: notes.Touch) -> None:
        object_id = touch.object_id
        if touch.at_ms < self._grace_from_ms or object_id > self.last_id:
            return
        cursor = txn.cursor(db=self._env.slabs)
        # A touched object may have been deleted by an earlier collection after its grace period.
        if cursor.set_range(slabs.slab_key(object_id)):
            directory = slabs.read_directory(cursor.key(), cursor.value())
            position = object_id - directory.first_id
            if position >= 0 and self._is_named(txn, directory, position):
                self._reach(object_id)

    def _reach(self, object_id: int) -> None:
        if object_id <= self.last_id and not self._states[object_id] & _REACHED:
            self._states[object_id] |= _REACHED
            heapq.heappush(self._open, -object_id)

    def _spread(
        self, directory: SlabDirectory, first: int, count: int, names: bytes | None
    ) -> None:
        """Mark the children of every reached object of a slab. Most of the time is spent here.

        ``names``: the states to add to those of its objects (named or not); None if they were set
        from the index before.
        """
        states = self._states
        if directory.stored_at_ms >= self._grace_from_ms:
            # Within the grace period: every named object counts as reached.
            named = states[first : first + count] if names is None else names
            self._add(first, named.translate(_ALL_REACHED))
        distances = directory.distances
        if distances:
            sound = max(distances) < first and 0 not in distances
            # If names come from the slabs, ids in and below this slab have no state but "reached"
            # yet, so that can be written without reading the old state.
            unnamed = sound and names is not None
            counts = directory.child_counts[:count]
            at = len(distances) if count == directory.objects else sum(counts)
            backwards = counts[::-1]
            ids = compress(range(first + count - 1, first - 1, -1), backwards)
            for object_id, links in zip(ids, filter(None, backwards), strict=True):
                at -= links
                if not states[object_id] & _REACHED:
                    continue
                if unnamed:
                    for far in distances[at : at + links]:
                        states[object_id - far] = _REACHED
                    continue
                for far in distances[at : at + links]:
                    if not sound and not 0 < far < object_id:
                        raise CorruptionError(
                            f"object {directory.digest(object_id - first).hex()} is older "
                            "than one it links to"
                        )
                    states[object_id - far] |= _REACHED
        if names is not None:
            self._add(first, names)
        self._require_named(directory, states[first : first + count])

    def _require_named(self, directory: SlabDirectory, states: bytes) -> None:
        """Raise if an object is reached that the index does not name."""
        position = states.find(_STRAY)
        if position >= 0:
            raise CorruptionError(
                f"object {directory.digest(position).hex()} of {self._env.path} is linked "
                "to, but the index does not name it"
            )

    def _require_nothing_between(self, start: int, stop: int) -> None:
        """Raise if an id is reached in a range without slabs."""
        if start == stop:
            return  # one slab follows the other, as nearly always
        found = max(self._states.find(each, start, stop) for each in _REACHED_STATES)
        if found >= 0:
            raise CorruptionError(
                f"object {found} of {self._env.path} is linked to, but no slab holds it"
            )

    def _directories(self, txn: Txn, below: int) -> Iterator[tuple[SlabDirectory, int]]:
        """Some slabs with ids below ``below``, newest first; each with the id after its last one.

        That id is at most ``below``.
        """
        cursor = txn.cursor(db=self._env.slabs)
        more = cursor.set_range(slabs.slab_key(below - 1)) or cursor.last()
        for _ in range(_SLAB_BATCH):
            if not more:
                return
            directory = slabs.read_directory(cursor.key(), cursor.value())
            if directory.first_id < below:
                # Packing may have joined slabs since the last one was visited.
                yield directory, min(directory.first_id + directory.objects, below)
            more = cursor.prev()

    def _more(self, txn: Txn, below: int) -> bool:
        """True if there is a slab with ids below this one."""
        cursor = txn.cursor(db=self._env.slabs)
        if not cursor.first():
            return False
        first = int.from_bytes(cursor.key(), "big") - slabs.count_of(cursor.value()) + 1
        return first < below

    # --- catching up ----------------------------------------------------------------------

    def _reach_recent(self, txn: Txn, view: MemtableView) -> None:
        """Mark what the commits of the log need: the children of their objects, and their rows'
        objects.
        """
        for key, value in view.slabs():
            directory = slabs.read_directory(key, value)
            start = 0
            for position, links in enumerate(directory.child_counts):
                for child in directory.children(position, start):
                    self._reach(child)
                start += links
        for table in self._roots.tables:
            for key, changed in view.changed_between(table, b"", None, reverse=False):
                if changed is None:
                    continue
                for digest in self._roots.named(table, Row(key, changed)):
                    if isinstance(view.find_id(digest), Unchanged):
                        self._reach_root(txn, table, key, digest)

    def catch_up(self, txn: Txn, limit: int | None = None) -> bool:
        """Mark what was written since the marking pass, and everything that it links to.

        That is: new objects, objects whose grace period restarted, and the objects that changed
        rows name. A transaction removes nothing before it has caught up (the second rule in
        docs/internals/gc.md). At most ``limit`` items are examined; False if some are left.
        """
        budget = _VisitBudget(limit)
        done = (
            self._scan_new(txn, budget)
            and self._read_changes(txn, budget)
            and self._read_touches(txn, budget)
        )
        return self._descend(txn, budget) and done

    def _scan_new(self, txn: Txn, budget: _VisitBudget) -> bool:
        cursor = txn.cursor(db=self._env.slabs)
        more = cursor.set_range(slabs.slab_key(self._scanned_id + 1))
        while more:
            directory = slabs.read_directory(cursor.key(), cursor.value())
            start = 0
            for position, links in enumerate(directory.child_counts):
                if directory.first_id + position > self._scanned_id and self._is_named(
                    txn, directory, position
                ):
                    for child in directory.children(position, start):
                        self._reach_child(directory, position, child)
                start += links
            self._scanned_id = directory.first_id + directory.objects - 1
            more = cursor.next()
            if not budget.spend(directory.objects) and more:
                return False
        return True

    def _is_named(self, txn: Txn, directory: SlabDirectory, position: int) -> bool:
        object_id = directory.first_id + position
        return is_named(txn, self._env, None, directory.digest(position), object_id)

    def _read_changes(self, txn: Txn, budget: _VisitBudget) -> bool:
        for number, (table, key) in notes.changes_after(self._env, txn, self._changes_seen):
            if not budget.spend(1):
                return False
            self._changes_seen = number
            if table not in self._roots.tables:
                continue
            value = likely_row(txn, self._env.tables[table], table, key)
            if value is not None:
                for digest in self._roots.named(table, Row(key, value)):
                    self._reach_root(txn, table, key, digest)
        return True

    def _read_touches(self, txn: Txn, budget: _VisitBudget) -> bool:
        for number, touch in notes.touches_after(self._env, txn, self._touches_seen):
            if not budget.spend(1):
                return False
            self._touches_seen = number
            self._reach_touched(txn, touch)
        return True

    def _descend(self, txn: Txn, budget: _VisitBudget) -> bool:
        """Mark everything that the objects in ``_open`` link to, from the highest id down."""
        cursor = txn.cursor(db=self._env.slabs)
        directory: SlabDirectory | None = None
        starts: list[int] = []
        while self._open:
            if not budget.spend(1):
                return False
            object_id = -heapq.heappop(self._open)
            if not self._states[object_id] & _NAMED:
                raise CorruptionError(
                    f"object {object_id} of {self._env.path} is linked to, but the index does not "
                    "name it"
                )
            if directory is None or object_id < directory.first_id:
                if not cursor.set_range(slabs.slab_key(object_id)):
                    raise CorruptionError(f"no slab of {self._env.path} holds object {object_id}")
                directory = slabs.read_directory(cursor.key(), cursor.value())
                starts = [0]
                for links in directory.child_counts:
                    starts.append(starts[-1] + links)
            position = object_id - directory.first_id
            if position < 0:
                raise CorruptionError(f"no slab of {self._env.path} holds object {object_id}")
            for child in directory.children(position, starts[position]):
                self._reach_child(directory, position, child)
        return True

    def _reach_child(self, directory: SlabDirectory, position: int, child: int) -> None:
        if not 0 < child < directory.first_id + position:
            raise CorruptionError(
                f"object {directory.digest(position).hex()} is older than one it links to"
            )
        self._reach(child)

    # --- unreached objects -------------------------------------------------------------------

    def candidates(self, below: int, limit: int) -> Candidates:
        """The next ``limit`` unreached objects below ``below``, by descending id."""
        ids: list[int] = []
        digests: list[bytes] = []
        sizes: list[int] = []
        with self._env.reading() as txn:
            for directory, stop in self._directories(txn, below):
                first = directory.first_id
                below = first
                for position in reversed(self._unreached_in(first, stop)):
                    ids.append(first + position)
                    digests.append(directory.digest(position))
                    sizes.append(directory.lengths[position])
                    if len(ids) == limit:
                        return Candidates(ids, digests, sizes, first + position)
            if below > 1 and not self._more(txn, below):
                below = 1
        return Candidates(ids, digests, sizes, below)

    def _unreached_in(self, first: int, stop: int) -> list[int]:
        """Which ids from ``first`` to below ``stop`` are named and not reached, minus ``first``."""
        left = self._states[first:stop].translate(_IS_LEFT)
        return list(compress(range(stop - first), left))

    def dead_slabs(self, below: int) -> tuple[list[bytes], int]:
        """The keys of some slabs below ``below`` without a named object; and where to continue."""
        found: list[bytes] = []
        with self._env.reading() as txn:
            for directory, stop in self._directories(txn, below):
                below = directory.first_id
                if self.is_dead(directory):
                    found.append(slabs.slab_key(stop - 1))
            if below > 1 and not self._more(txn, below):
                below = 1
        return found, below

    def is_dead(self, directory: SlabDirectory) -> bool:
        """True if no object in this slab is named. False for the newest, which new ids follow."""
        stop = directory.first_id + directory.objects
        if stop > self.last_id:
            return False
        return not any(self._states[directory.first_id : stop].translate(_IS_NAMED))

    def is_reached(self, object_id: int) -> bool:
        """True if this object was reached."""
        return bool(self._states[object_id] & _REACHED)

    def forget(self, object_ids: Iterable[int]) -> None:
        """Record that these objects have lost their names."""
        for object_id in object_ids:
            self._states[object_id] &= ~_NAMED

    def unreached(self) -> bytes:
        """All ids that are named and not reached: a byte for each, compressed."""
        packer = compressobj(1)
        parts: list[bytes] = []
        for start in range(0, self.last_id + 1, _CHUNK_IDS):
            stop = min(start + _CHUNK_IDS, self.last_id + 1)
            parts.append(packer.compress(self._states[start:stop].translate(_IS_LEFT)))
        return b"".join((*parts, packer.flush()))

    def restrict(self, unreached: bytes) -> None:
        """Leave only those objects unreached that an earlier ``unreached`` lists as well.

        The others keep their names, so everything they link to must stay, too: they become reached,
        and ``catch_up`` marks what they link to.
        """
        unpacker = decompressobj()
        data = unreached
        for start in range(0, self.last_id + 1, _CHUNK_IDS):
            stop = min(start + _CHUNK_IDS, self.last_id + 1)
            before = b""
            while len(before) < stop - start:
                more = unpacker.decompress(data, stop - start - len(before))
                data = unpacker.unconsumed_tail
                if not more:
                    break
                before += more
            left = int.from_bytes(self._states[start:stop].translate(_IS_LEFT), "big")
            listed = int.from_bytes(before.ljust(stop - start, b"\0"), "big")
            spared = (left & ~listed).to_bytes(stop - start, "big")
            for object_id in compress(range(start, stop), spared):
                self._reach(object_id)


class _VisitBudget:
    """How many objects and notes may be visited while writers wait; None: no limit."""

    def __init__(self, limit: int | None) -> None:
        self._left = limit

    def spend(self, amount: int) -> bool:
        """Spend this amount; False if the budget was used up."""
        if self._left is None:
            return True
        if self._left <= 0:
            return False
        self._left -= amount
        return True


def _size_of(directory: SlabDirectory, chosen: bytes) -> int:
    """The bytes of those objects of a slab whose byte in ``chosen`` is 1."""
    if len(chosen) == directory.objects and b"\0" not in chosen:
        return directory.size_bytes
    return sum(compress(directory.lengths, chosen))
