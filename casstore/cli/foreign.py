"""Databases of other stores become records: ``import-records``."""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from casstore.cli.command import App, command
from casstore.cli.output import Printer, good, name
from casstore.cli.quantities import count, size
from casstore.cli.shapes import Part, Shape
from casstore.compat.importing import IMPORTERS, Import

_SECTION: Final = "Moving"


@command(
    _SECTION,
    Shape(
        "import-records",
        {
            "file": "the database",
            "kind": "whose it is",
            "dry_run": "true: nothing was written",
            "parts": Part(
                "its rows by kind",
                {
                    "name": "what they are",
                    "found": "how many the database has",
                    "imported": "moved now, or that would be; the others were there already",
                },
            ),
            "source_bytes": "how large the database is",
            "store_bytes_before": "how large the store was, null if its engine does not tell",
            "store_bytes": "how large it is, null if its engine does not tell",
        },
    ),
    "casstore import-records power-loop sessions.db --dry-run --store agents",
    "casstore import-records power-loop sessions.db --store agents",
    name="import-records",
)
@click.argument("kind", type=click.Choice(sorted(IMPORTERS)))
@click.argument("file")
@click.option("-n", "--dry-run", is_flag=True, help="Look at every row, and write nothing.")
def import_records(app: App, kind: str, file: str, dry_run: bool) -> None:
    """Move the database of another store into this one, and compare every row.

    KIND says whose it is; FILE, the database, is only read. Rows that are there already, and
    equal, are passed over; so what was stopped goes on from there. One that is there with other
    content ends it.
    """
    module, _, function = IMPORTERS[kind].partition(":")
    run: Import = getattr(import_module(module), function)
    with app.open(write=not dry_run) as store, app.meter() as meter:
        report = run(store, file, dry_run=dry_run, progress=meter)

    def render(to: Printer) -> None:
        for part in report.parts:
            told = "would move " if dry_run else "moved "
            to.line(good(told), f"{part.imported:,} of {count(part.found, 'row')}: {part.name}")
        sizes = f"{size(report.source_bytes)} as a database"
        if report.store_bytes is not None and report.store_bytes_before is not None:
            sizes += f", {size(report.store_bytes - report.store_bytes_before)} in the store"
        to.line(name(file), f": {sizes}")

    app.answer(
        {
            "file": file,
            "kind": kind,
            **report._asdict(),
            "parts": [part._asdict() for part in report.parts],
        },
        render,
    )
