"""Commands that free space: ``gc``, ``pack``, ``vacuum``, ``compact``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import click

from casstore.cli.advice import advice
from casstore.cli.command import App, command
from casstore.cli.fields import PROBLEM, Field, Fields, described, document
from casstore.cli.main import INTERRUPTED
from casstore.cli.naming import complete_name
from casstore.cli.options import dry_run_option
from casstore.cli.output import Printer, bad, bold, good, name
from casstore.cli.quantities import DURATION, Whole, count, duration
from casstore.engine.protocol import DEFAULT_BATCH, PackReport
from casstore.errors import BusyError, CasstoreError
from casstore.maintenance import compact as compaction
from casstore.maintenance import gc as collecting
from casstore.maintenance import pack as packing
from casstore.maintenance import vacuum as vacuuming
from casstore.maintenance.compact import CompactReport
from casstore.maintenance.gc import GcReport, Outcome
from casstore.maintenance.keepers import Keeper
from casstore.maintenance.vacuum import SessionReport, VacuumOutcome, VacuumReport

_FINE: Final = ("swept", "nothing to do", "planned", "done")
# The most lines of each list that the text shows.
_SHOWN: Final = 20

GC_FIELDS: Final[Fields] = described(
    GcReport,
    {
        "outcome": "swept, nothing to do, planned, incomplete, refused or failed",
        "grace_ms": Field("objects put within this time were kept", "grace period"),
        "roots": Field(),
        "objects_kept": Field(label="reachable", unit="object"),
        "kept_bytes": Field(label="reachable size", of="bytes_kept"),
        "objects_unreached": Field(label="unreachable", unit="object"),
        "unreached_bytes": Field(label="unreachable size", of="bytes_unreached"),
        "objects_swept": Field(label="removed", unit="object"),
        "swept_bytes": Field(label="removed size", of="bytes_swept"),
        "freed_bytes": Field(label="freed in the file", of="bytes_freed"),
        "pins_expired": Field(label="expired", unit="pin"),
        "longest_pause_ms": Field(
            label="longest wait of writers", of=lambda report: round(report.longest_pause_ms, 3)
        ),
        "problem": PROBLEM,
        "missing_systems": Field(label="kept for systems that are not installed"),
    },
)
PACK_FIELDS: Final[Fields] = {
    "slabs_before": Field("slabs that were rewritten", "slabs rewritten", "slab"),
    "slabs_after": Field("slabs that replaced them", "replaced by", "slab"),
    "bytes_before": "the stored size of those slabs",
    "bytes_after": "the stored size of the slabs that replaced them",
    "objects_dropped": Field("removed objects whose bytes were dropped", "dropped", "object"),
    "pages_saved": "pages that indexes and rows take less",
    "longest_pause_ms": Field(
        "the longest time that writers had to wait",
        of=lambda report: round(report.longest_lock_s * 1000, 3),
    ),
    "damaged": Field(
        "damaged slabs, which were left unchanged, and why",
        of=lambda report: [
            f"objects up to {one.last_id}: {one.reason}" for one in report.damaged
        ],
    ),
}  # fmt: skip
_VACUUMED: Final[Fields] = described(
    SessionReport,
    {
        "session": Field(label="session"),
        "outcome": Field("done, nothing to do, gone, busy or failed", "outcome"),
        "nodes_removed": Field(label="nodes removed", unit="node"),
        "nodes_rewritten": Field(label="nodes rewritten", unit="node"),
        "revisions_rewritten": Field(label="revisions rewritten", unit="revision"),
        "problem": PROBLEM,
    },
)
VACUUM_FIELDS: Final[Fields] = described(
    VacuumReport,
    {
        "outcome": "done, nothing to do, planned, busy, incomplete or failed: the worst of all "
        "parts",
        "expired_rows": Field(label="expired", unit="row"),
        "sessions": Field(fields=_VACUUMED),
        "collected": Field(fields=GC_FIELDS),
        "packed": Field(fields=PACK_FIELDS),
        "objects_kept": Field(),
        "keepers": Field(
            fields=described(Keeper, {"kind": Field(), "name": Field(), "rows": Field()}),
        ),
        "problem": PROBLEM,
    },
)


def gc_document(report: GcReport, grace_ms: int) -> dict[str, Any]:
    """The report of a collection as JSON."""
    return document(GC_FIELDS, report, {"grace_ms": grace_ms})


def vacuum_document(report: VacuumReport, grace_ms: int) -> dict[str, Any]:
    """The report of vacuum as JSON."""
    collected = report.collected
    answer = None if collected is None else gc_document(collected, grace_ms)
    return document(VACUUM_FIELDS, report, {"collected": answer})


def _exit_code(outcome: str, problems: Iterable[CasstoreError | None], *, interrupted: bool) -> int:
    """The exit code of gc or vacuum: 0 if it did all there was to do."""
    if outcome in _FINE:
        return 0
    if interrupted:
        return INTERRUPTED
    found = [one.exit_code for one in problems if one is not None]
    return max(found, default=BusyError.exit_code)


def gc_exit_code(report: GcReport, *, interrupted: bool) -> int:
    """The exit code of a collection."""
    return _exit_code(report.outcome.value, [report.problem], interrupted=interrupted)


def vacuum_exit_code(report: VacuumReport, *, interrupted: bool) -> int:
    """The exit code of vacuum."""
    problems = [report.problem, *[one.problem for one in report.sessions]]
    if report.collected is not None:
        problems.append(report.collected.problem)
    return _exit_code(report.outcome.value, problems, interrupted=interrupted)


_GRACE: Final = click.option(
    "--grace", "grace_ms", type=DURATION, default="1h", show_default=True,
    help="Keep objects that were put within this time, and what they link to.",
)  # fmt: skip


@command(GC_FIELDS, "casstore gc --dry-run", "casstore gc --grace 10m")
@_GRACE
@dry_run_option("removed")
@click.option(
    "--batch", type=Whole(1, collecting.MAX_BATCH), default=DEFAULT_BATCH,
    show_default=True, help="Objects removed in one transaction. Writers wait for it.",
)  # fmt: skip
def gc(app: App, grace_ms: int, dry_run: bool, batch: int) -> None:
    """Remove unreachable objects.

    Removes the objects that no session, revision, tag, pin, queue, attachment or record reaches.
    Agents can go on working. Ctrl-C stops it between transactions, and the next run continues.
    The file keeps its length: see pack and compact.
    """
    with app.open(write=not dry_run) as store, app.meter(stoppable=True) as meter:
        report = collecting.collect(
            store, grace_ms=grace_ms, dry_run=dry_run, batch=batch,
            progress=meter, stop=meter.stopped,
        )  # fmt: skip
    app.exit_code = gc_exit_code(report, interrupted=meter.stopped())
    app.answer(report, lambda to: _write_gc(to, report, grace_ms), grace_ms=grace_ms)


def _write_outcome(to: Printer, report: GcReport | VacuumReport) -> None:
    outcome = report.outcome.value
    to.line((good if outcome in _FINE else bad)(outcome))
    if report.problem is not None:
        to.line(str(report.problem))
        remedy = advice(report.problem)
        if remedy:
            to.line("try: ", bold(remedy))


def _write_gc(to: Printer, report: GcReport, grace_ms: int) -> None:
    _write_outcome(to, report)
    if report.outcome is Outcome.REFUSED:
        to.line("nothing was removed")
        return
    removed = ("objects_swept", "swept_bytes", "freed_bytes", "longest_pause_ms")
    hidden = [*removed] if report.outcome in (Outcome.PLANNED, Outcome.NOTHING) else []
    hidden += [] if report.pins_expired else ["pins_expired"]
    to.report(
        {key: one for key, one in GC_FIELDS.items() if key not in hidden},
        gc_document(report, grace_ms),
    )


@command(PACK_FIELDS, "casstore pack", "casstore pack --min-age 0")
@click.option(
    "--min-age", "min_age_ms", type=DURATION, default="15m", show_default=True,
    help="Leave objects that were stored within this time where they are.",
)  # fmt: skip
def pack(app: App, min_age_ms: int) -> None:
    """Rewrite small slabs into large, better compressed ones.

    The bytes of removed objects are dropped. Agents can go on working; writers wait only for single
    short steps. Ctrl-C loses nothing. Damaged slabs are left unchanged, and the exit code is 1.
    """
    with app.open(write=True) as store, app.meter() as meter:
        report = packing.pack(store, min_age_ms=min_age_ms, progress=meter)
    app.exit_code = 1 if report.damaged else 0
    app.answer(report, lambda to: _write_pack(to, report, min_age_ms))


def _write_pack(to: Printer, report: PackReport, min_age_ms: int = 0) -> None:
    answer = document(PACK_FIELDS, report)
    if not report.slabs_before:
        left = f"; objects stored within {duration(min_age_ms)} stay where they are (--min-age 0)"
        to.line("nothing to pack" + (left if min_age_ms else ""))
    to.report(PACK_FIELDS, answer)
    for line in answer["damaged"][:_SHOWN]:
        to.line(bad("damaged  "), line)
    if report.damaged:
        to.line("try: ", bold("casstore check"))


@command(
    VACUUM_FIELDS,
    "casstore vacuum",
    "casstore vacuum --session agent --grace 0",
)
@click.option(
    "--session", "sessions", multiple=True, metavar="ID", shell_complete=complete_name,
    help="Rewrite only this session; may be repeated. Otherwise all that have hidden nodes.",
)  # fmt: skip
@_GRACE
@dry_run_option("removed")
def vacuum(app: App, sessions: tuple[str, ...], grace_ms: int, dry_run: bool) -> None:
    """Remove hidden nodes for good; then collect and pack.

    Expired rows and unreachable objects are removed as well. Hidden nodes are removed from all
    revisions of their sessions. Agents can go on working. Ctrl-C stops it between sessions and
    transactions, and the next run continues. The file keeps its length: see compact.
    """
    with app.open(write=not dry_run) as store, app.meter(stoppable=True) as meter:
        for session in sessions:
            # Vacuum skips a session that does not exist; a misspelt id must be an error.
            store.session(session).meta()
        report = vacuuming.vacuum(
            store,
            sessions=list(sessions) if sessions else None,
            grace_ms=grace_ms,
            dry_run=dry_run,
            progress=meter,
            stop=meter.stopped,
        )
    app.exit_code = vacuum_exit_code(report, interrupted=meter.stopped())
    app.answer(vacuum_document(report, grace_ms), lambda to: _write_vacuum(to, report, grace_ms))


def _write_vacuum(to: Printer, report: VacuumReport, grace_ms: int) -> None:
    if report.outcome is not VacuumOutcome.NOTHING or report.collected is None:
        # Otherwise ``_write_gc`` prints the outcome below.
        _write_outcome(to, report)
    if report.sessions:
        to.rows(_VACUUMED, [document(_VACUUMED, one) for one in report.sessions])
    for one in report.sessions:
        if one.problem is not None:
            to.line(bad("failed  "), name(one.session), f": {one.problem}")
    if report.expired_rows:
        verb = "would be removed" if report.dry_run else "removed"
        to.line(f"{count(report.expired_rows, 'expired row')} {verb}")
    if report.collected is not None:
        _write_gc(to, report.collected, grace_ms)
    if report.packed is not None:
        _write_pack(to, report.packed)
    if report.objects_kept:
        to.line(f"{count(report.objects_kept, 'removed object')} still stored, kept by:")
        for keeper in report.keepers[:_SHOWN]:
            to.line(f"    {keeper.kind} {keeper.name}")
        if not report.keepers:
            to.line("    their grace period; --grace 0 removes them now")


COMPACT_FIELDS: Final[Fields] = described(
    CompactReport,
    {
        "file_bytes_before": Field(label="file before"),
        "file_bytes_after": Field(label="file now"),
        "content_bytes": Field(label="content"),
        "slabs_before": Field(label="slabs before", unit="slab"),
        "slabs_after": Field(label="slabs now", unit="slab"),
        "objects": Field(label="verified", unit="object"),
        "objects_dropped": Field(label="dropped", unit="object"),
        "dictionaries_dropped": Field(),
    },
)


@command(
    COMPACT_FIELDS,
    "casstore compact --wait 30s",
)
@click.option(
    "--wait", "wait_ms", type=DURATION, default="0", show_default=True,
    help="Wait this long for other processes to close the store.",
)  # fmt: skip
def compact(app: App, wait_ms: int) -> None:
    """Rewrite the file without free pages.

    The new file is verified and replaces the old one. No other process may have the store open;
    a process that opens it waits. The disk needs space for both files. If compact is stopped, the
    store is unchanged.
    """
    with app.meter() as meter:
        report = compaction.compact(app.path, wait_s=wait_ms / 1000, progress=meter)
    app.answer(report)
