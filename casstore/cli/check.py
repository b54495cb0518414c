"""Damage: ``check`` finds it; ``rebuild``, ``salvage`` and ``recover`` repair what can be."""

from __future__ import annotations

from typing import Final

import click

from casstore.cli.command import App, command, require_yes
from casstore.cli.fields import Field, Fields, described, document
from casstore.cli.options import YES
from casstore.cli.output import Printer, Styled, bad, bold, dim, good, name
from casstore.cli.quantities import DURATION, Whole, count
from casstore.cli.text import safe
from casstore.errors import BusyError, CasstoreError
from casstore.maintenance import check as checking
from casstore.maintenance import findings as codes
from casstore.maintenance import recover as recovery
from casstore.maintenance import salvage as salvaging
from casstore.maintenance.check import CheckReport, RebuildReport
from casstore.maintenance.findings import Affected, Finding
from casstore.maintenance.recover import RecoverReport
from casstore.maintenance.salvage import SalvagedSession, SalvageReport
from casstore.maintenance.salvaged_rows import LostRow, StrayRow
from casstore.store import is_server

_FINDING: Final[Fields] = described(
    Finding,
    {
        "code": Field(),
        "severity": Field(),
        "what": Field(),
        "meaning": Field(),
        "remedy": Field(),
        "session": Field("the session, null if none", of="where.session"),
        "revision": Field("its revision, null if none", of="where.revision"),
        "digest": Field("the object, null if none", of="where.digest"),
        "table": Field("the table, null if none", of="where.table"),
        "key": Field("the row's key in hexadecimal, null if none", of="where.key"),
    },
)


_CHECK: Final[Fields] = described(
    CheckReport,
    {
        "sound": Field(),
        "level": Field(),
        "since_last": Field(),
        "findings": Field(fields=_FINDING),
        "omitted": Field(of="findings_omitted"),
        "counts": Field(),
        "harmless": Field(),
        "affected": Field(
            fields=described(
                Affected,
                {
                    "session": Field(),
                    "head": Field(),
                    "revisions": Field(),
                    "revision_count": Field(),
                    "others": Field(),
                },
            ),
        ),
        "affected_omitted": Field(),
        "affected_pins": Field(),
        "rows_checked": Field(),
        "objects_checked": Field(),
        "contents_checked": Field(),
        "checked_at": Field(),
    },
)


@command(
    _CHECK,
    "casstore check",
    "casstore check --level full",
)
@click.option(
    "--level", type=click.Choice(checking.LEVELS), default="connectivity", show_default=True,
    help="quick: headers. connectivity: also that every object in use is stored. sample: also the "
    "content of some objects. full: also the content of all.",
)  # fmt: skip
@click.option(
    "--since-last", is_flag=True,
    help="Check only what was added since the last check that found no error.",
)  # fmt: skip
@click.option(
    "--share", type=click.FloatRange(0, 1, min_open=True), default=0.05, show_default=True,
    help="With --level sample: the fraction of the objects whose content is read.",
)  # fmt: skip
@click.option(
    "--seed", type=int,
    help="With --level sample: the seed of the random choice; otherwise each check reads others.",
)  # fmt: skip
@click.option(
    "--max-findings", type=Whole(1), default=100, show_default=True,
    help="List at most this many; the rest is counted.",
)  # fmt: skip
def check(
    app: App, level: str, since_last: bool, share: float, seed: int | None, max_findings: int
) -> None:
    """Check the store for damage.

    The exit code is 1 if the store is damaged. Agents can go on working. Each finding says what it
    means and what to do; the sessions that need the damaged objects are listed. The check only
    reads. Its result is then stored for --since-last, stats and ui, unless the store was left
    open by a process that died: opening it to write would apply its log.
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
    _record(app, report)
    app.exit_code = 0 if report.sound else 1
    app.answer(report, lambda to: _write_check(to, report))


def _record(app: App, report: checking.CheckReport) -> None:
    """Store the result of a check, unless that would apply the log of a store left open."""
    try:
        try:
            was_closed = is_server(app.path) or recovery.count_unapplied(app.path) is None
        except BusyError:
            was_closed = True  # another process has it open for writing, and has read its log
        if was_closed:
            with app.open(write=True) as store:
                checking.record(store, report)
        else:
            app.remark("the result was not stored: the store was not closed; see casstore recover")
    except CasstoreError as exc:
        app.remark(f"the result was not stored: {exc}")


_COLOURS: Final = {codes.ERROR: "red", codes.WARNING: "yellow", codes.INFO: "cyan"}


def _write_check(to: Printer, report: CheckReport) -> None:
    for one in report.findings:
        if one.remedy == codes.NOTHING:
            continue
        to.line(Styled(one.severity, fg=_COLOURS[one.severity]), f"  {one.what}")
        to.line(dim(f"    {one.code}: {one.meaning}"))
        to.line(dim(f"    do: {one.remedy}"))
    if report.findings_omitted:
        to.line(dim(f"… {count(report.findings_omitted, 'more finding')}: --max-findings"))
    for hit in report.affected[:20]:
        what = "its present state" if hit.head else count(hit.revision_count, "old revision")
        to.line(bad("affected  "), name(hit.session), f"  {what}")
    if report.affected_pins:
        to.line(bad("affected  "), "tags and pins ", ", ".join(report.affected_pins[:20]))
    looked = f"{count(report.objects_checked, 'object')}, {count(report.rows_checked, 'row')}"
    if report.contents_checked:
        looked += f"; {report.contents_checked:,} read and proven"
    if report.harmless:
        looked += f"; {count(report.harmless, 'harmless note')}, listed by --json"
    verdict = good("sound") if report.sound else bad("not sound")
    to.line(verdict, f"  {looked} (level {report.level})")


@command(
    described(
        RebuildReport,
        {
            "objects_named": Field(label="in the index", unit="object"),
            "objects_found": Field(label="added", unit="object"),
            "objects_dropped": Field(label="removed", unit="object"),
            "objects_missing": Field(label="missing", unit="object"),
        },
    ),
    "casstore rebuild",
)
@click.option(
    "--grace", "grace_ms", type=DURATION, default="1h", show_default=True,
    help="Keep unreachable objects that were put within this time.",
)  # fmt: skip
def rebuild(app: App, grace_ms: int) -> None:
    """Rebuild the index of objects from the stored objects.

    Run it when check advises it. If there is damage that it cannot repair, it changes nothing; use
    salvage then.
    """
    with app.open(write=True) as store, app.meter() as meter:
        report = checking.rebuild(store, grace_ms=grace_ms, progress=meter)
    app.exit_code = 1 if report.objects_missing else 0
    app.answer(report)


_SAVED: Final[Fields] = described(
    SalvagedSession,
    {
        "session": Field(label="session"),
        "outcome": Field("whole, partial, lost, deleted or exists", "outcome"),
        "revision": Field(label="revision", unit="revision"),
        "head_revision": Field(label="damaged at", unit="revision"),
        "revisions_saved": Field(label="revisions saved", unit="revision"),
        "revisions_lost": Field(
            "revisions lost", "revisions lost", "revision", of="revisions_lost_count"
        ),
        "lost": Field(of=lambda one: [f"{piece.name}: {piece.why}" for piece in one.lost]),
        "from_strays": Field(),
    },
)
_SALVAGE: Final[Fields] = described(
    SalvageReport,
    {
        "source": Field(),
        "target": "the new one",
        "complete": Field(),
        "sessions": Field(fields=_SAVED),
        "objects_saved": Field(),
        "objects_lost": Field(),
        "rows_saved": Field(),
        "rows_lost": Field(
            of=lambda report: [f"{_row_title(row)}: {row.why}" for row in report.rows_lost]
        ),
        "rows_from_strays": Field(
            of=lambda report: [_row_title(row) for row in report.rows_from_strays]
        ),
        "rows_existing": Field(),
        "gaps": Field(of=lambda report: [f"{gap.table}: {gap.why}" for gap in report.gaps]),
        "dictionaries_lost": Field(),
    },
)


@command(
    _SALVAGE,
    "casstore salvage damaged rescued",
)
@click.argument("source")
@click.argument("target")
def salvage(app: App, source: str, target: str) -> None:
    """Copy what can be verified of a damaged store into another.

    SOURCE is the damaged store, TARGET the other one. SOURCE is only read, without LMDB. TARGET
    is created if it does not exist; its sessions stay as they are. The command ends with 1 if
    something could not be saved.
    """
    with app.meter() as meter:
        report = salvaging.salvage(source, target, progress=meter)
    app.exit_code = 0 if report.complete else 1
    answer = document(_SALVAGE, report, {"target": target})

    def render(to: Printer) -> None:
        to.rows(_SAVED, answer["sessions"][:1000])
        for one in report.sessions:
            for piece in one.lost[:5]:
                to.line(bad("lost  "), f"{one.session}@{piece.revision}: {piece.name}: {piece.why}")
        for line in [*answer["rows_lost"][:20], *answer["gaps"][:20]]:
            to.line(bad("lost  "), line)
        for line in answer["rows_from_strays"][:20]:
            to.line(bold("old?  "), line)
        saved = f"{count(report.objects_saved, 'object')}, {count(report.rows_saved, 'row')} saved"
        to.line(
            good("all saved") if report.complete else bold("saved what could be verified"),
            f"  {saved}",
        )

    app.answer(answer, render)


def _row_title(row: LostRow | StrayRow) -> str:
    whose = "" if row.session is None else f" of {row.session}"
    return f"{row.table} {row.name}{whose}"


@command(
    described(
        RecoverReport,
        {
            "needed_log": Field(),
            "commits_recovered": Field(),
            "commits_discarded": Field(),
        },
    ),
    "casstore recover",
    "casstore recover agents --discard-log --yes",
)
@click.argument("directory", metavar="[STORE]", required=False)
@click.option(
    "--discard-log", is_flag=True,
    help="Open without the log; commits that only the log holds are lost.",
)  # fmt: skip
@YES
def recover(app: App, directory: str | None, discard_log: bool, yes: bool) -> None:
    """Apply the redo log of a store that was not closed.

    STORE is a directory; if not given, the one of --store or CASSTORE_PATH. Afterwards data.mdb
    is complete without the log. Opening a store reads its log, so this is never needed before
    a store is used. --discard-log is for a store that cannot be opened because its log is
    missing, damaged or another store's; if you have the right log, put it back instead. No other
    process may have the store open.
    """
    path = app.place_of(directory)
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

    app.answer(report, render)
