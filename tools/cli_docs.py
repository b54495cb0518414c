#!/usr/bin/env python3
"""Write docs/cli.md from the command tree, so that it says what the commands do.

    tools/cli_docs.py            write it
    tools/cli_docs.py --check    end with 1 if it is not as it would be written
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import click

from casstore import errors
from casstore.cli import naming
from casstore.cli.command import COMMON, Command
from casstore.cli.main import MODULE_OF, SECTIONS, cli
from casstore.cli.shapes import ERROR

TARGET = ROOT / "docs" / "cli.md"

INTRODUCTION = """\
# The command line

`casstore` looks into a store, compares what is in it and cares for it, without a line of Python. This page is
written by `tools/cli_docs.py` from the commands themselves; a test sees to it that it is never out of date.

{contents}

## Which store

`--store DIRECTORY`, else `$CASSTORE_PATH`, else the current directory. Both `casstore --store agents log s1` and
`casstore log s1 --store agents` are understood.

## Names

{grammar}

```sh
casstore show agent              # a session as it stands
casstore show agent@41           # as it was at revision 41
casstore show agent@before-fix   # as it was where the label stands
casstore show agent~2            # two revisions before its head
casstore show 'agent@41#n17'     # one node of it
casstore show 3f2a91             # an object, by the beginning of its digest
casstore diff backup::agent agent
```

## Answers

Text is for people and may change. With `--json` every command answers with one JSON document whose `schema` names its
shape, such as `casstore.gc/1`; keys are only ever added. Sizes are integers of bytes and end in `_bytes`, times are RFC
3339 in UTC, digests have all 64 digits. JSON has no bytes and no links: they are spelled `{{"$bytes": "<base64>"}}` and
`{{"$link": "<digest>"}}`, and a map of one key that begins with `$` gets a second `$` in front of it.

The answer is on stdout, everything else on stderr: progress, remarks, errors. Long work shows a bar with rate and time left
on a terminal and a line every five seconds elsewhere; `--quiet` silences both. Colours are used on a terminal unless
`NO_COLOR` is set. Text from a store is escaped where a terminal would take it for a command.

With `--json` an error is a document on stderr:

{error}

## Exit codes

{codes}

A command that stopped in the middle, by Ctrl-C or by an error, has left the store whole: what it did is done, and running
it again goes on from there.
"""

COMPLETION = """\
## Options of every command

{common}
"""

TIMER = """\
## Unattended: `tools/gc.py`

`tools/gc.py` prunes, collects, vacuums and packs one store or many, for cron and systemd. It takes its policy from a TOML
file or from options, runs once at a time on each store, ends with a line of summary for each and with the exit code of the
worst, and writes a JSON report if asked to. `tools/gc.py --help` lists the options.

```toml
# /etc/casstore/gc.toml: options of tools/gc.py, for all stores and for each
stores = ["/var/lib/agents/*"]
grace = "1h"
pack = true

[retention]
last = 20
daily = 14
idle = "90d"

[store."/var/lib/agents/archive"]
retention = {{ everything = true }}
```

```ini
# /etc/systemd/system/casstore-gc.service
[Unit]
Description=Give back what casstore stores no longer need

[Service]
Type=oneshot
User=agents
ExecStart=/opt/casstore/tools/gc.py --config /etc/casstore/gc.toml --report /var/log/casstore-gc.json
Nice=10
IOSchedulingClass=idle
# Stopping is harmless: the next run goes on.
KillSignal=SIGINT

# /etc/systemd/system/casstore-gc.timer
[Unit]
Description=casstore-gc every night

[Timer]
OnCalendar=03:17
RandomizedDelaySec=20min
Persistent=true

[Install]
WantedBy=timers.target
```

For cron: `17 3 * * *  /opt/casstore/tools/gc.py --config /etc/casstore/gc.toml --quiet`

`tools/snapshot_diff.py` is `casstore diff` as a script of its own: `tools/snapshot_diff.py a-store::agent b-store::agent`.
"""

# What ends a command beside errors of the store.
OUTCOMES = (
    (0, "done"),
    (1, "done, and the answer is no: `check` found damage, `diff --exit-code` a difference"),
    (2, "the command line is wrong"),
)
ENDINGS = ((130, "interrupted by Ctrl-C"), (141, "nobody read the answer to its end"))
GROUPS = (
    errors.InvalidInputError,
    errors.NotFoundError,
    errors.ConflictError,
    errors.StoreStateError,
    errors.BusyError,
    errors.CorruptionError,
    errors.FormatError,
    errors.StorageError,
)


def commands() -> list[Command]:
    """All commands, by section."""
    with click.Context(cli, info_name="casstore") as ctx:
        found = [cli.get_command(ctx, name) for name in MODULE_OF]
    known = [one for one in found if isinstance(one, Command)]
    return sorted(known, key=lambda one: SECTIONS.index(one.section))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join([cell.replace("|", "\\|").replace("\n", " ") for cell in row]) + " |"
        for row in rows
    ]
    return "\n".join(lines)


def option_rows(options: list[click.Option]) -> list[tuple[str, ...]]:
    """An option a row."""
    rows: list[tuple[str, ...]] = []
    for option in options:
        spelled = ", ".join([f"`{name}`" for name in sorted(option.opts, key=len, reverse=True)])
        if not option.is_flag:
            what = option.metavar or option.type.name.upper()
            if isinstance(option.type, click.Choice):
                what = "\\|".join(option.type.choices)
            spelled += f" {what}"
        told = option.help or ""
        if option.show_default and option.default is not None:
            told += f" Default: {option.default}."
        rows.append((spelled.replace("\\|", "/"), told))
    return rows


def own_options(command: Command) -> list[click.Option]:
    """The options that only this command has."""
    return [
        one for one in command.params if isinstance(one, click.Option) and one not in COMMON
    ]


def usage(command: Command) -> str:
    """How a command is called."""
    with click.Context(command, info_name=f"casstore {command.name}") as ctx:
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        pieces = [one.make_metavar(ctx) for one in arguments]
    options = ["[OPTIONS]"] if own_options(command) else []
    return " ".join([f"casstore {command.name}", *options, *pieces])


def section(command: Command) -> Iterator[str]:
    """All there is to say of a command."""
    yield f"### `{command.name}`\n"
    yield f"```\n{usage(command)}\n```\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield " ".join(paragraph.split()).replace("<", "\\<").replace("*", "\\*") + "\n"
    options = own_options(command)
    if options:
        yield table(("option", ""), option_rows(options)) + "\n"
    yield "```sh\n" + "\n".join(command.examples) + "\n```\n"
    rows: list[tuple[str, ...]] = [(f"`{key}`", told) for key, told in command.shape.lines()]
    yield f"`--json`: `{command.shape.schema}`\n"
    yield table(("key", ""), rows) + "\n"


def document() -> str:
    """The whole page."""
    doc = inspect.cleandoc(naming.__doc__ or "").split("\n\n")
    grammar = "\n\n".join(
        [
            "```\n" + inspect.cleandoc(part) + "\n```" if part.startswith("    ") else part
            for part in doc[1:]
        ]
    ).replace("``", "`").replace("`````", "```")
    grammar = grammar.replace("``\n", "```\n").replace("\n``", "\n```") if "```" not in grammar else grammar
    found = commands()
    contents = []
    for title in SECTIONS:
        names = [one.name or "" for one in found if one.section == title]
        if names:
            links = " · ".join([f"[`{name}`](#{name})" for name in names])
            contents.append((title, links))
    codes: list[tuple[str, ...]] = [(str(code), told) for code, told in OUTCOMES]
    for group in GROUPS:
        said = " ".join((group.__doc__ or "").split())
        codes.append((str(group.exit_code), f"`{group.__name__}`: {said}"))
    codes.append((str(errors.CasstoreError.exit_code), "any other error of casstore"))
    codes += [(str(code), told) for code, told in ENDINGS]
    error_rows: list[tuple[str, ...]] = [(f"`{key}`", told) for key, told in ERROR.lines()]
    parts = [
        INTRODUCTION.format(
            contents=table(("", ""), [tuple(one) for one in contents]),
            grammar=grammar,
            error=table(("key", ""), error_rows),
            codes=table(("code", "means"), codes),
        ),
        COMPLETION.format(common=table(("option", ""), option_rows(list(COMMON)))),
    ]
    for title in SECTIONS:
        inside = [one for one in found if one.section == title]
        if inside:
            parts.append(f"## {title}\n")
            for command in inside:
                parts += section(command)
    parts.append(TIMER.format())
    return "\n".join([part.rstrip("\n") + "\n" for part in parts])


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
