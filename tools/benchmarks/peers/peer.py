"""The interface of the compared session stores, and how their sizes are measured.

A peer implements the operations that it supports; ``does`` tells which. Operations that a library
lacks are not emulated: the table then says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Turn = Sequence[Message]


class Flush(Enum):
    """What a returned write survives. Times are compared only between peers of one kind."""

    EACH = "flushed to disk"
    LATER = "not flushed"
    NEVER = "memory only"


class Peer:
    """A session store. Each measurement gets a new one and an empty directory."""

    name: str
    flush: Flush
    # Modules, or programs with a leading "!", without which the peer is skipped.
    needs: tuple[str, ...] = ()

    def start(self, place: Path) -> None:
        """Open or create in ``place``."""
        raise NotImplementedError

    def stop(self) -> None:
        """Close what ``start`` opened."""
        raise NotImplementedError

    def reopen(self, place: Path) -> None:
        """Discard the state in memory, as a new process would."""
        self.stop()
        self.start(place)

    def settle(self, place: Path) -> None:
        """Checkpoint logs, so that the size is that of the data."""

    def size_bytes(self, place: Path) -> int:
        """The allocated size of the files, in whole blocks."""
        self.settle(place)
        return sum(file.stat().st_blocks * 512 for file in place.rglob("*") if file.is_file())

    def commit(self, session: str, turn: Turn) -> None:
        """Append a turn; on return it survives what ``flush`` says."""
        raise NotImplementedError

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """Add many new sessions in as few calls as possible."""
        raise NotImplementedError

    def path(self, session: str) -> Sequence[Any]:
        """All messages of a session, decoded."""
        raise NotImplementedError

    def edit(self, session: str, state: Mapping[str, Any], key: str) -> None:
        """Store ``state``, in which only ``key`` changed; earlier states stay readable."""
        raise NotImplementedError

    def fork(self, source: str, target: str) -> None:
        """Create a session with the state of another one, independent afterwards."""
        raise NotImplementedError

    def branch(self, source: str, target: str, turn: Turn) -> None:
        """Fork and append a turn."""
        raise NotImplementedError

    def diff(self, left: str, right: str) -> int:
        """The number of messages that are in only one of two sessions."""
        raise NotImplementedError

    def collect(self, gone: Sequence[str]) -> None:
        """Delete sessions and make their space reusable; shared content stays."""
        raise NotImplementedError

    def pack(self) -> None:
        """Reduce the stored size."""
        raise NotImplementedError


def does(peer: type[Peer], verb: str) -> bool:
    """True if the peer has this operation."""
    return getattr(peer, verb) is not getattr(Peer, verb)


def missing(peer: type[Peer]) -> str | None:
    """A requirement of the peer that is not installed."""
    for name in peer.needs:
        if name.startswith("!"):
            if shutil.which(name[1:]) is None:
                return name[1:]
            continue
        try:
            if find_spec(name) is None:
                return name
        except ModuleNotFoundError:
            return name
    return None
