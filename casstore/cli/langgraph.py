"""A LangGraph application moves over from the savers that come with LangGraph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from casstore.cli.command import App, command
from casstore.cli.import_sizes import SIZES, sizes
from casstore.cli.output import Printer, good, name
from casstore.cli.quantities import count
from casstore.cli.shapes import Shape

if TYPE_CHECKING:
    from casstore.adapters.langgraph import ImportReport

_SECTION: Final = "Moving"
_FIGURES: Final = {
    "checkpoints": "checkpoints in it",
    "writes": "pending writes in it",
    "imported": "checkpoints moved now; the others were in the store already",
    "updated": "checkpoints that were there, and to which writes were added now",
    **SIZES,
}


@command(
    _SECTION,
    Shape("import-langgraph-sqlite", {"file": "the database", **_FIGURES}),
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
        report = import_sqlite(store, file, progress=meter)
    app.answer({"file": file, **report._asdict()}, lambda to: _tell(to, report, file))


@command(
    _SECTION,
    Shape(
        "import-langgraph-postgres",
        {"source": "where the tables are, without user and password", **_FIGURES},
    ),
    "casstore import-langgraph-postgres postgresql://agents@db/app --store agents",
    name="import-langgraph-postgres",
)
@click.argument("url")
def import_langgraph_postgres(app: App, url: str) -> None:
    """Move what LangGraph's PostgresSaver has stored into the store, and compare it.

    URL is the saver's connection string; options=-csearch_path%3DNAME in it names a schema. A
    password is better kept in ~/.pgpass or PGPASSWORD: a command line can be seen. The tables are
    only read, as of one moment. Of ShallowPostgresSaver the latest checkpoint of each thread moves,
    which is all it keeps. Stopped anywhere, the next call goes on from there. Needs
    casstore[langgraph,postgres] to be installed.
    """
    try:
        from casstore.adapters.langgraph.postgres_import import import_postgres
        from casstore.compat.postgres_source import shown
    except ModuleNotFoundError as exc:
        raise click.UsageError(str(exc)) from exc
    place = shown(url)
    with app.open(write=True) as store, app.meter() as meter:
        report = import_postgres(store, url, progress=meter)
    app.answer({"source": place, **report._asdict()}, lambda to: _tell(to, report, place))


def _tell(to: Printer, report: ImportReport, source: str) -> None:
    moved = f"{count(report.imported, 'checkpoint')} of {report.checkpoints:,} from "
    to.line(good("moved "), moved, name(source))
    if report.updated:
        to.line(good("added "), f"writes to {count(report.updated, 'checkpoint')} of before")
    to.line(sizes(report))
