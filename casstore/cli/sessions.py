"""Sessions as a whole: which there are, a new one from another, back to an earlier revision."""

from __future__ import annotations

import heapq
from typing import Any, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command, require_yes
from casstore.cli.completing import complete_name
from casstore.cli.output import Column, Printer, dim, good, name
from casstore.cli.quantities import age, count, moment_or_none
from casstore.cli.shapes import Part, Shape
from casstore.cli.spelling import clip, clip_name, short
from casstore.errors import InvalidInputError
from casstore.maintenance import systems
from casstore.session.data import UNFENCED, SessionInfo

_SECTION: Final = "Sessions"
# How many sessions a question names.
_NAMED: Final = 5

SESSION_FIELDS: Final = {
    "id": "its id",
    "name": "what it is called; its id if it was given no name",
    "model": "the model, null if not told",
    "cwd": "the directory it works in, null if not told",
    "parent": "the session it was forked or started from, null if none",
    "created_at": "when it was made",
    "revision": "where it stands, null before the first commit",
    "manifest": "the digest of its checkpoint, null before the first commit",
    "leaf": "the node at the end of its active path",
    "nodes": "how many nodes its graph has",
    "committed_at": "when it last moved",
    "user_messages": "messages of the user on the active path",
    "first_user_message": "the first of them",
}


def session_document(info: SessionInfo) -> dict[str, Any]:
    """A session as JSON."""
    head = info.head
    return {
        "id": info.meta.session,
        "name": info.meta.name,
        "model": info.meta.model,
        "cwd": info.meta.cwd,
        "parent": info.meta.parent,
        "created_at": moment_or_none(info.meta.created_at_ms),
        "revision": None if head is None else head.revision,
        "manifest": None if head is None else head.manifest.hex(),
        "leaf": None if head is None else head.leaf,
        "nodes": 0 if head is None else head.node_count,
        "committed_at": None if head is None else moment_or_none(head.committed_at_ms),
        "user_messages": info.user_message_count,
        "first_user_message": info.first_user_message,
    }


def _moved_at(info: SessionInfo) -> int:
    return info.meta.created_at_ms if info.head is None else info.head.committed_at_ms


@command(
    _SECTION,
    Shape(
        "sessions",
        {
            "sessions": Part("in the order asked for", SESSION_FIELDS),
            "systems": "names of the record systems in the store: casstore records",
            "missing_systems": "those of them that are not installed",
        },
    ),
    "casstore sessions --recent --limit 10",
)
@click.argument("prefix", default="", shell_complete=complete_name)
@click.option("--recent", "-r", is_flag=True, help="Those that moved last first; else by id.")
@click.option(
    "--limit",
    "-n",
    type=click.IntRange(0),
    default=0,
    help="At most so many; 0: all.",
)
@click.option("--after", metavar="ID", help="Only ids behind this one, to go on with a long list.")
def sessions(app: App, prefix: str, recent: bool, limit: int, after: str | None) -> None:
    """List the sessions whose ids begin with PREFIX, or all."""
    with app.open() as store:
        now_ms = store.engine.now_ms()
        if recent:
            running = store.sessions(prefix=prefix, after=after)
            if limit:
                found = heapq.nlargest(limit, running, key=_moved_at)
            else:
                found = sorted(running, key=_moved_at, reverse=True)
        else:
            found = list(store.sessions(prefix=prefix, after=after, limit=limit or None))
        held, missing = systems.names(store.engine), systems.unregistered(store.engine)

    def render(to: Printer) -> None:
        if not found:
            app.remark("no sessions" + (f" that begin with {prefix!r}" if prefix else " yet"))
            remark_systems()
            return
        columns = [
            Column("session"), Column("revision", right=True), Column("nodes", right=True),
            Column("moved", right=True), Column("from"), Column("says", gives=True),
        ]  # fmt: skip
        room = to.room(60, 110)
        to.table(columns, [_row(info, now_ms, room) for info in found])
        remark_systems()

    def remark_systems() -> None:
        if held:
            told = [f"{one} (not installed)" if one in missing else one for one in held]
            app.remark(f"casstore records lists those of {', '.join(told)}")

    document = {
        "sessions": [session_document(info) for info in found],
        "systems": held,
        "missing_systems": list(missing),
    }
    app.answer(document, render)


def _row(info: SessionInfo, now_ms: int, room: int) -> list[Any]:
    head = info.head
    said = info.first_user_message or ""
    if info.meta.name != info.meta.session:
        said = f"{info.meta.name}: {said}" if said else info.meta.name
    return [
        name(clip_name(info.meta.session)),
        "-" if head is None else f"{head.revision:,}",
        "0" if head is None else f"{head.node_count:,}",
        age(_moved_at(info), now_ms),
        dim(clip_name(info.meta.parent or "", 24)),
        clip(said, room),
    ]


@command(
    _SECTION,
    Shape(
        "fork",
        {
            "session": "the new session",
            "source": "what it was forked from",
            "source_revision": "at which revision",
            "node": "the node it ends in, null: where the source does",
            "manifest": "the digest of its checkpoint",
            "nodes": "how many nodes it has",
        },
    ),
    "casstore fork agent attempt-2",
    "casstore fork agent@50 retry",
    "casstore fork 'agent#n49' without-the-rest",
)
@click.argument("source", shell_complete=complete_name)
@click.argument("target")
def fork(app: App, source: str, target: str) -> None:
    """Make a new session TARGET that stands where SOURCE does.

    SOURCE is a session, SESSION@REVISION, SESSION~2, or PLACE#NODE for the path to a node.
    One row is written, whatever the session's length.
    """
    with app.open(write=True) as store:
        found = naming.resolve(store, source)
        if found.session is None:
            raise InvalidInputError(
                f"{source!r} is {naming.described(store, found)}; only a session can be forked"
            )
        if found.revision is None:
            raise naming.NothingCommittedError(found.session)
        head = store.fork(found.session, target, at=found.at, node=found.node)
    origin = head.origin
    assert origin is not None
    document = {
        "session": head.session,
        "source": origin.session,
        "source_revision": origin.revision,
        "node": origin.node,
        "manifest": head.manifest.hex(),
        "nodes": head.node_count,
    }

    def render(to: Printer) -> None:
        at = f"{origin.session}@{origin.revision}" + (f"#{origin.node}" if origin.node else "")
        to.line(
            good("forked "), at, " as ", name(head.session), f", {count(head.node_count, 'node')}"
        )

    app.answer(document, render)


@command(
    _SECTION,
    Shape(
        "rewind",
        {
            "session": "the session",
            "revision": "the new revision",
            "rewound_to": "the revision that it is like",
            "manifest": "the digest of its checkpoint",
            "leaf": "the node at the end of its active path",
        },
    ),
    "casstore rewind agent~2",
    "casstore rewind agent@before-refactoring --label again",
)
@click.argument("place", shell_complete=complete_name)
@click.option("--expected", type=click.IntRange(0), help="Only if the session is at this revision.")
@click.option("--label", help="A label for the new revision.")
def rewind(app: App, place: str, expected: int | None, label: str | None) -> None:
    """Make an earlier revision the head of its session again, as a new revision.

    PLACE is SESSION@REVISION, SESSION@LABEL or SESSION~2. Nothing is lost by it: what came
    between stays in the history. Refused while an agent holds the session's lease.
    """
    with app.open(write=True) as store:
        found = naming.resolve(store, place, abbreviated=False)
        if found.kind != naming.REVISION or found.revision is None or found.session is None:
            raise InvalidInputError(
                f"{place!r} is {naming.described(store, found)}; "
                "say which revision: SESSION@REVISION or SESSION~2"
            )
        result = store.session(found.session).rewind(
            found.revision, lease=UNFENCED, expected=expected, label=label
        )
    document = {
        "session": found.session,
        "revision": result.revision,
        "rewound_to": found.revision,
        "manifest": result.manifest.hex(),
        "leaf": result.leaf,
    }

    def render(to: Printer) -> None:
        to.line(
            name(str(found.session)), f" is at revision {result.revision}, like {found.revision}; ",
            dim(short(result.manifest)),
        )  # fmt: skip

    app.answer(document, render)


@command(
    _SECTION,
    Shape(
        "delete",
        {
            "sessions": Part(
                "in the order given",
                {"id": "the session", "deleted": "true if it is gone, or would be"},
            ),
            "dry_run": "true: nothing was changed",
        },
    ),
    "casstore delete old-experiment --yes",
)
@click.argument(
    "sessions_", nargs=-1, required=True, metavar="SESSION…", shell_complete=complete_name
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
def delete(app: App, sessions_: tuple[str, ...], yes: bool, dry_run: bool) -> None:
    """Take sessions away for good; their ids are not given again.

    Ids are given whole. What forks share stays with them; the rest is space for gc.
    """
    wanted = list(dict.fromkeys(sessions_))
    with app.open(write=not dry_run) as store:
        for session in wanted:
            # All are there, or none goes.
            store.session(session).meta()
        if not dry_run:
            require_yes(yes=yes, question=f"Delete {_named(wanted)} for good?")
        gone = [
            {"id": session, "deleted": dry_run or store.delete_session(session)}
            for session in wanted
        ]

    def render(to: Printer) -> None:
        for one in gone:
            to.line("would delete " if dry_run else "deleted ", name(str(one["id"])))
        if not dry_run:
            app.remark("casstore gc gives the space back")

    app.answer({"sessions": gone, "dry_run": dry_run}, render)


def _named(sessions: list[str]) -> str:
    """The first of them, and how many there are besides: who is asked must know of all."""
    shown = ", ".join([clip_name(session) for session in sessions[:_NAMED]])
    rest = len(sessions) - _NAMED
    return shown if rest <= 0 else f"{shown} and {count(rest, 'other session')}"
