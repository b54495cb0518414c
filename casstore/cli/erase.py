"""``erase``: every session and record about a subject."""

from __future__ import annotations

from typing import BinaryIO, Final

import click

from casstore.cli.command import App, command, require_yes
from casstore.cli.fields import Field, Fields, described, document, nested
from casstore.cli.naming import NameNotFoundError
from casstore.cli.options import (
    YES,
    dry_run_option,
    keys_option,
    open_keys,
    read_secret,
    secret_option,
)
from casstore.cli.output import Printer, bad, bold, dim, good, name
from casstore.cli.quantities import count, size
from casstore.cli.retention import MISSING, write_missing
from casstore.cli.text import safe
from casstore.maintenance import erasure
from casstore.maintenance.erasure import ErasedSession, ErasurePlan, Staying
from casstore.maintenance.sharing import Sharing
from casstore.records.lifecycles.erasure import LifecycleErasure, records_of


def _unknown_subject(subject: str) -> NameNotFoundError:
    """The error for a subject without sessions or records. A store has no list of subjects."""
    return NameNotFoundError(
        subject,
        "write it as it was given to sessions and records, with --secret if they had one",
        f"no session and no record is about {subject!r}",
    )


_FIELDS: Final[Fields] = described(
    ErasurePlan,
    {
        "subject": Field(),
        "dry_run": "true: a plan, nothing was changed",
        "sessions": Field(
            fields=described(
                ErasedSession,
                {
                    "id": Field(of="session"),
                    "revisions": Field(),
                    "labels": Field(),
                    "batches": Field(),
                    "attachments": Field(),
                    "elsewhere": Field(),
                    "also_about": Field(),
                },
            ),
        ),
        "pins": Field(
            "tags and pins on their checkpoints, which are removed too",
            of=lambda plan: [pin for pin, _ in plan.pins],
        ),
        "records": "records about the subject, or derived from such records",
        "records_erased": "records erased, null for a plan",
        "stays": Field(
            fields=described(
                Staying,
                {
                    "provider": Field(),
                    "record": Field(),
                    "reason": Field(),
                },
            ),
        ),
        "recipients": Field(),
        "shared": nested(
            "what others reach as well, so that it stays; null with --no-survey",
            described(
                Sharing,
                {
                    "objects": Field(),
                    "size_bytes": Field(of="bytes"),
                    "shared_objects": Field(),
                    "shared_bytes": Field(),
                    "sharers": Field(of=lambda sharing: [one.name for one in sharing.sharers]),
                },
            ),
        ),
        "sessions_deleted": "sessions deleted, null for a plan",
        "remaining": "sessions about the subject that were not in the plan: run it again",
        "records_remaining": "records about the subject that were not in the plan",
        "missing_systems": MISSING,
        "still_to_run": "commands to run next, which remove the bytes from the disk",
    },
)


@command(
    _FIELDS,
    "casstore erase user-42 --dry-run",
    "casstore erase user-42 --yes && casstore gc --grace 0 && casstore compact",
)
@click.argument("subject")
@dry_run_option("erased")
@click.option(
    "--no-survey", is_flag=True, help="Faster: do not measure which objects others share."
)
@keys_option(
    "The directory with the keys of encrypted user data; the subject's key is destroyed.",
    exists=True,
)
@secret_option(
    "The file whose bytes are the secret that subjects are hashed with, if there is one."
)
@YES
def erase(
    app: App,
    subject: str,
    dry_run: bool,
    no_survey: bool,
    key_directory: str | None,
    secret_file: BinaryIO | None,
    yes: bool,
) -> None:
    """Erase every session and record about SUBJECT.

    The tags and pins that keep them are removed as well. A session is about the subjects named
    when it was created. Protections and leases do not prevent it. Records are user data,
    checkpoints of agents and data derived from them, scoped state of the actor of that name,
    and what other record systems find. Records that are sealed, or held until a time, stay and
    are reported, and so are record systems that are not installed. Objects that others share
    stay and are reported. The bytes are gone after gc without grace period and compact.
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
            raise _unknown_subject(subject)
        report: erasure.ErasureReport | None = None
        if not dry_run:
            asked = f"{count(len(plan.sessions), 'session')} and {count(records, 'record')}"
            # Ask between two progress bars: a moving bar would overwrite the question.
            require_yes(yes=yes, question=f"Erase {asked} about {safe(subject)} for good?")
            with app.meter() as meter:
                report = erasure.execute(store, plan, providers=providers, progress=meter)
    stays = plan.stays if report is None else report.stays
    remaining = () if report is None else report.remaining
    unplanned = [] if report is None else [": ".join(one) for one in report.records_remaining]
    shared = plan.sharing
    answer = document(
        _FIELDS,
        plan,
        {
            "subject": subject,
            "dry_run": dry_run,
            "records": records,
            "records_erased": None if report is None else report.records_erased,
            "stays": stays,
            "shared": None if no_survey else shared,
            "sessions_deleted": None if report is None else report.sessions_deleted,
            "remaining": remaining,
            "records_remaining": unplanned,
            "still_to_run": ["casstore gc --grace 0", "casstore compact"],
        },
    )

    def render(to: Printer) -> None:
        for one in plan.sessions:
            to.line("would erase " if dry_run else "erased ", name(one.session),
                    dim(f"  {count(one.revisions, 'revision')}"))  # fmt: skip
        if report is not None and records:
            to.line(f"erased {count(report.records_erased, 'record')}")
        elif records:
            to.line(f"would erase {count(records, 'record')}, except those that stay")
        for staying in stays:
            to.line(bad("stays "), name(staying.record), dim(f"  {staying.reason}"))
        if plan.recipients:
            to.line("to be informed: ", ", ".join(plan.recipients))
        if not no_survey:
            to.line(
                f"{size(shared.bytes)} in {count(shared.objects, 'object')}; of it others reach "
                f"{size(shared.shared_bytes)}, which stays"
            )
            for sharer in shared.sharers[:10]:
                to.line(dim(f"  {sharer.name}: {size(sharer.bytes)}"))
        for each in (*remaining, *unplanned):
            to.line(bad("remains "), name(each), dim("  added during the run: erase again"))
        write_missing(to, plan.missing_systems)
        if report is not None:
            to.line(good("done"), "; the bytes are gone after ",
                    bold("casstore gc --grace 0; casstore compact"))  # fmt: skip

    app.answer(answer, render)
