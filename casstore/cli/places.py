"""Reads the values that names refer to, whole or in part."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any, Final

from casstore.cli.fields import Field, Fields, as_field, read
from casstore.cli.naming import Target
from casstore.cli.text import summary
from casstore.errors import InvalidInputError, PathNotFoundError, PathStep
from casstore.format.canonical import Link
from casstore.format.digest import Digest, Kind
from casstore.format.graph import DecodedNode, link_target
from casstore.maintenance.keepers import remembered
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import Stored, open_stored, stored_field
from casstore.session.attempts import read_again
from casstore.session.checkpoint import components_of, ledger_of, read_usage
from casstore.session.data import Node
from casstore.session.scanning import scan
from casstore.session.state import decode_head, runtime_of
from casstore.store import Store

_STEP: Final = re.compile(r"""\.?([^.\[\]"]+)|\[(\d+)\]|\[?"((?:[^"\\]|\\.)*)"\]?""")
_PAGE: Final = 256


def parse_path(text: str) -> tuple[PathStep, ...]:
    """A path inside a value in its text form: ``messages[3].text``, ``files["a.py"]``."""
    steps: list[PathStep] = []
    rest = text.removeprefix("$").removeprefix(".")
    at = 0
    while at < len(rest):
        match = _STEP.match(rest, at)
        try:
            if match is None or (at and rest[at] not in ".["):
                raise ValueError
            if match[1] is not None:
                steps.append(match[1])
            elif match[2] is not None:
                steps.append(int(match[2]))
            else:
                steps.append(json.loads(f'"{match[3]}"'))
        except ValueError as exc:
            raise InvalidInputError(
                f'{text!r} is not a path; write messages[3].text or files["a.py"].size'
            ) from exc
        at = match.end()
    return tuple(steps)


class _Hidden:
    """Replaces a payload that a tombstone hides."""


HIDDEN: Final = _Hidden()


def hidden_nodes(store: Store, session: str | None) -> Container[bytes]:
    """The digests of nodes that tombstones hide in a session; without one, in any session.

    A digest or a tag names a node outside all sessions. Then the nodes that vacuum has
    removed from their sessions count as well: a tag, a pin or a fork may still keep them.
    """
    runtime = runtime_of(store)
    if session is not None:
        state = read_again(lambda: runtime.find(session))
        return () if state is None else runtime.hidden(state.head)
    found = remembered(store)
    for row in scan(store.engine, "heads", b"", None):
        head = decode_head(row.value)
        if head.hidden is not None:
            found.update(runtime.hidden(head))
    return found


def node_summary(node: Node, width: int) -> str:
    """The role and the beginning of the text of a node."""
    return "(hidden)" if node.payload is HIDDEN else summary(node.payload, width)


_SUMMARY_CHARACTERS: Final = 200
_NODE: Final[dict[str, Field]] = {
    "id": Field("its id"),
    "digest": Field("its digest, which identifies its whole path"),
    "parent": Field("the id of its parent, null for a root"),
    "seq": Field("its number in insertion order"),
    "depth": Field("the number of nodes on its path"),
    "frame": Field("the frame that the runtime gave it"),
    "time": Field("the time that the runtime gave it"),
    "cause": Field("what caused it, null if it is hidden"),
    "payload": Field(
        "its payload, null if it is hidden",
        of=lambda node: None if node.payload is HIDDEN else node.payload,
    ),
    "hidden": Field(
        "true: a tombstone hides it in this session, or in any if no session was named",
        of=lambda node: node.payload is HIDDEN,
    ),
    "summary": Field(
        "role and beginning of its text; null if it is hidden",
        of=lambda node: None if node.payload is HIDDEN else node_summary(node, _SUMMARY_CHARACTERS),
    ),
}


def node_fields(*names: str, of: str | None = None) -> Fields:
    """These fields of a ``Node``, or of the node that the report has as its attribute ``of``."""
    if of is None:
        return {name: _NODE[name] for name in names}
    return {name: _NODE[name]._replace(of=f"{of}.{name}") for name in names}


#: The fields of a node that is shown alone.
SHOWN_NODE: Final = node_fields(
    "id", "parent", "seq", "depth", "frame", "time", "cause", "payload", "hidden"
)


def node_document(node: Node) -> dict[str, Any]:
    """A node as it is shown; a hidden one without its content. Long parts stay ``Stored``."""
    return {name: read(node, name, as_field(field)) for name, field in SHOWN_NODE.items()}


def node_of(decoded: DecodedNode, digest: bytes) -> Node:
    """The node with this digest."""
    header, cause, payload = decoded
    return Node(
        header.id, payload, header.parent_id, cause, header.frame, header.time,
        header.seq, header.depth, Digest(digest),
    )  # fmt: skip


def read_node(store: Store, digest: bytes, session: str | None) -> Node:
    """A node by its digest, as visible in a session (None: outside all sessions)."""
    return next(read_nodes(store, [digest], session))


def read_nodes(store: Store, digests: Sequence[bytes], session: str | None) -> Iterator[Node]:
    """Nodes by their digests, in pages: on a server, a page is one round trip.

    Causes and payloads are ``Stored``, or None. If a tombstone hides the node, its payload is
    ``HIDDEN`` and its cause None.
    """
    hidden = hidden_nodes(store, session) if digests else ()
    for start in range(0, len(digests), _PAGE):
        page = digests[start : start + _PAGE]
        found = graph.stored_nodes(PieceReader(store.engine), page)
        for digest, decoded in zip(page, found, strict=True):
            node = node_of(decoded, digest)
            yield node._replace(cause=None, payload=HIDDEN) if digest in hidden else node


# What a checkpoint has for a component that it lacks.
_ABSENT: Final[dict[str, Any]] = {
    "turn_state": None, "tool_state": None, "plugin_snapshot": None, "plugin_revision": None,
    "execution_state": None, "frames": [], "current_frame": None, "config": None,
}  # fmt: skip


def checkpoint_document(store: Store, digest: bytes, *, hydrate: bool) -> dict[str, Any]:
    """A checkpoint as it is shown: if ``hydrate``, with components as ``Stored``, else as links.

    Long parts other than components are always ``Stored``.
    """
    reader = PieceReader(store.engine)
    manifest = graph.read_manifest(reader, digest, named=True)
    found: dict[str, Any] = {}
    for name, component in components_of(manifest).items():
        target = link_target(component)
        if target is None:
            found[name] = stored_field(reader, component)
        else:
            found[name] = open_object(store, target) if hydrate else Link(Digest(target))
    return {
        "leaf": manifest.leaf_id,
        "node_count": manifest.nodes,
        **_ABSENT,
        **found,
        "usage": [entry._asdict() for entry in read_usage(reader, ledger_of(manifest))],
    }


def open_object(store: Store, digest: bytes) -> Stored:
    """A value or blob whose parts are read only when they are needed."""
    reader = PieceReader(store.engine)
    return open_stored(reader, digest, reader.get(digest))


def load(store: Store, target: Target) -> Any:
    """The whole value of a target; long parts are ``Stored``."""
    if target.entry is not None and target.system is not None:
        return target.system.content(store, target.entry.id)
    digest = target.require_digest()
    kind = PieceReader(store.engine).get(digest).kind
    if kind == Kind.NODE:
        return node_document(read_node(store, digest, target.session))
    if kind == Kind.MANIFEST:
        return checkpoint_document(store, digest, hydrate=True)
    return open_object(store, digest)


def at_path(store: Store, target: Target, path: tuple[PathStep, ...]) -> Any:
    """The value at a path of a target; reads only the parts on the path."""
    if not path:
        return load(store, target)
    if target.entry is not None:
        return _descend(load(store, target), path)
    digest = target.require_digest()
    kind = PieceReader(store.engine).get(digest).kind
    if kind in (Kind.BLOB, Kind.ROPE):
        raise InvalidInputError("a blob has no parts to name; print it whole")
    if kind == Kind.NODE:
        return _descend(node_document(read_node(store, digest, target.session)), path)
    if kind == Kind.MANIFEST:
        whole = checkpoint_document(store, digest, hydrate=False)
        component = whole.get(str(path[0]))
        if isinstance(component, Link):
            whole[str(path[0])] = open_object(store, component.digest)
        return _descend(whole, path)
    return open_object(store, digest).at(path)


def _descend(here: Any, path: tuple[PathStep, ...]) -> Any:
    for depth, step in enumerate(path):
        if isinstance(here, Stored):
            try:
                return here.at(path[depth:])
            except PathNotFoundError as exc:
                raise PathNotFoundError((*path[:depth], *exc.path)) from exc
        try:
            if isinstance(here, str | bytes):
                raise TypeError
            here = here[step]
        except (LookupError, TypeError) as exc:
            raise PathNotFoundError(path[: depth + 1]) from exc
    return here
