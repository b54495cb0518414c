"""vacuum: remove tombstoned nodes, expired rows, and the bytes of unreachable objects.

    expire    remove expired rows
    rewrite   remove hidden nodes from all revisions of their sessions
    collect   remove unreachable objects (``gc``)
    pack      reclaim their bytes

It can run concurrently with readers and writers, and each part can run alone. Interrupting or
killing it at any point is safe: a session is rewritten atomically, and the next run continues with
what is left. The report says how each part ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

from casstore.engine.overlay import OverlayEngine
from casstore.engine.protocol import DEFAULT_GRACE_MS, Packing, PackReport, reclaiming
from casstore.errors import (
    BusyError,
    CasstoreError,
    CorruptionError,
    SessionDeletedError,
    StorageFullError,
)
from casstore.format.printing import count
from casstore.maintenance import gc, keepers
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.gc import GcReport
from casstore.maintenance.keepers import Keeper
from casstore.maintenance.pack import pack
from casstore.maintenance.progress import Phase, Progress
from casstore.session import keys, rewriting
from casstore.session.arguments import check_callable, check_flag, check_ms, list_of
from casstore.session.scanning import scan
from casstore.session.state import Runtime, decode_head, runtime_of
from casstore.store import Store, check_store

_COLLECTED: Final = (gc.Outcome.SWEPT, gc.Outcome.NOTHING, gc.Outcome.PLANNED)


class VacuumOutcome(Enum):
    """How a part of vacuum ended, and all of it."""

    DONE = "done"
    NOTHING = "nothing to do"
    #: A dry run, which changes nothing.
    PLANNED = "planned"
    #: A session that was deleted meanwhile.
    GONE = "gone"
    #: Other writers kept changing the session, or another process reclaims space in the store. The
    #: session is unchanged; run again.
    BUSY = "busy"
    #: Stopped early; the completed steps are valid. Run it again.
    INCOMPLETE = "incomplete"
    #: Something is damaged, or went wrong; ``problem`` says what.
    FAILED = "failed"


class SessionReport(NamedTuple):
    """The result of removing the hidden nodes of a session.

    Attributes:
        session: the session
        outcome: how it ended
        nodes_removed: hidden nodes removed
        nodes_rewritten: nodes rewritten because they came after a removed one
        revisions_rewritten: revisions rewritten because they had a removed node
        problem: the error that stopped it, if one did
    """

    session: str
    outcome: VacuumOutcome
    nodes_removed: int = 0
    nodes_rewritten: int = 0
    revisions_rewritten: int = 0
    problem: CasstoreError | None = None

    def __str__(self) -> str:
        text = (
            f"session {self.session!r}: {self.outcome.value}, {count(self.nodes_removed, 'node')} "
            f"removed, {self.nodes_rewritten:,} rewritten in "
            f"{count(self.revisions_rewritten, 'revision')}"
        )
        return text if self.problem is None else f"{text}; {self.problem}"


class VacuumReport(NamedTuple):
    """What vacuum did, part by part; None: the part did not run.

    Attributes:
        expired_rows: rows that had expired
        sessions: sessions that had hidden nodes
        collected: the report of gc, if gc ran
        packed: the report of pack, if pack ran
        objects_kept: removed nodes and long parts of their payloads that are still stored
        keepers: the owners of rows that keep them; empty: they are within the grace period, or gc
            was not finished
        problem: the error that stopped it, if one did
        dry_run: true: nothing was changed; the report says what a run would do up to gc
    """

    expired_rows: int = 0
    sessions: tuple[SessionReport, ...] = ()
    collected: GcReport | None = None
    packed: PackReport | None = None
    objects_kept: int = 0
    keepers: tuple[Keeper, ...] = ()
    problem: CasstoreError | None = None
    dry_run: bool = False

    def __str__(self) -> str:
        lines = [f"{self.outcome.value}: {count(self.expired_rows, 'expired row')} removed"]
        lines += map(str, self.sessions)
        if self.collected is not None:
            lines.append(f"gc {self.collected}")
        if self.packed is not None:
            lines.append(str(self.packed))
        if self.objects_kept:
            named = ", ".join([f"{one.kind} {one.name!r}" for one in self.keepers])
            lines.append(
                f"{count(self.objects_kept, 'removed object')} still stored"
                + (f", kept by {named}" if named else "")
            )
        if self.problem is not None:
            lines.append(str(self.problem))
        return "\n".join(lines)

    @property
    def outcome(self) -> VacuumOutcome:
        """The worst of all parts."""
        parts = [each.outcome for each in self.sessions]
        collected = None if self.collected is None else self.collected.outcome
        if self.problem is not None or collected is gc.Outcome.FAILED:
            return VacuumOutcome.FAILED
        if collected is gc.Outcome.REFUSED:
            busy = self.collected is not None and isinstance(self.collected.problem, BusyError)
            parts.append(VacuumOutcome.BUSY if busy else VacuumOutcome.FAILED)
        for worst in (VacuumOutcome.FAILED, VacuumOutcome.BUSY):
            if worst in parts:
                return worst
        if collected not in _COLLECTED:
            return VacuumOutcome.INCOMPLETE
        if collected is gc.Outcome.NOTHING and not self.expired_rows and not parts:
            return VacuumOutcome.NOTHING
        return VacuumOutcome.PLANNED if self.dry_run else VacuumOutcome.DONE


def vacuum(
    store: Store,
    *,
    sessions: Sequence[str] | None = None,
    grace_ms: int = DEFAULT_GRACE_MS,
    dry_run: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> VacuumReport:
    """Remove hidden nodes, expired rows and unreachable objects, and reclaim their bytes.

    A dry run does all but pack in memory, and leaves the store unchanged. ``sessions`` limits which
    sessions are rewritten; by default all with hidden nodes. Objects put within the grace period
    ``grace_ms`` are kept, removed nodes included; with 0 they are removed at once. ``stop`` is
    called between sessions and between transactions.

    >>> hidden = session.tombstone(["ask"])
    >>> report = vacuum(store, grace_ms=0)
    >>> report.outcome, [done.nodes_removed for done in report.sessions]
    (<VacuumOutcome.DONE: 'done'>, [1])
    """
    check_store(store)
    check_ms(grace_ms, "grace_ms")
    if stop is not None:
        check_callable(stop, "stop")
    named = None if sessions is None else list_of(sessions, "sessions")
    for session in named or ():
        keys.session_key(session)
    check_flag(dry_run, "dry_run")
    if dry_run:
        store = Store(OverlayEngine(store.engine))
    runtime = runtime_of(store)
    expired = expire_rows(store, progress=progress).removed
    report = VacuumReport(expired_rows=expired, dry_run=dry_run)
    done: list[SessionReport] = []
    todo = list(sessions_with_hidden(store)) if named is None else named
    begin = Phase(progress, "rewrite", "sessions")
    for session in todo:
        if stop is not None and stop():
            return report._replace(sessions=tuple(done))
        begin(len(done), len(todo))
        became, digests = _rewrite(runtime, session, progress)
        done.append(became)
        if digests:
            # Before gc runs: if this run is stopped, the next one still reports what is kept.
            keepers.remember(store, session, digests)
    collected = gc.collect(store, grace_ms=grace_ms, dry_run=dry_run, progress=progress, stop=stop)
    report = report._replace(sessions=tuple(done), collected=collected)
    if dry_run:
        return report
    if collected.outcome in _COLLECTED:
        report = _pack(store, report, progress)
    kept = keepers.find_kept(store)
    return report._replace(objects_kept=len(kept), keepers=keepers.find_keepers(store.engine, kept))


def sessions_with_hidden(store: Store) -> Iterator[str]:
    """The ids of sessions that have hidden nodes, found by their heads alone.

    >>> hidden = session.tombstone(["ask"])
    >>> list(sessions_with_hidden(store))
    ['s']
    """
    check_store(store)
    rows = scan(store.engine, "heads", b"", None)
    heads = ((row.key, decode_head(row.value)) for row in rows)
    return (keys.name_of(key, head.long_id) for key, head in heads if head.hidden is not None)


def rewrite_hidden(store: Store, session: str) -> SessionReport:
    """Remove the hidden nodes of one session from all of its revisions.

    Their objects stay until they are collected. What readers see stays the same.

    >>> hidden = session.tombstone(["ask"])
    >>> rewrite_hidden(store, "s").revisions_rewritten
    2
    >>> list(sessions_with_hidden(store))
    []
    """
    check_store(store)
    return _rewrite(runtime_of(store), session, None)[0]


def _rewrite(
    runtime: Runtime, session: str, progress: Progress | None
) -> tuple[SessionReport, set[bytes]]:
    """Remove hidden nodes; the report, and the digests of these nodes and of what they link to."""
    report = Phase(progress, "revise", "revisions")
    try:
        with reclaiming(runtime.engine):
            done = rewriting.rewrite_hidden(runtime, session, progress=report)
    except SessionDeletedError:
        return SessionReport(session, VacuumOutcome.GONE), set()
    except BusyError as exc:
        return SessionReport(session, VacuumOutcome.BUSY, problem=exc), set()
    except CorruptionError as exc:
        # Continue: other sessions may be intact, and gc checks for itself what it can rely on.
        return SessionReport(session, VacuumOutcome.FAILED, problem=exc), set()
    if not done.removed:
        return SessionReport(session, VacuumOutcome.NOTHING), set()
    counts = len(done.removed), done.nodes_rewritten, done.revisions_rewritten
    became = SessionReport(session, VacuumOutcome.DONE, *counts)
    return became, {*done.removed, *done.linked}


def _pack(store: Store, report: VacuumReport, progress: Progress | None) -> VacuumReport:
    if not isinstance(store.engine, Packing):
        return report
    try:
        return report._replace(packed=pack(store, min_age_ms=0, progress=progress))
    except (CorruptionError, StorageFullError) as exc:
        # What was hidden is removed and collected; only the space within slabs is not reclaimed.
        return report._replace(problem=exc)
