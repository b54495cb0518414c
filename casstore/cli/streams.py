"""Standard streams that are closed, full or left: what a program does about them.

A closed one is given to nobody else: the next file that is opened would take its number, and
what anybody writes to it would land in the store.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any, Literal, TextIO


def prepare_streams() -> None:
    """Put streams that are closed to ``/dev/null``, and let others show what they can."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    while nowhere <= 2:
        nowhere = os.open(os.devnull, os.O_RDWR)
    os.close(nowhere)
    sys.stdin = sys.stdin or _nowhere("r")
    sys.stdout = sys.stdout or _nowhere("w")
    sys.stderr = sys.stderr or _nowhere("w")
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _nowhere(mode: Literal["r", "w"]) -> TextIO:
    return open(os.devnull, mode, encoding="utf-8")


def let_go(stream: IO[Any]) -> None:
    """See that nothing complains when Python flushes a stream at its end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        # Not a real file: there is nothing to flush into.
        return
