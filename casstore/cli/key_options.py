"""Options for keys of encrypted user data and for the secret of subjects, alike in all commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO, Final, TypeVar

import click

from casstore.records.lifecycles.key_files import FileKeys

# More than a secret may have.
_MAX_SECRET_BYTES: Final = 5000

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def keys_option(help: str, *, exists: bool) -> Callable[[Decorated], Decorated]:
    """``--keys DIRECTORY``, as the argument ``key_directory``."""
    return click.option(
        "--keys", "key_directory", type=click.Path(file_okay=False, exists=exists), help=help
    )


def secret_option(help: str) -> Callable[[Decorated], Decorated]:
    """``--secret FILE``, as the argument ``secret_file``."""
    return click.option("--secret", "secret_file", type=click.File("rb"), help=help)


def open_keys(directory: str | None) -> FileKeys | None:
    """The keys in a directory, if one was given."""
    return None if directory is None else FileKeys(directory)


def read_secret(file: BinaryIO | None) -> bytes | None:
    """The secret in a file, if one was given; one that is too long is refused where it is used."""
    return None if file is None else file.read(_MAX_SECRET_BYTES)
