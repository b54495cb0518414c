"""What stays and what goes: retention policies, pruning by them, and erasing a subject."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import click

from casstore.cli.command import App, command, require_yes
from casstore.cli.completing import complete_name
from casstore.cli.key_options import keys_option, open_keys, read_secret, secret_option
from casstore.cli.naming import NameNotFoundError
from casstore.cli.output import Cells, Column, Printer, bad, bold, dim, good, name
from casstore.cli.quantities import DURATION, count, duration, size
from casstore.cli.records import MISSING, missing_documents, write_missing
from casstore.cli.shapes import Fields, Part, Shape
from casstore.cli.spelling import clip_name, safe
from casstore.engine.files import source_error
from casstore.engine.overlay import OverlayEngine
from casstore.errors import InvalidInputError, StorageError
from casstore.maintenance import erasure, expiring, retention
from casstore.maintenance.policy import policy_fields
from casstore.maintenance.retention import Plan, Policy, RetentionReport, SessionPlan
from casstore.maintenance.retention_execution import Tally
from casstore.maintenance.whole_files import whole_file
from casstore.records.lifecycles.erasure import LifecycleErasure, records_of
from casstore.store import Store

_SECTION: Final = "Giving space back"
_LISTED: Final = 100

_POLICY: Final = (
    click.option("--last", type=click.IntRange(0), help="Keep the newest so many revisions."),
    click.option("--hourly", type=click.IntRange(0), help="Keep one of each of so many hours."),
    click.option("--daily", type=click.IntRange(0), help="Keep one of each of so many days."),
    click.option("--weekly", type=click.IntRange(0), help="Keep one of each of so many weeks."),
    click.option("--monthly", type=click.IntRange(0), help="Keep one of each of so many months."),
    click.option("--yearly", type=click.IntRange(0), help="Keep one of each of so many years."),
    click.option("--within", type=DURATION, help="Keep all that was committed within this time."),
    click.option("--idle", type=DURATION, help="Take a session away that was idle so long."),
    click.option("--everything", is_flag=True, help="Keep all revisions."),
    click.option("--unlabelled", is_flag=True, help="Labels keep no revision; else they do."),
)


def _with_policy(function: Any) -> Any:
    for option in reversed(_POLICY):
        function = option(function)
    return function


def _policy_of(given: dict[str, Any]) -> Policy | None:
    """The policy that options make; None if there are none."""
    fields: dict[str, Any] = {}
    for option in ("last", "hourly", "daily", "weekly", "monthly", "yearly"):
        if given[option] is not None:
            fields[option] = given[option]
    for option, field in (("within", "within_ms"), ("idle", "idle_ms")):
        if given[option] is not None:
            fields[field] = given[option]
    if given["everything"]:
        fields["everything"] = True
    if given["unlabelled"]:
        fields["labelled"] = False
    return Policy(**fields) if fields else None


def _policy_document(policy: Policy | None) -> dict[str, Any] | None:
    return None if policy is None else dict(policy._asdict())


def policy_words(policy: Policy | None) -> str:
    """A policy in a few words."""
    if policy is None:
        return "none: everything stays"
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
    "null: none, everything stays"
)


@command(
    _SECTION,
    Shape(
        "policy",
        {
            "session": "whose policy, null: the store's default",
            "policy": _POLICY_MEANING,
            "changed": "set, removed or null: only shown",
            "sessions": Part(
                "sessions with a policy of their own; only if the default was asked for",
                {"id": "the session", "policy": _POLICY_MEANING},
            ),
        },
    ),
    "casstore policy --last 10 --daily 7",
    "casstore policy --session agent --everything",
    "casstore policy",
)
@click.option("--session", metavar="ID", help="Of this session; else the store's default.")
@_with_policy
@click.option("--delete", "-d", is_flag=True, help="Take the policy away.")
def policy(app: App, session: str | None, delete: bool, **given: Any) -> None:
    """Show, set or take away what stays of sessions when they are pruned.

    A revision stays if any rule keeps it. The head always stays, and so does what is pinned,
    protected or needed by the holder of a lease. Nothing goes before prune.
    """
    wanted = _policy_of(given)
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
        "policy": _policy_document(found),
        "changed": changed,
        "sessions": [{"id": one, "policy": _policy_document(theirs)} for one, theirs in own],
    }
    app.answer(document, render)


# --- pruning ------------------------------------------------------------------------------


PRUNE_FIELDS: Final[Fields] = {
    "dry_run": "true: a plan, nothing was changed",
    "sessions": "sessions looked at",
    "sessions_deleted": "sessions that went as a whole, or would",
    "revisions_removed": "revisions that went, or would",
    "labels_removed": "labels that went with them, or would",
    "already_gone": "planned, but gone before",
    "skipped": Part(
        "planned, but somebody uses them now; the first 100",
        {"session": "the session", "revision": "null: all of it", "why": "why it stayed"},
    ),
    "refused": Part(
        "sessions of which nothing could be decided",
        {"session": "the session", "revision": "null", "why": "the row that cannot be read"},
    ),
    "overridden": Part(
        "sessions whose stored policy the given one overrode; of a run the first 1,000",
        {"session": "the session", "policy": "the stored policy"},
    ),
    "own_policies": "how many sessions the policy stored for them decided about",
    "expired_rows": Part(
        "rows that kept nothing any more and went, or would",
        {
            "pins": "pins whose time was up",
            "protections": "protections whose time was up",
            "marks": "notes for retention itself",
            "receipts": "receipts of turns, with --receipts",
            "deletions": "deletions that were finished",
            "records": "records that had expired, or that a deletion had left, of all systems",
            "attachments": "attachments that were never committed, with --attachments",
            "condemned": "the same with bytes elsewhere: listed until these are deleted",
        },
    ),
    "missing_systems": MISSING,
    "plan": Part(
        "of a plan, what happens to each session that loses something; else empty",
        {
            "session": "the session",
            "deleted": "why it goes as a whole, empty: it stays",
            "kept": "revisions that stay",
            "removed": "revisions that go",
        },
    ),
}


def prune_document(
    report: RetentionReport, expired: expiring.ExpiredRows, plan: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """What pruning did, or would do by this plan, as JSON."""
    return {
        "dry_run": plan is not None,
        "sessions": report.sessions,
        "sessions_deleted": report.sessions_deleted,
        "revisions_removed": report.revisions_removed,
        "labels_removed": report.labels_removed,
        "already_gone": report.already_gone,
        "skipped": [one._asdict() for one in report.skipped[:_LISTED]],
        "refused": [one._asdict() for one in report.refused[:_LISTED]],
        "overridden": [
            {"session": one.session, "policy": _policy_document(one.policy)}
            for one in report.overridden
        ],
        "own_policies": report.own_policies,
        "expired_rows": {
            key: value for key, value in expired._asdict().items() if key != "missing_systems"
        },
        "missing_systems": missing_documents(expired.missing_systems),
        "plan": plan or [],
    }


@command(
    _SECTION,
    Shape("prune", PRUNE_FIELDS),
    "casstore prune --dry-run",
    "casstore prune --last 10 --daily 7 --yes",
    "casstore prune --last 1 --override-policies --dry-run",
    "casstore prune --dry-run --plan tonight.jsonl && casstore prune --from tonight.jsonl --yes",
)
@click.argument("sessions", nargs=-1, metavar="[SESSION]…", shell_complete=complete_name)
@click.option("--prefix", default="", help="Only sessions whose ids begin so.")
@_with_policy
@click.option(
    "--override-policies", is_flag=True,
    help="The given policy decides also for sessions that have a policy of their own.",
)  # fmt: skip
@click.option("--receipts", type=DURATION, help="Also receipts of turns older than this.")
@click.option(
    "--attachments", type=DURATION,
    help="Also attachments announced longer ago than this and never committed.",
)  # fmt: skip
@click.option("--dry-run", "-n", is_flag=True, help="The plan: say what would go, change nothing.")
@click.option("--plan", "plan_file", metavar="FILE", help="Write the plan down, with --dry-run.")
@click.option("--from", "from_file", metavar="FILE", help="Carry out a plan that was written down.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def prune(
    app: App,
    sessions: tuple[str, ...],
    prefix: str,
    override_policies: bool,
    receipts: int | None,
    attachments: int | None,
    dry_run: bool,
    plan_file: str | None,
    from_file: str | None,
    yes: bool,
    **given: Any,
) -> None:
    """Take away revisions and sessions that no policy keeps, and what has expired.

    The policy stored for a session decides; for the others the one given, else the store's
    default, else everything stays. With --override-policies the one given decides for all.
    What is in use stays and is reported. The space comes back with gc.
    """
    wanted = _policy_of(given)
    if override_policies and wanted is None and from_file is None:
        raise click.UsageError("--override-policies needs a policy, such as --last 10")
    if sessions and prefix:
        raise click.UsageError("either name sessions or give a prefix")
    if plan_file is not None and not dry_run:
        raise click.UsageError("--plan is for --dry-run; a run without it says what it did")
    choices = sessions or prefix or wanted is not None or dry_run or override_policies
    if from_file is not None and choices:
        raise click.UsageError("--from carries out a plan as it is; it takes no other choice")
    if not dry_run:
        require_yes(yes=yes, question="Take away what the policy does not keep?")
    listed: list[dict[str, Any]] | None = None
    with app.open(write=not dry_run) as opened, app.meter() as meter:
        store = opened
        if from_file is not None:
            report = _execute_from(
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
            attachments_older_than_ms=attachments,
            progress=meter,
        )
    if report.refused_count:
        app.exit_code = 8
    app.answer(
        prune_document(report, expired, listed),
        lambda to: write_prune(to, report, expired, listed),
    )
    if not dry_run:
        app.remark("casstore gc gives the space back")


def _execute_from(path: str, execute: Any) -> RetentionReport:
    try:
        with open(path, encoding="utf-8") as lines:
            report: RetentionReport = execute(Plan.from_json(lines))
            return report
    except OSError as exc:
        raise source_error(path, exc) from exc
    except UnicodeDecodeError as exc:
        raise InvalidInputError(f"{path} is no retention plan: {exc}") from exc


def planned(
    plan: Plan, plan_file: str | None = None
) -> tuple[RetentionReport, list[dict[str, Any]]]:
    """What a plan would do; also written down, line by line, if that was asked for."""
    if plan_file is not None:
        try:
            with whole_file(plan_file) as into:
                into.writelines(f"{line}\n".encode() for line in plan.to_json())
        except FileExistsError as exc:
            raise InvalidInputError(f"{plan_file} is there already; choose another name") from exc
        try:
            with open(plan_file, encoding="utf-8") as lines:
                return _count(iter(Plan.from_json(lines)))
        except OSError as exc:
            raise StorageError(f"cannot read {plan_file}: {exc.strerror}") from exc
    return _count(iter(plan))


def _count(parts: Iterator[SessionPlan]) -> tuple[RetentionReport, list[dict[str, Any]]]:
    tally = Tally(listed=None)
    listed: dict[str, dict[str, Any]] = {}
    for part in parts:
        tally.begin(part)
        tally.deleted += bool(part.deleted)
        tally.revisions += len(part.removed)
        tally.labels += sum(len(one.labels) for one in part.removed)
        if part.refused is not None:
            tally.refuse(part.session, part.refused)
        if part.removed or part.deleted or part.session in listed:
            told = listed.setdefault(
                part.session,
                {"session": part.session, "deleted": [], "kept": [], "removed": []},
            )
            told["deleted"] = list(part.deleted)
            told["kept"] += [one.revision for one in part.kept]
            told["removed"] += [one.revision for one in part.removed]
    return tally.report(), list(listed.values())


def write_prune(
    to: Printer,
    report: RetentionReport,
    expired: expiring.ExpiredRows,
    plan: list[dict[str, Any]] | None,
) -> None:
    """What pruning did, or would do by this plan, for a person."""
    planned = plan is not None
    if plan:
        rows: list[Cells] = [
            [
                name(clip_name(one["session"])),
                bad("goes") if one["deleted"] else f"{len(one['removed']):,} go",
                f"{len(one['kept']):,} stay",
                dim(_runs(one["removed"])),
            ]
            for one in plan[:_LISTED]
        ]
        columns = [Column("session"), Column("goes"), Column("stays"), Column("which", gives=True)]
        to.table(columns, rows)
    verb = "would go" if planned else "gone"
    to.facts(
        [
            ("sessions", f"{report.sessions:,} looked at, {report.sessions_deleted:,} {verb}"),
            ("revisions", f"{report.revisions_removed:,} {verb}"),
            ("labels", f"{report.labels_removed:,} {verb}"),
            ("expired rows", f"{expired.removed:,} {verb}"),
        ]
    )
    if expired.condemned:
        listed = count(expired.condemned, "attachment")
        done = "would be condemned" if planned else "condemned"
        to.line(f"{listed} {done}: casstore attachments lists the bytes to delete")
    write_missing(to, expired.missing_systems)
    for overridden in report.overridden:
        words = policy_words(overridden.policy)
        to.line(bad("policy overridden: "), name(overridden.session), f"  stored policy: {words}")
    if report.own_policies:
        to.facts([("own policy", f"decided for {count(report.own_policies, 'session')}")])
    for one in report.skipped[:_LISTED]:
        at = "" if one.revision is None else f"@{one.revision}"
        to.line("stayed: ", name(f"{one.session}{at}"), f"  {one.why}")
    for one in report.refused[:_LISTED]:
        to.line(bad("refused: "), name(one.session), f"  {one.why}")


def _runs(revisions: list[int]) -> str:
    """Numbers, neighbours together: ``1-40, 42``."""
    parts: list[str] = []
    for revision in sorted(revisions):
        low, _, high = parts[-1].partition("-") if parts else ("", "", "")
        if parts and int(high or low) == revision - 1:
            parts[-1] = f"{low}-{revision}"
        else:
            parts.append(str(revision))
    shown = ", ".join(parts[:12])
    return shown + (", …" if len(parts) > 12 else "")


# --- erasing ------------------------------------------------------------------------------


def _nobody(subject: str) -> NameNotFoundError:
    """Not a wrong name of a session: a store has no list of subjects to look it up in."""
    error = NameNotFoundError(
        subject, "spell it as it was given to sessions and records, with --secret if they had one"
    )
    error.args = (f"no session and no record is about {subject!r}",)
    return error


@command(
    _SECTION,
    Shape(
        "erase",
        {
            "subject": "whom it was about",
            "dry_run": "true: a plan, nothing was changed",
            "sessions": Part(
                "sessions about the subject",
                {
                    "id": "the session",
                    "revisions": "how many",
                    "labels": "how many",
                    "batches": "of its queue",
                    "attachments": "how many",
                    "elsewhere": "attachments whose bytes are elsewhere, for you to delete",
                    "also_about": "other subjects",
                },
            ),
            "pins": "tags and pins on their checkpoints, which go too",
            "records": "how many records are about the subject, or derived from those that are",
            "records_erased": "how many went, null for a plan",
            "stays": Part(
                "records that may not go",
                {
                    "provider": "what kind of records it is among",
                    "record": "its name",
                    "reason": "a hold and its end, a seal, a key that waits",
                },
            ),
            "to_tell": "who was given what goes, and must be told",
            "shared": Part(
                "what others reach as well, and so stays; null if it was not surveyed",
                {
                    "objects": "that the sessions reach",
                    "size_bytes": "uncompressed",
                    "shared_objects": "of those, what others reach too",
                    "shared_bytes": "uncompressed",
                    "sharers": "who they are, those that share most first",
                },
            ),
            "sessions_deleted": "how many went, null for a plan",
            "remaining": "sessions about the subject that were not in the plan: run it again",
            "records_remaining": "records about the subject that were not in the plan",
            "missing_systems": MISSING,
            "still_to_run": "commands after which the bytes are gone from the disk",
        },
    ),
    "casstore erase user-42 --dry-run",
    "casstore erase user-42 --yes && casstore gc --grace 0 && casstore compact",
)
@click.argument("subject")
@click.option("--dry-run", "-n", is_flag=True, help="The plan: say what would go, change nothing.")
@click.option("--no-survey", is_flag=True, help="Do not find out what others share: faster.")
@keys_option("Where the keys of encrypted user data are: the subject's is destroyed.", exists=True)
@secret_option(
    "The file whose bytes are the secret that subjects are hashed with, if there is one."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def erase(
    app: App,
    subject: str,
    dry_run: bool,
    no_survey: bool,
    key_directory: str | None,
    secret_file: BinaryIO | None,
    yes: bool,
) -> None:
    """Take away every session and record about SUBJECT, and what keeps them alive.

    Sessions are about those they were said to be about when they were made. Protection and
    leases do not help against it. Records are user data, checkpoints of agents and what was
    derived from them, scoped state of the actor of that name, and what other record systems
    find; what is sealed, or held until a time, stays and is reported, and so are record systems
    that are not installed. What others share stays with them and is reported. The bytes are
    gone after gc without grace and compact.
    """
    lives = LifecycleErasure(keys=open_keys(key_directory), secret=read_secret(secret_file))
    providers = (lives,)
    with app.open(write=not dry_run) as store:
        with app.meter() as meter:
            plan = erasure.plan(
                store, subject, providers=providers, survey=not no_survey, progress=meter
            )
        found = {**plan.records, lives.name: records_of(plan.records[lives.name])}
        records = sum([len(one) for one in found.values()])
        if not plan.sessions and not plan.pins and not any(plan.records.values()):
            raise _nobody(subject)
        report: erasure.ErasureReport | None = None
        if not dry_run:
            told = f"{count(len(plan.sessions), 'session')} and {count(records, 'record')}"
            # Between two bars: one that moves would be drawn over the question.
            require_yes(yes=yes, question=f"Erase {told} about {safe(subject)} for good?")
            with app.meter() as meter:
                report = erasure.execute(store, plan, providers=providers, progress=meter)
    stays = plan.stays if report is None else report.stays
    came = [] if report is None else list(report.remaining)
    came_records = [] if report is None else [": ".join(one) for one in report.records_remaining]
    shared = plan.sharing
    document = {
        "subject": subject,
        "dry_run": dry_run,
        "sessions": [
            {
                "id": one.session,
                **{key: value for key, value in one._asdict().items() if key != "session"},
            }
            for one in plan.sessions
        ],
        "pins": [pin for pin, _ in plan.pins],
        "records": records,
        "records_erased": None if report is None else report.records_erased,
        "stays": [one._asdict() for one in stays],
        "to_tell": list(plan.to_tell),
        "shared": None
        if no_survey
        else {
            "objects": shared.objects,
            "size_bytes": shared.bytes,
            "shared_objects": shared.shared_objects,
            "shared_bytes": shared.shared_bytes,
            "sharers": [one.name for one in shared.sharers],
        },
        "sessions_deleted": None if report is None else report.sessions_deleted,
        "remaining": came,
        "records_remaining": came_records,
        "missing_systems": missing_documents(plan.missing_systems),
        "still_to_run": ["casstore gc --grace 0", "casstore compact"],
    }

    def render(to: Printer) -> None:
        for one in plan.sessions:
            to.line("would erase " if dry_run else "erased ", name(one.session),
                    dim(f"  {count(one.revisions, 'revision')}"))  # fmt: skip
        if report is not None and records:
            to.line(f"erased {count(report.records_erased, 'record')}")
        elif records:
            to.line(f"would erase {count(records, 'record')}, but for what stays")
        for staying in stays:
            to.line(bad("stays "), name(staying.record), dim(f"  {staying.reason}"))
        if plan.to_tell:
            to.line("to be told: ", ", ".join(plan.to_tell))
        if not no_survey:
            to.line(
                f"{size(shared.bytes)} in {count(shared.objects, 'object')}; of it others reach "
                f"{size(shared.shared_bytes)}, which stays"
            )
            for sharer in shared.sharers[:10]:
                to.line(dim(f"  {sharer.name}: {size(sharer.bytes)}"))
        for each in (*came, *came_records):
            to.line(bad("remains "), name(each), dim("  it came meanwhile: erase again"))
        write_missing(to, plan.missing_systems)
        if report is not None:
            to.line(good("done"), "; the bytes are gone after ",
                    bold("casstore gc --grace 0; casstore compact"))  # fmt: skip

    app.answer(document, render)
