"""Transcripts of other agents become sessions: ``import-jsonl``."""

from __future__ import annotations

from typing import Final, Literal

import click

from casstore.cli.command import App, command
from casstore.cli.output import Printer, good, name
from casstore.cli.quantities import count, size
from casstore.cli.shapes import Shape

_SECTION: Final = "Moving"


@command(
    _SECTION,
    Shape(
        "import-jsonl",
        {
            "file": "the transcript",
            "session": "the session that it became",
            "format": "claude, pi or messages",
            "lines": "lines that hold something",
            "imported": "nodes made now",
            "already": "nodes that were there",
            "orphans": "nodes whose parent is not in the file: they begin a path of their own",
            "bad": "bad lines that were left out",
            "bad_lines": "the numbers of the first of them",
            "source_bytes": "how large the file is",
        },
    ),
    "casstore import-jsonl transcript.jsonl --store agents",
    name="import-jsonl",
)
@click.argument("file")
@click.option(
    "--format",
    "layout",
    type=click.Choice(("auto", "claude", "pi", "messages")),
    default="auto",
    show_default=True,
    help="How its lines are to be read.",
)
@click.option("--session", metavar="ID", help="The session's id, if not the file's own.")
@click.option("--skip-bad", is_flag=True, help="Leave out lines that cannot be read, and count.")
def import_jsonl(
    app: App,
    file: str,
    layout: Literal["auto", "claude", "pi", "messages"],
    session: str | None,
    skip_bad: bool,
) -> None:
    """Make a session of a transcript in lines of JSON, with its branches.

    FILE is only read. The same file again imports what has been added to it. A line that cannot
    be read ends it with its number, and nothing is written, unless --skip-bad is given.
    """
    from casstore.adapters import jsonl

    with app.open(write=True) as store, app.meter() as meter:
        report = jsonl.import_jsonl(
            store, file, format=layout, session_id=session, skip_bad=skip_bad, progress=meter
        )

    def render(to: Printer) -> None:
        to.line(
            good("imported "), f"{count(report.imported, 'node')} into ", name(report.session),
            f", {report.already:,} were there",
        )  # fmt: skip
        to.line(f"{count(report.lines, 'line')} of {report.format}, {size(report.source_bytes)}")
        if report.bad:
            to.line(f"{count(report.bad, 'line')} left out, the first is {report.bad_lines[0]}")

    app.answer({"file": file, **report._asdict()}, render)
