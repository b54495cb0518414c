"""The page that compares two places: where they diverged, nodes on either side, the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from casstore.cli import naming
from casstore.cli.payloads import Block
from casstore.errors import InvalidInputError
from casstore.format.digest import Digest, Kind
from casstore.objects import graph
from casstore.session.compare import NodeRef
from casstore.ui.views import values
from casstore.ui.views.things import hidden_digests
from casstore.ui.views.timeline import brief_message
from casstore.ui.views.values import ShownChange
from casstore.ui.views.viewed import Viewed

_NODES: Final = 40


class Side(NamedTuple):
    """One of the two places."""

    text: str
    digest: str
    session: str | None
    revision: int | None


class ComparedNode(NamedTuple):
    """A node that only one of the two has."""

    id: str
    digest: str
    depth: int
    is_hidden: bool
    role: str
    blocks: tuple[Block, ...]


class Compared(NamedTuple):
    """Two places side by side."""

    old: Side
    new: Side
    is_equal: bool
    ancestor: ComparedNode | None
    dropped: tuple[ComparedNode, ...]
    added: tuple[ComparedNode, ...]
    dropped_total: int
    added_total: int
    changes: tuple[ShownChange, ...]
    changes_total: int


def compare(viewed: Viewed, old: str, new: str) -> Compared:
    """Compare two places, named as on the command line: SESSION, SESSION@REVISION, TAG …"""
    sides = [_side(viewed, text) for text in (old, new)]
    digests = [Digest.from_hex(side.digest) for side in sides]
    found = viewed.store.compare(digests[0], digests[1])
    plain = [one for one in found.changes if one.path[0] not in found.details]
    return Compared(
        sides[0],
        sides[1],
        found.equal,
        None if found.ancestor is None else _nodes(viewed, [found.ancestor], sides[1])[0],
        _nodes(viewed, found.dropped[:_NODES], sides[0]),
        _nodes(viewed, found.added[:_NODES], sides[1]),
        len(found.dropped),
        len(found.added),
        values.show_difference(plain, found.details, found.failures),
        len(plain) + sum(map(len, found.details.values())),
    )


def _side(viewed: Viewed, text: str) -> Side:
    target = naming.resolve_place(viewed.store, text)
    if target.digest is None:
        raise InvalidInputError(
            f"{text!r} has no checkpoint: it is a session without a commit, or a record; "
            "compare sessions, revisions or tags of them"
        )
    if naming.kind_of(viewed.store, target.digest) != Kind.MANIFEST:
        kind = naming.described(viewed.store, target)
        raise InvalidInputError(f"{text!r} is {kind}; compare sessions, revisions or tags of them")
    return Side(target.text, target.digest.hex(), target.session, target.revision)


def _nodes(viewed: Viewed, nodes: Sequence[NodeRef], side: Side) -> tuple[ComparedNode, ...]:
    hidden = hidden_digests(viewed, side.session) if nodes else ()
    stored = graph.stored_nodes(viewed.reader(), [node.digest for node in nodes])
    found: list[ComparedNode] = []
    for node, content in zip(nodes, stored, strict=True):
        is_hidden = node.digest in hidden
        role = ""
        blocks: tuple[Block, ...] = ()
        if not is_hidden:
            message = brief_message(content.payload)[0]
            role, blocks = message.role, message.blocks
        found.append(ComparedNode(node.id, node.digest.hex(), node.depth, is_hidden, role, blocks))
    return tuple(found)
