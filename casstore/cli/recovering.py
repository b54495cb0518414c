"""``recover``: apply the log of a store that was not closed, or go on without that log."""

from __future__ import annotations

from typing import Final

import click

from casstore.cli.command import App, command, require_yes
from casstore.cli.output import Printer, bad, good
from casstore.cli.quantities import count
from casstore.cli.shapes import Shape
from casstore.cli.spelling import safe
from casstore.maintenance import recover as recovery

_SECTION: Final = "Care"


@command(
    _SECTION,
    Shape(
        "recover",
        {
            "needed_log": "false: the store was closed, and nothing was changed",
            "commits_recovered": "commits read from the log, now in data.mdb",
            "commits_discarded": "commits of the log that could still be read and are lost, "
            "null: the log was not discarded",
        },
    ),
    "casstore recover",
    "casstore recover agents --discard-log --yes",
)
@click.argument("directory", metavar="[STORE]", required=False)
@click.option(
    "--discard-log", is_flag=True,
    help="Go on without the commits that only the log holds: they are lost.",
)  # fmt: skip
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def recover(app: App, directory: str | None, discard_log: bool, yes: bool) -> None:
    """Apply the redo log of a store that was not closed.

    STORE is a directory; if not given, what --store or CASSTORE_PATH say. Afterwards data.mdb is
    complete without the log. Opening a store reads its log, so no store needs this before it is
    used. With --discard-log a store opens again whose log is missing, damaged or another
    store's; put the right log back if there is one. No other process may have the store open.
    """
    if directory == "":
        raise click.UsageError("the store's name is empty")
    path = directory or app.path
    if discard_log:
        readable = recovery.count_unapplied(path)
        if readable is not None:
            commits = f"{count(readable, 'commit')} that can still be read"
            require_yes(
                yes=yes, question=f"Discard the log of {safe(path)} for good, with {commits}?"
            )
    report = recovery.recover(path, discard_log=discard_log)

    def render(to: Printer) -> None:
        if not report.needed_log:
            to.line("nothing to recover: the store was closed")
        elif report.commits_discarded is None:
            commits = f"{count(report.commits_recovered, 'commit')} of the log"
            to.line(good("recovered  "), f"{commits}; the store needs no log now")
        else:
            commits = f"{count(report.commits_discarded, 'commit')} that could still be read"
            to.line(bad("discarded  "), f"the log, and {commits}; the store needs no log now")

    app.answer(report._asdict(), render)
