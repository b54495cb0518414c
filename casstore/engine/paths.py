"""Converts the paths that callers pass to text."""

from __future__ import annotations

import os

from casstore.errors import InvalidInputError


def path_text(path: str | os.PathLike[str]) -> str:
    """The path as text; InvalidInputError if the operating system cannot accept it."""
    try:
        text = os.fspath(path)
    except TypeError as exc:
        raise InvalidInputError(
            f"a path must be a str or a Path, got {type(path).__name__}"
        ) from exc
    if not isinstance(text, str):
        raise InvalidInputError("a path must be text, got bytes; convert it with os.fsdecode")
    try:
        # os.fsdecode represents undecodable bytes as surrogates; other surrogates have no encoding.
        os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"{text!r} is not a valid path: {exc.reason}") from exc
    if not text or "\0" in text:
        raise InvalidInputError(
            f"{text!r} is not a valid path: it is empty or contains a NUL character"
        )
    return text
