"""Reads messages: the active ones, all in order of arrival, or one by number."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from casstore.errors import CorruptionError, NotFoundError
from casstore.records.log.data import Message
from casstore.records.log.messages import check_number, message_of
from casstore.records.log.tables import At, LogTables
from casstore.session.attempts import read_again
from casstore.session.loading import PATH, Nodes, open_nodes, visible_leaf
from casstore.session.state import State


class Numbered:
    """The nodes of a session by number, some of which may have been removed."""

    def __init__(self, nodes: Nodes, last: int) -> None:
        self.nodes = nodes
        # Numbers ascend along the path. If there are as many nodes as numbers, none is missing, and
        # a number gives its position without a search.
        self._whole = len(nodes) == last

    def between(self, first: int, last: int) -> Nodes:
        """The nodes from ``first`` to ``last``, inclusive."""
        return self.nodes[self._position(first) : self._position(last + 1)]

    def _position(self, number: int) -> int:
        if self._whole:
            return min(max(number - 1, 0), len(self.nodes))
        return bisect_left(
            range(len(self.nodes)), number, key=lambda place: int(self.nodes[place].id)
        )


def nodes_of(
    tables: LogTables, session: str, revision: State, last: int, *, payloads: bool = True
) -> Numbered:
    """The nodes of a session at a revision whose last message is ``last``."""
    runtime = tables.runtime
    hidden = runtime.hidden(revision.head)
    leaf, _ = visible_leaf(runtime, revision, hidden)
    nodes = open_nodes(runtime, session, revision, hidden, PATH, leaf, payloads=payloads)
    return Numbered(nodes, last)


def numbered(tables: LogTables, at: At, *, payloads: bool = True) -> Numbered:
    """As ``nodes_of``, for a session that was read."""
    return nodes_of(tables, at.session, at.revision, at.last, payloads=payloads)


def opened(tables: LogTables, session: str, *, payloads: bool = True) -> tuple[At, Numbered]:
    """The current revision of a session, and its nodes."""

    def read() -> tuple[At, Numbered]:
        at = tables.at(session)
        return at, numbered(tables, at, payloads=payloads)

    return read_again(read)


def active(tables: LogTables, session: str) -> list[Message]:
    """The messages shown, in their order: the context of the next call of a model."""

    def read() -> list[Message]:
        at, nodes = opened(tables, session)
        return [
            message_of(node, at.state.view)
            for first, last in at.state.view.shown(at.last)
            for node in nodes.between(first, last)
        ]

    return read_again(read)


def every(tables: LogTables, session: str, first: int, last: int | None) -> Iterator[Message]:
    """All current messages in order of arrival, including folded ones; read a page at a time."""
    check_number(first, "first")
    if last is not None:
        check_number(last, "last")
    at, nodes = opened(tables, session)
    return _from(tables, at, nodes, first, at.last if last is None else last)


def _from(tables: LogTables, at: At, nodes: Numbered, first: int, last: int) -> Iterator[Message]:
    """Yield messages by number; continue on the head if the revision is deleted meanwhile."""
    last_error = ""
    while True:
        try:
            for node in nodes.between(first, last):
                yield message_of(node, at.state.view)
                first = int(node.id) + 1
            return
        except (CorruptionError, NotFoundError) as exc:
            # A message is the same at every revision that has it. If the same object is missing
            # again, the store is damaged.
            if repr(exc) == last_error:
                raise
            last_error = repr(exc)
            at, nodes = opened(tables, at.session)


def find(tables: LogTables, session: str, number: int) -> Message | None:
    """One message; None if it does not exist or was removed."""
    check_number(number, "number")

    def read() -> Message | None:
        at, nodes = opened(tables, session)
        found = nodes.between(number, number)
        return message_of(found[0], at.state.view) if found else None

    return read_again(read)
