"""Retention: ``policy`` sets which revisions are kept, ``prune`` removes the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import click

from casstore.cli.command import App, command, require_yes
from casstore.cli.fields import Field, Fields, described, document, nested
from casstore.cli.naming import complete_name
from casstore.cli.options import ATTACHMENTS, OVERRIDE_POLICIES_HELP, YES, dry_run_option, options
from casstore.cli.output import Printer, bad, dim, name
from casstore.cli.quantities import DURATION, Whole, count, duration
from casstore.engine.files import source_error
from casstore.engine.overlay import OverlayEngine
from casstore.errors import CorruptionError, InvalidInputError
from casstore.maintenance import expiring, retention
from casstore.maintenance.expiring import ExpiredRows
from casstore.maintenance.files import whole_file
from casstore.maintenance.policy import policy_fields
from casstore.maintenance.retention import (
    Overridden,
    Plan,
    Policy,
    RetentionReport,
    SessionPlan,
    Tally,
)
from casstore.store import Store

_LISTED: Final = 100

Result = TypeVar("Result")

MISSING: Final = nested(
    "record systems in the store that are not installed: their rows are kept",
    {
        "name": Field("its name", of=lambda one: one[0]),
        "why": Field("why its code cannot be used", of=lambda one: one[1]),
    },
)


def write_missing(to: Printer, missing: Iterable[tuple[str, str]]) -> None:
    """Record systems that are not installed, and why, for people."""
    for system, why in missing:
        to.line(bad("not installed: "), "record system ", name(system), dim(f"  {why}"))


def _keep_each(period: str) -> Any:
    return click.option(
        f"--{period}ly" if period != "day" else "--daily",
        type=Whole(0), metavar="N", help=f"Keep one revision of each of N {period}s.",
    )  # fmt: skip


#: The options of a retention policy; ``policy_of`` reads them.
with_policy: Final = options(
    click.option("--last", type=Whole(0), metavar="N", help="Keep the N newest revisions."),
    *[_keep_each(period) for period in ("hour", "day", "week", "month", "year")],
    click.option(
        "--within", "within_ms", type=DURATION, help="Keep revisions committed within this time."
    ),
    click.option(
        "--idle", "idle_ms", type=DURATION, help="Delete sessions idle for longer than this."
    ),
    click.option("--everything", is_flag=True, help="Keep all revisions."),
    click.option("--unlabelled", is_flag=True, help="Do not keep a revision for its labels."),
)


_POLICY_NUMBERS: Final = (
    "last", "hourly", "daily", "weekly", "monthly", "yearly", "within_ms", "idle_ms",
)  # fmt: skip


def policy_of(given: dict[str, Any]) -> Policy | None:
    """The policy of the options; None if no option is given."""
    fields = {key: given[key] for key in _POLICY_NUMBERS if given[key] is not None}
    if given["everything"]:
        fields["everything"] = True
    if given["unlabelled"]:
        fields["labelled"] = False
    return Policy(**fields) if fields else None


def policy_words(policy: Policy | None) -> str:
    """A policy in a few words."""
    if policy is None:
        return "none: everything is kept"
    words: list[str] = []
    for field, value in policy_fields(policy).items():
        if field.endswith("_ms"):
            words.append(f"{field.removesuffix('_ms')} {duration(value)}")
        elif isinstance(value, bool):
            words.append(field if value else f"not {field}")
        else:
            words.append(f"{field} {value}")
    return ", ".join(words)


_POLICY_MEANING: Final = (
    "last, hourly, daily, weekly, monthly, yearly, within_ms, labelled, everything, idle_ms; "
    "null: none, everything is kept"
)


@command(
    {
        "session": "whose policy, null: the store's default",
        "policy": _POLICY_MEANING,
        "changed": "set, removed or null: only shown",
        "sessions": nested(
            "sessions with a policy of their own; only if the default was asked for",
            {"id": "the session", "policy": _POLICY_MEANING},
        ),
    },
    "casstore policy --last 10 --daily 7",
    "casstore policy --session agent --everything",
    "casstore policy",
)
@click.option("--session", metavar="ID", help="Of this session; otherwise the store's default.")
@with_policy
@click.option("--delete", "-d", is_flag=True, help="Delete the policy.")
def policy(app: App, /, session: str | None, delete: bool, **given: Any) -> None:
    """Show, set or delete the policy by which prune keeps revisions.

    A revision is kept if any rule keeps it. Always kept are the head, and revisions that are
    pinned, protected or needed by the holder of a lease. Only prune removes revisions.
    """
    wanted = policy_of(given)
    if delete and wanted is not None:
        raise click.UsageError("either set a policy or delete it")
    with app.open(write=delete or wanted is not None) as store:
        changed: str | None = None
        if delete or wanted is not None:
            retention.set_policy(store, wanted, session)
            changed = "removed" if delete else "set"
        elif session is not None:
            store.session(session).meta()
        found = retention.find_policy(store, session)
        own: list[tuple[str, Policy]] = []
        if session is None and changed is None:
            for info in store.sessions():
                theirs = retention.find_policy(store, info.meta.session)
                if theirs is not None:
                    own.append((info.meta.session, theirs))

    def render(to: Printer) -> None:
        whose = "the default" if session is None else session
        to.line(f"{changed}: " if changed else "", name(whose), "  ", policy_words(found))
        for one, theirs in own:
            to.line(name(one), "  ", policy_words(theirs))

    document = {
        "session": session,
        "policy": found,
        "changed": changed,
        "sessions": [{"id": one, "policy": theirs} for one, theirs in own],
    }
    app.answer(document, render)


# --- pruning ------------------------------------------------------------------------------


def _skips(why: str) -> Fields:
    return {"session": "the session", "revision": "null: all of them", "why": why}


PRUNE_FIELDS: Final[Fields] = described(
    RetentionReport,
    {
        "dry_run": "true: a plan, nothing was changed",
        "sessions": Field(label="examined", unit="session"),
        "sessions_deleted": Field(label="deleted", unit="session"),
        "revisions_removed": Field(label="removed", unit="revision"),
        "labels_removed": Field(label="removed", unit="label"),
        "already_gone": Field(),
        "skipped": nested(
            "revisions that the plan removes and that are in use now; the first 100",
            _skips("why it was kept"),
            of=lambda report: report.skipped[:_LISTED],
        ),
        "refused": nested(
            "sessions that were left unchanged because a row of them cannot be read",
            _skips("the row that cannot be read"),
            of=lambda report: report.refused[:_LISTED],
        ),
        "overridden": nested(
            "sessions whose stored policy the given one overrode; of a run the first 1,000",
            described(
                Overridden,
                {
                    "session": Field(),
                    "policy": Field(),
                },
            ),
        ),
        "own_policies": Field(label="by their own policy", unit="session"),
        "expired_rows": nested(
            "expired rows that were removed, or would be",
            described(
                ExpiredRows,
                {
                    "pins": Field(),
                    "protections": Field(),
                    "marks": Field(),
                    "receipts": Field(),
                    "deletions": Field(),
                    "records": Field(),
                    "attachments": Field(),
                    "condemned": Field(),
                },
            ),
        ),
        "missing_systems": MISSING,
        "plan": nested(
            "of a plan, every session that loses something; otherwise empty",
            {
                "session": "the session",
                "deleted": "why all of it would be deleted, empty: it is kept",
                "kept": "revisions that are kept",
                "removed": "revisions that would be removed",
            },
        ),
    },
)


class PlannedSession(NamedTuple):
    """A session that loses something by a plan."""

    session: str
    deleted: list[str]
    kept: list[int]
    removed: list[int]


def prune_document(
    report: RetentionReport, expired: ExpiredRows, plan: Sequence[PlannedSession] | None
) -> dict[str, Any]:
    """The report of prune, or of its plan, as JSON."""
    return document(
        PRUNE_FIELDS,
        report,
        {
            "dry_run": plan is not None,
            "expired_rows": expired,
            "missing_systems": expired.missing_systems,
            "plan": plan or [],
        },
    )


@command(
    PRUNE_FIELDS,
    "casstore prune --dry-run",
    "casstore prune --last 10 --daily 7 --yes",
    "casstore prune --last 1 --override-policies --dry-run",
    "casstore prune --dry-run --plan tonight.jsonl && casstore prune --from tonight.jsonl --yes",
)
@click.argument("sessions", nargs=-1, metavar="[SESSION]…", shell_complete=complete_name)
@click.option("--prefix", default="", help="Only sessions whose ids begin with this.")
@with_policy
@click.option(
    "--override-policies", is_flag=True,
    help=OVERRIDE_POLICIES_HELP,
)  # fmt: skip
@click.option(
    "--receipts", type=DURATION,
    help="Forget turns committed longer ago than this: repeated, such a turn commits again.",
)  # fmt: skip
@ATTACHMENTS
@dry_run_option("removed")
@click.option("--plan", "plan_file", metavar="FILE", help="With --dry-run: write the plan to FILE.")
@click.option("--from", "from_file", metavar="FILE", help="Carry out the plan in FILE.")
@YES
def prune(
    app: App,
    /,
    sessions: tuple[str, ...],
    prefix: str,
    override_policies: bool,
    receipts: int | None,
    attachments_ms: int | None,
    dry_run: bool,
    plan_file: str | None,
    from_file: str | None,
    yes: bool,
    **given: Any,
) -> None:
    """Remove revisions and sessions that no policy keeps.

    Expired rows are removed as well. The policy stored for a session decides; for other
    sessions the one given, otherwise the store's default; without any, everything is kept. With
    --override-policies the given policy decides for all. What is in use is kept and reported.
    gc frees the space.
    """
    wanted = policy_of(given)
    if override_policies and wanted is None and from_file is None:
        raise click.UsageError("--override-policies needs a policy, such as --last 10")
    if sessions and prefix:
        raise click.UsageError("either name sessions or give a prefix")
    if plan_file is not None and not dry_run:
        raise click.UsageError("--plan is for --dry-run; a run without it says what it did")
    choices = sessions or prefix or wanted is not None or dry_run or override_policies
    if from_file is not None and choices:
        raise click.UsageError(
            "--from carries out the plan in FILE; it takes no sessions, no policy and no --dry-run"
        )
    if not dry_run:
        require_yes(yes=yes, question="Remove what the policy does not keep?")
    listed: list[PlannedSession] | None = None
    with app.open(write=not dry_run) as opened, app.meter() as meter:
        store = opened
        if from_file is not None:
            report = _with_saved_plan(
                from_file, lambda plan: retention.execute(store, plan, progress=meter)
            )
        else:
            plan = retention.plan(
                store,
                sessions=list(sessions) if sessions else None,
                prefix=prefix,
                policy=wanted,
                override_policies=override_policies,
                progress=meter if dry_run else None,
            )
            if dry_run:
                report, listed = planned(plan, plan_file)
                # Executed in memory, so that the rows that expire with the revisions are counted.
                store = Store(OverlayEngine(store.engine))
                retention.execute(store, plan, progress=meter)
            else:
                report = retention.execute(store, plan, progress=meter)
        expired = expiring.expire_rows(
            store,
            receipts_older_than_ms=receipts,
            attachments_older_than_ms=attachments_ms,
            progress=meter,
        )
    if report.refused_count:
        app.exit_code = CorruptionError.exit_code
    answer = prune_document(report, expired, listed)
    app.answer(answer, lambda to: _write_prune(to, report, expired, listed))
    if not dry_run:
        app.remark("casstore gc frees the space")


def _with_saved_plan(path: str, use: Callable[[Plan], Result]) -> Result:
    """Call ``use`` with the plan in a file, which is read as the plan is iterated over."""
    try:
        with open(path, encoding="utf-8") as lines:
            return use(Plan.from_json(lines))
    except OSError as exc:
        raise source_error(path, exc) from exc
    except UnicodeDecodeError as exc:
        raise InvalidInputError(f"{path} is not a retention plan: {exc}") from exc


def planned(
    plan: Plan, plan_file: str | None = None
) -> tuple[RetentionReport, list[PlannedSession]]:
    """The report of a plan and the sessions in it; writes the plan to ``plan_file`` if given."""
    if plan_file is None:
        return _count(plan)
    try:
        with whole_file(plan_file) as into:
            into.writelines(f"{line}\n".encode() for line in plan.to_json())
    except FileExistsError as exc:
        raise InvalidInputError(f"{plan_file} exists already; choose another name") from exc
    # A plan reads the store each time it is iterated over: report what the file has.
    return _with_saved_plan(plan_file, _count)


def _count(parts: Iterable[SessionPlan]) -> tuple[RetentionReport, list[PlannedSession]]:
    tally = Tally(listed=None)
    listed: dict[str, PlannedSession] = {}
    for part in parts:
        tally.begin(part)
        tally.deleted += bool(part.deleted)
        tally.revisions += len(part.removed)
        tally.labels += sum(len(one.labels) for one in part.removed)
        if part.refused is not None:
            tally.refuse(part.session, part.refused)
        if part.removed or part.deleted or part.session in listed:
            one = listed.setdefault(part.session, PlannedSession(part.session, [], [], []))
            one.deleted[:] = part.deleted
            one.kept.extend([kept.revision for kept in part.kept])
            one.removed.extend([removed.revision for removed in part.removed])
    return tally.report(), list(listed.values())


_PLAN_TABLE: Final[Fields] = {
    "session": Field("the session", "session"),
    "removed": Field(
        "how many revisions would be removed", "revisions removed", "revision",
        of=lambda one: "all" if one.deleted else len(one.removed),
    ),
    "kept": Field("how many are kept", "kept", "revision", of=lambda one: len(one.kept)),
    "which": Field(
        "the revisions that would be removed", "which", of=lambda one: _runs(one.removed),
        gives=True,
    ),
}  # fmt: skip


def _write_prune(
    to: Printer,
    report: RetentionReport,
    expired: ExpiredRows,
    plan: Sequence[PlannedSession] | None,
) -> None:
    would = "" if plan is None else "would be "
    if plan:
        to.rows(_PLAN_TABLE, [document(_PLAN_TABLE, one) for one in plan[:_LISTED]])
    to.facts(
        [
            ("sessions", f"{report.sessions:,} examined, "
                         f"{report.sessions_deleted:,} {would}deleted"),
            ("revisions", f"{report.revisions_removed:,} {would}removed"),
            ("labels", f"{report.labels_removed:,} {would}removed"),
            ("expired rows", f"{expired.removed:,} {would}removed"),
        ]
    )  # fmt: skip
    if expired.condemned:
        listed = count(expired.condemned, "attachment")
        to.line(f"{listed} {would}condemned: casstore attachments lists the bytes to delete")
    write_missing(to, expired.missing_systems)
    for one in report.overridden:
        words = policy_words(one.policy)
        to.line(bad("policy overridden: "), name(one.session), f"  stored policy: {words}")
    if report.own_policies:
        to.facts([("own policy", f"decided for {count(report.own_policies, 'session')}")])
    for skipped in report.skipped[:_LISTED]:
        at = "" if skipped.revision is None else f"@{skipped.revision}"
        to.line("kept: ", name(f"{skipped.session}{at}"), f"  {skipped.why}")
    for refused in report.refused[:_LISTED]:
        to.line(bad("refused: "), name(refused.session), f"  {refused.why}")


def _runs(revisions: list[int]) -> str:
    """Numbers with consecutive ones joined: ``1-40, 42``."""
    parts: list[str] = []
    for revision in sorted(revisions):
        low, _, high = parts[-1].partition("-") if parts else ("", "", "")
        if parts and int(high or low) == revision - 1:
            parts[-1] = f"{low}-{revision}"
        else:
            parts.append(str(revision))
    shown = ", ".join(parts[:12])
    return shown + (", …" if len(parts) > 12 else "")
