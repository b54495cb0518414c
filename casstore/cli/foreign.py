"""Databases of other stores become records: ``import-records``."""

from __future__ import annotations

import inspect
import os
from functools import partial
from importlib import import_module
from typing import BinaryIO, Final

import click

from casstore.cli.command import App, command
from casstore.cli.import_sizes import SIZES, sizes
from casstore.cli.key_options import keys_option, open_keys, read_secret, secret_option
from casstore.cli.output import Printer, good, name
from casstore.cli.quantities import count
from casstore.cli.shapes import Part, Shape
from casstore.compat.importing import IMPORTERS, Import

_SECTION: Final = "Moving"
# What an option is called by the functions that know it.
_PARAMETERS: Final = {"--keys": "keys", "--secret": "secret", "--artifacts": "root"}


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
            **SIZES,
        },
    ),
    "casstore import-records power-loop sessions.db --dry-run --store agents",
    "casstore import-records power-loop sessions.db --store agents",
    "casstore import-records morrow user_store.db --keys agent-keys --store agents",
    "casstore import-records agent-harness runtime.sqlite --artifacts workspace --store agents",
    name="import-records",
)
@click.argument("kind", metavar="KIND", type=click.Choice(sorted(IMPORTERS)))
@click.argument("file")
@click.option("-n", "--dry-run", is_flag=True, help="Look at every row, and write nothing.")
@keys_option(
    "Encrypt the user data of morrow, with keys in this directory; it is made if need be.",
    exists=False,
)
@secret_option("The file whose bytes are the secret to hash the users of morrow with.")
@click.option(
    "--artifacts",
    "root",
    type=click.Path(file_okay=False, exists=True),
    help="The directory that threads/ of agent-harness is in, if not beside the database.",
)
def import_records(
    app: App,
    kind: str,
    file: str,
    dry_run: bool,
    key_directory: str | None,
    secret_file: BinaryIO | None,
    root: str | None,
) -> None:
    """Move the database of another store into this one, and compare every row.

    KIND says whose it is: agent-harness, langbot, morrow or power-loop. FILE, the database, is
    only read. Rows that are there already, and equal, are passed over; so what was stopped goes
    on from there. One that is there with other content ends it. Only what was committed moves:
    a file in the middle of a write, by somebody at work or somebody who died, is refused.
    """
    # A dry run makes no directory: one that is not there has no keys either.
    has_keys = not dry_run or os.path.isdir(key_directory or "")
    options = {
        "--keys": open_keys(key_directory) if has_keys else None,
        "--secret": read_secret(secret_file),
        "--artifacts": root,
    }
    run = _importer(kind, {option: value for option, value in options.items() if value is not None})
    with app.open(write=not dry_run) as store, app.meter() as meter:
        report = run(store, file, dry_run=dry_run, progress=meter)

    def render(to: Printer) -> None:
        for part in report.parts:
            told = "would move " if dry_run else "moved "
            to.line(good(told), f"{part.imported:,} of {count(part.found, 'row')}: {part.name}")
        to.line(name(file), f": {sizes(report)}")

    app.answer(
        {
            "file": file,
            "kind": kind,
            **report._asdict(),
            "parts": [part._asdict() for part in report.parts],
        },
        render,
    )


def _importer(kind: str, options: dict[str, object]) -> Import:
    """What moves such a database, with these options; UsageError if one is not for it."""
    module, _, function = IMPORTERS[kind].partition(":")
    run = getattr(import_module(module), function)
    known = inspect.signature(run).parameters
    for option in options:
        if _PARAMETERS[option] not in known:
            raise click.UsageError(f"{option} is not for databases of {kind}")
    return partial(run, **{_PARAMETERS[option]: value for option, value in options.items()})
