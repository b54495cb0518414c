#!/usr/bin/env python3
"""Write docs/reference/cli.md from the command tree, so that it says what the commands do.

tools/cli_docs.py            write it
tools/cli_docs.py --check    end with 1 if it is not as it would be written
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click

from casstore import errors
from casstore.cli import naming
from casstore.cli.command import COMMON, Command, Kinds
from casstore.cli.fields import ERROR, Shape
from casstore.cli.main import SECTIONS, cli

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"

TEMPLATE = Path(__file__).resolve().with_suffix(".md")

# The exit codes that are not errors of the store.
OUTCOMES = (
    (0, "done"),
    (1, "done, and the answer is no: `check` found damage, `search` nothing"),
    (2, "the command line is wrong"),
)
ENDINGS = (
    (130, "interrupted by Ctrl-C"),
    (141, "the reader closed stdout before the end of the answer"),
)

# The classes that represent an exit code, in its order.
GROUPS = sorted(
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.CasstoreError)
        and kind is not errors.CasstoreError
        and "exit_code" in vars(kind)
    ],
    key=lambda kind: kind.exit_code,
)


def commands(names: list[str]) -> Iterator[Command | Kinds]:
    """The commands of these names."""
    with click.Context(cli, info_name="casstore") as ctx:
        for name in names:
            found = cli.get_command(ctx, name)
            assert found is not None
            yield found


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join([cell.replace("|", "\\|").replace("\n", " ") for cell in row]) + " |"
        for row in rows
    ]
    return "\n".join(lines)


def option_rows(options: list[click.Option]) -> list[tuple[str, ...]]:
    """One row per option."""
    rows: list[tuple[str, ...]] = []
    for option in options:
        encoded = ", ".join([f"`{name}`" for name in sorted(option.opts, key=len, reverse=True)])
        if not option.is_flag:
            what = option.metavar or option.type.name.upper()
            if isinstance(option.type, click.Choice):
                what = "\\|".join(option.type.choices)
            encoded += f" {what}"
        told = option.help or ""
        if option.show_default and option.default is not None:
            told += f" Default: {option.default}."
        rows.append((encoded.replace("\\|", "/"), told))
    return rows


def own_options(command: Command) -> list[click.Option]:
    """The options that only this command has."""
    return [one for one in command.params if isinstance(one, click.Option) and one not in COMMON]


def usage(command: Command, name: str) -> str:
    """The synopsis of a command."""
    with click.Context(command, info_name=f"casstore {name}") as ctx:
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        pieces = [one.make_metavar(ctx) for one in arguments]
    options = ["[OPTIONS]"] if own_options(command) else []
    return " ".join([f"casstore {name}", *options, *pieces])


def section(command: Command | Kinds) -> Iterator[str]:
    """The documentation of a command and its subcommands."""
    if isinstance(command, Command):
        yield from body(command, command.name or "")
        yield from answer(command.shape)
        return
    yield f"### `{command.name}`\n"
    yield f"```\ncasstore {command.name} {command.subcommand_metavar}\n```\n"
    yield from paragraphs(command)
    kinds = [one for one in command.commands.values() if isinstance(one, Command)]
    rows: list[tuple[str, ...]] = [
        (f"[`{one.name}`](#{command.name}-{one.name})", one.get_short_help_str(100))
        for one in kinds
    ]
    yield table(("kind", ""), rows) + "\n"
    if command.shape is not None:
        yield from answer(command.shape)
    for one in kinds:
        yield from body(one, f"{command.name} {one.name}")
        if command.shape is None:
            yield from answer(one.shape)


def body(command: Command, name: str) -> Iterator[str]:
    """Usage, help, options and examples of a command."""
    yield f"### `{name}`\n"
    yield f"```\n{usage(command, name)}\n```\n"
    yield from paragraphs(command)
    options = own_options(command)
    if options:
        yield table(("option", ""), option_rows(options)) + "\n"
    yield "```sh\n" + "\n".join(command.examples) + "\n```\n"


def paragraphs(command: click.Command) -> Iterator[str]:
    """The help of a command."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield " ".join(paragraph.split()).replace("<", "\\<").replace("*", "\\*") + "\n"


def answer(shape: Shape) -> Iterator[str]:
    """The JSON answer of a command."""
    rows: list[tuple[str, ...]] = [(f"`{key}`", told) for key, told in shape.lines()]
    yield f"`--json`: `{shape.schema}`\n"
    yield table(("key", ""), rows) + "\n"


def document() -> str:
    """The whole page."""
    contents: list[tuple[str, ...]] = [
        (title, " · ".join([f"[`{name}`](#{name})" for name in names]))
        for title, names in SECTIONS.items()
    ]
    codes: list[tuple[str, ...]] = [(str(code), told) for code, told in OUTCOMES]
    for group in GROUPS:
        said = " ".join((group.__doc__ or "").split()).replace("``", "`")
        codes.append((str(group.exit_code), f"`{group.__name__}`: {said}"))
    other = "any other error of casstore, and a fault of casstore itself"
    codes.append((str(errors.CasstoreError.exit_code), other))
    codes += [(str(code), told) for code, told in ENDINGS]
    error_rows: list[tuple[str, ...]] = [(f"`{key}`", told) for key, told in ERROR.lines()]
    parts: list[str] = []
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        for command in commands(names):
            parts += section(command)
    filled = {
        "contents": table(("", ""), contents),
        "grammar": grammar(),
        "error": table(("key", ""), error_rows),
        "codes": table(("code", "means"), codes),
        "common": table(("option", ""), option_rows(list(COMMON))),
        "commands": "\n".join(parts).rstrip("\n"),
    }
    page = TEMPLATE.read_text()
    for mark, text in filled.items():
        page = page.replace(f"<!-- {mark} -->", text)
    return page


def grammar() -> str:
    """The meaning of names, from the module that parses them."""
    pieces: list[str] = []
    for part in inspect.cleandoc(naming.__doc__ or "").split("\n\n")[1:]:
        if part.startswith("    "):
            pieces.append("```\n" + inspect.cleandoc(part) + "\n```")
        else:
            pieces.append(part.replace("``", "`"))
    return "\n\n".join(pieces)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    given = parser.parse_args()
    wanted = document()
    if given.check:
        if TARGET.read_text() == wanted:
            return 0
        print(f"{TARGET} is out of date; run tools/cli_docs.py", file=sys.stderr)
        return 1
    TARGET.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
