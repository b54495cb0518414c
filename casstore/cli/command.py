"""The common part of all commands: options, opening the store, and text or JSON output."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Concatenate, Final, ParamSpec, cast

import click

from casstore.cli.fields import Fields, Shape
from casstore.cli.output import Pager, Printer, is_terminal, write_json
from casstore.cli.progress import Meter
from casstore.engine.protocol import DURABILITIES
from casstore.errors import InvalidInputError
from casstore.store import Store
from casstore.store import open as open_store

Given = ParamSpec("Given")

PATH_VARIABLE: Final = "CASSTORE_PATH"
#: The key of ``click.Context.meta`` with the words that name the command: ``casstore import lash``.
COMMAND_PATH: Final = "casstore.command_path"


class App:
    """One run of a command: its store and its output."""

    def __init__(
        self,
        command: Command,
        *,
        store: str | None,
        as_json: bool,
        quiet: bool,
        durability: str | None,
        no_pager: bool,
    ) -> None:
        """The keyword arguments are the options in ``COMMON``, by their names."""
        self.shape = command.shape
        self._place = store
        self.as_json = as_json
        self.quiet = quiet
        self.durability = durability or "full"
        self.durability_given = durability
        self.exit_code = 0
        self._no_pager = no_pager
        self._remarks: list[str] = []

    @property
    def path(self) -> str:
        """The path of the store: by option, environment variable, or current directory."""
        return self._place or os.environ.get(PATH_VARIABLE) or os.curdir

    def place_of(self, argument: str | None) -> str:
        """The store that an optional argument names, else that of the options."""
        if argument == "":
            raise click.UsageError("the store's name is empty")
        return self.path if argument is None else argument

    def open(self, *, write: bool = False, path: str | None = None) -> Store:
        """Open the store, or the one at ``path``; it must exist. Read-only unless ``write``."""
        place = self.path if path is None else path
        return open_store(place, durability=self.durability, readonly=not write, create=False)

    def meter(self, *, stoppable: bool = False) -> Meter:
        """A meter that reports progress on stderr; if ``stoppable``, Ctrl-C requests a stop."""
        # With --json, stderr holds only JSON as well, so progress needs a terminal there.
        hidden = self.quiet or (self.as_json and not sys.stderr.isatty())
        return Meter(silent=hidden, stoppable=stoppable)

    def answer(
        self, report: Any, render: Callable[[Printer], None] | None = None, **more: Any
    ) -> None:
        """Print a report: with --json as JSON, else by ``render``, else its labelled fields.

        ``more`` has values of fields that the report object lacks.
        """
        shape = self.shape
        if self.as_json:
            write_json(sys.stdout, shape.document(report, **more))
        else:
            document = shape.document(report, **more) if render is None else {}
            with self.printer() as to:
                render(to) if render is not None else to.report(shape.fields, document)

    @contextmanager
    def printer(self) -> Iterator[Printer]:
        """A writer of text to stdout; on a terminal, long text goes through a pager."""
        if self._no_pager or not is_terminal(sys.stdout):
            yield Printer(sys.stdout)
            return
        with Pager(sys.stdout) as pages:
            # A Pager has only the attributes of a stream that Printer uses.
            yield Printer(cast(IO[str], pages), shown_on=sys.stdout)

    def rows(
        self, to: Printer, fields: Fields, found: Sequence[Mapping[str, Any]], otherwise: str
    ) -> None:
        """Print documents as a table; if there are none, remark ``otherwise``."""
        if found:
            to.rows(fields, found)
        else:
            self.remark(otherwise)

    def remark(self, text: str) -> None:
        """Add a remark for people; ``write_remarks`` writes it to stderr after the answer."""
        if not self.quiet and not self.as_json:
            self._remarks.append(text)

    def write_remarks(self) -> None:
        """Write the remarks, each once. A closed stderr does not make the command fail."""
        remarks, self._remarks = self._remarks, []
        for text in remarks:
            with suppress(OSError):
                Printer(sys.stderr).line(text)


class Command(click.Command):
    """A command with a documented JSON answer and examples."""

    shape: Shape
    examples: Sequence[str]


class Kinds(click.Group):
    """A group such as ``import KIND``: each kind is a command with its own options.

    Messages call a kind by the first word of ``subcommand_metavar``.

    ``shape`` is the JSON answer of all kinds; None: each has its own.
    """

    shape: Shape | None = None
    examples: Sequence[str] = ()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The kind asked for; UsageError, with a suggestion, if there is no such kind."""
        name = click.utils.make_str(args[0])
        found = self.get_command(ctx, name)
        if found is not None:
            return name, found, args[1:]
        known = self.list_commands(ctx)
        what = (self.subcommand_metavar or "kind").split()[0].lower()
        exc = click.UsageError(f"No such {what} {name!r}; there are {', '.join(known)}.", ctx)
        raise with_suggestion(exc, ctx, name, known)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The kinds, each with its first sentence."""
        rows = [(name, self.commands[name].get_short_help_str(100)) for name in self.commands]
        with formatter.section("Kinds"):
            formatter.write_dl(rows, col_max=max(map(len, self.commands)))

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The kinds in the order in which they were added."""
        return list(self.commands)


def with_suggestion(
    exc: click.UsageError, ctx: click.Context, word: str, known: Iterable[str]
) -> click.UsageError:
    """The error with the most similar known word as a suggestion, if there is one."""
    import difflib

    near = difflib.get_close_matches(word, known, 1)
    return click.UsageError(f"{exc.message} Did you mean {near[0]!r}?", ctx) if near else exc


def _named(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty name: it usually comes from a variable that is not set."""
    if value == "":
        raise click.BadParameter("the store's name is empty", ctx, param)
    return value


_STORE: Final = click.Option(
    ["--store", "-s"],
    metavar="STORE",
    callback=_named,
    help=f"A directory, or postgresql://… If not given, ${PATH_VARIABLE}; else the current one.",
)
_JSON: Final = click.Option(["--json", "as_json"], is_flag=True, help="Answer in JSON.")
_QUIET: Final = click.Option(
    ["--quiet", "-q"], is_flag=True, help="No progress and no remarks on stderr."
)
_DURABILITY: Final = click.Option(
    ["--durability"],
    type=click.Choice(DURABILITIES),
    help="full (the default): a write waits until a power loss cannot undo it. relaxed: it does "
    "not wait.",
)
_NO_PAGER: Final = click.Option(
    ["--no-pager"], is_flag=True, help="Write long text to the terminal without $PAGER."
)
COMMON: Final = (_STORE, _JSON, _QUIET, _DURABILITY, _NO_PAGER)
COMMON_NAMES: Final = ("store", "as_json", "quiet", "durability", "no_pager")


def command(
    fields: Fields, *examples: str, name: str | None = None, schema: str | None = None
) -> Callable[[Callable[Concatenate[App, Given], None]], Command]:
    """Make a command of a function that takes the ``App`` and the command's own options.

    ``fields`` is its JSON answer. ``name`` is that of the function unless given, and ``schema``,
    the name of the answer, that of the command.
    """

    def wrap(function: Callable[Concatenate[App, Given], None]) -> Command:
        @functools.wraps(function)
        def callback(**given: Any) -> None:
            ctx = click.get_current_context()
            ctx.meta[COMMAND_PATH] = ctx.command_path
            before_command = ctx.find_root().params
            common: dict[str, Any] = {
                key: given.pop(key) or before_command[key] for key in COMMON_NAMES
            }
            assert isinstance(ctx.command, Command)
            app = App(ctx.command, **common)
            # Not typed: click passes exactly the function's own options.
            call: Callable[..., None] = function
            call(app, **given)
            app.write_remarks()
            ctx.exit(app.exit_code)

        own_name = name or function.__name__.strip("_")
        made = click.command(own_name, cls=Command)(callback)
        made.params.extend(COMMON)
        made.shape = Shape(schema or own_name, fields)
        made.examples = examples
        return made

    return wrap


def require_yes(*, yes: bool, question: str) -> None:
    """Ask before data is lost; without a terminal, ``--yes`` is required."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("this cannot be undone; add --yes to confirm")
    click.confirm(question, abort=True, err=True)


@contextmanager
def needs_extra(user: str, extra: str, packages: Sequence[str]) -> Iterator[None]:
    """Import optional packages inside; a missing one is an InvalidInputError that names the extra.

    A module that is not in ``packages`` is missing because of a fault.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in packages:
            raise
        raise InvalidInputError(
            f"{user} needs {exc.name}: pip install '.[{extra}]' in the clone of casstore"
        ) from exc
