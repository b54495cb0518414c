"""Messages going out: those shown in their order, all in order of arrival, or single ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from casstore.errors import CorruptionError, NotFoundError
from casstore.records.log.data import Message
from casstore.records.log.ground import At, Ground
from casstore.records.log.messages import check_number, message_of
from casstore.session.attempts import read_again
from casstore.session.nodes import PATH, Nodes, open_nodes, visible_leaf
from casstore.session.state import State


class Numbered:
    """The nodes of a session by their numbers, some of which may be gone."""

    def __init__(self, nodes: Nodes, last: int) -> None:
        self.nodes = nodes
        # Numbers rise along the path. As many nodes as numbers: none is missing.
        self._whole = len(nodes) == last

    def between(self, first: int, last: int) -> Nodes:
        """Those from one number to another, both included."""
        return self.nodes[self._position(first) : self._position(last + 1)]

    def _position(self, number: int) -> int:
        if self._whole:
            return min(max(number - 1, 0), len(self.nodes))
        return bisect_left(
            range(len(self.nodes)), number, key=lambda place: int(self.nodes[place].id)
        )


def nodes_of(
    ground: Ground, session: str, revision: State, last: int, *, payloads: bool = True
) -> Numbered:
    """The nodes of a session at a revision whose last message is ``last``."""
    runtime = ground.runtime
    hidden = runtime.hidden(revision.head)
    leaf, _ = visible_leaf(runtime, revision, hidden)
    nodes = open_nodes(runtime, session, revision, hidden, PATH, leaf, payloads=payloads)
    return Numbered(nodes, last)


def numbered(ground: Ground, at: At, *, payloads: bool = True) -> Numbered:
    """The same of a session as it was read."""
    return nodes_of(ground, at.session, at.revision, at.last, payloads=payloads)


def opened(ground: Ground, session: str, *, payloads: bool = True) -> tuple[At, Numbered]:
    """A session as it stands, and its nodes."""

    def read() -> tuple[At, Numbered]:
        at = ground.at(session)
        return at, numbered(ground, at, payloads=payloads)

    return read_again(read)


def active(ground: Ground, session: str) -> list[Message]:
    """The messages shown, in their order: what an agent goes on from."""

    def read() -> list[Message]:
        at, nodes = opened(ground, session)
        return [
            message_of(node, at.state.view)
            for first, last in at.state.view.shown(at.last)
            for node in nodes.between(first, last)
        ]

    return read_again(read)


def every(ground: Ground, session: str, first: int, last: int | None) -> Iterator[Message]:
    """All messages in order of arrival, folded ones too, as of now; read a page at a time."""
    check_number(first, "a number")
    if last is not None:
        check_number(last, "a number")
    at, nodes = opened(ground, session)
    return _from(ground, at, nodes, first, at.last if last is None else last)


def _from(ground: Ground, at: At, nodes: Numbered, first: int, last: int) -> Iterator[Message]:
    """Messages by number; from the session as it is then, if the revision goes in the midst."""
    told = ""
    while True:
        try:
            for node in nodes.between(first, last):
                yield message_of(node, at.state.view)
                first = int(node.id) + 1
            return
        except (CorruptionError, NotFoundError) as exc:
            # A message is the same at every revision that has it. What is damaged is missed again.
            if repr(exc) == told:
                raise
            told = repr(exc)
            at, nodes = opened(ground, at.session)


def find(ground: Ground, session: str, number: int) -> Message | None:
    """One message; None if there is none of this number, or no longer."""
    check_number(number, "a number")

    def read() -> Message | None:
        at, nodes = opened(ground, session)
        found = nodes.between(number, number)
        return message_of(found[0], at.state.view) if found else None

    return read_again(read)
