"""The long-term memory of a LangGraph application moves over from the stores that come with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from casstore.cli.command import App, command
from casstore.cli.import_sizes import SIZES, sizes
from casstore.cli.output import Printer, bad, good, name
from casstore.cli.quantities import count
from casstore.cli.shapes import Shape

if TYPE_CHECKING:
    from casstore.adapters.langgraph import ItemsReport

_SECTION: Final = "Moving"
_FIGURES: Final = {
    "dry_run": "true: nothing was written",
    "items": "items in it",
    "imported": "items moved now, or that would be; the others were there already",
    "replaced": "those of them that were in the store with other content, with --replace",
    "expired": "items whose time is up: moved, but CasstoreStore does not show them",
    "vectors": "embeddings, which stay behind: there is no vector index",
    **SIZES,
}
_Run = TypeVar("_Run", bound=Callable[..., Any])


def _options(run: _Run) -> _Run:
    """What both commands can be told."""
    replace = click.option(
        "--replace", is_flag=True,
        help="Where the store has an item with other content, take what the source has.",
    )  # fmt: skip
    dry_run = click.option(
        "-n", "--dry-run", is_flag=True, help="Look at every item, and write nothing."
    )
    return dry_run(replace(run))


@command(
    _SECTION,
    Shape("import-langgraph-sqlite-store", {"file": "the database", **_FIGURES}),
    "casstore import-langgraph-sqlite-store memory.sqlite --dry-run --store agents",
    "casstore import-langgraph-sqlite-store memory.sqlite --store agents",
    name="import-langgraph-sqlite-store",
)
@click.argument("file")
@_options
def import_langgraph_sqlite_store(app: App, file: str, dry_run: bool, replace: bool) -> None:
    """Move the items of LangGraph's SqliteStore into the store, and compare them.

    FILE, the database, is only read. Items that are there already, and equal, are passed over; so
    what was stopped goes on from there, and what came since is added. One that is there with
    other content ends it, unless --replace is given; so does one that cannot be kept as it is.
    Embeddings stay behind. Needs casstore[langgraph] to be installed.
    """
    try:
        from casstore.adapters.langgraph import import_sqlite_store
    except ModuleNotFoundError as exc:
        raise click.UsageError(str(exc)) from exc
    with app.open(write=not dry_run) as store, app.meter() as meter:
        report = import_sqlite_store(store, file, replace=replace, dry_run=dry_run, progress=meter)
    app.answer({"file": file, **report._asdict()}, lambda to: _tell(to, report, file))


@command(
    _SECTION,
    Shape(
        "import-langgraph-postgres-store",
        {"source": "where the tables are, without user and password", **_FIGURES},
    ),
    "casstore import-langgraph-postgres-store postgresql://agents@db/app --dry-run --store agents",
    "casstore import-langgraph-postgres-store postgresql://agents@db/app --store agents",
    name="import-langgraph-postgres-store",
)
@click.argument("url")
@_options
def import_langgraph_postgres_store(app: App, url: str, dry_run: bool, replace: bool) -> None:
    """Move the items of LangGraph's PostgresStore into the store, and compare them.

    URL is the connection string; options=-csearch_path%3DNAME in it names a schema. A password is
    better kept in ~/.pgpass or PGPASSWORD: a command line can be seen. The tables are only read,
    as of one moment. Items that are there already, and equal, are passed over; so what was stopped
    goes on from there, and what came since is added. One that is there with other content ends
    it, unless --replace is given; so does one that cannot be kept as it is. Embeddings stay
    behind. Needs casstore[langgraph,postgres] to be installed.
    """
    try:
        from casstore.adapters.langgraph.postgres_store_import import import_postgres_store
        from casstore.compat.postgres_source import shown
    except ModuleNotFoundError as exc:
        raise click.UsageError(str(exc)) from exc
    place = shown(url)
    with app.open(write=not dry_run) as store, app.meter() as meter:
        report = import_postgres_store(store, url, replace=replace, dry_run=dry_run, progress=meter)
    app.answer({"source": place, **report._asdict()}, lambda to: _tell(to, report, place))


def _tell(to: Printer, report: ItemsReport, source: str) -> None:
    told, replaced = (
        ("would move ", "would replace ") if report.dry_run else ("moved ", "replaced ")
    )
    to.line(good(told), f"{count(report.imported, 'item')} of {report.items:,} from ", name(source))
    if report.replaced:
        to.line(bad(replaced), f"{count(report.replaced, 'item')} that the store had otherwise")
    if report.expired:
        to.line(
            bad("not shown "), f"{count(report.expired, 'item')} whose time is up; sweep_ttl() of "
            "CasstoreStore removes them",
        )  # fmt: skip
    if report.vectors:
        to.line(
            bad("left behind "), f"{count(report.vectors, 'embedding')}: there is no vector index"
        )
    to.line(sizes(report))
