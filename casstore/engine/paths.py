"""Paths as callers give them, into text that the operating system takes."""

from __future__ import annotations

import os

from casstore.errors import InvalidInputError


def path_text(path: str | os.PathLike[str]) -> str:
    """The path as text; InvalidInputError if it can be the path of nothing."""
    try:
        text = os.fspath(path)
    except TypeError as exc:
        raise InvalidInputError(f"a path is text or a Path, not {type(path).__name__}") from exc
    if not isinstance(text, str):
        raise InvalidInputError("a path is text, not bytes; os.fsdecode makes it text")
    try:
        # Names that are no text come with surrogates from os.fsdecode; others stand for nothing.
        os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"{text!r} cannot be a path: {exc.reason}") from exc
    if not text or "\0" in text:
        raise InvalidInputError(f"{text!r} cannot be a path")
    return text
