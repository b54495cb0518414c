"""Giving space back: ``gc`` and ``pack``."""

from __future__ import annotations

from typing import Any, Final

import click

from casstore.cli.command import App, command
from casstore.cli.main import INTERRUPTED
from casstore.cli.output import Printer, bad, bold, good
from casstore.cli.quantities import DURATION, count, duration, size
from casstore.cli.shapes import Fields, Part, Shape
from casstore.engine.protocol import PackReport
from casstore.maintenance import gc as collecting
from casstore.maintenance import pack as packing
from casstore.maintenance.gc import GcReport, Outcome

_SECTION: Final = "Giving space back"

PROBLEM: Final = Part(
    "what stood in the way, null if nothing did",
    {"error": "the class of the error", "message": "what is wrong", "try": "what to do next"},
)

GC_FIELDS: Final[Fields] = {
    "outcome": "swept, nothing to do, planned, incomplete, refused or failed",
    "grace_ms": "what was put within this time stayed",
    "roots": "distinct digests that rows name",
    "objects_kept": "objects that are reached",
    "objects_unreached": "objects that are not",
    "objects_swept": "of those, removed now",
    "kept_bytes": "before compression, without links",
    "unreached_bytes": "before compression, without links",
    "swept_bytes": "before compression, without links",
    "freed_bytes": "given back at once, as stored; the rest when slabs are rewritten",
    "pins_expired": "pins whose time is up: removed, or found by a plan",
    "longest_pause_ms": "the longest that writers had to wait",
    "problem": PROBLEM,
    "missing_systems": "names of record systems in the store that are not installed: all is kept",
}


def problem_document(exc: Exception | None) -> dict[str, Any] | None:
    """What stood in the way, as JSON."""
    if exc is None:
        return None
    from casstore.cli.advice import advice
    from casstore.errors import CasstoreError

    remedy = advice(exc) if isinstance(exc, CasstoreError) else None
    return {"error": type(exc).__name__, "message": str(exc), "try": remedy}


def gc_document(report: GcReport, grace_ms: int) -> dict[str, Any]:
    """The report of a collection as JSON."""
    return {
        "outcome": report.outcome.value,
        "grace_ms": grace_ms,
        "roots": report.roots,
        "objects_kept": report.objects_kept,
        "objects_unreached": report.objects_unreached,
        "objects_swept": report.objects_swept,
        "kept_bytes": report.bytes_kept,
        "unreached_bytes": report.bytes_unreached,
        "swept_bytes": report.bytes_swept,
        "freed_bytes": report.bytes_freed,
        "pins_expired": report.pins_expired,
        "longest_pause_ms": round(report.longest_pause_ms, 3),
        "problem": problem_document(report.problem),
        "missing_systems": list(report.missing_systems),
    }


def gc_exit_code(report: GcReport, *, interrupted: bool) -> int:
    """What a collection ends with: 0 if it did all there was to do."""
    if report.outcome in (Outcome.SWEPT, Outcome.NOTHING, Outcome.PLANNED):
        return 0
    if interrupted:
        return INTERRUPTED
    return 7 if report.problem is None else report.problem.exit_code


@command(
    _SECTION,
    Shape("gc", GC_FIELDS),
    "casstore gc --dry-run",
    "casstore gc --grace 10m",
)
@click.option(
    "--grace", "grace_ms", type=DURATION, default="1h", show_default=True,
    help="What was put within this time stays, with all it links to.",
)  # fmt: skip
@click.option("--dry-run", "-n", is_flag=True, help="The plan: say what would go, change nothing.")
@click.option(
    "--batch", type=click.IntRange(1, collecting.MAX_BATCH), default=collecting.DEFAULT_BATCH,
    show_default=True, help="Objects removed in one transaction. Writers wait for it.",
)  # fmt: skip
def gc(app: App, grace_ms: int, dry_run: bool, batch: int) -> None:
    """Remove what no session, revision, tag, pin, queue or attachment reaches.

    Runs beside agents at work. Ctrl-C stops it where it is: what went is gone rightly, and the
    next run goes on. The file does not become shorter by it: see pack and compact.
    """
    with app.open(write=not dry_run) as store, app.meter(stoppable=True) as meter:
        report = collecting.collect(
            store,
            grace_ms=grace_ms,
            dry_run=dry_run,
            batch=batch,
            progress=meter,
            stop=meter.stopped,
        )
    app.exit_code = gc_exit_code(report, interrupted=meter.stopped())
    app.answer(gc_document(report, grace_ms), lambda to: write_gc(to, report, grace_ms))


def write_gc(to: Printer, report: GcReport, grace_ms: int) -> None:
    """The report of a collection for a person."""
    outcome = report.outcome
    fine = outcome in (Outcome.SWEPT, Outcome.NOTHING, Outcome.PLANNED)
    to.line((good if fine else bad)(outcome.value))
    if report.problem is not None:
        to.line(str(report.problem))
        told = problem_document(report.problem)
        if told is not None and told["try"]:
            to.line("try: ", bold(told["try"]))
    if outcome is Outcome.REFUSED:
        to.line("nothing was removed")
        return
    unreached = f"{count(report.objects_unreached, 'object')}, {size(report.bytes_unreached)}"
    facts = [
        ("reached", f"{count(report.objects_kept, 'object')}, {size(report.bytes_kept)}"),
        ("not reached", f"{unreached} (older than {duration(grace_ms)})"),
    ]
    if report.pins_expired:
        facts.append(("expired", count(report.pins_expired, "pin")))
    if outcome not in (Outcome.PLANNED, Outcome.NOTHING):
        removed = f"{count(report.objects_swept, 'object')}, {size(report.bytes_swept)}"
        facts.append(("removed", removed))
        facts.append(("given back now", f"{size(report.bytes_freed)} of the file"))
        facts.append(("writers waited", f"{report.longest_pause_ms:.1f} ms at the most"))
    if report.missing_systems:
        facts.append(("kept", f"records of {', '.join(report.missing_systems)}, not installed"))
    to.facts(facts)


PACK_FIELDS: Final[Fields] = {
    "slabs_before": "slabs that were rewritten",
    "slabs_after": "what became of them",
    "bytes_before": "as stored",
    "bytes_after": "as stored",
    "objects_dropped": "collected objects whose bytes went",
    "pages_saved": "pages that indexes and rows take less",
    "longest_pause_ms": "the longest that writers had to wait",
    "damaged": "slabs that were left as they are because they are damaged, and why",
}


def pack_document(report: PackReport) -> dict[str, Any]:
    """What packing did, as JSON."""
    return {
        "slabs_before": report.slabs_before,
        "slabs_after": report.slabs_after,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "objects_dropped": report.objects_dropped,
        "pages_saved": report.pages_saved,
        "longest_pause_ms": round(report.longest_lock_s * 1000, 3),
        "damaged": [f"objects up to {one.last_id}: {one.reason}" for one in report.damaged],
    }


@command(
    _SECTION,
    Shape("pack", PACK_FIELDS),
    "casstore pack",
    "casstore pack --min-age 0",
)
@click.option(
    "--min-age", "min_age_ms", type=DURATION, default="15m", show_default=True,
    help="Leave what was stored within this time as it is.",
)  # fmt: skip
def pack(app: App, min_age_ms: int) -> None:
    """Rewrite small slabs into large ones, compressed harder; drop what was collected.

    Runs beside agents at work, in short steps; Ctrl-C loses nothing. What is damaged is left as
    it is, and the command ends with 1.
    """
    with app.open(write=True) as store, app.meter() as meter:
        report = packing.pack(store, min_age_ms=min_age_ms, progress=meter)
    app.exit_code = 1 if report.damaged else 0
    app.answer(pack_document(report), lambda to: write_pack(to, report, min_age_ms))


def write_pack(to: Printer, report: PackReport, min_age_ms: int = 0) -> None:
    """What packing did, for a person."""
    if not report.slabs_before:
        left = f"; what was stored within {duration(min_age_ms)} is left alone (--min-age 0)"
        to.line("nothing to pack" + (left if min_age_ms else ""))
    to.facts(
        [
            ("slabs", f"{report.slabs_before:,} → {report.slabs_after:,}"),
            ("stored", f"{size(report.bytes_before)} → {size(report.bytes_after)}"),
            ("dropped", count(report.objects_dropped, "collected object")),
        ]
    )
    for one in report.damaged[:20]:
        to.line(bad("damaged  "), f"objects up to {one.last_id}: {one.reason}")
    if report.damaged:
        to.line("try: ", bold("casstore check"))
