"""A graph drawn beside its nodes, as git draws it.

Each branch has a lane. A lane holds the name of the node that it comes to next; where a
node's parent is awaited by another lane, the right one of the two bends into the left one.
Names may be anything that can be compared; nothing is known here of what they stand for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def order(parents: Mapping[Name, Name | None], newest_first: Sequence[Name]) -> Iterator[Name]:
    """All nodes, children before parents, each branch in one piece down to where it parts.

    ``newest_first`` are all nodes in the order in which branches are begun.
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
    """Draws node after node."""

    def __init__(self) -> None:
        self._lanes: list[Hashable | None] = []

    def draw(self, node: Hashable, parent: Hashable | None) -> tuple[str, list[str]]:
        """The lanes on the line of a node, and the lines that follow it.

        Lanes that come to an end leave their place to those on the right.
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

    def beside(self) -> str:
        """The lanes as they stand, for a line beside them."""
        return " ".join("|" * len(self._lanes))

    def _close(self, at: int) -> list[str]:
        """End a lane; those on its right move over."""
        del self._lanes[at]
        if at == len(self._lanes):
            return []
        return [self._picture(at, dict.fromkeys(range(at, len(self._lanes)), "/"))]

    def _picture(self, straight: int, bent: Mapping[int, str]) -> str:
        """Lanes below ``straight`` go on; from there on each comes from the right of its place."""
        cells = [" "] * (2 * len(self._lanes) + 1)
        for lane in range(straight):
            cells[2 * lane] = "|"
        for lane in bent:
            cells[2 * lane + 1] = "/"
        return "".join(cells).rstrip()

    def _merge(self, left: int, right: int) -> list[str]:
        """Bend the right lane into the left one, across those between them."""
        lines: list[str] = []
        before = len(self._lanes)
        del self._lanes[right]
        for step in range(right, left, -1):
            cells = [" "] * (2 * before)
            for lane in range(before):
                if step == right:
                    # The first step: the lane leaves its place, and others move up to it.
                    if lane < right:
                        cells[2 * lane] = "|"
                    elif lane > right:
                        cells[2 * lane - 1] = "/"
                elif lane < before - 1:
                    cells[2 * lane] = "|"
            cells[2 * step - 1] = "/"
            lines.append("".join(cells).rstrip())
        return lines
