"""Copies of stores and sessions: ``backup``, ``copy``, ``export`` and ``verify``."""

from __future__ import annotations

from typing import Any, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.fields import Field, Fields, described
from casstore.cli.naming import complete_name
from casstore.cli.output import name
from casstore.cli.quantities import count
from casstore.engine.files import leftovers
from casstore.maintenance import backup as backing_up
from casstore.maintenance import copy as copying
from casstore.maintenance import export as exporting
from casstore.maintenance import verify as verification
from casstore.maintenance.backup import BackupReport
from casstore.maintenance.copy import CopyReport
from casstore.maintenance.export import ExportReport
from casstore.maintenance.verify import VerifyReport
from casstore.store import open as open_store
from casstore.store import shown_place


@command(
    described(
        BackupReport,
        {
            "target": Field("the backup", "backup"),
            "updated": Field(label="updated"),
            "objects": Field(label="copied", unit="object"),
            "size_bytes": Field(label="size"),
        },
    ),
    "casstore backup /backups/agents",
    "casstore backup /backups/agents --update",
)
@click.argument("target")
@click.option("--update", is_flag=True, help="Update an earlier backup: copy what it lacks.")
@click.option("--replace", is_flag=True, help="Replace an old backup.")
@click.option("--compact", "compacted", is_flag=True, help="Leave out free pages.")
def backup(app: App, target: str, update: bool, replace: bool, compacted: bool) -> None:
    """Write everything in the store to the backup TARGET.

    Agents can go on working. The backup appears when it is complete, verified and on the disk;
    it opens like any store.
    """
    with app.open() as store, app.meter() as meter:
        report = backing_up.backup(
            store, target, update=update, replace=replace, compact=compacted, progress=meter
        )

    app.answer(report, target=target)
    _name_leftovers(app, target)


def _name_leftovers(app: App, target: str) -> None:
    """Report the parts that unfinished runs left next to the target."""
    for left in leftovers(target):
        app.remark(
            f"{left} is there as well: an interrupted run left it, or another run is writing it; "
            "remove it when no other run is active"
        )


@command(
    described(
        CopyReport,
        {
            "target": Field("the store copied into", "target"),
            "sessions": Field(label="copied", unit="session"),
            "new_objects": Field(label="new", unit="object"),
            "object_bytes": Field(label="uncompressed"),
            "rows": Field(label="written", unit="row"),
            "rows_removed": Field(label="removed", unit="row"),
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
@click.option("--create", is_flag=True, help="Create TARGET if it does not exist.")
def copy(
    app: App, stores: tuple[str, ...], sessions: tuple[str, ...], mirror: bool, create: bool
) -> None:
    """Copy everything that TARGET lacks from SOURCE.

    SOURCE is this store if it is not given. Each is a directory or a URL. Every object is
    verified. A session that diverged in TARGET stops the copy. If the copy is interrupted, TARGET
    is sound, and the next call continues. With --session, queued work and leases of the session
    are not copied.
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

    app.answer(report, target=shown_place(target))


_BUNDLE: Final[Fields] = described(
    ExportReport,
    {
        "session": Field(label="session"),
        "revisions": Field(label="revisions", unit="revision"),
        "objects": Field(label="objects", unit="object"),
        "object_bytes": Field(label="uncompressed"),
        "size_bytes": Field(label="size"),
        "thin": Field(label="thin"),
    },
)


@command(
    {
        "file": Field("the bundle, null: only a list for --have was written", "bundle"),
        **_BUNDLE,
        "objects": Field("objects in it; with --list-have, manifests listed", "objects", "object"),
    },
    "casstore export agent agent.bundle",
    "casstore export agent@41 moment.bundle",
    "casstore export agent rest.bundle --have known.txt",
)
@click.argument("place", shell_complete=complete_name)
@click.argument("file")
@click.option("--head-only", is_flag=True, help="Only the present revision, without history.")
@click.option(
    "--have",
    metavar="FILE",
    help="Leave out what FILE lists, made by --list-have.",
)
@click.option(
    "--list-have", is_flag=True, help="Write a list of what this store has of PLACE, for --have."
)
@click.option("--replace", is_flag=True, help="Overwrite an existing file.")
def export(
    app: App,
    place: str,
    file: str,
    head_only: bool,
    have: str | None,
    list_have: bool,
    replace: bool,
) -> None:
    """Write a session to a file, a bundle.

    PLACE is a session with all its history, or SESSION@REVISION, or a tag, for that one alone. The
    file appears when it is complete. casstore import bundle imports it, casstore verify verifies
    it. Policy, expiry, protections and subjects are left out; casstore copy copies them.
    """
    if list_have and (have or head_only or replace):
        raise click.UsageError("--list-have writes a list and takes no other option")
    with app.open() as store, app.meter() as meter:
        target = naming.resolve_revision(store, place, "only sessions can be exported")
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
            at=None if target.is_session else target.revision,
            history=not head_only,
            have=known,
            replace=replace,
            progress=meter,
        )

    app.answer(report, file=file)
    _name_leftovers(app, file)


@command(
    described(
        VerifyReport,
        {
            "file": Field("the bundle", "verified"),
            **_BUNDLE,
            "left_out": Field(label="left out", unit="object"),
            "unproven": Field(label="not verified", unit="part"),
        },
    ),
    "casstore verify agent.bundle",
)
@click.argument("file")
def verify(app: App, file: str) -> None:
    """Verify FILE, a bundle: every digest, link and row.

    It needs no store. A store is verified by check.
    """
    with app.meter() as meter:
        report = verification.verify_bundle(file, progress=meter)

    app.answer(report, file=file)
