"""``show``: prints a session, revision, node, record or object."""

from __future__ import annotations

import codecs
from itertools import islice
from typing import Any, Final

import click

from casstore.cli import fields, naming
from casstore.cli.command import App, command
from casstore.cli.fields import Field, Fields, nested
from casstore.cli.naming import Target, complete_name
from casstore.cli.output import Printer, Styled, TreeLine, dim, name
from casstore.cli.places import (
    SHOWN_NODE,
    at_path,
    checkpoint_document,
    hidden_nodes,
    load,
    node_document,
    node_summary,
    open_object,
    parse_path,
    read_node,
    read_nodes,
)
from casstore.cli.quantities import count, moment_or_none, size, time_words
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
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import Stored
from casstore.store import Store

_NODES_SHOWN: Final = 10
_LINES_SHOWN: Final = 40
# How many bytes of a blob are read.
_BLOB_SHOWN: Final = 400
# A value up to this size is shown whole.
_WHOLE_BYTES: Final = 1 << 20

_ENTRY: Final[Fields] = {
    "system": Field("the title of its record system", "records", of="system.title"),
    "id": Field("its id within the system", "entry", of="entry.id"),
    "title": Field("how a person recognises it", "title", of="entry.title"),
    "changed_at": Field(
        "when it last changed, null if not known", "last change",
        of="entry.changed_at",
    ),
    "size_bytes": Field(
        "keys and values of its rows, without objects that they link to", "size of rows",
        of="entry.size_bytes",
    ),
}  # fmt: skip
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
            value = at_path(store, target, parse_path(path))
            document = _document(store, target)
            document.update(checkpoint=None, node=None, value=plain(value))
            app.answer(document, lambda to: _write_value(to, document["value"], full=full))
            return
        document = _document(store, target)
        app.answer(document, lambda to: _Shown(store, target, document, to, full=full).write())


def _document(store: Store, target: Target) -> dict[str, Any]:
    document: dict[str, Any] = dict.fromkeys(_FIELDS)
    document.update(name=target.text, kind=target.kind, links=[], kept_by=[])
    if target.session is not None:
        document["session"] = fields.document(SESSION_FIELDS, store.session(target.session).info())
        if target.revision is not None:
            entry = store.session(target.session).entry(target.revision)
            [document["revision"]] = entry_documents(store, target.session, [entry])
    if target.entry is not None:
        document["entry"] = fields.document(_ENTRY, target)
        document["value"] = plain(load(store, target))
    if target.digest is None:
        return document
    document["digest"] = target.digest.hex()
    document["kept_by"] = [pin.name for pin in store.pins() if pin.digest == target.digest]
    if target.kind == naming.TAG:
        pin = store.find_pin(target.text.partition(":")[2])
        document["expires_at"] = moment_or_none(None if pin is None else pin.expires_at_ms)
    item = PieceReader(store.engine).get(target.digest)
    if target.kind in (naming.TAG, naming.OBJECT):
        document["kind"] = naming.kind_name(store, target.digest)
    if item.kind == Kind.MANIFEST:
        document["checkpoint"] = plain(checkpoint_document(store, target.digest, hydrate=False))
    elif item.kind == Kind.NODE:
        node = plain(node_document(read_node(store, target.digest, target.session)))
        document["node"] = node
        if node["hidden"]:
            return document
    elif item.kind in (Kind.BLOB, Kind.ROPE):
        with store.open_blob(target.digest) as blob:
            document["size_bytes"] = blob.seek(0, 2)
        return document
    elif item.kind == Kind.VALUE:
        try:
            document["value"] = plain(store.get_value(target.digest, max_bytes=_WHOLE_BYTES))
        except LimitError:
            # Long: its entries are shown, each cut.
            document["value"] = None
    document["size_bytes"] = len(item.data)
    document["links"] = [digest.hex() for digest in _links(item.kind, item.data)]
    return document


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
        self, store: Store, target: Target, document: dict[str, Any], to: Printer, *, full: bool
    ) -> None:
        self._store = store
        self._target = target
        self._document = document
        self._to = to
        self._full = full

    def write(self) -> None:
        """Write the target."""
        self._title()
        if self._document["checkpoint"] is not None:
            self._checkpoint()
        if self._document["node"] is not None:
            self._node()
        if self._document["value"] is not None:
            _write_value(self._to, self._document["value"], full=self._full)
        elif self._document["kind"] in ("value", "list", "map"):
            self._view()
        elif self._document["kind"] == "blob":
            self._blob()
        if self._document["checkpoint"] is not None and self._target.session is not None:
            self._last_nodes()

    def _title(self) -> None:
        answer = self._document
        facts: list[tuple[str, Any]] = []
        session, revision = answer["session"], answer["revision"]
        if answer["entry"] is not None:
            facts += fields.facts(_ENTRY, answer["entry"])
        if session is not None:
            facts += fields.facts(SESSION_FIELDS, session)
            if session["name"] != session["id"]:
                facts.insert(1, ("name", session["name"]))
        if revision is not None:
            made = f"{operation_words(revision)}, {time_words(revision['committed_at'])}"
            facts.append(("revision", f"{revision['revision']} ({made})"))
            if revision["turn"] is not None:
                facts.append(("turn", revision["turn"]))
            if revision["labels"]:
                facts.append(("labels", ", ".join(revision["labels"])))
        elif session is not None:
            facts.append(("revision", "nothing was committed yet"))
        if answer["digest"] is not None:
            what = "checkpoint" if answer["checkpoint"] is not None else answer["kind"]
            facts.append((what, [name(answer["digest"])]))
        if (
            answer["size_bytes"] is not None
            and answer["checkpoint"] is None
            and answer["node"] is None
        ):
            facts.append(("size", f"{size(answer['size_bytes'])} ({answer['size_bytes']:,} bytes)"))
        if answer["kept_by"]:
            facts.append(("kept by", ", ".join(answer["kept_by"])))
        if answer["expires_at"] is not None:
            facts.append(("until", time_words(answer["expires_at"])))
        if answer["node"] is not None:
            facts += self._node_facts(answer["node"])
        self._to.facts(facts)

    def _node_facts(self, node: dict[str, Any]) -> list[tuple[str, str]]:
        facts = [("id", node["id"]), ("parent", node["parent"] or "none, a root")]
        facts += [("number", str(node["seq"])), ("depth", count(node["depth"], "node"))]
        facts += [(key, str(node[key])) for key in ("time", "frame") if node[key] is not None]
        if node["cause"] is not None:
            facts.append(("cause", brief(node["cause"], self._to.room(10, 120))))
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

    def _node(self) -> None:
        node = self._document["node"]
        if node["hidden"]:
            self._to.line("hidden by a tombstone")
            return
        _write_value(self._to, node["payload"], full=self._full)

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
