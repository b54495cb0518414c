"""``attachments``: what was announced for a session and never committed."""

from __future__ import annotations

import click

from casstore.cli.command import App, command
from casstore.cli.output import Cells, Column, Printer, dim, name
from casstore.cli.quantities import DURATION, clock, moment
from casstore.cli.shapes import Part, Shape
from casstore.cli.spelling import clip_name
from casstore.maintenance.uncommitted import list_uncommitted


@command(
    "Sessions",
    Shape(
        "attachments",
        {
            "attachments": Part(
                "attachments that were not committed, by session and id",
                {
                    "session": "the session, null: its id is too long and it never began",
                    "id": "the attachment",
                    "state": "intent, or condemned: no commit may refer to it any more",
                    "announced_at": "when it was announced last",
                    "uri": "where the bytes are, null: not elsewhere",
                    "digest": "the blob of this store, null: none",
                    "owner": "who announced it, null: not given",
                },
            )
        },
    ),
    "casstore attachments --older 7d",
    "casstore prune --attachments 7d --yes",
)
@click.option(
    "--older", "older_ms", type=DURATION, default="0",
    help="Only those announced at least this long ago.",
)  # fmt: skip
def attachments(app: App, older_ms: int) -> None:
    """List the attachments of all sessions that were announced and never committed.

    Sessions that never began are included. Prune with --attachments gives them up: it removes
    those whose bytes are in the store, and condemns those whose bytes are elsewhere; condemned
    ones stay listed until their host has deleted the bytes and says so.
    """
    with app.open() as store:
        before_ms = max(0, store.engine.now_ms() - older_ms)
        found = list(list_uncommitted(store, older_than_ms=before_ms))

    def render(to: Printer) -> None:
        if not found:
            app.remark("none")
            return
        columns = [
            Column("session"), Column("attachment"), Column("state"), Column("announced"),
            Column("bytes", gives=True),
        ]  # fmt: skip
        rows: list[Cells] = [
            [
                dim("?") if one.session is None else name(clip_name(one.session)),
                clip_name(one.attachment),
                one.state,
                clock(one.intent_at_ms),
                one.uri or ("" if one.digest is None else one.digest.hex()[:16]),
            ]
            for one in found
        ]
        to.table(columns, rows)

    document = [
        {
            "session": one.session,
            "id": one.attachment,
            "state": one.state,
            "announced_at": moment(one.intent_at_ms),
            "uri": one.uri,
            "digest": None if one.digest is None else one.digest.hex(),
            "owner": one.owner,
        }
        for one in found
    ]
    app.answer({"attachments": document}, render)
