"""Parses an strace log into calls.

strace stops a thread at the entry and at the exit of each call until it has printed the line,
so a call whose entry line stands after another call's exit line did happen after it. Everything
else about the order of overlapping calls is unknown, so a call keeps both its lines.

The log must come from ``strace -f -y -xx``: descriptors carry their paths, and strings are all
hexadecimal, so that no comma, quote or bracket inside one can be mistaken for syntax.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from campaigns.disk_events import NEVER

_BEGIN = re.compile(r"(\d+)\s+(\w+)\((.*)", re.DOTALL)
_RESUMED = re.compile(r"(\d+)\s+<\.\.\. (\w+) resumed>(.*)", re.DOTALL)
_UNFINISHED = re.compile(r"(.*?)\s*<unfinished \.\.\.>(\)\s+= \?)?", re.DOTALL)
_COMPLETE = re.compile(r"(.*)\)\s+= (.*)", re.DOTALL)
_DESCRIPTOR = re.compile(r"(?:(\d+)|AT_FDCWD)(?:<([^>]*)>)?")
QUOTED = re.compile(r'"([^"]*)"')


class TraceError(RuntimeError):
    """The log does not record everything that happened to the files."""


class Call(NamedTuple):
    """One system call. ``begun`` and ``ended`` are log lines, ``ended`` NEVER if not seen."""

    pid: int
    name: str
    arguments: str
    result: str
    begun: int
    ended: int

    def value(self) -> int | None:
        """Return the number the call returned, None if its exit was not seen."""
        match = re.match(r"-?\d+", self.result)
        return int(match[0]) if match else None

    def fields(self) -> list[str]:
        """Split the arguments. Under -xx no string holds a comma, so a plain split is exact."""
        return self.arguments.split(", ")


def calls(lines: Iterable[str]) -> Iterator[Call]:
    """Yield the calls of a log by where they end, halves joined; those without an end last."""
    open_calls: dict[int, tuple[str, str, int]] = {}
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\n")
        if resumed := _RESUMED.fullmatch(text):
            pid = int(resumed[1])
            if pid not in open_calls:
                raise TraceError(f"line {number} resumes a call that did not begin")
            name, head, begun = open_calls.pop(pid)
            rest = head + resumed[3]
        elif begin := _BEGIN.fullmatch(text):
            pid, name, rest, begun = int(begin[1]), begin[2], begin[3], number
        else:
            continue  # signals and exits
        if unfinished := _UNFINISHED.fullmatch(rest):
            open_calls[pid] = (name, unfinished[1], begun)
        elif complete := _COMPLETE.fullmatch(rest):
            # A restarted call has done nothing yet and appears again.
            if not complete[2].startswith("? ERESTART"):
                yield Call(pid, name, complete[1], complete[2], begun, number)
        else:
            raise TraceError(f"line {number} is not a call: {text[:120]}")
    for pid, (name, head, begun) in open_calls.items():
        yield Call(pid, name, head, "?", begun, NEVER)


def unescape(text: str) -> bytes:
    """Decode a string as -xx prints it."""
    try:
        return bytes.fromhex(text.replace("\\x", ""))
    except ValueError:
        raise TraceError(f"not a string of strace -xx: {text[:60]}") from None


def descriptor(field: str) -> tuple[int | None, str]:
    """Split ``4<path>`` into number and path; the number is None for AT_FDCWD."""
    match = _DESCRIPTOR.match(field)
    if match is None:
        return None, ""
    return (int(match[1]) if match[1] else None), os.fsdecode(unescape(match[2] or ""))


def flags(field: str) -> set[str]:
    """Split ``O_RDWR|O_CREAT``."""
    return set(field.split("|"))
