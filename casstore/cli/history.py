"""The revisions of a session, and labels on them."""

from __future__ import annotations

from typing import Any, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.completing import complete_name
from casstore.cli.output import Column, Printer, dim, good, name
from casstore.cli.quantities import clock, moment
from casstore.cli.shapes import Part, Shape
from casstore.cli.spelling import clip_name, short
from casstore.errors import InvalidInputError, RevisionNotFoundError
from casstore.session.data import Entry

_SECTION: Final = "Sessions"

ENTRY_FIELDS: Final = {
    "revision": "its number",
    "manifest": "the digest of its checkpoint",
    "operation": "commit, rewind or fork",
    "committed_at": "when",
    "turn": "the turn that made it, null if it had none",
    "labels": "its labels",
    "rewound_to": "the revision a rewind went back to, else null",
}


def entry_document(entry: Entry) -> dict[str, Any]:
    """A revision as JSON."""
    return {
        "revision": entry.revision,
        "manifest": entry.manifest.hex(),
        "operation": entry.operation,
        "committed_at": moment(entry.committed_at_ms),
        "turn": entry.turn,
        "labels": list(entry.labels),
        "rewound_to": entry.rewound_to,
    }


@command(
    _SECTION,
    Shape(
        "history",
        {
            "session": "the session",
            "revisions": Part("newest first", ENTRY_FIELDS),
            "more": "are there earlier ones?",
        },
    ),
    "casstore history agent --limit 10",
)
@click.argument("session", shell_complete=complete_name)
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=50, show_default=True,
    help="At most so many; 0: all.",
)  # fmt: skip
@click.option("--before", type=click.IntRange(1), help="Only revisions below this one.")
@click.option("--labelled", is_flag=True, help="Only revisions that have a label.")
def history(app: App, session: str, limit: int, before: int | None, labelled: bool) -> None:
    """List the revisions of a session, newest first."""
    found: list[Entry] = []
    more = False
    with app.open() as store:
        found_id = naming.resolve_session(store, session)
        for entry in store.session(found_id).history(before=before):
            if labelled and not entry.labels:
                continue
            if limit and len(found) == limit:
                more = True
                break
            found.append(entry)

    def render(to: Printer) -> None:
        columns = [
            Column("revision", right=True), Column("committed"), Column("what"),
            Column("checkpoint"), Column("turn", gives=True), Column("labels", gives=True),
        ]  # fmt: skip
        to.table(columns, [_row(entry) for entry in found])
        if more:
            app.remark(f"there are more: --before {found[-1].revision}, or --limit 0")

    document = {
        "session": found_id,
        "revisions": [entry_document(entry) for entry in found],
        "more": more,
    }
    app.answer(document, render)


def _row(entry: Entry) -> list[Any]:
    what = entry.operation
    if entry.rewound_to is not None:
        what += f" to {entry.rewound_to}"
    return [
        name(f"{entry.revision}"),
        clock(entry.committed_at_ms),
        what,
        dim(short(entry.manifest)),
        clip_name(entry.turn or ""),
        good(", ".join([clip_name(label) for label in entry.labels])),
    ]


@command(
    _SECTION,
    Shape(
        "label",
        {
            "session": "the session",
            "labels": Part(
                "all labels of the session, or the one that was set or removed",
                {
                    "label": "its name",
                    "revision": "the one it names, or named; null if that is gone",
                },
            ),
            "changed": "set, removed or null: only listed",
        },
    ),
    "casstore label agent@41 before-refactoring",
    "casstore label agent --delete before-refactoring",
    "casstore label agent",
)
@click.argument("place", shell_complete=complete_name)
@click.argument("label_", metavar="[LABEL]", required=False)
@click.option("--delete", "-d", metavar="LABEL", help="Take this label away.")
def label(app: App, place: str, label_: str | None, delete: str | None) -> None:
    """Give a revision a name, take one away, or list those of a session.

    PLACE is a session (its head) or SESSION@REVISION. A label names one revision of its
    session: given again, it moves. SESSION@LABEL is then a name for that revision.
    """
    if label_ is not None and delete is not None:
        raise click.UsageError("either set a label or delete one")
    writes = label_ is not None or delete is not None
    changed: str | None = None
    with app.open(write=writes) as store:
        target = naming.resolve(store, place, abbreviated=not writes)
        if target.session is None or target.node is not None:
            raise InvalidInputError(
                f"{place!r} is {naming.described(store, target)}; only revisions have labels"
            )
        if target.revision is None:
            raise naming.NothingCommittedError(target.session)
        session = store.session(target.session)
        if label_ is not None:
            entry = session.label(label_, target.revision)
            labels: list[dict[str, Any]] = [{"label": label_, "revision": entry.revision}]
            changed = "set"
        elif delete is not None:
            named: int | None = None
            try:
                named = session.entry(delete).revision
            except RevisionNotFoundError:
                # One whose revision is gone can be taken away like others: check says to do so.
                if not session.unlabel(delete):
                    raise
            else:
                session.unlabel(delete)
            labels = [{"label": delete, "revision": named}]
            changed = "removed"
        else:
            labels = [
                {"label": one, "revision": entry.revision}
                for entry in session.history()
                for one in entry.labels
            ]

    def render(to: Printer) -> None:
        for one in labels:
            said = {"set": "labelled ", "removed": "no longer "}.get(changed or "", "")
            at = "?" if one["revision"] is None else one["revision"]
            to.line(said, name(f"{target.session}@{at}"), "  ", good(str(one["label"])))

    app.answer({"session": target.session, "labels": labels, "changed": changed}, render)
