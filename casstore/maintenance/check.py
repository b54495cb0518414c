"""Check: is everything stored, is it what was written, and does it fit together?

Damage does not raise: it becomes a finding, and the report names the sessions and revisions that
need the damaged object or row. Objects are read once, by ascending id, with one bit or two of
memory for each: a child's id is lower than its parent's, so when an object is read, it is known
whether all it links to is undamaged. A check runs concurrently with writers and gc, on snapshots;
what looks wrong is read again in a fresh snapshot before it is reported.

    quick         headers, dictionaries, numbers
    connectivity  everything that rows reach is stored; the node index of every head lists its
                  nodes; rows match their checksums; rows about the same record agree
    sample        the same, and the content of a random share of the objects
    full          the same, and the content of every object, the node index of every revision,
                  and the number of every message

``rebuild`` repairs a damaged index of objects from the slabs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from casstore.engine import faults
from casstore.engine.faults import Checking, Fault
from casstore.engine.protocol import DEFAULT_GRACE_MS, TABLES, Rebuilding
from casstore.errors import CasstoreError, CorruptionError, InvalidInputError, ReadOnlyError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import Digest
from casstore.format.printing import count
from casstore.maintenance import findings as codes
from casstore.maintenance.findings import Affected, Finding, Findings, Where
from casstore.maintenance.graph_proof import GraphProof, IndexMismatch
from casstore.maintenance.objects_check import ObjectsCheck
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.records_check import RecordsCheck
from casstore.maintenance.roots import ROOTS
from casstore.maintenance.rows import remove_pins
from casstore.maintenance.rows_check import Revision, RowsCheck, session_of
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.session.arguments import check_choice, check_count, check_flag, check_kind, check_ms
from casstore.store import Store, check_store

QUICK: Final = "quick"
CONNECTIVITY: Final = "connectivity"
SAMPLE: Final = "sample"
FULL: Final = "full"
LEVELS: Final = (QUICK, CONNECTIVITY, SAMPLE, FULL)

# How many sessions, and revisions of each, a report names at most.
_NAMED_SESSIONS: Final = 1000
_NAMED_REVISIONS: Final = 20
_MARK_VERSION: Final = 1
_TOLD_EVERY: Final = 64
# If one of these tables is damaged, no object is read.
_OBJECT_TABLES: Final = frozenset(("main", "meta", "slabs", "index", "dictionaries"))
# If one of these tables is damaged, no graph is checked.
_GRAPH_TABLES: Final = frozenset(("heads", "history"))


class CheckReport(NamedTuple):
    """What a check found.

    Attributes:
        level: the level of the check
        since_last: true: only what was added since the last check without an error was checked
        sound: true: no error was found
        findings: what was found, the worst first
        findings_omitted: findings beyond the limit, which are not listed
        counts: how many findings of each code, those not listed included
        harmless: how many findings need no remedy
        affected: sessions that need what is damaged or missing
        affected_omitted: affected sessions that are not listed
        affected_pins: tags and pins that need what is damaged or missing
        rows_checked: rows looked at
        objects_checked: objects looked at
        contents_checked: objects whose content was read and compared with its digest
        checked_at_ms: when the check ended
        last_id: objects with ids up to this one are checked, now or by the checks that `since_last`
            relies on
    """

    level: str
    since_last: bool
    sound: bool
    findings: tuple[Finding, ...]
    findings_omitted: int
    counts: dict[str, int]
    harmless: int
    affected: tuple[Affected, ...]
    affected_omitted: int
    affected_pins: tuple[str, ...]
    rows_checked: int
    objects_checked: int
    contents_checked: int
    checked_at_ms: int
    last_id: int

    def __str__(self) -> str:
        lines = [
            f"{'sound' if self.sound else 'damaged'}: level {self.level}, "
            f"{count(self.rows_checked, 'row')}, {count(self.objects_checked, 'object')}, "
            f"{count(len(self.findings) + self.findings_omitted, 'finding')}"
        ]
        lines += map(str, self.findings)
        if self.findings_omitted:
            lines.append(f"… {self.findings_omitted:,} more")
        if self.affected:
            named = ", ".join([repr(one.session) for one in self.affected])
            lines.append(f"affected sessions: {named}")
        return "\n".join(lines)


def check(
    store: Store,
    *,
    level: str = CONNECTIVITY,
    since_last: bool = False,
    share: float = 0.05,
    seed: int | None = None,
    max_findings: int = 100,
    progress: Progress | None = None,
) -> CheckReport:
    """Look for damage and report it; damage never raises.

    ``since_last`` looks only at objects that came after the last check of this level, or a
    stricter one, that found no error. ``share`` and ``seed`` are for level ``sample``: how
    many of the objects, and which. At most ``max_findings`` are listed; the rest is counted.
    Unless the store is read-only, ``record`` stores the result for ``last_check``.

    >>> report = check(store, level="full")
    >>> report.sound, report.findings
    (True, ())
    """
    check_store(store)
    engine = store.engine
    check_choice(level, "level", LEVELS)
    check_flag(since_last, "since_last")
    if not isinstance(engine, Checking):
        raise InvalidInputError("the engine of this store cannot be checked")
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise InvalidInputError(f"share must be a number above 0 and up to 1, got {share!r:.60}")
    check_count(max_findings, "max_findings", least=1)
    if seed is not None:
        check_kind(seed, "seed", int)
    chance = random.Random(seed)
    is_read: dict[str, Callable[[int], bool]] = {
        SAMPLE: lambda object_id: chance.random() < share,
        FULL: lambda object_id: True,
    }
    wanted = is_read.get(level)
    checking = _Check(store, engine, level, wanted, Findings(max_findings), progress)
    report = checking.run(since_last=since_last)
    with suppress(ReadOnlyError):
        # Without the result, the next check with ``since_last`` looks at more than it has to.
        record(store, report)
    return report


# --- the result of the last check -------------------------------------------------------------


class LastCheck(NamedTuple):
    """The result of the last check, as the store holds it.

    Attributes:
        checked_at_ms: when it ended
        level: its level
        since_last: true: it looked only at what was added since the check before
        sound: true: it found no error
        findings: what it found, harmless notes included
    """

    checked_at_ms: int
    level: str
    since_last: bool
    sound: bool
    findings: int


class _Mark(NamedTuple):
    """What checks store: up to which id each level found no error, and the last result."""

    connectivity: int = 0
    full: int = 0
    last: LastCheck | None = None


def last_check(store: Store) -> LastCheck | None:
    """The result of the last check that could store it; None if there was none.

    >>> report = check(store, level="quick")
    >>> last_check(store).level, last_check(store).sound
    ('quick', True)
    """
    check_store(store)
    engine = store.engine
    return _read_mark(engine).last if isinstance(engine, Checking) else None


def record(store: Store, report: CheckReport) -> bool:
    """Store the result of a check; False, and nothing is written, if pages are damaged.

    A write could overwrite pages that ``salvage`` still reads. ``check`` calls this itself; call it
    for a report about a store that was open read-only.

    >>> record(store, check(store, level="quick"))
    True
    """
    check_store(store)
    engine = store.engine
    if not isinstance(engine, Checking) or faults.PAGE_DAMAGED in report.counts:
        return False
    known = _read_mark(engine)
    connectivity, full = known.connectivity, known.full
    if report.sound and report.level in (CONNECTIVITY, FULL):
        connectivity = max(connectivity, report.last_id)
        if report.level == FULL:
            full = max(full, report.last_id)
    engine.write_mark(pack_checked([_MARK_VERSION, connectivity, full, *result_of(report)]))
    return True


def result_of(report: CheckReport) -> LastCheck:
    """The part of a report that is stored."""
    findings = len(report.findings) + report.findings_omitted
    return LastCheck(report.checked_at_ms, report.level, report.since_last, report.sound, findings)


def _read_mark(checking: Checking) -> _Mark:
    stored = checking.read_mark()
    if stored is None:
        return _Mark()
    try:
        version, connectivity, full, *last = unpack_checked(stored)
        if version == _MARK_VERSION and connectivity >= 0 and full >= 0:
            return _Mark(connectivity, full, LastCheck(*last))
    except (TypeError, ValueError, CasstoreError):
        pass
    # A mark that cannot be decoded counts as absent: the next check looks at everything.
    return _Mark()


class _Check:
    """One call of ``check``."""

    def __init__(
        self,
        store: Store,
        checking: Checking,
        level: str,
        content: Callable[[int], bool] | None,
        found: Findings,
        progress: Progress | None,
    ) -> None:
        self._engine = engine = store.engine
        self._checking = checking
        self._level = level
        self._found = found
        self._progress = progress
        self._start = 0
        self._pins: list[str] = []
        self._objects = ObjectsCheck(engine, checking, found, content, whole=level == FULL)
        self._rows = RowsCheck(engine, checking, found)
        self._records = RecordsCheck(store, self._rows, found, whole=level == FULL)

    def run(self, *, since_last: bool) -> CheckReport:
        """Check everything that the level includes, as far as it can be read."""
        checking, found = self._checking, self._found
        unsafe: frozenset[str] = frozenset()
        if self._level != QUICK:
            structure = checking.check_structure()
            self._take(structure.faults)
            unsafe = self._rows.unsafe = structure.unsafe
        # LMDB may crash the process when it reads a damaged page, so such tables are not read.
        readable = not unsafe & _OBJECT_TABLES
        if readable:
            self._attempt(lambda: self._take(checking.check_header()))
        affected: list[Affected] = []
        if self._level != QUICK:
            tables = [table for table in TABLES if table not in unsafe]
            progress = Phase(self._progress, "rows", "rows")
            self._attempt(
                lambda: self._take(checking.check_rows(tables, progress, whole=not unsafe))
            )
            if since_last and readable:
                mark = _read_mark(checking)
                self._start = mark.full if self._level in (FULL, SAMPLE) else mark.connectivity
            if readable:
                self._attempt(lambda: self._objects.run(self._start, self._progress))
            if readable and not self._start:
                names = Phase(self._progress, "index", "names")
                excused = self._objects.is_tainted
                self._attempt(lambda: self._take(checking.check_index(excused, names)))
            if readable:
                self._attempt(lambda: self._rows.run(tables, progress))
                self._attempt(self._records.settle)
            if readable and not unsafe & _GRAPH_TABLES:
                self._attempt(self._check_graphs)
                self._attempt(lambda: affected.extend(self._find_affected()))
        return CheckReport(
            level=self._level,
            since_last=since_last,
            sound=not found.has(codes.ERROR),
            findings=found.found(),
            findings_omitted=found.omitted,
            counts=dict(sorted(found.counts.items())),
            harmless=found.harmless,
            affected=tuple(affected[:_NAMED_SESSIONS]),
            affected_omitted=max(0, len(affected) - _NAMED_SESSIONS),
            affected_pins=tuple(self._pins),
            rows_checked=self._rows.rows,
            objects_checked=self._objects.objects,
            contents_checked=self._objects.contents,
            checked_at_ms=self._engine.now_ms(),
            last_id=max(self._objects.highest, self._start),
        )

    def _attempt(self, work: Callable[[], object]) -> None:
        """Run a part of the check; damage that ends it, as LMDB reports it, becomes a finding."""
        try:
            work()
        except CorruptionError as exc:
            self._found.add(faults.PAGE_DAMAGED, str(exc))

    def _take(self, faulty: list[Fault]) -> None:
        for fault in faulty:
            self._found.add_fault(fault, session_of(fault.table, fault.key))

    # --- graphs ----------------------------------------------------------------------------

    def _check_graphs(self) -> None:
        """Compare the node index of each head, at level ``full`` each revision, with its nodes."""
        reader = PieceReader(self._engine)
        proof = GraphProof(reader)
        progress = Phase(self._progress, "graphs", "revisions")
        revisions = self._rows.revisions("heads")
        if self._level == FULL:
            revisions = self._rows.revisions_by_session()
        for done, revision in enumerate(revisions):
            digest = revision.head.manifest
            [known] = self._checking.find_ids([digest])
            if known is None or self._objects.is_tainted(known) or 0 < known <= self._start:
                # Missing or damaged, which is reported already; or proven by an earlier check.
                continue
            try:
                proof.prove(digest, graph.read_manifest(reader, digest))
            except CasstoreError as exc:
                self._wrong_graph(revision, exc)
            if not done % _TOLD_EVERY:
                progress(done)

    def _wrong_graph(self, revision: Revision, exc: CasstoreError) -> None:
        if self._rows.now([revision.place]) != [revision.row]:
            # The row has changed meanwhile, so gc may have removed the objects that it named.
            return
        code = codes.NODE_INDEX_WRONG if isinstance(exc, IndexMismatch) else codes.GRAPH_WRONG
        what = f"the graph of session {revision.session!r}: {exc}"
        head = revision.head
        where = Where(revision.session, head.revision, Digest(head.manifest))
        self._found.add(code, what, where)

    # --- affected sessions -------------------------------------------------------------------

    def _find_affected(self) -> list[Affected]:
        """The sessions and revisions that need something damaged or missing."""
        if not (self._objects.any_tainted or self._found.counts.get(codes.ROOT_MISSING)):
            return []
        hit: dict[str, list[int]] = {}
        heads: set[str] = set()
        counts: dict[str, int] = {}
        for revision in self._rows.revisions():
            digests = [revision.head.manifest]
            if revision.head.hidden is not None:
                digests.append(revision.head.hidden)
            if self._are_whole(digests):
                continue
            name = revision.session
            counts[name] = counts.get(name, 0) + 1
            newest = [*hit.get(name, []), revision.head.revision]
            hit[name] = sorted(newest, reverse=True)[:_NAMED_REVISIONS]
            if revision.is_head:
                heads.add(name)
        others: dict[str, list[str]] = {}
        for session, what, digest in self._rows.keepers():
            if self._are_whole([digest]):
                continue
            named = self._pins if session is None else others.setdefault(session, [])
            if len(named) < _NAMED_SESSIONS:
                named.append(what)
        return [
            Affected(
                name,
                tuple(hit.get(name, ())),
                counts.get(name, 0),
                name in heads,
                tuple(others.get(name, ())),
            )
            for name in sorted(hit.keys() | others.keys())
        ]

    def _are_whole(self, digests: list[bytes]) -> bool:
        ids = self._checking.find_ids(digests)
        return all(each is not None and not self._objects.is_tainted(each) for each in ids)


# --- rebuilding -------------------------------------------------------------------------------


class RebuildReport(NamedTuple):
    """What a rebuild of the index did.

    Attributes:
        objects_named: objects in the index now
        objects_found: of those, not in it before
        objects_dropped: entries removed from the index: unreachable, or their bytes are gone
        objects_missing: objects that are needed and lost
    """

    objects_named: int
    objects_found: int
    objects_dropped: int
    objects_missing: int

    def __str__(self) -> str:
        return (
            f"rebuilt the index of {count(self.objects_named, 'object')}: "
            f"{self.objects_found:,} found, {self.objects_dropped:,} dropped, "
            f"{self.objects_missing:,} missing"
        )


def rebuild(
    store: Store, *, grace_ms: int = DEFAULT_GRACE_MS, progress: Progress | None = None
) -> RebuildReport:
    """Rebuild the index of objects from the slabs.

    Only the index records which objects gc removed while their bytes are still in slabs. So the
    rebuilt index names what rows reach and what is younger than ``grace_ms``, as after gc.
    CorruptionError, and nothing is changed, if a row that names objects or the directory of a slab
    is damaged; then use ``salvage``.

    >>> report = rebuild(store)
    >>> report.objects_missing, session.head().leaf
    (0, 'left')
    """
    check_store(store)
    engine = store.engine
    if not isinstance(engine, Rebuilding):
        raise InvalidInputError("the engine of this store has nothing to be rebuilt")
    check_ms(grace_ms, "grace_ms")
    Phase(progress, "index", "objects")(0)
    # The rebuilt index names what rows reach, so remove expired pins first: none may keep its
    # object longer, or remain without it.
    remove_pins(engine, progress)
    index = engine.rebuild_index(ROOTS, grace_ms=grace_ms)
    engine.sum_rows()
    return RebuildReport(*index)
