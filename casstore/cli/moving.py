"""Stores and sessions on their way elsewhere: backup, copy, export, verify."""

from __future__ import annotations

from typing import Any, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.completing import complete_name
from casstore.cli.output import Printer, good, name
from casstore.cli.quantities import count, size
from casstore.cli.shapes import Shape
from casstore.engine.files import leftovers
from casstore.errors import InvalidInputError
from casstore.maintenance import backup as backing_up
from casstore.maintenance import copying, exporting, verification
from casstore.store import open as open_store
from casstore.store import shown_place

_SECTION: Final = "Moving"


@command(
    _SECTION,
    Shape(
        "backup",
        {
            "target": "the backup",
            "updated": "was an earlier backup brought up to date?",
            "objects": "objects copied",
            "size_bytes": "of the new file; of an update, of the objects, uncompressed",
        },
    ),
    "casstore backup /backups/agents",
    "casstore backup /backups/agents --update",
)
@click.argument("target")
@click.option("--update", is_flag=True, help="Bring an earlier backup up to date: copy the rest.")
@click.option("--replace", is_flag=True, help="Put the new backup in the place of an old one.")
@click.option("--compact", "compacted", is_flag=True, help="Leave free space out.")
def backup(app: App, target: str, update: bool, replace: bool, compacted: bool) -> None:
    """Make TARGET a store with everything that is in this one now.

    Runs beside agents at work. The backup appears when it is complete, verified and on the
    disk; it opens like any store.
    """
    with app.open() as store, app.meter() as meter:
        report = backing_up.backup(
            store, target, update=update, replace=replace, compact=compacted, progress=meter
        )

    def render(to: Printer) -> None:
        said = "updated " if report.updated else "made "
        to.line(
            good(said),
            name(target),
            f"  {count(report.objects, 'object')}, {size(report.size_bytes)}",
        )

    app.answer({"target": target, **report._asdict()}, render)
    _name_leftovers(app, target)


def _name_leftovers(app: App, target: str) -> None:
    """Report the parts that unfinished runs left next to the target."""
    for left in leftovers(target):
        app.remark(
            f"{left} is there as well: an interrupted run left it, or another one builds it; "
            "remove it once none is running"
        )


@command(
    _SECTION,
    Shape(
        "copy",
        {
            "target": "the store copied into",
            "sessions": "sessions that are new there, or have moved",
            "new_objects": "objects that it lacked",
            "object_bytes": "uncompressed",
            "rows": "rows written",
            "rows_removed": "rows removed: with --mirror, and of runs that have moved on",
        },
    ),
    "casstore copy other-store",
    "casstore copy laptop-store postgresql://db.example/agents --create",
    "casstore copy postgresql://db.example/agents here --session agent --create",
)
@click.argument("stores", metavar="[SOURCE] TARGET", nargs=-1, required=True)
@click.option(
    "--session", "sessions", metavar="ID", multiple=True,
    help="Copy this session alone; may be given again.",
)  # fmt: skip
@click.option("--mirror", is_flag=True, help="Remove from TARGET what SOURCE does not have.")
@click.option("--create", is_flag=True, help="Make TARGET if it is not there.")
def copy(
    app: App, stores: tuple[str, ...], sessions: tuple[str, ...], mirror: bool, create: bool
) -> None:
    """Copy everything of SOURCE that TARGET lacks into it.

    SOURCE is this store if it is not given. Each is a directory or a URL. Every object is proven
    on its way. A session that went another way in TARGET stops the copy. Stopped anywhere, it is
    sound and goes on when it is called again. With --session, work that waits for the session
    stays behind, and so do its leases.
    """
    if len(stores) > 2:
        raise click.UsageError("one TARGET, or a SOURCE and a TARGET")
    if mirror and sessions:
        raise click.UsageError("--mirror makes TARGET the same as SOURCE; it takes no --session")
    source, target = stores if len(stores) == 2 else (None, stores[0])
    with (
        app.open(path=source) as store,
        open_store(target, durability=app.durability, create=create) as into,
        app.meter() as meter,
    ):
        report = copying.copy(store, into, sessions=sessions or None, mirror=mirror, progress=meter)

    def render(to: Printer) -> None:
        to.line(
            good("copied "), f"{count(report.sessions, 'session')}, "
            f"{count(report.new_objects, 'new object')}, {size(report.object_bytes)} into ",
            name(shown_place(target)),
        )  # fmt: skip

    app.answer({"target": shown_place(target), **report._asdict()}, render)


@command(
    _SECTION,
    Shape(
        "export",
        {
            "file": "the bundle, null: only --have was written",
            "session": "the session in it",
            "revisions": "how many it has",
            "objects": "how many it has; of --have, manifests listed",
            "object_bytes": "uncompressed",
            "size_bytes": "of the file",
            "thin": "true: it leaves out what the reader has",
        },
    ),
    "casstore export agent agent.bundle",
    "casstore export agent@41 moment.bundle",
    "casstore export agent rest.bundle --have known.txt",
)
@click.argument("place", shell_complete=complete_name)
@click.argument("file")
@click.option("--head-only", is_flag=True, help="Without the history: the present state alone.")
@click.option(
    "--have", metavar="FILE", help="Leave out what the reader has, who made FILE so: --list-have."
)
@click.option(
    "--list-have", is_flag=True, help="Write a list of what this store has of PLACE, for --have."
)
@click.option("--replace", is_flag=True, help="Write over a file that is there.")
def export(
    app: App,
    place: str,
    file: str,
    head_only: bool,
    have: str | None,
    list_have: bool,
    replace: bool,
) -> None:
    """Write a session into one file, a bundle that proves itself.

    PLACE is a session with all its history, or SESSION@REVISION for that one alone. The file
    appears when it is complete. casstore import bundle brings it into a store, casstore verify
    proves it.
    Policy, expiry, protections and subjects stay behind; casstore copy takes them along.
    """
    if list_have and (have or head_only or replace):
        raise click.UsageError("--list-have writes a list and takes no other option")
    with app.open() as store, app.meter() as meter:
        target = naming.resolve(store, place)
        if target.session is None or target.node is not None:
            raise InvalidInputError(
                f"{place!r} is {naming.described(store, target)}; only sessions can be exported"
            )
        if target.revision is None:
            raise naming.NothingCommittedError(target.session)
        if list_have:
            listed = exporting.write_have(store, file, target.session)
            document: dict[str, Any] = {
                "file": None, "session": target.session, "revisions": 0, "objects": listed,
                "object_bytes": 0, "size_bytes": 0, "thin": False,
            }  # fmt: skip
            app.answer(document, lambda to: to.line(f"{count(listed, 'digest')} in ", name(file)))
            return
        known = None if have is None else exporting.read_have(have)
        report = exporting.export_session(
            store,
            target.session,
            file,
            at=target.revision if target.kind == naming.REVISION else None,
            history=not head_only,
            have=known,
            replace=replace,
            progress=meter,
        )

    def render(to: Printer) -> None:
        to.line(
            good("wrote "), name(file), f"  {count(report.revisions, 'revision')} of ",
            name(report.session), f", {count(report.objects, 'object')}, {size(report.size_bytes)}",
        )  # fmt: skip

    app.answer({"file": file, **report._asdict()}, render)
    _name_leftovers(app, file)


@command(
    _SECTION,
    Shape(
        "verify",
        {
            "file": "the bundle",
            "session": "the session in it",
            "revisions": "how many it has",
            "objects": "how many it has, each proven",
            "object_bytes": "uncompressed",
            "size_bytes": "of the file",
            "thin": "does it leave out what another store has?",
            "left_out": "objects that a thin one leaves out",
            "unproven": "parts that only the store that has the rest can prove",
        },
    ),
    "casstore verify agent.bundle",
)
@click.argument("file")
def verify(app: App, file: str) -> None:
    """Prove FILE, a bundle, without any store: every digest, every link, every row.

    A store is proven by check.
    """
    with app.meter() as meter:
        report = verification.verify_bundle(file, progress=meter)

    def render(to: Printer) -> None:
        to.line(
            good("proven "), name(file), f"  {count(report.revisions, 'revision')} of ",
            name(report.session), f", {count(report.objects, 'object')}",
        )  # fmt: skip
        if report.thin:
            to.line(
                f"thin: leaves out {count(report.left_out, 'object')} that the reader must have"
            )

    app.answer({"file": file, **report._asdict()}, render)
