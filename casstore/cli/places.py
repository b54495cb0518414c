"""What stands at a place: whole values of what a name stands for, and parts of them."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any, Final

from casstore.cli.naming import Target
from casstore.cli.spelling import plain, safe_json, summary
from casstore.errors import InvalidInputError, PathNotFoundError, PathStep
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.format.hashing import Kind
from casstore.maintenance.removed_nodes import remembered
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.objects.view import View
from casstore.session.checkpoint import read_checkpoint, read_usage
from casstore.session.data import Node
from casstore.session.heads import decode_head
from casstore.session.scanning import scan
from casstore.session.state import Runtime
from casstore.store import Store

_STEP: Final = re.compile(r"""\.?([^.\[\]"]+)|\[(\d+)\]|\[?"((?:[^"\\]|\\.)*)"\]?""")
_PAGE: Final = 256
COMPONENTS: Final = ("tool_state", "plugin_snapshot", "execution_state")


def parse_path(text: str) -> tuple[PathStep, ...]:
    """A place inside a value, as a person writes it: ``messages[3].text``, ``files["a.py"]``."""
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
                f'{text!r} is no path; write messages[3].text or files["a.py"].size'
            ) from exc
        at = match.end()
    return tuple(steps)


class _Hidden:
    """Stands in the place of a payload that a tombstone hides."""


HIDDEN: Final = _Hidden()


def hidden_nodes(store: Store, session: str | None) -> Container[bytes]:
    """The digests of nodes that tombstones hide in a session; without one, in any session.

    A digest or a tag names a node outside of all sessions: then also those count that vacuum has
    removed and that something keeps.
    """
    runtime = Runtime(store)
    if session is not None:
        state = runtime.find(session)
        return () if state is None else runtime.hidden(state.head)
    found = remembered(store)
    for row in scan(store.engine, "heads", b"", None):
        head = decode_head(row.value)
        if head.hidden is not None:
            found.update(runtime.hidden(head))
    return found


def node_summary(node: Node, width: int) -> str:
    """Who says what in a node, its beginning."""
    return "(hidden)" if node.payload is HIDDEN else summary(node.payload, width)


def node_document(node: Node) -> dict[str, Any]:
    """A node as it is shown; of one that is hidden, without its content."""
    is_hidden = node.payload is HIDDEN
    return {
        "id": node.id,
        "parent": node.parent,
        "seq": node.seq,
        "depth": node.depth,
        "frame": node.frame,
        "time": node.time,
        "cause": node.cause,
        "payload": None if is_hidden else node.payload,
        "hidden": is_hidden,
    }


def read_node(store: Store, digest: bytes, session: str | None) -> Node:
    """A node by its digest, as it is seen in a session (None: outside of all)."""
    return next(read_nodes(store, [digest], session))


def read_nodes(store: Store, digests: Sequence[bytes], session: str | None) -> Iterator[Node]:
    """Nodes by their digests, in pages: on a server, a page is one round trip.

    The payload of one that a tombstone hides is ``HIDDEN``, and its cause is left out.
    """
    hidden = hidden_nodes(store, session) if digests else ()
    for start in range(0, len(digests), _PAGE):
        page = digests[start : start + _PAGE]
        found = graph.read_nodes(PieceReader(store.engine), page)
        for digest, (header, cause, payload) in zip(page, found, strict=True):
            if digest in hidden:
                cause, payload = None, HIDDEN
            yield Node(
                header.id, payload, header.parent_id, cause, header.frame, header.time,
                header.seq, header.depth, Digest(digest),
            )  # fmt: skip


def checkpoint_document(store: Store, digest: bytes, *, hydrate: bool) -> dict[str, Any]:
    """A checkpoint as it is shown; components whole, or as links."""
    reader = PieceReader(store.engine)
    manifest = graph.read_manifest(reader, digest, named=True)
    found = read_checkpoint(reader, manifest, hydrate=hydrate)
    usage = [entry._asdict() for entry in read_usage(reader, manifest.usage)]
    return {
        "leaf": manifest.leaf_id,
        "node_count": manifest.nodes,
        **found._asdict(),
        "frames": list(found.frames),
        "usage": usage,
    }


def load(store: Store, target: Target) -> Any:
    """Everything that a name stands for, as one value."""
    assert target.digest is not None
    kind = PieceReader(store.engine).get(target.digest).kind
    if kind == Kind.NODE:
        return node_document(read_node(store, target.digest, target.session))
    if kind == Kind.MANIFEST:
        return checkpoint_document(store, target.digest, hydrate=True)
    if kind in (Kind.BLOB, Kind.ROPE):
        return store.get_blob(target.digest)
    return store.get_value(target.digest)


def at_path(store: Store, target: Target, path: tuple[PathStep, ...]) -> Any:
    """What stands at a place of what a name stands for; reads only what is on the way."""
    assert target.digest is not None
    if not path:
        return load(store, target)
    kind = PieceReader(store.engine).get(target.digest).kind
    if kind in (Kind.BLOB, Kind.ROPE):
        raise InvalidInputError("a blob has no parts to name; print it whole")
    if kind == Kind.NODE:
        return _descend(node_document(read_node(store, target.digest, target.session)), path)
    if kind == Kind.MANIFEST:
        whole = checkpoint_document(store, target.digest, hydrate=False)
        component = whole.get(str(path[0]))
        if path[0] in COMPONENTS and isinstance(component, Link):
            whole[str(path[0])] = _open(store, component.digest)
        return _descend(whole, path)
    return _descend(store.view(target.digest), path)


def _open(store: Store, digest: Digest) -> Any:
    """A component, read on demand; it may be a blob."""
    if PieceReader(store.engine).get(digest).kind in (Kind.BLOB, Kind.ROPE):
        return store.get_blob(digest)
    return store.view(digest)


def _descend(here: Any, path: tuple[PathStep, ...]) -> Any:
    for depth, step in enumerate(path):
        if isinstance(here, View):
            here = here.at([step])
            continue
        try:
            if isinstance(here, str | bytes):
                raise TypeError
            here = here[step]
        except (LookupError, TypeError) as exc:
            raise PathNotFoundError(path[: depth + 1]) from exc
    return here.load() if isinstance(here, View) else here


def json_text(value: Any, *, ascii_only: bool = False) -> str:
    """A value as a person reads it, and a program, too."""
    return safe_json(json.dumps(plain(value), ensure_ascii=ascii_only, indent=2))
