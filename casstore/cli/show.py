"""``show``: prints a session, revision, node, record or object."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

import click

from casstore.cli import fields, naming
from casstore.cli.command import App, command
from casstore.cli.fields import Field, Fields, described, nested
from casstore.cli.naming import Target, complete_name
from casstore.cli.output import Printer, Styled, TreeLine, dim, name
from casstore.cli.places import (
    HIDDEN,
    SHOWN_NODE,
    at_path,
    checkpoint_document,
    hidden_nodes,
    load,
    node_summary,
    open_object,
    parse_path,
    read_node,
    read_nodes,
)
from casstore.cli.quantities import count, moment, size, time_words
from casstore.cli.sessions import (
    ENTRY_FIELDS,
    SESSION_FIELDS,
    entry_documents,
    operation_words,
)
from casstore.cli.text import brief, plain, short
from casstore.errors import LimitError, ObjectNotFoundError
from casstore.format.canonical import Link
from casstore.format.digest import Digest, Kind
from casstore.maintenance.systems import SystemEntry
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import Stored
from casstore.session.data import Node, SessionInfo
from casstore.store import Store

_NODES_SHOWN: Final = 10
_LINES_SHOWN: Final = 40
# How many bytes of a blob are read.
_BLOB_SHOWN: Final = 400
# A value up to this size is shown whole.
_WHOLE_BYTES: Final = 1 << 20

_ENTRY: Final[Fields] = described(
    SystemEntry,
    {
        "system": Field("the title of its record system", "records", of="system.title"),
        "id": Field(label="entry", of="entry.id"),
        "title": Field(label="title", of="entry.title"),
        "changed_at": Field(label="last change", of="entry.changed_at"),
        "size_bytes": Field(label="size of rows", of="entry.size_bytes"),
    },
)
_FIELDS: Final[Fields] = {
    "name": "the unambiguous name",
    "kind": "session, revision, node, entry, manifest, value, list, map or blob",
    "digest": "the digest of the checkpoint, node or object; null before the first commit",
    "session": nested("the session, null if no session was named", SESSION_FIELDS),
    "revision": nested("the revision, null if none was named", ENTRY_FIELDS),
    "checkpoint": ('the components, as links {"$link": digest}; null for others'),
    "node": nested(
        "the node with its payload, or hidden and without it; null for others", SHOWN_NODE
    ),
    "value": "the value at --path, a short value, or the content of an entry; null for others",
    "size_bytes": "the size of the object, null for others",
    "links": "digests that an object links to, the first 1,000",
    "kept_by": "tags and pins that name the digest",
    "expires_at": "when the pin that was named expires, null for others",
    "entry": nested("the entry of a record system, null for others", _ENTRY),
}


@command(
    _FIELDS,
    "casstore show agent",
    "casstore show agent@41",
    "casstore show agent~2 --path tool_state.files",
    "casstore show 'agent#n17'",
    "casstore show 3f2a91",
)
@click.argument("name_", metavar="NAME", shell_complete=complete_name)
@click.option("--path", help='Only the value at this path: tool_state.files["a.py"].')
@click.option("--full", is_flag=True, help="Do not cut long values.")
def show(app: App, name_: str, path: str | None, full: bool) -> None:
    """Show a session, a revision, a node, a record or an object.

    NAME is a session, SESSION@REVISION, SESSION@LABEL, SESSION~2, PLACE#NODE, SYSTEM:ENTRY, a
    tag, or a digest; the beginning of an id or digest is enough if nothing else begins so.
    """
    with app.open() as store:
        target = naming.resolve(store, name_)
        if path is not None:
            value = plain(at_path(store, target, parse_path(path)))
            found = _find(store, target)._replace(checkpoint=None, node=None, value=value)
            app.answer(found, lambda to: _write_value(to, value, full=full))
            return
        found = _find(store, target)
        app.answer(found, lambda to: _Shown(store, target, found, to, full=full).write())


class _ShownTarget(NamedTuple):
    """What is shown of a target; the fields of the answer say more."""

    name: str
    kind: str
    digest: Digest | None = None
    session: SessionInfo | None = None
    revision: dict[str, Any] | None = None
    checkpoint: Any = None
    node: Node | None = None
    value: Any = None
    size_bytes: int | None = None
    links: Sequence[str] = ()
    kept_by: Sequence[str] = ()
    expires_at_ms: int | None = None
    entry: Target | None = None


def _find(store: Store, target: Target) -> _ShownTarget:
    found = _ShownTarget(target.text, target.kind)
    if target.session is not None:
        session = store.session(target.session)
        found = found._replace(session=session.info())
        if target.revision is not None:
            entry = session.entry(target.revision)
            [revision] = entry_documents(store, target.session, [entry])
            found = found._replace(revision=revision)
    if target.entry is not None:
        found = found._replace(entry=target, value=plain(load(store, target)))
    if target.digest is None:
        return found
    kept_by = [pin.name for pin in store.pins() if pin.digest == target.digest]
    found = found._replace(digest=target.digest, kept_by=kept_by)
    if target.kind == naming.TAG:
        tag = store.find_pin(target.text.partition(":")[2])
        found = found._replace(expires_at_ms=None if tag is None else tag.expires_at_ms)
    item = PieceReader(store.engine).get(target.digest)
    if target.kind in (naming.TAG, naming.OBJECT):
        found = found._replace(kind=naming.kind_name(store, target.digest))
    if item.kind == Kind.MANIFEST:
        checkpoint = plain(checkpoint_document(store, target.digest, hydrate=False))
        found = found._replace(checkpoint=checkpoint)
    elif item.kind == Kind.NODE:
        node = read_node(store, target.digest, target.session)
        if node.payload is HIDDEN:
            return found._replace(node=node)
        node = node._replace(cause=plain(node.cause), payload=plain(node.payload))
        found = found._replace(node=node)
    elif item.kind in (Kind.BLOB, Kind.ROPE):
        with store.open_blob(target.digest) as blob:
            return found._replace(size_bytes=blob.seek(0, 2))
    elif item.kind == Kind.VALUE:
        # The entries of a long value are shown instead, each cut.
        with suppress(LimitError):
            value = store.get_value(target.digest, max_bytes=_WHOLE_BYTES)
            found = found._replace(value=plain(value))
    links = [digest.hex() for digest in _links(item.kind, item.data)]
    return found._replace(size_bytes=len(item.data), links=links)


def _links(kind: int, data: bytes) -> list[bytes]:
    from casstore.format import tree
    from casstore.format.canonical import links_in

    if kind in (Kind.LIST, Kind.MAP):
        return list(tree.decode_branch(kind, data).digests)[:1000]
    return list(dict.fromkeys(links_in(data)))[:1000]


def _write_value(to: Printer, value: Any, *, full: bool) -> None:
    """A value that is already JSON, or ``Stored``."""
    if full:
        to.json(value)
    else:
        to.json_lines(value, _LINES_SHOWN, to.room(0, 200))


class _Shown:
    """Writes one target as text."""

    def __init__(
        self, store: Store, target: Target, found: _ShownTarget, to: Printer, *, full: bool
    ) -> None:
        self._store = store
        self._target = target
        self._found = found
        self._to = to
        self._full = full

    def write(self) -> None:
        """Write the target."""
        found = self._found
        self._title()
        if found.checkpoint is not None:
            self._checkpoint()
        if found.node is not None:
            self._node(found.node)
        if found.value is not None:
            _write_value(self._to, found.value, full=self._full)
        elif found.kind in ("value", "list", "map"):
            self._view()
        elif found.kind == "blob":
            self._blob()
        if found.checkpoint is not None and self._target.session is not None:
            self._last_nodes()

    def _title(self) -> None:
        found = self._found
        facts: list[tuple[str, Any]] = []
        session, revision = found.session, found.revision
        if found.entry is not None:
            facts += fields.facts(_ENTRY, fields.document(_ENTRY, found.entry))
        if session is not None:
            facts += fields.facts(SESSION_FIELDS, fields.document(SESSION_FIELDS, session))
            if session.meta.name != session.meta.session:
                facts.insert(1, ("name", session.meta.name))
        if revision is not None:
            made = f"{operation_words(revision)}, {time_words(revision['committed_at'])}"
            facts.append(("revision", f"{revision['revision']} ({made})"))
            if revision["turn"] is not None:
                facts.append(("turn", revision["turn"]))
            if revision["labels"]:
                facts.append(("labels", ", ".join(revision["labels"])))
        elif session is not None:
            facts.append(("revision", "nothing was committed yet"))
        if found.digest is not None:
            what = "checkpoint" if found.checkpoint is not None else found.kind
            facts.append((what, [name(found.digest.hex())]))
        if found.size_bytes is not None and found.checkpoint is None and found.node is None:
            facts.append(("size", f"{size(found.size_bytes)} ({found.size_bytes:,} bytes)"))
        if found.kept_by:
            facts.append(("kept by", ", ".join(found.kept_by)))
        if found.expires_at_ms is not None:
            facts.append(("until", time_words(moment(found.expires_at_ms))))
        if found.node is not None:
            facts += self._node_facts(found.node)
        self._to.facts(facts)

    def _node_facts(self, node: Node) -> list[tuple[str, str]]:
        facts = [("id", node.id), ("parent", node.parent or "none, a root")]
        facts += [("number", str(node.seq)), ("depth", count(node.depth, "node"))]
        facts += [("time", str(node.time))] if node.time is not None else []
        facts += [("frame", node.frame)] if node.frame is not None else []
        if node.cause is not None:
            facts.append(("cause", brief(node.cause, self._to.room(10, 120))))
        return facts

    def _checkpoint(self) -> None:
        found = checkpoint_document(self._store, self._target.require_digest(), hydrate=False)
        room = self._to.room(26, 120)
        branches: list[TreeLine] = []
        for key, value in found.items():
            if key in ("leaf", "node_count", "usage") or value is None or value == []:
                continue
            if isinstance(value, Link):
                branches.append(self._component(key, value.digest, room))
            else:
                branches.append(TreeLine(f"{key}  {brief(value, room)}"))
        for entry in found["usage"]:
            said = f"usage  {entry['source']}, {entry['model']}: "
            said += (
                f"{entry['input']:,} tokens in, {entry['output']:,} out, "
                f"{entry['reasoning']:,} reasoning"
            )
            branches.append(TreeLine(said))
        title = f"{count(found['node_count'], 'node')}, leaf {found['leaf'] or 'none'}"
        if self._is_leaf_hidden():
            title += " (hidden)"
        self._to.tree(Styled(title, bold=True), branches)

    def _is_leaf_hidden(self) -> bool:
        reader = PieceReader(self._store.engine)
        leaf = graph.read_manifest(reader, self._target.require_digest()).leaf
        return leaf is not None and leaf in hidden_nodes(self._store, self._target.session)

    def _component(self, key: str, digest: Digest, room: int) -> TreeLine:
        """A component and its first entries, without reading all of it."""
        label = f"{key}  {short(digest)}"
        try:
            if naming.kind_of(self._store, digest) in (Kind.BLOB, Kind.ROPE):
                with self._store.open_blob(digest) as blob:
                    return TreeLine(f"{label}  {size(blob.seek(0, 2))} of bytes")
            stored = open_object(self._store, digest)
        except ObjectNotFoundError:
            return TreeLine(Styled(f"{label}  is missing: casstore check", fg="red"))
        total = stored.entry_count()
        if total is None:
            return TreeLine(f"{label}  {brief(stored, room)}")
        below = _first(stored, 200 if self._full else 8, room)
        return TreeLine(f"{label}  {count(total, 'entry', 'entries')}", below)

    def _node(self, node: Node) -> None:
        if node.payload is HIDDEN:
            self._to.line("hidden by a tombstone")
            return
        _write_value(self._to, node.payload, full=self._full)

    def _view(self) -> None:
        stored = open_object(self._store, self._target.require_digest())
        total = stored.entry_count()
        if total is None:
            self._to.line(brief(stored, self._to.room(0, 200)))
            return
        limit = 1000 if self._full else 40
        below = _first(stored, limit, self._to.room(20, 120), ": --full, or --path")
        self._to.tree(Styled(count(total, "entry", "entries"), bold=True), below)

    def _blob(self) -> None:
        digest = self._target.require_digest()
        with self._store.open_blob(digest) as blob:
            begin = blob.read(_BLOB_SHOWN)
        try:
            # Text that is cut in the middle of a character is still text.
            text = codecs.getincrementaldecoder("utf-8")().decode(begin, len(begin) < _BLOB_SHOWN)
        except UnicodeDecodeError:
            text = begin[:32].hex(" ")
        for line in text.splitlines()[:6]:
            self._to.line(dim(line[: self._to.room(0, 200)]))
        self._to.line(dim("all of it: casstore cat " + short(digest)))

    def _last_nodes(self) -> None:
        assert self._target.session is not None
        nodes = self._store.session(self._target.session).nodes(at=self._target.at)
        shown = list(nodes[-_NODES_SHOWN:].digests())
        if len(nodes) > len(shown):
            self._to.line(dim(f"… {count(len(nodes) - len(shown), 'node')} before: casstore log"))
        room = self._to.room(20, 120)
        for node in read_nodes(self._store, shown, self._target.session):
            said = node_summary(node, max(20, room - len(node.id)))
            self._to.line(name(node.id), "  ", said)


def _first(stored: Stored, limit: int, room: int, remedy: str = "") -> list[TreeLine]:
    """The first entries of a list or map, with their indices or keys, and how many follow."""
    lines = [
        TreeLine(f"{f'[{step}]' if isinstance(step, int) else step}  {_entry(value, room)}")
        for step, value in islice(stored.entries(), limit)
    ]
    left = (stored.entry_count() or 0) - len(lines)
    return [*lines, TreeLine(dim(f"… {left:,} more{remedy}"))] if left > 0 else lines


def _entry(value: Stored, room: int) -> str:
    entries = value.entry_count()
    if entries is not None:
        return f"({count(entries, 'entry', 'entries')})"
    return brief(value, room)
