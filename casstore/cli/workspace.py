"""``workspace`` commits and restores files with a session; ``bisect`` searches its revisions."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, Kinds, command
from casstore.cli.fields import Field, Fields, document, nested
from casstore.cli.naming import complete_name
from casstore.cli.options import limit_option, options
from casstore.cli.output import Part, Printer, bad, bold, diff_line, dim, good, name, other
from casstore.cli.quantities import Whole, clock, count, size
from casstore.cli.text import safe
from casstore.errors import InvalidInputError, SnapshotNotFoundError
from casstore.format.digest import plain_hash
from casstore.session.data import Entry
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import (
    FileChange,
    RestorePlan,
    RestoreReport,
    Workspace,
    diff_snapshots,
    diff_text,
    find_snapshot,
    snapshots,
)
from casstore.workspace import restore as restore_files
from casstore.workspace.beneath import printable
from casstore.workspace.workspace import MAX_FILE_BYTES

_CACHE_VARIABLE: Final = "XDG_CACHE_HOME"
# As for git bisect run: the exit code of a test that cannot tell good from bad, and those with
# which a shell reports that it could not run the test.
_CANNOT_TELL: Final = 125
_CANNOT_RUN: Final = (126, 127)


@click.group(
    cls=Kinds,
    name="workspace",
    options_metavar="",
    subcommand_metavar="COMMAND [OPTIONS]",
    epilog="casstore workspace COMMAND --help has the options of a command.",
)
def workspace() -> None:
    """Commit, compare and restore the files of a directory.

    COMMAND is snapshot, status, diff, restore or log. Symbolic links are stored as links and never
    followed. Repositories, virtual environments, caches and the store itself are ignored. What was
    read is remembered in $XDG_CACHE_HOME/casstore (~/.cache/casstore), so that files that did not
    change are not read again.
    """


# The options that say which files of a directory count; ``_workspace`` takes them.
_files_options: Final = options(
    click.option(
        "--ignore", "-i", multiple=True, metavar="PATTERN",
        help="Leave out what matches, as .gitignore writes it; may be given again.",
    ),
    click.option(
        "--no-defaults", is_flag=True,
        help="Ignore only what --ignore names, not repositories, caches and the like.",
    ),
    click.option(
        "--gitignore", is_flag=True,
        help="Leave out what the .gitignore files in the directory name.",
    ),
    click.option(
        "--max-file", "max_file_bytes", type=Whole(0), default=MAX_FILE_BYTES,
        show_default=True, help="Leave out larger files, in bytes.",
    ),
    click.option("--skip-unreadable", is_flag=True, help="Leave out what cannot be read."),
)  # fmt: skip
_SHOW_TEXT: Final = click.option(
    "--text", "-t", "as_text", is_flag=True, help="Show what changed in text files."
)


def _workspace(app: App, directory: str, **options: Any) -> Workspace:
    options["defaults"] = not options.pop("no_defaults", False)
    place = os.path.abspath(directory)
    known = plain_hash(os.fsencode(f"{os.path.abspath(app.path)}\0{place}")).hex()[:32]
    base = os.environ.get(_CACHE_VARIABLE) or os.path.expanduser("~/.cache")
    cache: str | None = os.path.join(base, "casstore", "workspaces", known)
    try:
        os.makedirs(os.path.dirname(str(cache)), mode=0o700, exist_ok=True)
    except OSError:
        # Without a writable home directory there is no cache; it is only slower.
        cache = None
    return Workspace(directory, cache=cache, **options)


def _at(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def _place(store: Store, text: str) -> tuple[Session, int | None]:
    """A session, and the revision if the name has one."""
    target = naming.resolve_place(store, text)
    if target.session is None or target.kind not in (naming.SESSION, naming.REVISION):
        raise InvalidInputError(
            f"{text!r} is {naming.described(store, target)}; name a session, or SESSION@REVISION"
        )
    return store.session(target.session), target.revision


def _paths(help: str, key: str) -> Field:
    """A list of paths in a report, as they are printed."""
    return Field(help, of=lambda report: [printable(path) for path in getattr(report, key)])


_CHANGES: Final = nested(
    "in order of path",
    {
        "kind": "added, removed, changed, mode or renamed",
        "path": Field("relative to the directory", of=lambda one: printable(one.path)),
        "old_path": Field(
            "what a renamed file was called before, else null",
            of=lambda one: one.old_path and printable(one.old_path),
        ),
    },
)
_MARKS: Final = {"added": "+", "removed": "-", "changed": "M", "mode": "m", "renamed": "R"}


def _mark(change: FileChange) -> list[Part]:
    styles = {"added": good, "removed": bad}
    style = styles.get(change.kind, other)
    came = f" (from {printable(change.old_path)})" if change.old_path is not None else ""
    return [style(f"{_MARKS[change.kind]}  "), printable(change.path), dim(came)]


def _answer_changes(
    app: App, changes: Sequence[FileChange], texts: Sequence[Sequence[str]], **more: Any
) -> None:
    """Answer with changes; ``texts`` are the lines to show of each."""

    def render(to: Printer) -> None:
        if not changes:
            app.remark("nothing changed")
        for change, lines in zip(changes, texts, strict=True):
            to.line(*_mark(change))
            for line in lines:
                to.line(diff_line(line))

    app.answer({"changes": changes, **more}, render)


# --- snapshot ---------------------------------------------------------------------------------


@command(
    {
        "session": "the session",
        "revision": "the revision that has the files",
        "digest": "the digest of the snapshot",
        "files": "regular files in it",
        "bytes": Field("bytes in them", of="size_bytes"),
        "files_read": "files whose content was read; the others had not changed",
        "bytes_read": "bytes that were read",
        "ignored": "files and directories that the rules leave out",
        "left_out": nested(
            "other paths that are not in the snapshot",
            {
                "path": Field("the path", of=lambda item: printable(item[0])),
                "reason": Field("why", of=lambda item: item[1]),
            },
            of=lambda found: [*found.left_out.items()],
        ),
        "unstable": _paths("files that changed each time they were read", "unstable"),
    },
    "casstore workspace snapshot project --session coder --label tested",
    "casstore workspace snapshot transcripts --session archive --no-defaults",
    schema="workspace-snapshot",
)
@click.argument("directory", type=click.Path(file_okay=False))
@click.option(
    "--session", "-S", "session_id", required=True, shell_complete=complete_name,
    help="The session to commit to; it need not exist.",
)  # fmt: skip
@click.option("--label", "-l", help="A name for the revision.")
@_files_options
def snapshot(
    app: App, /, directory: str, session_id: str, label: str | None, **options: Any
) -> None:
    """Commit the files of a directory as a new revision of a session.

    DIRECTORY is stored with names, kinds, modes, targets of links and contents. The conversation
    and the other components of the session stay as they are.
    """
    ws = _workspace(app, directory, **options)
    with app.open(write=True) as store, app.meter() as meter:
        result = ws.commit(store.session(session_id), label=label, progress=meter)
    found = ws.last
    assert found is not None

    def render(to: Printer) -> None:
        to.line(
            good("committed  "), name(safe(session_id)), f"@{result.revision}: ",
            f"{count(found.files, 'file')}, {size(found.size_bytes)}; ",
            f"{count(found.files_read, 'file')} read, {size(found.bytes_read)}",
        )  # fmt: skip
        for path, reason in found.left_out.items():
            to.line(bad("left out   "), printable(path), dim(f" ({reason})"))
        for path in found.unstable:
            to.line(bad("unstable   "), printable(path), dim(" (changed while it was read)"))

    app.answer(found, render, session=session_id, revision=result.revision)


# --- status and diff --------------------------------------------------------------------------


@command(
    {"session": "the session", "changes": _CHANGES},
    "casstore workspace status project --session coder",
    "casstore workspace status project --session coder@1 --text",
    schema="workspace-status",
)
@click.argument("directory", type=click.Path(file_okay=False))
@click.option(
    "--session", "-S", "place", required=True, shell_complete=complete_name,
    help="The session, or SESSION@REVISION, to compare with.",
)  # fmt: skip
@_SHOW_TEXT
@_files_options
def status(app: App, /, directory: str, place: str, as_text: bool, **options: Any) -> None:
    """Show what changed in a directory since a revision of a session.

    DIRECTORY is compared with the files of the revision, the newest unless one is named. Nothing
    is stored.
    """
    ws = _workspace(app, directory, **options)
    with app.open() as store:
        session, at = _place(store, place)
        changes = ws.status(session, at)
        texts = [ws.status_text(session, one) if as_text else [] for one in changes]
    _answer_changes(app, changes, texts, session=session.id)


@command(
    {
        "old": "the revision compared with, null: no files",
        "new": "the revision compared",
        "changes": _CHANGES,
    },
    "casstore workspace diff coder@1 coder",
    "casstore workspace diff coder@1 coder@2 --text",
    schema="workspace-diff",
)
@click.argument("old", shell_complete=complete_name)
@click.argument("new", shell_complete=complete_name)
@_SHOW_TEXT
def diff(app: App, old: str, new: str, as_text: bool) -> None:
    """Show what changed in the files between two revisions.

    OLD and NEW are sessions or SESSION@REVISION, of the same session or of two.
    """
    with app.open() as store:
        digests = []
        shown = []
        for text in (old, new):
            session, at = _place(store, text)
            found = find_snapshot(session, at)
            if found is None:
                raise SnapshotNotFoundError(session.id, at, "workspace")
            digests.append(found.digest)
            shown.append(f"{session.id}@{session.entry(at).revision}")
        changes = diff_snapshots(store, *digests)
        texts = [diff_text(store, one) if as_text else [] for one in changes]
    _answer_changes(app, changes, texts, old=shown[0], new=shown[1])


# --- restore ----------------------------------------------------------------------------------


@command(
    {
        "dry_run": "true: nothing was changed",
        "snapshot": Field("the digest of the snapshot", of="target"),
        "created": "how many paths are, or in a dry run would be, created",
        "changed": "how many are changed",
        "deleted": "how many are deleted",
        "plan": nested(
            "what a dry run found, null without --dry-run",
            {
                "created": _paths("paths that are missing", "created"),
                "changed": _paths("paths that differ", "changed"),
                "deleted": _paths("paths that the snapshot does not have", "deleted"),
                "untracked": _paths("paths in no snapshot, which would stay", "untracked"),
            },
        ),
        "conflicts": nested(
            "paths with changes that would be lost",
            {"path": Field("the path", of=lambda one: printable(one.path)), "reason": "why"},
        ),
        "bytes_written": "bytes written, null in a dry run",
        "saved": "the snapshot of the state before a forced restore, null: none was needed",
        "saved_pin": "the pin that keeps it",
    },
    "casstore workspace restore coder@1 project --dry-run",
    "casstore workspace restore coder@1 project",
    schema="workspace-restore",
)
@click.argument("name", metavar="NAME", shell_complete=complete_name)
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--dry-run", "-n", is_flag=True, help="Show the plan and change nothing.")
@click.option(
    "--force", "-f", is_flag=True,
    help="Overwrite what was changed since, and delete what no snapshot has, after saving both.",
)  # fmt: skip
@_files_options
def restore(
    app: App, /, name: str, directory: str, dry_run: bool, force: bool, **options: Any
) -> None:
    """Restore the files of a directory as they were at a revision of a session.

    NAME is a session, SESSION@REVISION, or the pin of a snapshot that a forced restore has saved.
    DIRECTORY gets its files; ignored files stay. A file that was changed since the last snapshot
    stops the restore before anything is changed, unless --force is given. If the command is
    killed, run it again.
    """
    ws = _workspace(app, directory, **options)
    with app.open(write=not dry_run) as store:
        target = naming.resolve_place(store, name)
        if target.session is None:
            digest = target.require_digest()
            if dry_run:
                raise click.UsageError("--dry-run needs a session, or SESSION@REVISION")
            report = ws.restore_snapshot(store, digest, force=force)
        else:
            session, at = _place(store, name)
            if dry_run:
                _answer_plan(app, ws.plan_restore(session, at))
                return
            report = ws.restore(session, at, force=force)
    app.answer(
        report, lambda to: _render_report(to, report), dry_run=False, plan=None, conflicts=[]
    )


def _answer_plan(app: App, plan: RestorePlan) -> None:
    counts = {key: len(getattr(plan, key)) for key in ("created", "changed", "deleted")}
    app.answer(
        plan, lambda to: _render_plan(to, plan), dry_run=True, **counts, plan=plan,
        bytes_written=None, saved=None, saved_pin=None,
    )  # fmt: skip


def _render_plan(to: Printer, plan: RestorePlan) -> None:
    for path in plan.created:
        to.line(good("create    "), printable(path))
    for path in plan.changed:
        to.line(other("change    "), printable(path))
    for path in plan.deleted:
        to.line(bad("delete    "), printable(path))
    for path in plan.untracked:
        to.line(dim("keep      "), printable(path), dim(" (in no snapshot)"))
    for one in plan.conflicts:
        to.line(bad("conflict  "), printable(one.path), dim(f" ({one.reason})"))
    if plan.is_empty:
        to.line("nothing to restore: the directory has these files")


def _render_report(to: Printer, report: RestoreReport) -> None:
    to.line(
        good("restored  "),
        f"{count(report.created, 'path')} created, {count(report.changed, 'path')} changed, "
        f"{count(report.deleted, 'path')} deleted; {size(report.bytes_written)} written",
    )
    if report.saved_pin is not None:
        to.line(bold("saved     "), "the state before: casstore workspace restore ",
                name(safe(report.saved_pin)), " DIRECTORY")  # fmt: skip
    for path in report.kept:
        to.line(dim("kept      "), printable(path), dim(" (holds ignored files)"))


# --- log --------------------------------------------------------------------------------------


_LOGGED: Final[Fields] = {
    "revision": Field("its number", "revision", "revision", of="entry.revision"),
    "committed_at": Field("when", "committed", of="entry.committed_at"),
    "turn": Field("the turn that made it, null if it had none", "turn", of="entry.turn"),
    "labels": Field("its labels", "labels", of="entry.labels", gives=True),
    "digest": Field("the digest of the snapshot", of="snapshot.digest"),
    "files": Field("regular files", "files", "file", of="snapshot.files"),
    "bytes": Field("bytes in them", "size", of="snapshot.size_bytes"),
}


@command(
    {
        "session": "the session",
        "snapshots": nested(
            "revisions whose files differ from the revision before, newest first", _LOGGED
        ),
    },
    "casstore workspace log coder",
    schema="workspace-log",
)
@click.argument("session", shell_complete=complete_name)
@limit_option(50)
def log_(app: App, session: str, limit: int) -> None:
    """List the revisions in which the files of a session changed, newest first.

    SESSION is the id of a session, or its beginning.
    """
    with app.open() as store:
        found_id = naming.resolve_session(store, session)
        logged = islice(snapshots(store.session(found_id)), limit or None)
        found = [document(_LOGGED, one) for one in logged]
    app.answer(
        {"session": found_id, "snapshots": found},
        lambda to: app.rows(to, _LOGGED, found, "no files"),
    )


for _one in (snapshot, status, diff, restore, log_):
    workspace.add_command(_one)


# --- bisect -----------------------------------------------------------------------------------


@command(
    {
        "session": "the session",
        "revision": "the first bad revision",
        "turn": "the turn that made it, null if it had none",
        "committed_at": "when",
        "nodes": "the nodes that it added",
        "changes": _CHANGES,
        "runs": nested(
            "each run of the command, in order",
            {"revision": "the revision", "exit_code": "how the command ended"},
        ),
    },
    "casstore bisect coder --good 1 --bad 3 -- grep -q pass a.py",
)
@click.argument("session", shell_complete=complete_name)
@click.option("--good", required=True, help="A revision or label at which the command succeeds.")
@click.option("--bad", "bad_", required=True, help="A later one at which it fails.")
@click.argument("command_", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def bisect(app: App, session: str, good: str, bad_: str, command_: tuple[str, ...]) -> None:
    """Find the first revision of a session whose files make a command fail.

    The files of each candidate of SESSION are restored into a directory of their own, and COMMAND
    runs there. Exit code 0 is good, every other is bad; 125, 126, 127 and a signal stop the
    search. Revisions with equal files are tried once. With n revisions from the good one to the
    bad one, the command runs at most ⌈log₂ n⌉ times. What it prints goes to stderr.
    """
    with app.open() as store:
        found = store.session(naming.resolve_session(store, session))
        candidates = _candidates(found, found.entry(_at(good)), found.entry(_at(bad_)))
        runs: list[dict[str, int]] = []
        low, high = 0, len(candidates) - 1
        while high - low > 1:
            middle = (low + high) // 2
            revision = candidates[middle].revision
            code = _run_at(app, found, revision, command_)
            runs.append({"revision": revision, "exit_code": code})
            low, high = (low, middle) if code else (middle, high)
        first = candidates[high]
        before = find_snapshot(found, candidates[low].revision)
        after = find_snapshot(found, first.revision)
        changes = diff_snapshots(
            store,
            None if before is None else before.digest,
            None if after is None else after.digest,
        )
        added = store.compare((found.id, first.revision - 1), (found.id, first.revision)).added
        nodes = [node.id for node in added]

    def render(to: Printer) -> None:
        to.line(bold("first bad  "), name(safe(found.id)), f"@{first.revision}",
                dim(f"  turn {first.turn}" if first.turn else ""),
                dim(f"  {clock(first.committed_at_ms)}"))  # fmt: skip
        if nodes:
            to.line(dim("nodes      "), ", ".join(nodes))
        for change in changes:
            to.line(*_mark(change))

    app.answer(
        {
            "session": found.id,
            "revision": first.revision,
            "turn": first.turn,
            "committed_at": first.committed_at_ms,
            "nodes": nodes,
            "changes": changes,
            "runs": runs,
        },
        render,
    )


def _candidates(session: Session, first: Entry, last: Entry) -> list[Entry]:
    """The good revision, then each up to the bad one whose files differ from the one before."""
    if first.revision >= last.revision:
        raise click.UsageError(
            f"--good is revision {first.revision}, which must be before --bad, {last.revision}"
        )
    entries = [
        entry
        for entry in session.history(before=last.revision + 1)
        if entry.revision >= first.revision
    ]
    entries.reverse()
    found: list[Entry] = []
    digest: bytes | None = None
    for entry in entries:
        snapshot = find_snapshot(session, entry.revision)
        if snapshot is None:
            continue
        if not found or snapshot.digest != digest:
            found.append(entry)
        digest = snapshot.digest
    if len(found) < 2:
        raise InvalidInputError(
            f"the files of session {session.id!r} do not differ between revisions "
            f"{first.revision} and {last.revision}"
        )
    return found


def _run_at(app: App, session: Session, revision: int, words: Sequence[str]) -> int:
    """Run a command on the files of a revision; return its exit code."""
    with tempfile.TemporaryDirectory(
        prefix="casstore-bisect-", ignore_cleanup_errors=True
    ) as scratch:
        place = os.path.join(scratch, "files")
        restore_files(session, at=revision, into=place)
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        try:
            # stdout=2: the command writes to stderr, since stdout has only the answer.
            code = subprocess.run(words, cwd=place, stdout=2, check=False).returncode
        except OSError as exc:
            raise InvalidInputError(f"cannot run {words[0]!r}: {exc.strerror}") from exc
    if code < 0 or code == _CANNOT_TELL or code in _CANNOT_RUN:
        raise InvalidInputError(
            f"the command ended with {code} at revision {revision}, which is neither good nor bad"
        )
    app.remark(f"revision {revision}: {'good' if code == 0 else f'bad ({code})'}")
    return code
