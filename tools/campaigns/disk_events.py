"""The operations of a writer on its files, as an ordered list of events.

Calls of several threads overlap, so one instant per call is not enough. Events stand at the
moment they may *first* show: a write where its call begins, a sync where its call has returned.
``done`` and ``begun`` give the other end, in lines of the log: a sync covers only changes whose
call was over (``done``) no later than the sync began (``begun``). The defaults suit events that
do not overlap: everything before a sync is covered by it.

A ``file`` is an identity that survives renames: the path it was first seen at, with ``#2`` added
for a second file at the same path. Paths are relative to the recorded directory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NEVER = sys.maxsize


class Create(NamedTuple):
    """A new, empty ``file`` got the name ``path``."""

    file: str
    path: str
    done: int = 0


class Write(NamedTuple):
    """``data`` was written at ``offset``."""

    file: str
    offset: int
    data: bytes
    done: int = 0


class Truncate(NamedTuple):
    """The file was cut, or extended with zeros, to ``size`` bytes."""

    file: str
    size: int
    done: int = 0


class Allocate(NamedTuple):
    """Space was reserved, which can only extend the file."""

    file: str
    offset: int
    length: int
    done: int = 0


class Sync(NamedTuple):
    """fsync or fdatasync of a file returned."""

    file: str
    begun: int = NEVER


class SyncRange(NamedTuple):
    """A write through O_DSYNC or O_SYNC returned: durable are these bytes, not earlier ones."""

    file: str
    offset: int
    length: int
    begun: int = NEVER


class SyncDirectory(NamedTuple):
    """fsync of a directory returned: the names in it are durable."""

    path: str
    begun: int = NEVER


class Link(NamedTuple):
    """An existing file got a further name."""

    file: str
    path: str
    done: int = 0


class Rename(NamedTuple):
    """A file moved from ``source`` to ``target``, replacing what was there, as one step."""

    file: str
    source: str
    target: str
    done: int = 0


class Unlink(NamedTuple):
    """``path`` no longer names ``file``."""

    file: str
    path: str
    done: int = 0


class Ack(NamedTuple):
    """The writer promised something: one line on its standard output."""

    text: str


Event = (
    Create
    | Write
    | Truncate
    | Allocate
    | Sync
    | SyncRange
    | SyncDirectory
    | Link
    | Rename
    | Unlink
    | Ack
)


class Trace(NamedTuple):
    """The durable files before the writer began, and the writer's operations."""

    initial: Mapping[str, bytes]
    events: Sequence[Event]

    def acknowledged(self) -> int:
        """Count the acknowledgements in the whole trace."""
        return sum(isinstance(event, Ack) for event in self.events)


def headline(event: Event) -> str:
    """A short description of an event, without its data."""
    if isinstance(event, Write):
        return f"Write({event.file} {event.offset}+{len(event.data)})"
    if isinstance(event, Ack):
        return f"Ack({event.text})"
    places = [str(value) for value in event[:-1]]
    return f"{type(event).__name__}({' '.join(places)})"
