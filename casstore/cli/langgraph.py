"""A LangGraph application moves over: ``import-langgraph-sqlite``."""

from __future__ import annotations

from typing import Final

import click

from casstore.cli.command import App, command
from casstore.cli.output import Printer, good, name
from casstore.cli.quantities import count, size
from casstore.cli.shapes import Shape

_SECTION: Final = "Moving"


@command(
    _SECTION,
    Shape(
        "import-langgraph-sqlite",
        {
            "file": "the database",
            "checkpoints": "checkpoints in it",
            "writes": "pending writes in it",
            "imported": "checkpoints moved now; the others were in the store already",
            "source_bytes": "how large the database is",
            "store_bytes_before": "how large the store was, null if its engine does not tell",
            "store_bytes": "how large it is, null if its engine does not tell",
        },
    ),
    "casstore import-langgraph-sqlite checkpoints.sqlite --store agents",
    name="import-langgraph-sqlite",
)
@click.argument("file")
def import_langgraph_sqlite(app: App, file: str) -> None:
    """Move a database of LangGraph's SqliteSaver into the store, and compare it.

    FILE, the database, is only read. Stopped anywhere, the next call goes on from there. Needs
    casstore[langgraph] to be installed.
    """
    try:
        from casstore.adapters.langgraph import import_sqlite
    except ModuleNotFoundError as exc:
        raise click.UsageError(str(exc)) from exc
    with app.open(write=True) as store, app.meter() as meter:
        report = import_sqlite(file, store, progress=meter)

    def render(to: Printer) -> None:
        to.line(
            good("moved "),
            f"{count(report.imported, 'checkpoint')} of {report.checkpoints:,} from ", name(file),
        )  # fmt: skip
        grown = f"{size(report.source_bytes)} as a database"
        if report.store_bytes is not None and report.store_bytes_before is not None:
            grown += f", {size(report.store_bytes - report.store_bytes_before)} in the store"
        to.line(grown)

    app.answer({"file": file, **report._asdict()}, render)
