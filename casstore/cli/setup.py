"""``init`` creates a store; ``version`` and ``completion`` are about the command itself."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Final

import click
from click.shell_completion import get_completion_class

from casstore.cli.command import App, command
from casstore.cli.fields import nested
from casstore.cli.output import Printer, good, name
from casstore.cli.quantities import Whole
from casstore.errors import StorageError, StoreNotFoundError
from casstore.store import is_server, shown_place
from casstore.store import open as open_store
from casstore.version import __version__

_PACKAGES: Final = ("blake3", "click", "lmdb", "msgpack", "rich", "zstandard")


@command(
    {"path": "the store's directory or URL", "created": "false: it was there already"},
    "casstore init agents",
)
@click.argument("directory", required=False)
@click.option(
    "--lmdb-version",
    type=Whole(0, 1),
    help="LMDB's file format for the new store: 0 or 1.",
)
def init(app: App, directory: str | None, lmdb_version: int | None) -> None:
    """Create a store in DIRECTORY.

    If DIRECTORY is not given, --store or CASSTORE_PATH names it. It may be the URL of a server:
    then the tables are created there. An existing store is not changed.
    """
    path = app.place_of(directory)
    there = _is_there(path)
    with open_store(path, durability=app.durability, lmdb_version=lmdb_version):
        pass
    shown = shown_place(path) if is_server(path) else os.path.abspath(path)

    def render(to: Printer) -> None:
        said = "a store exists already in " if there else "created a store in "
        to.line(said if there else good(said), name(shown_place(path)))

    app.answer({"path": shown, "created": not there}, render)


def _is_there(path: str) -> bool:
    if not is_server(path):
        return os.path.exists(os.path.join(path, "data.mdb"))
    try:
        open_store(path, readonly=True, create=False).close()
    except StoreNotFoundError:
        return False
    return True


@command(
    {
        "casstore": "the version of casstore",
        "python": "the version of Python",
        "packages": nested(
            "the versions of the packages it uses, unknown if no installer recorded one",
            dict.fromkeys(_PACKAGES, ""),
        ),
    },
    "casstore version --json",
)
def version(app: App) -> None:
    """Print the versions of casstore and its packages."""
    packages = {package: _installed(package) for package in _PACKAGES}

    def render(to: Printer) -> None:
        to.line(f"casstore {__version__}")
        to.line(f"Python {platform.python_version()}")
        to.line(", ".join([f"{package} {found}" for package, found in packages.items()]))

    app.answer(
        {"casstore": __version__, "python": platform.python_version(), "packages": packages},
        render,
    )


def _installed(package: str) -> str:
    try:
        return installed(package)
    except PackageNotFoundError:
        # The package can be imported, or casstore would not run, but no installer recorded it.
        return "unknown"


@command(
    {"shell": "which shell it is for", "script": "what the shell must run"},
    "casstore completion bash > ~/.local/share/bash-completion/completions/casstore",
    "casstore completion fish > ~/.config/fish/completions/casstore.fish",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), required=False)
def completion(app: App, shell: str | None) -> None:
    """Print the completion script of a shell.

    If SHELL is not given, it is the one that $SHELL names.
    """
    from casstore.cli.main import COMPLETE_VARIABLE, cli

    wanted = shell or os.path.basename(os.environ.get("SHELL", ""))
    kind = get_completion_class(wanted)
    if kind is None:
        if not wanted:
            raise click.UsageError("$SHELL is not set: name the shell, bash, zsh or fish")
        raise click.UsageError(f"no completion for {wanted!r}: bash, zsh or fish")
    try:
        script = kind(cli, {}, "casstore", COMPLETE_VARIABLE).source()
    except (OSError, RuntimeError) as exc:
        raise StorageError(f"cannot ask {wanted} for its version: {exc}") from exc

    def render(to: Printer) -> None:
        click.echo(script)

    app.answer({"shell": wanted, "script": script}, render)
