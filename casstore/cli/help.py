"""``help``: all commands, how names are written, or one command."""

from __future__ import annotations

import inspect

import click

from casstore.cli import naming
from casstore.cli.command import App, Kinds, command
from casstore.cli.main import ALIASES, CommandLine


@command(
    {"topic": "the topic", "text": "the help"},
    "casstore help all",
    "casstore help names",
    "casstore help import lash",
)
@click.argument("topic", nargs=-1, metavar="[all|names|COMMAND]")
def help(app: App, topic: tuple[str, ...]) -> None:
    """Describe commands, and how names are written.

    all lists every command, names explains how things are named. Without an argument, the
    commands that most people need.
    """
    text = _text(click.get_current_context().find_root(), topic)
    words = " ".join(topic)
    app.answer({"topic": words, "text": text}, lambda to: to.lines(text))


def _text(root: click.Context, topic: tuple[str, ...]) -> str:
    group = root.command
    assert isinstance(group, CommandLine)
    if not topic:
        return group.get_help(root)
    if topic == ("all",):
        formatter = root.make_formatter()
        group.format_all(root, formatter)
        return formatter.getvalue().strip("\n")
    if topic == ("names",):
        return inspect.cleandoc(naming.__doc__ or "").replace("``", "")
    # Resolve it as a call does, so that an unknown command gets a suggestion.
    name, found, rest = group.resolve_command(root, list(topic))
    assert found is not None
    ctx = click.Context(found, info_name=ALIASES.get(name or "", name), parent=root)
    if isinstance(found, Kinds) and rest:
        kind, found, rest = found.resolve_command(ctx, rest)
        assert found is not None
        ctx = click.Context(found, info_name=kind, parent=ctx)
    if rest:
        raise click.UsageError(f"help takes one command, got {' '.join(topic)!r}")
    return found.get_help(ctx)
