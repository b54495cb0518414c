"""``vacuum``: hidden nodes, expired rows and what nobody reaches, gone for good."""

from __future__ import annotations

from typing import Any, Final

import click

from casstore.cli.command import App, command
from casstore.cli.completing import complete_name
from casstore.cli.main import INTERRUPTED
from casstore.cli.output import Printer, bad, good, name
from casstore.cli.quantities import DURATION, count
from casstore.cli.reclaiming import (
    GC_FIELDS,
    PACK_FIELDS,
    PROBLEM,
    gc_document,
    pack_document,
    problem_document,
    write_gc,
    write_pack,
)
from casstore.cli.shapes import Fields, Part, Shape
from casstore.maintenance import vacuum as vacuuming
from casstore.maintenance.vacuum import Outcome, VacuumReport

_SECTION: Final = "Giving space back"
_FINE: Final = (Outcome.DONE, Outcome.NOTHING, Outcome.PLANNED)

VACUUM_FIELDS: Final[Fields] = {
    "outcome": "done, nothing to do, planned, busy, incomplete or failed: the worst of all parts",
    "expired_rows": "rows whose time was up",
    "sessions": Part(
        "sessions that had hidden nodes",
        {
            "session": "the session",
            "outcome": "done, nothing to do, gone, busy or failed",
            "nodes_removed": "hidden nodes that are gone from all revisions",
            "nodes_rewritten": "nodes that came after them",
            "revisions_rewritten": "revisions that had one",
            "problem": PROBLEM,
        },
    ),
    "collected": Part("what gc did, null: not come to", GC_FIELDS),
    "packed": Part("what pack did, null: not come to", PACK_FIELDS),
    "objects_kept": "nodes removed now or earlier, and parts of them, that are stored still",
    "keepers": Part(
        "who keeps them",
        {"kind": "session, pin, queue or attachment", "name": "which", "rows": "how many rows"},
    ),
    "problem": PROBLEM,
}


def vacuum_document(report: VacuumReport, grace_ms: int) -> dict[str, Any]:
    """What vacuum did, as JSON."""
    collected, packed = report.collected, report.packed
    return {
        "outcome": report.outcome.value,
        "expired_rows": report.expired_rows,
        "sessions": [
            {
                "session": one.session,
                "outcome": one.outcome.value,
                "nodes_removed": one.nodes_removed,
                "nodes_rewritten": one.nodes_rewritten,
                "revisions_rewritten": one.revisions_rewritten,
                "problem": problem_document(one.problem),
            }
            for one in report.sessions
        ],
        "collected": None if collected is None else gc_document(collected, grace_ms),
        "packed": None if packed is None else pack_document(packed),
        "objects_kept": report.objects_kept,
        "keepers": [keeper._asdict() for keeper in report.keepers],
        "problem": problem_document(report.problem),
    }


def vacuum_exit_code(report: VacuumReport, *, interrupted: bool) -> int:
    """What vacuum ends with: 0 if it did all there was to do."""
    if report.outcome in _FINE:
        return 0
    if interrupted:
        return INTERRUPTED
    problems = [report.problem, *[one.problem for one in report.sessions]]
    if report.collected is not None:
        problems.append(report.collected.problem)
    codes = [problem.exit_code for problem in problems if problem is not None]
    return max(codes, default=7)


@command(
    _SECTION,
    Shape("vacuum", VACUUM_FIELDS),
    "casstore vacuum",
    "casstore vacuum --session agent --grace 0",
)
@click.option(
    "--session", "sessions", multiple=True, metavar="ID", shell_complete=complete_name,
    help="Rewrite only this session; may be given often. Else all with hidden nodes.",
)  # fmt: skip
@click.option(
    "--grace", "grace_ms", type=DURATION, default="1h", show_default=True,
    help="What was put within this time stays stored; 0: removed nodes go at once.",
)  # fmt: skip
@click.option("--dry-run", "-n", is_flag=True, help="Say what would go, change nothing.")
def vacuum(app: App, sessions: tuple[str, ...], grace_ms: int, dry_run: bool) -> None:
    """Remove hidden nodes, expired rows and what nobody reaches for good; then pack.

    Hidden nodes go from all revisions of their sessions. Runs beside agents at work. Ctrl-C stops
    it between sessions and transactions; the next run goes on. The file does not become shorter
    by it: see compact.
    """
    with app.open(write=not dry_run) as store, app.meter(stoppable=True) as meter:
        for session in sessions:
            # One that is not there has nothing hidden, but who misspelled it must not believe so.
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
    app.answer(vacuum_document(report, grace_ms), lambda to: write_vacuum(to, report, grace_ms))


def write_vacuum(to: Printer, report: VacuumReport, grace_ms: int) -> None:
    """What vacuum did, for a person."""
    to.line((good if report.outcome in _FINE else bad)(report.outcome.value))
    for one in report.sessions:
        to.line(
            name(one.session),
            f"  {one.outcome.value}: {count(one.nodes_removed, 'node')} removed, "
            f"{count(one.revisions_rewritten, 'revision')} rewritten",
        )  # fmt: skip
        if one.problem is not None:
            to.line(bad(f"    {one.problem}"))
    if report.expired_rows:
        verb = "would go" if report.dry_run else "gone"
        to.line(f"{count(report.expired_rows, 'expired row')} {verb}")
    if report.collected is not None:
        write_gc(to, report.collected, grace_ms)
    if report.packed is not None:
        write_pack(to, report.packed)
    if report.objects_kept:
        to.line(f"{count(report.objects_kept, 'removed object')} still stored, kept by:")
        for keeper in report.keepers[:20]:
            to.line(f"    {keeper.kind} {keeper.name}")
        if not report.keepers:
            to.line("    their age: they go when the grace is over, or with --grace 0")
    if report.problem is not None:
        to.line(bad(str(report.problem)))
