"""What works on the files of a store, and so on a directory and nowhere else."""

from __future__ import annotations

import os

from casstore.engine.paths import path_text
from casstore.errors import InvalidInputError
from casstore.store import is_server, shown_place


def require_directory(place: str | os.PathLike[str], what: str, instead: str) -> str:
    """The path of a directory; InvalidInputError, with what to do instead, for a server's URL."""
    path = path_text(place)
    if is_server(path):
        raise InvalidInputError(
            f"{what} works on the files of a store, but {shown_place(path)} is on a server; "
            f"{instead}"
        )
    return path
