"""How answers are written: lines, tables and trees for people, one JSON document for programs.

Everything that people are shown goes through ``Printer``, which escapes what a terminal
would take for a command. Colours only on a terminal, and not if ``NO_COLOR`` is set.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Final, NamedTuple

import click

from casstore.cli.json_stream import json_pieces
from casstore.cli.quantities import count as quantity
from casstore.cli.spelling import safe

# Where output is not shown, nothing is cut: wide enough for any line that is worth having.
_UNSHOWN_WIDTH: Final = 1_000_000
# The most lines of a value that are counted after those shown.
_COUNTED_LINES: Final = 10_000
# Of a column that is not cut.
_LEAST_WIDTH: Final = 6


class Styled(NamedTuple):
    """A text and how it looks: what ``click.style`` takes."""

    text: str
    fg: str | None = None
    bold: bool | None = None
    dim: bool | None = None


Part = str | Styled
#: One line of a table.
Cells = list[Part]


def bold(text: str) -> Styled:
    """What matters."""
    return Styled(text, bold=True)


def dim(text: str) -> Styled:
    """What is beside."""
    return Styled(text, dim=True)


def good(text: str) -> Styled:
    """What is well, or was added."""
    return Styled(text, fg="green")


def bad(text: str) -> Styled:
    """What is wrong, or went away."""
    return Styled(text, fg="red")


def name(text: str) -> Styled:
    """What something is called."""
    return Styled(text, fg="yellow")


def other(text: str) -> Styled:
    """What differs."""
    return Styled(text, fg="cyan")


class Column(NamedTuple):
    """A column of a table."""

    title: str
    right: bool = False
    #: Is it cut, rather than the others, if the terminal is too narrow?
    gives: bool = False


def is_terminal(stream: IO[Any]) -> bool:
    """Is somebody watching?"""
    try:
        return stream.isatty()
    except ValueError:
        # Closed: nobody is.
        return False


def wants_colour(stream: IO[Any]) -> bool:
    """May this stream be given colours?"""
    return (
        is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


class Printer:
    """Writes for people."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.is_terminal = is_terminal(stream)
        self._colour = wants_colour(stream)
        shown = shutil.get_terminal_size((100, 24)).columns
        self.width = max(40, shown) if self.is_terminal else _UNSHOWN_WIDTH

    def room(self, taken: int, usual: int = 100) -> int:
        """How wide a text may be beside ``taken`` columns; ``usual`` where nobody watches."""
        return max(20, (self.width if self.is_terminal else usual) - taken)

    def line(self, *parts: Part) -> None:
        """One line of parts."""
        self._write("".join([self._styled(part) for part in parts]) + "\n")

    def _styled(self, part: Part) -> str:
        if isinstance(part, str):
            return safe(part)
        text = safe(part.text)
        if not self._colour or not text:
            return text
        return click.style(text, fg=part.fg, bold=part.bold, dim=part.dim)

    def json(self, value: Any, *, before: Sequence[Part] = ()) -> None:
        """A value as JSON, in lines that begin with ``before``; nothing of it is cut."""
        begin = "".join([self._styled(part) for part in before])
        ascii_only = not has_all_characters(self._stream)
        self._write(begin)
        for piece in json_pieces(value, ascii_only=ascii_only):
            self._write(piece.replace("\n", "\n" + begin) if begin else piece)
        self._write("\n")

    def json_lines(self, value: Any, lines: int, width: int) -> None:
        """The first lines of a value as JSON, each cut to a width, and how many there are more."""
        count, line = 0, ""
        # What follows is counted, but not for ever.
        for piece in json_pieces(value):
            first, *others = piece.split("\n")
            line += first[: max(0, width - len(line))]
            for other in others:
                if count < lines:
                    self.line(line)
                count, line = count + 1, other[:width]
            if count >= lines + _COUNTED_LINES:
                break
        else:
            if count < lines:
                self.line(line)
            count += 1
        if count > lines:
            more = count - lines
            some = "more than " if more >= _COUNTED_LINES else ""
            self.line(dim(f"… {some}{quantity(more, 'more line')}: --full"))

    def facts(self, facts: Iterable[tuple[str, str | Sequence[Part]]]) -> None:
        """Names and values, one below the other."""
        rows = list(facts)
        wide = max((len(title) for title, _ in rows), default=0)
        for title, value in rows:
            parts: Sequence[Part] = [value] if isinstance(value, str) else value
            self.line(dim(title.ljust(wide)), "  ", *parts)

    def table(self, columns: Sequence[Column], rows: Iterable[Cells]) -> None:
        """Rows under titles."""
        if not self.is_terminal:
            self._plain_table(columns, rows)
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in columns:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=True,
                overflow="ellipsis",
                min_width=None if column.gives or column.right else _LEAST_WIDTH,
                ratio=None,
            )
        for row in rows:
            cells = [
                Text(safe(cell), no_wrap=True)
                if isinstance(cell, str)
                else Text(safe(cell.text), style=_rich_style(cell), no_wrap=True)
                for cell in row
            ]
            table.add_row(*cells)
        self._render(table)

    def _plain_table(self, columns: Sequence[Column], rows: Iterable[Cells]) -> None:
        """The same where nothing is cut and nothing coloured: many times as fast."""
        from rich.cells import cell_len

        lines = [[column.title for column in columns]]
        lines += [
            [safe(cell if isinstance(cell, str) else cell.text) for cell in row] for row in rows
        ]
        sizes = [[cell_len(cell) for cell in line] for line in lines]
        widths = [
            max(0 if column.gives or column.right else _LEAST_WIDTH, *[line[at] for line in sizes])
            for at, column in enumerate(columns)
        ]
        for line, taken in zip(lines, sizes, strict=True):
            shown = ""
            for column, cell, size, width in zip(columns, line, taken, widths, strict=True):
                gap = " " * (width - size)
                shown += (gap + cell if column.right else cell + gap) + "  "
            self._write(shown.rstrip() + "\n")

    def tree(self, title: Part, branches: Iterable[Branch]) -> None:
        """Something and what belongs to it."""
        from rich.tree import Tree

        root = Tree(_rich_text(title), guide_style="dim")
        _grow(root, branches)
        self._render(root)

    def _render(self, what: Any) -> None:
        from rich.console import Console

        page = io.StringIO()
        console = Console(
            file=page,
            force_terminal=self._colour,
            no_color=not self._colour,
            width=self.width,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )
        console.print(what)
        for line in page.getvalue().splitlines():
            self._write(line.rstrip() + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)


class Branch(NamedTuple):
    """A line of a tree, and what is below it."""

    label: Part
    below: Sequence[Branch] = ()


def _grow(tree: Any, branches: Iterable[Branch]) -> None:
    for branch in branches:
        _grow(tree.add(_rich_text(branch.label)), branch.below)


def _rich_text(part: Part) -> Any:
    from rich.text import Text

    if isinstance(part, str):
        return Text(safe(part))
    return Text(safe(part.text), style=_rich_style(part))


def _rich_style(part: Styled) -> str:
    words = [part.fg or "", "bold" if part.bold else "", "dim" if part.dim else ""]
    return " ".join([word for word in words if word])


def write_json(stream: IO[str], document: Mapping[str, Any]) -> None:
    """One JSON document."""
    for piece in json_pieces(document, ascii_only=needs_ascii(stream)):
        stream.write(piece)
    stream.write("\n")


def needs_ascii(stream: IO[Any]) -> bool:
    """Must JSON be ASCII here? On a terminal text could be commands."""
    return is_terminal(stream) or not has_all_characters(stream)


def has_all_characters(stream: IO[Any]) -> bool:
    """Can every character be written to it? What cannot is escaped, and not as JSON does."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return encoding.lower().replace("_", "-") in ("utf-8", "utf8")
