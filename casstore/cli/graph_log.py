"""``log``: the nodes of sessions, newest first, with their branches and forks drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.completing import complete_name
from casstore.cli.drawing import Lanes, order
from casstore.cli.naming import Target
from casstore.cli.output import Part as Text
from casstore.cli.output import Printer, Styled, dim, name
from casstore.cli.shapes import Part, Shape
from casstore.cli.spelling import clip_name, plain, summary
from casstore.errors import InvalidInputError, NotFoundError
from casstore.format.hashing import Kind
from casstore.format.node import DecodedNode, NodeHeader
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.heads import decode_head
from casstore.session.scanning import scan
from casstore.store import Store

_SECTION: Final = "Sessions"
_BATCH: Final = 256
# How many labels, tags and forks are looked at for marking nodes with them.
_MARKS: Final = 1000
_TEXT_WIDTH: Final = 200


class Mark(NamedTuple):
    """Something that stands at a node: the leaf of a session, a label, a tag, a fork."""

    kind: str
    text: str


class Graph:
    """Nodes of some sessions by digest, and what stands at them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader = PieceReader(store.engine)
        self.headers: dict[bytes, NodeHeader] = {}
        #: How many nodes were not even looked at, because so many were not asked for.
        self.left_out = 0
        self.marks: dict[bytes, list[Mark]] = {}

    def add(self, target: Target, *, scope: str, limit: int = 0) -> None:
        """Take the nodes of a session, at a revision or now: all, or the last so many."""
        assert target.session is not None
        handle = self._store.session(target.session)
        full = scope == "full"
        nodes = handle.nodes("full" if full else "path", at=target.at, leaf=target.node)
        if limit and len(nodes) > limit:
            self.left_out += len(nodes) - limit
            nodes = nodes[-limit:]
        batch: list[bytes] = []
        for digest in nodes.digests():
            if digest not in self.headers:
                batch.append(digest)
            if len(batch) == _BATCH:
                self._take(batch)
                batch = []
        self._take(batch)
        path = handle.nodes(at=target.at, payloads=False)
        if path and target.node is None:
            at = "" if target.at is None else f"@{target.at}"
            self.mark(path[-1].digest, "leaf", f"{target.session}{at}")

    def add_left_behind(self, session: str) -> None:
        """Take the nodes that rewinds of a session left behind."""
        handle = self._store.session(session)
        for entry in handle.history():
            if entry.operation == "rewind":
                try:
                    earlier = handle.entry(entry.revision - 1)
                except NotFoundError:
                    # Taken away since: what it had alone is gone with it.
                    continue
                place = Target(naming.REVISION, "", earlier.manifest, session, earlier.revision)
                self.add(place, scope="full")

    def _take(self, digests: Sequence[bytes]) -> None:
        for digest, header in zip(digests, graph.read_headers(self._reader, digests), strict=True):
            self.headers[digest] = header

    def mark(self, digest: bytes, kind: str, text: str) -> None:
        """Note what stands at a node."""
        marks = self.marks.setdefault(bytes(digest), [])
        if Mark(kind, text) not in marks:
            marks.append(Mark(kind, text))

    def mark_names(self, sessions: Sequence[str]) -> None:
        """Note labels of these sessions, tags, and sessions forked from them."""
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
        """Note where other sessions were forked from these."""
        for fork in forks[:_MARKS]:
            try:
                entry = self._store.session(fork.source).entry(fork.revision)
            except NotFoundError:
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
        """The parent of each node; of one whose parent is hidden, the next that is not."""
        found: dict[bytes, bytes | None] = {}
        # What was left out was put in before all that is here: there is nothing to look for.
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


class Fork(NamedTuple):
    """A session that was forked from another."""

    session: str
    source: str
    revision: int
    node: str | None


def forks_of(store: Store) -> list[Fork]:
    """All forks there are."""
    found: list[Fork] = []
    # From the rows alone: a store may have very many sessions, and few are forks of these.
    for row in scan(store.engine, "heads", b"", None):
        head = decode_head(row.value)
        session = head.long_id or keys.session_of(row.key)
        if head.origin is not None and session is not None:
            found.append(Fork(session, *head.origin))
    return found


def family(sessions: Sequence[str], forks: Sequence[Fork]) -> list[str]:
    """These sessions, all that were forked from them or they from, and so on."""
    known = dict.fromkeys(sessions)
    grown = True
    while grown:
        grown = False
        for fork in forks:
            if (fork.session in known) != (fork.source in known):
                known[fork.session] = known[fork.source] = None
                grown = True
    return list(known)


@command(
    _SECTION,
    Shape(
        "log",
        {
            "sessions": "the sessions drawn",
            "nodes": Part(
                "newest first, children before parents",
                {
                    "id": "its id",
                    "digest": "names it and its whole path",
                    "parent": "the id of its parent, null for a root",
                    "parent_digest": "its parent among those shown: a hidden one is passed over",
                    "seq": "its place in insertion order",
                    "depth": "how many nodes its path has",
                    "time": "the runtime's own",
                    "marks": Part(
                        "what stands at it",
                        {"kind": "leaf, label, tag or fork", "name": "the session, label or tag"},
                    ),
                    "summary": "who says what, its beginning",
                    "payload": "with --payloads, else null",
                },
            ),
            "more": "how many nodes are not listed",
        },
    ),
    "casstore log agent",
    "casstore log agent --graph --forks",
    "casstore log --graph --all --limit 0",
)
@click.argument("names", nargs=-1, metavar="[NAME]…", shell_complete=complete_name)
@click.option("--graph", "-g", "drawn", is_flag=True, help="All branches, drawn; else the path.")
@click.option("--forks", is_flag=True, help="Also sessions forked from these, or these from.")
@click.option("--all", "-a", "everything", is_flag=True, help="All sessions.")
@click.option("--rewound", is_flag=True, help="Also branches that rewinds have left.")
@click.option(
    "--limit", "-n", type=click.IntRange(0), default=100, show_default=True,
    help="At most so many nodes; 0: all.",
)  # fmt: skip
@click.option("--payloads", "-p", is_flag=True, help="The payloads, whole.")
def log(
    app: App,
    names: tuple[str, ...],
    drawn: bool,
    forks: bool,
    everything: bool,
    rewound: bool,
    limit: int,
    payloads: bool,
) -> None:
    """List the nodes of sessions, newest first, as git log does with commits.

    NAME is a session, SESSION@REVISION, SESSION~2, or PLACE#NODE for the path to a node. With
    --graph every branch is drawn, and where sessions parted; nodes that several sessions share
    are drawn once. At a node stand the sessions that end there, labels, tags and forks.
    """
    if not names and not everything:
        raise click.UsageError(
            "which session? Name one, or say --all; casstore sessions lists them"
        )
    with app.open() as store:
        all_forks = forks_of(store) if drawn or forks or everything else []
        targets = [_session_target(store, one) for one in names]
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
                    # The source of a fork may be deleted long since.
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
        _answer(app, found, shown, parents, listed, total, drawn=drawn, payloads=payloads)


def _session_target(store: Store, text: str) -> Target:
    target = naming.resolve(store, text)
    if target.session is None:
        raise InvalidInputError(
            f"{text!r} is {naming.described(store, target)}; log lists the nodes of sessions"
        )
    return target


def _answer(
    app: App,
    found: Graph,
    sessions: list[str],
    parents: dict[bytes, bytes | None],
    listed: list[bytes],
    total: int,
    *,
    drawn: bool,
    payloads: bool,
) -> None:
    nodes: list[dict[str, Any]] = []
    lines: list[tuple[bytes, str, Any]] = []
    for digest, node in zip(listed, found.read(listed), strict=True):
        header = node.header
        lines.append((digest, header.id, node.payload))
        if app.as_json:
            above = parents[digest] or b""
            nodes.append(
                {
                    "id": header.id,
                    "digest": digest.hex(),
                    "parent": header.parent_id,
                    "parent_digest": above.hex() if above in found.headers else None,
                    "seq": header.seq,
                    "depth": header.depth,
                    "time": header.time,
                    "marks": [
                        {"kind": one.kind, "name": one.text} for one in found.marks.get(digest, ())
                    ],
                    "summary": summary(node.payload, _TEXT_WIDTH),
                    "payload": plain(node.payload) if payloads else None,
                }
            )

    def render(to: Printer) -> None:
        lanes = Lanes()
        for digest, node_id, payload in lines:
            before, after = lanes.draw(digest, parents[digest]) if drawn else ("*", [])
            marks = _marks(found.marks.get(digest, ()))
            shown_id = clip_name(node_id)
            taken = len(before) + len(shown_id) + sum(len(_text(mark)) for mark in marks) + 4
            told = [] if payloads else [summary(payload, to.room(taken, 120))]
            to.line(*_coloured(before), " ", name(shown_id), " ", *marks, *told)
            if payloads:
                beside = lanes.beside() if drawn else "|"
                to.json(payload, before=(dim(beside), "   "))
            for connection in after:
                to.line(*_coloured(connection))
        if total > len(lines):
            app.remark(f"… {total - len(lines):,} more: --limit 0")

    app.answer({"sessions": sessions, "nodes": nodes, "more": total - len(listed)}, render)


def _text(part: Text) -> str:
    return part if isinstance(part, str) else part.text


def _marks(marks: Sequence[Mark]) -> list[Text]:
    if not marks:
        return []
    colours = {"leaf": "green", "label": "cyan", "tag": "magenta", "fork": "blue"}
    words = {"leaf": "", "label": "label ", "tag": "tag ", "fork": "forked as "}
    parts: list[Text] = ["("]
    for at, mark in enumerate(marks):
        if at:
            parts.append(", ")
        parts.append(
            Styled(words[mark.kind] + clip_name(mark.text, 60), fg=colours[mark.kind], bold=True)
        )
    return [*parts, ") "]


_LANE_COLOURS: Final = ("red", "green", "blue", "magenta", "cyan")


def _coloured(lanes: str) -> list[Text]:
    """Lanes in colours of their own; the star of a node stays plain."""
    return [
        char if char in "* " else Styled(char, fg=_LANE_COLOURS[at // 2 % len(_LANE_COLOURS)])
        for at, char in enumerate(lanes)
    ]
