"""Session databases of lash become sessions: ``import-lash``."""

from __future__ import annotations

from typing import Final

import click

from casstore.cli.command import App, command
from casstore.cli.import_sizes import SIZES, sizes
from casstore.cli.output import Printer, bad, good, name
from casstore.cli.quantities import count
from casstore.cli.shapes import Part, Shape
from casstore.compat.lash import EMPTY, IMPORTED, LashReport, SessionReport, import_sessions

_SECTION: Final = "Moving"


@command(
    _SECTION,
    Shape(
        "import-lash",
        {
            "dry_run": "true: nothing was written",
            "sessions": Part(
                "what became of each database",
                {
                    "file": "the database",
                    "session": "the session in the store, null if the database holds none",
                    "outcome": "imported (or would be), unchanged: it was there, or empty",
                    "revision": "the revision that it has, as it had in lash",
                    "parts": Part(
                        "its rows by kind, then what has no place here and stays behind",
                        {
                            "name": "what they are",
                            "found": "how many the database has",
                            "imported": "moved now, or that would be",
                        },
                    ),
                    "findings": Part(
                        "what is not as it was",
                        {
                            "what": "what it is",
                            "number": "how many there are",
                            "first": "the first of them",
                        },
                    ),
                },
            ),
            "skipped": "databases in a directory that are not of sessions",
            **SIZES,
        },
    ),
    "casstore import-lash sessions/ --dry-run --store agents",
    "casstore import-lash sessions/ --store agents",
    "casstore import-lash root-4813494d137e1631.db --name helper --store agents",
    name="import-lash",
)
@click.argument("places", metavar="PLACE...", nargs=-1, required=True)
@click.option("-n", "--dry-run", is_flag=True, help="Look at everything, and write nothing.")
@click.option("--name", "session", metavar="ID", help="Call the session this; of one database.")
@click.option(
    "--leave-out-damaged",
    is_flag=True,
    help="Leave out nodes and blobs that are damaged, and tell; else they end it.",
)
def import_lash(
    app: App,
    places: tuple[str, ...],
    dry_run: bool,
    session: str | None,
    leave_out_damaged: bool,
) -> None:
    """Move sessions of lash into the store, each whole, and compare them.

    PLACE is a session database, or a directory with many (*.db); it is only read. A session keeps
    its id and revision, its nodes, checkpoint, usage, queue, attachments and turns: a turn that
    was committed there is refused here, not done again. One that was moved before is passed over;
    if its database has moved on since, or another session has its id, that ends it. So does one
    that somebody holds.
    """
    with app.open(write=not dry_run) as store, app.meter() as meter:
        report = import_sessions(
            store,
            *places,
            name=session,
            leave_out_damaged=leave_out_damaged,
            dry_run=dry_run,
            progress=meter,
        )

    def render(to: Printer) -> None:
        for one in report.sessions:
            _session(to, one, dry_run=dry_run)
        for file in report.skipped:
            to.line("passed over ", name(file), ": not of a session")
        to.line(_total(report))

    app.answer(
        {
            **report._asdict(),
            "sessions": [
                {
                    **one._asdict(),
                    "parts": [part._asdict() for part in one.parts],
                    "findings": [found._asdict() for found in one.findings],
                }
                for one in report.sessions
            ],
            "skipped": list(report.skipped),
        },
        render,
    )


def _session(to: Printer, one: SessionReport, *, dry_run: bool) -> None:
    if one.outcome == EMPTY or one.session is None:
        to.line("nothing in ", name(one.file))
        return
    told = good("would move " if dry_run else "moved ") if one.outcome == IMPORTED else "was there "
    to.line(told, name(one.session), f", revision {one.revision}, from ", name(one.file))
    for part in one.parts:
        to.line(f"  {part.imported:,} of {count(part.found, 'row')}: ", part.name)
    for found in one.findings:
        to.line("  ", bad(f"{found.number:,} "), f"{found.what}; the first: ", name(found.first))


def _total(report: LashReport) -> str:
    return f"{count(len(report.sessions), 'database')}: {sizes(report)}"
