"""``log``: the nodes of sessions or the steps of a record, newest first, as a list or a graph."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.fields import Field, nested
from casstore.cli.naming import Target, complete_name
from casstore.cli.options import limit_option, page
from casstore.cli.output import Part as Text
from casstore.cli.output import Printer, Styled, dim, name
from casstore.cli.places import node_fields, node_of
from casstore.cli.quantities import clock, count
from casstore.cli.text import begun, clip, plain, summary
from casstore.errors import InvalidInputError, NotFoundError
from casstore.format.digest import Kind
from casstore.format.graph import DecodedNode, NodeHeader
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.data import Entry, Node
from casstore.session.messages import message_in
from casstore.session.scanning import scan
from casstore.session.session import Session
from casstore.session.state import decode_head
from casstore.store import Store

_BATCH: Final = 256
# The most labels, the most tags and the most forks that are read to mark nodes.
_MARKS: Final = 1000
_TEXT_WIDTH: Final = 200
# The width of a date with a time to the minute.
_DATE_COLUMNS: Final = 16


class Mark(NamedTuple):
    """A mark at a node: the leaf of a session, a label, a tag or a fork."""

    kind: str
    text: str


class Graph:
    """Nodes of some sessions by digest, and their marks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader = PieceReader(store.engine)
        self.headers: dict[bytes, NodeHeader] = {}
        #: The number of nodes that were not read because of the limit.
        self.left_out = 0
        self.marks: dict[bytes, list[Mark]] = {}
        #: The revision that added each node, in the first session given to ``add`` that has it.
        self.added: dict[bytes, Entry] = {}

    def add(self, target: Target, *, scope: str, limit: int = 0) -> None:
        """Add nodes of a session at a revision or its head: all, or the last ``limit``.

        ``scope`` is ``path`` or ``full``, as for ``Session.nodes``.
        """
        assert target.session is not None
        handle = self._store.session(target.session)
        full = scope == "full"
        nodes = handle.nodes("full" if full else "path", at=target.at, leaf=target.node)
        if limit and len(nodes) > limit:
            self.left_out += len(nodes) - limit
            nodes = nodes[-limit:]
        own = [*nodes.digests()]
        new = [digest for digest in own if digest not in self.headers]
        for start in range(0, len(new), _BATCH):
            page = new[start : start + _BATCH]
            self.headers.update(zip(page, graph.read_headers(self._reader, page), strict=True))
        self._attribute(handle, target.revision, own)
        path = handle.nodes(at=target.at, payloads=False)
        if path and target.node is None:
            at = "" if target.at is None else f"@{target.at}"
            self.mark(path[-1].digest, "leaf", f"{target.session}{at}")

    def add_left_behind(self, session: str) -> None:
        """Add the nodes that a session had before each of its rewinds."""
        handle = self._store.session(session)
        for entry in handle.history():
            if entry.operation == "rewind":
                earlier = _find_entry(handle, entry.revision - 1)
                if earlier is None:
                    # The revision was removed since, and its nodes may have been collected.
                    continue
                place = Target(naming.REVISION, "", earlier.manifest, session, earlier.revision)
                self.add(place, scope="full")

    def _attribute(self, handle: Session, revision: int | None, own: Sequence[bytes]) -> None:
        """Find the revision that added each node: follow the history back, past rewinds.

        Nodes are numbered in the order of insertion, and a manifest has the next number. A fork's
        first revision counts as adding all of its nodes, and so does a revision that adopts. Nodes
        whose revision was pruned get none.
        """
        left = sorted(
            [digest for digest in own if digest not in self.added],
            key=lambda one: self.headers[one].seq,
        )
        while left and revision is not None:
            entry = _find_entry(handle, revision)
            if entry is None:
                return
            if entry.operation == "rewind" and entry.rewound_to is not None:
                revision = entry.rewound_to
                continue
            before = None
            if entry.operation == "commit" and revision > 1:
                before = _find_entry(handle, revision - 1)
                if before is None:
                    return
            first = 0
            if before is not None:
                first = graph.read_manifest(self._reader, before.manifest).next_seq
            while left and self.headers[left[-1]].seq >= first:
                self.added[left.pop()] = entry
            revision = None if before is None else before.revision

    def mark(self, digest: bytes, kind: str, text: str) -> None:
        """Add a mark to a node."""
        marks = self.marks.setdefault(bytes(digest), [])
        if Mark(kind, text) not in marks:
            marks.append(Mark(kind, text))

    def mark_names(self, sessions: Sequence[str]) -> None:
        """Mark nodes with the labels of these sessions, and with all tags."""
        seen = 0
        for session in sessions:
            for entry in self._store.session(session).history():
                for label in entry.labels:
                    self._mark_manifest(entry.manifest, "label", f"{session}@{label}")
                    seen += 1
                if seen >= _MARKS:
                    break
        for number, pin in enumerate(self._store.pins()):
            if number == _MARKS:
                break
            kind = naming.kind_of(self._store, pin.digest)
            if kind == Kind.NODE:
                self.mark(pin.digest, "tag", pin.name)
            elif kind == Kind.MANIFEST:
                self._mark_manifest(pin.digest, "tag", pin.name)

    def mark_forks(self, forks: Sequence[Fork]) -> None:
        """Mark where other sessions were forked from these."""
        for fork in forks[:_MARKS]:
            entry = _find_entry(self._store.session(fork.source), fork.revision)
            if entry is None:
                continue
            if fork.node is not None:
                found = naming.find_node(self._store, fork.source, fork.node, fork.revision)
                if found is not None:
                    self.mark(found, "fork", fork.session)
            else:
                self._mark_manifest(entry.manifest, "fork", fork.session)

    def _mark_manifest(self, digest: bytes, kind: str, text: str) -> None:
        leaf = graph.read_manifest(self._reader, digest).leaf
        if leaf is not None:
            self.mark(leaf, kind, text)

    def parents(self) -> dict[bytes, bytes | None]:
        """The parent of each node; if the parent is hidden, the nearest visible ancestor."""
        found: dict[bytes, bytes | None] = {}
        # Nodes omitted by the limit are older than all nodes here, and so are their ancestors: the
        # search for a visible ancestor stops there.
        oldest = min((header.seq for header in self.headers.values()), default=0)
        for digest, header in self.headers.items():
            above = header.parent
            while above is not None and above not in self.headers:
                hidden = graph.read_headers(self._reader, [above])[0]
                if self.left_out and hidden.seq < oldest:
                    break
                above = hidden.parent
            found[digest] = above
        return found

    def newest_first(self) -> list[bytes]:
        """All nodes by insertion order, the newest first."""
        return sorted(self.headers, key=lambda one: (-self.headers[one].seq, one))

    def read(self, digests: Sequence[bytes]) -> Iterator[DecodedNode]:
        """Nodes with their payloads, which are ``Stored``, or None."""
        for start in range(0, len(digests), _BATCH):
            yield from graph.stored_nodes(self._reader, digests[start : start + _BATCH])


def _find_entry(session: Session, revision: int) -> Entry | None:
    """The entry of a revision; None if it was removed."""
    try:
        return session.entry(revision)
    except NotFoundError:
        return None


class Fork(NamedTuple):
    """A session that was forked from another."""

    session: str
    source: str
    revision: int
    node: str | None


def forks_of(store: Store) -> list[Fork]:
    """All forks in the store."""
    found: list[Fork] = []
    # Read only the rows: a store may have many sessions, and few of them are forks of these.
    for row in scan(store.engine, "heads", b"", None):
        head = decode_head(row.value)
        if head.origin is not None:
            found.append(Fork(keys.name_of(row.key, head.long_id), *head.origin))
    return found


def family(sessions: Sequence[str], forks: Sequence[Fork]) -> list[str]:
    """These sessions and all sessions related to them by forks, directly or not."""
    known = dict.fromkeys(sessions)
    grown = True
    while grown:
        grown = False
        for fork in forks:
            if (fork.session in known) != (fork.source in known):
                known[fork.session] = known[fork.source] = None
                grown = True
    return list(known)


class _Listed(NamedTuple):
    """A node of the list."""

    node: Node
    #: The digest of its parent, or of the nearest ancestor that is not hidden, if that was read.
    parent_digest: bytes | None
    #: The revision that added it.
    added: Entry | None
    marks: Sequence[Mark]
    #: As JSON, with --payloads.
    payload: Any


def _role(payload: Any) -> str | None:
    message = message_in(begun(payload, _TEXT_WIDTH))
    return None if message is None else message["role"]


@command(
    {
        "sessions": "the sessions listed",
        "nodes": nested(
            "newest first, children before parents",
            {
                **node_fields("id", "digest", "parent", of="node"),
                "parent_digest": "the digest of its parent, or of the nearest ancestor that is "
                "not hidden; null if that was not read",
                **node_fields("seq", "depth", "time", of="node"),
                "session": Field(
                    "the session whose revision added it, null if that was pruned",
                    of="added.session",
                ),
                "revision": Field("that revision", of="added.revision"),
                "committed_at": Field("when that revision was committed", of="added.committed_at"),
                "turn": Field("the turn of that revision, null if it had none", of="added.turn"),
                "role": Field(
                    "the role of its message, null if it is not a message",
                    of=lambda one: _role(one.node.payload),
                ),
                "marks": nested(
                    "names at this node",
                    {
                        "kind": "leaf, label, tag or fork",
                        "name": Field("the session, label or tag", of="text"),
                    },
                ),
                "summary": Field(
                    "role and beginning of its text",
                    of=lambda one: summary(one.node.payload, _TEXT_WIDTH),
                ),
                "payload": "with --payloads, otherwise null",
            },
        ),
        "steps": nested(
            "the steps of one entry of a record system, newest first; otherwise empty",
            {
                "id": "its id",
                "made_at": "when it was made, null if not known",
                "summary": "one line of text",
                "details": "of LangGraph: namespace, parent, step, source, changed_channels; "
                "of Claude: transcript, type, role",
            },
        ),
        "more": "how many nodes are not listed; null for steps, which are not counted",
        "cursor": "what continues the list, null at the end: for nodes the NAME to give to "
        "log, for steps the ID to give to --before",
    },
    "casstore log agent",
    "casstore log agent --graph --forks",
    "casstore log --graph --all --limit 0",
    "casstore log langgraph:t0 --limit 10",
)
@click.argument("names", nargs=-1, metavar="[NAME]…", shell_complete=complete_name)
@click.option("--graph", "-g", "drawn", is_flag=True, help="Draw all branches; otherwise the path.")
@click.option("--forks", is_flag=True, help="Include sessions that are forks or sources of these.")
@click.option("--all", "-a", "everything", is_flag=True, help="All sessions.")
@click.option("--rewound", is_flag=True, help="Include the nodes that sessions had before rewinds.")
@limit_option(100, "List at most this many nodes; 0: all.")
@click.option("--before", metavar="ID", help="Of a record: only the steps older than this one.")
@click.option("--payloads", "-p", is_flag=True, help="Include whole payloads.")
def log(
    app: App,
    names: tuple[str, ...],
    drawn: bool,
    forks: bool,
    everything: bool,
    rewound: bool,
    limit: int,
    before: str | None,
    payloads: bool,
) -> None:
    """List the nodes of a session, or the steps of a record.

    The newest comes first.
    NAME is a session, SESSION@REVISION, SESSION~2, PLACE#NODE for the path to a node, or a tag on
    a checkpoint. With --graph all branches and forks are drawn; nodes that several sessions share
    are drawn once. Each node is listed with its commit time and the sessions, labels, tags and
    forks at it. NAME may also be one SYSTEM:ENTRY: a LangGraph thread lists its checkpoints, a
    Claude transcript its entries.
    """
    if not names and not everything:
        raise click.UsageError(
            "which session? Name one, or give --all; casstore sessions lists them"
        )
    with app.open() as store:
        targets = [naming.resolve_place(store, one) for one in names]
        if len(targets) == 1 and targets[0].entry is not None:
            _answer_steps(app, store, targets[0], limit, before)
            return
        if before is not None:
            raise click.UsageError("--before is for a record; of a session, name PLACE#NODE")
        for text, target in zip(names, targets, strict=True):
            if target.session is None:
                raise InvalidInputError(
                    f"{text!r} is {naming.described(store, target)}; log lists the nodes of "
                    "sessions, or the steps of one record"
                )
        all_forks = forks_of(store) if drawn or forks or everything else []
        chosen = [target.session or "" for target in targets]
        more_sessions: list[str] = []
        if everything:
            more_sessions = [info.meta.session for info in store.sessions()]
        elif forks:
            more_sessions = family(chosen, all_forks)
        for session in more_sessions:
            if session not in chosen:
                try:
                    targets.append(naming.resolve(store, f"session:{session}"))
                except NotFoundError:
                    # The source of a fork may have been deleted.
                    continue
        found = Graph(store)
        for target in targets:
            if target.digest is not None:
                is_path = not drawn or target.node is not None
                lonely = is_path and len(targets) == 1 and not rewound
                found.add(target, scope="path" if is_path else "full", limit=limit * lonely)
        shown = list(dict.fromkeys([target.session or "" for target in targets]))
        if rewound:
            for session in shown:
                found.add_left_behind(session)
        found.mark_names(shown)
        drawn_sessions = set(shown)
        found.mark_forks(
            [one for one in all_forks if one.source in drawn_sessions
             and one.session not in drawn_sessions]
        )  # fmt: skip
        parents = found.parents()
        ordered = list(order(parents, found.newest_first()))
        listed = ordered[:limit] if limit else ordered
        total = len(ordered) + found.left_out
        cursor = None
        if total > len(listed) and len(targets) == 1 and not drawn and not rewound:
            target = targets[0]
            above = found.headers[listed[-1]].parent_id
            cursor = f"{target.session}@{target.revision}#{above}"
        _answer(app, found, shown, parents, listed, total, cursor, drawn=drawn, payloads=payloads)


def _answer_steps(app: App, store: Store, target: Target, limit: int, before: str | None) -> None:
    assert target.system is not None
    assert target.entry is not None
    title = target.system.title
    # To continue a list, the steps before it are read as well.
    asked = limit + 1 if limit and before is None else sys.maxsize
    every = iter(target.system.steps(store, target.entry.id, limit=asked))
    if before is not None and not any(step.id == before for step in every):
        remedy = f"casstore log {naming.quoted(target.text.partition(':')[2])}"
        raise naming.NameNotFoundError(before, remedy)
    steps, more = page(every, limit)
    cursor = steps[-1].id if more else None

    def render(to: Printer) -> None:
        for step in steps:
            taken = len(step.id) + _DATE_COLUMNS + 4
            date = "" if step.made_at_ms is None else clock(step.made_at_ms)[:_DATE_COLUMNS]
            to.line(name(step.id), " ", dim(date), " ", clip(step.summary, to.room(taken, 200)))
        if not steps and before is None:
            app.remark(f"{title}: this record system keeps no steps")
        if cursor is not None:
            app.remark(f"there are more: --before {naming.quoted(cursor)}, or --limit 0")

    document = {"sessions": [], "nodes": [], "steps": steps, "more": None, "cursor": cursor}
    app.answer(document, render)


def _answer(
    app: App,
    found: Graph,
    sessions: list[str],
    parents: dict[bytes, bytes | None],
    listed: list[bytes],
    total: int,
    cursor: str | None,
    *,
    drawn: bool,
    payloads: bool,
) -> None:
    nodes: list[_Listed] = []
    for digest, decoded in zip(listed, found.read(listed), strict=True):
        above = parents[digest]
        nodes.append(
            _Listed(
                node_of(decoded, digest),
                above if above in found.headers else None,
                found.added.get(digest),
                found.marks.get(digest, []),
                plain(decoded.payload) if payloads and app.as_json else None,
            )
        )

    def render(to: Printer) -> None:
        lanes = Lanes()
        for digest, one in zip(listed, nodes, strict=True):
            before, after = lanes.draw(digest, parents[digest]) if drawn else ("*", [])
            marks = _marks(one.marks)
            added, node = one.added, one.node
            date = "" if added is None else clock(added.committed_at_ms)[:_DATE_COLUMNS] + " "
            taken = len(before) + len(node.id) + sum(len(_text(mark)) for mark in marks) + 4
            text = [] if payloads else [summary(node.payload, to.room(taken + len(date), 120))]
            to.line(*_coloured(before), " ", name(node.id), " ", dim(date), *marks, *text)
            if payloads:
                margin = lanes.margin() if drawn else "|"
                to.json(node.payload, before=(dim(margin), "   "))
            for connection in after:
                to.line(*_coloured(connection))
        if not nodes:
            app.remark("no nodes")
        if total > len(nodes):
            app.remark(f"… {count(total - len(nodes), 'more node')}: --limit 0")

    app.answer(
        {
            "sessions": sessions,
            "nodes": nodes,
            "steps": [],
            "more": total - len(listed),
            "cursor": cursor,
        },
        render,
    )


def _text(part: Text) -> str:
    return part if isinstance(part, str) else part.text


# The colour of each kind of mark, and the words before its name.
_MARK_STYLES: Final = {
    "leaf": ("green", ""),
    "label": ("cyan", "label "),
    "tag": ("magenta", "tag "),
    "fork": ("blue", "forked as "),
}


def _marks(marks: Sequence[Mark]) -> list[Text]:
    parts: list[Text] = []
    for mark in marks:
        colour, words = _MARK_STYLES[mark.kind]
        parts += [", " if parts else "(", Styled(words + mark.text, fg=colour, bold=True)]
    return [*parts, ") "] if parts else []


_LANE_COLOURS: Final = ("red", "green", "blue", "magenta", "cyan")


def _coloured(lanes: str) -> list[Text]:
    """Lanes, each in its own colour; the star of a node stays plain."""
    return [
        char if char in "* " else Styled(char, fg=_LANE_COLOURS[at // 2 % len(_LANE_COLOURS)])
        for at, char in enumerate(lanes)
    ]


Name = TypeVar("Name", bound=Hashable)


def order(parents: Mapping[Name, Name | None], newest_first: Sequence[Name]) -> Iterator[Name]:
    """All nodes, children before parents, each branch without a gap down to where it forked off.

    ``newest_first`` has all nodes; the branches begin in its order.
    """
    waiting: dict[Name, int] = dict.fromkeys(parents, 0)
    for parent in parents.values():
        if parent is not None and parent in waiting:
            waiting[parent] += 1
    ends = [node for node in newest_first if not waiting[node]]
    ready = ends[::-1]
    while ready:
        node = ready.pop()
        yield node
        parent = parents[node]
        if parent is not None and parent in waiting:
            waiting[parent] -= 1
            if not waiting[parent]:
                ready.append(parent)


class Lanes:
    """Draws a graph as text, node by node; a lane is a column of ``|`` down to a parent."""

    def __init__(self) -> None:
        self._lanes: list[Hashable | None] = []

    def draw(self, node: Hashable, parent: Hashable | None) -> tuple[str, list[str]]:
        """The lanes on the line of a node, and the lines of lanes to write after it.

        When a lane ends, the lanes to its right move left.
        """
        if node in self._lanes:
            at = self._lanes.index(node)
        else:
            at = len(self._lanes)
            self._lanes.append(node)
        line = " ".join(["*" if lane == at else "|" for lane in range(len(self._lanes))])
        if parent is None:
            return line, self._close(at)
        if parent in self._lanes:
            other = self._lanes.index(parent)
            left, right = min(at, other), max(at, other)
            self._lanes[at] = parent
            return line, self._merge(left, right)
        self._lanes[at] = parent
        return line, []

    def margin(self) -> str:
        """The current lanes, for a line without a node."""
        return " ".join("|" * len(self._lanes))

    def _close(self, at: int) -> list[str]:
        """End a lane; the lanes to its right move left."""
        del self._lanes[at]
        right = len(self._lanes) - at
        return ["| " * at + " /" * right] if right else []

    def _merge(self, left: int, right: int) -> list[str]:
        """Bend the right lane into the left one, across the lanes between them."""
        del self._lanes[right]
        count = len(self._lanes)
        # First the lane leaves its column, and the lanes to its right move left.
        lines = ["| " * (right - 1) + "|/" + " /" * (count - right)]
        for step in range(right - 1, left, -1):
            lines.append(("| " * (step - 1) + "|/" + "| " * (count - step)).rstrip())
        return lines
