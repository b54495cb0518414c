"""``records``: the record systems in a store, and what each of them stores."""

from __future__ import annotations

from typing import Any, Final

import click

from casstore.cli.command import App, command
from casstore.cli.output import Column, Printer, bad, dim, name
from casstore.cli.quantities import age, count, moment_or_none, size
from casstore.cli.shapes import Fields, Part, Shape
from casstore.cli.spelling import clip, clip_name
from casstore.errors import InvalidInputError
from casstore.maintenance import systems
from casstore.maintenance.systems import SystemEntry, SystemSize

_SECTION: Final = "Sessions"

SYSTEM_FIELDS: Final[Fields] = {
    "name": "its name: its tables are called NAME.table",
    "title": "what it stores, null if it is not installed",
    "version": "the version of its rows that is installed, null if none is",
    "rows": "how many rows it has",
    "size_bytes": "their keys and values, without objects that they link to",
    "missing": "why its code cannot be used, null if it can",
}
MISSING: Final = Part(
    "record systems in the store that are not installed: their rows are kept as they are",
    {"name": "its name", "why": "why its code cannot be used"},
)


def system_documents(found: list[SystemSize]) -> list[dict[str, Any]]:
    """The record systems in a store as JSON."""
    return [one._asdict() for one in found]


def missing_documents(missing: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    """Record systems that are not installed as JSON."""
    return [{"name": system, "why": why} for system, why in missing]


def write_missing(to: Printer, missing: tuple[tuple[str, str], ...]) -> None:
    """Record systems that are not installed, for a person."""
    for system, why in missing:
        to.line(bad("not installed: "), "record system ", name(system), dim(f"  {why}"))


def write_systems(to: Printer, found: list[dict[str, Any]]) -> None:
    """The record systems in a store, for a person."""
    columns = [
        Column("records"), Column("rows", right=True), Column("size", right=True), Column("title"),
    ]  # fmt: skip
    to.table(
        columns,
        [
            [
                name(clip_name(one["name"])),
                f"{one['rows']:,}",
                size(one["size_bytes"]),
                one["title"] or bad(f"not installed: {one['missing']}"),
            ]
            for one in found
        ],
    )


@command(
    _SECTION,
    Shape(
        "records",
        {
            "systems": Part("the record systems in the store", SYSTEM_FIELDS),
            "entries": Part(
                "what the given system stores, by id; empty if none is given",
                {
                    "id": "its name within the system",
                    "title": "what it is",
                    "changed_at": "when it last changed, null if not known",
                    "size_bytes": "keys and values of its rows, without objects they link to",
                },
            ),
        },
    ),
    "casstore records",
    "casstore records lg --limit 20",
)
@click.argument("system", required=False)
@click.option(
    "--limit", "-n", type=click.IntRange(1, 10_000), default=100, show_default=True,
    help="The largest number of entries to list.",
)  # fmt: skip
@click.option("--after", metavar="ID", help="Only entries behind this one, to continue a list.")
def records(app: App, system: str | None, limit: int, after: str | None) -> None:
    """List the record systems in the store, or the entries of SYSTEM.

    Record systems store rows of their own: session logs, runs, LangGraph threads, and those of
    other packages. The rows of a system that is not installed are kept and counted.
    """
    entries: list[SystemEntry] = []
    with app.open() as store:
        now_ms = store.engine.now_ms()
        found = systems.measure(store)
        if system is not None:
            known = systems.load(system)
            if isinstance(known, str):
                raise InvalidInputError(f"record system {system!r} is not installed: {known}")
            entries = list(known.entries(store, after=after, limit=limit))
        elif after is not None:
            raise InvalidInputError("--after continues the entries of a SYSTEM: name the system")
    document = {
        "systems": system_documents(found),
        "entries": [
            {
                "id": one.id,
                "title": one.title,
                "changed_at": moment_or_none(one.changed_at_ms),
                "size_bytes": one.size_bytes,
            }
            for one in entries
        ],
    }

    def render(to: Printer) -> None:
        if system is None and found:
            write_systems(to, document["systems"])
        elif system is None:
            app.remark("no records yet")
        elif not entries:
            app.remark(f"no entries of {system}" + (" behind that one" if after else ""))
        else:
            _write_entries(to, entries, now_ms)
            if len(entries) == limit:
                app.remark(f"the first {count(limit, 'entry', 'entries')}; --after continues")

    app.answer(document, render)


def _write_entries(to: Printer, entries: list[SystemEntry], now_ms: int) -> None:
    columns = [
        Column("entry"), Column("changed", right=True), Column("size", right=True), Column("title"),
    ]  # fmt: skip
    to.table(
        columns,
        [
            [
                name(clip_name(one.id)),
                "-" if one.changed_at_ms is None else age(one.changed_at_ms, now_ms),
                size(one.size_bytes),
                clip(one.title, to.room(60, 110)),
            ]
            for one in entries
        ],
    )
