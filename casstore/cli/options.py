"""Options that several commands have, and their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import click

from casstore.cli.quantities import DURATION, Whole

if TYPE_CHECKING:
    from casstore.records.lifecycles.key_files import FileKeys

# One read of this length gets every valid secret whole, and enough of a longer file to refuse it.
_MAX_SECRET_BYTES: Final = 5000

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Item = TypeVar("Item")

YES: Final = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
OVERRIDE_POLICIES_HELP: Final = (
    "Apply the given policy to sessions that have their own policy as well."
)
ATTACHMENTS: Final = click.option(
    "--attachments",
    "attachments_ms",
    type=DURATION,
    help="Give up attachments announced longer ago than this and never committed.",
)


def options(*given: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Give a command several options, in this order."""

    def add(function: Decorated) -> Decorated:
        for option in reversed(given):
            function = option(function)
        return function

    return add


def dry_run_option(done: str) -> Callable[[Decorated], Decorated]:
    """Add the option ``--dry-run``; ``done`` is the verb of what it only reports."""
    return click.option(
        "--dry-run", "-n", is_flag=True, help=f"Report what would be {done}; change nothing."
    )


def limit_option(
    default: int, help: str = "List at most this many; 0: all."
) -> Callable[[Decorated], Decorated]:
    """Add the option ``--limit``."""
    return click.option(
        "--limit", "-n", type=Whole(0), default=default, show_default=True, help=help
    )


def page(items: Iterable[Item], limit: int) -> tuple[list[Item], bool]:
    """The first ``limit`` items (0: all), and whether there are more."""
    taken = [*islice(items, limit + 1 if limit else None)]
    return (taken[:limit], len(taken) > limit) if limit else (taken, False)


def keys_option(help: str, *, exists: bool) -> Callable[[Decorated], Decorated]:
    """Add the option ``--keys DIRECTORY``, passed as ``key_directory``."""
    return click.option(
        "--keys", "key_directory", type=click.Path(file_okay=False, exists=exists), help=help
    )


def open_keys(directory: str | None) -> FileKeys | None:
    """The keys in a directory, if one was given."""
    from casstore.records.lifecycles.key_files import FileKeys

    return None if directory is None else FileKeys(directory)


def secret_option(help: str) -> Callable[[Decorated], Decorated]:
    """Add the option ``--secret FILE``, passed as ``secret_file``."""
    return click.option("--secret", "secret_file", type=click.File("rb"), help=help)


def read_secret(file: BinaryIO | None) -> bytes | None:
    """The secret in a file, if one was given; where it is used, a secret too long is refused."""
    return None if file is None else file.read(_MAX_SECRET_BYTES)
