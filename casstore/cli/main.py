"""The ``casstore`` command: its sub-commands, and the exit code of each kind of error.

Exit codes: 0 done; 1 done, and the answer is no; 2 the command line is wrong; one for each kind
of error (``casstore.errors``); 70 a fault of casstore; 130 interrupted; 141 the reader of stdout
closed it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from types import FrameType
from typing import Any, Final, NoReturn

import click

from casstore.cli.command import COMMAND_PATH, COMMON, Command, Kinds, with_suggestion
from casstore.cli.fields import ERROR
from casstore.cli.output import Printer, bad, dim, let_go, prepare_streams, write_json
from casstore.errors import CasstoreError, StorageError
from casstore.version import __version__

USAGE: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
COMPLETE_VARIABLE: Final = "_CASSTORE_COMPLETE"

#: All commands, by section of ``casstore help all`` and of the documentation, and by module.
_SECTIONS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "Sessions": {
        "sessions": ("sessions", "history", "label", "fork", "adopt", "rewind", "delete"),
        "show": ("show",),
        "log": ("log",),
        "search": ("search",),
        "tags": ("tag", "pin"),
        "workspace": ("workspace",),
        "ui": ("ui", "html"),
        "mcp": ("mcp",),
    },
    "Comparing": {"diff": ("diff",), "workspace": ("bisect",)},
    "Work": {"work": ("queue", "leases", "attachments", "watch")},
    "Objects": {"objects": ("put", "cat")},
    "Maintenance": {
        "maintain": ("maintain",),
        "stats": ("stats",),
        "check": ("check", "rebuild", "salvage", "recover"),
    },
    "Space": {
        "space": ("gc", "pack", "vacuum", "compact"),
        "retention": ("policy", "prune"),
        "erase": ("erase",),
    },
    "Moving": {"moving": ("backup", "copy", "export", "verify"), "import_": ("import",)},
    "Setup": {"help": ("help",), "setup": ("init", "version", "completion")},
}
#: The commands of each section.
SECTIONS: Final = {
    section: [command for commands in modules.values() for command in commands]
    for section, modules in _SECTIONS.items()
}
#: The module of each command; it is loaded when one of its commands is used.
MODULE_OF: Final = {
    command: module
    for modules in _SECTIONS.values()
    for module, commands in modules.items()
    for command in commands
}
_NAME_COLUMNS: Final = max(map(len, MODULE_OF))
#: Short names of commands: {short: name}.
ALIASES: Final = {"ls": "sessions"}
#: The commands that most people need, by task: what ``casstore --help`` lists.
COMMON_TASKS: Final = {
    "Start a store": ("init", "import"),
    "Look into it": ("sessions", "show", "log", "diff", "ui"),
    "Try alternatives": ("fork", "rewind"),
    "Maintain it": ("maintain", "check", "backup"),
}


class _Terminated(BaseException):
    """SIGTERM or SIGHUP was received: clean up, then end by that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _heed_signals() -> None:
    """Let SIGTERM and SIGHUP raise ``_Terminated``, so that temporary files are removed first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # The parent process may want it ignored, as nohup does.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # A second signal ends the process at once.
    signal.signal(number, signal.SIG_DFL)
    raise _Terminated(number)


class CommandLine(click.Group):
    """The group of all commands. Its ``main`` ends the process with the right code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, by section."""
        return list(MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Command | Kinds | None:
        """The command of this name, None if there is none; loads its module."""
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        module = MODULE_OF.get(cmd_name)
        if module is None:
            return None
        attribute = cmd_name.replace("-", "_") + "_" * iskeyword(cmd_name)
        found = getattr(import_module(f"casstore.cli.{module}"), attribute)
        assert isinstance(found, Command | Kinds)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command asked for; UsageError suggests a similar one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            raise with_suggestion(exc, ctx, args[0], (*MODULE_OF, *ALIASES)) from exc

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands that most people need, by task."""
        self._format(ctx, formatter, COMMON_TASKS)

    def format_all(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """All commands, by section."""
        self._format(ctx, formatter, SECTIONS)

    def _format(
        self,
        ctx: click.Context,
        formatter: click.HelpFormatter,
        sections: Mapping[str, Sequence[str]],
    ) -> None:
        for title, names in sections.items():
            found = [self.get_command(ctx, name) for name in names]
            rows = [
                (one.name or "", one.get_short_help_str(100)) for one in found if one is not None
            ]
            with formatter.section(title):
                # Wide enough for the longest name, so that each command takes one line.
                formatter.write_dl(rows, col_max=_NAME_COLUMNS)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command line and exit."""
        given = list(sys.argv[1:] if args is None else args)
        if COMPLETE_VARIABLE in os.environ:
            super().main(given, "casstore", COMPLETE_VARIABLE, **extra)
        sys.exit(self._run(given, extra))

    def _run(self, given: list[str], extra: dict[str, Any]) -> int:
        as_json = "--json" in given[: given.index("--") if "--" in given else len(given)]
        try:
            code = self._invoke(given, extra, as_json)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            let_go(sys.stdout)
            return BROKEN_PIPE
        except click.exceptions.NoArgsIsHelpError as exc:
            click.echo(exc.format_message(), err=True)
            return USAGE
        except click.ClickException as exc:
            return _report("Usage", exc.format_message(), _usage_hint(exc), USAGE, as_json)
        except (click.Abort, KeyboardInterrupt):
            return _report_interrupt(as_json)
        except OSError as exc:
            return _report_refusal(exc, as_json)
        except Exception as exc:
            return _report_fault(exc, as_json)

    def _invoke(self, given: list[str], extra: dict[str, Any], as_json: bool) -> int:
        try:
            with self.make_context("casstore", given, **extra) as ctx:
                try:
                    self.invoke(ctx)
                except CasstoreError as exc:
                    return _report_error(exc, ctx.meta.get(COMMAND_PATH, "casstore"), as_json)
        except click.exceptions.Exit as exc:
            return exc.exit_code
        return 0


def _usage_hint(exc: click.ClickException) -> str | None:
    ctx = getattr(exc, "ctx", None)
    if ctx is None:
        return None
    # Commands such as ui take the store as an argument, so users also pass it to the others.
    extra = re.search(r"extra argument \((.+)\)", exc.message)
    if extra is not None and os.path.exists(os.path.join(extra[1], "data.mdb")):
        return f"{ctx.command_path} --store {shlex.quote(extra[1])}"
    return f"{ctx.command_path} --help"


def _report(kind: str, message: str, remedy: str | None, exit_code: int, as_json: bool) -> int:
    """Write an error and the next command to try to stderr; return the exit code."""
    try:
        if as_json:
            data = {"error": kind, "message": message, "try": remedy, "exit_code": exit_code}
            write_json(sys.stderr, ERROR.document(data))
        else:
            printer = Printer(sys.stderr)
            printer.line(bad("error: "), message)
            if remedy:
                printer.line(dim("try: "), remedy)
        sys.stderr.flush()
    except OSError:
        # stderr is closed.
        let_go(sys.stderr)
    return exit_code


def _report_error(exc: CasstoreError, command_path: str, as_json: bool) -> int:
    from casstore.cli.advice import advice

    remedy = advice(exc, command_path.removeprefix("casstore ")) or f"{command_path} --help"
    return _report(type(exc).__name__, str(exc), remedy, exc.exit_code, as_json)


def _report_interrupt(as_json: bool) -> int:
    return _report("Interrupted", "interrupted", None, INTERRUPTED, as_json)


def _report_refusal(exc: OSError, as_json: bool) -> int:
    """Report an error of the operating system, mostly stdout on a full disk."""
    from casstore.cli.advice import advice

    message = exc.strerror or str(exc)
    if exc.filename is None:
        # Errors of files and stores have a file name; only a stream has none.
        let_go(sys.stdout)
        message = f"cannot write the answer: {message}"
    else:
        message = f"{exc.filename}: {message}"
    remedy = advice(StorageError(message))
    return _report(StorageError.__name__, message, remedy, StorageError.exit_code, as_json)


def _report_fault(exc: Exception, as_json: bool) -> int:
    """Report a fault of casstore with its traceback; return exit code 70.

    Left to Python, the exit code would be 1, which means that the answer is no.
    """
    import traceback

    where = "".join(traceback.format_exception(exc))
    message = f"casstore itself is at fault: {type(exc).__name__}: {exc}"
    remedy = (
        "casstore check, if the store may be damaged; otherwise report it with the traceback above"
    )
    if as_json:
        message, remedy = f"{message}\n{where}", "casstore check, if the store may be damaged"
    else:
        for line in where.splitlines():
            try:
                Printer(sys.stderr).line(line)
            except OSError:
                break
    return _report(type(exc).__name__, message, remedy, CasstoreError.exit_code, as_json)


def _print_version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        Printer(sys.stdout).line(f"casstore {__version__}")
        ctx.exit()


_VERSION: Final = click.Option(
    ["--version"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)


@click.group(
    cls=CommandLine,
    params=[*COMMON, _VERSION],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="COMMAND [ARGUMENTS]…",
    epilog=(
        "casstore help all lists every command, casstore help names explains how sessions, "
        "revisions, nodes and tags are written, casstore help COMMAND describes one command."
    ),
)
def cli(**common: Any) -> None:
    """Show, compare and maintain the sessions and records in a casstore store."""


def main(begin: Callable[[], None] | None = None) -> NoReturn:
    """Run the command line; ``begin`` is called once interrupts are handled here."""
    try:
        if begin is not None:
            begin()
        prepare_streams()
        _heed_signals()
        cli.main()
    except KeyboardInterrupt:
        # Interrupted before the command began or after its answer.
        sys.exit(_report_interrupt("--json" in sys.argv))
    except _Terminated as exc:
        let_go(sys.stdout)
        os.kill(os.getpid(), exc.number)
        raise
