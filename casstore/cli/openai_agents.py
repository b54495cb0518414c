"""An application on the OpenAI Agents SDK moves over: ``import-openai-sqlite``."""

from __future__ import annotations

from typing import Final

import click

from casstore.cli.command import App, command
from casstore.cli.import_sizes import SIZES, sizes
from casstore.cli.output import Printer, bad, good, name
from casstore.cli.quantities import count
from casstore.cli.shapes import Part, Shape

_SECTION: Final = "Moving"


@command(
    _SECTION,
    Shape(
        "import-openai-sqlite",
        {
            "file": "the database",
            "dry_run": "true: nothing was written",
            "sessions": "sessions in it",
            "branches": "their branches",
            "items": "their items; one that branches share counts once",
            "new_sessions": "sessions that were not in the store, and are now, or would be",
            "imported": "items moved now, or that would be; the others were there already",
            "unreadable": "messages that hold no JSON and were left out, as the SDK does",
            "unreadable_items": Part(
                "the first of them",
                {
                    "session": "whose it is",
                    "row": "its id in the table of messages",
                    "reason": "why it cannot be read",
                },
            ),
            "unlinked": "messages on no branch, which the SDK does not show, left out",
            **SIZES,
        },
    ),
    "casstore import-openai-sqlite conversations.db --dry-run --store agents",
    "casstore import-openai-sqlite conversations.db --store agents",
    name="import-openai-sqlite",
)
@click.argument("file")
@click.option("-n", "--dry-run", is_flag=True, help="Look at every item, and write nothing.")
@click.option(
    "--session", "sessions", metavar="ID", multiple=True,
    help="Move this session alone; may be given again.",
)  # fmt: skip
@click.option(
    "--sessions-table", metavar="NAME", default="agent_sessions", show_default=True,
    help="The table of sessions, if SQLiteSession was given another name.",
)  # fmt: skip
@click.option(
    "--messages-table", metavar="NAME", default="agent_messages", show_default=True,
    help="The table of messages, likewise.",
)  # fmt: skip
def import_openai_sqlite(
    app: App,
    file: str,
    dry_run: bool,
    sessions: tuple[str, ...],
    sessions_table: str,
    messages_table: str,
) -> None:
    """Move the conversations of the OpenAI Agents SDK into the store, and compare them.

    FILE, a database of its SQLiteSession or AdvancedSQLiteSession, is only read. Every session
    keeps its id, its items, branches and usage. What is there already, and equal, is passed over;
    so what was stopped goes on from there, and what came since is added. A session that is there
    with other content ends it. Needs casstore[openai-agents] to be installed.
    """
    try:
        from casstore.adapters.openai_agents import import_sqlite
    except ModuleNotFoundError as exc:
        raise click.UsageError(str(exc)) from exc
    with app.open(write=not dry_run) as store, app.meter() as meter:
        report = import_sqlite(
            store,
            file,
            sessions=sessions or None,
            sessions_table=sessions_table,
            messages_table=messages_table,
            dry_run=dry_run,
            progress=meter,
        )

    def render(to: Printer) -> None:
        to.line(
            good("would move " if dry_run else "moved "),
            f"{count(report.imported, 'item')} of {report.items:,} from ", name(file),
        )  # fmt: skip
        to.line(
            f"{count(report.sessions, 'session')}, {report.new_sessions:,} new; "
            f"{count(report.branches, 'branch', 'branches')}"
        )
        if report.unreadable:
            first = report.unreadable_items[0]
            to.line(
                bad("left out "), f"{count(report.unreadable, 'message')} without JSON, the first "
                f"is {first.row} of ", name(first.session), f": {first.reason}",
            )  # fmt: skip
        if report.unlinked:
            to.line(bad("left out "), f"{count(report.unlinked, 'message')} on no branch")
        to.line(sizes(report))

    app.answer(
        {
            "file": file,
            **report._asdict(),
            "unreadable_items": [each._asdict() for each in report.unreadable_items],
        },
        render,
    )
