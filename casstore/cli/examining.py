"""Is a store sound, and what can be done if not: ``check``, ``rebuild``, ``salvage``."""

from __future__ import annotations

from typing import Any, Final

import click

from casstore.cli.command import App, command
from casstore.cli.output import Column, Printer, Styled, bad, bold, dim, good, name
from casstore.cli.quantities import DURATION, count
from casstore.cli.shapes import Part, Shape
from casstore.cli.spelling import clip_name
from casstore.maintenance import check as checking
from casstore.maintenance import findings as codes
from casstore.maintenance import salvage as salvaging
from casstore.maintenance.findings import Finding
from casstore.maintenance.salvaged_rows import LostRow, StrayRow

_SECTION: Final = "Care"


def _finding(one: Finding) -> dict[str, Any]:
    where = one.where
    return {
        "code": one.code,
        "severity": one.severity,
        "what": one.what,
        "meaning": one.meaning,
        "remedy": one.remedy,
        "session": where.session,
        "revision": where.revision,
        "digest": None if where.digest is None else where.digest.hex(),
        "table": where.table,
        "key": None if where.key is None else where.key.hex(),
    }


@command(
    _SECTION,
    Shape(
        "check",
        {
            "sound": "is there no error?",
            "level": "how thoroughly it was looked at",
            "since_last": "only what came since the last check without an error",
            "findings": Part(
                "what was found, the worst first",
                {
                    "code": "one of a closed list",
                    "severity": "error, warning or info",
                    "what": "what is wrong here",
                    "meaning": "what the code means",
                    "remedy": "what to do about it",
                    "session": "the session, null if none",
                    "revision": "its revision, null if none",
                    "digest": "the object, null if none",
                    "table": "the table, null if none",
                    "key": "the row's key in hexadecimal, null if none",
                },
            ),
            "omitted": "findings beyond --max-findings",
            "counts": "how many of each code: {code: number}",
            "harmless": "how many findings need no remedy",
            "affected": Part(
                "sessions that need what is damaged or missing",
                {
                    "session": "the session",
                    "head": "is its present state among it?",
                    "revisions": "the newest of them",
                    "revision_count": "how many there are",
                    "others": "queued batches and attachments",
                },
            ),
            "affected_omitted": "sessions that are not listed",
            "affected_pins": "tags and pins that do",
            "rows_checked": "rows looked at",
            "objects_checked": "objects looked at",
            "contents_checked": "objects whose content was read and proven",
        },
    ),
    "casstore check",
    "casstore check --level full",
)
@click.option(
    "--level", type=click.Choice(checking.LEVELS), default="connectivity", show_default=True,
    help="quick: headers. connectivity: all that rows reach is there. sample: and the content "
    "of some objects. full: of all.",
)  # fmt: skip
@click.option("--since-last", is_flag=True, help="Only what came since the last sound check.")
@click.option(
    "--share", type=click.FloatRange(0, 1, min_open=True), default=0.05, show_default=True,
    help="Of level sample: the part of the objects that is read.",
)  # fmt: skip
@click.option("--seed", type=int, help="Of level sample: which objects; else other ones each time.")
@click.option(
    "--max-findings", type=click.IntRange(1), default=100, show_default=True,
    help="List at most so many; the rest is counted.",
)  # fmt: skip
def check(
    app: App, level: str, since_last: bool, share: float, seed: int | None, max_findings: int
) -> None:
    """Look for damage; ends with 1 if there is any.

    Runs beside agents at work. Each finding says what it means and what to do, and the sessions
    that need what is damaged are named.
    """
    with app.open() as store, app.meter() as meter:
        report = checking.check(
            store,
            level=level,
            since_last=since_last,
            share=share,
            seed=seed,
            max_findings=max_findings,
            progress=meter,
        )
    app.exit_code = 0 if report.sound else 1
    document = {
        "sound": report.sound,
        "level": report.level,
        "since_last": report.since_last,
        "findings": [_finding(one) for one in report.findings],
        "omitted": report.findings_omitted,
        "counts": report.counts,
        "harmless": report.harmless,
        "affected": [
            {
                "session": one.session,
                "head": one.head,
                "revisions": list(one.revisions),
                "revision_count": one.revision_count,
                "others": list(one.others),
            }
            for one in report.affected
        ],
        "affected_omitted": report.affected_omitted,
        "affected_pins": list(report.affected_pins),
        "rows_checked": report.rows_checked,
        "objects_checked": report.objects_checked,
        "contents_checked": report.contents_checked,
    }
    app.answer(document, lambda to: _write_check(to, document))


_COLOURS: Final = {codes.ERROR: "red", codes.WARNING: "yellow", codes.INFO: "cyan"}


def _write_check(to: Printer, told: dict[str, Any]) -> None:
    for one in told["findings"]:
        if one["remedy"] == codes.NOTHING:
            continue
        to.line(Styled(one["severity"], fg=_COLOURS[one["severity"]]), f"  {one['what']}")
        to.line(dim(f"    {one['code']}: {one['meaning']}"))
        to.line(dim(f"    do: {one['remedy']}"))
    if told["omitted"]:
        to.line(dim(f"… {count(told['omitted'], 'more finding')}: --max-findings"))
    for one in told["affected"][:20]:
        what = "its present state" if one["head"] else count(one["revision_count"], "old revision")
        to.line(bad("affected  "), name(one["session"]), f"  {what}")
    if told["affected_pins"]:
        to.line(bad("affected  "), "tags and pins ", ", ".join(told["affected_pins"][:20]))
    looked = f"{count(told['objects_checked'], 'object')}, {count(told['rows_checked'], 'row')}"
    if told["contents_checked"]:
        looked += f"; {told['contents_checked']:,} read and proven"
    if told["harmless"]:
        looked += f"; {count(told['harmless'], 'harmless note')}, listed by --json"
    if told["sound"]:
        to.line(good("sound"), f"  {looked} (level {told['level']})")
    else:
        to.line(bad("not sound"), f"  {looked} (level {told['level']})")


@command(
    _SECTION,
    Shape(
        "rebuild",
        {
            "objects_named": "objects that the index names now",
            "objects_found": "of those, what it did not name before",
            "objects_dropped": "names that went",
            "objects_missing": "objects that are needed and that nothing holds",
        },
    ),
    "casstore rebuild",
)
@click.option(
    "--grace", "grace_ms", type=DURATION, default="1h", show_default=True,
    help="Of what nobody reaches, what was put within this time stays.",
)  # fmt: skip
def rebuild(app: App, grace_ms: int) -> None:
    """Rebuild the index of objects from the stored objects.

    What to do when check says so. Nothing happens if something is damaged that cannot be
    rebuilt; then salvage helps.
    """
    with app.open(write=True) as store, app.meter() as meter:
        report = checking.rebuild(store, grace_ms=grace_ms, progress=meter)
    app.exit_code = 1 if report.objects_missing else 0
    titles = {key: key.replace("_", " ") for key in report._fields}
    app.answer(
        report._asdict(),
        lambda to: to.facts(
            [(titles[key], f"{value:,}") for key, value in report._asdict().items()]
        ),
    )


@command(
    _SECTION,
    Shape(
        "salvage",
        {
            "source": "the damaged store",
            "target": "the new one",
            "complete": "was everything taken over?",
            "sessions": Part(
                "what became of each",
                {
                    "session": "the session",
                    "outcome": "whole, partial, lost, deleted or exists",
                    "revision": "where it stands in the new store",
                    "head_revision": "where it stood",
                    "revisions_saved": "how many",
                    "revisions_lost": "how many",
                    "lost": "what its newest revision lacks, by name",
                    "from_strays": "true: some rows may be outdated",
                },
            ),
            "objects_saved": "objects copied",
            "objects_lost": "objects that are needed and gone",
            "rows_saved": "rows copied",
            "rows_lost": "rows left out, and why",
            "rows_from_strays": "policies, protections and the like that may be outdated",
            "rows_existing": "rows that the target has otherwise, left as they are",
            "gaps": "tables in which rows may be missing whose names are not known",
            "dictionaries_lost": "compression dictionaries that are gone",
        },
    ),
    "casstore salvage damaged rescued",
)
@click.argument("source")
@click.argument("target")
def salvage(app: App, source: str, target: str) -> None:
    """Copy all that can be proven of the damaged store SOURCE into the store TARGET.

    SOURCE is only read, and never given to LMDB. TARGET is made if it is not there; sessions
    that it has stay as they are. Ends with 1 if something could not be saved.
    """
    with app.meter() as meter:
        report = salvaging.salvage(source, target, progress=meter)
    app.exit_code = 0 if report.complete else 1
    document: dict[str, Any] = {
        "source": report.source,
        "target": target,
        "complete": report.complete,
        "sessions": [
            {
                "session": one.session,
                "outcome": one.outcome,
                "revision": one.revision,
                "head_revision": one.head_revision,
                "revisions_saved": one.revisions_saved,
                "revisions_lost": one.revisions_lost_count,
                "lost": [f"{piece.name}: {piece.why}" for piece in one.lost],
                "from_strays": one.from_strays,
            }
            for one in report.sessions
        ],
        "objects_saved": report.objects_saved,
        "objects_lost": report.objects_lost,
        "rows_saved": report.rows_saved,
        "rows_lost": [f"{_row_title(row)}: {row.why}" for row in report.rows_lost],
        "rows_from_strays": [_row_title(row) for row in report.rows_from_strays],
        "rows_existing": report.rows_existing,
        "gaps": [f"{gap.table}: {gap.why}" for gap in report.gaps],
        "dictionaries_lost": list(report.dictionaries_lost),
    }

    def render(to: Printer) -> None:
        columns = [
            Column("session"), Column("outcome"), Column("stands at", right=True),
            Column("stood at", right=True), Column("revisions saved", right=True),
        ]  # fmt: skip
        if report.sessions:
            to.table(
                columns,
                [
                    [name(clip_name(one.session)),
                     (good if one.outcome == salvaging.WHOLE else bad)(one.outcome),
                     str(one.revision or "-"), str(one.head_revision or "-"),
                     f"{one.revisions_saved:,}"]
                    for one in report.sessions[:1000]
                ],
            )  # fmt: skip
        for one in report.sessions:
            for piece in one.lost[:5]:
                to.line(bad("lost  "), f"{one.session}@{piece.revision}: {piece.name}: {piece.why}")
        for line in [*document["rows_lost"][:20], *document["gaps"][:20]]:
            to.line(bad("lost  "), line)
        for line in document["rows_from_strays"][:20]:
            to.line(bold("old?  "), line)
        told = f"{count(report.objects_saved, 'object')}, {count(report.rows_saved, 'row')} saved"
        to.line(
            good("all saved") if report.complete else bold("saved what could be proven"),
            f"  {told}",
        )

    app.answer(document, render)


def _row_title(row: LostRow | StrayRow) -> str:
    whose = "" if row.session is None else f" of {row.session}"
    return f"{row.table} {row.name}{whose}"
