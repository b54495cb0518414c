"""The ``casstore`` command: its sub-commands, and how each way to fail ends.

Exit codes: 0 done; 1 done, and the answer is no; 2 the command line is wrong; then one for
each kind of error (``casstore.errors``), 70 for what should not happen; 130 interrupted;
141 nobody reads the answer.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from keyword import iskeyword
from types import FrameType
from typing import Any, Final, NoReturn

import click

from casstore.cli.command import COMMON, Command, Kinds, with_suggestion
from casstore.cli.output import Printer, bad, dim, write_json
from casstore.cli.shapes import ERROR
from casstore.cli.streams import let_go, prepare_streams
from casstore.errors import CasstoreError, StorageError
from casstore.version import __version__

USAGE: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
COMPLETE_VARIABLE: Final = "_CASSTORE_COMPLETE"

# Where each command is; a module is loaded when one of its commands is used.
_MODULES: Final = {
    "setting_up": ("init", "version", "completion"),
    "objects": ("put", "cat"),
    "sessions": ("sessions", "fork", "rewind", "delete"),
    "showing": ("show",),
    "graph_log": ("log",),
    "history": ("history", "label"),
    "keeping": ("tag", "pin"),
    "attachments": ("attachments",),
    "comparing": ("diff",),
    "reclaiming": ("gc", "pack"),
    "vacuuming": ("vacuum",),
    "compacting": ("compact",),
    "retaining": ("policy", "prune", "erase"),
    "records": ("records",),
    "statistics": ("stats",),
    "examining": ("check", "rebuild", "salvage"),
    "recovering": ("recover",),
    "moving": ("backup", "copy", "export", "verify"),
    "importing": ("import",),
}
MODULE_OF: Final = {command: module for module, names in _MODULES.items() for command in names}
_NAME_COLUMNS: Final = max(map(len, MODULE_OF))
SECTIONS: Final = (
    "Objects",
    "Sessions",
    "Comparing",
    "Giving space back",
    "Care",
    "Moving",
    "Setup",
)


class _ToldToEnd(BaseException):
    """SIGTERM or SIGHUP came: clean up, then end as they make a program end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _heed_signals() -> None:
    """Let what was begun be cleaned up when the process is told to end: files, directories."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Whoever started this may want it ignored, as nohup does.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # A second one waits for nothing.
    signal.signal(number, signal.SIG_DFL)
    raise _ToldToEnd(number)


class CommandLine(click.Group):
    """The group of all commands. Its ``main`` ends the process with the right code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, by section."""
        return list(MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Command | Kinds | None:
        """One command; its module is loaded now."""
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
        """The command asked for; a slip of the finger is told what is near it."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            raise with_suggestion(exc, ctx, args[0], MODULE_OF) from exc

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands under the titles of their sections."""
        found = [self.get_command(ctx, one) for one in MODULE_OF]
        for section in SECTIONS:
            rows = [
                (one.name or "", one.get_short_help_str(100))
                for one in found
                if one is not None and one.section == section
            ]
            if rows:
                with formatter.section(section):
                    # Wide enough for the longest name: beside it, not below, is what it does.
                    formatter.write_dl(rows, col_max=_NAME_COLUMNS)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run what the command line says, and exit."""
        given = list(sys.argv[1:] if args is None else args)
        if COMPLETE_VARIABLE in os.environ:
            super().main(given, "casstore", COMPLETE_VARIABLE, **extra)
        sys.exit(self._run(given, extra))

    def _run(self, given: list[str], extra: dict[str, Any]) -> int:
        as_json = "--json" in given[: given.index("--") if "--" in given else len(given)]
        try:
            code = self._invoke(given, extra)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            let_go(sys.stdout)
            return BROKEN_PIPE
        except click.exceptions.NoArgsIsHelpError as exc:
            # Nothing was asked for: what there is to ask for.
            click.echo(exc.format_message(), err=True)
            return USAGE
        except click.ClickException as exc:
            _report(_Failure("Usage", exc.format_message(), _usage_hint(exc), USAGE), as_json)
            return USAGE
        except (click.Abort, KeyboardInterrupt):
            _report(_Failure("Interrupted", "interrupted", None, INTERRUPTED), as_json)
            return INTERRUPTED
        except CasstoreError as exc:
            from casstore.cli.advice import advice

            name = _command_in(given)
            remedy = advice(exc, name) or _help_for(name)
            failure = _Failure(type(exc).__name__, str(exc), remedy, exc.exit_code)
            _report(failure, as_json)
            return exc.exit_code
        except OSError as exc:
            return _report_refusal(exc, as_json)
        except Exception as exc:
            return _report_fault(exc, as_json)

    def _invoke(self, given: list[str], extra: dict[str, Any]) -> int:
        try:
            with self.make_context("casstore", given, **extra) as ctx:
                self.invoke(ctx)
        except click.exceptions.Exit as exc:
            return exc.exit_code
        return 0


class _Failure:
    """How a command failed."""

    def __init__(self, kind: str, message: str, remedy: str | None, exit_code: int) -> None:
        self.data = {"error": kind, "message": message, "try": remedy, "exit_code": exit_code}


def _usage_hint(exc: click.ClickException) -> str | None:
    ctx = getattr(exc, "ctx", None)
    return None if ctx is None else f"{ctx.command_path} --help"


def _command_in(given: list[str]) -> str | None:
    """The command that was given; of an import with its kind: ``import lash``."""
    words = iter(given)
    for word in words:
        if word in ("-s", "--store", "--durability"):
            # The next word is a value, though a store may have the name of a command.
            next(words, None)
        elif word in MODULE_OF:
            kind = next(words, "") if word == "import" else ""
            return f"{word} {kind}" if kind and not kind.startswith("-") else word
    return None


def _help_for(name: str | None) -> str:
    """The help of a command: what to read where nothing else helps."""
    return "casstore --help" if name is None else f"casstore {name} --help"


def _report(failure: _Failure, as_json: bool) -> None:
    """Say on stderr what went wrong, and what to try next."""
    data = failure.data
    try:
        if as_json:
            write_json(sys.stderr, ERROR.document(data))
        else:
            printer = Printer(sys.stderr)
            printer.line(bad("error: "), str(data["message"]))
            if data["try"]:
                printer.line(dim("try: "), str(data["try"]))
        sys.stderr.flush()
    except OSError:
        # Nobody is left to tell.
        let_go(sys.stderr)


def _report_refusal(exc: OSError, as_json: bool) -> int:
    """The operating system refused: mostly to take the answer, on a disk that is full."""
    from casstore.cli.advice import advice

    told = exc.strerror or str(exc)
    if exc.filename is None:
        # What is done to a store or a file names it; only a stream has no name.
        let_go(sys.stdout)
        told = f"cannot write the answer: {told}"
    else:
        told = f"{exc.filename}: {told}"
    remedy = advice(StorageError(told))
    _report(_Failure(StorageError.__name__, told, remedy, StorageError.exit_code), as_json)
    return StorageError.exit_code


def _report_fault(exc: Exception, as_json: bool) -> int:
    """What should not happen must not end as if the answer were no."""
    import traceback

    where = "".join(traceback.format_exception(exc))
    told = f"casstore itself is at fault: {type(exc).__name__}: {exc}"
    remedy = "casstore check, if the store may be damaged; else report it with what stands above"
    if as_json:
        told, remedy = f"{told}\n{where}", "casstore check, if the store may be damaged"
    else:
        for line in where.splitlines():
            try:
                Printer(sys.stderr).line(line)
            except OSError:
                break
    _report(_Failure(type(exc).__name__, told, remedy, CasstoreError.exit_code), as_json)
    return CasstoreError.exit_code


def _tell_version(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        Printer(sys.stdout).line(f"casstore {__version__}")
        ctx.exit()


# What every program answers to; the command of that name tells more.
_VERSION: Final = click.Option(
    ["--version"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_tell_version,
    help="Show the version and exit.",
)


@click.group(
    cls=CommandLine,
    params=[*COMMON, _VERSION],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="COMMAND [ARGUMENTS]…",
    epilog="casstore COMMAND --help tells more. Names of things: docs/cli.md.",
)
def cli(**common: Any) -> None:
    """Look into a casstore store, compare what is in it, and care for it."""


def main(begin: Callable[[], None] | None = None) -> NoReturn:
    """Run the command line; ``begin`` is called once an interrupt ends it as it should."""
    try:
        if begin is not None:
            begin()
        prepare_streams()
        _heed_signals()
        cli.main()
    except KeyboardInterrupt:
        # Before the command began, or behind its answer.
        failure = _Failure("Interrupted", "interrupted", None, INTERRUPTED)
        _report(failure, as_json="--json" in sys.argv)
        sys.exit(INTERRUPTED)
    except _ToldToEnd as exc:
        let_go(sys.stdout)
        os.kill(os.getpid(), exc.number)
        raise
