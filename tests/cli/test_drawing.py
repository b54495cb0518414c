"""The drawing of a graph shows the graph: every line from a node leads to its parent."""

from __future__ import annotations

import io
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.cli.log import Lanes, order
from casstore.cli.output import Cells, Column, Printer, name


def draw(parents: dict[int, int | None]) -> tuple[list[str], list[int]]:
    """The picture, and the nodes in the order of their stars."""
    lanes = Lanes()
    lines: list[str] = []
    nodes = list(order(parents, sorted(parents, reverse=True)))
    for node in nodes:
        line, after = lanes.draw(node, parents[node])
        lines += [line, *after]
    return lines, nodes


def char(line: str, at: int) -> str:
    return line[at] if 0 <= at < len(line) else " "


def follow(lines: list[str], row: int, at: int) -> tuple[int, int] | None:
    """From a star down to the next star on its line; None if the line ends."""
    while row + 1 < len(lines):
        below = lines[row + 1]
        if at % 2:
            # On the way to the left: on across a lane, or into one.
            at = at - 2 if char(below, at - 2) == "/" and char(below, at - 1) == "|" else at - 1
            if at % 2 == 0 and char(below, at) not in "|*":
                return None
        elif char(below, at) not in "|*":
            if char(below, at - 1) != "/":
                return None
            at -= 1
        row += 1
        if char(lines[row], at) == "*":
            return row, at
    return None


def read(lines: list[str], nodes: list[int]) -> dict[int, int | None]:
    """The graph that a picture shows."""
    rows = [row for row, line in enumerate(lines) if "*" in line]
    assert len(rows) == len(nodes)
    node_at = {(row, lines[row].index("*")): node for row, node in zip(rows, nodes, strict=True)}
    found: dict[int, int | None] = {}
    for (row, at), node in node_at.items():
        end = follow(lines, row, at)
        found[node] = None if end is None else node_at[end]
    return found


@st.composite
def trees(draws: st.DrawFn) -> dict[int, int | None]:
    """Nodes with earlier nodes as parents; some branch off, few are roots of their own."""
    count = draws(st.integers(1, 24))
    parents: dict[int, int | None] = {0: None}
    for node in range(1, count):
        choices = st.one_of(st.just(node - 1), st.integers(0, node - 1))
        parents[node] = draws(choices)
    return parents


@settings(max_examples=80, deadline=None)
@given(trees())
def test_the_drawn_graph_can_be_read_back_as_its_tree(parents: dict[int, int | None]) -> None:
    lines, nodes = draw(parents)
    assert sorted(nodes) == sorted(parents)
    assert read(lines, nodes) == parents, "\n".join(lines)


@settings(max_examples=20, deadline=None)
@given(trees())
def test_children_come_before_their_parents(parents: dict[int, int | None]) -> None:
    seen: set[int] = set()
    for node in order(parents, sorted(parents, reverse=True)):
        assert parents[node] not in seen
        seen.add(node)


def test_two_branches_are_drawn_as_git_draws_them() -> None:
    lines, _ = draw({0: None, 1: 0, 2: 1, 3: 1, 4: 3})
    assert lines == ["*", "*", "| *", "|/", "*", "*"]


def test_a_thousand_branches_of_one_node_take_two_lanes() -> None:
    lines, _ = draw({0: None, **dict.fromkeys(range(1, 1001), 0)})
    assert max(len(line) for line in lines) == 3


def test_crossing_branches_are_drawn_unambiguously() -> None:
    # 4 and 5 hang on 0 and 1, with a branch between them.
    parents = {0: None, 1: 0, 2: 1, 3: 0, 4: 2, 5: 1, 6: 3}
    lines, nodes = draw(parents)
    assert read(lines, nodes) == parents


def test_a_root_ends_its_lane() -> None:
    lanes = Lanes()
    assert lanes.draw("a", None) == ("*", [])
    assert lanes.draw("b1", "b") == ("*", [])
    assert lanes.draw("c", None) == ("| *", [])
    assert lanes.draw("d1", "d") == ("| *", [])
    assert lanes.draw("b", None) == ("* |", [" /"])
    assert lanes.draw("d", None) == ("*", [])


# --- tables -------------------------------------------------------------------------------


def test_a_table_is_the_same_on_a_terminal_and_in_a_file() -> None:
    rng = random.Random(1)
    texts = ["", "a", "é", "😀😀", "汉字", "x" * 70, "\x1b[31m", "[b]m[/b]", "\u0301e", "a b"]
    for _ in range(40):
        columns = [
            Column(rng.choice(["", "id", "session"]), rng.random() < 0.3, rng.random() < 0.3)
            for _ in range(rng.randint(1, 5))
        ]
        rows: list[Cells] = [
            [name(rng.choice(texts)) if rng.random() < 0.5 else rng.choice(texts) for _ in columns]
            for _ in range(rng.randint(0, 6))
        ]
        pages = io.StringIO(), io.StringIO()
        plain, shown = Printer(pages[0]), Printer(pages[1])
        # As if on a terminal that is wide enough for everything, and has no colours.
        shown.is_terminal = True
        for to in (plain, shown):
            to.table(columns, rows)
        assert pages[0].getvalue() == pages[1].getvalue()
