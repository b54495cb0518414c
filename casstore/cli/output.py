"""How answers are written: lines, tables and trees for people, one JSON document for programs.

``Printer`` writes all text for people and escapes characters that a terminal would interpret. It
uses colours only on a terminal, and not if ``NO_COLOR`` is set.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final, Literal, NamedTuple, Self, TextIO

import click

from casstore.cli.fields import Fields, as_field, facts, is_number, shown
from casstore.cli.quantities import count as quantity
from casstore.cli.text import json_pieces, safe

# Without a terminal nothing is cut: wide enough for any line.
_UNSHOWN_WIDTH: Final = 1_000_000
# After this many lines that are not shown, counting them stops.
_COUNTED_LINES: Final = 10_000
# The smallest width to which a column is cut.
_LEAST_WIDTH: Final = 6
# Spaces between columns.
_GAP: Final = 2


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
    """Bold, for emphasis."""
    return Styled(text, bold=True)


def dim(text: str) -> Styled:
    """Dim, for what is less important."""
    return Styled(text, dim=True)


def good(text: str) -> Styled:
    """Green, for what is good or added."""
    return Styled(text, fg="green")


def bad(text: str) -> Styled:
    """Red, for what is bad or removed."""
    return Styled(text, fg="red")


def name(text: str) -> Styled:
    """Yellow, for a name."""
    return Styled(text, fg="yellow")


def other(text: str) -> Styled:
    """Cyan, for what changed."""
    return Styled(text, fg="cyan")


def diff_line(line: str, indent: str = "") -> Styled:
    """A line of a unified diff: green if it was added, red if removed, cyan for a heading."""
    return Styled(indent + line, fg={"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))


class Column(NamedTuple):
    """A column of a table."""

    title: str
    right: bool = False
    #: Whether this column is cut if the terminal is too narrow.
    gives: bool = False


def is_terminal(stream: IO[Any]) -> bool:
    """Whether the stream is a terminal."""
    try:
        return stream.isatty()
    except ValueError:
        # The stream is closed.
        return False


def wants_colour(stream: IO[Any]) -> bool:
    """Whether to write colours to this stream."""
    return (
        is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


class Printer:
    """Writes text for people."""

    def __init__(self, stream: IO[str], *, shown_on: IO[str] | None = None) -> None:
        """Write to ``stream``, formatted for ``shown_on`` if given."""
        self._stream = stream
        self.is_terminal = is_terminal(shown_on or stream)
        self._colour = wants_colour(shown_on or stream)
        shown = shutil.get_terminal_size((100, 24)).columns
        self.width = max(40, shown) if self.is_terminal else _UNSHOWN_WIDTH

    def room(self, taken: int, usual: int = 100) -> int:
        """The columns left after ``taken``, at least 20; without a terminal of ``usual``."""
        return max(20, (self.width if self.is_terminal else usual) - taken)

    def line(self, *parts: Part) -> None:
        """One line of parts."""
        self._write("".join([self._styled(part) for part in parts]) + "\n")

    def lines(self, text: str) -> None:
        """A text of several lines."""
        for line in text.split("\n"):
            self.line(line)

    def _styled(self, part: Part) -> str:
        if isinstance(part, str):
            return safe(part)
        text = safe(part.text)
        if not self._colour or not text:
            return text
        return click.style(text, fg=part.fg, bold=part.bold, dim=part.dim)

    def json(self, value: Any, *, before: Sequence[Part] = ()) -> None:
        """A value as JSON, uncut; every line starts with ``before``."""
        begin = "".join([self._styled(part) for part in before])
        ascii_only = not has_all_characters(self._stream)
        self._write(begin)
        for piece in json_pieces(value, ascii_only=ascii_only):
            self._write(piece.replace("\n", "\n" + begin) if begin else piece)
        self._write("\n")

    def json_lines(self, value: Any, lines: int, width: int) -> None:
        """The first lines of a value as JSON, each cut to a width, and how many follow."""
        count, line = 0, ""
        # Count the remaining lines, up to a limit.
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
        """Rows under titles. Only columns that may be cut are cut, and only on a terminal."""
        from rich.cells import cell_len, set_cell_size

        lines: list[Cells] = [[bold(column.title) for column in columns], *rows]
        plain = [
            [safe(cell if isinstance(cell, str) else cell.text) for cell in line] for line in lines
        ]
        sizes = [[cell_len(cell) for cell in line] for line in plain]
        widths = [max([line[at] for line in sizes]) for at in range(len(columns))]
        giving = [at for at, column in enumerate(columns) if column.gives]
        spare = self.width - sum(widths) - _GAP * (len(columns) - 1)
        for at in sorted(giving, key=lambda one: -widths[one]):
            if spare < 0:
                cut = min(-spare, max(0, widths[at] - _LEAST_WIDTH))
                widths[at] -= cut
                spare += cut
        for line, texts, taken in zip(lines, plain, sizes, strict=True):
            parts: list[str] = []
            for at, cell in enumerate(line):
                text, used = texts[at], taken[at]
                if used > widths[at]:
                    text = set_cell_size(text, widths[at] - 1).rstrip() + "…"
                    used = cell_len(text)
                gap = " " * (widths[at] - used)
                look = text if isinstance(cell, str) else self._styled(cell._replace(text=text))
                parts.append(gap + look if columns[at].right else look + gap)
            self._write((" " * _GAP).join(parts).rstrip() + "\n")

    def rows(self, fields: Fields, found: Sequence[Mapping[str, Any]]) -> None:
        """Documents as a table: a column for each labelled field, the first styled as a name."""
        labelled = [(key, as_field(given)) for key, given in fields.items()]
        labelled = [(key, field) for key, field in labelled if field.label is not None]
        columns = [
            Column(field.label or "", right=is_number(key, field), gives=field.gives)
            for key, field in labelled
        ]
        self.table(
            columns,
            [
                [
                    (name if not at else str)(shown(key, field, one[key], counted=False))
                    for at, (key, field) in enumerate(labelled)
                ]
                for one in found
            ],
        )

    def report(self, fields: Fields, found: Mapping[str, Any]) -> None:
        """A document as text: its labelled values, then a table for each labelled list."""
        self.facts(facts(fields, found))
        for key, given in fields.items():
            field = as_field(given)
            if field.fields is not None and field.label is not None and found[key]:
                if isinstance(found[key], list):
                    self.rows(field.fields, found[key])
                else:
                    self.report(field.fields, found[key])

    def tree(self, title: Part, branches: Sequence[TreeLine]) -> None:
        """An item and its children as a tree."""
        self.line(title)
        self._branches(branches, "")

    def _branches(self, branches: Sequence[TreeLine], before: str) -> None:
        for number, branch in enumerate(branches, 1):
            guide, below = ("└── ", "    ") if number == len(branches) else ("├── ", "│   ")
            self.line(dim(before + guide), branch.label)
            self._branches(branch.below, before + below)

    def _write(self, text: str) -> None:
        self._stream.write(text)


class Pager:
    """A text stream that shows output longer than a screen through a pager, as it is written.

    Shorter output goes to the terminal itself. The pager is ``$PAGER``, else ``less``; an empty
    ``$PAGER``, or ``cat``, means no pager. Leaving the pager early is not an error.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.encoding: str = getattr(stream, "encoding", None) or "utf-8"
        self._stream = stream
        self._held: list[str] = []
        self._lines_left = shutil.get_terminal_size((100, 24)).lines - 1
        self._command = _pager_command()
        self._process: subprocess.Popen[str] | None = None
        self._left = False

    def isatty(self) -> bool:
        """True: a pager shows its input on the terminal."""
        return True

    def write(self, text: str) -> int:
        """Buffer one screenful; after that, start the pager."""
        self._held.append(text)
        self._lines_left -= text.count("\n")
        if self._lines_left < 0 and self._command and not self._left:
            self._send()
        return len(text)

    def _send(self) -> None:
        text, self._held = "".join(self._held), []
        try:
            if self._process is None:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, text=True, encoding=self.encoding,
                    errors="backslashreplace", env={"LESS": "FRX", **os.environ},
                )  # fmt: skip
            assert self._process.stdin is not None
            self._process.stdin.write(text)
        except BrokenPipeError:
            self._left = True
        except OSError:
            # The pager cannot be started: write to the terminal.
            self._command = []
            self._held = [text]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            self._stream.write("".join(self._held))
            return
        with suppress(BrokenPipeError):
            self._process.communicate()


def _pager_command() -> list[str]:
    given = os.environ.get("PAGER")
    if given is None:
        return ["less"] if shutil.which("less") else []
    command = shlex.split(given)
    return [] if command in ([], ["cat"]) else command


class TreeLine(NamedTuple):
    """A line of a tree, and what is below it."""

    label: Part
    below: Sequence[TreeLine] = ()


def write_json(stream: IO[str], document: Mapping[str, Any]) -> None:
    """One JSON document."""
    for piece in json_pieces(document, ascii_only=needs_ascii(stream)):
        stream.write(piece)
    stream.write("\n")


def needs_ascii(stream: IO[Any]) -> bool:
    """Whether JSON must be ASCII: on a terminal, text could contain control sequences."""
    return is_terminal(stream) or not has_all_characters(stream)


def has_all_characters(stream: IO[Any]) -> bool:
    """True for UTF-8. In other encodings Python escapes missing characters, which breaks JSON."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return encoding.lower().replace("_", "-") in ("utf-8", "utf8")


def prepare_streams() -> None:
    """Redirect closed streams to ``/dev/null``, and escape characters a stream cannot encode."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere <= 2:
        nowhere = os.open(os.devnull, os.O_RDWR)
    os.close(nowhere)
    sys.stdin = sys.stdin or _nowhere("r")
    sys.stdout = sys.stdout or _nowhere("w")
    sys.stderr = sys.stderr or _nowhere("w")
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _nowhere(mode: Literal["r", "w"]) -> TextIO:
    return open(os.devnull, mode, encoding="utf-8")


def let_go(stream: IO[Any]) -> None:
    """Redirect a broken stream to ``/dev/null``, so that Python's flush at exit does not fail."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        # Not a real file, so there is nothing to flush.
        return
