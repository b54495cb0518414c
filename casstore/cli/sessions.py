"""Commands that list what a store holds, and that change sessions as a whole.

They are ``sessions``, ``history``, ``label``, ``fork``, ``adopt``, ``rewind``, ``delete``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import click

from casstore.cli import naming
from casstore.cli.command import App, command, require_yes
from casstore.cli.fields import Field, Fields, described, document, nested
from casstore.cli.naming import complete_name
from casstore.cli.options import YES, limit_option, page
from casstore.cli.output import Printer, dim, good, name
from casstore.cli.quantities import Whole, count
from casstore.cli.text import clip_name, short
from casstore.errors import InvalidInputError, RevisionNotFoundError
from casstore.maintenance import systems
from casstore.maintenance.contents import measure_own
from casstore.maintenance.systems import SystemEntry
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.data import Entry, SessionInfo
from casstore.store import Store

# With more objects, measuring the sizes of sessions would take longer than a second.
_MAX_MEASURED: Final = 100_000
# How many sessions the question before a deletion lists by name.
_NAMED: Final = 5


_ORIGIN: Final[Fields] = {
    "session": "the session",
    "revision": "its revision",
    "node": "the node that the fork ends in, null: the leaf of that revision",
}
SESSION_FIELDS: Final[Fields] = {
    "id": Field("its id", "session", of="meta.session"),
    "name": Field("its title; its id if it was given none", of="meta.name"),
    "model": Field("the model, null if not given", "model", of="meta.model"),
    "cwd": Field("its working directory, null if not given", "directory", of="meta.cwd"),
    "parent": Field(
        "the session it was forked or started from, null if none", "parent", of="meta.parent"
    ),
    "created_at": Field("when it was created", "created", of="meta.created_at"),
    "revision": Field("its revision, null before the first commit", of="head.revision"),
    "manifest": Field(
        "the digest of its checkpoint, null before the first commit", of="head.manifest"
    ),
    "leaf": Field("the node at the end of its active path", of="head.leaf"),
    "nodes": Field(
        "nodes in its graph",
        unit="node",
        of=lambda info: 0 if info.head is None else info.head.node_count,
    ),
    "committed_at": Field("when it was last committed to", of="head.committed_at"),
    "origin": nested(
        "the place that it was forked from, null if it is not a fork",
        _ORIGIN,
        of="head.origin",
    ),
    "user_messages": Field("messages of the user on the active path", of="user_message_count"),
    "first_user_message": "the first of them",
}
ENTRY_FIELDS: Final[Fields] = {
    "revision": Field("its number", "revision", "revision"),
    "committed_at": Field("when it was committed", "committed"),
    "operation": Field("commit, rewind, fork or adopt", "operation"),
    "manifest": "the digest of its checkpoint",
    "leaf": Field("the node at the end of its active path", "leaf"),
    "turn": Field("the turn that made it, null if it had none", "turn"),
    "labels": Field("its labels", "labels", gives=True),
    "rewound_to": "the revision that a rewind went back to, else null",
    "origin": nested("of a fork, the place that it was made from, else null", _ORIGIN),
    "adopted": nested("the place that was adopted, else null", _ORIGIN),
}


def entry_documents(store: Store, session: str, entries: list[Entry]) -> list[dict[str, Any]]:
    """Revisions as JSON: entries of the history, the leaf of each, and the origin of a fork."""
    reader = PieceReader(store.engine)
    head = store.session(session).head()
    origin = None if head is None else head.origin
    return [
        document(
            ENTRY_FIELDS,
            entry,
            {
                "leaf": graph.read_manifest(reader, entry.manifest).leaf_id,
                "origin": origin if entry.operation == "fork" else None,
            },
        )
        for entry in entries
    ]


# --- what a store holds -----------------------------------------------------------------------


class _ListedEntry(NamedTuple):
    """A session or an entry of a record system."""

    name: str
    kind: str
    changed_at_ms: int | None
    title: str
    info: SessionInfo | None
    entry: SystemEntry | None


def _items(store: Store, prefix: str, after: str | None) -> Iterator[_ListedEntry]:
    """Sessions by id, then the entries of each record system by name.

    Only those whose names begin with ``prefix`` and come after ``after`` in this order.
    """
    held = systems.held_by(store).systems
    begins = {f"{naming.prefix_of(system)}:": system for system in held}
    behind = next((one for one in begins if after is not None and after.startswith(one)), None)
    if behind is None:
        for info in store.sessions(prefix=prefix, after=after):
            yield _session_item(info)
    for begin, system in sorted(begins.items()):
        if behind is not None and begin < behind:
            continue
        if not (begin + prefix).startswith(prefix) and not prefix.startswith(begin):
            continue
        start = after[len(begin) :] if after is not None and begin == behind else None
        for entry in systems.all_entries(system, store, after=start):
            found = begin + entry.id
            if found.startswith(prefix):
                yield _ListedEntry(
                    found, naming.prefix_of(system), entry.changed_at_ms,
                    entry.title, None, entry,
                )  # fmt: skip


def _session_item(info: SessionInfo) -> _ListedEntry:
    title = info.first_user_message or ""
    if info.meta.name != info.meta.session:
        title = f"{info.meta.name}: {title}" if title else info.meta.name
    head = info.head
    changed_at_ms = info.meta.created_at_ms if head is None else head.committed_at_ms
    return _ListedEntry(info.meta.session, "session", changed_at_ms, title, info, None)


def _own_sizes(store: Store, found: list[_ListedEntry]) -> list[int | None]:
    """The own size of each item; None for sessions if measuring them would take long."""
    sizes = None
    if any(item.info is not None for item in found):
        sizes = measure_own(store, max_objects=_MAX_MEASURED)

    def own_size(item: _ListedEntry) -> int | None:
        if item.entry is not None:
            return item.entry.size_bytes
        return None if sizes is None else sizes.get(keys.session_key(item.name), 0)

    return [own_size(item) for item in found]


_LISTED: Final[Fields] = {
    "name": Field("the name that commands take", "name"),
    "kind": Field("session, or the record system: langgraph, claude …", "kind"),
    "changed_at": Field("when it last changed, null if not known", "last change"),
    "own_bytes": Field(
        "uncompressed, of the objects that only this session reaches; of an entry, of its rows",
        "own size",
    ),
    "revision": Field(
        "of a session, its revision", "revision", "revision", of="info.head.revision"
    ),
    "from": Field(
        "of a session, the one it was forked or started from", "from",
        of="info.meta.parent",
    ),
    "title": Field("how a person recognises it", "title", gives=True),
}  # fmt: skip


_SESSION: Final[Fields] = {
    **SESSION_FIELDS,
    "own_bytes": "what only this session reaches, uncompressed: deleting it and gc free this; null "
    f"in a store of more than {_MAX_MEASURED:,} objects, see stats",
}


@command(
    {
        "sessions": nested("the sessions, in the order asked for", _SESSION),
        "entries": nested(
            "the entries of record systems, in the order asked for",
            described(
                SystemEntry,
                {
                    "name": "the name that commands take: langgraph:t0",
                    "kind": "the part of that name before the colon",
                    "id": Field(of="entry.id"),
                    "title": Field(),
                    "changed_at": Field(),
                    "size_bytes": Field(of="entry.size_bytes"),
                },
            ),
        ),
        "systems": nested(
            "the record systems in the store",
            {
                "name": "the beginning of its tables' names",
                "kind": "the beginning of its entries' names",
            },
        ),
        "missing_systems": "names of systems that are not installed: their rows are kept",
        "more": "true: --limit left some out; --after the last name continues",
    },
    "casstore sessions --recent --limit 10",
    "casstore sessions langgraph:",
)
@click.argument("prefix", default="", shell_complete=complete_name)
@click.option("--recent", "-r", is_flag=True, help="The last change first; otherwise by name.")
@limit_option(0)
@click.option("--after", metavar="NAME", help="Only names after this one, to continue a list.")
def sessions(app: App, prefix: str, recent: bool, limit: int, after: str | None) -> None:
    """List the sessions and records in the store.

    With PREFIX, those whose names begin with it. Records are the entries of record systems:
    LangGraph threads, Claude transcripts, session logs, runs, and those of other packages.
    Their names begin with the system: langgraph:t0.
    """
    with app.open() as store:
        items: Iterable[_ListedEntry] = _items(store, prefix, after)
        if recent and limit:
            items = heapq.nlargest(limit + 1, items, key=_changed_at)
        elif recent:
            items = sorted(items, key=_changed_at, reverse=True)
        found, more = page(items, limit)
        sizes = _own_sizes(store, found)
        held = systems.held_by(store)
    sized = [*zip(found, sizes, strict=True)]

    def render(to: Printer) -> None:
        rows = [document(_LISTED, item, {"own_bytes": own}) for item, own in sized]
        empty = f"nothing begins with {prefix!r}" if prefix else "nothing is stored yet"
        app.rows(to, _LISTED, rows, empty)
        if more:
            app.remark(f"there are more: --after {naming.quoted(found[-1].name)}, or --limit 0")
        if None in sizes:
            app.remark(f"sizes are not measured above {_MAX_MEASURED:,} objects: casstore stats")
        for missing, why in held.missing.items():
            app.remark(f"the entries of record system {missing} cannot be listed: {why}")

    app.answer(
        {
            "sessions": [
                {**document(SESSION_FIELDS, item.info), "own_bytes": own}
                for item, own in sized if item.info is not None
            ],
            "entries": [item for item in found if item.entry is not None],
            "systems": [
                {"name": one.name, "kind": naming.prefix_of(one)} for one in held.systems
            ],
            "missing_systems": list(held.missing),
            "more": more,
        },
        render,
    )  # fmt: skip


def _changed_at(item: _ListedEntry) -> int:
    return item.changed_at_ms or 0


# --- revisions ----------------------------------------------------------------------------------


@command(
    {
        "session": "the session",
        "revisions": nested("newest first", ENTRY_FIELDS, "revisions"),
        "more": "true: there are earlier ones; --before the last number continues",
    },
    "casstore history agent --limit 10",
)
@click.argument("session", shell_complete=complete_name)
@limit_option(50)
@click.option("--before", type=Whole(1), help="Only revisions earlier than this one.")
@click.option("--labelled", is_flag=True, help="Only revisions that have a label.")
def history(app: App, session: str, limit: int, before: int | None, labelled: bool) -> None:
    """List the revisions of a session, newest first."""
    with app.open() as store:
        found_id = naming.resolve_session(store, session)
        entries = store.session(found_id).history(before=before)
        wanted = (entry for entry in entries if entry.labels or not labelled)
        listed, more = page(wanted, limit)
        found = entry_documents(store, found_id, listed)

    def render(to: Printer) -> None:
        to.rows(ENTRY_FIELDS, [{**one, "operation": operation_words(one)} for one in found])
        if more:
            app.remark(f"there are more: --before {found[-1]['revision']}, or --limit 0")

    app.answer({"session": found_id, "revisions": found, "more": more}, render)


def operation_words(revision: dict[str, Any]) -> str:
    """The operation that made a revision: ``rewind to 9``."""
    words = str(revision["operation"])
    if revision["rewound_to"] is not None:
        words += f" to {revision['rewound_to']}"
    for key, word in (("origin", "of"), ("adopted", "of")):
        if revision[key] is not None:
            words += f" {word} {revision[key]['session']}@{revision[key]['revision']}"
    return words


@command(
    {
        "session": "the session",
        "labels": nested(
            "all labels of the session, or the one that was set or removed",
            {
                "label": "its name",
                "revision": "the revision it names or named; null if that was removed",
            },
        ),
        "changed": "set, removed or null: only listed",
    },
    "casstore label agent@41 before-refactoring",
    "casstore label agent --delete before-refactoring",
    "casstore label agent",
)
@click.argument("place", shell_complete=complete_name)
@click.argument("label_", metavar="[LABEL]", required=False)
@click.option("--delete", "-d", metavar="LABEL", help="Delete this label.")
def label(app: App, place: str, label_: str | None, delete: str | None) -> None:
    """Label a revision, delete a label, or list the labels of a session.

    PLACE is a session (its present revision) or SESSION@REVISION. A label names one revision of
    its session; setting it again moves it. SESSION@LABEL then names that revision.
    """
    if label_ is not None and delete is not None:
        raise click.UsageError("either set a label or delete one")
    writes = label_ is not None or delete is not None
    changed: str | None = None
    with app.open(write=writes) as store:
        target = naming.resolve_revision(
            store, place, "only revisions have labels", abbreviated=not writes
        )
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
                # A label whose revision was removed can be deleted as well: check advises it.
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
            said = {"set": "labelled ", "removed": "removed from "}.get(changed or "", "")
            at = "?" if one["revision"] is None else one["revision"]
            to.line(said, name(f"{target.session}@{at}"), "  ", good(str(one["label"])))

    app.answer({"session": target.session, "labels": labels, "changed": changed}, render)


# --- new heads ------------------------------------------------------------------------------------


@command(
    {
        "session": "the new session",
        "source": "the session it was forked from",
        "source_revision": "at which revision",
        "node": "the node it ends in, null: the leaf of that revision",
        "manifest": "the digest of its checkpoint",
        "nodes": Field("nodes in its graph", of="node_count"),
    },
    "casstore fork agent attempt-2",
    "casstore fork agent@50 retry",
    "casstore fork 'agent#n49' without-the-rest",
)
@click.argument("source", shell_complete=complete_name)
@click.argument("target")
def fork(app: App, source: str, target: str) -> None:
    """Create a session TARGET with the content of SOURCE.

    SOURCE is a session, SESSION@REVISION, SESSION~2, PLACE#NODE for the path to a node, or a tag
    on a checkpoint. One row is written, whatever the session's length.
    """
    with app.open(write=True) as store:
        found = naming.resolve_revision(store, source, "only a session can be forked", nodes=True)
        head = store.fork(found.session, target, at=found.at, node=found.node)
    origin = head.origin
    assert origin is not None

    def render(to: Printer) -> None:
        at = f"{origin.session}@{origin.revision}" + (f"#{origin.node}" if origin.node else "")
        to.line(
            good("forked "), at, " as ", name(head.session), f", {count(head.node_count, 'node')}"
        )

    app.answer(
        head, render, source=origin.session, source_revision=origin.revision, node=origin.node
    )


_MOVED: Final[Fields] = {
    "session": "the session",
    "revision": "its new revision",
    "manifest": "the digest of its checkpoint",
    "leaf": "the node at the end of its active path",
}


@command(
    {**_MOVED, "adopted": nested("the place that was adopted", _ORIGIN)},
    "casstore adopt agent other",
)
@click.argument("session", shell_complete=complete_name)
@click.argument("other", shell_complete=complete_name)
@click.option("--expected", type=Whole(0), help="Only if SESSION is at this revision.")
@click.option("--label", help="A label for the new revision.")
def adopt(app: App, session: str, other: str, expected: int | None, label: str | None) -> None:
    """Make the content of OTHER the next revision of SESSION.

    Earlier revisions of SESSION stay in its history, and OTHER stays as it is. Refused while
    another owner holds the lease of SESSION.
    """
    with app.open(write=True) as store:
        into = naming.resolve_revision(
            store, session, "only a session can adopt", abbreviated=False, nodes=True
        )
        source = naming.resolve_revision(
            store, other, "only a session can be adopted", abbreviated=False, nodes=True
        )
        if not (into.is_session and source.is_session):
            raise InvalidInputError(
                f"adopt takes two sessions at their present revisions, got {session!r} and "
                f"{other!r}; fork an earlier revision first"
            )
        result = store.session(into.session).adopt(source.session, expected=expected, label=label)
        adopted = store.session(into.session).entry(result.revision).adopted
    assert adopted is not None

    def render(to: Printer) -> None:
        to.line(
            name(into.session), f" is at revision {result.revision}, ",
            good("adopted "), f"{adopted.session}@{adopted.revision}",
        )  # fmt: skip

    app.answer(result, render, session=into.session, adopted=adopted)


@command(
    {**_MOVED, "rewound_to": "the revision whose content it has now"},
    "casstore rewind agent~2",
    "casstore rewind agent@before-refactoring --label again",
)
@click.argument("place", shell_complete=complete_name)
@click.option("--expected", type=Whole(0), help="Only if the session is at this revision.")
@click.option("--label", help="A label for the new revision.")
def rewind(app: App, place: str, expected: int | None, label: str | None) -> None:
    """Make an earlier revision the next revision of its session.

    PLACE is SESSION@REVISION, SESSION@LABEL, SESSION~2 or a tag on a checkpoint. The revisions
    between stay in the history. Refused while an agent holds the session's lease.
    """
    with app.open(write=True) as store:
        found = naming.resolve_place(store, place, abbreviated=False)
        if found.kind != naming.REVISION or found.revision is None or found.session is None:
            raise InvalidInputError(
                f"{place!r} is {naming.described(store, found)}; "
                "say which revision: SESSION@REVISION or SESSION~2"
            )
        result = store.session(found.session).rewind(found.revision, expected=expected, label=label)

    def render(to: Printer) -> None:
        to.line(
            name(str(found.session)), f" is at revision {result.revision}, with the content of "
            f"revision {found.revision}; ", dim(short(result.manifest)),
        )  # fmt: skip

    app.answer(result, render, session=found.session, rewound_to=found.revision)


@command(
    {
        "sessions": nested(
            "in the order given",
            {"id": "the session", "deleted": "true if it was deleted, or would be"},
        ),
        "dry_run": "true: nothing was changed",
    },
    "casstore delete old-experiment --yes",
)
@click.argument(
    "sessions_", nargs=-1, required=True, metavar="SESSION…", shell_complete=complete_name
)
@YES
@click.option("--dry-run", is_flag=True, help="Report what would be deleted; change nothing.")
def delete(app: App, sessions_: tuple[str, ...], yes: bool, dry_run: bool) -> None:
    """Delete sessions for good; their ids cannot be used again.

    Ids must be complete. Content that forks share stays; gc removes the rest.
    """
    wanted = list(dict.fromkeys(sessions_))
    with app.open(write=not dry_run) as store:
        for session in wanted:
            # Raises for an id that does not exist, before any session is deleted.
            store.session(session).meta()
        if not dry_run:
            require_yes(yes=yes, question=f"Delete {_listing(wanted)} for good?")
        gone = [
            {"id": session, "deleted": dry_run or store.delete_session(session)}
            for session in wanted
        ]

    def render(to: Printer) -> None:
        for one in gone:
            to.line("would delete " if dry_run else "deleted ", name(str(one["id"])))
        if not dry_run:
            app.remark("casstore gc frees the space")

    app.answer({"sessions": gone, "dry_run": dry_run}, render)


def _listing(sessions: list[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join([clip_name(session) for session in sessions[:_NAMED]])
    rest = len(sessions) - _NAMED
    return shown if rest <= 0 else f"{shown} and {count(rest, 'other session')}"
