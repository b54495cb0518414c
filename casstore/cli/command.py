"""What all commands have: the options, the store they work on, and two ways to answer."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, Final, ParamSpec

import click

from casstore.cli.output import Printer, write_json
from casstore.cli.progress import Meter
from casstore.cli.shapes import Shape
from casstore.engine.protocol import DURABILITIES
from casstore.store import Store
from casstore.store import open as open_store

Given = ParamSpec("Given")

PATH_VARIABLE: Final = "CASSTORE_PATH"


class App:
    """One run of a command: which store, and how to answer."""

    def __init__(
        self,
        command: Command,
        *,
        store: str | None,
        as_json: bool,
        quiet: bool,
        durability: str,
    ) -> None:
        self._command = command
        self._place = store
        self.as_json = as_json
        self.quiet = quiet
        self.durability = durability
        self.exit_code = 0

    @property
    def path(self) -> str:
        """Where the store is: as given, else from the environment, else the current directory."""
        return self._place or os.environ.get(PATH_VARIABLE) or os.curdir

    def open(self, *, write: bool = False, path: str | None = None) -> Store:
        """Open the store; it must be there."""
        place = self.path if path is None else path
        if write:
            return open_store(place, durability=self.durability, create=False)
        return open_store(place, readonly=True, create=False)

    def meter(self, *, stoppable: bool = False) -> Meter:
        """Tell of progress, on stderr."""
        # What stands on stderr beside a JSON answer is JSON, too, unless somebody watches.
        hidden = self.quiet or (self.as_json and not sys.stderr.isatty())
        return Meter(silent=hidden, stoppable=stoppable)

    def answer(self, data: Mapping[str, Any], render: Callable[[Printer], None]) -> None:
        """Print the answer: ``data`` as JSON, or what ``render`` writes."""
        document = self._command.shape.document(data)
        if self.as_json:
            write_json(sys.stdout, document)
        else:
            render(Printer(sys.stdout))

    def remark(self, text: str) -> None:
        """Say something beside the answer, on stderr, to people only."""
        if not self.quiet and not self.as_json:
            # Where nobody hears it the answer is still worth giving.
            with suppress(OSError):
                Printer(sys.stderr).line(text)


class Command(click.Command):
    """A command with a documented JSON answer and examples."""

    shape: Shape
    examples: Sequence[str]
    section: str


class Kinds(click.Group):
    """A command whose first argument is a kind, each a command with its own options.

    All kinds have the same JSON answer.
    """

    shape: Shape
    examples: Sequence[str] = ()
    section: str

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The kind asked for; UsageError, with a suggestion, if there is no such kind."""
        name = click.utils.make_str(args[0])
        found = self.get_command(ctx, name)
        if found is not None:
            return name, found, args[1:]
        known = self.list_commands(ctx)
        exc = click.UsageError(f"No such kind {name!r}; there are {', '.join(known)}.", ctx)
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
    """The error with the known word that is most similar, if one is."""
    import difflib

    near = difflib.get_close_matches(word, known, 1)
    return click.UsageError(f"{exc.message} Did you mean {near[0]!r}?", ctx) if near else exc


def _named(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty name: it is a variable that is not set, and no wish for another store."""
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
    help="Whether a write waits until a power loss cannot undo it (full, the default) or not.",
)
COMMON: Final = (_STORE, _JSON, _QUIET, _DURABILITY)
COMMON_NAMES: Final = ("store", "as_json", "quiet", "durability")


def command(
    section: str, shape: Shape, *examples: str, name: str | None = None
) -> Callable[[Callable[Concatenate[App, Given], None]], Command]:
    """Make a command of a function that is given the ``App`` and its own options."""

    def wrap(function: Callable[Concatenate[App, Given], None]) -> Command:
        @functools.wraps(function)
        def callback(**given: Any) -> None:
            ctx = click.get_current_context()
            root = ctx.find_root()
            asked = {}
            for key in COMMON_NAMES:
                asked[key] = given.pop(key, None) or root.params.get(key)
            assert isinstance(ctx.command, Command)
            app = App(
                ctx.command,
                store=asked["store"],
                as_json=bool(asked["as_json"]),
                quiet=bool(asked["quiet"]),
                durability=asked["durability"] or "full",
            )
            # click has made sure that these are the function's own options.
            call: Callable[..., None] = function
            call(app, **given)
            ctx.exit(app.exit_code)

        made = click.command(name or function.__name__.strip("_"), cls=Command)(callback)
        made.params.extend(COMMON)
        made.shape = shape
        made.examples = examples
        made.section = section
        return made

    return wrap


def require_yes(*, yes: bool, question: str) -> None:
    """Ask before something is lost; where nobody can be asked, ``--yes`` must be given."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("this cannot be undone; say --yes if you mean it")
    click.confirm(question, abort=True, err=True)
